"""`Ahead`: a loader that reads the rows of its next batches while earlier ones are used.

The loop's own thread gets batches from the loader: loaders are made for one thread, and draw random numbers
in order. A call of the cached module then schedules reads for the next batches, under its own modes of torch,
which are part of keys and differ between threads. Another thread makes the keys, and reads the rows into a
`Room`, which all look-ups of the budget search first. Rows keep their keys, so a wrong guess, such as after a
change of weights, only costs the time of reading.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache2.core.keys import Keys, Positions
from torchcache2.core.logs import logger
from torchcache2.core.memory import CUDA, Runtime
from torchcache2.core.process import ProcessLock, before_pools_end
from torchcache2.core.rows import Parts, Rows

_MOST_UNUSED = 4  # consecutive unused batches, besides those read together, after which to stop
_LOOK_EVERY = 1.0  # seconds between checks that the thread is alive

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
KeysOf = Callable[[tuple[Any, ...], Mapping[str, Any]], Callable[[], Keys]]  # returns what makes its keys
Read = Callable[[Keys, "Room", "_Batch"], None]


class _Batch:
    """A batch of the loader: the arguments of its call, and whether its rows have been read."""

    def __init__(self, content: Any, arguments: Arguments) -> None:
        self.content, self.arguments = content, arguments
        self.is_read: threading.Event | None = None  # None: no read is scheduled
        self.is_over = False


class Room:
    """Rows of coming batches, by key. Thread-safe.

    A look-up of a whole batch gets its rows without a copy. On a GPU, rows are on their way to the call's
    device, on a stream of their own, beside the steps before it.
    """

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self._lock = ProcessLock()
        self._batches: dict[_Batch, tuple[Keys, Callable[[], Parts]]] = {}
        self._used: set[_Batch] = set()
        self._runtime = runtime

    def put(self, batch: _Batch, keys: Keys, parts: Parts, device: torch.device) -> None:
        """Keep the rows of a batch, for a call on `device`, until the batch is over."""
        arrived: Callable[[], Parts] = functools.partial(list, parts)
        if self._runtime.has_streams(device):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # the call copies them then
                sent = [(positions, rows.sent(device, self._runtime)) for positions, rows in parts]
                arrived = functools.partial(_arrived, sent)
        with self._lock():
            if parts and not batch.is_over:
                self._batches[batch] = keys, arrived

    def get(self, keys: Keys, *, whole: bool) -> Parts:
        """Rows of these keys from one batch; with `whole`, only from a batch of exactly these keys."""
        with self._lock():
            for batch, (brought, arrived) in self._batches.items():
                if brought.namespace != keys.namespace:
                    continue
                if not whole and (found := _among(keys, brought, arrived())):
                    self._used.add(batch)
                    return found
                if whole and np.array_equal(brought.data, keys.data):
                    del self._batches[batch]
                    return arrived()
        return []

    def drop(self, namespace: bytes) -> None:
        """Forget the rows of a namespace."""
        with self._lock():
            self._batches = {b: one for b, one in self._batches.items() if one[0].namespace != namespace}

    def end(self, batch: _Batch) -> bool:
        """Forget the rows of a finished batch; returns whether it had rows that no look-up used."""
        with self._lock():
            batch.is_over = True
            was_used = batch in self._used
            self._used.discard(batch)
            return self._batches.pop(batch, None) is not None and not was_used


def _arrived(sent: Sequence[tuple[Positions, Callable[[], Rows]]]) -> Parts:
    return [(positions, rows()) for positions, rows in sent]


def _among(keys: Keys, brought: Keys, parts: Parts) -> Parts:
    """Copies of a batch's rows for these keys; the batch may be larger, or in another order."""
    found = []
    for where, rows in parts:
        words = brought.words[where]
        order = np.argsort(words[:, 0])
        nearest = np.searchsorted(words[:, 0], keys.words[:, 0], sorter=order).clip(max=len(order) - 1)
        at = order[nearest]
        positions = np.flatnonzero((words[at] == keys.words).all(axis=1))
        if len(positions):
            found.append((positions, rows.take(torch.from_numpy(at[positions]))))
    return found


class Loop:
    """One loop over an `Ahead`: its unused batches, and the thread that reads their rows."""

    def __init__(self, tell: Callable[..., None], name: str) -> None:
        self.room = Room()
        self.batches: deque[_Batch] = deque()
        self._tell, self._name = tell, name
        self._current: _Batch | None = None
        self._unused = self._most_waiting = 0
        self._is_stopped = False
        self._lock = ProcessLock()
        self._thread: threading.Thread | None = None
        # Reentrant: the garbage collector may end a loop at any point.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def bring(self, keys_of: KeysOf, read: Read) -> None:
        """Schedule reads of the next batches' rows, under this thread's modes of torch."""
        if self._is_stopped:
            return
        with self._lock():
            for batch in [one for one in [*self.batches] if one.is_read is None]:
                try:
                    make = keys_of(*batch.arguments)
                except Exception as error:
                    self._stop(f"the arguments of a batch cannot be put in keys: {error}")
                    return
                if not self._has_thread():
                    return
                batch.is_read = threading.Event()
                self._tasks.put(functools.partial(_read, batch, self.room, make, read))

    def next(self) -> Any:
        """The next batch, once its scheduled read has finished."""
        self._most_waiting = max(self._most_waiting, len(self.batches))  # one change wastes as many
        batch = self._current = self.batches.popleft()
        if batch.is_read is not None and self._thread is not None:
            while not batch.is_read.wait(_LOOK_EVERY) and self._thread.is_alive():  # none in a fork
                pass
        return batch.content

    def passed(self) -> None:
        """Forget the last batch."""
        if (batch := self._current) is None:
            return
        self._current = None
        if self.room.end(batch):
            self._unused += 1
            if self._unused == _MOST_UNUSED + self._most_waiting:
                self._stop(f"no call has used the last {self._unused} batches that were read")
        elif batch.is_read is not None:
            self._unused = 0

    def end(self) -> None:
        """End the thread. Takes no lock, as a finalizer may call it in any thread, at any point."""
        for batch in [*self.batches, *([self._current] if self._current else [])]:
            batch.is_over = True
        self._tasks.put(None)

    def _stop(self, why: str) -> None:
        self._is_stopped = True
        advice = "inputs= of ahead must return the forward's arguments for a batch"
        self._tell("ahead", "%s: nothing is read ahead any more, as %s; %s", self._name, why, advice)

    def _has_thread(self) -> bool:
        """Whether the thread lives; starts it if there was none."""
        if self._thread is None:
            # No daemon: exit would stop a daemon inside torch's code, which may abort the process.
            thread = threading.Thread(target=_work, args=(self._tasks,), name="torchcache2 ahead")
            try:
                thread.start()
            except RuntimeError:  # at exit, or with too many threads
                return False
            self._thread = thread
            before_pools_end(self.end)
        return self._thread.is_alive()


def _read(batch: _Batch, room: Room, make: Callable[[], Keys], read: Read) -> None:
    assert batch.is_read is not None
    try:
        if not batch.is_over:
            read(make(), room, batch)
    except Exception as error:  # the call will raise it, too
        logger.debug("a batch is not read ahead: %r", error)
    finally:
        batch.is_read.set()


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        task = None  # keep no reference to the batch while waiting


class Asker(NamedTuple):
    """A cache whose module is called with each batch.

    Attributes
    ----------
    arguments : callable
        The arguments of its calls for a batch.
    begin, end : callable
        Start a `Loop` known to its calls, and end it.
    """

    arguments: Callable[[Any], Arguments]
    begin: Callable[[], Loop]
    end: Callable[[Loop], None]


class Ahead:
    """The batches of a loader, unchanged and in order; see `ModuleCache.ahead`.

    Attributes of the loader are found here, too, such as its `sampler`.
    """

    loader: Iterable[Any]
    batches: int
    askers: Sequence[Asker]

    def __init__(self, loader: Iterable[Any], batches: int, askers: Sequence[Asker]) -> None:
        self.loader, self.batches, self.askers = loader, batches, askers
        if isinstance(loader, Ahead):  # of another cache: both read ahead for the same batches
            self.loader, self.batches = loader.loader, max(batches, loader.batches)
            self.askers = [*loader.askers, *askers]

    def __iter__(self) -> Iterator[Any]:
        pulled, failure, is_done, is_last = iter(self.loader), None, False, False
        loops = [asker.begin() for asker in self.askers]  # after the loader has forked its workers
        held = loops[0].batches
        try:
            while held or not is_done:
                try:
                    # After their last batch, Accelerate's loaders reset state that the last step still needs.
                    while not is_done and len(held) <= (0 if is_last else self.batches):
                        batch = next(pulled)
                        is_last = bool(getattr(self.loader, "end_of_dataloader", False))
                        asked = [asker.arguments(batch) for asker in self.askers]
                        for loop, arguments in zip(loops, asked, strict=True):
                            loop.batches.append(_Batch(batch, arguments))
                except StopIteration:
                    is_done = True
                except Exception as error:  # batches before it come first
                    is_done, failure = True, error
                if held:
                    (batch, *_) = [loop.next() for loop in loops]
                    if is_last:  # must refer to the batch used now
                        vars(self.loader)["end_of_dataloader"] = not held
                    yield batch
                    for loop in loops:
                        loop.passed()
            if failure is not None:
                raise failure
        finally:
            failure = None  # it refers to this frame
            for asker, loop in zip(self.askers, loops, strict=True):
                asker.end(loop)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy without attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)
