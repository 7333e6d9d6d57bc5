"""A bucket as an option: the tiers that are made, and what they leave behind."""

import contextlib
import os
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.buckets import bucket
from torchcache2 import CachedDataset, CacheSettings, torchcache
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.make import make_tiers


class Samples(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((64,), float(index))


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are."""
    get_temp_dir()  # that of multiprocessing stays where it is: a longer path is too long for its sockets
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_a_dataset_is_filled_by_workers_and_served_from_the_bucket(tmp_path, temporary, scheme):
    made = bucket(scheme, tmp_path)
    options = {"storage_options": made.storage_options, "memory_size": 0, "version": "1"}
    rounds = [(0, "one"), (200, "one"), (200, "two"), (200, None)]
    for hits, local in rounds if scheme == "file" else rounds[::3]:
        place = None if local is None else tmp_path / local
        data = CachedDataset(Samples(), made.url, name="samples", local_dir=place, **options)
        with contextlib.closing(data):
            seen = torch.cat(list(DataLoader(data, batch_size=32, shuffle=True, num_workers=2)))
            assert sorted(seen[:, 0].tolist()) == list(range(200)) and (seen == seen[:, :1]).all()
            stats = data.stats()
            assert (stats.hits, stats.misses, stats.faults, stats.corrupt) == (hits, 200 - hits, 0, 0)
            assert len(os.listdir(temporary)) == (local is None)
        assert os.listdir(temporary) == []


def test_a_module_finds_what_another_process_has_computed(tmp_path):
    made = bucket("file", tmp_path)
    x = torch.arange(12.0).reshape(4, 3)
    for misses in (4, 0):

        @torchcache(persistent=True, persistent_cache_dir=made.url)
        class Module(torch.nn.Module):
            def forward(self, x):
                return x * 2

        module = Module()
        assert torch.equal(module(x), x * 2)
        assert module.cache_instance.stats().misses == misses
        module.cache_instance.close()
    remote = Path(made.url.removeprefix("file://"))
    assert len(list(remote.glob("*/*.safetensors"))) == 1 and not list(remote.glob("*/*.head"))


def test_the_tiers_of_a_bucket(tmp_path, temporary):
    made = bucket("memory", tmp_path)
    tiers = make_tiers(CacheSettings(persistent_cache_dir=made.url), set, lambda namespace: {})
    _, disk = tiers
    assert isinstance(disk, DiskTier) and disk.bucket.objects.bucket.url == made.url
    assert len(os.listdir(temporary)) == 1
    for tier in tiers:
        tier.close()
    assert os.listdir(temporary) == []
    there = CacheSettings(persistent_cache_dir=made.url, local_dir=tmp_path / "here")
    tiers = make_tiers(there, set, lambda namespace: {})
    assert tiers[1].path == str(tmp_path / "here")
    for tier in tiers:
        tier.close()
    assert os.listdir(temporary) == []
