"""`CachedDataset`: a dataset whose samples are loaded once, and then served from the cache."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from torchcache2.core.errors import NotCachedError, OptionError
from torchcache2.core.keys import Positions
from torchcache2.core.logs import logger, shown
from torchcache2.core.process import place
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size
from torchcache2.datasets.identity import length_of
from torchcache2.datasets.loader import Loader, filled
from torchcache2.datasets.mapped import Map, MappedStore
from torchcache2.datasets.options import CAPACITY, aliased, check, check_dataset, check_others
from torchcache2.datasets.recipe import OF_PROCESS, Keeper, Recipe
from torchcache2.datasets.served import ServedRecipe
from torchcache2.datasets.store import Store
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.samples import Samples
from torchcache2.engine.warmup import Estimate, Looks, Progress, WarmupStats, row_sizes
from torchcache2.files.codec import codec
from torchcache2.files.layout import HEAD
from torchcache2.files.removal import keep_rows
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE, __version__

_HINTS = {
    "advice": "Samples that do not fit are loaded in each epoch: raise the budgets of memory or disk",
    "option": "disk_size",
}
_DERIVING = (
    "map",
    "filter",
    "select",
    "shuffle",
    "sort",
    "shard",
    "skip",
    "take",
    "with_format",
    "with_transform",
)
_OWN = ("_recipe", "_is_closed", "_view", *OF_PROCESS)  # our own attributes; all others are the dataset's


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
    """Whether a lasting folder has all samples now; None without such a folder."""
    levels, directory = store.levels, store.levels.directory
    folder, bucket = levels.settings.persistent_cache_dir, levels.settings.bucket
    if folder is None or directory is None:
        return None
    path, there = str(folder) if bucket is None else bucket.url, total - len(levels.absent(total))
    try:
        contents = directory.contents(levels.namespace.hex())
    except OSError:
        return None
    if bucket is not None:
        heads = {info.name.removesuffix(HEAD) for info in contents.heads}
        if left := len({info.name for info in contents.segments} - heads):
            return f"{left:,} of {len(contents.segments):,} files of {directory.path} are not in {path} yet"
    return f"{path} has {f'all {total:,}' if there == total else f'{there:,} of {total:,}'} samples"


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
        in front of a server. An alias is ``memory_cache_size``.
    disk_size : int, str or float, optional
        How much the folder may take, as above. None: a share of 0.8 with a `cache_dir`, else 0. Without one,
        a temporary folder takes samples that do not fit in memory. An alias is ``disk_cache_size``.
    name : str, optional
        A name that, with `version` and the length, if any, identifies the dataset; attributes and code are
        then not read. An alias is ``dataset_name``. Without a dataset: selects one of several in the folder,
        by its name, its class, or the first digits of its namespace.
    version : str or int, optional
        Change it when samples change in a way that the cache cannot see, such as files behind the same paths.
    map : callable, optional
        ``map(batch)`` makes of a collated batch of samples what is kept in their place, such as features: any
        structure of tensors with an entry for each sample. It is part of the key with all that it refers to:
        code, models, weights. Only the process that makes the dataset calls it, without gradients; see
        `loader`. If it has a parameter ``generators``, that is a list with a `torch.Generator` for each
        sample, seeded by `seed` and the sample's key, to draw what it needs for that sample.
    collate_fn : callable, optional
        Makes a batch for `map` of a list of samples. None: `torch.utils.data.default_collate`.
    views : int
        How many random variants of each sample to keep. Variant v of sample i is loaded under generators (of
        Python, NumPy, and torch on the CPU) that are seeded by `seed`, i and v, so its random numbers are
        part of its key. `loader` gives another variant in each epoch, and `set_view` chooses one.
    seed : int
        See `views` and `map`.
    keys : sequence or callable, optional
        Which sample each one is: a text, int, bytes, path, or tuple of these for each sample, or a function
        of the index. A path to a file stands for the file's content. A row then belongs to the key, not to
        the position: a sample that is added, removed, moved or edited costs one row. Equal keys mean equal
        samples. Neither the length counts then, nor lists, arrays and the like with an entry for each sample;
        `explain` says which. Without a dataset: needed if there were keys when the folder was filled.
    ignore : str or sequence of str
        Paths of attributes, globals and closures of the dataset that no sample depends on, such as
        ``"cfg.lr"``; ``*`` stands for any text, ``?`` for one character. Code always counts.
    code_version : str or int, optional
        Stands for source code and the versions of packages, which then do not count; attributes do. You must
        change it with code that changes samples.
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
        map: Callable[..., Any] | None = None,  # noqa: A002
        collate_fn: Callable[[list[Any]], Any] | None = None,
        views: int = 1,
        seed: int = 0,
        keys: Sequence[Any] | Callable[[Any], Any] | None = None,
        ignore: str | Sequence[str] = (),
        code_version: str | int | None = None,
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
        if length is None:
            return len(self._recipe.dataset)  # raises the reason
        return length // self._recipe.views

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_torchcache")) or name in _OWN:  # also during unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._recipe.dataset, name)
        if name.startswith("set_") and callable(value):
            return functools.partial(self._change, value)
        return functools.partial(self._derived, value) if name in _DERIVING and callable(value) else value

    def _derived(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the dataset that returns another one."""
        found, dataset = method(*args, **kwargs), self._recipe.dataset
        if isinstance(found, type(dataset)) and found is not dataset:
            logger.warning(
                "%s: %s returns a dataset that is not cached. Call it first: CachedDataset(dataset.%s(...))",
                *(self._recipe.title, method.__name__, method.__name__),
            )
        return found

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
        if type(index) is int and store is not None and self._recipe.views == 1:
            for sample in store.find_one(index):
                return sample if transform is None else transform(sample)
        return self.__getitems__([index])[0]

    @own_batches
    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices; a `DataLoader` calls this."""
        if self._recipe.views > 1:
            indices = self._recipe.variants(indices, self._view).tolist()
        return self._samples(indices)

    def _samples(self, indices: Sequence[Any]) -> list[Any]:
        store, transform = self._store, self._recipe.transform
        if store is not None:
            samples = store.fetch(indices)
        elif self._recipe.is_mapped and self._recipe.dataset is not None:
            samples = Map.items(self._output(indices), len(indices))
        else:
            samples = self._source.plain(indices)
        return samples if transform is None else [transform(sample) for sample in samples]

    _view = 0  # which variant `dataset[i]` is

    def set_view(self, view: int) -> None:
        """Choose which variant of the samples ``dataset[i]`` returns, such as the epoch; modulo `views`."""
        vars(self)["_view"] = view % self._recipe.views

    def _output(self, indices: Sequence[int]) -> Any:
        """What `map` makes of the batch of n samples: any structure, its tensors of shape ``(n, ...)``."""
        if isinstance(self._store, MappedStore) and self._store.is_making:
            return self._store.output(indices)
        if self._recipe.map is None:
            raise NotCachedError(f"{self!r} has no map to call here: it is sealed, or a copy, or has none")
        with torch.no_grad():
            return self._recipe.map.of(self._source.plain(indices), indices)

    def loader(
        self,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        *,
        generator: torch.Generator | None = None,
        device: str | torch.device | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **workers: Any,
    ) -> Loader:
        """The batches of the dataset, straight from its rows, in the order of a `DataLoader`.

        Batches whose rows are there need no worker and no sample. Missing samples are loaded by `num_workers`
        processes ahead of need, only these; `map` runs in this process.

        Parameters
        ----------
        batch_size, shuffle, sampler, batch_sampler, drop_last, generator
            As for a `DataLoader`: batches come in the same order.
        num_workers : int
            How many processes load missing samples; 0: this one. If none is missing, none is started.
        collate_fn : callable, optional
            Makes a batch of a list of samples, or of what `map` has made of each; it is then called for each
            batch. None: what `map` returns, or `torch.utils.data.default_collate` of samples.
        pin_memory : bool, optional
            Whether batches are in pinned memory. None: if `device` is a GPU.
        device : torch.device, optional
            Where batches are moved.
        rank, world_size : int, optional
            Which share of the samples to give, by a `DistributedSampler`, unless there is a sampler. None: as
            the launcher says.
        **workers
            Other options of the `DataLoader` that loads missing samples, such as `multiprocessing_context`.

        Returns
        -------
        Loader
            An iterable with `len`, `set_epoch`, `state_dict` and `load_state_dict`.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        check({"num_workers": num_workers})
        return Loader(self, **given)

    def __repr__(self) -> str:
        return f"<CachedDataset {self._recipe.title} {self._recipe.identity.namespace.hex()}>"

    @property
    def cache_dir(self) -> Path | None:
        """The folder with the samples; None if they are in memory only."""
        directory = None if self._store is None else self._store.levels.directory
        return None if directory is None else Path(directory.path)

    def warmup(
        self,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> WarmupStats:
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
        on_progress : callable, optional
            Called after each batch as ``on_progress(done, total, nbytes)``: samples done and in all, and the
            bytes of the rows so far.

        Returns
        -------
        WarmupStats
            How many samples were loaded and found, and how long it took.
        """
        where = place()
        count = len(self) * self._recipe.views
        mine = np.arange(where.rank, count, where.world_size)
        return self._fill(mine, num_workers, batch_size, on_progress)

    def _fill(
        self,
        mine: Positions,
        num_workers: int,
        batch_size: int,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> WarmupStats:
        """Load the missing samples of this rank, at indices `mine`; see `warmup`."""
        check({"batch_size": batch_size, "num_workers": num_workers})
        store, where, total = self._filled_store(), place(), len(self) * self._recipe.views
        levels = store.levels
        absent = mine[~levels.has(levels.keys(mine))].tolist()
        there = len(mine) - len(absent)
        levels.bring()
        if there:
            logger.info("%s: %d of %d samples are there already", store.name, there, len(mine))
        loader: Iterable[Any] = DataLoader(
            _Filling(self),
            batch_size,
            sampler=absent,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # the default one must not advance
        )
        if self._recipe.is_mapped:
            loader = filled(self, absent, num_workers=num_workers, batch_size=batch_size)
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
                if on_progress is not None:
                    on_progress(there + counts.hits + counts.misses, len(mine), nbytes)
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
        self._store.follow()
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
        store, count, looks = self._filled_store(), len(self) * self._recipe.views, Looks()
        chosen = np.linspace(0, count - 1, min(count, batches * batch_size)).astype(np.int64).tolist()
        random, start = RandomState([]), time.perf_counter()
        try:
            for first in range(0, len(chosen), batch_size):
                some = chosen[first : first + batch_size]
                samples, is_steady = self._source.load(some)
                seconds, batch = time.perf_counter() - start, Samples().to_rows(samples)
                if not is_steady or batch.refused:
                    why = next(iter(batch.refused.values()), "random numbers are drawn")
                    raise NotCachedError(f"{store.name}: samples would not be cached: {why}")
                rows = [rows for _, rows in batch.parts]
                if isinstance(store, MappedStore) and store.mapped is not None:
                    with torch.no_grad():
                        output = store.mapped.map.of(samples, some)
                    rows = [rows for _, rows in store.mapped.parts(output, len(samples))]
                    seconds = time.perf_counter() - start
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
        """Indices, int64 ``(k,)``, of samples that are not cached, or not in the `cache_dir` or server.

        With `views`, of samples that lack a variant.
        """
        count = len(self)
        if self._store is None:
            return np.arange(count)
        self._store.follow()
        absent = self._store.levels.absent(count * self._recipe.views)
        return absent if self._recipe.views == 1 else np.unique(absent % count)

    def insert(self, indices: Sequence[int], rows: Any) -> None:
        """Keep what was made elsewhere for n samples: a list of samples or, with `map`, its output for them.

        Rows that are there stay. It is up to the caller that they are what would be loaded or computed.
        """
        store, plain = self._filled_store(), self._recipe.variants(indices, self._view)
        keys = store.levels.keys(plain)
        if isinstance(store, MappedStore):
            store.insert(keys, rows)
        elif len(rows) != len(plain):
            raise OptionError(f"rows: expected a list of {len(plain)} samples, one for each index")
        else:
            store.keep(keys, rows, store.tally.drops)

    def seal(self) -> None:
        """Serve what `map` has made, and make nothing more: a sample that is not there is then an error.

        Afterwards `map` is not called, so its models may be freed. Writes queued rows first. `OptionError`
        without `map`.
        """
        store = self._filled_store()
        if not isinstance(store, MappedStore):
            raise OptionError(
                "seal() ends the calls of map=, and there is none: to serve samples without loading any, use "
                "CachedDataset(None, cache_dir)"
            )
        self.flush()
        self._recipe.renew()
        self._recipe.map = None
        store.end_map()

    def keep_only(self) -> int:
        """Delete the rows of samples that are no longer in the dataset; returns how many these are.

        For a dataset with `keys` and a folder on this machine. Rows of other datasets that differ in their
        keys alone, such as other folds, go, too, as do those that `map` has made under another mode of torch,
        such as autocast. Files that also have other rows are written anew before they are deleted.

        Raises
        ------
        OptionError
            Without `keys`, or if there is no such folder: servers and buckets may have other users.
        NotCachedError
            If another process, such as a worker, or another `CachedDataset` uses these rows. Nothing is
            deleted then.
        """
        store, recipe = self._filled_store(), self._recipe
        recipe.check_clear()
        levels, settings = store.levels, store.levels.settings
        if (
            levels.fills_up
            or levels.directory is None
            or settings.bucket is not None
            or not levels.by.are_given
        ):
            raise OptionError(
                "keep_only() deletes rows by keys= from a folder on this machine, and there are no keys, or "
                "no cache_dir, or it is in a bucket. Servers forget what is not used with policy='lru'"
            )
        directory, keys = levels.directory, levels.keys(np.arange(len(self) * recipe.views))
        self._store = None
        store.close()  # also releases memory, and our own mark that the rows are in use
        try:
            made = codec(settings.compression, settings.compression_quality)
            count = keep_rows(directory, keys, made, __version__)
        finally:
            self._store = recipe.store(self._source)
        if count is None:
            raise NotCachedError(
                f"{store.name}: another process or object uses these rows, so none is deleted"
            )
        return count

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


def _counted(cached: CachedDataset) -> tuple[Any, ...]:
    """What stands for a cached dataset in the key of what refers to it."""
    recipe, more = cached._recipe, list[Any]()
    if recipe.is_mapped:
        more += [recipe.identity.namespace] if recipe.map is None else recipe.map.counted
    if recipe.views > 1:
        more.append(cached._view)
    return recipe.dataset, recipe.transform, *more


setattr(CachedDataset, ADDED_ATTRIBUTE, True)
setattr(CachedDataset, ORIGINAL_ATTRIBUTE, property(_counted))
