"""What `CachedDataset` costs beside a hit in RAM: cold reads from a disk, memory, and the fingerprint."""

import fcntl
import math
import os
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.benchmarks.dataset_peers import WORKERS, Arrays, LmdbPickle, TorchSave, read, shuffled
from tests.benchmarks.disk_machine import drop_page_cache, files, resident, seconds, touch_memory
from tests.benchmarks.report import at_least, at_most, duration, per_item
from tests.benchmarks.timing import progress
from torchcache2 import CachedDataset

BATCH, COUNT = 256, 4096
SMALL = (8, 32, 32)  # of samples on the disk, 8 kB
READS = 9  # of a cold batch
MEDIUM = (3, 64, 64)  # of samples of which RAM has half
LARGE = (3, 256, 256)  # of samples whose memory is measured, 805 MB
PATHS, CLASSES = 1_281_167, 1000  # of ImageNet
OURS = "torchcache2"
COUNTER = os.memfd_create("")  # its length; a number that counts would be a state of the source
fcntl.fcntl(COUNTER, fcntl.F_SETFL, os.O_APPEND)  # else processes write over what others have written


def cold(report, root):
    """Random batches of a cache that was opened anew, page cache dropped; it keeps what it reads in RAM."""
    source = Arrays(2 * COUNT, SMALL)
    folders = [root / kind for kind in ("ours", "files", "lmdb")]
    for folder in folders:
        folder.mkdir()
    caches = {
        OURS: partial(CachedDataset, source, folders[0], name="cold", memory_size="1GB"),
        TorchSave.name: partial(TorchSave, source, folders[1]),
        LmdbPickle.name: partial(LmdbPickle, source, folders[2], 1 << 30),
    }
    for name, make in caches.items():
        progress(f"datasets: writing, {name}")
        _opened(make, _all)
    os.sync()
    rng, found, left = np.random.default_rng(0), {name: [] for name in caches}, []
    for turn in range(READS):
        for (name, make), folder in zip(caches.items(), folders, strict=True):
            progress(f"datasets: cold, {name}, {turn + 1} of {READS}")
            positions = rng.choice(len(source), BATCH + 1, replace=False)
            touch_memory(3 * BATCH * 8192)
            taken, share = _opened(make, partial(_cold_batch, source, files(folder), positions))
            found[name].append(taken)
            left.append(share)
    if max(left) > 0.01:
        report.text(f"Up to {max(left):.0%} of the bytes stayed in the page cache: use another `--dir`.")
    times = {name: statistics.median(taken) for name, taken in found.items()}
    rows = [
        (name, per_item(taken, BATCH), f"{BATCH / taken:,.0f}", f"{taken / times[OURS]:.2f}×")
        for name, taken in times.items()
    ]
    title = f"A random batch of {BATCH} of {len(source):,} samples of 8 kB, page cache dropped"
    report.table(title, ("", "µs per sample", "samples/s", "over torchcache2"), rows)
    bounds = {TorchSave.name: 3, LmdbPickle.name: 2}
    return [
        at_least(f"cold samples of 8 kB: times as fast as {name}", times[name] / times[OURS], bound)
        for name, bound in bounds.items()
    ]


def _opened(make, act):
    cache = make()
    try:
        return act(cache)
    finally:
        cache.close()


def _all(cache):
    for positions in np.split(np.arange(len(cache)), len(cache) // BATCH):
        _batch(cache, positions)


def _cold_batch(source, paths, positions, cache):
    """Seconds, and the share of the bytes that were in the page cache before."""
    _batch(cache, positions[-1:])  # files are opened when something is looked for
    drop_page_cache(paths)
    share = sum(map(resident, paths[:64])) / sum(path.stat().st_size for path in paths[:64])
    start = time.perf_counter()
    samples = _batch(cache, positions[:-1])
    taken = time.perf_counter() - start
    for index, (image, label) in zip(positions.tolist(), samples, strict=False):
        assert torch.equal(image, source[index][0]) and label == source[index][1]
    return taken, share


def _batch(cache, positions):
    """The samples as a DataLoader would read them."""
    if hasattr(cache, "__getitems__"):
        return cache.__getitems__(positions.tolist())
    return [cache[index] for index in positions.tolist()]


def memory(report):
    """What the main process and its workers have, beyond what they have without a cache."""
    progress("datasets: memory")
    source = Arrays(COUNT, LARGE)
    size = COUNT * (math.prod(LARGE) + 8)
    without = _pss(source)
    cached = CachedDataset(source, memory_size=2 * size)
    with_cache = _pss(cached)
    cached.close()
    report.text(
        f"{COUNT:,} samples of {LARGE}, {size / 1e6:.1f} MB, that the {WORKERS} workers have read: "
        f"{with_cache / 1e6:.1f} MB in all processes (PSS), {without / 1e6:.1f} MB without the cache."
    )
    what = f"PSS of {WORKERS + 1} processes, less that without the cache, over the samples"
    return at_most(what, (with_cache - without) / size, 1.15)


def _pss(data):
    """Bytes of this process and its workers after three epochs, shared ones counted once."""
    loader = shuffled(data, 16)
    for _ in range(3):
        read(loader)
    pids = [os.getpid(), *(worker.pid for worker in loader._iterator._workers)]
    kilobytes = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 1024 * kilobytes


class Counted(Arrays):
    """Counts its reads in all processes."""

    def __getitem__(self, index):
        os.write(COUNTER, b"x")
        return super().__getitem__(index)


def twice(report):
    """RAM for half of the samples, the disk has the others."""
    source, size = Counted(COUNT, MEDIUM), COUNT * (math.prod(MEDIUM) + 8)
    cached = CachedDataset(source, memory_size=size // 2, disk_size=2 * size)
    loader = shuffled(cached, BATCH, stay=False)  # what waits to be written is there when they end
    reads, hits, taken = [], [], []
    for epoch in range(3):
        progress(f"datasets: half in RAM, epoch {epoch + 1} of 3")
        before, found = os.fstat(COUNTER).st_size, cached.stats().memory_hits
        taken.append(seconds(partial(read, loader)))
        reads.append(os.fstat(COUNTER).st_size - before)
        hits.append(100 * (cached.stats().memory_hits - found) / COUNT)
    cached.close()
    report.text(
        f"{COUNT:,} samples of {MEDIUM}, RAM for half of them, the rest on disk, shuffled: {reads} reads of "
        f"the source in three epochs that take {', '.join(map(duration, taken))}."
    )
    return [
        at_least("twice the budget: samples found in RAM", min(hits[1:]), 49, " %"),
        at_most("twice the budget: reads of the source after the first epoch", sum(reads[1:]), 0, ""),
    ]


class Folder(Dataset):
    """Paths and classes, as torchvision's `ImageFolder` has them for ImageNet."""

    def __init__(self, count=PATHS):
        self.root = "/data/imagenet/train"
        self.classes = [f"n{2_000_000 + 7 * c:08}" for c in range(CLASSES)]
        self.class_to_idx = {name: c for c, name in enumerate(self.classes)}
        self.samples = self.imgs = [self._sample(i, CLASSES * i // count) for i in range(count)]
        self.targets = [c for _, c in self.samples]

    def _sample(self, i, c):
        return f"{self.root}/{self.classes[c]}/{self.classes[c]}_{i}.JPEG", c

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def fingerprint(root):
    progress("datasets: fingerprint")
    source, taken = Folder(), []
    for turn in range(3):
        start = time.perf_counter()
        cached = CachedDataset(source, root / f"folder {turn}")
        taken.append(time.perf_counter() - start)
        cached.close()
    what = f"fingerprint of {PATHS:,} paths and classes"
    return at_most(what, statistics.median(taken), 3, " s")
