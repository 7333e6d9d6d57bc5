"""Ranks of a machine that share memory: forwards, time and memory, beside ranks that do not."""

import os
import signal
import statistics
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from tests.benchmarks.jobs import Backbone, computed, run_job
from tests.benchmarks.report import at_least, at_most, duration
from tests.benchmarks.timing import interleave, progress, ratio
from torchcache2 import Cache, CacheSettings, Keys, torchcache

ITEMS, BATCH, EPOCHS = 384, 16, 3
ROUNDS = 3
LARGE = 65_536  # rows of (768,) whose memory is measured, 201 MB
SHAPES = {(768,): 256, (197, 768): 64}  # of rows, and how many a step has


def run(report):
    targets = [*_epochs(report), *_steps(report), *_memory(report), _killed(report)]
    report.targets(targets)


def _epochs(report):
    rows, targets, seconds = [], [], {}
    for turn in range(ROUNDS):  # interleaved, as the machine has slow moments
        for ranks, distributed in [(1, "off"), (2, "auto"), (2, "off"), (4, "auto"), (4, "off")]:
            progress(f"ranks: {ranks}, distributed={distributed!r}, {turn + 1} of {ROUNDS}")
            found = run_job(__name__, "epochs", ranks, distributed)
            seconds.setdefault((ranks, distributed), []).append(
                ([max(one["seconds"][e] for one in found) for e in range(EPOCHS)], found)
            )
    for (ranks, distributed), runs in seconds.items():
        first, last = (statistics.median([taken[e] for taken, _ in runs]) for e in (0, -1))
        forwards = statistics.median([sum(one["computed"] for one in found) / ITEMS for _, found in runs])
        waited = statistics.median([sum(one["waited"] for one in found) for _, found in runs])
        rows.append((ranks, distributed, f"{forwards:.3f}", duration(first), duration(last), int(waited)))
        if distributed == "auto":
            targets.append(at_most(f"{ranks} ranks: forwards per item, {EPOCHS} epochs", forwards, 1.0, ""))
        seconds[ranks, distributed] = first
    shared, alone, off = (seconds[key] for key in [(4, "auto"), (1, "off"), (4, "off")])
    targets.append(at_least("first epoch on 4 ranks: times as fast as on one", alone / shared, 3.5))
    targets.append(at_most("first epoch on 4 ranks: time over that with 'off'", shared / off, 1.05))
    report.table(
        f"{EPOCHS} epochs of {ITEMS} items under a `DistributedSampler`, batches of {BATCH}, 10 ms an item",
        ("ranks", "distributed", "forwards per item", "first epoch", "last epoch", "waited"),
        rows,
    )
    return targets


def _steps(report):
    progress("ranks: all-hit steps")
    (found,) = run_job(__name__, "steps", 1, "node")
    rows, targets = [], []
    for (shape, batch), times in zip(SHAPES.items(), found["steps"], strict=True):
        what = f"{batch} × {shape}"
        rows.append((what, *map(duration, (times["private"], times["shared"], times["first"]))))
        targets.append(
            at_most(f"all-hit step of {what}: time over private", times["over"], 1.3, cold=times["cold"])
        )
    report.table(
        "All-hit steps, float32", ("", "private", "shared", "shared, first read of others' rows"), rows
    )
    return targets


def _memory(report):
    progress("ranks: memory")
    found = run_job(__name__, "memory", 4, "auto")
    pss = sum(one["pss"] for one in found)
    size, index = found[0]["memory_bytes"], found[0]["index"] / LARGE
    report.text(
        f"{LARGE:,} rows of (768,) float32 on 4 ranks: {LARGE * 3072 / 1e6:.1f} MB of rows, "
        f"{size / 1e6:.1f} MB counted, with room for rows to come; "
        f"{pss / 1e6:.1f} MB of shared memory in all ranks (PSS)."
    )
    return [
        at_most("4 ranks: PSS over one copy of rows and index", pss / LARGE / (3072 + index), 1.1),
        at_most("index, of a row", index, 64, " B"),
    ]


def _killed(report):
    taken = []
    for turn in range(ROUNDS):
        progress(f"ranks: a claimant is killed, {turn + 1} of {ROUNDS}")
        found = run_job(__name__, "killed", 4, "auto", killed=0)
        assert sum(one["taken_over"] for one in found) >= 1
        taken.append(max(one["seconds"] for one in found))
    return at_most("SIGKILL of a claimant: the others have its item after", max(taken), 1.0, " s")


# What the ranks do


def epochs_of(rank, ranks, distributed, meet, _):
    data = TensorDataset(torch.arange(float(ITEMS))[:, None].expand(-1, 768).contiguous())
    net = torchcache(probe=False, distributed=distributed)(Backbone())
    net(-torch.ones(2 + rank, 768))  # what a first call costs, and may compute
    before = computed()
    sampler = DistributedSampler(data, ranks, rank, shuffle=True)
    seconds = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        meet()
        start = time.perf_counter()
        for indices in torch.tensor([*sampler]).split(BATCH):
            x = data.tensors[0][indices]
            assert torch.equal(net(x), x * 2)
        seconds.append(time.perf_counter() - start)
    meet()
    stats = net.cache_instance.stats()
    counts = {"computed": computed() - before, "waited": stats.waited, "received": stats.received}
    return {"seconds": seconds, **counts}


def _steps_of(rank, ranks, distributed, meet, folder):
    """Another process, which is forked, puts the rows: what is read first was never mapped here."""
    steps = []
    for shape, batch in SHAPES.items():
        count = batch * 9
        rows = torch.arange(float(count)).view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()
        words = torch.arange(2 * count).view(count, 2).numpy().view("uint8")
        namespace = b"%-16d" % batch
        private, shared = (Cache(namespace, CacheSettings(distributed=kind)) for kind in ("off", "node"))
        ready, done = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            other = Cache(namespace, CacheSettings(distributed="node"))  # its rows go with it
            other.fetch(Keys(namespace, words), rows.__getitem__)
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        pieces = [Keys(namespace, words[i : i + batch]) for i in range(0, count, batch)]
        private.fetch(Keys(namespace, words), rows.__getitem__)
        first = []
        for piece in pieces[1:]:
            start = time.perf_counter()
            shared.fetch(piece, _not_here)
            first.append(time.perf_counter() - start)
        assert torch.equal(shared.fetch(pieces[0], _not_here), rows[:batch])
        caches = {"private": private, "shared": shared}
        step = {name: partial(cache.fetch, pieces[0], _not_here) for name, cache in caches.items()}
        times = interleave(step, rounds=60)
        over, cold = ratio(times["shared"], times["private"])
        medians = {name: times[name].median for name in caches}
        steps.append({**medians, "first": statistics.median(first), "over": over, "cold": cold})
        os.write(done[1], b"x")
        os.waitpid(child, 0)
    return {"steps": steps}


def _not_here(positions):
    raise AssertionError(f"{len(positions)} rows are not here")


def _memory_of(rank, ranks, distributed, meet, _):
    cache = Cache(bytes(16), CacheSettings(distributed=distributed, max_memory_cache_size="1GB"))
    words = torch.arange(2 * LARGE).view(LARGE, 2).numpy().view("uint8")
    rows = torch.ones(4096, 768)
    parts = [Keys(cache.namespace, words[i : i + 4096]) for i in range(0, LARGE, 4096)]
    for part in parts[rank::ranks]:
        cache.fetch(part, rows.__getitem__)
    meet()
    for part in parts:
        cache.fetch(part, _not_here)
    size, index = cache.stats().memory_bytes, cache.tiers.tiers[0]._tables.open[cache.namespace]._index
    meet()
    pss, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():
            is_shared = "memfd:" in line
        elif is_shared and line.startswith("Pss:"):
            pss += 1024 * int(line.split()[1])
    meet()
    return {"pss": pss, "memory_bytes": size, "index": index._table.slots.nbytes + 32 * len(index.sums)}


class Stuck(nn.Module):
    """Rank 0 never computes a batch of one."""

    def forward(self, x):
        stay(len(x))
        return x * 2


def stay(count):
    if os.environ["RANK"] == "0" and count == 1:
        Path(os.environ["TORCHCACHE_JOB"], "claims").touch()
        time.sleep(600)


def _killed_of(rank, ranks, distributed, meet, folder):
    net = torchcache(probe=False, distributed=distributed)(Stuck())
    net(-torch.ones(2 + rank, 8))
    meet()
    if rank == 0:
        net(torch.ones(1, 8))
    while not Path(folder, "claims").exists():
        time.sleep(0.001)
    killed = time.monotonic() + 0.5
    if rank == 1:
        pid = int(Path(folder, "pid 0").read_text())
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    assert torch.equal(net(torch.ones(1, 8)), torch.full((1, 8), 2.0))
    stats = net.cache_instance.stats()
    return {"seconds": time.monotonic() - killed, "taken_over": stats.taken_over}


PARTS = {"epochs": epochs_of, "steps": _steps_of, "memory": _memory_of, "killed": _killed_of}
