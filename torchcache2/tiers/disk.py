"""`DiskTier`: rows in the segments of a cache directory, written behind the caller's back.

Rows that were put can be read at once; they are on the disk when they are sealed in a segment, which
happens when there are enough of them, after some seconds, at `flush` and `close`, and at exit. Rows that
other processes have sealed are found when something is missing.

Safe under threads. Safe for any number of processes on one directory: nothing is ever modified, and
a segment appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from torchcache2 import codec as codecs
from torchcache2.directory import CacheDirectory, NewerDirectoryError
from torchcache2.eviction import make_room, used_bytes
from torchcache2.gather import with_ordinary_tensors
from torchcache2.keys import Keys
from torchcache2.locks import ProcessLock
from torchcache2.rows import Rows, Schema
from torchcache2.schemajson import UnserialisableError
from torchcache2.segment import DamagedError, schema_text
from torchcache2.segmentread import Descriptors, Segment
from torchcache2.segmentwrite import SEGMENT, Encoded, encode, ulid, write
from torchcache2.settings import Policy
from torchcache2.storage import FileSystem
from torchcache2.tiers.base import Found, Positions, TierStats
from torchcache2.tiers.fetch import fetch
from torchcache2.tiers.health import Health
from torchcache2.tiers.located import Located, Source
from torchcache2.tiers.pending import Held, Pending, Slabs
from torchcache2.tiers.writer import Writer
from torchcache2.version import __version__

__all__ = ["DiskTier", "queue_limit"]

_SEGMENT_BYTES = 64 << 20
_SEALED_AFTER = 5.0  # seconds
_MOST_QUEUED = 256 << 20
_LEAST_QUEUED = 16 << 20
_TOUCHED_EVERY = 60.0  # seconds

Array = np.ndarray[Any, np.dtype[Any]]


def queue_limit(memory_budget: int) -> int:
    """Bytes of a memory budget for rows that wait to be written; some, however small it is."""
    return max(_LEAST_QUEUED, min(_MOST_QUEUED, memory_budget // 4))


class DiskTier:
    """Rows in segments.

    Parameters
    ----------
    path : str
        The directory; made if it does not exist.
    budget : int
        Bytes of the whole directory, whoever wrote them. Exceeded by one segment a writer at most.
    policy : {"mru", "lru"}
        What to do when it is full of rows that are in use: stop writing, or delete the segments that were
        not used for longest.
    codec : {"brotli", "blosc2", "none"}
    quality : int
        Of the codec.
    queue : int
        Bytes of rows that may wait to be written; a caller that brings more waits.
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.
    describe : callable, optional
        What a namespace stands for, for its ``fingerprint.json``.
    fs : FileSystem, optional
    delay : float
        Seconds after which rows are sealed, however few.
    temporary : bool
        Whether nobody will open the directory again: `close` does not write what waits.

    Raises
    ------
    OptionError
        If the path is a file, or a folder with somebody else's files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int = 10_000_000_000,
        policy: Policy = "mru",
        codec: str = "brotli",
        quality: int = 1,
        *,
        queue: int = _MOST_QUEUED,
        in_use: Callable[[], Collection[bytes]] | None = None,
        describe: Callable[[bytes], Mapping[str, Any]] | None = None,
        fs: FileSystem | None = None,
        delay: float = _SEALED_AFTER,
        temporary: bool = False,
    ) -> None:
        self.budget = budget
        self.policy = policy
        self._fs = fs if fs is not None else FileSystem()
        self.directory = CacheDirectory(os.fspath(path), self._fs)
        self._codec = codecs.codec(codec, quality)
        self._queue = queue
        self._in_use = in_use
        self._describe = describe
        self._delay = delay
        self._temporary = temporary
        self._lock = ProcessLock(threading.RLock)
        self._sealing = ProcessLock()
        self._numbers = itertools.count()
        self._descriptors = Descriptors(self._fs)
        self._located: dict[bytes, Located] = {}
        self._touched: dict[str, float] = {}
        self._serialisable: dict[Schema, bool] = {}
        self._writer: Writer | None = None
        self._slabs = Slabs()
        self._closed = False
        self._evictions = 0
        self._health = Health(self.directory)
        self._open_directory()

    @property
    def path(self) -> str:
        """The directory."""
        return self.directory.path

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here, read into fresh memory."""
        try:
            return Found(self._find(keys))
        except Exception as error:  # such as no memory: a fault is a miss
            self._health.fault(error, self.path)
            return Found([])

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, to be written soon; waits only while too many wait already."""
        if not self._takes(keys.namespace, rows.schema) or len(keys) == 0:
            return 0
        try:
            kept = self._keep(keys, rows)
        except Exception as error:
            self._health.fault(error, self.path)
            return 0
        if kept and self._writer is not None:
            self._writer.wait_for_room()
        return kept

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, and delete its segments."""
        if self._lock()._is_owned():
            self._later(self.drop, namespace)  # the garbage collector calls, while tables change
            return
        with self._lock():
            self._begin()
            self._start_anew(namespace)
        left: set[str] = set()
        try:
            contents = self.directory.contents(namespace.hex())
            if not self._health.writes:
                with self._lock():
                    if self._health.reads:  # they cannot be deleted: never open them again
                        self._new_namespace(namespace).names = {entry.name for entry in contents.segments}
                return
            for entry in (*contents.segments, *contents.corrupt):
                path = os.path.join(self.directory.folder(namespace), entry.name)
                try:
                    self._fs.remove(path)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    self._health.fault(error, path)
                    left.add(entry.name)
                self._descriptors.forget(path)
                self._remove_file(namespace, entry.name)  # another thread may have opened it meanwhile
            if left:
                with self._lock():  # such as another user's: never open them again
                    located = self._located.get(namespace) or self._new_namespace(namespace)
                    located.names |= left
        except OSError as error:
            self._health.fault(error, self.directory.folder(namespace))

    def flush(self) -> None:
        """Return when everything that was put is sealed, or forgotten because of a fault."""
        if self._is_busy_here():
            return  # it is written soon
        with self._lock():
            self._begin()
            writer = self._writer
        if writer is not None:
            writer.flush()

    def close(self) -> None:
        """Flush, and let go of every file and the thread; nothing is found or kept from then on."""
        if self._closed:
            return
        if self._is_busy_here():
            self._later(self.close)
            return
        if not self._temporary:
            self.flush()
        with self._lock():
            self._begin()
            self._closed = True
            writer = self._writer
            if writer is not None and self._temporary:
                for namespace in list(self._located):
                    writer.drop(namespace)
        if writer is not None:
            writer.end()
        with self._lock():
            self._located.clear()
            self._descriptors.clear()

    def stats(self) -> TierStats:
        """Rows of the namespaces that were asked for, and the bytes of the whole directory."""
        with self._lock():
            self._begin()
            rows = sum(map(len, self._located.values()))
        try:
            size = used_bytes(self.directory.scan()) if self._health.reads else 0
        except OSError as error:
            self._health.fault(error, self.path)
            size = 0
        return TierStats(rows, size, self._evictions, self._health.corrupt, self._health.faults)

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that finding rows takes."""
        with self._lock():
            return sum(located.nbytes for located in self._located.values())

    def _is_busy_here(self) -> bool:
        """Whether the garbage collector calls, in the middle of what this thread does with this tier."""
        writes = self._writer is not None and self._writer.writes_here()
        return writes or bool(self._lock()._is_owned())

    def _later(self, function: Callable[..., None], *args: object) -> None:
        # If no thread can be started, the process ends, and `atexit` closes.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=function, args=args, daemon=True).start()

    def _open_directory(self) -> None:
        try:
            self.directory.check()
            self.directory.create()
            self.directory.remove_leftovers()
        except NewerDirectoryError as error:
            self._health.newer(str(error))
        except OSError as error:
            self._health.write_fault(error, self.path)

    def _begin(self) -> None:
        """Make what belongs to this process; with the lock held."""
        torn = self._lock.was_torn()
        if self._writer is not None and self._writer.pid == os.getpid():
            return
        if torn:
            # The parent was in the middle of something in another thread.
            self._located = {}
            self._descriptors = Descriptors(self._fs)
        elif self._writer is not None:
            for located in self._located.values():
                located.forget_pending()  # the parent writes them
        target = max(1, min(_SEGMENT_BYTES, self.budget // 8, self._queue // 4))
        self._writer = Writer(
            self._lock(),
            self._write,
            self._forget,
            target=target,
            limit=self._queue,
            delay=self._delay,
            at_exit=self.close,
        )

    def _namespace(self, namespace: bytes) -> Located:
        located = self._located.get(namespace)
        if located is None:
            located = self._new_namespace(namespace)
            located.look()
        return located

    def _new_namespace(self, namespace: bytes) -> Located:
        located = self._located[namespace] = Located(
            namespace,
            self.directory,
            self._descriptors,
            lambda: next(self._numbers),
            max(self.budget, 1),
            self._health.fault,
        )
        return located

    def _find(self, keys: Keys) -> list[tuple[Positions, Rows]]:
        if keys.namespace not in self._located:
            self._hold_what_is_used()  # or a process that only reads would hold all that it ever used
        with self._lock():
            self._begin()
            if self._closed or not self._health.reads:
                return []
            try:
                located = self._namespace(keys.namespace)
                located.keep_hold()
                entries = located.find(keys.words)
                if (entries < 0).any() and located.look():
                    entries = located.find(keys.words)  # all of them: entries move
            except BaseException:
                self._start_anew(keys.namespace)
                raise
            positions = np.flatnonzero(entries >= 0)
            if not self._health.reads or len(positions) == 0:
                return []
            numbers, rows = located.where(entries[positions])
            sources = {number: located.sources[number] for number in np.unique(numbers).tolist()}

        def lost(number: int, source: Source, error: Exception) -> None:
            if not isinstance(error, FileNotFoundError):  # else another process has made room
                self._health.fault(error, getattr(source, "path", self.path))
            self._remove_source(keys.namespace, number, is_damaged=isinstance(error, DamagedError))

        found = fetch(sources, numbers, rows, positions, lost)
        for source in sources.values():
            self._touch(source)
        return found

    def _touch(self, source: Source) -> None:
        """Say that a segment is in use; at most once a minute."""
        if isinstance(source, Segment) and self._health.writes:
            now = time.monotonic()
            if now - self._touched.get(source.path, -_TOUCHED_EVERY) >= _TOUCHED_EVERY:
                self._touched[source.path] = now
                with contextlib.suppress(OSError):
                    self._fs.touch(source.path)

    def _takes(self, namespace: bytes, schema: Schema) -> bool:
        """Whether rows of a namespace and schema can be written at all."""
        if not self._health.may_write(namespace) or self._closed:
            return False
        if schema.row_bytes > self.budget:
            return False
        known = self._serialisable.get(schema)
        if known is None:
            try:
                schema_text(schema)
                known = True
            except UnserialisableError as error:
                self._health.tell("schema", "such outputs stay in memory, not on disk: %s", str(error))
                known = False
            if len(self._serialisable) > 1000:
                self._serialisable.clear()
            self._serialisable[schema] = known
        return known

    def _keep(self, keys: Keys, rows: Rows) -> int:
        held = Held(rows, self._slabs)
        with self._lock():
            self._begin()
            if self._closed or self._writer is None:
                return 0
            try:
                located = self._namespace(keys.namespace)
                located.keep_hold()
                if not self._health.writes:  # what is there is of a newer format
                    return 0
                absent = np.flatnonzero(located.find(keys.words) < 0)
                if len(absent) < len(keys):
                    keys, held = keys.take(absent), held.take(absent)
                self._queue_rows(self._writer, located, keys, held)
            except BaseException:
                self._start_anew(keys.namespace)
                raise
        return len(keys)

    def _queue_rows(self, writer: Writer, located: Located, keys: Keys, held: Held) -> None:
        """Have rows join segments to be, none of them much larger than it should."""
        family = held.schema.family
        step = max(1, writer.target // max(1, held.schema.row_bytes))
        for start in range(0, len(keys), step):
            some, piece = keys, held
            if step < len(keys):
                some = keys.take(np.arange(start, min(len(keys), start + step)))
                piece = held.part(start, start + len(some))
            pending = writer.open(keys.namespace, family, lambda: next(self._numbers))
            located.sources[pending.number] = pending
            first = pending.add(some, piece)
            located.add(some.data, pending.number, first)
            writer.added(pending, family)

    def _write(self, pending: Pending) -> None:
        """Seal rows; they are forgotten if that fails. Interrupts are left to the writer."""
        folder = self.directory.folder(pending.namespace)
        name = ulid() + SEGMENT
        try:
            encoded = encode(pending.rows(), self._codec, library=__version__)
            with self._lock():
                located = self._located.get(pending.namespace)
                if located is None or pending.dropped or not self._health.writes:
                    self._forget(pending)
                    return
                located.names.add(name)
                pending.name = name
            described = self._describe(pending.namespace) if self._describe is not None else {}
            if not self._sealed(pending, folder, name, encoded, described):
                self._forget(pending)
                return
            path = os.path.join(folder, name)
            segment = Segment.written(self._fs, self._descriptors, path, encoded)
            segment.keys = None
            with self._lock():
                self._health.wrote(pending.namespace)
                is_forgotten = not self._closed and self._located.get(pending.namespace) is not located
                if pending.dropped or is_forgotten:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.remove(path)
                elif pending.number in located.sources:
                    located.sources[pending.number] = segment
        except Exception as error:
            self._forget(pending)
            self._health.write_fault(error, folder, pending.namespace)

    def _sealed(
        self, pending: Pending, folder: str, name: str, encoded: Encoded, described: Mapping[str, Any]
    ) -> bool:
        """Write a segment; False if there is no room for it."""
        for is_last in (False, True):
            if self._temporary and not self._fs.exists(self.path):
                return False  # its run has ended: nobody would delete it again
            # Held until it is written: what uses the namespace may be gone, and the tier itself let go of it.
            held = self.directory.enter(pending.namespace, described)
            try:
                with self._sealing():  # one at a time: both would see the same room
                    if not self._has_room(encoded.nbytes):
                        return False
                    write(self._fs, folder, name, encoded)
                return True
            except FileNotFoundError:  # somebody has deleted the folder in spite of the hold
                if is_last:
                    raise
            finally:
                del held
        return False

    def _forget(self, pending: Pending) -> None:
        self._remove_source(pending.namespace, pending.number)

    def _remove_source(self, namespace: bytes, number: int, *, is_damaged: bool = False) -> int:
        """Rows of a source are not found any more; how many there were."""
        with self._lock():
            located = self._located.get(namespace)
            if located is None:
                return 0
            try:
                return located.remove(number, is_damaged=is_damaged)
            except BaseException:
                self._start_anew(namespace)
                raise

    def _start_anew(self, namespace: bytes) -> None:
        """Forget what is in memory of a namespace, and find again what is sealed; with the lock held.

        As after an interrupt, when tables may be half changed.
        """
        located = self._located.pop(namespace, None)  # first: nothing may find rows that are dropped
        if located is not None:
            located.let_go()
        dropped = self._writer.drop(namespace) if self._writer is not None else []
        if names := {pending.name for pending in dropped if pending.name}:
            # Their files may appear for a moment, until whoever writes them sees that they are dropped.
            self._new_namespace(namespace).names = names

    def _has_room(self, size: int) -> bool:
        if size > self.budget:
            return False
        self._hold_what_is_used()
        try:
            if make_room(self.directory, size, self.budget, lru=self.policy == "lru", removed=self._removed):
                return True
        except PermissionError:
            self._health.faults += 1  # what would have to go is another user's
        except OSError as error:
            self._health.write_fault(error, self.path)  # not that of the namespace that is to be written
            return False
        self._health.full(self.budget)
        return False

    def _hold_what_is_used(self) -> None:
        """Hold the namespaces that something alive uses, and no others."""
        in_use = None if self._in_use is None else self._in_use()
        with self._lock():
            self._begin()
            for namespace, located in self._located.items():
                if in_use is None or namespace in in_use:
                    located.hold(is_used=False)  # others may have made its folder since
                else:
                    located.let_go()

    def _removed(self, namespace: str, name: str) -> None:
        with self._lock():
            self._evictions += self._remove_file(bytes.fromhex(namespace), name)

    def _remove_file(self, namespace: bytes, name: str) -> int:
        """Rows of a file are not found any more; how many there were."""
        with self._lock():
            located = self._located.get(namespace)
            number = located.number_of(name) if located is not None else None
            return self._remove_source(namespace, number) if number is not None else 0
