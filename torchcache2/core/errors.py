"""The exceptions.

::

    TorchcacheError
    ├── OptionError (ValueError)          an unknown option, or a value that it cannot take
    ├── DecorationError (TypeError)       the decorated thing is neither module nor function
    └── NotCachedError (RuntimeError)     under ``strict=True`` and in a warmup: a call that cannot be cached
        ├── InputError (ValueError)       ... it has no batch, or batches that differ
        ├── UnhashableArgumentError (TypeError)  ... an argument cannot be put in a key
        └── OutputError (ValueError)      ... its output is not batched, or cannot be kept

The first two are a programmer's mistakes and are raised at once. What works without the cache works with it:
without ``strict=True``, a call that cannot be cached is passed to the plain forward and told once. Faults of
storage or network are never exceptions: they are counted misses and one warning.

The ``__module__`` of a public class, here and elsewhere, is ``torchcache2``, from where it is imported: this
is the path that pickles and tracebacks name, so that a pickle can be loaded when the class's file has moved.
"""

from __future__ import annotations

__all__ = [
    "DecorationError",
    "InputError",
    "NotCachedError",
    "OptionError",
    "OutputError",
    "TorchcacheError",
    "UnhashableArgumentError",
    "hint",
]


class TorchcacheError(Exception):
    """Base of every exception that torchcache2 raises."""

    __module__ = "torchcache2"


class OptionError(TorchcacheError, ValueError):
    """An option that does not exist, or a value that it cannot take."""

    __module__ = "torchcache2"


class DecorationError(TorchcacheError, TypeError):
    """``@torchcache`` was put on something that is neither a module nor a function."""

    __module__ = "torchcache2"


class NotCachedError(TorchcacheError, RuntimeError):
    """A call that cannot be cached, where ``strict=True`` or a warmup makes that an error."""

    __module__ = "torchcache2"


class InputError(NotCachedError, ValueError):
    """A call without anything to cache by, or whose arguments differ in batch size."""

    __module__ = "torchcache2"


class UnhashableArgumentError(NotCachedError, TypeError):
    """An argument whose value cannot be put in a key."""

    __module__ = "torchcache2"


class OutputError(NotCachedError, ValueError):
    """An output with a tensor whose first dimension is not the batch, or that cannot be kept."""

    __module__ = "torchcache2"


def hint(value: object) -> str:
    """What to do about a value of a well-known kind that cannot be cached; empty if nothing is known."""
    kind = type(value)
    if kind.__name__.endswith("Cache") and kind.__module__.startswith("transformers."):
        return "; pass use_cache=False to have the call cached"
    return ""
