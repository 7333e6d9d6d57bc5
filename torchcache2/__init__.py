"""Caching for PyTorch that never changes a result."""

import typing as _typing

from torchcache2.logs import logger as _logger
from torchcache2.logs import set_logger_config
from torchcache2.version import __version__

if _typing.TYPE_CHECKING:
    from torchcache2.cache import Cache
    from torchcache2.errors import (
        DecorationError,
        InputError,
        NotCachedError,
        OptionError,
        OutputError,
        TorchcacheError,
        UnhashableArgumentError,
    )
    from torchcache2.keys import Keys
    from torchcache2.module import torchcache
    from torchcache2.settings import CacheSettings
    from torchcache2.stats import CacheStats

__all__ = [
    "Cache",
    "CacheSettings",
    "CacheStats",
    "DecorationError",
    "InputError",
    "Keys",
    "NotCachedError",
    "OptionError",
    "OutputError",
    "TorchcacheError",
    "UnhashableArgumentError",
    "__version__",
    "set_logger_config",
    "torchcache",
]

_FILES = {
    "Cache": "cache",
    "CacheSettings": "settings",
    "CacheStats": "stats",
    "Keys": "keys",
    "torchcache": "module",
}


def __getattr__(name: str) -> _typing.Any:
    # The command line would not be patient with the seconds that torch and its compiler take to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FILES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _logger.handlers:  # else the application has configured it already
    set_logger_config()
