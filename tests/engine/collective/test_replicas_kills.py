"""Processes that are killed while replicas make room: the others go on, and no row is wrong."""

import os
import random

from tests.helpers import warm
from tests.tiers.shared.scripts import JOINING

STEP = 31 if os.environ.get("SOAK") else 1499  # lines between two kills
AT_EACH_LINE = (
    JOINING
    + """
from tests.helpers.storage import NAMESPACES
from tests.helpers.replicas import Replicas, Stack


def work(tier):
    '''Fills the memory with replicas, and then with rows that take their room.'''
    for first in range(0, 1600, 400):
        put(Replicas(Stack(tier)), range(first, first + 400), 100)
    for first in range(0, 1200, 400):
        put(tier, range(first, first + 400), 100)


def fits(tier):
    '''Whether rows find room again that is theirs; what was killed may be noticed a second later.'''
    put(tier, range(1200), 100)
    return len(found(tier, range(1200), 100)) == 1200


step, line, killed = int(sys.argv[2]), 1 + int(sys.argv[3]), 0
tier = join(1_000_000)
while True:
    put(Replicas(Stack(tier)), range(100), 100)
    code = killed_at(line, work, tier)
    found(Replicas(Stack(tier)), range(1600), 100)
    wait_until(lambda: fits(tier))
    stats = tier.stats()
    assert (stats.corrupt, stats.faults) == (0, 0), stats
    assert resident(tier) <= stats.bytes + tier._job.board.region.size, stats
    assert stats.bytes <= tier.budget
    if code == 0:
        break
    assert code == -signal.SIGKILL
    killed, line = killed + 1, line + step
    tier.drop(NAMESPACES[0])
    tier.drop(NAMESPACES[0])
print(killed, line)
"""
)


def test_a_process_may_be_killed_at_any_line(tmp_path):
    process = warm.start(AT_EACH_LINE, tmp_path, STEP, random.randrange(STEP))
    killed, lines = map(int, process.done(timeout=600.0).words)
    assert killed > 1 and lines > 400
