"""`estimate` says what caching takes, and stores nothing."""

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.utils import data

from tests.helpers.outputs import frozen, warnings_in
from torchcache2 import CachedDataset, NotCachedError, OptionError, torchcache
from torchcache2.engine import warmup as estimates

ITEMS = data.TensorDataset(torch.randn(3000, 16), torch.arange(3000))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 256)

    def forward(self, x):
        return {"a": self.layer(x).relu(), "b": [row[: 1 + int(row[0] > 0)] for row in x]}


@pytest.fixture
def cached():
    nets = []  # a cache does not keep its module alive

    def make(**options):
        nets.append(frozen(torchcache(**options)(Net())))
        return nets[-1].cache_instance

    return make


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["brotli", "none"])
def test_it_is_what_a_warmup_takes(cached, path, compression, capfd):
    cache = cached(persistent_cache_dir=path, compression=compression)
    state = torch.get_rng_state()
    found = cache.estimate(data.DataLoader(ITEMS, 100, shuffle=True))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.memory_rows, stats.disk_rows) == (0, 0, 0, 0)
    assert torch.equal(torch.get_rng_state(), state) and not list(path.rglob("*.safetensors"))
    assert found.items == 3000 and found.fits and found.fits_memory and found.fits_disk and found.seconds > 0
    cache.warmup(ITEMS)
    cache.flush()
    on_disk = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert found.disk_bytes == pytest.approx(on_disk, rel=0.1)
    assert found.memory_bytes == pytest.approx(cache.stats().memory_bytes, rel=0.3)
    assert str(found).startswith("3,000 items: memory 3.2 MB (room for ") and "about 0:00:0" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.items = 3
    # A warmup begins with the same line.
    said = re.sub(r"about.*", "", f"{found}").partition("disk")[0]
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (data.DataLoader(ITEMS, 50), 3000),
        ((batch for batch in data.DataLoader(ITEMS, 50)), None),
        (data.DataLoader(ITEMS, batch_sampler=data.BatchSampler(range(1000), 30, True)), 990),
    ],
)
def test_how_many_items_there_are(cached, items, expected):
    found = cached().estimate(items, batches=2)
    assert found.items == expected and found.row_bytes > 1024
    assert ("the number of items is unknown" in str(found)) == (expected is None)
    assert (found.fits, found.memory_bytes is None) == ((None, True) if expected is None else (True, False))


def test_what_does_not_fit_says_which_budget_would(cached, path):
    options = {"max_memory_cache_size": 0, "max_persistent_cache_size": 10_000}
    found = cached(persistent_cache_dir=path, **options).estimate(ITEMS)
    assert not (found.fits or found.fits_memory or found.fits_disk)
    size = re.search(r"max_persistent_cache_size='(.*?)' has room for all", str(found))[1]
    options["max_persistent_cache_size"] = size
    found = cached(persistent_cache_dir=path, **options).estimate(ITEMS)
    assert found.fits and str(found).endswith("What does not fit in memory is read from the disk")


@pytest.mark.slow
def test_a_disk_without_room_is_one_warning_at_the_start_of_a_warmup(cached, path, monkeypatch, log):
    monkeypatch.setattr(estimates, "free_disk", lambda folder: 100_000)
    cache = cached(persistent_cache_dir=path)
    found = cache.estimate(ITEMS)
    assert found.lacks_disk and found.disk_free == 100_000 and "has only 100.0 kB free" in str(found)
    assert warnings_in(log) == []
    cache.warmup(ITEMS)
    (warning,) = warnings_in(log)
    assert warning.startswith("Net: 3,000 items") and f"The disk of {path} has only 100.0 kB free" in warning
    cache.warmup(ITEMS)  # all is there
    assert len(warnings_in(log)) == 1


def test_mistakes_and_what_would_not_be_cached_are_errors(cached):
    cache, training, objects = cached(), torchcache(nn.Dropout()), torchcache(lambda x: object())
    with pytest.raises(OptionError, match="batches=0"):
        cache.estimate(ITEMS, batches=0)
    with pytest.raises(OptionError, match="data is empty"):
        cache.estimate(iter([]))
    with pytest.raises(NotCachedError, match="cannot be stored"):
        objects.cache_instance.estimate(ITEMS)
    with pytest.raises(NotCachedError, match="training"):
        training.cache_instance.estimate(ITEMS)
    cache.close()
    with pytest.raises(NotCachedError, match="closed"):
        cache.estimate(ITEMS)


class Samples(data.Dataset):
    def __init__(self, width=1000):
        self.width, self.random = width, False

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        if self.random:
            torch.rand(1)
        return torch.full((self.width,), index % 7), f"sample {index}"


@pytest.mark.parametrize("compression", ["brotli", "none"])
def test_of_a_dataset(path, compression):
    samples = CachedDataset(Samples(), path, memory_size="100MB", compression=compression)
    found = samples.estimate(batches=3)
    assert samples.stats().misses == 0 and len(samples.missing()) == 2000
    assert found.items == 2000 and found.fits and found.seconds > 0
    samples.warmup()
    samples.flush()
    on_disk = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert found.disk_bytes == pytest.approx(on_disk, rel=0.15)
    assert found.memory_bytes > 2000 * 8000


def test_of_a_dataset_that_is_not_cached():
    small = CachedDataset(Samples(), memory_size="10kB").estimate()
    assert not small.fits and small.disk_bytes is None and "raise the budgets" in str(small)
    random = Samples()
    random.random = True
    with pytest.raises(NotCachedError, match="random numbers"):
        CachedDataset(random, memory_size="10MB").estimate()
    closed = CachedDataset(Samples(), memory_size="10MB")
    closed.close()
    with pytest.raises(NotCachedError, match="closed"):
        closed.estimate()


@pytest.mark.parametrize(("most", "fits"), [(None, True), ("1MB", False), ("10MB", True)])
def test_a_bucket_has_room_for_more_than_its_local_folder(tmp_path, most, fits):
    options = {"memory_size": 0, "disk_size": "1MB", "compression": "none", "remote_size": most}
    cached = CachedDataset([torch.zeros(2000)] * 500, f"file://{tmp_path}/bucket", name="zeros", **options)
    found = cached.estimate()
    assert (found.fits, found.fits_disk, found.lacks_disk) == (fits, fits, False)
    assert "bucket 4.0 MB" in str(found) and "disk_size=" not in str(found)
    assert ("remote_size='4." in str(found)) is not fits
    cached.close()
