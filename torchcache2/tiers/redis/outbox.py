"""`Outbox`: one process's queue of rows to be sent to servers, and the thread that sends them.

Rows are sent first in, first out: when there are enough, after a while, or at once when a process waits for
them. Look-ups find them here until they are on the servers. A forked child begins with an empty queue, as its
parent sends those rows. An interrupt in the middle of an update empties the queue.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.process import AtExit, ProcessLock, holds
from torchcache2.core.rows import Parts, Rows
from torchcache2.tiers.base import Signals
from torchcache2.tiers.unwritten import OwnRows

_EXIT_PRIORITY = 10  # above that of a temporary directory, whose deletion comes later
_BETWEEN_LOOKS = 0.2  # seconds between checks whether other processes need unsent rows
_PIECE = 4 << 20  # bytes of rows sent before waiting for replies
_FIRST = 4e5, 0.1  # assumed until measured: bytes, and seconds to send them


class Batch:
    """Rows that were put together, and whether they have been forgotten since."""

    def __init__(self, keys: Keys, own: OwnRows) -> None:
        self.keys = Keys(keys.namespace, keys.data.copy(), keys.group)  # the caller may overwrite its own
        self.own = own
        self.nbytes = own.nbytes + 16 * len(keys)
        self.since = time.monotonic()
        self.dropped = False


def pieces(batches: Sequence[Batch]) -> Iterator[list[tuple[Batch, Keys, Rows]]]:
    """The rows of batches, in pieces whose encoded values take little memory."""
    piece, size = list[tuple[Batch, Keys, Rows]](), 0
    for batch in batches:
        rows = batch.own.rows.laid_out_as(batch.own.schema)
        step = max(1, _PIECE // max(1, rows.schema.row_bytes))
        for start in range(0, len(rows), step):
            some = np.arange(start, min(len(rows), start + step))
            columns = [column[start : start + step] for column in rows.columns]
            piece.append((batch, batch.keys.take(some), Rows(rows.schema, columns, len(some))))
            size += len(some) * rows.schema.row_bytes
            if size >= _PIECE:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


class Outbox:
    """A bounded queue with look-up of its rows.

    Parameters
    ----------
    send : callable
        ``send(batches, look)`` sends the rows that are not dropped, and returns whether any were kept; it
        raises only interrupts. ``look()`` marks batches that other processes have dropped meanwhile.
    signals : Signals
        Signals between the processes of a job.
    queue : int
        Bytes that may wait.
    buffer : int
        Rows to send together.
    delay : float
        Seconds after which rows are sent, however few.
    most_seconds : callable, optional
        Returns the seconds within which the queue must be sendable; None: no limit.
    at_exit : callable
        Called when the process ends.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Batch], Callable[[], None]], bool],
        signals: Signals,
        *,
        queue: int,
        buffer: int,
        delay: float,
        most_seconds: Callable[[], float | None] | None,
        at_exit: Callable[[], None],
    ) -> None:
        self.closed = False
        self._send, self._signals, self._at_exit = send, signals, at_exit
        self._queue_bytes, self._buffer, self._delay, self._most_seconds = queue, buffer, delay, most_seconds
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may call
        self._sending = ProcessLock(threading.RLock)  # one thread sends at a time; taken before `_lock`
        self._dropped = signals.drops()
        self._pid = 0
        self._nbytes = self._count = self._sent = 0
        self._limit = queue

    def find(self, keys: Keys) -> Parts:
        """The queued rows of these keys, in fresh memory."""
        found: dict[int, tuple[Batch, list[int], list[int]]] = {}
        with self._lock():
            self._begin()
            where = self._where.get(keys.namespace)
            for position, key in enumerate(_split(keys) if where else ()):
                if (place := where.get(key)) is not None:  # type: ignore[union-attr]
                    batch, row = place
                    _, positions, rows = found.setdefault(id(batch), (batch, [], []))
                    positions.append(position)
                    rows.append(row)
        parts = []
        for batch, positions, rows in found.values():
            own = batch.own.rows.laid_out_as(batch.own.schema)
            parts.append((np.array(positions, np.int64), own.take(torch.tensor(rows))))
        return parts

    def has(self, keys: Keys) -> Flags:
        """Whether the row of each key is queued."""
        with self._lock():
            self._begin()
            where = self._where.get(keys.namespace)
            return np.array([key in where for key in _split(keys)]) if where else np.zeros(len(keys), bool)

    def keep(self, keys: Keys, own: OwnRows) -> int:
        """Queue rows under distinct keys that are not queued yet; returns how many, once there is room."""
        with self._lock():
            self._begin()
            absent = np.flatnonzero(~self.has(keys))
            if self.closed or len(absent) == 0:
                return 0
            if len(absent) < len(keys):
                keys, own = keys.take(absent), own.take(absent)
            try:
                batch = Batch(keys, own)
                self._queue.append(batch)
                self._nbytes += batch.nbytes
                self._count += len(keys)
                where = self._where.setdefault(keys.namespace, {})
                where.update((key, (batch, row)) for row, key in enumerate(_split(keys)))
            except BaseException:
                self._forget_all()  # the queue may be half updated
                self._nbytes = sum(batch.nbytes for batch in self._queue)
                self._count = sum(len(batch.keys) for batch in self._queue)
                raise
            self._wake()
        while self._nbytes > self._limit and not self.closed:
            self._send_some()
        return len(keys)

    def after_rows(self, function: Callable[[], None]) -> None:
        """Send the queue now, and call a function once its rows are on the servers or given up."""
        with self._lock():
            self._begin()
            if self._queue:
                self._after.append((self._sent + len(self._queue), function))
                self._wake()
                return
        function()

    def drop(self, namespace: bytes) -> None:
        """Forget the rows of a namespace; waits for those being sent."""
        with self._lock():
            self._begin()
            self._forget(namespace)
        with self._sending():
            pass

    def flush(self) -> None:
        """Send all queued rows, in this thread too, and return when they are sent."""
        with self._lock():
            self._begin()
            last = self._sent + len(self._queue)
        while True:
            with self._sending():
                if self._sent >= last:
                    return
                self._send_some()

    def close(self) -> None:
        """End the thread; waiting rows are no longer sent."""
        with self._lock():
            self._begin()
            self.closed = True
            self._changed.notify_all()
            thread = self._thread
        if self._exit is not None:
            self._exit.cancel()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()

    def is_busy_here(self) -> bool:
        """Whether the garbage collector called us from this thread's own work here."""
        return holds(self._sending()) or holds(self._lock())

    @property
    def nbytes(self) -> int:
        """Bytes queued or being sent."""
        return self._nbytes if self._pid == os.getpid() else 0

    def _begin(self) -> None:
        """Start empty in a forked process, and forget what others have dropped; call with the lock."""
        if self._pid != os.getpid():
            self._changed = threading.Condition(self._lock())
            self._queue: deque[Batch] = deque()
            self._where: dict[bytes, dict[bytes, tuple[Batch, int]]] = {}  # batch and row of each key
            self._nbytes = self._count = 0
            self._sent = 0  # batches sent so far
            self._after: list[tuple[int, Callable[[], None]]] = []
            self._thread: threading.Thread | None = None
            self._exit: AtExit | None = None
            self._seals = self._signals.seals()
            self._written, self._took = _FIRST  # bytes sent recently, and seconds taken
            self._limit = self._queue_bytes
            self._adjust()
            self._pid = os.getpid()
        if self._dropped != (drops := self._signals.drops()):
            self._dropped = drops
            self._forget_all()

    def _adjust(self) -> None:
        """Limit the queue to what can be sent within `most_seconds`."""
        seconds = None if self._most_seconds is None else self._most_seconds()
        if seconds is not None:
            self._limit = min(self._queue_bytes, int(seconds * self._written / max(self._took, 1e-9)))

    def _forget(self, namespace: bytes) -> None:
        self._where.pop(namespace, None)
        for batch in self._queue:
            batch.dropped |= batch.keys.namespace == namespace

    def _forget_all(self) -> None:
        for namespace in {batch.keys.namespace for batch in self._queue}:
            self._forget(namespace)

    def _wake(self) -> None:
        """Wake the thread, and start it if there is none; call with the lock."""
        self._changed.notify_all()
        if self._thread is not None or self.closed:
            return
        if self._exit is None:
            self._exit = AtExit(self._at_exit, _EXIT_PRIORITY)
        self._thread = threading.Thread(target=self._work, name="torchcache2 outbox", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # at interpreter exit, or with too many threads, `flush` sends
            self._thread = None

    def _work(self) -> None:
        while True:
            with self._lock():
                while (left := self._seconds_left()) > 0:
                    if self.closed:
                        return
                    self._changed.wait(None if left == math.inf else left)
            self._send_some()

    def _seconds_left(self) -> float:
        """Seconds until the thread must send or check something; call with the lock."""
        if not self._queue:
            return 0.0 if self._after else math.inf
        is_enough = self._count >= self._buffer or self._nbytes >= min(
            self._queue_bytes // 8, self._limit // 4
        )
        if is_enough or self._after:
            return 0.0
        left = self._queue[0].since + self._delay - time.monotonic()
        if self._signals.seals is not int:
            left = 0.0 if self._signals.seals() != self._seals else min(left, _BETWEEN_LOOKS)
        return left

    def _send_some(self) -> None:
        """Send the oldest rows, up to a piece, and call the functions that waited for them."""
        with self._sending():
            with self._lock():
                self._begin()
                size, batches = 0, list[Batch]()
                for batch in self._queue:
                    if size < _PIECE:
                        batches.append(batch)
                        size += batch.nbytes
                self._seals = self._signals.seals()
            start = time.monotonic()
            is_kept, due = False, list[tuple[int, Callable[[], None]]]()
            try:
                is_kept = self._send(batches, self._look)
            finally:
                with self._lock():
                    for batch in batches:
                        self._remove(batch)
                    self._sent += len(batches)
                    if is_kept:
                        self._written = self._written / 2 + size
                        self._took = self._took / 2 + time.monotonic() - start
                        self._adjust()
                    due = [after for after in self._after if after[0] <= self._sent]
                    self._after = [after for after in self._after if after[0] > self._sent]
            for _, function in due:
                function()

    def _look(self) -> None:
        with self._lock():
            self._begin()  # another process may have dropped rows

    def _remove(self, batch: Batch) -> None:
        """Remove the oldest batch, now found on the servers; call with the lock."""
        self._queue.popleft()
        self._nbytes -= batch.nbytes
        self._count -= len(batch.keys)
        where = self._where.get(batch.keys.namespace, {})
        for key in _split(batch.keys):
            if where.get(key, (None,))[0] is batch:
                del where[key]


def _split(keys: Keys) -> Iterator[bytes]:
    data = keys.data.tobytes()
    return (data[at : at + 16] for at in range(0, len(data), 16))
