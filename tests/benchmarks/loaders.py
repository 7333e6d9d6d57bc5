"""Loaders of training data, side by side: `CachedDataset`, and the libraries that a user may take instead.

All use 2 workers that stay, batches of 256 and their own shuffle. `CachedDataset`, stocaching and the list
keep decoded samples; the libraries with files of their own keep a JPEG as it is. One that cannot be imported
is named in the table.
"""

import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks.dataset_peers import Arrays, Jpegs, Plain, Stocaching, shuffled
from tests.benchmarks.disk_machine import seconds
from tests.benchmarks.loader_peers import LIBRARIES
from tests.benchmarks.report import at_least, duration
from tests.benchmarks.timing import progress
from torchcache2 import CachedDataset

BATCH, WORKERS, EPOCHS = 256, 2, 5
MEMORY, DISK = "torchcache2, in memory", "torchcache2, on disk"
QUICK = MEMORY, DISK, Stocaching.name, Plain.name  # others take part in every other turn


def run(report, folder=None):
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # which a batch copies
    targets = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
        source = Arrays(12_000, (3, 64, 64))
        epochs = _measured(source, Path(root, "arrays"))
        targets += _arrays(report, len(source), epochs)
        source = Jpegs(1024, 224, 224)
        _jpegs(report, len(source), _measured(source, Path(root, "jpegs")))
    report.targets(targets)


def _arrays(report, count, epochs):
    rates = {name: count / statistics.median(later) for name, (_, _, *later) in epochs.items() if later}
    header = ("", "samples/s", "torchcache2 in memory", "on disk")
    rows = []
    for name in epochs:
        over = (f"{rates[ours] / rates[name]:.2f}×" if name in rates else "" for ours in (MEMORY, DISK))
        rows.append((name, f"{rates[name]:,.0f}" if name in rates else "not installed", *over))
    title = (
        f"{count:,} samples of (3, 64, 64) uint8 and a label, {WORKERS} workers, batches of {BATCH}, "
        f"shuffled: median of {EPOCHS} epochs after the second, and how many times as fast torchcache2 is"
    )
    report.table(title, header, rows)
    targets, others = [], [rates[library.name] for library in LIBRARIES if library.name in rates]
    if Stocaching.name in rates:
        what = f"in memory: samples/s over {Stocaching.name}"
        targets.append(at_least(what, rates[MEMORY] / rates[Stocaching.name], 1.1))
    if others:
        what = "on disk: samples/s over the best of the libraries with files"
        targets.append(at_least(what, rates[DISK] / max(others), 2.5))
    return targets


def _jpegs(report, count, epochs):
    rows = []
    for name, (written, first, *later) in epochs.items():
        times = (written, first, statistics.median(later)) if later else ()
        rows.append((name, *(map(duration, times) if times else ("not installed", "", ""))))
    title = (
        f"{count:,} JPEGs of 224 px, {WORKERS} workers, batches of {BATCH}, shuffled: what it takes to write "
        f"its files, or to open the cache, then the first epoch, and later ones (median of {EPOCHS})"
    )
    report.table(title, ("", "before", "first epoch", "later epochs"), rows)


def _measured(source, root):
    """Seconds of each: to write, of the first epoch, and of later ones, in turns after one to warm up."""
    loaders, found, caches = {}, {}, []
    for name, make in _makers(source, root).items():
        progress(f"loaders: {name}, writing and filling")
        (root / name).mkdir(parents=True)
        start = time.perf_counter()
        made = None if make is None else make(root / name)
        if made is not None and not isinstance(made, torch.utils.data.Dataset):
            made.write()
        found[name] = [time.perf_counter() - start, 0.0]
        if made is None:
            continue
        caches.append(made)
        loaders[name] = made.loader() if hasattr(made, "loader") else shuffled(made, BATCH, WORKERS)
        found[name][1] = seconds(partial(_epoch, loaders[name], len(source)))
        _epoch(loaders[name], len(source))
    order = list(loaders)
    for turn in range(EPOCHS):
        for name in order:
            if turn % 2 == 0 or name in QUICK:
                progress(f"loaders: {name}, epoch {turn + 1} of {EPOCHS}")
                found[name].append(seconds(partial(_epoch, loaders[name], len(source))))
        order.reverse()
    loaders.clear()
    for cache in caches:
        if isinstance(cache, CachedDataset):
            cache.close()
    return found


def _epoch(loader, count):
    """Have each sample once."""
    assert sum(len(next(iter(b.values() if isinstance(b, dict) else b))) for b in loader) == count


def _makers(source, root):
    """What makes each cache or library in a folder; None for one that is not installed."""
    makers = {
        MEMORY: lambda _: CachedDataset(source, memory_size="2GB"),
        DISK: lambda folder: CachedDataset(source, folder, memory_size=0, disk_size="2GB"),
        Stocaching.name: (lambda _: Stocaching(source)) if Stocaching.is_installed() else None,
        Plain.name: lambda _: Plain(source),
    }
    for library in LIBRARIES:
        make = partial(library, source, batch=BATCH, workers=WORKERS)
        makers[library.name] = (lambda folder, make=make: make(folder=folder)) if library.imported() else None
    return makers
