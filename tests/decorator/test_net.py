"""The net: found rows are computed again now and then, at a price, so that no row is wrong for long."""

import logging
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers import warm
from tests.helpers.outputs import bypasses, warnings_in
from tests.helpers.ranks import run as run_ranks
from torchcache2 import LazyModule, NotCachedError, torchcache

X = torch.arange(24.0).reshape(6, 4).sin()
SIZES = logging.getLogger("tests.net")  # a list that a forward appends to would be state


class Clock:
    """The time, which only forwards of this test let pass."""

    def __init__(self):
        self.now, self.sizes = 0.0, []
        self.tick = 0.0  # seconds that pass each time that somebody looks

    def __call__(self):
        self.now += self.tick
        return self.now

    def compute(self, size, seconds):
        self.sizes.append(size)
        self.now += size * seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that is told of all computed batches: with 0 s an item, no check has a price."""
    clock, handler = Clock(), logging.Handler()
    handler.emit = lambda record: clock.compute(*record.msg)
    monkeypatch.setattr(time, "perf_counter", clock)
    SIZES.addHandler(handler)
    SIZES.setLevel(logging.INFO)
    yield clock
    SIZES.removeHandler(handler)


def doubled(x, by=2, dim=1):
    return x * by


def counted(forward=doubled, seconds=0.0, **options):
    """A cached function that takes some seconds an item."""

    def counting(x, *args, **kwargs):
        SIZES.info((len(x), seconds))
        return forward(x, *args, **kwargs)

    return torchcache(**options)(counting)


def checks_in(clock, calls):
    """The numbers of the calls, from 1 on, in which a batch was computed."""
    found = []
    for number, call in enumerate(calls, 1):
        del clock.sizes[:]
        call()
        if clock.sizes:
            found.append(number)
    return found


# The schedule


def test_the_first_second_and_fourth_found_batch_and_then_one_in_256(clock):
    function, x = counted(), torch.randn(64, 3)
    for rows in x.split(16):
        function(rows)
    found = checks_in(clock, [lambda: function(x[torch.randperm(64)[:16]])] * 1200)
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    stats = function.cache_instance.stats()
    assert stats.verified == 16 * len(found) and stats.mismatched == stats.unchecked == 0


def test_batches_that_come_again_as_they_were_computed_are_checked_likewise(clock):
    function, x = counted(), torch.randn(64, 3)
    epoch = [lambda rows=rows: function(rows) for rows in x.split(16)]
    assert checks_in(clock, epoch) == [1, 2, 3, 4]
    assert checks_in(clock, epoch * 10) == [1, 2, 4, 8, 16, 32]
    assert checks_in(clock, [lambda: function(x[:16].flip(0))]) == []  # the same items
    assert checks_in(clock, [lambda: function(x[10:26])] * 2) == [1]  # put together anew


def test_what_is_found_of_a_batch_is_computed_with_the_rest_as_often(clock):
    function, x = counted(), torch.randn(600, 3)
    function(x[:8])
    del clock.sizes[:]
    for start in range(4, 4 + 4 * 40, 4):
        function(x[start : start + 8])
    assert [at for at, size in enumerate((s for s in clock.sizes if s in (4, 8)), 1) if size == 8] == [
        *(1, 2, 4, 8, 16, 32)
    ]


def test_parts_of_the_first_second_and_fourth_batch_are_computed_alone(clock):
    function = counted()
    function(torch.randn(18, 4))
    assert clock.sizes == [18, 3, 3, 3]
    for _ in range(7):
        function(torch.randn(18, 5))  # another length
    assert clock.sizes[4:] == [18, 3, 3, 3, 18, 18, 3, 3, 3, 18, 18, 18, 18, 3, 3, 3]
    del clock.sizes[:]
    for by in (0.5, 0.75, 0.5):  # another value of an argument
        function(torch.randn(7, 9), by)
    assert clock.sizes == [7, 1, 1, 7, 1, 1, 7, 1, 1]
    for more in ({"dim": 0}, {"x": torch.randn(7, 4, 2)}):  # another way to compute, and more dimensions
        del clock.sizes[:]
        function(**{"x": torch.randn(7, 4), **more})
        assert clock.sizes == [7, 1, 1]


def lengths(texts):
    SIZES.info((len(texts), 0.0))
    return torch.tensor([len(text) for text in texts])


@pytest.mark.parametrize("make", [list, tuple, lambda texts: np.array(texts, dtype=object)])
def test_lists_whose_entries_differ_in_length_are_another_kind(clock, make):
    function = torchcache(item_args="texts")(lengths)
    alike, other = [f"a{i}" for i in range(10, 50)], [f"text {7**i}" for i in range(12)]
    for some in (alike[:6], alike[6:12], alike[12:18]):
        function(make(some))
    for texts, expected in ((other[:6], [6, 1, 1]), (alike[18:24], [6, 1, 1]), (alike[24:30], [6])):
        del clock.sizes[:]
        function(make(texts))
        assert clock.sizes == expected
    found = [alike[i : i + 6] for i in (1, 2, 3)] + [other[5::-1]]
    assert checks_in(clock, [lambda texts=texts: function(make(texts)) for texts in found]) == [1, 2, 4]


def test_single_items_are_another_kind_and_computed_twice(clock):
    function, x = counted(), torch.randn(20, 4)
    assert checks_in(clock, [lambda: function(x[:1])] * 9) == [1, 2, 3, 5, 9]
    for start in (1, 2, 3):
        function(x[start : start + 1])
    del clock.sizes[:]
    function(x[4:10])
    assert clock.sizes == [6, 1, 1]
    generator = random.SystemRandom()

    def drawn(x):
        return x * generator.random()

    function = torchcache(drawn)
    assert not torch.equal(function(x[:1]), function(x[:1])) and bypasses(function) == {"batch": 2}


# The price


def spent_on(clock, function, x, size, batches):
    """Items computed for checks while batches of random found items are asked for."""
    for _ in range(batches):
        function(x[torch.randperm(len(x))[:size]])
    return sum(clock.sizes)


@pytest.mark.parametrize(("size", "batches"), [(16, 3000), (8, 500), (32, 150), (64, 40)])
def test_checks_take_two_percent_of_what_found_items_would_have_taken(clock, size, batches):
    function, x = counted(seconds=0.01), torch.randn(64, 3)
    for rows in x.split(size):
        function(rows)
    del clock.sizes[:]
    first = function.cache_instance.stats().seconds_checking
    checked = spent_on(clock, function, x, size, batches) - size
    assert 0 <= checked <= 0.02 * size * batches
    assert checked >= size * min(batches // 256, int(0.02 * batches))
    stats = function.cache_instance.stats()
    assert stats.seconds_checking - first == pytest.approx(0.01 * sum(clock.sizes))
    assert 0 < first <= 0.01 * size * 1.5


def test_parts_of_a_forward_that_takes_as_long_for_one_item_as_for_many_have_their_price(clock):
    def forward(x):
        SIZES.info((1, 1.0))
        return x * 2

    function = torchcache(forward)
    function(torch.randn(18, 3))
    first = function.cache_instance.stats().seconds_checking
    for number in range(1, 600):
        function(torch.randn(18, 3))
        assert function.cache_instance.stats().seconds_checking - first <= 0.02 * (number + 1)
    assert function.cache_instance.stats().seconds_checking - first >= 6


def test_a_forward_that_is_cheaper_than_its_call_is_checked_for_the_time_of_calls(clock):
    function, x = counted(), torch.randn(64, 3)
    for rows in x.split(16):
        function(rows)
    clock.tick = 1e-4  # seconds that each look at the clock takes, of the cache or of a check
    function(x[8:24])
    stats, start = function.cache_instance.stats(), clock.now
    for _ in range(2000):
        function(x[torch.randperm(64)[:16]])
        spent = function.cache_instance.stats().seconds_checking - stats.seconds_checking
        assert spent <= 0.02 * (clock.now - start)
    assert spent > 0.015 * (clock.now - start) / 4


# Verdicts


def run(folder, forward, *calls, **options):
    """Calls of one run, which is the first one of its checks; the cached function."""
    function = torchcache(persistent_cache_dir=folder, **options)(forward)
    with function.cache_instance:
        for call in calls:
            call(function)
    return function


class Hidden:
    """A number that no key covers."""

    def __init__(self, path):
        self.path = path / "number"

    def __call__(self, x):
        return x * float(self.path.read_text())

    def set(self, number):
        self.path.write_text(str(number))


def epoch_of(function, plain, x, order, size):
    """The batches of an epoch that were wrong."""
    return [not torch.equal(function(x[rows]), plain(x[rows])) for rows in torch.tensor(order).split(size)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_what_has_changed_since_the_last_run_is_noticed_by_its_first_found_batch(
    tmp_path, log, size, is_shuffled
):
    hidden, x = Hidden(tmp_path), torch.rand(24, 3)
    path = str(hidden.path)

    def forward(x):
        return x * float(Path(path).read_text())

    for number, runs in ((2.0, 2), (3.0, 3), (2.0, 1)):
        hidden.set(number)
        for _ in range(runs):
            function = torchcache(persistent_cache_dir=tmp_path / "rows")(forward)
            order = torch.randperm(24) if is_shuffled else torch.arange(24)
            with function.cache_instance:
                assert not any(epoch_of(function, hidden, x, order.tolist(), size))
                stats = function.cache_instance.stats()
            assert stats.bypasses == {} and stats.hits + stats.misses == 24
    assert len(warnings_in(log)) == 2  # one in each run that found old rows
    for part in ("rows that were found differ", "keys do not cover", "version=", "ignore="):
        assert part in warnings_in(log)[0]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_number_that_changes_in_a_run_is_noticed_by_the_next_check(data, tmp_path_factory):
    hidden, x = Hidden(tmp_path_factory.mktemp("hidden")), torch.rand(24, 3)
    path, size = str(hidden.path), data.draw(st.sampled_from([3, 8, 24]), "size")
    order = st.permutations(range(24)) if data.draw(st.booleans(), "shuffled") else st.just(list(range(24)))
    function, wrong = torchcache(lambda x: x * float(Path(path).read_text())), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", Clock())  # checks have no price
        for number, epochs in ((1.0, data.draw(st.integers(1, 9), "epochs before")), (2.0, 12)):
            hidden.set(number)
            for _ in range(epochs):
                wrong += epoch_of(function, hidden, x, data.draw(order), size)
    first = wrong.index(True) if any(wrong) else 0
    assert wrong == sorted(wrong[:first]) + [True] * sum(wrong) + [False] * (len(wrong) - first - sum(wrong))
    assert sum(wrong) <= len(wrong) // 2 + 1  # until twice as many batches were found, at the latest
    assert function.cache_instance.stats().mismatched > 0 and bypasses(function) == {}


def test_stale_rows_are_dropped_and_caching_goes_on(tmp_path, log):
    hidden = Hidden(tmp_path)
    path = str(hidden.path)

    def forward(x):
        return x * float(Path(path).read_text())

    hidden.set(2.0)
    run(tmp_path / "rows", forward, lambda f: f(X))
    hidden.set(3.0)
    function = torchcache(persistent_cache_dir=tmp_path / "rows")(forward)
    with function.cache_instance as cache:
        assert [torch.equal(function(X), 3 * X) for _ in range(4)] == [True] * 4
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.verified, stats.mismatched) == (12, 12, 12, 6)
    hidden.set(4.0)
    strict = torchcache(persistent_cache_dir=tmp_path / "rows", strict=True)(forward)
    with strict.cache_instance:
        with pytest.raises(NotCachedError, match="version="):
            strict(X)
        assert torch.equal(strict(X), 4 * X) and torch.equal(strict(X), 4 * X)


def test_after_a_verdict_first_found_batches_are_checked_again(clock, tmp_path):
    hidden, x = Hidden(tmp_path), torch.randn(32, 3)
    path = str(hidden.path)
    function = counted(
        lambda x: x * float(Path(path).read_text()), seconds=1.0
    )  # the second check is too dear
    for number in (1.0, 2.0):
        hidden.set(number)
        function(x[:16]), function(x[16:])
        assert checks_in(clock, [lambda: function(x[:16])] * 3) == [1]
        hidden.set(number + 1)
        assert torch.equal(function(x[8:24]), x[8:24] * (number + 1))  # the first one put together anew


def test_a_check_of_what_is_outside_does_not_find_what_is_inside(clock, tmp_path):
    hidden, x = Hidden(tmp_path), torch.randn(32, 3)
    path = str(hidden.path)
    inner = counted(lambda x: x * float(Path(path).read_text()), seconds=1.0)
    outer = torchcache(lambda x: inner(x) + 1)
    hidden.set(2.0)
    outer(x), inner(x), inner(x)  # so that the next check of `inner` is too dear
    hidden.set(3.0)
    assert torch.equal(inner(x), x * 2) and torch.equal(outer(x), x * 3 + 1)


def test_what_is_stale_again_and_again_is_not_cached(clock, tmp_path):
    hidden, x = Hidden(tmp_path), torch.randn(64, 3)
    path = str(hidden.path)
    function = torchcache(lambda x: x * float(Path(path).read_text()))
    for number in range(5):
        hidden.set(number)
        for _ in range(40):
            function(x[torch.randperm(64)[:16]])
    assert bypasses(function).keys() == {"batch"}


def centred(x):
    return x - x.mean(0)


def test_mixing_is_a_verdict_for_this_run(tmp_path, clock):
    first = [6, 1, 1, 1, 6]  # a part differs; alone, an item has one output; then nothing is looked at
    for _ in range(2):
        function = counted(centred, persistent_cache_dir=tmp_path)
        with function.cache_instance as cache:
            for _ in range(2):
                del clock.sizes[:]
                function(X), function(X.flip(0))
                assert clock.sizes == first and set(bypasses(function)) == {"batch"}
                for _ in range(5):  # by now, such calls go straight to the forward
                    function(X)
                cache.clear()
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_one_mismatch_is_not_for_life(tmp_path):
    hidden, x = Hidden(tmp_path), torch.rand(64, 3)
    path = str(hidden.path)

    def forward(x):
        return x * float(Path(path).read_text())

    for number in (1.0, 2.0, 1.0):
        hidden.set(number)
        run(tmp_path / "rows", forward, lambda f: [f(part) for part in x.split(16)])
    function = run(tmp_path / "rows", forward, lambda f: [f(part) for part in x.flip(0).split(16)])
    stats = function.cache_instance.stats()
    assert stats.bypasses == {} and stats.hits == 32  # without those of the batches that showed it


def test_texts_of_one_length_and_then_of_many(tmp_path, log):
    def pooled(texts):
        longest = max(map(len, texts))
        return torch.tensor([[float(ord(c)) for c in text.ljust(longest)] for text in texts]).mean(1)

    draw = random.Random(0)
    for epochs, lengths in ((3, [8]), (3, range(8, 20))):
        texts = ["".join(draw.choices("abcdefgh", k=draw.choice(lengths))) for _ in range(80)]
        function = torchcache(item_args="texts", persistent_cache_dir=tmp_path)(pooled)
        with function.cache_instance:
            for _ in range(epochs):
                draw.shuffle(texts)
                for start in range(0, 80, 8):
                    some = texts[start : start + 8]
                    assert torch.equal(function(some), pooled(some))
            assert (bypasses(function) != {}) == (len(lengths) > 1)
    assert "docs/recipes/padding.md" in warnings_in(log)[0]


def test_rows_of_a_name_that_stands_for_the_module_are_replaced(clock):
    module = nn.Linear(4, 3).eval().requires_grad_(False)
    cached = torchcache(persistent_module_hash="encoder")(module)
    before = cached(X)
    with torch.no_grad():
        module.weight += 1
    fresh = cached(X.flip(0))  # the first found batch
    assert not torch.allclose(fresh, before.flip(0)) and bypasses(cached) == {}
    assert torch.equal(cached(X), fresh.flip(0))


@pytest.mark.parametrize("more", [{}, {"persistent_module_hash": "encoder"}])
def test_another_version_is_another_key(more):
    def named(**options):
        return torchcache(**options, **more)(doubled).cache_instance.module_hash

    assert named() == named(version=None) != named(version=1) == named(version="1") != named(version=2)


def test_a_method_that_mixes_leaves_the_rows_of_another_one(tmp_path):
    class Both(nn.Module):
        def encode(self, x):
            return x * 2

        def mix(self, x):
            return x - x.mean(0)

    x = torch.rand(20, 4)
    for expected in (0, 20):
        both = torchcache(Both(), methods=("encode", "mix"), persistent_cache_dir=tmp_path)
        with both.cache_instance as cache:
            for rows in x.split(5):
                assert torch.equal(both.encode(rows), rows * 2)
                assert torch.equal(both.mix(rows), rows - rows.mean(0))
            assert cache.stats("encode").hits == expected and cache.stats("mix").bypasses == {"batch": 20}


# Where nothing can be checked


def test_a_lazy_module_that_is_not_loaded_is_not_checked(tmp_path):
    path = str(tmp_path / "net.pt")
    torch.save(nn.Linear(4, 3).requires_grad_(False), path)
    for expected in (0, 6):
        net = LazyModule(lambda: torch.load(path, weights_only=False), files=path)
        module = torchcache(net, persistent_cache_dir=tmp_path / "rows")
        with module.cache_instance as cache:
            module(X)
            stats = cache.stats()
            assert (stats.verified, stats.unchecked) == (0, expected)
            assert ("unchecked" in str(stats)) == (expected > 0)


def test_a_forward_that_raises_is_not_checked_and_not_tried_each_time(tmp_path, clock):
    broken = tmp_path / "broken"

    def forward(x):
        SIZES.info((len(x), 0.0))
        if broken.exists():
            raise OSError("no such thing")
        return x * 2

    function = torchcache(forward)
    function(X)
    broken.touch()
    assert checks_in(clock, [lambda: function(X.flip(0))] * 9) == [1, 2, 4, 8]
    stats = function.cache_instance.stats()
    assert (stats.hits, stats.unchecked, stats.verified) == (54, 24, 0)


def test_parts_that_have_no_memory_are_not_tried_each_time(clock):
    def forward(x):
        SIZES.info((len(x), 0.0))
        if len(x) < 8:
            raise MemoryError
        return x * 2

    function = torchcache(forward)
    for _ in range(64):
        function(torch.randn(8, 3))
    assert clock.sizes.count(1) <= 7


def test_a_check_that_raises_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    path = str(tmp_path / "broken")

    class Drawing(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if Path(path).exists():
                torch.rand(3)
                raise ValueError("now")
            return x * 2

    module = torchcache(Drawing())
    module(X)
    before = torch.get_rng_state()
    Path(path).touch()
    assert torch.equal(module(X), X * 2) and module.calls == 1
    assert module.cache_instance.stats().unchecked == 6 and torch.equal(torch.get_rng_state(), before)


# Processes


WORKERS = """
import os, sys, time, torch
from torchcache2 import torchcache

time.perf_counter = lambda: 0.0  # no check has a price

@torchcache
def scaled(x):
    os.write(1, f"{len(x)}\\n".encode())
    return x * float(open(sys.argv[1]).read())

x = torch.arange(96.0).reshape(24, 4)
for rows in x.split(3):
    scaled(rows)
os.write(1, b"epochs\\n")
for epoch in range(int(sys.argv[2])):
    if epoch == 6:
        open(sys.argv[1], "w").write("3")
    for half in (x[:12], x[12:]):  # the workers of a loader, of which each finds four batches
        if (child := os.fork()) == 0:
            for rows in half.split(3):
                if not torch.equal(scaled(rows), rows * (2 if epoch < 6 else 3)):
                    os.write(1, b"wrong\\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_workers_count_and_check_together(tmp_path):
    (tmp_path / "scale").write_text("2")
    computed = warm.run(WORKERS, str(tmp_path / "scale"), "6").out.partition("epochs\n")[2].split()
    assert computed == ["3"] * 6  # of 48 batches the 1st, 2nd, 4th, 8th, 16th and 32nd


def test_what_changes_is_noticed_by_workers_that_live_for_an_epoch(tmp_path):
    (tmp_path / "scale").write_text("2")
    words = warm.run(WORKERS, str(tmp_path / "scale"), "12").out.partition("epochs\n")[2].split()
    assert words.count("wrong") == 15  # the 49th to 63rd; later workers begin with a check


MIXING = """
import os, torch
from torchcache2 import torchcache

@torchcache
def centred(x):
    os.write(1, f"{len(x)}\\n".encode())
    return x - x.mean(0)

for seed in range(2):
    if (child := os.fork()) == 0:
        x = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(centred(x), x - x.mean(0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_workers_share_a_verdict():
    assert warm.run(MIXING).out.split() == [*"6111", "6"]


RANKS = """
net = torchcache()(Backbone())
for seed in range(2):
    epoch(net, seed, size=4)
report(net, computed=computed(), mismatched=net.cache_instance.stats().mismatched)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_little_more_than_each_item_once(tmp_path, ranks):
    reports = run_ranks(RANKS, str(tmp_path), ranks=ranks)
    assert all(one["mismatched"] == 0 and one["bypasses"] == {} for one in reports)
    # Of each rank, the checks of its first batches of which none, some and all items were found.
    assert sum(one["computed"] for one in reports) <= 192 + 20 * ranks


SHARED = """
import os, torch
from torch import nn
from torchcache2 import torchcache

torch.manual_seed(0)
table = nn.Embedding(100_000, 8).requires_grad_(False).share_memory()
embed = torchcache(table)
ids = torch.arange(64)
plain = table.weight.clone()
for rows in ids.split(16):
    embed(rows)
if (child := os.fork()) == 0:
    table.weight.detach().numpy()[50_000:] += 1.0  # rows that no found item reads
    os._exit(0)
os.waitpid(child, 0)
before = embed.cache_instance.namespace
embed(ids[8:24])
assert embed.cache_instance.namespace == before
embed(ids[:1])
assert embed.cache_instance.module_hash != before.hex()
assert torch.equal(embed(ids[-8:]), plain[56:64])
"""


def test_weights_that_another_process_changes_are_compared_at_each_check():
    assert "changed by another process" in warm.run(SHARED).err
