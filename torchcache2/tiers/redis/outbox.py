"""`Outbox`: the rows of one tier that wait in this process to be sent, and the thread that sends them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from torchcache2.core.keys import Array, Flags, Keys, Positions
from torchcache2.core.process import ProcessLock, holds
from torchcache2.tiers.base import Signals
from torchcache2.tiers.disk.catalog import AnySegment
from torchcache2.tiers.disk.places import Places
from torchcache2.tiers.pace import Pace
from torchcache2.tiers.redis.lease import Lease
from torchcache2.tiers.redis.leases import Leases
from torchcache2.tiers.unwritten import OwnRows, Pending
from torchcache2.tiers.writer import Writer


class Outbox:
    """Rows can be found until they are sent. A forked child begins with none: its parent sends them.

    ``send(pending, is_dropped)`` sends rows, and says whether any were kept; see `Sender`. `queue` bytes may
    wait, or what is sent in `most_seconds()`. Rows are sent when there are `buffer` of them, or after `delay`
    seconds. The claims of `leases` are given up when the rows are sent.
    """

    def __init__(
        self,
        send: Callable[[Pending, Callable[[], bool]], bool],
        leases: Leases | None,
        signals: Signals,
        *,
        queue: int,
        buffer: int,
        delay: float,
        most_seconds: Callable[[], float | None] | None,
        at_exit: Callable[[], None],
    ) -> None:
        self.closed = False
        self._send, self._leases, self._signals = send, leases, signals
        self._queue, self._buffer, self._delay, self._at_exit = queue, buffer, delay, at_exit
        self._most_seconds = most_seconds
        self._lock = ProcessLock(threading.RLock)
        self._numbers = itertools.count()
        self._dropped = signals.drops()
        self._waiting = _Waiting()
        self._claimed: dict[int, list[Lease]] = {}  # of the rows of each `Pending`
        self._last_writer: Writer | None = None

    def has(self, keys: Keys) -> Flags:
        """Whether the row of each key waits."""
        with self._lock():
            self._begin()
            return self._waiting.has(keys)

    def find(self, keys: Keys) -> tuple[dict[int, AnySegment], Array, Array, Positions]:
        """Where rows are that wait, as `torchcache2.tiers.disk.reading.read_rows` takes it."""
        with self._lock():
            self._begin()
            return self._waiting.find(keys)

    def keep(self, keys: Keys, own: OwnRows) -> int:
        """Have rows of distinct keys wait unless they do; returns how many were added, when there is room."""
        # This comes before the lock: the garbage collector may flush in a thread that holds the lock of the
        # leases, and then waits for ours. If an interrupt comes here, the leases are given up soon.
        claimed = [] if self._leases is None else self._leases.hand_over(keys)
        with self._lock():
            writer = self._begin()
            absent = np.flatnonzero(~self._waiting.has(keys))
            if self.closed or len(absent) == 0:
                return 0
            try:
                if len(absent) < len(keys):
                    keys, own = keys.take(absent), own.take(absent)
                pending = writer.open(keys.namespace, None, self._numbers)
                self._claimed.setdefault(pending.number, []).extend(claimed)
                before = pending.nbytes
                self._waiting.add(pending, keys, own)
                writer.added(pending, None, pending.nbytes - before, is_urgent=bool(claimed))
            except BaseException:
                self._forget_all(keys.namespace)  # tables may be half changed
                raise
        writer.wait_for_room()
        return len(keys)

    def drop(self, namespace: bytes) -> None:
        """Forget the rows of a namespace; those that are being sent have been when this returns."""
        with self._lock():
            writer = self._begin()
            gone = self._forget_all(namespace)
        writer.wait_for(gone)

    def flush(self) -> None:
        """Return when everything that waits now is sent."""
        with self._lock():
            writer = self._begin()
        writer.flush()

    def close(self) -> None:
        """End the thread; what waits is not sent any more."""
        with self._lock():
            writer = self._begin()
            self.closed = True
        writer.end()

    def wake(self) -> None:
        """Have the thread renew leases, now and from time to time."""
        with self._lock():
            writer = self._begin()
        writer.beat_now()

    def is_busy_here(self) -> bool:
        """Whether this thread is at work in here, and the garbage collector calls from there."""
        writer = self._last_writer
        return (writer is not None and writer.writes_here()) or holds(self._lock())

    def _begin(self) -> Writer:
        """The writer of this process, made if there is none, as after a fork; with the lock held."""
        writer = self._last_writer
        if writer is None or writer.pid != os.getpid():
            self._lock.was_torn()
            self._waiting, self._claimed = _Waiting(), {}
            self._last_writer = writer = self._make_writer()
        if self._dropped != (drops := self._signals.drops()):
            self._dropped = drops
            for namespace in self._waiting.namespaces:
                self._forget_all(namespace)
        return writer

    def _make_writer(self) -> Writer:
        more: dict[str, Any] = {} if self._leases is None else {"beat": self._leases.beat}
        pace = Pace(
            target=max(1, self._queue // 8),
            limit=self._queue,
            delay=self._delay,
            longest_delay=self._delay,  # a server has nothing against many small pieces
            most_seconds=None if self._most_seconds is None else self._most_seconds(),
            rows=self._buffer,
        )
        return Writer(
            self._lock(),
            self._write,
            self._forget,
            pace,
            seals=self._signals.seals,
            at_exit=self._at_exit,
            **more,
        )

    def _write(self, pending: Pending) -> bool:
        """Send rows; the writer deals with interrupts."""

        def is_dropped() -> bool:
            with self._lock():
                self._begin()  # another process may have dropped rows
                return pending.dropped

        kept = self._send(pending, is_dropped)
        self._forget(pending)
        return kept

    def _forget(self, pending: Pending) -> None:
        """Rows are on the servers now, or lost: have them looked for there, and give up their claims."""
        with self._lock():
            self._waiting.remove(pending)
            claimed = self._claimed.pop(pending.number, [])
        if claimed and self._leases is not None:
            self._leases.end(claimed)

    def _forget_all(self, namespace: bytes) -> list[Pending]:
        """Forget the rows of a namespace, and return what is being sent; with the lock held."""
        self._waiting.drop(namespace)
        gone = [] if self._last_writer is None else self._last_writer.drop(namespace)
        for pending in gone:
            self._claimed.pop(pending.number, None)
        return gone


class _Waiting:
    """Where the rows that wait are, by namespace. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[bytes, Places] = {}
        self._pending: dict[bytes, dict[int, AnySegment]] = {}

    @property
    def namespaces(self) -> list[bytes]:
        """Those of which rows wait."""
        return list(self._pending)

    def has(self, keys: Keys) -> Flags:
        """Whether the row of each key waits."""
        places = self._places.get(keys.namespace)
        return np.zeros(len(keys), bool) if places is None else places.find(keys.words) >= 0

    def find(self, keys: Keys) -> tuple[dict[int, AnySegment], Array, Array, Positions]:
        """Where rows are that wait, as `torchcache2.tiers.disk.reading.read_rows` takes it."""
        places = self._places.get(keys.namespace)
        ordinals = np.full(len(keys), -1) if places is None else places.find(keys.words)
        positions = np.flatnonzero(ordinals >= 0)
        if places is None or len(positions) == 0:
            return {}, positions, positions, positions
        numbers, rows = places.where(ordinals[positions])
        pending = self._pending[keys.namespace]
        return {number: pending[number] for number in set(numbers.tolist())}, numbers, rows, positions

    def add(self, pending: Pending, keys: Keys, own: OwnRows) -> None:
        """Add a batch of distinct keys that do not wait yet."""
        places = self._places.setdefault(keys.namespace, Places())
        self._pending.setdefault(keys.namespace, {})[pending.number] = pending
        places.add(keys.data, pending.number, pending.add(keys, own))

    def remove(self, pending: Pending) -> None:
        """Forget rows that do not wait any more."""
        others = self._pending.get(pending.namespace, {})
        if others.pop(pending.number, None) is None:
            return
        if others:
            self._places[pending.namespace].remove([pending.number])
        else:
            self.drop(pending.namespace)

    def drop(self, namespace: bytes) -> None:
        """Forget the rows of a namespace."""
        self._pending.pop(namespace, None)
        self._places.pop(namespace, None)
