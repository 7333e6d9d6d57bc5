"""`Drain`: brings rows that processes of a job have put to the lasting tier of one of them.

A row in shared memory is in reach of all processes from the moment it is put, so whoever lives writes it: one
process looks every second which rows have appeared, and puts those into its folder, or sends them to its
servers, that are not there. That is the process that made the tiers or, once it has ended, another one that
has put rows. Two that drain at once only waste work.

Rows that did not fit into shared memory wait in the process that put them, until its writer writes them, or
another process asks for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial

import numpy as np

from torchcache2.core.keys import Flags, Keys, Words
from torchcache2.core.process import ProcessLock
from torchcache2.tiers.base import Signals, Tier
from torchcache2.tiers.shared.table import SharedTable
from torchcache2.tiers.shared.tier import SharedTier

_PIECE = 8 << 20  # bytes of rows that are copied at once


class Drain:
    """Of one process.

    Parameters
    ----------
    memory : SharedTier or None
        Where processes put rows; None if they share no memory.
    lasting : Tier
        The tier that gets them.
    signals : Signals
        As for `lasting`.
    is_worker : bool
        Whether the tiers are those of a worker, which ends before the process that made them.
    """

    def __init__(
        self, memory: SharedTier | None, lasting: Tier, signals: Signals, *, is_worker: bool
    ) -> None:
        self.memory = memory
        self._lasting, self._signals = lasting, signals
        self._maker = -1 if is_worker else os.getpid()
        self._watching = -1
        self._pulled: tuple[int, dict[bytes, SharedTable]] = -1, {}  # the process, and what it had open
        self._lock = ProcessLock(threading.RLock)  # reentrant: a handler of signals may flush
        lasting.above = self
        if not is_worker:
            self.watch()

    def watch(self) -> None:
        """Take part in this process from now on."""
        if self._watching != os.getpid():
            self._watching = os.getpid()
            self._lasting.watch()
            self.pull()  # the first to do so drains

    def pull(self) -> None:
        """Drain, if this process does so for all."""
        if self.memory is None or not self.memory.drains():
            return
        pid, drained = self._pulled
        for namespace, table in drained.items() if pid == os.getpid() else ():
            if table.is_dropped:  # since the last time: what has come from it meanwhile must not stay
                self._lasting.drop(namespace)
        self._pulled = os.getpid(), self.memory.tables()
        self.now()

    def gather(self, *, at_end: bool = False) -> None:
        """Ask the other processes for their rows, and drain.

        Other processes than the one that made the tiers leave this to it `at_end`, and only `pull`.
        """
        if at_end and os.getpid() != self._maker:
            self.pull()
        else:
            self._signals.ask()
            self.now()

    def now(self) -> None:
        """Put the rows into the lasting tier that have appeared in memory and are not there."""
        if self.memory is None:
            return
        with self._lock(), contextlib.suppress(MemoryError):
            for namespace, table in self.memory.tables().items():
                table.drain(partial(self._copy_new, namespace, table))

    def _copy_new(self, namespace: bytes, table: SharedTable, words: Words) -> None:
        self._lasting.look_again(namespace)  # another process may have drained them
        keys = Keys(namespace, words.view(np.uint8))
        self._copy(keys.take(np.flatnonzero(~self._lasting.has(keys))), table)

    def copy(self, keys: Keys) -> Flags:
        """Put rows into the lasting tier that it has lost; returns which of the keys memory has."""
        table = None if self.memory is None else self.memory.tables().get(keys.namespace)
        return np.zeros(len(keys), bool) if table is None else self._copy(keys, table)

    def _copy(self, keys: Keys, table: SharedTable) -> Flags:
        assert self.memory is not None
        found = np.zeros(len(keys), bool)
        stats = self.memory.stats()
        step = max(1, _PIECE * stats.rows // max(1, stats.bytes))
        for start in range(0, len(keys), step):
            piece = keys.take(np.arange(start, min(len(keys), start + step)))
            for positions, rows in self.memory.get(piece).parts:
                if table.is_live:
                    self._lasting.put(piece.take(positions), rows)
                    found[start + positions] = True
        if table.is_dropped:  # memory is dropped before the lasting tier
            self._lasting.drop(keys.namespace)
        return found
