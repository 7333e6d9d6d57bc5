"""`BucketFiles`: a folder in a bucket as a read-only file system, for commands that read all of it.

It makes few requests: heads of segments, which are opened one after another, are fetched many together, and
everything else in large pieces. It writes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any

from torchcache2.core.errors import TorchcacheError
from torchcache2.files.directory import FINGERPRINT, NAMESPACE_NAME, SEGMENT_NAME, TAG
from torchcache2.files.filesystem import Descriptor, FileInfo, FileSystem
from torchcache2.tiers.bucket.objects import Objects, Pieces, read_heads

_HEADS = 32  # that are fetched together
_FIRST_READ = 64 << 10  # bytes, as most heads are shorter
_AHEAD = 128 << 20  # bytes that are read at once


class BucketError(TorchcacheError):
    """A bucket fails, so its content is unknown."""


class _Object(Descriptor):
    """An object that stands for an open file."""

    __slots__ = ("name", "size")

    def __init__(self, name: str, size: int) -> None:
        super().__init__(-1)
        self.name, self.size = name, size

    def __del__(self) -> None:
        pass


class BucketFiles(FileSystem):
    """The objects below the URL of a bucket, as first listed. Paths begin with the URL.

    For one thread. A bucket that does not answer raises `BucketError`: no `OSError`, so that callers do not
    take it for a missing or damaged file.
    """

    is_remote = True

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._listings: dict[str, list[FileInfo]] = {}
        self._texts: dict[str, bytes] = {}  # of small files
        self._heads: dict[str, bytes] = {}  # of the segments that are likely to be opened next
        self._pieces = Pieces()

    def fetch_texts(self) -> None:
        """Fetch the tag with the format, and all fingerprints, at once.

        A namespace whose fingerprint came this way need not be listed for it.
        """
        with contextlib.suppress(FileNotFoundError):
            names = [info.name for info in self.listing(self._path("")) if info.is_folder]
            names = [f"{name}/{FINGERPRINT}" for name in names if NAMESPACE_NAME.fullmatch(name)]
            self._texts |= self._objects.texts([TAG, *names])

    def open(self, path: str) -> Descriptor:
        """An object, to read from."""
        if (text := self._texts.get(name := self._name(path))) is not None:
            return _Object(name, len(text))
        info = self._info(path)
        if info is None or info.is_folder:
            raise self._gone(path)
        return _Object(self._name(path), info.size)

    def create(self, path: str) -> Descriptor:
        """Nothing is written."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def make_folder(self, path: str) -> None:
        """Nothing is written."""
        self.create(path)

    def size(self, file: Descriptor) -> int:
        """Bytes of an object."""
        return _of(file).size

    def exists(self, path: str) -> bool:
        """Whether there is an object, or one below this path."""
        return self._info(path) is not None

    def is_file(self, path: str) -> bool:
        """Whether there is an object."""
        info = self._info(path)
        return info is not None and not info.is_folder

    def listing(self, path: str) -> list[FileInfo]:
        """What is directly in a folder; `FileNotFoundError` if there is nothing."""
        name = self._name(path)
        found = self._listings.get(name)
        if found is None:
            found = self._objects.listing(name)
            if found is None:
                raise self._failed()
            self._listings[name] = found
        if not found:
            raise self._gone(path)
        return list(found)

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Reads fetch what comes next."""

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into the first writable buffer; may read less."""
        one, view = _of(file), memoryview(buffers[0])
        if offset >= one.size:
            return 0
        if (found := self._at(one.name, offset)) is None:
            self._fetch(one, offset, len(view))
            found = self._at(one.name, offset)
        if not found:
            raise self._gone(one.name)
        size = min(len(view), len(found))
        view[:size] = found[:size]
        return size

    def remove(self, path: str) -> None:
        """Delete an object."""
        self.remove_all([path])

    def remove_all(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        try:
            self._objects.remove([self._name(path) for path in paths])
        finally:
            self._listings.clear()
            self._texts.clear()

    def _at(self, name: str, offset: int) -> memoryview | None:
        for data in (self._heads.get(name), self._texts.get(name)):
            if data is not None and offset < len(data):
                return memoryview(data)[offset:]
        found = self._pieces.at(name, offset)
        if isinstance(found, Exception):
            raise self._gone(name) if self._objects.cause is None else self._failed()
        return found

    def _fetch(self, file: _Object, offset: int, size: int) -> None:
        """Fetch these bytes, and what is likely to be read next."""
        self._pieces = Pieces()
        if not SEGMENT_NAME.fullmatch(file.name.rpartition("/")[2]):
            self._pieces.fetch(self._objects, [(file.name, 0, file.size)])
            if found := self._at(file.name, 0):
                self._texts[file.name] = bytes(found)
        elif offset < _FIRST_READ and file.name not in self._heads:
            self._fetch_heads(file.name)
        else:
            end = min(file.size, offset + max(size, _AHEAD))
            self._pieces.fetch(self._objects, [(file.name, offset, end)])

    def _fetch_heads(self, name: str) -> None:
        """Fetch the head of a segment, and those of the next ones in its folder."""
        folder = name.rpartition("/")[0]
        following = [info for info in self._listings[folder] if SEGMENT_NAME.fullmatch(info.name)]
        sizes = {f"{folder}/{info.name}": info.size for info in following if f"{folder}/{info.name}" >= name}
        self._heads = read_heads(self._objects, dict(list(sizes.items())[:_HEADS]))
        if name not in self._heads:
            self._pieces.fetch(self._objects, [(name, 0, 1)])  # for the reason

    def _info(self, path: str) -> FileInfo | None:
        """The listing's entry for a path; the URL itself is a folder."""
        name = self._name(path)
        folder, _, last = name.rpartition("/")
        try:
            if not name:
                self.listing(path)
                return FileInfo("", True, 0, 0.0)
            listing = self.listing(self._path(folder))
        except FileNotFoundError:
            return None
        return next((info for info in listing if info.name == last), None)

    def _path(self, name: str) -> str:
        url = self._objects.bucket.url
        return f"{url}/{name}" if name else url

    def _name(self, path: str) -> str:
        """The name of an object relative to the URL."""
        url = self._objects.bucket.url
        if path != url and not path.startswith(url + "/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path[len(url) + 1 :].rstrip("/")

    def _gone(self, path: str) -> OSError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _failed(self) -> BucketError:
        return BucketError(str(self._objects.cause or f"{self._objects.bucket.url} does not answer"))


def _of(file: Descriptor) -> _Object:
    assert isinstance(file, _Object)
    return file
