"""Epochs over rows that memory does not hold: with `ahead`, and without.

A step takes as long as reading its batch does. One kind waits, as the host does for a GPU: it computes
nothing, and lets other threads run. The other kinds multiply matrices, on one of torch's threads or on all,
and share the machine's cores with the thread that reads.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from tests.benchmarks.disk_machine import drop_page_cache, files, touch_memory
from tests.benchmarks.report import at_most
from tests.benchmarks.timing import progress
from torchcache2 import torchcache

SHAPE = 197, 768  # float32: 605 kB
COUNT, BATCH, ROUNDS = 1024, 16, 5
HEADER = ("rows", "step", "reading", "steps", "both, before", "with `ahead`", "of the larger one", "of both")
WAIT, ONE, ALL = "waits, as for a GPU", "matmul, one thread", "matmul, all threads"


class Patches(nn.Module):
    """Makes of a number a row as large as that of a ViT-B/16."""

    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(SHAPE, generator=generator) + x.view(-1, 1, 1)


def run(report, folder=None):
    rows, targets, threads = [], [], torch.get_num_threads()
    items = torch.arange(float(COUNT))
    for codec in ("none", "brotli"):
        with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
            options = {"max_memory_cache_size": 0, "compression": codec}
            net = torchcache(Patches(), persistent_cache_dir=root, probe=False, **options)
            for some in items.split(BATCH):
                net(some)
            net.cache_instance.flush()
            for step in (WAIT, ONE, ALL):
                torch.set_num_threads(1 if step is ONE else threads)
                times = measure(net, items, step, Path(root))
                larger = max(times["reading"], times["steps"])
                share = times["ahead"] / larger
                shown = [f"{times[name]:.2f} s" for name in ("reading", "steps", "both", "ahead")]
                rows.append((codec, step, *shown, f"{share:.2f}", f"{times['ahead'] / times['both']:.2f}"))
                if step is WAIT:
                    targets.append(at_most(f"`ahead`, {codec}: of the larger one", share, 1.15))
            torch.set_num_threads(threads)
            net.cache_instance.close()
    title = f"Epochs of {COUNT:,} rows of {SHAPE} float32 on disk, none in memory, batches of {BATCH}"
    report.table(f"{title}; the page cache was dropped before each", HEADER, rows)
    report.targets(targets)


def measure(net, items, step, folder):
    """Medians of the seconds that an epoch takes, by what it does."""
    batches, size = COUNT // BATCH, COUNT * SHAPE[0] * SHAPE[1] * 4
    paths, square = files(folder), torch.randn(384, 384)
    each = work = 0

    def compute():
        if step is WAIT:
            time.sleep(each)
        for _ in range(work):
            square @ square

    def epoch(batches, reads, computes):
        drop_page_cache(paths)
        touch_memory(size // 4)
        start = time.perf_counter()
        for some in batches:
            if reads:
                net(some)
            if computes:
                compute()
        return time.perf_counter() - start

    def shuffled():
        return items[torch.randperm(COUNT)].split(BATCH)

    each = statistics.median(epoch(shuffled(), True, False) for _ in range(3)) / batches
    if step is not WAIT:
        work = 20
        took = [epoch(shuffled(), False, True) for _ in range(3)]
        work = max(1, round(20 * each * batches / statistics.median(took)))
    runs = {
        "reading": lambda: epoch(shuffled(), True, False),
        "steps": lambda: epoch(shuffled(), False, True),
        "both": lambda: epoch(shuffled(), True, True),
        "ahead": lambda: epoch(net.cache_instance.ahead(shuffled()), True, True),
    }
    found = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name, run in runs.items():
            progress(f"ahead: {step}, {name}, {turn}")
            found[name].append(run())
    return {name: statistics.median(times) for name, times in found.items()}
