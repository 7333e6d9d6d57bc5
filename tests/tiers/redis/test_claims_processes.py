"""Processes that claim, compute, give up, are stopped and are killed, in any order, against a model."""

import os
import random
import signal
import time

import pytest

from tests.helpers import warm
from tests.helpers.redis import RedisServer

SOAK = bool(os.environ.get("SOAK"))
LASTS = 1.5  # seconds, though others may have the machine for a while

WORKER = """
import os, random, sys, threading, time
from tests.helpers.storage import keys_of
from torchcache2.core.places import Servers
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import Clients
from torchcache2.tiers.redis.record import row_names

url, log, seed, rounds, RedisClaims.least = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
chance = random.Random(seed)
file = os.open(log, os.O_WRONLY | os.O_APPEND)
clients = Clients(Servers.of(url))
claims = RedisClaims(clients)


def note(what, names):
    os.write(file, "".join(f"{what} {os.getpid()} {name}\\n" for name in names).encode())


def compute(names):
    '''What an engine and a tier do for a batch.'''
    keys = keys_of(names)
    there = clients.exist(row_names(keys), keys.words)
    names = [name for name, is_row in zip(names, there, strict=True) if not is_row]
    claim = Claim(len(names), [claims.of(keys_of(names))] if names else [])
    try:
        mine = claim.mine
        while True:
            done = [names[i] for i in mine.tolist()]
            note("begins", done)
            time.sleep(chance.choice([0, 0.002, 0.01]))
            if chance.random() < 0.1:
                note("leaves", done)
                return
            note("ends", done)
            keys = keys_of(done)
            if chance.random() < 0.5:
                time.sleep(0.002)
            clients.run([(b"SET", name, b"row") for name in row_names(keys)], keys.words)
            if not len(claim.others):
                return
            mine = claim.wait()
    finally:
        claim.release()


for number in range(rounds):
    compute([f"{number // 4}-{i}" for i in chance.sample(range(30), chance.randint(1, 10))])
claims.close()
clients.close()
print("through")
"""


def check(lines):
    """Assert that nobody computes what another one, who is well, computes or has computed; count what was."""
    computing, computed, unwell = {}, {}, set()
    for line in lines:
        what, pid, *names = line.split()
        if what in ("killed", "stopped"):
            unwell.add(pid)
            continue
        (name,) = names
        others = computing.setdefault(name, set())
        if what == "begins":
            # One that was stopped does not know that others have taken over meanwhile.
            if pid not in unwell:
                assert others <= unwell | {pid}, line
                assert computed.get(name, set()) <= unwell, line
            others.add(pid)
            continue
        others.discard(pid)
        if what == "ends":
            computed.setdefault(name, set()).add(pid)
    return len(computed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_a_random_schedule_with_processes_that_are_killed_and_stopped(tmp_path, seed):
    chance, log, rounds = random.Random(seed), tmp_path / "log", 40 if SOAK else 8
    log.touch()

    def note(what, process):
        with open(log, "a") as file:
            file.write(f"{what} {process.pid}\n")

    with RedisServer() as server:
        numbers = iter(range(1000))

        def start():
            return warm.start(WORKER, server.url, log, f"{seed} {next(numbers)}", rounds, LASTS)

        running = [start() for _ in range(4 if SOAK else 3)]
        faults, began = 8 if SOAK else 2, time.monotonic()
        while faults:
            time.sleep(chance.uniform(0.05, 0.3))
            victim = chance.choice(running)
            if victim.poll() is not None:
                faults -= 1
                continue
            if chance.random() < 0.5:
                note("stopped", victim)
                victim.send(signal.SIGSTOP)
                time.sleep(chance.choice([0.05, 1.3 * LASTS]))
                victim.send(signal.SIGCONT)
            else:
                note("killed", victim)
                victim.send(signal.SIGKILL)
                assert victim.wait() in (-signal.SIGKILL, 0)  # it may have ended just before
                running[running.index(victim)] = start()
            faults -= 1
        for process in running:
            assert process.done().out.split() == ["through"]
        assert time.monotonic() - began < 120
        time.sleep(LASTS)  # what the killed ones had claimed
        client = server.client()
        assert list(client.scan_iter(b"torchcache2:claim:*")) == []
        client.close()
    assert check(log.read_text().splitlines()) > 20


def test_the_model_finds_what_two_compute():
    good = [
        "begins 1 a",
        "begins 2 b",
        "ends 1 a",
        "leaves 2 b",
        "begins 1 b",
        "killed 1",
        "begins 2 b",
        "ends 2 b",
    ]
    assert check(good) == 2
    for bad in (["begins 1 a", "begins 2 a"], ["begins 1 a", "ends 1 a", "begins 2 a"]):
        with pytest.raises(AssertionError):
            check(bad)
