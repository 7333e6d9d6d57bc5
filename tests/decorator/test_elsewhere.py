"""A module that is moved away once its items are cached: hits need no weights, and a miss says what to do."""

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.outputs import assert_same, frozen, hits, misses
from torchcache2 import DeviceError, TorchcacheError, torchcache

X = torch.rand(6, 8)


class Encoder(nn.Module):
    def __init__(self, *, is_tied):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if is_tied:
            self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.rand(8))
        self.mean = torch.rand(8)  # neither a parameter nor a buffer: it does not move

    def forward(self, x):
        return self.norm(self.first(x) + self.shift).relu() + self.second(x) - self.mean


@contextlib.contextmanager
def conversion(name):
    if name is None:
        yield
        return
    switch = getattr(torch.__future__, f"set_{name}")
    switch(True)
    try:
        yield
    finally:
        switch(False)


# As `.cpu()` does with weights on an accelerator: each tensor gets other storage with the same bytes.
@pytest.mark.parametrize(
    "how", [None, "overwrite_module_params_on_conversion", "swap_module_params_on_conversion"]
)
@pytest.mark.parametrize(
    "move",
    [lambda module: module._apply(torch.clone), lambda module: module.double().float()],
    ids=["other storage", "there and back"],
)
def test_weights_of_the_same_bytes_in_other_storage_are_the_same_namespace(move, how):
    # With these switches a parameter becomes a new one, which unties it: that is another module.
    encoder = torchcache(frozen(Encoder(is_tied=how is None)))
    expected = encoder(X)
    namespace = encoder.cache_instance.module_hash
    pointers = [tensor.data_ptr() for tensor in encoder.state_dict().values()]
    floats = [tensor for tensor in encoder.state_dict().values() if tensor.is_floating_point()]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in floats]
    del floats
    with conversion(how):
        move(encoder)
    assert_same(encoder(X), expected)
    assert (hits(encoder), misses(encoder)) == (6, 6)
    assert encoder.cache_instance.module_hash == namespace
    assert all(storage.expired() for storage in storages)  # the cache keeps no memory of weights
    assert pointers != [tensor.data_ptr() for tensor in encoder.state_dict().values()]


def test_hits_need_no_weights_and_misses_say_where_they_are():
    # Weights on `meta` have no bytes, so a name stands for them. Torch refuses as it does with two devices.
    encoder = torchcache(persistent_module_hash="an encoder")(
        frozen(nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
    )
    weights = encoder.state_dict()
    expected = encoder(X)
    encoder.to("meta")
    assert_same(encoder(X), expected)
    before = encoder.cache_instance.stats()
    new = torch.rand(2, 8)
    for _ in range(2):
        with pytest.raises(DeviceError) as raised:
            encoder(torch.cat([X, new, new]))
        assert re.fullmatch(
            f"Sequential: 2 of the 10 items of this call have to be computed, but they are on {X.device}, "
            rf"and all weights on meta\. Move the module to {X.device}\. Only a call whose items are all "
            r"found needs no weights\. \(The forward: .*device.*\)",
            str(raised.value),
        )
        assert isinstance(raised.value, RuntimeError) and isinstance(raised.value, TorchcacheError)
        assert type(raised.value.__cause__) is RuntimeError
    with pytest.raises(DeviceError, match="2 of the 2 items"):
        encoder(new)
    assert encoder.cache_instance.stats() == before
    encoder.to_empty(device=X.device).load_state_dict(weights)
    assert_same(encoder(torch.cat([X, new, new]))[:6], expected)
    assert misses(encoder) == 8


def test_misses_that_are_compiled_say_so_too():
    encoder = torchcache(persistent_module_hash="compiled", probe=False)(
        frozen(nn.Sequential(nn.Linear(8, 4)))
    )
    compiled = torch.compile(encoder, backend="eager", dynamic=False)
    expected = compiled(X)
    encoder.to("meta")
    assert_same(compiled(X), expected)
    with pytest.raises(DeviceError, match="6 of the 6 items"):
        compiled(X + 1)


class Faulty(nn.Module):
    """Its weights are elsewhere on purpose; it needs none of them, and raises what it is told to."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(8, 8, device="meta")

    def forward(self, x, fault=None):
        if fault is not None:
            raise {kind.__name__: kind for kind in FAULTS}[fault]("mine")
        return x * 2


class OwnError(RuntimeError):
    pass


FAULTS = [KeyError, OwnError, torch.cuda.OutOfMemoryError]


def test_a_module_whose_weights_are_elsewhere_works_as_before():
    module = torchcache(frozen(Faulty()))
    assert_same(module(X), X * 2)
    assert_same(module(X), X * 2)
    assert (hits(module), misses(module)) == (6, 6)


@pytest.mark.parametrize("kind", FAULTS)
def test_other_faults_of_such_a_module_stay_what_they_are(kind):
    module = torchcache(frozen(Faulty()))
    with pytest.raises(kind, match="mine") as raised:
        module(X, fault=kind.__name__)
    assert type(raised.value) is kind


def test_an_error_of_torch_where_all_is_on_one_device_stays_what_it_is():
    module = torchcache(frozen(nn.Linear(8, 4)))
    with pytest.raises(RuntimeError, match="shapes") as raised:
        module(torch.rand(6, 7))
    assert type(raised.value) is RuntimeError


def test_weights_that_a_function_uses_are_its_own(monkeypatch):
    # There is one device here, so where the batch is must be pretended, and torch refuses for the dtype.
    encoder = frozen(nn.Linear(8, 4))
    embed = torchcache(lambda x: encoder(x))
    expected, wrong = embed(X), torch.rand(6, 8, dtype=torch.float64)
    apart = "xpu:1", str(X.device)
    monkeypatch.setattr("torchcache2.decorator.lazymodule.devices_apart", lambda *args: apart)
    assert_same(embed(X), expected)
    with pytest.raises(
        DeviceError,
        match=rf"they are on xpu:1, and all weights on {X.device}\. Move the module to xpu:1, "
        f"or the batch to {X.device}",
    ):
        embed(wrong)
    with pytest.raises(RuntimeError, match="shapes") as raised:
        embed(torch.rand(6, 7))  # it would be refused on any device
    assert type(raised.value) is RuntimeError
    apart = None
    with pytest.raises(RuntimeError, match="dtype") as raised:
        embed(wrong)
    assert type(raised.value) is RuntimeError
