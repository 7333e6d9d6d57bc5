"""Claims on real servers: each key is computed by one, and nobody waits longer than a lease."""

import contextlib
import math
import os
import sys
import threading
import time

import numpy as np
import pytest

from tests.helpers.redis import RedisServer
from tests.helpers.storage import NAMESPACES, key_of, keys_of, wait_until
from torchcache2.core.places import Servers
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.clients import LOST, Clients
from torchcache2.tiers.redis.leases import LeasedClaim, Leases
from torchcache2.tiers.redis.names import claim_names, row_names


@pytest.fixture
def server(servers):
    """A server with nothing on it."""
    return servers[0]


@pytest.fixture
def join():
    """Makes leases as another process or thread would have; their time is `clock`, if it is given."""
    made = []

    def joined(*servers, clock=time.monotonic, wake=lambda: None):
        clients = Clients(Servers.of([server.url for server in servers]), read_timeout=1.0)
        leases = Leases(clients, wake, clock=clock)
        number = len(made)
        leases.own_tokens = lambda: b"process %8d" % number
        made.append((leases, clients))
        return leases

    yield joined
    for leases, clients in made:
        leases.close()
        clients.close()


@pytest.fixture
def two(server, join):
    return join(server), join(server)


@pytest.fixture
def short(monkeypatch):
    """Leases are as short as this."""
    monkeypatch.setattr(Leases, "least", 0.6)
    return 0.6


def claim(leases, names, namespace=NAMESPACES[0]):
    return leases.claim(keys_of(list(names), namespace))


def publish(leases, names, namespace=NAMESPACES[0]):
    """What a tier does with rows."""
    keys = keys_of(list(names), namespace)
    handed = leases.hand_over(keys)
    write(leases, keys)
    leases.end(handed)


def write(leases, keys):
    replies = leases._clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)
    assert LOST not in replies


def held(server, namespace=NAMESPACES[0]):
    """How many claims are on a server."""
    with contextlib.closing(server.client()) as client:
        return sum(1 for _ in client.scan_iter(b"torchcache2:claim:" + namespace.hex().encode() + b":*"))


def in_thread(function):
    """Runs a function in another thread, for which nothing is claimed yet; what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    (result,) = results
    return result


def test_what_one_has_claimed_is_others_to_the_rest(server, two):
    first, second = two
    mine, theirs = claim(first, range(8)), claim(second, range(4, 12))
    assert mine.mine.tolist() == list(range(8)) and len(mine.others) == 0
    assert theirs.mine.tolist() == [4, 5, 6, 7] and theirs.others.tolist() == [0, 1, 2, 3]
    publish(second, range(8, 12))
    publish(first, range(8))
    assert theirs.wait().tolist() == []
    assert theirs.appeared.tolist() == [0, 1, 2, 3] and theirs.others.tolist() == []
    assert (second.waited, second.taken_over) == (4, 0)
    theirs.release()
    mine.release()
    assert held(server) == 0


def test_rows_that_were_published_since_are_not_claimed(server, two):
    first, second = two
    publish(first, range(4))
    theirs = claim(second, range(8))
    assert theirs.mine.tolist() == [4, 5, 6, 7] and theirs.others.tolist() == [0, 1, 2, 3]
    assert held(server) == 4
    assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1, 2, 3]
    assert held(server) == 0


def test_what_was_released_is_taken_over(two):
    first, second = two
    mine, theirs = claim(first, range(4)), claim(second, range(6))
    publish(first, [0, 1])
    mine.release()
    assert theirs.wait().tolist() == [2, 3]
    assert theirs.appeared.tolist() == [0, 1] and theirs.others.tolist() == []
    assert (second.waited, second.taken_over) == (2, 2)
    again = claim(first, range(6))
    assert again.mine.tolist() == [4, 5] and again.others.tolist() == [0, 1, 2, 3]


def test_rows_that_wait_to_be_written_keep_their_claims(server, two):
    first, second = two
    mine = claim(first, range(4))
    keys = keys_of(range(2))
    handed = first.hand_over(keys)
    mine.release()
    theirs = claim(second, range(4))
    assert theirs.mine.tolist() == [2, 3] and theirs.others.tolist() == [0, 1]
    # The thread that has computed them may claim others meanwhile.
    assert claim(first, [7]).mine.tolist() == [0] and held(server) == 4 + 1
    write(first, keys)
    first.end(handed)
    assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1]


def test_rows_that_will_not_be_written_are_computed_by_who_waits(two):
    first, second = two
    mine, theirs = claim(first, range(4)), claim(second, range(4))
    handed = first.hand_over(keys_of(range(4)))
    mine.release()
    threading.Timer(0.05, first.end, [handed]).start()
    assert theirs.wait().tolist() == [0, 1, 2, 3]


def test_nothing_is_handed_over_that_was_not_claimed(two):
    first, second = two
    assert first.hand_over(keys_of(range(4))) == []
    mine = claim(first, range(2))
    assert second.hand_over(keys_of(range(4))) == []
    (handed,) = first.hand_over(keys_of(range(1, 4)))
    assert handed.names == set(claim_names(keys_of([1])))
    first.end([handed])
    assert claim(second, range(4)).mine.tolist() == [1, 2, 3]
    mine.release()


def test_nobody_waits_while_holding_a_claim(two):
    first, second = two
    one, other = claim(first, [0, 1]), claim(second, [2, 3])
    crossed = in_thread(lambda: claim(first, [2, 3, 4])), in_thread(lambda: claim(second, [0, 1, 5]))
    assert [c.mine.tolist() for c in crossed] == [[2], [2]]
    one.release()
    other.release()
    assert sorted(crossed[0].wait().tolist()) == [0, 1]
    assert sorted(crossed[1].wait().tolist()) == [0, 1]


def test_one_of_those_that_wait_takes_over(server, join):
    all_ = [join(server) for _ in range(4)]
    mine = claim(all_[0], range(20))
    taken, lock = [], threading.Lock()

    def work(leases):
        claimed = claim(leases, range(20))
        while len(claimed.others):
            left = claimed.wait().tolist()
            with lock:
                taken.extend(left)
            publish(leases, left)
        claimed.release()

    threads = [threading.Thread(target=work, args=(leases,)) for leases in all_[1:]]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    publish(all_[0], range(5))
    mine.release()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(5, 20)) and held(server) == 0


def test_a_lease_that_ran_out_is_taken_over_and_its_holder_leaves_the_next_one_alone(server, join, short):
    now = time.monotonic
    first, second, third = join(server, clock=lambda: now() - behind), join(server), join(server)
    behind = 0.0
    mine = claim(first, range(4))
    theirs = claim(second, range(4))
    began = now()
    assert theirs.wait().tolist() == [0, 1, 2, 3]
    assert 0.7 * short < now() - began < short + 3.0
    assert first.beat() == math.inf  # by its own clock, it has none any more
    publish(first, [0])
    mine.release()
    assert held(server) == 4
    assert claim(third, range(4)).mine.tolist() == []
    publish(second, range(4))
    assert held(server) == 0


def test_a_holder_whose_clock_stood_still_renews_and_deletes_nothing_of_others(server, join, short):
    stopped = time.monotonic()
    first, second = join(server, clock=lambda: stopped), join(server)
    mine, theirs = claim(first, range(4)), claim(second, range(4))
    assert theirs.wait().tolist() == [0, 1, 2, 3]
    stopped += short / 2  # it does not know that its lease ran out, and renews it
    first.beat()
    assert not any(lease.names for lease in first._held)
    mine.release()
    assert held(server) == 4


def test_a_lease_is_renewed_as_long_as_it_is_held(server, join, short):
    woken = []
    first, second = join(server, wake=lambda: woken.append(1)), join(server)
    mine = claim(first, range(4))
    assert woken == [1]
    handed, end = first.hand_over(keys_of([3])), time.monotonic() + 2 * short
    while time.monotonic() < end:
        wait = first.beat()
        assert 0 <= wait < short / 2
        time.sleep(wait)
    assert claim(second, range(4)).mine.tolist() == [] and woken == [1]
    mine.release()
    first.end(handed)
    assert first.beat() == math.inf and held(server) == 0
    claim(first, range(4)).release()
    assert woken == [1, 1]


def test_a_lease_of_a_holder_that_is_stuck_is_not_renewed_for_ever(server, join, monkeypatch):
    monkeypatch.setattr(Leases, "most", 0.0)
    now = 100.0
    leases = join(server, clock=lambda: now)
    mine = claim(leases, range(4))
    now += 15.0
    assert leases.beat() > 0.0
    with contextlib.closing(server.client()) as client:
        assert max(client.pttl(name) for name in claim_names(keys_of(range(4)))) <= 30_000
    now += 15.0
    assert leases.beat() == math.inf
    mine.release()


def test_a_lease_lasts_four_times_the_longest_computation(server, join):
    now = 100.0
    leases = join(server, clock=lambda: now)
    mine = claim(leases, [1])
    now += 25.0
    publish(leases, [1])
    mine.release()
    claim(leases, [2])
    with contextlib.closing(server.client()) as client:
        assert client.pttl(claim_names(keys_of([2]))[0]) <= 30_000 or leases.seconds == 100.0
    assert leases.seconds == 100.0


def test_a_claim_that_nothing_refers_to_is_deleted_at_the_next_beat(server, two):
    first, second = two
    claim(first, [1])
    first.beat()
    assert held(server) == 0 and claim(second, [1]).mine.tolist() == [0]


def test_rows_that_nobody_will_write_are_given_up_at_the_next_beat(server, two):
    first, _ = two
    mine = claim(first, [1, 2])
    handed = first.hand_over(keys_of([1, 2]))
    mine.release()
    del handed
    first.beat()
    assert held(server) == 0


def test_a_thread_that_holds_a_claim_computes_all_and_another_one_waits(server, join):
    leases = join(server)
    del leases.own_tokens
    outer = claim(leases, [1, 2])
    inner = claim(leases, [2, 3])
    assert type(inner) is Claim and inner.mine.tolist() == [0, 1]
    other = in_thread(lambda: claim(leases, [2, 3]))
    assert other.mine.tolist() == [1] and other.others.tolist() == [0]
    assert claim(leases, [2], NAMESPACES[1]).mine.tolist() == [0]
    publish(leases, [1, 2])
    outer.release()
    assert in_thread(other.wait).tolist() == [] and other.appeared.tolist() == [0]


def test_a_thread_does_not_wait_for_itself_through_another_cache_of_its_process(server, two):
    first, second = two
    del first.own_tokens, second.own_tokens
    outer, inner = claim(first, [1, 2]), claim(second, [1, 2, 3])
    assert inner.mine.tolist() == [2] and inner.others.tolist() == [0, 1]
    assert inner.wait().tolist() == [0, 1] and inner.others.tolist() == []
    inner.release()
    assert held(server) == 2
    outer.release()
    assert held(server) == 0


def test_outer_calls_that_hold_what_inner_ones_wait_for_do_not_wait_long(two, monkeypatch):
    """As two functions that call each other, in two threads."""
    first, second = two
    monkeypatch.setattr(Leases, "least", 0.3)
    meet, waited, over = threading.Barrier(2), [], threading.Event()

    def beat():
        while not over.wait(0.02):
            first.beat()
            second.beat()

    def work(leases, outer, inner):
        held = claim(leases, [1], outer)
        meet.wait()
        theirs = claim(leases, [1], inner)
        waited.append(theirs.wait().tolist())
        held.release()
        theirs.release()

    a, b = NAMESPACES[:2]
    threads = [threading.Thread(target=work, args=args) for args in ((first, a, b), (second, b, a))]
    beats = threading.Thread(target=beat)
    for thread in (*threads, beats):
        thread.start()
    for thread in threads:
        thread.join(10)
    over.set()
    beats.join()
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
        first.beat()
        assert time.monotonic() - began < 5


def test_a_server_that_fails_while_others_wait_for_it(join):
    with RedisServer() as server:
        first, second = join(server), join(server)
        mine, theirs = claim(first, range(4)), claim(second, range(4))
        threading.Timer(0.1, server.kill).start()
        assert theirs.wait().tolist() == [0, 1, 2, 3]
        server.start()  # it comes back empty
        wait_until(lambda: claim(second, [9]).mine.tolist() == [0] and held(server) == 1)
        mine.release()


@pytest.mark.parametrize("command", [(b"SET", b"somebody's"), (b"RPUSH", b"a list")], ids=["text", "list"])
def test_a_claim_that_somebody_has_set_for_ever_is_waited_for_in_vain(server, join, monkeypatch, command):
    leases = join(server)
    with contextlib.closing(server.client()) as client:
        client.execute_command(command[0], claim_names(keys_of([2]))[0], command[1])
    theirs = claim(leases, range(4))
    assert theirs.mine.tolist() == [0, 1, 3] and theirs.others.tolist() == [2]
    monkeypatch.setattr(Leases, "most", 0.2)
    began = time.monotonic()
    assert theirs.wait().tolist() == [2]
    assert 0.1 < time.monotonic() - began < 5


def test_a_full_server_gives_no_claims(join):
    with RedisServer(None, "maxmemory 1", "maxmemory-policy noeviction") as server:
        first, second = join(server), join(server)
        assert claim(first, range(4)).mine.tolist() == claim(second, range(4)).mine.tolist() == [0, 1, 2, 3]
        first.beat()


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
        publish_of(first, mine.mine)
        assert theirs.wait().tolist() == [] and len(theirs.appeared) == 40 - of_other
        assert held(one) == 0


def publish_of(leases, positions):
    keys = keys_of(positions.tolist())
    handed = leases.hand_over(keys)
    leases._clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)
    leases.end(handed)


def test_a_forked_child_has_no_claims_of_its_parent(server, join):
    leases = join(server)
    mine = claim(leases, range(4))
    handed = leases.hand_over(keys_of([3]))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            assert leases.hand_over(keys_of(range(4))) == []
            leases.end(handed)
            mine.release()
            assert leases.beat() == math.inf
            leases.own_tokens = lambda: b"child"
            theirs = claim(leases, range(5))
            assert isinstance(theirs, LeasedClaim) and theirs.mine.tolist() == [4]
            theirs.release()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held(server) == 4
    mine.release()
    leases.end(handed)
    assert held(server) == 0


def test_close_ends_claims(server, two):
    first, second = two
    mine = claim(first, [1, 2])
    first.close()
    assert held(server) == 0 and type(claim(first, [7])) is Claim
    mine.release()
    assert claim(second, [1, 2]).mine.tolist() == [0, 1]


def test_claims_of_nothing(server, join):
    empty = claim(join(server), [])
    assert empty.mine.tolist() == [] and empty.others.tolist() == []
    assert empty.wait().dtype == np.int64
    empty.release()


class Interrupt(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("step", ["claim", "wait", "hand over", "release"])
def test_an_interrupt_at_any_line_leaves_nothing_that_is_renewed(server, join, step):
    """What is left of the call is freed with the exception, as it is in a session that goes on."""
    first, second = join(server), join(server)
    for number in range(1, 200):
        seen, claimed, handed = 0, None, []
        if step != "claim":
            claimed = claim(first, [number])
        if step == "wait":
            claimed.release()
            blocker = claim(second, [number])
            claimed = claim(first, [number])
            assert len(claimed.others)
            blocker.release()

        def tracer(frame, event, _, number=number):
            nonlocal seen
            if not frame.f_code.co_filename.endswith("leases.py") or frame.f_code.co_name == "__del__":
                return None
            # A lock is let go of by the line of its `with`, which no signal interrupts before.
            if event == "line":
                seen += 1
                if seen == number:
                    raise Interrupt
            return tracer

        before, is_over = sys.gettrace(), False
        sys.settrace(tracer)
        try:
            if step == "claim":
                claimed = claim(first, [number])
            elif step == "wait":
                claimed.wait()
            elif step == "hand over":
                handed = first.hand_over(keys_of([number]))
            else:
                claimed.release()
            is_over = True
        except Interrupt:
            pass
        finally:
            sys.settrace(before)
        del claimed, handed
        first.beat()
        with first._lock():
            assert not first._leases(), number
        if is_over:
            break
    assert 5 < number < 199
    assert first.beat() == math.inf


def test_rows_that_are_there_are_told_apart(server, join):
    leases = join(server)
    write(leases, keys_of([1, 3]))
    assert leases.published(keys_of(range(4))).tolist() == [False, True, False, True]
    assert leases.published(keys_of([1, 3])).tolist() == [True, True]
    assert leases.published(keys_of([0])).tolist() == [False] and leases.published(keys_of([])).tolist() == []


def test_keys_are_claimed_one_by_one(server, two):
    """As in a schedule of a job: whoever asks gets what nobody has."""
    first, second = two
    claims = [claim(first, range(0, 10, 2)), in_thread(lambda: claim(first, range(10)))]
    assert claims[1].mine.tolist() == [1, 3, 5, 7, 9]
    assert claim(second, range(10)).mine.tolist() == []
    assert len({key_of(name) for name in range(10)}) == held(server) == 10
