"""What the processes of these tests begin with."""

JOB = b"a job of 16 byte"


JOINING = """
import os, random, signal, sys, time
import numpy as np
from tests.helpers.storage import found, keys_of, put, wait_until
from tests.tiers.shared.scripts import JOB
from torchcache2.tiers.shared.tier import SharedTier

folder = sys.argv[1]


def join(budget=30_000_000, patience=30.0):
    tier = SharedTier(JOB, budget, folder=folder)
    tier._job.lock.patience = patience
    return tier


def meet(place):
    '''Wait for the other processes here; see `together`.'''
    print(place, flush=True)
    wait_until(lambda: os.path.exists(f"{folder}-{place}"))


def compute(tier, names, width=4):
    '''What an engine does for a batch; what it computed.'''
    here = set(found(tier, names, width))
    misses = [name for name in names if name not in here]
    claim, computed = tier.claim(keys_of(misses)), []
    try:
        mine = claim.mine
        while True:
            computed += [misses[i] for i in mine.tolist()]
            put(tier, [misses[i] for i in mine.tolist()], width)
            if not len(claim.others):
                return computed
            mine = claim.wait()
    finally:
        claim.release()


def resident(tier):
    '''Bytes that the job's files really take.'''
    regions = [tier._job.board.region, *[table.region for table in tier._tables.open.values()]]
    return sum(os.fstat(region.descriptor).st_blocks * 512 for region in regions)


def forked(function):
    '''A child that calls a function.'''
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(line, function, *args):
    '''The exit code of a child that calls a function, and is killed at a line of the shared tier's code.'''
    left = line

    def traced(frame, event, arg):
        nonlocal left
        if "/tiers/shared/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return traced

    def work():
        sys.settrace(traced)
        function(*args)

    return ended(forked(work))
"""
