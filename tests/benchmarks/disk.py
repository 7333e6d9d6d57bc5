"""Rows on a disk: ours beside other stores, one file per item, and the disk itself.

Stores take turns, in another order each time, and each turn gets memory that the machine has just used:
see `touch_memory`.
"""

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.benchmarks import disk_costs
from tests.benchmarks.disk_machine import (
    BATCH,
    WAYS,
    Machine,
    drop_page_cache,
    files,
    resident,
    seconds,
    touch_memory,
)
from tests.benchmarks.disk_peers import Decorated, Items, Lmdb, Ours, Torchcache, TorchSave
from tests.benchmarks.report import at_least
from tests.benchmarks.timing import progress

HEADER = ("rows", "", "rows there", "rows/s, median", "P90", "MB/s", "turns")


@dataclass(frozen=True)
class Case:
    """How many rows of how many float32, and how often they are written and read."""

    name: str
    count: int
    width: int
    writes: int
    reads: int
    few: int  # rows of a store with a file per item
    slow_writes: int
    slow_reads: int


SMALL = Case("8 KB", 20_000, 2048, writes=7, reads=15, few=5000, slow_writes=2, slow_reads=5)
LARGE = Case("600 KB", 512, 153_600, writes=5, reads=7, few=256, slow_writes=2, slow_reads=2)


def run(report, folder=None):
    targets = []
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
        root = Path(root)
        for case in (SMALL, LARGE):
            items = Items(case.count, case.width)
            stores = write_all(report, targets, case, items, root)
            read_cold(report, targets, case, items, stores)
            if case is SMALL:
                read_warm(report, targets, case, stores)
            clear(root)
        read_compressed(report, targets, root)
        clear(root)
        disk_costs.open_million(report, targets, root)
        disk_costs.epochs(report, targets, root)
    report.targets(targets)


def write_all(report, targets, case, items, root):
    """Write all rows into empty folders; the stores of the last turns, by class."""
    stores = {}

    def write(make, turn):
        progress(f"writing rows of {case.name}, {make.__name__}")
        if make in stores:
            shutil.rmtree(stores[make].folder)
        folder = root / f"{make.__name__}-{turn}"
        folder.mkdir()
        some = items.first(case.few) if make.is_slow else items
        os.sync()
        touch_memory(4 * some.rows.nbytes)
        store = stores[make] = make(folder, some)
        return store, seconds(store.write) / len(some)

    turns = dict.fromkeys((Ours, Decorated, Machine, Lmdb), case.writes)
    measured = take_turns(write, turns | dict.fromkeys((TorchSave, Torchcache), case.slow_writes))
    os.sync()
    report.table(
        "Writing rows. The time includes closing the store and syncing its files, "
        "except for stores that write a file for each item: these do not sync",
        HEADER,
        speeds(case, measured),
    )
    median = medians(measured)
    if case is SMALL:
        for make, bound in (TorchSave, 10), (Torchcache, 20):
            what = f"writing {case.name}: times as fast as {make.name}"
            targets.append(at_least(what, median[make.name] / median[Ours.name], bound))
    else:
        share = 100 * median[Machine.name] / median[Ours.name]
        targets.append(at_least(f"writing {case.name}: of the machine's speed", share, 60, " %"))
    return stores


def read_cold(report, targets, case, items, stores):
    """A random batch after the page cache was dropped."""
    machines = [Machine(stores[Machine].folder, items, way) for way in WAYS]
    turns = dict.fromkeys((stores[Ours], stores[Decorated], *machines), case.reads)
    peers = [stores[make] for make in (TorchSave, Torchcache, Lmdb)]
    turns |= dict.fromkeys(peers, case.slow_reads)
    paths = {store.folder: files(store.folder) for store in turns}
    left = []
    rng = np.random.default_rng(0)

    def read(store, turn):
        progress(f"cold rows of {case.name}, {store.name}")
        touch_memory(3 * BATCH * items.row_bytes)
        store.open()
        drop_page_cache(paths[store.folder])
        if turn == 0:
            sizes = sum(path.stat().st_size for path in paths[store.folder])
            left.append(sum(map(resident, paths[store.folder])) / sizes)
        elapsed = read_batch(store, rng)
        store.close()
        return store, elapsed

    measured = take_turns(read, turns)
    title = f"Reading a random batch of {BATCH}, page cache dropped"
    report.table(title, HEADER, speeds(case, measured))
    if max(left) > 0.01:
        report.text(f"Up to {max(left):.0%} of the bytes stayed in the page cache: use another `--dir`.")
    median = medians(measured)
    ours = median[Ours.name]
    if case is SMALL:
        for make, bound in (Torchcache, 8), (Lmdb, 4):
            what = f"cold batches of {case.name}: times as fast as {make.name}"
            targets.append(at_least(what, median[make.name] / ours, bound))
    else:
        share = 100 * min(median[machine.name] for machine in machines) / ours
        targets.append(at_least(f"cold batches of {case.name}: of the machine's best", share, 70, " %"))


def read_warm(report, targets, case, stores):
    """A random batch that is in the page cache."""
    machine = stores[Machine]
    machines = [Machine(machine.folder, machine.items, way) for way in ("preadv", "4 threads")]
    fast = (stores[Ours], stores[Decorated], stores[Lmdb], *machines)
    slow = [stores[make] for make in (TorchSave, Torchcache)]
    measured = time_warm(case, {**dict.fromkeys(fast, 40), **dict.fromkeys(slow, 5)})
    title = f"Reading a random batch of {BATCH}, all in the page cache"
    report.table(title, HEADER, speeds(case, measured))
    median = medians(measured)
    what = f"warm batches of {case.name}"
    targets.append(at_least(f"{what}: rows/s", round(1 / median[Ours.name]), 60_000, ""))
    value = median[Torchcache.name] / median[Ours.name]
    targets.append(at_least(f"{what}: times as fast as {Torchcache.name}", value, 10))


def read_compressed(report, targets, root):
    """The same with brotli, of features that leave a LayerNorm."""
    items = Items(4000, SMALL.width)
    generator = torch.Generator().manual_seed(0)
    items.rows = torch.nn.functional.layer_norm(
        torch.randn(items.rows.shape, generator=generator), (items.width,)
    )
    stores = [Ours(root / codec, items, codec) for codec in ("brotli", "blosc2")]
    for store in stores:
        store.write()
        size = sum(path.stat().st_size for path in files(store.folder))
        assert size < 0.9 * items.rows.nbytes, f"{store.codec} was not used"
    measured = time_warm(SMALL, dict.fromkeys(stores, 20))
    title = f"Reading a random batch of {BATCH}, all in the page cache, dense float32"
    report.table(title, HEADER, speeds(SMALL, measured))
    value = round(1 / medians(measured)[stores[0].name])
    targets.append(at_least(f"warm batches of {SMALL.name}, brotli: rows/s", value, 12_000, ""))


def time_warm(case, turns):
    rng = np.random.default_rng(0)
    for store in turns:
        store.open()
        for path in files(store.folder):
            path.read_bytes()

    def read(store, turn):
        progress(f"warm rows of {case.name}, {store.name}")
        read_batch(store, rng)  # what another store has left in the processor's caches
        return store, read_batch(store, rng)

    measured = take_turns(read, turns)
    for store in turns:
        store.close()
    return measured


def take_turns(act, turns):
    """By name, a store and the seconds of each `act(contender, turn)`, which returns both.

    `turns` are by contender. They alternate; the turns of those with fewer are spread over all.
    """
    measured = {}
    order = list(turns)
    most = max(turns.values())
    for turn in range(most):
        for contender in order:
            if turn * turns[contender] % most < turns[contender]:
                store, elapsed = act(contender, turn)
                measured.setdefault(store.name, (store, []))[1].append(elapsed)
        order.reverse()
    return measured


def read_batch(store, rng):
    """Seconds per row that a store takes to read a random batch, which has to be right."""
    positions = rng.choice(len(store.items), BATCH, replace=False)
    start = time.perf_counter()
    rows = store.read(positions)
    elapsed = time.perf_counter() - start
    assert torch.equal(rows, store.items.rows[torch.from_numpy(positions)]), store.name
    return elapsed / BATCH


def medians(measured):
    return {name: statistics.median(times) for name, (_, times) in measured.items()}


def speeds(case, measured):
    """A table's rows of what took so many seconds per row."""
    table = []
    for name, (store, times) in measured.items():
        median = statistics.median(times)
        p90 = statistics.quantiles(times, n=10, method="inclusive")[-1]
        numbers = len(store.items), 1 / median, 1 / p90, store.items.row_bytes / median / 1e6
        table.append((case.name, name, *(f"{number:,.0f}" for number in numbers), len(times)))
    return table


def clear(root):
    """Delete what is in a folder."""
    for path in root.iterdir():
        shutil.rmtree(path)
