"""Whether a forward may be cached: reasons to step aside before it runs, and what it did as it ran."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from torchcache2.containers import copied, restore, restore_fields

__all__ = ["ADVICE", "Attributes", "Reason", "depends_on_batch", "versions"]

Reason = tuple[str, str]  # a word for statistics, and a sentence

# What to do about each reason.
ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first",
    "batch": "an item's output has to depend on that item alone. If the batch is not the first dimension, "
    "use batch_first=True; name arguments of the whole batch in shared_args; decorate a narrower function; "
    "quantize statically. If only rounding differs, probe=False keeps the rows",
    "parametrize": "call it outside of that context",
    "lazy": "the next call can be cached",
    "inference": "make or load the module under torch.no_grad() instead",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation; or "
    "another thread drew random numbers meanwhile",
    "state": "the forward changed a tensor, an attribute or a container of its own module, or a global one; "
    "if that happens at every call, it cannot be cached",
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


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Version counters; inference tensors have none."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class Attributes:
    """What some modules, containers and variables hold, to be put back.

    A forward that sets itself up when it first runs does so on the same objects: a flag, and a hook in the
    dict of hooks.

    Parameters
    ----------
    modules : iterable of nn.Module
        Their attributes, and what their dicts, lists and sets hold.
    containers : iterable
        Other containers.
    variables : iterable of (mapping, name)
        Globals and attributes of objects.
    cells : iterable of cell
        Variables of functions around.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        containers: Iterable[Any] = (),
        variables: Iterable[tuple[Mapping[str, Any], str]] = (),
        cells: Iterable[CellType] = (),
    ) -> None:
        self._fields = [(fields, dict(fields)) for fields in map(vars, modules)]
        self._contents = [
            (value, value.copy() if value else None)
            for _, fields in self._fields
            for value in fields.values()
            if type(value) in _CONTAINERS
        ]
        own = {id(value) for value, _ in self._contents}
        self._contents += [(value, copied(value)) for value in containers if id(value) not in own]
        self._variables: list[tuple[Any, str, Any]] = [
            (scope, name, scope.get(name, _MISSING)) for scope, name in variables if type(scope) is dict
        ]
        for cell in cells:
            with contextlib.suppress(ValueError):  # one that is empty
                self._variables.append((cell, "cell_contents", cell.cell_contents))

    def restore(self) -> None:
        """Put back what is another; one step at a time, as other threads use these objects."""
        self.restore_fields()
        for scope, name, value in self._variables:
            if isinstance(scope, CellType):
                setattr(scope, name, value)
            elif value is _MISSING:
                scope.pop(name, None)
            elif scope.get(name, _MISSING) is not value:
                scope[name] = value
        for container, content in self._contents:
            restore(container, content)

    def restore_fields(self) -> None:
        """Put back the attributes of modules alone."""
        for fields, before in self._fields:
            restore_fields(fields, before)
