"""Our own server as one process sees it."""

import contextlib
import hashlib
import os
import re
import signal
import socket
import stat
from pathlib import Path

import pytest
import redis

from tests.helpers.ownserver import answers, client
from tests.helpers.redis import PROGRAMS, names
from tests.helpers.storage import wait_until
from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server, Servers
from torchcache2.tiers.redis import server as ownserver
from torchcache2.tiers.redis import watcher
from torchcache2.tiers.redis.server import configuration, hold, let_go, own_servers
from torchcache2.tiers.shared.region import start_time

REFUSED = [
    *(["EVAL", "return 1", "0"], ["CONFIG", "GET", "*"], ["FLUSHALL"], ["KEYS", "*"], ["SAVE"], ["SHUTDOWN"]),
    *(["ACL", "LIST"], ["CLIENT", "LIST"], ["PUBLISH", "torchcache2:a", "b"], ["MONITOR"]),
    *(["REPLICAOF", "a", "1"], ["MODULE", "LIST"]),
    *(["GET", "other"], ["SET", "other", "1"], ["MGET", "torchcache2:a", "other"], ["DEL", "other"]),
]


@pytest.fixture(params=PROGRAMS, ids=names())
def program(request, monkeypatch):
    monkeypatch.setattr(ownserver, "find_servers", lambda: [request.param])
    return request.param


def fake(place, name, text):
    """A program that is no server."""
    path = place.path / name
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def test_a_server_does_what_is_needed_and_nothing_else(place, program):
    servers = own_servers("50MB", "lru", buffer=7)
    assert servers.buffer == 7 and len(servers.servers) == 1 and str(servers).startswith("unix:")
    with contextlib.closing(client(servers.servers[0])) as user:
        assert user.set("torchcache2:a", b"row", nx=True, px=10_000)
        assert user.mget(["torchcache2:a", "torchcache2:b"]) == [b"row", None]
        assert user.get("torchcache2:a") == b"row"
        assert user.exists("torchcache2:a") and user.dbsize() == 1
        assert user.scan(0, "torchcache2:*")[1] == [b"torchcache2:a"]
        assert user.delete("torchcache2:a") and not user.unlink("torchcache2:a")
        memory = user.info("memory")
        assert (memory["maxmemory"], memory["maxmemory_policy"]) == (50_000_000, "allkeys-lru")
        assert user.info("persistence")["aof_enabled"] == 0
        assert user.info("server")["tcp_port"] == 0
        for command in REFUSED:
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)
        with pytest.raises(redis.exceptions.ResponseError):
            user.execute_command("SELECT", 1)
    path = str(place.folders[0] / watcher.SOCKET)
    for password in (None, "wrong"):
        stranger = client(Server("unix:", (("password", password), ("path", path))))
        with contextlib.closing(stranger), pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()
    assert program.encode() in Path(f"/proc/{place.about['pid']}/cmdline").read_bytes()
    assert Path(f"/proc/{place.about['pid']}/oom_score_adj").read_text() == "500\n"


def test_only_this_user_can_enter(place):
    before = os.umask(0)
    try:
        own_servers("50MB", "keep")
    finally:
        os.umask(before)
    (folder,) = place.folders
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in [folder, *folder.iterdir()]}
    assert modes == {folder.name: "0o700", "server": "0o600", "held": "0o600", "socket": "0o700"}
    assert stat.S_ISSOCK((folder / "socket").stat().st_mode)


def test_the_first_limits_stand(place):
    first = own_servers("50MB", "keep")
    assert own_servers("60MB", "lru").servers == first.servers
    with contextlib.closing(client(first.servers[0])) as user:
        assert user.info("memory")["maxmemory"] == 50_000_000


def test_a_share_is_of_what_is_free(place, monkeypatch):
    monkeypatch.setattr(ownserver, "free_memory", lambda device: 10**9)
    with contextlib.closing(client(own_servers(0.25, "keep").servers[0])) as user:
        assert user.info("memory")["maxmemory"] == 25 * 10**7


def test_a_server_without_room_keeps_nothing(place):
    user = client(own_servers(0, "keep").servers[0])
    with contextlib.closing(user), pytest.raises(redis.exceptions.OutOfMemoryError):
        user.set("torchcache2:a", 1)


def test_the_password_is_in_no_text(place, log):
    servers = own_servers("50MB", "keep")
    password = dict(servers.servers[0].options)["password"]
    assert len(password) >= 40 and password in (place.folders[0] / "server").read_text()
    hashed = hashlib.sha256(password.encode()).hexdigest()
    texts = [repr(servers), str(servers), *(record.getMessage() for record in log)]
    for pid in (place.about["pid"], place.about["watcher"], os.getpid()):
        for name in ("cmdline", "environ"):
            texts.append(Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace"))
    assert not any(secret in text for text in texts for secret in (password, hashed))


def test_programs_that_do_not_start_are_named_with_what_they_printed(place, monkeypatch):
    says = "#!/bin/sh\ncat\necho first\necho second\necho library missing\nexit 1"
    wrong = [
        fake(place, "wrong", "\x7fELF nothing"),
        fake(place, "old", says),
        fake(place, "mute", "#!/bin/true"),
    ]
    monkeypatch.setattr(ownserver, "find_servers", lambda: wrong)
    with pytest.raises(OptionError) as caught:
        own_servers("50MB", "keep")
    text = str(caught.value)
    assert "wrong: [Errno 8]" in text and "old: first | second | library missing" in text
    assert "mute: it printed nothing" in text and "#" not in text
    place.all_ended()
    monkeypatch.setattr(ownserver, "find_servers", lambda: [*wrong, *PROGRAMS])
    assert answers(own_servers("50MB", "keep").servers[0])


def test_no_program_is_an_error_that_says_what_to_install(place, monkeypatch):
    monkeypatch.setattr(ownserver, "find_servers", list)
    advice = 'pip install "torchcache2[redis]", or install redis or valkey'
    with pytest.raises(OptionError, match=re.escape(advice)):
        own_servers("50MB", "keep")
    place.all_ended()


def test_a_capacity_that_does_not_parse_is_an_error(place):
    with pytest.raises(OptionError, match="capacity_per_node='much'"):
        own_servers("much", "keep")
    assert place.folders == []


def test_a_folder_that_others_can_enter_is_not_used(place):
    servers = own_servers("50MB", "keep")
    (folder,) = place.folders
    let_go(servers.guard)
    place.all_ended()
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(OptionError, match="is not a folder that this user alone can enter"):
        own_servers("50MB", "keep")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"address": {"path": "/nowhere", "password": ""}}'],
    ids=["empty", "list", "cut", "gone"],
)
def test_a_file_that_names_no_server_is_written_anew(place, text):
    first = own_servers("50MB", "keep")
    (folder,) = place.folders
    pids = place.about["pid"], place.about["watcher"]
    (folder / "server").write_text(text)
    second = own_servers("50MB", "keep")
    assert second.servers[0].name == first.servers[0].name and second != first
    assert place.about["pid"] != pids[0] and answers(second.servers[0])
    wait_until(lambda: not any(map(start_time, pids)))
    assert answers(second.servers[0])  # the one before has not removed its files


def test_a_path_that_is_too_long_for_a_socket_is_not_used(place, monkeypatch, tmp_path):
    long = tmp_path / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("TORCHCACHE_JOB", str(long))
    servers = own_servers("50MB", "keep")
    try:
        assert servers.guard.startswith("/tmp/torchcache2_redis_") and answers(servers.servers[0])
    finally:
        let_go(servers.guard)
    wait_until(lambda: not os.path.exists(os.path.dirname(servers.guard)))


def test_a_path_with_odd_characters(place, monkeypatch):
    odd = place.path / 'a "b\\ä # c'
    odd.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    servers = own_servers("50MB", "keep")
    assert answers(servers.servers[0])
    let_go(servers.guard)
    wait_until(lambda: not list(odd.iterdir()))


def test_a_server_that_is_stopped_is_found(place, monkeypatch):
    """It may go on; until then it is a fault."""
    first = own_servers("50MB", "keep")
    monkeypatch.setattr(ownserver, "_ANSWERS", 0.02)
    os.kill(place.about["pid"], signal.SIGSTOP)
    assert own_servers("50MB", "keep") == first
    let_go(first.guard)
    place.all_ended()


def test_coming_and_going(place):
    """Who joins while the last one leaves has a server that answers."""
    for _ in range(8):
        servers = own_servers("50MB", "keep")
        assert answers(servers.servers[0])
        hold(servers)
        let_go(servers.guard)
    place.all_ended()


def test_servers_of_others_are_not_held(place):
    hold(Servers.of("redis://host"))
    hold(Servers((Server("unix:/nowhere", ()),), guard="/nowhere/held"))  # it has ended


# What the watcher does, in this process


def started(lines, host, programs=PROGRAMS):
    process, found = watcher.start(programs, lines, host)
    if process is not None:
        process.end()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # this process has threads
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_meanwhile_is_tried_again(place, host, program, monkeypatch):
    free = watcher._free_port
    with socket.create_server((host, 0), family=family(host)) as taken:
        ports = [taken.getsockname()[1], free(host)]
        tried = iter(ports)
        monkeypatch.setattr(watcher, "_free_port", lambda host: next(tried))
        lines = configuration(str(place.path), host, "secret", 10**7, "keep")
        assert started(lines, host, [program]) == ports[-1]
        monkeypatch.setattr(watcher, "_free_port", lambda host: ports[0])
        monkeypatch.setattr(watcher, "_PORTS", 2)
        ((path, printed),) = started(lines, host, [program])
    assert path == program and "in use" in printed


def family(host):
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_program_that_does_nothing_is_given_up(place, monkeypatch):
    monkeypatch.setattr(watcher, "_PATIENCE", 1.0)  # long enough for its first words
    sleeps = fake(place, "sleeps", "#!/bin/sh\necho waiting\nexec sleep 60")
    assert started("", None, [sleeps]) == [[sleeps, "waiting\n"]]
