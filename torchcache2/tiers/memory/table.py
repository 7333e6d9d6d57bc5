"""`ArenaTable`: the arenas of each namespace, and where keys of a group have their rows.

Keys of one group have everything but the item's content in common: arguments, modes, shapes of items.
Their rows are in one arena, or few, however many shapes a namespace has seen: only these are asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchcache2.core.keys import Keys
from torchcache2.core.schema import Schema
from torchcache2.tiers.memory.arena import Arena

__all__ = ["GROUP_BYTES", "ArenaTable"]

GROUP_BYTES = 256  # about what is kept for a group
_MOST_GROUPS = 100_000  # of a namespace

Name = tuple[Schema, tuple[bool, ...], torch.device]


class ArenaTable:
    """Arenas by namespace and schema.

    Attributes
    ----------
    nbytes : int
        Bytes of all arenas when they were last measured, and of the groups.
    last_used : dict of bytes to int
        When each namespace was last used, by the tier's clock.
    """

    def __init__(self) -> None:
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

    def namespaces(self) -> list[bytes]:
        """The namespaces that have arenas."""
        return list(self._arenas)

    def arenas_for(self, keys: Keys) -> list[Arena]:
        """The arenas that may have rows of these keys."""
        if not keys.group:
            return list(self._arenas.get(keys.namespace, {}).values())
        return self._groups.get(keys.namespace, {}).get(keys.group, [])

    def get(self, namespace: bytes, name: Name) -> Arena | None:
        """The arena of a schema and its layout on a device."""
        return self._arenas.get(namespace, {}).get(name)

    def add(self, namespace: bytes, name: Name, arena: Arena) -> None:
        """Add a new arena."""
        self._arenas.setdefault(namespace, {})[name] = arena
        self.measure(arena)

    def measure(self, arena: Arena) -> None:
        """Count an arena's bytes anew, as its size may have changed."""
        size = arena.nbytes
        self.nbytes += size - self._sizes.get(arena, 0)
        self._sizes[arena] = size

    def link(self, keys: Keys, arena: Arena) -> None:
        """Say that rows of the keys' group are in this arena from now on."""
        if not keys.group:
            return
        groups = self._groups.setdefault(keys.namespace, {})
        if len(groups) >= _MOST_GROUPS and keys.group not in groups:
            self.nbytes -= GROUP_BYTES * len(groups)
            groups.clear()  # their rows are found again only after they are put again
        if keys.group not in groups:
            self.nbytes += GROUP_BYTES
        arenas = groups.setdefault(keys.group, [])
        if not any(other is arena for other in arenas):
            arenas.append(arena)

    def pop(self, namespace: bytes) -> int:
        """Forget a namespace; returns how many rows it had."""
        self.last_used.pop(namespace, None)
        arenas = self._arenas.pop(namespace, {}).values()
        self.nbytes -= sum(self._sizes.pop(arena) for arena in arenas)
        self.nbytes -= GROUP_BYTES * len(self._groups.pop(namespace, ()))
        return sum(map(len, arenas))

    def pop_empty(self, namespace: bytes, keep: Arena | None = None) -> None:
        """Forget arenas without rows, but for one to `keep`; a namespace without arenas goes too."""
        arenas = self._arenas.get(namespace, {})
        empty = [name for name, arena in arenas.items() if len(arena) == 0 and arena is not keep]
        for name in empty:
            self.nbytes -= self._sizes.pop(arenas.pop(name))
        if not arenas:
            self.pop(namespace)
        elif empty:
            groups = self._groups.get(namespace, {})
            for group in list(groups):
                groups[group] = [arena for arena in groups[group] if arena in self._sizes]
                if not groups[group]:
                    del groups[group]
                    self.nbytes -= GROUP_BYTES
