"""`Keys`: the keys of a batch, keys of ints, and types of NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.ma  # now: the first `np.unique` imports it, and a child forked meanwhile would wait for ever

# Types of numpy arrays. Comments give the shapes, as mypy does not check them.

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]  # (size,)
Bytes2D = np.ndarray[Any, np.dtype[np.uint8]]  # (n, bytes of a row)
Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (n,): a flag for each item of a batch
Words = np.ndarray[Any, np.dtype[np.uint64]]  # (n, 2): keys as two little-endian numbers
Positions = np.ndarray[Any, np.dtype[np.int64]]  # (n,): places in a batch
Ordinals = np.ndarray[Any, np.dtype[np.int64]]  # (n,): numbers that a `KeyIndex` gives to keys

_WORD = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """The keys of a batch.

    Attributes
    ----------
    namespace : bytes
        16 bytes that identify the computation.
    data : ndarray of uint8, shape (n, 16)
        One key per item, C-contiguous.
    group : bytes
        A digest of what all items share, such as their shape; empty if unknown. Equal keys have equal groups.
    """

    __module__ = "torchcache2"

    namespace: bytes
    data: Bytes2D
    group: bytes = b""

    def __post_init__(self) -> None:
        if len(self.namespace) != 16:
            raise ValueError(f"namespace has {len(self.namespace)} bytes, expected 16")
        data = self.data
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 16:
            raise ValueError(f"keys are {data.dtype} {data.shape}, expected uint8 (n, 16)")
        if not data.flags.c_contiguous:
            object.__setattr__(self, "data", np.ascontiguousarray(data))

    def __len__(self) -> int:
        return len(self.data)

    @property
    def words(self) -> Words:
        """The keys as little-endian uint64, shape (n, 2)."""
        return self.data.view(_WORD)

    def take(self, positions: Positions) -> Keys:
        """The keys at some positions."""
        return Keys(self.namespace, self.data[positions], self.group)

    def first_positions(self) -> tuple[Positions, Positions] | None:
        """The first position of each distinct key, and for each key the index of its distinct key.

        None if all keys differ.
        """
        words = self.words
        low = np.sort(words[:, 0])  # sorting is several times faster than `unique`
        if not (low[1:] == low[:-1]).any():
            return None
        whole = words.view(np.dtype([("low", "<u8"), ("high", "<u8")])).reshape(-1)
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return first[order].astype(np.int64), rank[inverse.reshape(-1)].astype(np.int64)


# Keys of ints, such as indices of samples: 16 bytes each, see docs/format.md. Two mixers make the halves of a
# key. Both are bijective, so no two ints share a key, and the int can be computed from the key.

# The constants of each half: of splitmix64 (Steele, Lea, Flood 2014), with variant 13 of Stafford's mixers
# (2011), and of MurmurHash3's finalizer (Appleby 2011), after another increment.
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


_MASK = (1 << 64) - 1
_HALVES = [  # the constants of a half as ints: increment, then shifts and factors alternating
    [int(_INCREMENTS[half]), *(int(x[half]) for step in _STEPS for x in step), int(_LAST_SHIFTS[half])]
    for half in range(2)
]


def int_key(index: int) -> tuple[int, int]:
    """The two words of the key of one 64-bit int, as in `int_keys`."""
    halves = []
    for increment, s1, f1, s2, f2, s3 in _HALVES:
        mixed = index + increment & _MASK
        mixed = (mixed ^ mixed >> s1) * f1 & _MASK
        mixed = (mixed ^ mixed >> s2) * f2 & _MASK
        halves.append(mixed ^ mixed >> s3)
    return halves[0], halves[1]


def indices_of(keys: Array) -> tuple[Positions, Array]:
    """The ints with these keys, uint8 ``(n, 16)``, and whether each is the key of an int at all."""
    mixed = keys.view("<u8")[:, 0].astype(np.uint64)  # the first half alone determines the int
    mixed = _unshifted(mixed, _LAST_SHIFTS[0])
    for shifts, factors in reversed(_STEPS):
        mixed = _unshifted(mixed * np.uint64(pow(int(factors[0]), -1, 1 << 64)), shifts[0])
    indices = (mixed - _INCREMENTS[0]).view(np.int64)
    return indices, (int_keys(bytes(16), indices).data == keys).all(axis=1)


def filled(length: int, keys: Sequence[Array]) -> float:
    """The share of the ints from 0 to `length` - 1 whose keys are among `keys`, each uint8 ``(n, 16)``."""
    indices, are_ints = indices_of(np.concatenate([np.empty((0, 16), np.uint8), *keys]))
    there = np.unique(indices[are_ints & (indices >= 0) & (indices < length)])
    return len(there) / length if length else 1.0


def _unshifted(mixed: Array, shift: np.uint64) -> Array:
    """The inverse of ``x ^ (x >> shift)``."""
    undone: Array = mixed ^ (mixed >> shift) ^ (mixed >> (shift + shift))
    return undone
