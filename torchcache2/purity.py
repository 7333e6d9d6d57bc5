"""Whether a forward may be cached: reasons to step aside before it runs, and what it did as it ran."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["ADVICE", "Attributes", "RandomState", "Reason", "depends_on_batch", "versions"]

Reason = tuple[str, str]  # a word for statistics, and a sentence

# What to do about each reason.
ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first",
    "batch": "an item's output has to depend on that item alone; quantize statically, or cache parts",
    "parametrize": "call it outside of that context",
    "lazy": "the next call can be cached",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation",
    "state": "the forward changed a tensor or an attribute of its own module; if that happens at every "
    "call, it cannot be cached",
    "subclass": "pass dense tensors of torch's own type to have the call cached",
    "autocast": "change weights outside of the autocast context",
    "input": "the forward changed its input in place; have it work on a copy",
}

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
    elif module.training:
        rate = 0.0
        if isinstance(module, _DropoutNd):
            rate = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rate = module.dropout
        if rate > 0:
            return "training", f"{name} drops out at random"
    return None


def _elements(container: Any) -> list[int]:
    """What is in a container, by identity."""
    values = container.items() if isinstance(container, dict) else [(value,) for value in container or ()]
    return [id(part) for pair in values for part in pair]


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
        """Put everything back, into the objects that are there now."""
        for fields, before in self._fields:
            fields.clear()
            fields.update(before)
        for container, content in self._contents:
            # Only where something has changed: another thread may be going through it.
            if _elements(container) == _elements(content):
                continue
            container.clear()
            if content:
                (container.extend if isinstance(container, list) else container.update)(content)


class RandomState:
    """The state of the generators that a forward may draw from, as it was.

    Parameters
    ----------
    generators : iterable
        Generators besides the default ones of torch, numpy and Python.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        self._generators = list(generators)
        self._state = self._read()

    def moved(self) -> bool:
        """Whether something has been drawn since."""
        return bool(self._read()[0] != self._state[0])

    def restore(self) -> None:
        """Undo what has been drawn."""
        _, cpu, cuda, numbers, numpy_state, others = self._state
        torch.set_rng_state(cpu)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        random.setstate(numbers)
        np.random.set_state(numpy_state)
        for generator, state in zip(self._generators, others, strict=True):
            _set_state(generator, state)

    def _read(self) -> tuple[Any, ...]:
        cpu = torch.get_rng_state()
        cuda: list[Tensor] = []
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
        numbers = random.getstate()
        numpy_state: Any = np.random.get_state()
        others = list(map(_get_state, self._generators))
        comparable = (
            [state.numpy().tobytes() for state in (cpu, *cuda)],
            numbers,
            [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state],
            list(map(_comparable, others)),
        )
        return comparable, cpu, cuda, numbers, numpy_state, others


def _get_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _comparable(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu().numpy().tobytes()
    return repr(state)
