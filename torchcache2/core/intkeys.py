"""Keys of ints, such as the indices of samples: 16 bytes each, as docs/format.md has them.

A key is made of two mixers, each of which takes different ints to different numbers, so that no two ints have
one key, and the int can be found from the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchcache2.core.arrays import Array, Positions
from torchcache2.core.keys import Keys

__all__ = ["filled", "indices_of", "int_keys"]

# For each half of a key its constants: those of splitmix64 (Steele, Lea, Flood 2014), with variant 13 of
# Stafford's mixers (2011), and of MurmurHash3's finalizer (Appleby 2011), with another increment before it.
_INCREMENTS = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03], np.uint64)
_STEPS = (
    (np.array([30, 33], np.uint64), np.array([0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD], np.uint64)),
    (np.array([27, 33], np.uint64), np.array([0x94D049BB133111EB, 0xC4CEB9FE1A85EC53], np.uint64)),
)
_LAST_SHIFTS = np.array([31, 33], np.uint64)


def int_keys(namespace: bytes, indices: Positions) -> Keys:
    """The keys of n ints of 64 bits."""
    mixed = indices.view(np.uint64)[:, None] + _INCREMENTS
    for shifts, factors in _STEPS:
        mixed ^= mixed >> shifts
        mixed *= factors
    mixed ^= mixed >> _LAST_SHIFTS
    return Keys(namespace, mixed.astype("<u8", copy=False).view(np.uint8))


def indices_of(keys: Array) -> tuple[Positions, Array]:
    """The ints whose keys these are, uint8 ``(n, 16)``, and whether each is the key of an int at all."""
    mixed = keys.view("<u8")[:, 0].astype(np.uint64)  # the first half alone tells ints apart
    mixed = _unshifted(mixed, _LAST_SHIFTS[0])
    for shifts, factors in reversed(_STEPS):
        mixed = _unshifted(mixed * np.uint64(pow(int(factors[0]), -1, 1 << 64)), shifts[0])
    indices = (mixed - _INCREMENTS[0]).view(np.int64)
    return indices, (int_keys(bytes(16), indices).data == keys).all(axis=1)


def filled(length: int, keys: Sequence[Array]) -> float:
    """Which share of the ints from 0 to `length` - 1 has one of some keys, each uint8 ``(n, 16)``."""
    indices, are_ints = indices_of(np.concatenate([np.empty((0, 16), np.uint8), *keys]))
    there = np.unique(indices[are_ints & (indices >= 0) & (indices < length)])
    return len(there) / length if length else 1.0


def _unshifted(mixed: Array, shift: np.uint64) -> Array:
    """What gives `mixed` when it is shifted to the right, and both are combined by exclusive or."""
    undone: Array = mixed ^ (mixed >> shift) ^ (mixed >> (shift + shift))
    return undone
