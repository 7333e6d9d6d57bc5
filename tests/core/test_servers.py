"""Which servers keep rows: URLs, dicts, and passwords that are in no text."""

import pickle
import traceback

import pytest

from torchcache2 import CacheSettings
from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server, Servers

SECRET = "tops3cret"
ENTRIES = [
    (f"redis://:{SECRET}@node1:6380/2", "node1:6380", {"host": "node1", "port": 6380, "db": 2}),
    ("redis://node1", "node1:6379", {"host": "node1", "port": 6379}),
    ("redis://", "localhost:6379", {"host": "localhost", "port": 6379}),
    ("redis://[::1]:7", "::1:7", {"host": "::1", "port": 7}),
    (f"rediss://user:{SECRET}@node1", "node1:6379", {"username": "user", "ssl": True}),
    ("rediss://h?ssl_ca_certs=/ca.pem", "h:6379", {"ssl": True, "ssl_ca_certs": "/ca.pem"}),
    (f"unix://:{SECRET}@/run/redis.sock?db=3", "unix:/run/redis.sock", {"db": 3}),
    ({"host": "node1", "port": "6381"}, "node1:6381", {"port": 6381}),
    ({"host": "node1", "password": SECRET, "username": None}, "node1:6379", {"password": SECRET}),
    ({"path": "/run/redis.sock"}, "unix:/run/redis.sock", {"path": "/run/redis.sock"}),
]
WRONG = [
    (5, "of type int"),
    ([5], "of type int"),
    ([], "is empty"),
    ("node1:6379", "not the URL of a server"),
    (f"http://:{SECRET}@node1", "not the URL of a server"),
    (f"redis://:{SECRET}@node1:{SECRET}", "cannot be read"),
    (f"redis://:{SECRET}@node1?pass={SECRET}", "'pass'"),
    ({"port": 1}, "without a host"),
    ({"host": ""}, "without a host"),
    (f"redis://node1/{SECRET}", "cannot be read"),
    ({"host": "a", "port": SECRET}, "'port' is not a number"),
    ({"host": "a", "port": -4}, "'port' is not a number from 1 to 65535"),
    ({"host": "a", "port": 70_000}, "'port' is not a number from 1 to 65535"),
    ({"host": "a", "db": "-1"}, "'db' is not a number from 0"),
    ({"host": "a", "port": 1.5}, "'port' is of type float"),
    ({"host": "a", "port": True}, "'port' is of type bool"),
    ({"host": "a", "passwd": SECRET}, "'passwd'"),
    ({"host": "a", "path": "/b"}, "a path and a host"),
    ([{"host": "a"}, "redis://a:6379"], "twice: a:6379"),
]


@pytest.mark.parametrize(("entry", "name", "options"), ENTRIES, ids=range(len(ENTRIES)))
def test_a_server_has_a_name_and_options_and_its_password_is_in_no_text(entry, name, options):
    servers = Servers.of(entry, buffer=7)
    (server,) = servers.servers
    assert server.name == str(servers) == name and servers.buffer == 7
    assert options.items() <= dict(server.options).items()
    assert SECRET not in f"{server} {server!r} {servers} {servers!r} {[servers]}"
    copy = pickle.loads(pickle.dumps(servers))
    assert copy == servers and hash(copy) == hash(servers)
    assert Server.of(server) is server


@pytest.mark.parametrize(("hosts", "text"), WRONG, ids=range(len(WRONG)))
def test_what_names_no_server_is_an_error_that_shows_no_password(hosts, text):
    with pytest.raises(OptionError) as caught:
        Servers.of(hosts)
    assert text in str(caught.value) and str(caught.value).startswith("hosts")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_the_order_of_servers_does_not_matter():
    hosts = ["redis://c", "redis://a", {"host": "b", "port": 3}]
    assert Servers.of(hosts) == Servers.of(hosts[::-1])
    assert str(Servers.of(hosts)) == "a:6379, b:3, c:6379"


def test_a_url_is_a_place_for_rows():
    settings = CacheSettings(persistent_cache_dir=f"redis://:{SECRET}@node1:6380/2")
    assert settings.is_persistent and str(settings.servers) == "node1:6380"
    assert SECRET not in repr(settings) + repr(settings.of_tiers())
    assert settings.replace({"verify": 0.5}).servers == settings.servers
    assert CacheSettings(persistent=False, persistent_cache_dir="redis://node1").servers is None
    assert CacheSettings(persistent_cache_dir="/tmp/rows").servers is None


@pytest.mark.parametrize("start", ["redis:/", "unix:/"])
def test_nearly_the_url_of_a_server_is_an_error(start):
    with pytest.raises(OptionError, match=r"persistent_cache_dir is a URL of .*redis://") as caught:
        CacheSettings(persistent_cache_dir=f"{start}:{SECRET}@host")
    assert SECRET not in str(caught.value)
