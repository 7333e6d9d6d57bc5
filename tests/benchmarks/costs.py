"""What caching itself costs: the gather, a miss, a row's bookkeeping, a call."""

import copy

import numpy as np
import torch
from torch import nn

from tests.benchmarks.hits import BATCH, PEER, make_features
from tests.benchmarks.peers import torchcache as peer
from tests.benchmarks.report import at_least, at_most, time_rows
from tests.benchmarks.timing import interleave, progress, ratio
from torchcache2 import Keys, torchcache
from torchcache2.core.memory import empty_bytes
from torchcache2.core.rows import Rows
from torchcache2.tiers.memory.tier import MemoryTier

CPU = torch.device("cpu")
NAMESPACE = b"benchmark" + bytes(7)
GATHERED = {(197, 768): 1000, (256, 14, 14): 2000}  # output: rows in the tier, 0.6 and 0.4 GB


def run(report):
    gather(report)
    misses(report)
    bookkeeping(report)
    call(report)


def gather(report):
    """`MemoryTier.get` against a copy of as many bytes into memory from the same allocator."""
    times, targets = [], []
    for shape, count in GATHERED.items():
        progress(f"gather of {shape}")
        source = torch.randn(count, *shape)
        keys = random_keys(count)
        tier = filled_tier(keys, source)
        rng = np.random.default_rng(0)
        wanted = [rng.choice(count, BATCH, replace=False) for _ in range(16)]
        batches = [(keys.take(positions), positions) for positions in wanted]
        check_gather(tier, source, *batches[0])
        turn = iter(range(10**9))

        def get(tier=tier, batches=batches, turn=turn):
            return tier.get(batches[next(turn) % len(batches)][0])

        def window(source=source, turn=turn):
            first = next(turn) * 97 % (len(source) - BATCH)
            return source[first : first + BATCH]

        def copy(window=window):
            part = window()
            fresh = empty_bytes(part.nbytes).view(part.dtype).view(part.shape)
            return fresh.copy_(part)

        functions = {
            "MemoryTier.get": get,
            "copy into fresh memory": copy,
            "x.clone()": lambda window=window: window().clone(),
        }
        measured = interleave(functions, rounds=30)
        times += time_rows(f"{shape}", measured, BATCH)
        value, cold = ratio(measured["MemoryTier.get"], measured["copy into fresh memory"])
        targets.append(at_most(f"{shape}: gather over copy", value, 1.5, cold=cold))
    report.times(f"Gather of {BATCH} random rows, float32", times)
    report.targets(targets)


def filled_tier(keys, source):
    tier = MemoryTier(2 * source.nbytes)
    for first in range(0, len(source), BATCH):
        part = source[first : first + BATCH]
        some = keys.take(np.arange(first, first + len(part)))
        tier.put(some, Rows.from_pytree(part, len(part), device=CPU))
    return tier


def check_gather(tier, source, keys, positions):
    ((found, rows),) = tier.get(keys).parts
    assert len(found) == BATCH
    assert torch.equal(rows.columns[0], source[torch.from_numpy(positions)])


def misses(report):
    """A batch that no cache has seen, against the forward alone."""
    progress("misses")
    x = torch.randn(BATCH, 3, 224, 224)
    plain = make_features()().eval()
    ours, theirs = torchcache(make_features())().eval(), peer()(make_features())().eval()
    with torch.no_grad():
        functions = {
            "plain forward": lambda: plain(x),
            "torchcache2": lambda: ours(x),
            PEER: lambda: theirs(x),
        }
        # Values grow, so that no two batches have a key in common, the peer's included.
        measured = interleave(functions, rounds=15, before=lambda: x.add_(1.0))
    assert ours.cache_instance.stats().hits == 0
    report.times(f"Batches of {BATCH} misses, float32 → (768,)", time_rows("(3, 224, 224)", measured, BATCH))
    cached, forward = measured["torchcache2"], measured["plain forward"]
    value = (cached.median - forward.median) / BATCH * 1e6
    cold = (cached.cold - forward.cold) / BATCH * 1e6
    report.targets([at_most("a miss over the plain forward", value, 60, " µs", cold)])


def bookkeeping(report):
    """Bytes of a row that are not its own, at a million rows of four float32."""
    progress("a million rows")
    count = 1_000_000
    tier = MemoryTier(1_000_000_000)
    for first in range(0, count, BATCH):
        part = torch.full((min(BATCH, count - first), 4), float(first))
        tier.put(random_keys(len(part), seed=first), Rows.from_pytree(part, len(part), device=CPU))
    stats = tier.stats()
    assert stats.rows == count
    report.targets([at_most("bytes beside a row, of a million", stats.bytes / count - 16, 64, " B")])


def call(report):
    """One item through a module of 200 parameters in about 150 submodules: the fixed cost."""
    progress("fixed cost of a call")
    net, theirs = torchcache(make_blocks())().eval(), peer()(make_blocks())().eval()
    x = torch.randn(1, 16)
    weights, fields = list(net.parameters()), [vars(module) for module in net.modules()]

    def read():
        for weight in weights:
            weight._version, weight.data_ptr()
        for names in fields:
            for value in names.values():
                id(value)

    with torch.no_grad():
        net(x), theirs(x)
        functions = {"torchcache2": lambda: net(x), PEER: lambda: theirs(x), "all read once": read}
        measured = interleave(functions, rounds=1000, warmup=50)
        noticed = sum(changes_noticed(net, x))
    times = measured["torchcache2"]
    over, cold = ratio(times, measured["all read once"])
    report.times("One item that hits, 200 parameters in 150 submodules", time_rows("(16,)", measured, 1))
    report.targets(
        [
            at_most("fixed cost of a call", times.median * 1e6, 350, " µs", times.cold * 1e6),
            at_most("over reading versions, pointers and attributes once", over, 2, cold=cold),
            at_least("kinds of edits noticed at the next call", noticed, 3, " of 3"),
        ]
    )


def changes_noticed(net, x):
    """Whether the output is the plain forward's after an edit of each kind."""
    plain = make_blocks()().eval()
    plain.load_state_dict(net.state_dict())
    block = copy.deepcopy(plain.blocks[0])
    edits = [
        lambda root: root.blocks[3].linear.weight.mul_(2),
        lambda root: setattr(root.blocks[4], "scale", 3.0),
        lambda root: root.blocks.__setitem__(5, copy.deepcopy(block)),
    ]
    for edit in edits:
        old = net(x)
        edit(net), edit(plain)
        yield torch.equal(net(x), plain(x)) and not torch.equal(net(x), old)


def make_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
            self.scale = 1.0

        def forward(self, x):
            return x + self.norm(self.linear(x)) * self.scale

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(50))
            self.requires_grad_(False)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Blocks


def random_keys(count, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
    return Keys(NAMESPACE, data)
