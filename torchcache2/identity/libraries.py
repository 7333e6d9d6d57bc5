"""Code of libraries: what others have put into installed code, and torch's operators, graphs and scripts."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchcache2.core.private import (
    CUSTOM_OPERATORS,
    OPERATOR_CODE,
    OPERATOR_DEFINITION,
    REGISTERED_KERNELS,
    ScriptParts,
    pytree,
)
from torchcache2.identity.sourcecode import CompiledTexts, Origins, names_in
from torchcache2.identity.uses import taken_by

__all__ = [
    "OPERATORS",
    "OPERATOR_NAMESPACES",
    "InstalledCode",
    "ScriptState",
    "definition",
    "graph_code",
    "is_operator",
    "operator_name",
    "registered_otherwise",
    "script_code",
]

_LARGEST_REGISTRY = 1000


class InstalledCode:
    """Follows forwards of installed classes by name, through the methods and functions of their package."""

    def __init__(self, origins: Origins, texts: CompiledTexts) -> None:
        self.found: dict[str, Any] = {}  # the user's code that was met, by the place where it is
        self.registries: list[dict[Any, Any]] = []  # dicts to which more code may be added
        self._origins, self._texts = origins, texts
        self._named: dict[int, Any] = {}
        self._scopes: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._reached_by: dict[int, tuple[set[str], list[types.FunctionType]]] = {}

    @property
    def scopes(self) -> list[tuple[Mapping[str, Any], set[str]]]:
        """Names that stand for code, with the globals or the class that they are in."""
        return list(self._scopes.values())

    def reach(self, kind: type) -> set[str]:
        """Follow the forwards of a class and its bases; every name that they take."""
        bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
        queue = list(self._methods(bases, {"forward"}))
        names: set[str] = set()
        seen = set(map(id, queue))
        is_installed = self._origins.of(kind) == "installed"
        while queue:
            function = queue.pop()
            own, reached = self._one(function)
            reached = [*reached, *self._methods(bases, own - names)]
            names |= own
            for other in reached:
                root = other.__globals__.get("__name__", "").partition(".")[0]
                is_near = is_installed or other.__globals__ is function.__globals__
                if id(other) not in seen and is_near and root == kind.__module__.partition(".")[0]:
                    seen.add(id(other))
                    queue.append(other)
        return names

    def names(self, start: types.FunctionType | type) -> set[str]:
        """Every name that a function or class takes, and the installed code that it names."""
        queue: list[Any] = [start]
        names: set[str] = set()
        while queue:
            one = queue.pop()
            if id(one) in self._named or self._origins.of(one) != "installed":
                continue
            self._named[id(one)] = one
            if isinstance(one, type):
                queue += [
                    inner for base in one.__mro__ for v in vars(base).values() for inner in _functions(v)
                ]
                continue
            own, scope = self._texts.once(taken_by, one.__code__), one.__globals__
            names |= own
            found = [scope[name] for name in own & scope.keys()]
            modules = [value for value in found if isinstance(value, types.ModuleType)]
            found += [vars(module)[name] for module in modules for name in own & vars(module).keys()]
            found += [inner for cell in one.__closure__ or () for inner in _in_cell(cell)]
            queue += [inner for value in found for inner in _functions(value)]
        return names

    def _methods(self, bases: list[type], names: set[str]) -> Iterator[types.FunctionType]:
        for base in bases:
            for name in names & vars(base).keys():
                value = vars(base)[name]
                if callable(value) or hasattr(type(value), "__get__"):
                    self._watch(base, name)
                yield from _functions(value)

    def _one(self, function: types.FunctionType) -> tuple[set[str], list[types.FunctionType]]:
        """The names that a function takes, and the functions that these stand for."""
        known = self._reached_by.get(id(function))
        if known is not None:
            return known
        names, scope = names_in(function.__code__), function.__globals__
        reached = [inner for cell in function.__closure__ or () for inner in _in_cell(cell)]
        reached += _functions(getattr(function, "__wrapped__", None))
        modules: list[types.ModuleType] = []
        for name in names & scope.keys():
            reached += self._global(scope, name, modules)
        for module in modules:
            for name in names & vars(module).keys():
                reached += self._global(vars(module), name, modules)
        found = self._reached_by[id(function)] = names, reached
        return found

    def _global(
        self, scope: dict[str, Any], name: str, modules: list[types.ModuleType]
    ) -> Iterator[types.FunctionType]:
        value = scope[name]
        where = f"{scope.get('__name__', '')}.{name}"
        if isinstance(value, types.ModuleType):
            if not any(value is module for module in modules):
                modules.append(value)
            return
        for owner, place, registry in _registries(scope, name):
            self._watch(owner, place)
            if any(registry is one for one in self.registries) or len(registry) > _LARGEST_REGISTRY:
                continue
            self.registries.append(registry)
            for key, value in list(registry.items()):
                if self._origins.is_project(value):
                    self.found[f"{where}[{key!r}]" if isinstance(key, (str, int)) else f"{where}[…]"] = value
        if callable(value):
            self._watch(scope, name)
            if self._origins.is_project(value):
                self.found[where] = value
            else:
                yield from _functions(value)

    def _watch(self, owner: type | dict[str, Any], name: str) -> None:
        scope = vars(owner) if isinstance(owner, type) else owner
        self._scopes.setdefault(id(owner), (scope, set()))[1].add(name)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The Python function of a function, method, property or wrapper."""
    for inner in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
        if isinstance(inner, types.FunctionType):
            yield inner
    wrapped = getattr(value, "__wrapped__", None) if not isinstance(value, type) else None
    if isinstance(wrapped, types.FunctionType):
        yield wrapped


def _in_cell(cell: types.CellType) -> Iterator[types.FunctionType]:
    try:
        value = cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return
    if isinstance(value, types.FunctionType):
        yield value


def _registries(
    scope: dict[str, Any], name: str
) -> Iterator[tuple[type | dict[str, Any], str, dict[Any, Any]]]:
    """The dicts in which a global keeps what others have registered, each with where it is."""
    value = scope[name]
    if isinstance(value, dict):
        yield scope, name, value
    elif not isinstance(value, type) and isinstance(value, Mapping):
        for owner in (getattr(value, "__dict__", {}), *type(value).__mro__):
            content = vars(owner) if isinstance(owner, type) else owner
            yield from [(owner, place, one) for place, one in list(content.items()) if type(one) is dict]


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
