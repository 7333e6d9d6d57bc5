"""Keys of samples: 16 bytes for the index of a sample, which is an int, a text or bytes.

Those of ints are in `torchcache2.core.keys`. Others are hashed with XXH3-128, behind a byte that says what
they are. The keys are part of the file format: see ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Keys, int_keys

Index = int | str | bytes

_EXPECTED = (
    "a CachedDataset takes one int, str or bytes at a time; for several samples use a DataLoader, or "
    "[dataset[i] for i in indices]"
)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def as_index(index: Any, expected: str = _EXPECTED) -> Index:
    """An index as an int, str or bytes.

    An int may be one of numpy, or a tensor without dimensions. `TypeError`, which says what is `expected`,
    for anything else.
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
    raise TypeError(f"an index of type {kind.__name__}: {expected}")


def keys_of(namespace: bytes, indices: Sequence[Index]) -> Keys:
    """The keys of n indices, as `as_index` gives them."""
    if all(type(index) is int for index in indices):
        with contextlib.suppress(OverflowError):
            return int_keys(namespace, np.array(indices, np.int64))
    data = b"".join(map(_key, indices))
    return Keys(namespace, np.frombuffer(data, np.uint8).reshape(-1, 16))


def _key(index: Index) -> bytes:
    if isinstance(index, int):
        if _LEAST <= index <= _MOST:
            return int_keys(bytes(16), np.array([index], np.int64)).data.tobytes()
        return xxh3_128_digest(b"i" + str(index).encode())
    if isinstance(index, bytes):
        return xxh3_128_digest(b"b" + index)
    return xxh3_128_digest(b"s" + index.encode("utf-8", "surrogatepass"))
