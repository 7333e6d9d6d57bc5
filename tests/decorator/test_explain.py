"""`explain`: which part of a namespace, or of a call, is another than before."""

import contextlib
import copy
import dataclasses
import types

import pytest
import torch
from torch import nn

from torchcache2 import torchcache
from torchcache2.identity.encoding import Encoder, readable

X = torch.arange(12.0).view(3, 4)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, width)})
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.mlp["fc1"](x))


def make():
    @torchcache
    class Net(nn.Module):
        def __init__(self, heads=2, name="small", table=None):
            super().__init__()
            self.heads, self.dtype = heads, torch.float32
            self.blocks = nn.Sequential(Block(4), Block(4))
            self.eval().requires_grad_(False)

        def forward(self, x, scale=1.0, flags=()):
            return self.blocks(x) * scale

    return Net


def lines(module):
    return module.cache_instance.explain().splitlines()


def test_the_first_namespace_is_said_to_be_the_first():
    net = make()()
    assert lines(net)[0].startswith("namespace ") and "first of Net" in lines(net)[0]
    assert lines(net)[1:] == ["Net was not called yet; if you call another method, name it in methods="]
    net(X)
    assert lines(net) == [f"namespace {net.cache_instance.module_hash} is the first of Net in this process"]


EDITS = {
    "a weight": (
        lambda net: net.blocks[1].mlp["fc1"].weight.mul_(2),
        ["weights: blocks.1.mlp.fc1.weight changed"],
    ),
    "a weight replaced by another": (
        lambda net: setattr(net.blocks[0].mlp["fc1"], "bias", nn.Parameter(torch.ones(4), False)),
        ["weights: blocks.0.mlp.fc1.bias changed"],
    ),
    "an attribute": (lambda net: setattr(net, "heads", 4), ["attribute heads: 2 → 4"]),
    "a dtype": (
        lambda net: setattr(net, "dtype", torch.half),
        ["attribute dtype: torch.float32 → torch.float16"],
    ),
    "an attribute that is new": (lambda net: setattr(net, "extra", 3), ["attribute extra is new: 3"]),
    "an attribute that is gone": (
        lambda net: delattr(net, "dtype"),
        ["attribute dtype is gone: torch.float32"],
    ),
    "two at once": (
        lambda net: (setattr(net, "heads", (1, None, "a")), net.blocks[0].mlp["fc1"].weight.add_(1)),
        ["attribute heads: 2 → (1, None, 'a')", "weights: blocks.0.mlp.fc1.weight changed"],
    ),
    "training": (lambda net: net.train(), ["training: False → True, and 9 more: blocks, blocks.0, …"]),
    "training of a part": (lambda net: net.blocks[0].act.train(), ["training blocks.0.act: False → True"]),
    "many": (
        lambda net: [setattr(net, f"number_{number}", number) for number in range(80)],
        [*(f"attribute number_{n} is new: {n}" for n in sorted(range(80), key=str)[:50]), "… and 30 more"],
    ),
    "a hook": (lambda net: net.blocks[0].register_forward_hook(lambda *args: args[-1] * 2), "hook"),
    "a class": (
        lambda net: setattr(net.blocks[1], "act", nn.ReLU()),
        "module blocks.1.act has another class",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_named(name):
    edit, expected = EDITS[name]
    net = make()()
    net(X)
    edit(net)
    net(X)
    if isinstance(expected, list):
        assert lines(net) == expected
    else:
        assert any(line.startswith(expected) for line in lines(net)), lines(net)


def test_another_instance_is_compared_with_the_last_one_of_its_class():
    kind = make()
    torch.manual_seed(0)
    first = kind()
    first(X)
    torch.manual_seed(0)
    second = kind(heads=8, table=torch.ones(3))
    second(X)
    assert lines(second) == ["attribute heads: 2 → 8"]
    assert "first of Net" in lines(first)[0]
    first.heads = 3
    first(X)
    assert lines(first) == ["attribute heads: 2 → 3"]
    copy.deepcopy(first)(X)
    assert lines(first) == ["attribute heads: 2 → 3"]


def test_another_source_is_named():
    @torchcache
    def shifted(x):
        return x + 1

    def other(x):
        return x + 2

    shifted(X)
    shifted.__wrapped__.__code__ = other.__code__.replace(co_name="shifted")
    shifted(X)
    assert "source of function shifted changed" in lines(shifted)


CALLS = {
    "a number": (((X,), {}), ((X,), {"scale": 2.5}), ["argument scale: 1.0 → 2.5"]),
    "a tuple": (((X, 1.0, (1,)), {}), ((X, 1.0, (1, "b")), {}), ["argument flags: (1,) → (1, 'b')"]),
    "a shape": (((X,), {}), ((X[:, None],), {}), ["items of x: float32 (4,) → float32 (1, 4)"]),
    "only items": (((X,), {}), ((X + 1,), {}), ["nothing but the items differs between the last two calls"]),
    "nothing": (((X,), {}), ((X[:2],), {}), ["nothing but the items differs between the last two calls"]),
    "an argument of another kind": (
        ((X, 1.0), {}),
        ((X, torch.ones(3, 1)), {}),
        ["items of scale: not given → float32 (1,)"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_two_calls_of_one_namespace_are_compared(name):
    (args, kwargs), (more, keywords), expected = CALLS[name]
    net = make()()
    net(*args, **kwargs)
    net(*more, **keywords)
    found = lines(net)
    assert [line for line in found if not line.startswith("argument scale: 1.0 → not")] == expected


@pytest.mark.cpu_only
def test_modes_are_compared():
    net = make()()
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            net(X)
    assert lines(net) == [
        "modes: default torch.float32 highest → default torch.float32 highest; cpu torch.bfloat16"
    ]


SHORT = [None, True, False, 0, -17, 2**80, 1.5, float("-inf"), 1e-300, 2 + 3j, "text ‖", ()]
SHORT += [(1,), [1, "a", None], (1, (2.0,))]


@pytest.mark.parametrize("value", SHORT)
def test_short_values_are_described_as_python_prints_them(value):
    assert readable(Encoder().encode(value, "")) == repr(value)


def test_long_and_opaque_values_are_not_described():
    for value in ("x" * 300, {"a": 1}, {1}, torch.ones(2), [torch.ones(2)]):
        assert readable(Encoder().encode(value, "")) is None


# What code has captured


def test_the_captured_value_that_changed_is_named():
    rate, args = 1, types.SimpleNamespace(lr=0.1, out="a", sizes=(1, 2))

    def scaled(x, power=2):
        return x * rate**power * repr(args).count("lr")

    cached = torchcache(scaled)
    cached(X)
    rate = 3
    cached(X)
    assert lines(cached) == ["closure variable rate of function scaled: 1 → 3"]
    args.lr, args.sizes = 0.2, (1, 3)
    cached(X)
    assert lines(cached) == [
        "closure variable args.lr of function scaled: 0.1 → 0.2",
        "closure variable args.sizes of function scaled: (1, 2) → (1, 3)",
    ]
    scaled.__defaults__ = (3,)
    cached(X)
    assert lines(cached) == ["default power of function scaled: 2 → 3"]


@dataclasses.dataclass
class Options:
    depth: int = 2
    name: str = "small"


OPTIONS = Options()
TABLE = {"first": 1, "second": 2}


def test_the_attribute_of_a_global_or_of_an_attribute_is_named(monkeypatch):
    class Net(nn.Module):
        scale = 1.0

        def __init__(self):
            super().__init__()
            self.options = Options()

        def forward(self, x):
            return x * self.scale * len(repr((self.options, OPTIONS, TABLE)))

    net = torchcache(Net())
    net(X)
    net.options.depth = 3
    net(X)
    assert lines(net) == ["attribute options.depth: 2 → 3"]
    monkeypatch.setattr(OPTIONS, "name", "large")
    net(X)
    assert lines(net) == ["global OPTIONS.name of function Net.forward: 'small' → 'large'"]
    monkeypatch.setitem(TABLE, "second", 5)
    net(X)
    assert lines(net) == ["global TABLE['second'] of function Net.forward: 2 → 5"]
    Net.scale = 2.0
    net(X)
    assert lines(net) == ["value Net.scale of class Net: 1.0 → 2.0"]


def test_an_attribute_is_named_after_a_restart(tmp_path):
    def run(rate):
        args = types.SimpleNamespace(rate=rate, name="a")

        @torchcache(persistent=True, persistent_cache_dir=tmp_path)
        def scaled(x):
            return x * vars(args)["rate"]

        with scaled.cache_instance:
            scaled(X)
            return lines(scaled)

    run(1)
    assert run(2)[1:] == ["closure variable args.rate of function scaled: 1 → 2"]


def test_a_module_that_cannot_be_read_is_explained():
    class Options:
        def __getattribute__(self, name):
            return {"scale": 2.0, "__class__": Options}[name]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = Options()

        def forward(self, x):
            return x * self.options.scale

    cached = torchcache(Net())
    cached(torch.ones(2, 2))
    assert "unreadable: reading options raised KeyError" in cached.cache_instance.explain()
