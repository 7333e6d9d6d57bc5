"""`LazyShardDataset`: one rank's part of a dataset, cached at first use.

`Shard` computes which samples a rank has in an epoch, without reading or communicating. The seed determines
an order of the samples, which are dealt to the ranks like cards: rank r of w gets those at positions r, r +
w, r + 2w and so on. Groups of ranks can deal theirs anew in each epoch. So all ranks agree without
communication.

**The order never changes.** It is a stable sort of raw numbers of Philox, a generator whose numbers depend
only on its key and counter. NumPy guarantees these in all versions, unlike its ``permutation``.
"""

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
from torchcache2.core.keys import Array, Positions
from torchcache2.core.logs import logger
from torchcache2.core.process import Place, place, ranks_of_each
from torchcache2.core.sizes import Size, parse_size, size_text
from torchcache2.datasets.cached import CachedDataset, own_batches
from torchcache2.datasets.identity import length_of
from torchcache2.datasets.options import (
    aliased,
    check,
    check_dataset,
    is_count,
    level_settings,
)
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.samples import Samples
from torchcache2.engine.warmup import WarmupStats


def permutation(count: int, seed: int, stream: int, part: int = 0) -> Positions:
    """The numbers from 0 to `count` - 1 in a random order determined by the arguments alone.

    Arguments are from 0 to 2**64 - 1. Orders of different streams, or parts of a stream, are independent.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, 0, part], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


class Shard:
    """One rank's share of the numbers from 0 to `count` - 1.

    Parameters
    ----------
    count : int
        Samples of the dataset.
    rank, ranks : int
        The number of the rank, and how many there are.
    together : int
        Size of the groups of consecutive ranks that deal their samples anew in each epoch; a divisor of
        `ranks`. 1: a rank always has the same samples.
    seed : int
        From 0 to 2**64 - 1.
    shuffle : bool
        Whether the order of samples changes with the epoch; False: ascending.
    even : {None, "drop", "repeat"}
        Make all ranks have equally many samples: leave out up to ``ranks - 1`` samples of the dataset, or
        give some ranks one of theirs twice. None: they differ by one at most.
    most : int, optional
        Most samples of a rank. The same ones are left out in each epoch.

    Attributes
    ----------
    samples : ndarray of int64
        The samples of this rank's group in each epoch.
    left_out : int
        How many samples this group leaves out because of `most`.
    least : int
        The least number of samples of any rank, if `most` is equal for all.
    is_even : bool
        Whether all ranks have that many.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        ranks: int,
        *,
        together: int = 1,
        seed: int = 13,
        shuffle: bool = False,
        even: str | None = None,
        most: int | None = None,
    ) -> None:
        self._seed, self._shuffle, self._together = seed, shuffle, together
        self._group, self._member = divmod(rank, together)
        order = permutation(count, seed, 0)
        mine = order[np.arange(count) % ranks // together == self._group]
        least, rest = divmod(count, ranks)
        each = {None: least + (rest > 0), "drop": least, "repeat": least + (rest > 0)}[even]
        bound = each if most is None else min(each, most)
        self.least = bound if even is not None else min(least, bound)
        self.is_even = self.least == bound
        self.left_out = max(0, min(len(mine), each * together) - bound * together)
        if even == "repeat" and len(mine) < bound * together:
            # Fewer samples than ranks: ranks without samples repeat those of others.
            mine = np.resize(mine if len(mine) else order, bound * together)
        self.samples: Array = mine[: bound * together].copy()  # not a view, which would keep all others

    def __len__(self) -> int:
        """Samples of this rank, the same number in each epoch."""
        return max(0, -(-(len(self.samples) - self._member) // self._together))

    def order(self, epoch: int) -> Positions:
        """The samples of this rank in an epoch from 0 on, int64 ``(len(self),)``."""
        dealt = self.samples
        if self._shuffle or self._together > 1:
            dealt = dealt[permutation(len(dealt), self._seed, epoch + 1, self._group)]
        mine = dealt[self._member :: self._together]
        return mine if self._shuffle else np.sort(mine)


_PROBED = 8


def _sizes_of(
    mode: str, path: Any, memory_size: Size | None, disk_size: Size | None
) -> tuple[Size | None, Size | None]:
    """Both sizes as for `CachedDataset`, with shares of 0.0 as 0."""
    memory_size = 0 if mode == "disk" else memory_size if memory_size is None else memory_size or 0
    disk_size = disk_size if disk_size is None else disk_size or 0
    parse_size("memory_size", memory_size or 0, free=0)
    parse_size("disk_size", disk_size or 0, free=0)
    if mode == "disk" and not (path if disk_size is None else disk_size):
        raise OptionError("mode='disk' keeps samples on the disk only: give it a cache_dir, or a disk_size")
    return memory_size, disk_size


def _samples_of(dataset: Any) -> int:
    """How many samples the dataset has; `OptionError` if unknown."""
    length = length_of(dataset)
    if length is None:
        raise OptionError(f"dataset is of type {type(dataset).__name__}: expected a dataset with a len()")
    return length


def _place_of(rank: int | None, num_replicas: int | None) -> Place:
    """The rank of this process among all: from these options, else from the launcher."""
    if rank is None and num_replicas is None:
        return place()
    given = f"rank={rank!r}, num_replicas={num_replicas!r}"
    if rank is None or num_replicas is None:
        raise OptionError(f"{given}: give both, or none of them")
    if not (is_count(rank) and is_count(num_replicas) and rank < num_replicas):
        raise OptionError(f"{given}: expected ints, and a rank from 0 to num_replicas - 1")
    return Place(int(rank), int(num_replicas))


def _together_of(mode: str, mine: Place) -> int:
    """How many ranks form a group: one, or those of a machine."""
    found = 1 if mode == "rank" else ranks_of_each(*mine)
    if found is None:
        raise OptionError(
            f"mode={mode!r}: cannot tell which of {mine.world_size} ranks are on the machine of rank "
            f"{mine.rank}. Start them with torchrun, or set the variable LOCAL_WORLD_SIZE to the number of "
            "ranks on each machine, which has to be the same everywhere. Or use mode='rank'"
        )
    return found


class _Bound:
    """How many samples a rank's shard may have, estimated from the size of some.

    Attributes
    ----------
    most : int, optional
        None: there is no bound.
    is_share : bool
        Whether a share of free space determines it, so that ranks may differ.
    """

    def __init__(
        self,
        dataset: Any,
        path: Any,
        memory_size: Size | None,
        disk_size: Size | None,
        *,
        overflow: float | None,
        even: str | None,
        mine: Place,
    ) -> None:
        self.most: int | None = None
        self.is_share, self._text = False, ""
        if overflow is None:
            return
        shares = isinstance(memory_size, float), isinstance(disk_size, float)
        self.is_share = mine.world_size > 1 and (any(shares) or (disk_size is None and path is not None))
        if even is not None and self.is_share:
            raise OptionError(
                f"overflow={overflow!r}, even={even!r}: memory_size={memory_size!r} and "
                f"disk_size={disk_size!r} have to be bytes, or texts such as '4GB', because a share of the "
                f"free space may differ between ranks"
            )
        count, room = _samples_of(dataset), _room(path, memory_size, disk_size)
        mean = max(1.0, _mean_size(dataset))
        here = ranks_of_each(*mine) or mine.world_size  # the most, and equal on all ranks
        self.most = int(min(count, (1 + overflow) * room / mean / here))
        self._text = f": overflow={overflow!r}, and {size_text(room)} have room for about "
        self._text += f"{int(room / mean):,} samples of {size_text(mean)}"
        self._text += f", for {here} ranks" if here > 1 else ""
        if self.most == 0 and count > 0:
            raise OptionError(f"no rank would have any of {count:,} samples{self}")

    def __str__(self) -> str:
        """The reason for the bound, as the end of a sentence; empty if there is none."""
        return self._text


def _room(path: Any, memory_size: Size | None, disk_size: Size | None) -> int:
    sizes = {"cache_dir": path, "memory_size": memory_size, "disk_size": disk_size}
    settings = level_settings(sizes)
    memory, disk = settings.memory_budget(), settings.persistent_budget("")
    # A lasting folder has every sample; a temporary one only those that do not fit in memory.
    return memory + disk if path is None else max(memory, disk)


def _mean_size(dataset: Any) -> float:
    """The mean size of up to 8 samples from all over a dataset, in bytes of rows."""
    count, state = _samples_of(dataset), RandomState([])
    places = sorted({place * count // _PROBED for place in range(_PROBED if count else 0)})
    try:
        probes = [dataset[place] for place in places]
    finally:
        state.restore()  # the caller's random numbers must not change
    rows = Samples().to_rows(probes)
    for error in rows.refused.values():
        raise error
    return sum(c.nbytes for _, part in rows.parts for c in part.columns) / max(1, len(probes))


class LazyShardDataset(Dataset[Any]):
    """One rank's shard of a dataset; each sample is loaded once.

    All ranks together have every sample once per epoch. A rank reads only its own samples: its machine loads
    the shard in the first epoch, and then serves it from the cache. Do not add a `DistributedSampler`, as the
    dataset is already divided.

    Parameters
    ----------
    dataset : Dataset
        All samples. Any object with ``__getitem__`` for ints and ``__len__``, such as an array of Zarr.
    cache_dir : path, optional
        A folder that keeps samples for later runs, as for `CachedDataset`. An alias is ``disk_cache_path``.
    shuffle : bool
        Whether the order within the shard changes with the epoch; otherwise it is ascending.
    memory_size, disk_size : int, str or float, optional
        How much memory and disk samples may take on this machine, for all of its ranks: bytes, a text like
        ``"4GB"``, or a share of what is free. 0: none. None: as for `CachedDataset`.
    overflow : float, optional
        Limits the shard to ``1 + overflow`` times the samples that can be cached, judged by the mean size of
        8 samples. A warning tells how many are left out. None: no limit.
    min_elements : int
        Raise an error if a rank's shard has fewer samples than this.
    rank, num_replicas : int, optional
        This process's rank, and the number of ranks. None: from `torch.distributed`, else from the variables
        RANK and WORLD_SIZE.
    seed : int
        Determines the samples of each shard, and their order.
    mode : {"rank", "node", "disk"}
        ``"rank"``: each rank has a shard, which is the same in all epochs. ``"node"``: each machine has one,
        which its ranks divide anew in each epoch. ``"disk"``: as ``"node"``, but only the disk keeps samples.
    even : {None, "drop", "repeat"}
        Make all ranks' shards equally long, as `DistributedDataParallel` needs: leave out fewer samples than
        there are ranks, or give some ranks one of theirs twice. None: lengths differ by one at most.
    disk_cache_path : path, optional
        An alias of `cache_dir`.
    **options
        Options of `CachedDataset`: ``name``, ``version``, ``transform``,
        ``policy``, ``compression``, ``allow_random``, ``verify``.

    Raises
    ------
    OptionError
        If an option has an invalid value; if the shard has fewer than `min_elements` samples; for modes
        ``"node"`` and ``"disk"``, if it is unknown which ranks share a machine.

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
        cache_dir: str | os.PathLike[str] | None = None,
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
        given = {"cache_dir": cache_dir, "name": None}
        aliased(given, {"disk_cache_path": disk_cache_path})
        cache_dir = given["cache_dir"]
        check({"mode": mode, "even": even, "seed": seed, "overflow": overflow, "min_elements": min_elements})
        is_served = options.get("backend", "local") != "local"
        memory_size, disk_size = _sizes_of(mode, cache_dir, memory_size, disk_size)
        if is_served and overflow is not None:
            raise OptionError(
                f"overflow={overflow!r} and backend='redis': how much fits on a server is unknown"
            )
        mine, count = _place_of(rank, num_replicas), _samples_of(dataset)
        together, ranks = _together_of(mode, mine), mine.world_size
        bound = _Bound(dataset, cache_dir, memory_size, disk_size, overflow=overflow, even=even, mine=mine)
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
                "LazyShardDataset: some of %d ranks have more samples than others, which makes "
                "DistributedDataParallel wait forever: pass even='drop' or even='repeat'",
                ranks,
            )
        self._shard = shard
        self._cached = CachedDataset(
            dataset, cache_dir, memory_size=memory_size, disk_size=disk_size, **options
        )
        self._epoch = _shared(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._order = 0, shard.order(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _shared(self._epoch)  # already shared, in a worker; a copy has its own epoch

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the `CachedDataset` of all samples, and of the dataset itself."""
        if name.startswith("_"):  # also during unpickling, before there is a cache
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._cached, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._cached, name, value)  # which refuses changes that would not affect stored samples

    @property
    def indices(self) -> Positions:
        """Indices of this rank's samples in this epoch, int64 ``(len(self),)``."""
        return self._now().copy()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0 on, for this process and its workers, persistent ones too.

        Call it between epochs: samples being loaded meanwhile may belong to either.
        """
        check({"epoch": epoch})
        self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        """Samples of this rank, in each epoch."""
        return len(self._shard)

    def __getitem__(self, index: int) -> Any:
        """The sample at a position in this rank's shard."""
        return self._cached[self._places([index])[0]]

    @own_batches
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at n positions in this rank's shard; a `DataLoader` calls this."""
        return self._cached.__getitems__(self._places(indices))

    def _places(self, indices: Sequence[int]) -> list[int]:
        """The dataset's indices of the samples at these positions in the shard."""
        order = self._now()
        try:
            return [int(order[operator.index(index)]) for index in indices]
        except IndexError:
            raise IndexError(f"{indices} are not all in a shard of {len(order):,} samples") from None

    def warmup(self, *, batch_size: int = 64, num_workers: int = 0) -> WarmupStats:
        """Load this rank's missing samples of this epoch, without returning them.

        Parameters and result are those of `CachedDataset.warmup`.
        """
        return self._cached._fill(np.unique(self._now()), num_workers, batch_size)

    def missing(self) -> Positions:
        """The positions in this rank's shard whose samples are not cached now, ascending, int64 ``(k,)``."""
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
