"""Numbers that no seed decides: code that draws them is not cached, whatever the generators say."""

import os
import random
import secrets
import uuid
from uuid import uuid4 as fresh

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from torchcache2 import CachedDataset, NotCachedError, torchcache

X = torch.arange(12.0).view(4, 3)


pytestmark = pytest.mark.usefixtures("without_grad")


def imported():
    import numpy as numbers

    return numbers.random.default_rng().random()


def imported_name():
    from numpy.random import PCG64, Generator

    return Generator(PCG64()).random()


def captured():
    from secrets import randbits as bits

    return lambda: bits(8)


def nested():
    return sum([np.random.default_rng().random() for _ in range(2)])


def through_another():
    return imported()


def seeded(make):
    return make(3)


class Drawing:
    def __call__(self):
        return os.urandom(1)[0]


DRAWS = {
    "object": Drawing(),
    "default_rng": lambda: np.random.default_rng().random(),
    "default_rng of None": lambda: np.random.default_rng(None).random(),
    "default_rng of None by its name": lambda: np.random.default_rng(seed=None).random(),
    "RandomState": lambda: np.random.RandomState().rand(),
    "Random": lambda: random.Random().random(),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "urandom": lambda: os.urandom(1)[0],
    "secrets": lambda: secrets.randbelow(100),
    "uuid1": lambda: uuid.uuid1().int % 100,
    "uuid4": lambda: uuid.uuid4().int % 100,
    "another name": lambda: fresh().int % 100,
    "imported": imported,
    "imported name": imported_name,
    "captured": captured(),
    "nested": nested,
    "through another": through_another,
}
STEADY = {
    "a seed": lambda: np.random.default_rng(3).random(),
    "a seed by its name": lambda: np.random.default_rng(seed=3).random(),
    "Random with a seed": lambda: random.Random(3).random(),
    "RandomState with a seed": lambda: np.random.RandomState(3).rand(),
    "seeded by another": lambda: seeded(np.random.default_rng).random(),
    "uuid5": lambda: uuid.uuid5(uuid.NAMESPACE_DNS, "a").int % 100,
    "compared": lambda: float(secrets.compare_digest("a", "a")),
}


class Numbers(Dataset):
    def __init__(self, draw):
        self.draw = draw
        self.name = uuid.uuid4().hex if draw is None else "numbers"  # a constructor may draw

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw()])


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.start()

    def start(self):
        self.register_buffer("table", torch.zeros(3) * np.random.default_rng().random())

    def save(self):
        return uuid.uuid4().hex

    def __save(self):
        return uuid.uuid4().hex

    def forward(self, x):
        return x + self.table + self.noise()

    def noise(self):
        return self.draw()


@pytest.mark.parametrize("name", DRAWS)
def test_a_forward_that_draws_such_numbers_is_passed_through(name, log):
    draw = DRAWS[name]
    for cached in (torchcache(lambda x: x + draw()), torchcache(Noisy(draw))):
        cached(X)
        assert cached(X + 1).shape == X.shape
        assert cached.cache_instance.stats().bypasses == {"random": 8}
    assert len(log) == 2 and all("names" in record.getMessage() for record in log)


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
    """And constructors, what they alone call, and methods that no call can reach, may draw what they like."""
    draw = STEADY[name]
    for cached in (torchcache(lambda x: x + draw()), torchcache(Noisy(draw))):
        for _ in range(2):
            assert torch.equal(cached(X), X + draw())
        stats = cached.cache_instance.stats()
        assert stats.hits == 4 and stats.bypasses == {}
    samples = CachedDataset(Numbers(draw), memory_size="1MB")
    assert torch.equal(samples[2], samples[2]) and samples.stats().memory_rows == 1


def test_a_private_method_can_be_reached():
    class Private(nn.Module):
        def __noise(self):
            return os.urandom(1)[0]

        def forward(self, x):
            return x + self.__noise()

    cached = torchcache(Private())
    cached(X)
    assert cached.cache_instance.stats().bypasses == {"random": 4}
