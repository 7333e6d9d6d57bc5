"""`Shares` and `Slots`: which of several servers keeps a row, and which node of a Redis Cluster.

Each server draws a number for each key, and the highest one gets the key. So the order in which servers are
named does not matter, and a server that is added or lost moves no key between the others.

A cluster has shared out its slots itself. The client for clusters of redis-py gives up a whole call when one
node is dead. So nodes are spoken to as other servers are, and are only asked which of them serves what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from torchcache2.core.keys import Positions, Words
from torchcache2.core.places import Server, require_redis

_SLOTS = 16384
_UNSERVED = -1
# The multipliers of splitmix64. All processes must draw the same numbers, so they may never change.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Shares:
    """The shares of servers, by their names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._count = len(names)
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)

    def of(self, words: Words) -> Positions:
        """For each key the place of its server in the list of names, int64 ``(n,)``."""
        if self._count == 1:
            return np.zeros(len(words), np.int64)
        drawn = words[:, :1] ^ self._seeds
        drawn = (drawn ^ (drawn >> _SHIFTS[0])) * _FIRST + words[:, 1:]
        drawn = (drawn ^ (drawn >> _SHIFTS[1])) * _SECOND
        places: Positions = np.argmax(drawn ^ (drawn >> _SHIFTS[2]), axis=1)
        return places


class Slots:
    """What each node serves.

    Attributes
    ----------
    nodes : list of Server
        The nodes that serve something, sorted by name; they take the options of `asked`.
    """

    ASKED = b"CLUSTER", b"SLOTS"

    def __init__(self, reply: Sequence[Any], asked: Server) -> None:
        ranges = []
        for start, end, primary, *_ in reply:  # replicas follow, which refuse to serve
            host, port = primary[:2]
            ranges.append((start, end, _node(asked, host, port)))
        self.nodes = sorted({node for _, _, node in ranges}, key=lambda node: node.name)
        self._places = np.full(_SLOTS, _UNSERVED, np.int64)
        for start, end, node in ranges:
            self._places[start : end + 1] = self.nodes.index(node)

    def of(self, names: Sequence[bytes]) -> Positions:
        """For each name the place of its node in `nodes`, int64 ``(n,)``; -1 if no node serves it."""
        slot = require_redis("a Redis Cluster").crc.key_slot
        places: Positions = self._places[[slot(name) for name in names]]
        return places


def _node(asked: Server, host: bytes | None, port: int) -> Server:
    """How a node is reached; one that does not know its own host is where it was asked."""
    options = dict(asked.options)
    if host:
        options["host"] = host.decode()
    return Server.of(options | {"port": port})
