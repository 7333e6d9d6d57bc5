"""Linear probe on several ranks: each image goes through the frozen backbone once in the whole job.

    torchrun --nproc-per-node 2 examples/ddp_linear_probe.py

This is the training of ``linear_probe.py`` under `DistributedDataParallel`, on CPUs. A `DistributedSampler`
gives each rank another share of the images in each epoch. With a cache of its own, a rank would find only
those that it has met before. But the ranks of a machine share what their caches hold, so from the second
epoch on every image is found, whichever rank computed it. Nothing in the loop says so: ``@torchcache`` on the
class of the backbone is all, as the launcher says that there are several ranks.

The backbone stays outside of the model that `DistributedDataParallel` wraps: it is frozen, so there are no
gradients to exchange. All ranks give it the same weights by the same seed. With other weights a rank would
compute other features, and find none of the others'.

With ``--warmup``, the ranks compute all images before the first epoch, each its share. What is counted are
images that were not found. In its first batch, a rank also computes some images once more, to check that the
features of an image do not depend on its batch; these are not counted.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from linear_probe import PATCH, TRAIN_ITEMS, WIDTH, Backbone, load_data
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def of_all_ranks(value: float) -> Tensor:
    """The value of each rank, by rank."""
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return torch.cat(values)


def train_epoch(
    backbone: Backbone,
    head: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
) -> float:
    """The mean loss of this rank's batches."""
    losses = []
    for images, labels in loader:
        with torch.no_grad():
            features = backbone(images)
        loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()  # the ranks exchange the gradients of the head here
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def counts(values: Tensor) -> str:
    return " + ".join(f"{value:,.0f}" for value in values.tolist())


def train(options: argparse.Namespace) -> None:
    rank, world, batch = dist.get_rank(), dist.get_world_size(), options.batch_size

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    # As many images as fill whole batches on all ranks: the sampler would otherwise repeat some.
    train_set, test_set = load_data(options.items, batch * world, options.size)
    torch.manual_seed(0)
    backbone = Backbone(options.size, cached=True).eval().requires_grad_(False)
    cache = backbone.cache_instance
    head = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None, affine=False), nn.Linear(WIDTH, 10))
    model = DistributedDataParallel(head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch, sampler=sampler)
    say(f"{len(train_set):,} images, {world} ranks, batches of {batch} on each")

    computed = torch.zeros(world)
    if options.warmup:
        warmed = cache.warmup(train_set, batch_size=batch)
        dist.barrier()  # what a rank has not computed yet would be waited for, too
        computed += of_all_ranks(warmed.computed)
        say(f"warmup: {warmed.seconds:.3f} s, images computed by each rank: {counts(computed)}")

    say("epoch  mean loss        time   images computed by each rank")
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)  # shuffles anew, and so gives the ranks other halves
        start, hits = time.perf_counter(), cache.stats().hits
        loss = of_all_ranks(train_epoch(backbone, model, loader, optimizer)).mean().item()
        seconds = time.perf_counter() - start
        # Whatever was not found was computed.
        new = of_all_ranks(len(sampler) - (cache.stats().hits - hits))
        computed += new
        say(f"{epoch:5} {loss:10.4f} {seconds:9.3f} s   {counts(new)}")

    stats = cache.stats()
    total = f"{computed.sum():,.0f} images computed, of {len(train_set):,}, in {options.epochs} epochs"
    say(f"\nbackbone: {total}")
    say(f"memory of all ranks: {stats.memory_rows:,} rows, {stats.memory_bytes / 1e6:.1f} MB")
    images, labels = (part[rank::world] for part in test_set.tensors)
    with torch.no_grad():
        right = (head.eval()(backbone(images)).argmax(dim=1) == labels).sum().item()
    accuracy = of_all_ranks(right).sum() / len(test_set)
    say(f"final loss {loss:.4f}, test accuracy {accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="at least 2 (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="of a rank (default: %(default)s)"
    )
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
    parser.add_argument("--warmup", action="store_true", help="compute all images before the first epoch")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "it is for several ranks: run it as torchrun --nproc-per-node 2 examples/ddp_linear_probe.py"
        )
    world = int(os.environ["WORLD_SIZE"])
    if options.epochs < 2 or not 2 <= options.batch_size <= options.items // world <= TRAIN_ITEMS // world:
        parser.error(
            "expected at least 2 epochs, batches of at least 2 images, and items for a batch of each of the "
            f"{world} ranks, at most {TRAIN_ITEMS}"
        )
    if options.size < PATCH or options.size % PATCH:
        parser.error(f"expected a size that is a multiple of {PATCH} pixels")

    dist.init_process_group("gloo")
    train(options)
    dist.barrier()  # or torch before 2.8 may hang below, if a thread of its group still frees tensors
    dist.destroy_process_group()  # when no model is left that uses it


if __name__ == "__main__":
    main()
