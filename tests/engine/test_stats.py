import copy
import dataclasses
import html.parser
import pickle
import threading
import time

import pytest
import torch

from torchcache2 import Cache, CacheStats, torchcache
from torchcache2.engine.stats import Counters

MEMORY = {"evictions": 0, "memory_rows": 0, "memory_bytes": 0}
SOME = CacheStats(
    hits=13_824,
    misses=1_797,
    bypasses={"training": 1_200, "grad": 24},
    evictions=3_000,
    memory_rows=1_797,
    memory_bytes=2_228_224,
    seconds_computed=6.904,
    seconds_saved=-0.126,
)


RATES = [
    (CacheStats(), 0.0),
    (CacheStats(hits=5), 1.0),
    (CacheStats(misses=5), 0.0),
    (CacheStats(hits=3, misses=1), 0.75),
    (CacheStats(bypasses={"grad": 7}), 0.0),
    (CacheStats(hits=2, misses=1, bypasses={"grad": 3, "random": 2}), 0.25),
]


@pytest.mark.parametrize(("stats", "rate"), RATES, ids=str)
def test_hit_rate_is_the_share_of_all_items_that_were_asked_for(stats, rate):
    assert stats.hit_rate == rate


def test_the_default_is_a_cache_that_has_done_nothing():
    assert CacheStats() == Counters().stats(**MEMORY)
    assert dict(CacheStats().bypasses) == {}
    assert [value for name, value in vars(CacheStats()).items() if name != "bypasses"] == [0] * 24


def test_str_is_a_table_of_everything():
    assert str(SOME).splitlines() == [
        "hits      13,824 (82.1%)",
        "misses    1,797",
        "bypasses  training 1,200, grad 24",
        "evictions 3,000",
        "memory    1,797 rows, 2.2 MB",
        "computed  6.90 s",
        "saved     -0.13 s (estimated)",
    ]
    assert str(CacheStats()).splitlines() == [
        "hits      0 (0.0%)",
        "misses    0",
        "bypasses  0",
        "evictions 0",
        "memory    0 rows, 0 B",
        "computed  0.00 s",
        "saved     0.00 s (estimated)",
    ]


UNITS = [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (1_500_000, "1.5 MB"), (1_000_000_000, "1.0 GB")]
UNITS += [(12_340_000_000_000, "12.3 TB"), (5_000_000_000_000_000, "5,000.0 TB")]


@pytest.mark.parametrize(("count", "text"), UNITS)
def test_bytes_are_told_in_units_of_a_thousand(count, text):
    assert f" rows, {text}\n" in str(CacheStats(memory_bytes=count))


class Table(html.parser.HTMLParser):
    """The cells of an HTML table; fails on tags that are not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.rows = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        assert self.open[-1] in ("th", "td")
        self.rows[-1].append(data)


def cells(stats):
    table = Table()
    table.feed(stats._repr_html_())
    table.close()
    assert table.open == []
    return table.rows


def test_notebooks_show_the_same_table():
    assert cells(SOME) == [[line[:10].strip(), line[10:]] for line in str(SOME).splitlines()]


def test_what_looks_like_html_is_shown_as_it_is():
    stats = CacheStats(bypasses={"a <b> & 'c'": 1})
    assert ["bypasses", "a <b> & 'c' 1"] in cells(stats)


def test_stats_are_frozen():
    for field in dataclasses.fields(CacheStats):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(SOME, field.name, 0)
    with pytest.raises(AttributeError):
        SOME.hit_rate = 1.0


# A rank sends its stats to another, and a training loop logs them as a dict.
def test_stats_of_a_cache_can_be_copied_sent_and_made_a_dict():
    counters = Counters()
    counters.bypass("grad", 5)
    stats = counters.stats(**MEMORY)
    assert pickle.loads(pickle.dumps(stats)) == copy.deepcopy(stats) == stats
    plain = dataclasses.asdict(stats)
    assert dict(plain.pop("bypasses")) == {"grad": 5}
    assert plain.keys() == {field.name for field in dataclasses.fields(CacheStats)} - {"bypasses"}
    assert {name: plain.pop(name) for name in MEMORY} == MEMORY and set(plain.values()) == {0}


def test_counters_add_up():
    counters = Counters()
    counters.count(hits=0, misses=4, computed=4, seconds=2.0, spent=0.5)
    counters.count(hits=6, misses=0, computed=0, seconds=0.0, spent=0.25)
    stats = counters.stats(evictions=1, memory_rows=2, memory_bytes=3)
    assert (stats.hits, stats.misses, stats.evictions) == (6, 4, 1)
    assert (stats.memory_rows, stats.memory_bytes) == (2, 3)
    assert stats.seconds_computed == 2.0
    # Six hits of half a second each, less what the cache itself took.
    assert stats.seconds_saved == 6 * 0.5 - 0.75


# The counts of calls: hits, misses, computed items, their seconds, and those of the cache; what was saved.
SAVED = {
    "caching costs more": ([(0, 10, 10, 1.0, 3.0)], -3.0),
    "and still does": ([(0, 10, 10, 1.0, 3.0), (5, 0, 0, 0.0, 0.0)], -2.5),
    "a batch of eight computed whole for two misses": ([(6, 2, 8, 4.0, 0.0)], 6 * 0.5),
    "a slow first call": ([(0, 4, 4, 90.0, 0.0), *[(0, 4, 4, 2.0, 0.0)] * 2, (6, 0, 0, 0.0, 0.0)], 6 * 0.5),
    "three slow ones": ([*[(0, 4, 4, 90.0, 0.0)] * 3, *[(0, 4, 4, 2.0, 0.0)] * 4, (6, 0, 0, 0.0, 0.0)], 3.0),
    "of two, the first may have compiled": ([(0, 4, 4, 90.0, 0.0), (6, 4, 4, 2.0, 0.0)], 6 * 0.5),
}


@pytest.mark.parametrize(("calls", "saved"), SAVED.values(), ids=SAVED)
def test_what_hits_have_saved(calls, saved):
    counters = Counters()
    for hits, misses, computed, seconds, spent in calls:
        counters.count(hits=hits, misses=misses, computed=computed, seconds=seconds, spent=spent)
    stats = counters.stats(**MEMORY)
    assert stats.seconds_saved == saved
    assert stats.seconds_computed == sum(call[3] for call in calls)


def test_bypasses_are_counted_by_reason_and_the_first_of_each_is_told(log):
    with Cache(b"a" * 16) as cache:
        cache.count_bypass("grad", 5, "it needs a gradient")
        cache.count_bypass("grad", 2, "another one does")
        cache.count_bypass("random", 1, "it draws numbers")
        assert dict(cache.stats().bypasses) == {"grad": 7, "random": 1}
    told = [record.getMessage().partition(": ")[2] for record in log]
    assert told == ["not cached (grad): it needs a gradient", "not cached (random): it draws numbers"]


def test_stats_are_of_a_moment():
    counters = Counters()
    counters.bypass("grad", 1)
    before = counters.stats(**MEMORY)
    counters.count(hits=1, misses=1, computed=1, seconds=1.0, spent=0.0)
    counters.bypass("grad", 1)
    counters.bypass("random", 1)
    assert (before.hits, before.misses, dict(before.bypasses)) == (0, 0, {"grad": 1})


def test_counters_count_right_under_threads():
    counters = Counters()

    def work():
        for _ in range(2_000):
            counters.count(hits=1, misses=2, computed=2, seconds=0.5, spent=0.25)
            counters.bypass("grad", 3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = counters.stats(**MEMORY)
    assert (stats.hits, stats.misses, dict(stats.bypasses)) == (16_000, 32_000, {"grad": 48_000})
    assert stats.seconds_computed == 8_000.0
    assert stats.seconds_saved == 16_000 * 0.25 - 4_000.0


def test_a_cache_reports_what_it_did():
    @torchcache(max_memory_cache_size="10MB")
    def double(x):
        return x * 2

    items = torch.arange(24.0).view(6, 4)
    double(items[:4])
    double(items[[0, 1, 4, 4]])
    double(items.requires_grad_())
    stats = double.cache_instance.stats()
    # The second batch: two found, one computed, and one that another item of the batch equals.
    assert (stats.hits, stats.misses, dict(stats.bypasses)) == (3, 5, {"grad": 6})
    assert stats.hit_rate == 3 / 14
    assert (stats.memory_rows, stats.evictions) == (5, 0)
    assert 5 * (16 + 16) <= stats.memory_bytes <= 10_000_000
    assert stats.seconds_computed > 0


def test_making_keys_counts_as_a_cost():
    first = torchcache(lambda x: x[:, :1] * 2)
    x = torch.randn(64, 200_000)
    first(x)
    before, start = first.cache_instance.engine.counters.seconds_spent, time.perf_counter()
    for _ in range(20):
        first(x)
    passed = time.perf_counter() - start
    # Nearly all that these calls do is to hash their items, on whatever machine.
    assert first.cache_instance.engine.counters.seconds_spent - before > passed / 2
