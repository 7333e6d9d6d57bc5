"""`RowCopier`: copies rows that lie in several chunks of the memory of one device.

On CUDA, one Triton kernel copies all rows, whichever chunks they are in: the host sends it the address of
each row. Where there is no Triton, or it does not work, torch copies the rows of each chunk by themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.arrays import Ordinals
from torchcache2.core.gather import as_words
from torchcache2.core.logs import ToldOnce, logger
from torchcache2.core.transfer import CUDA, Runtime

__all__ = ["RowCopier"]

_OPTIONS = {"enable_fp_fusion": False}  # otherwise newer versions of Triton warn
_WORDS = 1024  # that a program of the kernel copies
# The dtype of words, and how many of them make a unit, by the alignment of rows in bytes.
_KINDS = {
    16: (torch.int64, 2),
    8: (torch.int64, 1),
    4: (torch.int32, 1),
    2: (torch.int16, 1),
    1: (torch.uint8, 1),
}


class RowCopier:
    """Copies rows between chunks.

    Chunks are contiguous, uint8 of shape ``(rows, row_bytes)``, on one device. The rows of all of them are
    numbered in order, and `starts` are the numbers of their first rows.
    """

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self.runtime = runtime
        self._told = ToldOnce()
        self._has_kernel = True  # as far as is known

    def gather(self, chunks: Sequence[Tensor], starts: Ordinals, ordinals: Ordinals) -> Tensor:
        """A copy of the rows with these numbers, in their order: uint8 ``(n, row_bytes)``."""
        shape = len(ordinals), chunks[0].shape[1]
        if 0 in shape:
            return torch.empty(shape, dtype=torch.uint8, device=chunks[0].device)
        if self._has_kernel_for(chunks[0].device):
            picked = torch.empty(shape, dtype=torch.uint8, device=chunks[0].device)
            targets = picked.data_ptr() + np.arange(shape[0]) * shape[1]
            if self._run_kernel(chunks, _addresses(chunks, starts, ordinals), targets, picked):
                return picked
        return self._gather(chunks, starts, ordinals)

    def move(self, chunks: Sequence[Tensor], starts: Ordinals, sources: Ordinals, targets: Ordinals) -> None:
        """Copy rows over other rows; no row is both a source and a target."""
        if len(sources) == 0:
            return
        if self._has_kernel_for(chunks[0].device):
            begins, ends = (_addresses(chunks, starts, ordinals) for ordinals in (sources, targets))
            if self._run_kernel(chunks, begins, ends):
                return
        moved = as_words(self._gather(chunks, starts, sources))
        for chunk, where, inside in self._by_chunk(chunks, starts, targets):
            as_words(chunk).index_copy_(0, inside, moved if where is None else moved.index_select(0, where))

    def _gather(self, chunks: Sequence[Tensor], starts: Ordinals, ordinals: Ordinals) -> Tensor:
        picked = None
        for chunk, where, inside in self._by_chunk(chunks, starts, ordinals):
            rows = as_words(chunk).index_select(0, inside)
            if where is None:
                picked = rows
            else:
                picked = rows.new_empty((len(ordinals), rows.shape[1])) if picked is None else picked
                picked.index_copy_(0, where, rows)
        assert picked is not None  # there are rows
        return picked.view(torch.uint8)

    def _by_chunk(
        self, chunks: Sequence[Tensor], starts: Ordinals, ordinals: Ordinals
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Each chunk that has some of these rows, their places among `ordinals`, and their places in it.

        The places are on the device. Those among `ordinals` are None if all rows are in one chunk.
        """
        which, device = _chunk_of(starts, ordinals), chunks[0].device
        first = int(which[0])
        if (which == first).all():
            yield chunks[first], None, self.runtime.send(torch.from_numpy(ordinals - starts[first]), device)
            return
        order = np.argsort(which, kind="stable")
        places = np.stack([order, (ordinals - starts[which])[order]])
        table = self.runtime.send(torch.from_numpy(places), device)
        hit, begins = np.unique(which[order], return_index=True)
        for chunk, begin, end in zip(hit, begins, [*begins[1:], len(order)], strict=True):
            yield chunks[chunk], table[0, begin:end], table[1, begin:end]

    def _has_kernel_for(self, device: torch.device) -> bool:
        is_host = device.type == "cpu"
        if not self._has_kernel or not (is_host or device.type == "cuda"):
            return False
        if is_host and os.environ.get("TRITON_INTERPRET") != "1":
            return False
        try:
            from torchcache2.core.rowkernel import INTERPRETED
        except Exception as error:  # whatever is wrong with Triton, rows can be copied without it
            self._do_without(device, error)
            return False
        return is_host == INTERPRETED  # the interpreter cannot read the memory of a GPU

    def _run_kernel(
        self, chunks: Sequence[Tensor], sources: Ordinals, targets: Ordinals, *others: Tensor
    ) -> bool:
        """Copy rows between addresses in `chunks` and `others`; whether that has worked."""
        from torchcache2.core.rowkernel import copy_rows

        device, row_bytes = chunks[0].device, chunks[0].shape[1]
        table = self.runtime.send(torch.from_numpy(np.stack([sources, targets])), device)
        alignment = math.gcd(16, row_bytes, *(chunk.data_ptr() for chunk in (*chunks, *others)))
        dtype, per_unit = _KINDS[alignment]
        words = row_bytes // dtype.itemsize
        wide = min(_WORDS, 1 << (words - 1).bit_length())
        high = _WORDS // wide
        tiles = -(-words // wide)
        grid = (-(-len(sources) // high) * tiles,)
        try:
            with self.runtime.current(device):
                copy_rows[grid](
                    *(table[0], table[1], chunks[0].view(-1)[:alignment].view(dtype)),
                    *(len(sources), row_bytes // alignment, tiles),
                    PER_UNIT=per_unit,
                    ALIGNMENT=alignment,
                    ROWS=high,
                    WORDS=wide,
                    **_OPTIONS,
                )
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # there may be no C compiler, or the GPU may be older than Triton supports
            self._do_without(device, error)
            return False
        return True

    def _do_without(self, device: torch.device, error: Exception) -> None:
        self._has_kernel = False
        text = "rows on %s are gathered with torch, as Triton cannot be used: %r"
        self._told("kernel", text, device, error, log=logger.info)


def _chunk_of(starts: Ordinals, ordinals: Ordinals) -> Ordinals:
    which: Ordinals = np.searchsorted(starts, ordinals, side="right") - 1
    return which


def _addresses(chunks: Sequence[Tensor], starts: Ordinals, ordinals: Ordinals) -> Ordinals:
    """Where these rows begin in memory."""
    row_bytes = chunks[0].shape[1]
    bases = np.array([chunk.data_ptr() for chunk in chunks]) - starts * row_bytes
    which = _chunk_of(starts, ordinals) if len(chunks) > 1 else 0
    addresses: Ordinals = bases[which] + ordinals * row_bytes
    return addresses
