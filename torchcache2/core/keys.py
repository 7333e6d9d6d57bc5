"""`Keys`: the keys of a batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from torchcache2.core.arrays import Bytes2D, Positions, Words

__all__ = ["Keys"]


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """The keys of a batch.

    Attributes
    ----------
    namespace : bytes
        16 bytes that say who computes.
    data : ndarray of uint8, shape (n, 16)
        One key per item, C-contiguous.
    group : bytes
        A digest of what all items share, such as the shape of an item; empty if unknown. A key always belongs
        to the same group.
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
        return self.data.view("<u8")

    def take(self, positions: Positions) -> Keys:
        """The keys at some positions."""
        return Keys(self.namespace, self.data[positions], self.group)

    def first_positions(self) -> tuple[Positions, Positions] | None:
        """The position where each distinct key comes first, and which of these each key equals.

        None if all keys differ.
        """
        words = self.words
        low = np.sort(words[:, 0])  # sorting is several times as fast as `unique`
        if not (low[1:] == low[:-1]).any():
            return None
        whole = words.view(np.dtype([("low", "<u8"), ("high", "<u8")])).reshape(-1)
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return first[order].astype(np.int64), rank[inverse.reshape(-1)].astype(np.int64)
