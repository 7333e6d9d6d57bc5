"""What a forward may do besides computing: whatever it is, a cached one does the same."""

import copy
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.outputs import assert_same
from torchcache2 import torchcache

X = torch.arange(12.0).view(4, 3)
DUPLICATES = torch.cat([X[:2], X[:2]])


def scaled_by(module, x):
    return x * module.calls


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.extra = lambda x: x * self.calls

    def reset(self):
        self.calls = 0


class ByFunction(Counting):
    def forward(self, x):
        self.calls += 1
        return scaled_by(self, x)


class ByDecoratedHelper(Counting):
    @torch.no_grad()
    def helper(self, x):
        return x * self.calls

    def forward(self, x):
        self.calls += 1
        return self.helper(x)


class ByNestedCode(Counting):
    def helper(self, x):
        return x * self.calls

    def forward(self, x):
        self.calls += 1
        return sum(self.helper(part) for part in (x, x))


class ByText(Counting):
    def forward(self, x):
        self.calls += 1
        return x * getattr(self, "cal" + "ls")


class ByName(Counting):
    def forward(self, x):
        self.calls += 1
        return x * vars(self)["calls"]


class ByStaticMethod(Counting):
    @staticmethod
    def helper(module, x):
        return x * module.calls

    def forward(self, x):
        self.calls += 1
        return self.helper(self, x)


class ByLambda(Counting):
    def forward(self, x):
        self.calls += 1
        return self.extra(x)


class ByTorch(nn.LayerNorm):
    def __init__(self):
        super().__init__(3)

    def forward(self, x):
        self.eps *= 4
        return super().forward(x)


class Unsure(Counting):
    def forward(self, x):
        match x.dim():
            case 3:
                self.calls = 5
        old = self.calls
        self.calls = old + 1
        return x * old


class OnlyDeclared(Counting):
    def forward(self, x):
        self.calls: int
        self.calls = self.calls + 1
        return x * self.calls


COUNTERS = [
    ByFunction,
    ByDecoratedHelper,
    ByNestedCode,
    ByText,
    ByName,
    ByStaticMethod,
    ByLambda,
    ByTorch,
    Unsure,
    OnlyDeclared,
]


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_counter_that_is_read_somewhere_counts(kind):
    plain, cached = kind(), torchcache(kind())
    for module in (plain, cached):
        module.requires_grad_(False)
    for x in (DUPLICATES, X, X, DUPLICATES, X):
        assert torch.equal(cached(x), plain(x))


def test_a_counter_that_only_others_read_is_no_obstacle():
    class Counted(Counting):
        def forward(self, x):
            self.calls += 1
            return x * 2

    cached = torchcache(Counted())
    del cached.extra
    for _ in range(3):
        assert torch.equal(cached(X), X * 2)
    assert cached.cache_instance.stats().hits == 8 and not cached.cache_instance.stats().bypasses


TOTAL = 0


def global_counter(x):
    global TOTAL
    TOTAL += 1
    return x * TOTAL


def test_state_changes_once_for_a_batch_with_duplicates(monkeypatch):
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
    monkeypatch.setitem(globals(), "TOTAL", 0)
    expected = [global_counter(DUPLICATES) for _ in range(2)]
    monkeypatch.setitem(globals(), "TOTAL", 0)
    counter = torchcache(global_counter)
    assert all(torch.equal(counter(DUPLICATES), output) for output in expected)
    assert TOTAL == 2


def grow(x, found):
    found.append(len(x))
    return x * 2


def add(x, table):
    table += 1
    return x * 2


def rename(x, options):
    options["done"] = options.pop("todo", 0) + 1
    return x * 2


@pytest.mark.parametrize(
    ("function", "argument"),
    [(grow, [1]), (add, np.zeros(3)), (rename, {"todo": 3})],
    ids=["list", "array", "dict"],
)
def test_arguments_that_are_changed_in_place_are_changed(function, argument):
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


def test_how_an_inner_module_is_cached_counts():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    outer = torchcache(Outer)
    third = X / 3
    rounded, exact = outer(torchcache(cache_dtype=torch.float16)(nn.Tanh())), outer(nn.Tanh())
    rounded(third)
    assert torch.equal(exact(third), third.tanh())


def test_how_an_inner_function_is_cached_counts():
    def make(**options):
        @torchcache(**options)
        def inner(x):
            return x.tanh()

        return torchcache(lambda x: inner(x) + 1)

    kinds = ({}, {"cache_dtype": torch.float16}, {"persistent_module_hash": "name"}, {"policy": "lru"})
    usual, rounded, named, same = [make(**options).cache_instance.module_hash for options in kinds]
    assert len({usual, rounded, named}) == 3 and usual == same


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


def test_a_weight_of_another_dtype_in_the_same_memory():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            return x + self.weight.double().sum()

    cached = torchcache(Weighted())
    cached(X)
    cached.weight.data = cached.weight.data.view(torch.int32)
    assert torch.equal(cached(X), X + cached.weight.double().sum())


def test_the_fast_path_of_attention_is_part_of_the_key():
    cached = torchcache(lambda x: x * (1 + torch.backends.mha.get_fastpath_enabled()))
    assert torch.equal(cached(X), X * 2)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(cached(X), X)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_decorator_that_gives_arguments_of_its_own():
    def with_three(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x, 3)

        return wrapper

    def times(x, factor):
        return x * factor

    cached = torchcache(with_three(times))
    for _ in range(2):
        assert torch.equal(cached(X), X * 3)


def test_a_default_that_is_replaced():
    def function(x, factor=3):
        return x * factor

    cached = torchcache(function)
    cached(X)
    function.__defaults__ = (5,)
    for _ in range(2):
        assert torch.equal(cached(X), X * 5)
        assert torch.equal(cached(X, 3), X * 3)


class Tagged(torch.Tensor):
    pass


OUTPUTS = {
    "subclass": lambda x: (x * 2).as_subclass(Tagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8),
    "sparse": lambda x: x.to_sparse(),
    "object": lambda x: {"out": x * 2, "kind": object},
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated in new versions
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.cpu_only
def test_outputs_that_cannot_be_kept_with_duplicates(name):
    function = OUTPUTS[name]
    cached = torchcache(lambda x: function(x))
    for _ in range(2):
        output, expected = cached(DUPLICATES), function(DUPLICATES)
        assert type(output) is type(expected)
        if isinstance(output, dict):
            assert_same(output, expected)
        else:
            assert output.layout is expected.layout and output.is_quantized == expected.is_quantized


def test_threads_do_not_take_each_others_attributes_for_their_own():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.layer = 0, nn.Identity()

        def forward(self, x):
            self.seen = self.seen + 1
            return self.layer(x) + 0 * self.seen

    cached, errors = torchcache(Stateful()), []

    def work():
        try:
            for _ in range(150):
                assert torch.equal(cached(DUPLICATES), DUPLICATES)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and set(vars(nn.Identity())) == set(vars(cached.layer))
