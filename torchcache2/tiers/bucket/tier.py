"""`RemoteTier`: rows that a bucket has.

It is behind the disk tier of the local folder, and keeps nothing itself: rows reach the bucket as segments of
that folder. Which segments the bucket has is told by their heads there, so that most processes never ask.

Safe under threads, under fork, and for any number of processes with one local folder.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from torchcache2.core.keys import Array, Flags, Keys, Positions
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.places import Bucket
from torchcache2.core.process import AtExit, ProcessLock, holds
from torchcache2.core.rows import Parts, Rows, merged
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError, NewerFormatError
from torchcache2.files.filesystem import Descriptors
from torchcache2.files.segment import Segment
from torchcache2.tiers.base import Found, Signals, Tier, TierStats
from torchcache2.tiers.bucket.heads import Listing, Remote
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder
from torchcache2.tiers.disk.index import RowLocations
from torchcache2.tiers.disk.reading import read_rows

_EXIT_PRIORITY = 5  # lower than that of the disk tier's writer, higher than that of a temporary folder
_LEAST_LIMIT = 1 << 30
_MILLISECOND = 1_000_000  # nanoseconds


class _Sought(NamedTuple):
    """Rows of a batch that the bucket has: segments, where rows are in them, positions in the batch."""

    segments: dict[int, Segment]
    where: RowLocations
    positions: Positions

    def at(self, chosen: Array | slice) -> tuple[RowLocations, Positions]:
        """The last two of some rows."""
        return self.where.at(chosen), self.positions[chosen]


class RemoteTier(Tier):
    """Rows in a bucket.

    Parameters
    ----------
    bucket : Bucket
    local : CacheDirectory
        The folder of the disk tier in front.
    limit : int
        Bytes that a row may have; at least 1 GiB.
    budget : int
        Bytes that the folder may have. Where it is full, or with 0, what is read is not kept there.
    signals : Signals, optional
        What the processes of a job tell each other.
    objects : Objects, optional
        What this process asks of the bucket; the tier closes it.
    mirror : callable, optional
        Makes what brings segments of the folder to the bucket, and back; see `Mirror`.
    every : float
        Seconds after which the bucket may be asked again which segments it has, if rows are missing.
    closed : callable, optional
        Called at the end of `close`, such as to delete a temporary folder.
    """

    name = "remote"
    is_lasting = True

    def __init__(
        self,
        bucket: Bucket,
        local: CacheDirectory,
        limit: int = _LEAST_LIMIT,
        *,
        budget: int = 0,
        signals: Signals | None = None,
        objects: Objects | None = None,
        mirror: Callable[[Objects], Mirror] | None = None,
        every: float = 60.0,
        closed: Callable[[], None] | None = None,
    ) -> None:
        signals = Signals() if signals is None else signals
        self.bucket = bucket
        self.objects = Objects(bucket) if objects is None else objects
        if signals.tell is not None:
            self.objects.tell = signals.tell
        self._local, self._limit, self._every = local, max(limit, _LEAST_LIMIT), every
        self._folder = BucketFolder(self.objects, local, budget)
        self._files = Descriptors(self._folder)
        self._on_closed, self._pid = closed, os.getpid()
        self._mirror = None if mirror is None else mirror(self.objects)
        self._lock = ProcessLock(threading.RLock)
        self._faults = 0  # calls of the system that failed; those of the bucket are counted by `Objects`
        self._is_closed, self._reads = False, True
        self._drops, self._dropped = signals.drops, signals.drops()
        self._dropped_at: dict[bytes, int] = {}  # in this process, in milliseconds since 1970
        self._located: dict[bytes, Remote] = {}
        self._listings: dict[bytes, Listing] = {}
        self._numbers = itertools.count()
        self._exit = AtExit(self._close_at_exit, _EXIT_PRIORITY)
        self._begin()

    @property
    def cause(self) -> Exception | None:
        """Why the bucket is left out now; None if it is not."""
        return self.objects.cause

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that the bucket has, in fresh memory."""
        try:
            sought = self._sought(keys)
            return Found(self._read(keys.namespace, sought) if len(sought.positions) else [])
        except Exception as error:  # such as a lack of memory; a fault is a miss
            self._fault(error, self.bucket.url)
            return Found([])
        finally:
            self._folder.done()
            self._files.clear()  # a file that is deleted takes room as long as it is open

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in the bucket, as far as its segments were seen."""
        here = np.zeros(len(keys), bool)
        try:
            here[self._sought(keys).positions] = True
        except Exception as error:
            self._fault(error, self.bucket.url)
        return here

    def look_again(self, namespace: bytes) -> None:
        """Look for heads that other processes have written at the next call."""
        with self._lock():
            if (located := self._located.get(namespace)) is not None:
                located.look_again()

    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep nothing: rows reach the bucket through the local folder."""
        return 0

    def drop(self, namespace: bytes) -> None:
        """Leave out what the bucket has now; nothing there is deleted."""
        if self.is_busy_here():
            self.later(self.drop, namespace)  # the garbage collector calls this while tables are changed
            return
        with self._lock():
            self._dropped_at[namespace] = time.time_ns() // _MILLISECOND
            self._located.pop(namespace, None)

    def flush(self) -> None:
        """Return when what was put into the local folder is in the bucket, or cannot be."""
        if self._mirror is not None:
            self._mirror.flush()

    def close(self) -> None:
        """Flush, and close the connections. From then on nothing is found."""
        if self._is_closed:
            return
        if self.is_busy_here():
            self.later(self.close)
            return
        if self._mirror is not None:
            self._mirror.close()
        with self._lock():
            self._is_closed = True
            self._located.clear()
            self._listings.clear()
        self._exit.cancel()
        self.objects.close()
        if self._on_closed is not None:
            self._on_closed()

    def stats(self) -> TierStats:
        """What the bucket has and the local folder lacks, of the namespaces that were asked for."""
        with self._lock():
            every = list(self._located.values())
            rows = sum(one.count() for one in every)
            nbytes = sum(segment.nbytes for one in every for segment in one.stored.values())
        return TierStats(rows, nbytes, 0, self.objects.corrupt, self._faults + self.objects.faults)

    def count(self, namespace: bytes) -> int:
        """How many rows of a namespace the bucket has and the local folder lacks."""
        with self._lock():
            located = self._located.get(namespace)
            return 0 if located is None else located.count()

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of this tier."""
        return super().counts() | {"bytes_up": self.objects.bytes_up, "bytes_down": self.objects.bytes_down}

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Why segments of the bucket cannot be opened, and why it cannot be asked now."""
        with self._lock():
            located = self._located.get(namespace)
            unopened = [] if located is None else list(located.unopened.values())
        return unopened + ([] if self.cause is None else [self.cause])

    def is_busy_here(self) -> bool:
        """Whether this thread is at work in this tier, and the garbage collector calls from there."""
        mirrors = self._mirror is not None and self._mirror.is_busy_here()
        return mirrors or holds(self._lock())

    # Where rows are.

    def _sought(self, keys: Keys) -> _Sought:
        """Where those of the keys are that the bucket has.

        It is asked what it has if some are missing; and once by each process that uploads, unless that is a
        worker: heads of an earlier run may be those of another bucket, or of one that was emptied since.
        """
        with self._lock():
            located, where = self._where(keys)
            if located is None:
                return _taken(located, where)
            if keys.namespace not in self._listings:
                self._listings[keys.namespace] = Listing(
                    self.objects, self._local, keys.namespace, self._limit, self._every
                )
            listing = self._listings[keys.namespace]
            doubts = self._mirror is not None and self._mirror.uploads and get_worker_info() is None
            is_sure = (listing.was_had or not doubts) and (where.numbers >= 0).all()
            if is_sure or listing.is_quiet():
                return _taken(located, where)
            known, since = located.known, located.since
        changes = None
        try:
            with self._folder.reading():  # who lists is about to read
                changes = listing.look(known, since)  # without the lock, as this may take seconds
        except NewerFormatError as error:
            self._fault(error, self.bucket.url)
        with self._lock():
            if changes is not None and not self._is_closed:
                self._remote(keys.namespace).update(changes)
            return _taken(*self._where(keys))

    def _where(self, keys: Keys) -> tuple[Remote | None, RowLocations]:
        """What is known of the namespace, or None, and where each key is; with the lock held."""
        self._begin()
        if self._reads and not self._is_closed and len(keys):
            try:
                located = self._remote(keys.namespace)
                where = located.find(keys.words)
                if (where.numbers < 0).any() and located.look():
                    where = located.find(keys.words)
            except BaseException:
                self._located.pop(keys.namespace, None)  # it may be half changed
                raise
            if self._reads:  # looking may have shown a later format
                return located, where
        nowhere = np.full(len(keys), -1)
        return None, RowLocations(nowhere, nowhere, nowhere)

    def _begin(self) -> None:
        if self._mirror is not None:
            self._mirror.begin()  # this may be a new child
        if self._lock.was_torn():  # another thread of the parent was changing these when it forked
            self._located, self._listings = {}, {}
        if self._dropped != (drops := self._drops()):
            self._dropped = drops
            self._located = {}

    def _remote(self, namespace: bytes) -> Remote:
        if namespace not in self._located:
            since = max(self._dropped_at.get(namespace, 0), self._dropped // _MILLISECOND)
            places = self._local, self._folder, self._files
            self._located[namespace] = Remote(
                namespace, *places, self._numbers, self._limit, since, self._fault
            )
        return self._located[namespace]

    # What is read.

    def _read(self, namespace: bytes, sought: _Sought) -> Parts:
        """The rows that are sought. Damaged ones are left out, and not asked for again."""
        for number, segment in sought.segments.items():
            segment.read_ahead(sought.where.rows[sought.where.numbers == number])
        self._folder.fetch()
        parts, failed = read_rows(sought.segments, *sought.at(slice(None)))
        bad: dict[int, list[int]] = {}
        for number, error in failed.items():
            if isinstance(error, MemoryError):
                self._fault(error, self.bucket.url)
            elif isinstance(error, DamagedError):
                some, bad[number] = self._read_again(number, sought)
                parts = merged([*parts, *some])
                if bad[number]:
                    self.objects.corrupt += len(bad[number])
                    where = f"{self.bucket.url}/{namespace.hex()}/{_name(sought.segments[number])}"
                    message = "%s is damaged (%s): such rows are not used, and it is left alone"
                    self.objects.tell("corrupt", message, where, str(error))
        gone = [number for number, error in failed.items() if isinstance(error, FileNotFoundError)]
        if gone or any(bad.values()):
            with self._lock():
                if (located := self._located.get(namespace)) is not None:
                    located.lose(gone, bad)
        return parts

    def _read_again(self, number: int, sought: _Sought) -> tuple[Parts, list[int]]:
        """The good rows of a segment with damage, and the numbers of the others.

        All are fetched once more: the object may be good, and the line or what was here not.
        """
        segment, parts, bad = sought.segments[number], Parts(), set[int]()
        self._folder.doubt(segment.path)
        self._files.forget(segment.path)
        which = np.flatnonzero(sought.where.numbers == number)
        segment.read_ahead(sought.where.rows[which])
        for i in which.tolist():
            found, failed = read_rows({number: segment}, *sought.at(slice(i, i + 1)))
            parts += found
            if any(isinstance(error, DamagedError) for error in failed.values()):
                bad.add(int(sought.where.rows[i]))
        if bad:
            self._folder.doubt(segment.path)
        return parts, sorted(bad)

    def _fault(self, error: Exception, path: str) -> None:
        """Respond to an error of this machine; those of the bucket are counted where they are met."""
        tell = self.objects.tell
        if isinstance(error, NewerFormatError):
            self._reads = False
            tell("newer", "%s has a later format: nothing there is read. Upgrade torchcache2", path)
        elif isinstance(error, DamagedError):
            self.objects.corrupt += 1
            tell("head", "%s is damaged (%s): it is fetched again", path, str(error))
        else:
            self._faults += 1
            # The error is logged as text: a log record that refers to it would keep memory alive.
            tell("fault", "rows of %s are computed again: %s", path, repr(error))

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child has the handlers of its parent
            self.close()


def _name(segment: Segment) -> str:
    return os.path.basename(segment.path)


def _taken(located: Remote | None, where: RowLocations) -> _Sought:
    positions = np.flatnonzero(where.numbers >= 0)
    if located is None or len(positions) == 0:
        return _Sought({}, where.at(slice(0)), positions[:0])
    if located.damaged:
        rows = where.numbers[positions] << 32 | where.rows[positions]
        positions = positions[~np.isin(rows, list(located.damaged))]
    where = where.at(positions)
    numbers = set(where.numbers.tolist())
    segments = {n: one for n in numbers if isinstance(one := located.segments[n], Segment)}
    return _Sought(segments, where, positions)
