"""`CachedDataset`: a dataset whose samples are loaded once, and then served from the cache."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torchcache2.core.errors import NotCachedError, OptionError
from torchcache2.core.keys import Positions, int_keys
from torchcache2.core.logs import logger, shown
from torchcache2.core.process import place
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size, size_text
from torchcache2.datasets.identity import length_of
from torchcache2.datasets.options import CAPACITY, aliased, check, check_dataset, check_others
from torchcache2.datasets.recipe import OF_PROCESS, Keeper, Recipe
from torchcache2.datasets.served import ServedRecipe, kept_in, with_samples
from torchcache2.datasets.store import Store
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.samples import Samples
from torchcache2.engine.warmup import Estimate, Looks, Progress, WarmupStats, row_sizes
from torchcache2.files.layout import HEAD
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE

_HINTS = {
    "advice": "Samples that do not fit are loaded in each epoch: raise the budgets of memory or disk",
    "option": "disk_size",
}
_OWN = ("_recipe", "_is_closed", *OF_PROCESS)  # our own attributes; all others are the dataset's


class own_batches:  # noqa: N801
    """A ``__getitems__`` that wrappers do not inherit through their ``__getattr__``.

    A `DataLoader` would prefer it to the wrapper's ``__getitem__``, and skip what that does to samples.
    """

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, dataset: Any, kind: Any = None) -> Callable[..., list[Any]]:
        name = sys._getframe(1).f_code.co_name
        if dataset is not None and name in ("__getattr__", "__getattribute__"):
            raise AttributeError("__getitems__ is not passed on to wrappers, which have a __getitem__")
        bound: Callable[..., list[Any]] = self._function.__get__(dataset, kind)
        return bound


def _outcome(store: Store, total: int) -> str | None:
    """Whether a lasting folder has all samples now, and how to serve them; None without such a folder."""
    levels, directory = store.levels, store.levels.directory
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
    size = f" ({size_text(sum(info.size for info in (*contents.segments, *contents.others)))})"
    if bucket is not None:
        there_too = {info.name.removesuffix(HEAD) for info in contents.heads}
        here = {info.name for info in contents.segments}
        size = size if there_too <= here else ""
        if left := len(here - there_too):
            return f"{left:,} of {len(contents.segments):,} files of {directory.path} are not in {path} yet"
    share = f"all {total:,} samples" if there == total else f"{there:,} of {total:,} samples"
    call = mine.call(path, [one for one in kept if one is not mine], partial=there < total)
    return f"{path} has {share}{size}. Without the dataset, {call} serves them"


class _Filling(Dataset[Any]):
    """Loads samples in workers, which return only counts: see `Store.fill`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> tuple[int, int, int]:
        store: Store | None = self._dataset._store
        if store is None:
            raise NotCachedError("caching is turned off in a worker, so nothing would be kept")
        return store.fill(indices)


def _as_it_is(batch: Any) -> Any:
    return batch


class CachedDataset(Keeper, Dataset[Any]):
    """Caches the samples of another dataset, so that each is loaded once.

    Samples are kept in memory that all workers of a `DataLoader` and all ranks of a machine share, then in a
    folder; or on Redis servers. They may be any nesting of tensors, NumPy arrays, PIL images, numbers, texts,
    bytes and None, and are restored exactly.

    Parameters
    ----------
    dataset : Dataset or None
        Any object with ``__getitem__``, and ``__getitems__`` if it has one. None: serve the samples in
        `cache_dir` without their dataset, and leave the folder unchanged.
    cache_dir : path or URL, optional
        A folder that keeps all samples for later runs; any number of runs and datasets may share it. It may
        be in a bucket: ``s3://bucket/folder``, ``gs://…``. An alias is ``disk_cache_path``. None: nothing
        outlives the run.
    memory_size : int, str or float, optional
        How much memory samples may take, once for all processes of the machine: bytes, a text like ``"4GB"``,
        or a share of what is free now. 0: none. None: a share of 0.25, as workers need memory, too; but none
        in front of a server.
    disk_size : int, str or float, optional
        How much the folder may take, as above. None: a share of 0.8 with a `cache_dir`, else 0. Without one,
        a temporary folder takes samples that do not fit in memory.
    name : str, optional
        A name that, with `version` and the length, if any, identifies the dataset; attributes and code are
        then not read. An alias is ``dataset_name``. Without a dataset: selects one of several in the folder,
        by its name, its class, or the first digits of its namespace.
    version : str or int, optional
        Change it when samples change in a way that the cache cannot see, such as files behind the same paths.
    transform : callable, optional
        Called with each sample after the cache, for example for random augmentation.
    policy : {"keep", "lru"}
        What a full folder, or a full server that this library started, does: keep what came first, or drop
        the least recently used.
    compression : {"none", "brotli", "blosc2"}
        How samples are compressed in the folder or on the server. The default is ``"none"``, as images hardly
        shrink, and plain samples are faster to read.
    allow_random : bool
        Whether to cache a dataset although it draws random numbers.
    verify : float
        Share of hits, in [0, 1], that are loaded again and compared.
    partial : bool
        Without a dataset: whether samples may be missing. Asking for a missing one raises
        `MissingSampleError`.
    backend : {"local", "redis"}
        Where samples are kept: in memory and folder, or on Redis servers, which any number of machines may
        share.
    hosts : str, dict, or sequence of these, optional
        The servers, as for `CacheLoader`. None: this library starts one on each machine.
    cluster_mode : bool
        Whether each machine uses the servers of all machines, or one of them.
    capacity_per_node : int, str or float
        How much memory a server that this library starts may take, as for `memory_size`.
    writer_buffer_size : int
        How many samples to gather before sending them to a server.
    local_dir : path, optional
        With a bucket, the local folder for its samples, and for new samples until they are uploaded; its
        budget is `disk_size`. None: a temporary one.
    storage_options : mapping, optional
        Options of fsspec for the bucket, such as keys, if they are not in the environment. Never shown.
    remote_size : int or str, optional
        Most bytes of the folder in the bucket. None: no limit.

    Raises
    ------
    OptionError
        If an option has an invalid value; if parts of the dataset cannot be read, with a `cache_dir` or a
        server; if a server refuses the password.
    MissingSampleError
        Without a dataset, if not all samples are in the folder.
    OutputError
        At the first sample, if it cannot be stored.

    Notes
    -----
    The dataset is read once, in the constructor. Do not change it afterwards.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, Dataset
    >>> from torchcache2 import CachedDataset

    >>> class Squares(Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         print("loaded", index)
    ...         return torch.tensor(index**2), f"{index} squared"

    >>> squares = CachedDataset(Squares(), memory_size="10MB")
    >>> squares[3], squares[3]
    loaded 3
    ((tensor(9), '3 squared'), (tensor(9), '3 squared'))
    >>> squares.stats().hits
    1
    """

    __module__ = "torchcache2"

    def __init__(
        self,
        dataset: Any,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        memory_size: Size | None = None,
        disk_size: Size | None = None,
        name: str | None = None,
        version: str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        policy: Policy = "keep",
        compression: str = "none",
        allow_random: bool = False,
        verify: float = 0.0,
        partial: bool = False,
        backend: Literal["local", "redis"] = "local",
        hosts: Any = None,
        cluster_mode: bool = True,
        capacity_per_node: Size = CAPACITY,
        writer_buffer_size: int = 20,
        local_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        remote_size: Size | None = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "dataset", "others")}
        aliased(given, others)
        check_others(others, [*given])
        check(given)
        if dataset is None:
            recipe: Recipe = ServedRecipe.of_folder(given)
        elif partial is not False:
            raise OptionError(
                f"partial={shown(partial)} is only for samples without their dataset, "
                "CachedDataset(None, cache_dir): a dataset loads missing samples"
            )
        else:
            check_dataset(dataset)
            recipe = Recipe.of_dataset(dataset, given)
        self.__setstate__({"_recipe": recipe})

    def __len__(self) -> int:
        length = length_of(self._recipe.dataset)
        return len(self._recipe.dataset) if length is None else length  # raises the reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_torchcache")) or name in _OWN:  # also during unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._recipe.dataset, name)
        if name.startswith("set_") and callable(value):
            return functools.partial(self._change, value)
        return value

    def _change(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the dataset, such as ``set_epoch``; if that changes it, stop caching."""
        if self._store is None:
            return method(*args, **kwargs)
        before = self._recipe.seen()
        result = method(*args, **kwargs)
        if self._recipe.seen() != before:
            logger.warning(
                "%s: %s changed the dataset, so it is no longer cached. Move what depends on the epoch "
                "into transform=, which runs after the cache",
                self._recipe.title,
                method.__name__,
            )
            self.close()
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or not hasattr(self._recipe.dataset, name):
            super().__setattr__(name, value)
        elif get_worker_info() is not None:  # such as a file opened by a worker_init_fn
            self._change(setattr, self._recipe.dataset, name, value)
        else:
            raise AttributeError(
                f"{name} is an attribute of the cached dataset, which must not change: the stored samples "
                f"were made without the change. Set it before CachedDataset(dataset) is made"
            )

    def __getitem__(self, index: Any) -> Any:
        """The sample at an index: an int (also of NumPy, or a tensor), a str or bytes."""
        store, transform = self._store, self._recipe.transform
        if type(index) is int and store is not None:
            for sample in store.find_one(index):
                return sample if transform is None else transform(sample)
        return self.__getitems__([index])[0]

    @own_batches
    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices; a `DataLoader` calls this."""
        store, transform = self._store, self._recipe.transform
        samples = self._source.plain(indices) if store is None else store.fetch(indices)
        return samples if transform is None else [transform(sample) for sample in samples]

    def __repr__(self) -> str:
        return f"<CachedDataset {self._recipe.title} {self._recipe.identity.namespace.hex()}>"

    @property
    def cache_dir(self) -> Path | None:
        """The folder with the samples; None if they are in memory only."""
        directory = None if self._store is None else self._store.levels.directory
        return None if directory is None else Path(directory.path)

    def warmup(self, *, batch_size: int = 64, num_workers: int = 0) -> WarmupStats:
        """Load the samples that are not there yet, without returning them.

        In a job of several ranks, all of them call this, and each takes every n-th sample. Rank 0 shows its
        progress and, after the first batches, an estimate of memory, disk and time. Samples that a bucket has
        come to ``local_dir`` in the background, as far as they fit.

        Parameters
        ----------
        batch_size : int
            Samples that a process loads at once.
        num_workers : int
            Processes that load samples.

        Returns
        -------
        WarmupStats
            How many samples were loaded and found, and how long it took.
        """
        where = place()
        return self._fill(np.arange(where.rank, len(self), where.world_size), num_workers, batch_size)

    def _fill(self, mine: Positions, num_workers: int, batch_size: int) -> WarmupStats:
        """Load the missing samples of this rank, at indices `mine`; see `warmup`."""
        check({"batch_size": batch_size, "num_workers": num_workers})
        store, where, total = self._filled_store(), place(), len(self)
        levels = store.levels
        absent = mine[~levels.has(int_keys(levels.namespace, mine))].tolist()
        there = len(mine) - len(absent)
        levels.bring()
        if there:
            logger.info("%s: %d of %d samples are there already", store.name, there, len(mine))
        loader: DataLoader[Any] = DataLoader(
            _Filling(self),
            batch_size,
            sampler=absent,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # the default one must not advance
        )
        counts, nbytes = SimpleNamespace(hits=0, misses=0), 0
        known = len(absent) if where.world_size == 1 else total
        is_shown = where.rank == 0 and bool(absent)
        progress = Progress(store.name, counts, levels, len(absent), known, is_shown=is_shown, **_HINTS)
        try:
            for found, loaded, size in loader:
                counts.hits += found
                counts.misses += loaded
                nbytes += size
                progress.update(lambda: (size, None))  # noqa: B023  # called at once
        finally:
            progress.close()
        levels.flush()
        if where.rank == 0 and (line := _outcome(store, total)):
            print(f"{store.name}: {line}", file=sys.stderr)
        done = progress.stats()
        return dataclasses.replace(done, found=done.found + there, bytes=nbytes)

    def _filled_store(self) -> Store:
        """The store; `NotCachedError` if nothing is cached."""
        if self._store is None:
            raise NotCachedError(f"{self!r} caches nothing: it is closed, or turned off, or both sizes are 0")
        return self._store

    def estimate(self, *, batches: int = 4, batch_size: int = 64) -> Estimate:
        """The cost of caching all samples: bytes in memory and on disk, and time in one process.

        Loads some evenly spread samples, and compresses them as on disk; stores nothing.

        Parameters
        ----------
        batches, batch_size : int
            How many batches of samples to examine, and how many samples to load at once.

        Returns
        -------
        Estimate
            The cost of all samples. Printing it shows that, and whether the budgets suffice.
        """
        check({"batch_size": batch_size})
        if type(batches) is not int or batches < 1:
            raise OptionError(f"batches={shown(batches)}: expected an int of at least 1")
        store, count, looks = self._filled_store(), len(self), Looks()
        chosen = np.linspace(0, count - 1, min(count, batches * batch_size)).astype(np.int64).tolist()
        random, start = RandomState([]), time.perf_counter()
        try:
            for first in range(0, len(chosen), batch_size):
                samples, is_steady = self._source.load(chosen[first : first + batch_size])
                seconds, batch = time.perf_counter() - start, Samples().to_rows(samples)
                if not is_steady or batch.refused:
                    why = next(iter(batch.refused.values()), "random numbers are drawn")
                    raise NotCachedError(f"{store.name}: samples would not be cached: {why}")
                rows = [rows for _, rows in batch.parts]
                looks.add(len(samples), seconds, row_sizes(rows, store.levels.settings))
                start = time.perf_counter()
        finally:
            random.restore()
        if not looks:
            raise OptionError("the dataset is empty")
        where = place()
        mine = len(range(where.rank, count, where.world_size))
        return looks.estimate(store.levels, mine, count, **_HINTS)

    def missing(self) -> Positions:
        """Indices, int64 ``(k,)``, of samples that are not cached, or not in the `cache_dir` or server."""
        return np.arange(len(self)) if self._store is None else self._store.levels.absent(len(self))

    def explain(self) -> str:
        """Why samples were loaded again: the differences from the dataset of earlier runs.

        Returns
        -------
        str
            A line for each difference, such as ``attribute transform.size: 224 → 256``.
        """
        store = self._store
        directory = None if store is None else store.levels.directory
        return self._recipe.explained(directory, is_cached=store is not None)


setattr(CachedDataset, ADDED_ATTRIBUTE, True)
setattr(
    CachedDataset,
    ORIGINAL_ATTRIBUTE,
    property(lambda self: (self._recipe.dataset, self._recipe.transform)),
)
