"""What processes see of each other's rows, and the memory that these take."""

import gc
import os
import stat
import sys
import tempfile
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.storage import (
    CPU,
    NAMESPACES,
    found,
    keys_of,
    put,
    value_of,
    warnings_of,
)
from torchcache2.core.process import Forked
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.tiers.index import KeyTable
from torchcache2.tiers.make import job_of, make_tiers
from torchcache2.tiers.meeting import job_name, machine
from torchcache2.tiers.memory.tier import MemoryTier
from torchcache2.tiers.shared import region as region_module
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.region import Region, SharingError
from torchcache2.tiers.shared.tier import SharedTier

SOAK = bool(os.environ.get("SOAK"))


def files_of(tier):
    """The job's files in memory that a tier has open, the board too."""
    return [tier._job.board.region, *[table.region for table in tier._tables.open.values()]]


def resident(*tiers):
    """Bytes that the system has given to the files of some tiers of one job."""
    sizes = {}
    for region in [region for tier in tiers for region in files_of(tier)]:
        sizes[region.inode] = os.fstat(region.descriptor).st_blocks * 512
    return sum(sizes.values())


def one(tier, name):
    """A row as the bytes of its leaves, by way of `get_one`."""
    keys = keys_of([name])
    return tier.get_one(keys.namespace, *keys.words[0].tolist(), lambda schema, row: list(map(bytes, row)))


def test_one_row_is_found_where_the_namespace_is_open_and_not_after_a_drop(join):
    first, second = join(), join()
    put(first, range(50))
    ((_, rows),) = first.get(keys_of(range(50))).parts
    expected = [[bytes(c[i].contiguous().view(torch.uint8).numpy()) for c in rows.columns] for i in range(50)]
    assert [one(first, name) for name in range(50)] == expected
    assert one(first, 50) is None and one(second, 3) is None  # its first `get` opens the namespace
    assert found(second, [3]) == [3] and one(second, 3) == expected[3] and one(second, 4) == expected[4]
    put(first, range(50, 9000))  # the table grows, and is replaced
    assert one(second, 3) == expected[3] and one(second, 8000) == one(first, 8000) is not None

    def dropped_meanwhile(schema, row):
        second.drop(NAMESPACES[0])
        return "zeros, perhaps"

    keys = keys_of([3])
    assert first.get_one(keys.namespace, *keys.words[0].tolist(), dropped_meanwhile) is None
    assert one(first, 3) is None and one(second, 3) is None
    assert (first.stats().faults, second.stats().faults) == (0, 0)


def test_other_jobs_see_nothing(join, tmp_path):
    tier = join()
    put(tier, [1])
    other = SharedTier(b"another job, yes", 10**8, folder=str(tmp_path))
    assert found(other, [1]) == [] and other.stats().rows == 0
    other.close()
    assert found(tier, [1]) == [1]


def test_the_first_one_says_how_large_the_budget_is(join):
    first = join(budget=5_000_000)
    assert join(budget=10**9).budget == first.budget == 5_000_000


def test_the_job_is_named_by_the_environment():
    torchrun = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1"}
    environs = [
        {},
        torchrun,
        torchrun | {"MASTER_PORT": "29501"},
        torchrun | {"TORCHCACHE_JOB": "sweep"},
        {"TORCHCACHE_JOB": "other"},
    ]
    names = [job_name(environ, *parts) for environ in environs for parts in [("a", "b"), ("ab",), ("a", "c")]]
    assert len(set(names)) == 15 and {len(name) for name in names} == {16}
    assert job_name({"TORCHCACHE_JOB": "sweep"}, "a", "b") == job_name(environs[3], "a", "b")


def test_the_processes_of_a_job_of_ray_share_and_no_others(monkeypatch):
    def job(**library):
        """The job of a process in which somebody has imported this as ``ray``."""
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**library))
        return job_of(CacheSettings(), "a")

    def of_ray(address, number, initialised=True):
        context = SimpleNamespace(gcs_address=address, get_job_id=lambda: number)
        return job(is_initialized=lambda: initialised, get_runtime_context=lambda: context)

    assert job_of(CacheSettings(), "a") is None
    places = [(":1", "01"), (":2", "01"), (":1", "02")]
    jobs = [of_ray(*place) for place in places]
    assert len({*jobs, None}) == 4 and jobs == [of_ray(*place) for place in places]
    assert of_ray(":1", "01", initialised=False) is None
    assert job() is None  # another library of this name
    ranks = {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}  # as Ray Train sets
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert of_ray(*places[0]) == of_ray(*places[1])


def test_letting_go_is_for_one_and_dropping_for_all_and_the_last_one_frees_memory(join):
    first, second = join(), join()
    put(first, range(100), 1000)
    assert found(second, [1], 1000) == [1]
    size = first.stats().bytes
    assert size > 400_000
    first.let_go(NAMESPACES[0])
    assert second.stats().bytes == size and found(second, range(100), 1000) == list(range(100))
    assert found(first, [1], 1000) == [1]
    first.drop(NAMESPACES[0])
    assert (first.stats().rows, first.stats().bytes) == (0, size)
    assert found(second, [1], 1000) == []
    assert first.stats().bytes == 0
    assert put(second, [1, 2], 7) == 2 and found(first, [1, 2], 7) == [1, 2]
    second.close()
    first.let_go(NAMESPACES[0])
    assert first.stats().bytes == 0 and first.stats().rows == 0


def test_a_drop_hides_no_namespace_that_takes_the_place_meanwhile(join, monkeypatch):
    """It takes no lock: the file that it has found may be freed before it is marked."""
    first, second = join(), join()
    put(first, [1])
    board, file_of = second._job.board, Board.file_of

    def found_before(self, namespace):
        file = file_of(self, namespace)
        if self is board and namespace == NAMESPACES[0]:
            first.let_go(namespace)
            assert put(first, [2], namespace=NAMESPACES[1]) == 1 and file_of(self, NAMESPACES[1]) == file
        return file

    monkeypatch.setattr(Board, "file_of", found_before)
    second.drop(NAMESPACES[0])
    assert found(first, [1]) == [] and found(first, [2], namespace=NAMESPACES[1]) == [2]


def test_closed_tiers_leave_no_hook_of_forks(tmp_path, monkeypatch):
    """Python removes none."""
    hooks = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
    gc.collect()
    before = len(Forked._methods)
    for _ in range(3):
        SharedTier(os.urandom(16), 10**6, folder=str(tmp_path)).close()
    gc.collect()
    assert hooks == [] and len(Forked._methods) <= before


def test_namespaces_that_nobody_uses_go_first(join):
    used = [set(NAMESPACES[:2]), set(NAMESPACES[:2])]
    first = join(1_000_000, lambda: used[0])
    second = join(1_000_000, lambda: used[1])
    assert put(first, range(100), 1000) == 100
    assert found(second, [1], 1000) == [1]
    assert put(first, range(80), 1000, NAMESPACES[1]) == 80
    used[0] = {NAMESPACES[1], NAMESPACES[2]}
    assert put(first, range(100), 1000, NAMESPACES[2]) < 100  # `second` uses the first namespace
    used[1] = {NAMESPACES[1], NAMESPACES[2]}
    assert found(second, [1], 1000, NAMESPACES[1]) == [1]  # here it lets go
    assert put(first, range(100), 1000, NAMESPACES[2]) > 0
    assert found(first, range(100), 1000, NAMESPACES[2]) == list(range(100))
    assert found(first, range(80), 1000, NAMESPACES[1]) == list(range(80))
    assert found(first, range(100), 1000, NAMESPACES[0]) == []
    assert first.stats().evictions + second.stats().evictions == 100


def test_an_index_takes_at_most_64_bytes_a_row(join):
    tier = join()
    most = 0
    for start in range(0, 60_000, 1500):
        data = np.random.default_rng(start).integers(0, 256, (1500, 16), dtype=np.uint8)
        keys = keys_of([])
        tier.put(type(keys)(keys.namespace, data), Rows.from_pytree(torch.zeros(1500, 0), 1500, device=CPU))
        if start >= 20_000:
            most = max(most, tier.stats().bytes / tier.stats().rows)
    assert most <= 64 and tier.stats().rows == 60_000


@pytest.mark.slow
def test_a_larger_index_is_made_with_little_memory_besides(join):
    tier, generator = join(), np.random.default_rng(0)
    rows, keys = Rows.from_pytree(torch.zeros(10_000, 0), 10_000, device=CPU), keys_of([])
    tracemalloc.start()
    try:
        for _ in range(70):  # the index grows at 327,680 and 655,360 rows
            data = generator.integers(0, 256, (10_000, 16), dtype=np.uint8)
            assert tier.put(type(keys)(keys.namespace, data), rows) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert tier.has(type(keys)(keys.namespace, data)).all()


def test_a_flipped_byte_is_a_miss_when_it_is_first_read(join, log):
    first, second, third = join(), join(), join()
    put(first, range(10), 100)
    (table,) = first._tables.open.values()
    _, locations = table._index.find(keys_of([3]).words)
    data = table.region.rows(1)
    place = next(iter(table._chunks._places(table._chunks.schema(1), locations)))
    data[place[0] + 77] ^= 4
    assert found(third, [4], 100) == [4] and one(third, 3) is None and one(third, 5) is not None
    assert found(second, range(10), 100) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert second.stats().corrupt == 1 and second.stats().rows == 9
    assert len(warnings_of(log)) == 1
    assert found(second, [3, 4], 100) == [4]
    assert put(third, [3, 4], 100) == 1
    assert found(second, range(10), 100) == found(third, range(10), 100) == list(range(10))


def test_a_row_under_another_key_is_a_miss(join):
    first, second = join(), join()
    put(first, range(2), 100)
    (table,) = first._tables.open.values()
    entries, locations = table._index.find(keys_of([0, 1]).words)
    table._index.locations[entries] = locations[::-1]
    assert found(second, [0, 1], 100) == []
    assert second.stats().corrupt == 2


def test_the_folder_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tier = SharedTier(os.urandom(16), 10**7)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    tier.close()
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    others = [folder / f"{machine()}-{name}" for name in ("pipe", "file")]
    os.mkfifo(others[0])  # who opens it to read would wait for ever
    others[1].touch()
    with pytest.raises(SharingError, match="alone can enter"):
        SharedTier(os.urandom(16), 10**7)
    assert sorted(folder.iterdir()) == sorted(others), "nothing in a folder that others can enter is ours"


def test_what_killed_jobs_have_left_is_deleted(join, tmp_path):
    held = SharedTier(os.urandom(16), 10**7, folder=str(tmp_path))
    (file,) = tmp_path.iterdir()
    machine = file.name.partition("-")[0]
    dead = np.array([os.getpid(), 1, 5, 7], np.int64).tobytes()  # the pid is another's by now
    for name, content in [(machine, dead), ("another", dead), (f"{machine}-torn", b"x")]:
        (tmp_path / f"{name}-job").write_bytes(content)
    join()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 4 and {file.name, "another-job", f"{machine}-torn-job"} < names
    held.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_list_that_is_damaged_is_begun_anew(join, tmp_path):
    first = join()
    put(first, [1])
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"\x99" * 77)
    second = join()
    assert found(second, [1]) == []
    put(second, [2])
    assert found(first, [1, 2]) == [1]


def test_nobody_joins_those_who_lock_another_file(join, tmp_path):
    """A list that was deleted comes back when a child of the old processes writes it."""
    first = join()
    put(first, [1])
    (file,) = tmp_path.iterdir()
    file.unlink()
    second = join()
    put(second, [2])
    first._job.rejoin()
    third = join()
    assert found(third, [1, 2]) == [2] and found(first, [1, 2]) == [1]


@pytest.mark.parametrize("what", ["memfd_create", "proc", "hidden", "folder"])
def test_a_system_that_cannot_share_says_so(join, monkeypatch, tmp_path, what):
    if what == "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    elif what == "proc":
        monkeypatch.setattr(region_module, "start_time", lambda pid: 0)
    elif what == "hidden":
        monkeypatch.setattr(Region, "open", classmethod(lambda *args: None))
    else:
        tmp_path.chmod(0o755)
    with pytest.raises(SharingError):
        join()


def test_ranks_that_cannot_share_have_memory_of_their_own(monkeypatch, log):
    monkeypatch.delattr(os, "memfd_create")
    (tier,) = make_tiers(
        CacheSettings(max_memory_cache_size="1MB"), set, lambda namespace: {}, os.urandom(16)
    )
    assert isinstance(tier, MemoryTier) and tier.budget == 10**6
    assert len(warnings_of(log)) == 1 and "on Linux only" in log[-1].getMessage()


@pytest.mark.parametrize("is_named", [False, True], ids=["any", "of our name"])
def test_a_file_with_the_inode_of_ours_is_not_taken_for_it(tmp_path, monkeypatch, is_named):
    if is_named:
        monkeypatch.setattr(os, "readlink", lambda path: "/memfd:torchcache2 (deleted)")
    region = Region.create(4096)
    with (tmp_path / "other").open("w+b") as file:
        file.truncate(4096)
        place = region.place._replace(descriptor=file.fileno(), inode=os.fstat(file.fileno()).st_ino)
        assert Region.open(*place) is None and Region.open(*region.place).inode == region.inode


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_refused(join):
    tier = join()
    put(tier, [1])
    region = tier._job.board.region
    path = f"/proc/{os.getpid()}/fd/{region.descriptor}"
    place = region.place
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.close(os.open(path, os.O_RDWR))
            os._exit(1)
        except PermissionError:
            os._exit(0 if Region.open(*place) is None else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fault_is_counted_and_told_once(join, monkeypatch, log):
    tier = join()

    def fail(*args):
        raise OSError("no memory")

    monkeypatch.setattr(Region, "create", fail)
    assert put(tier, [1]) == 0 and found(tier, [1]) == [] and put(tier, [1]) == 0
    assert len(tier.claim(keys_of([1])).mine) == 1
    assert tier.stats().faults == 3 and len(warnings_of(log)) == 1
    monkeypatch.undo()
    assert put(tier, [1]) == 1 and found(tier, [1]) == [1]


def test_memory_that_the_system_does_not_have_is_no_room(join, monkeypatch):
    tier = join()
    put(tier, [1])
    monkeypatch.setattr(Region, "reserve", lambda *args: (_ for _ in ()).throw(OSError("no space")))
    size = tier.stats().bytes
    assert put(tier, range(2, 600)) == 0
    assert tier.stats().bytes < size + 20_000  # room for the rows is given out, and comes to nothing
    monkeypatch.undo()
    assert put(tier, range(2, 600)) > 0
    assert found(tier, range(1, 600)) == list(range(1, 600))


@pytest.mark.parametrize("count", [1, 5])
def test_rows_are_found_while_another_process_makes_a_larger_table(join, monkeypatch, count):
    tier, other = join(), join()
    put(tier, range(count))
    find = KeyTable.find

    def found_late(table, words):
        if table is tier._tables.open[NAMESPACES[0]]._index._table:
            monkeypatch.undo()
            put(other, range(1000, 3000))
        return find(table, words)

    monkeypatch.setattr(KeyTable, "find", found_late)
    assert found(tier, range(count)) == list(range(count))
    assert found(tier, range(1000, 3000)) == list(range(1000, 3000))


class Dict(RuleBasedStateMachine):
    """Several processes see one dict, which may forget."""

    names = st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True)
    namespaces = st.sampled_from(NAMESPACES[:2])
    who = st.integers(0, 3)

    @initialize(count=st.integers(2, 4), budget=st.sampled_from([200_000, 400_000, 10**8]))
    def make(self, count, budget):
        self.folder = tempfile.TemporaryDirectory()
        self.job, self.budget = os.urandom(16), budget
        self.live = [set(NAMESPACES[:2]) for _ in range(count)]
        self.tiers = [self.joined(i) for i in range(count)]
        self.known, self.claims = {}, []

    def joined(self, i):
        tier = SharedTier(self.job, self.budget, lambda: self.live[i], folder=self.folder.name)
        tier.thread = lambda: i + 1  # as if each were a process
        return tier

    def tier(self, who):
        return self.tiers[who % len(self.tiers)]

    def value(self, namespace, name, width):
        return value_of((namespace, name), width)

    def put_names(self, tier, names, namespace, width):
        names = [name for name in names if self.known.get((namespace, name), width) == width]
        if names:
            output = {"x": torch.stack([self.value(namespace, name, width) for name in names]), "n": width}
            kept = tier.put(keys_of(names, namespace), Rows.from_pytree(output, len(names), device=CPU))
            assert 0 <= kept <= len(names)
            self.known |= {(namespace, name): width for name in names}

    @rule(who=who, names=names, namespace=namespaces, width=st.sampled_from([0, 1, 7, 900]))
    def put(self, who, names, namespace, width):
        self.put_names(self.tier(who), names, namespace, width)

    @rule(who=who, names=names, namespace=namespaces)
    def get(self, who, names, namespace):
        here = set()
        for positions, rows in self.tier(who).get(keys_of(names, namespace)).parts:
            output = rows.to_pytree(device=CPU)
            for position, row in zip(positions.tolist(), output["x"], strict=True):
                assert self.known[namespace, names[position]] == output["n"]
                assert torch.equal(row, self.value(namespace, names[position], output["n"]))
                here.add(names[position])
        if self.budget == 10**8:
            assert here == {name for name in names if (namespace, name) in self.known}

    @rule(who=who, names=names, namespace=namespaces, width=st.sampled_from([1, 900]))
    def claim_and_put(self, who, names, namespace, width):
        tier = self.tier(who)
        claim = tier.claim(keys_of(names, namespace))
        assert sorted([*claim.mine.tolist(), *claim.others.tolist()]) == list(range(len(names)))
        if self.budget == 10**8:  # no claim is left from before: what others have, they have put
            assert {names[i] for i in claim.others} == {n for n in names if (namespace, n) in self.known}
        self.put_names(tier, [names[i] for i in claim.mine], namespace, width)
        assert claim.wait().tolist() == []
        claim.release()

    @rule(who=who, namespace=namespaces)
    def drop(self, who, namespace):
        self.tier(who).drop(namespace)
        self.known = {name: width for name, width in self.known.items() if name[0] != namespace}

    @precondition(lambda self: self.budget < 10**8)
    @rule(who=who, namespace=namespaces)
    def let_go(self, who, namespace):
        self.tier(who).let_go(namespace)

    @precondition(lambda self: self.budget < 10**8)
    @rule(who=who, namespace=namespaces)
    def use(self, who, namespace):
        self.live[who % len(self.tiers)] ^= {namespace}

    @precondition(lambda self: self.budget < 10**8)
    @rule(who=who)
    def begin_anew(self, who):
        self.tier(who).close()
        self.tiers[who % len(self.tiers)] = self.joined(who % len(self.tiers))

    @invariant()
    def the_budget_holds(self):
        if hasattr(self, "tiers"):
            counted = self.tiers[0].stats().bytes + self.tiers[0]._job.board.region.size
            assert resident(*self.tiers) <= counted <= self.budget
            assert [tier.stats().faults + tier.stats().corrupt for tier in self.tiers] == [0] * len(
                self.tiers
            )

    def teardown(self):
        if hasattr(self, "tiers"):
            for tier in self.tiers:
                tier.close()
            assert os.listdir(self.folder.name) == []
            self.folder.cleanup()


TestDict = Dict.TestCase
TestDict.settings = settings(
    max_examples=2000 if SOAK else 15, stateful_step_count=25, deadline=None, derandomize=not SOAK
)


def test_a_tier_that_is_closed_in_the_middle_of_what_another_one_does_leaves_nothing(join):
    first, second = join(), join()
    put(first, range(3))
    put(second, range(3), namespace=NAMESPACES[1])
    board = first._job.board
    size, began = board.nbytes, time.monotonic()
    with first._job.lock():  # the garbage collector may close the second one here
        second.close()
    assert time.monotonic() - began < first._job.lock.patience / 2
    assert join()._job.slot == 1  # who joins frees what is left
    assert board.nbytes == size // 2
    assert len(found(first, range(3))) == 3


@pytest.mark.parametrize("budget", [30_000, 100_000, 200_000])
def test_a_small_budget_keeps_some_small_rows_and_those_that_came_first(join, budget, log):
    tier, other, kept = join(budget), join(budget), []
    for first in range(0, 2000, 10):
        names = range(first, first + 10)
        if put(tier, names, 10):
            kept += names
    count = tier.stats().rows
    assert 100 < count < 2000 and kept[:count] == list(range(count))
    assert found(other, range(2000), 10) == list(range(count))
    assert resident(tier) <= 200_000
    assert tier.stats().faults == other.stats().faults == 0 and len(warnings_of(log)) == 1


def test_a_budget_of_terabytes_keeps_single_rows(join):
    tiers = [join(2 * 10**12) for _ in range(2)]
    assert put(tiers[0], range(3)) == 3 and found(tiers[1], range(3)) == [0, 1, 2]


def test_a_budget_of_nothing_keeps_nothing(join):
    tier = join(0)
    assert put(tier, range(10)) == 0 and found(tier, range(10)) == []
    assert tier.stats().bytes == 0
