"""`Job`: which processes share, and where they find each other.

A job has a small file in a folder that only its user can enter. The file is what the processes lock, and it
lists those that have the job's `Board` open: pid, start time, descriptor, inode. Who joins opens the board
of any of them that lives; if there is none, what the file says is old, and a new board is made. The dead are
left out when the file is next written. Who joins also deletes the files of other jobs that are dead.

Pids mean something to the processes of one container or machine only. Another one may see the same folder: so
the names of files say which it is, and files of others are left alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping

import numpy as np

from torchcache2.core.arrays import Array
from torchcache2.core.ranks import place
from torchcache2.core.version import __version__
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.identity.encoding import digest
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.lock import LockTimeoutError, NodeLock
from torchcache2.tiers.shared.region import Region, SharingError, is_alive, start_time

__all__ = ["Job", "job_name"]

_FOLDER = "torchcache2_ranks_{}"  # in the folder for temporary files
_JOB, _RENDEZVOUS = "TORCHCACHE_JOB", ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_MOST_LOOKED_AT = 100  # files of other jobs
_RANKS = 63  # that are told apart, as bits of a number


def job_name(environ: Mapping[str, str], *parts: str) -> bytes:
    """The name of the job of this process, for a cache that `parts` name: 16 bytes.

    It is what ``TORCHCACHE_JOB`` says, else where the ranks meet, else the parent process.
    """
    if environ.get(_JOB):
        job = [environ[_JOB]]
    elif any(environ.get(name) for name in _RENDEZVOUS):
        job = ["ranks", *[environ.get(name, "") for name in _RENDEZVOUS]]
    else:
        parent = os.getppid()
        job = ["parent", str(parent), str(start_time(parent))]
    return digest(
        [
            __version__.encode(),
            str(len(job)).encode(),
            *[text.encode("utf-8", "replace") for text in (*job, *parts)],
        ]
    )


class Job:
    """The part of this process in a job, from when it is made until `leave`.

    Raises
    ------
    SharingError
        If the system cannot share memory in this way, or others hold the job's lock.

    Attributes
    ----------
    board : Board
        What the processes of the job tell each other.
    lock : NodeLock
        Under which they write to what they share.
    pid : int
        The process that has joined: another one, forked from it, has to `rejoin`.
    slot : int
        The number of this process among the members on the board.
    launch : bytes
        What the ranks have in common that were started together: the runs of a sweep may be of one job.
    rank : int
        The number of this process among these.
    """

    def __init__(self, name: bytes, budget: int, folder: str | None = None) -> None:
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            raise SharingError("memory can be shared on Linux only, where /proc is mounted")
        self._name, self._budget = name, budget
        self.launch = job_name({**os.environ, _JOB: ""})
        self.rank = place().rank
        self._folder = _own_folder() if folder is None else folder
        self._path = os.path.join(self._folder, f"{_machine()}-{name.hex()}")
        try:
            self._join()
        except (OSError, LockTimeoutError) as error:
            raise SharingError(f"the ranks cannot meet in {self._folder}: {error}") from None

    def rejoin(self) -> None:
        """Take part under the name of this process, which was forked from one that did."""
        self.pid, self.start = os.getpid(), start_time(os.getpid())
        with self.lock():
            self._enter()

    def leave(self) -> None:
        """Take part no more; the last one deletes the file."""
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
        except LockTimeoutError:  # others free what it had, and what the file says of it is found to be old
            self.board.strike_out(self.slot)

    def _join(self) -> None:
        self._remove_leftovers()
        self.pid, self.start = os.getpid(), start_time(os.getpid())
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = Descriptor(os.open(self._path, flags, 0o600))
            self.lock = NodeLock(file)
            with self.lock():
                if not _is_at(file, self._path):
                    continue  # the last one has just left
                inode = os.fstat(file.number).st_ino
                regions = (self._opened(line, inode) for line in self._listed().tolist())
                region = next(filter(None, regions), None)
                bit = (int.from_bytes(self.launch[:4], "little") + self.rank) % _RANKS
                self.board = Board(region, self._name, inode, self._budget, 1 << bit)
                self.lock.progress = self.board.read_progress
                self._enter()
                return

    def _enter(self) -> None:
        region = self.board.region
        # Where this file cannot be opened as others will, /proc shows other processes, or hides them.
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
        # One call, and less than a page: a process that is killed has written all of it, or nothing.
        # What is wrong in it is found out by who opens what it names.
        with open(self._path, "r+b", buffering=0) as file:
            file.write(np.ascontiguousarray(lines).tobytes())
            file.truncate(32 * len(lines))

    def _remove_leftovers(self) -> None:
        """Delete the files of jobs that have ended without leaving."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry, _ in zip(entries, range(_MOST_LOOKED_AT), strict=False):
                if entry.path != self._path and entry.name.startswith(f"{_machine()}-"):
                    with contextlib.suppress(OSError, ValueError):
                        _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    if FileSystem().lock(file, exclusive=True):
        lines = np.frombuffer(os.read(file.number, 1 << 20), np.int64).reshape(-1, 4).tolist()
        if _is_at(file, path) and not any(is_alive(pid, start) for pid, start, *_ in lines):
            os.unlink(path)


def _is_at(file: Descriptor, path: str) -> bool:
    """Whether an open file still has a name."""
    try:
        return os.path.samestat(os.fstat(file.number), os.stat(path))
    except FileNotFoundError:
        return False


def _own_folder() -> str:
    """A folder that this user has, and nobody else can enter."""
    path = os.path.join(tempfile.gettempdir(), _FOLDER.format(os.getuid()))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SharingError(f"{path} is not a folder that this user alone can enter: remove it")
    return path


def _machine() -> str:
    """What tells those processes whose pids this one sees from others, which may see the same folder."""
    parts = [os.uname().nodename.encode()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts.append(file.read())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino).encode())
    return digest(parts).hex()[:12]
