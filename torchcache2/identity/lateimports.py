"""What code reaches in a module that it imports as it runs, and whether the file of the module says the same.

Before the import only the file counts. So that the namespace stays the same after the import, everything in
the module that is as the file says adds nothing. What was put there by others, or was computed, is added.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torchcache2.identity import sourcecode
from torchcache2.identity.codenames import names_of
from torchcache2.identity.compiled import CompiledText, CompiledTexts, names_in, parse, stored_names
from torchcache2.identity.imports import resolved

__all__ = ["Reached", "fields_of_code", "is_plain", "reached"]

_CLASS_NOISE = ("__doc__", "__dict__", "__weakref__", "__parameters__", "__static_attributes__")


class Reached(NamedTuple):
    """A global of a project module that code takes."""

    module: types.ModuleType
    name: str
    value: Any
    is_said: bool  # whether the file of the module says so


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a bool or None, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def reached(module: types.ModuleType, names: Collection[str], texts: CompiledTexts) -> Iterator[Reached]:
    """The globals with these names, and those that the functions and classes among them take in turn."""
    queue = [(module, set(names))]
    seen: set[tuple[int, str]] = set()
    while queue:
        module, taken = queue.pop()
        scope = vars(module)
        if sourcecode.origin(module) != "project":
            yield from _of_others(module, taken, texts, seen)
            continue
        file = getattr(module, "__file__", None) or ""
        text = sourcecode.file_text(file)
        compiled = texts.get(file, text) if text else None
        for name in sorted(taken & scope.keys()):
            if name.startswith("__") or (id(module), name) in seen:
                continue
            seen.add((id(module), name))
            value = scope[name]
            if isinstance(value, types.ModuleType):
                queue.append((value, taken))
                yield Reached(module, name, value, True)
                continue
            codes = _said(value, name, module, compiled) if compiled is not None else None
            if codes is None and compiled is not None and type(value) in (dict, list, set):
                codes = [] if repr(value) == repr(_literal(name, text)) else None
            yield Reached(module, name, value, codes is not None)
            for code in codes or ():
                found = {*names_in(code)}
                queue.append((module, found))
                package = scope.get("__package__")
                imports = texts.once(names_of, code).imports
                full = [one for wanted in imports for one in resolved(wanted, package)]
                queue += [(sys.modules[one], found) for one in full if one in sys.modules]
            if codes is not None and isinstance(value, (types.FunctionType, type)):
                elsewhere = [value, *(value.__mro__[1:] if isinstance(value, type) else ())]
                for other in elsewhere:
                    where = sourcecode.defining_module(other)
                    if _is_project(where):
                        queue.append((sys.modules[where], {other.__name__}))


def _of_others(
    module: types.ModuleType, taken: Collection[str], texts: CompiledTexts, seen: set[tuple[int, str]]
) -> Iterator[Reached]:
    """What code takes from a module that is no project's; code of a project in it was put there."""
    queue = [module]
    while queue:
        module = queue.pop()
        scope = vars(module)
        for name in sorted(taken & scope.keys()):
            value = scope[name]
            if name.startswith("__") or (id(module), name) in seen:
                continue
            seen.add((id(module), name))
            is_said = True
            if isinstance(value, types.ModuleType):
                queue.append(value)
            elif isinstance(value, (types.FunctionType, type)):
                is_said = (
                    sourcecode.origin(value) != "project"
                    or sourcecode.defining_module(value) not in sys.modules
                )
            elif not is_plain(value):
                continue
            elif sourcecode.origin(module) == "installed":
                file = module.__file__ or ""
                compiled = texts.get(file, sourcecode.file_text(file))
                said = compiled.stored.constants.get(name) if compiled is not None else None
                is_said = not said or _is_among(value, said)  # computed ones depend on the machine
            yield Reached(module, name, value, is_said)


def _is_project(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and sourcecode.origin(module) == "project"


def _is_found(kind: type) -> bool:
    """Whether a class is a global of its module, if it is a project's."""
    where = sourcecode.defining_module(kind)
    return not _is_project(where) or vars(sys.modules[where]).get(kind.__name__) is kind


def _said(
    value: Any, name: str, module: types.ModuleType, compiled: CompiledText
) -> list[types.CodeType] | None:
    """The code of a global if it is as its file says; None if it is not, or may not be."""
    said = compiled.stored.constants.get(name)
    if said is None:
        return None
    if is_plain(value):
        return [] if _is_among(value, said) else None
    if not isinstance(value, (types.FunctionType, type)):
        return None
    where = sourcecode.defining_module(value)
    if where == module.__name__:
        if value.__qualname__ != name:
            return None
        return (
            _function(value, compiled) if isinstance(value, types.FunctionType) else _class(value, compiled)
        )
    origin = compiled.stored.imports.get(name, "").lstrip(".")
    if _is_project(where):
        other = vars(sys.modules[where]).get(value.__name__)
        return [] if origin and where.endswith(origin) and other is value else None
    return [] if origin and where.partition(".")[0] == origin.partition(".")[0] else None


def _literal(name: str, text: str) -> Any:
    """The value of a global that a file assigns once, by a literal; else None."""
    values = [
        node.value
        for node in parse(text).body
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name) and inner.id == name
    ]
    try:
        return ast.literal_eval(values[0]) if len(values) == 1 and values[0] is not None else None
    except (ValueError, TypeError):
        return None


def _function(function: types.FunctionType, compiled: CompiledText) -> list[types.CodeType] | None:
    defaults = [function.__defaults__, *(function.__kwdefaults__ or {}).values()]
    consts = [one for codes in compiled.codes.values() for code in codes for one in code.co_consts]
    if function.__closure__ or vars(function) or not all(_is_among(one, [None, *consts]) for one in defaults):
        return None
    return [function.__code__] if compiled.has(function.__code__, 0) else None


def _class(kind: type, compiled: CompiledText) -> list[types.CodeType] | None:
    if type(kind) is not type or not all(map(_is_found, kind.__mro__[1:])):
        return None
    bodies = compiled.codes.get(kind.__name__, [])
    codes: list[types.CodeType] = []
    for name, value in vars(kind).items():
        raw = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if name in _CLASS_NOISE or name.startswith(("__annot", "__classdict")):
            continue
        if isinstance(raw, types.FunctionType):
            if "__class__" in raw.__code__.co_freevars and len(raw.__closure__ or ()) == 1:
                found = [raw.__code__] if compiled.has(raw.__code__, 0) and not vars(raw) else None
                found = None if raw.__defaults__ or raw.__kwdefaults__ else found
            else:
                found = _function(raw, compiled)
            if found is None or raw.__name__ != name:
                return None
            codes += found
        elif name not in ("__module__", "__qualname__", "__firstlineno__"):
            said = [one for body in bodies for one in stored_names(body).constants.get(name, ())]
            if not is_plain(value) or not _is_among(value, said):
                return None
    return codes


def _is_among(value: Any, said: Collection[Any]) -> bool:
    return is_plain(value) and any(type(value) is type(one) and repr(value) == repr(one) for one in said)


def fields_of_code(value: Any) -> tuple[Any, ...]:
    """The parts of a function or class that change when it is modified in place."""
    if isinstance(value, types.FunctionType):
        return (value.__code__, value.__defaults__, value.__kwdefaults__, *vars(value).values())
    return tuple(vars(value).values()) if isinstance(value, type) else ()
