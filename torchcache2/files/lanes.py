"""`Codec`, and how the bytes of a leaf are split before they are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchcache2.core.keys import Bytes
from torchcache2.files.errors import DamagedError

_MOST = (1 << 31) - 33  # bytes that a part may have: sizes have 31 bits, and a chunk has a header


class Lane(NamedTuple):
    """How the bytes of a leaf are split: a part for each byte of an element, of which there are `width`.

    The width is 1, 2, 4 or 8. If elements are `rotated` first, the sign bit goes to the end, so that the
    exponent fills one byte.
    """

    width: int
    rotated: bool


_LANES = {
    torch.float32: Lane(4, True),
    torch.float64: Lane(8, True),
    torch.bfloat16: Lane(2, True),
    torch.complex64: Lane(4, True),
    torch.complex128: Lane(8, True),
    # Rotated or not, their exponent shares a byte with the mantissa, so that rotation saves nothing.
    torch.float16: Lane(2, False),
    torch.complex32: Lane(2, False),
    **{dtype: Lane(2, False) for dtype in (torch.int16, torch.uint16)},
    **{dtype: Lane(4, False) for dtype in (torch.int32, torch.uint32)},
    **{dtype: Lane(8, False) for dtype in (torch.int64, torch.uint64)},
}


def lane(dtype: torch.dtype) -> Lane:
    """How a leaf that is stored as `dtype` is split; one of an unknown dtype is not split."""
    return _LANES.get(dtype, Lane(1, False))


def lane_of_part(split: Lane, part: Bytes) -> Lane:
    """The lane for a part; a part whose size is not a multiple of the width is not split."""
    return split if len(part) % split.width == 0 else Lane(1, False)


class Codec:
    """Turns the parts of a block, one for each leaf, into bytes and back. Any thread may use it.

    Parts are contiguous, uint8 of shape ``(bytes,)``. A block has the encoded ones one after another; a part
    of no bytes leaves nothing in it.
    """

    name: str

    def encode(self, parts: Sequence[Bytes], lanes: Sequence[Lane]) -> bytes:
        """The block of these parts; `ValueError` if one has 2 GiB or more."""
        pieces: list[Any] = []
        for part, split in zip(parts, lanes, strict=True):
            if len(part) > _MOST:
                raise ValueError(f"a part of {len(part):,} bytes: a compressing codec takes up to {_MOST:,}")
            if len(part):
                self._encode(part, lane_of_part(split, part), pieces)
        return b"".join(pieces)

    def decode(self, block: bytes | memoryview, outs: Sequence[Bytes], lanes: Sequence[Lane]) -> None:
        """Fill `outs` from a block; `DamagedError` if it does not hold exactly that.

        Whatever the block says, memory beside `outs` stays within a few times the largest of them.
        """
        data, at = memoryview(block), 0
        for out, split in zip(outs, lanes, strict=True):
            if len(out):
                at = self._decode(data, at, out, lane_of_part(split, out))
        if at != len(data):
            raise DamagedError(f"{len(data) - at} bytes after the last part")

    def _encode(self, part: Bytes, split: Lane, pieces: list[Any]) -> None:
        """Append the encoded part to `pieces`."""
        raise NotImplementedError

    def _decode(self, data: memoryview, at: int, out: Bytes, split: Lane) -> int:
        """Fill `out` from the encoded part that begins at `at`; where it ends."""
        raise NotImplementedError
