"""Servers that are gone, silent, full, or refuse."""

import os
import socket
import statistics
import threading
import time

import numpy as np
import pytest

from tests.helpers.clients import connected, get, keys, put, values
from tests.helpers.redis import PASSWORD, PROGRAMS, RedisServer, names
from tests.helpers.storage import wait_until
from torchcache2.core.errors import OptionError
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import LOST, Shares
from torchcache2.tiers.redis.record import row_names

FOREVER = 1e3  # seconds for which a test wants a server to be left out


def texts(log):
    return [record.getMessage() for record in log]


def seconds(function, *args):
    start = time.monotonic()
    function(*args)
    return time.monotonic() - start


@pytest.mark.parametrize("port", [False, True], ids=["socket", "port"])
def test_a_dead_server_costs_its_share_and_no_time(port, log):
    some = keys(200)
    with (
        RedisServer(port=port) as one,
        RedisServer(port=port) as two,
        connected(one, two, pause=FOREVER) as clients,
    ):
        put(clients, some)
        both = sorted([one.name, two.name])
        of_two = Shares(both).of(some.words) == both.index(two.name)
        two.kill()
        expected = [None if lost else value for lost, value in zip(of_two, values(some), strict=True)]
        assert get(clients, some) == expected
        assert get(clients, some) == expected and clients.faults == 1  # it is not asked again
        assert (clients.allows_writes(some.words) == ~of_two).all()
        replies = put(clients, some)
        assert [reply is LOST for reply in replies] == of_two.tolist()
        assert sorted(map(str, clients.each(b"DBSIZE"))) == sorted([str((~of_two).sum()), str(LOST)])
        assert sum(map(len, clients.scan(b"*"))) == (~of_two).sum()
    (text,) = texts(log)
    assert two.name in text and PASSWORD not in text


def test_a_server_that_comes_back_is_used_again(log):
    some = keys(20)
    with RedisServer() as server, connected(server, pause=0.02) as clients:
        put(clients, some)
        server.kill()
        wait_until(lambda: get(clients, some) == [None] * 20 and clients.faults >= 3)
        server.start()
        wait_until(lambda: put(clients, some)[0] == b"OK")
        assert get(clients, some) == values(some) and clients.allows_writes(some.words).all()
        faults = clients.faults
        server.kill()
        server.start()  # the connection is an old one, but nothing was asked of it meanwhile
        assert get(clients, some) == [None] * 20 and clients.faults == faults
        put(clients, some)
        assert get(clients, some) == values(some)
    assert len(texts(log)) <= 2  # one of each kind: the connection was closed, and there is no server


@pytest.mark.slow
def test_a_silent_server_is_waited_for_once(log):
    some = keys(100)
    with (
        RedisServer() as one,
        RedisServer() as two,
        RedisServer() as three,
        connected(one, two, three, read_timeout=2.5, pause=0.05) as clients,
    ):
        put(clients, some)
        one.pause()
        two.pause()
        assert 2.4 < seconds(get, clients, some) < 4.9  # both together
        # They are tried again, and nobody waits for that.
        wait_until(lambda: get(clients, some) and clients.faults >= 4)
        assert statistics.median(seconds(get, clients, some) for _ in range(20)) < 1.5
        assert 0 < sum(value is not None for value in get(clients, some)) < 100
        one.resume()
        two.resume()
        wait_until(lambda: get(clients, some) == values(some))
    assert 2 <= len(texts(log)) <= 4 and all("no answer" in t or "Timeout" in t for t in texts(log))


@pytest.mark.slow
def test_a_server_that_takes_no_connection_costs_the_time_of_one():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        fillers = [
            socket.socket() for _ in range(3)
        ]  # the queue of connections is full: others get no answer
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        with connected(f"redis://127.0.0.1:{port}", connect_timeout=2.0, pause=FOREVER) as clients:
            assert 1.9 < seconds(get, clients, keys(3)) < 3.9
            assert statistics.median(seconds(get, clients, keys(3)) for _ in range(5)) < 0.5
            assert clients.faults == 1
        for filler in fillers:
            filler.close()


@pytest.fixture(params=PROGRAMS, ids=names())
def program(request):
    return request.param


def test_a_full_server_is_read_and_not_written_for_a_minute(program, log, monkeypatch):
    some = keys(300)
    with (
        RedisServer(program, "maxmemory 4mb", "maxmemory-policy noeviction") as server,
        connected(server) as clients,
    ):
        replies = put(clients, some, 60_000)
        kept = sum(reply == b"OK" for reply in replies)
        assert 0 < kept < 300 and "OutOfMemoryError" in {type(reply).__name__ for reply in replies}
        assert not clients.allows_writes(some.words).any() and clients.faults == 1
        assert put(clients, some)[0] is LOST and clients.faults == 1
        got = get(clients, some)
        assert sum(value is not None for value in got) == kept
        name = row_names(some)[0]
        assert clients.run([(b"DEL", name)], some.words[:1]) == [1]
        with server.client() as other:
            other.execute_command("FLUSHALL", "SYNC")
        later = time.monotonic() + 61
        monkeypatch.setattr("time.monotonic", lambda: later)
        assert clients.allows_writes(some.words).all() and put(clients, some)[0] == b"OK"
    (text,) = texts(log)
    assert server.name in text and "maxmemory" in text and "capacity_per_node" in text and "policy" in text


@pytest.mark.parametrize("given", ["", ":wrong-secret@", "somebody:wrong-secret@"])
def test_a_wrong_password_is_an_error_at_construction_and_a_fault_later(program, given, log):
    with (
        RedisServer(program, port=True) as server,
        connected(f"redis://{given}127.0.0.1:{server.port}", pause=FOREVER) as clients,
    ):
        with pytest.raises(OptionError) as caught:
            clients.check()
        assert server.name in str(caught.value) and "password" in str(caught.value)
        error = caught.value
        assert error.__context__ is None and error.__cause__ is None
        assert "wrong-secret" not in f"{error!r} {clients!r} {clients.servers!r}"
        assert get(clients, keys(2)) == [None, None] and clients.faults == 1
    (text,) = texts(log)
    assert "wrong-secret" not in text and PASSWORD not in text


def test_a_server_that_repeats_what_it_was_told_does_not_give_the_password_away(program, log):
    with (
        RedisServer(program, 'rename-command AUTH ""', password="", port=True) as server,
        connected(f"redis://somebody:{PASSWORD}@127.0.0.1:{server.port}") as clients,
    ):
        with pytest.raises(OptionError) as caught:
            clients.check()
        get(clients, keys(2))
        everything = [
            str(caught.value),
            repr(caught.value),
            *texts(log),
            repr(clients),
            repr(clients.__dict__),
        ]
    assert "unknown command" in str(caught.value) and log
    assert not [text for text in everything if PASSWORD in text]


@pytest.mark.parametrize(
    ("password", "database", "match"), [("", 0, "refuses the connection"), (PASSWORD, 99, "DB index")]
)
def test_what_a_server_refuses_at_once_is_an_error(password, database, match):
    with (
        RedisServer(password=password, port=True) as server,
        connected(f"redis://:{PASSWORD}@127.0.0.1:{server.port}/{database}") as clients,
        pytest.raises(OptionError, match=match),
    ):
        clients.check()


ACL = "user cache on >{password} ~torchcache2:* -@all {commands}"
NEEDED = "+info +scan +dbsize +set +mget +exists +del +unlink"


def test_the_commands_that_are_used_are_enough(program):
    acl = ACL.format(password=PASSWORD, commands=NEEDED)
    with (
        RedisServer(program, acl, port=True) as server,
        connected(f"redis://cache:{PASSWORD}@127.0.0.1:{server.port}") as clients,
    ):
        clients.check()
        put(clients, keys(3))
        assert get(clients, keys(3)) == values(keys(3)) and clients.faults == 0
        with server.client() as other:
            assert other.dbsize() == 3  # nothing remains of the check


@pytest.mark.parametrize("missing", NEEDED.split())
def test_a_command_that_is_refused_is_an_error_at_construction(missing):
    acl = ACL.format(password=PASSWORD, commands=NEEDED.replace(missing, ""))
    with (
        RedisServer(None, acl, port=True) as server,
        connected(f"redis://cache:{PASSWORD}@127.0.0.1:{server.port}") as clients,
        pytest.raises(OptionError, match=f"refuses {missing[1:].upper()}") as caught,
    ):
        clients.check()
    assert PASSWORD not in str(caught.value) and "torchcache2:" in str(caught.value)


def test_a_command_that_is_refused_later_is_a_fault(log):
    some = keys(5)
    with RedisServer(port=True) as server, server.client() as other:
        other.execute_command("ACL", "SETUSER", "cache", "on", f">{PASSWORD}", "~*", "+@all")
        with connected(f"redis://cache:{PASSWORD}@127.0.0.1:{server.port}", pause=0.3) as clients:
            put(clients, some)
            other.execute_command("ACL", "SETUSER", "cache", "-set")
            assert "NoPermission" in type(put(clients, some)[0]).__name__
            assert not clients.allows_writes(some.words).any() and get(clients, some) == values(some)
            other.execute_command("ACL", "SETUSER", "cache", "-mget")
            assert get(clients, some) == [None] * 5
            assert clients.faults == 2
            other.execute_command("ACL", "SETUSER", "cache", "off")
            assert list(clients.scan(b"*")) == []
            other.execute_command("ACL", "SETUSER", "cache", "on", "+mget")
            wait_until(lambda: get(clients, some) == values(some))
    assert 2 <= len(texts(log)) <= 4 and PASSWORD not in " ".join(texts(log))


def test_a_replica_is_read_and_not_written(log):
    some = keys(5)
    with (
        RedisServer(None, "repl-diskless-sync-delay 0", port=True) as first,
        RedisServer(None, f"masterauth {PASSWORD}", port=True) as second,
    ):
        with connected(first) as clients:
            put(clients, some)
        with second.client() as other:
            other.replicaof("127.0.0.1", first.port)
            wait_until(lambda: other.dbsize() == 5)
        with connected(second) as clients:
            clients.check()
            assert clients.allows_writes(some.words).all()
            assert "ReadOnly" in type(put(clients, some)[0]).__name__
            assert not clients.allows_writes(some.words).any() and clients.faults == 1
            assert get(clients, some) == values(some)
    assert len(texts(log)) == 1


def babbler(reply, heard=None):
    """A server that answers everything with the same bytes; what it has `heard` is a list."""
    heard = [] if heard is None else heard
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                one = listener.accept()[0]
            except OSError:
                return
            with one:
                while asked := one.recv(65536):
                    heard.append(asked)
                    one.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()

    def stop():
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    return listener.getsockname()[1], stop


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        b"-ERR max number of clients reached\r\n",
        b"*1\r\n*1\r\n$-1\r\n",
        b":5\r\n",
        b"*3\r\n$-1\r\n$-1\r\n$-1\r\n",
        b"+OK\r\n+OK\r\n",
    ],
    ids=["http", "loading", "masterdown", "many", "nested", "number", "more", "twice"],
)
def test_a_strange_answer_is_a_miss(reply):
    port, stop = babbler(reply)
    try:
        with connected(f"redis://127.0.0.1:{port}", pause=FOREVER, read_timeout=0.2) as clients:
            for _ in range(3):
                assert get(clients, keys(1)) == [None]
            assert clients.faults > 0
    finally:
        stop()


def test_a_server_that_refuses_what_is_tried_is_asked_for_nothing_else():
    heard = []
    port, stop = babbler(b"-NOPERM this user may not do that\r\n", heard)
    try:
        with connected(f"redis://127.0.0.1:{port}", pause=0.01, read_timeout=5) as clients:
            assert get(clients, keys(1)) == [None]
            wait_until(lambda: get(clients, keys(1)) == [None] and str(heard).count("torchcache2:try") >= 3)
    finally:
        stop()
    name = row_names(keys(1))[0]
    assert sum(name in asked for asked in heard) == 1


@pytest.mark.parametrize(
    "reply",
    [b"$1\r\n1\r\n", b"$-1\r\n", b":2\r\n", b"*3\r\n:0\r\n*0\r\n*0\r\n", b"*2\r\n$1\r\nx\r\n*1\r\n:1\r\n"],
    ids=["text", "nothing", "number", "three", "pair"],
)
def test_a_strange_answer_to_other_questions_raises_nothing(reply):
    port, stop = babbler(reply)
    try:
        with connected(f"redis://127.0.0.1:{port}", pause=1e-3, read_timeout=0.2) as clients:
            assert list(clients.scan(b"*")) == []
            clients.delete(b"*")
            claim = RedisClaims(clients).of(keys(1))
            claim.take(np.arange(1))
            claim.release()
            assert not clients.exist(row_names(keys(1)), keys(1).words).any()
    finally:
        stop()


def test_descriptors_do_not_leak_when_servers_fail():
    with RedisServer() as server:
        before = len(os.listdir("/proc/self/fd"))
        with connected(server, pause=0.001) as clients:
            for _ in range(5):
                wait_until(lambda: put(clients, keys(1)) == [b"OK"])
                server.kill()
                assert get(clients, keys(1)) == [None]
                server.start()
        assert len(os.listdir("/proc/self/fd")) == before
