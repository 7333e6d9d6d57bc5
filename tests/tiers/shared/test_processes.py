"""Several processes at once, and the ways in which one makes another."""

import itertools
import os
import random
import signal
import time

import pytest

from tests.helpers import warm
from tests.tiers.shared.scripts import JOINING
from torchcache2.tiers.shared.tier import SharedTier

SOAK = bool(os.environ.get("SOAK"))
AT_RANDOM = (
    JOINING
    + """
number, seconds = int(sys.argv[2]), float(sys.argv[3])
WIDTHS = [1, 7, 300]
rng = random.Random(number)
tier = join(int(sys.argv[4]))
end, computed, rounds = time.monotonic() + seconds, 0, 0
while time.monotonic() < end:
    kind = rng.randrange(3)
    names = [kind + 3 * i for i in rng.sample(range(600), 24)]
    computed += len(compute(tier, names, WIDTHS[kind]))
    rounds += 1
    action = rng.random()
    if action < 0.02:
        tier.drop(keys_of([]).namespace)
    elif action < 0.04:
        tier.let_go(keys_of([]).namespace)
    elif action < 0.05:
        tier.close()
        tier = join(int(sys.argv[4]))
    elif action < 0.06:
        child = forked(lambda: [compute(tier, names, WIDTHS[kind]) for _ in range(3)])
        assert ended(child) == 0
    assert tier.stats().bytes + tier._job.board.region.size <= tier.budget
stats = tier.stats()
assert stats.corrupt == stats.faults == 0, stats
print(rounds, computed)
"""
)


def test_processes_that_do_anything_at_any_time(tmp_path):
    processes = [warm.start(AT_RANDOM, tmp_path, number, 0.5, 10**8) for number in range(4)]
    rounds = [int(process.done().words[0]) for process in processes]
    assert sum(rounds) > 8
    assert [process.err for process in processes] == [""] * 4
    SharedTier(b"the next job: 16", 10**6, folder=str(tmp_path)).close()  # for processes too busy to leave
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_that_are_killed_and_stopped_at_any_time(tmp_path):
    rng, end, started = random.Random(), time.monotonic() + (600 if SOAK else 1.0), itertools.count()
    processes, killed = [], 0
    while time.monotonic() < end or processes:
        while len(processes) < 4 and time.monotonic() < end:
            processes.append(warm.start(AT_RANDOM, tmp_path, next(started), 1.0, 600_000))
        time.sleep(rng.random() * 0.2)
        chosen = rng.choice(processes)
        if rng.random() < 0.2:
            chosen.send(signal.SIGSTOP)
            time.sleep(0.1)
            chosen.send(signal.SIGCONT)
        elif (not killed or rng.random() < 0.5) and chosen.poll() is None:
            chosen.send(signal.SIGKILL)
            killed += 1
        for process in processes:
            if process.poll() not in (None, -signal.SIGKILL):
                process.done()  # and nothing that it has checked was wrong
        processes = [process for process in processes if process.poll() is None]
    assert killed > 0


def together(script, path, *places):
    """What four processes print that `meet` in some places."""
    folder = path / "job"
    folder.mkdir(0o700)
    processes = [warm.start(script, folder, number) for number in range(4)]
    for place in places:
        for process in processes:
            process.until(place)
        (path / f"job-{place}").touch()
    return [[word for word in process.done().words if word not in places] for process in processes]


EACH_ONCE = (
    JOINING
    + """
tier = join()
rng, computed = random.Random(int(sys.argv[2])), []
meet("start")
for _ in range(40):
    names = rng.sample(range(400), 16)
    computed += compute(tier, names)
    time.sleep(0.002)
print(*computed)
meet("end")  # the rows go with the last process
"""
)


def test_each_item_is_computed_once(tmp_path):
    computed = [name for names in together(EACH_ONCE, tmp_path, "start", "end") for name in names]
    assert len(computed) == len(set(computed)) > 390
