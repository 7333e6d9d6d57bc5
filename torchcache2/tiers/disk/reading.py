"""`Reader`: rows of a batch from the segments that have them, by schema, in the order of the batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from torchcache2.core.arrays import Array, Positions
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.core.schema import Schema
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError
from torchcache2.files.segment import Columns, Segment, empty_columns, rows_of
from torchcache2.tiers.disk.catalog import AnySegment
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.known import Known

__all__ = ["Reader"]

_TOUCHED_EVERY = 60.0  # seconds
_ASKED_BESIDE = 8 << 20  # bytes of a batch that are worth a thread


class Reader:
    """Finds and reads rows of one tier."""

    def __init__(self, directory: CacheDirectory, known: Known, health: Health) -> None:
        self._directory = directory
        self._known = known
        self._health = health
        self._touched: dict[str, float] = {}  # when, by path

    def find(self, keys: Keys) -> list[tuple[Positions, Rows]]:
        """The rows of those keys that are here, by schema, with their positions in the batch."""
        if keys.namespace not in self._known.located:
            self._known.let_go()  # otherwise a process that only reads would hold all that it ever used
        with self._known.lock():
            self._known.begin()
            if self._known.closed or not self._health.reads:
                return []
            try:
                located = self._known.namespace(keys.namespace)
                entries = located.find(keys.words)
                if (entries < 0).any() and located.look():
                    entries = located.find(keys.words)  # of all keys: looking may have moved every entry
            except BaseException:
                self._known.start_anew(keys.namespace)
                raise
            positions = np.flatnonzero(entries >= 0)
            if not self._health.reads or len(positions) == 0:
                return []
            numbers, rows = located.where(entries[positions])
            segments = {number: located.segments[number] for number in np.unique(numbers).tolist()}

        gone, damaged = [], []

        def lost(number: int, segment: AnySegment, error: Exception) -> None:
            if not isinstance(error, FileNotFoundError):  # a file that is gone made room for others
                self._health.fault(error, getattr(segment, "path", self._directory.path))
            gone.append(number)
            if isinstance(error, DamagedError):
                damaged.append(number)

        found = _read_rows(segments, numbers, rows, positions, lost)
        if gone:
            self._known.remove(keys.namespace, gone, damaged)
        for segment in segments.values():
            self._touch(segment)
        return found

    def _touch(self, segment: AnySegment) -> None:
        """Say that a segment is in use; at most once a minute."""
        if isinstance(segment, Segment) and self._health.writes:
            now = time.monotonic()
            if now - self._touched.get(segment.path, -_TOUCHED_EVERY) >= _TOUCHED_EVERY:
                self._touched[segment.path] = now
                with contextlib.suppress(OSError):
                    self._directory.fs.touch(segment.path)


class _Job(NamedTuple):
    """Rows of one segment and schema."""

    number: int
    rows: Array
    positions: Positions


def _read_rows(
    segments: Mapping[int, AnySegment],
    numbers: Array,
    rows: Array,
    positions: Positions,
    on_lost: Callable[[int, AnySegment, Exception], None],
) -> list[tuple[Positions, Rows]]:
    """Read rows by schema; `on_lost` is told of each segment that cannot be read, and its rows are left out.

    `numbers` (of segments), `rows` (in them) and `positions` (in the batch, ascending) are of shape ``(n,)``.
    The system is asked for all rows before, or while, the first is waited for.
    """
    jobs: dict[Schema, list[_Job]] = {}
    for number, segment in segments.items():
        which = np.flatnonzero(numbers == number)
        for schema, some in segment.schemas(rows[which]):
            chosen = which[some]
            jobs.setdefault(schema, []).append(_Job(number, rows[chosen], positions[chosen]))
    with _read_ahead(segments, jobs):
        parts = [_read(segments, schema, some_jobs, on_lost) for schema, some_jobs in jobs.items()]
    return [part for part in parts if part is not None]


@contextlib.contextmanager
def _read_ahead(segments: Mapping[int, AnySegment], jobs: Mapping[Schema, list[_Job]]) -> Iterator[None]:
    """Ask for all rows; for many bytes in a thread, since a system whose queue is full has us wait."""

    def ask() -> None:
        for some_jobs in jobs.values():
            for job in some_jobs:
                with contextlib.suppress(OSError):  # reading will say so
                    segments[job.number].read_ahead(job.rows)

    size = sum(schema.row_bytes * len(job.rows) for schema, some in jobs.items() for job in some)
    thread = threading.Thread(target=ask, name="torchcache2 read-ahead", daemon=True)
    if size < _ASKED_BESIDE or not _started(thread):
        ask()
        yield
        return
    try:
        yield
    finally:
        thread.join()


def _started(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # there are too many, or the interpreter ends
        return False
    return True


def _read(
    segments: Mapping[int, AnySegment],
    schema: Schema,
    jobs: list[_Job],
    on_lost: Callable[[int, AnySegment, Exception], None],
) -> tuple[Positions, Rows] | None:
    """Rows of one schema, in the order of their positions."""
    wanted = np.sort(np.concatenate([job.positions for job in jobs]))
    columns: Columns = empty_columns(schema, len(wanted))
    good = np.ones(len(wanted), bool)
    for job in jobs:
        segment = segments[job.number]
        targets = np.searchsorted(wanted, job.positions)
        error: Exception | None = None
        try:
            if not segment.read(job.rows, columns, targets):
                error = DamagedError("a row is not what was written")
        except OSError as fault:
            error = fault
        if error is not None:
            good[targets] = False
            on_lost(job.number, segment, error)
    result = rows_of(schema, columns, len(wanted))
    if good.all():
        return wanted, result
    if not good.any():
        return None
    return wanted[good], result.take(torch.from_numpy(np.flatnonzero(good)))
