"""`write_whole` writes a file that is whole or not there: under a temporary name, then synced and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence

from torchcache2.files.descriptors import Descriptor
from torchcache2.files.filesystem import FileSystem

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid() -> str:
    """A name of 26 characters that no other writer uses and that sorts by time.

    As in the ULID specification (github.com/ulid/spec): 48 bits of milliseconds, then 80 random ones. Of
    these, the first 20 are the nanoseconds in the millisecond, so that names of one process sort by time.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    number = (milliseconds & (2**48 - 1)) << 80 | nanoseconds << 60 | secrets.randbits(60)
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def made_at(name: str) -> int:
    """When the `ulid` was made that a name begins with, in milliseconds since 1970."""
    number = 0
    for letter in name[:10]:
        number = number << 5 | _ALPHABET.index(letter)
    return number


def write_whole(
    fs: FileSystem,
    path: str,
    content: Sequence[memoryview] | Callable[[Descriptor, str], object],
    *,
    stem: str,
    suffix: str = "",
    replaces: bool = True,
    sync: bool = True,
    sync_name: bool = True,
) -> None:
    """Write a file that is whole or not there, whenever the process is killed or the power goes off.

    The `content` is bytes, or what writes them: it is called with the open file and its temporary path, and
    there is no file if it raises. The temporary path is the `stem`, a fresh `ulid` and the `suffix`, in the
    folder of `path`. The temporary file is locked until it has its final name, so that whoever deletes what
    dead writers have left sees that this writer lives.

    If there is a file of that name, it is replaced; without `replaces` that is a `FileExistsError`. With
    `sync_name` the name is on the disk, too, when this returns. Without `sync` a power cut may leave garbage.
    """
    temporary, is_renamed = "", False
    try:
        while True:
            temporary = f"{stem}{ulid()}{suffix}"
            file = fs.create(temporary)
            if fs.lock(file, exclusive=True) is not False and fs.links(file):
                break  # otherwise another process has deleted it before it was locked
        if callable(content):
            content(file, temporary)
        else:
            fs.write_all(file, content, 0)
        if sync:
            fs.sync(file)
        if replaces:
            fs.rename(temporary, path)
            is_renamed = True
        else:
            fs.link(temporary, path)
        fs.unlock(file)  # users of the namespace lock this file if it is a fingerprint
    finally:
        if temporary and not is_renamed:  # after an interrupt there may be no name yet
            with contextlib.suppress(OSError):
                fs.remove(temporary)
    if sync_name:
        fs.sync_folder(os.path.dirname(path))
