"""`Fetcher`: the samples of a batch of indices. Found in the store, or loaded from the source and kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.errors import NotCachedError
from torchcache2.core.keys import Array, Keys
from torchcache2.core.memory import as_bytes
from torchcache2.datasets.itemkeys import as_index, keys_of
from torchcache2.datasets.source import Source
from torchcache2.datasets.store import SampleStore
from torchcache2.engine.values.samples import Samples


class Fetcher:
    """What one process does for a dataset.

    A share `verify` of the hits is loaded again and compared. Safe under threads; two that miss one sample at
    once both load it.
    """

    def __init__(self, store: SampleStore, source: Source, verify: float) -> None:
        self.store, self.source, self.levels, self.tally = store, source, store.levels, store.tally
        self._verify = verify
        self._random_shares = np.random.default_rng()  # its own: the generators of others must not move

    def fetch(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices."""
        drops = self.tally.drops  # first: whoever finds random numbers says so before all rows are dropped
        if self.tally.is_random:
            self.tally.add(random=len(indices))
            return self.source.plain(indices)
        start, before = time.perf_counter_ns(), self.source.nanoseconds
        indices = [as_index(index) for index in indices]  # a sample may have it
        keys = keys_of(self.levels.namespace, indices)
        samples, found, counts, _ = self.store.find(keys)
        if self._verify > 0.0 and not self._is_verified(indices, samples, found):
            self.tally.add(**counts)
            return self.source.plain(indices)
        missing = np.flatnonzero(~found)
        if len(missing):
            loaded, _ = self._load([indices[i] for i in missing.tolist()], keys.take(missing), drops)
            for position, sample in zip(missing.tolist(), loaded, strict=True):
                samples[position] = sample
        in_source = self.source.nanoseconds - before
        spent = time.perf_counter_ns() - start - in_source
        self.tally.add(**counts, nanoseconds=in_source, spent=spent)
        if len(missing):
            self.tally.count_epochs()
        return samples

    def find_one(self, index: int) -> list[Any]:
        """The sample at an int, if it is in memory and not to be verified; else nothing."""
        return [] if self._verify > 0.0 or self.tally.is_random else self.store.find_one(index)

    def fill(self, indices: Sequence[int]) -> tuple[int, int, int]:
        """Have the samples at distinct ints loaded and kept, unless they are there or others load them.

        Returns
        -------
        found, loaded, nbytes : int
            Samples that were there, or that others have loaded; samples that were loaded here; bytes of rows.
        """
        drops = self.tally.drops  # first, as in `fetch`
        self._check_steady()
        keys = keys_of(self.levels.namespace, indices)
        absent = np.flatnonzero(~self.levels.has(keys))
        absent = absent[~self.levels.write_kept(keys.take(absent))]
        loaded = nbytes = 0
        if len(absent):
            claim = self.levels.claim(keys.take(absent))
            try:
                wanted = absent[claim.mine]
                while True:
                    some = [indices[i] for i in wanted.tolist()]
                    samples, size = self._load(some, keys.take(wanted), drops)
                    loaded, nbytes = loaded + len(samples), nbytes + size
                    if not len(claim.others):
                        break
                    wanted = absent[claim.wait()]
            finally:
                claim.release()
        self._check_steady()
        return len(indices) - loaded, loaded, nbytes

    def _check_steady(self) -> None:
        if self.tally.is_random:
            raise NotCachedError(f"{self.store.name} draws random numbers, so that no sample would be kept")

    def _load(self, indices: Sequence[Any], keys: Keys, drops: int) -> tuple[list[Any], int]:
        """The samples at indices that have these keys, from the source, and the bytes of their rows.

        None is kept if `Tally.drops` is not `drops` any more.
        """
        if len(indices) == 0:
            return [], 0
        samples, is_steady = self.source.load(indices)
        if not is_steady:
            self._moved(indices[0])
            self.tally.add(random=len(samples))
            return samples, 0
        return samples, self.store.keep(keys, samples, drops)

    def _is_verified(self, indices: Sequence[Any], samples: list[Any], found: Array) -> bool:
        """Whether the hits that were drawn by lot are what the source gives; else all rows are dropped."""
        drawn = np.flatnonzero(found & (self._random_shares.random(len(found)) < self._verify)).tolist()
        apart = [
            i
            for i, fresh in zip(drawn, self.source.load([indices[i] for i in drawn])[0], strict=True)
            if not _same(samples[i], fresh)
        ]
        self.tally.add(verified=len(drawn), mismatched=len(apart))
        if not apart:
            return True
        self.store.told(
            "verify",
            "%s: cached samples differ from what the dataset gives now, such as that at %r: all are "
            "dropped. Either its data have changed, which version= tells, or it is not deterministic",
            *(self.store.name, indices[apart[0]]),
        )
        self.levels.clear()
        return False

    def _moved(self, index: Any) -> None:
        """Random numbers were drawn while samples were loaded."""
        if self.source.is_random(index) and not self.tally.is_random:
            self.tally.found_random()
            self.levels.clear()
            self.store.told(
                "random",
                "%s draws random numbers%s, so it is not cached: every epoch would get the same ones. Give "
                "random augmentation to CachedDataset as transform=, which runs after the cache. If the "
                "numbers do not matter, or are seeded by the index, pass allow_random=True",
                *(self.store.name, f" ({self.source.unseeded[0]})" if self.source.unseeded else ""),
            )


def _same(left: Any, right: Any) -> bool:
    """Whether two samples are bit for bit the same."""
    both = Samples().to_rows([left, right])
    if both.refused or len(both.parts) != 1:
        return False
    ((_, rows),) = both.parts
    return all(torch.equal(*as_bytes(column)) for column in rows.columns)
