"""Whoever lives writes what the processes of a job have put: rows outlive workers, however these end."""

import os
import random
import select
import signal
import time

import pytest

from tests.helpers import warm
from tests.helpers.datasets import Counted, noted
from torchcache2 import CachedDataset

COUNT = 40
PREAMBLE = """
import multiprocessing, os, sys, time
import torch
from torch.utils.data import DataLoader
from tests.helpers.datasets import Counted, note
from torchcache2 import CachedDataset, CachedStream, CacheLoader, LazyShardDataset, torchcache

COUNT = 40
fork = multiprocessing.get_context("fork")
"""


def run(script, *args, **options):
    return warm.start(warm.dedented(PREAMBLE) + warm.dedented(script), *args, **options)


ENDS = """
class Numbers:
    '''A stream of which each worker delivers a part.'''

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(range(worker.id, COUNT, worker.num_workers))


class Loaded(Counted):
    '''Its samples are those of a loader.'''

    def __getitem__(self, index):
        return values.get(index, super().__getitem__)


def squared(items):
    for item in items:
        note(log, item.item())
    return items**2


if __name__ == "__main__":
    root, how, memory = sys.argv[1:]
    log, options = root + "/log", {"cache_dir": root + "/rows", "memory_size": memory}
    source = Counted(COUNT, "tensor", log)
    if "stream" in how:
        data = CachedStream(Numbers(), key=int, load=source.__getitem__, name="numbers", **options)
    elif "shard" in how:
        data = LazyShardDataset(source, **options, rank=0, num_replicas=1)
    elif "values" in how:
        values = CacheLoader("local", "values", **options)
        data = Loaded(COUNT, "tensor", log)
    else:
        data = CachedDataset(source, **options)
    squared = torchcache(persistent=True, persistent_cache_dir=root + "/rows")(squared)
    if how == "function":
        squared(torch.arange(float(COUNT)))
        assert squared.cache_instance.stats().misses == 0
    elif "function" in how:
        with fork.Pool(2) as pool:
            pool.map(squared, torch.arange(float(COUNT)).split(5), chunksize=1)
            own = 0
            while squared.cache_instance.stats().disk_rows < COUNT + own:
                time.sleep(0.2)  # idle workers write
                own += 1
                squared(-torch.ones(1) * own)  # a miss looks for what others have written
    elif "pool" in how:
        with fork.Pool(2) as pool:
            pool.map(data.__getitem__, range(COUNT))
    elif "map" in how:
        import datasets
        rows = datasets.Dataset.from_dict({"x": list(range(COUNT))})
        rows.map(lambda x: {"image": data[x]}, input_columns="x", num_proc=2)
    else:  # in a global variable, as in a script without functions: the interpreter ends the workers
        loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            assert sum(map(len, loader)) == COUNT
    keeper = values if "values" in how else data
    if "flush" in how:
        keeper.flush()
        os.kill(os.getpid(), 9)
    if "close" in how:
        keeper.close()
"""


@pytest.mark.parametrize(
    ("how", "memory"),
    [
        ("loader", "10MB"),
        ("loader", "0"),
        ("loader, flush", "0"),
        ("pool", "10MB"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [
                ("loader, flush", "10MB"),
                ("loader, close", "10MB"),
                ("loader, close", "0"),
                ("values", "10MB"),
                ("values, flush", "0"),
                ("stream", "10MB"),
                ("stream, flush", "0"),
                ("shard", "10MB"),
                ("shard, flush", "0"),
                ("map", "10MB"),
                ("function, flush", "10MB"),
            ]
        ),
    ],
)
def test_the_next_run_loads_nothing(tmp_path, how, memory):
    run(ENDS, tmp_path, how, memory).done(code=-signal.SIGKILL if "flush" in how else 0)
    assert noted(tmp_path / "log").total() >= COUNT
    (tmp_path / "log").unlink()
    run(ENDS, tmp_path, how.replace(", flush", ""), memory).done()
    assert noted(tmp_path / "log").total() == 0 or "function" in how  # which checks what it finds


PUTS = """
def work(dataset, first, root):
    for index in range(first, COUNT, 2):
        dataset[index]
        note(root + "/put", index)
    while not os.path.exists(root + "/end"):
        time.sleep(0.01)


if __name__ == "__main__":
    root, memory = sys.argv[1:]
    dataset = CachedDataset(Counted(COUNT + 1, "tensor"), root + "/rows", memory_size=memory)
    workers = [fork.Process(target=work, args=(dataset, first, root)) for first in range(2)]
    for worker in workers:
        worker.start()
    print(*(worker.pid for worker in workers), flush=True)
    for worker in workers:
        worker.join()
"""


def missing(root):
    """The samples that another process does not find in the folder; nobody puts the last one."""
    dataset = CachedDataset(Counted(COUNT + 1, "tensor"), root / "rows", memory_size=0)
    found = dataset.missing().tolist()
    dataset.close()
    return found[:-1]


def wait_until(condition):
    end = time.monotonic() + warm.DEADLINE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def wait_for_end(process):
    assert select.select([process], [], [], warm.DEADLINE)[0], "a worker has not ended"
    os.close(process)


@pytest.mark.parametrize("memory", ["10MB", "0"])
@pytest.mark.parametrize("victim", ["worker", pytest.param("main", marks=pytest.mark.slow)])
def test_who_is_killed_takes_nothing_with_it(tmp_path, victim, memory):
    process = run(PUTS, tmp_path, memory)
    wait_until(lambda: noted(tmp_path / "put").total() == COUNT)
    if memory == "0":
        wait_until(lambda: missing(tmp_path) == [])  # idle workers write
    first, second = map(int, process.words)
    if victim == "main":
        ends = [os.pidfd_open(pid) for pid in (first, second)]
        process.send(signal.SIGKILL)
        process.wait()
    else:
        os.kill(first, signal.SIGKILL)
    (tmp_path / "end").touch()
    if victim == "main":
        for end in ends:
            wait_for_end(end)
    else:
        process.done()
    assert missing(tmp_path) == []


@pytest.mark.slow
def test_a_worker_that_outlives_all_others_writes_while_it_runs(tmp_path):
    process = run(PUTS, tmp_path, "10MB")
    wait_until(lambda: noted(tmp_path / "put").total() == COUNT)
    first, second = map(int, process.words)
    end = os.pidfd_open(second)
    process.send(signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: missing(tmp_path) == [])
    os.kill(second, signal.SIGKILL)
    wait_for_end(end)
    assert process.wait() == -signal.SIGKILL


STORM = """
def work(dataset, seed, root):
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()
    for index in order:
        dataset[index]
        note(root + "/put", index)
        time.sleep(0.002)


if __name__ == "__main__":
    root, seed = sys.argv[1], int(sys.argv[2])
    COUNT = 1000
    dataset = CachedDataset(Counted(COUNT, "tensor"), root + "/rows", memory_size="10MB")
    workers = []
    while not os.path.exists(root + "/end"):
        workers = [worker for worker in workers if worker.is_alive()]
        while len(workers) < 4:
            seed += 1
            workers.append(fork.Process(target=work, args=(dataset, seed, root)))
            workers[-1].start()
            note(root + "/pids", workers[-1].pid)
        time.sleep(0.01)
    for worker in workers:
        worker.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["workers", "main, too"])
def test_no_row_is_lost_whoever_is_killed_while_filling(tmp_path, victim):
    chance = random.Random(1)
    process = run(STORM, tmp_path, chance.randrange(1000))
    killed = set()
    for _ in range(10):
        wait_until(lambda: set(noted(tmp_path / "pids")) - killed)
        time.sleep(chance.random() * 0.2)
        pid = chance.choice(sorted(set(noted(tmp_path / "pids")) - killed))
        killed.add(pid)
        os.kill(int(pid), signal.SIGKILL)
    ends = [os.pidfd_open(int(pid)) for pid in set(noted(tmp_path / "pids")) - killed if is_there(pid)]
    if victim != "workers":
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and ends
    (tmp_path / "end").touch()
    for end in ends:
        wait_for_end(end)
    process.wait()
    put = {int(index) for index in noted(tmp_path / "put")}
    dataset = CachedDataset(Counted(1000, "tensor"), tmp_path / "rows", memory_size=0)
    assert put and put.isdisjoint(dataset.missing().tolist())
    dataset.close()


def is_there(pid):
    return os.path.exists(f"/proc/{pid}")
