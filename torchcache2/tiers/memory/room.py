"""`Room`: which rows of a memory tier go when its budget is full.

Rows of namespaces that nothing alive uses go first, the least recently used namespace first. After that
``mru`` keeps what came first, and ``lru`` drops the least recently used rows.

Not thread-safe: the tier holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from torchcache2.core.settings import Policy
from torchcache2.tiers.memory.arena import Arena
from torchcache2.tiers.memory.table import GROUP_BYTES, ArenaTable

__all__ = ["Room"]

_EVICTED_AT_ONCE = 64  # a 64th of the rows: finding the oldest reads when every row was last used


class Room:
    """Makes room in the arenas of a tier.

    Parameters
    ----------
    arenas : ArenaTable
    budget : int
        Bytes that the arenas never exceed.
    policy : {"mru", "lru"}
    in_use : callable, optional
        The namespaces that something alive uses; default: all.

    Attributes
    ----------
    evictions : int
        Rows forgotten to make room.
    """

    def __init__(
        self, arenas: ArenaTable, budget: int, policy: Policy, in_use: Callable[[], Collection[bytes]] | None
    ) -> None:
        self.evictions = 0
        self._arenas = arenas
        self._budget = budget
        self._policy = policy
        self._in_use = in_use

    def make(self, namespace: bytes, arena: Arena, count: int, evicts: bool) -> int:
        """Make room for `count` rows, or as many of them as the budget and policy allow."""
        while arena.room < count:
            free = self._budget - self._arenas.nbytes - GROUP_BYTES
            for wanted in (arena.slab(count), count):
                if arena.cost(wanted) <= free and self._reserve(arena, wanted):
                    return count
            if self.drop_unused(namespace):
                continue
            if evicts and self._policy == "lru" and self._evict(arena, count - arena.room):
                continue
            low, high = arena.room, count  # `low` rows fit, `high` rows do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if arena.cost(middle) <= free else (low, middle)
            return low if arena.cost(low) <= free and self._reserve(arena, low) else 0
        return count

    def _reserve(self, arena: Arena, count: int) -> bool:
        try:
            return arena.reserve(count)
        finally:
            self._arenas.measure(arena)

    def drop_unused(self, namespace: bytes) -> bool:
        """Forget the namespace that was used least recently, of those that nothing alive uses."""
        if self._in_use is None:
            return False
        used = {namespace, *self._in_use()}
        unused = [name for name in self._arenas.namespaces() if name not in used]
        if not unused:
            return False
        oldest = min(unused, key=lambda name: self._arenas.last_used.get(name, 0))
        self.evictions += self._arenas.pop(oldest)
        return True

    def _evict(self, favoured: Arena, count: int) -> bool:
        """Forget least recently used rows, worth `count` of the favoured arena; False if there are none."""
        arenas = list(self._arenas)
        lengths = list(map(len, arenas))
        total = sum(lengths)
        if total == 0:
            return False
        row_bytes = np.repeat([arena.row_bytes for arena in arenas], lengths)
        needed = count * favoured.row_bytes
        most = max(count, total // _EVICTED_AT_ONCE, round(needed / float(row_bytes.mean())) + 1)
        ticks = np.concatenate([arena.ticks for arena in arenas])
        if most < total:
            oldest = np.argpartition(ticks, most)[:most]
            oldest = oldest[np.argsort(ticks[oldest], kind="stable")]
        else:
            oldest = np.argsort(ticks, kind="stable")
        enough = int(np.searchsorted(np.cumsum(row_bytes[oldest]), needed)) + 1
        victims = np.sort(oldest[: max(enough, total // _EVICTED_AT_ONCE)])
        end = 0
        for arena, length in zip(arenas, lengths, strict=True):
            start, end = end, end + length
            low, high = np.searchsorted(victims, [start, end])
            arena.remove(victims[low:high] - start)
            if arena is not favoured and high > low:
                arena.shrink()
                self._arenas.measure(arena)
        self.evictions += len(victims)
        for namespace in self._arenas.namespaces():
            self._arenas.pop_empty(namespace, keep=favoured)
        return True
