"""Fresh memory for rows, and copies of some rows of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.spare import SpareMemory
from torchcache2.core.transfer import Runtime

__all__ = [
    "as_bytes",
    "as_words",
    "empty_bytes",
    "empty_rows",
    "gather",
    "gather_into",
    "is_channels_last",
    "item_bytes",
    "moved",
    "select",
    "with_ordinary_tensors",
    "write",
]

_ALONE = 1 << 20  # one thread copies so many bytes before others have woken up
_GRAIN = 32_768  # torch uses all threads for each row of so many elements
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_HUGE = 4 << 20  # from so many bytes on, numpy asks for huge pages, with far fewer page faults
P = ParamSpec("P")
R = TypeVar("R")


def with_ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of inference mode, as tensors made in it could not be written later."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper


def empty_bytes(size: int, *, runtime: Runtime | None = None, spare: SpareMemory | None = None) -> Tensor:
    """Fresh uint8 memory on the CPU; cheap to touch for the first time if it is large.

    With a `runtime`, page-locked memory for its accelerator. With `spare`, what that has.
    """
    if spare is not None:
        return spare.empty(size)
    if runtime is not None:
        return runtime.pinned((size,), torch.uint8)
    if size >= _HUGE:
        return torch.from_numpy(np.empty(size, np.uint8))
    return torch.empty(size, dtype=torch.uint8, device="cpu")  # a user may have set another default device


def empty_rows(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh memory for a column of `count` rows."""
    if device.type == "cpu":
        size = count * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return empty_bytes(size).view(dtype).view(count, *shape)
    return torch.empty((count, *shape), dtype=dtype, device=device)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes a tensor of 4 or 5 dimensions for one whose channels are last.

    Torch decides by the strides: see `is_channels_last_strides_2d` in `c10/core/MemoryFormat.h`.
    """
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
        return True
    strides, shape = tensor.stride(), tensor.shape
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if shape[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(1, shape[d])
    return True


def select(tensor: Tensor, positions: Tensor) -> Tensor:
    """The items of a tensor of any dtype at some positions, in the same memory format."""
    if tensor.dim() in (4, 5) and is_channels_last(tensor):
        return select(tensor.movedim(1, -1).contiguous(), positions).movedim(-1, 1)
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad:
        picked = gather(as_bytes(tensor.detach()), positions)
        return picked.view(-1).view(tensor.dtype).view(len(positions), *tensor.shape[1:])
    return tensor.index_select(0, positions)


def gather(data: Tensor, positions: Tensor, **kind: Any) -> Tensor:
    """Rows of contiguous uint8 ``(n, bytes)`` on the CPU, in fresh memory of a `kind` of `empty_bytes`."""
    picked = empty_bytes(len(positions) * data.shape[1], **kind).view(len(positions), data.shape[1])
    gather_into(picked, data, positions)
    return picked


def gather_into(picked: Tensor, data: Tensor, positions: Tensor) -> None:
    """The same, in memory that begins at a multiple of 8 bytes of its storage.

    If rows have many elements, torch's `index_select` copies each row with all threads. If other processes
    use the cores too, each such copy may wait for the scheduler. So long rows are copied in pieces.
    """
    if picked.numel() <= _ALONE:
        np.take(data.numpy(), positions.numpy(), axis=0, out=picked.numpy(), mode="clip")
        return
    source = as_words(data)
    words = source.shape[1]
    pieces = next((n for n in range(1, 257) if words % n == 0 and words // n < _GRAIN), 1)
    index = (positions[:, None] * pieces + torch.arange(pieces, device="cpu")).view(-1)
    target = picked.view(-1).view(source.dtype).view(-1, words // pieces)
    torch.index_select(source.view(-1, words // pieces), 0, index, out=target)


def write(data: Tensor, first: int, values: Tensor) -> None:
    """Copy a column of any dtype over rows of contiguous uint8 ``(n, bytes)``, from row `first` on."""
    if values.numel():
        target = data[first : first + values.shape[0]].view(-1).view(values.dtype)
        target.view(values.shape).copy_(values)


def as_bytes(column: Tensor) -> Tensor:
    """A column as uint8 ``(n, bytes)``; shares memory if it is contiguous."""
    count = column.shape[0]
    size = column.numel() // count * column.element_size() if count else 0
    flat = column.contiguous().view(-1)
    if flat.stride(0) != 1:  # a single number, which a slice with steps has left
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).view(count, size)


def item_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each item of a strided tensor of shape ``(n, ...)``, as uint8 ``(n, bytes)``, where it is.

    Shares memory with the tensor if that is contiguous.
    """
    return as_bytes(tensor.detach().resolve_conj().resolve_neg())


def as_words(data: Tensor) -> Tensor:
    """Contiguous uint8 ``(n, bytes)`` as the widest words that divide a row; shares memory."""
    # Memory of other libraries may begin anywhere, and a GPU reads a word at a multiple of its size only.
    places = data.storage_offset() | data.data_ptr() | data.shape[1]
    word = next(t for t in _WORDS if places % t.itemsize == 0)
    return data.view(-1).view(word).view(len(data), data.shape[1] // word.itemsize)


def moved(column: Tensor, source: int, target: int) -> Tensor:
    """A column with a dimension of its rows moved, contiguous."""
    there = column.movedim(source, target)
    try:
        return there.contiguous()
    except (NotImplementedError, RuntimeError):  # a dtype that torch cannot copy, such as uint4
        places = list(range(column.dim()))
        places.insert(target % column.dim(), places.pop(source))
        raw = as_bytes(column).view(*column.shape, column.element_size())
        raw = raw.permute(*places, column.dim()).contiguous()
        return raw.view(-1).view(column.dtype).view(there.shape)
