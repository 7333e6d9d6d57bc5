"""Environment variables that overrule the options of every cache of a run."""

from __future__ import annotations

import os

__all__ = ["disabled_by_environment", "strict_by_environment"]


def disabled_by_environment() -> bool:
    """Whether ``TORCHCACHE_DISABLE`` turns caching off for this run."""
    return _is_on("TORCHCACHE_DISABLE")


def strict_by_environment() -> bool:
    """Whether ``TORCHCACHE_STRICT`` makes calls that cannot be cached errors in this run."""
    return _is_on("TORCHCACHE_STRICT")


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable)
    return value is not None and value.strip().lower() not in ("", "0", "false", "no")
