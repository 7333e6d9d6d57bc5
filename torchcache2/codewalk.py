"""`CodeWalk`: classes and functions as named parts, with everything that their code names."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from torchcache2 import sources
from torchcache2.assigned import assigned_for_others
from torchcache2.digest import Encoder, qualified_name, sized, text_bytes

__all__ = [
    "ADDED_ATTRIBUTE",
    "BINDING",
    "ORIGINAL_ATTRIBUTE",
    "CodeWalk",
    "cache_options",
    "is_ours",
    "original",
]

ORIGINAL_ATTRIBUTE = "_torchcache_original"  # of a wrapper: what it wraps
BINDING = "_torchcache_binding"  # of a decorated class
ADDED_ATTRIBUTE = "_torchcache_added"  # of what the decorator put where there was nothing


# What a class statement leaves behind besides the code and values in it.
_CLASS_NOISE = frozenset(
    (
        "__module__",
        "__dict__",
        "__weakref__",
        "__doc__",
        "__qualname__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__parameters__",
        "__orig_bases__",
        "__abstractmethods__",
        "_abc_impl",
        "__slots__",
        "__slotnames__",
        "__match_args__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__signature__",
        "__classdictcell__",
        "_member_map_",
        "_value2member_map_",
        "_unhashable_values_",
        "_hashable_values_",
        "_value_repr_",
        "__new_member__",
        "_generate_next_value_",
    )
)
_FUNCTION_FIELDS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WRAPPER_FIELDS = attrgetter("__dict__", "__code__")
_MISSING = object()


class CodeWalk(Encoder):
    """The part of a walk that reads code.

    Project code is read function by function: source, defaults, closure, and the globals that it names.
    Each class and function becomes one part, under a label that does not depend on where its file is.

    Attributes
    ----------
    parts : dict of str to bytes
        Canonical bytes of each part.
    scopes : list of (mapping, name, value)
        Globals and attributes that were read, and what they were.
    cells : list of (cell, value)
        Closure cells that were read, and what was in them.
    reads : list of (callable, object)
        ``callable(object)`` is a tuple of what else was read off an object.
    dicts : list of mapping
        Attributes of objects and classes, which may get more.
    assigned : set of str
        Attributes and variables left out because code assigns them for others to read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, bytes] = {}
        self.scopes: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.reads: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self.dicts: list[Mapping[str, Any]] = []
        self.assigned: set[str] = set()
        self._versions: dict[str, str] = {}
        self._labels: dict[int, bytes] = {}  # of classes, functions and modules that were met
        self._taken: dict[str, int] = {}
        self._held: list[Any] = []  # keeps ids valid

    def unreadable(self, value: Any, path: str) -> bytes:
        """Bytes that stand for what cannot be read."""
        raise NotImplementedError

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class and its bases; the label of its part."""
        known = self._labels.get(id(kind))
        if known is not None:
            return known
        reference = self.label(kind, f"class {_short_name(kind)}")
        where = sources.origin(kind)
        if where in ("torch", "builtin"):
            parts = [text_bytes(qualified_name(kind)), *self._class_contents(kind, everything=False)]
            if "forward" in vars(kind):
                self.scopes.append((vars(kind), "forward", vars(kind)["forward"]))
        else:
            metaclass = [type(kind)] if type(kind) is not type else []
            parts = [self.items([(base, path) for base in (*kind.__bases__, *metaclass)])]
            if where == "installed":
                parts.append(self._installed(kind, qualified_name(kind)))
            else:
                parts.append(text_bytes(kind.__name__))
                parts.append(text_bytes(str(list(getattr(kind, "__dataclass_fields__", ())))))
            parts += self._class_contents(kind, everything=where == "project")
        self.parts[reference.decode()] = b"".join(map(sized, parts))
        return reference

    def _class_contents(self, kind: type, *, everything: bool) -> list[bytes]:
        parts = []
        for name, value in sorted(vars(kind).items()):
            if name in _CLASS_NOISE or name.startswith(("torchcache_", "_torchcache_")):
                continue
            raw = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            is_function = isinstance(raw, types.FunctionType)
            marks = vars(raw) if is_function else vars(type(raw))
            if ADDED_ATTRIBUTE in marks and is_ours(raw):
                continue
            if ORIGINAL_ATTRIBUTE in marks and is_ours(raw):
                value = marks[ORIGINAL_ATTRIBUTE]
                self.reads.append((_WRAPPER_FIELDS, raw))  # which a reload in a notebook replaces
                self.scopes.append((marks, ORIGINAL_ATTRIBUTE, value))
            code = getattr(inspect.unwrap(raw), "__code__", None) if is_function else None
            has_fields = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")
            if code is not None and code.co_filename == "<string>" and has_fields:
                continue  # made from the fields, which are covered
            # A package's class is covered by its file, but not what others have put on it.
            foreign = isinstance(value, types.FunctionType) and sources.origin(value) == "project"
            if everything or foreign:
                parts += [name.encode(), self.encode(value, f"{kind.__name__}.{name}")]
                self.scopes.append((vars(kind), name, vars(kind)[name]))
        if everything:
            self.dicts.append(vars(kind))
        return parts

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write down a function and what it names; the label of its part."""
        options = cache_options(function) if is_ours(function) else []
        if is_ours(function) and (own := _own_attributes(function)):
            # Of a cached function that code names, such as what it counts in itself.
            self.parts[f"attributes of {_short_name(function)} at {path}"] = self.encode(own, path)
            self.scopes += [(vars(function), *item) for item in own.items()]
            self.dicts.append(vars(function))
        function = original(function)
        if options:
            self.parts[f"cached {_short_name(function)} at {path}"] = self.encode(options, path)
        known = self._labels.get(id(function))
        if known is not None:
            return known
        reference = self.label(function, f"function {_short_name(function)}")
        name = function.__name__
        where = sources.origin(function)
        wrapped = getattr(function, "__wrapped__", None)
        if where in ("torch", "builtin"):
            module = sources.defining_module(function)
            parts = [text_bytes(f"{module} {function.__qualname__} {function.__code__.co_name}")]
            parts += [self.encode(wrapped, path), self._closure(function, path)]
        elif where == "installed":
            parts = [self._installed(function, name), self._closure(function, path)]
        else:
            source = sources.function_source(function)
            if source is None:
                token = self.unreadable(function, f"{path or name} (no source)")
                source = sources.instructions(function.__code__) + token.hex()
            _, left_out = assigned_for_others(source)
            self.assigned |= left_out
            parts = [
                source.encode("utf-8", "surrogatepass"),
                self.encode(function.__defaults__, f"{name}.__defaults__"),
                self.encode(function.__kwdefaults__, f"{name}.__kwdefaults__"),
                self._closure(function, path, left_out),
                self.encode(_own_attributes(function), name),
            ]
            self._globals(function, left_out, f"of {reference.decode()}")
            self.reads.append((_FUNCTION_FIELDS, function))
            self.dicts.append(vars(function))
            self.scopes += [(vars(function), *item) for item in _own_attributes(function).items()]
        self.parts[reference.decode()] = b"".join(map(sized, parts))
        return reference

    def _closure(self, function: types.FunctionType, path: str, left_out: Collection[str] = ()) -> bytes:
        pairs = []
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name in left_out:
                continue
            self.cells.append((cell, value))
            pairs += [(name, path), (value, f"{function.__name__}.{name}")]
        return self.items(pairs)

    def _globals(self, function: types.FunctionType, left_out: Collection[str], owner_name: str) -> None:
        """Write down what a function names: one part for each global."""
        for name, *attributes in sources.global_chains(function.__code__):
            if name == "import":
                file = sources.module_file(attributes[0], function.__globals__.get("__package__"))
                self.parts[f"import {attributes[0]} {owner_name}"] = file.encode()
                continue
            if name in left_out:
                continue
            scope: Mapping[str, Any] = function.__globals__
            value = scope.get(name, _MISSING)
            path = name
            self.scopes.append((scope, name, None if value is _MISSING else value))
            if value is _MISSING:
                continue  # a builtin, or a name that does not exist yet: reading it would fail
            owner = value
            while attributes and isinstance(value, types.ModuleType):
                owner, scope, attribute = value, vars(value), attributes.pop(0)
                path += f".{attribute}"
                value = scope.get(attribute, None)
                self.scopes.append((scope, attribute, value))
            # What others have in their modules counts by name, unless somebody has replaced it.
            foreign = isinstance(value, types.FunctionType) and sources.origin(value) == "project"
            if isinstance(owner, types.ModuleType) and sources.origin(owner) != "project" and not foreign:
                data = b"M" + text_bytes(owner.__name__)
            else:
                data = self.encode(value, path)
            self.parts[f"global {path} {owner_name}"] = data

    def python_module(self, module: types.ModuleType) -> bytes:
        """Bytes of a Python module that code uses as a whole."""
        if sources.origin(module) != "project":
            return b"M" + text_bytes(module.__name__)
        return b"M" + text_bytes(sources.file_digest(getattr(module, "__file__", None) or ""))

    def _installed(self, obj: Any, name: str) -> bytes:
        module = sources.defining_module(obj)
        if module not in self._versions:
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            version = sources.package_version(module.partition(".")[0])
            self._versions[module] = f"{version} {sources.file_digest(file)}"
        return text_bytes(f"{module} {name} {self._versions[module]}")

    def label(self, obj: Any, label: str) -> bytes:
        """A name for something that is met for the first time; deterministic, unique in this walk."""
        self._held.append(obj)
        count = self._taken[label] = self._taken.get(label, 0) + 1
        self._labels[id(obj)] = (label if count == 1 else f"{label} ({count})").encode()
        return self._labels[id(obj)]


def is_ours(value: Any) -> bool:
    """Whether the decorator has made a wrapper, whose marks `functools.wraps` copies to those of others."""
    module = getattr(value, "__globals__", {}).get("__name__", type(value).__module__)
    return module in (f"{__package__}.module", f"{__package__}.instance")


def original(value: Any) -> Any:
    """What a wrapper of the decorator wraps; anything else is itself."""
    return getattr(value, ORIGINAL_ATTRIBUTE, value) if is_ours(value) else value


def cache_options(obj: Any) -> list[Any]:
    """The options of what is cached itself that change what it returns; empty if all are usual."""
    settings = getattr(vars(obj).get("cache_instance"), "settings", None)
    if settings is None:
        settings = getattr(getattr(type(obj), BINDING, None), "settings", None)
    names = ("cache_dtype", "subsample_count", "persistent_module_hash")
    values = [vars(obj).get(f"torchcache_{name}", getattr(settings, name, None)) for name in names]
    return values if any(value is not None for value in values) else []


def _short_name(obj: Any) -> str:
    return str(obj.__qualname__).rpartition("<locals>.")[2]


def _own_attributes(function: types.FunctionType) -> dict[str, Any]:
    ours = ("__wrapped__", "cache_instance", ORIGINAL_ATTRIBUTE, ADDED_ATTRIBUTE)
    return {name: value for name, value in vars(function).items() if name not in ours}
