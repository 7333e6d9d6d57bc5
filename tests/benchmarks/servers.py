"""Samples on a Redis server, beside one GET or SET and a pickle a sample, as Bagua's CachedDataset has it.

All use one server that the benchmark starts, over one Unix socket.
"""

import logging
import pickle
import statistics
import subprocess
import sys
from functools import partial

import redis
import torch

from tests.benchmarks.dataset_peers import WORKERS, Arrays, Peer, read, shuffled
from tests.benchmarks.disk_machine import seconds
from tests.benchmarks.report import at_least, at_most, duration, per_item, time_rows
from tests.benchmarks.timing import interleave, progress, ratio
from tests.helpers.redis import RedisServer
from torchcache2 import CachedDataset, CacheLoader

SAMPLES, WIDTH = 256, 2048  # 8 kB each
SHAPE, COUNT, BATCH = (3, 224, 224), 512, 32  # 150 kB each
ROUNDS, EPOCHS, STARTS = 40, 7, 5
STARTING = """
import time
from torchcache2 import CacheLoader

before = time.perf_counter()
with CacheLoader("redis", "test") as loader:
    loader.get("first", len)
    loader.flush()
    print(time.perf_counter() - before)
"""
OURS, BAGUA, SHARED = "torchcache2", "GET and pickle a sample", "torchcache2, shared memory"


def run(report):
    logging.getLogger("torchcache2").setLevel(logging.ERROR)  # a server is killed
    with RedisServer() as server:
        targets = [*_batches(report, server), *_epochs(report, server)]
    targets += [*_dead(report), *_starts(report)]
    logging.getLogger("torchcache2").setLevel(logging.NOTSET)
    report.targets(targets)


class Pickled(Peer):
    """A GET, a pickle and, on a miss, a SET for each sample."""

    name = BAGUA

    def __init__(self, source, url):
        super().__init__(source)
        self.client = redis.Redis.from_url(url)
        self.client.flushdb()

    def find(self, index):
        data = self.client.get(f"bagua_{index}")
        return None if data is None else pickle.loads(data)

    def keep(self, index, sample):
        self.client.set(f"bagua_{index}", pickle.dumps(sample))


def _batches(report, server):
    progress("redis: batches")
    values = torch.randn(SAMPLES, WIDTH)
    peer = Pickled(values, server.url)
    keys, new = list(range(SAMPLES)), iter(range(SAMPLES, 1 << 40))
    with (
        CacheLoader("redis", "test", hosts=server.url) as ours,
        CacheLoader("local", "test", cache_dir=None) as shared,
    ):

        def write():
            ours.get_many([next(new) for _ in keys], lambda key: values[key % SAMPLES])
            ours.flush()

        def put():
            for key in keys:
                peer.keep(key, values[key].clone())

        def get():
            return [peer.find(key) for key in keys]

        for loader in (ours, shared):
            loader.get_many(keys, values.__getitem__)
            loader.flush()
        put()
        reads = {
            OURS: partial(ours.get_many, keys, values.__getitem__),
            BAGUA: get,
            SHARED: partial(shared.get_many, keys, values.__getitem__),
        }
        for call in reads.values():
            assert all(map(torch.equal, call(), values))
        reading = interleave(reads, rounds=ROUNDS)
        writing = interleave({OURS: write, BAGUA: put}, rounds=ROUNDS // 4)
        rows = time_rows("read", reading) + time_rows("write", writing)
        report.times(f"{SAMPLES} samples of {4 * WIDTH:,} bytes on a Redis server", rows)
        targets = []
        for what, times, bound in (("read", reading, 5), ("written", writing, 3)):
            over, cold = ratio(times[BAGUA], times[OURS])
            what = f"{SAMPLES} samples of 8 kB {what}: times as fast as {BAGUA}"
            targets.append(at_least(what, over, bound, cold=cold))
        ours.clear()
        return targets


def _epochs(report, server):
    source = Arrays(COUNT, SHAPE)
    ours = CachedDataset(source, backend="redis", dataset_name="bench", hosts=server.url)
    shared = CachedDataset(source, memory_size="1GB")
    loaders = {
        OURS: shuffled(ours, BATCH),
        BAGUA: shuffled(Pickled(source, server.url), BATCH),
        SHARED: shuffled(shared, BATCH),
    }
    found, order = {name: [] for name in loaders}, list(loaders)
    for name in order:
        progress(f"redis: filling, {name}")
        read(loaders[name])
    for turn in range(EPOCHS):
        progress(f"redis: epochs, {turn + 1} of {EPOCHS}")
        for name in order:
            found[name].append(seconds(partial(read, loaders[name])))
        order.reverse()
    assert ours.stats().misses == shared.stats().misses == COUNT
    medians = {name: statistics.median(taken) for name, taken in found.items()}
    rows = [(name, per_item(taken, COUNT), f"{COUNT / taken:,.0f}") for name, taken in medians.items()]
    title = f"Epochs in which all {COUNT} samples of 150 kB are hits, {WORKERS} workers, batches of {BATCH}"
    report.table(title, ("", "µs per sample", "samples/s"), rows)
    for data in (ours, shared):
        data.clear()
        data.close()
    what = f"second epoch, {WORKERS} workers, samples of 150 kB: times as fast as {BAGUA}"
    return [at_least(what, medians[BAGUA] / medians[OURS], 2)]


def _dead(report):
    progress("redis: a dead server")
    values = torch.randn(SAMPLES, WIDTH)
    with RedisServer() as server, CacheLoader("redis", "dead", hosts=server.url) as ours:
        ours.get_many([0], values.__getitem__)
        server.kill()
        batches = [range(first, first + 64) for first in range(0, SAMPLES, 64)]
        first = seconds(partial(ours.get_many, batches[0], values.__getitem__))
        later = []
        for number in range(40):
            plain = seconds(lambda: [values[key] for key in batches[number % 4]])  # noqa: B023
            later.append(seconds(partial(ours.get_many, batches[number % 4], values.__getitem__)) - plain)
    median = statistics.median(later)
    report.table(
        "Batches of 64 samples of 8 kB while the server is dead, over no cache",
        ("first", "later, median", "later, longest"),
        [(duration(first), duration(median), duration(max(later)))],
    )
    return [
        at_most("first batch with a dead server", first, 2.5, " s"),
        at_most("later batches with a dead server, over no cache, median", 1e3 * median, 5, " ms"),
    ]


def _starts(report):
    """Servers of our own; each is started by a process that ends, as they live as long as their job."""
    progress("redis: starting servers")
    command = [sys.executable, "-c", STARTING]
    found = [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(STARTS)]
    return [at_most("start of a server and its first answer", statistics.median(found), 2, " s")]
