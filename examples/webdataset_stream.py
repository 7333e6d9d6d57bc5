"""Images in tars of WebDataset are decoded once: `CachedStream` between the tars and a `DataLoader`.

The tars hold scikit-learn's handwritten digits as JPEG files of 768 by 768 pixels, as from a camera.
WebDataset shuffles the tars and divides them between the workers, as always. `CachedStream` gets its raw
samples, and decodes those that it does not have. The name of a file in its tar is the key.

The epochs run twice, in turns: with the cache and without. This script checks that all images of the two are
equal bit by bit. With ``--cache-dir`` the decoded images stay in a folder: a second run decodes none.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader

from torchcache2 import CachedStream

LARGE, SMALL, TARS = 768, 64, 8  # pixels, and files


def write_tars(folder: Path, count: int) -> list[str]:
    """Tars of images and their labels, which have the names that are the keys."""
    digits = load_digits()
    pattern = str(folder / "digits-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=-(-count // TARS), verbose=0) as tars:
        for index in range(count):
            pixels = (digits.images[index] * 15).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((LARGE, LARGE), Image.Resampling.BICUBIC).save(file, "JPEG")
            label = int(digits.target[index])
            tars.write({"__key__": f"{index:06}", "jpg": file.getvalue(), "cls": label})
    return sorted(map(str, folder.glob("*.tar")))


def decode(raw: dict[str, Any]) -> dict[str, Any]:
    """The sample of what a tar has of it."""
    image = Image.open(io.BytesIO(raw["jpg"])).resize((SMALL, SMALL), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.array(image))
    return {"name": raw["__key__"], "image": pixels, "label": int(raw["cls"])}


def epoch(loader: Iterable[dict[str, Any]]) -> tuple[dict[str, Tensor], float]:
    """All images of an epoch by name, and its seconds."""
    start = time.perf_counter()
    images = {}
    for batch in loader:
        images.update(zip(batch["name"], batch["image"], strict=True))
    return images, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help=f"up to {TARS} (default: %(default)s)")
    parser.add_argument("--cache-dir", metavar="DIR", help="keep decoded images there, for the next run")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        tars = write_tars(Path(folder), options.items)
        print(f"{options.items} JPEG files of {LARGE} x {LARGE} pixels in {len(tars)} tars", flush=True)
        source = webdataset.WebDataset(tars, shardshuffle=len(tars))
        stream = CachedStream(source, key="__key__", load=decode, name="digits", cache_dir=options.cache_dir)
        several = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
        loaders = [DataLoader(data, batch_size=64, **several) for data in (source.map(decode), stream)]
        print("\nepoch     without        with    decoded", flush=True)
        for number in range(1, options.epochs + 1):
            before = stream.stats().misses
            (plain, slow), (images, fast) = map(epoch, loaders)
            assert len(images) == options.items, "a sample that is missing"
            assert plain.keys() == images.keys(), "other samples than without the cache"
            assert all(torch.equal(images[name], plain[name]) for name in plain), "an image that differs"
            decoded = stream.stats().misses - before
            print(f"{number:5} {slow:9.2f} s {fast:9.2f} s {decoded:10}", flush=True)
        print(f"\nall images equal bit by bit\n\n{stream.stats()}")
        stream.close()


if __name__ == "__main__":
    main()
