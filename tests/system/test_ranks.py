"""Ranks of one machine: real processes that share memory, of which each item is computed by one."""

import json
import os
import signal
import time

import pytest

from tests.helpers import warm
from tests.helpers.ranks import PREAMBLE, run, start
from tests.helpers.storage import wait_until
from torchcache2 import CacheSettings, OptionError


@pytest.fixture
def job(tmp_path):
    return str(tmp_path)


MEET = """
import glob

def meet(name):
    path = f"{os.environ['TORCHCACHE_JOB']}/{name} "
    open(path + str(RANK), "w").close()
    while len(glob.glob(path + "*")) < WORLD:
        time.sleep(0.001)
"""
EPOCHS = (
    MEET
    + """
net = torchcache(**json.loads(sys.argv[1]))(Backbone())
for seed in range(3):
    epoch(net, seed)
    meet(seed)  # a rank that is late computes the whole batch in its first call
report(net, computed=computed())
"""
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_item_is_computed_once_for_all_ranks(job, ranks):
    reports = run(EPOCHS, job, json.dumps({"probe": False}), ranks=ranks)
    assert sum(one["misses"] for one in reports) == 192
    assert sum(one["computed"] for one in reports) == 192
    assert sum(one["hits"] for one in reports) == 2 * 192
    assert all(one["faults"] == 0 and one["bypasses"] == {} for one in reports)


def test_each_rank_has_its_own_with_off(job):
    reports = run(EPOCHS, job, json.dumps({"probe": False, "distributed": "off"}))
    assert sum(one["misses"] for one in reports) > 1.4 * 192
    assert all(one["memory_rows"] == one["misses"] and one["waited"] == 0 for one in reports)


def test_ranks_that_go_through_the_same_items_share_the_work(job):
    script = """
    SECONDS = 0.001
    net = torchcache(probe=False)(Backbone())
    epoch(net, RANK, shares=False)
    report(net, computed=computed())
    """
    reports = run(script, job, ranks=3)
    # The first call of a kind may compute a whole batch.
    assert 192 <= sum(one["computed"] for one in reports) <= 192 + 3 * 16
    assert all(one["hits"] + one["misses"] == 192 for one in reports)


def test_memory_is_that_of_all_ranks_under_one_budget(job):
    script = f"""{MEET}
net = torchcache(probe=False, max_memory_cache_size="3MB")(Backbone())
epoch(net, 0)
meet("computed")
report(net)
meet("reported")  # rows go with the ranks that need them
"""
    first, second = run(script, job)
    assert first["memory_rows"] == second["memory_rows"] == 192
    assert first["memory_bytes"] == second["memory_bytes"] <= 3_000_000


WAITING = """
import random
from torchcache2.tiers.base import Claim

HISTORY = []

def waits(claim, wait=Claim.wait):
    if RANK == 1:
        open(os.environ["GO"] + " waits", "w").close()
    return wait(claim)

Claim.wait = waits

def pause(count):  # the same code in all ranks: it is a part of the namespace
    if os.environ["RANK"] == "0" and count == 8 and not os.path.exists(os.environ["GO"]):
        open(os.environ["GO"], "w").close()
        act()

def act():
    while not os.path.exists(os.environ["GO"] + " waits"):
        time.sleep(0.001)
    {act}

net = torchcache(probe=False)(Backbone())
net(-ITEMS[RANK][None])  # the first call of a kind
while RANK == 1 and not os.path.exists(os.environ["GO"]):
    time.sleep(0.001)
began = time.monotonic()
try:
    assert torch.equal(net(ITEMS[:8]), expected(ITEMS[:8])) and RANK == {right}
except ValueError:
    assert RANK == 0
report(net, seconds=time.monotonic() - began)
sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("act", "right"),
    [("raise ValueError", 1), ("torch.rand(1)", "RANK"), ("HISTORY.append(len(HISTORY))", "RANK")],
    ids=["raising", "random", "stateful"],
)
def test_what_one_rank_gives_up_is_computed_by_who_waits(job, tmp_path, act, right):
    script = WAITING.format(act=act, right=right)
    first, second = run(script, job, GO=str(tmp_path / "go"))
    assert first["misses"] == 1
    assert (second["misses"], second["waited"], second["taken_over"]) == (1 + 8, 0, 8)
    assert second["seconds"] < 30  # it would be taken for stuck after a minute


def test_caches_inside_of_each_other_and_batches_of_all_sizes_and_widths(job):
    script = """
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torchcache(probe=False)(Backbone())

        def forward(self, x):
            return self.inner(x) * 2

    @torchcache(probe=False)
    def double(x):
        time.sleep(0.001)
        return x * 2

    outer = torchcache(probe=False)(Outer())
    for turn in range(40):
        order = torch.randperm(len(ITEMS), generator=torch.Generator().manual_seed(turn))
        x = ITEMS[order[: (0, 1, 5, 16)[(turn + RANK) % 4]]]
        assert torch.equal(outer(x), expected(x) * 2)
        wide = x[:, :1].expand(-1, 1 + turn % 7).contiguous()
        assert torch.equal(double(wide), wide * 2)
    others = [one.cache_instance.stats() for one in (outer.inner, double)]
    report(outer, others=[(stats.faults, dict(stats.bypasses)) for stats in others])
    """
    for rank in run(script, job):
        assert (rank["faults"], rank["bypasses"], rank["others"]) == (0, {}, [[0, {}]] * 2)
        assert rank["hits"] > 50


def test_a_rank_that_is_killed_in_its_forward_is_not_waited_for(job, tmp_path):
    go = tmp_path / "go"
    first, second = start(WAITING.format(act="time.sleep(600)", right="RANK"), job, GO=str(go))
    wait_until((tmp_path / "go waits").exists)
    killed = time.monotonic()
    first.send(signal.SIGKILL)
    second.until("taken_over")
    assert time.monotonic() - killed < 30  # it would be taken for stuck after a minute
    assert first.poll(10) == -signal.SIGKILL
    assert json.loads(second.done().out)["misses"] == 1 + 8


@pytest.mark.slow
def test_a_probe_does_not_take_rows_of_others_for_its_own(job):
    script = """
    class Centred(nn.Module):
        def forward(self, x):
            pause(len(x))
            return x - x.mean(0, keepdim=True)

    def pause(count):
        time.sleep(0.7 if count == 1 else 0.0)  # a batch of one cannot be probed

    net = torchcache()(Centred())
    if RANK < 2:
        net(ITEMS[RANK][None])
    else:
        time.sleep(0.3)
        assert torch.equal(net(ITEMS[:2]), ITEMS[:2] - ITEMS[:2].mean(0, keepdim=True))
    report(net)
    """
    assert run(script, job, ranks=3)[2]["bypasses"] == {"batch": 2}


@pytest.mark.slow
def test_hits_are_verified_while_others_compute_all_the_misses(job):
    script = """
    def pause(count):
        time.sleep(0.7 if count == 8 else 0.0)

    net = torchcache(probe=False, verify=1.0)(Backbone())
    net(ITEMS[:4])
    net(-ITEMS[: 2 + RANK])
    if RANK == 0:
        net(ITEMS[8:16])
    else:
        time.sleep(0.4)
        assert torch.equal(net(ITEMS[[0, 1, 2, *range(8, 16)]]), expected(ITEMS[[0, 1, 2, *range(8, 16)]]))
    report(net)
    """
    assert [one["faults"] for one in run(script, job)] == [0, 0]


def test_ranks_write_one_folder_that_serves_any_number_of_them(job, tmp_path):
    script = """
    net = torchcache(probe=False, persistent_cache_dir=sys.argv[1])(Backbone())
    epoch(net, 0)
    net.cache_instance.flush()
    report(net)
    """
    folder = tmp_path / "rows"
    reports = run(script, job + "/1", folder, ranks=3)
    assert sum(one["misses"] for one in reports) == 192
    for ranks in (1, 2):
        reports = run(script, f"{job}/again {ranks}", folder, ranks=ranks)
        assert sum(one["misses"] for one in reports) == 0
        assert sum(one["hits"] for one in reports) == 192


def test_ranks_without_a_folder_share_a_temporary_one(job, tmp_path):
    script = """
    import glob, tempfile
    net = torchcache(probe=False, persistent=True)(Backbone())
    epoch(net, 0)
    folders = glob.glob(tempfile.gettempdir() + "/torchcache2-*")
    assert [str(net.cache_instance.cache_dir)] == [folders[0] + "/cache"] and len(folders) == 1
    report(net)
    """
    reports = run(script, job, TMPDIR=str(tmp_path))
    assert sum(one["misses"] for one in reports) == 192
    assert list(tmp_path.glob("torchcache2-*")) == []


@pytest.mark.slow
def test_a_shared_temporary_folder_stays_as_long_as_anybody_uses_it(job, tmp_path):
    script = """
    from torchcache2.tiers.meeting import Scratch

    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        scratch = Scratch(b"j" * 16)
        file = os.path.join(scratch.path, str(os.getpid()))
        os.makedirs(scratch.path, exist_ok=True)
        open(file, "w").close()
        time.sleep(0.001 * (os.urandom(1)[0] % 2))
        assert os.path.exists(file)
        scratch.remove()
    """
    for rank in start(script, job, ranks=4, TMPDIR=str(tmp_path)):
        rank.done()
    assert list(tmp_path.glob("torchcache2-*")) == []


def test_other_jobs_share_nothing(tmp_path):
    script = """
    net = torchcache(probe=False)(Backbone())
    epoch(net, 0, shares=False)
    report(net)
    """
    ranks = [*start(script, f"{tmp_path} 1", ranks=1), *start(script, f"{tmp_path} 2", ranks=1)]
    assert [json.loads(rank.done().out)["misses"] for rank in ranks] == [192, 192]


@pytest.mark.slow
def test_runs_of_a_sweep_share_if_they_say_so(job):
    script = """
    net = torchcache(probe=False, distributed="node")(Backbone())
    net(-ITEMS[: 2 + int(sys.argv[1])])
    epoch(net, 0, shares=False)
    report(net)
    time.sleep(0.5)
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    text = PREAMBLE + warm.dedented(script)
    runs = [warm.start(text, number, env=alone | {"TORCHCACHE_JOB": job}) for number in range(2)]
    reports = [json.loads(run.done().out) for run in runs]
    assert sum(one["misses"] for one in reports) <= 192 + 5


def test_where_memory_cannot_be_shared_each_rank_has_its_own_and_says_so(job, tmp_path):
    (tmp_path / f"torchcache2_ranks_{os.getuid()}").mkdir(mode=0o755)
    script = """
    net = torchcache(probe=False)(Backbone())
    epoch(net, 0)
    report(net)
    """
    ranks = start(script, job, TMPDIR=str(tmp_path))
    for rank in ranks:
        assert json.loads(rank.done().out)["misses"] == 96
        assert rank.err.count("each rank has its own memory cache, because they cannot share one") == 1


def test_threads_of_ranks_wait_for_each_other_and_not_for_themselves(job):
    script = """
    SECONDS = 0.002
    net = torchcache(probe=False)(Backbone())
    net(-ITEMS[: 2 + RANK])
    outer = torchcache(probe=False)(nn.Sequential(net))

    def work(seed):
        with torch.no_grad():
            epoch(outer if seed % 2 else net, seed, shares=False)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(net)
    """
    reports = run(script, job)
    assert sum(one["misses"] for one in reports) < 2 * 192


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"distributed": "node", "policy": "lru"}, "policy='keep'"),
        ({"distributed": "node", "memory_cache_device": None}, "memory_cache_device='cpu'"),
        ({"distributed": "nodes"}, "'auto', 'off' or 'node'"),
    ],
)
def test_options_that_do_not_go_together(options, text):
    with pytest.raises(OptionError, match=text):
        CacheSettings(**options)
