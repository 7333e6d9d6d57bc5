"""`NamespaceIndex`: the segment and row of each key of a namespace.

Most rows of a large namespace are in *index files*, which are searched on disk. A table in memory has newer
rows, written or not. If several processes have computed an item, each of their segments has its row, and
look-ups find any of these.

`TierIndex` has the indexes of the namespaces that a tier uses, under one lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from torchcache2.core.errors import DamagedError, NewerFormatError, OptionError, UnreadableError
from torchcache2.core.keys import Array, Words
from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import FINGERPRINT, CacheDirectory
from torchcache2.files.filesystem import Descriptor, Descriptors, FileInfo
from torchcache2.files.indexfile import IndexFile
from torchcache2.files.layout import SEGMENT
from torchcache2.files.segment import Segment
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.index import KeyLocations
from torchcache2.tiers.unwritten import Pending
from torchcache2.tiers.writer import Writer

AnySegment = Segment | Pending
OnFault = Callable[[Exception, str], None]

_LOOK_EVERY = 0.5  # seconds between looks for segments of other writers
_SETTLED = 2e9  # nanoseconds after which another change surely changes a folder's time
_HOLD_EVERY = 0.1  # seconds
_ADDED_AT_ONCE = 1 << 20  # keys, 16 MB
_NOWHERE = -1


class RowLocations(NamedTuple):
    """Where keys are, each of shape ``(n,)``: numbers of segments (-1: nowhere), and rows in them.

    Runs provide the `checksums` of segments that were opened without their own index.
    """

    numbers: Array
    rows: Array
    checksums: Array

    def at(self, positions: Array | slice) -> RowLocations:
        """The locations of some keys."""
        return RowLocations(*(some[positions] for some in self))


class _File(NamedTuple):
    """A segment's file, and the index file's entry if that has its rows; None: the table has them."""

    name: str
    entry: Array | None


class NamespaceIndex:
    """The segments of one namespace, and the location of each key.

    `numbers` yields numbers for new segments. A row may have up to `limit` bytes. Each read error calls
    `on_fault(error, path)`.

    Attributes
    ----------
    segments : dict of int to AnySegment
        Open segments, and unsealed ones.
    names : set of str
        Names of files that are not to be opened.
    unopened : dict of str to Exception
        Errors of files that could not be opened, by name.
    """

    def __init__(
        self,
        namespace: bytes,
        directory: CacheDirectory,
        descriptors: Descriptors,
        numbers: Iterator[int],
        limit: int,
        on_fault: OnFault,
    ) -> None:
        self.namespace = namespace
        self.segments: dict[int, AnySegment] = {}
        self.names: set[str] = set()
        self.unopened: dict[str, Exception] = {}
        self.table = KeyLocations()
        self._directory = directory
        self._path = directory.folder(namespace)
        self._descriptors = descriptors
        self._next_numbers = numbers
        self._limit = limit
        self._on_fault = on_fault
        self._fingerprint = os.path.join(self._path, FINGERPRINT)
        self.is_wanted = True
        self._tried = -_HOLD_EVERY
        self._looked = -_LOOK_EVERY
        self._changed = -1
        self._files: dict[int, _File] = {}  # by number of the segment
        self._numbers: dict[str, int] = {}  # by name
        self._index_files: list[IndexFile] = []  # the largest first
        self._targets: list[Array] = []  # for each index file, the numbers of its segments, then -1
        self._seen_files: frozenset[str] = frozenset()
        self._doubted: set[str] = set()  # segments that contradict their index file
        self._lost = np.empty(0, np.int64)  # locations of damaged rows in segments that stay

    def __len__(self) -> int:
        return len(self.table) + sum(map(_rows_in_run, self._files.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the index in memory."""
        whole = [one for one in self.segments.values() if isinstance(one, Segment)]
        index_files = sum(one.nbytes for one in self._index_files)
        return self.table.nbytes + index_files + sum(one.index_bytes for one in whole)

    @property
    def beside_index_files(self) -> tuple[int, int]:
        """How many segments are in no index file, and how many rows are in memory; with the lock held."""
        return sum(file.entry is None for file in self._files.values()), len(self.table)

    # Holding the namespace, so that no process deletes it.

    def hold(self) -> None:
        """Mark the namespace as in use, so that no process deletes it.

        Does not wait for a process that is deleting, as it may wait for us. A process can hold a limited
        number of namespaces.
        """
        self.is_wanted = True
        self._tried = time.monotonic()
        if self.held() is None and self._descriptors.may_hold():
            with contextlib.suppress(OSError):
                file = self._directory.hold(self.namespace, patient=False)
                if file is not None:
                    self._descriptors.hold(self._fingerprint, file)

    def held(self) -> Descriptor | None:
        """The open file that marks the namespace as in use by this process; None if there is none."""
        file = self._descriptors.held(self._fingerprint)
        try:
            if file is not None and self._directory.fs.same(file, self._fingerprint):
                return file
        except OSError:
            pass
        return None

    def keep_hold(self) -> None:
        """Call `hold` again after `let_go`, or if it failed because a process was deleting."""
        is_held = self._descriptors.held(self._fingerprint) is not None
        if not self.is_wanted or (not is_held and time.monotonic() - self._tried > _HOLD_EVERY):
            self.hold()

    def let_go(self) -> None:
        """No longer mark the namespace as in use."""
        self._descriptors.let_go(self._fingerprint)
        self.is_wanted = False

    # Looking keys up.

    def find(self, words: Words) -> RowLocations:
        """Where keys are, ``(n, 2)``."""
        locations = self.table.find(words)
        found = RowLocations(locations >> 32, locations & 0xFFFFFFFF, np.zeros(len(words), np.uint64))
        absent = np.flatnonzero(locations < 0)
        for one, targets in list(zip(self._index_files, self._targets, strict=True)):
            if not len(absent):
                break
            try:
                positions, entries = one.find(words[absent])
            except (OSError, DamagedError) as error:
                self._lose(one, error)
                continue
            numbers = targets[np.minimum(entries["segment"], len(targets) - 1)]
            alive = numbers >= 0
            some = absent[positions[alive]]
            found.numbers[some], found.rows[some] = numbers[alive], entries["row"][alive]
            found.checksums[some] = entries["checksum"][alive]
            absent = absent[found.numbers[absent] < 0]
        if len(self._lost):
            found.numbers[np.isin(found.numbers << 32 | found.rows, self._lost)] = _NOWHERE
        return found

    def open_segments(self, numbers: Iterable[int]) -> dict[int, AnySegment]:
        """Segments by number, without those that cannot be opened."""
        found = {}
        for number in numbers:
            segment = self.segments.get(number)
            if segment is None and number in self._files:  # only an index file has opened it
                segment = self._opened(*self._files[number])
                if segment is None:
                    self.remove([number])
                else:
                    self.segments[number] = segment
            if segment is not None:
                found[number] = segment
        return found

    def _lose(self, one: IndexFile, error: Exception) -> None:
        """Forget an index file that cannot be read. The next `look` opens its segments."""
        if not isinstance(error, FileNotFoundError):  # else it was merged into another index file
            self.names.add(os.path.basename(one.path))  # it stays there if it cannot be renamed
            self._on_fault(error, one.path)
        self._start_anew()

    # Reading the folder.

    def look_again(self) -> None:
        """Make the next `look` read the folder at once."""
        self._looked = -_LOOK_EVERY

    def look(self) -> bool:
        """Open new files, and forget deleted ones, at most every few seconds; whether anything changed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return False
        self._looked = now
        try:
            changed = self._directory.changed(self.namespace)
            if changed == self._changed:
                return False
            # File times are coarse: a second change soon after may not show.
            self._changed = changed if time.time_ns() - changed > _SETTLED else -1
            contents = self._directory.contents(self.namespace.hex())
        except OSError as error:
            self._changed = -1  # look again
            self._on_fault(error, self._path)
            return False
        names = {file.name for file in contents.segments}
        if self._directory.fs.is_remote:
            for file in contents.segments:
                if file.size == 0:  # its local file may be gone, but takes space while open
                    self._descriptors.forget(os.path.join(self._path, file.name))
        missing = self._numbers.keys() - names  # other processes have deleted
        self.remove_files(missing)
        self.unopened = {name: error for name, error in self.unopened.items() if name in names}
        before = len(self._numbers)
        changes = self._look_at_index_files(contents.index_files, names)
        self._open_new(sorted(names))
        if names:
            self.hold()
        return bool(missing) or changes or len(self._numbers) > before

    def _look_at_index_files(self, files: Iterable[FileInfo], names: Collection[str]) -> bool:
        """Open the index files if they have changed; returns whether they have."""
        seen = frozenset(file.name for file in files if file.name not in self.names)
        if seen == self._seen_files:
            return False
        self._forget()
        self._seen_files = seen
        for name in seen:
            path = os.path.join(self._path, name)
            try:
                one = IndexFile(self._directory.fs, self._descriptors, path)
            except (FileNotFoundError, NewerFormatError):
                continue
            except (OSError, DamagedError) as error:
                self._on_fault(error, path)
                continue
            if one.namespace == self.namespace:
                self._index_files.append(one)
        self._index_files.sort(key=lambda one: -int(one.table["rows"].sum(dtype=np.int64)))
        usable = set(names) - self.names - self._doubted
        for one in self._index_files:
            targets = np.full(len(one.table) + 1, _NOWHERE)
            for place, name in enumerate(one.names):
                if name + SEGMENT in usable:
                    number = self._numbers.get(name + SEGMENT)
                    targets[place] = (
                        self._add_file(name + SEGMENT, one.table[place]) if number is None else number
                    )
            self._targets.append(targets)
        return True

    def _add_file(self, name: str, entry: Array | None = None) -> int:
        """The number of a new segment."""
        number = self._numbers[name] = next(self._next_numbers)
        self._files[number] = _File(name, entry)
        return number

    def _start_anew(self) -> None:
        """Forget all but unsealed rows; the next `look` reads the rest again from disk."""
        self._forget()
        self._changed = -1
        self.look_again()

    def _forget(self) -> None:
        for one in self._index_files:
            one.close()
        waiting = [one for one in self.segments.values() if isinstance(one, Pending)]
        self.segments, self.table = {one.number: one for one in waiting}, KeyLocations()
        self._index_files, self._targets, self._files, self._numbers = [], [], {}, {}
        self._seen_files = frozenset()
        for pending in waiting:
            for keys, first in pending.added():
                self.table.add({pending.number: keys}, first)

    def _open_new(self, names: Iterable[str]) -> None:
        waiting: dict[int, Array] = {}  # keys not in the table yet
        count = 0
        for name in names:
            if name in self.names or name in self._numbers:
                continue
            segment = self._opened(name)
            if segment is None:
                continue
            number = self._add_file(name)
            self.segments[number] = segment
            keys, segment.keys = segment.keys, None
            assert keys is not None
            waiting[number] = keys
            count += len(keys)
            if count > _ADDED_AT_ONCE:
                self.table.add(waiting)
                waiting, count = {}, 0
        if waiting:
            self.table.add(waiting)

    def _opened(self, name: str, entry: Array | None = None, *, is_second: bool = False) -> Segment | None:
        """Open a segment; with the `entry` of an index file, without reading the segment's own index."""
        fs, path = self._directory.fs, os.path.join(self._path, name)
        try:
            if entry is None:
                segment = Segment.open(fs, self._descriptors, path, limit=self._limit)
            else:
                head, digest = int(entry["head"]), int(entry["digest"])
                segment = Segment.in_index_file(fs, self._descriptors, path, head, digest, limit=self._limit)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            if entry is not None:  # its own index will show which of the two is wrong
                self._doubted.add(name)
                self._changed = -1
                self.look_again()
                return None
            if not is_second or fs.fetch_again(path):  # first read it once more; then fetch it again
                return self._opened(name, is_second=True)
            self.unopened[name] = error.with_traceback(None)  # its frames would keep the file open
            self.names.add(name)
            self._on_fault(error, path)
            return None
        except (OSError, NewerFormatError, OptionError, UnreadableError) as error:
            self.unopened[name] = error.with_traceback(None)
            self._changed = -1  # later its codec may be installed, or its class imported
            if isinstance(error, (OSError, NewerFormatError)):
                self._on_fault(error, path)
            return None
        self.unopened.pop(name, None)
        if segment.layout.namespace != self.namespace:  # the folder was renamed
            self.names.add(name)
            return None
        return segment

    # Adding and removing segments.

    def add(self, keys: Array, segment: Pending, first: int) -> None:
        """Add the keys, uint8 ``(n, 16)``, of an unsealed segment, from row `first` on."""
        self.segments[segment.number] = segment
        self.table.add({segment.number: keys}, first)

    def written(self, number: int, segment: Segment) -> None:
        """Record that an unsealed segment is now a file."""
        name = os.path.basename(segment.path)
        if number in self.segments:
            self.segments[number] = segment
            self._numbers[name], self._files[number] = number, _File(name, None)
        self.names.discard(name)

    def remove(self, numbers: Collection[int], damaged: Collection[int] = ()) -> int:
        """Forget segments; returns how many rows they had. Files not in `damaged` may be opened again.

        The next `look` finds copies of these rows in other segments.
        """
        known = [number for number in numbers if number in self._files or number in self.segments]
        if not known:
            return 0
        rows = 0
        for number in known:
            self.segments.pop(number, None)
            file = self._files.pop(number, None)
            if file is None:
                continue  # it was not written
            path = os.path.join(self._path, file.name)
            self._descriptors.forget(path)
            del self._numbers[file.name]
            rows += _rows_in_run(file)
            if number in damaged:
                self.names.add(file.name)
            else:
                self._changed = -1
                if self._directory.fs.has_elsewhere(path):
                    self.look_again()  # deleted to make room; the bucket still has it
        for targets in self._targets:
            targets[np.isin(targets, known)] = _NOWHERE
        rows += self.table.remove(known)
        if self.table.has_copies or self.table.gone > max(_ADDED_AT_ONCE, len(self.table)):
            self._start_anew()
        return rows

    def lose(self, number: int, rows: Collection[int]) -> None:
        """Forget damaged rows of a segment that stays."""
        locations = np.array([number << 32 | row for row in rows], np.int64)
        self._lost = np.concatenate([self._lost, locations])
        self.table.lose(locations)

    def remove_files(self, names: Iterable[str]) -> int:
        """Forget the segments with these file names; returns how many rows they had."""
        return self.remove([self._numbers[name] for name in names if name in self._numbers])

    def forget_pending(self) -> None:
        """In a forked child, forget unsealed rows: the parent writes them, and then we find them again."""
        self.remove([number for number, segment in self.segments.items() if isinstance(segment, Pending)])
        self.names.clear()
        self._changed = -1


def _rows_in_run(file: _File) -> int:
    return 0 if file.entry is None else int(file.entry["rows"])


class TierIndex:
    """Where rows are, by namespace, and the writer of unsealed rows.

    The `directory` includes segments of a bucket. A row may have up to `limit` bytes. `in_use()` returns the
    namespaces that something alive in this process uses; None: all. The `lock` protects all of this.
    `numbers` yields numbers for new segments. `begin` makes the `writer`. When `drops()` changes, forget
    everything.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        health: Health,
        limit: int,
        in_use: Callable[[], Collection[bytes]] | None,
        make_writer: Callable[[], Writer],
        drops: Callable[[], int] = int,
    ) -> None:
        self.lock = ProcessLock(threading.RLock)
        self.namespaces: dict[bytes, NamespaceIndex] = {}
        self.descriptors = Descriptors(directory.fs)
        self.writer: Writer | None = None
        self.closed = False
        self.directory = directory
        self._health = health
        self.limit = limit
        self._in_use = in_use
        self._make_writer = make_writer
        self._drops = drops
        self._dropped = drops()
        self.numbers = itertools.count()

    def begin(self) -> None:
        """Make a writer if this process has none, as after a fork; with the lock held."""
        torn = self.lock.was_torn()
        if self.writer is None or self.writer.pid != os.getpid():
            if torn:
                # Another thread of the parent was changing the tables when it forked.
                self.namespaces = {}
                self.descriptors = Descriptors(self.directory.fs)
            elif self.writer is not None:
                for index in self.namespaces.values():
                    index.forget_pending()  # the parent will write them
            self.writer = self._make_writer()
        if self._dropped != (drops := self._drops()):
            self._dropped = drops
            for namespace in list(self.namespaces):
                self.start_anew(namespace)
                with contextlib.suppress(OSError):  # another process is about to delete the files there now
                    files = self.directory.contents(namespace.hex()).segments
                    self.ignore(namespace, {file.name for file in files})

    def namespace(self, namespace: bytes) -> NamespaceIndex:
        """The index of a namespace, which this process uses from now on; call with the lock."""
        index = self.namespaces.get(namespace)
        if index is None:
            index = self.new(namespace)
            index.look()
        index.keep_hold()
        return index

    def new(self, namespace: bytes) -> NamespaceIndex:
        """Make the index of a namespace, still without rows; call with the lock."""
        index = self.namespaces[namespace] = NamespaceIndex(
            namespace, self.directory, self.descriptors, self.numbers, self.limit, self._health.fault
        )
        return index

    def ignore(self, namespace: bytes, names: Collection[str]) -> None:
        """Never open files of these names; with the lock held."""
        index = self.namespaces.get(namespace)  # it may have no rows, but names already
        if index is None:
            index = self.new(namespace)
        index.names.update(names)

    def remove(self, namespace: bytes, numbers: Collection[int], damaged: Collection[int] = ()) -> int:
        """Forget segments; returns how many rows they had. Other segments may have the same rows."""
        return self._change(namespace, lambda index: index.remove(numbers, damaged))

    def remove_files(self, namespace: bytes, names: Collection[str]) -> int:
        """Forget the segments with these file names; returns how many rows they had."""
        return self._change(namespace, lambda index: index.remove_files(names))

    def _change(self, namespace: bytes, change: Callable[[NamespaceIndex], int]) -> int:
        with self.lock():
            index = self.namespaces.get(namespace)
            if index is None:
                return 0
            try:
                return change(index)
            except BaseException:
                self.start_anew(namespace)
                raise

    def start_anew(self, namespace: bytes) -> None:
        """Forget the index and the unsealed rows of a namespace; call with the lock.

        Sealed rows are found again. Needed after an interrupt, when tables may be half changed.
        """
        index = self.namespaces.pop(namespace, None)  # first, so that no thread finds dropped rows
        if index is not None:
            index.let_go()
        dropped = self.writer.drop(namespace) if self.writer is not None else []
        if names := {pending.name for pending in dropped if pending.name}:
            # The writer may still be writing these: it deletes the files once it sees the drop.
            self.new(namespace).names = names

    def unopened(self, namespace: bytes) -> list[Exception]:
        """Why segments of a namespace could not be opened."""
        with self.lock():
            index = self.namespaces.get(namespace)
            return [] if index is None else list(index.unopened.values())

    def let_go(self) -> Collection[bytes] | None:
        """Release namespaces that nothing alive uses; returns those in use, if known.

        Call without the lock: `in_use` may wait for a lock whose owner waits for ours.
        """
        if self._in_use is None:
            return None
        in_use = self._in_use()
        with self.lock():
            self.begin()
            for namespace, index in self.namespaces.items():
                if namespace not in in_use and index.is_wanted:
                    index.let_go()
        return in_use

    def hold_what_is_used(self) -> None:
        """Hold exactly the namespaces that something alive uses; call without the lock."""
        in_use = self.let_go()
        with self.lock():
            self.begin()
            for namespace in self.namespaces if in_use is None else in_use:
                if (index := self.namespaces.get(namespace)) is not None:
                    index.hold()  # another process may have made its folder since

    def held(self, namespace: bytes) -> Descriptor | None:
        """The open file that marks a namespace as in use; None if there is none."""
        self.let_go()
        with self.lock():
            index = self.namespaces.get(namespace)
            return index.held() if index is not None else None

    def hold(self, namespace: bytes) -> None:
        """Mark a namespace as in use, if this process uses it."""
        with self.lock():
            index = self.namespaces.get(namespace)
            if index is not None and index.is_wanted:
                index.hold()
