"""`Writer`: a bounded queue of unwritten segments, and the one thread that writes them.

Rows join the open segment of their kind. The writer writes it when it is large enough or some seconds old, at
`flush`, and at exit. `flush` also writes in the calling thread, since no thread can start at exit.

Each process has its own queue. A forked child starts with an empty one: its parent writes the rows that were
queued at the fork.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from torchcache2.core.process import AtExit, holds, ranks_here, workers
from torchcache2.tiers.base import Signals
from torchcache2.tiers.unwritten import Pending

_WORKERS_WRITE = 2.0  # seconds; a `DataLoader` kills its workers 5 seconds after their end
_LONGEST_DELAY = 600.0  # seconds
_FIRST = 4e5, 0.1  # assumed until measured: bytes, and seconds to write them
_EXIT_PRIORITY = 10  # above that of a temporary directory, whose deletion comes later
_BETWEEN_LOOKS = 0.2  # seconds between checks whether other processes need unwritten rows
_BETWEEN_PULLS = 1.0  # seconds
Kind = tuple[bytes, Hashable]


class Pace:
    """Decides how large segments get, how long rows wait to be written, and how many may wait.

    If each segment were written after some seconds, a job that computes slowly for hours would leave
    thousands. So the delay of a namespace grows by a fixed share of the time that its rows have waited so
    far. The number of segments then grows with the logarithm of time, and a killed process loses a small
    share of its rows. The writer holds its lock when it calls this.

    A segment is large enough from `target` bytes on, and up to `limit` bytes may wait; in a worker of a
    `DataLoader`, both shrink to what it can write before it is killed. A small segment is written after
    `delay` seconds, n times as many in one of n workers, or once no row has been added to it for a fifth of
    `delay`. Later ones wait longer, up to ten minutes.

    Attributes
    ----------
    target, limit : int
        Bytes.
    share : float
        Of the time that rows of a namespace have waited so far; 0: delays do not grow.
    waited, idled : dict of bytes to float
        Seconds that rows of each namespace have waited, in segments written because of their age, or because
        no more were added.
    """

    share = 0.02

    def __init__(self, *, target: int, limit: int, delay: float) -> None:
        self.target = self._target = target
        self.limit = self._limit = limit
        self.waited: dict[bytes, float] = {}
        self.idled: dict[bytes, float] = {}
        self._delay, self._idle = delay * (workers() if self.share else 1), delay / 5
        self._most_seconds = most_seconds()
        self._written, self._took = _FIRST  # bytes of the last segments, and seconds
        self._adjust()

    def is_enough(self, pending: Pending) -> bool:
        """Whether a segment is large enough to be written now."""
        return pending.nbytes >= self.target

    def left(self, pending: Pending, now: float) -> float:
        """Seconds until a small segment is to be written; counts the delay if that is now."""
        name, least = pending.namespace, math.inf
        for delays, first, since in (
            (self.idled, self._idle, pending.last),
            (self.waited, self._delay, pending.since),
        ):
            delay = max(first, min(_LONGEST_DELAY, self.share * delays.get(name, 0.0)))
            if since + delay <= now:
                delays[name] = delays.get(name, 0.0) + delay
                return 0.0
            least = min(least, since + delay - now)
        return least

    def measured(self, size: int, seconds: float) -> None:
        """Update the measured speed: each segment has twice the weight of the one before."""
        self._written = self._written / 2 + size
        self._took = self._took / 2 + seconds
        self._adjust()

    def _adjust(self) -> None:
        """Limit what waits to what can be written in time."""
        if self._most_seconds is not None:
            self.limit = min(self._limit, int(self._most_seconds * self._written / max(self._took, 1e-9)))
            self.target = max(1, min(self._target, self.limit // 4))


def most_seconds() -> float | None:
    """How long a worker may take to write its queue: all workers write at the end. None elsewhere."""
    return None if get_worker_info() is None else _WORKERS_WRITE / (workers() * ranks_here())


class Writer:
    """The queue and thread of one tier in one process; each method states who holds the tier's lock.

    The `pace` decides when to write a segment; when the number from `signals.asked()` changes, all are
    written. The thread calls `pull`, which may add rows, every second.

    The writer calls ``write(pending)`` without the lock; it returns whether the rows were written, and raises
    only interrupts. After an interrupt the writer calls ``forget(pending)``, as these rows will never be
    written.
    """

    def __init__(
        self,
        lock: Any,
        write: Callable[[Pending], bool],
        forget: Callable[[Pending], None],
        pace: Pace,
        *,
        at_exit: Callable[[], None],
        signals: Signals | None = None,
        pull: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pace = pace
        self.pid = os.getpid()
        self._lock = lock
        # Use the condition for waiting only: an interrupt inside its ``with`` may leave the lock locked. The
        # lock's own ``with`` has no such gap.
        self._changed = threading.Condition(lock)
        self._write = write
        self._forget = forget
        self._at_exit = at_exit
        self._clock = clock
        self._signals, self._pull = Signals() if signals is None else signals, pull
        self._asked, self._pulled = self._signals.asked(), -math.inf
        self._most_bytes = 0  # upper bound of waiting bytes; includes bytes written since it was computed
        self._open: dict[Kind, Pending] = {}
        self._ready: deque[Pending] = deque()
        self._writing: list[Pending] = []
        self._thread: threading.Thread | None = None
        self._exit: AtExit | None = None
        self._ending = False

    @property
    def nbytes(self) -> int:
        """Bytes of rows that are queued or being written; call with the lock."""
        return sum(pending.nbytes for pending in self.all())

    def all(self) -> list[Pending]:
        """Every segment not written yet; call with the lock."""
        writing = [pending for pending in self._writing if not pending.done]
        return [*self._open.values(), *self._ready, *writing]

    def open(self, namespace: bytes, kind: Hashable, numbers: Iterator[int]) -> Pending:
        """The open segment for rows of a kind; call with the lock."""
        pending = self._open.get((namespace, kind))
        if pending is None or pending.dropped:
            if not self.all():
                self._asked = self._signals.asked()  # before these rows: they were not meant
            pending = self._open[namespace, kind] = Pending(namespace, next(numbers), self._clock())
            self._tell()
            self._changed.notify_all()  # the thread computes anew when to wake
        return pending

    def added(self, pending: Pending, kind: Hashable, size: int) -> None:
        """Count rows of `size` bytes added to a segment; call with the lock."""
        self._most_bytes += size
        pending.last = self._clock()
        if self.pace.is_enough(pending):
            self._ready.append(self._open.pop((pending.namespace, kind)))
            self._changed.notify_all()
        self._start()

    def again(self, pending: Pending, after: float) -> bool:
        """Queue a segment again that `write` could not write, to be tried after some seconds or at a flush.

        Returns False if the queue has no room for it. Call without the lock.
        """
        with self._lock:
            if pending.dropped or self._ending or self.nbytes > self.pace.limit // 2:
                return False
            pending.since = pending.last = self._clock() + after
            self._open[pending.namespace, pending] = pending
            return True

    def drop(self, namespace: bytes) -> list[Pending]:
        """Forget a namespace's segments, and mark one that is being written; call with the lock."""
        gone = [pending for pending in self.all() if pending.namespace == namespace]
        for pending in gone:
            pending.dropped = True
        self._open = {kind: p for kind, p in self._open.items() if not p.dropped}
        self._ready = deque(pending for pending in self._ready if not pending.dropped)
        self._changed.notify_all()
        return gone

    def wait_for_room(self) -> None:
        """Block until at most `limit` bytes wait; call without the lock."""
        with self._lock:
            if self._most_bytes <= self.pace.limit:
                return
            is_here = self._thread is threading.current_thread()  # as it has pulled
            while not is_here and self._is_full() and not self._ending and self._is_alive():
                if not self._ready and not self._writing:
                    self.hurry()
                self._wait()
            if self._ending or not self._is_full():
                return
        self.flush()  # the writer thread is gone, or here

    def flush(self) -> None:
        """Block until all queued rows are written; call without the lock. The calling thread writes, too."""
        with self._lock:
            self.hurry()
            waiting = self.all()
        while any(pending in waiting for pending in list(self._ready)) and self._write_next():
            pass
        self.wait_for(waiting)

    def wait_for(self, segments: Collection[Pending]) -> None:
        """Block while the thread is writing one of these segments; call without the lock."""
        with self._lock:
            while self._is_alive() and any(p in segments and not p.done for p in self._writing):
                self._wait()

    def writes_here(self) -> bool:
        """Whether the caller is the writer thread, or is writing a segment itself."""
        here = threading.get_ident()
        if self._thread is threading.current_thread():
            return True
        return any(pending.thread == here and not pending.done for pending in list(self._writing))

    def end(self) -> None:
        """End the thread, after which no rows may be added; call without the lock."""
        with self._lock:
            self._ending = True
            self._changed.notify_all()
        if self._exit is not None:
            self._exit.cancel()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._is_alive():
            thread.join()

    def _wait(self) -> None:
        """Wait for a change, at most a second; takes the lock again even if interrupted."""
        try:
            self._changed.wait(1.0)
        finally:
            if not holds(self._lock):  # the interrupt came right after the lock was released
                self._lock.acquire()

    def _is_full(self) -> bool:
        """Whether more than `limit` bytes wait; call with the lock."""
        self._most_bytes = self.nbytes
        return self._most_bytes > self.pace.limit

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def watch(self) -> None:
        """Call `pull` every second, and `at_exit`, even if no rows are added here; call with the lock."""
        self._start()

    def _start(self) -> None:
        """Start the thread if there is none; call with the lock."""
        if self._thread is not None or self._ending:
            return
        if self._exit is None:
            self._exit = AtExit(self._at_exit, _EXIT_PRIORITY)
        self._thread = threading.Thread(target=self._work, name="torchcache2 writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # at interpreter exit, or with too many threads, `flush` writes
            self._thread = None

    def _work(self) -> None:
        while self._wait_for_work():
            if not self._write_next() and self._pull is not None:
                self._pull()
                self._pulled = self._clock()

    def _wait_for_work(self) -> bool:
        """Wait until a segment is ready or old enough, or it is time to pull; False at the end."""
        with self._lock:
            while not self._ready:
                if self._ending:
                    return False
                left = self.close_old()
                if self._open:
                    left = min(left, self._close_if_asked())
                if self._pull is not None and not self._ready:
                    left = min(left, self._pulled + _BETWEEN_PULLS - self._clock())
                    if left <= 0.0:
                        return True
                if not self._ready:
                    self._changed.wait(None if left == math.inf else left)
            return True

    def _close_if_asked(self) -> float:
        """Mark all segments ready if other processes need them; returns seconds until the next check."""
        if self._signals.asked is int:
            return math.inf
        if (asked := self._signals.asked()) != self._asked:
            self._asked = asked
            self.hurry()
        return _BETWEEN_LOOKS

    def _tell(self) -> None:
        """Tell other processes since when rows have waited here; call with the lock."""
        self._signals.waits(min((pending.since for pending in self.all()), default=0.0))

    def close_old(self) -> float:
        """Mark segments ready that are old enough; call with the lock.

        Returns the seconds until the next one is old enough.
        """
        now, least = self._clock(), math.inf
        for kind, pending in list(self._open.items()):
            if (left := self.pace.left(pending, now)) > 0.0:
                least = min(least, left)
            else:
                self._ready.append(self._open.pop(kind))
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
                pending.done = True  # first, as an interrupt may skip the rest
            with self._lock:
                self._writing = [other for other in self._writing if not other.done]
                self._tell()
                self._changed.notify_all()
        return True

    def hurry(self) -> None:
        """Have the thread write all queued rows now; call with the lock."""
        # One statement: an interrupt between two would leave segments in both, or in neither.
        self._ready, self._open = deque([*self._ready, *self._open.values()]), {}
        self._changed.notify_all()
