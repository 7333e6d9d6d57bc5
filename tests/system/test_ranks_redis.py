"""Ranks of several machines, which are jobs here, with one Redis server: one of them computes an item."""

import contextlib
import os
import signal
import time

import pytest

from tests.helpers import ranks
from tests.helpers.redis import RedisServer, emptied
from tests.helpers.storage import wait_until

SOAK = bool(os.environ.get("SOAK"))

PREAMBLE = """
import glob
from torchcache2.tiers.redis.claims import RedisClaims

RedisClaims.least = float(os.environ.get("LASTS", 60))
MEMORY = {} if os.environ.get("MEMORY") is None else {"max_memory_cache_size": int(os.environ["MEMORY"])}


def made(**options):
    return torchcache(probe=False, persistent_cache_dir=os.environ["URL"], **MEMORY, **options)(Backbone())


def meet(name):
    path = f"{os.environ['MEET']}/{name} "
    open(path + str(RANK), "w").close()
    while len(glob.glob(path + "*")) < WORLD:
        time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def running():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(running):
    """A server with nothing on it."""
    return emptied([running])[0]


@pytest.fixture
def start(tmp_path):
    """Starts the ranks of two machines, those of the first one first."""

    def started(script, server, **env):
        env = {"URL": server.url, "MEET": str(tmp_path)} | env
        both = []
        for machine in range(2):
            job = tmp_path / f"machine {machine}"
            job.mkdir()
            both += ranks.start(PREAMBLE + script, str(job), machine=machine, machines=2, **env)
        return both

    return started


def claims(server):
    with contextlib.closing(server.client()) as client:
        return list(client.scan_iter(b"torchcache2:claim:*"))


EPOCHS = """
net = made()
net(-ITEMS[4 + RANK][None])  # the first call of a kind may compute a whole batch
meet("first")
for seed in range(3):
    epoch(net, seed)
report(net, computed=computed())
"""
SAME = """
SECONDS = 0.001
net = made()
net(-ITEMS[4 + RANK][None])
meet("first")
for seed in range(3):
    epoch(net, 10 * seed + RANK, shares=False)
report(net, computed=computed())
"""


@pytest.mark.parametrize("memory", [None, *[100_000_000] * SOAK], ids=["redis", *["memory"] * SOAK])
def test_three_epochs_that_are_shared_out_compute_each_item_once(server, start, memory):
    env = {} if memory is None else {"MEMORY": str(memory)}
    found = ranks.reports(start(EPOCHS, server, **env))
    assert sum(one["computed"] for one in found) == sum(one["misses"] for one in found) == 192 + 4
    assert sum(one["hits"] for one in found) == 2 * 192
    assert all(one["faults"] == 0 and one["bypasses"] == {} for one in found)
    assert claims(server) == []


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 100_000_000], ids=["redis", "memory"])
def test_ranks_that_go_through_all_items_compute_each_once(server, start, memory):
    env = {} if memory is None else {"MEMORY": str(memory)}
    found = ranks.reports(start(SAME, server, **env))
    assert sum(one["computed"] for one in found) == 192 + 4
    assert sum(one["waited"] for one in found) > 0
    assert all(one["faults"] == 0 and one["bypasses"] == {} for one in found)
    assert claims(server) == []


KILLED = """
def pause(count):  # the same code in all ranks: it is a part of the namespace
    os.write(COUNTER, bytes(count))
    if int(os.environ["RANK"]) < 2 and count > 1:
        meet_half()
        time.sleep(600)

def meet_half():
    open(f"{os.environ['MEET']}/computing {os.environ['RANK']}", "w").close()

net = made()
net(-ITEMS[RANK][None])
meet("first")
if RANK >= 2:
    while len(glob.glob(f"{os.environ['MEET']}/computing *")) < 2:
        time.sleep(0.001)
x = ITEMS[8 * (RANK % 2):][:8]
assert torch.equal(net(x), expected(x))
report(net, computed=computed())
"""


@pytest.mark.slow
@pytest.mark.parametrize("act", ["killed", *["stopped"] * SOAK])
def test_a_machine_that_is_lost_is_waited_for_no_longer_than_its_claims_last(server, start, tmp_path, act):
    lasts = 3.0
    lost, others = [], []
    started = start(KILLED, server, LASTS=str(lasts))
    lost, others = started[:2], started[2:]
    wait_until(lambda: len(list(tmp_path.glob("computing *"))) == 2)
    time.sleep(lasts / 3)
    assert [rank.out for rank in others] == ["", ""]
    began = time.monotonic()
    for rank in lost:
        rank.send(signal.SIGKILL if act == "killed" else signal.SIGSTOP)
    found = ranks.reports(others)
    assert time.monotonic() - began < lasts + 5.0
    assert [(one["misses"], one["taken_over"]) for one in found] == [(9, 8), (9, 8)]
    for rank in lost:
        rank.send(signal.SIGKILL)
    for rank in lost:
        assert rank.wait() == -signal.SIGKILL
    wait_until(lambda: claims(server) == [])
