"""Processes that are killed or stopped in the middle of anything: the others go on, and no row is wrong."""

import os
import random
import signal

import pytest

from tests.helpers import warm
from tests.helpers.storage import files_in_memory
from tests.tiers.shared.scripts import JOINING

STEP = 3 if os.environ.get("SOAK") else 149  # lines between two kills
AT_EACH_LINE = (
    JOINING
    + """
def work(tier, seed):
    '''Claims, inserts, makes the index and the chunks grow, and publishes.'''
    compute(tier, range(seed, seed + 300), 3)
    compute(tier, range(seed + 200, seed + 540), 3)
    compute(tier, range(seed + 540, seed + 600), 7)


step, offset, seed, killed = int(sys.argv[2]), int(sys.argv[3]), 0, 0
line = 1 + offset
tier = join()
while True:
    code = killed_at(line, work, tier, seed)
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


@pytest.mark.slow
def test_a_process_may_be_killed_at_any_line(tmp_path):
    process = warm.start(AT_EACH_LINE, tmp_path, STEP, random.randrange(STEP)).done(timeout=3600)
    killed, lines = map(int, process.words)
    assert killed > 5 and lines > 400


WHILE_OTHERS_WAIT = (
    JOINING
    + """
tier = join()
claimed, worker_started = os.pipe(), os.pipe()


def claimant():
    claim = tier.claim(keys_of(range(10)))
    assert len(claim.mine) == 10
    forked(worker)  # as a DataLoader has them; it has all that its parent had open
    os.read(worker_started[0], 1)
    put(tier, range(5))
    os.write(claimed[1], b"1")
    time.sleep(60)


def worker():
    os.write(worker_started[1], b"1")
    os.close(claimed[0])
    os.close(claimed[1])
    time.sleep(8)


pid = forked(claimant)
os.read(claimed[0], 1)
claim = tier.claim(keys_of(range(10)))
assert len(claim.mine) == 0
start = time.monotonic()
os.kill(pid, signal.SIGKILL)  # it is a zombie as long as nobody waits for it
assert sorted(claim.wait().tolist()) == [5, 6, 7, 8, 9]
assert time.monotonic() - start < 5
put(tier, range(5, 10))
claim.release()
assert found(tier, range(10)) == list(range(10))
assert ended(pid) == -signal.SIGKILL
counts = tier.counts()
print(counts["waited"], counts["taken_over"], counts["faults"])
"""
)


def test_those_who_wait_for_one_that_is_killed_go_on(tmp_path):
    assert warm.run(WHILE_OTHERS_WAIT, tmp_path).words == ["5", "5", "0"]


WITH_THE_LOCK = (
    JOINING
    + """
tier, late = join(patience=0.3), join()
put(tier, range(5))
found(late, [1])  # it has a part in the memory from now on
ready = os.pipe()


def holder():
    found(tier, [1])
    with tier._job.lock():
        child = forked(lambda: time.sleep(2))  # the lock is not its own
        os.write(ready[1], b"1")
        os.kill(os.getpid(), signal.SIGSTOP)
    put(tier, range(5, 8))


pid = forked(holder)
os.read(ready[0], 1)
os.waitpid(pid, os.WUNTRACED)
if sys.argv[2] == "killed":
    os.kill(pid, signal.SIGKILL)
    assert put(tier, range(5, 10)) == 5
else:
    waiting = tier.claim(keys_of(range(10)))
    assert len(waiting.mine) == 10 and len(waiting.others) == 0
    assert put(tier, range(5, 10)) == 0 and found(tier, range(10)) == []
    assert tier.stats().faults == 1, tier.stats()
    os.kill(pid, signal.SIGCONT)
assert ended(pid) == (-signal.SIGKILL if sys.argv[2] == "killed" else 0)
print(*found(late, range(10)))
tier.drop(keys_of([]).namespace)
print("after", *found(late, range(10)))
"""
)


def test_a_lock_whose_holder_is_stopped_is_given_up_on(tmp_path):
    process = warm.run(WITH_THE_LOCK, tmp_path, "stopped")
    assert process.words == [*"01234567", "after"]
    assert process.err.count("shared memory cannot be used") == 1


def test_a_lock_goes_with_its_holder_though_a_forked_child_lives(tmp_path):
    process = warm.run(WITH_THE_LOCK, tmp_path, "killed")
    assert process.words == [*"0123456789", "after"] and process.err == ""


ALL_KILLED = (
    JOINING
    + """
tier = join(100_000_000)
for number in range(3):
    put(tier, range(number, 6000, 3), 1000)
print(tier.stats().bytes, flush=True)
time.sleep(60)
"""
)


def test_memory_is_back_when_all_are_killed(tmp_path):
    processes = [warm.start(ALL_KILLED, tmp_path) for _ in range(2)]
    for process in processes:
        process.until("\n")
    held = files_in_memory(process.pid for process in processes)
    assert sum(held.values()) > 20_000_000
    for process in processes:
        process.send(signal.SIGKILL)
        process.wait()
    assert not held.keys() & files_in_memory().keys()
    words = warm.run(
        JOINING + "t = join(); print(*found(t, range(10), 1000), t.stats().bytes)", tmp_path
    ).words
    assert words == ["0"]
    assert list(tmp_path.iterdir()) == []
