"""`write_runs`: keeps few runs, and few segments outside them, in each namespace, like an LSM tree.

When enough rows are in no run, they become one. Many runs of similar size are merged into one; so each key is
written about twice, and a look-up searches few runs. The writer that seals segments does this. Nothing waits
for it, as the segments contain the same index.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Array
from torchcache2.files.directory import RUNS, CacheDirectory
from torchcache2.files.errors import DamagedError, UnreadableError
from torchcache2.files.filesystem import Descriptors
from torchcache2.files.layout import SEGMENT
from torchcache2.files.run import TABLE, Part, Run, by_key, entries_of, size_of, write_run
from torchcache2.files.segment import Segment

_LEAST_ROWS = 1 << 19  # of a run; up to as many newer rows are in memory of each process
_MOST_SEGMENTS = 1024  # outside of runs, however few rows they have
_ALIKE = 2  # runs are similar if the ratio of their sizes is below this
_MERGED = 8  # similar runs that are merged


def is_due(segments: int, rows: int) -> bool:
    """Whether so many segments and rows outside of runs are enough for another run."""
    return rows >= _LEAST_ROWS or segments >= _MOST_SEGMENTS


def write_runs(
    directory: CacheDirectory, namespace: bytes, limit: int, has_room: Callable[[int], bool]
) -> bool:
    """Write runs of segments that are in none, and merge runs; returns whether anything changed.

    A row may have up to `limit` bytes. ``has_room(size)`` returns whether a run of `size` bytes may be
    written, and may make room. Does nothing while another process does this. May raise `OSError`.
    """
    fs = directory.fs
    path = os.path.join(directory.path, RUNS)
    with contextlib.suppress(FileExistsError):
        fs.create(path)
    lock = fs.open(path)
    if fs.lock(lock, exclusive=True) is False:
        return False
    try:
        return _Merger(directory, namespace, limit, has_room).work()
    finally:
        fs.unlock(lock)


class _Merger:
    def __init__(
        self, directory: CacheDirectory, namespace: bytes, limit: int, has_room: Callable[[int], bool]
    ) -> None:
        self._directory, self._namespace = directory, namespace
        self._limit, self._has_room = limit, has_room
        self._path = directory.folder(namespace)
        self._files = Descriptors(directory.fs)
        contents = directory.contents(namespace.hex())
        self._alive = {info.name.removesuffix(SEGMENT) for info in contents.segments}
        self._runs: list[Run] = []
        self._changed = False
        self._covered: set[str] = set()
        for info in contents.runs:
            with contextlib.suppress(FileNotFoundError, UnreadableError):
                run = Run(directory.fs, self._files, os.path.join(self._path, info.name))
                if run.namespace == namespace:
                    self._runs.append(run)
                    self._covered.update(run.names)

    def work(self) -> bool:
        for run in [one for one in self._runs if not self._rows_of(one)]:
            self._remove([run])
        group, tables, rows = list[Array](), list[Array](), 0
        for name in sorted(self._alive - self._covered):
            found = self._head(name, len(tables))
            if found is None:
                continue
            table, entries = found
            tables.append(table)
            group.append(entries)
            rows += len(entries)
            if is_due(len(tables), rows):
                if not self._add(by_key(np.concatenate(group)), np.concatenate(tables)):
                    break
                group, tables, rows = [], [], 0
        return self._changed

    def _head(self, name: str, number: int) -> tuple[Array, Array] | None:
        """A run's entry for a segment, and those for its rows; None if the segment cannot be read."""
        fs, path = self._directory.fs, os.path.join(self._path, name + SEGMENT)
        try:
            segment = Segment.open(fs, self._files, path, limit=self._limit, structured=False)
            head = 8 + int.from_bytes(fs.read_bytes(self._files.get(path), 0, 8), "little")
            first = fs.read_bytes(self._files.get(path), 0, head)
        except (FileNotFoundError, OptionError, UnreadableError):
            return None  # readers of its rows report this
        finally:
            self._files.forget(path)
        if segment.layout.namespace != self._namespace or segment.keys is None:
            return None
        table = np.zeros(1, TABLE)
        table[0] = name.encode(), b"", len(segment), head, xxh3_64_intdigest(first)
        return table, entries_of(segment.keys, segment.checksums, number)

    def _add(self, entries: Array, table: Array) -> bool:
        """Write a run of newer rows, merged with similar runs; False if there is no room."""
        self._runs.sort(key=self._rows_of, reverse=True)
        count = kept_runs([self._rows_of(run) for run in self._runs], len(entries))
        merged = self._runs[count:]
        rows = len(entries) + sum(map(self._rows_of, merged))
        segments = len(table) + sum(len(run.table) for run in merged)
        if not self._has_room(size_of(rows, segments)):
            return False
        parts = [Part(entries, table), *(Part(run, run.table) for run in merged)]
        try:
            path = write_run(self._directory.fs, self._path, self._namespace, parts, self._alive)
        except DamagedError:
            self._remove([run for run in merged if not _is_good(run)])  # made again from the segments' heads
            return False
        self._changed = True
        self._remove(merged)
        self._runs.append(Run(self._directory.fs, self._files, path))
        return True

    def _rows_of(self, run: Run) -> int:
        here = np.array([name in self._alive for name in run.names], bool)
        return int(run.table["rows"][here].sum(dtype=np.int64))

    def _remove(self, runs: Sequence[Run]) -> None:
        """Delete runs; readers have them open, or look again."""
        for run in runs:
            self._runs.remove(run)
            run.close()
            with contextlib.suppress(FileNotFoundError):
                self._directory.fs.remove(run.path)
            self._changed = True


def _is_good(run: Run) -> bool:
    try:
        run.check()
    except DamagedError:
        return False
    return True


def kept_runs(sizes: Sequence[int], rows: int) -> int:
    """How many runs (`sizes`, largest first) stay unmerged when a run of `rows` rows is written.

    The others are merged with the new one.
    """
    kept = len(sizes)
    while True:
        first = kept
        while first and sizes[first - 1] < rows * _ALIKE:
            first -= 1
        if first == kept or (kept - first + 1 < _MERGED and sizes[first] * _ALIKE >= rows):
            return kept
        rows += sum(sizes[first:kept])
        kept = first
