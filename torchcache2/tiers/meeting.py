"""How the processes of a job find each other: its name, files and locks in folders of one user, `Scratch`.

A pid is unique within one container or machine only, and several may see the same folder. So file names
include the machine, and a process leaves files of other machines alone.

`Scratch` is a temporary cache directory, deleted at exit; it also deletes those of killed runs. The ranks of
a job share one; the last rank deletes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from torchcache2.core.process import AtExit, Forked, ray_job
from torchcache2.files.filesystem import Descriptor, FileSystem, open_to_lock
from torchcache2.identity.encoding import digest
from torchcache2.identity.marks import __version__
from torchcache2.tiers.shared.region import start_time

JOB = "TORCHCACHE_JOB"
_NONE = (1 << 31) - 1  # a number that no open file has
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds
_TRIES = 1000  # to enter a folder that others remove
_MOST_LOOKED_AT = 100  # files of other jobs
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def job_name(environ: Mapping[str, str], *parts: str) -> bytes:
    """The name of this process's job, for the cache named by `parts`: 16 bytes.

    It derives from ``TORCHCACHE_JOB``, else from the rendezvous address of the ranks, else from Ray's job,
    else from the parent process.
    """
    if environ.get(JOB):
        job = [environ[JOB]]
    elif any(environ.get(name) for name in _RENDEZVOUS):
        job = ["ranks", *[environ.get(name, "") for name in _RENDEZVOUS]]
    elif of_ray := ray_job():
        job = ["ray", *of_ray]
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


def machine() -> str:
    """Identifies the machine and pid namespace, since other machines may see the same folder."""
    parts = [os.uname().nodename.encode()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts.append(file.read())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino).encode())
    return digest(parts).hex()[:12]


def own_folder(path: str) -> str:
    """Make a folder that only this user can enter, or accept an existing one; `OSError` otherwise."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not is_own(path):
        raise PermissionError(f"{path} is not a folder that this user alone can enter: remove it")
    return path


def is_own(path: str) -> bool:
    """Whether a path is a folder that only this user can enter; `OSError` if nothing is there."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


class LockTimeoutError(Exception):
    """Another process has held the lock for too long, or the system has no locks."""


class NodeLock:
    """``with lock(): …``; `LockTimeoutError` after a long wait. One thread of a process at a time.

    It is a `flock`, which the system releases when a process is killed. Waiting ends after a while, because
    the holder may be stopped. A forked child inherits the open file, and with it the parent's lock, which
    would then outlive a killed parent: so the child opens the file anew at once.

    Attributes
    ----------
    file : Descriptor
        The file to lock, opened by this process itself.
    patience : float
        Seconds to wait.
    """

    def __init__(self, file: Descriptor, patience: float) -> None:
        self.patience = patience
        self.file, self._pid, self._fs = file, os.getpid(), FileSystem()
        Forked.add(self._reopen)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock; a holder must not ask for it again."""
        try:
            self._acquire()
            yield
        finally:
            self._fs.unlock(self.file)  # does nothing if not acquired

    def _acquire(self) -> None:
        if os.getpid() != self._pid:  # forked without Python's fork hooks
            self._reopen()
        deadline, pause = time.monotonic() + self.patience, _FIRST_PAUSE
        while not self._fs.lock(self.file, exclusive=True):
            if time.monotonic() > deadline:
                raise LockTimeoutError(f"the lock of the ranks was not free for {self.patience:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _reopen(self) -> None:
        inherited, self.file, self._pid = self.file, Descriptor(_NONE), os.getpid()
        with contextlib.suppress(OSError):  # then locking fails, but the parent's lock stays untouched
            self.file = Descriptor(os.open(f"/proc/self/fd/{inherited.number}", os.O_RDWR | os.O_CLOEXEC))


@contextlib.contextmanager
def locked(path: str, patience: float = 10.0) -> Iterator[NodeLock]:
    """Hold the lock of a file by which processes find each other; made if need be, with its folder.

    `OSError` if others can enter the folder, `LockTimeoutError` if the lock is not free.
    """
    for _ in range(_TRIES):  # others may remove both meanwhile
        try:
            own_folder(os.path.dirname(path))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = NodeLock(Descriptor(os.open(path, flags, 0o600)), patience)
        except FileNotFoundError:
            continue
        with lock():
            if FileSystem().same(lock.file, path):
                yield lock
                return
    raise FileNotFoundError(f"{path} cannot be made")


def remove_leftovers(folder: str, prefix: str, own: str, remove: Callable[[str], None]) -> None:
    """Call `remove` for what other jobs may have left in a folder: some paths with a prefix, but our own."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        others = (entry.path for entry in entries if entry.name.startswith(prefix) and entry.path != own)
        for path, _ in zip(others, range(_MOST_LOOKED_AT), strict=False):
            with contextlib.suppress(OSError, ValueError):
                remove(path)


_EXIT_PRIORITY = 0  # below the writer's, which writes into the folder first
_PREFIX = "torchcache2-"
_CACHE = "cache"
_ALIVE = ".alive"  # a file in the folder, locked by every process that uses the folder
_BETWEEN_TRIES = 0.005  # seconds


class Scratch:
    """A folder that exists until `remove` is called or the process ends; `OSError` if none can be made.

    The processes of a `job`, 16 bytes, share one, which exists until all have left.
    """

    def __init__(self, job: bytes | None = None) -> None:
        self._fs = fs = FileSystem()
        remove_leftovers(tempfile.gettempdir(), _PREFIX, "", self._remove_if_dead)
        self._pid, self._is_shared = os.getpid(), job is not None
        folder = tempfile.gettempdir()
        os.stat(folder)  # `OSError` if it is gone
        self._top = os.path.join(folder, f"{_PREFIX}{(job or os.urandom(16)).hex()}")
        self._alive: Descriptor | None = None
        path = os.path.join(self._top, _ALIVE)
        while self._alive is None:
            # The job's last process may delete the folder meanwhile, as may another run, as a leftover.
            with contextlib.suppress(FileNotFoundError):
                own_folder(self._top)
                try:
                    alive = fs.create(path)
                except FileExistsError:
                    alive = open_to_lock(fs, path)
                if fs.lock(alive, exclusive=False) is not False and fs.links(alive):
                    self._alive = alive
                    break
            time.sleep(_BETWEEN_TRIES)
        self._exit = AtExit(self.remove, _EXIT_PRIORITY)

    @property
    def path(self) -> str:
        """The cache directory, which the tier makes."""
        return os.path.join(self._top, _CACHE)

    def remove(self) -> None:
        """Delete the folder if no other process uses it; a forked child leaves it to its parent."""
        if os.getpid() == self._pid and self._alive is not None:
            self._exit.cancel()
            # If several leave at once, the last can lock it exclusively: the others' locks end here.
            is_alone = self._fs.lock(self._alive, exclusive=True)
            is_ours = is_alone if self._is_shared else is_alone is not False
            # If the locked file has no name, others have deleted the folder, and perhaps made a new one.
            if is_ours and self._fs.links(self._alive):
                _delete(self._top)
            self._alive = None

    def _remove_if_dead(self, top: str) -> None:
        """Delete a folder of this user whose processes are dead."""
        if _is_scratch(self._fs, top):
            alive = open_to_lock(self._fs, os.path.join(top, _ALIVE))
            # Meanwhile the job may have ended, and another have made the folder anew.
            if self._fs.lock(alive, exclusive=True) and self._fs.links(alive):
                _delete(top)


def _delete(top: str) -> None:
    """Delete a folder; ``.alive`` goes last, so that the next run finds what could not be deleted."""
    cache = os.path.join(top, _CACHE)
    shutil.rmtree(cache, ignore_errors=True)
    if not os.path.lexists(cache):
        shutil.rmtree(top, ignore_errors=True)


def _is_scratch(fs: FileSystem, top: str) -> bool:
    """Whether a folder was made by a run of this user, and has no other content."""
    status = os.lstat(top)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    listing = {info.name: info.is_folder for info in fs.listing(top)}
    is_known = listing in ({_ALIVE: False}, {_ALIVE: False, _CACHE: True})
    return is_known and len(os.listdir(top)) == len(listing)
