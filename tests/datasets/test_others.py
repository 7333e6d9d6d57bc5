"""Code for other libraries runs with another import: their public examples, written anew."""

import functools
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers import warm
from tests.helpers.datasets import Counted, noted
from tests.helpers.redis import RedisServer
from torchcache2 import CachedDataset, CacheLoader, LazyShardDataset, SharedCache, torchcache

COUNT = 12


def bilevelcache(data, path):
    dataset = CachedDataset(
        data, memory_cache_size=100_000_000, disk_cache_size=300_000_000, disk_cache_path=path
    )
    options = {"batch_size": 4, "num_workers": 2, "pin_memory": False, "shuffle": True}
    yield from (DataLoader(dataset, **options) for _ in range(2))
    dataset.close()
    shutil.rmtree(path)


def bilevelcache_shards(data, path):
    dataset = LazyShardDataset(
        data,
        shuffle=True,
        disk_size=0.95,
        memory_size=0.5,
        overflow=0.0,
        min_elements=len(data),
        rank=0,
        num_replicas=1,
        seed=13,
        mode="rank",
        disk_cache_path=path,
    )
    yield from (DataLoader(dataset, batch_size=4, num_workers=2, shuffle=True) for _ in range(2))
    dataset.close()


class Read(Dataset):
    """As with Bagua, a dataset asks a loader."""

    def __init__(self, data, loader):
        self.data, self.loader = data, loader

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.loader.get(index, lambda x: self.data[x])


def bagua_loader(data, path):
    with RedisServer(port=True, password="") as server:
        hosts = [{"host": "127.0.0.1", "port": str(server.port)}]
        for prefix in ({"key_prefix": "test"}, {}):
            loader = CacheLoader(backend="redis", hosts=hosts, cluster_mode=True, **prefix)
            yield from (DataLoader(Read(data, loader), 4) for _ in range(2))
            assert loader.num_keys() == COUNT
            loader.close()


def bagua_dataset(data, path):
    with RedisServer(port=True, password="") as server:
        hosts = [{"host": "127.0.0.1", "port": str(server.port)}]
        dataset = CachedDataset(data, backend="redis", dataset_name="ds", hosts=hosts, cluster_mode=False)
        yield from (DataLoader(dataset, 4) for _ in range(2))
        dataset.close()


def torch_xla(data, path):
    dataset = CachedDataset(data, path)
    dataset.warmup()
    dataset.close()
    for again in (CachedDataset(data, path), CachedDataset(None, path)):
        yield DataLoader(again, 4, shuffle=True)
        again.close()


class Stochastic(Dataset):
    """As with stocaching, a dataset has the cache."""

    def __init__(self, data):
        self.data = data
        self.cache = SharedCache(
            size_limit_gib=0.01, dataset_len=len(data), data_dims=(8,), dtype=torch.float64
        )

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        x = self.cache.get_slot(idx)
        if x is None:
            x = self.data[idx]
            self.cache.set_slot(idx, x)
        return x


def stocaching(data, path):
    dataset = Stochastic(data)
    yield from (DataLoader(dataset, 4, shuffle=True, num_workers=2) for _ in range(2))


OTHERS = [bilevelcache, bilevelcache_shards, bagua_loader, bagua_dataset, torch_xla, stocaching]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_epochs_are_those_of_the_samples_and_each_is_loaded_once(other, tmp_path):
    wanted = sorted(sample.tolist() for sample in (Counted(COUNT, "tensor")[i] for i in range(COUNT)))
    # A loader with a prefix, and one without; and for the mean size of samples.
    loads = 2 if other in (bagua_loader, bilevelcache_shards) else 1
    for batches in other(Counted(COUNT, "tensor", tmp_path / "log"), tmp_path / "cache"):
        assert sorted(torch.cat([*batches]).tolist()) == wanted
    assert max(noted(tmp_path / "log").values()) == loads


@pytest.mark.slow
def test_a_server_that_is_started_for_a_loader_without_a_prefix(tmp_path):
    script = """
    from torchcache2 import CacheLoader
    items = [10, 20, 30]
    loader = CacheLoader(backend="redis", hosts=None, cluster_mode=True, capacity_per_node=100000000)
    found = [loader.get(index, lambda x: items[x]) for index in (1, 1, 2)]
    print(found, loader.num_keys(), loader.stats().hits)
    """
    assert warm.run(script, env={"TMPDIR": str(tmp_path)}).out == "[20, 20, 30] 2 1\n"


def scaled(by):
    return lambda key: key * by


def wrapped(inner, by):
    @functools.wraps(inner)
    def wrapper(key):
        return inner(key) * by

    return wrapper


def test_functions_that_differ_in_anything_are_apart():
    inner, other = scaled(3), scaled(4)
    with CacheLoader("local", memory_size="1MB") as loader:
        for _ in range(2):
            functions = [inner, other, wrapped(inner, 2), wrapped(inner, 5), wrapped(other, 2)]
            functions += [lambda key, by=by: key * by for by in (6, 7)]
            functions += [lambda key, *, by=by: key * by for by in (6, 7)]
            functions += [functools.partial(int.__mul__, 8), functools.partial(int.__mul__, 9), (10).__mul__]
            values = [loader.get(1, function) for function in functions]
            assert values == [3, 4, 6, 15, 8, 6, 7, 6, 7, 8, 9, 10]
        assert loader.num_keys() == len(values) == loader.stats().hits


def test_loaders_without_a_prefix_share_what_is_the_same(path):
    """The code of the function, and what it closes over, stand for the prefix."""
    values = []
    for _ in range(2):
        with CacheLoader("local", cache_dir=path, memory_size=0) as loader:
            values.append(
                [
                    loader.get(3, scaled(2)),
                    loader.get(3, scaled(5)),
                    loader.get(3, float),
                    loader.get("3", float),
                ]
            )
            values.append(loader.get_many([3, (3, 3)], lambda key: repr(key)))
            assert loader.num_keys() == 6
            misses = loader.stats().misses
    assert values[:2] * 2 == values == [[6, 15, 3.0, 3.0], ["3", "(3, 3)"]] * 2 and misses == 0


def test_torchcache(tmp_path):
    @torchcache(
        subsample_count=1000,
        persistent=True,
        persistent_cache_dir=str(tmp_path / "cache"),
        persistent_module_hash=None,
        max_persistent_cache_size=int(10e9),
        max_memory_cache_size=int(1e9),
        cache_dtype=None,
    )
    class MyModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 10).requires_grad_(False)

        def forward(self, x):
            return self.linear(x)

    @torchcache()
    def my_function(x):
        return x * 2

    model, x = MyModule().eval(), torch.rand(4, 10)
    for _ in range(2):
        assert torch.equal(model(x), model.linear(x)) and torch.equal(my_function(x), x * 2)
    assert model.cache_instance.stats().hits == my_function.cache_instance.stats().hits == 4
    model.cache_instance.close()
