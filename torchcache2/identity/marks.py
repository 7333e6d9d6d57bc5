"""The marks that the decorator leaves on modules and functions, and questions that they answer."""

from __future__ import annotations

import types
from typing import Any

__all__ = [
    "ADDED_ATTRIBUTE",
    "BINDING",
    "INIT_ATTRIBUTE",
    "ORIGINAL_ATTRIBUTE",
    "cache_options",
    "is_ours",
    "original",
    "own_attributes",
]

ORIGINAL_ATTRIBUTE = "_torchcache_original"  # attribute of a wrapper: what it wraps
BINDING = "_torchcache_binding"  # attribute of a decorated class: its `Binding`
ADDED_ATTRIBUTE = "_torchcache_added"  # attribute of what the decorator has added where there was nothing
INIT_ATTRIBUTE = "_torchcache_init"  # attribute of an instance: its constructor arguments


def is_ours(value: Any) -> bool:
    """Whether a function, or the class of an object, is this library's.

    Marks do not tell: somebody else's wrapper has the same marks if `functools.wraps` has copied them.
    """
    scope = getattr(value, "__globals__", None)  # some classes have a descriptor of this name
    module = scope.get("__name__", "") if isinstance(scope, dict) else type(value).__module__
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def original(value: Any) -> Any:
    """What a wrapper of the decorator wraps; anything else as it is."""
    return getattr(value, ORIGINAL_ATTRIBUTE, value) if is_ours(value) else value


def cache_options(obj: Any) -> list[Any]:
    """The options of a cached module or function that change what it returns; empty if all are usual."""
    settings = getattr(vars(obj).get("cache_instance"), "settings", None)
    if settings is None:
        settings = getattr(getattr(type(obj), BINDING, None), "settings", None)
    names = ("cache_dtype", "subsample_count", "persistent_module_hash")
    ignored = vars(obj).get("torchcache_ignore", getattr(settings, "ignore", None))
    values = [vars(obj).get(f"torchcache_{name}", getattr(settings, name, None)) for name in names]
    values += [ignored] if ignored else []
    return values if any(value is not None for value in values) else []


def own_attributes(function: types.FunctionType) -> dict[str, Any]:
    """The attributes of a function that the decorator has not put there."""
    ours = ("__wrapped__", "cache_instance", ORIGINAL_ATTRIBUTE, ADDED_ATTRIBUTE)
    return {name: value for name, value in vars(function).items() if name not in ours}
