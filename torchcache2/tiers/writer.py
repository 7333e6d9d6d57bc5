"""`Writer`: a bounded queue of unwritten segments, and the one thread that writes them.

Rows are added to an open segment of their kind. It is written when it is large enough or some seconds old,
when somebody flushes, and at exit. `flush` also writes in the thread that calls it, since no thread can be
started at exit.

Each process has its own queue. A forked child starts with an empty one: the parent writes the rows that
waited when it forked.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

from torchcache2.core.process import AtExit, holds
from torchcache2.tiers.unwritten import Pending

_SHARE = 0.02  # rows wait for this share of the time that rows of their namespace have waited before
_LONGEST_DELAY = 600.0  # seconds
_FIRST = 4e5, 0.1  # bytes and the seconds that writing them takes, before that was measured
_EXIT_PRIORITY = 10  # higher than that of a temporary directory, which is deleted afterwards
_BETWEEN_LOOKS = 0.2  # seconds, while rows wait, between looks whether others need them
Kind = tuple[bytes, Hashable]


class Pace:
    """How many rows are written together, how long they wait for that, and how many may wait.

    A job that computes slowly for hours would leave thousands of segments if each were written after some
    seconds. So rows wait longer the longer the rows of their namespace have waited before, by a fixed share
    of that time. The number of segments then grows with the logarithm of the time, and a process that is
    killed loses a small share of its rows. Its writer holds its lock when it calls this.

    A segment is large enough from `target` bytes on, and `limit` bytes may wait; both are
    less where writing that many would take more than `most_seconds`. A segment is written after `delay`
    seconds, however small it is; later ones wait longer, up to ten minutes.

    Attributes
    ----------
    target, limit : int
        Bytes.
    waited : dict of bytes to float
        Seconds that rows of each namespace have waited until they were written because of their age.
    """

    def __init__(
        self,
        *,
        target: int,
        limit: int,
        delay: float,
        most_seconds: float | None = None,
    ) -> None:
        self.target = self._target = target
        self.limit = self._limit = limit
        self.waited: dict[bytes, float] = {}
        self._delay = delay
        self._most_seconds = most_seconds
        self._written, self._took = _FIRST  # bytes of the last segments, and seconds
        self._adjust()

    def is_enough(self, pending: Pending) -> bool:
        """Whether a segment is large enough to be written now."""
        return pending.nbytes >= self.target

    def delay_of(self, namespace: bytes) -> float:
        """Seconds that rows of a namespace may wait."""
        return max(self._delay, min(_LONGEST_DELAY, _SHARE * self.waited.get(namespace, 0.0)))

    def was_old(self, namespace: bytes) -> None:
        """Count a segment that is written because of its age."""
        self.waited[namespace] = self.waited.get(namespace, 0.0) + self.delay_of(namespace)

    def measured(self, size: int, seconds: float) -> None:
        """Count a segment that was written; half of the weight is that of the last one."""
        self._written = self._written / 2 + size
        self._took = self._took / 2 + seconds
        self._adjust()

    def _adjust(self) -> None:
        """Let so many bytes wait as are written in time."""
        if self._most_seconds is not None:
            self.limit = min(self._limit, int(self._most_seconds * self._written / max(self._took, 1e-9)))
            self.target = max(1, min(self._target, self.limit // 4))


class Writer:
    """The queue and thread of one tier in one process; methods say whether the caller holds the tier's lock.

    The `pace` says when a segment is written. All are when the number that `seals()` returns changes.
    ``write(pending)`` is called without the lock, says whether the rows are written, and raises nothing but
    interrupts. If an interrupt stops it, ``forget(pending)`` is called, as nobody will write these rows.
    """

    def __init__(
        self,
        lock: Any,
        write: Callable[[Pending], bool],
        forget: Callable[[Pending], None],
        pace: Pace,
        *,
        at_exit: Callable[[], None],
        seals: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pace = pace
        self.pid = os.getpid()
        self._lock = lock
        # The condition is for waiting only: an interrupt may stop its ``with`` half way, and leave the lock
        # locked. The ``with`` of the lock itself cannot be interrupted so.
        self._changed = threading.Condition(lock)
        self._write = write
        self._forget = forget
        self._at_exit = at_exit
        self._clock = clock
        self._seals, self._sealed = seals, seals()
        self._wakes = math.inf  # when the thread will look for old segments; inf if it does not wait
        self._most_bytes = 0  # an upper bound of the bytes that wait: written ones count until the next count
        self._open: dict[Kind, Pending] = {}
        self._ready: deque[Pending] = deque()
        self._writing: list[Pending] = []
        self._thread: threading.Thread | None = None
        self._exit: AtExit | None = None
        self._ending = False

    @property
    def nbytes(self) -> int:
        """Bytes of rows that wait or are being written; with the lock held."""
        return sum(pending.nbytes for pending in self.all())

    def all(self) -> list[Pending]:
        """Every segment that is not written yet; with the lock held."""
        writing = [pending for pending in self._writing if not pending.done]
        return [*self._open.values(), *self._ready, *writing]

    def open(self, namespace: bytes, kind: Hashable, numbers: Iterator[int]) -> Pending:
        """The segment that takes rows of a kind; with the lock held."""
        pending = self._open.get((namespace, kind))
        if pending is None or pending.dropped:
            pending = self._open[namespace, kind] = Pending(namespace, next(numbers), self._clock())
            if pending.since + self.pace.delay_of(namespace) < self._wakes:
                self._changed.notify_all()
        return pending

    def added(self, pending: Pending, kind: Hashable, size: int) -> None:
        """Count rows of `size` bytes that were added to a segment; with the lock held."""
        self._most_bytes += size
        if self.pace.is_enough(pending):
            self._ready.append(self._open.pop((pending.namespace, kind)))
            self._changed.notify_all()
        self._start()

    def again(self, pending: Pending, after: float) -> bool:
        """Have a segment that `write` could not write wait on, and try it in some seconds, or at a flush.

        Returns False if so much waits that there is no room for it. Without the lock.
        """
        with self._lock:
            if pending.dropped or self._ending or self.nbytes > self.pace.limit // 2:
                return False
            pending.since = self._clock() + after
            self._open[pending.namespace, pending] = pending
            return True

    def drop(self, namespace: bytes) -> list[Pending]:
        """Forget the segments of a namespace; with the lock held. One that is being written is marked."""
        gone = [pending for pending in self.all() if pending.namespace == namespace]
        for pending in gone:
            pending.dropped = True
        self._open = {kind: p for kind, p in self._open.items() if not p.dropped}
        self._ready = deque(pending for pending in self._ready if not pending.dropped)
        self._changed.notify_all()
        return gone

    def wait_for_room(self) -> None:
        """Return when no more than `limit` bytes wait; without the lock."""
        with self._lock:
            if self._most_bytes <= self.pace.limit:
                return
            while self._is_full() and not self._ending and self._is_alive():
                if not self._ready and not self._writing:
                    self._close_all()
                self._wait()
            if self._ending or not self._is_full():
                return
        self.flush()  # the thread is gone, so this one writes

    def flush(self) -> None:
        """Return when everything that waits now is written; without the lock. This thread writes, too."""
        with self._lock:
            self._close_all()
            waiting = self.all()
        while any(pending in waiting for pending in list(self._ready)) and self._write_next():
            pass
        self.wait_for(waiting)

    def wait_for(self, segments: Collection[Pending]) -> None:
        """Return when the thread is through with those segments that it is writing; without the lock."""
        with self._lock:
            while self._is_alive() and any(p in segments and not p.done for p in self._writing):
                self._wait()

    def writes_here(self) -> bool:
        """Whether the caller is the thread that writes, or in the middle of writing a segment itself."""
        here = threading.get_ident()
        if self._thread is threading.current_thread():
            return True
        return any(pending.thread == here and not pending.done for pending in list(self._writing))

    def end(self) -> None:
        """End the thread; without the lock. Nothing may be added afterwards."""
        with self._lock:
            self._ending = True
            self._changed.notify_all()
        if self._exit is not None:
            self._exit.cancel()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._is_alive():
            thread.join()

    def _wait(self) -> None:
        """Return when something has changed, or after a second; holds the lock again, even if interrupted."""
        try:
            self._changed.wait(1.0)
        finally:
            if not holds(self._lock):  # the interrupt came right after the lock was released
                self._lock.acquire()

    def _is_full(self) -> bool:
        """Whether more than `limit` bytes wait; with the lock held."""
        self._most_bytes = self.nbytes
        return self._most_bytes > self.pace.limit

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        """Start the thread if there is none; with the lock held."""
        if self._thread is not None or self._ending:
            return
        if self._exit is None:
            self._exit = AtExit(self._at_exit, _EXIT_PRIORITY)
        self._thread = threading.Thread(target=self._work, name="torchcache2 writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or there are too many threads: `flush` writes
            self._thread = None

    def _work(self) -> None:
        while self._wait_for_work():
            self._write_next()

    def _wait_for_work(self) -> bool:
        """Wait until a segment is ready, or old enough; False if the thread has to end."""
        with self._lock:
            while not self._ready:
                if self._ending:
                    return False
                left = self.close_old()
                if self._open:
                    left = min(left, self._close_if_asked())
                if not self._ready:
                    self._wakes = self._clock() + left
                    self._changed.wait(None if left == math.inf else left)
                    self._wakes = math.inf
            return True

    def _close_if_asked(self) -> float:
        """Move all segments to those that are ready if others need them; seconds until the next look."""
        if self._seals is int:
            return math.inf
        if (seals := self._seals()) != self._sealed:
            self._sealed = seals
            self._close_all()
        return _BETWEEN_LOOKS

    def close_old(self) -> float:
        """Move segments that are old enough to those that are ready; with the lock held.

        Returns the seconds until the next one is old enough.
        """
        now, least = self._clock(), math.inf
        for kind, pending in list(self._open.items()):
            delay = self.pace.delay_of(pending.namespace)
            if pending.since + delay > now:
                least = min(least, pending.since + delay - now)
                continue
            self._ready.append(self._open.pop(kind))
            self.pace.was_old(pending.namespace)
        return least

    def _write_next(self) -> bool:
        """Write one segment that is ready; False if there is none."""
        pending = None
        try:
            with self._lock:
                if not self._ready:
                    return False
                pending = self._ready[0]
                pending.thread, pending.done = threading.get_ident(), False
                self._writing.append(pending)
                self._ready.popleft()
            start = self._clock()
            if self._write(pending):
                seconds = self._clock() - start
                with self._lock:
                    self.pace.measured(pending.nbytes, seconds)
        except BaseException:
            if pending is not None:
                self._forget(pending)
            raise
        finally:
            if pending is not None:
                pending.done = True  # this comes first, as the rest may be interrupted
            with self._lock:
                self._writing = [other for other in self._writing if not other.done]
                self._changed.notify_all()
        return True

    def _close_all(self) -> None:
        # Both change in one statement: an interrupt between two would leave segments in both, or in none.
        self._ready, self._open = deque([*self._ready, *self._open.values()]), {}
        self._changed.notify_all()
