"""`Reader`: reads rows of a batch from the segments that have them, in the order of the batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from torchcache2.core.keys import Array, Flags, Keys, Positions
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError
from torchcache2.files.segment import Columns, Segment, empty_columns, rows_of
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.index import AnySegment, NamespaceIndex, RowLocations
from torchcache2.tiers.disk.known import Known

_TOUCHED_EVERY = 60.0  # seconds
_ASKED_BESIDE = 8 << 20  # from so many bytes on, the system is asked in a thread of its own


class Reader:
    """Finds and reads rows of one tier."""

    def __init__(self, directory: CacheDirectory, known: Known, health: Health) -> None:
        self._directory = directory
        self._known = known
        self._health = health
        self._touched: dict[str, float] = {}  # when each path was touched last

    def find(self, keys: Keys) -> list[tuple[Positions, Rows]]:
        """The rows of those keys that are here, by schema, with their positions in the batch."""
        self._let_go_before(keys)
        with self._known.lock():
            index, where = self._where(keys)
            positions = np.flatnonzero(where.numbers >= 0)
            if index is None or len(positions) == 0:
                return []
            segments = index.open_segments(set(where.numbers[positions].tolist()))
        found, failed = read_rows(segments, where.at(positions), positions)
        for number, error in failed.items():
            segment = segments[number]
            if not isinstance(segment, Segment):  # rows that wait are in no file that could be set aside
                self._health.fault(OSError(str(error)), self._directory.path)
            elif not isinstance(error, FileNotFoundError):  # a file that is gone was deleted to make room
                self._health.fault(error, segment.path)
        if failed:
            damaged = [number for number, error in failed.items() if isinstance(error, DamagedError)]
            # Where nothing may be written, a damaged segment stays, as nobody could replace its other rows.
            stays = damaged if self._health.serves_only else ()
            gone = [n for n, error in failed.items() if not (n in stays or isinstance(error, MemoryError))]
            self._known.remove(keys.namespace, gone, damaged)
        for segment in segments.values():
            self._touch(segment)
        return found

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now."""
        self._let_go_before(keys)
        with self._known.lock():
            return self._where(keys)[1].numbers >= 0

    def _let_go_before(self, keys: Keys) -> None:
        """Let unused namespaces go before another one is used; without the lock."""
        if keys.namespace not in self._known.located:
            self._known.let_go()  # else a process that only reads would hold all it ever used

    def _where(self, keys: Keys) -> tuple[NamespaceIndex | None, RowLocations]:
        """The index of the namespace, or None, and where each key is; with the lock held."""
        self._known.begin()
        if not self._known.closed and self._health.reads:
            try:
                index = self._known.namespace(keys.namespace)
                where = index.find(keys.words)
                if (where.numbers < 0).any() and index.look():
                    where = index.find(keys.words)
            except BaseException:
                self._known.start_anew(keys.namespace)
                raise
            if self._health.reads:  # looking may have shown files of a newer format
                return index, where
        nowhere = np.full(len(keys), -1)
        return None, RowLocations(nowhere, nowhere, nowhere)

    def _touch(self, segment: AnySegment) -> None:
        """Set the time at which a segment was last used; at most once a minute."""
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
    checksums: Array


def read_rows(
    segments: Mapping[int, AnySegment], where: RowLocations, positions: Positions
) -> tuple[list[tuple[Positions, Rows]], dict[int, Exception]]:
    """Read rows by schema; also the error of each segment that cannot be read, whose rows are left out.

    The `positions` are those in the batch, ascending. Rows of other segments are left out, too.
    The system is asked for all rows as soon as one was waited for.
    """
    jobs: dict[Schema, list[_Job]] = {}
    ahead: dict[int, Array] = {}
    size = 0
    order = np.argsort(where.numbers, kind="stable")
    ordered = where.numbers[order]
    for number, segment in segments.items():
        which = order[slice(*np.searchsorted(ordered, (number, number + 1)))]
        ahead[number] = rows = where.rows[which]
        for schema, some in segment.schemas(rows):
            chosen = which[some]
            job = _Job(number, rows[some], positions[chosen], where.checksums[chosen])
            jobs.setdefault(schema, []).append(job)
            size += schema.row_bytes * len(chosen)
    failed: dict[int, Exception] = {}
    with _Ahead(segments, ahead, size) as asks:
        parts = [_read(segments, schema, some_jobs, failed, asks) for schema, some_jobs in jobs.items()]
    return [part for part in parts if part is not None], failed


class _Ahead:
    """Has the system read rows ahead, given by the segment, once the disk was waited for.

    Rows of `size` bytes together: for many, it asks in a thread, as a system with a full queue waits.
    """

    def __init__(self, segments: Mapping[int, AnySegment], rows: Mapping[int, Array], size: int) -> None:
        self._segments, self._rows, self._size = segments, rows, size
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Ahead:
        if any(isinstance(one, Segment) and one.fs.is_remote for one in self._segments.values()):
            self()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def __call__(self) -> None:
        """Ask for all rows, the first time that this is called."""
        rows, self._rows = self._rows, {}

        def ask() -> None:
            for number, some in rows.items():
                with contextlib.suppress(OSError):  # reading will meet the same error
                    self._segments[number].read_ahead(some)

        if rows and self._size >= _ASKED_BESIDE:
            thread = threading.Thread(target=ask, name="torchcache2 read-ahead", daemon=True)
            with contextlib.suppress(RuntimeError):  # there are too many threads, or the interpreter ends
                thread.start()
                self._thread = thread
                return
        ask()


def _read(
    segments: Mapping[int, AnySegment],
    schema: Schema,
    jobs: list[_Job],
    failed: dict[int, Exception],
    waited: Callable[[], object],
) -> tuple[Positions, Rows] | None:
    """Rows of one schema, in the order of their positions; adds to `failed` why others cannot be read."""
    wanted = np.sort(np.concatenate([job.positions for job in jobs]))
    try:
        columns: Columns = empty_columns(schema, len(wanted))
    except MemoryError as error:
        failed.update((job.number, error.with_traceback(None)) for job in jobs)
        return None
    good = np.ones(len(wanted), bool)
    for job in jobs:
        targets = np.searchsorted(wanted, job.positions)
        try:
            if not segments[job.number].read(job.rows, columns, targets, waited, job.checksums):
                raise DamagedError("a row is not what was written")
        except (OSError, DamagedError, MemoryError) as error:
            good[targets] = False
            failed[job.number] = error.with_traceback(None)  # its frames would keep the file open
    result = rows_of(schema, columns, len(wanted))
    if good.all():
        return wanted, result
    if not good.any():
        return None
    return wanted[good], result.take(torch.from_numpy(np.flatnonzero(good)))
