"""Which weights are read when: those that may have changed, and no others."""

import contextlib
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.interpreter import OnHost
from tests.helpers.outputs import bypasses, hits, warnings_in
from torchcache2 import torchcache
from torchcache2.identity import namespace, tensors
from torchcache2.identity.encoding import tensor_digest
from torchcache2.identity.tensors import TensorWatch

X = torch.arange(1.0, 13.0).view(4, 3)
MANY = 50_000  # rows of 3 float32: more than 500 kB


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the tensors that were read."""
    sizes, read = [], tensors.tensor_digest

    def spy(tensor, content):
        sizes.append(tensor.numel())
        return read(tensor, content)

    monkeypatch.setattr(tensors, "tensor_digest", spy)
    return sizes


# Weights without version counters


class Weighted(nn.Module):
    """Its output tells of every element of its weights."""

    def __init__(self, count=5000):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, 3), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3))
        self.listed = [torch.ones(7)]
        self.every = torch.ones(1000, 3)[::10].t()
        self.same = torch.ones(1).expand(1000)

    def forward(self, x):
        x = x * self.weight.sum(0) + self.shift + self.listed[0].sum()
        return x * self.every.sum(1) + self.same[-1]


def made_under_inference_mode(count=5000):
    with torch.inference_mode():
        return Weighted(count)


INFERENCE_EDITS = {
    "last weight": lambda m: m.weight[-1].mul_(5),
    "buffer": lambda m: m.shift.add_(1),
    "in a list": lambda m: m.listed[0][6].fill_(9),
    "load_state_dict": lambda m: m.load_state_dict(
        {"weight": torch.arange(15000.0).view(5000, 3)}, strict=False
    ),
    "through data": lambda m: m.weight.data[2500].mul_(2),
    "numpy": lambda m: m.shift.numpy().__setitem__(2, 5),
    "the end of a view": lambda m: m.every[2].__setitem__(-1, 6),
    "what is expanded": lambda m: m.same[:1].fill_(4),
}


@pytest.mark.parametrize("name", INFERENCE_EDITS)
def test_any_edit_of_small_weights_made_under_inference_mode_is_noticed(name):
    plain, module = made_under_inference_mode(), torchcache(made_under_inference_mode())
    before = module(X)
    assert torch.equal(module(X), before) and hits(module) == 4
    with torch.inference_mode():
        INFERENCE_EDITS[name](module)
        INFERENCE_EDITS[name](plain)
    assert torch.equal(module(X), plain(X)) and not torch.equal(plain(X), before)
    assert bypasses(module) == {}


def test_large_weights_made_under_inference_mode_are_passed_through(log):
    plain, module = made_under_inference_mode(MANY), torchcache(made_under_inference_mode(MANY))
    for _ in range(2):
        assert torch.equal(module(X), plain(X))
    with torch.inference_mode():
        module.weight[-1].mul_(2), plain.weight[-1].mul_(2)
        assert torch.equal(module(X), plain(X))
    assert bypasses(module) == {"inference": 12}
    (message,) = warnings_in(log)
    assert "(inference)" in message and "torch.no_grad()" in message
    with torch.no_grad():
        again = Weighted(MANY)
        again.load_state_dict(plain.state_dict())
    named = torchcache(persistent_module_hash="mine")(made_under_inference_mode(MANY))  # nothing is checked
    for cached in (torchcache(again), named):
        assert torch.equal(cached(X), cached(X))
        assert hits(cached) == 4 and bypasses(cached) == {}
    with torch.inference_mode():  # many small ones are as large as one
        module = torchcache(nn.Sequential(*[nn.Linear(100, 100) for _ in range(30)]).requires_grad_(False))
    module(torch.rand(4, 100))
    assert bypasses(module) == {"inference": 4}


# Only what has changed is read


class Deep(nn.Module):
    """64 MB in one weight, and a few small ones; reads what it has counted."""

    def __init__(self, size=4096):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.large = nn.Parameter(torch.zeros(size, size))
        self.n, self.flag, self.factor = 0, False, 1
        self.requires_grad_(False).eval()

    def forward(self, x):
        return self.second(self.first(x)) * self.factor + self.large[0, :3]


class CountingDeep(Deep):
    def forward(self, x):
        self.n += 1
        self.flag = not self.flag
        return super().forward(x) * self.n


LARGE = 4096 * 4096


def test_a_forward_that_counts_reads_its_weights_once(reads):
    module = torchcache(CountingDeep())
    expected = Deep.forward(module, X)
    for n in range(1, 6):
        assert torch.equal(module(X), expected * n)
    assert bypasses(module) == {"state": 20}
    assert reads.count(LARGE) == 1 and len(reads) == 5


def toggle(module):
    module.train()
    module(X)
    module.eval()


def toggle_grad(module):
    module.requires_grad_(True)
    with torch.no_grad():
        module(X)
    module.requires_grad_(False)


HARMLESS = {
    "train and eval": toggle,
    "requires_grad": toggle_grad,
    "an attribute": lambda m: setattr(m, "factor", m.factor + 1),
    "a hook": lambda m: m.second.register_forward_hook(lambda module, args, output: output + 1),
    "a submodule less": lambda m: setattr(m, "second", nn.Identity()),
    "a submodule in another place": lambda m: setattr(m, "second", m.first),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_weight_has_none_read(reads, name):
    module = torchcache(Deep())
    module(X)
    reads.clear()
    for _ in range(2):
        HARMLESS[name](module)
        expected = Deep.forward(module, X)
        for hook in module.second._forward_hooks.values():
            assert hook
        assert torch.equal(module(X), expected)
    assert reads == []


CHANGES = {
    "in place": (lambda m: m.second.bias.mul_(2), [3]),
    "two": (lambda m: (m.first.weight.add_(1), m.second.bias.add_(1)), [9, 3]),
    "load_state_dict": (
        lambda m: m.second.load_state_dict({k: v + 1 for k, v in m.second.state_dict().items()}),
        [9, 3],
    ),
    "a new weight": (lambda m: setattr(m.second, "bias", nn.Parameter(torch.ones(3), False)), [3]),
    "a new submodule": (lambda m: setattr(m, "second", nn.Linear(3, 3).requires_grad_(False)), [9, 3]),
    "other storage": (lambda m: setattr(m.first.bias, "data", torch.ones(3)), [3]),
    "resized in place": (lambda m: m.first.weight.t_(), [9]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_only_the_weight_that_was_edited_is_read(reads, name):
    module, (edit, sizes) = torchcache(Deep()), CHANGES[name]
    module(X)
    reads.clear()
    with torch.no_grad():
        edit(module)
    assert torch.equal(module(X), Deep.forward(module, X))
    assert reads == sizes


# Edits that leave no trace are found when the bytes are read again


class Tables(nn.Module):
    """Tables of all kinds; their output tells of every element."""

    def __init__(self):
        super().__init__()
        self.tables = {
            "tiny": torch.ones(8, 8),
            "short": torch.ones(3000),
            "long": torch.ones(50, 1000),
            "half": torch.ones(40_001).bfloat16(),
            "last": torch.ones(8, 4, 30, 30).contiguous(memory_format=torch.channels_last),
            "turned": torch.ones(200, 300).t(),
            "parted": torch.ones(300, 300)[::2, ::2],
            "conjugate": torch.ones(9000, dtype=torch.complex64).conj(),
        }

    def forward(self, x):
        return x + sum(table.sum().real.float() for table in self.tables.values())


ROUND = 60  # more calls than it takes to read all again


def calls_until(module, x, expected, most):
    """How many calls give something else before one is as expected."""
    return next(n for n in range(most) if torch.equal(module(x), expected))


@given(
    edits=st.lists(st.tuples(st.sampled_from(sorted(Tables().tables)), st.integers(0, 10**6)), min_size=1),
    calls=st.integers(1, 25),
)
@settings(max_examples=12, deadline=None)
def test_an_edit_of_any_element_is_found_when_all_is_read_again(edits, calls):
    module = Tables()
    cached = torchcache(module)
    for _ in range(calls):
        cached(X)
    for name, place in edits:
        table = module.tables[name].data
        table[np.unravel_index(place % table.numel(), table.shape)] += 512
    assert calls_until(cached, X, Tables.forward(module, X), ROUND) < ROUND
    assert torch.equal(cached(X + 1), Tables.forward(module, X + 1))


@pytest.mark.parametrize("name", ["tiny", "short", "long"])
def test_tensors_of_256_bytes_are_compared_whole_at_every_call(name):
    module = Tables()
    cached = torchcache(module)
    for _ in range(2):  # the second call reads the short one again
        cached(X)
    module.tables[name].data.view(-1)[-1] = 7
    assert torch.equal(cached(X), Tables.forward(module, X)) == (name == "tiny")


MODES = {
    "": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fast", [True, False], ids=["", "without torch's own check"])
def test_a_form_is_noticed_in_every_mode(mode, fast, monkeypatch):
    if fast:
        assert tensors.form_check([torch.ones(3)]) is not None  # else this torch has it by another name
    else:
        monkeypatch.setattr(tensors, "form_check", lambda tensors: None)
    weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    watch = TensorWatch({"weight": weight, "other": torch.zeros(3)})
    watch.refresh()
    whole = weight.data
    with MODES[mode]():
        assert watch.same_forms() and watch.with_grad is None and not watch.moved()
        weight.requires_grad_()
        assert watch.same_forms() and watch.with_grad == "weight" and watch.same()
        weight.requires_grad_(False)
        for view in (whole.t(), whole.view(2, 8), whole.view(torch.int32), whole[:2]):
            weight.data = view
            assert watch.moved() and watch.moved_names() == ["weight"]
            weight.data = whole
            watch.refresh()
            assert not watch.moved() and watch.moved_names() == []


def test_the_digest_of_a_tensor_does_not_depend_on_its_strides_unless_its_channels_are_last():
    tensors = Tables().tables
    watch = TensorWatch(tensors)
    watch.refresh()
    for name, tensor in tensors.items():
        copy = tensor.resolve_conj().contiguous()
        assert watch.digests[name] == tensor_digest(tensor), name
        assert (tensor_digest(copy) == tensor_digest(tensor)) is (name != "last")
    turned = torch.complex(torch.ones(300), torch.ones(300))
    watch = TensorWatch({"as it is": turned, "conjugate": turned.conj()})
    watch.refresh()
    assert watch.digests["as it is"] != watch.digests["conjugate"]


class Words(nn.Module):
    def __init__(self, others=4):
        super().__init__()
        self.embedding = nn.Embedding(2000, 64)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(others)])
        self.rate = 1.0
        self.requires_grad_(False).eval()

    def forward(self, ids):
        return self.layers(self.embedding(ids)) * self.rate


@pytest.fixture(params=["host", "accelerator"])
def place_of_weights(request, monkeypatch):
    if request.param == "accelerator":
        monkeypatch.setattr(namespace, "TensorWatch", functools.partial(TensorWatch, runtime=OnHost()))


@pytest.mark.usefixtures("place_of_weights")
@pytest.mark.parametrize(
    "between", [lambda m: None, lambda m: setattr(m, "rate", float("1"))], ids=["alone", "walked again"]
)
def test_rows_of_a_new_token_are_not_kept_under_the_old_weights(between, log):
    """As for textual inversion, which writes one row of the table."""
    module = Words()
    cached, ids = torchcache(module, probe=False), torch.arange(1000, 1032).view(8, 4)
    before = cached(ids)
    old = module.embedding.weight[1025].clone()
    module.embedding.weight.data[1025] = 3.0
    after = Words.forward(module, ids)
    fresh = ids + 24  # the new token is among these, which are computed with it
    for _ in range(ROUND):
        between(module)
        cached(fresh)
        cached(ids)
    assert torch.equal(cached(ids), after) and torch.equal(cached(fresh), Words.forward(module, fresh))
    (message,) = warnings_in(log)
    assert "refresh()" in message and ".data" in message
    module.embedding.weight.data[1025] = old
    module.cache_instance.refresh()
    assert torch.equal(cached(fresh), Words.forward(module, fresh)), "a wrong row was kept"
    assert torch.equal(cached(ids), before)


def test_rows_of_all_that_had_the_old_weights_are_dropped():
    """Also those that were kept while another attribute was set."""
    module = Words()
    cached, ids = torchcache(module, probe=False), torch.arange(32).view(8, 4)
    cached(ids)
    old = module.embedding.weight[30].clone()
    module.embedding.weight.data[30] = 3.0
    module.rate = 2.0
    cached(ids + 1)
    module.rate = 1.0
    for _ in range(ROUND):
        cached(ids)
    module.embedding.weight.data[30] = old
    module.cache_instance.refresh()
    module.rate = 2.0
    assert torch.equal(cached(ids + 1), Words.forward(module, ids + 1))


@pytest.mark.usefixtures("place_of_weights")
def test_weights_that_are_swapped_through_data_keep_their_rows(log):
    """As for running averages: the call after the swap notices it, so no row is wrong."""
    module = Words()
    cached, ids = torchcache(module, probe=False), torch.arange(32).view(8, 4)
    for _ in range(4):
        expected = Words.forward(module, ids)
        for _ in range(3):
            assert torch.equal(cached(ids), expected)
        for weight in module.parameters():
            weight.data.neg_()
    stats = cached.cache_instance.stats()
    assert (stats.misses, stats.hits) == (16, 80) and warnings_in(log) == []


# Everything is read where an edit may have left no trace


def with_gradients(module):
    module.requires_grad_(True)
    module(X)
    assert bypasses(module) == {"grad": 4}
    module.requires_grad_(False)


def step(module, between):
    module.requires_grad_(True)
    with torch.no_grad():
        module.train()
        module(X)  # walked again, and read
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
    module.large.grad = torch.zeros_like(module.large)
    module.large.grad[-1, -1] = 1.0
    between(module)
    optimizer.step()


def step_while_not_looked_at(module):
    module.requires_grad_(False)
    module(X)
    module.requires_grad_(True)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    module.large.grad = torch.zeros_like(module.large)
    optimizer.step()
    module.requires_grad_(False)


def edit_and_refresh(module):
    module.large.data[40, 40] = 3.0
    module.cache_instance.refresh()


UNTRACED = {
    "gradients": with_gradients,
    "a step": functools.partial(step, between=lambda m: None),
    "a step, and modes": functools.partial(step, between=lambda m: m.train().eval()),
    "a step, and an attribute": functools.partial(step, between=lambda m: setattr(m, "factor", 3)),
    "a step between looks at frozen weights": step_while_not_looked_at,
    "refresh": edit_and_refresh,
}


@pytest.mark.parametrize("name", UNTRACED)
def test_everything_is_read_where_an_edit_may_have_left_no_trace(name, reads):
    module = torchcache(Deep(64))
    module(X)
    UNTRACED[name](module)
    reads.clear()
    with torch.no_grad():
        module(X)
    assert sorted(reads) == [3, 3, 9, 9, 64 * 64]


class Embedding(nn.Module):
    """The first 4 KB of the table are zeros, whatever it was multiplied by."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 2048, padding_idx=0)
        self.scale = nn.Linear(3, 3)
        self.factor = 1
        self.requires_grad_(False).eval()

    def forward(self, x):
        return self.scale(x) * self.table.weight.sum() * self.factor


def decay(module, only=""):
    for name, weight in module.named_parameters():
        if only in name:
            weight.data.mul_(0.9)


AVERAGES = {
    "alone": lambda m: decay(m),
    "modes": lambda m: (decay(m), m.train().eval()),
    "attribute": lambda m: (decay(m), setattr(m, "factor", 2)),
    "only the middle tells of it": lambda m: (decay(m, "table"), setattr(m, "factor", 2)),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_a_running_average_through_data_is_noticed_as_a_whole(name):
    """One weight, or another change, tells of it; the table, which does not, is read again too."""
    plain, module = Embedding(), torchcache(Embedding())
    plain.load_state_dict(module.state_dict())
    module(X)
    for one in (module, plain):
        AVERAGES[name](one)
    assert torch.equal(module(X), plain(X))


def test_a_weight_at_the_address_of_one_that_is_gone_is_read():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3).requires_grad_(False)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.layer(x))

    module = torchcache(Small().eval())
    module(X)
    module.train()
    for step in range(20):
        module(X)  # not cached, so that nothing is read
        module.layer.weight.data = torch.full((3, 3), float(step))
        module.layer.bias.data = torch.full((3,), float(step))
    module.eval()
    assert torch.equal(module(X), module.layer(X))


def test_storage_that_was_replaced_is_let_go():
    module = torchcache(Deep(512))
    module(X)
    storage = weakref.ref(module.large.untyped_storage())
    module.large.data = torch.ones(512, 512)
    module(X)
    gc.collect()
    assert storage() is None
    tensor = weakref.ref(module.large)
    del module
    gc.collect()
    assert tensor() is None
