"""`SharedTier`: rows in memory that the processes of a job share, under one budget, and claims of rows.

Each namespace has a file in memory; see `torchcache2.tiers.shared.table` for what holds there, and why
readers need no lock. Rows never move, and none is evicted alone. The memory of a namespace is freed when the
last process closes it. When there is no room, each process, at its next call, closes the namespaces that
nothing alive in it uses. `drop` affects all processes.

Safe under threads, which take turns; under fork, where the child joins as a process of its own; and under
kills, because unfinished writes are invisible. If a stopped process holds the lock for 10 seconds, this
process counts a fault, shares no more, and computes what it needs.

A claim is a ticket's number in the place where the row's location will be. It ends when the row is published,
or when the call returns its ticket: one write ends all claims under that ticket.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import numpy as np

from torchcache2.core.errors import UnserialisableError
from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.core.logs import WarnOnce
from torchcache2.core.memory import CUDA, Runtime, SpareMemory, to_host, with_ordinary_tensors
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Rows
from torchcache2.core.sizes import size_text
from torchcache2.tiers.base import Found, Make, Tally, Tier, TierClaim, TierStats
from torchcache2.tiers.meeting import LockTimeoutError
from torchcache2.tiers.shared.board import Ticket
from torchcache2.tiers.shared.job import Job, Tables, leave_soon
from torchcache2.tiers.shared.region import SharingError
from torchcache2.tiers.shared.table import SharedTable

_T = TypeVar("_T")
# Seconds to wait for the lock in `close`. The garbage collector may close many tiers in a thread that already
# holds the lock: waiting is then futile, and blocks all ranks.
_AT_CLOSE = 0.01
_BETWEEN_LOOKS = 0.05  # seconds between checks of the claiming processes


class SharedClaim(TierClaim):
    """A claim in a table that processes share."""

    pauses = 50e-6, 2e-3
    _ticket: Ticket | None = None  # `__del__` needs it even if `__init__` was interrupted

    def __init__(self, keys: Keys, table: SharedTable, tier: SharedTier) -> None:
        self.tally = tier.tally
        self._words, self._table, self._tier = keys.words, table, tier
        self._ordinals = np.full(len(keys), -1)
        self._passed: frozenset[int] = frozenset()  # held claims of dead or stuck processes
        self._next_look = 0.0

    def take(self, positions: Positions) -> Positions:  # noqa: D102
        taken = self._tier.guarded(partial(self._take, positions))
        return positions if taken is None else taken

    def look(self, positions: Positions) -> tuple[Flags, Flags]:  # noqa: D102
        tickets, ordinals = self._table.board.tickets, self._ordinals[positions]
        locations = np.where(ordinals < 0, 0, self._table.locations[ordinals])
        is_row, now = locations > 0, time.monotonic()
        is_held = tickets.held(locations)
        if now > self._next_look and not is_row.all():
            if self._next_look:  # skip fresh claims
                self._passed |= set(tickets.hopeless(locations[is_held]))
            self._next_look = now + _BETWEEN_LOOKS
        if self._passed:
            is_held &= ~np.isin(locations, list(self._passed))
        if not self._table.is_live:
            is_held[:] = False
        return is_row, ~is_row & ~is_held

    def release(self) -> None:  # noqa: D102
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._table.board.tickets.give_back(ticket)

    __del__ = release

    def _take(self, positions: Positions) -> Positions:
        """Claim what is open; returns the positions that this call computes, some perhaps without a claim."""
        table = self._table
        words = self._words[positions]
        ticket, ordinals, locations = table.claim(words, self._take_ticket, self._passed)
        self._ordinals[positions] = ordinals
        is_mine = (ordinals < 0) if ticket is None else (ordinals < 0) | (locations == ticket.word)
        if (locations > 0).any():
            is_mine |= (locations > 0) & ~table.is_readable(locations)
        return positions[is_mine]

    def _take_ticket(self, file: int) -> Ticket | None:
        tier = self._tier
        return self._table.board.tickets.take(tier.member, tier.thread(), file, self._note)

    def _note(self, ticket: Ticket) -> None:
        self._ticket = ticket


class SharedTier(Tier):
    """Rows in files in memory.

    Parameters
    ----------
    job : bytes
        Which processes share, 16 bytes; see `job_name`.
    budget : int
        The most bytes of all files; the first process decides. Smaller budgets than 200 kB, down to 30 kB,
        count as 200 kB, most of which is bookkeeping.
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.
    folder : str, optional
        Where the processes find each other; default: this user's, among temporary files.
    runtime : Runtime
        Of the accelerator that rows may come from.
    spills : bool
        Whether there is a tier below that keeps what does not fit here.
    is_copied : bool
        Whether the caller copies the rows that it gets, so that their memory can be reused.

    Raises
    ------
    SharingError
        If the system cannot share memory.
    """

    name = "memory"
    is_shared = True

    def __init__(
        self,
        job: bytes,
        budget: int,
        in_use: Callable[[], Collection[bytes]] | None = None,
        *,
        folder: str | None = None,
        runtime: Runtime = CUDA,
        spills: bool = False,
        is_copied: bool = False,
    ) -> None:
        self._job = Job(job, budget, folder)
        self._leaving = weakref.finalize(self, leave_soon, self._job)
        self._runtime, self._spills = runtime, spills
        self._spare = SpareMemory() if is_copied else None
        self._lock = ProcessLock()
        self.tally = Tally()
        self.thread: Callable[[], int] = threading.get_native_id  # unique over all processes
        self._tables = Tables(self._job, in_use)
        self._asked: deque[tuple[Callable[[bytes], None], bytes]] = deque()
        self._unshared: set[bytes] = set()  # namespaces with rows that cannot be shared: none is claimed
        self._told = WarnOnce()
        self._pins = False  # whether rows go to an accelerator: it copies faster from pinned memory
        self._is_off = False  # whether this process has stopped sharing, after a fault that would recur
        self._closed = False
        self._faults = self._corrupt = 0

    @property
    def member(self) -> int:
        """The number of this process on the board."""
        return self._job.slot

    @property
    def budget(self) -> int:
        """Bytes for all processes together."""
        return self._job.board.budget

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here, copied into fresh memory."""

        def found() -> Found:
            table = self._tables.find(keys.namespace)
            if table is None:
                return Found([])
            before = table.corrupt
            parts = table.get(keys.words, self._runtime if self._pins else None, self._spare)
            if table.corrupt > before:
                self._corrupt += table.corrupt - before
                self._told(
                    "corrupt", "rows in shared memory differ from their checksums: they count as misses"
                )
            return Found(parts)

        return self.guarded(found) or Found([])

    def get_one(self, namespace: bytes, low: int, high: int, make: Make) -> Any:
        """The value of one key's row, if this process has the namespace open."""
        with self._lock():
            try:
                self._catch_up()
                table = self._tables.open.get(namespace)
                if table is not None and not self._closed and not self._is_off:
                    made = table.get_one(low, high, make)
                    if table.is_live:
                        return made
            except Exception as error:
                self._fault(error)
        return None

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now."""

        def here() -> Flags | None:
            table = self._tables.find(keys.namespace)
            return None if table is None else table.has(keys.words)

        found = self.guarded(here)
        return np.zeros(len(keys), bool) if found is None else found

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, from any device; existing rows stay.

        Waits for copies from an accelerator: other processes may need these rows now.
        """
        if self._closed or self._is_off or len(keys) == 0:
            return 0
        self._pins |= any(map(self._runtime.owns, rows.columns))

        def kept() -> int:
            return self._keep(keys, Rows(rows.schema, to_host(rows.columns, self._runtime), len(rows)))

        return self.guarded(kept) or 0

    def hold(self, namespace: bytes) -> None:
        """Keep a namespace open until `let_go` or `drop`: its rows outlive the process that put them."""
        self.guarded(lambda: self._tables.find(namespace, create=True))

    def drains(self) -> bool:
        """Whether this process copies rows to a lasting tier for all; see `Board.drains`."""
        return bool(self.guarded(lambda: self._job.board.drains(self._job.slot)))

    def tables(self) -> dict[bytes, SharedTable]:
        """The namespaces that this process has open."""
        return self.guarded(self._tables.open.copy) or {}

    def claims(self, keys: Keys) -> TierClaim | None:
        """A claim on keys; None if memory is full, or this thread has a claim in the namespace."""

        def claimed() -> TierClaim | None:
            board = self._job.board
            if len(keys) == 0 or board.is_full:
                return None
            table = self._tables.find(keys.namespace, create=True)
            if table is None or keys.namespace in self._unshared:
                return None
            # Else this thread might wait for processes that wait for its other claim.
            if board.tickets.has_one(self.thread(), table.file):
                return None
            return SharedClaim(keys, table, self)

        return self.guarded(claimed)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, for all processes, now."""
        self._job.board.drop(namespace)
        self._ask(self._tables.let_go_if_dropped, namespace)

    def let_go(self, namespace: bytes) -> None:
        """Close a namespace, now or before the next call; other processes keep its rows."""
        self._ask(self._tables.let_go, namespace)

    def flush(self) -> None:
        """Nothing to do: rows in memory get no more durable."""

    def close(self) -> None:
        """Leave the job, and keep no rows from then on."""
        self._closed = True
        self._catch_up_if_free()

    def stats(self) -> TierStats:
        """Rows and bytes of all processes; the other counts are of this process."""
        rows = size = 0
        if not self._closed:
            self.guarded(lambda: None)
            rows, size = self._job.board.rows, self._job.board.nbytes
        return TierStats(rows, size, self._tables.evictions, self._corrupt, self._faults)

    def counts(self) -> dict[str, int]:
        """The tier's counts in `CacheStats`."""
        return super().counts() | self.tally.counts()

    def guarded(self, function: Callable[[], _T]) -> _T | None:
        """Call a function, one thread at a time; None if it fails, or if this process takes no part."""
        with self._lock():
            return self._tried(function)

    def _tried(self, function: Callable[[], _T]) -> _T | None:
        """As `guarded`, under the lock."""
        try:
            self._catch_up()
            if not self._closed and not self._is_off:
                return function()
        except Exception as error:
            self._fault(error)
        return None

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        if isinstance(error, (LockTimeoutError, SharingError)):
            self._is_off = True
            self._tables.open.clear()
            self._job.abandon()
        # As text: a log record with the error itself would keep its frames alive.
        self._told("fault", "shared memory cannot be used, so its rows are computed again (%s)", repr(error))

    def _catch_up(self) -> None:
        """Carry out requests that this and other processes have made meanwhile."""
        if self._closed:
            self._asked.clear()
            self._tables.open.clear()
            self._job.lock.patience = min(self._job.lock.patience, _AT_CLOSE)
            self._leaving()
            return
        if os.getpid() != self._job.pid and not self._is_off:
            self._tables.open.clear()  # the parent may have been changing them
            self._job.rejoin()
        while self._asked:
            action, namespace = self._asked.popleft()
            action(namespace)
        if not self._is_off:
            self._tables.answer_pressure()

    def _ask(self, action: Callable[[bytes], None], namespace: bytes) -> None:
        self._asked.append((action, namespace))
        self._catch_up_if_free()

    def _catch_up_if_free(self) -> None:
        self._lock.if_free(lambda: self._tried(lambda: None))

    def _keep(self, keys: Keys, rows: Rows) -> int:
        kept, fits = self._try_to_keep(keys, rows)
        if not fits and self._tables.make_room(keys.namespace):
            more, fits = self._try_to_keep(keys, rows)
            kept += more
        if not fits:
            self._job.board.is_full = 1
            if not self._spills:
                self._told(
                    "full",
                    "the memory cache that the ranks share is full (%s): new items are computed at "
                    "every call. Raise max_memory_cache_size, or set cache_dtype",
                    size_text(self.budget),
                )
        return kept

    def _try_to_keep(self, keys: Keys, rows: Rows) -> tuple[int, bool]:
        table = self._tables.find(keys.namespace, create=True)
        if table is None:
            return 0, False
        try:
            return table.put(keys.words, rows)
        except UnserialisableError as error:
            self._unshared.add(keys.namespace)
            self._told("schema", "rows that other processes cannot read are not shared: %s", str(error))
            return 0, True
