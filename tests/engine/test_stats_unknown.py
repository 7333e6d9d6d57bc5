"""What stats say when something cannot be known yet: what was saved, and what the disk holds."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from torchcache2 import CacheStats, torchcache
from torchcache2.engine.stats import Counters

MEMORY = {"evictions": 0, "memory_rows": 0, "memory_bytes": 0}
X = torch.randn(6, 8)


def run(path, **options):
    torch.manual_seed(0)
    return torchcache(persistent_cache_dir=path, **options)(nn.Linear(8, 4).requires_grad_(False))


def test_hits_without_a_miss_that_was_timed_save_an_unknown_time():
    counters = Counters()
    assert "saved     0.00 s (estimated)" in str(counters.stats(**MEMORY)).splitlines()
    counters.count(hits=6, misses=0, computed=0, seconds=0.0, spent=0.75)
    stats = counters.stats(**MEMORY)
    assert stats.seconds_saved is None
    assert "saved     not known: no miss was timed" in str(stats).splitlines()
    assert "not known: no miss was timed" in stats._repr_html_()
    counters.count(hits=0, misses=1, computed=1, seconds=2.0, spent=0.25)
    assert counters.stats(**MEMORY).seconds_saved == 6 * 2.0 - 1.0


def test_hits_that_were_verified_were_computed_and_thus_timed():
    counters = Counters()
    counters.count(hits=6, misses=0, computed=2, seconds=2.0, spent=0.5)
    counters.add(verified=2, mismatched=0)
    assert counters.stats(**MEMORY).seconds_saved == 4 * 1.0 - 0.5


def test_a_second_run_that_finds_everything_does_not_know_what_it_saved(path):
    first = run(path)
    first(X)
    first.cache_instance.close()
    second = run(path)
    second(X)
    stats = second.cache_instance.stats()
    assert (stats.hits, stats.misses) == (6, 0)
    assert stats.seconds_saved is None
    second(X + 1)
    assert isinstance(second.cache_instance.stats().seconds_saved, float)
    second.cache_instance.close()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_stats_that_do_not_know_can_be_sent(again):
    stats = CacheStats(hits=5, seconds_saved=None)
    assert again(stats) == stats and dataclasses.asdict(stats)["seconds_saved"] is None


def test_rows_that_wait_to_be_written_are_not_sealed_yet(path):
    module = run(path)
    module(X)
    before = str(module.cache_instance.stats())
    module.cache_instance.flush()
    after = module.cache_instance.stats()
    module.cache_instance.close()
    assert "disk      6 rows, not sealed yet" in before.splitlines()
    assert after.disk_bytes > 0 and "not sealed yet" not in str(after)
    assert any(line.startswith("disk      6 rows, ") for line in str(after).splitlines())
