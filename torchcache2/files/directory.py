"""`CacheDirectory`: the files in a cache directory, and who uses them.

::

    <directory>/CACHEDIR.TAG                                  marks a cache, and states its format
    <directory>/.lock                                         locked by a process that deletes
    <directory>/.runs                                         locked by a process that writes index files
    <directory>/.contents                                     see `FileDigests`
    <directory>/<32 hex>.note                                 see `Notes`
    <directory>/<namespace, 32 hex>/fingerprint.json          what the namespace stands for
    <directory>/<namespace, 32 hex>/<ulid>.safetensors        segments
    <directory>/<namespace, 32 hex>/<ulid>.safetensors.tmp    a segment that is being written
    <directory>/<namespace, 32 hex>/<ulid>.safetensors.corrupt
    <directory>/<namespace, 32 hex>/.asked                    its segments are to be brought from a bucket
    <directory>/<namespace, 32 hex>/<ulid>.run                where rows are: the index of many segments
    <directory>/<namespace, 32 hex>/<ulid>.run.tmp            likewise, and <ulid>.run.corrupt

Other files are neither counted nor deleted. A process that uses a namespace holds a shared lock on its
``fingerprint.json``, and a writer an exclusive one on its temporary file: the system releases them when the
process ends, so no stale lock remains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torchcache2.core.errors import DamagedError, NewerFormatError, OptionError
from torchcache2.core.logs import logger
from torchcache2.core.places import is_url
from torchcache2.files.filesystem import (
    Descriptor,
    FileInfo,
    FileSystem,
    StrangeFileError,
    is_read_only,
    ulid,
    write_whole,
)
from torchcache2.files.layout import FORMAT_VERSION, HEAD, INDEX_FILE, SEGMENT, TEMPORARY

_BEGAN = time.time()
_MOST_COMPARED = 8  # namespaces of earlier runs
_OFTEN = 3
_OBJECTS = ("attribute ", "closure ", "default ", "global ", "value ")  # parts that `ignore` can leave out

TAG = "CACHEDIR.TAG"
LOCK = ".lock"
MIRROR = ".mirror"
INDEX_FILES_LOCK = ".runs"
ASKED = ".asked"
CONTENTS = ".contents"
FINGERPRINT = "fingerprint.json"
CORRUPT = ".corrupt"
NOTE = ".note"
_NAMES = (TAG, LOCK, INDEX_FILES_LOCK, MIRROR, ASKED, CONTENTS)
TAG_TEXT = f"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is a cache of torchcache2, format {FORMAT_VERSION}. Deleting it loses nothing but time.
# For cache directory tags, see https://bford.info/cachedir/
"""
_IS_OURS = re.compile(rb"^# This folder is a cache of torchcache2, format (\d+)", re.MULTILINE)
_MOST_DIGITS = 9
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
SEGMENT_NAME = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}" + re.escape(SEGMENT))
INDEX_FILE_NAME = re.compile(SEGMENT_NAME.pattern.removesuffix(re.escape(SEGMENT)) + re.escape(INDEX_FILE))
HEAD_NAME = re.compile(SEGMENT_NAME.pattern + re.escape(HEAD))
NOTE_NAME = re.compile(NAMESPACE_NAME.pattern + re.escape(NOTE))
COMING_NAME = re.compile(SEGMENT_NAME.pattern + r"\.(\d{1,16})" + re.escape(TEMPORARY))  # with its bytes
_WHOLE_TEXT = f"({re.escape(FINGERPRINT)}|{re.escape(TAG)}|{NOTE_NAME.pattern})"
_TEMPORARY_TEXT = re.compile(_WHOLE_TEXT + r"\.[0-9A-Z]{26}")
_DATA_TEXT = f"({SEGMENT_NAME.pattern}|{INDEX_FILE_NAME.pattern})"
_KINDS = {
    "segments": SEGMENT_NAME,
    "index_files": INDEX_FILE_NAME,
    "heads": HEAD_NAME,
    "asked": re.compile(re.escape(ASKED)),
    "others": re.compile(re.escape(FINGERPRINT)),
    "corrupt": re.compile(_DATA_TEXT + re.escape(CORRUPT)),
    "temporary": re.compile(rf"{_DATA_TEXT}(\.\d{{1,16}})?{re.escape(TEMPORARY)}|{_TEMPORARY_TEXT.pattern}"),
}  # the files of a namespace, by field of `Contents`


@dataclasses.dataclass(frozen=True)
class Contents:
    """The files of one namespace, which is 32 hexadecimal digits.

    Besides segments: their `index_files`; the `heads` of segments in a bucket; `asked`, a file that says that
    these are to be brought; `corrupt` files; `temporary` ones being written; and `others`, which is
    ``fingerprint.json``.
    """

    namespace: str
    segments: list[FileInfo]
    index_files: list[FileInfo]
    heads: list[FileInfo]
    asked: list[FileInfo]
    corrupt: list[FileInfo]
    temporary: list[FileInfo]
    others: list[FileInfo]

    @property
    def files(self) -> list[FileInfo]:
        """All of these files."""
        return [info for kind in _KINDS for info in getattr(self, kind)]

    @property
    def nbytes(self) -> int:
        """Bytes of all of these files."""
        return sum(info.size for info in self.files)

    @property
    def last_used(self) -> float:
        """When a segment was last read or written, in seconds since the epoch; 0.0 if there is none."""
        return max((info.mtime for info in self.segments), default=0.0)


def contents_of(namespace: str, listing: list[FileInfo]) -> Contents:
    """The files of a namespace, from a listing of its folder."""
    found: dict[str, list[FileInfo]] = {kind: [] for kind in _KINDS}
    for info in listing:
        if coming := COMING_NAME.fullmatch(info.name):  # it takes its room from the start
            info = info._replace(size=max(info.size, int(coming[1])))
        for kind, name in _KINDS.items() if not info.is_folder else ():
            if name.fullmatch(info.name):
                found[kind].append(info)
                break
    return Contents(namespace, **found)


def is_ours(info: FileInfo) -> bool:
    """Whether a name in the directory belongs to the cache."""
    if info.is_folder:
        return NAMESPACE_NAME.fullmatch(info.name) is not None
    is_known = info.name in _NAMES or NOTE_NAME.fullmatch(info.name) is not None
    return is_known or _TEMPORARY_TEXT.fullmatch(info.name) is not None


def is_left_over(name: str) -> bool:
    """Whether a file of this name was set aside, is being written, or was left by a dead writer."""
    return any(_KINDS[kind].fullmatch(name) for kind in ("corrupt", "temporary"))


def stated_format(tag: bytes | None) -> int | None:
    """The format that a ``CACHEDIR.TAG`` states; None if it is another program's, or there is none."""
    match = _IS_OURS.search(tag or b"")
    # `int` refuses thousands of digits; the first ones suffice to see an unknown format.
    return int(match[1][:_MOST_DIGITS]) if match else None


def check_format(place: str, number: int) -> None:
    """Raise `NewerFormatError` if this version does not know a place's format."""
    if number != FORMAT_VERSION:
        raise NewerFormatError(
            f"{place} has format {number}, and this version of torchcache2 knows format {FORMAT_VERSION}: "
            "nothing is read or written there. Upgrade torchcache2, or give another folder"
        )


_MOST_TEXT = 16 << 20
_PROBE = memoryview(b"whether something can be written here")
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_ENTERINGS = 10
_REPLACED = 3
_TRIES, _BETWEEN_TRIES = 20, 0.005  # seconds


class CacheDirectory:
    """A folder of segments; its path may be a URL, if the file system supports it."""

    def __init__(self, path: str, fs: FileSystem) -> None:
        self.path = path if is_url(path) else os.path.abspath(path)
        self.fs = fs

    def check(self) -> None:
        """Raise an error if the path cannot be a cache directory.

        `OptionError` if it is a file, a folder with another program's files, or an impossible path;
        `NewerFormatError` if it has a later version of the format; `OSError` if it cannot be read.
        """
        try:
            listing = self.fs.listing(self.path)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            where = "is a file" if self.fs.exists(self.path) else "leads through a file"
            raise OptionError(f"{self.path!r} {where}: a cache directory is a folder of its own") from None
        except OSError as error:
            if error.errno not in _NO_PATH:
                raise
            raise OptionError(f"{self.path!r} cannot be a cache directory: {error.strerror}") from None
        tag = self._tag()
        number = stated_format(tag)
        if number is None:
            strange = [info.name for info in listing if not is_ours(info)]
            if strange or tag:  # an empty one, of a power cut or kill, is replaced
                name = strange[0] if strange else TAG
                raise OptionError(
                    f"{self.path!r} is not a cache directory and not empty (it has {name!r}): give a folder "
                    "that does not exist yet, or an empty one"
                )
        else:
            check_format(repr(self.path), number)

    def create(self) -> None:
        """Make the folder, and the tag that marks it as a cache."""
        self._make_folder(self.path)
        if stated_format(tag := self._tag()) is None:
            self._write(os.path.join(self.path, TAG), TAG_TEXT.encode(), replaces=tag == b"")
            self.fs.sync_folder(self.path)

    def folder(self, namespace: bytes) -> str:
        """The folder of a namespace."""
        return os.path.join(self.path, namespace.hex())

    def contents(self, namespace: str) -> Contents:
        """The files of a namespace."""
        try:
            listing = self.fs.listing(os.path.join(self.path, namespace))
        except (FileNotFoundError, NotADirectoryError):
            listing = []
        return contents_of(namespace, listing)

    def scan(self) -> list[Contents]:
        """The files of every namespace. One whose folder may not be read counts as empty."""
        try:
            listing = self.fs.listing(self.path)
        except FileNotFoundError:
            return []
        found = []
        for info in listing:
            if info.is_folder and NAMESPACE_NAME.fullmatch(info.name):
                try:
                    found.append(self.contents(info.name))
                except PermissionError:
                    found.append(contents_of(info.name, []))
        return found

    def changed(self, namespace: bytes) -> int:
        """When a namespace's folder last changed, in nanoseconds; 0 if there is none."""
        try:
            return self.fs.changed(self.folder(namespace))
        except FileNotFoundError:
            return 0

    def prepare(self, namespace: bytes, fingerprint: Mapping[str, Any]) -> None:
        """Make a namespace's folder, and the file that describes it.

        The file's name is on disk once the folder is synced, as after each segment.
        """
        folder = self.folder(namespace)
        is_new = self._make_folder(folder)
        path = os.path.join(folder, FINGERPRINT)
        if not self.fs.exists(path):
            if not is_new:
                self.fs.sync_folder(self.path)  # its maker may have died before this
            document = {"format_version": FORMAT_VERSION, "namespace": namespace.hex(), **fingerprint}
            self._write(path, json.dumps(document, indent=1, sort_keys=True).encode())
            with contextlib.suppress(OSError):
                self._tell_of_others(document)

    def _tell_of_others(self, now: dict[str, Any]) -> None:
        """Warn if earlier runs have left namespaces that differ from a new one in the same object alone."""
        folders = [one for one in self.fs.listing(self.path) if one.is_folder and one.mtime < _BEGAN]
        latest = sorted(folders, key=lambda one: one.mtime)[-_MOST_COMPARED:]
        others = [self.fingerprint(one.name) for one in latest if NAMESPACE_NAME.fullmatch(one.name)]
        parts = now.get("parts", {})
        alike = Counter[str]()
        for other in others:
            before = other.get("parts")
            if other.get("class") == now.get("class") and isinstance(before, dict):
                names = [name for name in parts.keys() | before.keys() if parts.get(name) != before.get(name)]
                alike[names[0] if len(names) == 1 else ""] += 1
        for name, count in alike.items():
            if name.startswith(_OBJECTS) and count >= _OFTEN:
                path = name.partition(" ")[2].partition(" of ")[0]
                logger.warning(
                    "%s: %d earlier runs differ from this one in nothing but %s, so none finds rows of "
                    "others. If no output depends on it, ignore=%r leaves it out",
                    now.get("class"),
                    count,
                    name,
                    path,
                )

    def fingerprint(self, namespace: str) -> dict[str, Any]:
        """The content of a namespace's ``fingerprint.json``; empty if it cannot be read."""
        path = os.path.join(self.path, namespace, FINGERPRINT)
        try:
            document = json.loads(self.fs.read_file(path, _MOST_TEXT))
        except (OSError, DamagedError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def enter(self, namespace: bytes, fingerprint: Mapping[str, Any]) -> Descriptor | None:
        """Make a namespace's folder, and mark it as in use as long as the result exists.

        None if other processes keep deleting the folder. Writers need this, as a new, unused namespace is the
        first to be deleted for room. `StrangeFileError` if the folder or its ``fingerprint.json`` is
        something else.
        """
        for _ in range(_ENTERINGS):
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process deletes it
                self.prepare(namespace, fingerprint)
            try:
                if (hold := self.hold(namespace)) is not None:
                    return hold
            except StrangeFileError:
                raise
            except OSError:
                pass
        return None

    def hold(self, namespace: bytes, *, patient: bool = True) -> Descriptor | None:
        """Mark a namespace as in use as long as the result exists.

        None if the namespace has no files, or another process is deleting it, for which a `patient` caller
        waits 0.1 s.
        """
        path = os.path.join(self.folder(namespace), FINGERPRINT)
        for left in reversed(range(_TRIES if patient else 2)):
            try:
                file = self.fs.open(path)
            except FileNotFoundError:
                return None
            if self.fs.lock(file, exclusive=False) is not False:
                if self.fs.same(file, path):
                    return file
                continue  # another file has this name now
            if left and patient:
                time.sleep(_BETWEEN_TRIES)  # a process that checks for users locks it briefly
        return None  # a process is deleting the namespace

    def set_aside(self, path: str) -> None:
        """Rename a damaged segment so that no process reads it; replaces one set aside before."""
        if self.fs.exists(path + CORRUPT) and not self.fs.is_file(path + CORRUPT):
            raise StrangeFileError(path + CORRUPT)
        self.fs.rename(path, path + CORRUPT)

    def lock_path(self) -> str:
        """The file that deleting processes lock; `StrangeFileError` if it is not a regular file."""
        path = os.path.join(self.path, LOCK)
        if not self.fs.is_file(path):
            with contextlib.suppress(FileExistsError):
                self.fs.create(path)
            if not self.fs.is_file(path):
                raise StrangeFileError(path)
        return path

    def is_writable(self) -> bool:
        """Whether files can be written beside the namespaces' folders; tries it."""
        try:
            self._make_folder(self.path)
            self.fs.listing(self.path)
            tag = os.path.join(self.path, f"{TAG}.")
            probe = tag + ulid()
            try:
                write_whole(self.fs, probe, [_PROBE], stem=tag)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.remove(probe)
        except OSError:
            return False
        return True

    def format(self) -> int | None:
        """The format stated in ``CACHEDIR.TAG``; None if it does not mark a cache."""
        return stated_format(self._tag())

    def _tag(self) -> bytes | None:
        """What is in ``CACHEDIR.TAG``; None if there is none, and its name if that is no small file."""
        for _ in range(_REPLACED):
            try:
                return self.fs.read_file(os.path.join(self.path, TAG), _MOST_TEXT)
            except FileNotFoundError:
                continue  # on NFS, also if another machine replaces it
            except NotADirectoryError:
                break
            except (StrangeFileError, DamagedError):
                return TAG.encode()
        return None

    def _make_folder(self, path: str) -> bool:
        """Make a folder and its parents, so that their names survive a power cut.

        Returns whether it is new.
        """
        missing = []
        while path and not self.fs.exists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            self.fs.make_folder(path)
            self.fs.sync_folder(os.path.dirname(path))
        return bool(missing)

    def _write(self, path: str, data: bytes, *, replaces: bool = False) -> None:
        """Write a small file; an existing one stays, unless this one `replaces` it."""
        with contextlib.suppress(FileExistsError):
            content = [memoryview(data)]
            write_whole(self.fs, path, content, stem=f"{path}.", replaces=replaces, sync_name=False)


_VALUE = re.compile(rb"[0-9a-f]{32}")


class Notes:
    """Remembers 16-byte values by 16-byte keys in a cache directory, `folder`; None: remembers nothing."""

    def __init__(self, folder: str | None) -> None:
        self._directory = None if folder is None else CacheDirectory(folder, FileSystem())

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if none is remembered."""
        if self._directory is None:
            return None
        try:
            text = self._directory.fs.read_file(self._path(self._directory, key), 64)
        except (OSError, DamagedError):
            return None
        return bytes.fromhex(text.decode()) if _VALUE.fullmatch(text) else None

    def put(self, key: bytes, value: bytes) -> bytes:
        """Remember a value, unless there is one; returns the remembered one.

        A fault of the disk causes a warning, and returns this process's value.
        """
        directory = self._directory
        if directory is None:
            return value
        try:
            directory.check()
            directory.create()
            path, data = self._path(directory, key), value.hex().encode()
            for replaces in (False, self.get(key) is None):  # replace an unreadable one
                with contextlib.suppress(FileExistsError):
                    write_whole(directory.fs, path, [memoryview(data)], stem=f"{path}.", replaces=replaces)
                if (found := self.get(key)) is not None:
                    return found
        except (OptionError, NewerFormatError):
            pass  # the tiers report it
        except OSError as error:
            log = logger.debug if is_read_only(error) else logger.warning
            log("a digest cannot be remembered in %s, and is computed again: %s", directory.path, error)
        return value

    @staticmethod
    def _path(directory: CacheDirectory, key: bytes) -> str:
        return os.path.join(directory.path, key.hex() + NOTE)
