"""Rows that other ranks own: they may go at any time, and other rows never notice that they are there."""

import contextlib
import os
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.helpers import storage
from tests.helpers.replicas import Replicas, Stack
from tests.helpers.storage import NAMESPACES, found, keys_of, warnings_of
from torchcache2 import CacheSettings
from torchcache2.engine.cache import Cache
from torchcache2.engine.stack import TierStack
from torchcache2.tiers.base import replicas_of
from torchcache2.tiers.memory import arena as arena_module
from torchcache2.tiers.memory import table as table_module
from torchcache2.tiers.memory.tier import MemoryTier
from torchcache2.tiers.shared.chunks import Chunks
from torchcache2.tiers.shared.region import Region
from torchcache2.tiers.shared.table import SharedTable
from torchcache2.tiers.shared.tier import SharedTier

JOB = b"a job of 16 byte"
KINDS = ["keep", "lru", "moved", "shared"]


@pytest.fixture
def share(tmp_path):
    """Makes tiers of one job."""
    with contextlib.ExitStack() as tiers:
        yield lambda *args, **options: tiers.enter_context(
            contextlib.closing(SharedTier(JOB, *args or [10**7], folder=str(tmp_path), **options))
        )


@pytest.fixture(params=KINDS)
def make(request, monkeypatch, share):
    """Makes tiers of each kind that keeps replicas; those that share are of one job."""
    if request.param == "moved":  # as on devices, where columns grow by moving

        def refuse(*args, **options):
            raise OSError("no address space")

        monkeypatch.setattr(arena_module.mmap, "mmap", refuse)

    def made(budget=10**7, in_use=None):
        if request.param == "shared":
            return share(budget, in_use=in_use)
        return MemoryTier(budget, "lru" if request.param == "lru" else "keep", in_use=in_use)

    made.kind = request.param
    return made


def put(store, names, width=100, namespace=NAMESPACES[0]):
    return storage.put(store, names, width, namespace)


def there(store, names, width=100, namespace=NAMESPACES[0]):
    return found(store, names, width, namespace)


def filled(replicas, width=100, count=200, namespace=NAMESPACES[0], first=0):
    """Put replicas until there is no room; how many were kept."""
    kept = [count]
    while kept[-1] == count:
        kept.append(put(replicas, range(first, first + count), width, namespace))
        first += count
    return sum(kept[1:])


def test_they_go_with_their_namespace(make):
    tier = make()
    replicas = Replicas(Stack(tier))
    for forget in (tier.drop, tier.let_go, replicas.drop):
        for namespace in NAMESPACES[:2]:
            put(tier, range(5), namespace=namespace)
            assert put(replicas, range(5, 9), namespace=namespace) == 4
        forget(NAMESPACES[0])
        assert there(replicas, range(9)) == []
        assert (there(tier, range(9)) == list(range(5))) == (forget == replicas.drop)
        assert there(replicas, range(9), namespace=NAMESPACES[1]) == [5, 6, 7, 8]
        tier.drop(NAMESPACES[0])
        tier.drop(NAMESPACES[1])
    put(replicas, range(5))
    tier.close()
    assert there(replicas, range(5)) == [] and put(replicas, range(5)) == 0
    assert tier.stats().rows == 0


def test_rows_that_are_owned_take_the_room_of_all_replicas(make, log):
    tier = make(1_000_000, in_use=lambda: {NAMESPACES[0]})
    replicas = Replicas(Stack(tier))
    assert filled(replicas) > 500 and filled(replicas, first=10**6, namespace=NAMESPACES[1]) >= 0
    before = tier.stats()
    assert 500_000 < before.bytes <= 1_000_000 and before.evictions == 0
    assert put(tier, range(1000)) == 1000
    assert there(tier, range(1000)) == list(range(1000))
    after = tier.stats()
    assert after.bytes <= 1_000_000 and after.evictions == 0 and after.faults == 0
    assert after.rows == 1000 + len(there(replicas, range(10_000)))
    assert not warnings_of(log)


def test_unused_namespaces_stay_while_replicas_can_go(make):
    tier = make(1_000_000, in_use=lambda: {NAMESPACES[0]})
    replicas = Replicas(Stack(tier))
    put(tier, range(200), namespace=NAMESPACES[2])
    filled(replicas)
    assert there(tier, range(200), namespace=NAMESPACES[2]) == list(range(200))
    assert put(tier, range(1000, 1500)) == 500
    assert there(tier, range(200), namespace=NAMESPACES[2]) == list(range(200))


def test_a_tier_that_is_full_takes_none_at_no_cost(make, monkeypatch):
    tier = make(1_000_000)
    replicas = Replicas(Stack(tier))
    filled(replicas)
    for start in range(0, 5000, 50):
        put(tier, range(start, start + 50))
    stats = tier.stats()
    assert there(replicas, range(10_000)) == []

    def refuse(*args, **options):
        raise AssertionError("no room, and yet something was made")

    monkeypatch.setattr(table_module, "Arena", refuse)
    monkeypatch.setattr(Region, "create", refuse)
    for start in range(0, 1000, 50):
        assert put(replicas, range(start, start + 50)) == 0
        put(tier, range(5000 + start, 5050 + start))
    assert tier.stats().bytes <= 1_000_000 and tier.stats().faults == 0
    if make.kind != "lru":
        assert tier.stats().bytes == stats.bytes and tier.stats().evictions == 0
    monkeypatch.undo()
    tier.drop(NAMESPACES[0])
    assert put(replicas, range(100)) == 100


def test_where_some_did_not_fit_others_are_not_tried(make, monkeypatch):
    tier = make(1_000_000)
    replicas = Replicas(Stack(tier))
    filled(replicas)
    stats, tried = tier.stats(), []
    monkeypatch.setattr(table_module.ArenaTable, "make_room", lambda *_: tried.append("memory"))
    monkeypatch.setattr(SharedTable, "put", lambda *_: tried.append("shared"))
    for start in range(10_000, 10_500, 50):
        assert put(replicas, range(start, start + 50)) == 0
    assert tier.stats() == stats and not tried


def test_how_often_they_go_is_bounded(make):
    """Other rows grow by a few at a time, and all replicas are asked for again and again."""
    tier = make(2_000_000)
    replicas = Replicas(Stack(tier))
    sent = most = filled(replicas, 1000, 50)
    assert most > 200
    for name in range(0, 600, 20):
        put(tier, range(name, name + 20), 1000)
        sent += sum(put(replicas, range(start, start + 50), 1000) for start in range(0, 600, 50))
    assert sent < 5 * most
    assert there(replicas, range(600), 1000) == [] and len(there(tier, range(600), 1000)) > 200


@pytest.mark.parametrize("kind", ["keep", "lru"])
def test_rows_that_are_owned_do_as_without_replicas(kind):
    """In memory of one process even sizes and evictions are the same."""
    generator = np.random.default_rng(0)
    alone, beside = (MemoryTier(300_000, kind, in_use=lambda: NAMESPACES[:2]) for _ in range(2))
    replicas = Replicas(Stack(beside))
    kept = 0
    for _ in range(150):
        names = [f"{name}" for name in generator.choice(400, generator.integers(1, 40), replace=False)]
        width, namespace = int(generator.choice([10, 100])), NAMESPACES[generator.integers(3)]
        names = [(name, width) for name in names]
        action = generator.integers(5)
        if action < 2:
            assert put(beside, names, width, namespace) == put(alone, names, width, namespace)
        elif action < 4:
            kept += put(replicas, names, width, namespace)
            there(replicas, names, width, namespace)
        else:
            assert there(beside, names, width, namespace) == there(alone, names, width, namespace)
        if generator.random() < 0.02:
            alone.drop(namespace)
            beside.drop(namespace)
        assert beside.stats().bytes <= 300_000
        assert beside.stats().evictions == alone.stats().evictions
    assert kept > 300


def test_many_shapes(monkeypatch):
    """An arena takes memory mappings: where there are many, replicas get none."""
    monkeypatch.setattr(table_module, "_MOST_ARENAS", 8)
    tier = MemoryTier(10**7)
    replicas = Replicas(Stack(tier))
    assert [put(replicas, [width], width) for width in range(1, 13)] == [1] * 8 + [0] * 4
    assert put(tier, [50], 50) == 1 and there(tier, [50], 50) == [50]
    assert all(there(replicas, [width], width) == [] for width in range(1, 13))
    assert [put(tier, [width], width) for width in range(1, 13)] == [1] * 12
    assert put(replicas, [99], 99) == 0


# In a stack


def test_they_never_go_to_disk(tmp_path):
    stack = TierStack(CacheSettings(persistent_cache_dir=tmp_path, max_memory_cache_size="100MB"))
    cache = Cache(NAMESPACES[0], stack.settings, tiers=stack)
    replicas = Replicas(stack)
    put(replicas, range(50))
    cache.flush()
    assert not list(tmp_path.rglob("*.safetensors")) and cache.stats().disk_rows == 0
    assert cache.stats().memory_rows == 50
    assert there(stack, range(50)) == [] and not stack.has(keys_of(range(50))).any()
    cache.clear()
    assert there(replicas, range(50)) == [] and cache.stats().memory_rows == 0
    put(replicas, range(50))
    with Cache(NAMESPACES[1], stack.settings, tiers=stack):
        cache.close()
        assert there(replicas, range(50)) == [] and stack.stats()["memory_rows"] == 0


# In memory that processes share


def blocks(*tiers):
    """Bytes that the system has given to the files of some tiers of one job."""
    regions = [table.region for tier in tiers for table in tier._tables.open.values()]
    sizes = {region.inode: os.fstat(region.descriptor).st_blocks * 512 for region in regions}
    return sum(sizes.values())


def test_memory_is_there_for_others_though_processes_have_the_replicas_open(share):
    owner, reader, third = share(2_000_000), share(2_000_000), share(2_000_000)
    replicas = Replicas(Stack(reader))
    count = filled(replicas)
    assert len(there(Replicas(Stack(owner)), range(count))) == count
    assert blocks(owner, reader) > 1_000_000
    assert put(third, range(2000)) == 2000
    assert blocks(owner, reader, third) <= third.stats().bytes <= 2_000_000
    assert there(replicas, range(count)) == there(Replicas(Stack(owner)), range(count)) == []
    assert there(reader, range(2000)) == list(range(2000))
    assert not any(tier.stats().faults or tier.stats().corrupt for tier in (owner, reader, third))


@pytest.mark.parametrize("seen", [True, False])
def test_memory_that_is_given_back_during_a_read_is_a_miss(share, monkeypatch, log, seen):
    owner, writer, reader = share(2_000_000), share(2_000_000), share(2_000_000)
    count, replicas = filled(Replicas(Stack(writer))), Replicas(Stack(reader))
    if seen:
        assert len(there(replicas, range(count))) == count
    gather = Chunks.gather

    def slow(*args):
        monkeypatch.setattr(Chunks, "gather", gather)
        assert put(owner, range(2000)) == 2000
        return gather(*args)

    monkeypatch.setattr(Chunks, "gather", slow)
    assert there(replicas, range(count)) == [] and Chunks.gather is gather
    assert there(replicas, range(count)) == [] and reader.stats().corrupt == 0
    assert not warnings_of(log)


def test_memory_that_is_given_back_during_a_write(share, monkeypatch):
    owner, reader = share(2_000_000), share(2_000_000)
    replicas = Replicas(Stack(reader))
    count = filled(replicas)
    reader.drop(NAMESPACES[0])
    put(replicas, range(count - 200))
    write = Chunks.write

    def slow(*args):
        monkeypatch.setattr(Chunks, "write", write)
        assert put(owner, range(2000)) == 2000
        return write(*args)

    monkeypatch.setattr(Chunks, "write", slow)
    put(replicas, range(count - 200, count - 100))
    assert there(replicas, range(count)) == []
    assert there(reader, range(2000)) == list(range(2000))
    assert reader.stats().faults == 0 and blocks(owner, reader) <= owner.stats().bytes <= 2_000_000


def test_a_process_that_ends_while_it_gives_memory_back(share, monkeypatch):
    first, second = share(2_000_000), share(2_000_000)
    count = filled(Replicas(Stack(second)))

    def die(region, offset, size):
        raise OSError("as if it were killed")

    with monkeypatch.context() as patch:
        patch.setattr(Region, "discard", die)
        put(first, range(2000))
    assert there(Replicas(Stack(second)), range(count)) == []
    assert put(second, range(2000, 3000)) == 1000
    assert put(first, range(3000, 4000)) == 1000 or first.stats().faults
    assert there(second, range(2000, 3000)) == list(range(2000, 3000))


def test_a_process_that_has_too_much_open_keeps_the_replicas_of_what_it_uses(share):
    tier = share(in_use=lambda: {NAMESPACES[0]})
    replicas = Replicas(Stack(tier))
    put(tier, range(5))
    put(replicas, range(5))
    put(replicas, range(5), namespace=NAMESPACES[1])
    tier._tables.let_unused_go()
    assert set(tier._tables.open) == {NAMESPACES[0], replicas_of(NAMESPACES[0])}
    assert tier.stats().evictions == 0


class Dict(RuleBasedStateMachine):
    """Each process sees two dicts, of rows that are owned and of replicas, and both may forget."""

    names = st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True)
    namespaces = st.sampled_from(NAMESPACES[:2])
    who = st.integers(0, 2)
    widths = st.sampled_from([0, 1, 7, 900])
    kinds = st.booleans()

    @initialize(kind=st.sampled_from(["keep", "lru", "shared"]), budget=st.sampled_from([300_000, 10**8]))
    def make(self, kind, budget):
        self.folder, self.budget = tempfile.TemporaryDirectory(), budget
        self.live, job = set(NAMESPACES[:2]), os.urandom(16)

        def tier():
            if kind == "shared":
                return SharedTier(job, budget, lambda: self.live, folder=self.folder.name)
            return MemoryTier(budget, kind, in_use=lambda: self.live)

        self.tiers = [tier() for _ in range(3 if kind == "shared" else 1)]
        self.known = {}

    def store(self, who, is_replica):
        tier = self.tiers[who % len(self.tiers)]
        return Replicas(Stack(tier)) if is_replica else tier

    @rule(who=who, names=names, namespace=namespaces, width=widths, is_replica=kinds)
    def put(self, who, names, namespace, width, is_replica):
        names = [name for name in names if self.known.get((is_replica, namespace, name), width) == width]
        if names:
            kept = put(self.store(who, is_replica), names, width, namespace)
            assert 0 <= kept <= len(names)
            self.known |= {(is_replica, namespace, name): width for name in names}

    @rule(who=who, names=names, namespace=namespaces, is_replica=kinds)
    def get(self, who, names, namespace, is_replica):
        store = self.store(who, is_replica)
        for width in (0, 1, 7, 900):
            mine = [name for name in names if self.known.get((is_replica, namespace, name)) == width]
            here = there(store, mine, width, namespace)
            assert here == sorted(mine) or self.budget < 10**8
        unknown = [name for name in names if (is_replica, namespace, name) not in self.known]
        assert not store.get(keys_of(unknown, namespace)).parts

    @rule(who=who, namespace=namespaces, replicas_only=kinds)
    def drop(self, who, namespace, replicas_only):
        self.store(who, replicas_only).drop(namespace)
        gone = {True} if replicas_only else {True, False}
        self.known = {
            key: width for key, width in self.known.items() if key[1] != namespace or key[0] not in gone
        }

    @rule(namespace=namespaces)
    def forget_module(self, namespace):
        self.live ^= {namespace}

    @invariant()
    def budget_holds(self):
        for tier in getattr(self, "tiers", []):
            stats = tier.stats()
            assert stats.bytes <= self.budget and (stats.faults, stats.corrupt) == (0, 0)

    def teardown(self):
        for tier in getattr(self, "tiers", []):
            tier.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestDict = Dict.TestCase
TestDict.settings = settings(max_examples=200 if os.environ.get("SOAK") else 15, stateful_step_count=25)
