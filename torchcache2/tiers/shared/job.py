"""`Job`: the processes that share memory, and how they find each other.

A job has a small file in a folder that only its user can enter. The processes lock this file, and it lists
those that have the job's `Board` open: pid, start time, descriptor, inode. A joining process opens the board
through any living one; if none lives, it makes a new board. The next write removes dead processes from the
list. A joining process also deletes the files of dead jobs.

`Tables` has the namespaces that this process has open. It closes those that nothing alive in it uses when it
has too many open, when it needs room, and, at its next call, when another process needs room. When the last
process closes a namespace, its memory is freed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection

import numpy as np

from torchcache2.core.keys import Array
from torchcache2.core.sizes import size_text
from torchcache2.files.filesystem import Descriptor, FileSystem, most_open
from torchcache2.tiers.meeting import LockTimeoutError, locked, machine, own_folder, remove_leftovers
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.chunks import Space
from torchcache2.tiers.shared.region import Region, SharingError, is_alive
from torchcache2.tiers.shared.table import SharedTable

_FOLDER = "torchcache2_ranks_{}"  # in the folder for temporary files
_AT_EXIT = 1.0  # seconds to wait for the lock when the process ends
_BETWEEN_LOOKS = 1.0  # seconds between requests for room while memory is full
_MOST_OPEN = 64  # each takes two descriptors


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

    pid = slot = -1

    def __init__(self, name: bytes, budget: int, folder: str | None = None) -> None:
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            raise SharingError("memory can be shared on Linux only, where /proc is mounted")
        try:
            Region.create(Space.size(budget))  # as each namespace takes
        except OSError as error:
            raise SharingError(f"this process may not map {size_text(Space.size(budget))}: {error}") from None
        self._name, self._budget = name, budget
        path = os.path.join(tempfile.gettempdir(), _FOLDER.format(os.getuid()))
        self._folder = path if folder is None else folder
        self._path = os.path.join(self._folder, f"{machine()}-{name.hex()}")
        try:
            self._join()
        except (OSError, LockTimeoutError) as error:
            raise SharingError(f"the ranks cannot meet in {self._folder}: {error}") from None

    def rejoin(self) -> None:
        """Join as a process of its own, after a fork."""
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
        except LockTimeoutError:
            self.abandon()

    def abandon(self) -> None:
        """Leave without the lock: others free what this process had, and ignore its line in the file."""
        if os.getpid() == self.pid:
            self.board.strike_out(self.slot)
            self.pid = 0  # the slot may soon be another process's

    def _join(self) -> None:
        own_folder(self._folder)
        remove_leftovers(self._folder, f"{machine()}-", self._path, _remove_if_dead)
        with locked(self._path) as self.lock:
            inode = os.fstat(self.lock.file.number).st_ino
            regions = (Region.open(*place) for place in self._listed().tolist())
            boards = (one for one in regions if one is not None and Board.is_one(one, self._name, inode))
            self.board = Board(next(boards, None), self._name, inode, self._budget)
            self._enter()

    def _enter(self) -> None:
        place = self.board.region.place
        # If we cannot open our own file through /proc, other processes cannot either.
        if Region.open(*place) is None:
            raise SharingError("/proc does not show the files of this user's processes")
        # A child that cannot join must not act as its parent: until it is here, it has joined nothing.
        self.slot = self.board.enter(place.pid, place.start)
        self.pid = os.getpid()
        self._write(np.concatenate([self._listed(), [place]]))

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


def leave_soon(job: Job) -> None:
    """Leave the job, also at the end of the process, without waiting long for the lock."""
    job.lock.patience = min(job.lock.patience, _AT_EXIT)
    with contextlib.suppress(OSError):
        job.leave()


def _remove_if_dead(path: str) -> None:
    """Delete the file of a job that has ended without leaving."""
    fs, file = FileSystem(), Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    if fs.lock(file, exclusive=True):
        try:
            lines = np.frombuffer(os.read(file.number, 1 << 20), np.int64).reshape(-1, 4).tolist()
            if fs.same(file, path) and not any(is_alive(pid, start) for pid, start, *_ in lines):
                os.unlink(path)
        finally:
            fs.unlock(file)  # a child forked meanwhile has the open file, too


class Tables:
    """The namespaces that this process has open. One thread at a time.

    Parameters
    ----------
    job : Job
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.

    Attributes
    ----------
    open : dict of bytes to SharedTable
        The table of each namespace that is open.
    evictions : int
        Rows lost because this process, to make room, was the last to close them.
    """

    def __init__(self, job: Job, in_use: Callable[[], Collection[bytes]] | None) -> None:
        self.evictions = 0
        self._job, self._in_use = job, in_use
        self._pressure = job.board.pressure
        self._last_look = 0.0
        self.open: dict[bytes, SharedTable] = {}

    def find(self, namespace: bytes, create: bool = False) -> SharedTable | None:
        """The table of a namespace, made if need be with `create`; None if there is none, or no room."""
        table = self.open.get(namespace)
        if table is not None and table.is_live:
            return table
        self.let_go(namespace)
        if len(self.open) >= min(_MOST_OPEN, most_open()):
            self.let_unused_go(namespace)
        if not create and self._job.board.file_of(namespace) is None:
            return None
        with self._job.lock():
            table = self._opened(namespace, create)
        if table is not None:
            self.open[namespace] = table
        return table

    def _opened(self, namespace: bytes, create: bool) -> SharedTable | None:
        """The table of a namespace that is not open yet; under the lock."""
        board, file = self._job.board, self._job.board.file_of(namespace)
        if file is not None:
            region = board.open(file)
            if region is None:
                board.remove_dead()
                file = board.file_of(namespace)
            elif board.hold(file, region, self._job.slot):
                return SharedTable(region, board, file, self._job.lock)
        if file is None and create:
            return SharedTable.create(namespace, board, self._job.slot, self._job.lock)
        return None

    def let_go(self, namespace: bytes) -> None:
        """Close a namespace."""
        table = self.open.pop(namespace, None)
        if table is not None:
            with self._job.lock():
                self._job.board.let_go(table.file, self._job.slot)

    def let_go_if_dropped(self, namespace: bytes) -> None:
        """Close a namespace, unless it was created again after a drop."""
        table = self.open.get(namespace)
        if table is not None and not table.is_live:
            self.let_go(namespace)

    def let_unused_go(self, *needed: bytes) -> None:
        """Close all namespaces but those in use and those `needed`."""
        if self._in_use is not None:
            kept = {*needed, *self._in_use()}
            for namespace, table in list(self.open.items()):
                was_live = table.is_live
                if namespace in kept and was_live:
                    continue
                rows = self._job.board.rows_of(table.file)
                self.let_go(namespace)
                if was_live and not table.is_live:
                    self.evictions += rows

    def answer_pressure(self) -> None:
        """Close unused namespaces if a process has asked for room since the last call."""
        if self._job.board.pressure != self._pressure:
            self._pressure = self._job.board.pressure
            self.let_unused_go()

    def make_room(self, namespace: bytes) -> bool:
        """Close unused namespaces, and ask other processes to; returns whether there is more room now."""
        board = self._job.board
        before = board.free
        self.let_unused_go(namespace)
        now = time.monotonic()
        if now - self._last_look > _BETWEEN_LOOKS:
            self._last_look = now
            with self._job.lock():
                board.remove_dead()
                board.pressure += 1
                self._pressure = board.pressure
        return board.free > before
