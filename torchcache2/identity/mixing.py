"""Which layers draw random numbers, or mix the items of a batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import nn

from torchcache2.core.private import BATCH_NORMS, DROPOUTS

__all__ = ["UnsteadyLayer", "unsteady"]

_DYNAMIC = (
    "torch.ao.nn.quantized.dynamic",
    "torch.ao.nn.intrinsic.quantized.dynamic",
    "torch.nn.quantized.dynamic",
)


class UnsteadyLayer(NamedTuple):
    """The class of a layer, and what makes its output for an item depend on the batch or the call."""

    name: str
    does: Literal["drops out", "normalises", "scales"]


def unsteady(module: nn.Module) -> UnsteadyLayer | None:
    """What makes the output of a module unsteady now, without its submodules; None if nothing does."""
    name = type(module).__name__
    if type(module).__module__.startswith(_DYNAMIC):
        return UnsteadyLayer(name, "scales")
    if isinstance(module, BATCH_NORMS):
        if module.training or module.running_mean is None:
            return UnsteadyLayer(name, "normalises")
    elif getattr(module, "training", False):  # frozen scripted modules have no such flag
        rate = 0.0
        if isinstance(module, DROPOUTS):
            rate = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rate = module.dropout
        if rate > 0:
            return UnsteadyLayer(name, "drops out")
    return None
