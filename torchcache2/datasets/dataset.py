"""`CachedDataset`: a dataset whose samples are loaded once, and then found in memory or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchcache2.core.errors import NotCachedError
from torchcache2.core.keys import Positions
from torchcache2.core.process import place
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size
from torchcache2.datasets.counts import DatasetStats
from torchcache2.datasets.filling import fill
from torchcache2.datasets.options import (
    aliased,
    check_dataset,
    check_others,
    check_portable,
    check_values,
    level_settings,
)
from torchcache2.datasets.plan import Plan
from torchcache2.datasets.portable import PortablePlan
from torchcache2.datasets.serving import CAPACITY, Serving
from torchcache2.datasets.wrapper import Wrapper, own_batches
from torchcache2.engine.progress import WarmupStats
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE


class CachedDataset(Wrapper):
    """A dataset that keeps the samples of another one, so that each is loaded once.

    Samples are kept in memory that all workers of a `DataLoader` and all ranks of a machine share, then in a
    folder; or on Redis servers. They may be any nesting of tensors, numpy arrays, PIL images, numbers, texts,
    bytes and None, and come back as they were.

    Parameters
    ----------
    dataset : Dataset or None
        Any object with ``__getitem__``, and ``__getitems__`` if it has one. None: the samples that are in
        `path` are served without it, from a folder in which nothing is changed.
    path : path or URL, optional
        A folder that keeps all samples for later runs; any number of runs and datasets may share it. It may
        be in a bucket: ``s3://bucket/folder``, ``gs://…``. An alias is ``disk_cache_path``. None: nothing
        outlives the run.
    memory_cache_size : int, str or float, optional
        How much memory samples may take, once for all processes of the machine: bytes, a text like ``"4GB"``,
        or a share of what is free now. 0: none. None: a share of 0.25, but none in front of a server.
    disk_cache_size : int, str or float, optional
        How much the folder may take, as above. None: a share of 0.8 with a `path`, else 0. Without `path`, a
        temporary folder has what did not fit in memory.
    name : str, optional
        What to call the dataset, whose attributes and code are then not read: only `name`, `version` and the
        length, if there is one, say which samples belong to it. An alias is ``dataset_name``. Without a
        dataset: which one of several in the folder, by its name, its class, or the first digits of its
        namespace.
    version : str or int, optional
        Change it when samples change in a way that cannot be seen, such as files behind the same paths.
    transform : callable, optional
        Is called with each sample after the cache, as for random augmentation.
    policy : {"mru", "lru"}
        What a full folder does, or a server of our own: keep what came first, or drop what was not used for
        longest.
    compression : {"none", "brotli", "blosc2"}
        How samples are compressed in the folder or on the server.
    allow_random : bool
        Whether a dataset that draws random numbers is cached all the same.
    verify : float
        Share of hits, in [0, 1], that are loaded again and compared.
    partial : bool
        Without a dataset: whether samples may be missing. A missing one is a `MissingSampleError` when it is
        asked for.
    backend : {"local", "redis"}
        Where samples are kept: as `path` and the sizes say, or on Redis servers, which any number of machines
        may share.
    hosts : str, dict, or sequence of these, optional
        The servers, as for `CacheLoader`. None: a server of our own on each machine.
    cluster_mode : bool
        Whether each machine uses the servers of all machines, or one of them.
    capacity_per_node : int, str or float
        How much memory a server of our own may take, as for `memory_cache_size`.
    writer_buffer_size : int
        How many samples are gathered before they are sent to a server.
    local_dir : path, optional
        With a bucket, the folder for what has come from it, and for new samples until they are uploaded; its
        budget is `disk_cache_size`. None: a temporary one.
    storage_options : mapping, optional
        What fsspec needs to reach the bucket, such as keys, if they are not in the environment. It is never
        shown.
    remote_size : int or str, optional
        How many bytes the folder in the bucket may have. None: any number.

    Raises
    ------
    OptionError
        If an option cannot have its value; if there is a `path` or a server, and the dataset cannot be told
        from others; if a server refuses the password.
    MissingSampleError
        Without a dataset, if not all samples are in the folder.
    OutputError
        At the first sample, if it cannot be stored.

    Notes
    -----
    The dataset is read once, when this is made. It must not be changed afterwards.

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

    >>> squares = CachedDataset(Squares(), memory_cache_size="10MB")
    >>> squares[3], squares[3]
    loaded 3
    ((tensor(9), '3 squared'), (tensor(9), '3 squared'))
    >>> squares.stats().hits
    1
    """

    __module__ = "torchcache2"
    _plan: Plan

    def __init__(
        self,
        dataset: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        memory_cache_size: Size | None = None,
        disk_cache_size: Size | None = None,
        name: str | None = None,
        version: str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        policy: Policy = "mru",
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
        path, name = aliased(path, name, others)
        check_others(others)
        check_values(transform, verify)
        if dataset is None:
            check_portable(path, backend, verify, partial)
        else:
            check_dataset(dataset, partial=partial)
        serving = Serving.of(
            backend,
            hosts,
            cluster_mode=cluster_mode,
            capacity_per_node=capacity_per_node,
            policy=policy,
            writer_buffer_size=writer_buffer_size,
        )
        for_buckets = {"local_dir": local_dir, "storage_options": storage_options, "remote_size": remote_size}
        settings = level_settings(
            path, memory_cache_size, disk_cache_size, policy, compression, serving, for_buckets
        )
        given: list[Any] = [
            memory_cache_size,
            disk_cache_size,
            settings.persistent_cache_dir,
            policy,
            compression,
        ]
        given += [] if serving is None else [serving]
        common: dict[str, Any] = {"name": name, "version": version, "transform": transform}
        common["options"] = repr(tuple(given))
        plan = (
            PortablePlan.served(settings, partial=partial, **common)
            if dataset is None
            else Plan.of(dataset, settings, serving, checks=not allow_random, verify=verify, **common)
        )
        self.__setstate__({"_plan": plan})

    def __getitem__(self, index: Any) -> Any:
        """The sample at an index: an int, also one of numpy or a tensor, a str or bytes."""
        fetcher, transform = self._fetcher, self._plan.transform
        if type(index) is int and fetcher is not None:
            for sample in fetcher.find_one(index):
                return sample if transform is None else transform(sample)
        return self.__getitems__([index])[0]

    @own_batches
    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices, which is what a `DataLoader` asks for."""
        fetcher, transform = self._fetcher, self._plan.transform
        samples = self._source.plain(indices) if fetcher is None else fetcher.fetch(indices)
        return samples if transform is None else [transform(sample) for sample in samples]

    def __repr__(self) -> str:
        return f"<CachedDataset {self._plan.title} {self._plan.identity.namespace.hex()}>"

    @property
    def cache_dir(self) -> Path | None:
        """The folder with the samples; None if they are in memory only."""
        directory = None if self._fetcher is None else self._fetcher.levels.directory
        return None if directory is None else Path(directory.path)

    def warmup(self, num_workers: int = 0, batch_size: int = 64) -> WarmupStats:
        """Load the samples that are not there yet, without returning them.

        In a job of several ranks, all of them call this, and each takes every n-th sample. Rank 0 shows how
        far it is, and after the first batches what all of it will take.

        Parameters
        ----------
        num_workers : int
            Processes that load samples.
        batch_size : int
            Samples that a process loads at once.

        Returns
        -------
        WarmupStats
            How many samples were loaded and found, and how long it took.
        """
        where = place()
        return self._fill(np.arange(where.rank, len(self), where.world_size), num_workers, batch_size)

    def _fill(self, mine: Positions, num_workers: int, batch_size: int) -> WarmupStats:
        if self._fetcher is None:
            raise NotCachedError(f"{self!r} caches nothing: it is closed, or turned off, or both sizes are 0")
        return fill(self, self._fetcher, mine, num_workers, batch_size)

    def missing(self) -> Positions:
        """Indices of samples, int64 ``(k,)``, that are not cached; with a `path` or server, not there."""
        return np.arange(len(self)) if self._fetcher is None else self._fetcher.levels.absent(len(self))

    def stats(self) -> DatasetStats:
        """What all processes have done with this dataset so far."""
        levels = None if self._fetcher is None else self._fetcher.levels
        return DatasetStats.of(self._plan.tally.total(), {} if levels is None else levels.stats())

    def explain(self) -> str:
        """Why samples were loaded that earlier runs had cached: what differs between the datasets.

        Returns
        -------
        str
            A line for each difference, such as ``attribute transform.size: 224 → 256``.
        """
        fetcher = self._fetcher
        directory = None if fetcher is None else fetcher.levels.directory
        return self._plan.explained(directory, is_cached=fetcher is not None)

    def flush(self) -> None:
        """Return when every sample that this process has loaded is as durable as the levels make it."""
        if self._fetcher is not None:
            self._fetcher.levels.flush()

    def clear(self) -> None:
        """Forget every sample, on disk too.

        `NotCachedError` if there is no dataset, as nothing could load the samples again.
        """
        self._plan.check_clear()
        if self._fetcher is not None:
            self._fetcher.levels.clear()


setattr(CachedDataset, ADDED_ATTRIBUTE, True)
setattr(
    CachedDataset,
    ORIGINAL_ATTRIBUTE,
    property(lambda self: (self._plan.dataset, self._plan.transform)),
)
