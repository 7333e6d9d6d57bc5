"""The plan of a step: the keys that ranks ask for, and which rank reads, computes or sends each row.

Every rank derives the same plan from the messages of all, so the plan itself is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torchcache2.core.errors import RankError
from torchcache2.core.keys import Array, Flags, Keys, Positions
from torchcache2.core.rows import Parts, Rows
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.wire import Ask, Flag, Offer, Schemas, Told, packed, unpacked

_MOST_PARTS = 65_535  # most parts of the rows that a rank offers in a step


class Asked:
    """The distinct pairs of namespace and key that ranks ask for in a step, and the rows offered.

    All ranks derive the same order of keys. Each source sends each asking rank its rows sorted by part (as
    numbered in the source's offer), then by key.

    Parameters
    ----------
    asks : sequence of Ask
        The requests of all ranks, by rank.
    rank : int
        This one.
    schemas : Schemas
        Schemas known from messages.

    Attributes
    ----------
    data : ndarray of uint8, shape (n, 16)
        The keys.
    words : ndarray of uint64, shape (n,)
        The first half of each key.
    by : ndarray of bool, shape (n, ranks)
        Which rank asks for which key.
    mine : ndarray of int64, shape (k,)
        Positions, among the n keys, of the k keys that this rank asks for, in its own order.
    number : ndarray of uint16, shape (n, ranks)
        The number of the part in which each rank offers each key; see `Offer`.
    source : ndarray of int64, shape (n,)
        The rank that sends each key's row.
    rows_sent : int
        How many rows this rank sends.
    """

    def __init__(self, asks: Sequence[Ask], rank: int, schemas: Schemas) -> None:
        self._asks, self._rank, self._schemas = asks, rank, schemas
        numbers: dict[bytes, int] = {}  # of each pair, in order of first appearance
        asked = [[numbers.setdefault(pair, len(numbers)) for pair in ask.pairs()] for ask in asks]
        pairs = np.frombuffer(b"".join(numbers), np.uint8).reshape(-1, 32)
        self._namespaces, self.data = pairs[:, :16], np.ascontiguousarray(pairs[:, 16:])
        self.words: Array = self.data.view("<u8")[:, 0]
        self.by: Flags = np.zeros((len(pairs), len(asks)), bool)
        for asker, keys in enumerate(asked):
            self.by[keys, asker] = True
        self.mine: Positions = np.array(asked[rank], np.int64)
        self.number = np.zeros(self.by.shape, np.uint16)
        self.source: Positions = np.full(len(pairs), -1)
        self.rows_sent = 0
        self._told: list[list[Told]] = [[] for _ in asks]  # the parts of each rank
        self._parts: list[Rows] = []
        self._row = np.zeros(len(pairs), np.int64)  # each key's row in its part

    def keys_at(self, numbers: Positions) -> Iterator[tuple[Positions, Keys]]:
        """The keys at some positions, by namespace: positions and keys."""
        for namespace in dict.fromkeys(ask.namespace for ask in self._asks):
            of = np.frombuffer(namespace, np.uint8)
            those = numbers[(self._namespaces[numbers] == of).all(axis=1)]
            if len(those):
                yield those, Keys(namespace, self.data[those])

    def readers(self) -> Flags:
        """Which ranks look for the row of each key, (n, ranks).

        For each key, one rank per shared memory, among those that do not ask for it; the key selects it.
        """
        readers = np.zeros_like(self.by)
        for place in {ask.place for ask in self._asks}:
            there = [rank for rank, ask in enumerate(self._asks) if ask.place == place]
            active = np.array([rank for rank in there if not self._asks[rank].flags & Flag.DONE] or there)
            others = ~self.by[:, active]
            keys = np.flatnonzero(np.logical_or.reduce(others, axis=1))
            readers[keys, active[_nth(others[keys], self.words[keys])]] = True
        return readers

    def offer(self, parts: Parts, told: Flags) -> Offer:
        """Add this rank's rows; returns its offer, for the keys of which other ranks are `told`."""
        number, schemas = np.zeros(len(self.data), "<u2"), []
        for numbers, rows in parts:
            text = self._schemas.text(rows.schema) if told[numbers].any() else None
            if text is not None and len(self._parts) < _MOST_PARTS:
                self._parts.append(rows)
                schemas.append(text)
                number[numbers] = len(self._parts)
                self._row[numbers] = np.arange(len(numbers))
        return Offer(numbers=number[told], schemas=schemas)

    def hear(self, offers: Sequence[Offer], told: Flags) -> None:
        """Add the offers of all ranks; each is about the keys that `told`, (n, ranks), names."""
        for rank, offer in enumerate(offers):
            self._told[rank] += map(self._schemas.told, offer.schemas)
            keys = np.flatnonzero(told[:, rank])
            numbers = offer.numbers if not offer.flags else np.zeros(len(keys), np.uint16)
            if len(numbers) != len(keys) or numbers.max(initial=0) > len(self._told[rank]):
                raise RankError(f"rank {rank} has offered other rows than it was asked for")
            self.number[keys, rank] = numbers

    def swap(self, channel: Channel, device: torch.device) -> Iterator[tuple[int, Positions, Rows]]:
        """Send rows, and yield received ones of known classes: source rank, keys, rows."""
        ranks = range(len(self._asks))
        outgoing = [self._parts_of(self._rank, receiver) for receiver in ranks]
        incoming = [self._parts_of(source, self._rank) for source in ranks]
        self.rows_sent = sum(len(keys) for parts in outgoing for _, keys in parts)
        rows = [[(self._parts[number], self._row[keys]) for number, keys in parts] for parts in outgoing]
        told = [
            [(self._told[source][number], len(keys)) for number, keys in incoming[source]] for source in ranks
        ]
        sizes = [sum(one.bytes_of(count) for one, count in parts) for parts in told]
        data, start = channel.swap(*packed(rows, device), sizes), 0
        for source, size in enumerate(sizes):
            blocks = unpacked(data[start : start + size], told[source])
            start += size
            for (_, keys), block in zip(incoming[source], blocks, strict=True):
                if block is not None:
                    yield source, keys, block

    def _parts_of(self, source: int, receiver: int) -> list[tuple[int, Positions]]:
        """The parts that one rank sends to another: their numbers and keys."""
        if source == receiver:
            return []
        keys = np.flatnonzero(self.by[:, receiver] & (self.source == source))
        numbers = self.number[keys, source]
        return [(number - 1, keys[numbers == number]) for number in np.unique(numbers).tolist() if number]


def planned(words: Array, asked: Flags, held: Flags, whole: Flags, turn: int) -> Positions:
    """The rank that has, or will compute, the row of each of n keys; -1 if no rank has it or asks for it.

    Parameters
    ----------
    words : ndarray of uint64, shape (n,)
        A part of each key.
    asked, held : ndarray of bool, shape (n, W)
        Which ranks ask for each key, and which have its row. A rank computes only keys that it asks for.
    whole : ndarray of bool, shape (W,)
        Which ranks can run only their whole batch.
    turn : int
        Ties are broken in the order of ranks that begins with ``turn % W``.

    Notes
    -----
    If several ranks have a row, the key selects one. Keys without a row are *open*. First come `whole` ranks:
    one gets all of its open keys if none of them is assigned yet, or if only it can compute one of them. So
    each soon runs once, after which it can compute parts, too. The remaining open keys are divided among the
    ranks that ask for them.
    """
    source = np.full(len(words), -1, np.int64)
    is_held = np.logical_or.reduce(held, axis=1)
    source[is_held] = _nth(held[is_held], words[is_held])
    if is_held.all():
        return source
    open_keys = asked & ~is_held[:, None]
    is_alone = open_keys.sum(axis=1) == 1
    in_parts = open_keys & ~whole
    is_shared = in_parts.any(axis=1)
    ranks = [(turn + i) % len(whole) for i in range(len(whole))]
    ranks.sort(key=lambda rank: not (open_keys[:, rank] & is_alone).any())
    for is_last in (False, True):
        for rank in [rank for rank in ranks if whole[rank]]:
            mine = open_keys[:, rank]
            left = mine & (source < 0)
            # At last, the remaining keys are open for ranks that also ask for a key assigned to another one.
            if (left & ~is_shared).any() if is_last else (mine & is_alone).any() or (left == mine).all():
                source[left] = rank
    rest = np.flatnonzero(is_shared & (source < 0))
    rest = rest[np.lexsort(in_parts[rest].T)]  # keys with the same askers are beside each other
    source[rest] = _nth(in_parts[rest], np.arange(turn, turn + len(rest)))
    return source


def _nth(flags: Flags, numbers: Array) -> Positions:
    """For each row of flags, the index of one set flag: number `numbers`, modulo their count."""
    if flags.shape[1] == 1:
        return np.zeros(len(flags), np.int64)
    nth = numbers.astype(np.int64) % flags.sum(axis=1)
    found: Positions = (flags.cumsum(axis=1) > nth[:, None]).argmax(axis=1)
    return found
