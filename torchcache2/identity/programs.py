"""The code of modules that tools have made: fx graphs, and what `torch.jit` has scripted or traced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["SCRIPT_FIELDS", "ScriptState", "graph_code", "script_code"]

SCRIPT_FIELDS = frozenset(("_c", "_concrete_type", "_initializing"))
# Where code stood, and a count of what the process has scripted.
_OF_PROCESS = re.compile(r" # .*:\d+:\d+$|___torch_mangle_\d+\.", re.MULTILINE)
_OPAQUE = ("prim::CallMethod", "prim::CallFunction", "prim::PythonOp", "prim::fork")  # run other code
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.device)


def graph_code(graph: torch.fx.Graph) -> list[Any]:
    """The code that a graph stands for, and the values that it names."""
    code = graph.python_code("self")
    return [code.src, sorted(code.globals.items())]


def script_code(methods: Iterable[Any]) -> list[Any] | None:
    """The code of scripted methods or functions and of all that they call; None if it cannot be had."""
    parts: list[Any] = []
    for method in methods:
        graph = method.inlined_graph
        if any(graph.findAllNodes(kind) for kind in _OPAQUE):
            return None
        # The printed code shows only a few digits of each constant, and shortens texts that look like paths.
        constants = [
            node.output().toIValue()
            for node in graph.findAllNodes("prim::Constant")
            if "value" in node.attributeNames()
        ]
        parts.append([method.name, _OF_PROCESS.sub("", graph.str(False)), constants])
    return parts


class ScriptState:
    """The attributes of a scripted module, and whether they changed."""

    def __init__(self, module: Any) -> None:
        self._script = module._c
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(self._script._type())
        self._names = sorted(kind.get_attributes())
        self.constants = dict(sorted(kind.get_constants().items()))
        self.values = self._read()
        self.is_plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(self.values))

    def methods(self) -> list[Any]:
        """Methods and hooks."""
        script = self._script
        named = [script._get_method(name) for name in sorted(script._method_names())]
        return [*named, *script._get_forward_pre_hooks(), *script._get_forward_hooks()]

    def _read(self) -> dict[str, Any]:
        return {name: self._script.getattr(name) for name in self._names}

    def __call__(self, module: object) -> tuple[Any, ...]:
        """The same object as long as attributes are equal; reading them makes new numbers and lists."""
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
