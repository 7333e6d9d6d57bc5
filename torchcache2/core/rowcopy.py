"""`RowCopier`: copies rows that lie in several `Chunks` of the memory of one device.

On CUDA, one Triton kernel copies all rows, whichever chunks they are in: the host sends it the address of
each row. Where there is no Triton, or it does not work, torch copies the rows of each chunk by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Ordinals
from torchcache2.core.logs import ToldOnce, logger
from torchcache2.core.memory import CUDA, Runtime, as_words

__all__ = ["Chunks", "RowCopier"]

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


class Chunks:
    """Rows of `row_bytes` bytes in several tensors on one device, numbered in their order.

    Attributes
    ----------
    tensors : list of Tensor
        Contiguous, uint8 of shape ``(rows, row_bytes)``.
    starts, addresses : ndarray of int64
        The number of the first row of each, and where it is in memory.
    capacity : int
        Rows of all tensors.
    """

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self.row_bytes = row_bytes
        self.device = device
        self.tensors: list[Tensor] = []
        self.starts: Ordinals = np.empty(0, np.int64)
        self.addresses: Ordinals = np.empty(0, np.int64)
        self.capacity = 0

    def append(self, tensor: Tensor) -> None:
        """Add a tensor behind the others."""
        self.tensors.append(tensor)
        self.starts = np.append(self.starts, self.capacity)
        self.addresses = np.append(self.addresses, tensor.data_ptr())
        self.capacity += len(tensor)

    def shrink(self, rows: int) -> None:
        """Let go of the tensors behind so many rows."""
        kept = int(np.searchsorted(self.starts, rows))
        if kept < len(self.tensors):
            self.capacity = int(self.starts[kept])
            del self.tensors[kept:]
            self.starts, self.addresses = self.starts[:kept], self.addresses[:kept]

    def of(self, ordinals: Ordinals) -> Ordinals:
        """The numbers of the tensors that have these rows."""
        which: Ordinals = np.searchsorted(self.starts, ordinals, side="right") - 1
        return which

    def addresses_of(self, ordinals: Ordinals) -> Ordinals:
        """Where these rows are in memory."""
        which = self.of(ordinals) if len(self.tensors) > 1 else 0
        bases = self.addresses - self.starts * self.row_bytes
        addresses: Ordinals = bases[which] + ordinals * self.row_bytes
        return addresses


class RowCopier:
    """Copies rows of chunks, with what is known of the kernel: that it works, or that it does not."""

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self.runtime = runtime
        self._told = ToldOnce()
        self._has_kernel = True  # as far as is known
        self._right: set[tuple[torch.device, int]] = set()  # where it was seen to work, for which alignments

    def gather(self, chunks: Chunks, ordinals: Ordinals) -> Tensor:
        """A copy of the rows with these numbers, in their order: uint8 ``(n, row_bytes)``."""
        shape = len(ordinals), chunks.row_bytes
        if 0 in shape:
            return torch.empty(shape, dtype=torch.uint8, device=chunks.device)
        if self._has_kernel_for(chunks.device):
            picked = Chunks(chunks.row_bytes, chunks.device)
            picked.append(torch.empty(shape, dtype=torch.uint8, device=chunks.device))
            if self._run_kernel(chunks, ordinals, picked, np.arange(len(ordinals))):
                return picked.tensors[0]
        return self._gather(chunks, ordinals)

    def move(self, chunks: Chunks, sources: Ordinals, targets: Ordinals) -> None:
        """Copy rows over other rows; no row is both a source and a target."""
        if len(sources) == 0:
            return
        if self._has_kernel_for(chunks.device) and self._run_kernel(chunks, sources, chunks, targets):
            return
        moved = as_words(self._gather(chunks, sources))
        for chunk, where, inside in self._by_chunk(chunks, targets):
            as_words(chunk).index_copy_(0, inside, moved if where is None else moved.index_select(0, where))

    def _gather(self, chunks: Chunks, ordinals: Ordinals) -> Tensor:
        picked = None
        for chunk, where, inside in self._by_chunk(chunks, ordinals):
            rows = as_words(chunk).index_select(0, inside)
            if where is None:
                picked = rows
            else:
                picked = rows.new_empty((len(ordinals), rows.shape[1])) if picked is None else picked
                picked.index_copy_(0, where, rows)
        assert picked is not None  # there are rows
        return picked.view(torch.uint8)

    def _by_chunk(self, chunks: Chunks, ordinals: Ordinals) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Each tensor that has some of these rows, their places among `ordinals`, and their places in it.

        The places are on the device. Those among `ordinals` are None if all rows are in one tensor.
        """
        which = chunks.of(ordinals)
        inside = ordinals - chunks.starts[which]
        first = int(which[0])
        if (which == first).all():
            yield chunks.tensors[first], None, self.runtime.send(torch.from_numpy(inside), chunks.device)
            return
        order = np.argsort(which, kind="stable")
        table = self.runtime.send(torch.from_numpy(np.stack([order, inside[order]])), chunks.device)
        hit, begins = np.unique(which[order], return_index=True)
        for number, begin, end in zip(hit, begins, [*begins[1:], len(order)], strict=True):
            yield chunks.tensors[number], table[0, begin:end], table[1, begin:end]

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

    def _run_kernel(self, chunks: Chunks, sources: Ordinals, others: Chunks, targets: Ordinals) -> bool:
        """Copy rows from `chunks` to `others`; whether that has worked."""
        everything = (chunks.row_bytes, *chunks.addresses, *others.addresses)
        alignment = int(np.gcd.reduce(everything, initial=16))
        try:
            with self.runtime.current(chunks.device):
                if not self._is_right(chunks.device, alignment):
                    return False
                self._start_kernel(alignment, chunks, sources, others, targets)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # there may be no C compiler, or the GPU may be older than Triton supports
            self._do_without(chunks.device, error)
            return False
        return True

    def _start_kernel(
        self, alignment: int, chunks: Chunks, sources: Ordinals, others: Chunks, targets: Ordinals
    ) -> None:
        """Start the kernel on the current device, which has the chunks; `alignment` is that of all rows."""
        from torchcache2.core.rowkernel import copy_rows

        addresses = np.stack([chunks.addresses_of(sources), others.addresses_of(targets)])
        table = self.runtime.send(torch.from_numpy(addresses), chunks.device)
        dtype, per_unit = _KINDS[alignment]
        words = chunks.row_bytes // dtype.itemsize
        wide = min(_WORDS, 1 << (words - 1).bit_length())
        high = _WORDS // wide
        tiles = -(-words // wide)
        copy_rows[(-(-len(sources) // high) * tiles,)](
            *(table[0], table[1], chunks.tensors[0].view(-1)[:alignment].view(dtype)),
            *(len(sources), chunks.row_bytes // alignment, tiles),
            per_unit=per_unit,
            alignment=alignment,
            tile_rows=high,
            tile_words=wide,
            **_OPTIONS,
        )

    def _is_right(self, device: torch.device, alignment: int) -> bool:
        """Whether the kernel copies rows that are known: this is seen before it is first used on a device."""
        if (device, alignment) in self._right:
            return True
        known = torch.arange(7 * 5 * alignment, device="cpu").to(torch.uint8).view(7, -1)
        chunks, picked = Chunks(known.shape[1], device), Chunks(known.shape[1], device)
        for part in (known[:3], known[3:]):
            chunks.append(part.to(device, copy=True))
        picked.append(torch.zeros_like(known, device=device))
        order = np.array([4, 0, 6, 2, 5, 1, 3])
        self._start_kernel(alignment, chunks, order, picked, np.arange(7))
        if not torch.equal(picked.tensors[0].cpu(), known[torch.from_numpy(order)]):
            self._has_kernel = False
            self._told(
                "wrong",
                "a kernel has not copied rows on %s as they are, so torch copies them. Please report this, "
                "with the name of the device and the versions of torch (%s) and Triton",
                *(device, torch.__version__),
            )
            return False
        self._right.add((device, alignment))
        return True

    def _do_without(self, device: torch.device, error: Exception) -> None:
        self._has_kernel = False
        text = "rows on %s are gathered with torch, as Triton cannot be used: %r"
        self._told("kernel", text, device, error, log=logger.info)
