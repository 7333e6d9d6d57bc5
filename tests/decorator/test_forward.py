"""A cached forward against the plain one: arguments, outputs, bypasses and errors."""

import collections
import contextlib
import copy
import dataclasses
import random
import re
import threading
import typing

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.helpers.outputs import Notes, assert_same, bypasses, cached, note, warnings_in
from torchcache2 import InputError, UnhashableArgumentError, torchcache


@dataclasses.dataclass
class Registered:
    image: torch.Tensor
    scale: float


pytree.register_pytree_node(
    Registered,
    lambda item: ([item.image, item.scale], None),
    lambda leaves, context: Registered(*leaves),
)


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


X = torch.arange(24.0).reshape(6, 4)
IDS = torch.arange(6)

CALLS = {
    "positional": (lambda x, y: x * 2 + y[:, None], (X, IDS), {}),
    "keyword": (lambda x, y: x * 2 + y[:, None], (), {"y": IDS, "x": X}),
    "mixed dtypes": (lambda x, y, z: (x, y, z), (X.half(), IDS, X.bool()), {}),
    "dict": (lambda batch: batch["a"] + batch["b"][0], ({"a": X, "b": [X, 3]},), {}),
    "nested": (lambda batch: batch[0][1]["x"] * batch[1], (((1, {"x": X}), 2.5),), {}),
    "named tuple": (lambda pair: pair.left - pair.right, (Pair(X, X + 1),), {}),
    "dataclass": (lambda item: item.image * item.scale, (Registered(X, 3.0),), {}),
    "ordered dict": (lambda d: d["x"] * 2, (collections.OrderedDict(x=X),), {}),
    "variadic": (lambda *xs: sum(xs), (X, X + 1, X + 2), {}),
    "keywords": (lambda **xs: xs["b"] - xs["a"], (), {"a": X, "b": X * 3}),
    "the same twice": (lambda x, y: x * y, (X, X), {}),
    "one-dimensional": (lambda x: x * 2, (IDS,), {}),
    "no elements": (lambda x: x.sum(1), (X[:, :0],), {}),
    "conjugated": (lambda x: x * 2, (torch.complex(X, -X).conj(),), {}),
}

OUTPUTS = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x.long()),
    "list": lambda x: [x, x.sum(1)],
    "dict": lambda x: {"b": x * 2, "a": (x.sum(1), [x > 3])},
    "named tuple": lambda x: Pair(x * 2, x * 3),
    "numbers and texts": lambda x: {"y": x, "n": 3, "f": 2.5, "t": "text é", "b": True, "c": 1j, "z": None},
    "bytes": lambda x: (x, b"\x00\xff", ""),
    "complex": lambda x: torch.complex(x, -x),
    "conjugated": lambda x: torch.complex(x, -x).conj(),
    "one number an item": lambda x: x.sum(1),
    "no elements": lambda x: x[:, :0],
    "view": lambda x: (x * 2)[:, 1:3],
    "transposed": lambda x: torch.stack([x, x * 2], 2).transpose(1, 2),
    "expanded": lambda x: x.sum(1)[:, None].expand(-1, 5),
    "the input": lambda x: x,
    "a view of the input": lambda x: x[:, ::2],
    "the same tensor twice": lambda x: [x * 2] * 2,
    "channels last": lambda x: (
        x.reshape(-1, 1, 2, 2).expand(-1, 3, 2, 2).to(memory_format=torch.channels_last)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_any_call_is_cached(name):
    forward, args, kwargs = CALLS[name]
    function = cached(forward)
    expected = forward(*args, **kwargs)
    for _ in range(3):
        assert_same(function(*args, **kwargs), expected)
    assert function.sizes == [6]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.one_in(2)
def test_any_output_comes_back_as_it_is_and_owns_its_memory(name, context):
    forward = OUTPUTS[name]
    function = cached(forward)
    with context():
        for order in (range(3), range(6), [5, 0, 5], [1], range(5, -1, -1), range(6), range(6)):
            x = X[torch.tensor(list(order))]
            output = function(x)
            assert_same(output, forward(x))
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
                    leaf.zero_()
            assert torch.equal(x, X[torch.tensor(list(order))])
    # A tuple of 3 may have an entry for each of 3 items: one item alone shows that it does not.
    assert function.sizes == ([3, 1, 3] if name == "bytes" else [3, 3])


def test_a_batch_of_misses_gets_the_callers_own_tensors():
    seen = Notes()
    name, seen = seen.name, seen.notes
    function = torchcache(shared_args=("table",), probe=False)(
        lambda x, table: note(name, x, table) or x * table.sum()
    )
    x, table = torch.randn(4, 3), torch.randn(2)
    function(x, table)
    assert seen[0][0] is x and seen[0][1] is table
    function(torch.cat([x[:2], x + 1]), table)
    assert len(seen[1][0]) == 4 and seen[1][1] is table


def test_only_misses_are_computed_and_duplicates_once():
    function = cached(lambda x: x * 2)
    function(X[:2])
    assert torch.equal(function(X), X * 2)
    index = torch.tensor([0, 3, 3, 5, 0])
    more = torch.cat([X[index], X[index] + 100, X[index] + 100])
    assert torch.equal(function(more), more * 2)
    assert function.sizes == [2, 4, 3]
    assert function.cache_instance.stats().misses == 9
    assert function.cache_instance.stats().hits == 14


def test_rows_without_elements_are_put_together():
    function = torchcache(lambda x: (x[:, :0], x * 2))
    for batch in (X[:2], X, X.flip(0)):
        nothing, doubled = function(batch)
        assert nothing.shape == (len(batch), 0) and torch.equal(doubled, batch * 2)
    stats = function.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.bypasses) == (8, 6, {})


def test_an_empty_batch():
    function = cached(lambda x: {"y": x * 2, "n": 3})
    for _ in range(2):
        assert_same(function(X[:0]), {"y": X[:0] * 2, "n": 3})
    assert function.cache_instance.stats().memory_rows == 0


def longest(x):
    """As tokenizers pad: the output's width depends on the batch."""
    width = int(x.max())
    return torch.arange(width).expand(len(x), width) * x[:, None]


@pytest.mark.parametrize("forward", [longest, lambda x: (x * 2, float(x.sum()))])
def test_hits_that_do_not_stack_or_have_values_of_other_batches_are_computed_again(forward):
    function = cached(forward)
    for batch in ([1, 2], [3, 4], [1, 3], [1, 5], [1, 2], [4, 5, 1, 2]):
        x = torch.tensor(batch)
        assert_same(function(x), forward(x))


def test_cache_dtype_rounds_hits_and_misses_alike():
    function = cached(lambda x: (x / 3, x.long()), cache_dtype=torch.bfloat16)
    expected = ((X / 3).bfloat16().float(), X.long())
    for batch in (slice(0, 2), slice(0, 6), slice(3, 6)):
        assert_same(function(X[batch]), tuple(leaf[batch] for leaf in expected))
    assert function.sizes == [2, 1, 4]


def test_shared_arguments_belong_to_the_batch():
    function = cached(lambda x, mask, tables=None: x * mask, shared_args=("mask", "tables"))
    masks = [torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4)]
    for mask in masks * 2:
        assert torch.equal(function(X, mask, tables={"t": [torch.ones(1)]}), X * mask)
        assert torch.equal(function(X[2:], mask=mask.clone(), tables={"t": [torch.ones(1)]}), X[2:] * mask)
    assert function.sizes == [6, 6]


def test_an_exception_leaves_the_cache_as_it_was():
    @torchcache(probe=False)
    def function(x):
        if x[-1, 0] == X[5, 0]:
            raise KeyError("mine")
        return x * 2

    function(X[:3])
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            function(X)
    stats = function.cache_instance.stats()
    assert (stats.memory_rows, stats.misses) == (3, 3)
    assert torch.equal(function(X[:5]), X[:5] * 2)


class Net(nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.extra = extra if extra is not None else nn.Identity()

    def forward(self, x):
        return self.extra(self.fc(x))


def test_a_graph_from_elsewhere_is_kept():
    weight = torch.ones(4, requires_grad=True)
    scale = {"w": weight}

    function = torchcache(lambda x: x * scale["w"])
    for _ in range(2):
        function(X).sum().backward()
    assert torch.equal(weight.grad, 2 * X.sum(0))
    assert bypasses(function) == {"grad": 12}


def test_batch_norm_without_running_statistics_depends_on_the_batch():
    module = torchcache(Net(nn.BatchNorm1d(3, track_running_stats=False)).eval())
    with torch.no_grad():
        for batch in (X, X[:3], X):
            assert torch.equal(module(batch), module.extra(module.fc(batch)))
    assert bypasses(module) == {"training": 15}


NOISE = {
    "torch": lambda x: x + torch.rand(x.shape),
    "functional dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
    "python": lambda x: x + random.random(),
    "numpy": lambda x: x + np.random.rand(),
    "seeded anew": lambda x: torch.manual_seed(0) and x + torch.randn(x.shape),
}


@pytest.mark.parametrize("name", NOISE)
def test_a_random_forward_is_bypassed_and_draws_what_it_would_have(name, log):
    forward = NOISE[name]
    function = torchcache(forward)
    batches = [X, X, torch.cat([X[:2], X[:2]])]

    def run(forward):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        return [forward(batch) for batch in batches]

    for left, right in zip(run(function), run(forward), strict=True):
        assert torch.equal(left, right)
    assert bypasses(function) == {"random": 16}
    (message,) = warnings_in(log)
    assert "random" in message


def test_a_generator_of_its_own_is_watched():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.torch_generator = torch.Generator().manual_seed(1)
            self.numpy_generator = np.random.default_rng(1)
            self.which = 0

        def forward(self, x):
            if self.which == 0:
                return x + torch.rand(4, generator=self.torch_generator)
            return x + self.numpy_generator.random()

    plain, module = Noisy(), torchcache(Noisy())
    for which in (0, 1):
        plain.which = module.which = which
        for batch in (X, X, torch.cat([X, X])):
            assert torch.equal(module(batch), plain(batch))
    assert bypasses(module) == {"random": 48}


def test_an_item_that_is_random_only_sometimes():
    def forward(x, sample):
        return x + torch.rand(x.shape) if sample else x * 2

    function = cached(forward)
    function(X, False)
    assert not torch.equal(function(X, True), function(X, True))
    assert torch.equal(function(X, False), X * 2)
    assert function.cache_instance.stats().hits == 6


def test_a_buffer_that_is_made_at_the_first_call_is_no_obstacle():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", None)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(4.0)
            return x * self.table

    module = torchcache(Lazy())
    for _ in range(3):
        assert torch.equal(module(X), X * torch.arange(4.0))
    assert bypasses(module) == {"state": 6}
    assert module.cache_instance.stats().hits == 6


def test_attributes_that_forward_assigns_are_left_out_and_named(log):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.kept, self.other = x.sum(), "seen"
            return x * 2

    module = torchcache(Keeps())
    for _ in range(3):
        module(X)
    assert module.calls == 1 and module.cache_instance.stats().hits == 12
    assert warnings_in(log) == []
    named = [record.getMessage() for record in log if record.levelname == "INFO"]
    assert any("Keeps.calls" in message for message in named)
    assert any("Keeps.kept" in message for message in named)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode])
def test_an_input_changed_in_place_is_bypassed(context):
    function = torchcache(lambda x: x.add_(1) * 2)
    for _ in range(2):
        with context():
            x = X.clone()
            assert torch.equal(function(x), (X + 1) * 2) and torch.equal(x, X + 1)
    assert bypasses(function) == {"input": 12}
    x = torch.cat([X, X])
    assert torch.equal(function(x), (torch.cat([X, X]) + 1) * 2)
    assert torch.equal(x, torch.cat([X, X]) + 1)


@pytest.mark.parametrize(
    "output, words",
    [
        (object(), "object"),
        (2**70, "64 bits"),
        (np.zeros(3), "has shape (3,)"),
    ],
)
def test_outputs_that_cannot_be_kept_are_passed_through(output, words, log):
    function = cached(lambda x: {"y": x * 2, "o": output})
    for batch in (X, X, torch.cat([X, X])):
        back = function(batch)
        assert torch.equal(back["y"], batch * 2) and back["o"] is output
    assert function.cache_instance.stats().misses == 0
    assert sum(bypasses(function).values()) == 24
    (message,) = warnings_in(log)
    assert words in message and "['o']" in message


ERRORS = {
    "no tensor": (lambda f: f(3), InputError, "no batched tensor"),
    "only shared": (lambda f: f(mask=X), InputError, "no batched tensor"),
    "no dimension": (lambda f: f(torch.tensor(3.0)), InputError, "argument x .*without dimensions"),
    "batch sizes": (lambda f: f(X, X[:5]), InputError, r"x has shape \(6, 4\), y has shape \(5, 4\)"),
    "nested sizes": (lambda f: f(X, {"a": [X[:2]]}), InputError, r"y\['a'\]\[0\] has shape \(2, 4\)"),
    "an object": (lambda f: f(X, object()), UnhashableArgumentError, "argument y is a object"),
    "what cannot be read": (
        lambda f: f(X, [nn.ReLU(), threading.local()]),
        UnhashableArgumentError,
        r"y\[1\] is a _?local",
    ),
    "a function": (lambda f: f(X, len), UnhashableArgumentError, "argument y is a builtin"),
    "sparse": (lambda f: f(X.to_sparse()), UnhashableArgumentError, "argument x .*sparse"),
    "in a set": (lambda f: f(X, {X}), UnhashableArgumentError, "set"),
    "unexpected": (lambda f: f(X, z=1), TypeError, "unexpected keyword"),
    "missing": (lambda f: f(), TypeError, "missing 2 required positional arguments"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_cached_steps_aside_or_is_an_error_if_strict(name, log):
    call, kind, words = ERRORS[name]

    def plain(x=1, y=None, mask=None):
        return x

    if name == "missing":
        plain = lambda x, y: x  # noqa: E731
    with pytest.raises(kind, match=words):
        call(torchcache(shared_args=() if name == "missing" else ("mask",), strict=True)(plain))
    if kind is TypeError:
        with pytest.raises(kind, match=words):
            call(torchcache(plain))
        return
    function = torchcache(shared_args=("mask",))(plain)
    for _ in range(2):
        assert torch.equal(
            torch.as_tensor(call(function)).to_dense(), torch.as_tensor(call(plain)).to_dense()
        )
    (message,) = warnings_in(log)
    assert re.search(words, message) and function.cache_instance.stats().bypasses.keys() == {"argument"}


def test_a_cached_module_inside_of_a_cached_module():
    inner = torchcache(Net().requires_grad_(False).eval())
    outer = torchcache(nn.Sequential(inner, nn.ReLU()).eval())
    expected = nn.functional.relu(inner.fc(X))
    assert torch.equal(outer(X), expected) and torch.equal(outer(X), expected)
    with torch.no_grad():
        inner.fc.weight.mul_(2)
    assert torch.equal(outer(X), nn.functional.relu(inner.fc(X)))


def test_a_function_notices_the_module_that_it_uses():
    net = Net()

    @torchcache
    def embed(x):
        return net(x)

    assert embed(X).requires_grad and bypasses(embed) == {"grad": 6}
    net.requires_grad_(False)
    first = embed(X)
    assert torch.equal(embed(X), first) and embed.cache_instance.stats().hits == 6
    net.fc.weight.data.mul_(2)
    assert torch.equal(embed(X), net(X)) and not torch.equal(net(X), first)
    net.extra = nn.Dropout(0.5)
    embed(X)
    assert bypasses(embed) == {"grad": 6, "training": 6}


def test_the_callers_thread_is_the_one_that_computes():
    threads = []
    function = torchcache(probe=False)(lambda x: threads.append(threading.get_ident()) or x * 2)
    function(X)
    assert threads == [threading.get_ident()]


def test_the_environment_turns_caching_off(monkeypatch):
    function = cached(lambda x: x * 2)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    function(X)
    function(X)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "0")
    function(X)
    function(X)
    assert function.sizes == [6, 6, 6]


def test_a_forward_that_sets_itself_up_does_so_once():
    class Capturing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.is_ready, self.names, self.kinds = False, [], {}

        def forward(self, x):
            if not self.is_ready:
                self.layer.register_forward_hook(lambda module, args, output: output + 1)
                self.add_module("second", nn.Tanh())
                self.names.append("second")
                self.kinds["second"] = nn.Tanh
                self.is_ready = True
            return self.second(self.layer(x))

    torch.manual_seed(0)
    plain = Capturing().eval().requires_grad_(False)
    cached_module = torchcache(copy.deepcopy(plain))
    x = torch.arange(12.0).view(4, 3)
    x[3] = x[0]  # the first call runs the forward for a part of the batch
    for _ in range(3):
        assert torch.equal(cached_module(x), plain(x))
    for module in (plain, cached_module):
        assert len(module.layer._forward_hooks) == 1
        assert (module.names, module.kinds) == (["second"], {"second": nn.Tanh})
    assert cached_module.cache_instance.stats().bypasses == {"state": 4}
    assert cached_module.cache_instance.stats().hits >= 4


@pytest.fixture
def idle_thread():
    """A thread that does nothing, but might have drawn a number."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


def states():
    numpy_state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]


def test_a_number_that_another_thread_may_have_drawn_is_forgiven(idle_thread):
    @torchcache
    def function(x):
        if bool((x == 99).any()):
            random.random()  # stands for another thread's
        return x * 2

    x = torch.arange(8.0).view(4, 2)
    function(x)
    function(torch.full((4, 2), 99.0))
    before = states()
    for _ in range(8):
        assert torch.equal(function(x), x * 2)
        assert torch.equal(function(x[:2]), x[:2] * 2)
    assert states() == before
    stats = function.cache_instance.stats()
    assert stats.bypasses == {"random": 4} and stats.hits == 8 * 6


@pytest.mark.parametrize("seeded", [True, False])
def test_a_random_forward_beside_another_thread_is_never_cached(idle_thread, seeded):
    def noisy(x):
        if seeded:
            torch.manual_seed(5)
        return x + torch.rand(x.shape) + random.random() * (not seeded)

    cached_noisy = torchcache(noisy)
    x = torch.zeros(3, 2)
    for function in (noisy, cached_noisy):
        torch.manual_seed(1)
        random.seed(1)
        outputs = [function(x[: 1 + i % 3]) for i in range(150)]
        if function is noisy:
            expected, after = outputs, states()
    for output, right in zip(outputs, expected, strict=True):
        assert torch.equal(output, right)
    assert states() == after
    assert cached_noisy.cache_instance.stats().hits == 0
