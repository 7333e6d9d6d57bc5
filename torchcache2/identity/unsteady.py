"""What makes outputs unsteady: layers that draw or mix the items of a batch, and numbers without a seed."""

from __future__ import annotations

import contextlib
import dis
import os
import random
import re
import secrets
import sys
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import nn

from torchcache2.core.private import BATCH_NORMS, DROPOUTS
from torchcache2.identity import sourcecode
from torchcache2.identity.sourcecode import code_objects, names_in

__all__ = ["UnsteadyLayer", "unseeded_draws", "unsteady"]

_FROM_SYSTEM: list[Any] = [os.urandom, random.SystemRandom, uuid.uuid1, uuid.uuid4]
_FROM_SYSTEM += [vars(secrets)[name] for name in secrets.__all__ if name != "compare_digest"]
_GENERATORS: list[Any] = [random.Random, np.random.default_rng, np.random.RandomState, np.random.SeedSequence]
_GENERATORS += [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
_NAMES = {value.__name__ for value in (*_FROM_SYSTEM, *_GENERATORS)} | {*secrets.__all__}
_SYSTEM, _MAKERS = set(map(id, _FROM_SYSTEM)), set(map(id, _GENERATORS))
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")  # these run before any call
_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES")


def unseeded_draws(
    functions: Iterable[types.FunctionType], root: Any, methods: Iterable[str] = ()
) -> list[str]:
    """Where project code draws such numbers, for people, such as ``Net.forward names uuid.uuid4``.

    Left out are methods that only constructors call. `root` is what is called itself, or its `methods` are.
    """
    waiting = [function for function in functions if sourcecode.origin(function) == "project"]
    names = set(methods)
    found: dict[str, None] = {}
    while called := [one for one in waiting if one is root or _may_run(one, names)]:
        waiting = [one for one in waiting if not any(one is other for other in called)]
        for function in called:
            names |= names_in(function.__code__)
            found |= dict.fromkeys(f"{function.__qualname__} names {path}" for path in _draws(function))
    return list(found)


def _may_run(function: types.FunctionType, names: set[str]) -> bool:
    """Whether a call may run a function, if the code of the call takes these names."""
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
    local: dict[str, Any] = {}  # what it has captured, or imports as it runs
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not assigned yet
            local[variable] = cell.cell_contents
    reached = [*map(scope.get, taken), *local.values()]
    if _NAMES.isdisjoint(taken) and (_SYSTEM | _MAKERS).isdisjoint(map(id, reached)):
        return
    for code in code_objects(function.__code__):
        steps = list(_steps(code))
        value: Any = None
        module: Any = None
        path = ""
        for number, step in enumerate(steps):
            name = str(step.argval)
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value, path = local.get(name, scope.get(name)), name
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                value, path = local.get(name), name
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value, path = _attribute(value, name), f"{path}.{name}"
            elif step.opname == "IMPORT_NAME":
                is_outermost = number > 0 and steps[number - 1].argval is None  # as for ``import os.path``
                value = module = sys.modules.get(name.partition(".")[0] if is_outermost else name)
            elif step.opname == "IMPORT_FROM":
                value = _attribute(module, name)
                continue
            else:
                if step.opname.startswith("STORE_") and value is not None:
                    local[name] = value
                value = None
            if id(value) in _SYSTEM:
                yield path
            elif id(value) in _MAKERS and _is_call_without_seed(steps[number + 1 :]):
                yield f"{path}() without a seed"


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions, each of which has one name: Python 3.13 has some with two."""
    for step in dis.get_instructions(code):
        names = re.findall("(?:LOAD|STORE)_FAST", step.opname)
        if len(names) == 2:
            for name, variable in zip(names, step.argval, strict=True):
                yield step._replace(opname=name, argval=variable)
        elif step.opname not in _SKIPPED:
            yield step


def _attribute(value: Any, name: str) -> Any:
    return vars(value).get(name) if isinstance(value, types.ModuleType) else None


def _is_call_without_seed(steps: list[dis.Instruction]) -> bool:
    count = int(steps[0].opname == "LOAD_CONST" and steps[0].argval is None)  # as in ``default_rng(None)``
    if count and steps[1].opname == "LOAD_CONST" and isinstance(steps[1].argval, tuple):
        steps = steps[1:]  # the name of the argument
    return steps[count].opname.startswith("CALL") and steps[count].arg == count


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
