"""`CachedDataset.loader` gives the batches of a `DataLoader` over the plain samples, whatever is kept."""

import contextlib
import copy
import multiprocessing
import os
import random
import tempfile
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.helpers import warm
from tests.helpers.datasets import same
from tests.helpers.redis import RedisServer
from torchcache2 import CachedDataset

COUNT = 23
NET = nn.Linear(3, 4).eval().requires_grad_(False)
NET.load_state_dict({"weight": torch.arange(12.0).view(4, 3), "bias": torch.zeros(4)})


class Unsized:
    """A sampler without a length."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.generator = sampler.generator

    def __iter__(self):
        return iter(self.sampler)


class Drawn:
    """Batches that are drawn as an epoch begins."""

    def __init__(self, size, generator):
        self.size, self.generator = size, generator

    def __iter__(self):
        order = torch.randperm(COUNT, generator=self.generator).tolist()
        return iter([order[i : i + self.size] for i in range(0, COUNT, self.size)])


class Samples(Dataset):
    """Samples of some structure."""

    def __init__(self, kind, count=COUNT):
        self.kind, self.count = kind, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.tensor([1.0, -0.5, 0.25]) * index
        if self.kind == "tensor":
            return x
        if self.kind == "labelled":
            return x, index % 3
        if self.kind == "image":
            return {
                "x": x,
                "image": torch.full((2, 3, 3), index).contiguous(memory_format=torch.preserve_format),
            }
        if self.kind == "turned":
            return x, torch.arange(12).view(2, 2, 3).add(index).permute(2, 0, 1), np.array(index)
        if self.kind == "numbers":
            return {
                "x": x,
                "more": [index, index / 7, index % 2 == 0, np.float32(index), np.arange(3) * index],
            }
        if self.kind == "texts":
            return {"x": x, "name": "é" * (index % 4), "raw": bytes([index % 256])}
        if self.kind == "nested":
            return [x.double(), (x.half(), {"b": x > 1, "a": ()})]
        assert self.kind == "ragged"
        return x, torch.arange(index % 3)


def embed(batch):
    x = batch["x"] if isinstance(batch, dict) else batch if torch.is_tensor(batch) else batch[0]
    y = NET(x.float())
    if isinstance(batch, dict) and "name" in batch:
        return y, {"sums": x.sum(-1), "names": batch["name"]}
    return y, y.sum(-1).numpy()


def listed(samples):
    """A collate_fn that stacks nothing."""
    return {"x": torch.stack([sample[0] for sample in samples]), "rest": [sample[1] for sample in samples]}


ORDERS = {
    "sequential": lambda size, last, generator: {"batch_size": size, "drop_last": last},
    "shuffled": lambda size, last, generator: {"batch_size": size, "shuffle": True, "drop_last": last},
    "weighted": lambda size, last, generator: {
        "batch_size": size,
        "sampler": WeightedRandomSampler(torch.arange(COUNT) + 1.0, 30, generator=generator),
    },
    "replaced": lambda size, last, generator: {
        "batch_size": size,
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=70, generator=generator),
    },
    "subset": lambda size, last, generator: {
        "batch_size": size,
        "sampler": SubsetRandomSampler([3, 3, 1, 20, 7, 8], generator=generator),
        "drop_last": last,
    },
    "rank": lambda size, last, generator: {
        "batch_size": size,
        "sampler": DistributedSampler(range(COUNT), 3, 1, seed=5),
    },
    "buckets": lambda size, last, generator: {
        "batch_sampler": [[1, 2, 3], [4], [3, 1], [22, 0, 5, 6], [-1, 2]]
    },
    "batches": lambda size, last, generator: {
        "batch_sampler": BatchSampler(SequentialSampler(range(COUNT)), size, last)
    },
    "eager": lambda size, last, generator: {"batch_sampler": Drawn(size, generator)},
    "unsized": lambda size, last, generator: {
        "batch_size": size,
        "sampler": Unsized(RandomSampler(range(COUNT), generator=generator)),
    },
}


class Mapped:
    """The plain loader of samples, mapped."""

    def __init__(self, loader, function):
        self.loader, self.function = loader, function

    def __iter__(self):
        for batch in self.loader:
            yield self.function(batch)


def drawn(generator):
    """What the random generators are at."""
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return [*states, None if generator is None else generator.get_state()]


def outcome(make, generator):
    """Batches of two epochs, or the error; and where the random generators are then."""
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    batches = []
    with contextlib.ExitStack() as stack:
        try:
            loader = make(stack)
            for _ in range(2):
                batches += [*loader, "end"]
        except RuntimeError as error:  # of `default_collate`
            return type(error), None
    return batches, drawn(generator)


def strides(batch):
    return [leaf.stride() for leaf in torch.utils._pytree.tree_leaves(batch) if torch.is_tensor(leaf)]


KINDS = ["tensor", "labelled", "image", "turned", "numbers", "texts", "nested", "ragged"]
PLACES = [
    {"memory_size": "10MB"},
    {"memory_size": 0, "cache_dir": True},
    {"memory_size": 3000, "disk_size": 3000},
    {"memory_size": "10MB", "cache_dir": True, "compression": "brotli"},
    {"memory_size": 0, "disk_size": 0},
]


@settings(max_examples=400 if os.environ.get("SOAK") else 25)
@given(
    kind=st.sampled_from(KINDS),
    order=st.sampled_from([*ORDERS]),
    size=st.sampled_from([1, 4, 30]),
    last=st.booleans(),
    is_mapped=st.booleans(),
    has_generator=st.booleans(),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    place=st.sampled_from(PLACES),
    collates=st.booleans(),
)
def test_batches_are_those_of_a_plain_loader(
    kind, order, size, last, is_mapped, has_generator, share, place, collates
):
    check(kind, order, size, last, is_mapped, has_generator, share, place, collates, workers=0)


def check(kind, order, size, last, is_mapped, has_generator, share, place, collates, workers):
    if kind == "ragged" and not is_mapped:
        collates = True
    samples, function = Samples(kind), embed if is_mapped else lambda batch: batch
    collate = listed if collates and kind in ("labelled", "ragged") else None

    def generators():
        return torch.Generator().manual_seed(7) if has_generator else None

    generator = generators()
    plain = DataLoader(
        samples, collate_fn=collate, generator=generator, **ORDERS[order](size, last, generator)
    )
    wanted = outcome(
        lambda _: Mapped(plain, function if collate is None or not is_mapped else by_list), generator
    )
    given = generators()

    def make(stack):
        options = dict(place)
        if "cache_dir" in options:
            options["cache_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        if is_mapped:
            options |= {"map": embed if collate is None else by_list, "collate_fn": collate}
        data = stack.enter_context(contextlib.closing(CachedDataset(samples, **options)))
        state = torch.get_rng_state()
        some = torch.randperm(COUNT).tolist()[: int(share * COUNT)]
        torch.set_rng_state(state)
        if kind != "ragged":
            for index in some:
                data[index]
        more = ORDERS[order](size, last, given)
        return data.loader(
            num_workers=workers, generator=given, collate_fn=None if is_mapped else collate, **more
        )

    found = outcome(make, given)
    if isinstance(wanted[0], list):
        assert strides(wanted[0]) == strides(found[0])
    same(found, wanted)


def by_list(batch):
    return NET(batch["x"].float()), [str(one) for one in batch["rest"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_workers_load_what_is_missing(workers, is_mapped):
    for kind in ("labelled", "texts") if is_mapped else ("numbers", "ragged"):
        check(kind, "shuffled", 4, False, is_mapped, True, 0.4, PLACES[0], kind == "ragged", workers)


def test_two_loaders_side_by_side_draw_as_plain_ones_do():
    """What a DataLoader draws when a loop begins, and what at its first batch, differs."""

    def pairs(make):
        torch.manual_seed(1)
        loaders = [make(shuffle=True, batch_size=4) for _ in range(2)]
        return list(zip(*loaders, strict=True)), torch.get_rng_state()

    with contextlib.closing(CachedDataset(range(COUNT))) as data:
        same(pairs(data.loader), pairs(lambda **options: DataLoader(range(COUNT), **options)))


@pytest.mark.parametrize("order", [*ORDERS])
@pytest.mark.parametrize("has_generator", [False, True])
def test_a_loader_goes_on_where_another_was(order, has_generator):
    data = CachedDataset(Samples("tensor"), map=NET)

    def make():
        generator = torch.Generator().manual_seed(7) if has_generator else None
        return data.loader(**ORDERS[order](2, False, generator), generator=generator), generator

    for batches in (0, 1, 3):
        (loader, first), (other, second) = make(), make()
        list(loader)
        loader.set_epoch(1)
        reading = iter(loader) if batches else ()
        for _ in range(batches):
            next(reading)
        state, there = loader.state_dict(), torch.get_rng_state()
        rest = list(reading or loader)
        torch.set_rng_state(there if batches == 0 else torch.Generator().manual_seed(9).get_state())
        other.load_state_dict(state)
        same(list(other), rest)
        assert other.epoch == loader.epoch
        if has_generator:
            same(second.get_state(), first.get_state())
            same(list(other), list(loader))
    data.close()


def test_a_sampler_keeps_the_epoch_that_it_was_given():
    sampler = DistributedSampler(range(COUNT), 2, 0)
    with contextlib.closing(CachedDataset(range(COUNT))) as data:
        for make in (
            lambda: data.loader(sampler=sampler, batch_size=4),
            lambda: data.loader(batch_sampler=BatchSampler(sampler, 4, False)),
        ):
            loader, orders = make(), []
            for epoch in (5, 6):
                sampler.set_epoch(epoch)
                wanted = torch.tensor(list(sampler))
                assert torch.equal(torch.cat(list(loader)), wanted)
                orders.append(wanted)
            loader.set_epoch(5)
            assert torch.equal(torch.cat(list(loader)), orders[0])


def test_ranks_share_the_samples_in_another_order_each_epoch():
    with contextlib.closing(CachedDataset(range(24))) as data:
        ranks = [data.loader(4, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
        epochs = [[torch.cat(list(rank)).tolist() for rank in ranks] for _ in range(2)]
        assert all(sorted(a + b) == list(range(24)) for a, b in epochs) and epochs[0] != epochs[1]
        ranks[0].sampler.set_epoch(0)  # as trainers do
        assert torch.cat(list(ranks[0])).tolist() == epochs[0][0]


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_draw_numbers_are_others_in_each_epoch(workers):
    for options in ({}, {"map": torch.stack}):
        with contextlib.closing(CachedDataset(Noise(), **options)) as data:
            loader = data.loader(2, num_workers=workers)
            seen = [tuple(column.tolist()) for _ in range(3) for batch in loader for column in batch]
            assert len(set(seen)) == len(seen)


def test_what_a_map_makes_of_images_of_several_shapes_is_kept():
    images = [torch.rand(3, side, 4) for side in (2, 2, 5, 5)]
    with contextlib.closing(CachedDataset(images, map=lambda batch: batch * 2)) as data:
        for _ in range(2):
            batches = list(data.loader(batch_sampler=[[1, 0], [2, 3]]))
            assert [batch.shape for batch in batches] == [(2, 3, 2, 4), (2, 3, 5, 4)]
        assert data.stats().misses == 4 and len(data.missing()) == 0


PLACE_OPTIONS = [{"memory_size": "10MB"}, {"memory_size": 0, "cache_dir": True}]


@pytest.fixture(params=PLACE_OPTIONS, ids=["memory", "folder"])
def place(request, path):
    return request.param | ({"cache_dir": path} if "cache_dir" in request.param else {})


@pytest.fixture(params=[None, embed], ids=["samples", "mapped"])
def function(request):
    return request.param


def wanted_of(function, **options):
    batches = DataLoader(Samples("labelled"), 4, **options)
    return list(batches if function is None else Mapped(batches, function))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_happens_in_mid_epoch(place, function, workers, monkeypatch):
    wanted = wanted_of(function)
    for happens in ("edits", "leaves", "closes", "disables", "raises", "reads twice", "clears"):
        data = CachedDataset(Samples("labelled"), map=function, **place)
        loader = data.loader(4, num_workers=workers)
        same(next(iter(loader)), wanted[0])
        if happens != "leaves":
            same(list(loader), wanted)
        if happens == "reads twice":
            same(list(zip(loader, loader, strict=True)), list(zip(wanted, wanted, strict=True)))
        found = []
        with contextlib.suppress(KeyError), monkeypatch.context() as patch:
            for batch in loader:
                found.append(copy.deepcopy(batch))
                if happens == "edits":
                    batch[0].fill_(-1)
                elif happens == "closes":
                    data.close()
                elif happens == "clears":
                    data.clear()
                elif happens == "disables":
                    patch.setenv("TORCHCACHE_DISABLE", "1")
                elif happens == "leaves":
                    break
                elif happens == "raises":
                    raise KeyError
        same(found, wanted[: len(found)])
        same(list(loader), wanted)
        assert "torchcache2 loader" not in str(threading.enumerate())
        assert multiprocessing.active_children() == []
        data.close()


def test_found_batches_count_in_their_tier(path, function):
    for options, name in (({}, "memory_hits"), ({"cache_dir": path, "memory_size": 0}, "disk_hits")):
        with contextlib.closing(CachedDataset(Samples("labelled"), map=function, **options)) as data:
            loader = data.loader(4)
            for epoch in range(3):
                list(loader)
                stats = data.stats()
                hits = epoch * COUNT
                assert (stats.misses, stats.hits, getattr(stats, name)) == (COUNT, hits, hits)


def test_texts_may_be_indices_of_samples():
    samples = {"1": torch.ones(2), "b": torch.zeros(2), 1: torch.full((2,), 7.0)}
    with contextlib.closing(CachedDataset(samples)) as data:
        loader, order = data.loader(2, sampler=["1", "b", 1, "1"]), ["1", "b", 1, "1"]
        for _ in range(2):
            same(torch.cat(list(loader)), torch.stack([samples[key] for key in order]))


@pytest.mark.parametrize(
    "options",
    [
        {"shufle": True},
        {"batch_sampler": [[1]], "batch_size": 4},
        {"sampler": [1], "shuffle": True},
        {"batch_size": None},
        {"batch_size": 0},
        {"num_workers": -1},
        {"num_workers": 0, "prefetch_factor": 2},
        {"rank": 2, "world_size": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_a_loader_that_cannot_be_meant(options):
    with contextlib.closing(CachedDataset(range(4))) as data, pytest.raises((ValueError, TypeError)):
        data.loader(**options)


def test_a_served_folder_gives_the_same_batches(path, function):
    with contextlib.closing(CachedDataset(Samples("labelled"), path, map=function)) as data:
        list(data.loader(4))
    with contextlib.closing(CachedDataset(None, path)) as served:
        for workers in (0, 2):
            generators = [torch.Generator().manual_seed(1) for _ in range(2)]
            loader = served.loader(4, shuffle=True, generator=generators[0], num_workers=workers)
            same(list(loader), wanted_of(function, shuffle=True, generator=generators[1]))


def test_a_forked_process_and_the_end_of_one_in_mid_epoch(tmp_path):
    script = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader
    from tests.datasets.test_batches import Samples, embed, wanted_of
    from tests.helpers.datasets import same
    from torchcache2 import CachedDataset

    data = CachedDataset(Samples("labelled"), sys.argv[1], map=embed, memory_size=0)
    loader, wanted = data.loader(4, num_workers=1), wanted_of(embed)
    same(list(loader), wanted)
    reading = iter(loader)
    same(next(reading), wanted[0])
    pid = os.fork()
    same(list(data.loader(4)), wanted)
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(DataLoader(data, 4, num_workers=2))) == len(wanted)
    same(next(reading), wanted[1])
    print("done")  # the loop is still open
    """
    process = warm.start(warm.dedented(script), str(tmp_path / "cache"), whole=True).done()
    assert process.words == ["done"] and "Error" not in process.err


def test_batches_are_read_ahead_from_a_server_that_may_fail(function):
    wanted = wanted_of(function)
    with RedisServer() as server:
        options = {"map": function, "backend": "redis", "hosts": server.url}
        for misses in (COUNT, 0):
            with contextlib.closing(CachedDataset(Samples("labelled"), **options)) as data:
                loader = data.loader(4)
                same([*loader, *loader], wanted * 2)
                assert (data.stats().hits, data.stats().misses) == (2 * COUNT - misses, misses)
                reading = iter(loader)
                same(next(reading), wanted[0])
                if not misses:
                    server.stop()
                same([*reading, *loader], wanted[1:] + wanted)
