"""Which modules have weights that are spread over processes, so that their forwards wait for each other."""

from __future__ import annotations

import weakref
from itertools import chain

from torch import nn

__all__ = ["ShardedError", "check_whole", "sharding"]

_FSDP = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_FSDP_MARK = "_is_fsdp_managed_module"  # FSDP sets it on each module whose parameters it gathers
_ZERO_MARK = "ds_id"  # ZeRO-3 of DeepSpeed sets it on each parameter that it spreads


class ShardedError(Exception):
    """Raised of a module that needs other processes to compute, or of a part of it."""

    def __init__(self, part: nn.Module, text: str) -> None:
        super().__init__(text)
        self.part = weakref.ref(part)


def sharding(module: nn.Module) -> str | None:
    """What spreads the parameters of a module, those of its submodules aside; None if they are whole.

    Libraries are known by the names and marks that they leave: to import them only to ask takes seconds.
    """
    name = type(module).__name__
    if _FSDP_MARK in vars(module) or any(base.__module__.startswith(_FSDP) for base in type(module).__mro__):
        return f"{name} is sharded by FSDP"
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if type(tensor).__name__ == "DTensor":
            return f"{name} has a DTensor parameter"
        if hasattr(tensor, _ZERO_MARK):
            return f"{name} is sharded by ZeRO"
    return None


def check_whole(module: nn.Module) -> None:
    """Raise `ShardedError` if the parameters of a module are spread over processes."""
    if (text := sharding(module)) is not None:
        raise ShardedError(module, text)
