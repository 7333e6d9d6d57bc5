"""`InstalledCode`: what the forward of an installed class reaches that may have been replaced.

Installed code counts by its file and version, and torch's by name. That does not cover code that others have
put into it: in the place of globals and methods, and into registries that it names, such as
``ALL_ATTENTION_FUNCTIONS`` of transformers.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchcache2.identity.compiled import CompiledTexts, names_in
from torchcache2.identity.sourcecode import Origins
from torchcache2.identity.uses import taken_by

__all__ = ["InstalledCode"]

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
