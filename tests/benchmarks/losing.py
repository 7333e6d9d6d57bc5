"""Where a cache costs more than it saves: measured, so that nobody has to find out."""

import torch
from torch import nn

from tests.benchmarks.hits import BATCH, make_features
from tests.benchmarks.report import per_item
from tests.benchmarks.timing import interleave, progress
from torchcache2 import torchcache

UNCACHED, CACHED = "uncached", "cached"
HEADER = ("", "forward", "uncached, µs per item", "cached, µs per item", "cached takes")


def run(report):
    with torch.no_grad():
        rows = [*cheap_forwards(), *augmentation(), *single_items()]
    report.table("Where a cache loses, and for comparison where it does not", HEADER, rows)


def cheap_forwards():
    """Nothing but hits, of a forward that reads eight elements of each item."""
    for shape, rounds in ((2048,), 60), ((3, 64, 64), 30), ((3, 224, 224), 15):
        progress(f"cheap forward of {shape}")
        x = torch.randn(BATCH, *shape)
        plain, cached = pair(make_features())
        measured = time_hits(plain, cached, x, rounds)
        yield row(f"all hits, {BATCH} of {shape}", "8 columns @ (8, 768)", measured, BATCH)


def augmentation():
    """A random brightness for each image: no item comes twice."""
    images = torch.rand(BATCH, 3, 64, 64)
    x = torch.empty_like(images)

    def augment():
        x.copy_(images * torch.empty(BATCH, 1, 1, 1).uniform_(0.8, 1.2))

    for name, make in {"8 columns @ (8, 768)": make_features, "3 convolutions": make_convolutions}.items():
        progress(f"random augmentation, {name}")
        plain, cached = pair(make())
        augment()
        assert torch.allclose(cached(x), plain(x), atol=1e-5)
        functions = {UNCACHED: lambda plain=plain: plain(x), CACHED: lambda cached=cached: cached(x)}
        measured = interleave(functions, rounds=8, warmup=1, before=augment)
        assert cached.cache_instance.stats().hits == 0
        yield row(f"random augmentation, {BATCH} of (3, 64, 64)", name, measured, BATCH)


def single_items():
    """One item that hits: the fixed cost of a call is all there is."""
    forwards = {
        "8 columns @ (8, 768)": (make_features, (16,)),
        "Linear(768, 768)": (make_linear, (768,)),
        "3 convolutions": (make_convolutions, (3, 64, 64)),
    }
    for name, (make, shape) in forwards.items():
        progress(f"one item, {name}")
        plain, cached = pair(make())
        measured = time_hits(plain, cached, torch.randn(1, *shape), rounds=300)
        yield row(f"all hits, 1 of {shape}", name, measured, 1)


def pair(cls):
    """A plain module, and a cached one with the same weights."""
    plain = cls().eval().requires_grad_(False)
    cached = torchcache(cls().eval().requires_grad_(False))
    cached.load_state_dict(plain.state_dict())
    return plain, cached


def time_hits(plain, cached, x, rounds):
    expected = plain(x)
    for _ in range(2):
        assert torch.equal(cached(x), expected)
    measured = interleave({UNCACHED: lambda: plain(x), CACHED: lambda: cached(x)}, rounds=rounds)
    assert cached.cache_instance.stats().misses == len(x)
    return measured


def row(case, forward, measured, items):
    plain, cached = measured[UNCACHED].median, measured[CACHED].median
    return case, forward, per_item(plain, items), per_item(cached, items), f"{cached / plain:.3g}×"


def make_linear():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(768, 768)

        def forward(self, x):
            return self.linear(x)

    return Linear


def make_convolutions():
    class Convolutions(nn.Module):
        """About 1 ms an item of (3, 64, 64)."""

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 64, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(64, 128, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(128, 256, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(256, 768),
            )

        def forward(self, x):
            return self.layers(x)

    return Convolutions
