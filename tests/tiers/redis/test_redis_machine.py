"""Handles of some servers put, get, drop, flush, reopen, meet damage and losses: a dict that may forget.

Whatever is found must be what was put. What was flushed must be found by every handle, and what a handle has
kept by that handle, until somebody drops it, damages it, or ends its server.
"""

import contextlib
import os

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.helpers.redis import PROGRAMS
from tests.helpers.storage import NAMESPACES, NEVER, keys_of, put
from tests.tiers import machine
from tests.tiers.machine import NAMES, SOME, WIDTHS, rows, width_of
from torchcache2.core.places import Servers
from torchcache2.tiers.redis.record import row_names
from torchcache2.tiers.redis.tier import RedisTier

pytestmark = pytest.mark.slow

SOAK = bool(os.environ.get("SOAK"))
SPACES = NAMESPACES[:2]


class Handle(machine.Handle):
    def __init__(self, servers, codec, buffer):
        hosts = [server.url for server in servers]
        super().__init__(RedisTier(Servers.of(hosts, buffer=buffer), codec=codec, delay=NEVER, claims=False))
        for node in self.tier._clients._known.values():
            node.using.shortest = 0.0  # a server is tried again at once


class Cluster(RuleBasedStateMachine):
    servers = ()
    names = SOME
    spaces = st.sampled_from(SPACES)
    which = st.integers(0, 1)

    @initialize(codec=st.sampled_from(["none", "brotli"]), buffer=st.sampled_from([1, 20, 1000]))
    def make(self, codec, buffer):
        self.clients = [server.client() for server in self.servers]
        for client in self.clients:
            client.flushall()
        self.options = (self.servers, codec, buffer)
        self.handles = [Handle(*self.options) for _ in range(2)]
        self.sealed = set()  # what every handle must find
        self.kept = set()  # what may be on the servers

    @rule(which=which, names=names, space=spaces)
    def put(self, which, names, space):
        handle = self.handles[which]
        for width in WIDTHS:
            mine = [name for name in names if width_of(name) == width]
            count = put(handle.tier, mine, width, space)
            assert count == len(rows(mine, space) - handle.waiting) or self.options[2] < 1000
        handle.waiting |= rows(names, space)
        self.kept |= rows(names, space)

    @rule(names=names, space=spaces)
    def get(self, names, space):
        for handle in self.handles:
            expected = {row for row in self.sealed | handle.waiting if row[0] == space}
            asked = [*names, *sorted({name for _, name in expected}.difference(names))]
            here = handle.get(asked, space)
            assert expected <= here <= self.kept
            flags = handle.tier.has(keys_of(asked, space))
            assert here <= rows([name for name, is_here in zip(asked, flags, strict=True) if is_here], space)

    @rule(which=which)
    def flush(self, which):
        handle = self.handles[which]
        handle.tier.flush()
        self.sealed |= handle.waiting
        handle.waiting = set()

    @rule(which=which)
    def reopen(self, which):
        self.handles[which].tier.close()
        self.sealed |= self.handles[which].waiting
        self.handles[which] = Handle(*self.options)

    def settle(self):
        """Have everything on the servers, as a thread may send it at any time."""
        for which in range(len(self.handles)):
            self.flush(which)

    @rule(which=which, space=spaces)
    def drop(self, which, space):
        self.settle()
        self.handles[which].tier.drop(space)
        self.sealed -= rows(NAMES, space)
        self.kept -= rows(NAMES, space)
        for handle in self.handles:
            assert handle.get(NAMES, space) == set()
        assert self.handles[0].tier.count(space) == 0

    @rule(
        name=st.sampled_from(NAMES),
        space=spaces,
        place=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 8),
    )
    def damage(self, name, space, place, bit):
        """A bit of a value is another one, or its end is gone."""
        self.settle()
        (key,) = row_names(keys_of([name], space))
        for client in self.clients:
            value = client.get(key)
            if value is not None:
                at = int(place * len(value))
                flipped = value[:at] + (bytes([value[at] ^ 1 << bit]) + value[at + 1 :] if bit < 8 else b"")
                client.set(key, flipped)
                self.sealed -= rows([name], space)

    @rule(number=st.integers(0, 2))
    def lose(self, number):
        """A server forgets everything."""
        self.settle()
        self.clients[number % len(self.clients)].flushall()
        self.sealed.clear()

    @invariant()
    def nothing_fails(self):
        if hasattr(self, "handles"):
            for handle in self.handles:
                assert handle.tier._clients.faults == handle.tier._faults == 0

    def teardown(self):
        for handle in getattr(self, "handles", ()):
            handle.tier.close()
            self.sealed |= handle.waiting
            handle.waiting = set()
        if hasattr(self, "handles"):
            last = Handle(*self.options)
            with contextlib.closing(last.tier):
                here = set().union(*(last.get(NAMES, space) for space in SPACES))
            assert self.sealed <= here <= self.kept
            for client in self.clients:
                client.close()


@pytest.mark.parametrize("count", [1, 3])
def test_servers(started, count):
    class Some(Cluster):
        servers = started(*PROGRAMS[:1] * count)

    settings = hypothesis.settings(
        max_examples=1000 if SOAK else 12,
        stateful_step_count=60 if SOAK else 25,
        deadline=None,
        derandomize=not SOAK,  # `make soak` looks for what nobody has seen yet
        report_multiple_bugs=False,
        phases=tuple(hypothesis.Phase)[: 5 if SOAK else 3],  # with threads, shrinking would take minutes
    )
    run_state_machine_as_test(Some, settings=settings)
