"""What of a module keeps it from being cached, as far as one can see without running it.

Weights that are sharded over processes, so that forwards wait for each other; layers that draw random numbers
or mix items; and code that draws unseeded random numbers.
"""

from __future__ import annotations

import dis
import os
import random
import secrets
import sys
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn

from torchcache2.core.errors import attribute
from torchcache2.core.private import BATCH_NORMS, DROPOUTS, FSDP_MARK, FSDP_MODULES, buffers_of, parameters_of
from torchcache2.identity.names import chains_in, steps_of
from torchcache2.identity.sourcecode import cells_of, code_objects, names_in, origin

_FROM_SYSTEM: list[Any] = [os.urandom, random.SystemRandom, uuid.uuid1, uuid.uuid4]
_FROM_SYSTEM += [vars(secrets)[name] for name in secrets.__all__ if name != "compare_digest"]
_GENERATORS: list[Any] = [random.Random, np.random.default_rng, np.random.RandomState, np.random.SeedSequence]
_GENERATORS += [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
_NAMES = {value.__name__ for value in (*_FROM_SYSTEM, *_GENERATORS)} | {*secrets.__all__}
_SYSTEM, _MAKERS = set(map(id, _FROM_SYSTEM)), set(map(id, _GENERATORS))
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")  # run before any call
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


def unseeded_draws(
    functions: Iterable[types.FunctionType], root: Any, methods: Iterable[str] = ()
) -> list[str]:
    """Where project code draws unseeded numbers, for people, such as ``Net.forward names uuid.uuid4``.

    Skips methods that only constructors call. The call goes to `root` itself, or to its `methods`.
    """
    waiting = [function for function in functions if origin(function) == "project"]
    names = set(methods)
    found: dict[str, None] = {}
    while called := [one for one in waiting if one is root or _may_run(one, names)]:
        waiting = [one for one in waiting if not any(one is other for other in called)]
        for function in called:
            names |= names_in(function.__code__)
            found |= dict.fromkeys(f"{function.__qualname__} names {path}" for path in _draws(function))
    return list(found)


def _may_run(function: types.FunctionType, names: set[str]) -> bool:
    """Whether a call whose code uses these names may run a function."""
    name, outer = function.__name__, function.__qualname__.rpartition(".")[0]
    if name in _CONSTRUCTORS:
        return False
    if not outer or outer.endswith("<locals>") or name == "forward":
        return True
    is_private = name.startswith("__") and not name.endswith("__")
    return name.startswith("__") > is_private or any(taken.endswith(name) for taken in names)


def _draws(function: types.FunctionType) -> Iterator[str]:
    scope = function.__globals__
    taken = names_in(function.__code__)
    local = {name: value for name, _, value in cells_of(function)}
    reached = [*map(scope.get, taken), *local.values()]
    if _NAMES.isdisjoint(taken) and (_SYSTEM | _MAKERS).isdisjoint(map(id, reached)):
        return
    for steps in map(steps_of, code_objects(function.__code__)):
        module: Any = None
        for start, end in chains_in(steps):
            step, name, value = steps[start], str(steps[start].argval), None
            if step.opname == "IMPORT_NAME":
                is_outermost = steps[start - 1].argval is None  # as for ``import os.path``
                value = module = sys.modules.get(name.partition(".")[0] if is_outermost else name)
            elif step.opname == "IMPORT_FROM":
                value = _attribute(module, name)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = local.get(name, scope.get(name))
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                value = local.get(name)
            for inner in steps[start + 1 : end]:
                value = _attribute(value, inner.argval)
            if value is not None and steps[end].opname.startswith("STORE_"):
                local[str(steps[end].argval)] = value
            path = ".".join(str(one.argval) for one in steps[start:end])
            if id(value) in _SYSTEM and step.opname != "IMPORT_FROM":
                yield path
            elif id(value) in _MAKERS and _is_call_without_seed(steps[end:]):
                yield f"{path}() without a seed"


def _attribute(value: Any, name: str) -> Any:
    return vars(value).get(name) if isinstance(value, types.ModuleType) else None


def _is_call_without_seed(steps: list[dis.Instruction]) -> bool:
    count = int(steps[0].opname == "LOAD_CONST" and steps[0].argval is None)  # as in ``default_rng(None)``
    if count and steps[1].opname == "LOAD_CONST" and isinstance(steps[1].argval, tuple):
        steps = steps[1:]  # the name of the argument
    return steps[count].opname.startswith("CALL") and steps[count].arg == count
