"""The exceptions.

::

    TorchcacheError
    ├── OptionError (ValueError)          an unknown option, or a value that it cannot take
    ├── DecorationError (TypeError)       the decorated thing is neither module nor function
    ├── InputError (ValueError)           a call without a tensor, or with batches that differ
    ├── UnhashableArgumentError (TypeError)  an argument that cannot be put in a key
    └── OutputError (ValueError)          an output that is not batched

All of them are a programmer's mistakes and are raised at once. Faults of storage or network are
never exceptions: they are counted misses and one warning.
"""

from __future__ import annotations

__all__ = [
    "DecorationError",
    "InputError",
    "OptionError",
    "OutputError",
    "TorchcacheError",
    "UnhashableArgumentError",
]


class TorchcacheError(Exception):
    """Base of every exception that torchcache2 raises."""


class OptionError(TorchcacheError, ValueError):
    """An option that does not exist, or a value that it cannot take."""


class DecorationError(TorchcacheError, TypeError):
    """``@torchcache`` was put on something that is neither a module nor a function."""


class InputError(TorchcacheError, ValueError):
    """A call without a tensor to cache by, or whose tensors differ in batch size."""


class UnhashableArgumentError(TorchcacheError, TypeError):
    """An argument whose value cannot be put in a key."""


class OutputError(TorchcacheError, ValueError):
    """An output with a tensor whose first dimension is not the batch."""
