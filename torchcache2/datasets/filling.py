"""`fill`: has the samples of a dataset loaded before they are needed, each by one rank."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchcache2.core.errors import NotCachedError, OptionError
from torchcache2.core.keys import Positions, int_keys
from torchcache2.core.logs import logger
from torchcache2.core.process import place
from torchcache2.core.sizes import size_text
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.folders import kept_in, with_samples
from torchcache2.engine.progress import Progress, WarmupStats
from torchcache2.files.layout import HEAD


def fill(dataset: Any, fetcher: Fetcher, mine: Positions, num_workers: int, batch_size: int) -> WarmupStats:
    """Load the samples of this rank, at indices `mine`, that are not there; see `CachedDataset.warmup`."""
    for option, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if type(value) is not int or value < least:
            raise OptionError(f"{option}={value!r}: expected an int of at least {least}")
    where, total, levels = place(), len(dataset), fetcher.levels
    absent = mine[~levels.has(int_keys(levels.namespace, mine))].tolist()
    there = len(mine) - len(absent)
    if there:
        logger.info("%s: %d of %d samples are there already", fetcher.store.name, there, len(mine))
    loader: DataLoader[Any] = DataLoader(
        _Filling(dataset),
        batch_size,
        sampler=absent,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # the default one must not move
    )
    counts = _Counts()
    left = len(absent)
    known = left if where.world_size == 1 else total
    progress = Progress(
        fetcher.store.name,
        counts,
        levels,
        left,
        known,
        is_shown=where.rank == 0 and left > 0,
        advice="What does not fit is loaded in each epoch: raise the budgets of memory or disk",
    )
    nbytes = 0
    try:
        for found, loaded, size in loader:
            counts.hits += found
            counts.misses += loaded
            nbytes += size
            progress.update(nbytes)
    finally:
        progress.close()
    levels.flush()
    if where.rank == 0 and (line := _outcome(fetcher, total)):
        print(f"{fetcher.store.name}: {line}", file=sys.stderr)
    done = progress.stats()
    return dataclasses.replace(done, found=done.found + there, bytes=nbytes)


def _outcome(fetcher: Fetcher, total: int) -> str | None:
    """Whether a folder that stays has all samples now, and how they are served; None if there is none."""
    levels, directory = fetcher.levels, fetcher.levels.directory
    folder, bucket = levels.settings.persistent_cache_dir, levels.settings.bucket
    if folder is None or directory is None:
        return None
    path = str(folder) if bucket is None else bucket.url
    there = total - len(levels.absent(total))
    try:
        kept = with_samples(directory, kept_in(directory))
        contents = directory.contents(levels.namespace.hex())
    except OSError:
        return None
    mine = next((one for one in kept if one.namespace == contents.namespace), None)
    if there == 0 or mine is None:
        return f"{path} has none of {total:,} samples"
    size = sum(info.size for info in (*contents.segments, *contents.others))
    if bucket is not None:
        size += sum(tier.stats().bytes for tier in levels.tiers if tier.is_lasting and tier.directory is None)
        there_too = {info.name.removesuffix(HEAD) for info in contents.heads}
        left = sum(info.name not in there_too for info in contents.segments)
        if left:
            return f"{left:,} of {len(contents.segments):,} files of {directory.path} are not in {path} yet"
    share = f"all {total:,} samples" if there == total else f"{there:,} of {total:,} samples"
    call = mine.call(path, [one for one in kept if one is not mine], partial=there < total)
    return f"{path} has {share} ({size_text(size)}). Without the dataset, {call} serves them"


class _Counts:
    hits = misses = 0


class _Filling(Dataset[Any]):
    """Loads samples in the process that asks for them, which gets numbers only: see `Fetcher.fill`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> tuple[int, int, int]:
        fetcher: Fetcher | None = self._dataset._fetcher
        if fetcher is None:
            raise NotCachedError("caching is turned off in a worker, so nothing would be kept")
        return fetcher.fill(indices)


def _as_it_is(batch: Any) -> Any:
    return batch
