"""Rows of 1 to 100 MB, such as latents of videos and states of a T5-XXL.

Writing and reading them stands beside one file that is written and read from end to end, and a file for each
item; finding them in memory beside a copy into fresh memory. Processes of their own measure the memory at the
peak, besides the module's weights: rows are computed one by one, and then read by a second cache.
None stay in the memory tier.
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from tests.benchmarks.disk_machine import Machine, drop_page_cache, files, seconds, touch_memory
from tests.benchmarks.disk_peers import Items, Ours, TorchSave, make_module
from tests.benchmarks.report import at_least, at_most, duration
from tests.benchmarks.timing import interleave, progress
from torchcache2 import torchcache

CASES = (  # float32 of a row, rows, rows of a batch
    ("1 MB", 250_000, 128, 8),
    ("10 MB", 2_500_000, 24, 2),
    ("100 MB", 25_000_000, 6, 1),
)
TURNS, PEAK_ROWS = 5, 6
DISK = "written", "read cold"
FOUND, COPY, BY_INDEX = "found in memory", "copied into fresh memory", "dict by index, stacked"


def run(report, folder=None):
    disk, memory, peaks, targets = [], [], [], []
    for name, width, count, batch in CASES:
        with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
            items = Items(count, width, batch)
            speeds = _disk(name, items, Path(root))
            disk += [(name, store, *(f"{speed:,.0f}" for speed in both)) for store, both in speeds.items()]
            for what, *both in zip(DISK, speeds[Ours.name], speeds[Machine.name], strict=True):
                share = 100 * both[0] / both[1]
                targets.append(at_least(f"{name}, {what}: of the machine's speed", share, 70, " %"))
            times = _found(items)
            rate = batch * items.row_bytes / 1e6
            memory += [
                (name, what, duration(t.median), f"{rate / t.median:,.0f}") for what, t in times.items()
            ]
            value, cold = times[FOUND].median / times[COPY].median, times[FOUND].cold / times[COPY].cold
            targets.append(at_most(f"{name}, {FOUND}: time over that of a copy", value, 1.5, cold=cold))
    name, width, *_ = CASES[-1]
    for codec in ("none", "brotli", "blosc2"):
        progress(f"large: {name}, {codec}, memory at the peak")
        with tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
            both = _in_a_process(_peak, width, codec, root)
        peaks.append((name, codec, *(f"{peak:.2f}" for peak in both)))
        targets.append(at_most(f"{name}, {codec}: memory at the peak", max(both), 2.5, " rows"))
    title = f"Large rows of float32, uncompressed, on disk: MB/s, median of {TURNS} turns"
    title += "; the page cache was dropped before reading"
    report.table(title, ("rows", "", *DISK), disk)
    report.table("A batch of them in memory", ("rows", "", "median", "MB/s"), memory)
    title = "Memory at the peak, in rows: the output and what it takes to keep it, or to read it"
    report.table(title, ("rows", "codec", "computed and written", "read"), peaks)
    report.targets(targets)


def _disk(name, items, root):
    """MB/s of writing all rows, and of reading a batch cold, for each store."""
    found = {make.name: ([], []) for make in (Ours, Machine, TorchSave)}
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(0)).numpy()
    for turn in range(-1, TURNS):  # the first is to warm up
        for make in (Ours, Machine, TorchSave)[:: 1 if turn % 2 else -1]:
            progress(f"large: {name}, {make.name}, {turn}")
            folder = root / make.__name__
            folder.mkdir()
            os.sync()
            touch_memory(items.rows.nbytes)
            store = make(folder, items)
            times = [items.rows.nbytes / 1e6 / seconds(store.write)]
            os.sync()
            store.open()
            drop_page_cache(files(folder))
            touch_memory(3 * items.batch * items.row_bytes)
            some = order[: items.batch]
            times.append(len(some) * items.row_bytes / 1e6 / seconds(lambda: store.read(some)))  # noqa: B023
            store.close()
            shutil.rmtree(folder)
            for speeds, speed in zip(found[make.name], times, strict=True):
                speeds += [speed] if turn >= 0 else []
    return {name: tuple(map(statistics.median, speeds)) for name, speeds in found.items()}


def _found(items):
    """The times of a batch of hits in memory, of a copy, and of a dict by index."""
    some = items.rows[: items.batch]
    net = torchcache(make_module())(items.width).eval()
    net(items.inputs[: items.batch])
    rows = dict(enumerate(some.clone()))
    functions = {
        FOUND: lambda: net(items.inputs[: items.batch]),
        COPY: some.clone,
        BY_INDEX: lambda: torch.stack([rows[i] for i in range(items.batch)]),
    }
    found = interleave(functions, rounds=10)
    assert net.cache_instance.stats().misses == items.batch
    return found


def _in_a_process(function, *arguments):
    """What a function returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _peak(width, codec, folder):
    """The most memory, in rows, while some are computed and written; and while they are read."""
    with torch.no_grad():
        return [_peak_of(width, codec, folder) for _ in range(2)]


def _peak_of(width, codec, folder):
    options = {"persistent_cache_dir": folder, "compression": codec, "max_memory_cache_size": 0}
    net = torchcache(**options)(make_module())(width).eval()
    net(torch.full((1, 2), -1.0))  # what the first call imports and makes
    net.cache_instance.flush()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is that from here on
    for number in range(PEAK_ROWS):
        net(torch.full((1, 2), float(number)))
    net.cache_instance.close()
    assert net.cache_instance.stats().faults == 0
    return (_memory("VmHWM") - before) / (4 * width)


def _memory(name):
    """A number of bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
