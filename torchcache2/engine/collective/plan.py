"""Which keys ranks ask for in a step, who looks for their rows, who computes them, and who sends them.

Every rank derives the same from what all have said, so none of this is ever sent.
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

_MOST_PARTS = 65_535  # of the rows that a rank offers in a step


class Asked:
    """The distinct pairs of namespace and key that ranks ask for in a step, and their rows.

    The keys are in an order that all ranks derive. From each source to each rank that asks for its keys go
    their rows, by number of the part that the source has offered, then in the order of the keys.

    Parameters
    ----------
    asks : sequence of Ask
        What the ranks have asked for.
    rank : int
        This one.
    schemas : Schemas
        Those that were told.

    Attributes
    ----------
    data : ndarray of uint8, shape (n, 16)
        The keys.
    words : ndarray of uint64, shape (n,)
        A part of each.
    by : ndarray of bool, shape (n, ranks)
        Which rank asks for which key.
    mine : ndarray of int64, shape (k,)
        Which of the n keys each of the k keys is that this rank asks for, in its own order.
    number : ndarray of uint16, shape (n, ranks)
        What each rank has offered of each key; see `Offer`.
    source : ndarray of int64, shape (n,)
        The rank whose row of each key is sent.
    rows_sent : int
        By this rank.
    """

    def __init__(self, asks: Sequence[Ask], rank: int, schemas: Schemas) -> None:
        self._asks, self._rank, self._schemas = asks, rank, schemas
        numbers: dict[bytes, int] = {}  # of each namespace and key, as they come first
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
        self._row = np.zeros(len(pairs), np.int64)  # of each key in its part

    def keys_at(self, numbers: Positions) -> Iterator[tuple[Positions, Keys]]:
        """The keys at some numbers, by namespace: numbers and keys."""
        for namespace in dict.fromkeys(ask.namespace for ask in self._asks):
            of = np.frombuffer(namespace, np.uint8)
            those = numbers[(self._namespaces[numbers] == of).all(axis=1)]
            if len(those):
                yield those, Keys(namespace, self.data[those])

    def readers(self) -> Flags:
        """Which rank looks for the row of each key, (n, ranks).

        It is one rank of each memory, of those that do not ask for the key: the key says which one.
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
        """Take rows of this rank; what it says of those keys of which the others are `told`."""
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
        """Take what the ranks have offered of those keys, (n, ranks), of which they have told."""
        for rank, offer in enumerate(offers):
            self._told[rank] += map(self._schemas.told, offer.schemas)
            keys = np.flatnonzero(told[:, rank])
            numbers = offer.numbers if not offer.flags else np.zeros(len(keys), np.uint16)
            if len(numbers) != len(keys) or numbers.max(initial=0) > len(self._told[rank]):
                raise RankError(f"rank {rank} has offered other rows than it was asked for")
            self.number[keys, rank] = numbers

    def swap(self, channel: Channel, device: torch.device) -> Iterator[tuple[int, Positions, Rows]]:
        """Send rows, and yield those that come, but of unknown classes: from which rank, of which keys."""
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
        """What goes from one rank to another: numbers of parts, and the keys of each."""
        if source == receiver:
            return []
        keys = np.flatnonzero(self.by[:, receiver] & (self.source == source))
        numbers = self.number[keys, source]
        return [(number - 1, keys[numbers == number]) for number in np.unique(numbers).tolist() if number]


def planned(words: Array, asked: Flags, held: Flags, whole: Flags, turn: int) -> Positions:
    """The rank that has the row of each of n keys, or computes it; -1 if nobody has it or asks for it.

    Parameters
    ----------
    words : ndarray of uint64, shape (n,)
        A part of each key.
    asked, held : ndarray of bool, shape (n, W)
        Which ranks ask for each key, and which have its row. A rank computes only what it asks for.
    whole : ndarray of bool, shape (W,)
        Which ranks run their whole batch or nothing.
    turn : int
        Ranks that are equal otherwise come in an order that begins with rank ``turn % W``.

    Notes
    -----
    Those that have a row take turns by key. Keys that nobody has are *open*. A `whole` rank gets all of its
    open keys, if no other has one of them yet, and before ranks that can compute parts: then each soon has
    its turn, after which it can compute parts, too. It also runs if nobody else can compute one of its keys.
    The others take turns, among those who ask for the same keys.
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
            # At last, what is left is open for ranks that also ask for a key that another one has got.
            if (left & ~is_shared).any() if is_last else (mine & is_alone).any() or (left == mine).all():
                source[left] = rank
    rest = np.flatnonzero(is_shared & (source < 0))
    rest = rest[np.lexsort(in_parts[rest].T)]  # keys with the same askers are beside each other
    source[rest] = _nth(in_parts[rest], np.arange(turn, turn + len(rest)))
    return source


def _nth(flags: Flags, numbers: Array) -> Positions:
    """For each row of flags one of those that are set: the number says which, modulo how many they are."""
    if flags.shape[1] == 1:
        return np.zeros(len(flags), np.int64)
    nth = numbers.astype(np.int64) % flags.sum(axis=1)
    found: Positions = (flags.cumsum(axis=1) > nth[:, None]).argmax(axis=1)
    return found
