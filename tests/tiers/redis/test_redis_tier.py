"""What `RedisTier` does beside what every tier does: when it sends, what it forgets, and what it survives."""

import contextlib
import functools
import gc
import threading

import numpy as np
import pytest
import torch

from tests.helpers import warm
from tests.helpers.redis import PROGRAMS, RedisServer, emptied, names
from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    found,
    keys_of,
    put,
    rows_of,
    value_of,
    wait_until,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.tiers import writer
from torchcache2.tiers.base import Signals
from torchcache2.tiers.redis import tier as module
from torchcache2.tiers.redis.record import claim_names, row_names


def size_of(server):
    with contextlib.closing(server.client()) as client:
        return client.dbsize()


def set_value(server, name, value, namespace=NAMESPACES[0]):
    with contextlib.closing(server.client()) as client:
        client.set(row_names(keys_of([name], namespace))[0], value)


def value(server, name, namespace=NAMESPACES[0]):
    with contextlib.closing(server.client()) as client:
        return client.get(row_names(keys_of([name], namespace))[0])


@pytest.fixture
def server(servers):
    return servers[0]


# When rows are sent.


def test_rows_are_sent_when_there_are_enough(server, tiers):
    tier = tiers([server], buffer=5, delay=NEVER)
    put(tier, range(3))
    put(tier, [3])
    assert size_of(server) == 0 and found(tier, range(9)) == [0, 1, 2, 3]
    put(tier, [7, 8])
    wait_until(lambda: size_of(server) == 6)
    assert found(tiers([server]), range(9)) == [0, 1, 2, 3, 7, 8]


def test_a_large_batch_is_sent_in_pieces(server, tiers, monkeypatch):
    monkeypatch.setattr("torchcache2.tiers.redis.tier._PIECE", 1 << 16)
    tier = tiers([server], buffer=10_000, delay=NEVER)
    sizes, run = [], tier._clients.run
    monkeypatch.setattr(
        tier._clients, "run", lambda commands, words: sizes.append(len(commands)) or run(commands, words)
    )
    put(tier, range(100), 1000)
    for name in range(100, 130):
        put(tier, [name], 1000)
    tier.flush()
    assert sum(sizes) == 130 and max(sizes) <= 32 and len(sizes) < 20
    assert found(tiers([server]), range(140), 1000) == list(range(130))


def test_the_queue_is_bounded(server, tiers):
    tier = tiers([server], queue=100_000, delay=NEVER)
    for first in range(0, 200, 10):
        put(tier, range(first, first + 10), 1000)
        with tier._lock():
            assert tier._queue.nbytes < 200_000
    assert found(tier, range(200), 1000) == list(range(200))


# What waits, and what others drop.


def test_a_row_that_is_on_its_way_while_it_is_dropped_is_gone_afterwards(server, tiers, monkeypatch):
    tier, other = tiers([server], delay=NEVER), tiers([server])
    put(other, [5], namespace=NAMESPACES[1])
    other.flush()
    for is_late in (False, True):  # the drop comes before, or after the server has the row
        begun, go_on, run = threading.Event(), threading.Event(), tier._clients.run

        def slow(commands, words, run=run, begun=begun, go_on=go_on, is_late=is_late):
            is_set = commands[0][0] == b"SET"
            replies = run(commands, words) if is_late or not is_set else None
            if is_set:
                begun.set()
                assert go_on.wait(30)
            return run(commands, words) if replies is None else replies

        with monkeypatch.context() as patched:
            patched.setattr(tier._clients, "run", slow)
            put(tier, [1, 2])
            assert begun.wait(30)
            dropper = threading.Thread(target=tier.drop, args=(NAMESPACES[0],))
            dropper.start()
            wait_until(lambda: tier._unsent(keys_of([1, 2])) == [None, None])
            go_on.set()
            dropper.join(30)
            assert not dropper.is_alive()
        assert size_of(server) == 1 and found(tier, [1, 2]) == []
    assert found(tier, [5], namespace=NAMESPACES[1]) == [5]


def test_a_row_that_another_process_drops_on_its_way_is_gone_afterwards(server, tiers, monkeypatch):
    drops = [0]
    tier = tiers([server], buffer=100, delay=NEVER, signals=Signals(drops=lambda: drops[0]))
    run = tier._clients.run

    def dropped_meanwhile(commands, words):
        replies = run(commands, words)
        drops[0] += commands[0][0] == b"SET"  # when the rows are on the server
        return replies

    monkeypatch.setattr(tier._clients, "run", dropped_meanwhile)
    put(tier, [1, 2])
    tier.flush()
    assert size_of(server) == 0 and found(tier, [1, 2]) == []


def test_drop_leaves_what_others_have_on_the_server(server, tiers):
    tier = tiers([server], claims=False)
    put(tier, range(3000), 1)
    put(tier, range(10), 1, NAMESPACES[1])
    prefix = b"torchcache2:" + NAMESPACES[0].hex().encode()
    foreign = [b"foreign", prefix, prefix[:-1] + b":1", b"torchcache2:", b"torchcache2:claim:" + prefix]
    with contextlib.closing(server.client()) as client:
        for name in foreign:
            client.set(name, b"1")
        client.set(prefix + b":garbage", b"1")
        tier.flush()
        assert tier.count(NAMESPACES[0]) == 3000 and tier.count(NAMESPACES[1]) == 10
        assert tier.count(NAMESPACES[2]) == 0
        tier.drop(NAMESPACES[0])
        assert tier.count(NAMESPACES[0]) == 0
        assert client.dbsize() == 10 + len(foreign)


def test_drop_finds_rows_of_servers_that_are_no_longer_theirs(started, tiers):
    servers = emptied(started(*PROGRAMS[:1] * 3))
    tier = tiers(servers[:1])
    put(tier, range(30))
    tier.flush()
    tiers(servers).drop(NAMESPACES[0])
    assert size_of(servers[0]) == 0


def test_claims_are_given_up_when_the_rows_are_on_the_server(server, tiers):
    first, second = tiers([server], buffer=100, delay=NEVER), tiers([server])
    keys = keys_of(range(3))
    claim = first.claim(keys)
    assert claim.mine.tolist() == [0, 1, 2] and size_of(server) == 3
    assert first.count(NAMESPACES[0]) == 0  # a claim is no row
    answers = []

    def compute():
        theirs = second.claim(keys)
        answers.extend([theirs.mine.tolist(), theirs.wait().tolist(), theirs.appeared.tolist()])
        answers.append(found(second, range(3)))
        theirs.release()

    thread = threading.Thread(target=compute)
    thread.start()
    put(first, range(3))  # sent at once, as somebody may be waiting
    claim.release()
    thread.join(30)
    assert answers == [[], [], [0, 1, 2], [0, 1, 2]]
    first.flush()
    with contextlib.closing(server.client()) as client:
        assert client.exists(*claim_names(keys)) == 0 and client.exists(*row_names(keys)) == 3


def test_without_claims_nobody_waits(server, tiers):
    first, second = tiers([server], claims=False), tiers([server], claims=False)
    for tier in (first, second):
        assert tier.claim(keys_of([1])).mine.tolist() == [0]
    assert size_of(server) == 0


# Damage and others' values.


def test_garbage_under_our_names_is_a_miss_and_is_overwritten(server, tiers, log):
    tier = tiers([server])
    put(tier, range(6))
    tier.flush()
    right = value(server, 3)
    set_value(server, 1, b"garbage")
    set_value(server, 2, b"")
    set_value(server, 3, right[:-1])
    set_value(server, 4, value(server, 5))
    with contextlib.closing(server.client()) as client:
        (name,) = row_names(keys_of([9]))
        client.rpush(name, b"a list")
        client.set(b"torchcache2:", b"1")
    assert found(tier, range(10)) == [0, 5]
    assert found(tier, range(10)) == [0, 5]
    stats = tier.stats()
    assert (stats.corrupt, stats.faults) == (8, 0)
    (record,) = warnings_of(log)
    assert "damaged" in record.getMessage()
    put(tier, [1, 2, 3, 4, 9])
    tier.flush()
    assert found(tier, range(10)) == [0, 1, 2, 3, 4, 5, 9]
    assert value(server, 3) == right
    assert len(warnings_of(log)) == 1


def test_rows_that_are_too_large_are_told_once(server, tiers, log, monkeypatch):
    monkeypatch.setattr(module, "MOST_ROW_BYTES", 1000)
    tier = tiers([server])
    for first in range(2):
        assert put(tier, [first], 251) == 0
        assert put(tier, [first + 5], 250) == 1
    (record,) = warnings_of(log)
    assert "1000 bytes" in record.getMessage()


# Servers that fail.


@pytest.mark.parametrize("program", PROGRAMS, ids=names())
def test_a_server_that_comes_back_empty_is_filled_again(tiers, program, log):
    with RedisServer(program) as server:
        tier = tiers([server])
        for node in tier._clients._known.values():
            node.using.shortest = 0.05
        put(tier, range(5))
        tier.flush()
        server.kill()
        assert found(tier, range(5)) == [] and not tier.has(keys_of([1])).any()
        assert put(tier, range(5)) == 0  # it is left out, and nothing waits for it
        assert tier._queue.nbytes == 0
        assert tier.stats().rows == 0 and tier.stats().faults > 0
        tier.drop(NAMESPACES[0])
        server.start()

        def filled():
            put(tier, range(5))
            tier.flush()
            return found(tier, range(7)) == [0, 1, 2, 3, 4]

        wait_until(filled)
        assert tier.stats().rows == 5
    assert len(warnings_of(log)) == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=names())
def test_rows_that_a_server_forgets_are_only_missed(tiers, program, log):
    with RedisServer(program, "maxmemory 4mb", "maxmemory-policy allkeys-lru") as server:
        tier = tiers([server])
        for first in range(0, 1000, 50):
            assert put(tier, range(first, first + 50), 2000) == 50
            tier.flush()
        here = found(tier, range(1000), 2000)
        stats = tier.stats()
        assert 50 < len(here) < 600
        assert 1000 <= stats.rows + stats.evictions < 1020  # a full server may forget at each command
        assert (stats.corrupt, stats.faults) == (0, 0) and stats.bytes <= 5e6
        assert tier.counts()["remote_evictions"] == stats.evictions
        assert put(tier, [1, 2], 2000) == 2
        tier.flush()
        assert found(tier, [1, 2], 2000) == [1, 2]
        assert warnings_of(log) == []


def test_servers_are_killed_and_begun_again_while_threads_read_and_write(tiers):
    with RedisServer() as first, RedisServer() as second:
        tier = tiers([first, second], buffer=5, delay=0.01)
        for node in tier._clients._known.values():
            node.using.shortest = 0.01
        is_over = threading.Event()

        def work(number):
            generator = np.random.default_rng(number)
            while not is_over.is_set():
                some = generator.choice(200, 20, replace=False).tolist()
                here = found(tier, some, 100)
                put(tier, sorted(set(some).difference(here)), 100)
                if generator.random() < 0.1:
                    tier.flush()

        def kill():
            try:
                for server in (first, second, first):
                    wait_until(lambda server=server: size_of(server) > 20)
                    server.kill()
                    wait_until(lambda before=tier._clients.faults: tier._clients.faults > before)
                    server.start()
                wait_until(lambda: len(found(tier, range(200), 100)) == 200)
            finally:
                is_over.set()

        run_at_once(kill, *[functools.partial(work, number) for number in range(3)])
        assert tier.stats().corrupt == 0


def test_an_error_within_is_a_fault(server, tiers, monkeypatch, log):
    tier = tiers([server])
    put(tier, [1])
    tier.flush()

    def broken(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(tier._records, "decode", broken)
        assert found(tier, [1]) == []
        patched.setattr(tier._records, "encode", broken)
        assert put(tier, [2]) == 1
        tier.flush()
        patched.setattr(module, "OwnRows", broken)
        assert put(tier, [3]) == 0
    assert found(tier, [1, 2, 3]) == [1]
    assert tier.stats().faults == 3 and len(warnings_of(log)) == 1


def test_an_interrupt_leaves_a_tier_that_works(server, tiers, monkeypatch):
    tier = tiers([server], buffer=100, delay=NEVER)
    tier.flush()

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    for where, what in [
        (tier, "_send_piece"),
        (writer, "Pending"),
        (module, "split"),
        (tier._clients, "mget"),
        (tier._clients, "run"),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(where, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                put(tier, [1, 2])
                found(tier, [1, 2, 3])
                tier.flush()
        assert set(found(tier, [1, 2])) <= {1, 2}
        tier.drop(NAMESPACES[0])
        assert put(tier, [1, 2]) == 2 and found(tier, [1, 2, 3]) == [1, 2]
        tier.flush()
        assert found(tier, [1, 2, 3]) == [1, 2]
        tier.drop(NAMESPACES[0])


def test_the_garbage_collector_may_close_it_at_any_point(server, tiers, monkeypatch):
    for where, what in [(module, "split"), (writer, "Pending"), (None, "_send_piece")]:
        tier = tiers([server], delay=NEVER)
        put(tier, ["before"])
        tier.flush()
        owner = where or tier
        function = getattr(owner, what)

        def closing(*args, function=function, tier=tier):
            result = function(*args)
            for method in (tier.flush, tier.close, lambda: tier.drop(NAMESPACES[1])):
                method()
            return result

        with monkeypatch.context() as patched:
            patched.setattr(owner, what, closing)
            put(tier, [what])
            found(tier, [what])
            wait_until(lambda tier=tier: tier._closed)
        assert found(tier, [what]) == []
    gc.collect()


# Processes.


SENT_AT_EXIT = """
import multiprocessing, sys
from tests.helpers.storage import NEVER, put
from torchcache2.core.places import Servers
from torchcache2.tiers.redis.tier import RedisTier

tier = RedisTier(Servers.of(sys.argv[1], buffer=100), delay=NEVER)
for method, first in (("fork", 1), ("fork", 3)):
    child = multiprocessing.get_context(method).Process(target=put, args=(tier, [first, first + 1]))
    child.start()
    child.join()
    put(tier, [first + 10])
if len(sys.argv) > 2:
    raise SystemExit(3)
"""


def test_rows_are_sent_when_a_process_ends(server, tiers):
    assert warm.run(SENT_AT_EXIT, server.url).err == ""
    assert found(tiers([server]), range(20)) == [1, 2, 3, 4, 11, 13]
    tiers([server]).drop(NAMESPACES[0])
    warm.start(SENT_AT_EXIT, server.url, "fail").done(3)
    assert found(tiers([server]), range(20)) == [1, 2, 3, 4, 11, 13]


def test_rows_of_compressing_writers_are_read_by_all(server, tiers):
    several = {codec: tiers([server], codec=codec) for codec in ("none", "brotli", "blosc2")}
    for number, tier in enumerate(several.values()):
        put(tier, range(10 * number, 10 * number + 10), 1000)
        tier.flush()
    assert len({len(value(server, name)) for name in (0, 10, 20)}) == 3
    for tier in several.values():
        ((positions, rows),) = tier.get(keys_of(range(30))).parts  # they are one part
        assert positions.tolist() == list(range(30))
        assert torch.equal(rows.columns[0], torch.stack([value_of(name, 1000) for name in range(30)]))


def test_no_text_of_a_tier_has_a_password(server, tiers):
    tier = tiers([server])
    assert server.password not in repr(tier) + repr(vars(tier)) + str(tier.servers)
    assert np.array_equal(tier.has(keys_of([1])), [False]) and len(rows_of([1], 3)) == 1
