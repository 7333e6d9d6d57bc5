"""`Tally`: the counts of all processes that use one dataset.

The counts lie in shared memory, one row per process. A process takes a row by locking a byte of the file; the
next process to take that row adds to its numbers. The lock belongs to this process's own opening of the file,
and ends with the process. Without shared memory, each process has its own counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from torchcache2.core.process import ProcessLock
from torchcache2.engine.stats import CacheStats
from torchcache2.tiers.shared.region import Region, is_alive, start_time

COUNTS = (
    "memory_hits",  # first: `add_hit`
    "disk_hits",
    "remote_hits",
    "misses",
    "random",
    "refused",
    "verified",
    "mismatched",
    "nanoseconds",
    "spent",
)
_PLACES = {name: place for place, name in enumerate(COUNTS)}
_SPENT = _PLACES["spent"]
_RANDOM, _DROPS, _ASKED, _TOLD = range(4)  # words of the first row; told are warnings, from there on
_WAITS = len(COUNTS)  # since when samples have waited in a process, in ns; then its pid and start time
_PROCESSES = 1024
_LONGEST = 30.0  # seconds that `ask` waits
_PATIENCE = 10.0  # seconds that a drop waits for a process that writes samples: it may be suspended
_WORDS = 16  # of 8 bytes: a row is two cache lines, so no two processes share one


class Tally:
    """The counts named in `COUNTS`, and flags for all processes.

    Safe under threads and fork. A pickle is a handle: it finds the counts as long as the pickling process
    lives; otherwise it begins new ones, and `is_new`.

    Attributes
    ----------
    bypasses : Counter of str
        Samples of which a map has made what was not kept, by reason; in this process, which runs it.
    """

    is_new = True

    def __init__(self) -> None:
        self._begin(_region())

    def _begin(self, region: Region | None) -> None:
        self._region, self.bypasses = region, Counter[str]()
        size = (_PROCESSES + 1) * _WORDS
        words = np.zeros(size, np.int64) if region is None else region.array("<i8", 0, size)
        self._table = words.reshape(_PROCESSES + 1, _WORDS)
        self._numbers = words.data  # reading one is several times faster than from an array
        # The owner is the lock of the process whose row it is.
        self._lock, self._row, self._owner = ProcessLock(), 0, object()

    def __getstate__(self) -> Any:
        return () if self._region is None else tuple(self._region.place)

    def __setstate__(self, place: Any) -> None:
        region = Region.open(*place) if place else None
        self._begin(_region() if region is None else region)
        self.is_new = region is None

    def add(self, **counts: int) -> None:
        """Add to this process's counts."""
        with self._lock():
            first, numbers = self._own_row() * _WORDS, self._numbers
            for name, count in counts.items():
                numbers[first + _PLACES[name]] += count

    def add_hit(self, spent: int) -> None:
        """Count one hit in memory, and the nanoseconds that it took."""
        lock, numbers = self._lock(), self._numbers
        with lock:
            first = (self._row if lock is self._owner else self._own_row()) * _WORDS
            numbers[first] += 1
            numbers[first + _SPENT] += spent

    def total(self) -> dict[str, int]:
        """The counts of all processes."""
        return dict(zip(COUNTS, self._table[1:].sum(axis=0).tolist(), strict=False))

    @property
    def is_random(self) -> bool:
        """Whether a process has found that the source draws random numbers."""
        return self._numbers[_RANDOM] != 0

    def found_random(self) -> None:
        """Tell all processes that the source draws random numbers."""
        self._table[0, _RANDOM] = 1

    def is_first(self, what: str) -> bool:
        """Whether no process has asked this before, so that one warns for all."""
        number = xxh3_64_intdigest(what.encode()) >> 1 | 1
        told = self._table[0, _TOLD:]
        if number in told:
            return False
        told[np.flatnonzero(told == 0)[:1]] = number  # if no place is free, several may warn
        return True

    @property
    def drops(self) -> int:
        """When `dropped` was called last, in nanoseconds since 1970; 0: never."""
        return self._numbers[_DROPS]

    @property
    def asked(self) -> int:
        """Changes when a process needs the samples that wait in others: they are then written at once."""
        return self._numbers[_ASKED]

    def waits(self, since: float) -> None:
        """Set since when samples have waited in this process, in seconds of `time.monotonic`; 0: none do."""
        with self._lock():
            self._numbers[self._own_row() * _WORDS + _WAITS] = int(since * 1e9)

    def ask(self) -> None:
        """Ask other processes to write the samples that wait in them, and wait until they have."""
        now = self._table[0, _ASKED] = time.monotonic_ns()
        with self._lock():
            own = self._own_row()
        while time.monotonic_ns() < now + _LONGEST * 1e9:
            others = np.delete(self._table, [0, own], axis=0)[:, _WAITS:]
            waiting = others[(others[:, 0] > 0) & (others[:, 0] <= now)]
            if not any(is_alive(pid, start) for _, pid, start, *_ in waiting.tolist()):
                break
            time.sleep(0.01)

    def dropped(self) -> None:
        """Make all processes forget their own samples, such as queued ones; waits while any is publishing."""
        self._table[0, _DROPS] = max(time.time_ns(), self.drops + 1)
        with self._gate(is_alone=True):
            pass

    def publishing(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a process checks `drops` and then writes samples where others find them.

        Otherwise samples might be dropped between the two, and be found until they are deleted again.
        """
        return self._gate(is_alone=False)

    @contextlib.contextmanager
    def _gate(self, *, is_alone: bool) -> Iterator[None]:
        """Hold a lock of the file, exclusively if `is_alone`; without it if it is not free for too long."""
        with contextlib.ExitStack() as stack:
            if self._region is not None:
                import fcntl  # exists wherever memory can be shared

                kind, until = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH, time.monotonic() + _PATIENCE
                with contextlib.suppress(OSError):  # no free descriptors
                    own = self._opened_anew(self._region)
                    stack.callback(os.close, own)
                    while time.monotonic() < until:
                        with contextlib.suppress(BlockingIOError):
                            fcntl.flock(own, kind | fcntl.LOCK_NB)
                            # Closing does not unlock the file while a child forked meanwhile has it open.
                            stack.callback(fcntl.flock, own, fcntl.LOCK_UN)
                            break
                        time.sleep(0.001)
            yield

    @staticmethod
    def _opened_anew(region: Region) -> int:
        """A new descriptor of the file: a forked child shares the locks of its parent's descriptors."""
        return os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def _own_row(self) -> int:
        if self._lock() is not self._owner:
            self._row, self._owner, pid = self._free_row(), self._lock(), os.getpid()
            self._table[self._row, _WAITS : _WAITS + 3] = 0, pid, start_time(pid)
        return self._row

    def _free_row(self) -> int:
        if self._region is None:
            return 1
        import fcntl  # exists wherever memory can be shared

        first = os.getpid() % _PROCESSES
        try:
            own = self._opened_anew(self._region)
            weakref.finalize(self, os.close, own)
            for row in (*range(first, _PROCESSES), *range(first)):
                lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0)
                with contextlib.suppress(BlockingIOError, PermissionError):  # another process has it
                    fcntl.fcntl(own, fcntl.F_OFD_SETLK, lock)
                    return int(row + 1)
        except OSError:  # no free descriptors, or no such locks
            pass
        return first + 1


def _region() -> Region | None:
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None
    try:
        return Region.create((_PROCESSES + 1) * _WORDS * 8)
    except OSError:
        return None


@dataclasses.dataclass(frozen=True)
class DatasetStats(CacheStats):
    """Statistics of a dataset in all processes since it was made; counts are samples.

    Attributes
    ----------
    memory_hits, disk_hits, remote_hits : int
        Samples found in memory, on disk (or in its bucket), and on servers; `hits` is their sum.
    misses : int
        Samples that were loaded and offered to the cache. Loaded samples that may not or cannot be stored are
        `bypasses`, by reason: ``"random"``, ``"refused"``, and those of `map` in this process.
    """

    __module__ = "torchcache2"

    memory_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0

    def _lines(self) -> list[tuple[str, str]]:
        (name, hits), *others = super()._lines()
        where = f"{self.memory_hits:,} in memory"
        where += f", {self.disk_hits:,} on disk" if self.disk_hits else ""
        where += f", {self.remote_hits:,} remote" if self.remote_hits else ""
        return [(name, f"{hits}: {where}" if self.disk_hits or self.remote_hits else hits), *others]

    @classmethod
    def of(cls, tally: Tally, tiers: Mapping[str, int]) -> DatasetStats:
        """From a `Tally` and the counts of the tiers."""
        counts = tally.total()
        where = {name: counts[name] for name in ("memory_hits", "disk_hits", "remote_hits")}
        hits = sum(where.values())
        seconds, spent = counts["nanoseconds"] / 1e9, counts["spent"] / 1e9
        loaded = counts["misses"]
        mean = seconds / loaded if loaded else 0.0
        return cls(
            hits=hits,
            misses=loaded,
            bypasses=dict(tally.bypasses + Counter({name: counts[name] for name in ("random", "refused")})),
            **where,
            verified=counts["verified"],
            mismatched=counts["mismatched"],
            seconds_computed=seconds,
            seconds_saved=None if hits and not loaded else hits * mean - spent,
            **tiers,
        )
