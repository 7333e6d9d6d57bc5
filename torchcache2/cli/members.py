"""The files in a tar of a cache directory. Nothing is trusted: with any other file the tar is refused."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchcache2.cli.check import printable
from torchcache2.core.errors import TorchcacheError
from torchcache2.files.directory import (
    ASKED,
    FINGERPRINT,
    LOCK,
    MIRROR,
    NAMESPACE_NAME,
    NOTE_NAME,
    SEGMENT_NAME,
    TAG,
    is_left_over,
    stated_format,
)
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.files.layout import FORMAT_VERSION

BLOCK = 512  # bytes; of a tar
_MOST_TEXT = 16 << 20  # bytes of a fingerprint.json
_MOST_DEPTH = 10  # of the values in it
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
}


class ArchiveError(TorchcacheError):
    """A file that is not an archive of a cache directory."""


class Member(NamedTuple):
    """A file in an archive."""

    namespace: str  # 32 hexadecimal digits; empty for files that belong to no namespace
    name: str
    start: int  # where its bytes begin in the archive
    size: int


def members(fs: FileSystem, file: Descriptor) -> Iterator[Member]:
    """The files of a cache directory in an archive, without folders; `ArchiveError` if there are others."""
    size, at = fs.size(file), 0
    while True:
        if at + BLOCK > size:
            raise ArchiveError("is not a whole tar archive: it ends without an end mark")
        block = fs.read_bytes(file, at, BLOCK)
        if not any(block):
            return
        try:
            # Only this header is read. `tarfile.open` would follow extended headers, sparse maps and links.
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise ArchiveError(f"is not a tar archive: there is no header at byte {at:,}") from None
        at += BLOCK
        namespace, name = _names(info)
        if not 0 <= info.size <= size - at or (info.size and not name):
            raise ArchiveError(f"states {info.size:,} bytes for {info.name!r}, and has {size - at:,}")
        if name:
            yield Member(namespace, name, at, info.size)
        at += -(-info.size // BLOCK) * BLOCK


def _names(info: tarfile.TarInfo) -> tuple[str, str]:
    """Namespace and name of a file. The namespace is empty for files above, and the name for a folder."""
    path = info.name
    while path.startswith("./"):  # as ``tar -cf x.tar .`` writes them
        path = path[2:]
    if info.type == tarfile.DIRTYPE and (path in ("", ".") or NAMESPACE_NAME.fullmatch(path)):
        return path, ""
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kind = _KINDS.get(info.type, "not a plain file")
        raise ArchiveError(f"has {info.name!r}, which is {kind}: it is no export of a cache directory")
    if path in (TAG, LOCK, MIRROR, ASKED) or NOTE_NAME.fullmatch(path) or is_left_over(path):
        return "", path
    namespace, _, name = path.partition("/")
    is_ours = name == FINGERPRINT or SEGMENT_NAME.fullmatch(name) or is_left_over(name)
    if not NAMESPACE_NAME.fullmatch(namespace) or not is_ours:
        raise ArchiveError(f"has {info.name!r}, which is no file of a cache directory")
    return namespace, name


def check_tag(fs: FileSystem, file: Descriptor, member: Member) -> None:
    """Whether a ``CACHEDIR.TAG`` in an archive is that of a format that is known here."""
    version = stated_format(_text(fs, file, member))
    if version is None:
        raise ArchiveError(f"has a {TAG} of something else: it is no export of a cache directory")
    _check_version(version)


def _check_version(version: object) -> None:
    if type(version) is not int or version != FORMAT_VERSION:
        stated = printable(repr(version))
        raise ArchiveError(f"is of format {stated}, and this torchcache2 knows format {FORMAT_VERSION}")


def fingerprint(fs: FileSystem, file: Descriptor, member: Member) -> dict[str, Any]:
    """What a ``fingerprint.json`` in an archive says."""
    document = None
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(_text(fs, file, member))
    path = f"{member.namespace}/{member.name}"
    if (
        not isinstance(document, dict)
        or not _is_shallow(document)
        or document.get("namespace") != member.namespace
    ):
        raise ArchiveError(f"has {path!r}, which does not describe that namespace")
    _check_version(document.get("format_version"))
    return document


def _text(fs: FileSystem, file: Descriptor, member: Member) -> bytes:
    """The bytes of a small file; empty if it is too large to be what its name says."""
    return fs.read_bytes(file, member.start, member.size if member.size <= _MOST_TEXT else 0)


def _is_shallow(value: Any, depth: int = _MOST_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)
