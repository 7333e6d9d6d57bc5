"""`Reader`: reads the rows of a batch from their segments, in batch order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import torch

from torchcache2.core.errors import AwayError, DamagedError, NewerFormatError
from torchcache2.core.keys import Array, Flags, Keys, Positions
from torchcache2.core.rows import Parts, Schema, merged
from torchcache2.files.segment import Job, Segment, empty_columns, rows_of
from torchcache2.files.segment import read_rows as read_segments
from torchcache2.tiers.bucket.source import BucketSource
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.index import AnySegment, NamespaceIndex, RowLocations, TierIndex

_TOUCHED_EVERY = 60.0  # seconds


class Reader:
    """Finds and reads rows of one tier."""

    def __init__(self, index: TierIndex, health: Health, bucket: BucketSource | None) -> None:
        self._index = index
        self._fs = index.directory.fs
        self._health = health
        self._bucket = bucket
        self._touched: dict[str, float] = {}  # when each path was touched last

    def find(self, keys: Keys) -> Parts:
        """The rows of those keys that are here, by schema, with their positions in the batch."""
        self._begin(keys)
        with self._index.lock():
            index, where = self._where(keys)
            positions = np.flatnonzero(where.numbers >= 0)
            if index is None or len(positions) == 0:
                return []
            segments = index.open_segments(set(where.numbers[positions].tolist()))
        where = where.at(positions)
        parts, failed = read_rows(segments, where, positions)
        if failed:
            parts = self._meet(failed, keys.namespace, index, segments, where, positions, parts)
        for segment in segments.values():
            self._touch(segment)
        return parts

    def _meet(
        self,
        failed: dict[int, Exception],
        namespace: bytes,
        index: NamespaceIndex,
        segments: Mapping[int, AnySegment],
        where: RowLocations,
        positions: Positions,
        parts: Parts,
    ) -> Parts:
        """Respond to errors of segments; returns the parts, with good rows of damaged segments added.

        What is damaged is first read once more: a bit may have flipped on its way, and the file be good. If
        the segment stays, it is then fetched anew from a bucket, as only the local copy may be damaged.
        """
        gone, damaged = [], []
        for number, error in failed.items():
            segment = segments[number]
            if isinstance(error, DamagedError) and isinstance(segment, Segment):
                stays = self._health.serves_only or self._fs.has_elsewhere(segment.path)
                for doubts in (False, True) if stays else (False,):
                    if doubts:
                        self._fs.fetch_again(segment.path)
                    self._index.descriptors.forget(segment.path)
                    lost = _lost(where.numbers == number, positions, parts)
                    some, again = read_rows({number: segment}, where.at(lost), positions[lost])
                    parts = merged([*parts, *some])
                    if not again:
                        break
                    error = again[number]
                if not again:
                    continue
                if isinstance(error, DamagedError) and stays:
                    self._fs.fetch_again(segment.path)
                    lost = _lost(where.numbers == number, positions, parts)
                    self._health.damaged(segment.path, error, len(lost))
                    with self._index.lock():
                        index.lose(number, where.rows[lost].tolist())
                    continue
            if isinstance(error, AwayError):
                continue
            if not isinstance(segment, Segment):  # unsealed rows have no file to set aside
                self._health.fault(OSError(str(error)), self._index.directory.path)
            elif not isinstance(error, FileNotFoundError):  # a file that is gone was deleted to make room
                self._health.fault(error, segment.path)
            if isinstance(error, DamagedError):
                damaged.append(number)
            if not isinstance(error, MemoryError):
                gone.append(number)
        self._index.remove(namespace, gone, damaged)
        return parts

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now."""
        self._begin(keys)
        with self._index.lock():
            return self._where(keys)[1].numbers >= 0

    def _begin(self, keys: Keys) -> None:
        """Prepare a look-up, without the lock: release unused namespaces, and ask the bucket."""
        if keys.namespace not in self._index.namespaces:
            self._index.let_go()  # else a process that only reads would hold every namespace it ever used
        if self._bucket is None or not self._health.reads or self._index.closed or len(keys) == 0:
            return

        def has_all() -> bool:
            with self._index.lock():
                return bool((self._where(keys)[1].numbers >= 0).all())

        try:
            has_changed = self._bucket.look(keys.namespace, has_all)
        except NewerFormatError as error:
            self._health.fault(error, self._bucket.objects.bucket.url)
            return
        if has_changed:
            with self._index.lock():
                if (index := self._index.namespaces.get(keys.namespace)) is not None:
                    index.look_again()

    def _where(self, keys: Keys) -> tuple[NamespaceIndex | None, RowLocations]:
        """The index of the namespace, or None, and where each key is; with the lock held."""
        self._index.begin()
        if not self._index.closed and self._health.reads:
            try:
                index = self._index.namespace(keys.namespace)
                where = index.find(keys.words)
                if (where.numbers < 0).any() and index.look():
                    where = index.find(keys.words)
            except BaseException:
                self._index.start_anew(keys.namespace)
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
                    self._fs.touch(segment.path)


def _lost(is_asked: Flags, positions: Positions, parts: Parts) -> Array:
    """Which of the positions that are asked for are in no part."""
    found = np.isin(positions, np.concatenate([some for some, _ in parts])) if parts else False
    return np.flatnonzero(is_asked & ~np.asarray(found))


def read_rows(
    segments: Mapping[int, AnySegment], where: RowLocations, positions: Positions
) -> tuple[Parts, dict[int, Exception]]:
    """Read rows by schema; also returns an error for each segment with rows that cannot be read.

    `positions` are positions in the batch. Bad rows, and those of other segments, are left out. Once reads
    have to wait for the disk, the system is asked to read all rows ahead.
    """
    order = np.argsort(where.numbers << 32 | where.rows)  # as in the files
    where, positions = where.at(order), positions[order]
    cuts = np.flatnonzero(where.numbers[1:] != where.numbers[:-1]) + 1
    by_schema: dict[Schema, list[tuple[int, Array]]] = {}  # numbers of segments, and places of their rows
    rows: dict[int, Array] = {}
    for begin, end in pairwise([0, *cuts.tolist(), len(order)]):
        number = int(where.numbers[begin])
        if number in segments:
            rows[number] = where.rows[begin:end]
            for schema, some in segments[number].schemas(rows[number]):
                by_schema.setdefault(schema, []).append((number, begin + some))
    parts, failed = Parts(), dict[int, Exception]()
    with _Ahead(segments, rows) as asks:
        for schema, chosen in by_schema.items():
            try:
                parts += _read(segments, schema, chosen, where, positions, failed, asks)
            except MemoryError as error:
                failed.update((number, error.with_traceback(None)) for number, _ in chosen)
    return parts, failed


class _Ahead:
    """Asks the system to read `rows`, by segment, ahead, once reads have to wait for the disk.

    A thread asks, as the call blocks while the system's queue is full.
    """

    def __init__(self, segments: Mapping[int, AnySegment], rows: dict[int, Array]) -> None:
        self._segments, self._rows = segments, rows
        self._thread: threading.Thread | None = None
        self._slow = 0  # slow reads in a row, up to the last ones

    def __enter__(self) -> _Ahead:
        away = [n for n, one in self._segments.items() if isinstance(one, Segment) and one.is_away()]
        self._ask({number: self._rows.pop(number) for number in away})  # here: fetched for this thread
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def __call__(self, is_slow: bool) -> None:
        """Ask for all rows, once, when reads were slow twice in a row: some may have met a page fault."""
        self._slow = self._slow + 1 if is_slow else 0
        if self._slow == 2 and self._thread is None:
            name = "torchcache2 read-ahead"
            thread = threading.Thread(target=self._ask, args=(self._rows,), name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # there are too many threads, or the interpreter ends
                thread.start()
                self._thread = thread

    def _ask(self, rows: Mapping[int, Array]) -> None:
        for number, some in rows.items():
            with contextlib.suppress(OSError, DamagedError):  # reading will meet the same error
                self._segments[number].read_ahead(some)


def _read(
    segments: Mapping[int, AnySegment],
    schema: Schema,
    chosen: list[tuple[int, Array]],
    where: RowLocations,
    positions: Positions,
    failed: dict[int, Exception],
    waited: Callable[[bool], object],
) -> Parts:
    """The rows of one schema, by position; adds the errors of unreadable segments to `failed`."""
    asked = [positions[which] for _, which in chosen]
    wanted = np.sort(np.concatenate(asked))
    columns, jobs, bad = empty_columns(schema, len(wanted)), dict[int, Job](), list[int]()
    for (number, which), some in zip(chosen, asked, strict=True):
        segment, rows, targets = segments[number], where.rows[which], np.searchsorted(wanted, some)
        if isinstance(segment, Segment):
            sums = where.checksums[which] if segment.checksums is None else segment.checksums[rows]
            jobs[number] = Job(segment, rows, targets, sums)
        else:
            try:
                segment.fill(columns, rows, targets)
            except OSError as error:
                failed[number] = error.with_traceback(None)
                bad += targets.tolist()
    if jobs:
        numbers = list(jobs)
        errors, some_bad = read_segments(list(jobs.values()), columns, waited)
        failed.update((numbers[place], error) for place, error in errors.items())
        bad += some_bad
    result = rows_of(schema, columns, len(wanted))
    if not bad:
        return [(wanted, result)]
    good = np.delete(np.arange(len(wanted)), bad)
    return [(wanted[good], result.take(torch.from_numpy(good)))] if len(good) else []
