"""The files that this process has open: a limited number for all tiers, segments and namespaces.

The cache opens at most a quarter of the files that a process may open: one half of these for segments, the
other for holds. A hold is an open and locked ``fingerprint.json``, which shows other processes that the
namespace is in use. When there are too many, those that were not used for longest are closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from torchcache2.core.process import ProcessLock

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]


_SHARE = 8  # an eighth of the files that may be open is for segments, and an eighth for holds
_LEAST, _MOST = 4, 512


class Descriptor:
    """An open file, closed when nothing refers to it any more: threads that still read keep it open."""

    __slots__ = ("_close", "number")

    def __init__(self, number: int) -> None:
        self._close: Callable[[int], None] = os.close
        self.number = number

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file now, although something may refer to it."""
        close, self._close = self._close, _nothing
        with contextlib.suppress(OSError):
            close(self.number)


def _nothing(number: int) -> None:
    pass


def most_open() -> int:
    """How many segments may be open now, and how many holds: the limit of a process may change."""
    if resource is None:
        return _MOST
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit < 0 else max(_LEAST, min(_MOST, limit // _SHARE))


class _Open:
    """Open files of all tiers of this process, the least recently used first.

    A forked child counts the files of its parent too, as it has them open.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock(threading.RLock)
        # The garbage collector may change this between any two statements.
        self._files: OrderedDict[tuple[object, str], Descriptor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, owner: object, path: str, *, is_used: bool = True) -> Descriptor | None:
        with self._lock():
            file = self._files.get((owner, path))
            if file is not None and is_used:
                with contextlib.suppress(KeyError):
                    self._files.move_to_end((owner, path))
            return file

    def put(self, owner: object, path: str, file: Descriptor) -> None:
        with self._lock():
            self._files[owner, path] = file

    def shrink(self, most: int) -> None:
        """Close the least recently used, down to so many."""
        with self._lock(), contextlib.suppress(KeyError):
            while len(self._files) > most:
                self._files.popitem(last=False)

    def pop(self, owner: object, path: str) -> None:
        with self._lock():
            self._files.pop((owner, path), None)

    def clear(self, owner: object = None) -> bool:
        """Close those of one owner, or all; whether there were any."""
        with self._lock():
            some = [key for key in list(self._files) if owner is None or key[0] is owner]
            for key in some:
                self._files.pop(key, None)
            return bool(some)


class Opener(Protocol):
    """A file system."""

    def open(self, path: str) -> Descriptor:
        """Open a file for reading."""
        ...


class Descriptors:
    """The open files of one tier, by path."""

    # All tiers of a process share these, because the process has one limit for all of them.
    _segments = _Open()
    _holds = _Open()

    def __init__(self, fs: Opener) -> None:
        self._fs = fs
        self._owner = object()
        self._lock = ProcessLock(threading.RLock)
        self._forgotten = 0
        weakref.finalize(self, _clear, self._owner).atexit = False

    @classmethod
    def spare(cls) -> bool:
        """Close all segments or, if none is open, all holds; whether there were any."""
        return cls._segments.clear() or cls._holds.clear()

    @classmethod
    def _shrink(cls) -> None:
        most = most_open()
        cls._segments.shrink(most)
        cls._holds.shrink(most)

    def get(self, path: str) -> Descriptor:
        """The file, open for reading; it stays open as long as somebody has it."""
        file = self._segments.get(self._owner, path)
        if file is not None:
            return file
        before = self._forgotten
        file = self._fs.open(path)
        with self._lock():
            if self._forgotten == before:  # otherwise the file may have been deleted since
                self._segments.put(self._owner, path, file)
        self._shrink()
        return file

    def forget(self, path: str) -> None:
        """Close a file, when nobody reads it any more."""
        with self._lock():
            self._forgotten += 1
            self._segments.pop(self._owner, path)

    def clear(self) -> None:
        """Close all."""
        with self._lock():
            self._forgotten += 1
            _clear(self._owner)

    def may_hold(self, path: str) -> bool:
        """Whether a file can be held without closing another hold."""
        return self.held(path, is_used=False) is not None or len(self._holds) < most_open()

    def hold(self, path: str, file: Descriptor) -> None:
        """Keep a file open until `let_go`, or until too many others are."""
        self._holds.put(self._owner, path, file)
        self._shrink()

    def held(self, path: str, *, is_used: bool = True) -> Descriptor | None:
        """The file of this path if it is still held; with `is_used` it counts as used now."""
        return self._holds.get(self._owner, path, is_used=is_used)

    def let_go(self, path: str) -> None:
        """No longer hold a file."""
        self._holds.pop(self._owner, path)


def _clear(owner: object) -> None:
    Descriptors._segments.clear(owner)
    Descriptors._holds.clear(owner)
