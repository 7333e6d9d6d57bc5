"""What a process says to its servers, and what comes back."""

import os
import random
import signal
import socket
import threading
import warnings

import numpy as np
import pytest

from tests.helpers.clients import NAMESPACE, connected, get, keys, put, value_of, values
from tests.helpers.redis import PASSWORD, PROGRAMS, RedisServer, names
from tests.helpers.storage import wait_until
from torchcache2.core.places import Servers
from torchcache2.tiers.redis.client import LOST, Clients
from torchcache2.tiers.redis.record import claim_names, pattern, row_names

SOAK = os.environ.get("SOAK")


@pytest.fixture(params=PROGRAMS, ids=names())
def server(request):
    with RedisServer(request.param) as one:
        yield one


@pytest.fixture(scope="module")
def kept():
    """A server that several tests use."""
    with RedisServer() as one:
        yield one


@pytest.fixture
def clients(kept):
    with kept.client() as spoiler:
        spoiler.flushall()
    with connected(kept) as one:
        yield one


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_what_was_set_is_got(server):
    some = keys(100)
    with connected(server) as clients:
        clients.check()
        assert get(clients, some) == [None] * 100
        assert put(clients, some) == [b"OK"] * 100
        assert get(clients, some) == values(some)
        assert get(clients, some.take(np.array([5, 3, 5]))) == [values(some)[i] for i in (5, 3, 5)]
        assert get(clients, some.take(np.empty(0, np.int64))) == []
        assert clients.run([], some.words[:0]) == []
        claims = [(b"SET", name, b"me", b"NX", b"PX", 30000) for name in claim_names(some)]
        assert clients.run(claims, some.words) == [b"OK"] * 100
        assert clients.run(claims, some.words) == [None] * 100
        found = [name for page in clients.scan(pattern(NAMESPACE)) for name in page]
        assert sorted(set(found)) == sorted(row_names(some))
        assert clients.each(b"DBSIZE") == [200]
        assert clients.allows_writes(some.words).all() and clients.faults == 0


def test_several_servers_each_keep_a_share():
    some = keys(300)
    with RedisServer() as one, RedisServer() as two, RedisServer() as three:
        with connected(one, two, three) as clients:
            put(clients, some)
            sizes = clients.each(b"DBSIZE")
            assert sum(sizes) == 300 and min(sizes) > 50
            assert len({name for page in clients.scan(b"torchcache2:*") for name in page}) == 300
            assert get(clients, some) == values(some) and clients.faults == 0
        with connected(three, two, one) as others:
            assert get(others, some) == values(some)


def test_commands_of_a_pipeline_are_answered_in_order(clients):
    some = keys(3)
    name = row_names(some)[0]
    same = np.repeat(some.words[:1], 4, axis=0)
    commands = [(b"SET", name, b"1"), (b"INCR", name), (b"LPUSH", name, b"x"), (b"GET", name)]
    ok, two, error, last = clients.run(commands, same)
    assert (ok, two, last) == (b"OK", 2, b"2") and "WRONGTYPE" in str(error)
    assert error.__traceback__ is None  # which would keep a connection
    assert clients.faults == 1 and get(clients, some)[0] == b"2"


def test_a_foreign_kind_of_value_is_a_miss_and_is_written_over(kept, clients):
    some = keys(2)
    with kept.client() as other:
        other.lpush(row_names(some)[0], "x")
        other.set("foreign", "y")
    assert get(clients, some) == [None, None]
    put(clients, some)
    assert get(clients, some) == values(some) and clients.faults == 0
    assert {name for page in clients.scan(pattern(NAMESPACE)) for name in page} == set(row_names(some))


def test_a_database_can_be_chosen(kept, clients):
    some = keys(4)
    with connected(kept.url.replace("db=0", "db=3")) as third:
        put(third, some)
        assert get(third, some) == values(some)
    assert get(clients, some) == [None] * 4


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_port_is_spoken_to(host):
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    with RedisServer(None, "bind 127.0.0.1 -::1", port=True) as server:
        written = f"[{host}]" if ":" in host else host
        with connected(f"redis://:{PASSWORD}@{written}:{server.port}") as clients:
            put(clients, keys(3))
        with connected({"host": host, "port": str(server.port), "password": PASSWORD}) as clients:
            assert get(clients, keys(3)) == values(keys(3))


def test_values_are_asked_for_in_pieces(clients, monkeypatch):
    some = keys(150)
    put(clients, some)
    monkeypatch.setattr("torchcache2.tiers.redis.client._ASKED", 64)
    counts, exchange = [], clients._exchange

    def watched(asked):
        counts.extend(len(command) - 1 for commands in asked.values() for command in commands)
        return exchange(asked)

    monkeypatch.setattr(clients, "_exchange", watched)
    assert get(clients, some) == values(some) and counts == [64, 64, 22]


def test_a_forked_child_has_connections_of_its_own(clients):
    some = keys(100)
    put(clients, some, 2000)
    stop = threading.Event()
    wrong = []

    def ask():
        while not stop.is_set():
            wrong.append(get(clients, some) != values(some, 2000))

    thread = threading.Thread(target=ask)
    thread.start()
    children = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        for _ in range(3):
            child = os.fork()
            if not child:
                code = 1
                try:
                    turned = some.take(np.arange(99, -1, -1))
                    code = int(any(get(clients, turned) != values(turned, 2000) for _ in range(20)))
                finally:
                    os._exit(code)
            children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    stop.set()
    thread.join()
    assert codes == [0, 0, 0] and not any(wrong) and clients.faults == 0
    assert get(clients, some) == values(some, 2000)


class Interrupt(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # redis-py does not close a socket while it connects
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_no_reply_to_be_read_by_others(kept):
    random_ = random.Random(0)
    some = [keys(20, seed) for seed in range(10)]

    def interrupt(signum, frame):
        raise Interrupt

    with RedisServer() as second, connected(kept, second, pause=0.001) as clients:
        for part in some:
            put(clients, part, 3000)
        get(clients, some[0])
        before = open_files()
        old = signal.signal(signal.SIGALRM, interrupt)
        stopped, found, longest = 0, 0, 1e-3
        try:
            for round_ in range(20_000 if SOAK else 800):
                part = some[round_ % 10]
                try:
                    signal.setitimer(signal.ITIMER_REAL, random_.uniform(1e-5, longest))
                    if round_ % 3:
                        got = get(clients, part)
                    else:
                        got = clients.run([(b"GET", name) for name in row_names(part)], part.words)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    stopped += 1
                    longest *= 1.1  # about as many calls are stopped as are not, however fast the machine is
                    continue
                longest /= 1.1
                # An interrupt in redis-py may come out as an error, which is a fault: then there is no row.
                right = zip(got, values(part, 3000), strict=True)
                assert all(value in (expected, None, LOST) for value, expected in right)
                found += got == values(part, 3000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert stopped > 100 and found > 100 and clients.faults <= stopped / 20
        for part in some:
            wait_until(lambda part=part: get(clients, part) == values(part, 3000))
        wait_until(lambda: open_files() <= before + 2)


def test_nothing_is_asked_of_what_is_closed(kept):
    before = open_files()
    clients = Clients(Servers.of(kept.url))
    get(clients, keys(2))
    clients.close()
    clients.close()
    assert get(clients, keys(2)) == [None, None]
    assert put(clients, keys(2)) == [LOST, LOST] and clients.each(b"INFO") == [LOST]
    assert list(clients.scan(b"*")) == [] and not clients.allows_writes(keys(2).words).any()
    assert open_files() == before and clients.faults == 0


def test_a_value_of_many_bytes_travels(clients):
    some = keys(3)
    name = row_names(some)[0]
    value = os.urandom(20 << 20)
    commands = [(b"SET", name, value), (b"SET", row_names(some)[1], b"x")]
    assert clients.run(commands, some.words[:2]) == [b"OK", b"OK"]
    assert get(clients, some) == [value, b"x", None]
    assert value_of(name) != value and clients.faults == 0
