"""A Redis Cluster of three servers."""

import binascii
import contextlib

import numpy as np
import pytest

from tests.helpers import storage
from tests.helpers.clients import NAMESPACE, connected, get, keys, put, values
from tests.helpers.redis import PASSWORD, PROGRAMS, RedisServer, free_port, names
from tests.helpers.storage import wait_until
from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server, Servers
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import LOST, Slots
from torchcache2.tiers.redis.record import pattern, row_names
from torchcache2.tiers.redis.tier import RedisTier

LINES = (
    "cluster-enabled yes",
    "cluster-config-file nodes.conf",
    "cluster-require-full-coverage no",
    "cluster-node-timeout 60000",
)
RANGES = [(0, 5460), (5461, 10922), (10923, 16383)]


def node_port():
    """A port of a node; the one that is 10000 higher is for its talk with other nodes."""
    while (port := free_port()) > 55_000:
        pass
    return port


@contextlib.contextmanager
def cluster(program):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(program, *LINES, port=node_port())) for _ in range(3)]
        others = [stack.enter_context(contextlib.closing(server.client())) for server in servers]
        for place, (other, (first, last)) in enumerate(zip(others, RANGES, strict=True)):
            other.execute_command("CLUSTER ADDSLOTS", *range(first, last + 1))
            other.execute_command("CLUSTER SET-CONFIG-EPOCH", place + 1)
        for server in servers[1:]:
            others[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port)
        wait_until(lambda: all(map(is_ready, others)))
        yield servers


def is_ready(other):
    said = other.execute_command("CLUSTER INFO")
    return said["cluster_state"] == "ok" and said["cluster_slots_assigned"] == "16384"


def owners(some):
    """The place of the server that serves each row."""
    slots = [binascii.crc_hqx(name, 0) % 16384 for name in row_names(some)]
    return np.searchsorted([last for _, last in RANGES], slots)


def untagged(count, seed=0):
    """Keys whose slots are those of the whole name: braces have a meaning there."""
    some = keys(count, seed)
    return some.take(np.flatnonzero(~(some.data == ord("{")).any(1)))


@pytest.fixture(params=PROGRAMS, ids=names())
def servers(request):
    with cluster(request.param) as three:
        yield three


@pytest.mark.slow
def test_a_cluster_is_noticed_and_each_node_keeps_its_share(servers, log):
    some = keys(300)
    with connected(servers[1]) as clients:
        clients.check()
        assert put(clients, some) == [b"OK"] * 300
        assert get(clients, some) == values(some)
        sizes = clients.each(b"DBSIZE")
        assert len(sizes) == 3 and sum(sizes) == 300 and min(sizes) > 50
        found = [name for page in clients.scan(pattern(NAMESPACE)) for name in page]
        assert sorted(set(found)) == sorted(row_names(some))
        assert clients.allows_writes(some.words).all() and clients.faults == 0
    with connected(*servers) as clients:
        assert get(clients, some) == values(some) and clients.faults == 0
    with connected(servers[2]) as clients, connected(servers[0]) as others:
        check_claims(RedisClaims(clients), RedisClaims(others), keys(100, seed=1))
    wrong = f"redis://:wrong-secret@127.0.0.1:{servers[0].port}"
    with connected(wrong) as clients, pytest.raises(OptionError, match="refuses the connection"):
        clients.check()

    some = untagged(300)
    with connected(*servers, pause=0.02) as clients:
        put(clients, some)
        servers[2].kill()
        expected = [None if owner == 2 else v for owner, v in zip(owners(some), values(some), strict=True)]
        assert get(clients, some) == expected and get(clients, some) == expected
        assert clients.faults >= 1 and clients.allows_writes(some.words).all()
        replies = put(clients, some)
        assert [reply is LOST for reply in replies] == (owners(some) == 2).tolist()
    with connected(*servers) as clients:  # the first that answers says what there is
        assert get(clients, some) == expected
    assert log and not [record for record in log if PASSWORD in record.getMessage()]


def check_claims(first, second, some):
    """Claims and rows lie on different nodes here, and the row is there before the claim goes."""
    second.thread = lambda: 1
    mine, theirs = Claim(100, [first.of(some)]), Claim(100, [second.of(some)])
    assert len(mine.mine) == len(theirs.others) == 100
    put(first.clients, some.take(np.arange(50)))
    mine.release()
    assert sorted(theirs.wait().tolist()) == list(range(50, 100))
    assert theirs.appeared.tolist() == list(range(50)) and len(theirs.others) == 0
    theirs.release()
    assert first.clients.faults == second.clients.faults == 0


@pytest.fixture(scope="module")
def lasting():
    """A cluster for tests that leave it whole: it takes two seconds until its servers have found together."""
    with cluster(PROGRAMS[0]) as three:
        yield three


def test_a_tier_keeps_rows_on_all_nodes(lasting):
    with contextlib.closing(RedisTier(Servers.of(lasting[1].url))) as tier:
        assert storage.put(tier, range(200)) == 200
        tier.flush()
        assert tier.stats().rows == tier.count(storage.NAMESPACES[0]) == 200
        assert tier.has(storage.keys_of(range(190, 210))).sum() == 10
        assert storage.found(tier, range(300)) == list(range(200))
        claim = tier.claim(storage.keys_of(range(190, 210)))
        assert len(claim.mine) == 10
        claim.release()
        tier.drop(storage.NAMESPACES[0])
        stats = tier.stats()
        assert (stats.rows, stats.corrupt, stats.faults) == (0, 0, 0)


def test_slots_that_move_are_followed(lasting):
    some = untagged(100)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(contextlib.closing(server.client())) for server in lasting]
        with connected(lasting[0], pause=0.02) as clients:
            put(clients, some)
            ids = [other.execute_command("CLUSTER MYID").decode() for other in others]
            slot = binascii.crc_hqx(row_names(some)[0], 0) % 16384
            owner = owners(some)[0]
            target = (owner + 1) % 3
            others[owner].delete(row_names(some)[0])
            for other in (others[target], others[owner], others[3 - owner - target]):
                other.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])
            assert get(clients, some)[0] is None
            wait_until(lambda: put(clients, some)[0] == b"OK")
            assert get(clients, some) == values(some) and clients.faults > 0


def test_slots_are_read_from_what_a_node_says():
    reply = [
        [0, 99, [b"a", 1, b"id"], [b"replica", 2, b"id"]],
        [100, 199, [b"", 7, b"id"]],
        [300, 16383, [None, 7, b"id"]],
    ]
    asked = Server.of({"host": "asked", "port": 5, "password": PASSWORD, "ssl": True})
    slots = Slots(reply, asked)
    assert [node.name for node in slots.nodes] == ["a:1", "asked:7"]
    assert all(dict(node.options)["password"] == PASSWORD for node in slots.nodes)
    assert all(dict(node.options)["ssl"] for node in slots.nodes)
    by_slot = {binascii.crc_hqx(b"%d" % number, 0) % 16384: b"%d" % number for number in range(300_000)}
    asked_for = [by_slot[slot] for slot in (0, 99, 100, 199, 200, 299, 300, 16383)]
    assert slots.of(asked_for).tolist() == [0, 0, 1, 1, -1, -1, 1, 1]
    assert slots.of([b"x{" + by_slot[5] + b"}y", b"a{}b"]).tolist()[0] == 0
    assert slots.of([]).tolist() == []
