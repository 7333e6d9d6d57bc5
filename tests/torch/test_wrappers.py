"""Wrappers that others put around what is cached: `functools.wraps` copies our marks to them."""

import functools

import pytest
import torch
from torch import nn

from tests.helpers.outputs import hits
from torchcache2 import Cache, torchcache

X = torch.arange(12.0).view(4, 3)


@torchcache
def inner(x):
    return x * 2


def plus_one(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1

    return wrapper


def plus_hundred(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100

    return wrapper


wrapped = plus_one(inner)


def test_a_wrapper_of_a_cached_function_is_read_itself(monkeypatch):
    @torchcache
    def outer(x):
        return wrapped(x)

    for _ in range(2):
        assert torch.equal(outer(X), X * 2 + 1)
    assert hits(outer) == 4
    monkeypatch.setitem(globals(), "wrapped", plus_hundred(inner))
    assert torch.equal(outer(X), X * 2 + 100)


def test_a_subclass_that_wraps_the_inherited_forward_is_cached():
    @torchcache
    class Base(nn.Module):
        def forward(self, x):
            return x * 3

    class Wrapped(Base):
        forward = plus_one(Base.forward)

    module = Wrapped()
    for _ in range(2):
        assert torch.equal(module(X), X * 3 + 1)
    assert hits(module) == 4


@pytest.mark.parametrize("make", [nn.Linear, torchcache(type("Cached", (nn.Linear,), {}))])
def test_a_forward_wrapped_on_the_instance(make):
    module = make(3, 2).eval().requires_grad_(False)
    if make is nn.Linear:
        torchcache()(module)
    plain = nn.functional.linear(X, module.weight, module.bias)
    module.forward = functools.update_wrapper(functools.partial(module.forward), module.forward)
    outer = nn.Sequential(module)
    torchcache()(outer)
    for _ in range(2):
        torch.testing.assert_close(outer(X), plain)
    assert hits(outer) == 4
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(outer(X), nn.functional.linear(X, module.weight, module.bias))


def test_a_cache_among_the_attributes_is_no_obstacle(log):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.store = Cache(b"sixteen letters.")

        def forward(self, x):
            return x + 1

    net = torchcache(Net)()
    for _ in range(2):
        net(X)
    assert hits(net) == 4
    assert not [record for record in log if record.levelname == "WARNING"]


def reload(old, new):
    """What the reloading of notebooks does with a function that exists already."""
    old.__code__, old.__defaults__, old.__dict__ = new.__code__, new.__defaults__, new.__dict__


def shifted(amount):
    @torchcache
    def function(x):
        return x + amount

    return function, function


def shifted_module(amount):
    @torchcache
    class Shifted(nn.Module):
        def forward(self, x):
            return x + amount

    return Shifted(), Shifted.forward


@pytest.mark.parametrize("make", [shifted, shifted_module])
def test_what_is_reloaded_in_place_is_the_new_one(make):
    cached, function = make(1)
    assert torch.equal(cached(X), X + 1)
    reload(function, make(2)[1])
    for _ in range(2):
        assert torch.equal(cached(X), X + 2)
