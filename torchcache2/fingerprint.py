"""The namespace of a module or function: a digest of *who computes*.

`Walk` visits everything that the outcome of a forward depends on and writes it down as named parts:
code by source, attributes by value, hooks, closures and the globals that code names. Tensors are listed,
not read, so that a walk is cheap. `fingerprint` reads them and makes the namespace.

The source of the user's own code counts, wherever the file is; see `torchcache2.sources` for the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchcache2 import sources
from torchcache2.digest import Encoder, digest, qualified_name, sized, text_bytes

__all__ = ["FORMAT", "INIT_ATTRIBUTE", "Fingerprint", "Walk", "argument_digests"]

FORMAT = 1
INIT_ATTRIBUTE = "_torchcache_init"  # of an instance: digests of its constructor arguments
ORIGINAL_ATTRIBUTE = "_torchcache_original"  # of a wrapper: what it wraps
ADDED_ATTRIBUTE = "_torchcache_added"  # of what the decorator put where there was nothing

_MOST_OBJECTS = 100_000
_INTERNAL = frozenset(vars(nn.Module())) | {
    INIT_ATTRIBUTE,
    "_compiled_call_impl",
    "cache_instance",
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
)
_CLASS_NOISE = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __qualname__ __firstlineno__ __static_attributes__ "
    "__annotations__ __annotate__ __annotate_func__ __annotations_cache__ __parameters__ __orig_bases__ "
    "__abstractmethods__ _abc_impl __slots__ __match_args__ __dataclass_fields__ __dataclass_params__ "
    "__signature__ __classdictcell__ _member_map_ _value2member_map_ _unhashable_values_ "
    "_hashable_values_ _value_repr_ __new_member__ _generate_next_value_".split()
)
_NO_STATE = (
    weakref.ReferenceType,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_BUILTIN_CODE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    np.ufunc,
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The named parts behind a namespace.

    Attributes
    ----------
    namespace : bytes
        16 bytes.
    parts : mapping of str to bytes
        Digest of each part by its name, such as ``attribute blocks.0.heads``.
    """

    namespace: bytes
    parts: Mapping[str, bytes]

    @classmethod
    def of_parts(cls, parts: Mapping[str, bytes]) -> Fingerprint:
        """The fingerprint made of some parts."""
        names = sorted(parts)
        namespace = digest([data for name in names for data in (name.encode(), parts[name])])
        return cls(namespace, dict(parts))


class Walk(Encoder):
    """Everything that a module or function computes with, as named parts.

    Parameters
    ----------
    root : nn.Module or function
    tokens : dict
        Random bytes that stand for objects that cannot be read, by id; a caller that walks again
        passes it again, so that the same object keeps its token.

    Attributes
    ----------
    parts : dict of str to bytes
        Canonical bytes of each part.
    tensors : dict of str to Tensor
        Parameters, buffers and other tensors by path: their content is part of the namespace too.
    modules : list of (nn.Module, tuple of str, set of str)
        Every module that was met, the attributes of it that were read, and those left out.
    scopes : list of (mapping, name, value)
        Globals and attributes that were read, and what they were.
    cells : list of (cell, value)
        Closure cells that were read, and what was in them.
    generators : list
        Random generators that were met; their state is not part of the namespace.
    unreadable : list of str
        Where something was met that cannot be read.
    assigned : set of str
        Attributes left out because the class's own forward assigns them.
    """

    def __init__(self, root: Any, tokens: MutableMapping[int, tuple[object, bytes]]) -> None:
        super().__init__()
        self.parts: dict[str, bytes] = {}
        self.tensors: dict[str, Tensor] = {}
        self.modules: list[tuple[nn.Module, tuple[str, ...], set[str]]] = []
        self.scopes: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.generators: list[Any] = []
        self.unreadable: list[str] = []
        self.assigned: set[str] = set()
        self._tokens = tokens
        self._labels: dict[int, bytes] = {}  # of classes, functions and modules that were met
        self._taken: dict[str, int] = {}
        self._held: list[Any] = []  # keeps ids valid
        self._objects = 0
        self.parts["format"] = str(FORMAT).encode()
        self.parts["root"] = self.encode(root, "")
        for hooks in GLOBAL_HOOKS:
            for number, hook in enumerate(hooks.values()):
                self.parts[f"hook (global) {number}"] = self.encode(hook, f"global hook {number}")

    def encode(self, value: Any, path: str) -> bytes:
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            return self._unreadable(value, f"{path} (more than {_MOST_OBJECTS} objects)")
        try:
            return super().encode(value, path)
        except RecursionError:
            return self._unreadable(value, f"{path} (too deep)")

    def tensor(self, value: Tensor, path: str) -> bytes:
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return b"s" + self.items(
                [(type(value), path), (context, path)]
                + [(getattr(value, name), f"{path}.{name}") for name in names]
            )
        if not is_lazy(value) and (value.layout != torch.strided or value.is_quantized):
            return self._parts_of(value, path)
        if value.is_meta:
            return b"meta" + self.encode([value.dtype, tuple(value.shape)], path)
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = value
        return name.encode()

    def _parts_of(self, value: Tensor, path: str) -> bytes:
        """A tensor that is not dense, as the dense ones that it is made of."""
        if value.layout == torch.sparse_coo:
            parts = [value._indices(), value._values()]
        elif value.layout == torch.sparse_csr:
            parts = [value.crow_indices(), value.col_indices(), value.values()]
        elif value.is_quantized and value.qscheme() == torch.per_tensor_affine:
            parts = [value.q_scale(), value.q_zero_point(), value.int_repr()]
        else:
            return self._unreadable(value, path)
        return b"S" + self.encode([str(value.layout), tuple(value.shape), *parts], path)

    def kind(self, kind: type, path: str) -> bytes:
        return self._class(kind, path)

    def other(self, value: Any, path: str) -> bytes:
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, type):
            return self._class(value, path)
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, types.MethodType):
            return b"m" + self.items([(value.__func__, path), (value.__self__, path)])
        if isinstance(value, types.ModuleType):
            return self._python_module(value)
        if isinstance(value, _BUILTIN_CODE):
            owner = getattr(value, "__self__", None)
            bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
            name = text_bytes(qualified_name(value))
            return b"u" + name + (self.encode(owner, path) if bound else b"")
        if isinstance(value, (staticmethod, classmethod)):
            return b"h" + self.items([(type(value).__name__, path), (value.__func__, path)])
        if isinstance(value, property):
            return b"h" + self.items([(value.fget, path), (value.fset, path)])
        if isinstance(value, functools.cached_property):
            return b"h" + self.encode(value.func, path)
        if isinstance(value, functools.partial):
            return b"h" + self.items(
                [(value.func, path), (value.args, path), (value.keywords, path)]
            )
        if isinstance(value, functools._lru_cache_wrapper):
            return b"h" + self.encode(value.__wrapped__, path)
        if isinstance(value, logging.Logger):
            return b"h" + text_bytes(value.name)
        if isinstance(value, _GENERATORS):
            self.generators.append(value)
            return b"z" + text_bytes(qualified_name(type(value)))
        if isinstance(value, _NO_STATE) or type(value) is object:
            return b"z" + text_bytes(qualified_name(type(value)))
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> bytes:
        kind = type(value)
        state = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__"):
                    state.setdefault(slot, getattr(value, slot, None))
        from_python = bool(kind.__flags__ & (1 << 9))  # a class statement made it
        if not state and not (from_python and kind.__base__ is object):
            text = repr(value)
            if _ADDRESS.search(text):
                return self._unreadable(value, path)
            return b"r" + self._class(kind, path) + text_bytes(text)
        self._watch(getattr(value, "__dict__", {}))
        names = sorted(state)
        pairs = [(state[name], f"{path}.{name}") for name in names]
        return b"o" + self._class(kind, path) + text_bytes(" ".join(names)) + self.items(pairs)

    def _module(self, module: nn.Module, path: str) -> bytes:
        known = self._labels.get(id(module))
        if known is not None:
            return known
        reference = self._label(module, f"module {path}")
        kind = type(module)
        where = f"{path}." if path else ""
        skipped = self._assigned_by_forward(kind)
        names = []
        for name, value in sorted(vars(module).items()):
            if name in _INTERNAL or name in skipped or name.startswith("torchcache_"):
                continue
            value = getattr(value, ORIGINAL_ATTRIBUTE, value) if name == "forward" else value
            self.parts[f"attribute {where}{name}"] = self.encode(value, f"{where}{name}")
            names.append(name)
        self.modules.append((module, tuple(names), skipped))
        init, unreadable = vars(module).get(INIT_ATTRIBUTE, ({}, ()))
        self.unreadable += unreadable
        self.parts[reference.decode()] = b"".join(
            [
                self._class(kind, path),
                self.encode(module.training, path),
                self.encode(init, path),
                self.encode(list(module._modules), path),
            ]
        )
        for hooks in _HOOKS:
            for number, hook in enumerate(vars(module).get(hooks, {}).values()):
                name = f"{where}{hooks}[{number}]"
                self.parts[f"hook {name}"] = self.encode(hook, name)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.parts[f"tensor {where}{name}"] = self.encode(tensor, f"{where}{name}")
        for name, child in module._modules.items():
            if child is not None:
                self.parts[f"child {where}{name}"] = self._module(child, f"{where}{name}")
        return reference

    def _assigned_by_forward(self, kind: type) -> set[str]:
        forward = getattr(kind, "forward", None)
        forward = getattr(forward, ORIGINAL_ATTRIBUTE, forward)
        if not isinstance(forward, types.FunctionType) or sources.origin(forward) == "torch":
            return set()
        source = sources.function_source(forward)
        names = sources.assigned_attributes(source) if source else set()
        self.assigned |= {f"{kind.__name__}.{name}" for name in names}
        return names

    def _class(self, kind: type, path: str) -> bytes:
        known = self._labels.get(id(kind))
        if known is not None:
            return known
        reference = self._label(kind, f"class {_short_name(kind)}")
        where = sources.origin(kind)
        if where in ("torch", "builtin"):
            parts = [text_bytes(qualified_name(kind))]
        else:
            parts = [self.items([(base, path) for base in kind.__bases__])]
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
            if hasattr(getattr(value, "__func__", value), ADDED_ATTRIBUTE):
                continue
            value = getattr(value, ORIGINAL_ATTRIBUTE, value)
            code = getattr(value, "__code__", None)
            if code is not None and code.co_filename == "<string>":
                if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
                    continue  # made from the fields, which are covered
            # A package's class is covered by its file, but not what others have put on it.
            foreign = isinstance(value, types.FunctionType) and sources.origin(value) == "project"
            if everything or foreign:
                parts += [name.encode(), self.encode(value, f"{kind.__name__}.{name}")]
                self.scopes.append((vars(kind), name, vars(kind)[name]))
        return parts

    def _function(self, function: types.FunctionType, path: str) -> bytes:
        function = getattr(function, ORIGINAL_ATTRIBUTE, function)
        known = self._labels.get(id(function))
        if known is not None:
            return known
        reference = self._label(function, f"function {_short_name(function)}")
        name = function.__name__
        where = sources.origin(function)
        wrapped = getattr(function, "__wrapped__", None)
        if where in ("torch", "builtin"):
            # The state of torch's own context managers changes while they are used.
            module = sources.defining_module(function)
            parts = [text_bytes(f"{module} {function.__qualname__} {function.__code__.co_name}")]
            parts.append(self.encode(wrapped, path) if wrapped else self._closure(function, path))
        elif where == "installed":
            parts = [self._installed(function, name), self._closure(function, path)]
        else:
            source = sources.function_source(function)
            if source is None:
                token = self._unreadable(function, f"{path or name} (no source)")
                source = sources.instructions(function.__code__) + token.hex()
            parts = [
                source.encode("utf-8", "surrogatepass"),
                self.encode(function.__defaults__, f"{name}.__defaults__"),
                self.encode(function.__kwdefaults__, f"{name}.__kwdefaults__"),
                self._closure(function, path),
                self._globals(function),
                self.encode(_own_attributes(function), name),
            ]
        self.parts[reference.decode()] = b"".join(map(sized, parts))
        return reference

    def _closure(self, function: types.FunctionType, path: str) -> bytes:
        pairs = []
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.cells.append((cell, value))
            pairs += [(name, path), (value, f"{function.__name__}.{name}")]
        return self.items(pairs)

    def _globals(self, function: types.FunctionType) -> bytes:
        parts = []
        for name, *attributes in sources.global_chains(function.__code__):
            if name == "import":
                found = sys.modules.get(attributes[0])
                parts += [attributes[0].encode(), self._python_module(found) if found else b""]
                continue
            scope: Mapping[str, Any] = function.__globals__
            value = scope.get(name, _MISSING)
            path = name
            if value is _MISSING:
                continue  # a builtin, or a name that does not exist yet: reading it would fail
            self.scopes.append((scope, name, value))
            while attributes and isinstance(value, types.ModuleType):
                if sources.origin(value) != "project":
                    break
                scope, attribute = vars(value), attributes.pop(0)
                path += f".{attribute}"
                value = scope.get(attribute, None)
                self.scopes.append((scope, attribute, value))
            tail = ".".join(attributes) if isinstance(value, types.ModuleType) else ""
            parts += [path.encode(), tail.encode(), self.encode(value, path)]
        return b"".join(map(sized, parts))

    def _python_module(self, module: types.ModuleType) -> bytes:
        if sources.origin(module) != "project":
            return b"M" + text_bytes(module.__name__)
        return b"M" + text_bytes(sources.file_digest(getattr(module, "__file__", None) or ""))

    def _installed(self, obj: Any, name: str) -> bytes:
        module = sources.defining_module(obj)
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        version = sources.package_version(module.partition(".")[0])
        return text_bytes(f"{module} {name} {version} {sources.file_digest(file)}")

    def _watch(self, scope: Mapping[str, Any]) -> None:
        self.scopes += [(scope, name, value) for name, value in scope.items()]

    def _label(self, obj: Any, label: str) -> bytes:
        """A name for something that is met for the first time; deterministic, unique in this walk."""
        self._held.append(obj)
        count = self._taken[label] = self._taken.get(label, 0) + 1
        self._labels[id(obj)] = (label if count == 1 else f"{label} ({count})").encode()
        return self._labels[id(obj)]

    def _unreadable(self, value: Any, path: str) -> bytes:
        self.unreadable.append(path or type(value).__qualname__)
        _, token = self._tokens.setdefault(id(value), (value, os.urandom(16)))
        return b"?" + token


def _short_name(obj: Any) -> str:
    return str(obj.__qualname__).rpartition("<locals>.")[2]


def _own_attributes(function: types.FunctionType) -> dict[str, Any]:
    ours = ("__wrapped__", ORIGINAL_ATTRIBUTE, ADDED_ATTRIBUTE)
    return {name: value for name, value in vars(function).items() if name not in ours}


class _Arguments(Walk):
    """Constructor arguments: tensors by content, modules by class (they are walked where they are kept)."""

    def tensor(self, value: Tensor, path: str) -> bytes:
        return Encoder.tensor(self, value, path) if not is_lazy(value) else b"lazy"

    def _module(self, module: nn.Module, path: str) -> bytes:
        return text_bytes(qualified_name(type(module)))


def argument_digests(
    arguments: Mapping[str, Any],
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Digest of each constructor argument, and where something cannot be read."""
    digests: dict[str, bytes] = {}
    unreadable: list[str] = []
    for name, value in arguments.items():
        walk = _Arguments(value, {})
        digests[name] = Fingerprint.of_parts(walk.parts).namespace
        unreadable += [f"argument {path or name}" for path in walk.unreadable]
    return digests, tuple(unreadable)
