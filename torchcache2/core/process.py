"""The process: its rank, locks that survive a fork, numbers that forked children share, and exit handlers."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # it registers before `before_pools_end`, which so comes first
import mmap
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import torch
from torch.utils.data import get_worker_info

from torchcache2.core.private import register_before_pools_end

T = TypeVar("T")

# Ranks.


class Place(NamedTuple):
    """The rank of this process in its job, and the number of ranks."""

    rank: int
    world_size: int


def place() -> Place:
    """From `torch.distributed` or, if that is not initialised, from RANK and WORLD_SIZE."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world_size = _number("RANK", -1), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:  # not in the group, or inconsistent variables
        rank, world_size = 0, 1
    return Place(rank, world_size)


def has_ranks() -> bool:
    """Whether this process is one of several ranks, as far as is known now."""
    distributed = torch.distributed
    return (
        _number("LOCAL_WORLD_SIZE", 1) > 1
        or ("LOCAL_RANK" in os.environ and _number("WORLD_SIZE", 1) > 1)  # all that Lightning sets
        or (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
    )


def ray_job() -> tuple[str, ...]:
    """The Ray cluster and job of this process, be it driver, task or actor; empty if there is none.

    Only a process that has imported Ray itself is asked. Ray's processes are not ranks: they have no number,
    and nothing tells how many there are.
    """
    ray: Any = sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized():
            context = ray.get_runtime_context()
            return context.gcs_address, context.get_job_id()
    except Exception:  # another library of this name, or Ray is being imported or shut down
        pass
    return ()


def has_peers() -> bool:
    """Whether this process is one of several ranks, or belongs to a Ray job."""
    return has_ranks() or bool(ray_job())


def ranks_here() -> int:
    """How many ranks this machine has; if unknown, how many there are in all."""
    return max(1, _number("LOCAL_WORLD_SIZE", place().world_size))


def workers() -> int:
    """How many workers its `DataLoader` has, in one of these; else 1."""
    worker = get_worker_info()
    return 1 if worker is None else worker.num_workers


def ranks_on_each() -> int | None:
    """How many ranks this machine has, according to the launcher; None if unknown."""
    return _number("LOCAL_WORLD_SIZE", 0) or None


def node_number() -> int:
    """The number of this machine in the job, from 0 on; 0 if unknown."""
    return _number("GROUP_RANK", place().rank // ranks_here())


def ranks_of_each(rank: int, world_size: int) -> int | None:
    """How many ranks each machine has, if ranks are numbered machine by machine.

    None if that is unknown, or does not fit this rank.
    """
    here = _number("LOCAL_WORLD_SIZE", 1 if world_size == 1 else 0)
    if (
        here == 0
        or world_size % here != 0
        or _number("GROUP_WORLD_SIZE", world_size // here) * here != world_size
    ):
        return None
    machine, local = divmod(rank, here)
    is_there = _number("GROUP_RANK", machine) == machine and _number("LOCAL_RANK", local) == local
    return here if is_there else None


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


# Locks that work in forked processes. A process may fork while another thread holds a lock: a `DataLoader`
# with workers forks at each epoch. The child inherits the lock, but not the thread that would release it.


def holds(lock: Any) -> bool:
    """Whether this thread holds a lock."""
    try:
        threading.Condition(lock).notify()  # raises if not
    except RuntimeError:
        return False
    return True


class ProcessLock:
    """A lock for each process, used as ``with lock(): …``.

    An interrupt cannot leave it locked, as ``with`` enters the lock itself.

    Parameters
    ----------
    make : callable
        `threading.Lock` or `threading.RLock`.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._locks = {os.getpid(): make()}

    def __call__(self) -> Any:
        """The lock of this process."""
        try:
            return self._locks[os.getpid()]
        except KeyError:  # `setdefault` is atomic, so that all threads of a child get the same lock
            return self._locks.setdefault(os.getpid(), self._make())

    def if_free(self, function: Callable[[], object]) -> None:
        """Call a function under the lock, or do nothing if the lock is held: never waits.

        For work that the garbage collector may start in a thread that holds the lock, which the holder then
        does later.
        """
        lock = self()
        # With a plain `acquire`, an interrupt before `try` would leave the lock locked. No interrupt comes
        # between `map` and the loop's body.
        for is_free in map(lock.acquire, (False,)):
            if is_free:
                try:
                    function()
                finally:
                    lock.release()

    def was_torn(self) -> bool:
        """Whether the parent held its lock at the fork: protected state may then be half changed.

        True at most once in a child. Call with the lock.
        """
        if len(self._locks) == 1:
            return False
        pid = os.getpid()
        others = [lock for owner, lock in self._locks.items() if owner != pid]
        self._locks = {pid: self._locks[pid]}
        return not all(lock.acquire(blocking=False) for lock in others)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLock, (self._make,)


class computed_once(Generic[T]):  # noqa: N801
    """A property that is computed at its first use; the object's ``__dict__`` keeps the value.

    Before Python 3.12, `functools.cached_property` has a lock: a child forked while another thread holds it
    would wait for ever.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> computed_once[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> T | computed_once[T]:
        if owner is None:
            return self
        value = vars(owner)[self._name] = self._compute(owner)
        return value


class Forked:
    """Calls methods in each forked child, while their objects live: one hook, as Python removes none."""

    _methods: ClassVar[set[weakref.WeakMethod[Any]]] = set()

    @classmethod
    def add(cls, method: Callable[[], object]) -> None:
        """Call a method in the children that are forked from now on."""
        cls._methods.add(weakref.WeakMethod(method, cls._methods.discard))

    @classmethod
    def call(cls) -> None:
        """Call all of them."""
        for method in [reference() for reference in list(cls._methods)]:
            if method is not None:
                method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forked.call)


class ForkedRows:
    """Rows of numbers that a process shares with its forked children; all are 0 at first.

    Takes no lock: of two changes of a number made at once, one may be lost.

    Parameters
    ----------
    width : int
        How many numbers a row has.
    """

    ROWS = 256

    def __init__(self, width: int) -> None:
        self._width = 1 + width
        memory = memoryview(mmap.mmap(-1, 8 * self._width * self.ROWS))
        self._names, self._numbers = memory.cast("Q"), memory.cast("d")

    def row(self, name: int) -> memoryview[float]:
        """The row with a name, a number of 64 bits other than 0; if there are too many, one of its own."""
        first = name % self.ROWS
        for at in (*range(first, self.ROWS), *range(first)):
            start = at * self._width
            if self._names[start] in (0, name):
                self._names[start] = name
                if self._names[start] == name:  # else another process has just taken it
                    return self._numbers[start + 1 : start + self._width]
        return memoryview(bytearray(8 * self._width)).cast("d")[1:]


# The end of the process.


class AtExit:
    """Calls a function when the process ends, and keeps it alive until then.

    The function that was registered last is called first, as with `atexit`. A process of `multiprocessing`
    does not run the handlers of `atexit` but its own finalizers, the one with the highest `priority` first.

    A child of `os.fork` inherits the handlers: the function has to check in which process it is called.
    """

    def __init__(self, function: Callable[[], None], priority: int) -> None:
        self._function: Callable[[], None] | None = function
        atexit.register(function)
        self._finalizer = None
        if multiprocessing.process.parent_process() is not None:
            self._finalizer = multiprocessing.util.Finalize(None, function, exitpriority=priority)

    def call(self) -> None:
        """Call the function now, instead of at exit."""
        function = self._function
        self.cancel()
        if function is not None:
            function()

    def cancel(self) -> None:
        """Do not call the function, and drop the reference to it. Idempotent."""
        if self._function is not None:
            atexit.unregister(self._function)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._function = self._finalizer = None


def before_pools_end(method: Callable[[], None]) -> None:
    """Call a method when the main thread has ended, unless its object is gone; runs before `AtExit`.

    Afterwards, `concurrent.futures` pools accept no more work. `asyncio` resolves host names in one, so
    network clients can make no new connections in `atexit` functions.
    """
    reference: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    register_before_pools_end(call)
