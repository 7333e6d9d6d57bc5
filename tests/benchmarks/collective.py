"""Ranks in step: forwards, time and memory, beside the collectives that they are made of."""

import statistics
import time
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from tests.benchmarks import ranks
from tests.benchmarks.jobs import Backbone, computed, run_job
from tests.benchmarks.report import at_least, at_most, duration
from tests.benchmarks.timing import interleave, progress
from torchcache2 import RankError, torchcache
from torchcache2.engine.collective.channel import Channel

BATCH, WIDTH = 64, 768
ROW = WIDTH * 4  # bytes
STEPS = 5  # with the same batches
ROUNDS = 20  # of single calls
TURNS = 2  # of what is measured once in a job
LARGE = 8192  # items whose memory is measured, 25 MB
INDEX = 64  # bytes of a row's place in the index, at most
MORE = 1.03  # memory than for the rows that a node owns: it comes in pieces


class Double(nn.Module):
    """Takes no time."""

    def forward(self, x):
        return x * 2


class Raises(nn.Module):
    """Rank 0 raises if an item is 13."""

    def forward(self, x):
        fail(x)
        return x * 2


def run(report):
    report.targets([*_epochs(report), *_same(report), *_memory(report), *_calls(report), _raised()])


def _epochs(report):
    rows, targets = [], []
    for count, nodes in [(2, 1), (2, 2), (4, 1), (4, 2)]:
        progress(f"collective: epochs on {count} ranks of {nodes} nodes")
        found = run_job(__name__, "epochs", count, "collective", nodes=nodes)
        forwards = sum(one["computed"] for one in found) / ranks.ITEMS
        seconds = [duration(max(one["seconds"][epoch] for one in found)) for epoch in (0, -1)]
        rows.append((count, nodes, f"{forwards:.3f}", *seconds, sum(one["received"] for one in found)))
        what = f"{count} ranks, {nodes} nodes: forwards per item, {ranks.EPOCHS} epochs"
        targets.append(at_most(what, forwards, 1.0, ""))
    title = f"{ranks.EPOCHS} epochs of {ranks.ITEMS} items under a `DistributedSampler`, in step"
    header = ("ranks", "nodes", "forwards per item", "first epoch", "last epoch", "received")
    report.table(f"{title}, batches of {ranks.BATCH}, 10 ms an item", header, rows)
    return targets


def _same(report):
    rows, targets = [], []
    for count in (2, 4):
        progress(f"collective: the same batches on {count} ranks")
        found = run_job(__name__, "same", count)
        plain, stepped = (max(one[name] for one in found) for name in ("plain", "stepped"))
        share = BATCH / count
        off = max(abs(new - share) for one in found for new in one["computed"])
        rows.append((count, duration(plain), duration(stepped), f"{plain / stepped:.2f}×", f"{off:.0f}"))
        targets.append(at_most(f"the same batches on {count} ranks: items away from B/{count}", off, 1, ""))
    targets.append(at_least("the same batches on 4 ranks: times as fast as uncached", plain / stepped, 3))
    report.table(
        f"New batches of {BATCH} items, the same on all ranks, 10 ms an item",
        ("ranks", "uncached", "in step", "", "items away from an even share, at most"),
        rows,
    )
    return targets


def _memory(report):
    progress("collective: memory")
    found = run_job(__name__, "memory", 4, nodes=4)
    budget, size = found[0]["budget"], sum(one["memory_bytes"] for one in found)
    forwards = sum(one["computed"] for one in found) / LARGE
    rows, received = (sum(one[name] for one in found) for name in ("memory_rows", "received"))
    report.text(
        f"{LARGE:,} rows of ({WIDTH},) float32 on 4 nodes, each with a budget of {budget / 1e6:.1f} MB for a "
        f"quarter of them: {rows:,} rows in {size / 1e6:.1f} MB in all; {received:,} were received in "
        f"{ranks.EPOCHS} epochs."
    )
    return [
        at_most(
            "4 nodes with a quarter each: memory over that of one copy", size / LARGE / (ROW + INDEX), 1.05
        ),
        at_most("4 nodes with a quarter each: forwards per item", forwards, 1.0, ""),
    ]


def _calls(report):
    rows, targets = [], []
    for count in (2, 4):
        taken = []
        for turn in range(TURNS):
            progress(f"collective: calls on {count} ranks, {turn + 1} of {TURNS}")
            taken += run_job(__name__, "calls", count, nodes=count)
        names = taken[0]["times"]
        times = {name: statistics.median([one["times"][name] for one in taken]) for name in names}
        sizes = taken[0]["bytes"]
        for name, seconds in times.items():
            rows.append((count, name, sizes.get(name, ""), duration(seconds)))
        local, remote = (times[name] - times["local hits, alone"] for name in ("local hits", "remote hits"))
        ask, bare = times["all_gather, ask"], times["all_gather, have"] + times["all_to_all_single"]
        targets.append(at_most(f"{count} ranks: local hits add, over one all_gather", local / ask, 1.5))
        what = f"{count} ranks: remote hits add, over two all_gathers and an all_to_all_single"
        targets.append(at_most(what, remote / (ask + bare), 3))
    title = f"Calls of {BATCH} items with rows of ({WIDTH},) float32, and bare collectives of the same bytes"
    report.table(title, ("ranks", "", "bytes of a rank", "median"), rows)
    return targets


def _raised():
    taken = []
    for turn in range(TURNS):
        progress(f"collective: a rank raises, {turn + 1} of {TURNS}")
        found = run_job(__name__, "raised", 4, nodes=2)
        taken.append(max(one["time"] for one in found[1:]) - found[0]["time"])
    return at_most("a raise in one rank is a RankError in the others after", max(taken), 1.0, " s")


# What the ranks do


def _same_of(rank, count, _, meet, __):
    """The median seconds of a step and of an uncached call, and what each step has computed here."""
    backbone = Backbone()
    net = torchcache(probe=False, distributed="collective")(Backbone())
    for number in range(count):  # a rank's first call of a kind is a whole batch
        net(torch.full((1, WIDTH), -1.0 - number))
    seconds, new = {"plain": [], "stepped": []}, []
    for step in range(STEPS):
        x = torch.arange(step * BATCH, (step + 1) * BATCH).float()[:, None].expand(-1, WIDTH).contiguous()
        for name, module in (("plain", backbone), ("stepped", net)):
            before = computed()
            meet()
            start = time.perf_counter()
            assert torch.equal(module(x), x * 2)
            seconds[name].append(time.perf_counter() - start)
            if module is net:
                new.append(computed() - before)
    return {name: statistics.median(all_) for name, all_ in seconds.items()} | {"computed": new}


def _memory_of(rank, count, _, meet, __):
    budget = int(LARGE / count * (ROW + INDEX) * MORE)
    net = torchcache(probe=False, distributed="collective", max_memory_cache_size=budget)(Double())
    items = torch.arange(float(LARGE))[:, None].expand(-1, WIDTH).contiguous()
    sampler = DistributedSampler(range(LARGE), count, rank)
    for epoch in range(ranks.EPOCHS):
        sampler.set_epoch(epoch)
        for indices in torch.tensor([*sampler]).split(BATCH):
            assert torch.equal(net(items[indices]), items[indices] * 2)
    stats = net.cache_instance.stats()
    names = "memory_bytes", "memory_rows", "received"
    found = {name: getattr(stats, name) for name in names} | {"budget": budget, "computed": stats.misses}
    meet()
    return found


def _calls_of(rank, count, _, meet, __):
    """Each rank is a node, and holds the batches that the one before it asks for."""
    net = torchcache(probe=False, distributed="collective")(Double())
    cache = net.cache_instance
    turns = 2 + 3 * (ROUNDS + 3)  # as `interleave` makes them
    items = torch.arange(float(count * turns * BATCH)).view(count, turns, BATCH, 1)
    batches = items.expand(-1, -1, -1, WIDTH).contiguous()
    for batch in batches[rank]:
        net(batch)
    misses = cache.stats().misses
    theirs, mine = iter(batches[(rank + 1) % count]), batches[rank, 0]
    net(next(theirs))  # the structure of rows is told once
    blocks = _blocks(lambda: net(next(theirs)))
    sent, received = [0] * count, [0] * count
    sent[rank - 1] = received[(rank + 1) % count] = BATCH * ROW
    rows, arrived = torch.zeros(BATCH * ROW, dtype=torch.uint8), torch.empty(BATCH * ROW, dtype=torch.uint8)

    def alone():
        with cache.alone():
            return net(mine)

    functions = {
        "local hits, alone": alone,
        "local hits": lambda: net(mine),
        "remote hits": lambda: net(next(theirs)),
    }
    for kind, size in blocks.items():
        block = torch.zeros(size, dtype=torch.uint8)
        every = list(torch.zeros(count, size, dtype=torch.uint8))
        functions[f"all_gather, {kind}"] = partial(torch.distributed.all_gather, every, block)
    swap = torch.distributed.all_to_all_single
    functions["all_to_all_single"] = partial(swap, arrived, rows, received, sent)
    times = interleave(functions, rounds=ROUNDS, before=meet)
    stats = cache.stats()
    assert stats.misses == misses and stats.received == turns * BATCH, stats
    sizes = {f"all_gather, {kind}": size for kind, size in blocks.items()}
    sizes |= {"all_to_all_single": BATCH * ROW}
    return {"times": {name: times[name].median for name in functions}, "bytes": sizes}


def _blocks(step):
    """How many bytes a rank gives to each round of a step: see `Channel`."""
    lengths, gather = {}, Channel.gather

    def counted(channel, kind, data, *more):
        said = gather(channel, kind, data, *more)
        lengths[kind] = max(map(len, said))
        return said

    with mock.patch.object(Channel, "gather", counted):
        step()
    return dict.fromkeys(lengths, 8 + max(1024, 1 << (max(lengths.values()) - 1).bit_length()))


def _raised_of(rank, count, _, meet, __):
    net = torchcache(probe=False, distributed="collective")(Raises())
    net(torch.full((2, 8), float(rank)))
    meet()
    try:
        net(torch.full((2, 8), 13.0 + rank))
    except RankError:
        return {"time": time.monotonic()}
    except ValueError as error:
        return {"time": error.args[0]}
    raise AssertionError(f"rank {rank} has not heard of it")


def fail(x):
    if (x == 13).any():
        raise ValueError(time.monotonic())


PARTS = {
    "epochs": ranks.epochs_of,
    "same": _same_of,
    "memory": _memory_of,
    "calls": _calls_of,
    "raised": _raised_of,
}
