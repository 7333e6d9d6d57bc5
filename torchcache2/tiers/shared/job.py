"""`Job`: the processes that share memory, and how they find each other.

A job has a small file in a folder that only its user can enter. The processes lock this file, and it lists
those that have the job's `Board` open: pid, start time, descriptor, inode. A joining process opens the board
through any living one; if none lives, it makes a new board. The next write removes dead processes from the
list. A joining process also deletes the files of dead jobs.

`NodeLock` is a `flock` on this file, which the system releases when a process is killed. Waiting ends after a
while, because the holder may be stopped. A forked child inherits the open file, and with it the parent's
lock, which would then outlive a killed parent: so the child opens the file anew at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from torchcache2.core.keys import Array
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.tiers.meeting import machine, own_folder
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.region import Region, SharingError, is_alive, start_time

_NONE = (1 << 31) - 1  # a number that no open file has
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds
_FOLDER = "torchcache2_ranks_{}"  # in the folder for temporary files
_MOST_LOOKED_AT = 100  # files of other jobs
_AT_EXIT = 1.0  # seconds to wait for the lock when the process ends


class LockTimeoutError(Exception):
    """Another process has held the lock for too long, or the system has no locks."""


class NodeLock:
    """``with lock(): …``; `LockTimeoutError` after a long wait. One thread of a process at a time.

    Parameters
    ----------
    file : Descriptor
        The file to lock, opened by this process itself.

    Attributes
    ----------
    patience : float
        Seconds to wait without progress of the holder.
    progress : callable
        Returns a number that the holder increments during long work.
    """

    def __init__(self, file: Descriptor) -> None:
        self.patience = 10.0
        self.progress: Callable[[], int] = int
        self._file, self._pid, self._fs = file, os.getpid(), FileSystem()
        own = weakref.ref(self)

        def reopen() -> None:
            lock = own()
            if lock is not None:
                lock._reopen()

        os.register_at_fork(after_in_child=reopen)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock; a holder must not ask for it again."""
        try:
            self._acquire()
            yield
        finally:
            self._fs.unlock(self._file)  # does nothing if not acquired

    def _acquire(self) -> None:
        if os.getpid() != self._pid:  # forked without Python's fork hooks
            self._reopen()
        deadline, pause, seen = time.monotonic() + self.patience, _FIRST_PAUSE, self.progress()
        while not self._fs.lock(self._file, exclusive=True):
            if time.monotonic() > deadline:
                if self.progress() == seen:
                    raise LockTimeoutError(f"the lock of the ranks was not free for {self.patience:g} s")
                deadline, seen = time.monotonic() + self.patience, self.progress()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _reopen(self) -> None:
        inherited, self._file, self._pid = self._file, Descriptor(_NONE), os.getpid()
        with contextlib.suppress(OSError):  # then locking fails, but the parent's lock stays untouched
            self._file = Descriptor(os.open(f"/proc/self/fd/{inherited.number}", os.O_RDWR | os.O_CLOEXEC))


class Job:
    """The membership of this process in a job, until `leave`.

    Raises
    ------
    SharingError
        If the system cannot share memory in this way, or others hold the job's lock.

    Attributes
    ----------
    board : Board
        What the processes of the job tell each other.
    lock : NodeLock
        Protects writes to the shared memory.
    pid : int
        The process that has joined; a child forked from it must `rejoin`.
    slot : int
        The number of this process among the members on the board.
    """

    def __init__(self, name: bytes, budget: int, folder: str | None = None) -> None:
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            raise SharingError("memory can be shared on Linux only, where /proc is mounted")
        self._fs, self._name, self._budget = FileSystem(), name, budget
        path = os.path.join(tempfile.gettempdir(), _FOLDER.format(os.getuid()))
        self._folder = path if folder is None else folder
        self._path = os.path.join(self._folder, f"{machine()}-{name.hex()}")
        try:
            if folder is None:
                own_folder(path)
            self._join()
        except (OSError, LockTimeoutError) as error:
            raise SharingError(f"the ranks cannot meet in {self._folder}: {error}") from None

    def rejoin(self) -> None:
        """Join as a process of its own, after a fork."""
        self.pid, self.start = os.getpid(), start_time(os.getpid())
        with self.lock():
            self._enter()

    def leave(self) -> None:
        """Leave the job; the last process deletes the file."""
        if os.getpid() != self.pid:
            return
        try:
            with self.lock():
                self.board.leave(self.slot)
                others = self._listed()
                others = others[(others[:, 0] != self.pid) | (others[:, 2] != self.board.region.descriptor)]
                if len(others):
                    self._write(others)
                else:
                    os.unlink(self._path)
        except LockTimeoutError:  # others free what it had, and ignore its line in the file
            self.board.strike_out(self.slot)

    def _join(self) -> None:
        self._remove_leftovers()
        self.pid, self.start = os.getpid(), start_time(os.getpid())
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = Descriptor(os.open(self._path, flags, 0o600))
            self.lock = NodeLock(file)
            with self.lock():
                if not self._fs.same(file, self._path):
                    continue  # the last one has just left
                inode = os.fstat(file.number).st_ino
                regions = (self._opened(line, inode) for line in self._listed().tolist())
                region = next(filter(None, regions), None)
                self.board = Board(region, self._name, inode, self._budget)
                self.lock.progress = functools.partial(getattr, self.board, "progress")
                self._enter()
                return

    def _enter(self) -> None:
        region = self.board.region
        # If we cannot open our own file through /proc, other processes cannot either.
        if self.start == 0 or Region.open(self.pid, region.descriptor, region.inode) is None:
            raise SharingError("/proc does not show the files of this user's processes")
        self.slot = self.board.enter(self.pid, self.start)
        mine = np.array([[self.pid, self.start, region.descriptor, region.inode]])
        self._write(np.concatenate([self._listed(), mine]))

    def _opened(self, line: list[int], lock: int) -> Region | None:
        pid, start, descriptor, inode = line
        region = Region.open(pid, descriptor, inode) if is_alive(pid, start) else None
        return region if region is not None and Board.is_one(region, self._name, lock) else None

    def _listed(self) -> Array:
        """Pid, start time, descriptor and inode of each process that is alive."""
        with open(self._path, "rb") as file:
            content = file.read()
        lines = np.frombuffer(content[: len(content) // 32 * 32], np.int64).reshape(-1, 4)
        return lines[[is_alive(pid, start) for pid, start, *_ in lines.tolist()]]

    def _write(self, lines: Array) -> None:
        # One call, less than a page: a killed process has written all of it or nothing. Readers verify what
        # they open through it.
        with open(self._path, "r+b", buffering=0) as file:
            file.write(np.ascontiguousarray(lines).tobytes())
            file.truncate(32 * len(lines))

    def _remove_leftovers(self) -> None:
        """Delete the files of jobs that have ended without leaving."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry, _ in zip(entries, range(_MOST_LOOKED_AT), strict=False):
                if entry.path != self._path and entry.name.startswith(f"{machine()}-"):
                    with contextlib.suppress(OSError, ValueError):
                        _remove_if_dead(entry.path)


def leave_soon(job: Job) -> None:
    """Leave the job, also at the end of the process, without waiting long for the lock."""
    job.lock.patience = min(job.lock.patience, _AT_EXIT)
    with contextlib.suppress(OSError):
        job.leave()


def _remove_if_dead(path: str) -> None:
    fs, file = FileSystem(), Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    if fs.lock(file, exclusive=True):
        lines = np.frombuffer(os.read(file.number, 1 << 20), np.int64).reshape(-1, 4).tolist()
        if fs.same(file, path) and not any(is_alive(pid, start) for pid, start, *_ in lines):
            os.unlink(path)
