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

from torchcache2.cli.check import Verdict, printable, row_limit, verdict
from torchcache2.core.errors import OptionError, TorchcacheError
from torchcache2.files.directory import FINGERPRINT, LOCK, NAMESPACE_NAME, SEGMENT_NAME, TAG, CacheDirectory
from torchcache2.files.encode import SEGMENT, TEMPORARY
from torchcache2.files.errors import DamagedError
from torchcache2.files.filenames import is_left_over, stated_format
from torchcache2.files.filesystem import Descriptor, Entry, FileSystem
from torchcache2.files.layout import FORMAT_VERSION
from torchcache2.files.whole import write_whole

__all__ = ["ArchiveError", "Imported", "export", "import_archive"]

_BLOCK = 512
_PIECE = 1 << 20
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
Progress = Callable[[int], object]


class ArchiveError(TorchcacheError):
    """A file that is not an archive of a cache directory."""


class _RefusedError(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class _Member(NamedTuple):
    namespace: str
    name: str
    start: int
    size: int


@dataclasses.dataclass
class Imported:
    """What an import has done.

    Attributes
    ----------
    segments, rows, nbytes : int
        That are new.
    kept : int
        Segments that were there already.
    refused : list of (str, Verdict)
        Segments that are damaged, or cannot be checked here.
    """

    segments: int = 0
    rows: int = 0
    nbytes: int = 0
    kept: int = 0
    refused: list[tuple[str, Verdict]] = dataclasses.field(default_factory=list)


def export(directory: CacheDirectory, path: str, progress: Progress = lambda _: None) -> tuple[int, int]:
    """Write the segments of a directory to a new file; how many they are, and the bytes of the file.

    Segments are copied as they are. The file is whole or not there.

    Raises
    ------
    OptionError
        If it exists already.
    OSError
        As the file system does.
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


def import_archive(path: str, directory: CacheDirectory, progress: Progress = lambda _: None) -> Imported:
    """Add the segments of an archive to a directory, which is made if it does not exist.

    Files that are there already stay as they are. What is not good is left out, and named in the result.

    Parameters
    ----------
    path : str
        Of the archive.
    directory : CacheDirectory
    progress : callable
        Is told the bytes of each part of the archive that is done.

    Raises
    ------
    ArchiveError
        If the file is not an archive of a cache directory; nothing has been written then.
    OptionError, NewerFormatError
        See `CacheDirectory.check`.
    OSError
        As the file system does. What was imported before is whole.
    """
    fs = directory.fs
    directory.check()
    file = fs.open(path)
    fingerprints = {}
    for member in _members(fs, file):  # all of them, before anything is written
        if member.name == TAG:
            _check_tag(fs, file, member)
        elif member.name == FINGERPRINT:
            fingerprints[member.namespace] = member
            _fingerprint(fs, file, member)
    directory.create()
    done, limit = Imported(), row_limit()
    hold: tuple[str, Descriptor | None] = ("", None)
    for member in _members(fs, file):
        if SEGMENT_NAME.fullmatch(member.name):
            if member.namespace != hold[0]:
                text = fingerprints.get(member.namespace)
                described = _fingerprint(fs, file, text) if text else {}
                # Others that make room take the namespace for one that is in use.
                hold = member.namespace, directory.enter(bytes.fromhex(member.namespace), described)
            _import_segment(directory, file, member, limit, done)
        progress(member.size)
    return done


def _import_segment(
    directory: CacheDirectory, file: Descriptor, member: _Member, limit: int, done: Imported
) -> None:
    fs = directory.fs
    folder = os.path.join(directory.path, member.namespace)
    path = os.path.join(folder, member.name)
    if fs.exists(path):
        if fs.is_file(path):
            done.kept += 1
        else:
            found = Verdict("unchecked", reason="something that is no file has its name")
            done.refused.append((f"{member.namespace}/{member.name}", found))
        return
    found = Verdict("good")

    def fill(target: Descriptor, temporary: str) -> None:
        nonlocal found
        _copy(fs, file, member.start, member.size, target, 0, lambda _: None)
        found = verdict(fs, temporary, member.namespace, limit)
        if found.state != "good":
            raise _RefusedError(found)

    try:
        write_whole(fs, path, fill, stem=os.path.join(folder, ""), suffix=SEGMENT + TEMPORARY)
    except _RefusedError as refused:
        done.refused.append((f"{member.namespace}/{member.name}", refused.verdict))
        return
    done.segments += 1
    done.rows += found.rows
    done.nbytes += member.size


def _members(fs: FileSystem, file: Descriptor) -> Iterator[_Member]:
    """The files in an archive, each of them one of a cache directory; without its folders.

    Raises
    ------
    ArchiveError
        If something else is there.
    """
    size, at = fs.size(file), 0
    while True:
        block = bytearray(_BLOCK)
        if at + _BLOCK > size:
            raise ArchiveError("is not a whole tar archive: it ends without an end mark")
        fs.read_all(file, [memoryview(block)], at)
        if not any(block):
            return
        try:
            # Of this header alone. `tarfile.open` would follow extended headers, sparse maps and links.
            info = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise ArchiveError(f"is not a tar archive: there is no header at byte {at:,}") from None
        at += _BLOCK
        namespace, name = _names(info)
        if not 0 <= info.size <= size - at or (info.size and not name):
            raise ArchiveError(f"states {info.size:,} bytes for {info.name!r}, and has {size - at:,}")
        if name:
            yield _Member(namespace, name, at, info.size)
        at += -(-info.size // _BLOCK) * _BLOCK


def _names(info: tarfile.TarInfo) -> tuple[str, str]:
    """Namespace and name of a file of a cache directory; no namespace above those, no name for a folder."""
    path = info.name
    while path.startswith("./"):  # as ``tar -cf x.tar .`` writes them
        path = path[2:]
    if info.type == tarfile.DIRTYPE and (path in ("", ".") or NAMESPACE_NAME.fullmatch(path)):
        return path, ""
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kind = _KINDS.get(info.type, "not a plain file")
        raise ArchiveError(f"has {info.name!r}, which is {kind}: it is no export of a cache directory")
    if path in (TAG, LOCK) or is_left_over(path):
        return "", path
    namespace, _, name = path.partition("/")
    is_ours = name == FINGERPRINT or SEGMENT_NAME.fullmatch(name) or is_left_over(name)
    if not NAMESPACE_NAME.fullmatch(namespace) or not is_ours:
        raise ArchiveError(f"has {info.name!r}, which is no file of a cache directory")
    return namespace, name


def _check_tag(fs: FileSystem, file: Descriptor, member: _Member) -> None:
    """Whether a ``CACHEDIR.TAG`` in an archive is that of a format that is known here."""
    data = bytearray(min(member.size, _MOST_TEXT))
    fs.read_all(file, [memoryview(data)], member.start)
    version = stated_format(bytes(data))
    if version is None:
        raise ArchiveError(f"has a {TAG} of something else: it is no export of a cache directory")
    _check_version(version)


def _check_version(version: object) -> None:
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        stated = printable(repr(version))
        raise ArchiveError(f"is of format {stated}, and this torchcache2 knows format {FORMAT_VERSION}")


def _fingerprint(fs: FileSystem, file: Descriptor, member: _Member) -> dict[str, Any]:
    """What a ``fingerprint.json`` in an archive says."""
    document = None
    if member.size <= _MOST_TEXT:
        data = bytearray(member.size)
        fs.read_all(file, [memoryview(data)], member.start)
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(data)
    if not _is_shallow(document):
        document = None
    path = f"{member.namespace}/{member.name}"
    if not isinstance(document, dict) or document.get("namespace") != member.namespace:
        raise ArchiveError(f"has {path!r}, which does not describe that namespace")
    _check_version(document.get("format_version"))
    return document


def _is_shallow(value: Any, depth: int = _MOST_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)


def _write_archive(directory: CacheDirectory, target: Descriptor, progress: Progress) -> tuple[int, int]:
    fs, count = directory.fs, 0
    end = 0
    for entry in fs.entries(directory.path):
        if entry.name == TAG:
            end = _add(directory, "", entry, target, 0)
    for contents in directory.scan():
        for entry in contents.others:
            with contextlib.suppress(FileNotFoundError):  # somebody has made room
                end = _add(directory, f"{contents.namespace}/", entry, target, end)
        for entry in contents.segments:
            with contextlib.suppress(FileNotFoundError):
                end = _add(directory, f"{contents.namespace}/", entry, target, end, progress)
                count += 1
    # Two empty blocks are the end; tar pads to twenty.
    end_mark = memoryview(bytes(2 * _BLOCK + -(end + 2 * _BLOCK) % tarfile.RECORDSIZE))
    return count, fs.write_all(target, [end_mark], end)


def _add(
    directory: CacheDirectory,
    folder: str,
    entry: Entry,
    target: Descriptor,
    at: int,
    progress: Progress = lambda _: None,
) -> int:
    """Append a file; where it ends."""
    fs = directory.fs
    info = tarfile.TarInfo(folder + entry.name)
    source = fs.open(os.path.join(directory.path, info.name))
    info.size = fs.size(source)
    info.mtime = int(entry.mtime)
    at = fs.write_all(target, [memoryview(info.tobuf(tarfile.GNU_FORMAT))], at)
    at = _copy(fs, source, 0, info.size, target, at, progress)
    return fs.write_all(target, [memoryview(bytes(-info.size % _BLOCK))], at)


def _copy(
    fs: FileSystem, source: Descriptor, start: int, size: int, target: Descriptor, at: int, progress: Progress
) -> int:
    """Copy a part of a file, a piece at a time; where the copy ends."""
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
