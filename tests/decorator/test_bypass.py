"""What cannot be cached works as without the cache, says so once, and costs nearly nothing."""

import copy
import logging
from collections import UserDict

import pytest
import torch
import transformers
from torch import nn

from torchcache2 import InputError, NotCachedError, OutputError, UnhashableArgumentError, torchcache
from torchcache2.decorator.bypass import batch_advice
from torchcache2.decorator.shortcuts import Shortcuts, glance

X = torch.arange(24.0).reshape(6, 4)


def bypasses(function):
    return dict(function.cache_instance.stats().bypasses)


def warnings_of(log):
    return [record.getMessage() for record in log if record.levelno == logging.WARNING]


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, features):
        return self.table(features["ids"]).mean(1) * features["scale"]


class Mapping(UserDict):
    pass


@pytest.mark.parametrize("kind", [dict, UserDict, Mapping, transformers.BatchEncoding])
def test_a_mapping_that_is_no_dict_is_an_argument_like_one(kind):
    plain = Features().eval().requires_grad_(False)
    cached = torchcache(copy.deepcopy(plain))
    ids = torch.arange(24).reshape(6, 4)
    for rows, scale in (
        (ids, 1.0),
        (ids.flip(0), 1.0),
        (torch.cat([ids[:2], ids[:3] + 30]), 1.0),
        (ids, 2.0),
    ):
        features = kind({"ids": rows, "scale": scale})
        assert torch.equal(cached(features), plain(features))
        assert features["ids"] is rows
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
    (message,) = warnings_of(log)
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
    shortcuts, kind = Shortcuts(), ("kind",)
    tried = []
    for call in range(200):
        if shortcuts.reason(kind) is None:
            tried.append(call)
            shortcuts.add(kind, "output")
    assert tried == [0, 1, 2, 3, 20, 53, 118]
    assert shortcuts.reason(("another",)) is None
    shortcuts.clear(kind)
    assert shortcuts.reason(kind) is None


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


def test_a_glance_tells_kinds_apart():
    kinds = [
        ((X,), {}),
        ((X[0],), {}),
        ((X.int(),), {}),
        ((X.to_sparse(),), {}),
        ((X.as_subclass(Labelled),), {}),
        ((X.to("meta"),), {}),
        ((X, True), {}),
        ((X, None), {}),
        ((X, 1), {}),
        ((X, "a"), {}),
        ((X, "b"), {}),
        ((X,), {"a": True}),
        ((X,), {"b": True}),
    ]
    assert len({glance(None, *kind) for kind in kinds}) == len(kinds)
    assert glance(None, (X, 1, [1]), {}) == glance(None, (X[:3], 2, [2, 3]), {})


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_memory_formats_do_not_mix(memory_format):
    cached = torchcache(lambda x: x * 2)
    x = torch.randn(4, 3, 6, 5)
    for batch in (x, x.to(memory_format=torch.channels_last)) * 2:
        assert cached(batch).stride() == (batch * 2).stride()
    fresh = torchcache(lambda x: x * 2)
    batch = x.contiguous(memory_format=memory_format)
    fresh(batch[:2])
    assert fresh(batch).stride() == batch.stride()  # two found, and two computed
    assert torch.equal(fresh(batch), batch * 2)


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


@pytest.mark.parametrize("settled", [False, True])
def test_memory_formats_do_not_mix_on_disk(tmp_path, settled):
    def doubled(x):
        return x * 2

    x = torch.randn(4, 3, 6, 5)
    both = [x, x.to(memory_format=torch.channels_last)]
    for batches in (both, both[::-1], both):
        cached = torchcache(persistent=True, persistent_cache_dir=tmp_path, max_memory_cache_size=0)(doubled)
        with cached.cache_instance:
            for batch in batches * 2:
                assert cached(batch).stride() == cached(batch[:3]).stride() == batch.stride()
                if settled:
                    cached.cache_instance.flush()


def test_the_advice_about_a_batch_is_for_its_cause():
    advice = {cause: batch_advice(cause) for cause in ADVICE}
    assert len(set(advice.values())) == len(ADVICE)
    for cause, word in ADVICE.items():
        assert word in advice[cause], cause


ADVICE = {
    "": "narrower",
    "shape": "fixed length",
    "raises": "item_args",
    "rounding": "probe=False",
    "values": "batch_first",
    "repeat": "place in the batch",
    "found": "mask",
    "quantized": "statically",
    "stack": "pad outputs",
}


def test_an_advice_is_not_that_for_another_cause(log):
    torchcache(lambda x: x @ x.T)(X)
    (message,) = warnings_of(log)
    assert "quantize" not in message and "probe=False" not in message
