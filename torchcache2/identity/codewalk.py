"""`CodeWalk`: classes and functions as named parts, with everything that their code names."""

from __future__ import annotations

import contextlib
import inspect
import os
import types
from collections.abc import Iterator
from dataclasses import MISSING
from operator import attrgetter
from typing import Any

from torch import nn

from torchcache2.identity import sourcecode
from torchcache2.identity.encoding import public_module, qualified_name, sized, text_bytes
from torchcache2.identity.guard import MUTABLE
from torchcache2.identity.libraries import InstalledCode
from torchcache2.identity.marks import (
    ADDED_ATTRIBUTE,
    ORIGINAL_ATTRIBUTE,
    cache_options,
    is_ours,
    original,
    own_attributes,
)
from torchcache2.identity.namewalk import NameWalk, values_of
from torchcache2.identity.sourcecode import CompiledTexts, names_in
from torchcache2.identity.uses import Uses, is_plain, uses_of

__all__ = ["CodeWalk"]

# Attributes of a class that the class statement adds by itself.
_CLASS_NOISE = frozenset(
    (
        *("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__"),
        *("__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
        *("__slots__", "__slotnames__", "__match_args__", "__dataclass_fields__", "__dataclass_params__"),
        *("__signature__", "__classdictcell__", "_member_map_", "_value2member_map_", "_unhashable_values_"),
        *("_hashable_values_", "_value_repr_", "__new_member__", "_generate_next_value_"),
    )
)
_FUNCTION_FIELDS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WRAPPER_FIELDS = attrgetter("__dict__", "__code__")


class CodeWalk(NameWalk):
    """The part of a walk that reads code.

    Project code is read function by function: source, defaults, closure, and the globals that it names.
    Each class and function becomes one part, under a label that does not depend on where its file is.
    """

    def __init__(self, texts: CompiledTexts) -> None:
        super().__init__(texts)
        self.cells: list[tuple[types.CellType, Any]] = []  # the cells of closures, with their content
        self._code_of_others = InstalledCode(self.origins, texts)
        self._put: set[str] = set()
        self._methods: dict[int, tuple[str, type]] = {}  # by id of a function of a class that is being read
        self._uses_of_methods: dict[int, Uses] = {}
        self.in_hook = False  # hooks are there to collect, so what they only write counts all the same

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class and its bases; the label of its part."""
        known = self._labels.get(id(kind))
        if known is not None:
            return known
        reference = self.label(kind, f"class {_short_name(kind)}")
        where = self.origins.of(kind)
        if where in ("torch", "builtin"):
            parts = [text_bytes(qualified_name(kind))]
        else:
            metaclass = [type(kind)] if type(kind) is not type else []
            parts = [self.items([(base, path) for base in (*kind.__bases__, *metaclass)])]
            if where == "installed":
                parts.append(self.installed(kind, qualified_name(kind)))
                if not issubclass(kind, nn.Module):  # of modules, `_reached_by` has some watched
                    self.uses.others |= self._code_of_others.names(kind)
                    functions = [n for n, one in vars(kind).items() if isinstance(one, types.FunctionType)]
                    self.watch_names(vars(kind), functions)
            else:
                parts += [text_bytes(kind.__name__), self._fields(kind)]
        # If a function has made the class, the file does not say with which arguments.
        is_made = where == "installed" and "<locals>" in kind.__qualname__
        parts += self._class_contents(kind, reference.decode(), everything=where == "project" or is_made)
        if where != "project" and issubclass(kind, nn.Module) and kind is not nn.Module:
            parts.append(self._reached_by(kind))
        self.parts[reference.decode()] = b"".join(map(sized, parts))
        return reference

    def _fields(self, kind: type) -> bytes:
        """Bytes of the fields of a dataclass, and of what their defaults are made by."""
        fields = vars(kind).get("__dataclass_fields__", {})
        defaults = [
            [name, *(None if one is MISSING else one for one in (field.default, field.default_factory))]
            for name, field in fields.items()
        ]
        return self.encode(defaults, f"{kind.__name__} fields")

    def _reached_by(self, kind: type) -> bytes:
        """Bytes of what the user has put where the forward of an installed class, or of torch's, finds it."""
        names = self._code_of_others.reach(kind)
        self.uses.others |= names
        if "forward" in vars(kind):
            self.scopes.append((vars(kind), "forward", vars(kind)["forward"]))
        if self.origins.of(kind) != "installed":
            return b""
        self.dicts.append(vars(kind))
        pairs = []
        for base in kind.__mro__:
            if self.origins.of(base) == "installed":
                own = {name: vars(base)[name] for name in names & vars(base).keys() - _CLASS_NOISE}
                # Paths are left out, because they differ between machines.
                plain = {
                    name: value
                    for name, value in own.items()
                    if is_plain(value) and not (isinstance(value, str) and os.path.isabs(value))
                }
                self.watch_names(vars(base), plain)
                pairs += [(item, f"{base.__name__}.{item[0]}") for item in sorted(plain.items())]
        return self.items(pairs)

    def finish(self) -> None:
        """Write down what the user has put into installed code."""
        while True:
            super().finish()
            found = self._code_of_others.found
            new = sorted(found.keys() - self._put)
            if not new:
                break
            for path in new:
                self._put.add(path)
                self.parts[f"global {path}"] = self.encode(found[path], path)
        for scope, names in self._code_of_others.scopes:
            self.watch_names(scope, names)
        for registry in self._code_of_others.registries:
            self.dicts.append(registry)
            self.reads.append((values_of, registry))

    def _class_contents(self, kind: type, owner: str, *, everything: bool) -> list[bytes]:
        parts = []
        for name, value in sorted(vars(kind).items()):
            if name in _CLASS_NOISE or name.startswith(("torchcache_", "_torchcache_")):
                continue
            if self.ignores(value, f"{kind.__name__}.{name}"):
                continue
            raw = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            is_function = isinstance(raw, types.FunctionType)
            marks = vars(raw) if is_function else vars(type(raw))
            if ADDED_ATTRIBUTE in marks and is_ours(raw):
                continue
            if ORIGINAL_ATTRIBUTE in marks and is_ours(raw):
                value = marks[ORIGINAL_ATTRIBUTE]
                self.reads.append((_WRAPPER_FIELDS, raw))  # a notebook that reloads its code changes these
                self.scopes.append((marks, ORIGINAL_ATTRIBUTE, value))
            code = getattr(inspect.unwrap(raw), "__code__", None) if is_function else None
            has_fields = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")
            if code is not None and code.co_filename == "<string>" and has_fields:
                if name != "__init__":
                    self.uses.others |= names_in(code)
                continue  # it was generated from the fields, which count already
            if everything or self._is_put_there(kind, name, value):
                if name == "__init__" and issubclass(kind, nn.Module):
                    self._constructors.add(id(value))
                is_bound = isinstance(value, (staticmethod, classmethod))
                inner = value.fget if isinstance(value, property) else value.__func__ if is_bound else value
                if isinstance(inner, types.FunctionType):
                    self._methods[id(inspect.unwrap(inner))] = name, kind
                data = self.encode(value, f"{kind.__name__}.{name}")
                if is_function or hasattr(type(value), "__get__"):
                    parts += [name.encode(), data]
                else:
                    self.parts[f"value {kind.__name__}.{name} of {owner}"] = data
                self.scopes.append((vars(kind), name, vars(kind)[name]))
        if everything:
            self.dicts.append(vars(kind))
        return parts

    def _is_put_there(self, kind: type, name: str, value: Any) -> bool:
        """Whether an attribute of an installed class, or of torch's, is code that its file does not have."""
        raw = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not isinstance(raw, types.FunctionType):
            return False
        if self.origins.of(raw) == "project":
            return True
        if name != "forward" or self.origins.of(kind) != "installed" or hasattr(raw, "__wrapped__"):
            return False
        return (raw.__module__, raw.__qualname__) != (kind.__module__, f"{kind.__qualname__}.{name}")

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write down a function and what it names; the label of its part."""
        options = cache_options(function) if is_ours(function) else []
        if is_ours(function) and (own := own_attributes(function)):
            # A cached function may keep values as its own attributes, such as a count of its calls.
            self.parts[f"attributes of {_short_name(function)} at {path}"] = self.encode(own, path)
            self.scopes += [(vars(function), *item) for item in own.items()]
            self.dicts.append(vars(function))
        function = original(function)
        if options:
            self.parts[f"cached {_short_name(function)} at {path}"] = self.encode(options, path)
        method = self._methods.pop(id(function), ())
        known = self._labels.get(id(function))
        if known is not None:
            if id(function) in self._uses_of_methods:  # it has another name too, or is called without one
                self.uses.add(self._in_hook(self._uses_of_methods[id(function)]), *method)
            return known
        reference = self.label(function, f"function {_short_name(function)}")
        name = function.__name__
        where = self.origins.of(function)
        wrapped = getattr(function, "__wrapped__", None)
        if where in ("torch", "builtin"):
            module = sourcecode.defining_module(function)
            names = f"{function.__qualname__} {function.__code__.co_name}"
            if is_ours(function):
                module, names = public_module(module), _short_name(function)
            parts = [text_bytes(f"{module} {names}")]
            parts += [self.encode(wrapped, path), self._closure(function, path)]
        elif where == "installed":
            self.uses.others |= self._code_of_others.names(function)
            parts = [self.installed(function, name), self._closure(function, path), self._defaults(function)]
            self.reads.append((_FUNCTION_FIELDS, function))
        else:
            source = sourcecode.function_source(function, self._texts)
            if source is None:
                token = self.unreadable(function, f"{path or name} (no source)")
                source = sourcecode.instructions(function.__code__) + token.hex()
            uses = self._texts.once(uses_of, function.__code__, source)
            uses = self._in_hook(uses)
            self._note_refilled(function, uses)
            self.uses.add(uses, *method)
            if method:
                self._uses_of_methods[id(function)] = uses
            elif function.__code__.co_varnames[:1] == ("self",):  # a method that something has wrapped
                self.uses.is_dynamic |= uses.passes_self
            parts = [
                source.encode("utf-8", "surrogatepass"),
                self.encode(own_attributes(function), name),
            ]
            for argument, value in _defaults_of(function).items():
                self.parts[f"default {argument} of {reference.decode()}"] = self.encode(value, argument)
            self._captured(function, uses, f"of {reference.decode()}")
            self.named_globals(function, uses, f"of {reference.decode()}")
            self.reads.append((_FUNCTION_FIELDS, function))
            self.dicts.append(vars(function))
            self.scopes += [(vars(function), *item) for item in own_attributes(function).items()]
        self.parts[reference.decode()] = b"".join(map(sized, parts))
        return reference

    def _in_hook(self, uses: Uses) -> Uses:
        return uses._replace(collected=uses.assigned | uses.added) if self.in_hook else uses

    def _note_refilled(self, function: types.FunctionType, uses: Uses) -> None:
        """Note the containers that a function clears and then reads: hooks may fill them for it."""
        captured = {name: value for name, _, value in _cells_of(function)}
        code = function.__code__
        for name in set(uses.refilled).difference(code.co_varnames, code.co_cellvars):
            value = captured.get(name, function.__globals__.get(name))
            if isinstance(value, MUTABLE):
                self.refilled[id(value)] = value

    def _defaults(self, function: types.FunctionType) -> bytes:
        """Bytes of the defaults of an installed function: all, if a function has made it; else plain ones."""
        values = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
        if "<locals>" not in function.__qualname__:
            values = [value if is_plain(value) else None for value in values]
        return self.encode(values, f"{function.__name__}.__defaults__")

    def _closure(self, function: types.FunctionType, path: str) -> bytes:
        """Bytes of what a function of an installed package, or of torch, has captured."""
        pairs = []
        for name, cell, value in _cells_of(function):
            self.cells.append((cell, value))
            if is_ours(function):
                pairs.append((value, f"{function.__name__}.{name}"))
            else:
                owner = self._labels[id(function)].decode()
                self.parts[f"closure {name} of {owner}"] = self.encode(value, name)
        return self.items(pairs)

    def _captured(self, function: types.FunctionType, uses: Uses, owner: str) -> None:
        """Write down what a function reads of the variables that it has captured: one part for each."""
        for name, cell, value in _cells_of(function):
            if self.ignores(value, name):
                continue
            if is_left_out := self.only_writes(uses, name, value):
                self.leave_out(name, value)
                if name in uses.assigned:
                    self.written_cells.append(cell)
                    continue
            self.cells.append((cell, value))
            for one, where in () if is_left_out else self.read_of(uses, name, value, name):
                self.parts[f"closure {where} {owner}"] = self.encode(one, where)


def _cells_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType, Any]]:
    """The variables that a function has captured, with their cells and their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable is not assigned yet
            yield name, cell, cell.cell_contents


def _defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function, by the names of its parameters."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=False)) | (
        function.__kwdefaults__ or {}
    )


def _short_name(obj: Any) -> str:
    if is_ours(obj):  # the function that `torchcache(policy="lru")` returns counts as `torchcache`
        return str(obj.__qualname__).partition(".<locals>")[0]
    return str(obj.__qualname__).rpartition("<locals>.")[2]
