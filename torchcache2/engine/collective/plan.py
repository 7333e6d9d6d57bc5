"""Which keys ranks ask for in a step, who looks whether it has them, and who sends or computes each.

Every rank derives the same from what all have said, so none of this is ever sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from torchcache2.core.keys import Array, Bytes2D, Flags, Keys, Positions
from torchcache2.engine.collective.wire import Ask, Flag


@dataclasses.dataclass(frozen=True)
class Asked:
    """The distinct pairs of namespace and key that ranks ask for, in an order that all ranks derive.

    Attributes
    ----------
    namespaces : list of bytes
        The distinct namespaces, sorted.
    namespace_of : ndarray of int64, shape (n,)
        Which of them each key belongs to.
    data : ndarray of uint8, shape (n, 16)
        The keys.
    by : ndarray of bool, shape (n, ranks)
        Which rank asks for which key.
    mine : ndarray of int64, shape (k,)
        Which of the n keys each of the k keys is that this rank asks for, in its own order.
    """

    namespaces: list[bytes]
    namespace_of: Positions
    data: Bytes2D
    by: Flags
    mine: Positions

    @classmethod
    def of(cls, asks: Sequence[Ask], rank: int) -> Asked:
        """The keys that all ranks ask for, as `rank` sees them."""
        namespaces = sorted({ask.namespace for ask in asks})
        counts = [len(ask.keys) for ask in asks]
        data = np.concatenate([ask.keys for ask in asks])
        namespace_of = np.repeat([namespaces.index(ask.namespace) for ask in asks], counts)
        columns = [*data.view("<u8").T, namespace_of][: 2 + (len(namespaces) > 1)]
        order = np.lexsort(columns)
        is_first = np.ones(len(order), bool)
        is_first[1:] = False
        for column in columns:
            ranked = column.take(order)
            is_first[1:] |= ranked[1:] != ranked[:-1]
        number = np.empty(len(order), np.int64)
        number[order] = np.cumsum(is_first) - 1
        firsts = order[is_first]
        by = np.zeros((len(firsts), len(asks)), bool)
        by[number, np.repeat(np.arange(len(asks)), counts)] = True
        begin = sum(counts[:rank])
        mine = number[begin : begin + counts[rank]]
        return cls(namespaces, namespace_of[firsts], data[firsts], by, mine)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def words(self) -> Array:
        """A part of each key, uint64."""
        return self.data.view("<u8")[:, 0]

    def keys_at(self, numbers: Positions) -> Iterator[tuple[Positions, Keys]]:
        """Some of the keys by namespace: which they are, and the keys."""
        for index, namespace in enumerate(self.namespaces):
            those = numbers[self.namespace_of[numbers] == index]
            if len(those):
                yield those, Keys(namespace, self.data[those])

    def readers(self, asks: Sequence[Ask]) -> Flags:
        """Which rank looks for the row of each key, (n, ranks).

        It is one rank of each memory, of those that do not ask for the key: the key says which one.
        """
        readers = np.zeros_like(self.by)
        for place in {ask.place for ask in asks}:
            there = [rank for rank, ask in enumerate(asks) if ask.place == place]
            active = np.array([rank for rank in there if not asks[rank].flags & Flag.DONE] or there)
            others = ~self.by[:, active]
            keys = np.flatnonzero(np.logical_or.reduce(others, axis=1))
            readers[keys, active[_nth(others[keys], self.words[keys])]] = True
        return readers


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
