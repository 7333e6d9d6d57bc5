"""`Asked`: the keys that the ranks ask for in one step, and who asks for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from torchcache2.core.keys import Bytes2D, Flags, Keys, Positions, Words
from torchcache2.engine.collective.header import Header

__all__ = ["Asked"]


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
    def of(cls, headers: Sequence[Header], rank: int) -> Asked:
        """The keys of the headers of all ranks, as `rank` sees them."""
        namespaces = sorted({header.namespace for header in headers})
        counts = [len(header.keys) for header in headers]
        data = np.concatenate([header.keys for header in headers])
        namespace_of = np.repeat([namespaces.index(header.namespace) for header in headers], counts)
        words = data.view("<u8")
        order = np.lexsort((words[:, 1], words[:, 0], namespace_of)[: 2 + (len(namespaces) > 1)])
        is_first = np.zeros(len(order), bool)
        is_first[:1] = True
        for column in (words[order, 0], words[order, 1], namespace_of[order]):
            is_first[1:] |= column[1:] != column[:-1]
        number = np.empty(len(order), np.int64)
        number[order] = np.cumsum(is_first) - 1
        firsts = order[is_first]
        by = np.zeros((len(firsts), len(headers)), bool)
        by[number, np.repeat(np.arange(len(headers)), counts)] = True
        begin = sum(counts[:rank])
        return cls(namespaces, namespace_of[firsts], data[firsts], by, number[begin : begin + counts[rank]])

    def __len__(self) -> int:
        return len(self.data)

    @property
    def words(self) -> Words:
        """The keys as little-endian uint64, shape (n, 2)."""
        return self.data.view("<u8")

    def keys_at(self, numbers: Positions) -> Iterator[tuple[Positions, Keys]]:
        """Some of the keys by namespace: which they are, and the keys."""
        if len(self.namespaces) == 1:
            if len(numbers):
                yield numbers, Keys(self.namespaces[0], self.data[numbers])
            return
        for index, namespace in enumerate(self.namespaces):
            those = numbers[self.namespace_of[numbers] == index]
            if len(those):
                yield those, Keys(namespace, self.data[those])
