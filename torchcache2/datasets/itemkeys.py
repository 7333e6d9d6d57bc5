"""Keys of samples: 16 bytes for the index of a sample, which is an int, a text or bytes.

The key of an int is made of two mixers, each of which takes different ints to different numbers, so that no
two ints have one key. Others are hashed with XXH3-128, behind a byte that says what they are. The keys are
part of the file format: see ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from torchcache2.core.arrays import Positions
from torchcache2.core.keys import Keys

__all__ = ["Index", "as_index", "int_keys", "keys_of"]

Index = int | str | bytes

# For each half of a key its constants: those of splitmix64 (Steele, Lea, Flood 2014), with variant 13 of
# Stafford's mixers (2011), and of MurmurHash3's finalizer (Appleby 2011), with another increment before it.
_INCREMENTS = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03], np.uint64)
_STEPS = (
    (np.array([30, 33], np.uint64), np.array([0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD], np.uint64)),
    (np.array([27, 33], np.uint64), np.array([0x94D049BB133111EB, 0xC4CEB9FE1A85EC53], np.uint64)),
)
_LAST_SHIFTS = np.array([31, 33], np.uint64)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def as_index(index: Any) -> Index:
    """An index as an int, str or bytes.

    An int may be one of numpy, or a tensor without dimensions. `TypeError` for anything else.
    """
    kind = type(index)
    if kind is int or kind is str or kind is bytes:
        return index  # type: ignore[no-any-return]
    if isinstance(index, str):
        return str.__str__(index)  # `str(index)` drops zeros at the end of a text of numpy
    if isinstance(index, bytes):
        return bytes(index)
    if not getattr(index, "shape", ()):  # a tensor (1,) would be taken for an int
        with contextlib.suppress(TypeError):
            return int(operator.index(index))
    raise TypeError(
        f"an index of type {kind.__name__}: a CachedDataset takes one int, str or bytes at a time; for "
        "several samples use a DataLoader, or [dataset[i] for i in indices]"
    )


def keys_of(namespace: bytes, indices: Sequence[Index]) -> Keys:
    """The keys of n indices, as `as_index` gives them."""
    if all(type(index) is int for index in indices):
        with contextlib.suppress(OverflowError):
            return int_keys(namespace, np.array(indices, np.int64))
    data = b"".join(map(_key, indices))
    return Keys(namespace, np.frombuffer(data, np.uint8).reshape(-1, 16))


def int_keys(namespace: bytes, indices: Positions) -> Keys:
    """The keys of n ints of 64 bits."""
    mixed = indices.view(np.uint64)[:, None] + _INCREMENTS
    for shifts, factors in _STEPS:
        mixed ^= mixed >> shifts
        mixed *= factors
    mixed ^= mixed >> _LAST_SHIFTS
    return Keys(namespace, mixed.astype("<u8", copy=False).view(np.uint8))


def _key(index: Index) -> bytes:
    if isinstance(index, int):
        if _LEAST <= index <= _MOST:
            return int_keys(bytes(16), np.array([index], np.int64)).data.tobytes()
        return xxh3_128_digest(b"i" + str(index).encode())
    if isinstance(index, bytes):
        return xxh3_128_digest(b"b" + index)
    return xxh3_128_digest(b"s" + index.encode("utf-8", "surrogatepass"))
