"""Keys and digests of weights from an accelerator, for which Triton's interpreter stands in."""

import functools
import importlib
import logging
import sys

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.interpreter import Interpreted, OnHost, Passed
from torchcache2 import torchcache
from torchcache2.identity import encoding, items, namespace, tensors, xxh3
from torchcache2.identity.encoding import tensor_digest
from torchcache2.identity.items import item_keys
from torchcache2.identity.tensors import TensorWatch

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(np.__version__ < "2", reason="Triton's interpreter does not work with it"),
]
NAMESPACE = bytes(range(16))


def keys_of(*tensors, **options):
    leaves = [(f"x{i}", tensor) for i, tensor in enumerate(tensors)]
    return item_keys(NAMESPACE, b"", leaves, **options).data


def hashed_by(one, monkeypatch):
    for module in (items, encoding, tensors):
        monkeypatch.setattr(module, "DIGESTS", one)
    one.started.clear()
    return one


@pytest.fixture(scope="module")
def checked():
    """It compares its kernels with `xxhash` once for all tests, which takes seconds in the interpreter."""
    return Counted()


@pytest.fixture
def digests(checked, monkeypatch):
    """All that is hashed passes for tensors of an accelerator; says what was hashed there."""
    return hashed_by(checked, monkeypatch)


@pytest.fixture
def unchecked(monkeypatch):
    """The same, but it has not compared its kernels yet."""
    return hashed_by(Counted(), monkeypatch)


class Counted(Interpreted):
    """Notes how many rows were hashed by each start of the kernels."""

    def __init__(self):
        super().__init__()
        self.started = []

    def _digests(self, tensor, count):
        found = super()._digests(tensor, count)
        if found is not None:
            self.started.append(count)
        return found


BATCHES = {
    "float32": lambda: torch.randn(5, 3, 20, 20),
    "odd bytes": lambda: torch.randint(0, 256, (5, 17, 19), dtype=torch.uint8),
    "bfloat16": lambda: torch.randn(4, 333).bfloat16(),
    "float8": lambda: torch.randn(4, 333).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, 99, dtype=torch.complex64).conj(),
    "bool": lambda: torch.rand(3, 1001) > 0.5,
    "int64": lambda: torch.randint(-9, 9, (6, 128)),
    "channels last": lambda: torch.randn(3, 4, 9, 9).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 40, 20).transpose(1, 2),
    "every other": lambda: torch.randn(10, 200)[::2, ::2],
    "expanded": lambda: torch.randn(1, 200).expand(7, 200),
    "expanded items": lambda: torch.randn(7, 1).expand(7, 200),
    "an offset": lambda: torch.randint(0, 256, (1001,), dtype=torch.uint8)[1:].view(4, 250),
    "gradient": lambda: torch.randn(3, 100, requires_grad=True),
    "one item": lambda: torch.randn(1, 5000),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_keys_are_those_of_the_host(digests, batch, monkeypatch):
    x = batch()
    there = keys_of(x, torch.arange(len(x)))
    assert digests.started == [len(x)]
    monkeypatch.undo()
    assert (there == keys_of(x, torch.arange(len(x)))).all()


def test_subsampled_keys_are_those_of_the_host(digests, monkeypatch):
    x = torch.randn(4, 9000)
    there = keys_of(x, subsample_count=1000)
    assert digests.started == [4]
    monkeypatch.undo()
    assert (there == keys_of(x, subsample_count=1000)).all()


@pytest.mark.parametrize("shape", [(0, 900), (4, 0), (4,), (4, 60)])
def test_short_items_and_empty_batches_are_hashed_on_the_host(digests, shape):
    x = torch.zeros(shape)
    assert digests.of_items(x) is None
    assert keys_of(x).shape == (shape[0], 16) and digests.started == []


def test_weights_have_the_digests_of_the_host(digests):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(30, 17), nn.LayerNorm(400))
    tied = nn.Parameter(net[2].weight.data.t())  # a view whose rows are not contiguous
    tensors = {**net.state_dict(keep_vars=True), "tied": tied, "half": torch.randn(999).half()}
    watch = TensorWatch(tensors)
    watch.refresh()
    assert sum(digests.started) == sum(t.nbytes > 240 for t in tensors.values())
    for name, tensor in tensors.items():
        content = xxhash.xxh3_128_digest(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
        assert watch.digests[name] == tensor_digest(tensor, content), name


def test_kernels_that_differ_from_xxhash_are_not_used(unchecked, monkeypatch, log):
    x = torch.randn(3, 100)
    right = xxhash.xxh3_128_digest(x[0].numpy().tobytes())
    start = xxh3.start
    monkeypatch.setattr(xxh3, "start", lambda *args: start(*args) ^ 1)
    assert unchecked.of_items(x) is None and unchecked.of_tensors([x]) == {}
    keys = keys_of(x)
    monkeypatch.setattr(xxh3, "start", start)
    assert unchecked.of_items(x) is None and (keys_of(x) == keys).all()
    (record,) = log
    assert record.levelno == logging.WARNING and "not those of xxhash" in record.getMessage()
    assert Interpreted().of_items(x)[0].numpy().tobytes() == right


def test_without_triton_keys_are_computed_on_the_host(unchecked, monkeypatch, log):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "torchcache2.identity.kernels", raising=False)
    package = importlib.import_module("torchcache2.identity")
    monkeypatch.delattr(package, "kernels", raising=False)
    x = torch.randn(3, 100)
    keys = keys_of(x)
    assert (keys_of(x) == keys).all()
    (record,) = log
    assert record.levelno == logging.INFO
    assert "to the host" in record.getMessage() and "pip install 'torchcache2[gpu]'" in record.getMessage()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("no driver")])
def test_what_goes_wrong_on_the_device_costs_no_call(unchecked, monkeypatch, log, error):
    def failing(*args):
        raise error

    x = torch.randn(3, 100)
    start = xxh3.start
    monkeypatch.setattr(xxh3, "start", failing)
    keys = keys_of(x)
    assert unchecked.of_tensors([x]) == {} and tensor_digest(x)
    monkeypatch.setattr(xxh3, "start", start)
    assert (keys_of(x) == keys).all()
    is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
    assert (unchecked.of_items(x) is not None) == is_memory  # memory may be there again at the next call
    assert [record.levelno for record in log] == ([] if is_memory else [logging.INFO])


def test_weights_for_which_there_was_no_memory_are_read_at_the_next_call(monkeypatch):
    def failing(*args):
        raise torch.cuda.OutOfMemoryError("no memory")

    net, x = nn.Linear(8, 4).eval().requires_grad_(False), torch.randn(3, 8)
    twin, net = torchcache(nn.Sequential(net)), torchcache(nn.Sequential(net))
    expected = twin(x)
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "tensor_digest", failing)
        assert torch.equal(net(x), expected)
    assert torch.equal(net(x), expected)
    assert net.cache_instance.module_hash == twin.cache_instance.module_hash


class Late(OnHost):
    """Copies that arrive when `arrived` is set; what was started, in `started`."""

    arrived, started = False, 0

    def start_copy(self, target, source):
        self.started += 1
        target.copy_(source)

    def event(self, device):
        event = Passed()
        event.query = lambda: self.arrived
        return event


def test_no_call_waits_for_the_bytes_that_would_show_an_edit(digests):
    runtime = Late()
    weight = torch.zeros(1000)
    watch = TensorWatch({"weight": weight}, runtime=runtime)
    watch.refresh()
    assert watch.same() and watch.same() and runtime.started == 1
    weight.data[0] = 1.0  # past the version counter
    runtime.arrived = True
    watch._heads = []  # on an accelerator, these are not compared
    watch._head_bytes = b""
    assert watch.same() and runtime.started == 2  # the first copy was made before
    assert not watch.same()
    watch.refresh()
    assert watch.same()


@pytest.mark.parametrize("calls", [1, 2])
def test_an_edit_is_late_if_there_was_a_call_between_it_and_the_bytes_that_show_it(digests, calls):
    runtime = Late()
    weight = torch.zeros(1000)
    watch = TensorWatch({"weight": weight}, runtime=runtime)
    watch.refresh()
    assert watch.same()  # sends bytes
    weight.data[0] = 1.0
    for _ in range(calls - 1):
        assert watch.same()  # a call whose bytes are not there yet
    runtime.arrived = True
    assert watch.same() and not watch.holds()  # the first bytes, and those that it sends itself
    assert not watch.same()
    watch.refresh()
    assert watch.is_late == (calls > 1)
    assert watch.same() and watch.holds()
    weight.data[1] = 1.0
    assert watch.same() and not watch.holds()
    watch.refresh()
    assert not watch.is_late


def test_a_doubt_outlives_another_walk(digests):
    weight = torch.zeros(3000)
    watch = TensorWatch({"weight": weight}, runtime=OnHost())
    watch.refresh()
    weight.data[2000] = 1.0  # behind the samples
    while watch.holds():
        watch.same()
    again = TensorWatch({"weight": weight, "other": torch.zeros(3)}, watch, OnHost())
    again.refresh()
    assert again.digests["weight"] == tensor_digest(weight) != watch.digests["weight"]


@pytest.mark.usefixtures("digests")
def test_bytes_that_come_with_the_keys_show_an_edit_at_the_same_call(monkeypatch):
    monkeypatch.setattr(namespace, "TensorWatch", functools.partial(TensorWatch, runtime=OnHost()))
    net = torchcache(nn.Linear(100, 4, bias=False).eval().requires_grad_(False))
    x, rounds = torch.randn(3, 100), 4
    for _ in range(rounds):  # as weights are swapped for their averages, and back
        expected = nn.functional.linear(x, net.weight)
        assert torch.equal(net(x), expected) and torch.equal(net(x), expected)
        net.weight.data[:, 50] *= -1  # past the version counter, and behind the first 64 bytes
    stats = net.cache_instance.stats()
    assert (stats.misses, stats.hits) == (6, 18)


def test_bytes_on_their_way_keep_no_weights_in_memory():
    runtime = Late()
    weight = torch.zeros(1000)
    watch = TensorWatch({"weight": weight}, runtime=runtime)
    watch.refresh()
    storage = StorageWeakRef(weight.untyped_storage())
    assert watch.same() and runtime.started == 1
    watch.forget()
    weight.data = torch.zeros(1)
    assert storage.expired()
