"""`Places`: where some rows are, and the start of the kernels that hash them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.memory import CUDA, Runtime

__all__ = ["MOST_ROWS", "Places", "start"]

_BLOCK = 1024
_DEPTH = 17  # of bisections, so that there may be 2**17 - 1 rows of different sizes at once
_AHEAD = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

MOST_ROWS = (1 << _DEPTH) - 1


@dataclasses.dataclass(frozen=True)
class Places:
    """Where some rows are, each of 241 bytes or more.

    Attributes
    ----------
    data : Tensor, shape (words,)
        The rows of one array, one behind the other, in words as wide as their addresses and sizes allow. If
        the rows are anywhere, an empty tensor of words that are as wide.
    table : Tensor of int64, shape (3, count), optional
        Of rows that are anywhere: addresses, sizes, and how many blocks come before. None for an array.
    count, size : int
        How many rows there are; the bytes of a row, 0 if they are anywhere.
    total : int
        How many whole blocks all rows have. The last block of a row is never among them.
    """

    data: Tensor
    table: Tensor | None
    count: int
    size: int
    total: int

    @property
    def variant(self) -> tuple[torch.device, int, bool]:
        """What kernels are compiled for: the device, the width of a word, and whether rows are anywhere."""
        return self.data.device, self.data.element_size(), self.table is not None

    @classmethod
    def of_array(cls, rows: Tensor) -> Places:
        """The rows of a contiguous uint8 array of shape (n, bytes)."""
        count, size = rows.shape
        words = rows.view(-1).view(_widest(size | rows.data_ptr()))
        return cls(words, None, count, size, count * _blocks(size))

    @classmethod
    def of_rows(cls, rows: Sequence[Tensor], runtime: Runtime = CUDA) -> Places:
        """Rows that are anywhere on one device, contiguous uint8 of shape (bytes,), `MOST_ROWS` at most.

        The caller keeps them alive until the kernels have been started.
        """
        table = np.empty((3, len(rows)), np.int64)
        table[0], table[1] = [row.data_ptr() for row in rows], [len(row) for row in rows]
        blocks = _blocks(table[1])
        table[2] = np.cumsum(blocks) - blocks
        dtype = _widest(int(np.bitwise_or.reduce(table[:2], axis=None)))
        words = torch.empty(0, dtype=dtype, device=rows[0].device)
        there = runtime.send(torch.from_numpy(table), words.device)
        return cls(words, there, len(rows), 0, int(blocks.sum()))


def start(places: Places, secrets: Tensor, tiles: tuple[int, int]) -> Tensor:
    """Start the kernels on the current stream of the current device, which is that of the rows.

    `tiles` says how many blocks, and how many rows, a program takes.

    Returns
    -------
    Tensor of uint8, shape (count, 16)
        The digests, when the kernels are done.
    """
    from torchcache2.identity.xxh3 import kernels  # imports Triton, which not everybody has

    device, width, is_ragged = places.variant
    if kernels.INTERPRETED and device.type != "cpu":  # it would take addresses there for those of the host
        raise RuntimeError("TRITON_INTERPRET is set, and Triton's interpreter cannot read that memory")
    table = places.table if places.table is not None else secrets  # which is not read then
    sums = torch.empty((places.total, 8), dtype=torch.int64, device=device)
    out = torch.empty((places.count, 16), dtype=torch.uint8, device=device)
    # There are only integers. Triton warns of its default for other numbers unless it is told what to do.
    options: dict[str, Any] = {"enable_fp_fusion": False}
    options |= {"parts": 8 // width, "depth": _DEPTH if is_ragged else 0}
    given = (places.count, places.size, 0 if is_ragged else _blocks(places.size))
    blocks, rows = tiles
    if places.total:
        kernels.block_sums[(-(-places.total // blocks),)](
            *(places.data, table, secrets, sums, *given, places.total), tile=blocks, num_warps=2, **options
        )
    kernels.digests[(-(-places.count // rows),)](
        *(places.data, table, secrets, sums, out, *given), tile=rows, ahead=_AHEAD, num_warps=1, **options
    )
    return out


def _blocks(size: Any) -> Any:
    """Whole blocks before the end of inputs of these sizes."""
    return (size - 1) // _BLOCK


def _widest(places: int) -> torch.dtype:
    """The widest words in which rows can be read whose addresses and sizes are joined by "or"."""
    return next(dtype for width, dtype in _WORDS.items() if places % width == 0)
