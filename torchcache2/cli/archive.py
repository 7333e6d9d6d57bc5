"""A cache directory as one tar file, and back.

An archive has ``CACHEDIR.TAG``, and for each namespace ``fingerprint.json`` and the segments, as plain files
in a plain tar: unpacked by ``tar``, it is a cache directory, and what ``tar`` makes of one is an archive.
Importing trusts nothing in it. The headers are read first: one that is not of such a file, or states another
format or more bytes than follow, has the whole archive refused before anything is written. A segment appears
when all of it has been copied and checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchcache2.cli.report import Verdict, printable, row_limit, verdict
from torchcache2.core.errors import OptionError, TorchcacheError
from torchcache2.files.directory import (
    ASKED,
    FINGERPRINT,
    LOCK,
    MIRROR,
    NAMESPACE_NAME,
    NOTE_NAME,
    RUN_NAME,
    RUNS,
    SEGMENT_NAME,
    TAG,
    CacheDirectory,
    is_left_over,
    stated_format,
)
from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import Descriptor, FileSystem, write_whole
from torchcache2.files.layout import FORMAT_VERSION, SEGMENT, TEMPORARY

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
        raise ArchiveError(f"has {info.name!r}, which is {kind}: it is not an export of a cache directory")
    if path in (TAG, LOCK, RUNS, MIRROR, ASKED) or NOTE_NAME.fullmatch(path) or is_left_over(path):
        return "", path
    namespace, _, name = path.partition("/")
    is_known = any(one.fullmatch(name) for one in (SEGMENT_NAME, RUN_NAME))
    is_ours = is_known or name == FINGERPRINT or is_left_over(name)
    if not NAMESPACE_NAME.fullmatch(namespace) or not is_ours:
        raise ArchiveError(f"has {info.name!r}, which is not a file of a cache directory")
    return namespace, name


def check_tag(fs: FileSystem, file: Descriptor, member: Member) -> None:
    """Whether a ``CACHEDIR.TAG`` in an archive is that of a format that is known here."""
    version = stated_format(_text(fs, file, member))
    if version is None:
        raise ArchiveError(f"has a {TAG} of something else: it is not an export of a cache directory")
    _check_version(version)


def _check_version(version: object) -> None:
    if type(version) is not int or version != FORMAT_VERSION:
        stated = printable(repr(version))
        raise ArchiveError(f"is of format {stated}, and this torchcache2 knows format {FORMAT_VERSION}")


def fingerprint(fs: FileSystem, file: Descriptor, member: Member) -> dict[str, Any]:
    """The content of a ``fingerprint.json`` in an archive."""
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


_PIECE = 1 << 20
Progress = Callable[[int], object]


def _ignore(_: int) -> None:
    pass


@dataclasses.dataclass
class Imported:
    """What an import has added, kept and refused."""

    segments: int = 0  # these three are new
    rows: int = 0
    nbytes: int = 0
    kept: int = 0  # segments that were there already
    refused: list[tuple[str, Verdict]] = dataclasses.field(default_factory=list)  # damaged, or unchecked


def export(directory: CacheDirectory, path: str, progress: Progress = _ignore) -> tuple[int, int]:
    """Write the segments of a directory to a new file; how many they are, and the bytes of the file.

    Segments are copied as they are. The file is whole or not there. One that exists is an `OptionError`.
    """
    fs = directory.fs
    path = os.path.abspath(path)
    if fs.exists(path):
        raise OptionError(f"{path!r} exists already")
    done = (0, 0)

    def fill(file: Descriptor, _: str) -> None:
        nonlocal done
        done = _write_archive(directory, file, progress)

    write_whole(fs, path, fill, stem=f"{path}.", suffix=".tmp", replaces=False)
    return done


def import_archive(path: str, directory: CacheDirectory, progress: Progress = _ignore) -> Imported:
    """Add the segments of an archive to a directory, which is made if it does not exist.

    Files that are there already stay as they are. Bad files are left out, and named in the result.
    ``progress(nbytes)`` is called when so many more bytes of the archive are done.

    Raises
    ------
    ArchiveError
        If the file is not an archive of a cache directory; nothing has been written then.
    OptionError, NewerFormatError
        See `CacheDirectory.check`.
    OSError
        As the file system does. Files that were imported before are whole.
    """
    fs = directory.fs
    directory.check()
    file = fs.open(path)
    fingerprints = {}
    for member in members(fs, file):  # every header is checked before anything is written
        if member.name == TAG:
            check_tag(fs, file, member)
        elif member.name == FINGERPRINT:
            fingerprints[member.namespace] = member
            fingerprint(fs, file, member)
    directory.create()
    done, limit = Imported(), row_limit()
    user: tuple[str, Descriptor | None] = ("", None)
    for member in members(fs, file):
        if SEGMENT_NAME.fullmatch(member.name):
            if member.namespace != user[0]:
                text = fingerprints.get(member.namespace)
                described = fingerprint(fs, file, text) if text else {}
                # As long as the result of `enter` exists, others see that the namespace is in use.
                user = member.namespace, directory.enter(bytes.fromhex(member.namespace), described)
            _import_segment(directory, file, member, limit, done)
        progress(member.size)
    return done


def _import_segment(
    directory: CacheDirectory, file: Descriptor, member: Member, limit: int, done: Imported
) -> None:
    fs = directory.fs
    folder = os.path.join(directory.path, member.namespace)
    path = os.path.join(folder, member.name)
    name = f"{member.namespace}/{member.name}"
    if fs.is_file(path):
        done.kept += 1
        return
    if fs.exists(path):
        done.refused.append((name, Verdict("unchecked", reason="something that is not a file has its name")))
        return
    found = Verdict("good")

    def fill(target: Descriptor, temporary: str) -> None:
        nonlocal found
        _copy(fs, file, member.start, member.size, target, 0, _ignore)
        found = verdict(fs, temporary, member.namespace, limit)
        if found.state != "good":
            raise DamagedError(found.reason)  # so that there is no file

    try:
        write_whole(fs, path, fill, stem=os.path.join(folder, ""), suffix=SEGMENT + TEMPORARY)
    except DamagedError:
        done.refused.append((name, found))
        return
    done.segments += 1
    done.rows += found.rows
    done.nbytes += member.size


def _write_archive(directory: CacheDirectory, target: Descriptor, progress: Progress) -> tuple[int, int]:
    """Append all files and the end mark; how many segments there are, and the bytes of the archive."""
    fs, count, end = directory.fs, 0, 0
    files = [("", file) for file in fs.listing(directory.path) if file.name == TAG]
    for one in directory.scan():
        files += [(f"{one.namespace}/", file) for file in (*one.others, *one.segments)]
    for folder, file in files:
        is_segment = SEGMENT_NAME.fullmatch(file.name) is not None
        info = tarfile.TarInfo(folder + file.name)
        try:
            source = fs.open(os.path.join(directory.path, info.name))
        except FileNotFoundError:
            continue  # another process has made room
        info.size, info.mtime = fs.size(source), int(file.mtime)
        end = fs.write_all(target, [memoryview(info.tobuf(tarfile.GNU_FORMAT))], end)
        end = _copy(fs, source, 0, info.size, target, end, progress if is_segment else _ignore)
        end = fs.write_all(target, [memoryview(bytes(-info.size % BLOCK))], end)
        count += is_segment
    # Two empty blocks are the end; tar pads to twenty.
    end_mark = memoryview(bytes(2 * BLOCK + -(end + 2 * BLOCK) % tarfile.RECORDSIZE))
    return count, fs.write_all(target, [end_mark], end)


def _copy(
    fs: FileSystem, source: Descriptor, start: int, size: int, target: Descriptor, at: int, progress: Progress
) -> int:
    """Copy a part of a file, piece by piece; returns where the copy ends."""
    buffer = memoryview(bytearray(min(size, _PIECE)))
    for done in range(0, size, _PIECE):
        piece = buffer[: min(_PIECE, size - done)]
        try:
            fs.read_all(source, [piece], start + done)
        except DamagedError as error:
            raise OSError(errno.EIO, str(error)) from None
        at = fs.write_all(target, [piece], at)
        progress(len(piece))
    return at
