"""How much memory is free."""

import io

import pytest
import torch

from torchcache2 import CachedDataset, CacheSettings, torchcache
from torchcache2.core import sizes

CPU = torch.device("cpu")
FILES = {
    "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n",
    "/sys/fs/cgroup/memory.max": "4000000\n",
    "/sys/fs/cgroup/memory.current": "3900000\n",
    "/sys/fs/cgroup/memory.stat": "anon 900000\nfile 3000000\ninactive_file 2000000\nactive_file 500000\n",
}


@pytest.mark.parametrize(
    ("changed", "free"),
    [
        ({}, 4_000_000 - (3_900_000 - 2_500_000)),  # what files take is given up when memory is needed
        ({"/sys/fs/cgroup/memory.max": "max\n"}, 5_120_000),
        ({"/sys/fs/cgroup/memory.max": "900000\n"}, 0),
        ({"/sys/fs/cgroup/memory.max": "99000000\n"}, 5_120_000),
        ({"/sys/fs/cgroup/memory.max": None}, 5_120_000),
        ({"/proc/meminfo": None}, None),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_container(changed, free, monkeypatch):
    def opened(path, **_):
        text = (FILES | changed)[path]
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(sizes, "open", opened, raising=False)
    assert sizes.free_memory(CPU) == free


@pytest.mark.parametrize("size", [2**63, 2**70, "99999999999TB"])
def test_a_budget_of_more_than_all_memory_is_all_of_it(size):
    settings = CacheSettings(max_memory_cache_size=size)
    assert settings.memory_budget() == sizes.host_memory() < 2**62
    assert sizes.parse_size("remote_size", size) == 2**63 - 1
    assert CacheSettings(max_memory_cache_size=size, memory_cache_device=None).memory_budget() == 2**63 - 1


@pytest.mark.parametrize("kind", ["module", "ranks", "dataset"])
def test_rows_are_kept_with_such_a_budget(kind, monkeypatch):
    if kind == "dataset":
        dataset = CachedDataset([torch.ones(3)] * 4, memory_size=2**64)
        assert [len(dataset[i]) for i in (0, 0)] == [3, 3] and dataset.stats().hits == 1
        dataset.close()
        return
    options = {"distributed": "node"} if kind == "ranks" else {}
    model = torchcache(torch.nn.ReLU(), max_memory_cache_size=2**64, **options)
    for _ in range(2):
        model(torch.ones(2, 3))
    assert model.cache_instance.stats().hits >= 2


def test_rows_are_not_allocated_beyond_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(sizes, "free_memory", lambda device: 1 << 30)
    sizes.check_room(1 << 29)
    with pytest.raises(MemoryError, match=r"536\.9 MB of rows at once, with 1\.1 GB of memory free"):
        sizes.check_room((1 << 29) + 1)
    monkeypatch.setattr(sizes, "free_memory", lambda device: 1000)
    sizes.check_room(1 << 20)  # nobody asks what is free for a few bytes
    monkeypatch.setattr(sizes, "free_memory", lambda device: None)
    sizes.check_room(1 << 50)
