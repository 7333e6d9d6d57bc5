"""`Descriptors`: the files that are open, few of them however many segments there are."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torchcache2.locks import ProcessLock
from torchcache2.storage import Descriptor, FileSystem

__all__ = ["Descriptors"]

_MOST_OPEN = 128


class Descriptors:
    """Open files by path; those that were not used for longest are closed when there are too many."""

    def __init__(self, fs: FileSystem, most: int = _MOST_OPEN) -> None:
        self._fs = fs
        self._most = most
        self._lock = ProcessLock(threading.RLock)
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._forgotten = 0

    def get(self, path: str) -> Descriptor:
        """The file, open for reading; it stays open as long as somebody has it."""
        with self._lock():
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            before = self._forgotten
        file = self._fs.open(path)
        with self._lock():
            if self._forgotten == before:  # else it may have been deleted since
                self._open[path] = file
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return file

    def forget(self, path: str) -> None:
        """Close a file, when nobody reads it any more."""
        with self._lock():
            self._forgotten += 1
            self._open.pop(path, None)

    def clear(self) -> None:
        """Close all."""
        with self._lock():
            self._forgotten += 1
            self._open.clear()
