"""Hits that are computed again, and what runs between a caller and the forward."""

import concurrent.futures
import functools
import gc
import inspect
import itertools
import os
import random
import re
import sys
import threading
import traceback
import weakref

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

import torchcache2
from tests.helpers.outputs import assert_same, cached, warnings_in
from tests.helpers.storage import NAMESPACES, keys_of
from tests.helpers.trees import LEAVES, OTHERS, build, nested
from torchcache2 import Cache, CacheSettings, torchcache
from torchcache2.core.rows import Rows
from torchcache2.engine.batch import is_computed_again
from torchcache2.engine.stack import TierStack
from torchcache2.engine.verify import differences

NAMESPACE = NAMESPACES[0]
SOAK = bool(os.environ.get("SOAK"))
WIDTH = 512
SEEN = 4096 // (4 * WIDTH)  # the first rows of a float32 weight, among them those that each call looks at


def whole(*shape):
    """Small whole numbers: their sums are exact in whatever order."""
    return torch.randint(-8, 8, shape).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return torch.relu(self.fc(x)) * scale


def exact(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(whole(*parameter.shape))
    return module.eval().requires_grad_(False)


def as_class(**options):
    class Cached(Net):
        forward = Net.forward

    return exact(torchcache(**options)(Cached)())


def as_instance(**options):
    return torchcache(**options)(exact(Net()))


MAKERS = pytest.mark.parametrize("make", [as_class, as_instance])
FULL = {"verify": 1.0}


def plain(module, x, scale=1.0):
    return torch.relu(nn.functional.linear(x, module.fc.weight, module.fc.bias)) * scale


def notes():
    """A list that forwards may change: what is found through the standard library is not their state."""
    return vars(threading.current_thread()).setdefault("notes", [])


@pytest.fixture(autouse=True)
def no_notes():
    """What a test has left of its notes is not found by the next."""
    notes().clear()


def long(number):
    """A tensor of some number, an edit of whose end is not seen for some calls."""
    return torch.full((100_000,), number)


def edit_unseen(module, amount=1):
    module.fc.weight.data[SEEN + 1 :] += amount


def counts(cached):
    stats = cached.cache_instance.stats()
    return stats.verified, stats.mismatched


# Which hits are computed again


@pytest.mark.parametrize("verify, sizes", [(1.0, [6, 6, 6, 2]), (0.0, [6])])
def test_all_hits_are_computed_again_or_none(verify, sizes):
    function = cached(lambda x: x * 2, verify=verify)
    x = torch.randn(6, 4)
    for batch in (x, x, x, x[[4, 1]]):
        assert torch.equal(function(batch), batch * 2)
    stats = function.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.verified, stats.mismatched) == (14, 6, 14 * verify, 0)
    assert function.sizes == sizes
    assert ("verified  14, of which 0 differed" in str(stats)) == bool(verify) == ("verified" in str(stats))


def test_a_share_of_hits_is_computed_again():
    function = cached(lambda x: x * 2, verify=0.3)
    x = torch.arange(100.0)[:, None]
    for _ in range(81):
        function(x)
    verified, mismatched = counts(function)
    # 2400 expected of 8000, standard deviation 41.
    assert 2100 < verified < 2700 and mismatched == 0
    assert sum(function.sizes) == 100 + verified


@pytest.mark.parametrize("miss_batch", ["exact", "pad"])
def test_hits_misses_and_duplicates_of_a_batch_are_computed_together(miss_batch):
    function = cached(lambda x: x * 2, miss_batch=miss_batch, **FULL)
    x = torch.arange(20.0).reshape(10, 2)
    function(x[:3])
    some = x[[5, 0, 0, 6, 2, 5, 5, 0]]
    assert torch.equal(function(some), some * 2)
    stats = function.cache_instance.stats()
    # The two further copies of item 5 count as found, and there is nothing to compare them with.
    assert (stats.hits, stats.misses, stats.verified, stats.mismatched) == (6, 5, 4, 0)
    assert len(function.sizes) == 2 and stats.memory_rows == 5
    assert torch.equal(function(x[:7]), x[:7] * 2)
    assert function.cache_instance.stats().memory_rows == 7


@pytest.mark.slow
def test_padded_batches_have_sizes_that_are_powers_of_two():
    function = cached(lambda x: x * 2, miss_batch="pad", verify=0.5)
    x = torch.randn(37, 4)
    function(x)
    for _ in range(60):
        assert torch.equal(function(x), x * 2)
    assert set(function.sizes) <= {1, 2, 4, 8, 16, 32, 37}
    assert len(set(function.sizes)) > 1
    assert counts(function)[1] == 0


# Rows that are stale


@MAKERS
def test_a_stale_row_is_noticed(make, log):
    module = make(**FULL)
    x = whole(6, WIDTH)
    before = module(x)
    edit_unseen(module)
    fresh = plain(module, x)
    apart = (fresh - before).abs().amax(1)
    assert torch.equal(module(x), fresh)
    assert counts(module) == (6, int((apart > 0).sum()))
    (warning,) = warnings_in(log)
    found = re.search(r"(\d+) of 6 rows .* position (\d+) of the batch, by ([0-9.e+-]+)\. ", warning)
    assert int(found[1]) == int((apart > 0).sum())
    assert apart[int(found[2])] == apart.max()
    assert float(found[3]) == pytest.approx(float(apart.max()), rel=0.01)
    assert "after such an edit, call .cache_instance.refresh()" in warning
    assert module.cache_instance.stats().bypasses == {}
    mismatched = counts(module)[1]
    for _ in range(3):
        assert torch.equal(module(x), plain(module, x))
    stats = module.cache_instance.stats()
    assert stats.mismatched == mismatched and stats.hits > 0
    assert stats.bypasses == {}
    assert len(warnings_in(log)) == 1


@MAKERS
def test_what_was_computed_before_the_edit_was_noticed_is_forgotten(make):
    module = make(**FULL)
    first, x, y = module.fc.weight.clone(), whole(4, WIDTH), whole(5, WIDTH)
    module(x)
    edit_unseen(module)
    module(y)  # misses, which nothing can be compared with
    module(x)  # noticed
    with torch.no_grad():
        module.fc.weight.copy_(first)
    mismatched = counts(module)[1]
    assert torch.equal(module(y), plain(module, y))
    assert torch.equal(module(x), plain(module, x))
    assert counts(module)[1] == mismatched


def test_rows_under_a_name_of_ones_own_that_are_stale_are_replaced():
    module = as_instance(persistent_module_hash="mine", **FULL)
    x = whole(4, WIDTH)
    module(x)
    with torch.no_grad():
        module.fc.weight += 1
    for _ in range(3):
        assert torch.equal(module(x), plain(module, x))
    stats = module.cache_instance.stats()
    assert stats.mismatched <= 4 <= stats.verified
    assert stats.hits >= 4


@pytest.mark.parametrize("what", ["raises", "keeps"])
def test_what_happens_while_a_stale_batch_is_computed_again(what):
    """It fails, or another thread keeps rows that are stale too: they are forgotten."""
    factors, events = long(2.0), notes()

    @torchcache(**FULL, probe=False)
    def scaled(x):
        if notes() and (event := notes().pop()) is not None:
            event()
        return x * factors[-1]

    def fail():
        raise ValueError("not this time")

    def other():
        in_threads(lambda number: scaled(y), 1)

    x, y = torch.randn(4, 3), torch.randn(5, 3)
    scaled(x)
    factors.data[-1] = 5.0
    # One call verifies, the next computes the batch with its equal items.
    events += [fail, None] if what == "raises" else [other, None]
    batch = torch.cat([x, y[[0, 0]]])
    if what == "raises":
        with pytest.raises(ValueError, match="not this time"):
            scaled(batch)
        assert torch.equal(scaled(y), y * 5)
    else:
        assert torch.equal(scaled(batch), batch * 5)
    assert counts(scaled) == (4, 4) and events == []
    factors.data[-1] = 2.0
    scaled.cache_instance.refresh()
    assert torch.equal(scaled(y), y * 2)
    assert torch.equal(scaled(x), x * 2)
    assert counts(scaled) == (4, 4)


# What counts as a difference


def verified(old, new, count=3, **settings):
    """How many rows differ if `old` is found and `new` computed; and what is returned."""
    with Cache(NAMESPACE, CacheSettings(verify=1.0, **settings)) as cache:
        cache.fetch(keys_of(range(count)), lambda positions: old)
        output = cache.fetch(keys_of(range(count)), lambda positions: new)
        stats = cache.stats()
    assert stats.verified == count
    return stats.mismatched, output


VALUES = torch.tensor([[1.0, -2.0, 0.25, 3.0], [100.0, -50.0, 7.0, 25.0], [0.5, 0.125, 0.0, -0.75]])
TOLERATED = [
    # dtype, a relative difference that comes from rounding, and one that does not
    (torch.float32, 3e-6, 1e-2),
    (torch.float64, 1e-14, 1e-6),
    (torch.float16, 2e-3, 0.3),
    (torch.bfloat16, 1 / 64, 0.5),
    (torch.complex64, 3e-6, 1e-2),
    (torch.complex128, 1e-14, 1e-6),
]


@pytest.mark.parametrize("dtype, rounding, real", TOLERATED)
def test_rounding_is_no_difference(dtype, rounding, real):
    values = VALUES * (1 + 2j) if dtype.is_complex else VALUES
    double = torch.complex128 if dtype.is_complex else torch.float64
    old = values.to(dtype)
    close = (values.to(double) * (1 + rounding)).to(dtype)
    apart = (values.to(double) * (1 + real)).to(dtype)
    assert not torch.equal(old, close)
    mismatched, output = verified(old, close)
    assert mismatched == 0
    assert_same(output, old)
    mismatched, output = verified(old, apart)
    assert mismatched == 3
    assert_same(output, apart)
    one = torch.cat([old[:2], apart[2:]])
    mismatched, output = verified(old, one)
    assert mismatched == 1
    assert_same(output, one)


def changed(values, to, at=(1, 0)):
    values = values.clone()
    values[at] = to
    return values


NAN, INF = float("nan"), float("inf")
BIG = 2**60
SMALL = torch.softmax(torch.arange(1500.0).sin().view(3, 500), 1)
MAPS = torch.arange(360.0).view(3, 4, 5, 6)
LAST = MAPS.contiguous(memory_format=torch.channels_last)
COMPARED = {
    **{f"small {kind}": (SMALL.to(kind), SMALL.flip(1).to(kind), 3) for kind in (torch.float32, torch.half)},
    "small, rounded": (SMALL.bfloat16(), (SMALL.bfloat16().double() * (1 + 2**-7)).bfloat16(), 0),
    "channels last": (MAPS, LAST, 0),
    "channels last, another": (MAPS, changed(LAST, -1.0, (1, 0, 0, 0)), 1),
    "nan and nan": (changed(VALUES, NAN), changed(VALUES, NAN), 0),
    "nan and number": (changed(VALUES, NAN), VALUES, 1),
    "inf and inf": (changed(VALUES, INF), changed(VALUES, INF), 0),
    "inf and -inf": (changed(VALUES, INF), changed(VALUES, -INF), 1),
    "inf and nan": (changed(VALUES, INF), changed(VALUES, NAN), 1),
    "beside inf": (changed(VALUES, INF), changed(changed(VALUES, INF), -51.0, (1, 1)), 1),
    "beside nan": (changed(VALUES, NAN), changed(changed(VALUES, NAN), -55.0, (1, 1)), 1),
    "0.0 and -0.0": (torch.zeros(3, 2), -torch.zeros(3, 2), 0),
    "no bytes": (torch.zeros(3, 0, 2), torch.zeros(3, 0, 2), 0),
    "no bytes, other shape": (torch.zeros(3, 0, 2), torch.zeros(3, 0, 3), 3),
    "no leaves": ((), (), 0),
    "one number a row": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), 1),
    "int64": (VALUES.long(), changed(VALUES.long(), 101), 1),
    "large int64": (torch.full((3, 2), BIG), changed(torch.full((3, 2), BIG), BIG + 1), 1),
    "uint8": (VALUES.abs().byte(), changed(VALUES.abs().byte(), 99), 1),
    "uint16": (VALUES.abs().to(torch.uint16), changed(VALUES, 99).abs().to(torch.uint16), 1),
    "bool": (VALUES > 0, changed(VALUES > 0, False), 1),
    "float8": (VALUES.to(torch.float8_e5m2), VALUES.to(torch.float8_e5m2), 0),
    "int value": ({"y": VALUES, "n": 3}, {"y": VALUES, "n": 4}, 3),
    "float value": ({"y": VALUES, "n": 3.0}, {"y": VALUES, "n": 3.5}, 3),
    "float value, rounded": ({"y": VALUES, "n": 3.0}, {"y": VALUES, "n": 3.0 * (1 + 1e-15)}, 0),
    "nan value": ({"y": VALUES, "n": NAN}, {"y": VALUES, "n": NAN}, 0),
    "complex value": ({"y": VALUES, "n": 1 + 2j}, {"y": VALUES, "n": 1 + 3j}, 3),
    "text": ({"y": VALUES, "n": "ab"}, {"y": VALUES, "n": "ac"}, 3),
    "none and none": ((VALUES, None), (VALUES, None), 0),
    "none and number": ((VALUES, None), (VALUES, 0), 3),
    "1 and True": ((VALUES, 1), (VALUES, True), 3),
    "other dtype": (VALUES, VALUES.double(), 3),
    "other shape": (VALUES, VALUES[:, :3], 3),
    "other structure": ((VALUES,), [VALUES], 3),
    "other names": ({"a": VALUES}, {"b": VALUES}, 3),
    "second of two": ((VALUES, VALUES), (VALUES, changed(VALUES, 0.0)), 1),
}


@pytest.mark.parametrize("old, new, differing", COMPARED.values(), ids=COMPARED.keys())
def test_what_is_a_difference(old, new, differing):
    mismatched, output = verified(old, new)
    assert mismatched == differing
    expected = new if differing else old
    assert_same(output, expected)


def test_rows_kept_in_a_coarser_dtype():
    settings = {"cache_dtype": torch.bfloat16}
    mismatched, output = verified(VALUES, VALUES * (1 + 3e-3), **settings)
    assert mismatched == 0
    assert_same(output, VALUES.bfloat16().float())
    mismatched, output = verified(VALUES, VALUES * 1.5, **settings)
    assert mismatched == 3
    assert_same(output, (VALUES * 1.5).bfloat16().float())


def test_autocast_rounds_to_its_own_dtype():
    close = VALUES * (1 + 1 / 64)
    assert verified(VALUES, close)[0] == 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verified(VALUES, close)[0] == 0
        assert verified(VALUES, VALUES * 1.5)[0] == 3


@pytest.mark.parametrize("precision", ["high", "medium", "backend"])
def test_products_of_lower_precision(precision):
    if precision != "backend":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        reset = functools.partial(torch.set_float32_matmul_precision, before)
    else:  # from then on torch.get_float32_matmul_precision() is an error
        if not hasattr(torch._C, "_get_fp32_precision_getter"):
            pytest.skip("older ones have no such switch")
        switch = torch.backends.cuda.matmul
        reset = functools.partial(setattr, switch, "fp32_precision", switch.fp32_precision)
        switch.fp32_precision = "tf32"
    try:
        assert verified(VALUES, VALUES)[0] == 0
        assert verified(VALUES, VALUES * 2)[0] == 3
    finally:
        reset()


def test_the_default_device_and_dtype_do_not_matter():
    function = torchcache(**FULL)(lambda x: (x * 2, x[:, :0], len(x.shape)))
    x = torch.randn(3, 4)
    torch.set_default_dtype(torch.float64)
    try:
        for device in ("meta", "cpu"):
            with torch.device(device):
                for _ in range(2):
                    assert torch.equal(function(x)[0], x * 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert counts(function) == (6, 0)


def rounded_by_batch(values, dtype):
    """As kernels do: batches of one item are rounded otherwise."""
    return values * (1 + (len(values) == 1) * 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_of_a_finer_dtype_than_the_computation(dtype, log):
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6, dtype=dtype)

        def forward(self, ids):
            return rounded_by_batch(self.table(ids), dtype).double()

    module = torchcache(**FULL)(Embedding().eval().requires_grad_(False))
    function = torchcache(**FULL)(lambda x: rounded_by_batch(x, dtype).float())
    ids, x = torch.arange(10), torch.randn(10, 6, dtype=dtype)
    module(ids), function(x)
    for i in range(10):
        assert torch.equal(module(ids[i : i + 1])[0], module.table.weight[i].double())
        assert torch.equal(function(x[i : i + 1])[0], x[i].float())
    assert counts(module) == counts(function) == (10, 0)
    assert warnings_in(log) == []


# What else may go on in a forward


def program(verify):
    """Outputs and the states of all generators after each call."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    x = torch.arange(24.0).reshape(8, 3)

    def draws_at_times(x):
        return x + torch.rand(()) if bool((x < 3).any()) else x

    functions = [
        torchcache(verify=verify)(lambda x: x * 2),
        torchcache(verify=verify)(lambda x: x + torch.rand(x.shape)),
        torchcache(verify=verify)(lambda x: x + random.random()),
        torchcache(verify=verify)(lambda x: x + np.random.random()),
        torchcache(verify=verify)(draws_at_times),
        torchcache(verify=verify)(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))),
    ]
    seen = []
    for step in range(4):
        for function in functions:
            with torch.no_grad():
                output = function(x[2 * (step % 3) :])
            state = np.random.get_state()
            seen.append((output, torch.get_rng_state(), random.getstate(), state[1].tobytes(), state[2]))
    return seen


def test_generators_are_left_as_without_verify():
    for without, once in zip(program(0.0), program(1.0), strict=True):
        torch.testing.assert_close(without[0], once[0])
        assert torch.equal(without[1], once[1])
        assert without[2:] == once[2:]


def test_an_error_while_hits_are_computed_again():
    broken = []

    @torchcache(**FULL)
    def function(x):
        if broken:
            raise broken[0]
        return x * 2

    x = torch.randn(4, 3)
    function(x)
    broken.append(ValueError("today"))
    with pytest.raises(ValueError, match="today"):
        function(x)
    broken.clear()
    assert torch.equal(function(x), x * 2)
    stats = function.cache_instance.stats()
    assert (stats.hits, stats.verified, stats.mismatched, stats.bypasses) == (4, 4, 0, {})


@pytest.mark.parametrize("batch", [1, 6])
@MAKERS
@pytest.mark.slow
def test_compiled(make, batch, log):
    torch.compiler.reset()
    module = make(**FULL)
    compiled = torch.compile(module, backend="eager")
    x = whole(batch, WIDTH)
    for _ in range(3):
        assert torch.equal(compiled(x), plain(module, x))
    assert counts(module) == (2 * batch, 0)
    edit_unseen(module, 100)
    for _ in range(3):
        assert torch.equal(compiled(x), plain(module, x))
    assert counts(module)[1] == batch
    assert len(warnings_in(log)) == 1
    torch.compiler.reset()


# Threads


def in_threads(work, count=8):
    start = threading.Barrier(count)

    def started(number):
        start.wait()
        return work(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))


@pytest.mark.parametrize("verify, is_stale", [(0.2, False), (1.0, False), (1.0, True)])
def test_threads(verify, is_stale):
    module = as_class(verify=verify, policy="lru", max_memory_cache_size=60_000)
    items = whole(60, WIDTH)
    if is_stale:
        module(items)
        edit_unseen(module)

    def work(number):
        generator = torch.Generator().manual_seed(number)
        right = True
        for _ in range(60 if SOAK else 15):
            x = items[torch.randint(60, (7,), generator=generator)]
            right &= torch.equal(module(x), plain(module, x))
        return right

    assert all(in_threads(work))
    stats = module.cache_instance.stats()
    assert (stats.mismatched > 0) == is_stale and stats.verified > 0
    assert is_stale or stats.bypasses == {}


def test_a_cache_that_is_cleared_or_closed_during_a_computation():
    settings = CacheSettings(**FULL)
    tiers = TierStack(settings)
    other = Cache(b"SIXTEEN LETTERS.", settings, tiers=tiers)
    for act in (Cache.clear, Cache.close):
        cache = Cache(NAMESPACE, settings, tiers=tiers)
        cache.fetch(keys_of(range(2)), lambda positions: VALUES[positions])

        def compute(positions, act=act, cache=cache):
            thread = threading.Thread(target=act, args=(cache,))
            thread.start(), thread.join()
            return VALUES[positions]

        assert torch.equal(cache.fetch(keys_of(range(3)), compute), VALUES)
        assert torch.equal(cache.fetch(keys_of(range(3)), lambda positions: VALUES[positions]), VALUES)
        cache.close()
        # Nobody could find them any more, and they would take others' room.
        assert other.stats().memory_rows == 0


# Between the caller and the forward

ENDS = [GeneratorExit, KeyboardInterrupt, SystemExit]
FAILURES = [ValueError, RuntimeError, StopIteration, StopAsyncIteration, *ENDS]


class Failing(Net):
    failure = ValueError

    def forward(self, x):
        if x.sum() < 0:
            raise self.failure("from the forward")
        return self.fc(x)


def failing(kind, failure):
    class Cached(Failing):
        forward = Failing.forward

    Cached.failure = failure
    module = torchcache(Cached)() if kind == "class" else torchcache(Cached())
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", ["class", "instance"])
def test_errors_of_a_forward(kind, failure, collector_off):
    module, x, y = failing(kind, failure), torch.ones(3, WIDTH), -torch.ones(2, WIDTH)
    module(x)
    with pytest.raises(failure) as caught:
        module(y)
    error = caught.value
    assert type(error) is failure and error.args == ("from the forward",)
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    frames = traceback.extract_tb(error.__traceback__)
    assert (frames[0].name, frames[-1].name) == ("test_errors_of_a_forward", "forward")
    # While the traceback is alive, and all that it refers to:
    module(x)
    assert module.cache_instance.stats().hits == 2 + 3  # two of the first three are duplicates
    held = weakref.ref(module), weakref.ref(module.cache_instance), weakref.ref(y)
    del module, y, error, caught
    assert [ref() for ref in held] == [None] * 3


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Interrupt(KeyboardInterrupt):
    pass


@functools.cache
def ours(file):
    return file.startswith(os.path.dirname(torchcache2.__file__))


def interrupted(call, number):
    """Interrupt a call where a `number`-th function is about to start, as Ctrl-C does; the error."""
    seen = 0

    def tracer(frame, event, argument):
        nonlocal seen
        is_ours = ours(frame.f_code.co_filename) or ours(frame.f_back.f_code.co_filename)
        # Where a generator goes on, Python 3.10 would not run its `finally`, which a signal does.
        if is_ours and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            seen += 1
            if seen == number:
                raise Interrupt

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except Interrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FULL, {"miss_batch": "pad", "policy": "lru"}])
def test_an_interrupt_anywhere_leaves_the_cache_working(options, collector_off):
    module = as_class(**options)  # without the collector, whose callbacks would swallow an interrupt
    x = whole(3, WIDTH)
    module(x)
    expected = plain(module, x)
    # Every point in `make soak`, and otherwise one in twelve, others in each run.
    for number in range(1 if SOAK else random.randint(1, 12), 2000, 1 if SOAK else 12):
        batch = torch.cat([x, whole(2, WIDTH) + number / 4])
        error = interrupted(lambda batch=batch: module(batch), number)
        if error is None:
            break
        # The error is alive, as the last one is in a notebook, and with it all frames.
        assert not is_computed_again()
        assert not module.cache_instance.engine.tiers.tiers[0]._lock().locked(), traceback.format_tb(
            error.__traceback__
        )
        assert torch.equal(module(x), expected)
        before = module.cache_instance.stats().hits
        assert torch.equal(module(x), expected)
        assert module.cache_instance.stats().hits == before + 3, traceback.format_tb(error.__traceback__)
    assert 100 < number < 1999


@pytest.mark.slow
def test_modules_inside_of_each_other():
    inner = as_instance(**FULL)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + self.inner(x, 2.0)

    outer = torchcache(probe=False, **FULL)(Outer().eval())
    x = whole(5, WIDTH)

    def check(run, some):
        assert torch.equal(run(some), plain(inner, some) * 3)

    for _ in range(2):
        check(outer, x)
    check(outer, torch.cat([x[:2], x[:1] + 1]))
    assert counts(outer) == (7, 0)
    # Twice for each item that the outer one verified, with the one scale and the other.
    assert counts(inner) == (14, 0)
    torch.compiler.reset()
    compiled = torch.compile(outer, backend="eager")
    for _ in range(2):
        check(compiled, x)
    edit_unseen(inner, 50)
    for run in (outer, compiled, outer, compiled):
        check(run, x)
    assert outer.cache_instance.stats().mismatched == 5
    torch.compiler.reset()


def test_a_function_that_calls_itself():
    sizes = notes()
    sizes.clear()

    @torchcache(probe=False, **FULL)
    def power(x, n):
        notes().append(n)
        return power(x, n - 1) * x if n > 1 else x

    x = torch.tensor([[2.0], [3.0]])
    for _ in range(3):
        assert power(x, 3).tolist() == [[8.0], [27.0]]
    assert sizes == [3, 2, 1] * 3
    assert counts(power) == (4, 0)


# Outputs that cannot be kept, with rounding asked for


def test_an_output_that_cannot_be_kept_is_returned_by_a_closed_cache():
    marker = object()
    function = torchcache(cache_dtype=torch.bfloat16)(lambda x: (x * 2, marker))
    x = torch.ones(2, 3)
    for _ in range(2):
        output, returned = function(x)
        assert torch.equal(output, x * 2) and returned is marker
        function.cache_instance.close()


def test_a_number_for_an_empty_batch_in_another_dtype():
    function = torchcache(cache_dtype=torch.bfloat16)(lambda x: (x * 2, 3))
    for _ in range(2):
        output, number = function(torch.ones(0, 3))
        assert (output.shape, output.dtype, number) == ((0, 3), torch.float32, 3)


# Random sequences of batches


@hypothesis.settings(max_examples=60 if SOAK else 20)
@hypothesis.given(
    # At least one tensor: an output without any has no rows.
    argument=nested(st.one_of(LEAVES, OTHERS)),
    output=st.tuples(LEAVES, nested(st.one_of(LEAVES, OTHERS))),
    batches=st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=1, max_size=10),
    options=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["keep", "lru"]),
            "max_memory_cache_size": st.sampled_from([0, 5_000, 9_000, 13_000, 30_000, 10**7]),
            "miss_batch": st.sampled_from(["exact", "pad"]),
            "verify": st.sampled_from([0.0, 0.3, 1.0]),
            # The values of `build` are exact in all of them.
            "cache_dtype": st.sampled_from([None, torch.float32, torch.bfloat16, torch.float64]),
        }
    ),
)
@hypothesis.example(  # other batch sizes are other groups of keys, which take memory where rows need no more
    argument=(None, [None]),
    output=((torch.float32, ()), None),
    batches=[[0], [0, 0], [0, 0, 0]],
    options={
        "policy": "lru",
        "max_memory_cache_size": 5_000,
        "miss_batch": "exact",
        "verify": 0.0,
        "cache_dtype": None,
    },
)
def test_outputs_are_those_of_the_plain_forward(argument, output, batches, options):
    def forward(items, argument):
        return build(output, items)

    function = cached(forward, **options)
    for batch in batches:
        items = torch.tensor(batch, dtype=torch.int64)
        args = items, build(argument, items)
        assert_same(function(*args), forward(*args))
        assert function.cache_instance.stats().memory_bytes <= options["max_memory_cache_size"]
    stats = function.cache_instance.stats()
    assert stats.mismatched == 0 and stats.verified <= stats.hits
    assert stats.bypasses == {}
    assert stats.hits + stats.misses == sum(map(len, batches))
    if options["verify"] == 0.0:
        assert stats.verified == 0


@hypothesis.settings(max_examples=40 if SOAK else 15)
@hypothesis.given(
    steps=st.lists(
        st.one_of(
            st.lists(st.integers(0, 9), min_size=1, max_size=8),
            st.sampled_from(["edit", "restore", "clear", "refresh"]),
        ),
        max_size=15,
    ),
    miss_batch=st.sampled_from(["exact", "pad"]),
    policy=st.sampled_from(["keep", "lru"]),
    budget=st.sampled_from([0, 15_000, 20_000, 10**7]),
)
def test_with_all_hits_verified_no_unseen_edit_gets_through(steps, miss_batch, policy, budget):
    options = {"miss_batch": miss_batch, "policy": policy, "max_memory_cache_size": budget}
    module = as_instance(**options, **FULL)
    items, first = whole(10, WIDTH), module.fc.weight.clone()
    for step in steps:
        if step == "edit":
            edit_unseen(module)
        elif step == "restore":
            module.fc.weight.data.copy_(first)
        elif step in ("clear", "refresh"):
            getattr(module.cache_instance, step)()
        else:
            assert torch.equal(module(items[step]), plain(module, items[step]))
        assert module.cache_instance.stats().memory_bytes <= budget
    assert module.cache_instance.stats().bypasses.keys() <= {"batch"}  # what was found to be wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_tolerance_is_relative_to_the_row_however_small(dtype):
    scale = 10 * torch.finfo(dtype).eps ** 2
    old = torch.full((2, 4), scale, dtype=torch.float64).to(dtype)
    new = old * torch.tensor([[1.0], [2.0]]).to(dtype)
    rows = [Rows.from_pytree(side, 2, device=torch.device("cpu")) for side in (old, new)]
    assert (differences(*rows) > 0).tolist() == [False, True]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize("make", [lambda: lambda x: x + torch.rand(x.shape), lambda: Counting().eval()])
def test_random_forwards_and_those_with_a_state_are_not_verified(make):
    function, x = torchcache(**FULL)(make()), torch.zeros(3, 2)
    outputs = [function(x) for _ in range(4)]
    assert not any(torch.equal(left, right) for left, right in itertools.combinations(outputs, 2))
    stats = function.cache_instance.stats()
    assert (stats.verified, stats.hits, sum(stats.bypasses.values())) == (0, 0, 12)


@pytest.mark.parametrize("miss_batch", ["exact", "pad"])
@MAKERS
def test_a_stale_row_in_a_batch_with_misses_and_duplicates(make, miss_batch, log):
    module = make(miss_batch=miss_batch, **FULL)
    x = whole(12, WIDTH)
    module(x[:3])
    edit_unseen(module, 100)
    some = x[[9, 1, 10, 9, 1, 2]]
    assert torch.equal(module(some), plain(module, some))
    assert counts(module) == (3, 3)
    (warning,) = warnings_in(log)
    assert int(re.search(r"position (\d+) of the batch", warning)[1]) in (1, 4, 5)
    for _ in range(2):
        assert torch.equal(module(x), plain(module, x))
    assert counts(module)[1] == 3
