"""Whether a forward may be cached: reasons to step aside before it runs, and what it did as it ran."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["ADVICE", "Attributes", "Reason", "depends_on_batch", "versions"]

Reason = tuple[str, str]  # a word for statistics, and a sentence

# What to do about each reason.
ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first",
    "batch": "an item's output has to depend on that item alone; quantize statically, or cache parts",
    "parametrize": "call it outside of that context",
    "lazy": "the next call can be cached",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation; or "
    "another thread drew random numbers meanwhile",
    "state": "the forward changed a tensor or an attribute of its own module; if that happens at every "
    "call, it cannot be cached",
    "subclass": "pass dense tensors of torch's own type to have the call cached",
    "autocast": "change weights outside of the autocast context",
    "input": "the forward changed its input in place; have it work on a copy",
}

_MISSING = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
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


def _elements(container: Any) -> list[int]:
    """What is in a list or set, by identity."""
    return [id(value) for value in container or ()]


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Version counters; inference tensors have none."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class Attributes:
    """The attributes of some modules, and what their dicts, lists and sets hold, to be put back.

    A forward that sets itself up when it first runs does so on the same objects: a flag, and a hook in the
    dict of hooks.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._fields = [(fields, dict(fields)) for fields in map(vars, modules)]
        self._contents = [
            (value, value.copy() if value else None)
            for _, fields in self._fields
            for value in fields.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        """Put back what is another; one step at a time, as other threads use these objects."""
        for fields, before in self._fields:
            _restore_dict(fields, before)
        for container, content in self._contents:
            if isinstance(container, dict):
                _restore_dict(container, content or {})
            elif _elements(container) != _elements(content) and isinstance(container, list):
                container[:] = content or ()
            elif _elements(container) != _elements(content):
                container.intersection_update(content or ())
                container.update(content or ())


def _restore_dict(content: Any, before: Mapping[Any, Any]) -> None:
    for name in list(content.keys() - before.keys()):
        content.pop(name, None)
    for name, value in before.items():
        if content.get(name, _MISSING) is not value:
            content[name] = value
