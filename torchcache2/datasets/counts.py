"""`DatasetStats`: what all processes have done with a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchcache2.engine.stats import CacheStats


@dataclasses.dataclass(frozen=True)
class DatasetStats(CacheStats):
    """What all processes have done with a dataset since it was made; counts are samples.

    Attributes
    ----------
    memory_hits, disk_hits, remote_hits : int
        Samples that were found in memory, on disk, and on servers or in a bucket; `hits` are all of these.
    misses : int
        Samples that were loaded and offered to the cache. Samples that were loaded and not kept are
        `bypasses`, by reason: ``"random"`` and ``"refused"``, as they cannot be stored.
    """

    __module__ = "torchcache2"

    memory_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0

    def _lines(self) -> list[tuple[str, str]]:
        (name, hits), *others = super()._lines()
        where = f"{self.memory_hits:,} in memory"
        where += f", {self.disk_hits:,} on disk" if self.disk_hits else ""
        where += f", {self.remote_hits:,} remote" if self.remote_hits else ""
        return [(name, f"{hits}: {where}" if self.disk_hits or self.remote_hits else hits), *others]

    @classmethod
    def of(cls, counts: Mapping[str, int], tiers: Mapping[str, int]) -> DatasetStats:
        """From the counts of a `Tally`, and what the tiers say of themselves."""
        where = {name: counts[name] for name in ("memory_hits", "disk_hits", "remote_hits")}
        hits = sum(where.values())
        seconds, spent = counts["nanoseconds"] / 1e9, counts["spent"] / 1e9
        loaded = counts["misses"]
        mean = seconds / loaded if loaded else 0.0
        return cls(
            hits=hits,
            misses=loaded,
            bypasses={name: counts[name] for name in ("random", "refused") if counts[name]},
            **where,
            verified=counts["verified"],
            mismatched=counts["mismatched"],
            seconds_computed=seconds,
            seconds_saved=None if hits and not loaded else hits * mean - spent,
            **tiers,
        )
