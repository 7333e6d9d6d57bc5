"""Claims in two tiers: of the ranks of a machine, and on a server. Two machines are two jobs here."""

import contextlib
import functools
import os
import random
import threading
import time

import pytest

from tests.helpers.redis import RedisServer
from tests.helpers.storage import found, key_of, keys_of, put, wait_until
from tests.helpers.threads import run_at_once
from torchcache2.core.places import Servers
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import Clients
from torchcache2.tiers.redis.record import row_names
from torchcache2.tiers.shared.tier import SharedTier

SOAK = bool(os.environ.get("SOAK"))


class Rank:
    """What a process has: memory that it shares with those of its machine, and claims on a server."""

    def __init__(self, server, folder, machine, number):
        self.machine = machine
        self.near = SharedTier(b"machine %8d" % machine, 10**8, folder=folder)
        self.near.thread = lambda: number + 1  # as if this were not the thread of the others
        self.clients = Clients(Servers.of(server.url), read_timeout=5.0)
        self.far = RedisClaims(self.clients, self.once_sent)
        self.far.thread = lambda: number
        self.late = False

    def claim(self, names):
        keys = keys_of(list(names))
        return Claim(len(keys), [claim for claim in (self.near.claims(keys), self.far.of(keys)) if claim])

    def there(self, names):
        keys = keys_of(names)
        return self.clients.exist(row_names(keys), keys.words).tolist()

    def missing(self, names):
        near = set(found(self.near, names))
        left = [name for name in names if name not in near]
        there = self.there(left)
        put(self.near, [name for name, is_row in zip(left, there, strict=True) if is_row])
        return [name for name, is_row in zip(left, there, strict=True) if not is_row]

    def put(self, names):
        """What the tiers do."""
        put(self.near, list(names))
        self.publish(list(names))

    def publish(self, names):
        keys = keys_of(names)
        self.clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)

    def once_sent(self, keys, function):
        """The thread that sends rows may come later."""
        if self.late:
            threading.Timer(0.005, function, [keys]).start()
        else:
            function(keys)

    def close(self):
        self.near.close()
        self.far.close()
        self.clients.close()


@pytest.fixture(scope="module")
def running():
    with RedisServer() as server:
        yield server


@pytest.fixture
def join(running, tmp_path):
    with contextlib.closing(running.client()) as client:
        client.flushall()
    ranks = []

    def joined(machine, server=running):
        ranks.append(Rank(server, str(tmp_path), machine, len(ranks)))
        return ranks[-1]

    yield joined
    for rank in ranks:
        rank.close()


def test_what_is_mine_is_so_in_both(join):
    one, same, other = join(1), join(1), join(2)
    mine = one.claim(range(4))
    assert mine.mine.tolist() == [0, 1, 2, 3]
    theirs = other.claim(range(2, 6))
    assert theirs.mine.tolist() == [2, 3] and theirs.others.tolist() == [0, 1]
    third = same.claim(range(8))  # the near claim refuses 0 to 3, and the far one 4 and 5
    assert third.mine.tolist() == [6, 7] and third.others.tolist() == [0, 1, 2, 3, 4, 5]
    one.put(range(4))
    mine.release()
    other.put([4, 5])
    theirs.release()
    assert third.wait().tolist() == [] and third.others.tolist() == []
    assert third.appeared.tolist() == [0, 1, 2, 3, 4, 5]
    third.release()
    theirs = other.claim(range(2, 6))
    assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1, 2, 3]


def test_what_is_given_up_near_is_claimed_far_before_it_is_computed(join):
    one, same, other = join(1), join(1), join(2)
    mine, theirs = one.claim(range(4)), same.claim(range(4))
    mine.release()
    third = other.claim([0, 1])
    assert third.mine.tolist() == [0, 1]
    assert theirs.wait().tolist() == [2, 3] and theirs.others.tolist() == [0, 1]
    same.put([2, 3])
    other.put([0, 1])
    third.release()
    assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1]
    assert theirs.others.tolist() == []
    third.release()
    theirs.release()


def test_what_another_machine_gives_up_is_computed_by_one_of_those_that_wait(join):
    one, same, other = join(1), join(1), join(2)
    lost = other.claim(range(6))
    claims = [one.claim(range(6)), same.claim(range(6))]
    assert [len(claim.mine) for claim in claims] == [0, 0]
    taken = []

    def wait(rank, claim):
        while len(claim.others):
            names = claim.wait().tolist()
            taken.extend(names)
            rank.put(names)
            claim.release()
        claim.release()

    def release():
        time.sleep(0.02)
        lost.release()

    waits = [functools.partial(wait, *pair) for pair in zip((one, same), claims, strict=True)]
    run_at_once(release, *waits)
    assert sorted(taken) == list(range(6))


def test_nothing_is_held_on_servers_while_a_rank_of_the_machine_is_waited_for(join):
    one, same, other = join(1), join(1), join(2)
    mine, theirs = one.claim([1]), same.claim([1, 2])
    assert theirs.mine.tolist() == [1]
    waiting = threading.Thread(target=theirs.wait)
    waiting.start()
    wait_until(lambda: other.claim([2]).mine.tolist() == [0], seconds=10)  # less than a lease
    one.put([1])
    mine.release()
    waiting.join(30)
    assert theirs.appeared.tolist() == [0]


def test_nothing_is_held_on_the_machine_while_another_one_is_waited_for(join):
    one, same, more, other = join(1), join(1), join(1), join(2)
    held = other.claim([1])
    mine, theirs = one.claim([1]), same.claim([1])
    assert len(mine.mine) == len(theirs.mine) == 0
    waiting = threading.Thread(target=theirs.wait)
    waiting.start()
    mine.release()  # near, it is now for the one that waits, who is refused it far
    wait_until(lambda: more.near.claim(keys_of([1])).mine.tolist() == [0])
    other.put([1])
    held.release()
    waiting.join(30)
    assert theirs.appeared.tolist() == [0]


def test_a_lost_server_leaves_the_claims_of_the_machine(join):
    with RedisServer() as server:
        one, same = join(1, server), join(1, server)
        server.kill()
        mine, theirs = one.claim(range(4)), same.claim(range(6))
        assert mine.mine.tolist() == [0, 1, 2, 3]
        assert theirs.mine.tolist() == [4, 5] and theirs.others.tolist() == [0, 1, 2, 3]
        one.put(range(4))
        assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1, 2, 3]
        mine.release()
        theirs.release()


@pytest.mark.parametrize("seed", range(40 if SOAK else 2))
def test_a_random_schedule_computes_each_item_once(join, seed):
    """Two machines of two ranks ask for the same items in any order. None fails, so each is computed once."""
    ranks = [join(machine) for machine in (1, 1, 2, 2)]
    computed = []

    def work(rank, chance):
        for _ in range(12):
            run(rank, chance)

    def run(rank, chance):
        names = rank.missing(chance.sample(range(150), chance.randint(1, 20)))
        claim = rank.claim(names)
        try:
            mine = [names[i] for i in claim.mine.tolist()]
            while True:
                time.sleep(chance.choice([0, 0.001, 0.01]))
                computed.extend(mine)
                rank.late = chance.random() < 0.3
                rank.put(mine)
                if not len(claim.others):
                    return
                mine = [names[i] for i in claim.wait().tolist()]
                there = [names[i] for i in claim.appeared.tolist()]
                assert rank.missing(there) == []
        finally:
            claim.release()

    chances = [random.Random(f"{seed} {number}") for number in range(len(ranks))]
    run_at_once(*[functools.partial(work, *pair) for pair in zip(ranks, chances, strict=True)])
    assert len(computed) == len(set(computed)) and len({key_of(name) for name in computed}) > 100
