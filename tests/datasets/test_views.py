"""Variants of samples, and what is done after filling: `seal`, `insert`, `missing`, and progress."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from torchcache2 import CachedDataset, NotCachedError, OptionError, cache_of, torchcache

COUNT = 12


class Noisy(Dataset):
    """Each sample is its index, and numbers of three generators."""

    classes = ("a", "b")

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.loaded += 1
        noise = torch.tensor([torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)
        return torch.tensor(float(index)), noise


def double(batch):
    numbers, noise = batch
    return 2 * numbers, noise


def epoch(loader):
    return [torch.cat(column) for column in zip(*loader, strict=True)]


def same(left, right):
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("made", [None, double], ids=["samples", "map"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_epoch_gets_another_variant_of_each_sample_and_the_next_run_the_same(
    tmp_path, made, num_workers
):
    plain, epochs = Noisy(), []
    for run in range(2):
        cached = CachedDataset(Noisy(), tmp_path, map=made, views=3, seed=7, memory_size="1MB")
        assert (len(cached), cached.classes) == (COUNT, plain.classes)
        loader = cached.loader(5, num_workers=num_workers)
        before = torch.get_rng_state()
        for _ in range(6):
            list(DataLoader(range(COUNT)))  # which draws a number for its workers
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        torch.set_rng_state(before)
        some = [epoch(loader) for _ in range(6)]
        assert torch.equal(torch.get_rng_state(), after[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == after[1:]
        assert all(same(some[i], some[i + 3]) for i in range(3))
        assert not same(some[0], some[1]) and len(some[0][1].unique()) == 3 * COUNT
        epochs.append(some)
        assert len(cached.missing()) == 0
        cached.set_view(4)
        assert same(cached[5], [column[5] for column in some[1]])
        if run:
            assert cached.stats().misses == 0
        cached.close()
    assert all(map(same, *epochs))
    other = CachedDataset(Noisy(), tmp_path, map=made, views=3, seed=8, memory_size="1MB")
    assert not same(epoch(other.loader(5)), epochs[0][0])
    other.close()


def test_a_folder_of_variants_serves_them_without_the_dataset(tmp_path):
    cached = CachedDataset(Noisy(), tmp_path, map=double, views=2)
    cached.warmup()
    want = epoch(cached.loader(4))
    cached.close()
    served = CachedDataset(None, tmp_path)
    assert len(served) == COUNT
    loader = served.loader(4)
    assert same(epoch(loader), want) and not same(epoch(loader), want) and same(epoch(loader), want)
    served.close()


def sampled(batch, generators):
    """As a VAE does: a draw for each sample."""
    noise = [torch.randn(3, generator=one) for one in generators]
    return batch[0][:, None] + torch.stack(noise)


class Sampled(torch.nn.Module):
    """The same as a module."""

    def forward(self, batch, generators):
        return sampled(batch, generators)


def test_a_module_may_take_generators_as_a_function_may():
    samples = [(torch.tensor(float(i)),) for i in range(COUNT)]
    made = [CachedDataset(samples, map=one) for one in (sampled, Sampled().eval())]
    assert torch.equal(*[torch.cat([*data.loader(5)]) for data in made])
    for data in made:
        data.close()


@pytest.mark.parametrize(
    "options", [{}, {"keys": [f"key {i}" for i in range(COUNT)]}], ids=["indices", "keys"]
)
@pytest.mark.parametrize("views", [1, 3])
def test_what_a_map_draws_for_a_sample_depends_on_nothing_but_the_sample(options, views, tmp_path):
    """Not on the batch, the order, or whether there is a cache."""
    samples, made = [(torch.tensor(float(i)),) for i in range(COUNT)], []

    def cached(**more):
        return CachedDataset(samples, map=sampled, views=views, **options | {"seed": 5} | more)

    for more, sizes in (
        ({"cache_dir": tmp_path}, [[3, 1], [2, 7, 0, 5]]),
        ({"memory_size": 0}, [[1], [7, 3, 5]]),
    ):
        data = cached(**more)
        loader = data.loader(batch_sampler=[*sizes, [*range(COUNT)]], generator=torch.Generator())
        state = torch.get_rng_state()
        made.append([[*loader][-1] for _ in range(views)])
        assert torch.equal(torch.get_rng_state(), state)
        data.set_view(views - 1)
        assert torch.equal(data[3], made[-1][-1][3]) and not data.stats().bypasses
        data.close()
    assert same(*made) and len(torch.cat(made[0]).unique()) == 3 * COUNT * views
    other = cached(cache_dir=tmp_path, seed=6)
    assert len(other.missing()) == COUNT and not torch.equal(other[3], made[0][0][3])
    other.close()
    if options:  # a row belongs to its key, whatever comes before
        options, samples = {"keys": options["keys"][1:]}, samples[1:]
        fewer = cached(cache_dir=tmp_path, name="fewer")
        assert torch.equal(fewer[2], made[0][0][3])
        fewer.close()


def test_what_a_map_draws_from_a_generator_of_all_is_not_kept():
    cached = CachedDataset(
        [(torch.zeros(()),) for _ in range(COUNT)], map=lambda batch: torch.rand(len(batch[0]))
    )
    drawn = [torch.cat([*cached.loader(4)]) for _ in range(2)]
    assert not torch.equal(*drawn) and cached.stats().hits == cached.stats().misses == 0
    assert cached.stats().bypasses == {"random": 2 * COUNT}
    cached.close()


@pytest.mark.parametrize("views", [0, 1.5, True, "2"])
def test_views_is_a_count(views):
    with pytest.raises(OptionError, match="views="):
        CachedDataset(Noisy(), views=views)


def test_after_seal_rows_are_served_and_nothing_is_made(tmp_path):
    encoder = nn.Linear(1, 2).requires_grad_(False)

    def embed(batch):
        return encoder(batch[0][:, None].float())

    cached = CachedDataset([(torch.tensor(float(i)),) for i in range(COUNT)], tmp_path, map=embed)
    filled = [batch.clone() for batch in cached.loader(8, sampler=range(8))]
    cached.seal()
    encoder.to("meta")
    assert same([cached[3]], [filled[0][3]])
    assert same(list(cached.loader(8, sampler=range(8))), filled)
    with pytest.raises(NotCachedError, match="sample 8, and it is sealed"):
        list(cached.loader(4))
    with pytest.raises(NotCachedError, match="nothing can be inserted"):
        cached.insert([8], torch.zeros(1, 2))
    assert cached.missing().tolist() == list(range(8, COUNT))
    cached.close()


def test_only_what_a_map_makes_is_sealed():
    cached = CachedDataset(Noisy(), views=2, memory_size="1MB")
    with pytest.raises(OptionError, match="CachedDataset\\(None, cache_dir\\)"):
        cached.seal()
    cached.close()


def test_a_sealed_module_is_not_used_any_more():
    module = torchcache(nn.Linear(3, 2).requires_grad_(False).eval())
    x, other = torch.rand(6, 3), torch.rand(2, 3)
    assert cache_of(module).missing([x, other]) == list(range(8))
    want = module(x)
    assert cache_of(module).missing([x, other]) == [6, 7]
    cache_of(module).seal()
    module.to("meta")
    assert torch.equal(module(x.flip(0)), want.flip(0))
    assert cache_of(module).missing([other, x]) == [0, 1]
    with pytest.raises(NotCachedError, match="2 of 3 items are not there, and the cache is sealed"):
        module(torch.cat([x[:1], other]))


def test_a_sealed_function_of_one_text_returns_what_it_returned():
    @torchcache
    def length(text):
        return torch.tensor([len(text)])

    want = length("a cat")
    cache_of(length).seal()
    assert torch.equal(length("a cat"), want)
    with pytest.raises(NotCachedError, match="1 of 1 items"):
        length("a dog")


@pytest.mark.parametrize("made", [None, double], ids=["samples", "map"])
def test_what_was_made_elsewhere_is_found(made):
    samples = [(torch.tensor(float(i)), torch.zeros(3)) for i in range(COUNT)]
    cached = CachedDataset(samples, map=made, memory_size="1MB")
    rows = samples[2:5] if made is None else double(default_collate(samples[2:5]))
    cached.insert([2, 3, 4], rows)
    assert cached.missing().tolist() == [0, 1, *range(5, COUNT)]
    want = samples if made is None else list(zip(*double(default_collate(samples)), strict=True))
    assert all(same(cached[i], want[i]) for i in range(COUNT))
    assert cached.stats().mismatched == 0
    if made is None:
        with pytest.raises(OptionError, match="a list of 2 samples"):
            cached.insert([0, 1], samples[:1])
    cached.close()


def test_a_warmup_with_map_tells_its_progress_and_estimates(capfd):
    told = []
    cached = CachedDataset(Noisy(), map=double, views=2, memory_size="1MB")
    estimate = cached.estimate(batches=2, batch_size=4)
    assert estimate.items == 2 * COUNT and estimate.row_bytes == 4 + 24
    warmed = cached.warmup(batch_size=8, on_progress=lambda *numbers: told.append(numbers))
    assert told == [(n, 2 * COUNT, 28 * n) for n in (8, 16, 24)]
    assert (warmed.computed, warmed.found, warmed.bytes) == (2 * COUNT, 0, 28 * 2 * COUNT)
    again = cached.warmup()
    assert (again.computed, again.found) == (0, 2 * COUNT)
    cached.close()


def test_a_map_that_cannot_be_cached_stops_a_warmup():
    def drop(batch):
        return nn.functional.dropout(batch[0], 0.5)

    cached = CachedDataset([(torch.rand(3),) for _ in range(COUNT)], map=drop, memory_size="1MB")
    with pytest.raises(NotCachedError, match="random"):
        cached.warmup()
    assert len(list(DataLoader(cached, 4))) == COUNT // 4
    cached.close()
