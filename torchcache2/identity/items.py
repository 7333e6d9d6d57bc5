"""Keys of the items of a batch.

The key of an item is

    xxh3_128( header ‖ xxh3_128(item in leaf 1) ‖ … ‖ xxh3_128(item's entry in argument 1) ‖ … )

where `header` is the 16-byte digest of everything that the items of a batch share: the namespace,
the arguments that are not batched, the autocast state, and for each batched tensor its argument path,
dtype, per-item shape, and whether its channels are last. A key thus depends on neither the batch size nor the
order, the other strides or the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Bytes2D, Keys
from torchcache2.core.memory import is_channels_last, item_bytes, to_host
from torchcache2.identity.encoding import digest
from torchcache2.identity.xxh3 import DIGESTS

_SHORT = 256  # bytes; to copy so few is cheaper than to make an array for each row
_BLOCK = 250  # elements; single elements with a stride would touch as many cache lines


def item_keys(
    namespace: bytes,
    context: bytes,
    leaves: Sequence[tuple[str, Tensor]],
    entries: Sequence[tuple[str, Bytes2D]] = (),
    *,
    subsample_count: int | None = None,
) -> Keys:
    """The keys of a batch.

    Parameters
    ----------
    namespace : bytes
        16 bytes.
    context : bytes
        Canonical bytes of the other things that all items share.
    leaves : sequence of (str, Tensor)
        Argument path and tensor of shape ``(n, ...)``.
    entries : sequence of (str, ndarray of uint8, shape (n, 16))
        Argument path and digests of other arguments with one entry per item. `leaves` and `entries` are not
        both empty, and all have the same n.
    subsample_count : int, optional
        Elements to read of items that have more.
    """
    leaves = sorted(leaves, key=lambda leaf: leaf[0])
    entries = sorted(entries, key=lambda entry: entry[0])
    count = leaves[0][1].shape[0] if leaves else len(entries[0][1])
    parts = [namespace, context]
    tensors = []
    for path, tensor in leaves:
        parts.append(f"{path} {tensor.dtype} {tuple(tensor.shape[1:])}".encode())
        if tensor.dim() in (4, 5) and is_channels_last(tensor):
            parts.append(b"channels last")  # convolutions, and `view`, tell the two apart
        if subsample_count is not None and math.prod(tensor.shape[1:]) > subsample_count:
            parts.append(f"subsample {subsample_count}".encode())
            tensor = _subsample(tensor, subsample_count)
        tensors.append(tensor)
    columns = _columns(tensors)
    for path, column in entries:
        parts.append(f"entries of {path}".encode())
        columns.append(column)
    group = digest(parts)
    digests = np.empty((count, len(columns) + 1, 16), np.uint8)
    digests[:, 0] = np.frombuffer(group, np.uint8)
    for place, column in enumerate(columns, start=1):
        digests[:, place] = column
    return Keys(namespace, _digests(digests.reshape(count, 16 * (len(columns) + 1))), group)


def _columns(tensors: Sequence[Tensor]) -> list[Bytes2D]:
    """The digest of each item of each tensor. There is one wait for all that comes from accelerators."""
    there = [DIGESTS.of_items(tensor) for tensor in tensors]
    arriving = [t if digests is None else digests for t, digests in zip(tensors, there, strict=True)]
    if any(tensor.device.type != "cpu" for tensor in arriving):
        arriving = to_host(arriving)
    return [
        _digests(_rows(tensor)) if digests is None else tensor.numpy()
        for tensor, digests in zip(arriving, there, strict=True)
    ]


def _rows(tensor: Tensor) -> Bytes2D:
    """The bytes of each item of a tensor of the host, shape ``(n, bytes)``."""
    try:
        found = (tensor.detach() if tensor.requires_grad else tensor).numpy().reshape(tensor.shape[0], -1)
        return np.ascontiguousarray(found).view(np.uint8)
    except (RuntimeError, TypeError, ValueError):  # numpy has no such dtype, or there are no items
        return item_bytes(tensor).numpy()


def _digests(rows: Bytes2D) -> Bytes2D:
    count, size = rows.shape
    items: Iterable[Any] = rows
    if 0 < size <= _SHORT:
        items = rows.view((np.void, size)).ravel().tolist()  # bytes objects, all made at once
    return np.frombuffer(b"".join(map(xxh3_128_digest, items)), np.uint8).reshape(count, 16)


def _subsample(tensor: Tensor, count: int) -> Tensor:
    """`count` elements of each item in contiguous, evenly spread blocks, first and last included."""
    flat = tensor.detach().flatten(1)
    items, size = flat.shape
    blocks = max(2, round(count / _BLOCK))
    width = count // blocks
    head = width * (blocks - 1)
    step = (size - (count - head)) // (blocks - 1)
    picked = torch.empty((items, count), dtype=flat.dtype, device=flat.device)
    # There are two copies rather than one for each block, because each copy wakes torch's other threads.
    spread = flat.unfold(1, width, step)[:, : blocks - 1]
    picked[:, :head].view(items, blocks - 1, width).copy_(spread)
    picked[:, head:] = flat[:, size - (count - head) :]
    return picked
