"""Copies between an accelerator and the host, started together and waited for once.

Copies to and from page-locked ("pinned") host memory run beside the host's own work, in the order of
the stream that they were started on. Until a copy's event has passed, its target holds nothing yet and its
source must stay: `Arriving` keeps both. Torch's allocator of pinned memory gives a buffer out again only
after the copies that read it.

Only CUDA (and ROCm, which torch calls so too) is asynchronous here; other devices copy and wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDA", "Arriving", "Runtime", "StreamOrder", "to_device", "to_host"]


class Runtime:
    """What is asked of an accelerator: pinned memory, copies that do not wait, and events."""

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
        with torch.cuda.device(source.device):
            target.copy_(source, non_blocking=True)

    def event(self, device: torch.device) -> Any:
        """Passes when everything has been done that was started on the device's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: Any, device: torch.device) -> None:
        """Have the device's current stream wait for an event; the host does not."""
        torch.cuda.current_stream(device).wait_event(event)

    def keep_for_stream(self, tensor: Tensor) -> None:
        """Have the memory of a tensor given out again only after what was started on the current stream."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


CUDA = Runtime()


class Arriving:
    """Tensors of any devices on their way to the host; those on the host are passed on as they are."""

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
    def nbytes(self) -> int:
        """Bytes that are on their way."""
        return sum(tensor.nbytes for tensor in self._tensors) if self._events else 0

    def wait(self) -> list[Tensor]:
        """The tensors on the host, when all have arrived."""
        for event in self._events:
            event.synchronize()
        self._events, self._sources = [], []
        return self._tensors


def to_host(tensors: Sequence[Tensor], runtime: Runtime = CUDA) -> list[Tensor]:
    """The same tensors on the host; waits once for all of them."""
    return Arriving(tensors, runtime).wait()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same tensor on a device; from pinned memory, without waiting."""
    if tensor.device == device:
        return tensor
    # `is_pinned` asks the driver, so it is called only where the answer matters.
    is_async = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.to(device, non_blocking=is_async)


class StreamOrder:
    """Puts the work of several streams on the memory of a device in the order in which it was started.

    It is needed only where there are streams: on the host there is nothing to put in order.
    """

    def __init__(self, device: torch.device, runtime: Runtime = CUDA) -> None:
        self._device = device
        self._runtime = runtime
        self.is_needed = device.type == "cuda"
        self._last: Any = None

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """What the current stream does from here on, with these tensors, comes after what others were given.

        Their memory, which may be freed while it runs, is given out again after it.
        """
        if self._last is not None:
            self._runtime.wait(self._last, self._device)
        for tensor in tensors:
            self._runtime.keep_for_stream(tensor)

    def end(self) -> None:
        """What follows on any stream comes after what was started until here."""
        self._last = self._runtime.event(self._device)
