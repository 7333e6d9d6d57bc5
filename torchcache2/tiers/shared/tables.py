"""`Tables`: the namespaces of a job that this process has open, and when it closes them.

A process closes the namespaces that nothing alive in it uses when it has too many open, when it needs room,
and, at its next call, when another process needs room. When the last process closes a namespace, its memory
is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from torchcache2.tiers.shared.job import Job
from torchcache2.tiers.shared.table import SharedTable

_BETWEEN_LOOKS = 1.0  # seconds between requests for room while memory is full
_MOST_OPEN = 64  # each takes two descriptors, of which a process often has 1024
_MOST_ABSENT = 1000  # namespaces known to have no file


class Tables:
    """The namespaces that this process has open. One thread at a time.

    Parameters
    ----------
    job : Job
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.

    Attributes
    ----------
    open : dict of bytes to SharedTable
        The table of each namespace that is open.
    evictions : int
        Rows lost because this process, to make room, was the last to close them.
    """

    open: dict[bytes, SharedTable]
    _absent: dict[bytes, int]  # namespaces without a file, and `Board.changes` at that time

    def __init__(self, job: Job, in_use: Callable[[], Collection[bytes]] | None) -> None:
        self.evictions = 0
        self._job, self._in_use = job, in_use
        self._pressure = job.board.pressure
        self._last_look = 0.0
        self.clear()

    def clear(self) -> None:
        """Close everything without changing the board."""
        self.open, self._absent = {}, {}

    def find(self, namespace: bytes, create: bool = False) -> SharedTable | None:
        """The table of a namespace, made if need be with `create`; None if there is none, or no room."""
        table = self.open.get(namespace)
        if table is not None and table.is_live:
            return table
        self.let_go(namespace)
        if len(self.open) >= _MOST_OPEN:
            self.let_unused_go(namespace)
        board = self._job.board
        if not create and self._absent.get(namespace) == board.changes:
            return None
        with self._job.lock():
            changes, table = board.changes, self._opened(namespace, create)
        if table is not None:
            self.open[namespace] = table
            self._absent.pop(namespace, None)
            return table
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[namespace] = changes
        return None

    def _opened(self, namespace: bytes, create: bool) -> SharedTable | None:
        """The table of a namespace that is not open yet; under the lock."""
        board, file = self._job.board, self._job.board.file_of(namespace)
        if file is not None:
            region = board.open(file)
            if region is None:
                board.remove_dead()
                file = board.file_of(namespace)
            elif board.hold(file, region, self._job.slot):
                return SharedTable(region, board, file, self._job.lock)
        if file is None and create:
            return SharedTable.create(namespace, board, self._job.slot, self._job.lock)
        return None

    def let_go(self, namespace: bytes) -> None:
        """Close a namespace."""
        table = self.open.pop(namespace, None)
        if table is not None:
            with self._job.lock():
                self._job.board.let_go(table.file, self._job.slot)

    def let_go_if_dropped(self, namespace: bytes) -> None:
        """Close a namespace, unless it was created again after a drop."""
        table = self.open.get(namespace)
        if table is not None and not table.is_live:
            self.let_go(namespace)

    def let_unused_go(self, *needed: bytes) -> None:
        """Close all namespaces but those in use and those `needed`."""
        if self._in_use is not None:
            kept = {*needed, *self._in_use()}
            for namespace, table in list(self.open.items()):
                was_live = table.is_live
                if namespace in kept and was_live:
                    continue
                rows = self._job.board.rows_of(table.file)
                self.let_go(namespace)
                if was_live and not table.is_live:
                    self.evictions += rows

    def answer_pressure(self) -> None:
        """Close unused namespaces if a process has asked for room since the last call."""
        if self._job.board.pressure != self._pressure:
            self._pressure = self._job.board.pressure
            self.let_unused_go()

    def make_room(self, namespace: bytes) -> bool:
        """Close unused namespaces, and ask other processes to; returns whether there is more room now."""
        board = self._job.board
        before = board.free
        self.let_unused_go(namespace)
        now = time.monotonic()
        if now - self._last_look > _BETWEEN_LOOKS:
            self._last_look = now
            with self._job.lock():
                board.remove_dead()
                board.pressure += 1
                self._pressure = board.pressure
        return board.free > before
