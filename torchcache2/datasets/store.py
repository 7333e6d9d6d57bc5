"""`SampleStore`: samples under keys, found in the levels of one namespace and kept there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Array, Keys, Positions, int_key
from torchcache2.core.logs import ToldOnce
from torchcache2.core.rows import Rows, Schema
from torchcache2.datasets.levels import Levels
from torchcache2.datasets.tally import Tally
from torchcache2.engine.values.samples import Samples, from_rows
from torchcache2.engine.values.stub import rebuilder
from torchcache2.files.errors import UnreadableError


_MOST_REBUILDERS = 1024
_NOTHING: list[Any] = []


class Sought(NamedTuple):
    """What was found of n keys.

    Attributes
    ----------
    samples : list
        n samples; None where there is none.
    found : ndarray of bool
        Where there is one, ``(n,)``.
    counts : dict of str to int
        How many were found in each tier, by the names in `COUNTS`.
    unread : dict of int to UnreadableError
        Why a row that was found could not be read, by position.
    """

    samples: list[Any]
    found: Array
    counts: dict[str, int]
    unread: dict[int, UnreadableError]


class SampleStore:
    """What one process finds and keeps for a dataset or a loader, which messages call `name`.

    Safe under threads.

    Attributes
    ----------
    end : int
        Only ints from 0 to this are looked up by `find_one`.
    """

    end = 1 << 63

    def __init__(self, name: str, levels: Levels, tally: Tally) -> None:
        self.name, self.levels, self.tally = name, levels, tally
        self.told = ToldOnce(tally.is_first)
        self._samples = Samples()
        self._rebuilders: dict[int, tuple[Schema, Any]] = {}  # by the id of the schema, which is kept

    def find(self, keys: Keys) -> Sought:
        """The samples that tiers have, each in memory of its own."""
        sought = Sought([None] * len(keys), np.zeros(len(keys), bool), {}, {})
        names = [f"{tier.name}_hits" for tier in self.levels.tiers]
        for name, parts in zip(names, self.levels.found(keys), strict=False):
            before = int(sought.found.sum())
            for positions, rows in parts:
                self._read(positions, rows, sought)
            sought.counts[name] = int(sought.found.sum()) - before
        return sought

    def find_one(self, index: int) -> list[Any]:
        """The sample at an int in a list, if memory has it and nothing needs a closer look; else nothing."""
        if not 0 <= index < self.end or torch.is_inference_mode_enabled():
            return _NOTHING
        start, levels = time.perf_counter_ns(), self.levels
        memory = levels.tiers[0]
        found: list[Any] | None = memory.get_one(levels.namespace, *int_key(index), self._made)
        if found is None:
            return _NOTHING
        self.tally.add_hit("memory_hits", time.perf_counter_ns() - start)
        return found

    def _made(self, schema: Schema, buffers: Sequence[memoryview]) -> list[Any] | None:
        """The sample of a row in a list; None if the row cannot be read."""
        known = self._rebuilders.get(id(schema))
        try:
            if known is None:
                if len(self._rebuilders) >= _MOST_REBUILDERS:
                    self._rebuilders.clear()
                known = self._rebuilders[id(schema)] = schema, rebuilder(schema)
            return [known[1](buffers)]
        except UnreadableError:  # `find` says so
            return None

    def keep(self, keys: Keys, samples: Sequence[Any], drops: int) -> int:
        """Offer loaded samples to the tiers, and count them as misses.

        Parameters
        ----------
        keys : Keys
            n keys, of which some may be equal.
        samples : sequence
            Their samples.
        drops : int
            What `Tally.drops` was before the samples were loaded: none is kept if it is another now.

        Returns
        -------
        int
            Bytes of the rows.

        Raises
        ------
        OutputError
            If samples cannot be stored, and none was stored before.
        """
        count, distinct = len(samples), keys.first_positions()
        if distinct is not None:
            keys, samples = keys.take(distinct[0]), [samples[i] for i in distinct[0].tolist()]
        batch = self._samples.to_rows(samples)
        if batch.refused:
            self._refuse(next(iter(batch.refused.values())), is_any_kept=bool(batch.parts))
        kept = [self.levels.keep(keys.take(positions), rows) for positions, rows in batch.parts]
        if self.tally.drops != drops:  # samples that were loaded before must not be found afterwards
            self.levels.drop(self.levels.namespace)
        if not (all(kept) or self.levels.settings.is_persistent):  # a disk that is full says so itself
            self.told(
                "full",
                "%s: memory_cache_size is used up: samples that are not kept are loaded in each epoch. Raise "
                "it, or give disk_cache_size, which keeps them in a temporary folder",
                self.name,
            )
        self.tally.add(misses=count - len(batch.refused), refused=len(batch.refused))
        return sum(len(rows) * rows.schema.row_bytes for _, rows in batch.parts)

    def _read(self, positions: Positions, rows: Rows, sought: Sought) -> None:
        try:
            read = from_rows(rows)
        except UnreadableError as error:
            if len(rows) > 1:  # only some may be damaged
                for i in range(len(rows)):
                    one = rows.take(torch.from_numpy(np.array([i])))
                    self._read(positions[i : i + 1], one, sought)
                return
            sought.unread.update(dict.fromkeys(positions.tolist(), error))
            self.told("unreadable", "%s: a cached sample cannot be read (%s)", self.name, str(error))
            return
        for position, sample in zip(positions.tolist(), read, strict=True):
            sought.samples[position] = sample
        sought.found[positions] = True

    def _refuse(self, error: OutputError, *, is_any_kept: bool) -> None:
        """Samples that cannot be stored: an error if none was stored before, else a warning."""
        is_first = not is_any_kept and self.tally.total()["misses"] == 0
        if is_first and not any(tier.count(self.levels.namespace) for tier in self.levels.tiers):
            raise error
        self.told("refused", "%s: some samples cannot be cached: %s", self.name, str(error))
