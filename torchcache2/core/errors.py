"""The exceptions.

::

    TorchcacheError
    ├── OptionError (ValueError)
    ├── DecorationError (TypeError)
    ├── MissingSampleError (LookupError)
    ├── DeviceError (RuntimeError)
    └── NotCachedError (RuntimeError)
        ├── InputError (ValueError)
        ├── UnhashableArgumentError (TypeError)
        └── OutputError (ValueError)

The first two are a programmer's mistakes, and are raised at once. The third means that samples served without
their dataset are missing; the fourth that an item must be computed while all weights are on another device.
The others are raised only under ``strict=True`` and in a warmup: otherwise a call that cannot be cached runs
the plain forward, with one warning. Other faults of storage or network are never exceptions, but counted
misses and one warning.
"""

from __future__ import annotations

import sys
from typing import Any


class TorchcacheError(Exception):
    """The base of all exceptions of this library."""


class OptionError(TorchcacheError, ValueError):
    """An option does not exist, or has an invalid value."""


class DecorationError(TorchcacheError, TypeError):
    """`torchcache` cannot decorate this object."""


class MissingSampleError(TorchcacheError, LookupError):
    """A sample is missing, and there is no dataset to load it from."""


class DeviceError(TorchcacheError, RuntimeError):
    """An item must be computed, but its batch and all weights are on different devices."""


class NotCachedError(TorchcacheError, RuntimeError):
    """A call cannot be cached, and ``strict=True``, or a warmup, makes that an error."""


class InputError(NotCachedError, ValueError):
    """No argument of a call is batched, or the batch sizes of arguments differ."""


class UnhashableArgumentError(NotCachedError, TypeError):
    """An argument has a value that cannot be put in a key."""


class OutputError(NotCachedError, ValueError):
    """The first dimension of an output's tensor is not the batch, or the output cannot be stored."""


_PUBLIC = (TorchcacheError, OptionError, DecorationError, MissingSampleError, DeviceError, NotCachedError)
for _error in (*_PUBLIC, InputError, UnhashableArgumentError, OutputError):
    _error.__module__ = "torchcache2"  # the path in pickles, so that files may move


# What reading and writing a folder raises. It never reaches a training loop: tiers count it as misses, and
# the commands of ``torchcache2`` report it.


class UnreadableError(Exception):
    """A segment or directory that this process cannot read."""


class DamagedError(UnreadableError):
    """Bytes that no version of this library has written: a file, a block, a header or its JSON."""


class NewerFormatError(UnreadableError):
    """A segment or a directory of another version of the format, mostly a later one."""


class AwayError(OSError):
    """Bytes in a bucket that fails now; the user has been warned."""


class TooLargeError(UnreadableError):
    """A segment with rows of more bytes than the reader allows."""


class UnknownClassError(UnreadableError):
    """A class, dtype or device that is unknown in this process, or a class whose fields have changed.

    Attributes
    ----------
    name : str
        What is unknown; a class as ``module:qualname``.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r} {reason}")
        self.name = name


class UnserialisableError(Exception):
    """A schema without a JSON form; the message names the type at fault, and its place."""


def hint(value: object) -> str:
    """Advice for a well-known kind of value that cannot be cached; empty if there is none."""
    kind = type(value)
    if kind.__name__.endswith("Cache") and kind.__module__.startswith("transformers."):
        return "; pass use_cache=False to have the call cached"
    return ""


def require(library: str, extra: str, wanted: str) -> Any:
    """Import a library that only some options need; `OptionError` says how to install it.

    `extra` is the extra of this package that installs it, and `wanted` the option as the user has written it.
    """
    try:
        __import__(library)  # unlike `importlib`, takes no lock if already imported
        return sys.modules[library]
    except ImportError as error:
        raise OptionError(
            f'{wanted} needs a library that is not installed: pip install "torchcache2[{extra}]" ({error})'
        ) from None


def attribute(value: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of anybody's object; `otherwise` if reading it raises, whatever that is."""
    try:
        return getattr(value, name, otherwise)
    except Exception:
        return otherwise
