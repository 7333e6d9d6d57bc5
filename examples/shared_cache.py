"""Images are decoded once, whichever worker does it: `SharedCache` in a dataset with a `DataLoader`.

The images are scikit-learn's handwritten digits as JPEG files of 768 by 768 pixels, as from a camera, which a
sample is decoded from and made small. In the first epoch, the workers decode all images; in the second one,
only those that have no slot, for which ``--gib`` was too little. This script checks that both epochs have the
same images, bit by bit.
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

from torchcache2 import SharedCache

LARGE, SMALL = 768, 64  # pixels


class Digits(Dataset[tuple[Tensor, int]]):
    """JPEG files in memory, and the samples that were decoded so far."""

    def __init__(self, count: int, gib: float) -> None:
        digits = load_digits()
        self.files = [jpeg(image) for image in digits.images[:count]]
        self.labels = digits.target[:count].tolist()
        self.cache = SharedCache(gib, count, (SMALL, SMALL), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.cache.get_slot(index)
        if image is None:
            image = decode(self.files[index])
            self.cache.set_slot(index, image)
        return image, self.labels[index]  # random augmentation of the image would come here


def jpeg(pixels: np.ndarray) -> bytes:
    large = Image.fromarray((pixels * 15).astype(np.uint8)).resize((LARGE, LARGE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "JPEG", quality=95)
    return file.getvalue()


def decode(file: bytes) -> Tensor:
    image = Image.open(io.BytesIO(file)).resize((SMALL, SMALL), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="of the loader (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=1.0, help="memory for samples (default: %(default)s)")
    options = parser.parse_args()

    data = Digits(options.items, options.gib)
    print(f"{len(data)} images, {len(data.cache)} of them with a slot; {options.workers} workers")
    loader = DataLoader(data, 64, num_workers=options.workers, persistent_workers=options.workers > 0)
    first: Tensor | None = None
    for epoch in range(1, options.epochs + 1):
        start, before = time.perf_counter(), int((data.cache.aux_array == 1).sum())
        images = torch.cat([images for images, _ in loader])
        seconds = time.perf_counter() - start
        first = images if first is None else first
        assert torch.equal(images, first), "an image that another epoch did not have"
        print(f"epoch {epoch}: {before} found, {len(images) - before} decoded, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
