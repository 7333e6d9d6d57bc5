"""What rows on a disk cost besides: opening a large directory, and writing behind an epoch."""

import statistics
import time

import torch
from torch import nn

from tests.benchmarks.disk_machine import drop_page_cache, files, seconds
from tests.benchmarks.disk_peers import Items, Ours
from tests.benchmarks.report import at_most, duration
from tests.benchmarks.timing import progress
from torchcache2 import torchcache

WIDTH = 2048  # float32: rows of 8 KB
PER_ITEM = 0.010  # seconds of the backbone
ITEMS, BATCH_SIZE, PAIRS = 256, 32, 5


class Backbone(nn.Module):
    """`depth` products of matrices, each followed by a LayerNorm: dense float32 rows of 8 KB."""

    def __init__(self, depth):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.depth = depth

    def forward(self, x):
        for _ in range(self.depth):
            x = nn.functional.layer_norm(x @ self.weight, (WIDTH,))
        return x


def open_million(report, targets, root):
    """Open directories with a million rows, in as many segments as rows of 256 bytes and of 8 KB take."""
    items = Items(1_000_000, 64)
    table, opened, index = [], [], 0
    for name, target in ("256 B", 64 << 20), ("8 KB", 2 << 20):
        progress(f"writing a million rows, segments as of {name}")
        store = Ours(root / name, items)
        store.write(queue=4 * target)
        paths = files(store.folder)
        segments = sum(path.suffix == ".safetensors" for path in paths)
        times = {"page cache warm": [], "page cache dropped": []}
        for turn in range(8):
            cache = list(times)[turn % 2]
            if turn % 2:
                drop_page_cache(paths)
            times[cache].append(seconds(store.open))
            assert store.tier.stats().rows == len(items)
            index = max(index, store.tier.index_bytes / len(items))
            store.close()
        for cache, elapsed in times.items():
            opened.append(statistics.median(elapsed))
            table.append((name, segments, cache, f"{opened[-1]:.2f} s", f"{max(elapsed):.2f} s"))
    header = ("segments as of rows of", "segments", "", "median", "slowest")
    report.table(f"Opening a directory of {len(items):,} rows", header, table)
    targets.append(at_most("opening a million rows, slowest median", max(opened), 1.5, " s"))
    targets.append(at_most("index in memory per row, of a million", index, 64, " B"))


def epochs(report, targets, root):
    """A cold epoch that writes behind, and one in memory only, in turn."""
    depth, per_item = calibrated()
    x = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(1))
    kinds = {"in memory": {}, "in memory and written behind": {"persistent": True}}
    seconds = {name: ([], []) for name in kinds}
    for turn in range(-1, PAIRS):
        for name in reversed(kinds) if turn % 2 else kinds:
            progress(f"a cold epoch {name}, turn {turn}")
            options = dict(kinds[name])
            if options:
                options["persistent_cache_dir"] = root / f"epoch-{turn}"
            times = epoch(Backbone(depth), x, options)
            if turn >= 0:
                for some, elapsed in zip(seconds[name], times, strict=True):
                    some.append(elapsed)
    report.table(
        f"A cold epoch of {ITEMS} items in batches of {BATCH_SIZE}, {per_item * 1e3:.1f} ms an item, "
        "rows of 8 KB, default codec",
        ("", "the epoch, median", "and flushed, median", "slowest"),
        [
            (name, *(duration(statistics.median(some)) for some in times), duration(max(times[1])))
            for name, times in seconds.items()
        ],
    )
    plain, behind = seconds.values()
    for what, before, after in zip(("the epoch", "epoch and flush"), plain, behind, strict=True):
        shares = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
        what = f"{what}, written behind: more time than in memory, median of {PAIRS} pairs"
        targets.append(at_most(what, statistics.median(shares), 5, " %"))


def calibrated():
    """How deep a backbone takes 10 ms an item at best, and what it takes."""
    x = torch.randn(BATCH_SIZE, WIDTH)
    depth = 16
    for _ in range(3):
        backbone, times = Backbone(depth), []
        for _ in range(5):
            start = time.perf_counter()
            backbone(x)
            times.append(time.perf_counter() - start)
        per_item = min(times) / BATCH_SIZE
        if abs(per_item / PER_ITEM - 1) < 0.1:
            break
        depth = max(1, round(depth * PER_ITEM / per_item))
    return depth, per_item


def epoch(backbone, x, options):
    """Seconds until the last batch is there, and until everything is on the disk."""
    net = torchcache(**options)(backbone.eval())
    start = time.perf_counter()
    for batch in x.split(BATCH_SIZE):
        net(batch)
    done = time.perf_counter() - start
    net.cache_instance.flush()
    flushed = time.perf_counter() - start
    stats = net.cache_instance.stats()
    assert (stats.hits, stats.misses) == (0, len(x))
    if options:
        assert (stats.disk_rows, stats.faults) == (len(x), 0)
    net.cache_instance.close()
    return done, flushed
