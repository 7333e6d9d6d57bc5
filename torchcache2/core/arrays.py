"""Types of numpy arrays. Comments give the shapes, as mypy does not check them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "Bytes", "Bytes2D", "Flags", "Ordinals", "Positions", "Words"]

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]  # (size,)
Bytes2D = np.ndarray[Any, np.dtype[np.uint8]]  # (n, bytes of a row)
Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (n,): what is true of each item of a batch
Words = np.ndarray[Any, np.dtype[np.uint64]]  # (n, 2): keys as two little-endian numbers
Positions = np.ndarray[Any, np.dtype[np.int64]]  # (n,): places in a batch
Ordinals = np.ndarray[Any, np.dtype[np.int64]]  # (n,): numbers that a `KeyIndex` gives to keys
