"""Which parts of a module the methods that are called may use: others, such as a decoder, need not count.

A part is a submodule, a parameter or a buffer. It is left out only if the source of these methods, and of all
that they call with the module, shows that they use it for nothing but attributes with constant names, none of
which is that part. In any doubt, all parts count. Whether something else leads back to the module, such as a
submodule that refers to it, is for `Walk` to see.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Collection
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from torchcache2.core.errors import attribute
from torchcache2.core.private import BUFFERS, GLOBAL_HOOKS, HOOKS, MODULES, PARAMETERS, PRE_HOOKS
from torchcache2.identity import marks
from torchcache2.identity.names import bound_in, taken_by, unmangled
from torchcache2.identity.sourcecode import CompiledTexts, cells_of, function_source, parse

_MISSING = object()
_INTERNAL = vars(nn.Module()).keys() - {"training"}
_BUILTINS = ("getattr", "hasattr", "super", "type")
# By these, code finds objects that it does not name, and changes them.
UNNAMED = frozenset(("__self__", "globals", "f_locals", "getargvalues", "get_referrers", "get_objects"))
_DYNAMIC = ("locals", "vars", "dir", "eval", "exec", "setattr", "delattr")


class _DoubtError(Exception):
    """The object may be used in any way."""


class _Uses(NamedTuple):
    """How a function uses its first argument, an object."""

    names: set[str]  # its attributes
    stored: set[str]  # those that are set or deleted, of any object
    above: set[str]  # attributes of ``super()``
    given: set[str]  # variables: functions that get the object as their first argument
    absent: set[str]  # attributes without which the object reaches nobody else


def unused_parts(module: nn.Module, methods: Collection[str], texts: CompiledTexts) -> set[str]:
    """The names of the parts of a module that these methods do not use; empty if in doubt."""
    own = vars(module)
    parts = {name for kind in (PARAMETERS, BUFFERS, MODULES) for name in own.get(kind) or ()}
    is_odd = isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)) or marks.LAZY_ATTRIBUTE in own
    is_hooked = any((*GLOBAL_HOOKS, own.get(PRE_HOOKS), own.get(HOOKS)))
    if is_odd or is_hooked or "parametrizations" in parts:
        return set()
    try:
        used = _Reach(module, texts).used(methods)
    except _DoubtError:
        return set()
    return {name for name in parts if used.isdisjoint((name, unmangled(name)))}


class _Reach:
    """Follows methods of a module to all that they call with it."""

    def __init__(self, module: nn.Module, texts: CompiledTexts) -> None:
        self._module, self._texts = module, texts
        self._mro = type(module).__mro__
        self._taken, self._stored, self._absent = set[str](), set[str](), set[str]()
        self._met = dict[int, types.FunctionType]()

    def used(self, methods: Collection[str]) -> set[str]:
        """All names that the code of these methods, and of what they call, takes."""
        hidden = [name for name in ("__getattr__", "__call__") if self._of_user(name)]
        for name in [*methods, *hidden]:
            self._take(name)
        if self._of_user("__getattribute__") or (
            self._stored and self._of_user("__setattr__", "__delattr__")
        ):
            raise _DoubtError
        for name in self._absent:
            is_there = name in self._stored or name[:2] == "__" or self._found(name) is not None
            if is_there or attribute(self._module, name, _MISSING) is not _MISSING:
                raise _DoubtError
        return self._taken

    def _of_user(self, *names: str) -> bool:
        found = [self._found(name) for name in names]
        return any(one is not None and one[0] not in (nn.Module, object) for one in found)

    def _found(self, name: str, after: type | None = None) -> tuple[type, Any] | None:
        """The class with an attribute of the module, and its value there; `after` a class, for ``super``."""
        mro = self._mro[self._mro.index(after) + 1 :] if after is not None else self._mro
        for base in mro:
            value = vars(base).get(name, _MISSING)
            # What the decorator has added to a class calls the method of a base.
            is_added = marks.is_ours(value) and marks.ADDED_ATTRIBUTE in attribute(value, "__dict__", ())
            if value is not _MISSING and not is_added:
                return base, value
        return None

    def _take(self, name: str, after: type | None = None) -> None:
        """Follow an attribute of the module, which is private in any of its classes if it looks so."""
        self._taken.add(name)
        if name in _INTERNAL:
            raise _DoubtError
        if name[:2] == "__" != name[-2:]:
            owners = [base.__name__.lstrip("_") for base in self._mro]
            for owner in filter(None, owners):
                self._take(f"_{owner}{name}", after)
        found = self._found(name, after)
        if found is None or name == "__class__":
            return
        base, value = found
        if str(base.__module__).partition(".")[0] == "torch":
            raise _DoubtError
        if isinstance(value, types.FunctionType):
            own = vars(self._module).get(name, _MISSING)
            if own is not _MISSING and not (marks.is_method(own) and marks.original(own) is None):
                raise _DoubtError
            self._follow(value, name)
        elif type(value) in (property, cached_property):
            functions = [attribute(value, one) for one in ("fget", "fset", "fdel", "func")]
            for function in functions:
                if function is not None:
                    self._follow(function)
        elif type(value) not in (staticmethod, classmethod) and (
            hasattr(type(value), "__get__") or hasattr(type(value), "__set__")
        ):
            raise _DoubtError

    def _follow(self, function: Any, name: str = "") -> None:
        """Follow a function that gets the module as its first argument; `name` is that of a method."""
        function = marks.original(function)
        if not isinstance(function, types.FunctionType):
            raise _DoubtError
        if function.__code__.co_name == "__getattr__" != name:  # code may call it with any name
            raise _DoubtError
        if id(function) in self._met:
            return
        self._met[id(function)] = function
        uses = self._texts.once(_uses_of, function.__code__, self._texts)
        cells = {name: value for name, _, value in cells_of(function)}
        variables = function.__globals__ | cells
        if uses is None or not variables.keys().isdisjoint(_BUILTINS):
            raise _DoubtError
        self._taken |= self._texts.once(taken_by, function.__code__)
        self._stored |= uses.stored
        self._absent |= uses.absent
        if "__getattr__" in uses.names:
            raise _DoubtError
        for name in uses.names:
            self._take(name)
        for name in uses.above:
            owner = cells.get("__class__")
            if owner not in self._mro:
                raise _DoubtError
            found = self._found(name, owner)
            if name != "__getattr__" or found is None or found[0] is not nn.Module:
                self._take(name, owner)
        for name in uses.given:
            self._follow(variables.get(name))


def _uses_of(code: types.CodeType, texts: CompiledTexts) -> _Uses | None:
    """How a function uses its first argument; None if in any other way than these."""
    try:
        body = parse(function_source(code, texts) or "").body
        node: Any = body[0] if len(body) == 1 else None
        return _Reading(node.value if isinstance(node, ast.Expr) else node).uses
    except (_DoubtError, SyntaxError):
        return None


class _Reading:
    """Reads how the source of a function uses its first argument; `_DoubtError` if in an unknown way."""

    def __init__(self, function: Any) -> None:
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            raise _DoubtError
        nodes = list(ast.walk(function))
        self._function, self._bound = function, bound_in(nodes)
        self._parents = {inner: node for node in nodes for inner in ast.iter_child_nodes(node)}
        self._names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        packed = function.args.vararg if not self._names else None  # of ``def wrapper(*args, **kwargs)``
        first = packed.arg if packed is not None else next(iter(self._names), None)
        self.uses = _Uses(set(), set(), set(), set(), set())
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self.uses.stored.add(node.attr)
            if not UNNAMED.isdisjoint(getattr(node, field, None) for field in ("id", "attr", "name")):
                raise _DoubtError
            if isinstance(node, ast.Name) and node.id in _DYNAMIC:
                raise _DoubtError
            if isinstance(node, ast.Name) and node.id == "super":
                self._above(node)
            elif isinstance(node, ast.Name) and node.id == first:
                (self._object if packed is None else self._packed)(node)

    def _packed(self, node: ast.Name) -> None:
        """Note ``function(*args, …)``."""
        star = self._parents[node]
        call = self._parents.get(star)
        if not (isinstance(star, ast.Starred) and isinstance(call, ast.Call) and call.args[:1] == [star]):
            raise _DoubtError
        self._give(call.func)

    def _give(self, function: Any) -> None:
        if not isinstance(function, ast.Name) or function.id in self._bound:
            raise _DoubtError
        self.uses.given.add(function.id)

    def _object(self, node: ast.Name) -> None:
        """Note a use of the object."""
        above = self._parents[node]
        if isinstance(above, ast.Attribute):
            self._attribute(above)
            return
        if not isinstance(above, ast.Call) or node not in above.args:
            raise _DoubtError
        function, place = above.func, above.args.index(node)
        called = function.id if isinstance(function, ast.Name) else ""
        if called in self._bound:
            raise _DoubtError
        if called in ("getattr", "hasattr") and place == 0:
            name = getattr(above.args[1], "value", None) if len(above.args) > 1 else None
            if not isinstance(name, str):
                raise _DoubtError
            self.uses.names.add(name)
        elif called == "type" and len(above.args) == 1:
            self.uses.names.add("__class__")
        elif called and place == 0:
            self._give(function)
        else:  # ``self.hook.run(self)`` ends with an error if there is no hook
            while isinstance(function, ast.Attribute) and isinstance(function.value, ast.Attribute):
                function = function.value
            inner = function.value if isinstance(function, ast.Attribute) else None
            if not (isinstance(inner, ast.Name) and inner.id == node.id):
                raise _DoubtError
            self.uses.absent.add(function.attr)  # type: ignore[attr-defined]

    def _attribute(self, node: Any) -> None:
        """Note ``self.name``, ``self.__dict__["name"]`` and ``name in self.__dict__``."""
        above: Any = self._parents[node]
        name = node.attr
        if name == "__dict__":
            is_asked = isinstance(above, ast.Compare) and above.comparators == [node]
            if is_asked and isinstance(above.ops[0], (ast.In, ast.NotIn)):
                return
            is_item = isinstance(above, ast.Subscript) and above.value is node
            node, name = above, getattr(above.slice, "value", None) if is_item else None
            if not isinstance(name, str):
                raise _DoubtError
        self.uses.names.add(name)
        self.uses.stored.update(() if isinstance(node.ctx, ast.Load) else (name,))

    def _above(self, node: ast.Name) -> None:
        """Note ``super().name``."""
        call = self._parents[node]
        taken = self._parents.get(call)
        is_plain = isinstance(call, ast.Call) and call.func is node and not call.args and not call.keywords
        if not is_plain or not isinstance(taken, ast.Attribute) or node.id in self._bound:
            raise _DoubtError
        if taken.attr == "__getattr__":  # of the name that Python looks for, which counts where it is named
            asked = self._parents[taken]
            given = [getattr(one, "id", None) for one in asked.args] if isinstance(asked, ast.Call) else []
            is_same = self._names[1:] == given and self._bound.count(given[0]) == 1 if given else False
            if not is_same or getattr(self._function, "name", "") != "__getattr__":
                raise _DoubtError
        self.uses.above.add(taken.attr)
