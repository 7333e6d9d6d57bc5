"""The index of a large folder: what a new process pays before its first batch, look-ups, and merges.

`INDEX_ROWS=100_000_000` measures larger folders, too, up to so many rows: 100 million need 10 GB of disk in
`--dir`, and some minutes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from tests.benchmarks.report import at_most, duration
from tests.benchmarks.timing import progress
from torchcache2.core.keys import int_keys
from torchcache2.core.rows import Rows
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem, ulid
from torchcache2.files.layout import SEGMENT, Layout
from torchcache2.tiers.disk.tier import DiskTier

NAMESPACE = b"benchmark" + bytes(7)
WIDTH = 16  # float32: rows of 64 bytes
PER_SEGMENT = 1 << 19  # as many as segments of 64 MB have with their keys, and some more
BATCH, ROUNDS = 256, 60
SIZES = (1_000_000, 10_000_000, 100_000_000)


class Writes(FileSystem):
    """Counts the bytes that are written."""

    nbytes = 0

    def write(self, file, buffers, offset):
        count = super().write(file, buffers, offset)
        self.nbytes += count
        return count


def run(report, folder=None):
    most = int(os.environ.get("INDEX_ROWS", SIZES[0]))
    targets, table = [], []
    with tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
        heads = measured(Path(root), 4_000_000, runs=False)
        for rows in [size for size in SIZES if size <= most]:
            one = measured(Path(root), rows, runs=True)
            table.append(described(one))
            if rows == most:
                targets = [
                    at_most(f"{rows:,} rows: seconds to the first batch", one["first"], 0.3, " s"),
                    at_most(f"{rows:,} rows: memory at the first batch", one["memory"], 100, " MB"),
                    at_most(
                        f"{rows:,} rows: {BATCH} rows found, over 4 million in memory",
                        one["get"] / heads["get"],
                        2,
                    ),
                    at_most(
                        f"{rows:,} rows: bytes that merges write, over those of the keys", one["written"], 2
                    ),
                ]
    header = ("rows", "index files", "first batch", "memory")
    header += tuple(f"{BATCH} {what}" for what in ("rows found", "looked up", "missed"))
    report.table(
        "The index of a large folder, in a new process, pages warm; all rows in memory for comparison",
        (*header, "written, of the keys' bytes"),
        [described(heads), *table],
    )
    report.targets(targets)


def described(one):
    times = (duration(one[name]) for name in ("first", "get", "has", "missed"))
    first, *others = times
    written = f"{one['written']:.2f}×" if one["runs"] else ""
    return f"{one['rows']:,}", one["runs"] or "none", first, f"{one['memory']:.0f} MB", *others, written


def measured(root, rows, *, runs):
    """Make a folder of so many rows, and look at it from new processes."""
    progress(f"writing the heads of {rows:,} rows")
    directory = CacheDirectory(os.fspath(root / f"{rows}-{runs}"), Writes())
    written = fill(directory, rows, runs=runs)
    progress(f"reading {rows:,} rows")
    child = [sys.executable, "-m", "tests.benchmarks.index", directory.path, str(rows)]
    found = [json.loads(subprocess.run(child, check=True, capture_output=True).stdout) for _ in range(4)][1:]
    median = {name: statistics.median(one[name] for one in found) for name in found[0]}
    count = len(directory.contents(NAMESPACE.hex()).index_files)
    shutil.rmtree(directory.path)
    return {**median, "rows": rows, "runs": count, "written": written / (32 * rows)}


def fill(directory, rows, *, runs):
    """Make segments of zeros, most of whose bytes are holes, and runs as they come; bytes of all runs."""
    directory.create()
    directory.prepare(NAMESPACE, {})
    schema = Rows.from_pytree(torch.zeros(1, WIDTH), 1, device=torch.device("cpu")).schema
    checksum, written, waiting = xxh3_64_intdigest(bytes(4 * WIDTH)), 0, 0
    for first in range(0, rows, PER_SEGMENT):
        count = min(PER_SEGMENT, rows - first)
        keys = int_keys(NAMESPACE, np.arange(first, first + count)).data
        layout = Layout(NAMESPACE, schema, "none", count)
        head = layout.header([keys.tobytes(), np.full(count, checksum, np.uint64).tobytes()])
        path = os.path.join(directory.folder(NAMESPACE), ulid() + SEGMENT)
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(len(head) + layout.row_data_bytes)
        waiting += count
        if runs and merging.is_due(1, waiting):
            before = directory.fs.nbytes
            merging.write_index_files(directory, NAMESPACE, 1 << 30, lambda size: True)
            written, waiting = written + directory.fs.nbytes - before, 0
    return written


def look(path, rows):
    """What a new process pays; printed as JSON."""
    rng = np.random.default_rng(os.getpid())
    keys = [int_keys(NAMESPACE, rng.choice(rows, BATCH, replace=False)) for _ in range(3 * ROUNDS)]
    missed = [int_keys(NAMESPACE, rows + rng.choice(10**15, BATCH)) for _ in range(ROUNDS)]
    before, start = memory(), time.perf_counter()
    tier = DiskTier(path, 1 << 50, codec="none")
    found = tier.get(keys[0]).parts
    first = time.perf_counter() - start
    result = {"first": first, "memory": (memory() - before) / 1e6}
    assert sum(len(positions) for positions, _ in found) == BATCH
    for name, call, some in (
        ("get", tier.get, keys[1:]),
        ("has", tier.has, keys),
        ("missed", tier.has, missed),
    ):
        times = []
        for one in some:
            start = time.perf_counter()
            call(one)
            times.append(time.perf_counter() - start)
        result[name] = statistics.median(times)
    print(json.dumps(result))


def memory():
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    look(sys.argv[1], int(sys.argv[2]))
