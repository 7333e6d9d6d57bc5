"""Workers that are forked while threads use the tier; `tests/datasets` has those of a `DataLoader`."""

from tests.helpers import warm
from tests.tiers.shared.scripts import JOINING

BESIDE_THREADS = (
    JOINING
    + """
import threading
from tests.helpers.storage import value_of

# Torch takes locks when it draws numbers, and when one of its functions is called for the first time: a child
# that is forked meanwhile would wait for ever.
made = [value_of((worker, name), 4) for worker in range(12) for name in range(10)]
tier, stop, errors = join(10**8), threading.Event(), []
put(tier, ["first"])
assert found(tier, ["first", "absent"]) == ["first"]


def read_and_put(number):
    try:
        for name in range(10**6):
            if stop.is_set():
                return
            put(tier, [(number, name)])
            assert found(tier, [(number, name), (number, name + 1)]) == [(number, name)]
    except BaseException as error:
        errors.append(error)


def epoch(worker):
    for name in range(10):
        put(tier, [(worker, name)])
        assert found(tier, [(worker, name), "absent"]) == [(worker, name)]


threads = [threading.Thread(target=read_and_put, args=(f"thread {number}",)) for number in range(2)]
for thread in threads:
    thread.start()
for first in range(0, 12, 2):
    workers = [forked(lambda: epoch(worker)) for worker in (first, first + 1)]
    assert [ended(worker) for worker in workers] == [0, 0]
stop.set()
for thread in threads:
    thread.join()
names = [(worker, name) for worker in range(12) for name in range(10)]
assert found(tier, names) == names and errors == [], errors
assert (tier.stats().faults, tier.stats().corrupt) == (0, 0)
print(len(tier._job._listed()))
"""
)


def test_workers_that_are_forked_while_threads_are_in_the_tier(tmp_path):
    process = warm.run(BESIDE_THREADS, tmp_path)
    assert process.words == ["1"] and process.err == ""
