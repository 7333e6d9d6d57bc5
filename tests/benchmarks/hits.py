"""All-hit batches: ours, torchcache 0.6.0 and the machine's own limit in turn."""

import torch
from torch import nn

from tests.benchmarks.peers import torchcache as peer
from tests.benchmarks.report import at_least, at_most, time_rows
from tests.benchmarks.timing import interleave, progress, ratio
from torchcache2 import torchcache

BATCH = 256
OURS, PEER, LIMIT = "torchcache2, whole items", "torchcache 0.6.0", "x.sum()"
SUBSAMPLED = "torchcache2, subsample_count=10_000"

# Input, rounds, and how many times as fast as the peer we have to be. For (3, 64, 64) the peer takes 4 or
# 17 ms by chance, the same in the whole process: malloc gives its temporaries back to the system or not.
CASES = [((3, 224, 224), 30, 8), ((3, 64, 64), 60, 7), ((2048,), 100, 6)]


def make_features():
    """A new class at every call: one of them is patched, the others are wrapped."""

    class Features(nn.Module):
        """A cheap forward with (768,) outputs; its cost does not matter where all are hits."""

        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 768, generator=generator), requires_grad=False)

        def forward(self, x):
            return x.flatten(1)[:, :8] @ self.weight

    return Features


def run(report):
    times, targets = [], []
    for shape, rounds, bound in CASES:
        progress(f"all-hit batches of {shape}")
        x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))
        nets = {OURS: torchcache(make_features())().eval(), PEER: peer()(make_features())().eval()}
        is_largest = shape == CASES[0][0]
        if is_largest:
            nets[SUBSAMPLED] = torchcache(subsample_count=10_000)(make_features())().eval()
        with torch.no_grad():
            fill_and_check(nets, x)
            functions = {name: lambda net=net, x=x: net(x) for name, net in nets.items()}
            measured = interleave({**functions, LIMIT: x.sum}, rounds=rounds)
        times += time_rows(shape, measured, BATCH)
        value, cold = ratio(measured[PEER], measured[OURS])
        targets.append(at_least(f"{shape}: times as fast as {PEER}", value, bound, cold=cold))
        if is_largest:
            value, cold = ratio(measured[OURS], measured[LIMIT])
            targets.append(at_most(f"{shape}: time over {LIMIT}", value, 2.2, cold=cold))
            value, cold = ratio(measured[PEER], measured[SUBSAMPLED])
            what = f"{shape}, subsample_count=10_000: times as fast"
            targets.append(at_least(what, value, 25, cold=cold))
    report.times(f"All-hit batches of {BATCH}, float32 → (768,) float32", times)
    report.targets(targets)


def fill_and_check(nets, x):
    """Fill every cache, and see that hits are right and that they are hits."""
    expected = make_features()()(x)
    for name, net in nets.items():
        net(x)
        assert torch.equal(net(x), expected), name
        if name == PEER:
            assert len(net.cache_instance.cache) == BATCH
            assert net.cache_instance.current_indices_to_embed.numel() == 0
        else:
            assert net.cache_instance.stats().hits == net.cache_instance.stats().misses == BATCH, name
