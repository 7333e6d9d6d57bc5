"""`Known`: what a process knows of the segments in a bucket, by namespace, under one lock."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from torchcache2.core.keys import Array, Keys, Ordinals, Positions
from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError, NewerFormatError
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.catalog import Remote
from torchcache2.tiers.bucket.listing import Listing
from torchcache2.tiers.bucket.objects import Objects

_MILLISECOND = 1_000_000  # nanoseconds


class Sought(NamedTuple):
    """Rows of a batch that the bucket has: numbers of segments, rows in them, positions in the batch."""

    segments: dict[int, Segment]
    numbers: Array
    rows: Array
    positions: Positions


class Known:
    """Where rows are. A row may have `limit` bytes. The bucket is listed at most once in `every` seconds.

    Segments that were made up to `drops()`, in nanoseconds since 1970, are left out. `begin` is called each
    time that something is sought, as the process may be a new child. Who uploads `doubts` the heads that are
    in the local folder, until the bucket has been listed.

    Attributes
    ----------
    faults : int
        Calls of the system that failed; those of the bucket are counted by `Objects`.
    closed : bool
    """

    def __init__(
        self,
        objects: Objects,
        local: CacheDirectory,
        limit: int,
        every: float,
        drops: Callable[[], int],
        begin: Callable[[], None],
        doubts: bool,
    ) -> None:
        self.lock = ProcessLock(threading.RLock)
        self.faults = 0
        self.closed = False
        self._reads = True
        self._objects = objects
        self._local = local
        self._limit = limit
        self._every = every
        self._drops = drops
        self._dropped = drops()
        self._dropped_at: dict[bytes, int] = {}  # in this process, in milliseconds since 1970
        self._begin_here = begin
        self._doubts = doubts
        self._located: dict[bytes, Remote] = {}
        self._listings: dict[bytes, Listing] = {}
        self._numbers = itertools.count()

    def sought(self, keys: Keys) -> Sought:
        """Where those of the keys are that the bucket has.

        It is asked what it has if some are missing, and once by each process with `doubts`, if that is no
        worker.
        """
        with self.lock():
            located, ordinals = self._ordinals(keys)
            if located is None:
                return _taken(located, ordinals)
            listing = self._listing(keys.namespace)
            # Heads of an earlier run may be those of another bucket, or of one that was emptied since.
            is_sure = listing.was_had or not self._doubts or get_worker_info() is not None
            if is_sure and (ordinals >= 0).all():
                return _taken(located, ordinals)
            if listing.is_quiet():
                return _taken(located, ordinals)
            known, since = located.known, located.since
        try:
            changes = listing.look(known, since)  # without the lock, as this may take seconds
        except NewerFormatError as error:
            self.fault(error, self._objects.bucket.url)
            changes = None
        with self.lock():
            if changes is not None and not self.closed:
                self._remote(keys.namespace).update(changes)
            return _taken(*self._ordinals(keys))

    def look_again(self, namespace: bytes) -> None:
        """Look for heads that other processes have written at the next call."""
        with self.lock():
            if (located := self._located.get(namespace)) is not None:
                located.look_again()

    def unopened(self, namespace: bytes) -> list[Exception]:
        """Why segments of a namespace cannot be opened."""
        with self.lock():
            located = self._located.get(namespace)
            return [] if located is None else list(located.unopened.values())

    def drop(self, namespace: bytes) -> None:
        """Never look at segments again that were made up to now."""
        with self.lock():
            self._dropped_at[namespace] = time.time_ns() // _MILLISECOND
            self._located.pop(namespace, None)

    def forget(self, namespace: bytes, gone: Iterable[int], damaged: Mapping[int, Iterable[int]]) -> None:
        """Never read rows again that are damaged, nor segments that are gone, unless a listing has them."""
        with self.lock():
            if (located := self._located.get(namespace)) is not None:
                located.lose(list(gone))
                for number, rows in damaged.items():
                    located.damaged.update(number << 32 | row for row in rows)

    def close(self) -> None:
        """From now on nothing is found."""
        with self.lock():
            self.closed = True
            self._located.clear()
            self._listings.clear()

    def count(self, namespace: bytes | None = None) -> int:
        """How many rows of a namespace, or all, the bucket has and the local folder lacks."""
        with self.lock():
            some = [one for name, one in self._located.items() if namespace in (None, name)]
            return sum(located.count() for located in some)

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that the bucket has and the local folder lacks."""
        with self.lock():
            every = [segment for one in self._located.values() for segment in one.stored.values()]
            return sum(segment.nbytes for segment in every)

    def fault(self, error: Exception, path: str) -> None:
        """Respond to an error of this machine; those of the bucket are counted where they are met."""
        tell = self._objects.tell
        if isinstance(error, NewerFormatError):
            self._reads = False
            tell("newer", "%s has a later format: nothing there is read. Upgrade torchcache2", path)
        elif isinstance(error, DamagedError):
            self._objects.corrupt += 1
            tell("head", "%s is damaged (%s): it is fetched again", path, str(error))
        else:
            self.faults += 1
            # The error is logged as text: a log record that refers to it would keep memory alive.
            tell("fault", "rows of %s are computed again: %s", path, repr(error))

    def _ordinals(self, keys: Keys) -> tuple[Remote | None, Ordinals]:
        """What is known of the namespace, or None, and the ordinal of each key, or -1; with the lock held."""
        self._begin()
        if self._reads and not self.closed and len(keys):
            try:
                located = self._remote(keys.namespace)
                ordinals = located.places.find(keys.words)
                if (ordinals < 0).any() and located.look():
                    ordinals = located.places.find(keys.words)  # looking may have moved every key
            except BaseException:
                self._located.pop(keys.namespace, None)  # it may be half changed
                raise
            if self._reads:  # looking may have shown a later format
                return located, ordinals
        return None, np.full(len(keys), -1)

    def _begin(self) -> None:
        self._begin_here()
        if self.lock.was_torn():  # another thread of the parent was changing these when it forked
            self._located, self._listings = {}, {}
        if self._dropped != (drops := self._drops()):
            self._dropped = drops
            self._located = {}

    def _remote(self, namespace: bytes) -> Remote:
        if namespace not in self._located:
            since = max(self._dropped_at.get(namespace, 0), self._dropped // _MILLISECOND)
            self._located[namespace] = Remote(
                namespace, self._local, self._numbers, self._limit, since, self.fault
            )
        return self._located[namespace]

    def _listing(self, namespace: bytes) -> Listing:
        if namespace not in self._listings:
            self._listings[namespace] = Listing(
                self._objects, self._local, namespace, self._limit, self._every
            )
        return self._listings[namespace]


def _taken(located: Remote | None, ordinals: Ordinals) -> Sought:
    positions = np.flatnonzero(ordinals >= 0)
    if located is None or len(positions) == 0:
        return Sought({}, ordinals[:0], ordinals[:0], positions[:0])
    numbers, rows = located.places.where(ordinals[positions])
    if located.damaged:
        good = ~np.isin(numbers << 32 | rows, list(located.damaged))
        numbers, rows, positions = numbers[good], rows[good], positions[good]
    segments = {n: one for n in set(numbers.tolist()) if isinstance(one := located.segments[n], Segment)}
    return Sought(segments, numbers, rows, positions)
