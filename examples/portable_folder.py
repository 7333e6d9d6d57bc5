"""A dataset is decoded once, then served without its source: from an unpacked tar file, and from a bucket.

The images are scikit-learn's handwritten digits as JPEG files of 512 by 512 pixels, as from a camera, which
a sample is decoded from and made small. Decoding them fills a folder, which becomes a tar file. That is
unpacked elsewhere, and served in a process that has neither the files nor the code of the dataset. Then the
folder goes to a bucket of a local S3 server, and is served from there. Each time all samples are compared
with what the dataset gives, bit by bit.

With ``--url s3://bucket/folder`` a bucket of yours is used instead of the local server. That one is moto's:
``pip install "moto[server]" "torchcache2[s3]"``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcache2 import CachedDataset

LARGE, SMALL = 512, 64  # pixels
Sample = tuple[Tensor, int]


class Digits(Dataset[Sample]):
    """JPEG files in memory, which are decoded and made small."""

    def __init__(self, count: int) -> None:
        digits = load_digits()
        self.files = [jpeg(image) for image in digits.images[:count]]
        self.labels = digits.target[:count].tolist()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image = Image.open(io.BytesIO(self.files[index])).resize((SMALL, SMALL), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)), self.labels[index]


def jpeg(pixels: np.ndarray) -> bytes:
    large = Image.fromarray((pixels * 15).astype(np.uint8)).resize((LARGE, LARGE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "JPEG", quality=95)
    return file.getvalue()


def epoch(dataset: Dataset[Sample], workers: int) -> tuple[str, float]:
    """A digest of all samples in the order of an epoch, and its seconds."""
    torch.manual_seed(1)  # the order
    start, found = time.perf_counter(), sha256()
    for images, labels in DataLoader(dataset, 64, shuffle=True, num_workers=workers):
        found.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return found.hexdigest(), time.perf_counter() - start


def serve(place: str, workers: int, **options: Any) -> None:
    """What another machine does: it knows the place only."""
    with contextlib.closing(CachedDataset(None, place, **options)) as samples:
        for number in (1, 2):
            digest, seconds = epoch(samples, workers)
            print(f"  epoch {number}: {len(samples)} samples in {seconds:.2f} s", flush=True)
        print(digest)


def served(place: str, workers: int, options: dict[str, Any]) -> str:
    """Serve a place in a process of its own; the digest of an epoch."""
    command = [sys.executable, __file__, "--serve", place, "--workers", str(workers)]
    # Secrets are given on stdin: everybody may read the arguments of a process.
    child = subprocess.run(command, input=json.dumps(options), stdout=subprocess.PIPE, text=True, check=True)
    *lines, digest = child.stdout.splitlines()
    print("\n".join(lines), flush=True)
    return digest


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, Any]]]:
    """A local S3 server: the URL of a folder in a bucket, and what fsspec needs to reach it."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise SystemExit(f'pip install "moto[server]" "torchcache2[s3]" ({error})') from None
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would tell of each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": "any", "secret": "any", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("digits")
        yield "s3://digits/scans", options
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader (default: %(default)s)")
    parser.add_argument("--url", help="a folder in a bucket of yours; default: a local server is started")
    parser.add_argument("--serve", metavar="PLACE", help="only serve a folder or URL")
    given = parser.parse_args()
    if given.serve is not None:
        options = {} if sys.stdin.isatty() else json.loads(sys.stdin.read() or "{}")
        serve(given.serve, given.workers, **({"storage_options": options} if options else {}))
        return

    source = Digits(given.items)
    wanted, seconds = epoch(source, given.workers)
    print(f"{given.items} JPEG files of {LARGE} x {LARGE} pixels: an epoch of decoding takes {seconds:.2f} s")
    with tempfile.TemporaryDirectory() as top:
        folder, elsewhere, archive = Path(top, "scans"), Path(top, "elsewhere"), Path(top, "scans.tar")
        with contextlib.closing(CachedDataset(source, folder, name="scans")) as samples:
            samples.warmup(num_workers=given.workers)
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, ".")
        with tarfile.open(archive) as tar:
            tar.extractall(elsewhere, filter="data")
        files = sum(len(names) for _, _, names in os.walk(elsewhere))
        print(f"\nthe folder as a tar file: {archive.stat().st_size / 1e6:.1f} MB in {files} files")
        assert served(str(elsewhere), given.workers, {}) == wanted, "samples that differ"

        place = contextlib.nullcontext((given.url, {})) if given.url else s3_server()
        with place as (url, options):
            start = time.perf_counter()
            with contextlib.closing(
                CachedDataset(source, url, name="scans", local_dir=folder, storage_options=options)
            ) as samples:
                samples.warmup(
                    num_workers=given.workers
                )  # the folder has all: it is uploaded, and nothing decoded
                assert samples.stats().misses == 0
            print(f"\nthe same folder in a bucket, uploaded in {time.perf_counter() - start:.2f} s")
            assert served(url, given.workers, options) == wanted, "samples that differ"
    print("\nall samples equal bit by bit, from the tar file and from the bucket")


if __name__ == "__main__":
    main()
