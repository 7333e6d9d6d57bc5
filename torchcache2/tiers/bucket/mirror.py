"""`Mirror`: synchronises a local folder and a bucket, in threads of its own.

It uploads segments sealed in the folder by any process, and brings those that are wanted as long as there is
room. One of the processes that share a folder, chosen by `MirrorLock`, does this; when it ends, another takes
over. However a process ends, the next one finds what the bucket lacks by looking.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.utils.data import get_worker_info

from torchcache2.core.process import AtExit, Forked, ProcessLock, before_pools_end
from torchcache2.files.directory import FINGERPRINT, MIRROR, CacheDirectory
from torchcache2.files.filesystem import Descriptor, open_to_lock
from torchcache2.tiers.bucket.connection import LOOP_THREAD
from torchcache2.tiers.bucket.downloads import Downloads
from torchcache2.tiers.bucket.folder import BucketFolder
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.uploads import Transfer, Uploads

_EXIT_PRIORITY = 5  # below the disk tier's writer, above a temporary folder
_UP_AT_ONCE, _DOWN_AT_ONCE = 4, 2  # uploads, and groups of segments that are brought
_MOST_FAILURES = 3  # of one file, after which flushes ignore it
_RESUMED_AFTER = 1.0  # seconds between tries while the bucket pauses
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds after a failed upload while the bucket works
_BEATS = 1.0  # seconds
_ENDING = 10.0  # seconds for remaining transfers when the mirror ends
T = TypeVar("T", bound=tuple[str, ...])


class MirrorLock:
    """The lock of one folder, for one thread of the process that makes it."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._fs = directory.fs
        self._path = os.path.join(directory.path, MIRROR)
        self._file: Descriptor | None = None
        self._holds = False
        Forked.add(self._close)  # a child would keep the lock of a parent that is killed

    def take(self) -> bool | None:
        """Whether this process mirrors from now on; None if the lock file cannot be used."""
        try:
            if self._file is not None and not self._fs.same(self._file, self._path):
                self.release()  # it was deleted: others would lock a new file
            if self._file is None:
                with contextlib.suppress(FileExistsError):
                    self._file = self._fs.create(self._path)
            if self._file is None:
                self._file = open_to_lock(self._fs, self._path)
            if not self._holds:
                # Without locks, every process mirrors: they write the same bytes.
                self._holds = self._fs.lock(self._file, exclusive=True) is not False
        except OSError:
            self.release()
            return None
        return self._holds

    def beat(self) -> None:
        """Signal other processes that transfers are making progress."""
        with contextlib.suppress(OSError):
            self._fs.touch(self._path)

    def last_beat(self) -> int:
        """A number that changes with each beat of the mirroring process."""
        try:
            return self._fs.changed(self._path)
        except OSError:
            return 0

    def release(self) -> None:
        """Let another process mirror."""
        if self._file is not None:
            self._fs.unlock(self._file)
        self._close()

    def _close(self) -> None:
        """Close the file, even if a frame of a thread that a forked child lacks refers to it."""
        file, self._file, self._holds = self._file, None, False
        if file is not None:
            file.close()


class Mirror:
    """The mirror of one folder, in each process that uses it.

    Workers of a `DataLoader` do not mirror, as their parent does. Forked children must call `begin`.

    Parameters
    ----------
    objects : Objects
    directory : CacheDirectory
        The local folder.
    folder : BucketFolder
        The same, as it fetches segments.
    budget : int
        Most bytes of the folder; uploads do not depend on it.
    flush_first : callable, optional
        Seals unsealed rows; called when the process ends.
    uploads : bool or None
        Whether to upload; False: download only; None: neither, so this does nothing.
    temporary : bool
        Whether the folder is deleted when this is closed.
    pause : float
        Seconds between looks at the folder for files of other processes.
    silence : float
        Seconds without a beat of the mirroring process after which waiting for its uploads ends.
    """

    def __init__(
        self,
        objects: Objects,
        directory: CacheDirectory,
        folder: BucketFolder,
        budget: int,
        flush_first: Callable[[], None] = lambda: None,
        *,
        uploads: bool | None = True,
        temporary: bool = False,
        pause: float = 0.2,
        silence: float = 10.0,
    ) -> None:
        self.uploads = uploads
        self._objects, self._directory, self._folder, self._budget = objects, directory, folder, budget
        self._flush_first, self._temporary = flush_first, temporary
        self._pause, self._silence = pause, silence
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may call `close`
        self._pid, self._is_closed = -1, False  # the process that has the threads
        self._looks = ProcessLock(threading.RLock)  # without our thread, waiting threads look themselves
        self._flushes: list[set[Transfer]] = []  # for each waiting `flush`, what it waits for
        before_pools_end(self._flush_at_end)

    def begin(self) -> None:
        """Start mirroring in this process, if it should and has not yet; cheap to call again."""
        if self.uploads is None or self._is_closed or self._runs() or get_worker_info() is not None:
            return
        with self._lock():
            if not self._runs():
                self._start_anew()

    def wake(self) -> None:
        """Upload what was just written to the folder at once."""
        if self._runs():
            self._wake.set()

    def flush(self) -> None:
        """Return once the bucket has all segments in the folder; warns if that fails."""
        self.begin()
        if not self.uploads or not self._runs() or self.is_busy_here():
            return
        begun, left = time.monotonic(), set[Transfer]()
        self._flushes.append(left)
        self._not_before, is_first = 0.0, True
        try:
            while True:
                self._wake.set()
                if self._thread is None or not self._thread.is_alive():
                    self._look()
                with self._looks():
                    holds = self._sole.take()
                lacking = set(self._uploads.wanted(self._directory.scan(), is_sole=holds is True))
                left.update(lacking) if is_first else left.intersection_update(lacking)
                is_first = False
                if not left or self._is_hopeless(holds, begun, left):
                    break
                time.sleep(self._pause if holds is False else min(self._pause, 0.02))
        except OSError as error:
            self._fails(error)
            return
        finally:
            self._flushes = [one for one in self._flushes if one is not left]
        if left:
            later = "are lost with it" if self._temporary else "are uploaded when it is used again"
            self._objects.tell(
                "given up",
                "%d files of %s are not uploaded to %s (%s): they stay in the folder, and %s",
                *(len(left), self._directory.path, self._objects.bucket.url),
                *(self._uploads.ended or self._objects.cause or "no process does it now", later),
            )

    def close(self) -> None:
        """Flush, and end the threads; must not be called if `is_busy_here()`.

        Transfers that are still running get some seconds.
        """
        if self._is_closed:
            return
        self.flush()
        with self._lock():
            is_ours, self._is_closed = self._runs(), True
        self._folder.is_ending = True
        if is_ours:
            self._wake.set()
            self._exit.cancel()
            deadline = time.monotonic() + _ENDING
            for thread in self._threads():
                thread.join(max(0.0, deadline - time.monotonic()))
            self._sole.release()

    def is_busy_here(self) -> bool:
        """Whether uploads need this thread, so that it must not wait for them.

        The garbage collector may close a tier in any thread.
        """
        here = threading.current_thread()
        return here.name == LOOP_THREAD or (self._runs() and here in self._threads())

    def _runs(self) -> bool:
        """Whether this process has the threads: a forked child does not inherit them."""
        return self._pid == os.getpid()

    def _start_anew(self) -> None:
        """Forget the parent's state, and start the thread."""
        self._uploads = Uploads(self._objects, self._directory)
        self._downloads = Downloads(self._folder, self._directory, self._budget)
        self._sole = MirrorLock(self._directory)
        self._wake = threading.Event()
        self._flushes = []
        self._going: dict[tuple[str, ...], threading.Thread] = {}
        self._failures: dict[Transfer, tuple[int, float]] = {}  # how often, and when to retry
        self._failed_since = -1.0  # start of the last failed upload
        self._not_before = 0.0  # when to ask a failing bucket again
        self._beat_at = 0.0
        self._heard = 0, 0.0  # the last beat of another process, and when it was seen
        self._exit = AtExit(self._close_at_exit, _EXIT_PRIORITY)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._work, name="torchcache2 mirror", daemon=True
        )
        self._pid = os.getpid()
        try:
            self._thread.start()
        except RuntimeError:  # too many threads, or interpreter exit: `flush` uploads
            self._thread = None

    def _threads(self) -> list[threading.Thread]:
        threads = [self._thread, *list(self._going.values())]
        return [thread for thread in threads if thread is not None and thread.ident is not None]

    def _work(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            begun = time.monotonic()
            self._look()
            took = time.monotonic() - begun  # a look at many files takes long
            time.sleep(min(1.0, 4 * took))
            self._wake.wait(max(self._pause, min(5.0, 20 * took)))

    def _look(self) -> None:
        """Look once."""
        try:
            with self._looks():
                self._round()
        except Exception as error:
            self._fails(error)

    def _fails(self, error: Exception) -> None:
        self._objects.tell("mirror", "the mirror of %s fails: %s", self._directory.path, repr(error))

    def _round(self) -> None:
        """Look once, and start transfers."""
        holds, contents = self._sole.take(), self._directory.scan()
        self._downloads.note(contents)
        lacking = self._uploads.wanted(contents, is_sole=holds is True)
        if not self.uploads and any(one.name != FINGERPRINT for one in lacking):
            self._sole.release()  # to a process that uploads
        elif holds and lacking and self.uploads and not self._uploads.ended:
            self._start_uploads(lacking)
        elif holds and not self._flushes:
            while self._objects.cause is None and len(self._going) < _DOWN_AT_ONCE:
                if not (names := tuple(self._downloads.wanted(contents))):
                    break
                self._start(names, self._downloads.bring)

    def _start_uploads(self, lacking: list[Transfer]) -> None:
        now = time.monotonic()
        if self._objects.cause is None and now - self._beat_at > _BEATS:
            self._beat_at = now
            self._sole.beat()
        # A fingerprint comes last: after the segments that flushes wait for, or after all.
        awaited = set[Transfer]().union(*self._flushes) or set(lacking)
        waiting = {transfer.namespace for transfer in awaited if transfer.name != FINGERPRINT}
        # After a fault, one at a time, as they share a line that may be slow.
        most = 1 if self._objects.cause is not None or self._failures else _UP_AT_ONCE
        for transfer in lacking:
            if len(self._going) >= most:
                break
            is_early = transfer.name == FINGERPRINT and transfer.namespace in waiting
            begins = max(self._not_before, self._failures.get(transfer, (0, 0.0))[1])
            if not is_early and transfer not in self._going and now >= begins:
                self._start(transfer, self._upload)

    def _start(self, transfer: T, function: Callable[[T], object]) -> None:
        def work() -> None:
            try:
                function(transfer)
            except Exception as error:
                self._fails(error)
            finally:
                self._going.pop(transfer, None)
                self._wake.set()

        thread = self._going[transfer] = threading.Thread(
            target=work, name="torchcache2 transfer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter is ending
            work()

    def _upload(self, transfer: Transfer) -> None:
        begun, is_there = time.monotonic(), False
        try:
            is_there = self._uploads.upload(transfer)
        finally:
            if is_there:
                self._failures.pop(transfer, None)
            else:
                self._failed_since = max(self._failed_since, begun)
                now, count = time.monotonic(), self._failures.get(transfer, (0, 0.0))[0]
                if self._objects.cause is not None:
                    self._not_before = now + _RESUMED_AFTER
                else:
                    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(count, 10))
                    self._failures[transfer] = count + 1, now + pause

    def _is_hopeless(self, holds: bool | None, begun: float, left: set[Transfer]) -> bool:
        """Whether no process uploads, or can."""
        now = time.monotonic()
        if holds is False:
            if (beat := self._sole.last_beat()) != self._heard[0]:
                self._heard = beat, now
            return now - max(self._heard[1], begun) > self._silence
        is_tried = self._objects.cause is not None and self._failed_since >= begun
        fails = all(self._failures.get(one, (0, 0.0))[0] >= _MOST_FAILURES for one in left)
        return holds is None or bool(self._uploads.ended) or is_tried or fails

    def _flush_at_end(self) -> None:
        if self._runs() and not self._is_closed:
            self._flush_first()
            self.flush()

    def _close_at_exit(self) -> None:
        if self._runs():
            self.close()
