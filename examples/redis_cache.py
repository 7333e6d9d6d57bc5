"""Images are decoded once for all machines: a `CacheLoader` in a dataset, under a `DataLoader`.

The dataset asks the loader for a decoded image by its number. What is random comes after that, in
``__getitem__``, so that each epoch is augmented anew. Code that was written for Bagua's ``CacheLoader``
looks the same. The images are scikit-learn's handwritten digits as JPEG files of 768 by 768 pixels, as from a
camera, which a sample is decoded from and made small.

Without ``--hosts`` this starts a Redis server, which ends with the script. With ``--hosts
redis://:password@host:6379`` the images stay there: a second run, also on another machine, decodes none. The
epochs run twice, in turns: with the cache and without. This script checks that all batches of the two are
equal bit by bit.
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcache2 import CacheLoader

LARGE, SMALL, SHIFT = 768, 64, 6  # pixels
Sample = tuple[Tensor, int]


class Digits(Dataset[Sample]):
    """JPEG files in memory, which are decoded if the loader does not have their images."""

    def __init__(self, count: int, loader: CacheLoader | None = None) -> None:
        digits = load_digits()
        self.files = [jpeg(image) for image in digits.images[:count]]
        self.labels = digits.target[:count].tolist()
        self.loader = loader

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image = self.decode(index) if self.loader is None else self.loader.get(index, self.decode)
        return augment(image), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Samples of a batch, in one round trip to the server: ``__getitem__`` alone makes one for each."""
        if self.loader is None:
            return [self[index] for index in indices]
        images = self.loader.get_many(indices, self.decode)
        return [(augment(image), self.labels[index]) for index, image in zip(indices, images, strict=True)]

    def decode(self, index: int) -> Tensor:
        """Give what is the same each time, and is cached."""
        image = Image.open(io.BytesIO(self.files[index])).resize((SMALL, SMALL), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image))


def jpeg(pixels: np.ndarray) -> bytes:
    large = Image.fromarray((pixels * 15).astype(np.uint8)).resize((LARGE, LARGE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "JPEG", quality=95)
    return file.getvalue()


def augment(image: Tensor) -> Tensor:
    """Move an image to the side, up or down, and make it brighter or darker."""
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist()
    brightness = 0.5 + torch.rand(())
    return image.roll((down, right), (0, 1)) / 255 * brightness


def epoch(batches: DataLoader[Sample], number: int) -> tuple[Tensor, float]:
    """All images of an epoch, and its seconds."""
    torch.manual_seed(number)  # the order of the samples, and what the workers draw
    start = time.perf_counter()
    images = torch.cat([images for images, _ in batches])
    return images, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader (default: %(default)s)")
    parser.add_argument("--hosts", nargs="+", metavar="URL", help="Redis servers; default: one is started")
    options = parser.parse_args()

    with CacheLoader("redis", key_prefix="digits", hosts=options.hosts, capacity_per_node="1GB") as loader:
        print(f"{options.items} JPEG files of {LARGE} x {LARGE} pixels, {options.workers} workers")
        print(f"{loader.num_keys()} images are on the server already", flush=True)
        several = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
        plain, cached = (
            DataLoader(Digits(options.items, which), 64, shuffle=True, **several) for which in (None, loader)
        )
        print("\nepoch     without        with    decoded", flush=True)
        for number in range(1, options.epochs + 1):
            before = loader.stats().misses
            (wanted, slow), (images, fast) = (epoch(batches, number) for batches in (plain, cached))
            assert torch.equal(images, wanted), "an image that differs from what it is without the cache"
            decoded = loader.stats().misses - before
            print(f"{number:5} {slow:9.2f} s {fast:9.2f} s {decoded:10}", flush=True)
        print("\nall batches equal bit by bit, each epoch augmented anew")
        print(f"{loader.num_keys()} images are on the server now\n\n{loader.stats()}")


if __name__ == "__main__":
    main()
