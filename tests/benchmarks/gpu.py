"""Keys, hits and misses of tensors on a GPU, beside what its memory and the link to it can do."""

import copy
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from tests.benchmarks.report import at_least, at_most, duration, per_item
from tests.benchmarks.timing import Times, interleave, progress
from torchcache2 import torchcache
from torchcache2.core.memory import to_host
from torchcache2.identity.items import item_keys

NAMESPACE = bytes(16)
COPY, KEYS, TODAY = "copy on the device", "keys on the device", "keys on the host, with the copy to it"


@dataclass(frozen=True)
class Sizes:
    """How much is measured; smaller numbers are for trying this file out without a GPU."""

    items: int = 256
    image: tuple[int, ...] = (3, 224, 224)
    tokens: tuple[int, ...] = (197, 768)
    probe_images: int = 1024
    probe_layers: int = 12
    rounds: int = 50


def run(report):
    if torch.cuda.is_available():
        measure(report, torch.device("cuda", torch.cuda.current_device()), Sizes())
    else:
        report.text("No GPU here: what is on one is not measured.")


def measure(report, device, sizes):
    """Every table of this section."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    rows, targets = [], []
    for part in (keys, hits, gathers, misses, linear_probe):
        progress(f"on {name}: {part.__name__}")
        part(rows, targets, device, sizes)
    header = ("", "what", "median", "P90", "µs per item", "over the limit", "the limit")
    report.table(f"Batches of {sizes.items} on {name}, float32", header, rows)
    report.targets(targets)


def wait(device):
    """Wait until a device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(functions, device, rounds, before=None):
    """Times of functions in turn, each until the device has done what it was told."""

    def waited(function):
        def call():
            function()
            wait(device)

        return call

    def prepared():
        if before is not None:
            before()
        wait(device)

    waiting = {name: waited(function) for name, function in functions.items()}
    return interleave(waiting, rounds=rounds, before=prepared)


def row(label, what, times, items, limit=None, limit_name=""):
    over = "" if limit is None else f"{times.median / limit.median:.2f} ×"
    median, p90 = duration(times.median), duration(times.p90)
    return label, what, median, p90, per_item(times.median, items), over, limit_name


def keys(rows, targets, device, sizes):
    for shape, bound in ((sizes.image, 1.0), ((2048,), 0.3)):
        x = torch.randn(sizes.items, *shape, device=device)
        target = torch.empty_like(x)
        functions = {
            KEYS: lambda x=x: item_keys(NAMESPACE, b"", [("x", x)]),
            TODAY: lambda x=x: item_keys(NAMESPACE, b"", [("x", to_host([x])[0])]),
            COPY: lambda x=x, target=target: target.copy_(x),  # as many bytes as reading it twice
        }
        times = timed(functions, device, sizes.rounds)
        rows += [row(f"{shape}", what, t, sizes.items, times[COPY], COPY) for what, t in times.items()]
        value = times[KEYS].median / sizes.items * 1e6
        targets.append(at_most(f"keys of {shape}, an item", value, bound, " µs"))
        if shape == sizes.image:
            value = times[TODAY].median / times[KEYS].median
            targets.append(at_least(f"keys of {shape}: times as fast as on the host", value, 20))


class Features(nn.Module):
    """A cheap forward whose output has any shape for an item; its cost does not matter where all are hits."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        first = x.flatten(1)[:, :1]
        return first.repeat(1, math.prod(self.shape)).unflatten(1, self.shape)


def cached(shape, place):
    return torchcache(memory_cache_device=place, max_memory_cache_size="8GB")(Features(shape)).eval()


def hits(rows, targets, device, sizes):
    x = torch.randn(sizes.items, *sizes.image, device=device)
    net = cached((768,), device)
    for _ in range(3):
        net(x)
    label, one = "all are hits, rows (768,) on the device", "one item"
    functions = {f"{sizes.items} images": lambda: net(x), one: lambda: net(x[:1]), "x.sum()": x.sum}
    times = timed(functions, device, sizes.rounds)
    for what, t in times.items():
        rows.append(row(label, what, t, 1 if what == one else sizes.items, times["x.sum()"], "x.sum()"))
    many, fixed = (t.median for t in list(times.values())[:2])
    targets.append(at_most("a whole call of hits, an item", many / sizes.items * 1e6, 2.0, " µs"))
    targets.append(at_most("a call of one hit", fixed * 1e6, 350, " µs"))


def gathers(rows, targets, device, sizes):
    """Rows of tokens: what a call takes longer than one with rows of one number."""
    x = torch.randn(4 * sizes.items, 64, device=device)  # more rows than fit into a cache of the device
    chosen = torch.randperm(len(x), device=device)[: sizes.items]
    batch, small = x[chosen], cached((1,), device)
    nets = {"the device": cached(sizes.tokens, device), "pinned memory": cached(sizes.tokens, "cpu")}
    for net in (small, *nets.values()):
        for part in x.split(sizes.items):
            net(part)
    on_device = torch.empty(sizes.items, *sizes.tokens, device=device)
    on_host = torch.empty(on_device.shape, pin_memory=device.type == "cuda", device="cpu")
    target = torch.empty_like(on_device)
    limits = {
        "the device": (COPY, lambda: target.copy_(on_device)),
        "pinned memory": ("copy from pinned memory", lambda: target.copy_(on_host, non_blocking=True)),
    }
    for place, net in nets.items():
        limit, copied = limits[place]
        call, of_one = "the call", "the call with rows of one number"
        functions = {call: lambda net=net: net(batch), of_one: lambda: small(batch), limit: copied}
        times = timed(functions, device, sizes.rounds)
        label = f"rows {sizes.tokens} in {place}"
        rows += [row(label, what, t, sizes.items, times[limit], limit) for what, t in times.items()]
        over = (times[call].median - times[of_one].median) / times[limit].median
        if place == "the device":
            targets.append(at_most(f"{label}: gather over a copy", over, 1.3))
        else:
            targets.append(at_least(f"{label}: gather, of the link", 100 / over, 80, " %"))


def misses(rows, targets, device, sizes):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(sizes.image), 768)).eval().to(device)
    x = torch.randn(sizes.items, *sizes.image, device=device)
    with torch.no_grad():
        net = torchcache(memory_cache_device=device, max_memory_cache_size="256MB")(copy.deepcopy(plain))
        net.requires_grad_(False)
        functions = {"all are misses": lambda: net(x), "the plain forward": lambda: plain(x)}
        times = timed(functions, device, sizes.rounds, before=lambda: x.add_(1))  # new items for each call
    stats = net.cache_instance.stats()
    assert stats.hits == 0 and not stats.bypasses, stats
    plain_times = times["the plain forward"]
    for what, t in times.items():
        rows.append(row(f"{sizes.image} → (768,)", what, t, sizes.items, plain_times, "the plain forward"))
    over = (times["all are misses"].median - plain_times.median) / sizes.items
    targets.append(at_most("a miss, over the plain forward", over * 1e6, 3.0, " µs"))


def linear_probe(rows, targets, device, sizes):
    """Five epochs of a head on ViT-B/16 with random weights, with the cache and without."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(image_size=sizes.image[-1], num_hidden_layers=sizes.probe_layers)
    backbone = ViTModel(config, add_pooling_layer=False).eval().requires_grad_(False).to(device)
    images = torch.randn(sizes.probe_images, *sizes.image, device=device)
    labels = torch.arange(sizes.probe_images, device=device) % 10
    batches = list(zip(images.split(sizes.items), labels.split(sizes.items), strict=True))

    def features(images):
        return backbone(images).last_hidden_state[:, 0]

    def trained(features):
        """The times of the epochs after the first, and the losses of all steps."""
        torch.manual_seed(0)
        head = nn.Linear(config.hidden_size, 10).to(device)
        optimizer, losses, seconds = torch.optim.AdamW(head.parameters(), lr=1e-3), [], []
        for _ in range(5):
            start = time.perf_counter()
            for inputs, expected in batches:
                loss = nn.functional.cross_entropy(head(features(inputs)), expected)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            wait(device)
            seconds.append(time.perf_counter() - start)
        return Times.of(seconds[1:], seconds[1:]), torch.stack(losses)

    plain, expected = trained(features)
    warm, losses = trained(torchcache(memory_cache_device=device)(features))
    label = f"{sizes.probe_images} images, ViT-B/16"
    rows.append(row(label, "an epoch without the cache", plain, sizes.probe_images))
    rows.append(row(label, "an epoch of hits", warm, sizes.probe_images, plain, "without the cache"))
    faster, apart = plain.median / warm.median, float((losses - expected).abs().max())
    targets.append(at_least("linear probe: times as fast as without the cache", faster, 50))
    targets.append(at_most("linear probe: largest difference of a loss", apart, 0, ""))
