"""`Shipment`: the rows that go between ranks in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import RankError
from torchcache2.core.keys import Positions
from torchcache2.core.rows import Parts, Rows, Schema
from torchcache2.engine.collective import blocks
from torchcache2.engine.collective.asked import Asked
from torchcache2.engine.collective.header import Told
from torchcache2.engine.collective.schemas import SchemaTable

__all__ = ["Shipment"]

_MOST_SCHEMAS = 65_535
_NOTHING: Positions = np.empty(0, np.int64)


class Shipment:
    """The rows that the sources of keys send to the ranks that ask for them.

    Parameters
    ----------
    asked : Asked
        n keys.
    source : ndarray of int64, shape (n,)
        The rank that has, or computes, the row of each key; -1 for none.
    rank : int
        This one.
    schemas : SchemaTable
    """

    def __init__(self, asked: Asked, source: Positions, rank: int, schemas: SchemaTable) -> None:
        self.asked = asked
        self.rows_sent = 0
        self._source = source
        self._rank = rank
        self._schemas = schemas
        self._parts: list[Rows] = []  # by number of their schema, from 1 on
        self._row = np.zeros(len(asked), np.int64)  # of each key in its part
        self._number = np.zeros(len(asked), np.uint16)  # as the sources have told
        self._digests: list[list[bytes]] = []
        asked_by_others = np.count_nonzero(asked.by, axis=1) > asked.by[np.arange(len(asked)), source]
        self._is_wanted = (source >= 0) & asked_by_others
        self._outgoing = _NOTHING
        self._incoming: list[list[tuple[int, Positions]]] = []  # of each source, by number of the schema

    def load(self, parts: Parts, told: Told) -> None:
        """Take the rows of which this rank is the source, and fill in what the others are told of them."""
        is_wanted = self._is_wanted & (self._source == self._rank)
        number = np.zeros(len(self.asked), np.uint16)
        for numbers, rows in parts:
            name = self._schemas.digest(rows.schema) if is_wanted[numbers].any() else None
            if name is None or len(self._parts) == _MOST_SCHEMAS:
                continue
            self._parts.append(rows)
            told.digests.append(name)
            number[numbers] = len(self._parts)
            self._row[numbers] = np.arange(len(numbers))
        told.numbers = number[is_wanted]

    def announced(self, heard: Sequence[Told]) -> bool:
        """Take what the sources have told; whether any rows are to be sent."""
        self._digests = [told.digests for told in heard]
        of_ranks = self._by_source(np.flatnonzero(self._is_wanted))
        for source, (told, wanted) in enumerate(zip(heard, of_ranks, strict=True)):
            if len(told.numbers) not in (0, len(wanted)):
                raise RankError(f"rank {source} has told of {len(told.numbers)} rows, which nobody asked for")
            if len(told.numbers):
                self._number[wanted] = told.numbers
        is_told = self._number > 0
        self._outgoing = np.flatnonzero(is_told & (self._source == self._rank))
        theirs = np.flatnonzero(is_told & (self._source != self._rank) & self.asked.by[:, self._rank])
        self._incoming = [self._by_number(keys) for keys in self._by_source(theirs)]
        return bool(is_told.any())

    def packed(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """The bytes of the rows that this rank sends, on a device, and how many are for each rank."""
        parts: list[list[tuple[Rows, Positions]]] = []
        for receiver, asks in enumerate(self.asked.by[self._outgoing].T):
            keys = self._outgoing[asks] if receiver != self._rank else _NOTHING
            parts.append([(self._parts[n - 1], self._row[some]) for n, some in self._by_number(keys)])
            self.rows_sent += len(keys)
        return blocks.packed(parts, device)

    def expected(self) -> list[int]:
        """How many bytes come from each rank."""
        return [blocks.block_bytes(self._expected_of(source)) for source in range(len(self._incoming))]

    def unpacked(self, data: Tensor) -> Iterator[tuple[int, Positions, Rows]]:
        """The rows that have come: from which rank, of which keys. Those of unknown classes are left out."""
        begin = 0
        for source, incoming in enumerate(self._incoming):
            expected = self._expected_of(source)
            end = begin + blocks.block_bytes(expected)
            found = blocks.unpacked(data[begin:end], expected) if expected else []
            for (number, keys), rows in zip(incoming, found, strict=True):
                if self._schemas.schema(self._digests[source][number - 1]) is not None:
                    yield source, keys, rows
            begin = end

    def positions(self, keys: Positions) -> Positions:
        """Where some keys are among those that this rank asks for."""
        places = np.empty(len(self.asked), np.int64)
        places[self.asked.mine] = np.arange(len(self.asked.mine))
        return places[keys]

    def _by_source(self, keys: Positions) -> list[Positions]:
        """Some keys by the rank that is their source."""
        sources = self._source[keys]
        ends = np.bincount(sources, minlength=self.asked.by.shape[1]).cumsum().tolist()
        ordered = keys[np.argsort(sources, kind="stable")]
        return [ordered[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _by_number(self, keys: Positions) -> list[tuple[int, Positions]]:
        """Some keys of one source by the number of their schema."""
        numbers = self._number[keys]
        distinct = np.unique(numbers).tolist()
        return [(number, keys[numbers == number]) for number in distinct]

    def _expected_of(self, source: int) -> list[tuple[Schema, int]]:
        """The schema of the rows that come from a rank, or at least its sizes, and how many there are."""
        expected = []
        for number, keys in self._incoming[source]:
            name = self._digests[source][number - 1]
            expected.append((self._schemas.schema(name) or self._schemas.sizes(name), len(keys)))
        return expected
