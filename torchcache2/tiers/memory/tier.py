"""`MemoryTier`: rows in RAM (or on a device) under an exact byte budget.

Each pair of namespace and schema has an arena. When the budget is full, the tier first forgets namespaces
that nothing alive uses. After that ``keep`` keeps the rows that came first: if every epoch reads every item
once, no policy has more hits. ``lru`` forgets the least recently used rows, which suits serving.

Thread-safe: one lock covers look-up and copy, because rows move under ``lru``.

Copies from an accelerator to the host run while the caller continues. The tier makes room for these rows at
once; its next call first waits for the copies and puts the rows into their arena.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.core.logs import WarnOnce
from torchcache2.core.memory import CUDA, Arriving, Runtime, with_ordinary_tensors
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Rows
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import is_out_of_memory, size_text
from torchcache2.tiers.base import Found, Make, Tier, TierStats
from torchcache2.tiers.memory.arena import Arena
from torchcache2.tiers.memory.table import ArenaTable

_T = TypeVar("_T")


class MemoryTier(Tier):
    """Rows in arenas: tensors that grow in place.

    Parameters
    ----------
    budget : int
        The most bytes that the tier takes, bookkeeping included.
    policy : {"keep", "lru"}
    device : torch.device, optional
        Where to keep rows; None: where they are when put.
    in_use : callable, optional
        Returns the namespaces that something alive uses; default: all.
    runtime : Runtime
        The runtime of the accelerator that rows may come from.
    spills : bool
        Whether there is a tier below that keeps what does not fit here.
    among : callable, optional
        Returns how many processes divide what is left of the budget; called once in each process, also forked
        ones.
    """

    name = "memory"

    def __init__(
        self,
        budget: int,
        policy: Policy = "keep",
        device: torch.device | None = None,
        in_use: Callable[[], Collection[bytes]] | None = None,
        runtime: Runtime = CUDA,
        spills: bool = False,
        among: Callable[[], int] | None = None,
    ) -> None:
        self._spills = spills
        self.budget = budget
        self._among, self._pid = among, 0
        self._runtime = runtime
        # Rows on their way to the host, and the arena with room for them.
        self._incoming: tuple[Arena, Keys, Arriving] | None = None
        self.policy = policy
        self._device = device
        self._lock = ProcessLock()
        self._clock = 0
        self._closed = False
        self._dropped: deque[bytes] = deque()
        self._told = WarnOnce()
        self._arenas = ArenaTable(budget, policy, in_use, runtime)

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here, copied into fresh memory."""
        return Found(self._tried("read", lambda: self._find(keys), keys) or [])

    def get_one(self, namespace: bytes, low: int, high: int, make: Make) -> Any:
        """What `make` builds from the row of one key, if it is on the host."""
        with self._lock():
            try:
                self._catch_up()
                for arena in self._arenas.arenas_of(namespace):
                    found = arena.row(low, high)
                    if found is not None:
                        self._clock += 1
                        self._arenas.last_used[namespace] = self._clock
                        if self.policy == "lru":
                            arena.ticks[found[0]] = self._clock
                        return make(arena.schema, found[1])
            except BaseException as error:
                self._start_anew(error, "read")
        return None

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now."""
        here = self._tried("read", lambda: self._arenas.are_here(keys))
        return np.zeros(len(keys), bool) if here is None else here

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows, *, evicts: bool = True) -> int:
        """Keep rows under distinct keys; existing rows stay as they are.

        Without `evicts`, evict no row in use for them.
        """
        return self._tried("written", lambda: self._keep(keys, rows, evicts), keys) or 0

    def keep_if_room(self, keys: Keys, rows: Rows) -> int:
        """Keep rows that a slower tier has too, without evicting rows in use."""
        return self.put(keys, rows, evicts=False)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, now or before the next call."""
        self._dropped.append(namespace)
        self._lock.if_free(self._forget_dropped)

    def give_back(self, device: torch.device | None) -> int:
        """Forget the rows on a device, or on all but the host; returns how many bytes they took there."""
        with self._lock():
            self._forget_dropped()
            return self._arenas.give_back(device)

    def flush(self) -> None:
        """Wait for copies from an accelerator; memory gets no more durable than that."""
        self.stats()

    def close(self) -> None:
        """Forget everything, now or before the next call, and keep nothing from then on."""
        self._closed = True
        self._lock.if_free(self._forget_dropped)

    def stats(self) -> TierStats:
        """Rows, allocated bytes, and how many rows were evicted."""
        self._tried("written", lambda: None)
        with self._lock():
            return TierStats(sum(map(len, self._arenas)), self._used(), self._arenas.evictions)

    def _tried(self, verb: str, function: Callable[[], _T], keys: Keys | None = None) -> _T | None:
        """What a function returns under the lock; None after a fault."""
        with self._lock():
            try:
                self._catch_up()
                return function()
            except BaseException as error:
                if keys is not None and is_out_of_memory(error):
                    self._do_without(keys, error)
                else:
                    self._start_anew(error, verb)
        return None

    def _start_anew(self, error: BaseException, verb: str) -> None:
        """Forget everything after a fault, since rows may be half moved; later look-ups miss."""
        self._forget_all()
        if not isinstance(error, Exception):
            raise error
        self._told("fault", "the memory cache could not be %s, and starts anew: %r", verb, error)

    def _do_without(self, keys: Keys, error: BaseException) -> None:
        """Warn that there was no memory for a copy: rows of these keys are misses."""
        self._arenas.pop_empty(keys.namespace)
        self._told(
            "memory",
            "not enough memory to copy rows, so they are computed again, or not kept: %s. "
            "Lower max_memory_cache_size, or keep rows on the host with memory_cache_device='cpu'",
            str(error),
        )

    def _catch_up(self) -> None:
        self._forget_dropped()
        if self._among is not None and self._pid != os.getpid():
            self._pid = os.getpid()
            self.budget = self._used() + (self.budget - self._used()) // self._among()
            self._arenas.budget = self.budget
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        arena, keys, arriving = incoming
        columns = arriving.wait()
        if arena in self._arenas:  # otherwise its namespace has been dropped
            arena.append(keys.data, Rows(arena.schema, columns, len(keys)), self._clock)

    def _forget_dropped(self) -> None:
        if self._lock.was_torn():
            self._forget_all()
        while self._dropped:
            self._arenas.pop(self._dropped.popleft())
        if self._closed:
            self._forget_all()

    def _forget_all(self) -> None:
        self._incoming = None
        self._arenas.clear()

    def _find(self, keys: Keys) -> list[tuple[Positions, Rows]]:
        parts: list[tuple[Positions, Rows]] = []
        arenas = self._arenas.arenas_for(keys)
        if not arenas:
            return parts
        self._clock += 1
        self._arenas.last_used[keys.namespace] = self._clock
        for arena in arenas:
            ordinals = arena.find(keys.words)
            positions = (ordinals >= 0).nonzero()[0]
            if len(positions) == 0:
                continue
            if len(positions) < len(ordinals):
                ordinals = ordinals[positions]
            if self.policy == "lru":
                arena.ticks[ordinals] = self._clock
            parts.append((positions, arena.gather(ordinals)))
            if len(positions) == len(keys):
                break
        return parts

    def _keep(self, keys: Keys, rows: Rows, evicts: bool) -> int:
        if self._closed or len(keys) == 0:
            return 0
        arena = self._arena(keys.namespace, rows)
        absent = np.flatnonzero(~self._arenas.are_here(keys, arena))
        if len(absent) < len(keys):
            keys, rows = keys.take(absent), rows.take(torch.from_numpy(absent))
        if arena is None or len(keys) == 0:
            if arena is not None:
                self._arenas.link(keys, arena)
            self._arenas.pop_empty(keys.namespace)
            return 0
        self._clock += 1
        self._arenas.last_used[keys.namespace] = self._clock
        kept = self._arenas.make_room(keys, arena, len(keys), evicts)
        if kept < len(keys):
            if self.policy == "keep" and not self._spills:
                self._told(
                    "full",
                    "the memory cache is full (%s): new items are computed at every call. "
                    "Raise max_memory_cache_size, or set cache_dtype or policy='lru'",
                    size_text(self.budget),
                )
            keys, rows = keys.take(np.arange(kept)), rows.head(kept)
        if kept:
            self._arenas.link(keys, arena)
            self._append(arena, keys, rows)
        elif len(arena) == 0:
            self._arenas.pop_empty(keys.namespace)
        return kept

    def _append(self, arena: Arena, keys: Keys, rows: Rows) -> None:
        """Write rows into the room made for them, at once or when they have arrived on the host."""
        remote = [column for column in rows.columns if self._runtime.owns(column)]
        if remote and arena.device.type == "cpu":
            # Copy columns on the host: the caller may overwrite them before the others have arrived.
            columns = rows.laid_out_as(arena.schema).columns
            columns = tuple(c if self._runtime.owns(c) else c.clone() for c in columns)
            self._incoming = arena, keys, Arriving(columns, self._runtime)
            if self._used() > self.budget:
                self._catch_up()
        else:
            arena.append(keys.data, rows, self._clock)

    def _used(self) -> int:
        on_their_way = self._incoming[2].nbytes if self._incoming is not None else 0
        return self._arenas.nbytes + on_their_way

    def _arena(self, namespace: bytes, rows: Rows) -> Arena | None:
        device = self._device
        if device is None:
            device = rows.columns[0].device if rows.columns else torch.device("cpu")
        elif device.type == "cuda" and device.index is None and torch.cuda.is_available():
            # "cuda" means the current device at the first put, even if that changes later.
            device = self._device = torch.device("cuda", torch.cuda.current_device())
        name = rows.schema, rows.schema.layout, device
        arena = self._arenas.get(namespace, name)
        if arena is None and rows.schema.row_bytes < self.budget:
            are_remote = any(map(self._runtime.owns, rows.columns))
            try:
                arena = self._arenas.make(namespace, name, are_remote=are_remote)
            except (AssertionError, OSError, MemoryError, RuntimeError) as error:
                # Torch raises an `AssertionError` if it was built without support for the device.
                self._told("device", "not enough memory for rows on %s: %s", device, error)
        return arena
