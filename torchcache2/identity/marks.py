"""The marks of this library: its version, and what the decorator leaves on modules and functions."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torchcache2.core.errors import attribute

__version__ = "0.1.0"

ORIGINAL_ATTRIBUTE = "_torchcache_original"  # attribute of a wrapper: what it wraps
BINDING = "_torchcache_binding"  # attribute of a decorated class: its `Binding`
ADDED_ATTRIBUTE = "_torchcache_added"  # attribute of a method that the decorator added
METHOD = "method"  # `ADDED_ATTRIBUTE` of the class that replaces an object's own method
LAZY_ATTRIBUTE = "_torchcache_lazy"  # attribute of a lazily loaded module: its `Lazy`


def is_ours(value: Any) -> bool:
    """Whether a function, or the class of an object, belongs to this library.

    Marks are not enough: `functools.wraps` copies them to other wrappers.
    """
    scope = attribute(value, "__globals__")  # in some classes this is a descriptor
    module = scope.get("__name__", "") if isinstance(scope, dict) else type(value).__module__
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def original(value: Any) -> Any:
    """The function inside a wrapper of the decorator; anything else unchanged."""
    return getattr(value, ORIGINAL_ATTRIBUTE, value) if is_ours(value) else value


def is_method(value: Any) -> bool:
    """Whether a value replaces a method of one object."""
    return getattr(type(value), ADDED_ATTRIBUTE, None) == METHOD and is_ours(value)


def without_ours(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object as if it were not decorated."""
    own = {name: original(value) if is_method(value) else value for name, value in fields.items()}
    return {
        name: value
        for name, value in own.items()
        if name != "cache_instance" and (value is not None or fields[name] is None)
    }


def cache_options(obj: Any) -> list[Any]:
    """The options of a cached module or function that change its output; empty if all are defaults."""
    caches = getattr(vars(obj).get("cache_instance"), "methods", {})
    found = []
    for method, cache in sorted(caches.items()) or [("forward", getattr(type(obj), BINDING, None))]:
        settings = getattr(cache, "settings", None)
        names = ("cache_dtype", "subsample_count", "persistent_module_hash")
        ignored = vars(obj).get("torchcache_ignore", getattr(settings, "ignore", None))
        values = [vars(obj).get(f"torchcache_{name}", getattr(settings, name, None)) for name in names]
        values += [ignored] if ignored else []
        if any(value is not None for value in values):
            found += values if method == "forward" else [method, *values]
    return found


def own_attributes(function: types.FunctionType) -> dict[str, Any]:
    """The attributes of a function except those that the decorator added."""
    ours = ("__wrapped__", "cache_instance", ORIGINAL_ATTRIBUTE, ADDED_ATTRIBUTE, BINDING)
    return {name: value for name, value in vars(function).items() if name not in ours}
