"""Processes that are killed or stopped in the middle of anything: the others go on, and no row is wrong."""

import random
import signal

import pytest

from tests.helpers import warm

COMMON = """
import os, random, signal, sys, time
import numpy as np
from tests.helpers.storage import found, keys_of, put, wait_until
from torchcache2.tiers.shared.tier import SharedTier

JOB, folder = b"a job of 16 byte", sys.argv[1]


def join(budget=30_000_000, patience=30.0):
    tier = SharedTier(JOB, budget, folder=folder)
    tier._job.lock.patience = patience
    return tier


def compute(tier, names, width=4):
    '''What an engine does for a batch; how many it computed.'''
    here = set(found(tier, names, width))
    misses = [name for name in names if name not in here]
    claim, count = tier.claim(keys_of(misses)), 0
    try:
        mine = claim.mine
        while True:
            count += len(mine)
            put(tier, [misses[i] for i in mine.tolist()], width)
            if not len(claim.others):
                break
            mine = claim.wait()
    finally:
        claim.release()
    return count


def resident(tier):
    '''Bytes that the job's files really take.'''
    regions = [tier._job.board.region, *[table.region for table in tier._tables.values()]]
    return sum(os.fstat(region.descriptor).st_blocks * 512 for region in regions)
"""

AT_EACH_LINE = (
    COMMON
    + """
class Killer:
    '''Kills this process at a line of the shared tier's code.'''

    def __init__(self, line):
        self.left = line

    def call(self, frame, event, arg):
        return self.line if "/tiers/shared/" in frame.f_code.co_filename else None

    def line(self, frame, event, arg):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def work(tier, seed):
    '''Claims, inserts, makes the index and the chunks grow, and publishes.'''
    compute(tier, range(seed, seed + 300), 3)
    compute(tier, range(seed + 200, seed + 540), 3)
    compute(tier, range(seed + 540, seed + 600), 7)


def kill_at(tier, line, seed):
    pid = os.fork()
    if pid == 0:
        sys.settrace(Killer(line).call)
        work(tier, seed)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


step, offset, seed, killed = int(sys.argv[2]), int(sys.argv[3]), 0, 0
line = 1 + offset
tier = join()
while True:
    code = kill_at(tier, line, seed)
    start = time.monotonic()
    work(tier, seed)
    assert time.monotonic() - start < 10, line
    assert len(found(tier, range(seed, seed + 540), 3)) == 540
    assert len(found(tier, range(seed + 540, seed + 600), 7)) == 60
    stats = tier.stats()
    assert (stats.corrupt, stats.faults) == (0, 0), stats
    assert resident(tier) <= stats.bytes + tier._job.board.region.size <= tier.budget
    if code == 0:
        break
    assert code == -signal.SIGKILL
    killed, line = killed + 1, line + step
    seed += 600
    if killed % 6 == 0:
        tier.drop(keys_of([]).namespace)
print(killed, line)
"""
)


def test_a_process_may_be_killed_at_any_line(tmp_path):
    killed, lines = map(int, warm.run(AT_EACH_LINE, tmp_path, 97, random.randrange(97)).words)
    assert killed > 5 and lines > 400
