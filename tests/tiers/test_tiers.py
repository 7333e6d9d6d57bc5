"""The tiers that the suite of all tiers runs against: a new one is a line in `KINDS`."""

import math
import os
import random

import numpy as np
import pytest
import torch

from tests.helpers.nfs import Nfs
from tests.helpers.storage import CPU, NAMESPACES, Unsynced, keys_of, sealed_names
from tests.tiers.contract import LaterContract, TierContract, fewer
from torchcache2 import CacheSettings
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.engine.stack import TierStack
from torchcache2.tiers.base import TierStats
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.memory.tier import MemoryTier
from torchcache2.tiers.shared.tier import SharedTier

ROOM = 10**8


class Stack(TierStack):
    """A stack with the caller for its only cache; it has what the tier with most has."""

    def __init__(self, path):
        sizes = {"max_memory_cache_size": ROOM, "max_persistent_cache_size": ROOM}
        super().__init__(CacheSettings(persistent=True, persistent_cache_dir=path, **sizes))

    def description(self, namespace):
        return {}

    def claim(self, keys):
        return self.tiers[0].claim(keys)

    def let_go(self, namespace):
        self.forget(namespace)

    def put(self, keys, rows):
        return super().put(self, keys, rows)

    def close(self):
        for tier in self.tiers:
            tier.close()

    def stats(self):
        every = [tier.stats() for tier in self.tiers]
        names = ("rows", "bytes", "evictions", "corrupt", "faults")
        return TierStats(*[max(getattr(stats, name) for stats in every) for name in names])


class Singly:
    """Rows are put one by one."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def put(self, keys, rows):
        each = [np.array([i]) for i in range(len(keys))]
        return sum(self._tier.put(keys.take(i), rows.take(torch.from_numpy(i))) for i in each)


KINDS = {
    "memory-mru": lambda path, **options: MemoryTier(ROOM, "keep"),
    "memory-lru": lambda path, **options: MemoryTier(ROOM, "lru"),
    "disk-none": lambda path, **options: DiskTier(path, ROOM, "keep", "none", **options),
    "disk-brotli": lambda path, **options: DiskTier(path, ROOM, "lru", "brotli", **options),
    "disk-blosc2": lambda path, **options: DiskTier(path, ROOM, "keep", "blosc2", **options),
    "disk-singly": lambda path, **options: Singly(DiskTier(path, ROOM, "keep", "none", **options)),
    "disk-nfs": lambda path, **options: DiskTier(path, ROOM, "keep", "none", **options | {"fs": Nfs()}),
    "shared": lambda path, **options: SharedTier(os.urandom(16), ROOM, folder=str(path.parent)),
    "stack": lambda path, **options: Stack(path),
}


class TestTiers(TierContract):
    @pytest.fixture(
        params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind == "disk-nfs")) for kind in KINDS]
    )
    def make(self, request, tmp_path):
        tiers = []

        def one(**options):
            tiers.append(KINDS[request.param](tmp_path / "cache", **{"fs": Unsynced()} | options))
            return tiers[-1]

        yield one
        for tier in tiers:
            tier.close()

    # Each dtype is quick, but not in each kind of tier.
    test_every_dtype_comes_back_bit_by_bit = fewer(4, TierContract.test_every_dtype_comes_back_bit_by_bit)


class TestLater(LaterContract):
    @pytest.fixture
    def there(self, path):
        return lambda: sealed_names(path, range(20))


@pytest.mark.parametrize("count", [60, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_row_of_a_rare_shape_takes_its_bytes_and_less_than_64_more(kind, count, tmp_path):
    """Shapes of 10 rows each, one row at a time and in any order; another process reads shared ones."""
    shapes = [(1 + number % 7, 400 + 13 * number) for number in range(count)]
    size = sum(10 * (math.prod(shape) + 8) for shape in shapes)
    budget, job = int(1.5 * size), os.urandom(16)
    makes = {
        "memory": lambda: MemoryTier(budget),
        "shared": lambda: SharedTier(job, budget, folder=str(tmp_path)),
    }
    tier = makes[kind]()
    items = [(number, row) for number in range(len(shapes)) for row in range(10)]
    random.Random(0).shuffle(items)

    def keys(number, row):
        return Keys(NAMESPACES[0], keys_of([(number, row)]).data, number.to_bytes(4, "little"))

    def rows(number, row):
        output = {"x": torch.full((1, *shapes[number]), (number + row) % 251, dtype=torch.uint8), "n": row}
        return Rows.from_pytree(output, 1, device=CPU)

    assert sum(tier.put(keys(*item), rows(*item)) for item in items) == len(items)
    most = 64 if count == 800 else 256  # a few rows do not fill the pages that they begin
    assert tier.stats().bytes <= budget and tier.stats().bytes - size < most * len(items)
    reader = makes[kind]() if kind == "shared" else tier
    for item in items[::7]:
        (_, found), expected = reader.get(keys(*item)).parts[0], rows(*item).columns
        assert all(map(torch.equal, found.columns, expected))
        words, as_bytes = (
            keys(*item).words[0].tolist(),
            [column.view(-1).view(torch.uint8) for column in expected],
        )
        made = reader.get_one(NAMESPACES[0], *words, lambda schema, row: list(map(bytes, row)))
        assert made == [bytes(column.numpy()) for column in as_bytes]
    together = Keys(NAMESPACES[0], keys_of(items[:300]).data)
    assert sum(len(positions) for positions, _ in reader.get(together).parts) == len(items[:300])
    reader.close()
    tier.close()
