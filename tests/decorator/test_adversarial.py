"""Hard cases that once changed a result, broke a call or hung: right is what the plain forward does."""

import gc
import os
import random
import threading

import pytest
import torch
from torch import nn

from torchcache2 import torchcache
from torchcache2.tiers.memory import arena
from torchcache2.tiers.memory import tier as memory

SOAK = bool(os.environ.get("SOAK"))

NESTED = "ignore:The PyTorch API of nested tensors"
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(6))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def cached(module, **options):
    return torchcache(**options)(module.eval().requires_grad_(False))


def plain(module, *args):
    return type(module).forward(module, *args)


def hits_and_bypasses(cache):
    stats = cache.cache_instance.stats()
    return stats.hits, dict(stats.bypasses)


class Scaled(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


class Weighted(nn.Module):
    """Has others act while it runs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        actions = ACTIONS.get(len(x), (None, None))
        if actions[0]:
            actions[0]()
        y = x * self.w
        if actions[1]:
            actions[1]()
        return y


ACTIONS = {}


def assert_notices(module, change, x=X):
    """The module, cached, before and after a change."""
    cached(module)
    assert torch.equal(module(x), plain(module, x))
    change(module)
    assert torch.equal(module(x), plain(module, x))


# Other threads


def in_thread(function):
    def run():
        with torch.no_grad():
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_weights_that_another_thread_changed_meanwhile_are_not_stored(monkeypatch):
    model = cached(Weighted())
    started, go_on = threading.Event(), threading.Event()
    model(Y[:2])
    monkeypatch.setitem(ACTIONS, 4, (lambda: (started.set(), go_on.wait(30)), None))
    thread = in_thread(lambda: model(X))
    assert started.wait(30)
    model.w.mul_(5)
    assert torch.equal(model(Y[:2]), Y[:2] * 5)  # this thread has them read
    go_on.set()
    thread.join(30)
    monkeypatch.undo()
    model.w.div_(5)
    assert torch.equal(model(X), X)


@pytest.mark.parametrize("ends_early", [False, True])
def test_weights_swapped_out_and_back_by_another_thread_are_not_stored(monkeypatch, ends_early):
    model = cached(Weighted())
    model(Y[:2])
    events = [threading.Event() for _ in range(5)]
    swap, swapped, restore, restored, leave = events

    def swapper():
        swap.wait(30)
        model.w.mul_(5)
        swapped.set()
        restore.wait(30)
        model.w.div_(5)
        restored.set()
        leave.wait(30)

    thread = in_thread(swapper)

    def at_end():
        restore.set()
        restored.wait(30)
        if ends_early:
            leave.set()
            thread.join(30)

    monkeypatch.setitem(ACTIONS, 4, (lambda: (swap.set(), swapped.wait(30)), at_end))
    model(X)
    monkeypatch.undo()
    leave.set()
    thread.join(30)
    assert torch.equal(model(X), X)


def test_a_dict_that_another_thread_changes_while_it_is_walked():
    model = cached(Scaled())
    model.memo = {i: str(i) for i in range(2000)}
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for i in range(50):
                model.memo["k", i] = 1
            for i in range(50):
                del model.memo["k", i]

    thread = in_thread(change)
    try:
        for scale in range(10):
            model.scale = scale
            assert torch.equal(model(X), X * scale)
    finally:
        stop.set()
        thread.join(30)


def test_a_finalizer_that_closes_a_cache_while_the_tier_is_locked(monkeypatch):
    # Classes share a tier: what the garbage collector closes is in the tier that is being written to.
    kind = torchcache(type("Doubled", (nn.Module,), {"forward": lambda self, x: x * 2}))
    model, other = kind(), kind()
    model(X), other(X)
    closed = []

    class Owner:
        def __init__(self):
            self.itself = self  # only the garbage collector ends it

        def __del__(self):
            other.cache_instance.close()
            closed.append(True)

    append = memory.Arena.append

    def append_with_collection(self, *args):
        Owner()
        gc.collect()
        append(self, *args)

    monkeypatch.setattr(memory.Arena, "append", append_with_collection)
    thread = in_thread(lambda: model(Y))
    thread.join(30)
    assert not thread.is_alive() and closed
    assert torch.equal(model(Y), Y * 2) and torch.equal(other(X), X * 2)


# Faults in the middle


def fail_at_write(monkeypatch, number, error):
    write, count = arena.Column.write, iter(range(1000))

    def failing(self, *args):
        if next(count) % 2 == number:
            raise error
        write(self, *args)

    monkeypatch.setattr(arena.Column, "write", failing)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("no memory on the device"), KeyboardInterrupt()])
def test_an_error_while_rows_are_written_leaves_no_key_without_its_row(monkeypatch, log, number, error):
    model = cached(Scaled())
    model(X[:1])
    fail_at_write(monkeypatch, number, error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            model(X)
    else:
        assert torch.equal(model(X), X * 2) and torch.equal(model(Y), Y * 2)
        assert [record.levelname for record in log].count("WARNING") == 1
    monkeypatch.undo()
    for batch in (X, Y, X.flip(0), Y):
        assert torch.equal(model(batch), batch * 2)
    assert model.cache_instance.stats().memory_rows == 8
    assert model.cache_instance.stats().hits >= 8


def test_an_interrupt_while_weights_are_read_leaves_no_stale_namespace(monkeypatch):
    def interrupted(tensor, content):
        raise KeyboardInterrupt

    model = cached(Weighted())
    model(X)
    model.w.mul_(5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("torchcache2.identity.tensors.tensor_digest", interrupted)
        model(X)
    assert torch.equal(model(X), X * 5)


# Gradients, tracing and devices


def test_a_shared_argument_keeps_its_gradient_on_hits():
    @torchcache(shared_args=("w",))
    def product(x, w):
        return x * w

    w = torch.ones(3, requires_grad=True)
    product(X, w), product(X, w)
    with torch.enable_grad():
        product(X, w).sum().backward()
    assert torch.equal(w.grad, X.sum(0))


def test_a_forward_that_turns_grad_mode_on_keeps_its_gradient():
    w = torch.ones(3, requires_grad=True)

    @torchcache
    def product(x):
        with torch.enable_grad():
            return x * w

    for _ in range(3):
        assert product(X).requires_grad


# What forwards assign, draw and change


class Lazily(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = 2.0
        return x * self.scale


class Late(Scaled):
    def forward(self, x):
        y = self.scaled(x)
        self.scale = self.scale * 1.0
        return y

    def scaled(self, x):
        return x * self.scale


@pytest.mark.parametrize("kind", [Lazily, Late])
def test_attributes_that_forward_assigns_and_reads_are_part_of_the_key(kind):
    assert_notices(kind(), lambda model: setattr(model, "scale", 5.0))


# Objects in the key


class DotGet(dict):
    __getattr__ = dict.get


class DotItem(dict):
    __getattr__ = dict.__getitem__


class Grumpy(dict):
    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


@pytest.mark.parametrize("kind", [DotGet, DotItem, Grumpy])
@pytest.mark.parametrize("on_class", [False, True])
def test_dicts_with_attribute_access(kind, on_class):
    class Model(nn.Module):
        config = kind(scale=2)

        def forward(self, x):
            return x * self.config["scale"]

    model = Model()
    if not on_class:
        model.config = kind(scale=3)
    assert_notices(model, lambda m: setattr(Model if on_class else m, "config", kind(scale=5)))


def test_a_named_namespace_still_tells_stored_dtypes_apart():
    @torchcache(persistent_module_hash="adversarial")
    class Model(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.torchcache_cache_dtype = dtype

        def forward(self, x):
            return x * 1.0001

    rounded, exact = Model(torch.bfloat16), Model(None)
    for _ in range(2):
        assert torch.equal(rounded(X), (X * 1.0001).bfloat16().float())
        assert torch.equal(exact(X), X * 1.0001)


# Unusual modules and tensors


def nested(**options):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], **options)


@pytest.mark.filterwarnings(NESTED)
def test_constructor_arguments_of_every_layout():
    @torchcache
    class Model(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, x):
            return x * 2

    for table in (torch.eye(3).to_sparse(), torch.ones(3, device="meta"), nested()):
        model = Model(table)
        assert torch.equal(model(X), X * 2) and torch.equal(model(X), X * 2)
    with torch.device("meta"):
        model = Model(torch.ones(3))
    assert torch.equal(model(X), X * 2)


def test_system_random_is_no_state():
    class Model(Scaled):
        def forward(self, x):
            return x * self.scale if self.source else x

    model = Model()
    model.source = random.SystemRandom()
    cached(model)
    model(X)
    assert torch.equal(model(X), X * 2) and hits_and_bypasses(model) == (4, {})


@pytest.mark.slow
def test_a_large_vocabulary_is_read_whole(log):
    model, count = Scaled(), 200_000 if SOAK else 70_000
    model.vocabulary = {f"token {i}": i for i in range(count)}
    cached(model)
    model(X), model(X)
    assert hits_and_bypasses(model) == (4, {})
    assert not [record for record in log if record.levelname == "WARNING"]
    before = model.cache_instance.module_hash
    model.vocabulary = {**model.vocabulary, f"token {count - 1}": 0}
    assert model.cache_instance.module_hash != before
