"""What `verify=0.01` costs, over a backbone of about 10 ms an item."""

import time

import torch
from torch import nn
from torch.nn import functional as F

from tests.benchmarks.report import at_most, duration, per_item
from tests.benchmarks.timing import progress
from torchcache2 import torchcache

SHARE = 0.01
ITEMS, BATCH = 256, 64
EPOCHS = 60  # 15,360 hits: some 150 of them verified
SECONDS = 0.010  # of one item
WIDTH = 256


class Backbone(nn.Module):
    """Matrix products over the patches of an image: a batch of n takes about n times as long as one."""

    def __init__(self, depth):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(48, WIDTH, generator=generator) / 48**0.5)
        self.weights = nn.Parameter(torch.randn(depth, WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.eval().requires_grad_(False)

    def forward(self, images):
        x = F.unfold(images, 4, stride=4).mT @ self.embed
        for weight in self.weights:
            x = x + F.gelu(x @ weight)
            x = F.layer_norm(x, (WIDTH,))
        return x.mean(1)


def run(report):
    progress("verify: a backbone of 10 ms an item")
    batches = torch.randn(ITEMS, 3, 64, 64).split(BATCH)
    with torch.no_grad():
        backbone = Backbone(calibrated_depth(batches[0][:1]))
        single = seconds_of(lambda: backbone(batches[0][:1]), 30)
        hits, verifying = (
            torchcache(Backbone(len(backbone.weights))),
            torchcache(verify=SHARE)(Backbone(len(backbone.weights))),
        )
        check_and_fill(backbone, (hits, verifying), batches)
        uncached, seconds = epochs(backbone, {"hits": hits, "verify": verifying}, batches)
    stats = verifying.cache_instance.stats()
    assert stats.misses == hits.cache_instance.stats().misses == ITEMS
    assert stats.verified > 0
    assert stats.mismatched == 0
    rows = [
        ("uncached", uncached),
        ("all hits, verify=0.0", seconds["hits"]),
        (f"all hits, verify={SHARE}", seconds["verify"]),
    ]
    report.table(
        f"Epochs of {ITEMS} items in batches of {BATCH}, a backbone of {len(backbone.weights)} layers: "
        f"{duration(single)} for one item alone",
        ("loop", "one epoch", "µs per item", "over the hit loop"),
        [
            (name, duration(value), per_item(value, ITEMS), f"{value / seconds['hits']:.3g}×")
            for name, value in rows
        ],
    )
    share = f"{stats.verified} of {stats.hits:,} hits ({stats.verified / stats.hits:.2%})"
    report.text(
        f"Means of {EPOCHS} epochs, as what is verified is drawn at random: {share}, {stats.mismatched} of "
        "them mismatched. A hit that is verified costs a forward, so beside a loop of nothing but hits "
        "`verify` is dear; the target is relative to the uncached loop."
    )
    value = (seconds["verify"] - seconds["hits"]) / uncached * 100
    what = f"verify={SHARE} over the hit loop, as a share of the uncached loop"
    report.targets([at_most(what, value, 3, " %")])


def calibrated_depth(item):
    """How many layers take about 10 ms for one item."""
    nets = Backbone(4), Backbone(20)
    shallow, deep = (seconds_of(lambda net=net: net(item), 30) for net in nets)
    return max(1, 4 + round(16 * (SECONDS - shallow) / (deep - shallow)))


def seconds_of(function, rounds):
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[rounds // 2]


def check_and_fill(backbone, nets, batches):
    for batch in batches:
        expected = backbone(batch)
        for net in nets:
            net(batch)
            # A verified row is computed in a smaller batch, which may round differently.
            assert torch.allclose(net(batch), expected, atol=1e-4)


def epochs(backbone, nets, batches):
    """Seconds of an uncached epoch, and of one through each net; all in turn."""
    uncached, seconds = [], dict.fromkeys(nets, 0.0)
    for turn in range(EPOCHS):
        progress(f"verify: epoch {turn + 1} of {EPOCHS}")
        if turn in (0, EPOCHS // 2):
            uncached.append(epoch(backbone, batches))
        for name, net in nets.items():
            seconds[name] += epoch(net, batches) / EPOCHS
    return sum(uncached) / len(uncached), seconds


def epoch(net, batches):
    start = time.perf_counter()
    for batch in batches:
        net(batch)
    return time.perf_counter() - start
