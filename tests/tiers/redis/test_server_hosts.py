"""Which of several hosts a node uses with `cluster_mode=False`."""

import os

import pytest

from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server
from torchcache2.tiers.redis.server import one_of


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, 0),
        ({"GROUP_RANK": "1"}, 1),
        ({"GROUP_RANK": "5"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 0),
    ],
)
def test_a_node_has_the_host_of_its_number(environ, chosen, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, environ.get(name, ""))
    hosts = ["redis://c.invalid", {"host": "192.0.2.77", "port": "6380"}, "redis://a.invalid"]
    assert one_of(hosts) == Server.of(hosts[chosen])


@pytest.mark.parametrize(
    "here", ["unix:///tmp/a", "redis://127.0.0.1:7000", f"redis://{os.uname().nodename}"]
)
def test_a_node_has_its_own_host(here, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")
    assert one_of(["redis://c.invalid", "redis://192.0.2.77", here]) == Server.of(here)


def test_one_host_is_for_all():
    assert one_of("redis://a.invalid") == Server.of("redis://a.invalid")
    with pytest.raises(OptionError, match="names a server twice"):
        one_of(["redis://a.invalid", "redis://a.invalid:6379"])
