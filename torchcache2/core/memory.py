"""Memory for rows: fresh and reused blocks, copies of some rows, and copies between a device and the host."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Array, Bytes2D

# Copies between an accelerator and the host, started together, with one wait for all.
#
# Copies to and from page-locked ("pinned") host memory run asynchronously, in the order of their stream.
# Until a copy's event has passed, its target must not be read, and its source must not be freed: `Arriving`
# keeps both. Torch's allocator reuses a pinned buffer only after the copies that read it. Only CUDA is
# asynchronous here (and ROCm, which torch also calls CUDA). Copies to other devices wait.
#
# Each thread has a current stream for each device. Torch uses the stream of the tensors' device, whichever
# device is current; Triton's kernels, for example, do not, and need `Runtime.current`.


class Runtime:
    """The functions of an accelerator that we use: pinned memory, asynchronous copies, events."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the accelerator."""
        return tensor.is_cuda

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Fresh page-locked memory; ordinary memory if the system refuses."""
        try:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def start_copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream of the source's device; does not wait."""
        with self.current(source.device):
            target.copy_(source, non_blocking=True)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor from the host to a device, without waiting for the device's earlier work."""
        if tensor.device.type != "cpu" or not self.has_streams(device):
            return tensor.to(device)
        pinned = self.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(device, non_blocking=True)

    def has_streams(self, device: torch.device) -> bool:
        """Whether work on a device runs asynchronously."""
        return device.type == "cuda"

    def stream(self, device: torch.device) -> Hashable:
        """The device's current stream."""
        return torch.cuda.current_stream(device)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is the current one."""
        return torch.cuda.device(device) if self.has_streams(device) else nullcontext()

    def aside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context whose work on the device goes on beside that of other streams."""
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def event(self, device: torch.device) -> Any:
        """An event that passes once all work so far on the device's current stream is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: Any, device: torch.device) -> None:
        """Make the device's current stream wait for an event, without blocking the host."""
        torch.cuda.current_stream(device).wait_event(event)

    def keep_for_stream(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being reused before all current work on this stream is done."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


CUDA = Runtime()


class Arriving:
    """Tensors being copied to the host; those already there are used as they are."""

    def __init__(self, tensors: Sequence[Tensor], runtime: Runtime = CUDA) -> None:
        self._sources: list[Tensor] = []
        self._tensors = []
        for tensor in tensors:
            if runtime.owns(tensor):
                source = tensor.detach().resolve_conj().resolve_neg().contiguous()
                tensor = runtime.pinned(source.shape, source.dtype)
                runtime.start_copy(tensor, source)
                self._sources.append(source)
            self._tensors.append(tensor if tensor.device.type == "cpu" else tensor.cpu())
        devices = {source.device for source in self._sources}
        self._events = [runtime.event(device) for device in devices]

    @property
    def has_arrived(self) -> bool:
        """Whether all tensors have arrived, so that `wait` returns at once."""
        return all(event.query() for event in self._events)

    @property
    def nbytes(self) -> int:
        """Bytes being copied; 0 once all have arrived."""
        return sum(tensor.nbytes for tensor in self._tensors) if self._events else 0

    def wait(self) -> list[Tensor]:
        """Wait until all tensors have arrived; returns them."""
        for event in self._events:
            event.synchronize()
        self._events, self._sources = [], []
        return self._tensors


class Sending:
    """Tensors of the host being copied to a device with streams, beside what is computed there."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, runtime: Runtime = CUDA) -> None:
        self._device, self._runtime = device, runtime
        with runtime.aside(device):
            self._sent = [runtime.send(tensor, device) for tensor in tensors]
            self._event = runtime.event(device)

    def wait(self) -> list[Tensor]:
        """The tensors on the device, for use on its current stream, which waits for them."""
        self._runtime.wait(self._event, self._device)
        for tensor in self._sent:
            self._runtime.keep_for_stream(tensor)
        return self._sent


def to_host(tensors: Sequence[Tensor], runtime: Runtime = CUDA) -> list[Tensor]:
    """Copy tensors to the host if need be; waits once for all copies."""
    return Arriving(tensors, runtime).wait()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device if need be; from pinned memory, without waiting."""
    if tensor.device == device:
        return tensor
    # `is_pinned` asks the driver, so it is called only if the answer matters.
    is_async = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.to(device, non_blocking=is_async)


def sent(
    tensor: Tensor, devices: Iterable[torch.device], runtime: Runtime = CUDA
) -> dict[torch.device, Tensor]:
    """Copy a small host tensor, such as positions, to each of some devices, without waiting."""
    return {device: runtime.send(tensor, device) for device in set(devices)}


class StreamOrder:
    """Orders the work of several streams on one device's memory by when it was started.

    Only needed on devices with streams: on the host, work is in order anyway.
    """

    def __init__(self, device: torch.device, runtime: Runtime = CUDA) -> None:
        self._device = device
        self._runtime = runtime
        self.is_needed = runtime.has_streams(device)
        self._last: Any = None
        self._streams: set[Hashable] = set()  # streams that the tensors are kept for

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for the work marked by `end` before it uses these tensors.

        If their memory is freed meanwhile, it is reused only after this work.
        """
        if self._last is not None:
            self._runtime.wait(self._last, self._device)
        stream = self._runtime.stream(self._device)
        if stream not in self._streams:
            for tensor in tensors:
                self._runtime.keep_for_stream(tensor)
            self._streams.add(stream)

    def renew(self) -> None:
        """Note that the next `begin` gets other tensors."""
        self._streams.clear()

    def end(self) -> None:
        """Mark all work started so far: later work of any stream comes after it."""
        self._last = self._runtime.event(self._device)


# Reused memory for rows that are soon copied elsewhere. Freeing and allocating megabyte blocks between
# longer-lived samples fragments the heap: it grew by 100 MB in each `DataLoader` worker. A reused block does
# not, and its pages are already mapped.

LEAST_SPARE = 128 << 10  # bytes; smaller blocks leave small holes
_MOST = 4  # blocks of a thread


class SpareMemory(threading.local):
    """Blocks of each thread, reused once nothing refers to them."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Array, weakref.ref[Any]]] = []  # with the part lent from each

    def empty(self, size: int) -> Tensor:
        """Uninitialised uint8 ``(size,)`` on the CPU."""
        if size < LEAST_SPARE:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        free = [i for i, (_, lent) in enumerate(self._blocks) if lent() is None]
        i = free[0] if free else len(self._blocks)
        block = self._blocks[i][0] if free else None
        if block is None or len(block) < size:
            block = np.empty(size, np.uint8)
        part = block[:size]
        if i < _MOST:
            self._blocks[i : i + 1] = [(block, weakref.ref(part))]
        return torch.from_numpy(part)  # the tensor's memory keeps the array alive


# Fresh memory for rows, and copies of some rows of a tensor.

ALONE = 1 << 20  # bytes that one thread copies before others have woken up
_GRAIN = 32_768  # for rows of so many elements, torch uses all threads per row
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_HUGE = 4 << 20  # from so many bytes on, NumPy uses huge pages, with far fewer page faults
P = ParamSpec("P")
R = TypeVar("R")


def with_ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of inference mode, as tensors made in it are not writable later."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper


def empty_bytes(size: int, *, runtime: Runtime | None = None, spare: SpareMemory | None = None) -> Tensor:
    """Fresh uint8 memory on the CPU; if large, in huge pages, for cheap first writes.

    With a `runtime`, page-locked for its accelerator. With `spare`, from there.
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
    """Whether torch considers a tensor of 4 or 5 dimensions as channels-last.

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
    """Rows of contiguous uint8 ``(n, bytes)`` on the CPU, in fresh memory of a `kind` of `empty_bytes`.

    For long rows, torch's `index_select` copies each row with all threads. If other processes use the cores
    too, each such copy may wait for the scheduler. So copy long rows in pieces.
    """
    picked = empty_bytes(len(positions) * data.shape[1], **kind).view(len(positions), data.shape[1])
    if picked.numel() <= ALONE or torch.get_num_threads() == 1:  # as in a worker of a `DataLoader`
        data.numpy().take(positions.numpy(), 0, picked.numpy(), "clip")  # faster than `np.take`
        return picked
    source = as_words(data)
    words = source.shape[1]
    pieces = next((n for n in range(1, 257) if words % n == 0 and words // n < _GRAIN), 1)
    index = (positions[:, None] * pieces + torch.arange(pieces, device="cpu")).view(-1)
    target = picked.view(-1).view(source.dtype).view(-1, words // pieces)
    torch.index_select(source.view(-1, words // pieces), 0, index, out=target)
    return picked


_NUMPY = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in ("f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "?")
}


def numbers(rows: Bytes2D, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers, shape ``(n, numbers of a row)``; shares their memory.

    Viewing arrays is several times faster than viewing tensors.
    """
    if dtype in _NUMPY:
        return torch.from_numpy(rows.view(_NUMPY[dtype]))
    return torch.from_numpy(rows).view(-1).view(dtype).view(len(rows), rows.shape[1] // dtype.itemsize)


def write(data: Tensor, first: int, values: Tensor) -> None:
    """Copy a column of any dtype over rows of contiguous uint8 ``(n, bytes)``, from row `first` on."""
    if values.numel():
        target = data[first : first + values.shape[0]].view(-1).view(values.dtype)
        target.view(values.shape).copy_(values)


def as_bytes(column: Tensor) -> Tensor:
    """A column as uint8 ``(n, bytes)``; shares memory if it is contiguous, and no conjugate or negative."""
    count = column.shape[0]
    size = column.numel() // count * column.element_size() if count else 0
    flat = column.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # a single number from a strided slice
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).view(count, size)


def item_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each item of a strided tensor ``(n, ...)``, as uint8 ``(n, bytes)``, on its device.

    Shares memory with the tensor if that is contiguous.
    """
    return as_bytes(tensor.detach())


def as_words(data: Tensor) -> Tensor:
    """Contiguous uint8 ``(n, bytes)`` as the widest words that divide a row; shares memory."""
    # Other libraries' memory may begin anywhere, and a GPU reads only aligned words.
    places = data.storage_offset() | data.data_ptr() | data.shape[1]
    word = next(t for t in _WORDS if places % t.itemsize == 0)
    return data.view(-1).view(word).view(len(data), data.shape[1] // word.itemsize)


def moved(column: Tensor, source: int, target: int) -> Tensor:
    """A contiguous copy of a column with a dimension of its rows moved."""
    # Torch cannot copy every dtype, such as uint4: use ints of the same size.
    word = {word.itemsize: word for word in _WORDS}.get(column.element_size(), column.dtype)
    return column.view(word).movedim(source, target).contiguous().view(column.dtype)
