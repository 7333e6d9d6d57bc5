"""`Ranges`: the parts of objects that one batch needs: fetched together, and then read as if from files."""

from __future__ import annotations

import bisect
import errno
import os
from collections.abc import Sequence
from typing import Any

from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.tiers.bucket.objects import Objects

_GAP = 16 << 10  # bytes; to fetch so many that nobody needs costs less than another request
_MOST = 8 << 20  # bytes of one request; several at once are faster than a long one


class _Object(Descriptor):
    """An object: which parts of it are wanted, and what was had of them, or the error."""

    __slots__ = ("data", "name", "starts", "wanted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.wanted: list[tuple[int, int]] = []
        self.starts: list[int] = []
        self.data: list[bytes | Exception] = []

    def __del__(self) -> None:
        """There is nothing to close."""

    def merged(self) -> list[tuple[int, int]]:
        """The parts that are wanted, neighbours as one, unless that is too long."""
        parts: list[tuple[int, int]] = []
        for start, end in sorted(self.wanted):
            if parts and start - parts[-1][1] <= _GAP:
                parts[-1] = parts[-1][0], max(end, parts[-1][1])
            else:
                parts.append((start, end))
        return [(at, min(at + _MOST, end)) for start, end in parts for at in range(start, end, _MOST)]


class Ranges(FileSystem):
    """Parts of the objects of one folder of a bucket; paths are those of the local files in their place.

    `will_need` says what is wanted, before `fetch`. What was not had is an error when it is read: a
    `FileNotFoundError` if the object is gone, a `DamagedError` if it ends before, else an `OSError`.
    """

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects = objects
        self._folder = folder
        self._files: dict[str, _Object] = {}
        self._is_fetched = False

    def get(self, path: str) -> Descriptor:
        """The object in the place of a path."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _Object(f"{self._folder}/{os.path.basename(path)}")
        return file

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Have a range fetched."""
        assert isinstance(file, _Object)
        if size and not self._is_fetched:
            file.wanted.append((offset, offset + size))

    def fetch(self) -> None:
        """Fetch what is wanted, all at once."""
        self._is_fetched = True
        parts = [(file, start, end) for file in self._files.values() for start, end in file.merged()]
        ranges = [(file.name, start, end) for file, start, end in parts]
        data = self._objects.read(ranges)
        failed = [i for i, one in enumerate(data) if one is None]
        errors = dict(zip(failed, self._errors([ranges[i] for i in failed]), strict=True))
        for i, (file, start, _) in enumerate(parts):
            file.starts.append(start)
            one = data[i]
            file.data.append(errors[i] if one is None else one)

    def _errors(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | Exception]:
        """Why ranges were not had, or their bytes: another thread may just have found the bucket working."""
        failed = OSError(errno.EIO, "the bucket fails")
        if not ranges or self._objects.cause is not None:
            return [failed for _ in ranges]
        faults = self._objects.faults
        found = self._objects.read([*ranges, *[(name, 0, 1) for name, _, _ in ranges]])
        if self._objects.cause is not None or self._objects.faults != faults:
            return [failed if one is None else one for one in found[: len(ranges)]]
        errors: list[bytes | Exception] = []
        for (name, start, end), one, is_there in zip(ranges, found, found[len(ranges) :], strict=False):
            if one is not None:
                errors.append(one)
            elif is_there is None:
                errors.append(FileNotFoundError(errno.ENOENT, "there is no such object", name))
            else:
                errors.append(DamagedError(f"it ends before byte {end}, from {start} on"))
        return errors

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read what was fetched; see `FileSystem.read`."""
        assert isinstance(file, _Object)
        number = bisect.bisect_right(file.starts, offset) - 1
        data = file.data[number] if number >= 0 else b""
        if isinstance(data, Exception):
            raise data
        at, done = offset - file.starts[number] if number >= 0 else 0, 0
        for buffer in buffers:
            piece = memoryview(data)[at + done : at + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done
