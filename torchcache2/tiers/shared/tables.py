"""`Tables`: the namespaces of a job that this process has open, and when it closes them.

A process closes the namespaces that nothing alive in it uses when it has too many open, when it needs room,
and, at its next call, when another process needs room. When the last process closes a namespace, its memory
is freed.

`compare_later` explains why two ranks share no rows, if only values in their modules differ. Each rank does
this once per namespace, without waiting: it leaves the description of its namespace and reads those of
others. So of two ranks, the later one sees the earlier one's description.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torchcache2.core.logs import listed, logger
from torchcache2.core.process import ranks_here
from torchcache2.identity.fingerprint import differences_of_state, from_document
from torchcache2.tiers.base import replicas_of
from torchcache2.tiers.shared.chunks import Space
from torchcache2.tiers.shared.job import Job
from torchcache2.tiers.shared.table import SharedTable

_COMPARED_AFTER = 60.0  # seconds after a rank's first rows: by then the others have kept some, too
_MOST_READ = 16  # namespaces of others
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

    def find(self, namespace: bytes, create: bool = False, are_replicas: bool = False) -> SharedTable | None:
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
            changes, table = board.changes, self._opened(namespace, create, are_replicas)
        if table is not None:
            self.open[namespace] = table
            self._absent.pop(namespace, None)
            return table
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[namespace] = changes
        return None

    def _opened(self, namespace: bytes, create: bool, are_replicas: bool) -> SharedTable | None:
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
            return SharedTable.create(namespace, board, self._job.slot, self._job.lock, are_replicas)
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
        """Close all namespaces but those in use, their replicas, and those `needed`."""
        if self._in_use is not None:
            used = self._in_use()
            kept = {*needed, *used, *map(replicas_of, used)}
            board = self._job.board
            for namespace, table in list(self.open.items()):
                was_live = table.is_live
                if namespace in kept and was_live:
                    continue
                rows = 0 if board.are_replicas(table.file) else board.rows_of(table.file)
                self.let_go(namespace)
                if was_live and not table.is_live:
                    self.evictions += rows

    def answer_pressure(self) -> None:
        """Close unused namespaces if a process has asked for room since the last call."""
        if self._job.board.pressure != self._pressure:
            self._pressure = self._job.board.pressure
            self.let_unused_go()

    def drop_replicas(self) -> bool:
        """Forget all replicas in all processes, and free their memory; returns whether that made room.

        A full memory has no replicas; otherwise another process may have dropped them already.
        """
        board = self._job.board
        was_full = board.is_full
        with self._job.lock():
            files = board.drop_replicas()
            for file in files:
                region = board.open(file)
                if region is not None:
                    SharedTable(region, board, file, self._job.lock).discard()
        return bool(files) or not was_full

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


def compare_later(
    job: Job, table: SharedTable, namespace: bytes, description: Callable[[bytes], Mapping[str, Any]]
) -> None:
    """Compare a namespace once, in a call at least a minute after the first one."""
    if table.since is None:
        table.since = time.monotonic()
    if time.monotonic() - table.since > _COMPARED_AFTER:
        table.since = math.inf
        with contextlib.suppress(OSError):  # such as too many open files
            compare(job, table, namespace, description(namespace))


def compare(job: Job, table: SharedTable, namespace: bytes, description: Mapping[str, Any]) -> None:
    """Warn if another rank computes the same, except for values in its module.

    That means: the two ranks never had a namespace in common, their code and weights are equal, and they were
    started together (runs of a sweep differ on purpose). All ranks together warn once.
    """
    mine = from_document(namespace.hex(), description)
    if mine is None or job.board.ranks_of(table.file) >= ranks_here():
        return
    about = {"namespace": namespace.hex(), "launch": job.launch.hex(), "rank": job.rank, **description}
    table.space.tell(zlib.compress(json.dumps(about).encode()))
    for document in _of_others(job, table):
        other = from_document(document["namespace"], document)
        if other is None or document["launch"] != about["launch"]:
            continue
        lines = differences_of_state(other, mine)
        with job.lock():
            warns = bool(lines) and job.board.warns()
        if warns:
            logger.warning(
                "%s: rank %d and rank %d find none of each other's rows. What differs: %s. Use the device of "
                "the input instead, keep such values out of the module, or set persistent_module_hash. If "
                "the ranks are meant to differ, nothing is wrong",
                *(about["class"], document["rank"], about["rank"], listed(lines)),
            )
            return


def _of_others(job: Job, table: SharedTable) -> Iterator[dict[str, Any]]:
    """The descriptions left by ranks that never had a namespace in common with the ranks of `table`."""
    with job.lock():
        regions = [job.board.open(file) for file in job.board.strangers(table.file)[:_MOST_READ]]
    for region in filter(None, regions):
        text = zlib.decompressobj()
        with contextlib.suppress(ValueError, zlib.error):  # nothing there, or half written
            yield json.loads(text.decompress(Space(region, job.board, -1, job.lock).told()))
