"""`Fetcher`: the samples of a batch of indices. Found in the tiers, or loaded from the source and kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.arrays import Array, Positions
from torchcache2.core.errors import NotCachedError, OutputError
from torchcache2.core.gather import as_bytes
from torchcache2.core.keys import Keys
from torchcache2.core.logs import ToldOnce
from torchcache2.core.rows import Rows
from torchcache2.datasets.itemkeys import as_index, keys_of
from torchcache2.datasets.levels import Levels
from torchcache2.datasets.samples import Samples, from_rows
from torchcache2.datasets.source import Source
from torchcache2.datasets.tally import Tally
from torchcache2.files.errors import UnreadableError

__all__ = ["Fetcher"]


class Fetcher:
    """What one process does for a dataset, which messages call `name`.

    A share `verify` of the hits is loaded again and compared. Safe under threads; two that miss one sample at
    once both load it.
    """

    def __init__(self, name: str, levels: Levels, source: Source, tally: Tally, verify: float) -> None:
        self.levels, self.source, self.tally = levels, source, tally
        self.name, self._verify = name, verify
        self._samples = Samples()
        self._told = ToldOnce(tally.is_first)
        self._random_shares = np.random.default_rng()  # its own: the generators of others must not move

    def fetch(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices."""
        if self.tally.is_random:
            self.tally.add(random=len(indices))
            return self.source.plain(indices)
        start, before = time.perf_counter_ns(), self.source.nanoseconds
        indices = [as_index(index) for index in indices]  # a sample may have it
        keys = keys_of(self.levels.namespace, indices)
        samples: list[Any] = [None] * len(indices)
        found, counts = self._find(keys, samples)
        if self._verify > 0.0 and not self._is_verified(indices, samples, found):
            self.tally.add(**counts)
            return self.source.plain(indices)
        missing = np.flatnonzero(~found)
        if len(missing):
            loaded, _ = self._load([indices[i] for i in missing.tolist()], keys.take(missing))
            for position, sample in zip(missing.tolist(), loaded, strict=True):
                samples[position] = sample
        in_source = self.source.nanoseconds - before
        spent = time.perf_counter_ns() - start - in_source
        self.tally.add(**counts, nanoseconds=in_source, spent=spent)
        if len(missing):
            self.tally.count_epochs()
        return samples

    def fill(self, indices: Sequence[int]) -> tuple[int, int, int]:
        """Have the samples at distinct ints loaded and kept, unless they are there or others load them.

        Returns
        -------
        found, loaded, nbytes : int
            Samples that were there, or that others have loaded; samples that were loaded here; bytes of rows.
        """
        keys = keys_of(self.levels.namespace, indices)
        absent = np.flatnonzero(~self.levels.has(keys))
        self.levels.write_kept(keys.take(absent))
        loaded = nbytes = 0
        if len(absent):
            claim = self.levels.claim(keys.take(absent))
            try:
                wanted = absent[claim.mine]
                while True:
                    samples, size = self._load([indices[i] for i in wanted.tolist()], keys.take(wanted))
                    loaded, nbytes = loaded + len(samples), nbytes + size
                    if not len(claim.others):
                        break
                    wanted = absent[claim.wait()]
            finally:
                claim.release()
        if self.tally.is_random:
            raise NotCachedError(f"{self.name} draws random numbers, so that no sample would be kept")
        return len(indices) - loaded, loaded, nbytes

    def _load(self, indices: Sequence[Any], keys: Keys) -> tuple[list[Any], int]:
        """The samples at indices that have these keys, from the source, and the bytes of their rows."""
        if len(indices) == 0:
            return [], 0
        drops = self.tally.drops
        samples, is_steady = self.source.load(indices)
        if not is_steady:
            self._moved(indices[0])
            self.tally.add(random=len(samples))
            return samples, 0
        given, distinct = samples, keys.first_positions()
        if distinct is not None:
            keys, given = keys.take(distinct[0]), [samples[i] for i in distinct[0].tolist()]
        batch = self._samples.to_rows(given)
        if batch.refused:
            self._refuse(next(iter(batch.refused.values())), is_any_kept=bool(batch.parts))
        kept = [self.levels.keep(keys.take(positions), rows) for positions, rows in batch.parts]
        if self.tally.drops != drops:  # samples that were loaded before must not be found afterwards
            self.levels.drop(self.levels.namespace)
        if not (all(kept) or self.levels.settings.is_persistent):  # a disk that is full says so itself
            self._told(
                "full",
                "%s: memory_cache_size is used up: samples that are not kept are loaded in each epoch. Raise "
                "it, or give disk_cache_size, which keeps them in a temporary folder",
                self.name,
            )
        self.tally.add(misses=len(samples) - len(batch.refused), refused=len(batch.refused))
        return samples, sum(len(rows) * rows.schema.row_bytes for _, rows in batch.parts)

    def _find(self, keys: Keys, samples: list[Any]) -> tuple[Array, dict[str, int]]:
        """Put the samples that tiers have into their places; which these are, and how many of each tier."""
        found, counts = np.zeros(len(keys), bool), dict[str, int]()
        names = [f"{tier.name}_hits" for tier in self.levels.tiers]
        for name, parts in zip(names, self.levels.found(keys), strict=False):
            before = int(found.sum())
            for positions, rows in parts:
                self._read(positions, rows, samples, found)
            counts[name] = int(found.sum()) - before
        return found, counts

    def _read(self, positions: Positions, rows: Rows, samples: list[Any], found: Array) -> None:
        try:
            read = from_rows(rows)
        except UnreadableError as error:
            if len(rows) > 1:  # only some may be damaged
                for i in range(len(rows)):
                    one = rows.take(torch.from_numpy(np.array([i])))
                    self._read(positions[i : i + 1], one, samples, found)
                return
            self._told(
                "unreadable", "%s: a cached sample cannot be read, and is loaded (%s)", self.name, str(error)
            )
            return
        for position, sample in zip(positions.tolist(), read, strict=True):
            samples[position] = sample
        found[positions] = True

    def _is_verified(self, indices: Sequence[Any], samples: list[Any], found: Array) -> bool:
        """Whether the hits that were drawn by lot are what the source gives; else all rows are dropped."""
        drawn = np.flatnonzero(found & (self._random_shares.random(len(found)) < self._verify)).tolist()
        apart = [
            i
            for i, fresh in zip(drawn, self.source.plain([indices[i] for i in drawn]), strict=True)
            if not _same(samples[i], fresh)
        ]
        self.tally.add(verified=len(drawn), mismatched=len(apart))
        if not apart:
            return True
        self._told(
            "verify",
            "%s: cached samples differ from what the dataset gives now, such as that at %r: all are "
            "dropped. Either its data have changed, which version= tells, or it is not deterministic",
            *(self.name, indices[apart[0]]),
        )
        self.levels.clear()
        return False

    def _moved(self, index: Any) -> None:
        """Random numbers were drawn while samples were loaded."""
        if self.source.is_random(index) and not self.tally.is_random:
            self.tally.found_random()
            self.levels.clear()
            self._told(
                "random",
                "%s draws random numbers, so it is not cached: every epoch would get the same ones. Give "
                "random augmentation to CachedDataset as transform=, which runs after the cache. If the "
                "numbers do not matter, or are seeded by the index, pass allow_random=True",
                self.name,
            )

    def _refuse(self, error: OutputError, *, is_any_kept: bool) -> None:
        """Samples that cannot be stored: an error if none was stored before, else a warning."""
        is_first = not is_any_kept and self.tally.total()["misses"] == 0
        if is_first and not any(tier.stats().rows for tier in self.levels.tiers):
            raise error
        self._told("refused", "%s: some samples cannot be cached: %s", self.name, str(error))


def _same(left: Any, right: Any) -> bool:
    """Whether two samples are bit for bit the same."""
    both = Samples().to_rows([left, right])
    if both.refused or len(both.parts) != 1:
        return False
    ((_, rows),) = both.parts
    return all(torch.equal(*as_bytes(column)) for column in rows.columns)
