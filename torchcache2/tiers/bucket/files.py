"""`BucketFiles`: a folder in a bucket as a read-only file system, for commands that read all of it.

It makes few requests: heads of segments, which are opened one after another, are fetched many together, and
so are the ranges that `will_need` names; everything else in large pieces. It writes nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torchcache2.core.errors import TorchcacheError
from torchcache2.files.directory import FINGERPRINT, NAMESPACE_NAME, SEGMENT_NAME, TAG
from torchcache2.files.filesystem import Descriptor, FileInfo, FileSystem
from torchcache2.tiers.bucket.objects import Objects, read_heads

_HEADS = 32  # that are fetched together
_FIRST_READ = 64 << 10  # bytes, as most heads are shorter
_GAP = 64 << 10  # unneeded bytes that cost less than another request
_PIECE = 8 << 20  # bytes of one request
_MOST = 256 << 20  # bytes that are fetched ahead
Range = tuple[str, int, int]  # of an object: its name, and where it begins and ends


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
        self._wanted: list[Range] = []
        self._pieces: dict[str, list[tuple[int, bytes]]] = {}  # by name, in the order of their positions

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

    def edit(self, path: str) -> Descriptor:
        """As `open`, for locks, which do nothing here."""
        return self.open(path)

    def create(self, path: str) -> Descriptor:
        """Nothing is written."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def make_folder(self, path: str) -> None:
        """Nothing is written."""
        self.create(path)

    def is_away(self, file: Descriptor) -> bool:
        """All is."""
        return True

    def size(self, file: Descriptor) -> int:
        """Bytes of an object."""
        return _of(file).size

    def links(self, file: Descriptor) -> int:
        """An object has one name."""
        return 1

    def same(self, file: Descriptor, path: str) -> bool:
        """Whether an object has this path."""
        return self.exists(path) and _of(file).name == self._name(path)

    def lock(self, file: Descriptor, *, exclusive: bool) -> bool | None:
        """There are no locks."""
        return None

    def unlock(self, file: Descriptor) -> None:
        """There are no locks."""

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
        """Note a range: the first read of any noted range fetches them all."""
        if size:
            self._wanted.append((_of(file).name, offset, min(offset + size, _of(file).size)))

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into writable buffers, one after another; may read less."""
        done = 0
        for buffer in buffers:
            view, filled = memoryview(buffer), 0
            while filled < len(view):
                found = self._at(_of(file), offset + done, len(view) - filled)
                if not found:
                    return done
                view[filled : filled + len(found)] = found
                filled += len(found)
                done += len(found)
        return done

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

    def _at(self, file: _Object, offset: int, size: int) -> memoryview:
        """Some of the bytes from an offset on; none where the object ends."""
        if offset >= file.size:
            return memoryview(b"")
        found = self._known(file.name, offset, size)
        if found is None:
            self._fetch(file, offset, size)
            found = self._known(file.name, offset, size)
        if found is None:
            raise self._gone(file.name)
        return found

    def _known(self, name: str, offset: int, size: int) -> memoryview | None:
        for data in (self._heads.get(name), self._texts.get(name)):
            if data is not None and offset < len(data):
                return memoryview(data)[offset : offset + size]
        pieces = self._pieces.get(name, [])
        i = bisect.bisect_right(pieces, offset, key=lambda piece: piece[0]) - 1
        if i < 0 or offset >= pieces[i][0] + len(pieces[i][1]):
            return None
        start, data = pieces[i]
        return memoryview(data)[offset - start : offset - start + size]

    def _fetch(self, file: _Object, offset: int, size: int) -> None:
        """Fetch these bytes, and what is likely to be read next."""
        wanted, self._wanted = self._wanted, []
        if not SEGMENT_NAME.fullmatch(file.name.rpartition("/")[2]):
            self._texts[file.name] = b"".join(self._had([(file.name, 0, file.size)], file.name))
            return
        if offset < _FIRST_READ and file.name not in self._heads and not wanted:
            self._fetch_heads(file.name)
            return
        ranges = list(_merged(wanted))
        is_among = any(name == file.name and start <= offset < end for name, start, end in ranges)
        if not is_among or sum(end - start for _, start, end in ranges) > _MOST:
            end = file.size if file.size <= _MOST // 2 else max(offset + size, offset + _PIECE)
            ranges = list(_merged([(file.name, offset, min(end, file.size))]))
        self._pieces = {}
        for (name, start, _), data in zip(ranges, self._had(ranges, file.name), strict=True):
            self._pieces.setdefault(name, []).append((start, data))

    def _fetch_heads(self, name: str) -> None:
        """Fetch the head of a segment, and those of the next ones in its folder."""
        folder = name.rpartition("/")[0]
        following = [info for info in self._listings[folder] if SEGMENT_NAME.fullmatch(info.name)]
        sizes = {f"{folder}/{info.name}": info.size for info in following if f"{folder}/{info.name}" >= name}
        sizes = dict(list(sizes.items())[:_HEADS])
        self._heads = read_heads(self._objects, sizes, _FIRST_READ)
        if name not in self._heads:
            self._had([(name, 0, 1)], name)  # raises why

    def _had(self, ranges: Sequence[Range], needed: str) -> list[bytes]:
        """The bytes of ranges; empty for deleted objects, except that `needed` must exist."""
        found = self._objects.read(ranges)
        if any(data is None for data in found) and self._objects.cause is not None:
            raise self._failed()
        if any(data is None and name == needed for data, (name, _, _) in zip(found, ranges, strict=True)):
            raise self._gone(needed)
        return [data or b"" for data in found]

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


def _merged(ranges: Sequence[Range]) -> Iterator[Range]:
    """Ranges in order; neighbours are joined, and long ones cut into pieces."""
    joined: list[Range] = []
    for name, start, end in sorted(ranges):
        if joined and joined[-1][0] == name and start <= joined[-1][2] + _GAP:
            joined[-1] = name, joined[-1][1], max(end, joined[-1][2])
        else:
            joined.append((name, start, end))
    for name, start, end in joined:
        for first in range(start, end, _PIECE):
            yield name, first, min(first + _PIECE, end)
