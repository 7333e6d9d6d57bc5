"""Images are decoded once and augmented anew in each epoch: `CachedDataset` under a `DataLoader`.

Decoding an image gives the same pixels each time, so it is cached. What is random comes after the cache, as
``transform=``. The images are scikit-learn's handwritten digits as JPEG files of 768 by 768 pixels, as from a
camera, which a sample is decoded from and made small.

The epochs run twice, in turns: with the cache and without. This script checks that all batches of the two are
equal bit by bit. With ``--cache-dir`` the samples are kept in a folder as well: a second run decodes none.
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

from torchcache2 import CachedDataset

LARGE, SMALL, SHIFT = 768, 64, 6  # pixels
Sample = tuple[Tensor, int]


class Digits(Dataset[Sample]):
    """JPEG files in memory that are decoded when they are asked for."""

    def __init__(self, count: int) -> None:
        digits = load_digits()
        self.files = [jpeg(image) for image in digits.images[:count]]
        self.labels = digits.target[:count].tolist()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image = Image.open(io.BytesIO(self.files[index])).resize((SMALL, SMALL), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)), self.labels[index]


class Augmented(Dataset[Sample]):
    """The same without a cache."""

    def __init__(self, source: Dataset[Sample]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return augment(self.source[index])


def jpeg(pixels: np.ndarray) -> bytes:
    large = Image.fromarray((pixels * 15).astype(np.uint8)).resize((LARGE, LARGE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "JPEG", quality=95)
    return file.getvalue()


def augment(sample: Sample) -> Sample:
    """Move an image to the side, up or down, and make it brighter or darker."""
    image, label = sample
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist()
    brightness = 0.5 + torch.rand(())
    return image.roll((down, right), (0, 1)) / 255 * brightness, label


def epoch(loader: DataLoader[Sample], number: int) -> tuple[Tensor, float]:
    """All images of an epoch, and its seconds."""
    torch.manual_seed(number)  # the order of the samples, and what the workers draw
    start = time.perf_counter()
    images = torch.cat([images for images, _ in loader])
    return images, time.perf_counter() - start


def save_plot(path: str, plain: list[float], cached: list[float]) -> bool:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for seconds, name, colour, shift in (
        (plain, "without", "#8a929c", -0.2),
        (cached, "with", "#c2570c", 0.2),
    ):
        places = [number + shift for number in range(1, len(seconds) + 1)]
        label = f"{name} the cache: {sum(seconds):.1f} s in all"
        bars = axes.bar(places, seconds, width=0.38, color=colour, label=label)
        if len(seconds) <= 10:
            axes.bar_label(bars, fmt="%.2f", padding=2, color=colour, fontsize=11)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=12)
    axes.set_xlabel("epoch", fontsize=12)
    axes.set_ylabel("seconds", fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="of each loader (default: %(default)s)")
    parser.add_argument("--memory", default="1GB", help="for samples (default: %(default)s)")
    parser.add_argument("--cache-dir", metavar="DIR", help="keep the samples there, for the next run")
    parser.add_argument("--plot", default="epochs_of_images.png", metavar="PATH", help="default: %(default)s")
    options = parser.parse_args()

    digits = Digits(options.items)
    print(f"{len(digits)} JPEG files of {LARGE} x {LARGE} pixels, {options.workers} workers", flush=True)
    cached = CachedDataset(digits, options.cache_dir, memory_size=options.memory, transform=augment)
    several = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loaders = [DataLoader(data, 64, shuffle=True, **several) for data in (Augmented(digits), cached)]
    seconds: tuple[list[float], list[float]] = [], []
    print("\nepoch     without        with    decoded", flush=True)
    for number in range(1, options.epochs + 1):
        before = cached.stats().misses
        (plain, slow), (images, fast) = (epoch(loader, number) for loader in loaders)
        assert torch.equal(images, plain), "an image that differs from what it is without the cache"
        for taken, times in zip((slow, fast), seconds, strict=True):
            times.append(taken)
        decoded = cached.stats().misses - before
        print(f"{number:5} {slow:9.2f} s {fast:9.2f} s {decoded:10}", flush=True)
    print("\nall batches equal bit by bit, each epoch augmented anew")
    print(f"\n{cached.stats()}")
    cached.close()
    if save_plot(options.plot, *seconds):
        print(f"\nplot: {options.plot}")


if __name__ == "__main__":
    main()
