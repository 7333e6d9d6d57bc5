"""What of a module keeps it from being cached, as far as one can see without running it.

Weights that are sharded over processes, so that forwards wait for each other; and layers that draw random
numbers or mix items.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from torchcache2.core.errors import attribute
from torchcache2.core.private import BATCH_NORMS, DROPOUTS, FSDP_MARK, FSDP_MODULES, buffers_of, parameters_of

_ZERO_MARK = "ds_id"  # DeepSpeed's ZeRO-3 sets it on each sharded parameter


class ShardedError(Exception):
    """Raised for a module that needs other processes to compute."""

    def __init__(self, part: nn.Module, text: str) -> None:
        super().__init__(text)
        self.part = weakref.ref(part)


def sharding(module: nn.Module) -> str | None:
    """How a module's own parameters (not its submodules') are sharded; None if they are not.

    Recognises libraries by names and marks, as importing them takes seconds.
    """
    name = type(module).__name__
    bases = type(module).__mro__
    if FSDP_MARK in vars(module) or any(base.__module__.startswith(FSDP_MODULES) for base in bases):
        return f"{name} is sharded by FSDP"
    for tensor in chain(parameters_of(module).values(), buffers_of(module).values()):
        if type(tensor).__name__ == "DTensor":
            return f"{name} has a DTensor parameter"
        if hasattr(tensor, _ZERO_MARK):
            return f"{name} is sharded by ZeRO"
    return None


class _Met(set[int]):
    """What was met, by identity."""

    def __contains__(self, module: object) -> bool:
        return super().__contains__(id(module))

    def add(self, module: object) -> None:
        super().add(id(module))


def modules_of(root: Any) -> Iterator[nn.Module]:
    """A module and its submodules, each once; none for other values. Modules need not be hashable."""
    if isinstance(root, nn.Module):
        met: Any = _Met()
        yield from (module for _, module in nn.Module.named_modules(root, met))


def weights_of(root: Any) -> Iterator[Tensor]:
    """The parameters and buffers of a module; none for other values."""
    for module in modules_of(root):
        yield from chain(module.parameters(recurse=False), module.buffers(recurse=False))


class UnsteadyLayer(NamedTuple):
    """The class of a layer, and why its output for an item depends on the batch or the call."""

    name: str
    does: Literal["drops out", "normalises", "scales"]


def unsteady(module: nn.Module) -> UnsteadyLayer | None:
    """Why a module's own output (without submodules) is unsteady now; None if it is not."""
    name = type(module).__name__
    if type(module).__module__.startswith("torch.") and ".quantized.dynamic" in type(module).__module__:
        return UnsteadyLayer(name, "scales")
    if isinstance(module, BATCH_NORMS):
        if module.training or module.running_mean is None:
            return UnsteadyLayer(name, "normalises")
    elif attribute(module, "training"):  # some wrappers have no such flag
        rate = 0.0
        if isinstance(module, DROPOUTS):
            rate = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rate = module.dropout
        if rate > 0:
            return UnsteadyLayer(name, "drops out")
    return None
