"""Copies between an accelerator and the host, which start together and are waited for once.

Copies to and from page-locked ("pinned") host memory run while the host goes on, in the order of the stream
that they were started on. Before the event of a copy has passed, its target must not be read, and its source
must not be freed: `Arriving` refers to both. Torch's allocator of pinned memory gives out a buffer again only
after the copies that read it.

Only CUDA is asynchronous here, and ROCm, which torch also calls CUDA. Copies to other devices are waited for.

Each device has a current stream of its own in each thread. Torch uses that of the device where the tensors
are, whichever device is current; `Runtime.current` is for what does not, such as kernels of Triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDA", "Arriving", "Runtime", "StreamOrder", "sent", "to_device", "to_host"]


class Runtime:
    """The functions of an accelerator that are used here: pinned memory, copies that do not wait, events."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the accelerator."""
        return tensor.device.type == "cuda"

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Fresh page-locked memory; ordinary memory where the system gives no more of it."""
        try:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def start_copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream of the source's device; does not wait."""
        with self.current(source.device):
            target.copy_(source, non_blocking=True)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A small tensor of the host on a device; does not wait for what the device has to do before."""
        if tensor.device.type != "cpu" or not self.has_streams(device):
            return tensor.to(device)
        pinned = self.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(device, non_blocking=True)

    def has_streams(self, device: torch.device) -> bool:
        """Whether work on a device runs while the host goes on."""
        return device.type == "cuda"

    def stream(self, device: torch.device) -> Hashable:
        """The device's current stream."""
        return torch.cuda.current_stream(device)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is the current one."""
        return torch.cuda.device(device) if self.has_streams(device) else nullcontext()

    def event(self, device: torch.device) -> Any:
        """An event that passes when everything is done that was started on the device's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: Any, device: torch.device) -> None:
        """Have the device's current stream wait for an event; the host does not."""
        torch.cuda.current_stream(device).wait_event(event)

    def keep_for_stream(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being reused before all work on the current stream is done."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


CUDA = Runtime()


class Arriving:
    """Tensors that are being copied to the host; those that are there already stay as they are."""

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
        """Whether all have arrived, so that `wait` returns at once."""
        return all(event.query() for event in self._events)

    @property
    def nbytes(self) -> int:
        """Bytes that are being copied; 0 when all have arrived."""
        return sum(tensor.nbytes for tensor in self._tensors) if self._events else 0

    def wait(self) -> list[Tensor]:
        """Wait until all have arrived; returns the tensors on the host."""
        for event in self._events:
            event.synchronize()
        self._events, self._sources = [], []
        return self._tensors


def to_host(tensors: Sequence[Tensor], runtime: Runtime = CUDA) -> list[Tensor]:
    """The same tensors on the host; waits once for all copies."""
    return Arriving(tensors, runtime).wait()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same tensor on a device; from pinned memory, without waiting."""
    if tensor.device == device:
        return tensor
    # `is_pinned` asks the driver, so it is called only if the answer matters.
    is_async = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.to(device, non_blocking=is_async)


def sent(
    tensor: Tensor, devices: Iterable[torch.device], runtime: Runtime = CUDA
) -> dict[torch.device, Tensor]:
    """A small tensor of the host, such as positions, on each of some devices; waits for none of them."""
    return {device: runtime.send(tensor, device) for device in set(devices)}


class StreamOrder:
    """Puts the work of several streams on the memory of a device in the order in which it was started.

    It is needed only where there are streams: on the host there is nothing to put in order.
    """

    def __init__(self, device: torch.device, runtime: Runtime = CUDA) -> None:
        self._device = device
        self._runtime = runtime
        self.is_needed = runtime.has_streams(device)
        self._last: Any = None
        self._streams: set[Hashable] = set()  # that the tensors are kept for

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Let the current stream use these tensors only after the work that `end` has marked.

        Their memory may be freed while this work runs, and is reused only afterwards.
        """
        if self._last is not None:
            self._runtime.wait(self._last, self._device)
        stream = self._runtime.stream(self._device)
        if stream not in self._streams:
            for tensor in tensors:
                self._runtime.keep_for_stream(tensor)
            self._streams.add(stream)

    def renew(self) -> None:
        """Say that `begin` will be called with other tensors than before."""
        self._streams.clear()

    def end(self) -> None:
        """Mark the work that was started until now: later work of any stream comes after it."""
        self._last = self._runtime.event(self._device)
