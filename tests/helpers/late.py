"""A runtime of an accelerator that stands in here: its copies happen when they are waited for."""

import contextlib
import weakref

import torch

from torchcache2.core.memory import Runtime

POISON = 0xA5


class Late(Runtime):
    """Copies wait until somebody waits for their event; until then their target is garbage."""

    def __init__(self):
        self.remote, self.queue, self.log = set(), [], []
        self.current_stream = "default"

    def on_device(self, tensor):
        self.remote.add(tensor.untyped_storage().data_ptr())
        return tensor

    def owns(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.remote

    def pinned(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(POISON)
        return tensor

    def start_copy(self, target, source):
        self.queue.append((target, weakref.ref(source)))

    def stream(self, device):
        return self.current_stream

    def event(self, device):
        self.log.append("event")
        return Event(self, list(self.queue))

    def wait(self, event, device):
        self.log.append("wait")

    def keep_for_stream(self, tensor):
        self.log.append("keep")


class Event:
    def __init__(self, runtime, copies):
        self.runtime, self.copies = runtime, copies

    def synchronize(self):
        self.runtime.log.append("synchronize")
        for target, source in self.copies:
            assert source() is not None, "freed before it was copied"
            target.copy_(source())
        done = {id(target) for target, _ in self.copies}
        self.runtime.queue = [copy for copy in self.runtime.queue if id(copy[0]) not in done]


class Streams(Late):
    """Takes the memory of the host for that of an accelerator."""

    def has_streams(self, device):
        return True

    def pinned(self, shape, dtype):
        self.log.append("pinned")
        return super().pinned(shape, dtype)

    def current(self, device):
        return contextlib.nullcontext()


class Sends(Streams):
    """Copies to a device, too, arrive when a stream waits for them."""

    def send(self, tensor, device):
        sent, source = self.pinned(tensor.shape, tensor.dtype), tensor.clone()
        self.queue.append((sent, lambda: source))
        return sent

    @contextlib.contextmanager
    def aside(self, device):
        before, self.current_stream = self.current_stream, "aside"
        yield
        self.current_stream = before

    def event(self, device):
        self.log.append(f"event of {self.current_stream}")
        return Event(self, list(self.queue))

    def wait(self, event, device):
        self.log.append(f"wait of {self.current_stream}")
        event.synchronize()
