"""`SharedTier`: rows in memory that the processes of a job share, under one budget, and claims of rows.

Each namespace has a file in memory; see `torchcache2.tiers.shared.table` for what holds there, and why
readers need no lock. Rows are kept as they come, and stay where they are. A process that lets go of a
namespace gives up its part, and the memory goes with the last part. When there is no room, every process lets
go of the namespaces that nothing alive in it uses, at its next call. `drop` is for all processes.

Safe under threads, which take turns; under fork, where the child takes part under its own name; and under
signals that kill: what a process leaves unfinished is seen by nobody. A lock that is not given back for 10
seconds, since its holder was stopped, is a fault, after which this process computes what it needs.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torchcache2.core.gather import with_ordinary_tensors
from torchcache2.core.keys import Keys
from torchcache2.core.locks import ProcessLock
from torchcache2.core.logs import ToldOnce
from torchcache2.core.rows import Rows
from torchcache2.core.transfer import CUDA, Runtime, to_host
from torchcache2.files.errors import UnserialisableError
from torchcache2.tiers.base import Claim, Found, Tier, TierStats
from torchcache2.tiers.shared.claims import Claims, SharedClaim
from torchcache2.tiers.shared.job import Job
from torchcache2.tiers.shared.lock import LockTimeoutError
from torchcache2.tiers.shared.peers import compare
from torchcache2.tiers.shared.region import SharingError
from torchcache2.tiers.shared.table import SharedTable

__all__ = ["SharedTier"]

_T = TypeVar("_T")
_BETWEEN_LOOKS = 1.0  # seconds, when it is full, between looks for room that others have given up
_MOST_TABLES = 64  # each takes two descriptors, of which a process often has 1024
_COMPARED_AFTER = 10.0  # seconds that a rank has had a namespace: others had time to have it, too
_MOST_ABSENT = 1000  # namespaces that are remembered to have no file
_AT_EXIT = 1.0  # seconds to wait for the lock when the process ends


class SharedTier(Tier):
    """Rows in files in memory.

    Parameters
    ----------
    job : bytes
        Which processes share, 16 bytes; see `job_name`.
    budget : int
        Bytes that the files of all processes never exceed; that of the first process counts.
    in_use : callable, optional
        The namespaces that something alive in this process uses; default: all.
    description : callable, optional
        What a namespace stands for, to be compared with what other ranks have.
    folder : str, optional
        Where the processes find each other; default: this user's, among temporary files.
    runtime : Runtime
        Of the accelerator that rows may come from.
    spills : bool
        Whether there is a tier below that keeps what does not fit here.

    Raises
    ------
    SharingError
        If the system cannot share memory: the caller goes on with memory of its own.
    """

    name = "memory"
    is_shared = True

    def __init__(
        self,
        job: bytes,
        budget: int,
        in_use: Callable[[], Collection[bytes]] | None = None,
        description: Callable[[bytes], Mapping[str, Any]] | None = None,
        *,
        folder: str | None = None,
        runtime: Runtime = CUDA,
        spills: bool = False,
    ) -> None:
        self._job = Job(job, budget, folder)
        self._leaving = weakref.finalize(self, _leave, self._job)
        self._in_use, self._runtime, self._spills = in_use, runtime, spills
        self._description = description
        self._lock = ProcessLock()
        self._claims = Claims(self._job.slot, self._guarded)
        self._tables: dict[bytes, SharedTable] = {}
        self._absent: dict[bytes, int] = {}  # namespaces without a file, after so many changes
        self._asked: deque[tuple[Callable[[bytes], None], bytes]] = deque()
        self._told = ToldOnce()
        self._pressure = self._job.board.pressure
        self._last_look = 0.0
        self._pins = self._is_off = self._closed = False
        self._faults = self._corrupt = self._evictions = 0

    @property
    def budget(self) -> int:
        """Bytes for all processes together."""
        return self._job.board.budget

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here, copied into fresh memory."""

        def found() -> Found:
            table = self._table(keys.namespace)
            if table is None:
                return Found([])
            before = table.corrupt
            parts = table.get(keys.words, self._runtime if self._pins else None)
            if table.corrupt > before:
                self._corrupt += table.corrupt - before
                self._told(
                    "corrupt", "rows in shared memory differ from their checksums, and are computed again"
                )
            return Found(parts)

        return self._guarded(found) or Found([])

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, now, wherever they are; those that are here already stay.

        Rows on an accelerator are waited for: others may be waiting for them.
        """
        if self._closed or self._is_off or len(keys) == 0:
            return 0
        if any(map(self._runtime.owns, rows.columns)):
            self._pins = True

        def kept() -> int:
            return self._keep(keys, Rows(rows.schema, to_host(rows.columns, self._runtime), len(rows)))

        return self._guarded(kept) or 0

    def claim(self, keys: Keys) -> Claim:
        """Say which of some distinct keys, missed by `get`, this call computes.

        It claims those that nobody has claimed, and may wait for the others. A full tier gives no claims. A
        thread that holds a claim of the namespace gets no other: it computes all.
        """

        def claimed() -> Claim | None:
            board = self._job.board
            table = None if len(keys) == 0 or board.is_full else self._table(keys.namespace, create=True)
            if table is None or board.is_unclaimed(table.file):
                return None
            if board.has_ticket(self._claims.thread(), table.file):  # two that wait may wait for each other
                return None
            return SharedClaim(keys, table, self._claims)

        return self._guarded(claimed) or Claim(len(keys))

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, for all processes, now."""
        self._job.board.drop(namespace)
        self._ask(self._forget_dropped, namespace)

    def let_go(self, namespace: bytes) -> None:
        """Give up this process's part in a namespace, now or before the next call; others keep its rows."""
        self._ask(self._forget, namespace)

    def flush(self) -> None:
        """Memory is as durable as it gets."""

    def close(self) -> None:
        """Give up this process's part in everything, and keep nothing from then on."""
        self._closed = True
        self._ask(self._forget, b"")

    def stats(self) -> TierStats:
        """Rows and bytes of all processes; what else is counted has happened in this one."""
        rows = size = 0
        if not self._closed:
            self._guarded(lambda: None)
            rows, size = self._job.board.rows, self._job.board.bytes
        return TierStats(rows, size, self._evictions, self._corrupt, self._faults)

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of this tier, whose evictions are simply ``evictions`` there."""
        counts = super().counts()
        counts["evictions"] = counts.pop(f"{self.name}_evictions")
        return counts | {"waited": self._claims.waited, "taken_over": self._claims.taken_over}

    def _guarded(self, function: Callable[[], _T]) -> _T | None:
        """Call a function, one thread at a time; None if it fails, or if this process takes no part."""
        with self._lock():
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
            self._tables.clear()
        # As text: a log record that keeps the error would keep what its frames refer to.
        self._told("fault", "shared memory cannot be used: what it has is computed here (%s)", repr(error))

    def _catch_up(self) -> None:
        """Do what was asked for meanwhile, by others too."""
        if self._closed:
            self._asked.clear()
            self._tables.clear()
            self._leaving()
            return
        if os.getpid() != self._job.pid and not self._is_off:
            self._tables, self._absent = {}, {}  # another thread of the parent may have been changing them
            self._job.rejoin()
            self._claims.member = self._job.slot
        while self._asked:
            action, namespace = self._asked.popleft()
            action(namespace)
        if self._job.board.pressure != self._pressure and not self._is_off:
            self._pressure = self._job.board.pressure
            self._let_unused_go(b"")

    def _ask(self, action: Callable[[bytes], None], namespace: bytes) -> None:
        self._asked.append((action, namespace))
        # The garbage collector may call this in the middle of a call that holds the lock: it must not wait.
        lock = self._lock()
        # After an ordinary call of `acquire`, an interrupt could come before `try`, and the lock would stay
        # locked. No interrupt comes between `map` and the body of the loop.
        for is_free in map(lock.acquire, (False,)):
            if is_free:
                try:
                    self._catch_up()
                except Exception as error:
                    self._fault(error)
                finally:
                    lock.release()

    def _table(self, namespace: bytes, create: bool = False) -> SharedTable | None:
        """A namespace's rows; None if it has none, and can have none."""
        table = self._tables.get(namespace)
        if table is not None:
            if table.is_live:
                return table
            self._forget(namespace)
            table = None
        if len(self._tables) >= _MOST_TABLES:
            self._let_unused_go(namespace)
        board = self._job.board
        if not create and self._absent.get(namespace) == board.changes:
            return None
        with self._job.lock():
            changes, file = board.changes, board.file_of(namespace)
            if file is not None:
                region = board.open(file)
                if region is None:
                    board.remove_dead()
                    file = board.file_of(namespace)
                elif board.hold(file, region, self._job.slot):
                    table = SharedTable(region, board, file, self._job.lock)
            if file is None and create:
                table = SharedTable.create(namespace, board, self._job.slot, self._job.lock)
        if table is not None:
            self._tables[namespace] = table
            self._absent.pop(namespace, None)
            return table
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[namespace] = changes
        return None

    def _keep(self, keys: Keys, rows: Rows) -> int:
        kept, fits = self._try_to_keep(keys, rows)
        if not fits and self._make_room(keys.namespace):
            more, fits = self._try_to_keep(keys, rows)
            kept += more
        if not fits:
            self._job.board.fill()
            if not self._spills:
                self._told(
                    "full",
                    "the memory cache that the ranks share is full (%d bytes): new items are computed at "
                    "every call. Raise max_memory_cache_size, or set cache_dtype",
                    self.budget,
                )
        return kept

    def _try_to_keep(self, keys: Keys, rows: Rows) -> tuple[int, bool]:
        table = self._table(keys.namespace, create=True)
        if table is None:
            return 0, False
        if self._description is not None and time.monotonic() - table.since > _COMPARED_AFTER:
            table.since = math.inf
            with contextlib.suppress(OSError):  # such as too many open files
                compare(self._job, table, keys.namespace, self._description(keys.namespace))
        try:
            return table.put(keys.words, rows)
        except UnserialisableError as error:
            self._job.board.leave_unclaimed(table.file)
            self._told("schema", "rows that other processes cannot read are not shared: %s", str(error))
            return 0, True

    def _make_room(self, namespace: bytes) -> bool:
        """Have what nobody uses forgotten; whether there is more room now."""
        board = self._job.board
        before = board.free
        self._let_unused_go(namespace)
        now = time.monotonic()
        if now - self._last_look > _BETWEEN_LOOKS:
            self._last_look = now
            with self._job.lock():
                board.remove_dead()
                board.press()
                self._pressure = board.pressure
        return board.free > before

    def _let_unused_go(self, namespace: bytes) -> None:
        if self._in_use is not None:
            used = {namespace, *self._in_use()}
            for name in [name for name in self._tables if name not in used]:
                table = self._tables[name]
                rows = self._job.board.rows_of(table.file)
                self._forget(name)
                if not table.is_live:
                    self._evictions += rows

    def _forget(self, namespace: bytes) -> None:
        table = self._tables.pop(namespace, None)
        if table is not None:
            with self._job.lock():
                self._job.board.let_go(table.file, self._job.slot)

    def _forget_dropped(self, namespace: bytes) -> None:
        table = self._tables.get(namespace)
        if table is not None and not table.is_live:
            self._forget(namespace)


def _leave(job: Job) -> None:
    job.lock.patience = min(job.lock.patience, _AT_EXIT)
    with contextlib.suppress(LockTimeoutError, OSError):
        job.leave()
