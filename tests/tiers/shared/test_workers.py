"""Rows that the workers of a `DataLoader` share, who come and go, and are killed."""

import os

import pytest

from tests.helpers import warm
from tests.tiers.shared.scripts import JOINING

SOAK = bool(os.environ.get("SOAK"))

EPOCHS = """
import os, sys
from torch.utils.data import DataLoader
from tests.helpers.storage import found, keys_of
from tests.helpers.workers import Sharing

if __name__ == "__main__":
    folder, method, epochs, workers = *sys.argv[1:3], *map(int, sys.argv[3:])
    data = Sharing(b"job of a dataset", folder, 12)
    tier, namespace = data.tier, keys_of([]).namespace
    tier.hold(namespace)
    assert found(tier, range(12)) == [] and tier.stats().rows == 0
    pids = set()
    for epoch in range(epochs):
        tier.hold(namespace)
        loader = DataLoader(data, 3, num_workers=workers, collate_fn=list, multiprocessing_context=method)
        for batch in loader:
            for here, pid in batch:
                assert epoch == 0 or here == list(range(12)), here
                pids.add(pid)
    assert os.getpid() not in pids and len(pids) == epochs * workers
    assert found(tier, range(12)) == list(range(12))
    assert (tier.stats().faults, tier.stats().corrupt) == (0, 0)
    tier.close()
    tier.hold(namespace)
    print(os.listdir(folder))
"""

KILLED = """
import os, sys
from torch.utils.data import DataLoader
from tests.helpers.storage import found, keys_of
from tests.helpers.workers import Sharing

if __name__ == "__main__":
    folder, method = sys.argv[1:]
    data = Sharing(b"job of a dataset", folder, 12, killed=(7,))
    tier = data.tier
    tier.hold(keys_of([]).namespace)
    try:
        list(DataLoader(data, 1, num_workers=1, collate_fn=list, multiprocessing_context=method))
    except RuntimeError as error:
        assert "worker" in str(error)
    assert found(tier, range(12)) == list(range(8))
    later = DataLoader(data, 12, num_workers=1, collate_fn=list, multiprocessing_context="fork", sampler=[9])
    ((here, pid),) = next(iter(later))
    assert here == list(range(8)) and pid != os.getpid()
    assert found(tier, range(12)) == [*range(8), 9]
    assert (tier.stats().faults, tier.stats().corrupt) == (0, 0)
    tier.close()
    print(os.listdir(folder))
"""


@pytest.mark.parametrize(
    ("method", "epochs", "workers"), [("fork", 4, 2), ("forkserver", 2, 1), *[("spawn", 2, 1)] * SOAK]
)
def test_rows_outlive_the_workers_that_put_them(tmp_path, method, epochs, workers):
    process = warm.run(EPOCHS, tmp_path, method, epochs, workers, forks=True)
    assert process.out == "[]\n" and process.err == ""


@pytest.mark.parametrize("method", ["fork", *["spawn"] * SOAK])
def test_rows_of_a_worker_that_is_killed_stay(tmp_path, method):
    process = warm.run(KILLED, tmp_path, method)
    assert process.out == "[]\n"


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
