"""The options of `CachedDataset`, checked, and its budgets in bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown
from torchcache2.core.places import SCHEMES, Bucket, check_unused, is_url
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import Size, parse_size
from torchcache2.datasets.serving import Serving
from torchcache2.tiers.make import disk_budget

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
