"""Code of kinds that torch defines: operators, fx graphs, and what `torch.jit` has scripted or traced.

Torch's own operators count by name, and the user's operators by the functions that are registered for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchcache2.core.private import (
    CUSTOM_OPERATORS,
    OPERATOR_CODE,
    OPERATOR_DEFINITION,
    REGISTERED_KERNELS,
    ScriptParts,
    pytree,
)

__all__ = [
    "OPERATORS",
    "OPERATOR_NAMESPACES",
    "ScriptState",
    "definition",
    "graph_code",
    "is_operator",
    "operator_name",
    "registered_otherwise",
    "script_code",
]

_OVERLOAD = type(torch.ops.aten.add.Tensor)
OPERATORS = (_OVERLOAD, type(torch.ops.aten.add), OPERATOR_DEFINITION)
OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten), type(torch.ops.higher_order))
# Kernels for these dispatch keys do not compute outputs.
_NO_KERNELS = ("Meta", "Autograd", "ADInplace", "Tracer", "Functionalize")
_OF_TORCH = ("aten", "prim", "prims", "quantized", "torch", "c10d", "_c10d_functional", "higher_order")
# This matches where code stood, and numbers that the process gives to scripted classes.
_OF_PROCESS = re.compile(r" # .*:\d+:\d+$|___torch_mangle_\d+\.", re.MULTILINE)
_OPAQUE = ("prim::CallMethod", "prim::CallFunction", "prim::PythonOp", "prim::fork")  # they run other code
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.device)


def is_operator(value: Any) -> bool:
    """Whether a value is an operator, or the definition of one."""
    return isinstance(value, OPERATORS)


def operator_name(value: Any) -> str:
    """``namespace::name`` of an operator."""
    if isinstance(value, OPERATOR_DEFINITION):
        return str(value).removeprefix("<CustomOpDef(").removesuffix(")>")
    namespace, name = str(value).split(".")[:2]
    return f"{namespace}::{name}"


def definition(value: Any) -> dict[str, Any] | None:
    """What has been registered for an operator of `torch.library.custom_op`; None if that cannot be read."""
    is_definition = isinstance(value, OPERATOR_DEFINITION)
    found = value if is_definition else CUSTOM_OPERATORS.get(operator_name(value))
    return None if found is None or not vars(found).keys() >= {*OPERATOR_CODE} else vars(found)


def registered_otherwise(name: str) -> bool:
    """Whether Python code has been registered for an operator in a way that keeps no reference to it."""
    namespace, _, short = name.partition("::")
    if namespace in _OF_TORCH:
        return False
    if REGISTERED_KERNELS is None:
        return True
    # The set is copied, because the garbage collector may meanwhile remove the kernels of a dead library.
    keys = [key.split("/") for key in list(REGISTERED_KERNELS)]
    return any(
        key[0] == namespace and key[1].partition(".")[0] == short and not key[-1].startswith(_NO_KERNELS)
        for key in keys
        if len(key) > 2
    )


def graph_code(graph: torch.fx.Graph) -> list[Any]:
    """The code of a graph, and the values that it names."""
    code = graph.python_code("self")
    return [code.src, sorted(code.globals.items())]


def script_code(methods: Iterable[Any]) -> list[Any] | None:
    """The code of scripted methods or functions and of all that they call; None if it cannot be had."""
    parts: list[Any] = []
    for method in methods:
        graph = method.inlined_graph
        if any(graph.findAllNodes(kind) for kind in _OPAQUE):
            return None
        # The printed code has only a few digits of each constant, and shortens texts that look like paths.
        constants = [
            node.output().toIValue()
            for node in graph.findAllNodes("prim::Constant")
            if "value" in node.attributeNames()
        ]
        parts.append([method.name, _OF_PROCESS.sub("", graph.str(False)), constants])
    return parts


class ScriptState:
    """The attributes of a scripted module, and whether they changed."""

    def __init__(self, parts: ScriptParts) -> None:
        self._parts = parts
        self.values = self._read()
        self.is_plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(self.values))

    def _read(self) -> dict[str, Any]:
        return {name: self._parts.read(name) for name in self._parts.attributes}

    def __call__(self, module: object) -> tuple[Any, ...]:
        """A tuple of one object, which stays the same as long as the attributes are equal.

        The attributes themselves are new objects each time that they are read.
        """
        now = self._read()
        if not all(map(_same, now.values(), self.values.values())):
            self.values = now
        return (self.values,)


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, Tensor):
        return False
    if not isinstance(left, (list, tuple, dict)):
        return repr(left) == repr(right)  # NaN is not equal to itself
    (left_leaves, left_shape), (right_leaves, right_shape) = map(pytree.tree_flatten, (left, right))
    return left_shape == right_shape and all(map(_same, left_leaves, right_leaves))
