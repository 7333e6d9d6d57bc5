"""Servers that the tests of a module share, emptied for each test; where our own have their folders."""

import contextlib
import tempfile

import pytest

from tests.helpers import warm
from tests.helpers.ownserver import Place
from tests.helpers.redis import PROGRAMS, RedisServer, emptied
from torchcache2.core.places import Servers
from torchcache2.tiers.redis.tier import RedisTier


@pytest.fixture(scope="module")
def started():
    """Starts servers of some programs, or returns those that run already."""
    running = {}
    with contextlib.ExitStack() as stack:

        def start(*programs):
            for number, program in enumerate(programs):
                if (program, number) not in running:
                    running[program, number] = stack.enter_context(RedisServer(program))
            return [running[program, number] for number, program in enumerate(programs)]

        yield start


@pytest.fixture
def servers(started):
    """One empty server."""
    return emptied(started(PROGRAMS[0]))


@pytest.fixture
def tiers():
    """Makes tiers of servers; they are closed in the end."""
    made = []

    def make(servers, *, buffer=1, **options):
        hosts = [server.url for server in servers]
        made.append(RedisTier(Servers.of(hosts, buffer=buffer), **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(scope="session")
def warmed():
    """It has a folder for temporary files, too, which must not be in a `place`."""
    warm.server("random")


@pytest.fixture
def place(monkeypatch, tmp_path_factory):
    """Where our own servers have their folders in a test."""
    tmp_path_factory.getbasetemp()  # it is made when it is first asked for, and other tests use it later
    there = Place()
    monkeypatch.setattr(tempfile, "tempdir", str(there.path))
    yield there
    there.remove()
