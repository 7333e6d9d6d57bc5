"""`Job`: the processes that share memory, and how they find each other.

A job has a small file in a folder that only its user can enter. The processes lock this file, and it lists
those that have the job's `Board` open: pid, start time, descriptor, inode. A joining process opens the board
through any living one; if none lives, it makes a new board. The next write removes dead processes from the
list. A joining process also deletes the files of dead jobs.

`NodeLock` is a `flock` on this file, which the system releases when a process is killed. Waiting ends after a
while, because the holder may be stopped. A forked child inherits the open file, and with it the parent's
lock, which would then outlive a killed parent: so the child opens the file anew at once.

`Tables` has the namespaces that this process has open. It closes those that nothing alive in it uses when it
has too many open, when it needs room, and, at its next call, when another process needs room. When the last
process closes a namespace, its memory is freed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator

import numpy as np

from torchcache2.core.keys import Array
from torchcache2.core.process import place
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.tiers.meeting import JOB, job_name, machine, own_folder
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.region import Region, SharingError, is_alive, start_time
from torchcache2.tiers.shared.table import SharedTable

_NONE = (1 << 31) - 1  # a number that no open file has
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds
_FOLDER = "torchcache2_ranks_{}"  # in the folder for temporary files
_MOST_LOOKED_AT = 100  # files of other jobs
_AT_EXIT = 1.0  # seconds to wait for the lock when the process ends
_BETWEEN_LOOKS = 1.0  # seconds between requests for room while memory is full
_MOST_OPEN = 64  # each takes two descriptors, of which a process often has 1024
_MOST_ABSENT = 1000  # namespaces known to have no file
_RANKS = 63  # that can be distinguished, as bits of a number


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
    launch : bytes
        Identifies the ranks that were started together: one job may span several runs of a sweep.
    rank : int
        The number of this process among these.
    """

    def __init__(self, name: bytes, budget: int, folder: str | None = None) -> None:
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            raise SharingError("memory can be shared on Linux only, where /proc is mounted")
        self._fs, self._name, self._budget = FileSystem(), name, budget
        self.launch = job_name({**os.environ, JOB: ""})
        self.rank = place().rank
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
                bit = (int.from_bytes(self.launch[:4], "little") + self.rank) % _RANKS
                self.board = Board(region, self._name, inode, self._budget, 1 << bit)
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

    open: dict[bytes, SharedTable]
    _absent: dict[bytes, int]  # namespaces without a file, and `Board.changes` at that time

    def __init__(self, job: Job, in_use: Callable[[], Collection[bytes]] | None) -> None:
        self.evictions = 0
        self._job, self._in_use = job, in_use
        self._pressure = job.board.pressure
        self._last_look = 0.0
        self.clear()

    def clear(self) -> None:
        """Close everything without changing the board."""
        self.open, self._absent = {}, {}

    def find(self, namespace: bytes, create: bool = False, are_replicas: bool = False) -> SharedTable | None:
        """The table of a namespace, made if need be with `create`; None if there is none, or no room."""
        table = self.open.get(namespace)
        if table is not None and table.is_live:
            return table
        self.let_go(namespace)
        if len(self.open) >= _MOST_OPEN:
            self.let_unused_go(namespace)
        board = self._job.board
        if not create and self._absent.get(namespace) == board.changes:
            return None
        with self._job.lock():
            changes, table = board.changes, self._opened(namespace, create, are_replicas)
        if table is not None:
            self.open[namespace] = table
            self._absent.pop(namespace, None)
            return table
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[namespace] = changes
        return None

    def _opened(self, namespace: bytes, create: bool, are_replicas: bool) -> SharedTable | None:
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
            return SharedTable.create(namespace, board, self._job.slot, self._job.lock, are_replicas)
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
        """Close all namespaces but those in use, their replicas, and those `needed`."""
        if self._in_use is not None:
            used = self._in_use()
            kept = {*needed, *used, *map(replicas_of, used)}
            board = self._job.board
            for namespace, table in list(self.open.items()):
                was_live = table.is_live
                if namespace in kept and was_live:
                    continue
                rows = 0 if board.are_replicas(table.file) else board.rows_of(table.file)
                self.let_go(namespace)
                if was_live and not table.is_live:
                    self.evictions += rows

    def answer_pressure(self) -> None:
        """Close unused namespaces if a process has asked for room since the last call."""
        if self._job.board.pressure != self._pressure:
            self._pressure = self._job.board.pressure
            self.let_unused_go()

    def drop_replicas(self) -> bool:
        """Forget all replicas in all processes, and free their memory; returns whether that made room.

        A full memory has no replicas; otherwise another process may have dropped them already.
        """
        board = self._job.board
        was_full = board.is_full
        with self._job.lock():
            files = board.drop_replicas()
            for file in files:
                region = board.open(file)
                if region is not None:
                    SharedTable(region, board, file, self._job.lock).discard()
        return bool(files) or not was_full

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


def compare_later(
    job: Job, table: SharedTable, namespace: bytes, description: Callable[[bytes], Mapping[str, Any]]
) -> None:
    """Compare a namespace once, in a call at least a minute after the first one."""
    if table.since is None:
        table.since = time.monotonic()
    if time.monotonic() - table.since > _COMPARED_AFTER:
        table.since = math.inf
        with contextlib.suppress(OSError):  # such as too many open files
            compare(job, table, namespace, description(namespace))


def compare(job: Job, table: SharedTable, namespace: bytes, description: Mapping[str, Any]) -> None:
    """Warn if another rank computes the same, except for values in its module.

    That means: the two ranks never had a namespace in common, their code and weights are equal, and they were
    started together (runs of a sweep differ on purpose). All ranks together warn once.
    """
    mine = from_document(namespace.hex(), description)
    if mine is None or job.board.ranks_of(table.file) >= ranks_here():
        return
    about = {"namespace": namespace.hex(), "launch": job.launch.hex(), "rank": job.rank, **description}
    table.space.tell(zlib.compress(json.dumps(about).encode()))
    for document in _of_others(job, table):
        other = from_document(document["namespace"], document)
        if other is None or document["launch"] != about["launch"]:
            continue
        lines = differences_of_state(other, mine)
        with job.lock():
            warns = bool(lines) and job.board.warns()
        if warns:
            logger.warning(
                "%s: rank %d and rank %d find none of each other's rows. What differs: %s. Use the device of "
                "the input instead, keep such values out of the module, or set persistent_module_hash. If "
                "the ranks are meant to differ, nothing is wrong",
                *(about["class"], document["rank"], about["rank"], listed(lines)),
            )
            return


def _of_others(job: Job, table: SharedTable) -> Iterator[dict[str, Any]]:
    """The descriptions left by ranks that never had a namespace in common with the ranks of `table`."""
    with job.lock():
        regions = [job.board.open(file) for file in job.board.strangers(table.file)[:_MOST_READ]]
    for region in filter(None, regions):
        text = zlib.decompressobj()
        with contextlib.suppress(ValueError, zlib.error):  # nothing there, or half written
            yield json.loads(text.decompress(Space(region, job.board, -1, job.lock).told()))
