"""Features on several ranks in step: no image is computed twice, and no folder is shared.

    torchrun --nproc-per-node 2 examples/collective_features.py

Each rank looks for the nearest neighbours of its own images in a gallery that all ranks use. The features of
an image come from the frozen backbone of ``linear_probe.py``, with ``distributed="collective"``:

- The gallery is the same on every rank. The ranks call the backbone with the same batches, and each of them
  computes a part of a batch and receives the rest.
- The other images are dealt out anew in each pass. From the second pass on, a rank receives the features that
  another rank has computed, and computes nothing.
- The shares have different sizes, so some ranks make fewer calls than others. Inside of `cache.join`, a rank
  that has come to its end goes on answering, until all ranks have come to theirs.

The ranks of one machine would find each other's features in the memory that they share. So that there is
something to see on one machine, each rank plays a machine of its own. ``--machines 1`` leaves them what they
are. Between real machines nothing of that is needed, only the option.

What is counted are images that were not found. To check that the features of an image do not depend on its
batch, a rank computes some images of its first batch once more; these are not counted.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from ddp_linear_probe import counts, of_all_ranks
from linear_probe import PATCH, TRAIN_ITEMS, Backbone, load_data
from torch import Tensor

TOLERANCE = 1e-4  # a batch of another size may be rounded in another way


@torch.no_grad()
def extract(backbone: Backbone, images: Tensor, batch_size: int) -> Tensor:
    """The features of this rank's images, while the other ranks extract theirs."""
    with backbone.cache_instance.join():
        return torch.cat([backbone(batch) for batch in images.split(batch_size)])


def share(indices: Tensor, rank: int, world: int) -> Tensor:
    """A rank's part of the indices: the second rank gets twice as many as the first, and so on."""
    start, end = (len(indices) * n * (n + 1) // (world * (world + 1)) for n in (rank, rank + 1))
    return indices[start:end]


def nearest(features: Tensor, gallery: Tensor) -> Tensor:
    """Which image of the gallery is most similar, for each image."""
    features, gallery = (part - gallery.mean(dim=0) for part in (features, gallery))
    return torch.cdist(features, gallery).argmin(dim=1)


def run(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    # Who shares memory is decided at the first call: ranks of one machine and one job.
    machine = rank * min(options.machines or world, world) // world
    os.environ["TORCHCACHE_JOB"] = f"{os.environ['MASTER_PORT']} machine {machine}"

    data, _ = load_data(options.items, 1, options.size)
    images, labels = data.tensors
    size = len(images) // 3  # of the gallery
    torch.manual_seed(0)
    backbone = Backbone(options.size, cached=True).eval().requires_grad_(False)
    backbone.torchcache_distributed = "collective"
    cache = backbone.cache_instance
    computed = torch.zeros(world)

    def extracted(name: str, mine: Tensor) -> Tensor:
        """The features of these images, when all ranks have theirs; says who has computed and received."""
        nonlocal computed
        before, start = cache.stats(), time.perf_counter()
        features = extract(backbone, mine, options.batch_size)
        seconds, after = time.perf_counter() - start, cache.stats()
        new = of_all_ranks(len(mine) - (after.hits - before.hits))  # whatever was not found was computed
        computed += new
        received = counts(of_all_ranks(after.received - before.received))
        say(f"{name:8} {seconds:8.3f} s   {counts(new):20} {received}")
        return features

    say(f"{len(images):,} images, {size:,} of them in the gallery; {world} ranks\n")
    say("pass           time   computed by rank     received by rank")
    gallery = extracted("gallery", images[:size])
    for epoch in range(1, options.passes + 1):
        order = torch.randperm(len(images) - size, generator=torch.Generator().manual_seed(epoch))
        mine = share(size + order, rank, world)
        features = extracted(f"pass {epoch}", images[mine])

    say(f"\n{computed.sum():,.0f} images computed, of {len(images):,}")
    right = (labels[nearest(features, gallery)] == labels[mine]).sum().item()
    accuracy = of_all_ranks(right).sum() / (len(images) - size)
    say(f"the nearest image of the gallery shows the same digit: {accuracy:.1%}")

    torch.manual_seed(0)
    plain = Backbone(options.size, cached=False).eval().requires_grad_(False)
    with torch.no_grad():
        expected = torch.cat([plain(images[:size]), plain(images[mine])])
    difference = (torch.cat([gallery, features]) - expected).abs().max().item()
    difference = of_all_ranks(difference).max().item()
    assert difference < TOLERANCE, f"features differ by {difference} from those without the cache"
    say(f"features without the cache are the same on every rank (largest difference {difference:.0e})")
    say(f"\nrank 0:\n{cache.stats()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=3, help="at least 1 (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--items", type=int, default=TRAIN_ITEMS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--machines",
        type=int,
        default=0,
        metavar="N",
        help="that the ranks play; 1: those of a machine share its memory (default: one for each rank)",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=64,
        metavar="N",
        help="pixels of a side; fewer are faster (default: %(default)s)",
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "it is for several ranks: run it as torchrun --nproc-per-node 2 examples/collective_features.py"
        )
    # A rank's first batch is checked for features that depend on the rest of the batch, if it has two images.
    world = int(os.environ["WORLD_SIZE"])
    least = 3 * world * (world + 1)
    if options.passes < 1 or options.batch_size < 2 or not least <= options.items <= TRAIN_ITEMS:
        parser.error(
            "expected at least 1 pass, batches of at least 2 images, and from "
            f"{least} to {TRAIN_ITEMS} images for {world} ranks"
        )
    if options.machines < 0:
        parser.error("expected no negative number of machines")
    if options.size < PATCH or options.size % PATCH:
        parser.error(f"expected a size that is a multiple of {PATCH} pixels")

    dist.init_process_group("gloo")
    run(options)
    dist.barrier()  # or torch before 2.8 may hang below, if a thread of its group still frees tensors
    dist.destroy_process_group()  # when no cache is left that uses it


if __name__ == "__main__":
    main()
