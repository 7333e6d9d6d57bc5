"""The options of `CachedDataset`, checked, and its budgets in bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from torchcache2.core.errors import OptionError
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import Size, parse_size
from torchcache2.tiers.make import disk_budget

__all__ = ["aliased", "check_dataset", "check_others", "check_values", "level_settings"]

_DISK_SHARE = 0.8
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
                raise OptionError(f"{option}={given[option]!r} and {alias}={value!r}: these are one option")
            given[option] = value
    return given["path"], given["name"]


def check_others(others: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an option that does not exist."""
    for option in others:
        advice = _OTHERS.get(option, "see help(torchcache2.CachedDataset) for the options")
        raise OptionError(f"CachedDataset has no option {option!r}: {advice}")


def check_dataset(dataset: Any) -> None:
    """Raise `OptionError` if samples cannot be asked for by an index."""
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
        raise OptionError(f"transform={transform!r}: expected None or a callable that takes a sample")
    if isinstance(verify, bool) or not isinstance(verify, (int, float)) or not 0 <= verify <= 1:
        raise OptionError(f"verify={verify!r}: expected the share of hits to load again, from 0.0 to 1.0")


def level_settings(
    path: Any, memory_cache_size: Size, disk_cache_size: Size | None, policy: Any, compression: Any
) -> CacheSettings:
    """The settings of the tiers, with both budgets in bytes, as of now."""
    if path == "redis":
        raise OptionError("path='redis': path is a folder, and this version keeps samples in no server")
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path) or "://" in str(path)):
        raise OptionError(f"path={path!r}: expected None or the path of a local folder, not a URL")
    disk = disk_cache_size if disk_cache_size is not None else 0 if path is None else _DISK_SHARE
    parse_size("memory_cache_size", memory_cache_size, free=0)
    parse_size("disk_cache_size", disk, free=0)
    settings = CacheSettings(
        max_memory_cache_size=memory_cache_size,
        max_persistent_cache_size=disk,
        persistent=disk != 0,
        persistent_cache_dir=path,
        policy=policy,
        compression=compression,
        distributed="off",
    )
    folder = settings.persistent_cache_dir
    if folder is None:
        budget = settings.persistent_budget(tempfile.gettempdir())
    else:
        budget = disk_budget(settings, str(folder))
    budgets = {"max_memory_cache_size": settings.memory_budget(), "max_persistent_cache_size": budget}
    return settings.replace(budgets)
