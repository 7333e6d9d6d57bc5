import copy
import dataclasses
import pickle
import threading
import time
import xml.etree.ElementTree

import pytest
import torch
from torch import nn

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
    assert CacheStats() == Counters().stats(**MEMORY)
    assert str(CacheStats()).splitlines()[0] == "hits      0 (0.0%)"


def test_notebooks_show_the_same_table_and_what_looks_like_html_as_it_is():
    stats = dataclasses.replace(SOME, bypasses={"a <b> & 'c'": 1})
    (table,) = xml.etree.ElementTree.fromstring(f"<all>{stats._repr_html_()}</all>")
    cells = [[cell.text for cell in row] for row in table]
    assert cells == [[line[:10].strip(), line[10:]] for line in str(stats).splitlines()]


# A rank sends its stats to another, and a training loop logs them as a dict.
def test_stats_of_a_cache_can_be_copied_sent_and_made_a_dict_and_are_of_a_moment():
    counters = Counters()
    counters.bypass("grad", 5)
    stats = counters.stats(**MEMORY)
    counters.count(hits=1, misses=1, computed=1, seconds=1.0, spent=0.0)
    counters.bypass("grad", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.hits = 0
    for one in (stats, dataclasses.replace(stats, hits=5, seconds_saved=None)):
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    plain = dataclasses.asdict(stats)
    assert dict(plain.pop("bypasses")) == {"grad": 5} and set(plain.values()) == {0}


# The counts of calls: hits, misses, computed items, their seconds, and those of the cache; what was saved.
SAVED = {
    "hits of half a second, less what the cache took": ([(0, 4, 4, 2.0, 0.5), (6, 0, 0, 0.0, 0.25)], 2.25),
    "not known, as no miss was timed": ([(6, 0, 0, 0.0, 0.75)], None),
    "known again": ([(6, 0, 0, 0.0, 0.75), (0, 1, 1, 2.0, 0.25)], 6 * 2.0 - 1.0),
    "caching costs more": ([(0, 10, 10, 1.0, 3.0)], -3.0),
    "and still does": ([(0, 10, 10, 1.0, 3.0), (5, 0, 0, 0.0, 0.0)], -2.5),
    "a batch of eight computed whole for two misses": ([(6, 2, 8, 4.0, 0.0)], 6 * 0.5),
    "a slow first call": ([(0, 4, 4, 90.0, 0.0), *[(0, 4, 4, 2.0, 0.0)] * 2, (6, 0, 0, 0.0, 0.0)], 6 * 0.5),
    "three slow ones": ([*[(0, 4, 4, 90.0, 0.0)] * 3, *[(0, 4, 4, 2.0, 0.0)] * 4, (6, 0, 0, 0.0, 0.0)], 3.0),
    "found in a batch of 64, and computed one by one": (
        [*[(0, 64, 64, 2.0, 0.0)] * 2, *[(0, 1, 1, 1.0, 0.0)] * 3, (64, 0, 0, 0.0, 0.0), (1, 0, 0, 0.0, 0.0)],
        2.0 + 1.0,
    ),
    "a slow first call, and smaller ones": (
        [(0, 8, 8, 90.0, 0.0), (0, 2, 2, 1.0, 0.0), (8, 0, 0, 0.0, 0.0)],
        4.0,
    ),
    "of two, the first may have compiled": ([(0, 4, 4, 90.0, 0.0), (6, 4, 4, 2.0, 0.0)], 6 * 0.5),
}


@pytest.mark.parametrize(("calls", "saved"), SAVED.values(), ids=SAVED)
def test_what_hits_have_saved(calls, saved):
    counters = Counters()
    for hits, misses, computed, seconds, spent in calls:
        counters.count(hits=hits, misses=misses, computed=computed, seconds=seconds, spent=spent)
    stats = counters.stats(**MEMORY)
    assert stats.seconds_saved == saved
    assert ("saved     not known: no miss was timed" in str(stats).splitlines()) is (saved is None)
    assert stats.seconds_computed == sum(call[3] for call in calls)
    assert (stats.hits, stats.misses) == tuple(sum(call[i] for call in calls) for i in (0, 1))


def test_hits_that_were_verified_were_computed_and_thus_timed():
    counters = Counters()
    counters.count(hits=6, misses=0, computed=2, seconds=2.0, spent=0.5)
    counters.add(verified=2, mismatched=0)
    assert counters.stats(**MEMORY).seconds_saved == 4 * 1.0 - 0.5


def test_bypasses_are_counted_by_reason_and_the_first_of_each_is_told(log):
    with Cache(b"a" * 16) as cache:
        cache.count_bypass("grad", 5, "it needs a gradient")
        cache.count_bypass("grad", 2, "another one does")
        cache.count_bypass("random", 1, "it draws numbers")
        assert dict(cache.stats().bypasses) == {"grad": 7, "random": 1}
    told = [record.getMessage().partition(": ")[2] for record in log]
    assert told == ["not cached (grad): it needs a gradient", "not cached (random): it draws numbers"]


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


@pytest.mark.slow
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


def run(path):
    torch.manual_seed(0)
    return torchcache(persistent_cache_dir=path, probe=False)(nn.Linear(8, 4).requires_grad_(False))


def test_what_a_run_knows_of_the_disk_and_of_a_run_before(path):
    first, x = run(path), torch.randn(6, 8)
    first(x)
    assert "disk      6 rows, not written yet" in str(first.cache_instance.stats()).splitlines()
    first.cache_instance.flush()
    after = first.cache_instance.stats()
    assert after.disk_bytes > 0 and "not written yet" not in str(after)
    assert any(line.startswith("disk      6 rows, ") for line in str(after).splitlines())
    first.cache_instance.close()
    second = run(path)
    second(x)
    stats = second.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.seconds_saved) == (6, 0, None)
    second(x + 1)
    assert isinstance(second.cache_instance.stats().seconds_saved, float)
    second.cache_instance.close()
