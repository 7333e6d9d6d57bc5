"""Which layers give outputs that are random, or that depend on the rest of the batch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["Reason", "depends_on_batch"]

Reason = tuple[str, str]  # a word for statistics, and a sentence

_DYNAMIC = (
    "torch.ao.nn.quantized.dynamic",
    "torch.ao.nn.intrinsic.quantized.dynamic",
    "torch.nn.quantized.dynamic",
)


def depends_on_batch(module: nn.Module) -> Reason | None:
    """Why outputs of a module are random or depend on the rest of the batch, if they do."""
    name = type(module).__name__
    if type(module).__module__.startswith(_DYNAMIC):
        return "batch", f"the dynamically quantized {name} scales by the range of the batch"
    if isinstance(module, _BatchNorm):
        if module.training or module.running_mean is None:
            return "training", f"{name} normalises by the statistics of the batch"
    elif getattr(module, "training", False):  # frozen scripted modules have no flag
        rate = 0.0
        if isinstance(module, _DropoutNd):
            rate = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rate = module.dropout
        if rate > 0:
            return "training", f"{name} drops out at random"
    return None
