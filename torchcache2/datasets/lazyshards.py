"""`LazyShardDataset`: one rank's part of a dataset, cached when its samples are first asked for."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Positions
from torchcache2.core.logs import logger
from torchcache2.core.sizes import Size
from torchcache2.datasets.dataset import CachedDataset
from torchcache2.datasets.options import aliased, check_dataset
from torchcache2.datasets.shardoptions import (
    Bound,
    check_names,
    check_options,
    place_of,
    samples_of,
    sizes_of,
    together_of,
)
from torchcache2.datasets.shards import Shard
from torchcache2.datasets.wrapper import own_batches
from torchcache2.engine.progress import WarmupStats


class LazyShardDataset(Dataset[Any]):
    """One rank's shard of a dataset, each sample of which is loaded once.

    All ranks together have every sample once in each epoch. A rank asks for its own samples only, so that the
    shard comes to the rank's machine while the first epoch runs, and is found there later. Use no
    `DistributedSampler`: the dataset is divided already.

    Parameters
    ----------
    dataset : Dataset
        All samples. Any object with ``__getitem__`` for ints and ``__len__``, such as an array of Zarr.
    path : path, optional
        A folder that keeps samples for later runs, as of `CachedDataset`. An alias is ``disk_cache_path``.
    shuffle : bool
        Whether the order within the shard changes by epoch; else it is ascending.
    memory_size, disk_size : int, str or float, optional
        How much memory and disk samples may take on this machine, for all of its ranks: bytes, a text like
        ``"4GB"``, or a share of what is free. 0: none. ``memory_size=None``: 0.5, but none in front of a
        server. ``disk_size=None``: 0.8 with a `path`, else 0.
    overflow : float, optional
        The shard has at most ``1 + overflow`` times as many samples as can be cached, judged by the mean size
        of 8 samples. One warning says how many are left out. None: none are.
    min_elements : int
        It is an error if a rank's shard has fewer samples than this.
    rank, num_replicas : int, optional
        The number of this process, and how many there are. None: as `torch.distributed` says, or else the
        variables RANK and WORLD_SIZE.
    seed : int
        Which samples make a shard, and their order.
    mode : {"rank", "node", "disk"}
        Each rank has a shard which is the same in all epochs; each machine has one, which is dealt to its
        ranks anew in each epoch; as before, but only the disk keeps samples.
    even : {None, "drop", "repeat"}
        Make all ranks' shards equally long, as `DistributedDataParallel` needs: leave out fewer samples than
        there are ranks, or give some ranks one of theirs twice. None: lengths differ by one at most.
    disk_cache_path : path, optional
        The same as `path`.
    **options
        Those of `CachedDataset`: ``name``, ``version``, ``transform``, ``policy``, ``compression``,
        ``allow_random``, ``verify``.

    Raises
    ------
    OptionError
        If an option cannot have its value; if the shard has fewer than `min_elements` samples; for modes
        ``"node"`` and ``"disk"`` also if it is not known which ranks are on one machine.

    Notes
    -----
    Call `set_epoch` before each epoch, as with `DistributedSampler`. Shards depend on the length of the
    dataset, the number of ranks and the seed only, and are the same in all versions of this library.

    Examples
    --------
    >>> from torchcache2 import LazyShardDataset
    >>> squares = [index**2 for index in range(10)]
    >>> first, second = (
    ...     LazyShardDataset(squares, memory_size="10MB", rank=rank, num_replicas=2) for rank in range(2)
    ... )
    >>> first.indices.tolist(), list(first)
    ([0, 1, 3, 8, 9], [0, 1, 9, 64, 81])
    >>> list(second)
    [4, 16, 25, 36, 49]
    """

    __module__ = "torchcache2"

    def __init__(
        self,
        dataset: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        shuffle: bool = False,
        memory_size: Size | None = None,
        disk_size: Size | None = None,
        overflow: float | None = None,
        min_elements: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        seed: int = 13,
        mode: Literal["rank", "node", "disk"] = "rank",
        even: Literal["drop", "repeat"] | None = None,
        disk_cache_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_dataset(dataset)
        path, _ = aliased(path, None, {"disk_cache_path": disk_cache_path})
        check_names(options)
        check_options(
            {"mode": mode, "even": even, "seed": seed, "overflow": overflow, "min_elements": min_elements}
        )
        is_served = options.get("backend", "local") != "local"
        memory_size, disk_size = sizes_of(mode, path, memory_size, disk_size, is_served=is_served)
        if is_served and overflow is not None:
            raise OptionError(
                f"overflow={overflow!r} and backend='redis': it is not known how much fits on a server"
            )
        mine, count = place_of(rank, num_replicas), samples_of(dataset)
        together, ranks = together_of(mode, mine), mine.world_size
        bound = Bound(dataset, path, memory_size, disk_size, overflow=overflow, even=even, mine=mine)
        shard = Shard(count, *mine, together=together, seed=seed, shuffle=shuffle, even=even, most=bound.most)
        if shard.least < min_elements:
            raise OptionError(
                f"min_elements={min_elements}: of {count:,} samples, not every one of {ranks} ranks has more "
                f"than {shard.least:,}{bound}"
            )
        if shard.left_out:
            logger.warning(
                "LazyShardDataset: %s leaves out %s of %s samples%s",
                f"rank {mine.rank}" if together == 1 else "this machine",
                f"{shard.left_out:,}",
                f"{shard.left_out + len(shard.samples):,}",
                bound,
            )
        if mine.rank == 0 and (not shard.is_even or (shard.left_out and bound.is_share)):
            logger.warning(
                "LazyShardDataset: some of %d ranks have more samples than others, and "
                "DistributedDataParallel then waits for ever: pass even='drop' or even='repeat'",
                ranks,
            )
        self._shard = shard
        self._cached = CachedDataset(
            dataset, path, memory_cache_size=memory_size, disk_cache_size=disk_size, **options
        )
        self._epoch = _shared(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._order = 0, shard.order(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _shared(self._epoch)  # it is already, for a worker; a copy has an epoch of its own

    def __getattr__(self, name: str) -> Any:
        """What else a `CachedDataset` of all samples has, and the dataset itself."""
        if name.startswith("_"):  # also while a pickle is read, when there is no cache yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._cached, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._cached, name, value)  # which refuses what would not reach the samples

    @property
    def indices(self) -> Positions:
        """Which samples of the dataset this rank has in this epoch, int64 ``(len(self),)``."""
        return self._now().copy()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0 on, for this process and its workers, persistent ones too.

        Call it between epochs: samples that are being loaded meanwhile may be of either.
        """
        check_options({"epoch": epoch})
        self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        """Samples of this rank, in each epoch."""
        return len(self._shard)

    def __getitem__(self, index: int) -> Any:
        """The sample at a place in this rank's shard."""
        return self._cached[self._places([index])[0]]

    @own_batches
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at n places in this rank's shard, which is what a `DataLoader` asks for."""
        return self._cached.__getitems__(self._places(indices))

    def _places(self, indices: Sequence[int]) -> list[int]:
        """Where in the dataset the samples at these places in the shard are."""
        order = self._now()
        try:
            return [int(order[operator.index(index)]) for index in indices]
        except IndexError:
            raise IndexError(f"{indices} are not all in a shard of {len(order):,} samples") from None

    def warmup(self, num_workers: int = 0, batch_size: int = 64) -> WarmupStats:
        """Load the samples of this rank, in this epoch, that are not there yet, without returning them.

        The parameters and what is returned are those of `CachedDataset.warmup`.
        """
        return self._cached._fill(np.unique(self._now()), num_workers, batch_size)

    def missing(self) -> Positions:
        """The places in this rank's shard whose samples are not cached now, ascending, int64 ``(k,)``."""
        return np.flatnonzero(np.isin(self._now(), self._cached.missing()))

    def _now(self) -> Positions:
        epoch, (known, order) = int(self._epoch), self._order
        if epoch != known:
            order = self._shard.order(epoch)
            self._order = epoch, order
        return order


def _shared(epoch: Tensor) -> Tensor:
    """The same tensor, in memory that workers share."""
    try:
        epoch.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        logger.warning("set_epoch will not reach persistent workers, as memory cannot be shared: %s", error)
    return epoch
