"""`DiskTier`: rows in the segments of a cache directory, written asynchronously.

Rows can be read as soon as they are put. They reach the disk when they are written in a segment: when there
are enough of them, after some seconds, at `flush` and `close`, and at exit. If rows are missing, the tier
looks for new segments of other processes.

Thread-safe; processes may share a directory, since files appear whole and never change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from torchcache2.core.errors import NewerFormatError
from torchcache2.core.keys import Flags, Keys
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.process import holds
from torchcache2.core.rows import Rows
from torchcache2.core.settings import Policy
from torchcache2.files import codec as codecs
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.removal import remove_leftovers, unused_now, used_bytes
from torchcache2.tiers.base import Found, Signals, Tier, TierStats
from torchcache2.tiers.bucket.source import BucketSource
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.index import TierIndex
from torchcache2.tiers.disk.reading import Reader
from torchcache2.tiers.disk.segmentwriter import SegmentWriter, delete_files
from torchcache2.tiers.writer import Pace, Writer

_SEGMENT_BYTES = 64 << 20
_SEALED_AFTER = 5.0  # seconds
_QUEUED = 256 << 20


class DiskTier(Tier):
    """Rows in segments.

    Parameters
    ----------
    path : str
        The directory; made if it does not exist.
    budget : int
        The most bytes of the whole directory, by all writers. Each writer may exceed it by one segment.
    policy : {"keep", "lru"}
        If it is full of rows in use, ``keep`` stops writing; ``lru`` deletes the least recently used
        segments.
    codec : {"brotli", "blosc2", "none"}
    quality : int, of the codec
    queue : int
        Bytes of rows that may wait to be written. A caller that puts more waits until there is room.
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.
    description : callable, optional
        What a namespace stands for, for its ``fingerprint.json``.
    delay : float
        Seconds after which rows are written, however few; see `torchcache2.tiers.writer.Pace`.
    temporary : bool
        Whether the directory is deleted with this process, whose `close` then writes no more rows. Forked
        children write theirs as long as the directory exists.
    closed : callable, optional
        Called at the end of `close`, such as to delete a temporary directory.
    signals : Signals, optional
        Signals between the processes of a job.
    bucket : BucketSource, optional
        The bucket below the directory, closed with the tier. It gets every segment, and its segments are
        found too. Only segments that are in the bucket are deleted here to make room.
    writes : bool
        False: change nothing in the directory, and serve the good rows of damaged segments.

    Raises
    ------
    OptionError
        If the path is a file, or a folder with other programs' files.
    """

    name = "disk"
    is_lasting = True
    directory: CacheDirectory

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int = 10_000_000_000,
        policy: Policy = "keep",
        codec: str = "brotli",
        quality: int = 1,
        *,
        queue: int = _QUEUED,
        in_use: Callable[[], Collection[bytes]] | None = None,
        description: Callable[[bytes], Mapping[str, Any]] | None = None,
        fs: FileSystem | None = None,
        delay: float = _SEALED_AFTER,
        temporary: bool = False,
        closed: Callable[[], None] | None = None,
        signals: Signals | None = None,
        bucket: BucketSource | None = None,
        writes: bool = True,
    ) -> None:
        self.budget = budget
        self.policy = policy
        self.bucket = bucket
        if bucket is None:
            self.directory = CacheDirectory(os.fspath(path), fs if fs is not None else FileSystem())
            folder, limit = self.directory, max(budget, 1)
        else:
            self.directory, folder, limit = bucket.local, bucket.directory, bucket.limit
        self._queue = queue
        self._target = max(1, min(_SEGMENT_BYTES, budget // 8, queue // 4))
        self._delay = delay
        self._goes_with = os.getpid() if temporary and bucket is None else None  # the process
        self._on_closed = closed
        self._signals = Signals() if signals is None else signals
        drops = self._signals.drops
        self._health = Health(self.directory, self._signals.tell, serves_only=not writes)
        self._index = TierIndex(folder, self._health, limit, in_use, self._make_writer, drops)
        self._lock = self._index.lock
        self._writer = SegmentWriter(
            self.directory,
            self._index,
            self._health,
            codecs.codec(codec, quality),
            budget,
            policy,
            description,
            target=self._target,
            temporary=temporary,
            bucket=bucket,
            publishing=self._signals.publishing,
        )
        self._reader = Reader(self._index, self._health, bucket)
        self._open_directory()

    @property
    def cause(self) -> Exception | None:
        """The fault that keeps the tier from using its bucket now; None if there is none."""
        return None if self.bucket is None else self.bucket.objects.cause

    @property
    def path(self) -> str:
        """The directory."""
        return self.directory.path

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows that the tier has for these keys, read into fresh memory."""
        try:
            return Found(self._reader.find(keys))
        except Exception as error:  # such as a lack of memory; a fault is a miss
            self._health.fault(error, self.path)
            return Found([])
        finally:
            if self.bucket is not None:
                self.bucket.folder.done()

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now, written or not."""
        try:
            return self._reader.has(keys)
        except Exception as error:
            self._health.fault(error, self.path)
            return np.zeros(len(keys), bool)

    def look_again(self, namespace: bytes) -> None:
        """Have the next call look for segments of other processes."""
        with self._lock():
            index = self._index.namespaces.get(namespace)
            if index is not None:
                index.look_again()

    def bring(self, namespace: bytes) -> None:
        """Bring the bucket's segments of a namespace to the folder, as far as they fit."""
        if self.bucket is not None:
            self.bucket.bring(namespace)

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows) -> int:
        """Queue rows under distinct keys to be written; waits only if the queue is full."""
        if not self._writer.takes(keys.namespace, rows.schema) or len(keys) == 0:
            return 0
        try:
            kept = self._writer.keep(keys, rows)
        except Exception as error:
            self._health.fault(error, self.path)
            return 0
        if kept and self._index.writer is not None:
            self._index.writer.wait_for_room()
        return kept

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, and delete its segments."""
        if holds(self._lock()):
            self.later(self.drop, namespace)  # the garbage collector called in the middle of an update
            return
        with self._lock():
            self._index.begin()
            self._index.start_anew(namespace)
        delete_files(self._index, self._health, namespace)
        if self.bucket is not None:
            self.bucket.drop(namespace)

    def clear(self, namespace: bytes) -> None:
        """Like `drop`, but if another process, or another tier, uses the namespace, its segments stay."""
        with self._lock():
            self._index.begin()
            self._index.start_anew(namespace)  # which no longer holds it
        try:
            with unused_now(self.directory, namespace.hex()) as is_unused:
                if is_unused is not False:
                    self.drop(namespace)
                    return
        except OSError as error:
            self._health.fault(error, self.path)
        self._health.tell("used", "the rows in %s stay there, as others use them", self.path)

    def watch(self) -> None:
        """Have the writer of this process pull rows from `above` from now on."""
        with self._lock():
            self._index.begin()
            if self._index.writer is not None:
                self._index.writer.watch()

    def flush(self) -> None:
        """Return once all rows put so far are written, or queued again after a fault."""
        if self.is_busy_here():
            return  # this thread would wait for itself; the writer writes soon
        if self.above is not None:
            self.above.gather(at_end=self._writer.is_last)
        with self._lock():
            self._index.begin()
            writer = self._index.writer
        if writer is not None:
            writer.flush()
        if self.bucket is not None:
            self.bucket.mirror.flush()

    def close(self) -> None:
        """Flush, close every file, and end the thread. Afterwards the tier finds and keeps nothing."""
        if self._index.closed:
            return
        if self.is_busy_here():
            self.later(self.close)
            return
        is_going = self._goes_with == os.getpid()
        if not is_going:
            self._writer.is_last = True
            self.flush()
        with self._lock():
            self._index.begin()
            self._index.closed = True
            writer = self._index.writer
            unwritten = [] if writer is None or is_going else [one for one in writer.all() if one.name]
            if writer is not None and is_going:
                for namespace in list(self._index.namespaces):
                    writer.drop(namespace)
        if writer is not None:
            writer.end()
        if lost := self._writer.lost + sum(map(len, unwritten)):
            self._health.tell("lost", "rows that could not be written to %s: %d", self.path, lost)
        with self._lock():
            self._index.namespaces.clear()
            self._index.descriptors.clear()
        if self.bucket is not None:
            self.bucket.close()
        if self._on_closed is not None:
            self._on_closed()

    def stats(self) -> TierStats:
        """Rows of the namespaces used so far, and bytes of the whole directory."""
        with self._lock():
            self._index.begin()
            rows = sum(map(len, self._index.namespaces.values()))
            for pending in [] if self._index.writer is None else self._index.writer.all():
                if self._health.left_for(self.directory.folder(pending.namespace)) > 0:
                    rows -= len(pending)  # it could not be written
        try:
            size = used_bytes(self.directory.scan()) if self._health.reads else 0
        except OSError as error:
            self._health.fault(error, self.path)
            size = 0
        corrupt, faults = self._health.corrupt, self._health.faults
        if self.bucket is not None:
            corrupt, faults = corrupt + self.bucket.objects.corrupt, faults + self.bucket.objects.faults
        return TierStats(rows, size, self._writer.evictions, corrupt, faults)

    def count(self, namespace: bytes) -> int:
        """How many rows of a namespace in use are here."""
        with self._lock():
            self._index.begin()
            index = self._index.namespaces.get(namespace)
            return 0 if index is None else len(index)

    def counts(self) -> dict[str, int]:
        """The fields of `CacheStats` about this tier."""
        objects = None if self.bucket is None else self.bucket.objects
        moved = {} if objects is None else {"bytes_up": objects.bytes_up, "bytes_down": objects.bytes_down}
        return super().counts() | moved

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Errors of opening segments, the last failed system call, and the fault of the bucket."""
        causes = [] if self.cause is None else [self.cause]
        return self._index.unopened(namespace) + self._health.last + causes

    @property
    def index_bytes(self) -> int:
        """Bytes of memory of all indexes."""
        with self._lock():
            return sum(index.nbytes for index in self._index.namespaces.values())

    def is_busy_here(self) -> bool:
        """Whether the garbage collector called us from this thread's own work in this tier."""
        writes = self._index.writer is not None and self._index.writer.writes_here()
        uploads = self.bucket is not None and self.bucket.mirror.is_busy_here()
        return writes or uploads or holds(self._lock())

    def _open_directory(self) -> None:
        try:
            self.directory.check()
            if self._health.writes:
                self.directory.create()
                remove_leftovers(self.directory)
        except NewerFormatError as error:
            self._health.newer(str(error))
        except OSError as error:
            self._health.write_fault(error, self.path)

    def _make_writer(self) -> Writer:
        return Writer(
            self._lock(),
            self._writer.write,
            self._writer.forget,
            Pace(target=self._target, limit=self._queue, delay=self._delay),
            signals=self._signals,
            pull=None if self.above is None else self.above.pull,
            at_exit=self.close,
        )
