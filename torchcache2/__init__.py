"""Caching for PyTorch that never changes a result."""

import typing as _typing

from torchcache2.core.logs import logger as _logger
from torchcache2.core.logs import set_logger_config
from torchcache2.identity.marks import __version__

if _typing.TYPE_CHECKING:
    from torchcache2.core.errors import (
        DecorationError,
        DeviceError,
        InputError,
        MissingSampleError,
        NotCachedError,
        OptionError,
        OutputError,
        TorchcacheError,
        UnhashableArgumentError,
    )
    from torchcache2.core.keys import Keys
    from torchcache2.core.settings import CacheSettings
    from torchcache2.core.values import register_value
    from torchcache2.datasets.cached import CachedDataset
    from torchcache2.datasets.keyed import CachedStream, CacheLoader
    from torchcache2.datasets.shards import LazyShardDataset
    from torchcache2.datasets.slots import SharedCache, get_shm_size
    from torchcache2.datasets.tally import DatasetStats
    from torchcache2.decorator.lazymodule import LazyModule
    from torchcache2.decorator.modulecache import ModuleCache
    from torchcache2.decorator.torchcache import cache_of, torchcache, uncache
    from torchcache2.engine.cache import Cache
    from torchcache2.engine.stats import CacheStats
    from torchcache2.engine.warmup import Estimate, WarmupStats

__all__ = [
    "Cache",
    "CacheLoader",
    "CacheSettings",
    "CacheStats",
    "CachedDataset",
    "CachedStream",
    "DatasetStats",
    "DecorationError",
    "DeviceError",
    "Estimate",
    "InputError",
    "Keys",
    "LazyModule",
    "LazyShardDataset",
    "MissingSampleError",
    "ModuleCache",
    "NotCachedError",
    "OptionError",
    "OutputError",
    "SharedCache",
    "TorchcacheError",
    "UnhashableArgumentError",
    "WarmupStats",
    "__version__",
    "cache_of",
    "get_shm_size",
    "register_value",
    "set_logger_config",
    "torchcache",
    "uncache",
]

_FILES = {
    "_call_method": "decorator.lazymodule",  # which pickles name
    "_load_cache": "decorator.modulecache",
    "_load_instance": "decorator.wrap",
    "Cache": "engine.cache",
    "CacheLoader": "datasets.keyed",
    "CacheSettings": "core.settings",
    "CacheStats": "engine.stats",
    "CachedDataset": "datasets.cached",
    "CachedStream": "datasets.keyed",
    "DatasetStats": "datasets.tally",
    "Estimate": "engine.warmup",
    "Keys": "core.keys",
    "LazyModule": "decorator.lazymodule",
    "LazyShardDataset": "datasets.shards",
    "ModuleCache": "decorator.modulecache",
    "SharedCache": "datasets.slots",
    "WarmupStats": "engine.warmup",
    "cache_of": "decorator.torchcache",
    "get_shm_size": "datasets.slots",
    "register_value": "core.values",
    "torchcache": "decorator.torchcache",
    "uncache": "decorator.torchcache",
}


def __getattr__(name: str) -> _typing.Any:
    # The command line would not be patient with the seconds that torch and its compiler take to import.
    if name not in (*__all__, *_FILES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FILES.get(name, 'core.errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _logger.handlers:  # else the application has configured it already
    set_logger_config()
