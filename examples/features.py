"""Features of a dataset: train a head on a frozen backbone, and touch each image once.

A trainer that runs a frozen backbone decodes every image in every epoch, and so does one whose backbone is
cached, as an image is found by its pixels. ``CachedDataset(map=)`` keeps what the backbone makes of each
image by the image's index, and its loader gives batches straight from these rows. This script trains a head
on JPEG files for some epochs, with it and without, and checks that the losses of both are equal bit by bit.
Then it opens the folder once more, as a second run would, which computes one batch to check the rows.

The images are drawn and the weights random, for nothing is downloaded: put your own in `make_photos` and
`make_backbone`. With ``--cache-dir`` photos and features stay there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchcache2 import CachedDataset

SIDE, CLASSES, WIDTH = 224, 10, 64


class Photos(Dataset[tuple[Tensor, int]]):
    """JPEG files that are read and decoded when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[index]) as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels / 255, index % CLASSES


def make_photos(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    colours = draw.integers(0, 128, (CLASSES, 3))
    for index in range(count):
        spots = draw.integers(0, 128, (28, 28, 3)) + colours[index % CLASSES]
        image = Image.fromarray(spots.astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(folder / f"{index:05}.jpg", quality=90)


def make_backbone() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow, size in ((3, 16, 7), (16, 32, 3), (32, WIDTH, 3)):
        layers += [nn.Conv2d(wide, narrow, size, stride=3), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().requires_grad_(False)


class Head:
    """A linear head in training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, CLASSES))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.01)
        self.losses: list[float] = []

    def train(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """An epoch; its seconds."""
        start = time.perf_counter()
        for features, labels in batches:
            loss = F.cross_entropy(self.layers(features), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return time.perf_counter() - start


def run(folder: Path, options: argparse.Namespace) -> None:
    if not (folder / "photos").exists():
        make_photos(folder / "photos", options.images)
    photos, backbone = Photos(folder / "photos"), make_backbone()
    print(f"{len(photos)} JPEG files of {SIDE} x {SIDE} pixels, {options.workers} workers\n", flush=True)

    def embed(batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return backbone(images), labels

    order = {"batch_size": 64, "shuffle": True, "num_workers": options.workers}
    plain = DataLoader(photos, **order, generator=torch.Generator().manual_seed(0))
    features = CachedDataset(photos, folder / "features", map=embed)
    loader = features.loader(**order, generator=torch.Generator().manual_seed(0))
    without, with_it = Head(), Head()
    print("epoch     without        with   computed", flush=True)
    for epoch in range(1, options.epochs + 1):
        before = features.stats().misses
        slow, fast = without.train(map(embed, plain)), with_it.train(loader)
        print(f"{epoch:5} {slow:9.3f} s {fast:9.3f} s {features.stats().misses - before:10}", flush=True)
    assert without.losses == with_it.losses, "a loss differs between the two"
    print(f"\nall {len(with_it.losses)} losses equal bit by bit\n\n{features.stats()}")
    features.close()

    features = CachedDataset(photos, folder / "features", map=embed)
    seconds = Head().train(features.loader(**order))
    print(f"\nsecond run, first epoch: {seconds:.3f} s, {features.stats().misses} computed")
    features.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep photos and features there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(options.cache_dir or Path(temporary), options)


if __name__ == "__main__":
    main()
