"""An array of Zarr comes to the ranks of a job while they train: `LazyShardDataset`.

    torchrun --nproc-per-node 2 examples/lazy_shards.py

The images are scikit-learn's handwritten digits, 64 by 64 pixels large, as a compressed Zarr array. Such an
array is in chunks, here of 32 images: to read one image, Zarr reads and decodes all 32. So a shuffled epoch
decodes the whole array 32 times, and on a shared file system also fetches it 32 times.

Each rank has a shard, and the first epoch reads its images one by one, as before. Later epochs find them in
memory. With ``--mode node``, the ranks of a machine exchange their images after each epoch, and still find
all of them, because they share the memory. With ``--memory 1KB`` nothing fits: every epoch is as the first.

This script checks that in each epoch the ranks together have every image once, bit by bit as it is in the
array.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zarr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from torchcache2 import LazyShardDataset

SIZE, CHUNK = 64, 32  # pixels of a side, and images of a chunk


class Digits(Dataset[tuple[Tensor, int, int]]):
    """Images of a Zarr array, their labels, and their places in the array."""

    def __init__(self, folder: str, labels: list[int]) -> None:
        self.images = zarr.open_array(folder, mode="r")
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return torch.from_numpy(self.images[index]), self.labels[index], index


def write(folder: str, images: np.ndarray) -> None:
    shape = (len(images), SIZE, SIZE)
    array = zarr.open_array(folder, mode="w", shape=shape, chunks=(CHUNK, SIZE, SIZE), dtype="uint8")
    array[:] = np.kron(images * 15, np.ones((SIZE // 8, SIZE // 8))).astype(np.uint8)


def of_all_ranks(values: list[float]) -> np.ndarray:
    """The values of each rank, ``(ranks, n)``."""
    mine = torch.tensor(values, dtype=torch.float64)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).numpy()


def train(options: argparse.Namespace, folder: str) -> None:
    rank, digits = dist.get_rank(), load_digits()
    if rank == 0:
        write(folder, digits.images[: options.items])
    dist.barrier()
    torch.manual_seed(0)
    data = LazyShardDataset(
        Digits(folder, digits.target[: options.items].tolist()),
        shuffle=True,
        memory_size=options.memory,
        mode=options.mode,
        even="drop",  # DistributedDataParallel needs equally many batches
    )
    loader = DataLoader(data, 32, num_workers=options.workers, persistent_workers=options.workers > 0)
    model = DistributedDataParallel(nn.Linear(SIZE * SIZE, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    array = zarr.open_array(folder, mode="r")[:]
    shares = " + ".join(f"{count:.0f}" for count in of_all_ranks([len(data)])[:, 0])
    if rank == 0:
        print(f"{options.items} images in chunks of {CHUNK}; the ranks have {shares}", flush=True)
    for epoch in range(options.epochs):
        data.set_epoch(epoch)
        start, before, losses, seen = time.perf_counter(), data.stats().misses, [], []
        for images, labels, places in loader:
            loss = F.cross_entropy(model(images.flatten(1) / 255), labels)
            optimizer.zero_grad()
            loss.backward()  # the ranks exchange their gradients here
            optimizer.step()
            losses.append(loss.item())
            assert np.array_equal(images.numpy(), array[places.numpy()]), "not the image of the array"
            seen += places.tolist()
        seconds, read = time.perf_counter() - start, data.stats().misses - before
        found = of_all_ranks([seconds, read, float(np.mean(losses))])
        everything = of_all_ranks(list(map(float, seen))).ravel()
        assert len(set(everything)) == len(everything) == len(data) * dist.get_world_size()
        if rank == 0:
            counts = " + ".join(f"{count:.0f}" for count in found[:, 1])
            text = f"loss {found[:, 2].mean():.3f}, images read: {counts}, {found[:, 0].max():.2f} s"
            print(f"epoch {epoch + 1}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--items", type=int, default=1797, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="of each rank (default: %(default)s)")
    parser.add_argument("--memory", default="500MB", help="for samples (default: %(default)s)")
    parser.add_argument("--mode", choices=["rank", "node"], default="rank", help="default: %(default)s")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run it as torchrun --nproc-per-node 2 examples/lazy_shards.py")

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as mine:
        folders = [os.path.join(mine, "digits.zarr")]
        dist.broadcast_object_list(folders)  # the one of rank 0
        train(options, folders[0])
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
