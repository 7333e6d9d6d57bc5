"""`Located`: where the rows of one namespace are, in segments of the directory or in memory until written.

`Places` are the segment and row of each key, and the other segments that have a row of it. If several
processes compute the same item at the same time, each of them seals a row of it. A key is found in the first
of these segments that was seen. The others are noted, at 24 bytes a key: one of them is used when the first
segment is gone.

Neither is thread-safe: the tier holds a lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Array, Ordinals, Words
from torchcache2.files.directory import FINGERPRINT, CacheDirectory
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.files.filesystem import Descriptor, Descriptors, FileInfo
from torchcache2.files.segment import Segment
from torchcache2.tiers.index import KeyIndex
from torchcache2.tiers.unwritten import Pending

_GROWTH = 1.0625
_CHECKED_AT_ONCE = 1 << 18  # copies that one call of `restore` looks at, in some 20 ms


class Places:
    """Key → segment and row."""

    def __init__(self) -> None:
        self._index = KeyIndex(np.empty((0, 2), np.uint64))
        self._locations = np.empty(0, np.int64)
        self._copies: deque[tuple[Words, Array]] = deque()
        self._unchecked = 0  # so many of the first copies were not looked at since the last removal
        self._gone: set[int] = set()  # removed segments that copies may still name

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        copies = sum(words.nbytes + locations.nbytes for words, locations in self._copies)
        return self._index.nbytes + self._index.keys.nbytes + self._locations.nbytes + copies

    def find(self, words: Words) -> Ordinals:
        """Ordinal of each key, ``(n, 2)``; -1 of keys that are not here."""
        return self._index.find(words)

    def where(self, ordinals: Ordinals) -> tuple[Array, Array]:
        """The number of the segment, and of the row in it, for each ordinal."""
        locations = self._locations[ordinals]
        return locations >> 32, locations & 0xFFFFFFFF

    def add(self, keys: Array, number: int, first: int) -> None:
        """Note the keys, uint8 ``(n, 16)``, of row `first` of a segment and of those after it.

        A key that another segment has already is still found in that one.
        """
        words: Words = keys.view("<u8")
        locations = number << 32 | np.arange(first, first + len(words))
        if _has_equal(words):  # a file of this library never has a key twice
            distinct = np.unique(words, axis=0, return_index=True)[1]
            words, locations = words[distinct], locations[distinct]
        absent = self._index.find(words) < 0
        if not absent.all():
            self._copies.append((words[~absent], locations[~absent]))
            words, locations = words[absent], locations[absent]
        self._append(words, locations)

    def add_all(self, keys: Mapping[int, Array]) -> None:
        """Note the keys of all rows of some segments, given by the number of the segment.

        Adding many keys at once takes far less time than adding a few again and again.
        """
        words: Words = np.concatenate(list(keys.values())).view("<u8")
        if _has_equal(words) or (self._index.find(words) >= 0).any():
            for number, some in keys.items():
                self.add(some, number, 0)
        else:
            locations = [number << 32 | np.arange(len(some)) for number, some in keys.items()]
            self._append(words, np.concatenate(locations))

    def remove(self, numbers: Collection[int]) -> int:
        """Forget segments; returns how many keys were found in them.

        Keys that other segments have too are found again after `restore`.
        """
        count = len(self._index)
        ordinals = np.flatnonzero(np.isin(self._locations[:count] >> 32, list(numbers)))
        moved, target = self._index.remove(ordinals)
        self._locations[target] = self._locations[moved]
        if self._copies:
            self._gone.update(numbers)
            self._unchecked = len(self._copies)
        return len(ordinals)

    def restore(self) -> bool:
        """Find keys of removed segments in other segments that have them; True if there were any.

        Each call looks at a limited number of keys, so that it takes little time. The next call goes on.
        """
        if not self._unchecked:
            return False
        some, count = [], 0
        while self._unchecked and count < _CHECKED_AT_ONCE:
            some.append(self._copies.popleft())
            self._unchecked -= 1
            count += len(some[-1][0])
        words = np.concatenate([one for one, _ in some])
        locations = np.concatenate([one for _, one in some])
        here = ~np.isin(locations >> 32, list(self._gone))
        words, locations = words[here], locations[here]
        absent = np.flatnonzero(self._index.find(words) < 0)
        chosen = absent[np.unique(words[absent, 0], return_index=True)[1]]  # several segments may have a key
        self._append(words[chosen], locations[chosen])
        rest = np.ones(len(words), bool)
        rest[chosen] = False
        if rest.any():
            self._copies.append((words[rest], locations[rest]))
        if not self._unchecked:
            self._gone.clear()
        return len(chosen) > 0

    def _append(self, words: Words, locations: Array) -> None:
        """Add distinct keys that are not here yet."""
        count = len(self._index)
        if count + len(words) > len(self._locations):
            size = max(count + len(words), int(len(self._locations) * _GROWTH))
            self._locations = np.concatenate([self._locations[:count], np.empty(size - count, np.int64)])
            table = np.empty((size, 2), np.uint64)
            table[:count] = self._index.keys[:count]
            self._index.keys = table
        self._index.add(words)
        self._locations[count : count + len(words)] = locations


def _has_equal(words: Words) -> bool:
    """Whether some keys may be equal."""
    low = np.sort(words[:, 0])
    return bool((low[1:] == low[:-1]).any())


AnySegment = Segment | Pending

_LOOK_EVERY = 2.0  # seconds; how often it looks for segments of other writers
_SETTLED = 2e9  # nanoseconds; a folder that has not changed for so long gets another time if it changes again
_HOLD_EVERY = 0.1  # seconds
_ADDED_AT_ONCE = 1 << 20  # keys, 16 MB


class Located:
    """The segments of one namespace, and in which of them each key is.

    New segments get the next of `numbers`. A row may have `limit` bytes. `on_fault(error, path)` is called
    with each error of reading.

    Attributes
    ----------
    places : Places
    segments : dict of int to AnySegment
    names : set of str
        Names of files that are known, so that they need not be opened.
    unopened : dict of str to Exception
        Why files, by their names, could not be opened.
    """

    def __init__(
        self,
        namespace: bytes,
        directory: CacheDirectory,
        descriptors: Descriptors,
        numbers: Iterator[int],
        limit: int,
        on_fault: Callable[[Exception, str], None],
    ) -> None:
        self.namespace = namespace
        self.segments: dict[int, AnySegment] = {}
        self.names: set[str] = set()
        self.unopened: dict[str, Exception] = {}
        self._directory = directory
        self._descriptors = descriptors
        self._next_numbers = numbers
        self._limit = limit
        self._on_fault = on_fault
        self._fingerprint = os.path.join(directory.folder(namespace), FINGERPRINT)
        self._is_wanted = True
        self._tried = -_HOLD_EVERY
        self._looked = -_LOOK_EVERY
        self._changed = -1
        self._numbers: dict[str, int] = {}  # segments by the names of their files
        self.places = Places()

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of the index in memory."""
        sealed = [one for one in self.segments.values() if isinstance(one, Segment)]
        return self.places.nbytes + sum(one.index_bytes for one in sealed)

    def hold(self, *, is_used: bool = True) -> None:
        """Count as a user of the namespace from now on, so that nobody deletes it.

        Does not wait for a process that is deleting now, as that may wait for us. A process holds a limited
        number of namespaces: with `is_used`, this one takes the place of another if need be.
        """
        self._is_wanted = True
        self._tried = time.monotonic()
        if self.held() is None and (is_used or self._descriptors.may_hold(self._fingerprint)):
            with contextlib.suppress(OSError):
                file = self._directory.hold(self.namespace, patient=False)
                if file is not None:
                    self._descriptors.hold(self._fingerprint, file)

    def held(self) -> Descriptor | None:
        """The open file that tells others that this process uses the namespace; None if there is none."""
        file = self._descriptors.held(self._fingerprint, is_used=False)
        try:
            if file is not None and self._directory.fs.same(file, self._fingerprint):
                return file
        except OSError:
            pass
        return None

    def keep_hold(self) -> None:
        """Count as a user again if `let_go` was called, or if `hold` failed as somebody was deleting."""
        is_held = self._descriptors.held(self._fingerprint) is not None
        if not self._is_wanted or (not is_held and time.monotonic() - self._tried > _HOLD_EVERY):
            self.hold()

    def let_go(self) -> None:
        """No longer count as a user."""
        self._descriptors.let_go(self._fingerprint)
        self._is_wanted = False

    def look_again(self) -> None:
        """Have the next `look` look."""
        self._looked = -_LOOK_EVERY

    def look(self) -> bool:
        """Open segments that are new, and forget those that are gone, at most every few seconds.

        Returns whether anything changed; the ordinals that `places` gave before are then not valid.
        """
        changed = self._look()
        return self.places.restore() or changed

    def _look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return False
        self._looked = now
        try:
            changed = self._directory.changed(self.namespace)
            if changed == self._changed:
                return False
            # The clock of a file system is coarse: a second change soon after may leave the time as it is.
            self._changed = changed if time.time_ns() - changed > _SETTLED else -1
            files = self._files()
        except OSError as error:
            self._changed = -1  # look again
            self._on_fault(error, self._directory.folder(self.namespace))
            return False
        missing = self._numbers.keys() - {file.name for file in files}  # other processes have deleted
        self.remove_files(missing)
        self.unopened = {file.name: e for file in files if (e := self.unopened.get(file.name)) is not None}
        before = len(self.segments)
        waiting: dict[int, Array] = {}  # keys that are not in `places` yet
        count = 0
        for name in [file.name for file in files if file.name not in self.names]:
            opened = self._opened(name)
            waiting |= opened
            count += sum(map(len, opened.values()))
            if count > _ADDED_AT_ONCE:
                self.places.add_all(waiting)
                waiting, count = {}, 0
        if waiting:
            self.places.add_all(waiting)
        if files:
            self.hold()
        return bool(missing) or len(self.segments) > before

    def _files(self) -> list[FileInfo]:
        """The segments that there are."""
        return self._directory.contents(self.namespace.hex()).segments

    def _open(self, path: str) -> Segment:
        """Open one of them; raises what `Segment.open` raises."""
        return Segment.open(self._directory.fs, self._descriptors, path, limit=self._limit)

    def _opened(self, name: str) -> dict[int, Array]:
        """Open one segment; returns its number and keys, or nothing if it has no rows of this namespace."""
        path = os.path.join(self._directory.folder(self.namespace), name)
        try:
            segment = self._open(path)
        except FileNotFoundError:
            return {}
        except (OSError, DamagedError, NewerFormatError) as error:
            self.unopened[name] = error.with_traceback(None)  # its frames would keep the file open
            if isinstance(error, DamagedError):
                self.names.add(name)
            else:
                self._changed = -1
            self._on_fault(error, path)
            return {}
        except (OptionError, UnreadableError) as error:
            self.unopened[name] = error.with_traceback(None)
            self._changed = -1  # it may be opened later, when its codec is installed or its class is imported
            return {}
        self.names.add(name)
        self.unopened.pop(name, None)
        if segment.layout.namespace != self.namespace:
            return {}  # somebody has renamed the folder
        number = next(self._next_numbers)
        self.segments[number] = segment
        self._numbers[name] = number
        keys, segment.keys = segment.keys, None
        assert keys is not None
        return {number: keys}

    def add(self, keys: Array, segment: Pending, first: int) -> None:
        """Note the keys, uint8 ``(n, 16)``, of row `first` of an unwritten segment and of those after it."""
        self.segments[segment.number] = segment
        self.places.add(keys, segment.number, first)

    def sealed(self, number: int, segment: Segment) -> None:
        """Note that an unwritten segment is a file now."""
        if number in self.segments:
            self.segments[number] = segment
            self._numbers[os.path.basename(segment.path)] = number

    def remove(self, numbers: Collection[int], damaged: Collection[int] = ()) -> int:
        """Forget segments; returns how many rows were found in them. Files not `damaged` may be opened again.

        Rows that other segments have too are found again after the next look.
        """
        gone = {number: self.segments.pop(number) for number in numbers if number in self.segments}
        if not gone:
            return 0
        for number, segment in gone.items():
            if isinstance(segment, Segment):
                name = os.path.basename(segment.path)
                self._descriptors.forget(segment.path)
                self._numbers.pop(name, None)
                if number not in damaged:
                    self.names.discard(name)
                    self._changed = -1
        return self.places.remove(gone)

    def remove_files(self, names: Iterable[str]) -> int:
        """Forget the segments in files of these names; returns how many rows were found in them."""
        return self.remove([self._numbers[name] for name in names if name in self._numbers])

    def forget_pending(self) -> None:
        """In a forked child, forget the rows that the parent will write: they are found again afterwards."""
        self.remove([number for number, segment in self.segments.items() if isinstance(segment, Pending)])
        self.names = set(self._numbers)
        self._changed = -1
