"""`CachedDataset` under a `DataLoader` of 4 workers: beside no cache, stocaching and caches written by hand.

stocaching is left out if it is not installed; see `slots`.
"""

import logging
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from tests.benchmarks import dataset_costs
from tests.benchmarks.dataset_peers import (
    WORKERS,
    Arrays,
    Joblib,
    Jpegs,
    ManagerDict,
    Plain,
    Stocaching,
    read,
    shuffled,
)
from tests.benchmarks.disk_machine import seconds
from tests.benchmarks.plot import draw_shares
from tests.benchmarks.report import at_least, at_most, duration, per_item
from tests.benchmarks.timing import interleave, progress
from torchcache2 import CachedDataset

BATCH = 256
OURS, UNCACHED = "torchcache2", "uncached"
ROUNDS = 5
DECODE = 0.005  # seconds of a sample
IMAGES, SIDE, FEW = 640, 224, 16  # samples of (3, 224, 224) in batches of 16
SHARES = (0.25, 0.5, 0.75, 1.0)
SLOW = {ManagerDict.name: 2, Joblib.name: 4}  # take part in one turn of so many
HITS = 4096  # samples
SHAPES = [(3, 32, 32), (3, 64, 64)]


def run(report, folder=None, plot=None):
    targets = [*_epochs(report, plot), *_hits(report)]
    with tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
        targets += dataset_costs.cold(report, Path(root))
        targets += [dataset_costs.memory(report), *dataset_costs.twice(report)]
        targets.append(dataset_costs.fingerprint(Path(root)))
    report.targets(targets)


def _epochs(report, plot):
    """Two epochs of each, with new workers, in turns."""
    logging.getLogger("torchcache2").setLevel(logging.ERROR)  # it says what is meant: memory is full
    source, taken = _calibrated()
    room = 1.03 * len(source) * (3 * SIDE * SIDE + 8) + 400_000  # pixels, labels, and what finds them
    caches = {UNCACHED: lambda: source}
    if Stocaching.is_installed():
        caches[Stocaching.name] = partial(Stocaching, source)
    for share in SHARES:
        caches[share] = partial(CachedDataset, source, memory_size=int(share * room))
    found, order, kept = {name: [] for name in caches}, list(caches), {}
    for turn in range(ROUNDS):
        for name in order:
            progress(f"datasets: epochs, {name}, {turn + 1} of {ROUNDS}")
            data = caches[name]()
            loader = shuffled(data, FEW)
            found[name].append([seconds(partial(read, loader)) for _ in range(2)])
            if name in SHARES:
                kept[name] = data.stats().memory_rows / IMAGES
                data.close()
        order.reverse()
    logging.getLogger("torchcache2").setLevel(logging.NOTSET)
    first, second = ({name: [run[e] for run in runs] for name, runs in found.items()} for e in (0, 1))
    times = {name: [statistics.median(epoch[name]) for epoch in (first, second)] for name in caches}
    title = (
        f"Two epochs of {IMAGES} JPEG files, {1e3 * taken:.1f} ms to decode one, {WORKERS} workers, "
        f"medians of {ROUNDS}"
    )
    names = {name: f"torchcache2, RAM for {name:.0%}" if name in SHARES else name for name in caches}
    rows = [(names[name], *map(duration, times[name])) for name in caches]
    report.table(title, ("", "first epoch", "second epoch"), rows)
    over = [ours / plain for ours, plain in zip(first[1.0], first[UNCACHED], strict=True)]
    targets = [at_most("first epoch, all kept: time over uncached", statistics.median(over), 1.05)]
    if Stocaching.name not in times:
        return targets
    for share in SHARES:
        runs = zip(second[share], second[Stocaching.name], second[UNCACHED], strict=True)
        over = [ours / (kept[share] * full + (1 - kept[share]) * plain) for ours, full, plain in runs]
        what = f"second epoch, {kept[share]:.0%} kept: time over stocaching's share and the rest uncached"
        targets.append(at_most(what, statistics.median(over), 1.1))
    if plot is not None:
        ends = times[UNCACHED][1], times[Stocaching.name][1]
        draw_shares(plot, title, {share: times[share] for share in SHARES}, *ends)
    return targets


def _calibrated():
    """A source of samples that take 5 ms at best, and what one takes."""
    pixels = 512
    for _ in range(3):
        source = Jpegs(IMAGES, SIDE, pixels)
        taken = min(seconds(partial(source.__getitem__, index)) for index in range(48))
        if abs(taken / DECODE - 1) < 0.05:
            break
        pixels = round(pixels * (DECODE / taken) ** 0.5 / 8) * 8
    return source, taken


def _hits(report):
    rows, direct, targets = [], [], []
    for shape in SHAPES:
        source = Arrays(HITS, shape)
        with tempfile.TemporaryDirectory(prefix="torchcache2-") as folder:
            ours = CachedDataset(source, memory_size="1GB")
            peers = [ManagerDict(source), Joblib(source, folder)]
            peers += [Stocaching(source)] if Stocaching.is_installed() else []
            caches = {OURS: ours, Plain.name: Plain(source)} | {peer.name: peer for peer in peers}
            times = _hit_epochs(shape, caches)
            for name, taken in times.items():
                over = f"{taken / times[OURS]:.2f}×"
                rows.append((f"{shape}", name, per_item(taken, HITS), f"{HITS / taken:,.0f}", over))
            for peer, bound in zip(peers, (10, 5, 0.8), strict=False):
                what = f"RAM hits of {shape}: times as fast as {peer.name}"
                targets.append(at_least(what, times[peer.name] / times[OURS], bound))
            direct += _in_one_process(shape, caches)
            ours.close()
    title = f"Epochs in which all {HITS:,} samples are hits, {WORKERS} workers, batches of {BATCH}"
    report.table(title, ("sample", "", "µs per sample", "samples/s", "over torchcache2"), rows)
    report.table(
        "64 hits in this process, without a DataLoader", ("sample", "", "µs per sample", "P90"), direct
    )
    return targets


def _hit_epochs(shape, caches):
    """Medians of the seconds of an epoch, in turns, after one that fills the cache and one that finds all."""
    loaders = {name: shuffled(cache, BATCH) for name, cache in caches.items()}
    found, order = {name: [] for name in caches}, list(caches)
    for name in 2 * order:
        progress(f"datasets: filling with {shape}, {name}")
        read(loaders[name])
    for turn in range(2 * ROUNDS):
        progress(f"datasets: hits of {shape}, {turn + 1} of {2 * ROUNDS}")
        for name in order:
            if turn % SLOW.get(name, 1) == 0:
                found[name].append(seconds(partial(read, loaders[name])))
        order.reverse()
    return {name: statistics.median(taken) for name, taken in found.items()}


def _in_one_process(shape, caches):
    order = np.random.default_rng(0).choice(HITS, 64, replace=False).tolist()
    calls = {f"{OURS}, `__getitems__`": partial(caches[OURS].__getitems__, order)}
    calls |= {f"{name}, `__getitem__`": partial(_each, cache, order) for name, cache in caches.items()}
    times = interleave(calls, rounds=10)
    return [(f"{shape}", name, per_item(t.median, 64), per_item(t.p90, 64)) for name, t in times.items()]


def _each(cache, order):
    return [cache[index] for index in order]
