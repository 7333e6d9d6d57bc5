"""`Cache`, the engine below the decorator."""

import numpy as np
import pytest
import torch

from tests.helpers.storage import NAMESPACES, keys_of
from torchcache2 import Cache, CacheSettings, OptionError, OutputError
from torchcache2.engine.batch import Batch, FunctionSource

NAMESPACE = NAMESPACES[0]


class Squares:
    def __init__(self, names):
        self.names = torch.tensor(names, dtype=torch.float64)
        self.asked = []

    def __call__(self, positions):
        assert positions.dtype == torch.int64 and positions.device.type == "cpu"
        self.asked.append(positions.tolist())
        return self.names[positions] ** 2


def fetch(cache, names):
    compute = Squares(names)
    output = cache.fetch(keys_of(names), compute)
    assert output.tolist() == [name**2 for name in names]
    return compute.asked


def test_positions_of_misses_are_asked_for_once_and_in_order():
    cache = Cache(NAMESPACE)
    assert fetch(cache, [3, 1, 2]) == [[0, 1, 2]]
    assert fetch(cache, [1, 2, 3]) == []
    assert fetch(cache, [5, 1, 4, 5, 2, 4]) == [[0, 2]]
    assert fetch(cache, []) == [[]]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.memory_rows) == (7, 5, 5)


def test_a_namespace_has_sixteen_bytes():
    with pytest.raises(OptionError, match="16 bytes"):
        Cache(b"short")
    with pytest.raises(OptionError, match="16 bytes"):
        Cache("sixteen letters.")


def test_an_output_of_another_size_is_an_error():
    cache = Cache(NAMESPACE)
    with pytest.raises(OutputError, match=r"\(2,\) for a batch of 3"):
        cache.fetch(keys_of([1, 2, 3]), lambda positions: torch.zeros(2))
    assert cache.stats().memory_rows == 0


def test_a_closed_cache_computes():
    cache = Cache(NAMESPACE)
    fetch(cache, [1, 2])
    cache.close()
    cache.close()
    assert fetch(cache, [1, 2]) == [[0, 1]]
    assert cache.stats().memory_rows == 0


def test_budget_and_share_of_free_memory():
    with Cache(NAMESPACE, CacheSettings(max_memory_cache_size=0)) as cache:
        assert fetch(cache, [1, 2]) == fetch(cache, [1, 2]) == [[0, 1]]
    with Cache(NAMESPACE, CacheSettings(max_memory_cache_size=0.01)) as cache:
        fetch(cache, [1, 2])
        assert fetch(cache, [1, 2]) == []


def test_seconds_are_counted_and_saved():
    cache = Cache(NAMESPACE)

    def slow(positions):
        torch.randn(400, 400) @ torch.randn(400, 400)
        return positions.double()

    for _ in range(5):
        cache.fetch(keys_of(range(100)), slow)
    stats = cache.stats()
    assert stats.seconds_computed > 0
    assert stats.seconds_saved < 4 * stats.seconds_computed
    assert stats.hit_rate == pytest.approx(0.8)


def test_clear_and_flush():
    cache = Cache(NAMESPACE)
    fetch(cache, [1, 2])
    cache.flush()
    assert fetch(cache, [1, 2]) == []
    cache.clear()
    assert fetch(cache, [1, 2]) == [[0, 1]]


def test_rows_stay_what_they_were_if_the_forward_uses_its_memory_again():
    """A rank computes items twice in one call if another one gives up those that it has claimed."""
    memory = torch.empty(4, dtype=torch.float64)

    def compute(positions):
        memory[: len(positions)] = positions.double() ** 2
        return memory[: len(positions)]

    batch = Batch(keys_of(range(4)), FunctionSource(compute, torch.device("cpu")), CacheSettings())
    _, first = batch.compute(np.array([0, 2]))
    _, second = batch.compute(np.array([1, 3]))
    assert first.columns[0].tolist() == [0, 4] and second.columns[0].tolist() == [1, 9]
