"""`Mirror`: synchronises a local folder and a bucket, in threads of its own.

It uploads segments sealed in the folder by any process, and downloads those of the bucket as long as there is
room. One of the processes that share a folder, chosen by `MirrorLock`, does this; when it ends, another takes
over. However a process ends, the next one finds what the bucket lacks by looking.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection

from torch.utils.data import get_worker_info

from torchcache2.core.process import AtExit, Forked, ProcessLock, before_pools_end
from torchcache2.files.directory import FINGERPRINT, MIRROR, PACK, CacheDirectory, Contents
from torchcache2.files.filesystem import Descriptor, open_to_lock
from torchcache2.tiers.bucket.connection import LOOP_THREAD
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.transfers import Downloads, Transfer, Uploads


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


_EXIT_PRIORITY = 5  # below the disk tier's writer, above a temporary folder
_AT_ONCE, _DOWN_AT_ONCE = 4, 8  # transfers
_MOST_FAILURES = 3  # of one file, after which flushes ignore it
_RESUMED_AFTER = 1.0  # seconds between tries while the bucket pauses
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds after a failed upload while the bucket works
_BEATS = 1.0  # seconds
_ENDING = 10.0  # seconds for remaining transfers when the mirror ends


class _Flush:
    """A waiting `flush`. `names` are the files that the bucket still lacks; None before the first look."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.names: set[Transfer] | None = None
        self.is_done = threading.Event()


class Mirror:
    """The mirror of one folder, in each process that uses it.

    Workers of a `DataLoader` do not mirror, as their parent does. Forked children must call `begin`.

    Parameters
    ----------
    objects : Objects
    directory : CacheDirectory
        The local folder.
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
        budget: int,
        flush_first: Callable[[], None] = lambda: None,
        *,
        uploads: bool | None = True,
        temporary: bool = False,
        pause: float = 0.2,
        silence: float = 10.0,
    ) -> None:
        self.uploads = uploads
        self._objects, self._directory, self._budget = objects, directory, budget
        self._flush_first, self._temporary = flush_first, temporary
        self._pause, self._silence = pause, silence
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may call `close`
        self._pid, self._is_closed = -1, False  # the process that has the threads
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
        if not self._runs() or self.is_busy_here():
            return
        flush = _Flush()
        self._flushes.append(flush)
        self._not_before = 0.0
        while not flush.is_done.is_set():
            self._wake.set()
            if self._thread is not None and self._thread.is_alive():
                flush.is_done.wait(1.0)
            else:
                self._look()
                flush.is_done.wait(self._pause)

    def close(self) -> None:
        """Flush, and end the threads; must not be called if `is_busy_here()`.

        Transfers that are still running get some seconds.
        """
        if self._is_closed:
            return
        self.flush()
        with self._lock():
            is_ours, self._is_closed = self._runs(), True
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
        self._downloads = Downloads(self._objects, self._directory, self._budget)
        self._sole = MirrorLock(self._directory)
        self._wake = threading.Event()
        self._flushes: list[_Flush] = []
        self._looking = threading.RLock()  # without our thread, waiting threads look themselves
        self._going_up: dict[Transfer, threading.Thread] = {}
        self._going_down: dict[Transfer, threading.Thread] = {}
        self._failures: dict[Transfer, tuple[int, float]] = {}  # how often, and when to retry
        self._failed_since = -1.0  # start of the last failed upload
        self._not_before = 0.0  # when to ask a failing bucket again
        self._most = _AT_ONCE  # uploads at once; 1 after a fault, as they share a line that may be slow
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
        threads = [self._thread, *list(self._going_up.values()), *list(self._going_down.values())]
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
        """Look once; if that fails, end all waiting flushes."""
        with self._looking:
            try:
                self._round()
            except Exception as error:
                self._objects.tell("mirror", "the mirror of %s fails: %s", self._directory.path, repr(error))
                self._answer(list(self._flushes), is_hopeless=True)

    def _round(self) -> None:
        """Look once, and start transfers."""
        flushes = list(self._flushes)  # first: later flushes may have written more
        coming = list(self._going_down)  # before the look, so that downloads ending meanwhile still count
        holds = self._sole.take()
        contents = self._directory.scan()
        self._downloads.note(contents)
        lacking = self._uploads.wanted(contents)
        if not (holds and self.uploads):  # only the uploader knows the bucket's fingerprints
            lacking = [one for one in lacking if one.name != FINGERPRINT and not one.name.endswith(PACK)]
        if lacking and not self.uploads:
            self._sole.release()  # to a process that uploads
            holds, lacking = False, []
        for flush in flushes:
            flush.names = set(lacking) if flush.names is None else flush.names.intersection(lacking)
        if holds and lacking and not self._uploads.ended:
            self._start_uploads(lacking, flushes)
        elif holds and not flushes:
            self._start_downloads(contents, coming)
        self._answer(flushes, is_hopeless=self._is_hopeless(holds, flushes))

    def _start_uploads(self, lacking: list[Transfer], flushes: list[_Flush]) -> None:
        now = time.monotonic()
        if self._objects.cause is None and now - self._beat_at > _BEATS:
            self._beat_at = now
            self._sole.beat()
        # A fingerprint comes last: after the segments that flushes wait for, or after all.
        awaited = set().union(*(flush.names or () for flush in flushes)) if flushes else set(lacking)
        waiting = {transfer.namespace for transfer in awaited if transfer.name != FINGERPRINT}
        for transfer in lacking:
            if len(self._going_up) >= (self._most if self._objects.cause is None else 1):
                break
            is_early = transfer.name == FINGERPRINT and transfer.namespace in waiting
            begins = max(self._not_before, self._failures.get(transfer, (0, 0.0))[1])
            if not is_early and transfer not in self._going_up and now >= begins:
                self._start(self._going_up, transfer, self._upload)

    def _start_downloads(self, contents: list[Contents], coming: list[Transfer]) -> None:
        if self._objects.cause is None:
            for transfer in self._downloads.wanted(contents, coming, _DOWN_AT_ONCE - len(coming)):
                self._start(self._going_down, transfer, self._downloads.download)

    def _start(
        self,
        going: dict[Transfer, threading.Thread],
        transfer: Transfer,
        function: Callable[[Transfer], object],
    ) -> None:
        def work() -> None:
            try:
                function(transfer)
            except Exception as error:
                self._objects.tell("transfer", "the mirror fails at %s: %s", "/".join(transfer), repr(error))
            finally:
                going.pop(transfer, None)
                self._wake.set()

        thread = going[transfer] = threading.Thread(target=work, name="torchcache2 transfer", daemon=True)
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
                self._most = min(_AT_ONCE, self._most + 1)
            else:
                self._failed_since, self._most = max(self._failed_since, begun), 1
                now, count = time.monotonic(), self._failures.get(transfer, (0, 0.0))[0]
                if self._objects.cause is not None:
                    self._not_before = now + _RESUMED_AFTER
                else:
                    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(count, 10))
                    self._failures[transfer] = count + 1, now + pause

    def _is_hopeless(self, holds: bool | None, flushes: Collection[_Flush]) -> bool:
        """Whether no process uploads, or can."""
        if holds or holds is None:
            return holds is None or bool(self._uploads.ended)
        beat, now = self._sole.last_beat(), time.monotonic()
        if beat != self._heard[0]:
            self._heard = beat, now
        return now - max([self._heard[1], *(flush.since for flush in flushes)]) > self._silence

    def _answer(self, flushes: list[_Flush], *, is_hopeless: bool) -> None:
        """End the flushes that have nothing left to wait for, or no hope."""
        for flush in flushes:
            names = flush.names or set()
            is_tried = self._objects.cause is not None and self._failed_since >= flush.since
            failing = {name for name in names if self._failures.get(name, (0, 0.0))[0] >= _MOST_FAILURES}
            if is_hopeless or is_tried or failing == names:
                if names:
                    self._tell_given_up(len(names))
                self._flushes.remove(flush)
                flush.is_done.set()

    def _tell_given_up(self, count: int) -> None:
        later = "are lost with it" if self._temporary else "are uploaded when it is used again"
        self._objects.tell(
            "given up",
            "%d files of %s are not uploaded to %s (%s): they stay in the folder, and %s",
            *(count, self._directory.path, self._objects.bucket.url),
            *(self._uploads.ended or self._objects.cause or "no process does it now", later),
        )

    def _flush_at_end(self) -> None:
        if self._runs() and not self._is_closed:
            self._flush_first()
            self.flush()

    def _close_at_exit(self) -> None:
        if self._runs():
            self.close()
