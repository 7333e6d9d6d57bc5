"""`ArenaTable`: the arenas of each namespace and of each group of keys, within one budget.

Keys of one group share everything but the item's content: arguments, modes, shapes of items. Their rows are
in one or few arenas, so a look-up searches only these, however many arenas the namespace has.

When the budget is full, the table first forgets namespaces that nothing alive uses, least recently used
first. After that ``keep`` keeps the rows that came first, and ``lru`` forgets the least recently used rows.

Not thread-safe: the tier holds a lock.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.memory import Runtime
from torchcache2.core.rows import Schema
from torchcache2.core.settings import Policy
from torchcache2.tiers.memory.arena import Arena

_GROUP_BYTES = 256  # estimated size of a group
_MOST_GROUPS = 100_000  # in one namespace
_EVICTED_AT_ONCE = 64  # evict at least a 64th of all rows, as each search reads all ticks

Name = tuple[Schema, tuple[bool, ...], torch.device]


class ArenaTable:
    """Arenas by namespace and schema.

    Attributes
    ----------
    budget : int
        The most bytes that all arenas may take.
    nbytes : int
        Bytes of all arenas, as last measured, and of the groups.
    evictions : int
        Rows forgotten to make room.
    last_used : dict of bytes to int
        When each namespace was last used, by the tier's clock.
    """

    def __init__(
        self,
        budget: int,
        policy: Policy,
        in_use: Callable[[], Collection[bytes]] | None,
        runtime: Runtime,
    ) -> None:
        self.budget = budget
        self.policy = policy
        self.evictions = 0
        self._in_use = in_use
        self._runtime = runtime
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.nbytes = 0
        self.last_used: dict[bytes, int] = {}
        self._arenas: dict[bytes, dict[Name, Arena]] = {}
        self._groups: dict[bytes, dict[bytes, list[Arena]]] = {}
        self._sizes: dict[Arena, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Arena]:
        return iter(list(self._sizes))

    def __contains__(self, arena: Arena) -> bool:
        return arena in self._sizes

    def arenas_for(self, keys: Keys) -> list[Arena]:
        """The arenas that may have rows of these keys."""
        if not keys.group:
            return self.arenas_of(keys.namespace)
        return self._groups.get(keys.namespace, {}).get(keys.group, [])

    def arenas_of(self, namespace: bytes) -> list[Arena]:
        """The arenas that have rows of a namespace."""
        return list(self._arenas.get(namespace, {}).values())

    def are_here(self, keys: Keys, also: Arena | None = None) -> Flags:
        """Whether each key has a row in the arenas of its group, or in one more."""
        arenas = self.arenas_for(keys)
        if also is not None and not any(other is also for other in arenas):
            arenas = [*arenas, also]  # the table may have forgotten that the group has rows in this arena
        here = np.zeros(len(keys), bool)
        for arena in arenas:
            here |= arena.find(keys.words) >= 0
        return here

    def get(self, namespace: bytes, name: Name) -> Arena | None:
        """The arena of a schema, layout and device; None if there is none."""
        return self._arenas.get(namespace, {}).get(name)

    def make(self, namespace: bytes, name: Name, *, are_remote: bool) -> Arena:
        """Add an arena for a schema. For `are_remote`, see `Arena`."""
        schema, _, device = name
        arena = Arena(schema, device, self.budget, self._runtime, are_remote=are_remote)
        self._arenas.setdefault(namespace, {})[name] = arena
        self.measure(arena)
        return arena

    def measure(self, arena: Arena) -> None:
        """Update the count of an arena's bytes."""
        size = arena.nbytes
        self.nbytes += size - self._sizes.get(arena, 0)
        self._sizes[arena] = size

    def link(self, keys: Keys, arena: Arena) -> None:
        """Record that this arena has rows of these keys' group, if the budget has room for the record."""
        size = self._bytes_of_group(keys)
        if not keys.group or (size and self.nbytes + size > self.budget):
            return
        groups = self._groups.setdefault(keys.namespace, {})
        if len(groups) >= _MOST_GROUPS and size:
            self.nbytes -= _GROUP_BYTES * len(groups)
            groups.clear()  # their rows are misses until put again
        self.nbytes += size
        arenas = groups.setdefault(keys.group, [])
        if not any(other is arena for other in arenas):
            arenas.append(arena)

    def pop(self, namespace: bytes) -> int:
        """Forget a namespace; returns how many rows it had."""
        self.last_used.pop(namespace, None)
        arenas = self._arenas.pop(namespace, {}).values()
        self.nbytes -= sum(self._sizes.pop(arena) for arena in arenas)
        self.nbytes -= _GROUP_BYTES * len(self._groups.pop(namespace, ()))
        return sum(map(len, arenas))

    def pop_empty(self, namespace: bytes, keep: Arena | None = None) -> None:
        """Forget empty arenas, except `keep`, and the namespace if no arena is left."""
        self._pop_some(namespace, lambda arena: len(arena) == 0 and arena is not keep)

    def give_back(self, device: torch.device | None) -> int:
        """Forget the rows on a device, or on all but the host; returns how many bytes they took there."""
        there = {a for a in self if a.device.type != "cpu" and device in (None, a.device)}
        freed = sum(arena.device_bytes for arena in there)
        self.evictions += sum(map(len, there))
        for namespace in list(self._arenas):
            self._pop_some(namespace, there.__contains__)
        return freed

    def _pop_some(self, namespace: bytes, is_gone: Callable[[Arena], bool]) -> None:
        """Forget some arenas of a namespace, and the namespace if no arena is left."""
        arenas = self._arenas.get(namespace, {})
        gone = [name for name, arena in arenas.items() if is_gone(arena)]
        for name in gone:
            self.nbytes -= self._sizes.pop(arenas.pop(name))
        if not arenas:
            self.pop(namespace)
        elif gone:
            groups = self._groups.get(namespace, {})
            for group in list(groups):
                groups[group] = [arena for arena in groups[group] if arena in self._sizes]
                if not groups[group]:
                    del groups[group]
                    self.nbytes -= _GROUP_BYTES

    def make_room(self, keys: Keys, arena: Arena, count: int, evicts: bool) -> int:
        """Make room for `count` rows, or as many as budget and policy allow; returns for how many.

        This includes the bytes of their group's record.
        """
        while arena.room < count or self.nbytes + self._bytes_of_group(keys) > self.budget:
            free = self.budget - self.nbytes - self._bytes_of_group(keys)
            for size in (arena.slab(count), count):
                if arena.cost(size) <= free and self._grow(arena, size):
                    return count
            if self.drop_unused(keys.namespace):
                continue
            if evicts and self.policy == "lru" and self._evict(arena, count - arena.room):
                continue
            kept = bisect.bisect(range(1, count), free, key=arena.cost)  # so many rows fit
            return kept if self._grow(arena, kept) else 0
        return count

    def _bytes_of_group(self, keys: Keys) -> int:
        """Bytes that `link` will add."""
        is_new = keys.group and keys.group not in self._groups.get(keys.namespace, {})
        return _GROUP_BYTES if is_new else 0

    def _grow(self, arena: Arena, count: int) -> bool:
        try:
            return arena.reserve(count)
        finally:
            self.measure(arena)

    def drop_unused(self, namespace: bytes) -> bool:
        """Forget the least recently used of the namespaces that nothing alive uses."""
        if self._in_use is None:
            return False
        used = {namespace, *self._in_use()}
        unused = [name for name in self._arenas if name not in used]
        if not unused:
            return False
        oldest = min(unused, key=lambda name: self.last_used.get(name, 0))
        self.evictions += self.pop(oldest)
        return True

    def _evict(self, favoured: Arena, count: int) -> bool:
        """Evict the oldest rows until `count` rows of `favoured` would fit; False if there are no rows.

        A `count` of 0 means that some memory is needed, but not for rows of `favoured`.
        """
        arenas = list(self)
        lengths = list(map(len, arenas))
        total = sum(lengths)
        if total == 0:
            return False
        row_bytes = np.repeat([arena.row_bytes for arena in arenas], lengths)
        needed = max(1, count) * favoured.row_bytes
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
            if high > low and (arena is not favoured or count <= 0):
                arena.shrink()
                self.measure(arena)
        self.evictions += len(victims)
        for namespace in list(self._arenas):
            self.pop_empty(namespace, keep=favoured)
        return True
