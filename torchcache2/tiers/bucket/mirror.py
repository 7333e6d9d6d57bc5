"""`Mirror`: a thread that uploads what a bucket lacks of a local folder, and brings segments that are wanted.

It uploads ``CACHEDIR.TAG`` first, then the segments written by any process, and the ``fingerprint.json`` of
each namespace after them. Once the bucket has a segment, its head is written locally: now the local file may
be deleted. A killed process leaves no head, so the next one uploads the segment again: the same bytes.
One of the processes that share a folder uploads at a time: the one that has locked ``.mirror``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch.utils.data import get_worker_info

from torchcache2.core.errors import AwayError, DamagedError, UnreadableError
from torchcache2.core.process import Forked, ProcessLock, before_pools_end
from torchcache2.core.sizes import parse_size
from torchcache2.files.directory import (
    CORRUPT,
    FINGERPRINT,
    MIRROR,
    NAMESPACE_NAME,
    TAG,
    TAG_TEXT,
    CacheDirectory,
    Contents,
    stated_format,
)
from torchcache2.files.filesystem import Descriptor, open_to_lock
from torchcache2.files.layout import FORMAT_VERSION, HEAD, parse_head, read_head, write_head
from torchcache2.files.removal import used_bytes
from torchcache2.tiers.base import Breaker
from torchcache2.tiers.bucket.folder import TRANSFER, BucketFolder
from torchcache2.tiers.bucket.objects import Objects

_AT_ONCE = 4  # uploads
_GROUP = 512 << 20  # bytes of segments that are brought together
_FIRST_PAUSE = 0.5  # seconds after a failed upload
_ENDING = 10.0  # seconds for remaining transfers when the mirror ends
_ANY_SIZE = 1 << 62
_THREAD = "torchcache2 mirror"
_BUSY = (_THREAD, TRANSFER, "fsspecIO")  # names of threads that transfers need; the last one has the loop


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
        Writes rows that wait; called when the process ends.
    uploads : bool or None
        Whether to upload; False: download only; None: neither, so this does nothing.
    temporary : bool
        Whether the folder is deleted when this is closed.
    pause : float
        Seconds between looks at the folder for files of other processes.
    patience : float
        Seconds to wait for each segment that another process uploads.
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
        patience: float = 120.0,
    ) -> None:
        self.uploads = uploads
        self._objects, self._directory, self._folder, self._budget = objects, directory, folder, budget
        self._fs = directory.fs
        self._flush_first, self._temporary = flush_first, temporary
        self._pause, self._patience = pause, patience
        size = objects.bucket.remote_size
        self._most = None if size is None else parse_size("remote_size", size, free=None)
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may call `close`
        self._pid, self._is_closed = -1, False  # the process that has the thread
        self._file: Descriptor | None = None
        Forked.add(self._let_go)  # a child would keep the lock of a parent that is killed
        before_pools_end(self._close_at_end)

    def begin(self) -> None:
        """Start mirroring in this process, if it should and has not yet; cheap to call again."""
        if self.uploads is None or self._is_closed or self._runs() or get_worker_info() is not None:
            return
        with self._lock():
            if not self._runs():
                self._start()

    def wake(self) -> None:
        """Upload what was just written to the folder at once."""
        if self._runs():
            self._wake.set()

    def flush(self) -> None:
        """Return once the bucket has all segments in the folder; warns if that fails."""
        self.begin()
        if not self.uploads or not self._runs() or self.is_busy_here():
            return
        this = threading.get_ident()
        self._flushing.add(this)
        try:
            with self._lock():
                left = self._flush()
        except OSError as error:
            self._fails(error)
            return
        finally:
            self._flushing.discard(this)
        if left:
            why = self._ended or self._objects.cause or "another process does it, or the folder is read-only"
            later = "are lost with it" if self._temporary else "are uploaded when it is used again"
            self._objects.tell(
                "given up",
                "%d files of %s are not uploaded to %s (%s): they stay in the folder, and %s",
                *(len(left), self._directory.path, self._objects.bucket.url, why, later),
            )

    def close(self) -> None:
        """Flush, and end the thread; must not be called if `is_busy_here()`."""
        if self._is_closed:
            return
        self.flush()
        is_ours, self._is_closed = self._runs(), True
        if is_ours:
            self._wake.set()
            if self._thread.ident is not None:
                self._thread.join(_ENDING)

    def is_busy_here(self) -> bool:
        """Whether uploads need this thread, so that it must not wait for them.

        The garbage collector may close a tier in any thread.
        """
        return threading.current_thread().name.startswith(_BUSY)

    def is_uploading(self) -> bool:
        """Whether some process uploads now."""
        with contextlib.suppress(OSError):
            file = open_to_lock(self._fs, os.path.join(self._directory.path, MIRROR))
            is_locked = self._fs.lock(file, exclusive=True) is False
            self._fs.unlock(file)
            return is_locked
        return False

    # The thread.

    def _runs(self) -> bool:
        """Whether this process has the thread: a forked child does not inherit it."""
        return self._pid == os.getpid()

    def _start(self) -> None:
        """Forget the parent's state, and start the thread."""
        self._wake = threading.Event()
        self._flushing = set[int]()  # threads
        self._ended = ""  # why uploads have ended
        self._has_tag = False
        self._done = set[str]()  # files that the bucket has, or that cannot be read here
        self._been_here = set[str]()  # segments: those that have gone since had to make room
        self._breaker = Breaker(_FIRST_PAUSE)
        self._thread = threading.Thread(target=self._work, name=_THREAD, daemon=True)
        self._pid = os.getpid()
        with contextlib.suppress(RuntimeError):  # too many threads, or interpreter exit: `flush` uploads
            self._thread.start()

    def _work(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            begun, has_moved = time.monotonic(), False
            try:
                with self._lock():
                    has_moved = self._look()
            except Exception as error:
                self._fails(error)
            if not has_moved or self._flushing:  # a look at many files takes long
                self._wake.wait(max(self._pause, min(5.0, 20 * (time.monotonic() - begun))))

    def _look(self) -> bool:
        """Look once, and upload, or bring some segments; whether something was moved."""
        contents, before = self._directory.scan(), self._objects.bytes_up
        if self.uploads and self._breaker.allows():
            left, is_alone = self._upload(contents)
            if left and is_alone:
                self._breaker.failed()
            elif not left:
                self._breaker.worked()
        has_uploaded = self._objects.bytes_up > before
        return has_uploaded or (self._objects.cause is None and self._bring(contents))

    def _fails(self, error: Exception) -> None:
        self._objects.tell("mirror", "the mirror of %s fails: %s", self._directory.path, repr(error))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Lock ``.mirror``; yields whether no other process has."""
        path, file = os.path.join(self._directory.path, MIRROR), None
        try:
            with contextlib.suppress(FileExistsError):
                file = self._fs.create(path)
            self._file = file = file or open_to_lock(self._fs, path)
            # Without locks, every process mirrors: they write the same bytes.
            yield self._fs.lock(file, exclusive=True) is not False
        finally:
            if file is not None:
                self._fs.unlock(file)
            self._let_go()

    def _let_go(self) -> None:
        """Close the lock, even if a frame of a thread that a forked child lacks refers to it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # Uploading what the bucket lacks.

    def _flush(self) -> set[str]:
        """Upload what is in the folder, or wait while another process does; what the bucket lacks still."""
        left, end = None, 0.0
        while True:
            lacking, is_alone = self._upload(self._directory.scan())
            before, left = left, lacking if left is None else left & lacking
            now = time.monotonic()
            end = now + self._patience if left != before else end
            if not left or is_alone or self._ended or now > end:
                return left
            time.sleep(self._pause)

    def _upload(self, contents: list[Contents]) -> tuple[set[str], bool]:
        """Upload what the bucket lacks; returns what it lacks still, and whether no other process uploads."""
        lacking, described = [], []
        for one in contents:
            heads = {info.name for info in one.heads}
            lacking += [
                f"{one.namespace}/{info.name}" for info in one.segments if info.name + HEAD not in heads
            ]
            described += [f"{one.namespace}/{FINGERPRINT}"] if one.others and (one.segments or heads) else []
        lacking = [name for name in lacking if name not in self._done]
        described = [name for name in described if name not in self._done]
        left = {*lacking, *described}
        if self._ended or not left:
            return left, True
        try:
            with self._alone() as is_alone:
                if not is_alone or not self._begin():
                    return left, is_alone
                for first in range(0, len(lacking), _AT_ONCE):
                    some = lacking[first : first + _AT_ONCE]
                    left.difference_update(self._upload_some(some))
                    if left.intersection(some):
                        return left, True
                left.difference_update([name for name in described if self._describe(name)])
        except OSError:  # the folder is gone, or read-only
            pass
        return left, True

    def _begin(self) -> bool:
        """Check or write the bucket's tag; False if the bucket fails, or is not for us."""
        if not self._has_tag:
            (tag,) = self._objects.fetch([(TAG, 0, 4096)], may_be_short=True)
            if isinstance(tag, FileNotFoundError):
                self._has_tag = self._objects.write(TAG, TAG_TEXT.encode())
            elif not isinstance(tag, AwayError):
                self._has_tag = isinstance(tag, bytes) and stated_format(tag) == FORMAT_VERSION
                if not self._has_tag:
                    self._end(f"its {TAG} is of a newer format, or of another program")
        return self._has_tag

    def _upload_some(self, names: Sequence[str]) -> list[str]:
        """Upload segments, and write their heads; returns those that the bucket has, or that are no use."""
        found, done = dict[str, tuple[str, bytes]](), list[str]()
        size = self._bytes_there() if self._most is not None else 0
        if size is None:
            return done
        for name in names:
            path = os.path.join(self._directory.path, name)
            try:
                head, nbytes = read_head(self._fs, path)
                layout, _ = parse_head(head, nbytes, _ANY_SIZE, structured=False)
                is_useful = layout.namespace.hex() == name.partition("/")[0]  # else the folder was renamed
            except (OSError, UnreadableError) as error:
                is_useful = False
                self._leave(path, error)
            if not is_useful:
                self._done.add(name)
            if not is_useful or self._fs.is_file(path + HEAD):  # another process has just uploaded it
                done.append(name)
                continue
            size += nbytes
            if self._most is not None and size > self._most:
                self._end(f"the bucket has {size - nbytes} bytes, and remote_size={self._most}")
                break
            found[name] = path, head
        answers = self._objects.write_all([(name, path) for name, (path, _) in found.items()])
        for (name, (path, head)), is_there in zip(found.items(), answers, strict=True):
            if is_there or not self._fs.is_file(path):
                done.append(name)
                try:
                    if self._fs.is_file(path):  # if it was dropped meanwhile, write no head
                        write_head(self._fs, path, head)
                except OSError:
                    self._done.add(name)
        return done

    def _leave(self, path: str, error: Exception) -> None:
        """Say why a segment is not uploaded, and set it aside if it is damaged."""
        if isinstance(error, DamagedError):
            self._objects.corrupt += 1
            self._objects.tell("corrupt", "%s is damaged (%s): it is set aside", path, str(error))
            with contextlib.suppress(OSError):
                self._directory.set_aside(path)
        elif not isinstance(error, FileNotFoundError):
            self._objects.tell("unread", "%s is not uploaded: %s", path, repr(error))

    def _bytes_there(self) -> int | None:
        """Bytes of the cache in the bucket, as other machines upload, too; None if it fails."""
        listings = [self._objects.listing()]
        folders = [info.name for info in listings[0] or [] if info.is_folder]
        listings += [self._objects.listing(name) for name in folders if NAMESPACE_NAME.fullmatch(name)]
        if any(listing is None for listing in listings):
            return None
        return sum(info.size for listing in listings for info in listing or [])

    def _end(self, reason: str) -> None:
        self._ended = reason
        message = "nothing more is uploaded to %s: %s. New rows stay in %s"
        url = self._objects.bucket.url
        self._objects.tell("ended", message, url, reason, self._directory.path)

    def _describe(self, name: str) -> bool:
        """Upload a fingerprint, unless the bucket has one; False if that must be tried again."""
        (there,) = self._objects.fetch([(name, 0, 1)])
        is_done = not isinstance(there, AwayError)
        document = self._directory.fingerprint(name.partition("/")[0])
        if isinstance(there, FileNotFoundError) and document:
            text = json.dumps(document, indent=1, sort_keys=True).encode()
            is_done = self._objects.write(name, text)
        if is_done:
            self._done.add(name)
        return is_done

    def _close_at_end(self) -> None:
        if self._runs() and not self._is_closed:
            self._flush_first()
            self.close()

    # Bringing segments to the folder.

    def _bring(self, contents: list[Contents]) -> bool:
        """Bring some segments of wanted namespaces that this process uses; whether some came."""
        names, room = list[str](), self._budget - used_bytes(contents)
        for one in contents:
            here = {info.name for info in one.segments}
            here |= {info.name.removesuffix(CORRUPT) for info in one.corrupt}
            self._been_here.update(f"{one.namespace}/{name}" for name in here)
            if one.asked and one.namespace in self._folder.used:
                if one.temporary:
                    self._folder.clear_up(one.namespace)
                names += [f"{one.namespace}/{info.name.removesuffix(HEAD)}" for info in one.heads]
        size, some, useless = 0, list[str](), self._been_here | self._folder.bad
        for name in names:
            if size < _GROUP and name not in useless:
                with contextlib.suppress(OSError):
                    needed = self._folder.sizes_of(os.path.join(self._directory.path, name))[1]
                    if size + needed <= room:
                        size += needed
                        some.append(name)
        return bool(some) and self._folder.bring(some, lambda: self._is_closed or bool(self._flushing))
