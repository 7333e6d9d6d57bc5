"""Dtypes of tensors over memory that numpy maps."""

from __future__ import annotations

import numpy as np
import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown

_BITS = {"8-bit": torch.uint8, "16-bit": torch.uint16, "32-bit": torch.uint32, "64-bit": torch.uint64}
_OF_NUMPY = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def checked_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype, or the one that a text stands for; `OptionError` if no plain tensor can have it."""
    found = _BITS.get(dtype) if isinstance(dtype, str) else dtype
    try:
        if isinstance(found, torch.dtype) and not str(found).startswith("torch.q"):  # those are quantized
            one, other = (torch.from_numpy(np.zeros(1, numpy_name(found))).view(found) for _ in range(2))
            one.copy_(other)
            return found
    except RuntimeError:  # torch cannot copy it
        pass
    raise OptionError(
        f"dtype={shown(dtype)}: expected a dtype of plain tensors, or one of {', '.join(_BITS)}"
    )


def numpy_name(dtype: torch.dtype) -> str:
    """What numpy calls a dtype, or ints of the same size if it has no such type."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _OF_NUMPY else f"i{dtype.itemsize}"
