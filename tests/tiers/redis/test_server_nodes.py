"""Our own servers on several nodes: two jobs on this machine whose ranks have one process group."""

import json
import os

import pytest

from tests.helpers import warm
from tests.helpers.gloo import PREAMBLE
from tests.helpers.ownserver import answers
from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server
from torchcache2.tiers.redis import server as ownserver
from torchcache2.tiers.redis.server import find_or_start, let_go, own_servers

SCRIPT = (
    PREAMBLE
    + """
from torchcache2.core.errors import OptionError
from torchcache2.tiers.redis import server as ownserver
from torchcache2.tiers.redis.server import own_servers

join()
options = dict(argument.split("=") for argument in ARGUMENTS)
if options.get("broken") == str(RANK):
    ownserver.find_servers = list
if "loopback" in options:
    # What Debian has: the name of a machine means 127.0.1.1 to itself.
    far = ("127.0.0.3", "127.0.0.2")
    ownserver._addresses = lambda: ("127.0.1.1", "127.0.1.1") if RANK == 0 else far
    ownserver._is_loopback = lambda address: address.startswith("127.0.1.")
try:
    servers = own_servers("50MB", "keep", cluster_mode="alone" not in options, buffer=3)
    again = own_servers("50MB", "keep", cluster_mode="alone" not in options)
except OptionError as error:
    print("error", error)
else:
    assert again.servers == servers.servers
    print("servers", str(servers).replace(" ", ""), servers.guard, flush=True)
    # One has what another one writes.
    from contextlib import closing
    from tests.helpers.ownserver import client
    for number, server in enumerate(servers.servers):
        with closing(client(server)) as user:
            user.set(f"torchcache2:{RANK}:{number}", 1)
    torch.distributed.barrier()
    for number, server in enumerate(servers.servers):
        with closing(client(server)) as user:
            print("rows", user.dbsize())
    passwords = {dict(server.options)["password"] for server in servers.servers}
    print("passwords", len(passwords))
    torch.distributed.barrier()
"""
)


def run(place, *arguments, **environ):
    """What the rank of each of two nodes prints, when both have ended well."""
    ranks = []
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        env |= {"TMPDIR": str(place.path), "TORCHCACHE_JOB": f"node {rank}"} | environ
        ranks.append(warm.start(SCRIPT, place.path / "store", *arguments, env=env))
    printed = [dict(line.split(" ", 1) for line in rank.done().out.splitlines()) for rank in ranks]
    place.all_ended()
    return printed


@pytest.fixture
def place(warmed, place):
    return place


def test_each_node_has_a_server_and_all_have_both(place):
    first, second = run(place)
    name, guard = first["servers"].split()
    assert second["servers"].split()[0] == name and second["servers"].split()[1] != guard
    assert name.count("127.0.0.1:") == 2 and name.split(",") == sorted(name.split(","))
    assert first["passwords"] == second["passwords"] == "2" and first["rows"] == "2"


@pytest.mark.slow
def test_nodes_may_be_alone(place):
    first, second = run(place, "alone=1", LOCAL_WORLD_SIZE="1")
    assert first["servers"].startswith("unix:") and first["servers"] != second["servers"]
    assert first["passwords"] == "1"


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_in_all(place):
    first, second = run(place, "broken=1")
    assert first["error"].startswith("rank 1 has no Redis server: no program of a Redis server")
    assert second["error"].startswith("no program of a Redis server")


def test_an_address_that_is_missing_is_an_error_in_all(place):
    for its in run(place, MASTER_ADDR="", MASTER_PORT=""):
        assert its["error"].startswith("rank 0 has no Redis server: MASTER_ADDR and MASTER_PORT")


@pytest.mark.slow
def test_a_name_that_means_loopback_to_itself_is_what_others_know(place):
    first, second = run(place, "loopback=1")
    assert first["servers"].split()[0] == second["servers"].split()[0]
    assert "127.0.0.2:" in first["servers"] and "127.0.0.3:" in first["servers"]


def test_without_a_process_group_several_nodes_are_an_error(monkeypatch, place):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=r"call torch\.distributed\.init_process_group before"):
        own_servers("50MB", "keep")
    assert place.folders == []
    assert str(own_servers("50MB", "keep", cluster_mode=False)).startswith("unix:")


def test_the_address_is_that_by_which_the_master_is_reached(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    for address in ("127.0.0.1", "::1"):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert ownserver._addresses() == (address, address)
    assert ownserver._is_loopback("127.0.1.1") and not ownserver._is_loopback("fe80::1%eth0")


def test_a_server_that_listens_does_so_at_one_address(place):
    found = find_or_start(os.urandom(16), "127.0.0.1", "50MB", "keep")
    assert answers(found.server)
    (folder,) = place.folders
    assert {path.name for path in folder.iterdir()} == {"server", "held"}
    port = dict(found.server.options)["port"]
    for other in ("127.0.0.2", "::1"):
        elsewhere = Server.of({"host": other, "port": port, "password": "any"})
        assert not answers(elsewhere)
    again = find_or_start(bytes.fromhex(folder.name[-32:]), "127.0.0.1", "50MB", "keep")
    assert again == found
    about = json.loads((folder / "server").read_text())
    let_go(found.guard)
    place.all_ended(about["pid"], about["watcher"])
