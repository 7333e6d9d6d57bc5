"""Devices without free memory: the forward's errors are the caller's, and the cache's own are not."""

import functools
import gc
import weakref

import numpy as np
import pytest
import torch

from tests.helpers import storage
from tests.helpers.storage import CPU, NAMESPACES, keys_of, put, rows_of, warnings_of
from torchcache2 import Cache, CachedDataset, torchcache
from torchcache2.core.rows import Rows
from torchcache2.decorator import forward
from torchcache2.decorator.forward import Computation
from torchcache2.engine.running import Forward, device_of, is_of_forward
from torchcache2.identity.arguments import BoundCall
from torchcache2.tiers.memory import arena
from torchcache2.tiers.memory.tier import MemoryTier

pytestmark = pytest.mark.cpu_only  # stand-ins for one that has no memory

OutOfMemory = torch.cuda.OutOfMemoryError
X = torch.arange(12.0).view(4, 3)
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB"


class Double(torch.nn.Module):
    """Has no memory for items of more than 1,000, except in batches of 8 or more."""

    def forward(self, x):
        if len(x) < 8 and bool((x > 1000).any()):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. (GPU 1; 23.69 GiB total capacity)")
        return {"y": x * 2, "z": x.sum(1)}


def check(output, x):
    assert torch.equal(output["y"], x * 2) and torch.equal(output["z"], x.sum(1))


def cached(**options):
    return torchcache(**options)(Double().requires_grad_(False).eval())


@pytest.fixture
def given_back(monkeypatch):
    """The devices whose rows were to be given back, in place of doing so; the memory is then emptied."""
    devices = []
    monkeypatch.setattr(MemoryTier, "give_back", lambda self, device: devices.append(device) or 3_000_000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: devices.append("emptied"))
    return devices


@pytest.mark.parametrize("x", [X + 2000, torch.cat([X, X + 2000])], ids=["misses", "hits and misses"])
def test_an_error_of_the_forward_is_raised_when_rows_have_made_room(given_back, log, x):
    model = cached(probe=False)
    check(model(X), X)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="total capacity"):
            model(x)
    assert given_back == [torch.device("cuda:1"), "emptied"] * 2
    (warning,) = warnings_of(log)
    assert "3.0 MB" in warning.getMessage() and "max_memory_cache_size" in warning.getMessage()
    model = cached()
    both = torch.cat([X + 100, X + 2000])  # the parts that the probe computes have no memory
    check(model(both), both)
    assert model.cache_instance.stats().bypasses == {}


def test_the_error_is_the_one_that_was_raised(given_back):
    error = OutOfMemory("no more")

    def compute(positions):
        raise error

    cache = Cache(NAMESPACES[0])
    assert len(cache.fetch(keys_of([2]), lambda positions: positions)) == 1  # from now on there are tiers
    with pytest.raises(OutOfMemory) as raised:
        cache.fetch(keys_of([1]), compute)
    assert raised.value is error and given_back == [None, "emptied"]


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_a_forward_without_memory_on_the_host_is_the_callers(kind):
    class Large(torch.nn.Module):
        def forward(self, x):
            if bool((x > 1000).any()):
                raise kind("DefaultCPUAllocator: can't allocate memory")
            return x * 2

    model = torchcache(Large().eval())
    assert torch.equal(model(X), X * 2)
    for x in (X + 2000, torch.cat([X, X + 2000])):
        with pytest.raises(kind, match="can't allocate memory"):
            model(x)
    assert model.cache_instance.stats().hits == 0


def test_messages_name_their_device():
    assert device_of(OutOfMemory(TEXT)) == torch.device("cuda", 1)
    old = "CUDA out of memory. Tried to allocate 1 GiB (GPU 0; 23.69 GiB total capacity)"
    assert device_of(OutOfMemory(old)) == torch.device("cuda", 0)
    assert device_of(OutOfMemory("no more")) is None


OWN = {
    "keys": (forward, "item_keys"),
    "rows that are found": (arena.Arena, "gather"),
    "rows that are put": (arena.Column, "write"),
    "rows of a part": (Rows, "scatter"),
    "rows of an output": (Rows, "from_pytree"),
    "an output": (Rows, "to_pytree"),
    "items of a part": (BoundCall, "take"),
}


ON_THE_HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")  # as torch says it


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "error", [OutOfMemory(TEXT), MemoryError(), ON_THE_HOST], ids=["gpu", "numpy", "torch"]
)
@pytest.mark.parametrize("name", OWN)
def test_the_caches_own_work_without_memory_never_reaches_the_caller(monkeypatch, log, name, error):
    model, both = cached(), torch.cat([X + 50, X])
    for x in (X[:1], X):
        check(model(x), x)

    def fail(*args, **kwargs):
        failed.append(1)
        raise error

    failed = []
    monkeypatch.setattr(*OWN[name], fail)
    for x in (X, both, both + 100):
        check(model(x), x)
    assert failed and model.cache_instance.stats().bypasses == {}
    assert len(warnings_of(log)) <= 1
    monkeypatch.undo()
    for _ in range(2):
        check(model(both), both)
    stats = model.cache_instance.stats()
    assert stats.memory_rows >= 8 and stats.hits >= 12


class Shifting(torch.nn.Module):
    """Changes its input and a buffer when the first number is large."""

    def __init__(self):
        super().__init__()
        self.register_buffer("changes", torch.zeros(()))

    def forward(self, x):
        if x[0, 0] > 20:
            x += 1
            self.changes += 1
        return x * 2


@pytest.mark.parametrize("found", [X[:0], X[:2]], ids=["the whole batch", "a part of it"])
def test_what_the_forward_has_changed_is_not_changed_twice(monkeypatch, log, found):
    def fail(*args):
        raise OutOfMemory(TEXT)

    model = torchcache(Shifting().eval())
    assert torch.equal(model(X), X * 2)
    x = torch.cat([found, X + 50])
    twin = Shifting()
    expected = twin(x.clone())
    monkeypatch.setattr(Computation, "_trace", fail)
    assert torch.equal(model(x), expected) and model.changes == twin.changes
    assert len(warnings_of(log)) == 1


def test_a_function_of_a_batch_is_computed_past_a_cache_without_memory(monkeypatch, log):
    cache = Cache(NAMESPACES[0])
    monkeypatch.setattr(Rows, "from_pytree", failing)
    output = cache.fetch(keys_of(range(3)), lambda positions: positions.double() ** 2)
    assert torch.equal(output, torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64))
    assert cache.stats().misses == 3 and len(warnings_of(log)) == 1


def test_a_forward_without_memory_keeps_nothing_of_its_call():
    def failing():
        tensor = torch.ones(3)
        made.append(weakref.ref(tensor))
        raise (OutOfMemory if len(made) == 1 else ValueError)(TEXT)

    made = []
    gc.disable()
    try:
        for error in (OutOfMemory, ValueError):
            with pytest.raises(error) as raised:
                Forward(failing)()
            assert is_of_forward(raised.value) is (error is OutOfMemory)
            del raised
        assert [reference() for reference in made] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_outputs_and_samples_are_freed_without_the_garbage_collector(where, tmp_path):
    def tensor(value):
        made.append(weakref.ref(value))
        return value

    class Images(list):
        def __getitem__(self, index):
            return {"image": tensor(torch.full((3,), float(index))), "label": index}

    def double(x):
        return {"y": [tensor(x * 2)], "z": (tensor(x + 1),)}

    made, folder = [], {"memory": None, "disk": tmp_path}[where]
    images = CachedDataset(Images(range(10)), folder, name="ten", memory_size=(where == "memory") * 10**6)
    function = torchcache(persistent_cache_dir=folder)(double)
    function(X + 1), images[0]
    gc.disable()
    try:
        for i in range(3):
            function(X[i : i + 2]), images[i + 1], images.__getitems__([i + 4, i + 7])
        function.cache_instance.flush(), images.close()
        assert made and not [reference for reference in made if reference() is not None]
    finally:
        gc.enable()


# Tiers, with the device "meta" in the place of an accelerator


def failing(*args, **kwargs):
    raise OutOfMemory(TEXT)


def chunked(row_bytes, limit, device, runtime, are_remote):
    return arena._ChunkedColumn(row_bytes, device, runtime)


def put_away(tier, names):
    rows = rows_of(names, 100)
    rows = Rows(rows.schema, [column.to("meta") for column in rows.columns], len(rows))
    return tier.put(keys_of(names, NAMESPACES[1]), rows)


def test_growth_that_finds_no_memory_for_one_leaf_takes_none_for_another(monkeypatch):
    monkeypatch.setattr(arena, "row_column", chunked)
    tier = MemoryTier(10**6)
    output = {"a": torch.ones(3, 100), "b": torch.ones(3, 200)}
    rows = Rows.from_pytree(output, 3, device=CPU)
    assert tier.put(keys_of(range(3)), rows) == 3
    before = tier.stats().bytes
    with monkeypatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda size, **how: failing() if size > 2000 else empty(size, **how))
        assert tier.put(keys_of(range(3, 6)), rows) == 0
    assert tier.stats().bytes == before
    assert tier.put(keys_of(range(3, 6)), rows) == 3


def test_rows_of_a_device_make_room_and_rows_of_the_host_stay():
    tier = MemoryTier(10**6)
    assert put(tier, range(5), 100) == 5
    before = tier.stats().bytes
    for device in (torch.device("meta"), None):
        assert put_away(tier, range(50)) == 50
        assert tier.give_back(torch.device("cuda:0")) == 0 and tier.stats().rows == 55
        assert tier.give_back(device) == 20_480  # 50 rows of 400 bytes, in multiples of 512
        assert tier.stats().bytes == before and storage.found(tier, range(5), 100) == list(range(5))
    assert tier.stats().evictions == 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_copies_and_growth_that_find_no_memory_cost_rows_but_never_lie(monkeypatch, policy):
    chance, budget = np.random.default_rng(0), 300_000
    monkeypatch.setattr(arena, "row_column", chunked)
    for owner, name in (
        (arena._ChunkedColumn, "gather"),
        (arena._ChunkedColumn, "move"),
        (torch, "empty"),
        (arena, "write"),
    ):
        monkeypatch.setattr(owner, name, sometimes_failing(getattr(owner, name), chance))
    tier, kept, hits = MemoryTier(budget, policy), 0, 0
    for _ in range(500):
        names = [f"{i}" for i in chance.choice(2000, chance.integers(1, 30), replace=False)]
        width = int(chance.choice([40, 100]))
        if chance.random() < 0.5:
            kept += put(tier, [f"{name}/{width}" for name in names], width)
        else:
            hits += len(storage.found(tier, [f"{name}/{width}" for name in names], width))
        assert tier.stats().bytes <= budget
    assert kept > 500 and hits > 300
    assert (tier.stats().evictions > 0) == (policy == "lru")


def sometimes_failing(function, chance):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if chance.random() < 0.05:
            raise OutOfMemory(TEXT)
        return function(*args, **kwargs)

    return wrapper
