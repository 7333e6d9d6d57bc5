"""`Located`: where the rows of one namespace are, of all segments of a directory and those to be written.

Not thread-safe: the tier holds a lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from torchcache2.directory import FINGERPRINT, CacheDirectory
from torchcache2.errors import OptionError
from torchcache2.index import Entries, KeyIndex, Words
from torchcache2.schemajson import UnknownClassError
from torchcache2.segment import DamagedError, NewerFormatError, TooLargeError
from torchcache2.segmentread import Descriptors, Segment
from torchcache2.tiers.pending import Pending

__all__ = ["Located", "Source"]

Array = np.ndarray[Any, np.dtype[Any]]
Source = Segment | Pending

_LOOK_EVERY = 2.0  # seconds between looks for other writers' segments
_SETTLED = 2e9  # nanoseconds after which a folder's time of change says that nothing came since
_HOLD_EVERY = 0.1  # seconds
_GROWTH = 1.0625


class Located:
    """Key → source and row.

    Parameters
    ----------
    namespace : bytes
    directory : CacheDirectory
    descriptors : Descriptors
    number : callable
        The number of the next source.
    limit : int
        Bytes that a row may have.
    on_fault : callable
        Is told an `OSError` or `DamagedError`, and the path where it was met.

    Attributes
    ----------
    sources : dict of int to Source
    names : set of str
        Files that are known, and need not be opened.
    """

    def __init__(
        self,
        namespace: bytes,
        directory: CacheDirectory,
        descriptors: Descriptors,
        number: Callable[[], int],
        limit: int,
        on_fault: Callable[[Exception, str], None],
    ) -> None:
        self.namespace = namespace
        self.sources: dict[int, Source] = {}
        self.names: set[str] = set()
        self._directory = directory
        self._descriptors = descriptors
        self._number = number
        self._limit = limit
        self._on_fault = on_fault
        self._fingerprint = os.path.join(directory.folder(namespace), FINGERPRINT)
        self._is_wanted = True
        self._tried = -_HOLD_EVERY
        self._looked = -_LOOK_EVERY
        self._changed = -1
        self._shadowed: dict[int, int] = {}  # keys of a source that another one has too
        self._locations = np.empty(0, np.int64)
        self._index = KeyIndex(np.empty((0, 2), np.uint64))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the index in memory."""
        segments = sum(source.index_bytes for source in self.sources.values() if isinstance(source, Segment))
        return self._index.nbytes + self._index.keys.nbytes + self._locations.nbytes + segments

    def hold(self, *, is_used: bool = True) -> None:
        """Count as a user of the namespace from now on; does not wait, as whoever deletes may wait for us.

        If it is used now, the hold of another one goes if there are too many.
        """
        self._is_wanted = True
        self._tried = time.monotonic()
        if not self._is_held() and (is_used or self._descriptors.may_hold(self._fingerprint)):
            with contextlib.suppress(OSError):
                file = self._directory.hold(self.namespace, patient=False)
                if file is not None:
                    self._descriptors.hold(self._fingerprint, file)

    def _is_held(self) -> bool:
        """Whether other processes see that this one uses the namespace."""
        file = self._descriptors.held(self._fingerprint, is_used=False)
        try:
            return file is not None and self._directory.fs.same(file, self._fingerprint)
        except OSError:
            return False

    def keep_hold(self) -> None:
        """Count as a user again, if `let_go` was too early, or somebody was just deleting."""
        is_held = self._descriptors.held(self._fingerprint) is not None
        if not self._is_wanted or (not is_held and time.monotonic() - self._tried > _HOLD_EVERY):
            self.hold()

    def let_go(self) -> None:
        """No longer count as a user."""
        self._descriptors.let_go(self._fingerprint)
        self._is_wanted = False

    def look(self) -> bool:
        """Open segments that are new, and forget those that are gone, at most every few seconds.

        Returns whether there were any: entries are others then.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return False
        self._looked = now
        try:
            changed = self._directory.changed(self.namespace)
            if changed == self._changed:
                return False
            # A file that comes in the same tick of the clock would not change the time again.
            self._changed = changed if time.time_ns() - changed > _SETTLED else -1
            entries = self._directory.contents(self.namespace.hex()).segments
        except OSError as error:
            self._changed = -1  # look again
            self._on_fault(error, self._directory.folder(self.namespace))
            return False
        changes = self._forget_missing({entry.name for entry in entries})
        changes += [self.open(e.name) for e in entries if e.name not in self.names]
        if entries:
            self.hold()
        return any(changes)

    def _forget_missing(self, names: set[str]) -> list[bool]:
        """Forget segments that another process has deleted; one True for each."""
        gone = []
        for number, source in list(self.sources.items()):
            if isinstance(source, Segment) and os.path.basename(source.path) not in names:
                self.remove(number)
                gone.append(True)
        return gone

    def open(self, name: str) -> bool:
        """Open one segment; whether it has rows for us."""
        path = os.path.join(self._directory.folder(self.namespace), name)
        try:
            segment = Segment.open(self._directory.fs, self._descriptors, path, limit=self._limit)
        except FileNotFoundError:
            return False
        except (OptionError, TooLargeError, UnknownClassError):
            self._changed = -1  # perhaps later: when what it needs is there
            return False
        except (OSError, DamagedError, NewerFormatError) as error:
            if isinstance(error, DamagedError):
                self.names.add(name)
            else:
                self._changed = -1
            self._on_fault(error, path)
            return False
        self.names.add(name)
        if segment.layout.namespace != self.namespace:
            return False  # somebody renamed the folder
        number = self._number()
        self.sources[number] = segment
        assert segment.keys is not None
        self.add(segment.keys, number, 0)
        segment.keys = None
        return True

    def find(self, words: Words) -> Entries:
        """Entry of each key, or -1."""
        return self._index.find(words)

    def where(self, entries: Entries) -> tuple[Entries, Entries]:
        """Source and row of entries."""
        locations = self._locations[entries]
        return locations >> 32, locations & 0xFFFFFFFF

    def add(self, keys: Array, number: int, first: int) -> None:
        """Rows `first` and up of a source are under these keys; the first source of a key stays its own."""
        words: Words = keys.view("<u8")
        rows = np.arange(first, first + len(words))
        absent = self._index.find(words) < 0
        if not absent.all():
            words, rows = words[absent], rows[absent]
        low = np.sort(words[:, 0])
        if (low[1:] == low[:-1]).any():  # in files of strangers only
            distinct = np.unique(words, axis=0, return_index=True)[1]
            words, rows = words[distinct], rows[distinct]
        if len(words) < len(keys):
            self._shadowed[number] = self._shadowed.get(number, 0) + len(keys) - len(words)
        count = len(self._index)
        if count + len(words) > len(self._locations):
            size = max(count + len(words), int(len(self._locations) * _GROWTH))
            self._locations = np.concatenate([self._locations[:count], np.empty(size - count, np.int64)])
            table = np.empty((size, 2), np.uint64)
            table[:count] = self._index.keys[:count]
            self._index.keys = table
        self._index.add(words)
        self._locations[count : count + len(words)] = number << 32 | rows

    def remove(self, number: int, *, is_damaged: bool = False) -> int:
        """Forget a source; how many rows are gone. A file that is not damaged may come back."""
        source = self.sources.pop(number, None)
        if source is None:
            return 0
        count = len(self._index)
        entries = np.flatnonzero(self._locations[:count] >> 32 == number)
        moved, target = self._index.remove(entries)
        self._locations[target] = self._locations[moved]
        self._shadowed.pop(number, None)
        if isinstance(source, Segment):
            self._descriptors.forget(source.path)
            if not is_damaged:
                self.names.discard(os.path.basename(source.path))
                self._changed = -1
        for other in list(self._shadowed):
            self._restore(other)
        return count - len(self._index)

    def forget_pending(self) -> None:
        """In a forked child: forget what the parent writes, to find it when it is sealed."""
        for number in [n for n, source in self.sources.items() if isinstance(source, Pending)]:
            self.remove(number)
        paths = [source.path for source in self.sources.values() if isinstance(source, Segment)]
        self.names = set(map(os.path.basename, paths))
        self._changed = -1

    def number_of(self, name: str) -> int | None:
        """The source that is a file of this name."""
        for number, source in self.sources.items():
            if isinstance(source, Segment) and os.path.basename(source.path) == name:
                return number
        return None

    def _restore(self, number: int) -> None:
        """Add the keys of a source that another source had, and has no longer."""
        source = self.sources[number]
        self._shadowed.pop(number)
        try:
            if isinstance(source, Segment):
                again = Segment.open(self._directory.fs, self._descriptors, source.path, limit=self._limit)
                assert again.keys is not None
                keys = again.keys
            else:
                keys = source.keys()
        except (OSError, DamagedError, NewerFormatError, TooLargeError, OptionError, UnknownClassError):
            return  # reading its other rows will tell
        entries = self._index.find(keys.view("<u8"))
        absent = np.flatnonzero(entries < 0)
        for row in absent.tolist():  # seldom any, and then few
            self.add(keys[row : row + 1], number, row)
        if (self._locations[entries[entries >= 0]] >> 32 != number).any():
            self._shadowed[number] = 1
