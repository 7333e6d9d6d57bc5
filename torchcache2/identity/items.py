"""Keys of the items of a batch.

The key of an item is

    xxh3_128( header ‖ xxh3_128(item in leaf 1) ‖ … ‖ xxh3_128(item's entry in argument 1) ‖ … )

where `header` is the 16-byte digest of everything that the items of a batch share: the namespace,
the arguments that are not batched, the autocast state, and for each batched tensor its argument path,
dtype, per-item shape, and whether its channels are last. A key thus depends on neither the batch size nor the
order, the other strides or the device.
"""

from __future__ import annotations

import _thread
import contextlib
import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Bytes2D, Keys
from torchcache2.core.memory import is_channels_last, item_bytes, to_host
from torchcache2.identity.encoding import digest
from torchcache2.identity.xxh3 import DIGESTS

_SHORT = 256  # bytes; copying so few is cheaper than an array per row
_LARGE = 64 << 10  # bytes; xxh3 holds the interpreter's lock while it hashes fewer
_SHARE, _MOST_THREADS = 2 << 20, 8  # bytes that are worth a thread; more threads wait for memory
_MOST_GROUPS, _MOST_CONTEXT = 256, 4096  # remembered headers, and bytes of the context of one
_BLOCK = 250  # elements; strided single elements would touch as many cache lines

_Form = tuple[str, torch.dtype, torch.Size, bool]  # of a tensor: path, dtype, item's shape, channels last


def item_keys(
    namespace: bytes,
    context: bytes,
    leaves: Sequence[tuple[str, Tensor]],
    entries: Sequence[tuple[str, Bytes2D]] = (),
    *,
    subsample_count: int | None = None,
    groups: dict[Any, bytes] | None = None,
) -> Keys:
    """The keys of a batch.

    Parameters
    ----------
    namespace : bytes
        16 bytes.
    context : bytes
        Canonical bytes of everything else that all items share.
    leaves : sequence of (str, Tensor)
        Argument path and tensor of shape ``(n, ...)``.
    entries : sequence of (str, ndarray of uint8, shape (n, 16))
        Argument path and digests of other arguments with one entry per item. `leaves` and `entries` are not
        both empty, and all have the same n.
    subsample_count : int, optional
        Elements to read of items that have more.
    groups : dict, optional
        Known headers, of calls with one `subsample_count`; new ones are added.
    """
    leaves = sorted(leaves, key=itemgetter(0)) if len(leaves) > 1 else leaves
    entries = sorted(entries, key=itemgetter(0)) if len(entries) > 1 else entries
    count = leaves[0][1].shape[0] if leaves else len(entries[0][1])
    forms = [(path, t.dtype, t.shape[1:], t.dim() in (4, 5) and is_channels_last(t)) for path, t in leaves]
    paths = [path for path, _ in entries]
    known, shared = {} if groups is None else groups, (namespace, context, *forms, *paths)
    group = known.get(shared)
    if group is None:
        group = _group(namespace, context, forms, paths, subsample_count)
        if len(known) >= _MOST_GROUPS:
            known.clear()
        if len(context) <= _MOST_CONTEXT:
            known[shared] = group
    tensors = [tensor for _, tensor in leaves]
    if subsample_count is not None:
        most = subsample_count
        tensors = [_subsample(t, most) if math.prod(t.shape[1:]) > most else t for t in tensors]
    columns = [*_columns(tensors), *[_listed(column) for _, column in entries]]
    keys = map(xxh3_128_digest, map(b"".join, zip(repeat(group, count), *columns, strict=True)))
    return Keys(namespace, np.ndarray((count, 16), np.uint8, b"".join(keys)), group)


def _group(
    namespace: bytes,
    context: bytes,
    forms: Iterable[_Form],
    entries: Iterable[str],
    subsample_count: int | None,
) -> bytes:
    """The header: the digest of what all items share."""
    parts = [namespace, context]
    for path, dtype, shape, is_last in forms:
        parts.append(f"{path} {dtype} {tuple(shape)}".encode())
        if is_last:
            parts.append(b"channels last")  # convolutions, and `view`, tell the two apart
        if subsample_count is not None and math.prod(shape) > subsample_count:
            parts.append(f"subsample {subsample_count}".encode())
    return digest(parts + [f"entries of {path}".encode() for path in entries])


def _columns(tensors: Sequence[Tensor]) -> list[Iterable[bytes]]:
    """The digest of each item of each tensor. Waits once for all accelerators."""
    there = [DIGESTS.of_items(tensor) for tensor in tensors]
    arriving = [t if digests is None else digests for t, digests in zip(tensors, there, strict=True)]
    if any(tensor.device.type != "cpu" for tensor in arriving):
        arriving = to_host(arriving)
    return [
        _digests(_rows(tensor)) if digests is None else _listed(tensor.numpy())
        for tensor, digests in zip(arriving, there, strict=True)
    ]


def _digests(rows: Any) -> Iterable[bytes]:
    """The digest of each row; of many large rows in several threads, as xxh3 then lets go of the interpreter.

    No thread is waited for: each takes the next row, and this one at last those that no other has finished.
    """
    threads = 1
    if len(rows) and len(rows[0]) > _LARGE:
        threads = min(torch.get_num_threads(), len(rows) * len(rows[0]) // _SHARE, _MOST_THREADS)
    if threads < 2:
        return map(xxh3_128_digest, rows)
    found, left = [b""] * len(rows), iter(range(len(rows)))

    def work() -> None:
        for row in left:
            found[row] = xxh3_128_digest(rows[row])

    with contextlib.suppress(RuntimeError):  # the system, or a process that ends, starts no more threads
        for _ in range(threads - 1):
            _thread.start_new_thread(work, ())
    work()
    return [one or xxh3_128_digest(row) for one, row in zip(found, rows, strict=True)]


def _rows(tensor: Tensor) -> Iterable[Any]:
    """The bytes of each item of a tensor of the host."""
    count = tensor.shape[0]
    try:
        found = np.ascontiguousarray((tensor.detach() if tensor.requires_grad else tensor).numpy())
        size = found.nbytes // count
    except (RuntimeError, TypeError, ZeroDivisionError):  # NumPy lacks this dtype, or there are no items
        found = item_bytes(tensor).numpy()
        size = found.shape[1]
    rows: Bytes2D = np.ndarray((count, size), np.uint8, found)
    return _listed(rows) if 0 < size <= _SHORT else rows


def _listed(rows: Bytes2D) -> list[bytes]:
    """The bytes of each row, all made at once."""
    return np.ndarray(len(rows), f"V{rows.shape[1]}", rows).tolist()  # type: ignore[no-any-return]


def _subsample(tensor: Tensor, count: int) -> Tensor:
    """`count` elements of each item in contiguous, evenly spread blocks, first and last included."""
    flat = tensor.detach().flatten(1)
    items, size = flat.shape
    blocks = max(2, round(count / _BLOCK))
    width = count // blocks
    head = width * (blocks - 1)
    step = (size - (count - head)) // (blocks - 1)
    picked = torch.empty((items, count), dtype=flat.dtype, device=flat.device)
    # Two copies rather than one per block, as each copy wakes torch's threads.
    spread = flat.unfold(1, width, step)[:, : blocks - 1]
    picked[:, :head].view(items, blocks - 1, width).copy_(spread)
    picked[:, head:] = flat[:, size - (count - head) :]
    return picked
