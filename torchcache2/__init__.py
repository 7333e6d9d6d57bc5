"""Caching for PyTorch that never changes a result."""

from torchcache2.cache import Cache
from torchcache2.errors import (
    DecorationError,
    InputError,
    OptionError,
    OutputError,
    TorchcacheError,
    UnhashableArgumentError,
)
from torchcache2.keys import Keys
from torchcache2.logs import logger as _logger
from torchcache2.logs import set_logger_config
from torchcache2.module import torchcache
from torchcache2.settings import CacheSettings
from torchcache2.stats import CacheStats
from torchcache2.version import __version__

__all__ = [
    "Cache",
    "CacheSettings",
    "CacheStats",
    "DecorationError",
    "InputError",
    "Keys",
    "OptionError",
    "OutputError",
    "TorchcacheError",
    "UnhashableArgumentError",
    "__version__",
    "set_logger_config",
    "torchcache",
]


if not _logger.handlers:  # else the application has configured it already
    set_logger_config()
