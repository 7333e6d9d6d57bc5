"""What cannot be cached works as without the cache, says so once, and costs nearly nothing."""

import copy
import types
from collections import UserDict

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

from tests.helpers.outputs import bypasses, warnings_in
from torchcache2 import (
    InputError,
    NotCachedError,
    OutputError,
    UnhashableArgumentError,
    torchcache,
)
from torchcache2.decorator.bypass import Backoff, advice_for, glance

X = torch.arange(24.0).reshape(6, 4)


class Mapping(UserDict):
    pass


@pytest.mark.parametrize("kind", [dict, UserDict, Mapping, transformers.BatchEncoding])
def test_a_mapping_that_is_no_dict_is_an_argument_like_one(kind):
    def forward(features):
        return features["x"] * features["scale"]

    cached = torchcache(forward)
    for rows, scale in ((X, 1.0), (X.flip(0), 1.0), (torch.cat([X[:2], X[:3] + 30]), 1.0), (X, 2.0)):
        features = kind({"x": rows, "scale": scale})
        assert torch.equal(cached(features), forward(features)) and features["x"] is rows
    stats = cached.cache_instance.stats()
    assert (stats.hits, stats.misses) == (6 + 2, 6 + 3 + 6)


def test_a_mapping_that_the_forward_adds_to_steps_aside():
    def forward(features):
        features["out"] = features["x"] * 2
        return features["out"]

    cached = torchcache(forward)
    for _ in range(2):
        features = UserDict(x=X)
        assert torch.equal(cached(features), X * 2) and torch.equal(features["out"], X * 2)
    assert bypasses(cached) == {"input": 12}


def test_a_mapping_with_attributes_of_its_own_counts_with_them():
    def forward(features):
        return features["x"] * features.scale

    cached = torchcache(forward)
    for scale in (2, 3, 2):
        features = Mapping(x=X)
        features.scale = scale
        assert torch.equal(cached(features), X * scale)
    assert cached.cache_instance.stats().misses == 12


def unlike(x, y):
    return x[: len(y)] + y


WORKS = {
    "no tensor": (lambda x: x + 1, [3], "argument", InputError),
    "a timestep": (lambda x, t: x * t, [X, torch.tensor(3.0)], "argument", InputError),
    "sizes": (unlike, [X, X[:3]], "argument", InputError),
    "an object": (lambda x, y: x, [X, object()], "argument", UnhashableArgumentError),
    "a scalar": (lambda x: x.mean(), [X], "output", OutputError),
    "a list of another length": (lambda x: list(x[:4]), [X], "output", OutputError),
    "an object back": (lambda x: {x.sum()}, [X], "output", OutputError),
    "random": (lambda x: x + torch.rand_like(x) * 0, [X], "random", NotCachedError),
    "in place": (lambda x: x.add_(0), [X], "input", NotCachedError),
    "mixing": (lambda x: x - x.mean(0), [X], "batch", NotCachedError),
    "training": (nn.Dropout(1e-9), [X], "training", NotCachedError),
    "grad": (nn.Linear(4, 3), [X], "grad", NotCachedError),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works_without_the_cache_works_with_it(name, log, monkeypatch):
    plain, args, reason, error = WORKS[name]
    cached = torchcache(copy.deepcopy(plain) if isinstance(plain, nn.Module) else plain)
    strict = torchcache(strict=True)(copy.deepcopy(plain) if isinstance(plain, nn.Module) else plain)
    for _ in range(30):
        expected, found = plain(*args), cached(*args)
        assert str(found) == str(expected)
    assert bypasses(cached).keys() == {reason}
    (message,) = warnings_in(log)
    assert f"not cached ({reason})" in message
    for _ in range(6):
        with pytest.raises(error):
            strict(*args)
    monkeypatch.setenv("TORCHCACHE_STRICT", "1")
    with pytest.raises(error):
        cached(*args)
    monkeypatch.setenv("TORCHCACHE_STRICT", "0")
    cached(*args)


def test_an_exception_of_the_forward_is_the_callers():
    @torchcache
    def broken(x, y=None):
        raise ValueError("mine")

    for args in ((X,), (X, object()), (torch.tensor(1.0),)):
        with pytest.raises(ValueError, match="mine") as caught:
            broken(*args)
        assert caught.value.__context__ is None


def test_a_kind_of_call_that_is_never_cached_goes_straight_to_the_forward():
    backoff, kind = Backoff(4, 16), ("kind",)
    tried = []
    for call in range(200):
        if backoff.reason(kind) is None:
            tried.append(call)
            backoff.add(kind, "output")
    assert tried == [0, 1, 2, 3, 20, 53, 118]
    assert backoff.reason(("another",)) is None
    backoff.clear(kind)
    assert backoff.reason(kind) is None


def test_what_can_be_cached_is_cached_after_calls_of_another_kind():
    @torchcache
    def sometimes(x, sums=False):
        return x.sum() if sums else x * 2

    for _ in range(10):
        sometimes(X, sums=True)
        sometimes(X)
    stats = sometimes.cache_instance.stats()
    assert (stats.hits, stats.misses) == (54, 6) and stats.bypasses == {"output": 60}


def test_a_kind_that_can_be_cached_again_is_found_out():
    class Switched(nn.Module):
        sums = True

        def forward(self, x):
            return x.sum() if self.sums else x * 2

    module = torchcache(Switched())
    for _ in range(5):
        module(X)
    module.sums = False
    for _ in range(40):
        assert torch.equal(module(X), X * 2)
    assert module.cache_instance.stats().hits > 0


def test_eval_after_training_is_cached_at_once():
    module = torchcache(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))).requires_grad_(False)
    noisy = torchcache(lambda x, train: nn.functional.dropout(x, 0.5, train))
    for _ in range(20):
        module(X)
        noisy(X, True)
    module.eval()
    for _ in range(2):
        module(X)
        noisy(X, False)
    assert module.cache_instance.stats().hits == noisy.cache_instance.stats().hits == 6


class Labelled(torch.Tensor):
    pass


KINDS = [
    *([x] for x in (X, X[0], X.int(), X.to_sparse(), X.as_subclass(Labelled), X.to("meta"))),
    *([X, value] for value in (True, None, 1, "a", "b")),
]


def test_a_glance_tells_kinds_apart():
    kinds = [glance(None, kind, {}) for kind in KINDS] + [glance(None, [X], {name: True}) for name in "ab"]
    assert len(set(kinds)) == len(kinds)
    assert glance(None, (X, 1, [1]), {}) == glance(None, (X[:3], 2, [2, 3]), {})


class Unwilling(torch.Tensor):
    """Raises at whatever it is asked."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    "argument", [X.as_subclass(Unwilling), torch.nn.UninitializedParameter(requires_grad=False)]
)
def test_tensors_that_do_not_want_to_be_asked(argument):
    @torchcache
    def first(x, other=None):
        return x

    for args in ((X, argument), (argument, X), (argument,)):
        assert all(first(*args) is args[0] for _ in range(6))
    assert first.cache_instance.stats().misses == 0


ADVICE = {
    "": "batch_first",
    "padding": "fixed length",
    "structure": "a list",
    "raises": "item_args",
    "rounding": "probe=False",
    "random": "without a seed",
    "repeat": "place in the batch",
    "quantized": "statically",
}


def test_the_advice_about_a_batch_is_for_its_cause():
    assert len({advice_for("batch", cause) for cause in ADVICE}) == len(ADVICE)
    assert [cause for cause, word in ADVICE.items() if word not in advice_for("batch", cause)] == []


# All reasons at once


def test_a_bypass_names_all_of_its_reasons_and_counts_under_the_first(log):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    parametrize.register_parametrization(module[0], "weight", nn.Identity())
    cached = torchcache(module)
    with parametrize.cached():
        cached(X)
    (message,) = warnings_in(log)
    first, *others = message.split(". Also ")
    assert "not cached (parametrize): " in first and "; call it outside of that context" in first
    assert [text.partition(":")[0] for text in others] == ["(grad)", "(training)"]
    assert "requires_grad_(False)" in others[0] and "call .eval() first" in others[1]
    assert bypasses(cached) == {"parametrize": 6}
    assert all(reason in cached.cache_instance.explain() for reason in ("parametrize", "grad", "training"))
    cached(X)  # one is mended
    assert "not cached (grad): " in warnings_in(log)[1] and "Also (training): " in warnings_in(log)[1]


def test_reasons_in_the_arguments_are_named_with_those_in_the_module(log):
    class Net(nn.Linear):
        def forward(self, x, how=None):
            return super().forward(x)

    net = torchcache(Net(4, 3))
    for _ in range(2):
        net(X, object())
    (message,) = warnings_in(log)
    assert "not cached (grad): " in message and ". Also (argument): argument how is a object" in message
    assert bypasses(net) == {"grad": 12}
    strict = torchcache(strict=True)(Net(4, 3))
    for _ in range(2):
        with pytest.raises(NotCachedError, match=r"grad mode.*Also \(argument\): argument how"):
            strict(X, object())


def test_all_traces_of_a_forward_are_named(log):
    seen = []

    def forward(x):
        seen.append(len(x))
        return x.add_(torch.rand(()) * len(seen))

    cached = torchcache(forward)
    cached(X.clone())
    (message,) = warnings_in(log)
    reasons = [text.partition(")")[0] for text in message.split(" (")[1:]]
    assert {"random", "state", "input"} <= set(reasons) and bypasses(cached) == {"random": 6}


# Forwards that turn grad mode off


WITHOUT_GRAD = {
    "no_grad": torch.no_grad(),
    "no_grad without parentheses": torch.no_grad,
    "inference_mode": torch.inference_mode(),
    "inference_mode without parentheses": torch.inference_mode,
    "two": lambda function: torch.inference_mode()(torch.autocast("cpu", enabled=False)(function)),
}


@pytest.mark.parametrize("name", WITHOUT_GRAD)
def test_a_function_that_turns_grad_off_is_cached_with_weights_that_are_not_frozen(name, log):
    model = nn.Linear(4, 3)

    def forward(x):
        return model(x)

    cached = torchcache(WITHOUT_GRAD[name](forward))
    for _ in range(2):
        output = cached(X)
        assert torch.equal(output, model(X)) and not output.requires_grad
    stats = cached.cache_instance.stats()
    assert (stats.hits, stats.misses, dict(stats.bypasses)) == (6, 6, {}) and not warnings_in(log)
    with torch.no_grad():
        model.weight.mul_(2)
    assert torch.equal(cached(X), model(X)) and cached.cache_instance.stats().misses == 12


def test_a_forward_that_turns_grad_on_again_is_not_cached():
    model = nn.Linear(4, 3)

    @torchcache
    @torch.no_grad()
    @torch.enable_grad()
    def on(x):
        return model(x)

    @torchcache
    @torch.no_grad()
    def inside(x):
        with torch.enable_grad():
            return model(x)

    @torchcache
    @torch.inference_mode(False)
    def not_off(x):
        return model(x)

    for cached in (on, inside, not_off):
        for frozen in (True, False):  # rows that were kept while the weights were frozen have no graph
            model.requires_grad_(not frozen)
            for _ in range(2):
                assert cached(X).requires_grad != frozen
        assert bypasses(cached) == {"grad": 12}


def test_an_input_that_requires_grad_is_a_reason_where_the_forward_turns_grad_off():
    same = torchcache(torch.no_grad()(lambda x: x))
    x = X.clone()
    assert not same(x).requires_grad
    assert same(x.requires_grad_()).requires_grad  # the forward returns what it was given
    assert bypasses(same) == {"grad": 6}


# What has changed


CALLS = 0
TABLE = {"a": 0}


def changing(what):
    """A function that changes something of its own, and computes with it."""
    calls, seen, args = 0, [], types.SimpleNamespace(rate=1, name="a")

    def variable(x):
        nonlocal calls
        calls += 1
        return x * calls

    def appends(x):
        seen.append(1)
        return x * len(seen)

    def attribute(x):
        args.rate += 1
        return x * vars(args)["rate"]

    def default(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    def of_globals(x):
        global CALLS
        CALLS += 1
        TABLE["a"] = CALLS
        return x * CALLS * TABLE["a"]

    return locals()[what]


STATE = {
    "variable": ["closure variable calls of function variable was assigned: 0 → 1"],
    "appends": ["closure variable seen of function appends was appended to"],
    "attribute": ["closure variable args.rate of function attribute was assigned: 1 → 2"],
    "default": ["default seen of function default was appended to"],
    "of_globals": [
        "global CALLS of function of_globals was assigned: 0 → 1",
        "global TABLE['a'] of function of_globals was assigned: 0 → 1",
    ],
}


@pytest.mark.parametrize("name", STATE)
def test_a_function_is_told_what_it_changed(name, log):
    torchcache(changing(name))(X)
    (message,) = warnings_in(log)
    assert "not cached (state): while the forward ran, " in message
    assert all(text in message for text in STATE[name])


# Counts and words


def test_items_are_counted_where_they_are_in_lists():
    @torchcache(item_args=("texts",), shared_args=("table",))
    def lengths(table, texts, how=None):
        return torch.tensor([[float(len(text))] for text in texts])

    for _ in range(10):
        lengths(torch.ones(7, 2), ["a", "bb", "ccc"], object())
        lengths(torch.ones(7, 2), how=object(), texts=["a", "bb"])
    assert bypasses(lengths) == {"argument": 50}
