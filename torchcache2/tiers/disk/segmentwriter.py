"""`SegmentWriter`: queues rows that were put, and writes them as segments of a cache directory.

`delete_files` deletes the segments of a dropped namespace.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Rows, Schema
from torchcache2.core.settings import Policy
from torchcache2.files.codec import Codec
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import StrangeFileError, is_read_only, ulid
from torchcache2.files.indexfile import is_due, write_index_files
from torchcache2.files.layout import HEAD, SEGMENT
from torchcache2.files.removal import Removal, room_after, used_bytes
from torchcache2.files.segment import Encoded, Segment, encode, write
from torchcache2.identity.marks import __version__
from torchcache2.tiers.bucket.source import BucketSource
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.index import NamespaceIndex, TierIndex
from torchcache2.tiers.unwritten import OwnRows, Pending, Serialisable, Slabs
from torchcache2.tiers.writer import Writer

# Seconds to wait for room: for one segment to be uploaded, for a touch of the mirror's file, between polls.
PATIENCE, SILENCE, PAUSE = 120.0, 10.0, 0.05
_SHARE = 8  # a writer uses at most 1/8 of the room found, as others write too


def delete_files(index: TierIndex, health: Health, namespace: bytes) -> None:
    """Delete the segments of a namespace, and close them; without the lock.

    Files that cannot be deleted, such as another user's, are never opened again.
    """
    directory = index.directory
    folder = directory.folder(namespace)
    try:
        contents = directory.contents(namespace.hex())
        names = [info.name for info in (*contents.segments, *contents.corrupt)]
        removal = Removal(directory, math.inf)
        try:
            if health.writes:
                removal.files(contents)
        finally:
            for name in names:
                index.descriptors.forget(os.path.join(folder, name))
            index.remove_files(namespace, names)  # another thread may have opened them since
        if removal.error is not None:
            health.fault(removal.error, folder)
        if contents.segments:
            with index.lock():
                index.ignore(namespace, [info.name for info in contents.segments])
    except OSError as error:
        health.fault(error, folder)


class SegmentWriter:
    """Keeps the rows of one tier until they are written, in segments of `target` bytes.

    The whole directory has at most `budget` bytes. `description(namespace)` is written to
    ``fingerprint.json``. A `temporary` directory is not made again once deleted. In front of a `bucket`,
    segments that the bucket lacks are never deleted: new segments wait until there is room.

    Attributes
    ----------
    evictions : int
        Rows forgotten to make room.
    lost : int
        Rows forgotten as they could not be written.
    is_last : bool
        Whether this is the last try to write rows, as the tier is being closed.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        index: TierIndex,
        health: Health,
        codec: Codec,
        budget: int,
        policy: Policy,
        description: Callable[[bytes], Mapping[str, Any]] | None,
        *,
        target: int,
        temporary: bool,
        bucket: BucketSource | None,
        publishing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.evictions = self.lost = 0
        self.is_last = False
        self._directory = directory
        self._fs = directory.fs
        self._index = index
        self._health = health
        self._codec = codec
        self._budget = budget
        self._policy = policy
        self._description = description
        self._temporary = temporary
        self._bucket = bucket
        self._publishing = publishing
        self._target, self._allowed = target, 0  # bytes that may be written without a look at the directory
        self._one_at_a_time = ProcessLock()
        self._serialisable = Serialisable(health.tell, "such outputs stay in memory, not on disk: %s")
        self._slabs = Slabs()

    def takes(self, namespace: bytes, schema: Schema) -> bool:
        """Whether rows of a namespace and schema can be written now."""
        folder = self._directory.folder(namespace)
        if not self._health.may_write(folder) or self._index.closed or schema.row_bytes > self._budget:
            return False
        return self._serialisable(schema)

    def keep(self, keys: Keys, rows: Rows) -> int:
        """Queue the rows that are not here yet; returns how many these are."""
        own = OwnRows(rows, self._slabs, is_added=True)
        with self._index.lock():
            self._index.begin()
            if self._index.closed or self._index.writer is None:
                return 0
            try:
                index = self._index.namespace(keys.namespace)
                if not self._health.writes:  # the look found files of a newer format
                    return 0
                absent = np.flatnonzero(index.find(keys.words).numbers < 0)
                if len(absent) < len(keys):
                    keys, own = keys.take(absent), own.take(absent)
                self._queue_rows(self._index.writer, index, keys, own)
            except BaseException:
                self._index.start_anew(keys.namespace)
                raise
        return len(keys)

    def _queue_rows(self, writer: Writer, index: NamespaceIndex, keys: Keys, own: OwnRows) -> None:
        """Add rows to open segments, in pieces, so that no segment gets much larger than the target."""
        family = own.schema.family
        step = max(1, writer.pace.target // max(1, own.schema.row_bytes))
        for start in range(0, len(keys), step):
            some, piece = keys, own
            if step < len(keys):
                some = keys.take(np.arange(start, min(len(keys), start + step)))
                piece = own.part(start, start + len(some))
            pending = writer.open(keys.namespace, family, self._index.numbers)
            before = pending.nbytes
            index.add(some.data, pending, pending.add(some, piece))
            writer.added(pending, family, pending.nbytes - before)

    def write(self, pending: Pending) -> bool:
        """Write rows; returns whether they are in a segment.

        If the system fails, they are queued again while there is room, and else forgotten. The writer deals
        with interrupts.
        """
        folder = self._directory.folder(pending.namespace)
        waits = bool(pending.name) and self._health.left_for(folder) > 0 and not self.is_last
        if waits and self._waits_on(pending):
            return False
        try:
            encoded = encode(pending.rows(), self._codec, library=__version__)
            index = self._named(pending)
            if index is None or not self._placed(pending, encoded):
                self.forget(pending)
                return False
            self._publish(index, pending, encoded)
            self._write_index_files(index)
            return True
        except Exception as error:
            self._health.write_fault(error, folder)
            passes = isinstance(error, (OSError, MemoryError)) and not isinstance(error, StrangeFileError)
            is_lasting = not passes or (isinstance(error, OSError) and is_read_only(error))
            if is_lasting or not self._waits_on(pending):
                self.lost += 0 if is_lasting else len(pending)
                self.forget(pending)
            return False

    def _named(self, pending: Pending) -> NamespaceIndex | None:
        """Give rows the name of a file that nobody opens yet; None if they are not to be written."""
        with self._index.lock():
            self._index.begin()
            index = self._index.namespaces.get(pending.namespace)
            if index is None or pending.dropped or not self._health.writes:
                return None
            pending.name = ulid() + SEGMENT
            index.names.add(pending.name)
            return index

    def _publish(self, index: NamespaceIndex, pending: Pending, encoded: Encoded) -> None:
        """Have rows found in their file, which is removed instead if they were dropped meanwhile."""
        path = os.path.join(self._directory.folder(pending.namespace), pending.name)
        segment = Segment.written(self._index.directory.fs, self._index.descriptors, path, encoded)
        segment.keys = None
        with self._index.lock():
            self._index.begin()
            self._health.worked()
            is_known = self._index.closed or self._index.namespaces.get(pending.namespace) is index
            if pending.dropped or not is_known:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.remove(path)
            else:
                index.written(pending.number, segment)
        if self._bucket is not None:
            self._bucket.mirror.wake()

    def _write_index_files(self, index: NamespaceIndex) -> None:
        """Write index files if many rows are in none, unless the process is about to end."""
        with self._index.lock():  # another thread may add files
            beside = index.beside_index_files
        if self.is_last or not is_due(*beside):
            return
        try:
            if not write_index_files(
                self._index.directory, index.namespace, self._index.limit, self._has_room_for_index
            ):
                return
            with self._index.lock():
                if self._index.namespaces.get(index.namespace) is index:  # it forgets what these have
                    index.look_again()
                    index.look()
        except FileNotFoundError:
            pass  # the folder was deleted
        except OSError as error:
            self._health.fault(error, self._directory.folder(index.namespace))

    def _has_room_for_index(self, size: int) -> bool:
        """Whether an index file fits into the budget; under ``lru``, a small one may evict segments."""
        if self._policy != "lru" or self._bucket is not None or size > self._budget // 8:
            return used_bytes(self._directory.scan()) + size <= self._budget
        self._index.hold_what_is_used()
        with contextlib.suppress(PermissionError), self._one_at_a_time():
            return self._room_after(size) >= 0
        return False

    def _waits_on(self, pending: Pending) -> bool:
        """Queue rows again until the pause is over; False if there is no room for them."""
        writer = self._index.writer
        left = self._health.left_for(self._directory.folder(pending.namespace))
        return writer is not None and writer.again(pending, left)

    def _placed(self, pending: Pending, encoded: Encoded) -> bool:
        """Write a segment; False if there is no room for it, or it was dropped."""
        namespace = pending.namespace
        described = self._description(namespace) if self._description is not None else {}
        for is_last in (False, True):
            if self._temporary and not self._fs.exists(self._directory.path):
                return False  # its run has ended, so no process would delete it again
            # `held` keeps other processes from deleting the namespace until the segment is written: the cache
            # that put the rows may be closed by now.
            held, extra = self._index.held(namespace), 0
            if held is None:
                held = self._directory.enter(namespace, described)
                with contextlib.suppress(OSError):
                    extra = self._fs.size(held) if held is not None else 0  # written just now?
                self._index.hold(namespace)
            try:
                with self._one_at_a_time():  # else two threads could use the same room
                    if not self._has_room(encoded.nbytes, extra):
                        return False
                    with self._publishing():
                        if self._is_dropped(pending):
                            return False
                        write(self._fs, self._directory.folder(namespace), pending.name, encoded)
                return True
            except FileNotFoundError:  # the folder was deleted although it is held
                if is_last:
                    raise
            finally:
                del held
        return False

    def _is_dropped(self, pending: Pending) -> bool:
        with self._index.lock():
            self._index.begin()  # another process may have dropped rows
            return pending.dropped

    def forget(self, pending: Pending) -> None:
        """Forget rows that will not be written."""
        self._index.remove(pending.namespace, [pending.number])

    def _has_room(self, size: int, extra: int) -> bool:
        """Whether a segment fits into the budget, beside `extra` bytes written just now."""
        if size > self._budget:
            return False
        # A look at thousands of files takes longer than writing one. Writers do not see each other, so
        # each may exceed the budget by a segment.
        self._allowed -= size + extra
        if self._allowed >= 0:
            return True
        self._allowed = 0
        self._index.hold_what_is_used()
        room = -1
        try:
            room = self._room_after(size)
        except PermissionError:
            self._health.faults += 1  # the segments that would make room belong to another user
        if room < 0:
            self._health.full(self._budget, mirrored=self._bucket is not None)
            return False
        self._allowed = min(self._target - size, room // _SHARE)
        return True

    def _room_after(self, size: int) -> int:
        """The bytes left after writing a segment; negative if it does not fit.

        In front of a bucket, waits while segments that may then be deleted are uploaded.
        """
        room, lacking = self._room_now(size), None
        begun = heard = time.monotonic()
        while room < 0 and self._bucket is not None and lacking != set():
            now = time.monotonic()
            before, lacking = lacking, self._lacking()
            if before is None or before - lacking:
                begun, room = now, self._room_now(size)
                continue
            if self._bucket.mirror.is_uploading():
                heard = now
            if now - heard > SILENCE or now - begun > PATIENCE:
                break
            time.sleep(max(PAUSE, 5 * (time.monotonic() - now)))  # a look at many files takes long
        return room

    def _room_now(self, size: int) -> int:
        return room_after(
            self._directory,
            size,
            self._budget,
            lru=self._policy == "lru",
            mirrored=self._bucket is not None,
            removed=self._removed,
        )

    def _removed(self, namespace: str, names: list[str]) -> None:
        self.evictions += self._index.remove_files(bytes.fromhex(namespace), names)

    def _lacking(self) -> set[tuple[str, str]]:
        """Namespaces and names of the segments that have no head: the bucket lacks them."""
        lacking: set[tuple[str, str]] = set()
        for contents in self._directory.scan():
            heads = {info.name for info in contents.heads}
            some = [info.name for info in contents.segments if info.name + HEAD not in heads]
            lacking.update((contents.namespace, name) for name in some)
        return lacking
