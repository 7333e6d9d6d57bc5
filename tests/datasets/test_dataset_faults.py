"""Faults that a review of the datasets' code has found."""

import logging
import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.datasets import Counted
from torchcache2 import CachedDataset, CacheLoader, LazyShardDataset
from torchcache2.core.errors import OptionError
from torchcache2.tiers import make
from torchcache2.tiers.shared.region import SharingError

SOAK = bool(os.environ.get("SOAK"))


class NeverNothing(Counted):
    """Cannot load no samples, as many that stack what they have loaded."""

    def __getitems__(self, indices):
        if not indices:  # `assert` would make pytest a part of the dataset
            raise ValueError(indices)
        return [self[index] for index in indices]


def test_the_source_is_never_asked_for_no_samples():
    cached = CachedDataset(NeverNothing(3, "tensor"), memory_size="1MB", verify=1e-9)
    for _ in range(2):
        torch.testing.assert_close(cached[1], NeverNothing(3, "tensor")[1])
    assert cached.__getitems__([]) == []


class Collated(Counted):
    """Gives one dict for all samples, which only works without a cache."""

    def __getitems__(self, indices):
        return {"x": torch.tensor(indices), "y": torch.tensor(indices)}


def test_a_batch_in_place_of_samples_is_an_error():
    cached = CachedDataset(Collated(4), memory_size="1MB")
    for count in (2, 3):  # there are as many keys as samples, or not
        with pytest.raises(TypeError, match=r"Collated.__getitems__ has given a dict.*list with one sample"):
            cached.__getitems__(list(range(count)))


def test_options_are_called_by_their_own_names():
    with pytest.raises(OptionError, match=r"^cache_dir=''"):
        CachedDataset([1], "")
    with pytest.raises(OptionError, match="CacheLoader has no option 'disk_cache_size': it is disk_size"):
        CacheLoader("local", disk_cache_size="1MB")
    for option, advice in (
        ("transfrom", r"did you mean transform\?"),
        ("directory", "it is cache_dir"),
        ("num_workers", "give it to the DataLoader"),
        ("ttl", "the options are cache_dir, "),
    ):
        for kind in (CachedDataset, LazyShardDataset):
            with pytest.raises(OptionError, match=f"CachedDataset has no option '{option}': {advice}"):
                kind([1], **{option: "1MB"})


@pytest.mark.parametrize("kind", [CachedDataset, LazyShardDataset])
def test_a_folder_or_a_loader_in_place_of_a_dataset_is_an_error(kind):
    with pytest.raises(
        OptionError, match=r"dataset='folder': expected a dataset, and the folder as cache_dir"
    ):
        kind("folder")
    with pytest.raises(OptionError, match=r"is of type DataLoader: .*; pass its \.dataset"):
        kind(DataLoader([1]))


@pytest.mark.parametrize(
    ("memory", "disk", "has_path", "text"),
    [
        ("1kB", 0, False, "are loaded in each epoch: raise the budgets of memory or disk"),
        ("1kB", "1kB", True, "the budgets of memory or disk; disk_size='24.2 kB' has room for all"),
        (
            "2MB",
            "1kB",
            True,
            "items/s). Later runs find only what fits on disk; disk_size='24.2 kB' has room for all",
        ),
        ("1kB", "2MB", True, "What does not fit in memory is read from the disk"),
        ("20kB", "20kB", False, "What does not fit in memory is read from the disk"),
    ],
)
def test_the_line_of_cost_says_what_does_not_fit(memory, disk, has_path, text, path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it was not installed
    options = {"memory_size": memory, "disk_size": disk}
    CachedDataset(Counted(250, "tensor"), path if has_path else None, **options).warmup()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "250 items" in line]
    assert line.endswith(text)


@pytest.mark.parametrize("has_path", [False, True])
def test_memory_that_is_full_is_warned_of_once(has_path, path, log):
    cached = CachedDataset(
        Counted(600, "tensor"), path if has_path else None, memory_size=30_000, disk_size=0
    )
    cached.warmup()
    (record,) = [record for record in log if record.levelno >= logging.WARNING]
    assert "memory_size is used up" in record.getMessage()


class Wide(Counted):
    """Samples of 10 kB."""

    def __getitem__(self, index):
        return torch.full((10_000,), index, dtype=torch.uint8)


def test_workers_divide_memory_that_they_cannot_share(monkeypatch, capfd):
    def refuse(*args, **options):
        raise SharingError("there is no /proc")

    monkeypatch.setattr(make, "SharedTier", refuse)
    cached = CachedDataset(Wide(200), memory_size="1MB")
    loader = DataLoader(cached, 10, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    for _ in range(2):
        assert [batch[:, -1].tolist() for batch in loader] == torch.arange(200).view(20, 10).tolist()
    assert 60 <= cached.stats().memory_hits <= 100
    shown = capfd.readouterr().err
    assert shown.count("each keeps its own samples: n workers get an nth part of 1.0 MB each") == 1


class Refusing(Counted):
    """Has samples that cannot be stored."""

    def __getitem__(self, index):
        return object() if index % 2 else torch.zeros(2000)


def as_it_is(batch):
    return batch


@pytest.mark.parametrize("method", ["fork", *["spawn"] * SOAK])
def test_workers_warn_once_for_all(method, path, capfd):
    cached = CachedDataset(Refusing(40), path, memory_size="1MB", disk_size=30_000)
    for _ in range(2 if method == "fork" else 1):
        for _ in DataLoader(cached, 10, num_workers=2, multiprocessing_context=method, collate_fn=as_it_is):
            pass
    cached.flush()
    shown = capfd.readouterr().err
    assert shown.count("some samples cannot be cached") == 1
    assert shown.count("is full (30.0 kB)") == 1, shown
