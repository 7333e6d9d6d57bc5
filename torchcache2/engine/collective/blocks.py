"""Blocks of rows: the bytes that one rank sends to another.

A block has parts, each rows of one schema; a part has its columns one after another, each as it is stored,
and each begins at a multiple of 16 bytes. Both ranks know the schemas and how many rows there are of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchcache2.core.keys import Positions
from torchcache2.core.memory import (
    as_bytes,
    empty_bytes,
    gather_into,
    select,
    to_device,
    to_host,
    with_ordinary_tensors,
)
from torchcache2.core.rows import Rows, Schema

__all__ = ["block_bytes", "packed", "unpacked"]

_ALIGNMENT = 16  # the widest element, complex128, has so many bytes


def block_bytes(parts: Sequence[tuple[Schema, int]]) -> int:
    """Bytes of a block with so many rows of each schema."""
    return sum(_aligned(count * leaf.row_bytes) for schema, count in parts for leaf in schema.leaves)


@with_ordinary_tensors
def packed(
    parts: Sequence[Sequence[tuple[Rows, Positions]]], device: torch.device
) -> tuple[Tensor, list[int]]:
    """The blocks for all receivers, one after another.

    Parameters
    ----------
    parts : sequence of sequence of (Rows, ndarray of int64)
        For each receiver its rows: some rows, on any device, and which of them, shape ``(k,)``.
    device : torch.device
        Where the bytes are to be.

    Returns
    -------
    data : Tensor of uint8, shape (bytes,)
    sizes : list of int
        Bytes of each receiver's block.
    """
    sizes = [block_bytes([(rows.schema, len(which)) for rows, which in some]) for some in parts]
    pieces = [
        (column, torch.from_numpy(which)) for some in parts for rows, which in some for column in rows.columns
    ]
    on_host = all(column.is_cpu for column, _ in pieces)
    if on_host:  # they are put together there: one copy to the device is faster than many
        data = empty_bytes(sum(sizes))
    else:
        columns = [select(column, which.to(column.device)) for column, which in pieces]
        columns = to_host(columns) if device.type == "cpu" else columns
        pieces = [(column, which) for column, (_, which) in zip(columns, pieces, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    start = 0
    for column, which in pieces:
        flat = as_bytes(column)
        size = len(which) * flat.shape[1]
        target = data[start : start + size].view(len(which), flat.shape[1])
        if size and on_host:
            gather_into(target, flat, which)
        elif size:
            target.copy_(flat)
        start += _aligned(size)
    return to_device(data, device), sizes


@with_ordinary_tensors
def unpacked(data: Tensor, parts: Sequence[tuple[Schema, int]]) -> list[Rows]:
    """The rows of a block, with so many rows of each schema; they share its memory.

    `data` is uint8, of shape ``(bytes,)``. Raises `ValueError` if the block has another size.
    """
    if len(data) != block_bytes(parts):
        raise ValueError(f"a block of {len(data)} bytes where {block_bytes(parts)} belong")
    if data.data_ptr() % _ALIGNMENT or data.storage_offset() % _ALIGNMENT:
        data = data.clone()
    return list(_parts(data, parts))


def _parts(data: Tensor, parts: Sequence[tuple[Schema, int]]) -> Iterator[Rows]:
    start = 0
    for schema, count in parts:
        columns = []
        for leaf in schema.leaves:
            size = count * leaf.row_bytes
            flat = data[start : start + size].view(leaf.stored)
            columns.append(flat.view(count, *leaf.stored_shape))
            start += _aligned(size)
        yield Rows(schema, columns, count)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
