"""Claims on real servers: each key is computed by one, and nobody waits for ever."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

from tests.helpers.redis import RedisServer
from tests.helpers.storage import NAMESPACES, keys_of, wait_until
from tests.helpers.threads import run_at_once
from tests.tiers.claims_contract import ClaimContract, interrupted
from torchcache2.core.places import Servers
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import LOST, Clients
from torchcache2.tiers.redis.record import claim_names, row_names


@pytest.fixture
def server(servers):
    """A server with nothing on it."""
    return servers[0]


@pytest.fixture
def join():
    """Makes claims as another process or thread would have; their time is `clock`, if it is given."""
    made = []

    def joined(*servers, clock=time.monotonic, **options):
        clients = Clients(Servers.of([server.url for server in servers]), read_timeout=5.0)
        claims = RedisClaims(clients, clock=clock, **options)
        number = len(made)
        claims.thread = lambda: number << 32 | threading.get_native_id()
        made.append(claims)
        return claims

    yield joined
    for claims in made:
        claims.close()
        claims.clients.close()


@pytest.fixture
def two(server, join):
    return join(server), join(server)


@pytest.fixture
def short(monkeypatch):
    """Claims last as short as this."""
    monkeypatch.setattr(RedisClaims, "least", 0.6)
    return 0.6


def claim(claims, names, namespace=NAMESPACES[0]):
    keys = keys_of(list(names), namespace)
    own = claims.of(keys)
    return Claim(len(keys), [] if own is None else [own])


def write(claims, names):
    """What a tier does with rows."""
    keys = keys_of(list(names))
    replies = claims.clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)
    assert LOST not in replies


def is_claimed(claimed):
    """Whether a claim holds anything on servers."""
    return any(own._held is not None for own in claimed._tiers)


def held(server, namespace=NAMESPACES[0]):
    """How many claims are on a server."""
    with contextlib.closing(server.client()) as client:
        return sum(1 for _ in client.scan_iter(b"torchcache2:claim:" + namespace.hex().encode() + b":*"))


class TestClaims(ClaimContract):
    claim, put = staticmethod(claim), staticmethod(write)

    @pytest.fixture
    def join(self, server, join):
        return lambda: join(server)

    def tally(self, claims):
        return claims.tally

    def left(self, claims):
        return sum(map(len, claims.clients.scan(b"torchcache2:claim:*")))


class Waiting:
    """What waits to be sent."""

    def __init__(self, names):
        self.names, self.after = keys_of(names).data.tolist(), []

    def once_sent(self, keys, function):
        waits = np.array([key in self.names for key in keys.data.tolist()])
        function(keys.take(np.flatnonzero(~waits)))
        self.after.append(lambda: function(keys.take(np.flatnonzero(waits))))


def test_claims_are_given_up_after_the_rows_that_wait(server, join):
    outbox = Waiting([0, 1])
    first, second = join(server, once_sent=outbox.once_sent), join(server)
    mine = claim(first, range(4))
    mine.release()
    theirs = claim(second, range(4))
    assert theirs.mine.tolist() == [2, 3] and theirs.others.tolist() == [0, 1]
    # The thread that has computed them may claim others meanwhile.
    assert claim(first, [7]).mine.tolist() == [0]
    write(first, range(2))
    outbox.after.pop()()
    assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1]


def test_a_claim_that_ran_out_is_taken_over_and_its_holder_leaves_the_next_one_alone(server, join, short):
    behind, now = 0.0, time.monotonic
    first, second, third = join(server, clock=lambda: now() - behind), join(server), join(server)
    mine = claim(first, range(4))
    theirs = claim(second, range(4))
    began = now()
    assert theirs.wait().tolist() == [0, 1, 2, 3]
    assert 0.7 * short < now() - began < short + 3.0
    write(first, [0])
    mine.release()  # by its own clock, it has none any more
    assert held(server) == 4
    assert claim(third, range(1, 4)).mine.tolist() == []
    write(second, range(4))
    theirs.release()
    assert held(server) == 0


def test_a_claim_lasts_ten_times_the_longest_computation(server, join):
    now = 100.0
    claims = join(server, clock=lambda: now)
    mine = claim(claims, [1])
    with contextlib.closing(server.client()) as client:
        assert 50_000 < client.pttl(claim_names(keys_of([1]))[0]) <= 60_000
        now += 25.0
        mine.release()
        claimed = claim(claims, [2])
        assert 240_000 < client.pttl(claim_names(keys_of([2]))[0]) <= 250_000
    claimed.release()
    assert claims.seconds == 250.0


def test_a_thread_does_not_wait_for_itself_through_another_cache_of_its_process(server, two):
    first, second = two
    first.thread = second.thread = threading.get_native_id
    outer, inner = claim(first, [1, 2]), claim(second, [1, 2, 3])
    assert inner.mine.tolist() == [2] and inner.others.tolist() == [0, 1]
    assert inner.wait().tolist() == [0, 1] and inner.others.tolist() == []
    inner.release()
    assert held(server) == 2
    outer.release()
    assert held(server) == 0


def test_outer_calls_that_hold_what_inner_ones_wait_for_do_not_wait_for_ever(two, short):
    """As two functions that call each other, in two threads."""
    first, second = two
    meet, waited = threading.Barrier(2), []

    def work(claims, outer, inner):
        held = claim(claims, [1], outer)
        meet.wait()
        theirs = claim(claims, [1], inner)
        waited.append(theirs.wait().tolist())
        held.release()
        theirs.release()

    a, b = NAMESPACES[:2]
    run_at_once(lambda: work(first, a, b), lambda: work(second, b, a))
    assert waited == [[0], [0]]


def test_a_server_that_is_lost_gives_no_claims(join):
    with RedisServer() as server:
        first, second = join(server), join(server)
        mine, theirs = claim(first, range(4)), claim(second, range(6))
        server.kill()
        began = time.monotonic()
        assert theirs.wait().tolist() == [0, 1, 2, 3]  # computed without a claim
        assert claim(second, range(6)).mine.tolist() == list(range(6))
        mine.release()
        theirs.release()
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("command", [(b"SET", b"somebody's"), (b"RPUSH", b"a list")], ids=["text", "list"])
def test_a_claim_that_somebody_has_set_for_ever_is_waited_for_in_vain(server, join, monkeypatch, command):
    claims = join(server)
    with contextlib.closing(server.client()) as client:
        client.execute_command(command[0], claim_names(keys_of([2]))[0], command[1])
    theirs = claim(claims, range(4))
    assert theirs.mine.tolist() == [0, 1, 3] and theirs.others.tolist() == [2]
    monkeypatch.setattr(RedisClaims, "most", 0.2)
    monkeypatch.setattr(RedisClaims, "least", 0.2)
    began = time.monotonic()
    assert theirs.wait().tolist() == [2]
    assert 0.1 < time.monotonic() - began < 30


def test_a_full_server_gives_no_claims(join):
    with RedisServer(None, "maxmemory 1", "maxmemory-policy noeviction") as server:
        first, second = join(server), join(server)
        assert claim(first, range(4)).mine.tolist() == claim(second, range(4)).mine.tolist() == [0, 1, 2, 3]


def test_a_claim_lies_on_the_server_of_its_row_and_one_of_two_may_fail(join):
    with RedisServer() as one, RedisServer() as other:
        first, second = join(one, other), join(other, one)
        mine = claim(first, range(40))
        assert 5 < held(one) < 35 and held(one) + held(other) == 40
        theirs = claim(second, range(40))
        assert theirs.others.tolist() == list(range(40))
        of_other = held(other)
        other.kill()
        assert len(theirs.wait()) == of_other
        keys = keys_of(mine.mine.tolist())
        first.clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)
        mine.release()
        assert theirs.wait().tolist() == [] and len(theirs.appeared) == 40 - of_other
        assert held(one) == 0


def test_a_forked_child_has_no_claims_of_its_parent(server, join):
    claims = join(server)
    mine = claim(claims, range(4))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            mine.release()
            claims.thread = lambda: 99
            theirs = claim(claims, range(5))
            assert is_claimed(theirs) and theirs.mine.tolist() == [4]
            theirs.release()
            claims.close()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held(server) == 4
    mine.release()
    assert held(server) == 0


def test_close_ends_claims(server, two):
    first, second = two
    mine = claim(first, [1, 2])
    first.close()
    assert held(server) == 0
    mine.release()
    assert claim(second, [1, 2]).mine.tolist() == [0, 1]


def is_of_claims(code):
    return code.co_filename.endswith("claims.py") and code.co_name != "__del__"


@pytest.mark.slow
@pytest.mark.parametrize("step", ["claim", "wait", "release"])
def test_an_interrupt_at_any_line_costs_a_wait_at_most(server, join, step, short):
    second, is_over, number = join(server), False, 0
    while not is_over:
        first, number = join(server), number + 1
        if step == "claim":
            _, is_over = interrupted(number, is_of_claims, lambda: claim(first, [number]))  # noqa: B023
            continue
        blocker = claim(second, [number]) if step == "wait" else None
        claimed = claim(first, [number])
        if step == "wait":
            assert len(claimed.others)
            blocker.release()
        _, is_over = interrupted(number, is_of_claims, getattr(claimed, step))
        del claimed
    assert 5 < number < 199
    theirs = claim(second, range(1, number))
    while len(theirs.others):
        theirs.wait()
    theirs.release()
    wait_until(lambda: len(claim(first, [0]).mine) and not len(claim(second, range(1, number)).others))
