"""`LazyShardDataset`: a rank gets its samples, and finds them again, in one process and in several."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from tests.helpers import warm
from torchcache2 import LazyShardDataset, OptionError, OutputError

SOAK = bool(os.environ.get("SOAK"))
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


class Source:
    """Samples of 100 bytes; it notes which were loaded."""

    classes = ("even", "odd")

    def __init__(self, count=100):
        self.count = count
        self.loaded = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if type(index) is not int or not 0 <= index < self.count:
            raise IndexError(index)
        self.loaded.append(index)
        return torch.full((100,), index, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shard():
    """Makes shards, and closes their caches afterwards."""
    made = []

    def one(source=None, *args, **options):
        source = Source() if source is None else source
        options = {"memory_size": "1MB", "name": "source"} | options
        made.append(LazyShardDataset(source, *args, **options))
        return made[-1]

    yield one
    for dataset in made:
        dataset.close()


def numbers(samples):
    return [int(sample[0]) for sample in samples]


def test_without_ranks_it_is_the_whole_dataset(shard):
    dataset = shard()
    assert len(dataset) == 100 and numbers(dataset) == dataset.indices.tolist() == list(range(100))


def test_a_sample_is_that_of_the_dataset_and_is_loaded_once(shard):
    source = Source()
    dataset = shard(source, rank=1, num_replicas=4)
    assert len(dataset) == 25
    for _ in range(3):
        assert numbers(dataset) == dataset.indices.tolist()
    assert source.loaded == dataset.indices.tolist()
    assert dataset.stats().misses == 25 and dataset.stats().hits == 50


def test_places_are_ints_of_any_kind_and_count_from_the_end_too(shard):
    dataset = shard(rank=1, num_replicas=4)
    wanted = dataset.indices
    for kind in (int, np.int64, np.uint8, torch.tensor):
        assert numbers([dataset[kind(3)]]) == [wanted[3]]
    assert numbers([dataset[-1], dataset[-25]]) == [wanted[24], wanted[0]]
    assert numbers(dataset.__getitems__([3, -1, 3])) == [wanted[3], wanted[24], wanted[3]]
    assert dataset.__getitems__([]) == []
    for wrong in (25, -26, 100):
        with pytest.raises(IndexError, match=f"{wrong}.* a shard of 25 samples"):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset[1.0]
    assert numbers(Subset(dataset, [2, 0])) == [wanted[2], wanted[0]]
    assert len(ConcatDataset([dataset, dataset])) == 50


def test_other_attributes_are_the_datasets(shard):
    dataset = shard(transform=lambda sample: sample + 1)
    assert dataset.classes == ("even", "odd") and dataset.cache_dir is None
    assert numbers([dataset[3]]) == [4]
    with pytest.raises(AttributeError, match="nothing"):
        dataset.nothing  # noqa: B018


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_changes_by_epoch_if_it_is_shuffled(shard, shuffle):
    dataset = shard(rank=1, num_replicas=4, shuffle=shuffle)
    first = dataset.indices.tolist()
    dataset.set_epoch(1)
    assert sorted(dataset.indices.tolist()) == sorted(first)
    assert (dataset.indices.tolist() != first) == shuffle
    dataset.set_epoch(0)
    assert dataset.indices.tolist() == first


def test_machines_are_dealt_anew_and_find_what_another_rank_has_loaded(shard, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHCACHE_JOB", f"test {os.getpid()}")  # as ranks of one job
    source = Source()
    ranks = [shard(source, rank=rank, num_replicas=4, mode="node") for rank in range(4)]
    machines = [set(), set()]
    for epoch in range(3):
        for rank, dataset in enumerate(ranks):
            dataset.set_epoch(epoch)
            assert numbers(dataset) == dataset.indices.tolist()
            machines[rank // 2] |= set(dataset.indices.tolist())
    assert sorted(map(len, machines)) == [50, 50] and machines[0] | machines[1] == set(range(100))
    assert sorted(source.loaded) == list(range(100))


@pytest.mark.parametrize("lasts", [False, True])
def test_mode_disk_keeps_nothing_in_memory(shard, path, lasts):
    where = {"cache_dir": path} if lasts else {"disk_size": "1MB"}
    dataset = shard(mode="disk", memory_size=0.5, **where)
    for _ in range(2):
        assert numbers(dataset) == list(range(100))
        dataset.flush()
    stats = dataset.stats()
    assert (stats.memory_hits, stats.disk_hits, stats.misses) == (0, 100, 100)


def test_ranks_and_runs_share_a_folder(shard, path):
    source = Source()
    for rank in range(2):
        first = shard(source, disk_cache_path=path, rank=rank, num_replicas=2)
        assert len(numbers(first)) == 50
        first.close()
    again = shard(source, path)
    assert numbers(again) == list(range(100))
    assert sorted(source.loaded) == list(range(100))
    assert again.cache_dir == path


class Array:
    """As of Zarr 3: it has no length, but a shape."""

    shape, ndim, dtype = (7, 2), 2, np.dtype(np.uint8)

    def __getitem__(self, index):
        return np.full(2, index, np.uint8)


def test_an_array_without_a_length_has_its_rows(shard):
    dataset = shard(Array(), rank=1, num_replicas=2, overflow=9)
    assert len(dataset) == 3 and numbers(dataset) == dataset.indices.tolist()
    assert dataset.missing().tolist() == []


def test_a_dataset_without_a_length_has_no_shards(shard):
    class Endless:
        shape = (7, 2)  # of a sample

        def __getitem__(self, index):
            return index

    with pytest.raises(OptionError, match=r"dataset is of type Endless: expected a dataset with a len\(\)"):
        shard(Endless())


# Bounds


def test_without_overflow_nothing_is_left_out_however_little_fits(shard, log):
    assert len(shard(memory_size="500B")) == 100
    assert log == []


@pytest.mark.parametrize(("overflow", "expected"), [(0, 25), (0.0, 25), (1.0, 50), (0.5, 37), (9, 100)])
def test_overflow_bounds_the_shard_by_what_fits_and_tells_once(shard, log, overflow, expected):
    source = Source()
    dataset = shard(source, memory_size=1000, disk_size=1500, overflow=overflow)
    assert len(dataset) == len(set(dataset.indices.tolist())) == expected
    assert len(source.loaded) == 8 and max(source.loaded) > 80
    said = [record.getMessage() for record in log if record.levelname == "WARNING"]
    if expected == 100:
        assert said == []
    else:
        assert said == [
            f"LazyShardDataset: rank 0 leaves out {100 - expected} of 100 samples: overflow={overflow}, and "
            "2.5 kB have room for about 25 samples of 100 B"
        ]


def test_the_ranks_of_a_machine_divide_its_room(shard, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for mode in ("rank", "node"):
        ranks = [shard(rank=r, num_replicas=4, mode=mode, memory_size=2000, overflow=0) for r in range(4)]
        assert [len(dataset) for dataset in ranks] == [10] * 4
        assert len(set(np.concatenate([dataset.indices for dataset in ranks]).tolist())) == 40


def test_ranks_of_machines_that_differ_have_one_bound(shard, monkeypatch):
    lengths = []
    for machine, (first, here) in enumerate([(0, 4), (4, 2)]):  # as torchrun tells the ranks
        for local in range(here):
            told = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here, "GROUP_RANK": machine}
            for name, value in (told | {"GROUP_WORLD_SIZE": 2}).items():
                monkeypatch.setenv(name, str(value))
            options = {"overflow": 0, "even": "drop", "memory_size": 6000}
            lengths.append(len(shard(rank=first + local, num_replicas=6, **options)))
    assert lengths == [10] * 6


def test_the_bound_of_even_shards_is_in_bytes(shard, path):
    equal = {"rank": 0, "num_replicas": 3, "overflow": 0, "even": "drop"}
    assert len(shard(**equal, memory_size=1000)) == 3
    for sizes in ({"memory_size": 0.5}, {"disk_size": 0.5}, {"cache_dir": path}):
        with pytest.raises(OptionError, match=r"overflow=0, even='drop': .* have to be bytes, or texts"):
            shard(**equal, **sizes)
    assert len(shard(**equal | {"even": None}, memory_size=0.5)) == 34


def test_loading_some_samples_draws_no_random_numbers(shard):
    class Random(Source):
        def __getitem__(self, index):
            return torch.rand(4)

    state = torch.get_rng_state()
    assert len(shard(Random(), overflow=0, memory_size="100B")) == 6
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_that_cannot_be_stored_cannot_be_measured(shard):
    with pytest.raises(OutputError, match="object"):
        shard([object()] * 9, overflow=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_elements": 26}, "min_elements=26: .* 100 samples, not every one of 4 ranks has more than 25$"),
        (
            {"min_elements": 11, "memory_size": 4000, "overflow": 0},
            "has more than 10: overflow=0, and 4.0 kB have room for about 40 samples of 100 B, for 4 ranks$",
        ),
        (
            {"memory_size": "300B", "overflow": 0},
            "no rank would have any of 100 samples: overflow=0, and 300 B",
        ),
    ],
)
def test_a_shard_that_is_too_small_is_an_error_with_the_numbers(shard, options, message):
    with pytest.raises(OptionError, match=message):
        shard(rank=0, num_replicas=4, **options)


@pytest.mark.parametrize(
    ("even", "lengths"), [(None, [34, 33, 33]), ("drop", [33] * 3), ("repeat", [34] * 3)]
)
def test_lengths_that_differ_are_told_by_one_rank(shard, log, even, lengths):
    ranks = [shard(rank=rank, num_replicas=3, even=even) for rank in range(3)]
    assert list(map(len, ranks)) == lengths
    said = [record.getMessage() for record in log if record.levelname == "WARNING"]
    assert [("wait forever: pass even='drop' or even='repeat'" in text) for text in said] == [
        True for _ in range(even is None)
    ]


# All at once, and what else a cache does


def test_warmup_loads_this_ranks_samples_and_missing_are_places_in_the_shard(shard):
    source = Source()
    ranks = [shard(source, rank=rank, num_replicas=3, shuffle=True, even="repeat") for rank in range(3)]
    assert ranks[1].missing().tolist() == list(range(34))
    found = ranks[1][5]
    assert ranks[1].missing().tolist() == [place for place in range(34) if place != 5]
    done = ranks[1].warmup(batch_size=8)
    assert (done.computed, done.found) == (len(set(ranks[1].indices.tolist())) - 1, 1)
    assert ranks[1].missing().tolist() == []
    assert sorted(source.loaded) == sorted(set(ranks[1].indices.tolist()))
    assert len(source.loaded) < 100 and torch.equal(ranks[1][5], found)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "rank=1, num_replicas=None: give both, or none"),
        ({"rank": 2, "num_replicas": 2}, "rank=2, num_replicas=2: expected ints, and a rank from 0 to"),
        ({"rank": 0.0, "num_replicas": 2}, r"rank=0\.0, num_replicas=2: expected ints"),
        ({"mode": "all"}, "mode='all': expected 'rank', 'node' or 'disk'"),
        ({"even": "pad"}, "even='pad': expected None, 'drop' or 'repeat'"),
        ({"seed": -1}, r"seed=-1: expected an int from 0 to 2\*\*64 - 1"),
        ({"overflow": -0.1}, r"overflow=-0\.1: expected None, or a number from 0 on"),
        ({"min_elements": -1}, "min_elements=-1: expected an int from 0 on"),
        ({"memory_size": -1}, "memory_size=-1: expected bytes as an int"),
        ({"disk_size": "much"}, "disk_size='much': expected bytes as an int"),
        ({"mode": "disk"}, "mode='disk' keeps samples on the disk only: give it a cache_dir, or a disk_size"),
        ({"cache_dir": "here", "disk_cache_path": "there"}, "cache_dir='here' and disk_cache_path='there'"),
        ({"compress": True}, "compress"),
        (
            {"mode": "node", "rank": 1, "num_replicas": 4},
            "mode='node': cannot tell which of 4 ranks are on the machine of rank 1. .* LOCAL_WORLD_SIZE",
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error_that_says_what_is_right(shard, options, message):
    with pytest.raises(OptionError, match=message):
        shard(**options)


def test_an_epoch_is_an_int_from_zero_on(shard):
    dataset = shard()
    for wrong in (-1, 1.0, None):
        with pytest.raises(OptionError, match=r"epoch=.*: expected an int from 0 on"):
            dataset.set_epoch(wrong)
    dataset.set_epoch(np.int64(2**40))


def test_ranks_are_those_of_the_launcher(shard, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    given = shard(rank=3, num_replicas=4)
    assert shard().indices.tolist() == given.indices.tolist()
    assert len(shard(mode="node")) == 25
    monkeypatch.setenv("LOCAL_RANK", "0")  # the ranks of a machine do not follow on each other
    with pytest.raises(OptionError, match="mode='node': cannot tell"):
        shard(mode="node")


# Processes

LOADING = """
import sys
import torch
from torch.utils.data import DataLoader
from torchcache2 import LazyShardDataset


class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index)


if __name__ == "__main__":
    method, workers = sys.argv[1], int(sys.argv[2])
    data = LazyShardDataset(Numbers(), memory_size="1MB", rank=1, num_replicas=2, shuffle=True)
    loader = DataLoader(
        data, 4, num_workers=workers, multiprocessing_context=method, persistent_workers=True
    )
    orders = set()
    for epoch in (0, 1, 5, 0):
        data.set_epoch(epoch)
        found = torch.cat(list(loader)).tolist()
        assert found == data.indices.tolist(), (epoch, found)
        orders.add(tuple(found))
        assert epoch == 0 or data.missing().tolist() == []
    assert len(orders) == 3 and len(set(map(frozenset, orders))) == 1
    assert data.stats().misses == 20, data.stats()
    print("end")
"""


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 1), *[("spawn", 1)] * SOAK])
def test_persistent_workers_get_the_order_of_each_epoch(method, workers):
    process = warm.run(LOADING, method, workers, forks=True)
    assert process.words == ["end"] and process.err == ""
