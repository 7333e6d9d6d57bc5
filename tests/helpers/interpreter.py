"""Triton's interpreter: kernels run on the CPU, so that what they compute is seen on any machine.

`tests/conftest.py` turns it on, before anything imports Triton.
"""

import contextlib

import torch

from torchcache2.core.memory import Runtime
from torchcache2.identity.xxh3 import DeviceDigests


class OnHost(Runtime):
    """Takes tensors on the host for those of an accelerator, whose copies have arrived at once."""

    def owns(self, tensor):
        return tensor.device.type == "cpu"

    def current(self, device):
        return contextlib.nullcontext()

    def pinned(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def event(self, device):
        return Passed()


class Passed:
    def query(self):
        return True

    def synchronize(self):
        pass


class Interpreted(DeviceDigests):
    """Digests by the kernels. A program takes many rows, as the interpreter runs one after the other."""

    tiles = (512, 256)

    def __init__(self):
        super().__init__(OnHost())
