"""The options of datasets and loaders: a table of valid values, and the settings of the tiers."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown
from torchcache2.core.places import SCHEMES, Bucket, Servers, check_unused, is_url
from torchcache2.core.settings import CacheSettings, Policy, plain_policy, similar
from torchcache2.core.sizes import Size, parse_size
from torchcache2.tiers.make import disk_budget
from torchcache2.tiers.redis.server import one_of, own_servers

CAPACITY = 0.25
_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.8
_ALIASES = {
    "disk_cache_path": "cache_dir",
    "dataset_name": "name",
    "memory_cache_size": "memory_size",
    "disk_cache_size": "disk_size",
}
_OTHERS = {  # names from other libraries, or similar ones
    **{alias: f"it is {name}" for alias, name in _ALIASES.items()},
    "compress": "use compression='brotli'",
    "max_files_per_folder": "many samples are in one file here",
    "max_memory_cache_size": "it is memory_size",
    "max_persistent_cache_size": "it is disk_size",
    "size_limit_gib": "it is memory_size, such as '4GB'",
    **dict.fromkeys(("cache_size", "maxsize", "max_size", "size_limit"), "it is memory_size or disk_size"),
    **dict.fromkeys(("cache_limit", "max_cache_size"), "it is disk_size"),
    **dict.fromkeys(("persistent_cache_dir", "path", "directory", "folder", "location"), "it is cache_dir"),
    **dict.fromkeys(("num_workers", "shuffle", "drop_last"), "give it to the DataLoader"),
}
_FOR_BUCKETS = ("local_dir", "storage_options", "remote_size")


class _Option(NamedTuple):
    """The valid values of an option: in words, and as a check."""

    expected: str
    holds: Callable[[Any], Any]


def is_count(value: object) -> bool:
    """Whether a value is an int of at least 0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 0


def _one_of(*values: Any) -> _Option:
    *first, last = map(repr, values)
    return _Option(f"{', '.join(first)} or {last}", lambda value: value in values)


def _is_int(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _may_be_keys(keys: Any) -> bool:
    is_sequence = hasattr(keys, "__len__") and hasattr(keys, "__getitem__")
    return keys is None or callable(keys) or (is_sequence and not isinstance(keys, (str, bytes, Mapping)))


_SWITCH = _Option("True or False", lambda value: isinstance(value, bool))
_COUNT = _Option("an int from 0 on", is_count)
_OPTIONS = {
    "transform": _Option(
        "None or a callable that takes a sample", lambda value: value is None or callable(value)
    ),
    "keys": _Option("None, a function of the index, or a sequence with a key for each sample", _may_be_keys),
    "verify": _Option(
        "the share of hits to load again, from 0.0 to 1.0",
        lambda share: type(share) in (int, float) and 0 <= share <= 1,
    ),
    "views": _Option("an int of at least 1", _is_int(1)),
    "collate_fn": _Option(
        "None or a callable that takes a list of samples", lambda v: v is None or callable(v)
    ),
    "partial": _SWITCH,
    "name": _Option(
        "a text that stands for the dataset, such as 'coco-train'",
        lambda name: name is None or (isinstance(name, str) and name),
    ),
    "key_prefix": _Option(
        "a text that stands for the values, such as 'coco-train': all loaders with one key_prefix share them",
        lambda prefix: isinstance(prefix, str),
    ),
    "version": _Option(
        "a text or an int",
        lambda version: (
            version is None or (isinstance(version, (str, int)) and not isinstance(version, bool))
        ),
    ),
    "backend": _one_of("redis", "local"),
    "cluster_mode": _SWITCH,
    "writer_buffer_size": _Option("a number of samples from 1 on", _is_int(1)),
    "batch_size": _Option("an int of at least 1", _is_int(1)),
    "num_workers": _Option("an int of at least 0", _is_int(0)),
    "mode": _one_of("rank", "node", "disk"),
    "even": _one_of(None, "drop", "repeat"),
    "seed": _Option("an int from 0 to 2**64 - 1", lambda seed: is_count(seed) and seed < 1 << 64),
    "overflow": _Option(
        "None, or a number from 0 on",
        lambda share: share is None or (isinstance(share, (int, float)) and share >= 0),
    ),
    "min_elements": _COUNT,
    "epoch": _COUNT,
}


def check(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an option of the table with an invalid value."""
    for name, value in options.items():
        option = _OPTIONS.get(name)
        if option is not None and not option.holds(value):
            raise OptionError(f"{name}={shown(value)}: expected {option.expected}")


def check_others(others: Iterable[str], known: Sequence[str], of: str = "CachedDataset") -> None:
    """Raise `OptionError` for an option that does not exist; `known` are those that do."""
    for option in others:
        close = similar(option, known)
        meant = f"did you mean {' or '.join(close)}?" if close else f"the options are {', '.join(known)}"
        raise OptionError(f"{of} has no option {option!r}: {_OTHERS.get(option, meant)}")


def aliased(options: dict[str, Any], others: dict[str, Any]) -> None:
    """Move values in `others` given under aliases, as in other libraries, to their `options`."""
    for alias, option in _ALIASES.items():
        value = others.pop(alias, None)
        if value is not None:
            if options[option] is not None:
                raise OptionError(
                    f"{option}={shown(options[option])} and {alias}={shown(value)}: these name the same "
                    f"option"
                )
            options[option] = value


def check_dataset(dataset: Any) -> None:
    """Raise `OptionError` if samples have no index."""
    if dataset is None:
        raise OptionError(
            "dataset is None: to use the samples of a folder, pass CachedDataset(None, cache_dir) as the "
            "dataset"
        )
    if isinstance(dataset, IterableDataset):
        raise OptionError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no index: a CachedDataset "
            "needs __getitem__. Use CachedStream if its samples have a key, or pass list(dataset) if it fits "
            "in memory"
        )
    if isinstance(dataset, (str, bytes)):
        raise OptionError(
            f"dataset={shown(dataset)}: expected a dataset, and the folder as cache_dir. To use the samples "
            "that are in a folder, pass CachedDataset(None, cache_dir)"
        )
    if not hasattr(dataset, "__getitem__"):
        advice = "; pass its .dataset" if isinstance(dataset, DataLoader) else ""
        raise OptionError(
            f"dataset is of type {type(dataset).__name__}: expected an object with __getitem__, such as a "
            f"torch.utils.data.Dataset or a list{advice}"
        )


def check_served(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for options that require a dataset, or whose absence does."""
    backend, verify = options["backend"], options["verify"]
    if options["cache_dir"] is None:
        raise OptionError("dataset=None serves the samples that are in a folder: give it as cache_dir=")
    if backend != "local":
        raise OptionError(f"dataset=None with backend={backend!r}: a server cannot list its samples")
    for option in ("map", "collate_fn"):
        if options[option] is not None:
            raise OptionError(f"{option}= needs the dataset: what it makes is what the folder has")
    if verify:
        raise OptionError(f"verify={shown(verify)} loads samples again, which needs the dataset")


@dataclasses.dataclass(frozen=True)
class Serving:
    """Which Redis servers keep samples.

    Attributes
    ----------
    hosts : Servers or None
        The named servers, or just the one that this node uses; None: one of our own on each node.
    cluster_mode : bool
        Whether each node uses all servers, or one only.
    capacity : int, str or float
        Memory that a server of our own may take.
    policy : {"keep", "lru"}
        What a full server of our own does.
    buffer : int
        Samples to collect before sending them.
    """

    hosts: Servers | None
    cluster_mode: bool
    capacity: Size
    policy: Policy
    buffer: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Serving | None:
        """From the given options; None if no server keeps samples."""
        hosts, capacity = options["hosts"], options["capacity_per_node"]
        is_cluster, buffer = options["cluster_mode"], options["writer_buffer_size"]
        parse_size("capacity_per_node", capacity, free=0)
        if options["backend"] == "local":
            if hosts is not None:  # not shown, as they may contain a password
                raise OptionError("hosts are Redis servers: pass backend='redis' as well")
            if capacity != CAPACITY:
                raise OptionError(
                    f"capacity_per_node={capacity!r} is for backend='redis' only: give memory_size "
                    f"or disk_size"
                )
            return None
        if hosts is not None:
            hosts = Servers.of(hosts if is_cluster else one_of(hosts), buffer=buffer)
        return cls(hosts, is_cluster, capacity, plain_policy(options["policy"]), buffer)

    def servers(self) -> Servers:
        """The servers that this node uses; starts our own if they do not run yet."""
        if self.hosts is not None:
            return self.hosts
        return own_servers(self.capacity, self.policy, cluster_mode=self.cluster_mode, buffer=self.buffer)


def level_settings(options: Mapping[str, Any], serving: Serving | None = None) -> CacheSettings:
    """The settings of the tiers, with budgets in bytes, as of now; starts no server."""
    path, memory, disk = (options[name] for name in ("cache_dir", "memory_size", "disk_size"))
    _check_place(path, disk, serving)
    for_buckets: dict[str, Any] = {name: options.get(name) for name in _FOR_BUCKETS}
    if is_url(path):
        path = Bucket.of(path, **for_buckets)
    else:
        check_unused(for_buckets, "cache_dir")
    if memory is None:
        memory = _MEMORY_SHARE if serving is None else 0
    if disk is None:
        disk = 0 if path is None else _DISK_SHARE
    parse_size("memory_size", memory, free=0)
    parse_size("disk_size", disk, free=0)
    settings = CacheSettings(
        max_memory_cache_size=memory,
        max_persistent_cache_size=disk,
        persistent=disk != 0 or serving is not None,
        persistent_cache_dir=path,
        policy=options.get("policy", "keep"),
        compression=options.get("compression", "none"),
        distributed="off",
    )
    folder = settings.persistent_cache_dir
    if isinstance(folder, Bucket):
        folder = folder.local_dir
    if serving is not None:
        budget = 0  # a server has its own budget
    elif folder is None:
        budget = settings.persistent_budget(tempfile.gettempdir())
    else:
        budget = disk_budget(settings, str(folder))
    sizes = {"max_memory_cache_size": settings.memory_budget(), "max_persistent_cache_size": budget}
    budgets = {name: f"{size}B" for name, size in sizes.items()}
    return settings.replace(budgets)


def _check_place(path: Any, disk_size: Size | None, serving: Serving | None) -> None:
    """Raise `OptionError` for an invalid folder, or a folder together with servers."""
    if path == "redis":
        raise OptionError(
            "cache_dir='redis': cache_dir is a folder. To keep samples on a server, pass backend='redis'"
        )
    if is_url(path) and path.startswith(SCHEMES):  # not shown, as it may contain a password
        raise OptionError(
            "cache_dir is the URL of a Redis server: to keep samples there, pass backend='redis', "
            "hosts='redis://…'"
        )
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path)):
        raise OptionError(
            f"cache_dir={shown(path)}: expected None, the path of a folder, or the URL of a bucket"
        )
    if serving is not None and not (path is None and disk_size is None):
        given = "cache_dir" if path is not None else "disk_size"
        raise OptionError(
            f"{given} and backend='redis': samples are on a server, or in a folder, not in both"
        )
