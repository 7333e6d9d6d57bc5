"""The memory tier against a plain dict that may forget, and its budget against the system's."""

import functools
import gc
import os
import pathlib

import numpy as np
import pytest
import torch

from tests.helpers import storage
from tests.helpers.storage import CPU, check_values, keys_of, value_of
from tests.helpers.storage import NAMESPACES as ALL_NAMESPACES
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.tiers.memory import arena as arena_module
from torchcache2.tiers.memory import table as table_module
from torchcache2.tiers.memory.tier import MemoryTier

NAMESPACES = ALL_NAMESPACES[:2]
SOAK = bool(os.environ.get("SOAK"))


def rows_of(names, width, dtype=None):
    output = {"y": torch.stack([value_of(name, width) for name in names]), "n": width, "z": None}
    return Rows.from_pytree(output, len(names), device=CPU, dtype=dtype)


def put(tier, names, width=4, namespace=NAMESPACES[0]):
    return tier.put(keys_of(names, namespace), rows_of(names, width))


def check_outputs(output, names, width):
    assert output["n"] == width and output["z"] is None
    check_values(output["y"], names, width)


found = functools.partial(storage.found, check=check_outputs)


@pytest.fixture(params=["reserved", "moved", "chunked"])
def growth(request, monkeypatch):
    """Columns that grow in reserved address space, by moving, and by chunks as on an accelerator."""
    if request.param == "chunked":

        def chunked(row_bytes, limit, device, runtime, are_remote):
            return arena_module._ChunkedColumn(row_bytes, device, runtime)

        monkeypatch.setattr(arena_module, "row_column", chunked)
    if request.param == "moved":

        def refuse(*args, **options):
            raise OSError("no address space")

        monkeypatch.setattr(arena_module.mmap, "mmap", refuse)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("growth")
@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_random_walk_stays_in_the_budget_and_never_lies(policy):
    budget = 200_000
    live = set(NAMESPACES)
    tier = MemoryTier(budget, policy, in_use=lambda: live)
    rng = np.random.default_rng(1)
    widths = [1, 3, 50, 400]
    for _ in range(600 if SOAK else 250):
        width = int(rng.choice(widths))
        names = [f"{i}/{width}" for i in rng.choice(600, rng.integers(1, 40), replace=False)]
        namespace = NAMESPACES[rng.integers(2)]
        if rng.random() < 0.5:
            assert 0 <= put(tier, names, width, namespace) <= len(names)
        else:
            found(tier, names, width, namespace)
        if rng.random() < 0.01:
            tier.drop(namespace)
            live.symmetric_difference_update({NAMESPACES[0]})
            assert found(tier, names, width, namespace) == []
        assert tier.stats().bytes <= budget
    stats = tier.stats()
    assert stats.bytes > budget * 0.3
    assert stats.evictions > 0 or policy == "keep"


def room_for(rows, width=4):
    """A budget that just holds so many rows."""
    tier = MemoryTier(10**9)
    put(tier, list(range(rows)), width)
    return tier.stats().bytes


def test_mru_keeps_what_came_first():
    tier = MemoryTier(room_for(40, 1000), "keep")
    for name in range(80):
        put(tier, [name], 1000)
    kept = found(tier, list(range(80)), 1000)
    assert kept == list(range(len(kept))) and 35 <= len(kept) <= 41
    assert tier.stats().evictions == 0


def test_lru_drops_the_least_recently_used():
    tier = MemoryTier(room_for(30, 1000), "lru")
    for name in range(30):
        put(tier, [name], 1000)
    before = [name for name in range(30) if found(tier, [name], 1000)]
    found(tier, before[:5], 1000)
    for name in range(100, 110):
        assert put(tier, [name], 1000) == 1
    after = found(tier, [*range(30), *range(100, 110)], 1000)
    assert set(before[:5]) <= set(after) and set(range(100, 110)) <= set(after)
    dropped = sorted(set(before) - set(after))
    assert dropped == before[5 : 5 + len(dropped)]
    assert tier.stats().evictions >= len(dropped) > 0


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_rows_of_a_dead_namespace_make_room(policy):
    living = set(NAMESPACES)
    tier = MemoryTier(room_for(50, 1000), policy, in_use=lambda: living)
    for name in range(200):
        put(tier, [name], 1000, NAMESPACES[0])
    old = found(tier, list(range(200)), 1000, NAMESPACES[0])
    evictions = tier.stats().evictions
    living.remove(NAMESPACES[0])
    for name in range(40):
        assert put(tier, [name], 1000, NAMESPACES[1]) == 1
    assert found(tier, list(range(40)), 1000, NAMESPACES[1]) == list(range(40))
    assert found(tier, list(range(200)), 1000, NAMESPACES[0]) == []
    assert tier.stats().evictions == evictions + len(old)


def test_a_namespace_without_a_module_stays_while_there_is_room():
    tier = MemoryTier(10**8, in_use=set)
    put(tier, [1, 2], namespace=NAMESPACES[0])
    put(tier, [1, 2], namespace=NAMESPACES[1])
    assert found(tier, [1, 2], namespace=NAMESPACES[0]) == [1, 2]


def test_a_full_tier_says_so_once(log):
    tier = MemoryTier(room_for(5, 1000))
    for name in range(30):
        put(tier, [name], 1000)
    messages = [record.getMessage() for record in log if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert "max_memory_cache_size" in messages[0] and "full" in messages[0]


def test_a_batch_larger_than_the_budget_is_kept_in_part():
    for policy in ("keep", "lru"):
        tier = MemoryTier(100_000, policy)
        assert 15 <= put(tier, list(range(100)), 1000) < 25
        assert tier.stats().bytes <= 100_000


@pytest.mark.parametrize("budget", [0, 1, 100, 4000])
def test_a_budget_without_room_for_a_row_keeps_nothing(budget):
    tier = MemoryTier(budget)
    assert put(tier, [1, 2, 3], 1000) == 0
    assert tier.stats() == (type(tier.stats()))(rows=0, bytes=0, evictions=0)


def resident_bytes():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def put_much(tier, times):
    """Put rows of several widths, so many times; it stops after each."""
    rng = np.random.default_rng(0)
    for number in range(times):
        width = int(rng.choice([16, 256, 4096, 65_536]))
        count = max(1, min(200, 100_000 // width))
        data = rng.integers(0, 256, (count, 16), dtype=np.uint8)
        output = torch.full((count, width), float(number))
        tier.put(Keys(NAMESPACES[width % 2], data), Rows.from_pytree(output, count, device=CPU))
        del output
        yield


@pytest.mark.slow
def test_the_budget_is_what_the_process_allocates():
    small = MemoryTier(2_000_000, "lru")
    for _ in put_much(small, 100):  # what Python, malloc and torch take at first, and keep
        pass
    small.close()
    tier = MemoryTier(120_000_000, "lru")
    put(tier, [0])
    gc.collect()
    before = resident_bytes()
    base = tier.stats().bytes
    for _ in put_much(tier, 600):
        grown = resident_bytes() - before
        stats = tier.stats()
        assert stats.bytes <= 120_000_000
        # Besides: what they keep of more, which does not grow with the cache.
        assert grown <= stats.bytes - base + 25_000_000
    assert tier.stats().bytes > 90_000_000
    assert resident_bytes() - before > 70_000_000
    tier.close()
    gc.collect()
    assert resident_bytes() - before < 25_000_000


@pytest.mark.slow
def test_bookkeeping_of_a_million_rows_is_at_most_64_bytes_a_row():
    tier = MemoryTier(10**9)
    rng = np.random.default_rng(0)
    rows = Rows.from_pytree(torch.zeros(10_000, 4), 10_000, device=CPU)
    for _ in range(100):
        tier.put(Keys(NAMESPACES[0], rng.integers(0, 256, (10_000, 16), dtype=np.uint8)), rows)
    stats = tier.stats()
    assert stats.rows == 1_000_000
    assert (stats.bytes - 16_000_000) / stats.rows <= 64


def test_too_many_groups_are_forgotten_and_their_rows_can_be_put_again(monkeypatch):
    """A group stands for calls with the same other arguments, of which there may be one for each call."""
    monkeypatch.setattr(table_module, "_MOST_GROUPS", 3)
    tier = MemoryTier(10_000_000)

    def keys(number):
        return Keys(NAMESPACES[0], keys_of([number]).data, group=bytes([number]) * 16)

    def has(number):
        parts = tier.get(keys(number)).parts
        for _, rows in parts:
            check_outputs(rows.to_pytree(device=CPU), [number], 4)
        return len(parts) == 1

    plain = MemoryTier(10_000_000)  # the same rows, of no group
    sizes = []
    for number in range(20):
        assert tier.put(keys(number), rows_of([number], 4)) == 1
        assert has(number)
        plain.put(keys_of([number]), rows_of([number], 4))
        sizes.append(tier.stats().bytes - plain.stats().bytes)
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert max(sizes) == sizes[2], "forgotten groups take memory"
    # The fourth group came when there were three, and those were forgotten; so were later ones.
    assert [number for number in range(20) if has(number)] == [18, 19]
    tier.put(keys(0), rows_of([0], 4))
    assert has(0) and has(18) and has(19)
    tier.put(keys(19), rows_of([19], 4))
    assert has(0) and has(18) and has(19), "a group that is there is no further one"


def test_a_group_that_is_put_again_and_again_has_each_row_once():
    tier = MemoryTier(10_000_000)

    def of_group(names):
        return Keys(NAMESPACES[0], keys_of(names).data, group=b"g" * 16)

    for first in range(0, 40, 10):
        assert tier.put(of_group(range(first, first + 10)), rows_of(range(first, first + 10), 4)) == 10
    size = tier.stats().bytes
    assert tier.put(of_group(range(40)), rows_of(range(40), 4)) == 0 and tier.stats().bytes == size
    ((positions, rows),) = tier.get(of_group(range(5, 50))).parts
    assert positions.tolist() == list(range(35))
    check_outputs(rows.to_pytree(device=CPU), range(5, 40), 4)


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_one_row_is_used_like_those_of_a_batch(policy):
    tier = MemoryTier(20_000, policy)
    put(tier, range(10), 4)
    put(tier, [10], 9)
    keys = keys_of(range(12))
    words, made = keys.words.tolist(), []
    for name in range(12):
        made.append(tier.get_one(keys.namespace, *words[name], lambda schema, row: bytes(row[0])))
    expected = [value_of(name, 9 if name == 10 else 4).numpy().tobytes() for name in range(11)]
    assert made == [*expected, None]
    if policy == "lru":
        for start in range(100, 3000, 100):  # all others make room
            tier.get_one(keys.namespace, *words[3], lambda schema, row: True)
            put(tier, range(start, start + 100), 4)
        assert tier.stats().evictions > 0 and found(tier, range(10)) == [3]
    tier.drop(keys.namespace)
    assert tier.get_one(keys.namespace, *words[3], lambda schema, row: True) is None
    tier.close()
