"""Linear probe: train a linear head on a frozen backbone, with the cache and without.

The backbone gives the same features for an image in every epoch, yet a training loop runs it every time.
With ``@torchcache`` on its class, the first epoch computes each image's features, and later epochs find
them. Nothing else in the loop changes, and no number that comes out of it does: this script checks that
the losses of all steps are equal bit by bit.

With ``--cache-dir`` the features are kept in a folder as well: a second run computes none of them, and a
run that was killed goes on where it stopped.

The images are scikit-learn's 1797 handwritten digits; the backbone is a vision transformer with 5 million
random weights. With a pretrained one the loop would look the same. On a slow machine, ``--size 16`` makes the
images, and the work of the backbone, a sixteenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from torchcache2 import torchcache

PATCH, WIDTH, DEPTH, HEADS = 8, 256, 6, 4
TRAIN_ITEMS = 1536


@torchcache
class Backbone(nn.Module):
    """A vision transformer that turns images (n, 1, size, size) into features (n, 256)."""

    def __init__(self, size: int, *, cached: bool) -> None:
        super().__init__()
        self.torchcache_enabled = cached  # an option of this instance, here only to compare
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((size // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        """The features of a batch of images."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.norm(self.blocks(tokens)).mean(dim=1)


@dataclasses.dataclass
class Probe:
    """A frozen backbone and a head in training, and what has come out so far."""

    backbone: Backbone
    head: nn.Module
    loader: DataLoader[tuple[Tensor, ...]]
    optimizer: torch.optim.Optimizer
    seconds: list[float] = dataclasses.field(default_factory=list)  # per epoch
    losses: list[Tensor] = dataclasses.field(default_factory=list)  # per step


def load_data(items: int, batch_size: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    data = F.interpolate(images, size=(size, size), mode="bilinear"), torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    # As many training items as fill whole batches, so that drop_last has nothing to drop. Else an item that
    # was dropped in the first epoch would later be the only miss among hits: computed in a smaller batch, its
    # features could differ in the last bit, because torch may add in another order there.
    count = items // batch_size * batch_size
    train, test = ([part[items] for part in data] for items in (order[:count], order[TRAIN_ITEMS:]))
    return TensorDataset(*train), TensorDataset(*test)


def make_probe(
    train_set: TensorDataset, batch_size: int, *, cached: bool, cache_dir: str | None = None
) -> Probe:
    torch.manual_seed(0)
    size = train_set.tensors[0].shape[-1]
    backbone = Backbone(size, cached=cached).eval()
    if cache_dir is not None:
        backbone.torchcache_persistent = True
        backbone.torchcache_persistent_cache_dir = cache_dir
    # Random features vary little around their mean; batch norm without weights brings them to one scale.
    head = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None, affine=False), nn.Linear(WIDTH, 10))
    shuffling = torch.Generator().manual_seed(0)
    loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True, generator=shuffling)
    return Probe(backbone, head, loader, torch.optim.AdamW(head.parameters(), lr=0.01))


def train_epoch(probe: Probe, name: str) -> None:
    start = time.perf_counter()
    for images, labels in tqdm(probe.loader, name, leave=False, disable=None):  # None: only on a terminal
        with torch.no_grad():
            features = probe.backbone(images)
        loss = F.cross_entropy(probe.head(features), labels)
        probe.optimizer.zero_grad()
        loss.backward()
        probe.optimizer.step()
        probe.losses.append(loss.detach())
    probe.seconds.append(time.perf_counter() - start)


@torch.no_grad()
def accuracy(probe: Probe, test_set: TensorDataset) -> float:
    images, labels = test_set.tensors
    guesses = probe.head.eval()(probe.backbone(images)).argmax(dim=1)
    return (guesses == labels).double().mean().item()


def save_plot(path: str, plain: Probe, cached: Probe) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for probe, name, colour, shift in ((plain, "without", "#8a929c", -0.2), (cached, "with", "#c2570c", 0.2)):
        label = f"{name} the cache: {sum(probe.seconds):.1f} s in all"
        epochs = [epoch + shift for epoch in range(1, len(probe.seconds) + 1)]
        bars = axes.bar(epochs, probe.seconds, width=0.38, color=colour, label=label)
        if len(epochs) <= 10:
            axes.bar_label(bars, fmt="%.1f", padding=2, color=colour, fontsize=11, fontweight="bold")
    axes.set_title(
        f"Training on a frozen vision transformer, {len(cached.loader.dataset):,} images",
        loc="left",
        fontsize=14,
        pad=34,
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=12)
    axes.set_xlabel("epoch", fontsize=12)
    axes.set_ylabel("seconds", fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#e6e8eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="at least 2 (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--items", type=int, default=TRAIN_ITEMS, metavar="N", help="to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=64,
        metavar="N",
        help="pixels of a side; fewer are faster (default: %(default)s)",
    )
    parser.add_argument("--plot", default="epoch_times.png", metavar="PATH", help="default: %(default)s")
    parser.add_argument("--cache-dir", metavar="DIR", help="keep the features there, for the next run")
    options = parser.parse_args()
    if options.epochs < 2 or not 2 <= options.batch_size <= options.items <= TRAIN_ITEMS:
        parser.error(
            f"expected at least 2 epochs, and a batch size from 2 to the items, at most {TRAIN_ITEMS}"
        )

    if options.size < PATCH or options.size % PATCH:
        parser.error(f"expected a size that is a multiple of {PATCH} pixels")

    print("loading scikit-learn's handwritten digits")
    train_set, test_set = load_data(options.items, options.batch_size, options.size)
    print(
        "building a frozen vision transformer of random weights twice: with the cache, and without",
        flush=True,
    )
    # The one with the cache goes first: what only the very first steps cost is its loss.
    cached = make_probe(train_set, options.batch_size, cached=True, cache_dir=options.cache_dir)
    plain = make_probe(train_set, options.batch_size, cached=False)
    print(f"training a linear head on each for {options.epochs} epochs, in turn; these are the times:\n")
    print("epoch  mean loss     without        with", flush=True)
    for epoch in range(1, options.epochs + 1):
        train_epoch(cached, f"epoch {epoch}, with the cache")
        train_epoch(plain, f"epoch {epoch}, without")
        loss = torch.stack(cached.losses[-len(cached.loader) :]).mean().item()
        print(f"{epoch:5} {loss:10.4f} {plain.seconds[-1]:9.3f} s {cached.seconds[-1]:9.3f} s", flush=True)

    print("\nchecking that both have the same losses and guesses, bit by bit", flush=True)
    correct = accuracy(cached, test_set)
    assert all(map(torch.equal, plain.losses, cached.losses)), "a loss differs between the two runs"
    assert accuracy(plain, test_set) == correct, "the accuracy differs between the two runs"
    print(f"losses of all {len(plain.losses)} steps equal bit by bit, test accuracy of both {correct:.1%}")
    warm = median(plain.seconds[1:]) / median(cached.seconds[1:])
    total = sum(plain.seconds) / sum(cached.seconds)
    print(f"speed-up: {warm:.1f}x per epoch after the first (median), {total:.1f}x in all")
    print(f"\n{cached.backbone.cache_instance.stats()}")
    save_plot(options.plot, plain, cached)
    print(f"\nplot: {Path(options.plot).resolve()}")


if __name__ == "__main__":
    main()
