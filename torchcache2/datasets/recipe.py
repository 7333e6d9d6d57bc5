"""`Recipe`: what the processes that use one cache of samples agree on, which is what a pickle of it holds."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import listed, shown
from torchcache2.core.places import SCHEMES, Bucket, Servers, check_unused, is_url
from torchcache2.core.private import is_given_work
from torchcache2.core.settings import CacheSettings, Policy, disabled_by_environment
from torchcache2.core.sizes import Size, parse_size
from torchcache2.datasets.identity import Identity, document, explained_dataset, identify, length_of
from torchcache2.datasets.source import Source
from torchcache2.datasets.store import Fetcher, Levels, SampleStore
from torchcache2.datasets.tally import Tally
from torchcache2.files.directory import CacheDirectory
from torchcache2.tiers.make import disk_budget
from torchcache2.tiers.redis.holding import hold
from torchcache2.tiers.redis.server import one_of, own_servers

_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.8
_ALIASES = {"disk_cache_path": "path", "dataset_name": "name"}
_OTHERS = {  # of other libraries, or nearly right
    "compress": "use compression='brotli'",
    "max_files_per_folder": "many samples are in one file here",
    "max_memory_cache_size": "it is memory_cache_size",
    "max_persistent_cache_size": "it is disk_cache_size",
    "persistent_cache_dir": "it is path",
    "cache_dir": "it is path",
}


def aliased(path: Any, name: Any, others: dict[str, Any]) -> tuple[Any, Any]:
    """`path` and `name`, which may be among the `others` by the names that other libraries give them."""
    given = {"path": path, "name": name}
    for alias, option in _ALIASES.items():
        value = others.pop(alias, None)
        if value is not None:
            if given[option] is not None:
                raise OptionError(
                    f"{option}={shown(given[option])} and {alias}={shown(value)}: these are one option"
                )
            given[option] = value
    return given["path"], given["name"]


def check_others(others: Mapping[str, Any], of: str = "CachedDataset") -> None:
    """Raise `OptionError` for an option that does not exist."""
    for option in others:
        advice = _OTHERS.get(option, f"see help(torchcache2.{of}) for the options")
        raise OptionError(f"{of} has no option {option!r}: {advice}")


def check_portable(path: Any, backend: Any, verify: Any, partial: Any) -> None:
    """Raise `OptionError` for options without which, or with which, there must be a dataset."""
    if path is None:
        raise OptionError("dataset=None serves the samples that are in a folder: give it as path=")
    if backend != "local":
        raise OptionError(
            f"dataset=None with backend={backend!r}: a server does not tell which samples it has"
        )
    if verify:
        raise OptionError(f"verify={shown(verify)} loads samples again, for which there must be a dataset")
    if not isinstance(partial, bool):
        raise OptionError(f"partial={shown(partial)}: expected True or False")


def check_dataset(dataset: Any, *, partial: Any = False) -> None:
    """Raise `OptionError` if samples cannot be asked for by an index."""
    if partial is not False:
        raise OptionError(
            f"partial={shown(partial)} is about samples without their dataset, as of "
            "CachedDataset(None, path): a dataset loads what is missing"
        )
    if dataset is None:
        raise OptionError(
            "dataset is None: samples of a folder are served by CachedDataset(None, path), which may be "
            "given as the dataset here"
        )
    if isinstance(dataset, IterableDataset):
        raise OptionError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no index: a CachedDataset "
            "needs __getitem__. If all of it fits in memory, list(dataset) has one"
        )
    if not hasattr(dataset, "__getitem__"):
        raise OptionError(
            f"dataset is of type {type(dataset).__name__}: expected an object with __getitem__, such as a "
            "torch.utils.data.Dataset or a list"
        )


def check_values(transform: Any, verify: Any) -> None:
    """Raise `OptionError` for a value that cannot be meant."""
    if transform is not None and not callable(transform):
        raise OptionError(f"transform={shown(transform)}: expected None or a callable that takes a sample")
    if isinstance(verify, bool) or not isinstance(verify, (int, float)) or not 0 <= verify <= 1:
        raise OptionError(
            f"verify={shown(verify)}: expected the share of hits to load again, from 0.0 to 1.0"
        )


def level_settings(
    path: Any,
    memory_cache_size: Size | None,
    disk_cache_size: Size | None,
    policy: Any,
    compression: Any,
    serving: Serving | None = None,
    for_buckets: Mapping[str, Any] | None = None,
) -> CacheSettings:
    """The settings of the tiers, with both budgets in bytes, as of now; no server is started yet.

    The options `for_buckets` are ``local_dir``, ``storage_options`` and ``remote_size``.
    """
    _check_place(path, disk_cache_size, serving)
    for_buckets = for_buckets or {}
    if is_url(path):
        path = Bucket.of(path, **for_buckets)
    else:
        check_unused(for_buckets, "path")
    memory = memory_cache_size
    if memory is None:
        memory = _MEMORY_SHARE if serving is None else 0
    disk = disk_cache_size if disk_cache_size is not None else 0 if path is None else _DISK_SHARE
    parse_size("memory_cache_size", memory, free=0)
    parse_size("disk_cache_size", disk, free=0)
    settings = CacheSettings(
        max_memory_cache_size=memory,
        max_persistent_cache_size=disk,
        persistent=disk != 0 or serving is not None,
        persistent_cache_dir=path,
        policy=policy,
        compression=compression,
        distributed="off",
    )
    folder = settings.persistent_cache_dir
    if serving is not None:
        budget = 0  # a server has its own
    elif folder is None or (isinstance(folder, Bucket) and folder.local_dir is None):
        budget = settings.persistent_budget(tempfile.gettempdir())
    elif isinstance(folder, Bucket):
        budget = disk_budget(settings, str(folder.local_dir))
    else:
        budget = disk_budget(settings, str(folder))
    budgets = {"max_memory_cache_size": settings.memory_budget(), "max_persistent_cache_size": budget}
    return settings.replace(budgets)


def _check_place(path: Any, disk_cache_size: Size | None, serving: Serving | None) -> None:
    """Raise `OptionError` if samples cannot be in this folder, or not on servers and in a folder."""
    if path == "redis":
        raise OptionError("path='redis': path is a folder. To keep samples on a server, pass backend='redis'")
    if is_url(path) and path.startswith(SCHEMES):  # the path is not shown: it may have a password
        raise OptionError(
            "path is the URL of a Redis server: to keep samples there, pass backend='redis', "
            "hosts='redis://…'"
        )
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path)):
        raise OptionError(f"path={shown(path)}: expected None, the path of a folder, or the URL of a bucket")
    if serving is not None and not (path is None and disk_cache_size is None):
        given = "path" if path is not None else "disk_cache_size"
        raise OptionError(
            f"{given} and backend='redis': samples are on a server, or in a folder, not in both"
        )


CAPACITY = 0.25


@dataclasses.dataclass(frozen=True)
class Serving:
    """The options about servers, checked.

    Attributes
    ----------
    hosts : Servers or None
        The servers that were named, or that one of them which this node uses; None: one of our own on each
        node.
    cluster_mode : bool
        Whether each node uses all servers, or one only.
    capacity : int, str or float
        Memory that a server of our own may take.
    policy : {"mru", "lru"}
        What a server of our own does when it is full.
    buffer : int
        So many samples are gathered before they are written.
    """

    hosts: Servers | None
    cluster_mode: bool
    capacity: Size
    policy: Policy
    buffer: int

    @classmethod
    def of(
        cls,
        backend: Any,
        hosts: Any,
        *,
        cluster_mode: Any,
        capacity_per_node: Any,
        policy: Any,
        writer_buffer_size: Any,
    ) -> Serving | None:
        """From the options as they were given; None if `backend` is no server."""
        if backend not in ("local", "redis"):
            raise OptionError(f"backend={backend!r}: expected 'redis' or 'local'")
        if type(writer_buffer_size) is not int or writer_buffer_size < 1:
            raise OptionError(
                f"writer_buffer_size={writer_buffer_size!r}: expected a number of samples from 1 on"
            )
        if not isinstance(cluster_mode, bool):
            raise OptionError(f"cluster_mode={cluster_mode!r}: expected True or False")
        parse_size("capacity_per_node", capacity_per_node, free=0)
        if backend == "local":
            if hosts is not None:  # they are not shown, as there may be a password in them
                raise OptionError("hosts are servers, which only backend='redis' uses")
            if capacity_per_node != CAPACITY:
                raise OptionError(
                    f"capacity_per_node={capacity_per_node!r} is about servers, which only backend='redis' "
                    "uses: give memory_cache_size or disk_cache_size"
                )
            return None
        named = hosts
        if hosts is not None:
            named = Servers.of(hosts if cluster_mode else one_of(hosts), buffer=writer_buffer_size)
        return cls(named, cluster_mode, capacity_per_node, policy, writer_buffer_size)

    def servers(self) -> Servers:
        """The servers that this node uses; those of our own are started if they do not run yet."""
        if self.hosts is not None:
            return self.hosts
        return own_servers(self.capacity, self.policy, cluster_mode=self.cluster_mode, buffer=self.buffer)


@dataclasses.dataclass(kw_only=True)
class StorePlan:
    """How samples under keys are kept.

    Attributes
    ----------
    title : str
        What messages call the store.
    identity : Identity
        Which samples they are.
    document : dict
        What ``fingerprint.json`` says about it.
    settings : CacheSettings
        Those of the tiers, with budgets in bytes.
    options : str
        The options as they were given. Ranks whose options are equal share, though they may have measured
        different numbers of free bytes.
    serving : Serving or None
        Which servers keep samples; None if none do.
    tally : Tally
        What all processes have counted.
    job : bytes or None
        By which processes find each other; None before the first one has begun.
    """

    title: str
    identity: Identity
    document: dict[str, Any]
    settings: CacheSettings
    options: str
    serving: Serving | None
    tally: Tally
    job: bytes | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_of_earlier_run:
            self.job = None
            if self.serving is not None:  # a server of our own has ended with that run
                self.settings = self.settings.replace({"persistent_cache_dir": None})

    @property
    def is_of_earlier_run(self) -> bool:
        """Whether this comes from the pickle of a run that has ended."""
        # A process that is spawned has no parent yet while it is given its work.
        is_child = multiprocessing.parent_process() is not None or is_given_work()
        return self.tally.is_new and not is_child

    def store(self) -> SampleStore | None:
        """The part of this process in the store; None if nothing is kept."""
        sizes = self.settings.max_memory_cache_size, self.settings.is_persistent
        if disabled_by_environment() or not any(sizes):
            return None
        if self.serving is not None:
            servers = self.settings.servers or self.serving.servers()
            self.settings = self.settings.replace({"persistent_cache_dir": servers})
            hold(servers)
        return self.opened()

    def opened(self, **options: Any) -> SampleStore:
        """The same, whatever else says that nothing is kept; the options are those of `Levels`."""
        namespace, tally = self.identity.namespace, self.tally
        levels = Levels(self.settings, namespace, self.document, self.options, self.job, tally, **options)
        self.job = levels.job
        return SampleStore(self.title, levels, tally)


@dataclasses.dataclass(kw_only=True)
class Plan(StorePlan):
    """How samples of a dataset are cached.

    Attributes
    ----------
    dataset, transform : object
        The source, and what is called with each sample after the cache.
    name, version : str or int, optional
        What stands for the dataset, instead of what is read of it or besides.
    checks : bool
        Whether the dataset is watched for random numbers that it draws.
    verify : float
        Share of hits that are loaded again.
    """

    dataset: Any
    transform: Any
    name: str | None
    version: str | int | None
    checks: bool
    verify: float

    @classmethod
    def of(
        cls,
        dataset: Any,
        settings: CacheSettings,
        serving: Serving | None,
        *,
        name: str | None,
        version: str | int | None,
        transform: Any,
        options: str,
        checks: bool,
        verify: float,
    ) -> Plan:
        """Read the dataset; an `OptionError` if no later run could know what is kept of it."""
        length, identity = length_of(dataset), identify(dataset, name=name, version=version)
        plan = cls(
            dataset=dataset,
            transform=transform,
            title=type(dataset).__name__ if name is None else name,
            identity=identity,
            document=document(identity, dataset, length, name, version),
            settings=settings,
            options=options,
            serving=serving,
            name=name,
            version=version,
            checks=checks,
            verify=verify,
            tally=Tally(length),
        )
        plan._check_readable()
        return plan

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds; if an earlier run has made it, the code may have changed since."""
        super().__setstate__(state)
        if self.is_of_earlier_run:
            self.identity = identify(self.dataset, name=self.name, version=self.version)
            length = length_of(self.dataset)
            self.document = document(self.identity, self.dataset, length, self.name, self.version)

    def _check_readable(self) -> None:
        is_kept = self.serving is not None or self.settings.persistent_cache_dir is not None
        if self.identity.unread and is_kept:
            where = "in path" if self.serving is None else "on the server"
            raise OptionError(
                f"{self.title} has {listed(self.identity.unread)}, which cannot be read, so that no later "
                f"run could know whether the samples {where} are its own: pass name= and version=, which "
                "stand for it"
            )

    def check_clear(self) -> None:
        """Raise `NotCachedError` if samples must not be forgotten."""

    def seen(self) -> bytes:
        """What the dataset is now, as 16 bytes: it is read although it may have a name."""
        return identify(self.dataset).namespace

    def source(self) -> Source:
        """What loads samples in this process."""
        identity = self.identity
        return Source(self.dataset, identity.generators, identity.unseeded, checks=self.checks)

    def fetcher(self, source: Source) -> Fetcher | None:
        """The part of this process in the cache; None if nothing is cached."""
        store = self.store()
        return None if store is None else Fetcher(store, source, self.verify)

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """Why samples were not found; see `CachedDataset.explain`."""
        bypass = None
        if not is_cached:
            bypass = "closed, or turned off by TORCHCACHE_DISABLE, or both sizes are 0"
        elif self.tally.is_random:
            bypass = "it draws random numbers"
        kind, created = self.document["class"], self.document["created"]
        now = self.identity.fingerprint
        if self.serving is not None and bypass is None:
            return (
                f"namespace {now.namespace.hex()}: a server knows no more of a dataset than this number, so "
                "there is nothing to compare with. What other runs have left is found if it has the same"
            )
        return explained_dataset(self.title, kind, now, directory, created, bypass)
