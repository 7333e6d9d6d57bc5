"""Writers of one directory that are killed at random points, again and again.

Usage: ``python -m tests.helpers.killer DIRECTORY CYCLES SEED FILES``; ``FILES`` is ``local`` or ``nfs``.
The writers are forked from this process, which has imported torch. What is there after each cycle is checked:
every row of every segment, and that nothing is missing that a flush had returned for.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from tests.helpers.nfs import HERE, Nfs
from tests.helpers.storage import CPU, NEVER, found, key_of, put, segments, strange_files, value_of
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import Descriptors, FileSystem
from torchcache2.files.removal import make_room
from torchcache2.files.segment import Segment, empty_columns, rows_of
from torchcache2.tiers.disk.tier import DiskTier

WRITERS = 4
LIVES = 5  # cycles on one directory
NAMES = 600
WIDTHS = [3, 50, 700]  # rows of several extents share a segment
BATCH = 10
LARGE = merging._LEAST_ROWS, merging._MERGED
MEAN_LIFE = 0.08  # seconds


class Log:
    """What was flushed, one line for each time; whoever reads it leaves a line out that is not whole."""

    def __init__(self, path):
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, names):
        os.write(self._file, (json.dumps(sorted(names)) + "\n").encode())

    def names(self):
        lines = Path(self.path).read_text().split("\n")[:-1]
        return {name for line in lines for name in json.loads(line)}


def width_of(name):
    return WIDTHS[name % len(WIDTHS)]


def batch(rng):
    """Names of one width."""
    kind = rng.randrange(len(WIDTHS))
    return [kind + len(WIDTHS) * i for i in rng.sample(range(NAMES // len(WIDTHS)), BATCH)]


def write(path, log, rng, evicts, fs):
    """What a writer does until it is killed: a segment after 30 kB, or some milliseconds."""
    budget = {"budget": 300_000, "policy": "lru"} if evicts else {}
    codec, delay = rng.choice(["none", "brotli"]), rng.choice([0.0, 0.005, 0.1])
    tier = DiskTier(path, codec=codec, **budget, queue=120_000, delay=delay, fs=fs)
    names = set()
    while True:
        some = batch(rng)
        put(tier, some, width_of(some[0]))
        names |= set(some)
        some = batch(rng)
        found(tier, some, width_of(some[0]))
        if rng.random() < 0.2:
            tier.flush()
            log.add(names)


def check(path, must, fs):
    """What a new handle finds; each segment is read on its own, too."""
    tier = DiskTier(path, delay=NEVER, fs=fs)
    there = set()
    for kind, width in enumerate(WIDTHS):
        there |= set(found(tier, range(kind, NAMES, len(WIDTHS)), width))
    stats = tier.stats()
    tier.close()
    assert (stats.corrupt, stats.faults) == (0, 0), stats
    assert must <= there, sorted(must - there)
    names = {key_of(name): name for name in range(NAMES)}
    for file in segments(path):
        segment = Segment.open(fs, Descriptors(fs), str(file), limit=1 << 20)
        keys = [names[key.tobytes()] for key in segment.keys]
        for schema, which in segment.schemas(np.arange(len(segment))):
            columns = empty_columns(schema, len(which))
            assert segment.read(which, columns, np.arange(len(which))), file
            output = rows_of(schema, columns, len(which)).to_pytree(device=CPU)
            for i, value in zip(which.tolist(), output, strict=True):
                assert torch.equal(value, value_of(keys[i], width_of(keys[i]))), file


def cycle(path, log, rng, evicts, fs):
    """Start writers and kill each at some point; how many temporary files they leave."""
    living, codes = [], []
    for i in range(WRITERS):
        seed = rng.random()
        pid = os.fork()
        if pid == 0:
            try:
                write(path, log, random.Random(seed), evicts and i == 0, fs)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        living.append((time.monotonic() + rng.expovariate(1 / MEAN_LIFE), pid))
    for end, pid in sorted(living):
        time.sleep(max(0.0, end - time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert codes == [-signal.SIGKILL] * WRITERS, f"a writer has ended by itself: {codes}"
    return len(strange_files(path)) if os.path.exists(path) else 0


def main(path, cycles, seed, fs):
    torch.set_num_threads(1)
    for name in range(NAMES):
        value_of(name, width_of(name))  # which the writers then need not make
    rng = random.Random(seed)
    left = flushed = 0
    for i in itertools.count():
        if i >= cycles and i % LIVES == 0 and (left or i >= 10 * cycles):
            break  # on a busy machine, a few cycles may leave nothing
        if i % LIVES == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            log_path = f"{path}.log"
            Path(log_path).unlink(missing_ok=True)
            log = Log(log_path)
            evicts = i // LIVES % 3 == 2
            if i // LIVES % 2 == 0:  # runs of few rows, merged again and again
                merging._LEAST_ROWS, merging._MERGED = 40, 3
            else:
                merging._LEAST_ROWS, merging._MERGED = LARGE
        left += cycle(path, log, rng, evicts, fs)
        HERE.seen.clear()  # on NFS, some seconds later: each process is a machine of its own
        must = set() if evicts else log.names()
        flushed += len(must)
        check(path, must, fs)
        assert strange_files(path) == [], strange_files(path)
        if i % LIVES == LIVES - 1:
            # Nothing that is left of the dead stands in the way of who makes room.
            directory = CacheDirectory(path, fs)
            assert make_room(directory, 1000, 2000, lru=True), path
            assert segments(path) == []
    print(left, flushed)


if __name__ == "__main__":
    systems = {"local": FileSystem, "nfs": Nfs}
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), systems[sys.argv[4]]())
