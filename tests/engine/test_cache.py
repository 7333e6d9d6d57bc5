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
    for namespace in (b"short", "sixteen letters."):
        with pytest.raises(OptionError, match="16 bytes"):
            Cache(namespace)


def test_an_output_of_another_size_is_an_error():
    cache = Cache(NAMESPACE)
    with pytest.raises(OutputError, match=r"\(2,\) for a batch of 3"):
        cache.fetch(keys_of([1, 2, 3]), lambda positions: torch.zeros(2))
    assert cache.stats().memory_rows == 0


@pytest.mark.parametrize("size", [0, 0.01])
def test_budget_and_share_of_free_memory(size):
    with Cache(NAMESPACE, CacheSettings(max_memory_cache_size=size)) as cache:
        fetch(cache, [1, 2])
        assert fetch(cache, [1, 2]) == ([] if size else [[0, 1]])


def test_clear_flush_and_close():
    cache = Cache(NAMESPACE)
    fetch(cache, [1, 2])
    cache.flush()
    assert fetch(cache, [1, 2]) == []
    cache.clear()
    assert fetch(cache, [1, 2]) == [[0, 1]]
    cache.close()
    cache.close()
    assert fetch(cache, [1, 2]) == [[0, 1]]
    assert cache.stats().memory_rows == 0


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
