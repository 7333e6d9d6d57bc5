"""What a forward may do besides computing: whatever it is, a cached one does the same."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from torchcache2 import torchcache

X = torch.arange(12.0).view(4, 3)
DUPLICATES = torch.cat([X[:2], X[:2]])


CHANGES = {
    "list": (lambda x, found: found.append(len(x)), [1]),
    "array": (lambda x, table: np.add(table, 1, out=table), np.zeros(3)),
    "dict": (lambda x, options: options.update(done=options.pop("todo", 0) + 1), {"todo": 3}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_arguments_that_are_changed_in_place_are_changed(name):
    change, argument = CHANGES[name]

    def function(x, value):
        change(x, value)
        return x * 2

    plain, cached = copy.deepcopy(argument), copy.deepcopy(argument)
    with_cache = torchcache(function)
    for x in (DUPLICATES, X, X):
        assert torch.equal(with_cache(x, cached), function(x, plain))
        assert str(cached) == str(plain)
    for _ in range(2):  # an argument that is equal to one before
        fresh = copy.deepcopy(argument)
        with_cache(X, fresh)
        assert str(fresh) != str(argument)


def test_attributes_of_tensors_are_seen():
    cached = torchcache(lambda x: x * x.scale)
    for scale in (2.0, 3.0):
        x = X.clone()
        x.scale = scale
        assert torch.equal(cached(x), X * scale)


def test_one_tensor_given_twice_is_not_two_equal_ones():
    def function(query, key):
        return query * (2 if query is key else 3)

    cached = torchcache(function)
    for _ in range(2):
        for x in (X, DUPLICATES):
            assert torch.equal(cached(x, x), x * 2)
            assert torch.equal(cached(x, x.clone()), x * 3)
    assert cached.cache_instance.stats().hits > 8


def test_how_an_inner_function_is_cached_counts():
    def make(**options):
        @torchcache(**options)
        def inner(x):
            return x.tanh()

        return torchcache(lambda x: inner(x) + 1)

    kinds = ({}, {"cache_dtype": torch.float16}, {"persistent_module_hash": "name"}, {"policy": "lru"})
    usual, rounded, named, same = [make(**options).cache_instance.module_hash for options in kinds]
    assert len({usual, rounded, named}) == 3 and usual == same


def test_the_fast_path_of_attention_is_part_of_the_key():
    cached = torchcache(lambda x: x * (1 + torch.backends.mha.get_fastpath_enabled()))
    assert torch.equal(cached(X), X * 2)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(cached(X), X)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_base_whose_forward_is_replaced_later(monkeypatch):
    class Base(nn.Module):
        def forward(self, x):
            return x + 1

    class Child(Base):
        pass

    cached = torchcache(Child)()
    assert torch.equal(cached(X), X + 1)
    monkeypatch.setattr(Base, "forward", lambda self, x: x + 2)
    for _ in range(2):
        assert torch.equal(cached(X), X + 2)


def test_state_changes_once_for_a_batch_with_duplicates():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            return x * self.weight.mul_(0.5)

    plain, cached = Halving(), torchcache(Halving())
    for _ in range(2):
        assert torch.equal(cached(DUPLICATES), plain(DUPLICATES))
        assert torch.equal(cached.weight, plain.weight)
