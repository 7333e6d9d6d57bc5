"""Numbers that no seed decides: a forward that draws them is seen by its outputs, a dataset by its code."""

import os
import random
import uuid

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from torchcache2 import CachedDataset, NotCachedError, torchcache

X = torch.arange(12.0).view(4, 3)


pytestmark = pytest.mark.usefixtures("without_grad")

DRAWS = {
    "default_rng": lambda: np.random.default_rng().random(),
    "default_rng of None": lambda: np.random.default_rng(None).random(),
    "RandomState": lambda: np.random.RandomState().rand(),
    "Random": lambda: random.Random().random(),
    "SystemRandom": lambda: random.SystemRandom().random(),
}
OTHERS = {"urandom": lambda: int.from_bytes(os.urandom(3), "big"), "uuid4": lambda: uuid.uuid4().int % 2**20}
STEADY = {
    "a seed": lambda: np.random.default_rng(3).random(),
    "Random with a seed": lambda: random.Random(3).random(),
    "RandomState with a seed": lambda: np.random.RandomState(3).rand(),
    "uuid5": lambda: uuid.uuid5(uuid.NAMESPACE_DNS, "a").int % 100,
}


class Numbers(Dataset):
    def __init__(self, draw):
        self.draw = draw
        self.start = np.random.default_rng().random()  # a constructor may draw

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw()])


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.register_buffer("table", torch.zeros(3) * np.random.default_rng().random())

    def forward(self, x):
        return x + self.table + self.draw()


@pytest.mark.parametrize("name", {**DRAWS, **OTHERS})
def test_a_forward_that_draws_such_numbers_is_not_cached(name, log):
    draw = {**DRAWS, **OTHERS}[name]
    for cached in (torchcache(lambda x: x + draw()), torchcache(Noisy(draw))):
        assert not torch.equal(cached(X), cached(X))
        stats = cached.cache_instance.stats()
        assert stats.hits == 0 and sum(stats.bypasses.values()) == 8
    assert sum(one.levelname == "WARNING" for one in log) == 2


@pytest.mark.parametrize("name", DRAWS)
def test_a_dataset_that_draws_such_numbers_is_not_cached(name, log):
    cached = CachedDataset(Numbers(DRAWS[name]), memory_size="1MB")
    for index in (1, 1, 2):
        assert cached[index][0] == index
    assert cached.stats().bypasses == {"random": 3} and cached.stats().memory_rows == 0
    (record,) = log
    assert "draws random numbers (" in record.getMessage() and "allow_random" in record.getMessage()
    with pytest.raises(NotCachedError, match="random"):
        CachedDataset(Numbers(DRAWS[name]), memory_size="1MB").warmup()
    allowed = CachedDataset(Numbers(DRAWS[name]), memory_size="1MB", allow_random=True)
    assert torch.equal(allowed[1], allowed[1]) and allowed.stats().bypasses == {}


@pytest.mark.parametrize("name", STEADY)
def test_numbers_that_have_a_seed_are_cached(name):
    """And constructors may draw what they like."""
    draw = STEADY[name]
    for cached in (torchcache(lambda x: x + draw()), torchcache(Noisy(draw))):
        for _ in range(2):
            assert torch.equal(cached(X), X + draw())
        stats = cached.cache_instance.stats()
        assert stats.hits == 4 and stats.bypasses == {}
    samples = CachedDataset(Numbers(draw), memory_size="1MB")
    assert torch.equal(samples[2], samples[2]) and samples.stats().memory_rows == 1
