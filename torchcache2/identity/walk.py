"""`Walk`: writes everything that the output of a forward depends on as named parts.

Code counts by its source, attributes by their values. Hooks, closures, and the globals that code names count
too. One table of types says how objects are written; other types count by class and state. Tensors are listed
but not read, so that a walk is cheap: `NamespaceKeeper` reads them later. Attributes of modules are read
last, when all code that uses them is known.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import os
import queue
import random
import re
import struct
import sys
import threading
import types
import typing
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSet
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from gc import get_referents
from itertools import chain
from multiprocessing.synchronize import SemLock
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchcache2.core import private
from torchcache2.core.errors import TorchcacheError, attribute
from torchcache2.core.logs import shown
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.core.values import attributes
from torchcache2.identity import libraries, marks
from torchcache2.identity.codewalk import CodeWalk
from torchcache2.identity.encoding import (
    CONTAINERS,
    INNER,
    UNCOUNTED,
    Bulk,
    Encoder,
    UnencodableError,
    besides_value,
    digest,
    plain_dict,
    qualified_name,
    readable,
    sized,
    tensor_digest,
    text_bytes,
)
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.guard import MUTABLE, alike, content
from torchcache2.identity.libraries import ShardedError, sharding
from torchcache2.identity.names import is_plain, unmangled
from torchcache2.identity.sourcecode import HEAP_TYPE, CompiledTexts

_FORMAT = 3
_NONE = object()
_COMPILED = (  # attributes that the compiler, and Lightning around it, put on modules and tensors
    *("_dynamo", "_torchdynamo", "_is_torch_compile", "_compiled_call_impl", "_compile_kwargs"),
    *("dynamo_ctx", "get_compiler_config"),
)
_NOISE = ("torchcache_", *_COMPILED)
_INTERNAL = {*vars(nn.Module()), marks.LAZY_ATTRIBUTE, private.REPLICATE}
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_SMALL = 1 << 16
_MOST_NOTES = 500
_MOST_TOLD = 256  # elements of a C object's reported values, or bytes of an array among them
_HOOK_FLAGS = ("with_kwargs", "always_called")
_WATCHED = (  # what `Guard` and `NamespaceKeeper` use of a walk: lists that can be joined
    *("modules", "scopes", "cells", "reads", "dicts", "written", "written_scopes", "written_cells"),
    *("generators", "lazies"),
)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_TEXT = 4096  # characters, or bytes, of a reported value
# Objects of these packages also hold caches that they do not pickle.
_PICKLED = ("pandas.", "PIL.", "sympy.")
_SAYS_WHAT_TO_PICKLE = frozenset(("__getstate__", "__reduce__", "__reduce_ex__"))
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")


class Lazy(Protocol):
    """A lazily loaded module, as a walk uses it; see `torchcache2.LazyModule`."""

    loader: Callable[[], nn.Module]
    module: nn.Module | None  # None: it is not loaded
    tokens: dict[int, tuple[object, bytes]]  # see `CodeWalk`
    watchers: MutableSet[Any]  # the keepers that have walked it: they refer to the loaded module

    def places(self) -> dict[str, int]:
        """The files that the loader reads: the number of each by its absolute path."""

    def content(self, settings: CacheSettings | None) -> bytes:
        """A digest of these files' content; for a loaded module, of the files it was loaded from."""

    def device(self) -> torch.device:
        """The device of its weights, now or once loaded."""

    def expected(self, loader: bytes, content: bytes, settings: CacheSettings) -> bytes:
        """The namespace that a module had right after this loader loaded this content."""


class Loaded(NamedTuple):
    """A loaded lazy module, as found by a walk."""

    path: str
    lazy: Lazy
    loader: bytes  # digests of the loader, and of the content of its files
    content: bytes
    parts: dict[str, bytes]
    names: dict[str, str]  # a tensor's name in the outer walk → in the module


class Field(NamedTuple):
    """An attribute of a module, or of another object, to be read when all code that uses it is known."""

    kind: type  # the class of the module
    name: str
    path: str
    value: Any
    names: list[str]  # watched attributes of the module
    skipped: set[str]  # attributes not watched
    read: set[str]  # paths of its parts written so far


class Walk(CodeWalk):
    """Everything that a module or function computes with, as named parts.

    A nested walk gets the outer walk's `labels`, by id. Ends with a `ShardedError` at a sharded module. With
    `reads_all`, even attributes that no code reads count. `methods` are the called methods of an object:
    unless they are just a module's forward, all of its methods count. The `settings` name the folder with
    remembered digests of files. A path in `places` counts as its number.
    """

    most_objects = most_before_bulk = 100_000
    held_in_bulk: tuple[type, ...] = (tuple,)  # immutable, as bulk containers are not watched

    def __init__(
        self,
        root: Any,
        tokens: MutableMapping[int, tuple[object, bytes]],
        texts: CompiledTexts,
        labels: Mapping[int, bytes] | None = None,
        settings: CacheSettings | None = None,
        reads_all: bool = False,
        ignore: Iterable[str] = (),
        methods: Collection[str] = (),
        places: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(tokens, texts, ignore)
        self.generators: list[Any] = []  # random generators, whose state is not part of the namespace
        self.opaque: list[str] = []  # paths of objects whose changes leave no sign
        # Containers by id: their content when the walk read it, and their path.
        self.containers: dict[int, tuple[Any, tuple[Any, ...], str]] = {}
        self.tensors: dict[str, Tensor] = {}  # by path; their content becomes part of the namespace later
        # Every module found, its attributes that were read, and those that were left out. Includes a root
        # that is a plain object.
        self.modules: list[tuple[Any, list[str], set[str]]] = []
        self.memos: dict[int, tuple[Any, str]] = {}  # by id, functions behind `lru_cache`, and their paths
        self.lazies: list[Lazy] = []  # modules that need not be loaded
        self.loaded: list[Loaded] = []  # those that are
        self.names_grad = False  # whether code may turn grad mode on
        self.uses.is_dynamic = reads_all
        self.uses.root = type(root) if set(methods) - {"forward"} else None
        self._plain_root = root if methods and _has_fields_alone(root) else None  # read like a module
        self._settings, self._places = settings, places or {}
        self.counts_code = settings is None or settings.code_version is None
        self._is_inner = labels is not None
        self._labels.update(labels or {})
        self._attributes: list[Field] = []
        self._tensor_names: dict[int, str] = {}
        self._objects = 0
        self._too_much = os.urandom(16)
        self._bulk = Bulk(self.most_before_bulk, self.held_in_bulk)
        self._notes: dict[str, Any] = {}  # plain values inside of objects, by path
        self._noted: set[int] = set()
        self._kept: dict[int, Any] = {}  # by id, functions whose results were read, and those that count
        self._read(root)

    def _read(self, root: Any) -> None:
        """Write everything, in rounds: each may find more code, which reads more."""
        self.parts["format"] = str(_FORMAT).encode()
        self.parts["root"] = self.encode(root, "")
        for hooks in private.GLOBAL_HOOKS:
            for number, hook in enumerate(hooks.values()):
                self.parts[f"hook (global) {number}"] = self.encode(hook, f"global hook {number}")
        self.write_replaced()
        while self.write_all() or self._read_fields() or self._read_memos():
            pass
        self._close_fields()
        self.watch_all()
        self.names_grad |= any("enable_grad" in name or "grad_enabled" in name for name in self.parts)
        if not self.counts_code:
            self.leave_out_code(root)

    def encode(self, value: Any, path: str) -> bytes:
        """The bytes of `value`, or a token if there is too much of it."""
        try:
            if self.ignore and self.ignores(value, path):
                return b"-"
            if self._places and isinstance(value, (str, os.PathLike)) and value:
                number = self._places.get(os.path.abspath(os.fsdecode(value)))
                if number is not None:
                    return b"file" + text_bytes(str(number))
            if isinstance(value, UNCOUNTED):
                return super().encode(value, path)
            self._objects += 1
            if self._objects > self.most_objects:
                if self._objects == self.most_objects + 1:
                    self.unread.append(f"{path} (more than {self.most_objects} objects)")
                return self._too_much
            if issubclass(type(value), MUTABLE):  # by type, as an object may claim another `__class__`
                self.containers.setdefault(id(value), (value, content(value), path))
            elif type(value) is types.MappingProxyType:
                self._tell(dict, value)
                self.opaque.append(path)
            return super().encode(value, path)
        except RecursionError:
            return self.unreadable(value, f"{path} (too deep)")
        except AttributeError:  # it hides basic attributes, such as `__class__`
            return self.unreadable(value, path)
        except (TorchcacheError, ShardedError, UnencodableError):
            raise
        except Exception as error:  # raised by code of the object
            if is_out_of_memory(error):
                raise
            return self.refused(value, path, error)

    def refused(self, value: Any, path: str, error: Exception) -> bytes:
        """End the walk at an object that cannot be read: no change of what it refers to would be noticed."""
        raise UnencodableError(path, value, shown(error)) from error

    def kind(self, kind: type, path: str) -> bytes:
        """Walk a class."""
        return self.klass(kind, path)

    def _tell(self, tell: Callable[[Any], Any], value: Any) -> bool:
        """Watch the values that an object reports, if they are short, and not new objects each time."""
        told = _Told(tell, value)
        self.reads += [(told, value)] if told.is_short else []
        return told.is_short

    def contents(self, value: Any, path: str) -> bytes:
        """Read a set in an order independent of the process, as the order determines labels."""
        if (data := self._bulk.read(value, self._objects)) is not None:
            return data
        if isinstance(value, (set, frozenset)):
            ordered = sorted(value, key=self._rank)
            return b"".join(map(sized, sorted(self.encode(element, f"{path}{{…}}") for element in ordered)))
        if isinstance(value, dict):
            if libraries.left_out(type(value)):
                value = self.without_skipped(type(value), plain_dict(value))
            self._note(value, value, path)
        return super().contents(value, path)

    def _rank(self, element: Any) -> bytes:
        """Bytes to sort by: an element's label, its content, or the digest of a separate walk."""
        if id(element) in self._labels:
            return self._labels[id(element)]
        try:
            return Encoder().encode(element, "")
        except UnencodableError:
            pass
        if self._is_inner:
            return b""  # the element may contain this set, which would never end
        walk = Walk(element, self._tokens, self._texts, self._labels)
        small = [tensor for tensor in walk.tensors.values() if tensor.nbytes <= _SMALL]
        return digest([Fingerprint.of_parts(walk.parts).namespace, *map(tensor_digest, small)])

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Walk a subclass of a container or a dataclass, with its further attributes."""
        if value is self._plain_root:
            return self.module(value, path)
        # By type, as a proxy that claims a container's `__class__` would not be watched as one.
        if not hasattr(kind, "__dataclass_fields__") and not issubclass(kind, CONTAINERS):
            return self.other(value, path)
        return super().compound(value, kind, path)

    def fields(self, value: Any, path: str) -> dict[str, Any]:
        """The fields of a dataclass by name, without those that are left out."""
        fields = self.without_ignored(super().fields(value, path), f"{path}.")
        fields = self.without_skipped(type(value), fields)
        self._note(value, fields, path)
        return fields

    def besides(self, value: Any, path: str) -> bytes:
        """The bytes of further attributes, including slots, which are then watched."""
        fields = getattr(type(value), "__dataclass_fields__", ())
        state = self.without_ignored(besides_value(value), f"{path}.")
        self.watch(value, state)
        state = self.without_skipped(type(value), state)
        state = {name: item for name, item in state.items() if name not in fields}
        if isinstance(value, defaultdict):
            state["default_factory"] = value.default_factory
        return self.state(state, path)

    def other(self, value: Any, path: str) -> bytes:
        """Walk code and objects, by the table of types."""
        kind = type(value)
        if isinstance(module := attribute(value, "__module__"), str):
            self.extension(sys.modules.get(module))
        if hasattr(kind, marks.ADDED_ATTRIBUTE):
            if not marks.is_ours(value):  # a user's subclass of `Cache` may compute something
                return self.klass(kind, path) + self.unreadable(value, path)
            if marks.is_method(value):
                return b"z" + self.encode(value.plain(), path)  # with the object whose method it is
            # A wrapper may refer to a cached forward: it counts as that forward.
            return b"z" + self.encode(getattr(value, marks.ORIGINAL_ATTRIBUTE, None), path)
        if (parts := _parts_of_type(value)) is not None:
            return b"t" + self.encode(parts, path)
        if kind is object:
            return _class_alone(self, value, path)
        if names := libraries.counts_by(kind):
            parts = [(getattr(value, name), f"{path}.{name}") for name in names]
            return b"c" + self.installed(kind, qualified_name(kind)) + self.items(parts)
        write = next((_TABLE[base] for base in kind.__mro__ if base in _TABLE), Walk._object)
        return write(self, value, path)

    def state(self, state: Mapping[str, Any], path: str) -> bytes:
        """Bytes of named values."""
        names = sorted(state)
        pairs = [(state[name], f"{path}.{name}") for name in names]
        return text_bytes(" ".join(names)) + self.items(pairs)

    def watch(self, value: Any, state: Mapping[str, Any]) -> None:
        """Watch the attributes of an object for changes."""
        scope = getattr(value, "__dict__", None)
        if type(scope) is dict:
            self.dicts.append(scope)
            self.reads.append((_class_of, value))
        else:
            scope = {}
        self.scopes += [(scope, name, item) for name, item in state.items() if name in scope]
        slots = [name for name in state if name not in scope and attribute(value, name, _NONE) is not _NONE]
        if slots:
            # At least two names, so that `attrgetter` returns a tuple.
            self.reads.append((attrgetter("__class__", *slots), value))

    def texts(self) -> dict[str, str]:
        """Texts of plain values inside objects, to tell people which one has changed."""
        texts = {path: readable(Encoder().encode(value, path)) for path, value in self._notes.items()}
        return {f"{INNER}{path}": text for path, text in texts.items() if text is not None}

    def _note(self, owner: Any, state: Mapping[Any, Any], path: str) -> None:
        if id(owner) in self._noted or len(self._notes) > _MOST_NOTES:
            return  # several modules may share a configuration
        self._noted |= {id(owner), id(getattr(owner, "__dict__", None))}
        where = "{}[{!r}]" if isinstance(owner, dict) else "{}.{}"
        plain = {
            name: value
            for name, value in plain_dict(state).items()
            if isinstance(name, str) and is_plain(value)
        }
        self._notes |= {where.format(path, name): value for name, value in plain.items()}

    # Objects.

    def _object(self, value: Any, path: str) -> bytes:
        with self.inside(type(value)):
            return self._object_of_class(value, type(value), path)

    def _object_of_class(self, value: Any, kind: type, path: str) -> bytes:
        is_pickled = qualified_name(kind).startswith(_PICKLED)
        state = {} if is_pickled else self.without_ignored(attributes(value), f"{path}.")
        if hasattr(kind, "__enter__") and self.origins.of(kind) == "torch":
            # A context manager's saved state, which changes with each use.
            state = {name: item for name, item in state.items() if not name.startswith("prev")}
        if not is_pickled:
            self.watch(value, state)
        if hasattr(kind, "set_truncation_and_padding") and hasattr(state.get("_tokenizer"), "to_str"):
            # Each call of such a tokenizer changes the first two members of its JSON, so they do not count.
            self.reads.append((_parts_of_tokenizer, state["_tokenizer"]))
            text = state["_tokenizer"].to_str()  # "truncation", "padding", "added_tokens", …
            state["_tokenizer"] = text[max(0, text.find('"added_tokens"')) :]
        cached = marks.cache_options(value) if "cache_instance" in state else []
        state = self.without_skipped(kind, marks.without_ours(state))
        if qualified_name(kind) == "tokenizers.Tokenizer":
            self.reads.append((_tokenizer, value))
        hidden = _hidden(value, state) if self.origins.of(kind) == "installed" else set()
        state = {name: item for name, item in state.items() if name not in hidden}
        # The address of another attribute, as `CountVectorizer` keeps it, differs between processes.
        addresses = {id(value), *map(id, state.values())}
        state = {name: item for name, item in state.items() if type(item) is not int or item not in addresses}
        self._note(value, state, path)
        head = self.klass(kind, path) + self.state(state, path)
        head += self.encode(cached, path) if cached else b""
        if not is_pickled and not hidden and has_plain_state(value):
            return b"o" + head
        if hasattr(kind, "__next__"):
            return self.unreadable(value, path)  # an iterator's position changes with use
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            reduced = None
        if isinstance(reduced, str):
            return b"R" + head + text_bytes(reduced)
        if isinstance(reduced, tuple) and _has_unknown_numbers(kind, reduced):
            return self.unreadable(value, path) + head
        if isinstance(reduced, tuple):
            tell = _pickled if is_pickled else _in_c
            if not qualified_name(kind).startswith(("tokenizers.", "functools.")):  # watched elsewhere
                self.opaque.append(path)
                if not self._tell(tell, value) and hidden:  # methods of its own may change it
                    return self.unreadable(value, f"{path}.{min(hidden)}")
            return b"R" + head + self.encode(tell(value), path)
        if _is_named_in_c(value):  # such as the functions of scipy.fft
            return b"R" + head + _builtin(self, value, path)
        text = repr(value)
        if self.origins.of(kind) != "torch" or _ADDRESS.search(text):
            return self.unreadable(value, path)
        return b"r" + head + text_bytes(text)  # such as torch.finfo

    # Tensors.

    def tensor(self, value: Tensor, path: str) -> bytes:
        """List a tensor, to read it later."""
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            inner = [(getattr(value, name), f"{path}.{name}") for name in names]
            return b"s" + self.items([(type(value), path), (context, path), *inner])
        if not is_lazy(value) and (value.layout != torch.strided or value.is_quantized or value.is_nested):
            self.reads.append((_version, value))  # some parts are copies
            if parts := _parts_of_tensor(value):
                return b"S" + self.encode([str(value.layout), tuple(value.shape), *parts], path)
            return self.unreadable(value, path)
        if value.is_meta:
            return b"meta" + self.encode([value.dtype, tuple(value.shape)], path)
        if id(value) in self._tensor_names:
            return b"the same as " + text_bytes(self._tensor_names[id(value)])
        name = self._tensor_names[id(value)] = self._list(value, path)
        state = {k: v for k, v in attributes(value).items() if not k.startswith(_COMPILED)}
        if type(scope := getattr(value, "__dict__", None)) is dict:
            self.dicts.append(scope)
            self.scopes += [(scope, name, item) for name, item in state.items() if name in scope]
        return text_bytes(name) + (self.state(state, path) if state else b"")

    def _list(self, tensor: Tensor, name: str) -> str:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        return name

    # Modules.

    def module(self, module: Any, path: str) -> bytes:
        """Write a module, or a root read like one; returns the label of its part."""
        if id(module) in self._labels:
            return self._labels[id(module)]
        label = self.label(module, f"module {path}")
        if isinstance(module, nn.Module) and (text := sharding(module)) is not None:
            raise ShardedError(module, text)
        with self.inside(type(module)):
            # Labels are unique, so this path is unique too.
            self._new_module(module, label.decode(), label.decode().removeprefix("module "))
        return label

    def _new_module(self, module: Any, label: str, path: str) -> None:
        kind, own = type(module), vars(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{path or 'it'} is a module of torch.jit, whose changes cannot be noticed")
        where = f"{path}." if path else ""
        head = self.klass(kind, path)
        if path:
            self._hooks(module, where)
        children: dict[str, Any] = {}
        if isinstance(module, nn.Module):
            for name, tensor in [*private.parameters_of(module).items(), *private.buffers_of(module).items()]:
                if tensor is not None and not self.ignores(tensor, f"{where}{name}"):
                    self.parts[f"tensor {where}{name}"] = self.encode(tensor, f"{where}{name}")
            children = self.without_ignored(private.children_of(module), where)
        for name, child in children.items():
            if child is not None:
                self.parts[f"child {where}{name}"] = self.module(child, f"{where}{name}")
        if isinstance(module, torch.fx.GraphModule):
            self.uses.is_dynamic = True  # generated code may read any attribute
            _ = module.code  # a lazy graph generates its class's code at the first read
            # The class may have an earlier graph's code, while an interpreter runs the current graph.
            self.parts[f"graph {path}".rstrip()] = self.encode(module.graph, path)
        fields = {
            name: value
            for name, value in sorted(marks.without_ours(own).items())
            if name not in _INTERNAL and not name.startswith(_NOISE)
        }
        watched = self.without_ignored(fields, where)
        # Replacements of the root's own methods refer to the cache: a cycle.
        names = [name for name in watched if path or fields[name] is own[name]]
        if path and "cache_instance" in own:
            ours = ["cache_instance", *[name for name, one in own.items() if marks.is_method(one)]]
            names += [name for name in ours if name not in names]
        skipped = fields.keys() - watched.keys()
        self.modules.append((module, names, skipped))
        for name, value in self.without_skipped(kind, watched).items():
            self._attributes.append(Field(kind, name, f"{where}{name}", value, names, skipped, set()))
        if marks.LAZY_ATTRIBUTE in own:
            self._lazy(own[marks.LAZY_ATTRIBUTE], path)
        if path and (options := marks.cache_options(module)):
            self.parts[f"cached {path}"] = self.encode(options, path)
        self.parts[f"training {path}".rstrip()] = self.encode(attribute(module, "training", False), path)
        self.parts[label] = head + Encoder().encode(list(children), path)
        if not path:
            containers = dict(self.containers)
            self._hooks(module, where)
            if self.uses.root is None:  # they run outside of the forward: what they collect is irrelevant
                self.containers = containers

    def _hooks(self, module: nn.Module, where: str) -> None:
        before, self.in_hook = self.in_hook, bool(where) or self.uses.root is not None
        for hooks in (private.PRE_HOOKS, private.HOOKS):
            for number, (key, hook) in enumerate(libraries.without_captures(vars(module).get(hooks, {}))):
                name = f"{where}{hooks}[{number}]"
                flags = [key in vars(module).get(f"{hooks}_{flag}", ()) for flag in _HOOK_FLAGS]
                self.parts[f"hook {name}"] = self.encode([hook, *flags], name)
        self.in_hook = before

    def _read_fields(self) -> bool:
        """Write what code reads from modules' attributes; returns whether there was more than before."""
        is_more = False
        for field in self._attributes:  # may grow meanwhile
            key, uses = f".{unmangled(field.name)}", self.uses.of(field.kind)
            if uses.only_writes(key, field.value):
                continue
            for value, path in self.read_of(uses, key, field.value, field.path):
                if path not in field.read:
                    is_more = True
                    field.read.add(path)
                    self.write(f"attribute {path}", self.encode(value, path))
        return is_more

    def write(self, part: str, data: bytes) -> str:
        """Write a part; returns its name."""
        self.parts[part] = data
        return part

    def _close_fields(self) -> None:
        """Leave out the attributes of modules that code only writes."""
        for field in self._attributes:
            key, uses = f".{unmangled(field.name)}", self.uses.of(field.kind)
            if uses.only_writes(key, field.value):
                self.leave_out(f"{field.kind.__name__}.{field.name}", field.value)
                if key in uses.assigned:
                    field.skipped.add(field.name)
                    if field.name in field.names:
                        field.names.remove(field.name)

    def _read_memos(self) -> bool:
        """Write results that functions keep, and watch these functions; returns whether there was more."""
        before = len(self._kept)
        for memo, path in list(self.memos.values()):
            if self.origins.of(inspect.unwrap(memo)) in ("torch", "builtin"):
                continue
            if (kept := libraries.kept_by(memo)) is None:
                self.parts[f"global {path}()"] = self.unreadable(memo, f"{path}()")
                continue
            results = libraries.results_of(memo, kept, self._label_of)
            if id(memo) not in self._kept and (not results or any(one.counts for one in results)):
                self._kept[id(memo)] = memo
                self.reads.append((libraries.referents, (memo, kept)))
            for one in results:
                if one.counts and id(one.value) not in self._kept:
                    self._kept[id(one.value)] = one.value
                    where = f"{path}({one.call})"
                    self.parts[f"global {where}"] = self.encode(one.value, where)
        return len(self._kept) > before

    def _label_of(self, value: Any) -> str | None:
        if id(value) in self._labels:
            return self._labels[id(value)].decode()
        return "self" if id(value) in self._noted else None

    def _lazy(self, lazy: Lazy, path: str) -> None:
        """Write how a lazy module is loaded. If it is loaded, watch it like any other.

        The module itself counts only if it differs from the loader's result. So it has a separate walk, but
        not as a root, as its hooks run inside the forward.
        """
        where = f"{path}." if path else ""
        self.lazies.append(lazy)
        self.reads.append((_module_of, lazy))
        settings = self._settings
        # A file's path counts as a number, since its content counts.
        loader = Walk(lazy.loader, self._tokens, self._texts, settings=settings, places=lazy.places())
        self.parts |= {f"loader {where}{name}": data for name, data in loader.parts.items()}
        self.unread += loader.unread
        self._take_over(loader, f"{where}loader")
        content = lazy.content(settings)
        self.parts[f"files {path}".rstrip()] = content
        if lazy.module is not None:
            whole = settings and settings.replace({"code_version": None})  # as `namespace_of` reads it
            inner = Walk((lazy.module,), lazy.tokens, self._texts, settings=whole)
            names = self._take_over(inner, path)
            code = Fingerprint.of_parts(loader.parts).namespace
            self.loaded.append(Loaded(path, lazy, code, content, inner.parts, names))

    def _take_over(self, inner: Walk, path: str) -> dict[str, str]:
        """Watch what another walk has found; returns its tensors' names there, by their names here."""
        mine = {
            name: self._list(tensor, f"{path}.{name.removeprefix('[0]').removeprefix('.')}".strip("."))
            for name, tensor in inner.tensors.items()
        }
        for field in _WATCHED:
            getattr(self, field).extend(getattr(inner, field))
        self.containers |= inner.containers
        self.not_imported |= inner.not_imported
        self.names_grad |= inner.names_grad
        for one in inner.loaded:
            self.loaded.append(one._replace(names={mine.pop(name): its for name, its in one.names.items()}))
        return {theirs: name for name, theirs in mine.items()}


# How to write objects of special types. Each function gets the walk, the value, and its path.


def _fields_of(tag: bytes, *names: str) -> Callable[[Walk, Any, str], bytes]:
    """Write an object by these attributes."""
    return lambda walk, value, path: tag + walk.items([(getattr(value, name), path) for name in names])


def _class_alone(walk: Walk, value: Any, path: str) -> bytes:
    """For an object whose state does not count."""
    return b"z" + text_bytes(qualified_name(type(value)))


def _function(walk: Walk, value: types.FunctionType, path: str) -> bytes:
    compiled = vars(value).get(private.COMPILED_FROM)
    return walk.function(value, path) if compiled is None else walk.encode(compiled, path)


def _builtin(walk: Walk, value: Any, path: str) -> bytes:
    walk.uses.meet(value)
    owner = getattr(value, "__self__", None)
    walk.extension(owner)
    is_bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
    name = text_bytes(qualified_name(value) + repr(getattr(value, "__objclass__", "")))
    # `np.frompyfunc` keeps its Python function in no attribute: only the garbage collector shows it.
    called = filter(callable, get_referents(value)) if isinstance(value, np.ufunc) else ()
    data = b"".join(walk.encode(one, path) for one in called)
    if walk.origins.of(value) == "installed":
        data += walk.installed(value, "")
    return b"u" + name + data + (walk.encode(owner, path) if is_bound else b"")


def _memo(walk: Walk, value: Any, path: str) -> bytes:
    walk.memos.setdefault(id(value), (value, path))  # its results are read later
    return b"hl" + walk.items([(value.__wrapped__, path)])


def _is_named_in_c(value: Any) -> bool:
    """Whether a module has an object under its own name, which is callable, and of a type made in C."""
    names = getattr(sys.modules.get(str(getattr(value, "__module__", None))), "__dict__", {})
    is_there = names.get(str(getattr(value, "__name__", None))) is value
    return is_there and callable(value) and not type(value).__flags__ & HEAP_TYPE


def _generator(walk: Walk, value: Any, path: str) -> bytes:
    if not isinstance(value, random.SystemRandom):
        walk.generators.append(value)
    return _class_alone(walk, value, path)


def _fleeting(walk: Walk, value: Any, path: str) -> bytes:
    """For values that differ between threads, or depend on other objects being alive."""
    if walk.is_foreign:  # such as the cache of functools.singledispatch
        return _class_alone(walk, value, path)
    is_local = isinstance(value, threading.local)
    walk.reads.append((_of_this_thread if is_local else _is_empty, value))
    if not (vars(value) if is_local else len(value)) and type(value) in _FLEETING:
        return _class_alone(walk, value, path)
    state = walk.state(dict(vars(value)), path) if is_local else b""
    return walk.unreadable(value, path) + walk.klass(type(value), path) + state


def _variable(walk: Walk, value: contextvars.ContextVar[Any], path: str) -> bytes:
    walk.reads.append((_of_this_context, value))
    return b"v" + text_bytes(value.name) + walk.items([(one, path) for one in _of_this_context(value)])


_FLEETING = (threading.local, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_TABLE: dict[type, Callable[[Walk, Any, str], bytes]] = {
    nn.Module: Walk.module,
    type: lambda walk, value, path: walk.klass(value, path),
    types.FunctionType: _function,
    types.MethodType: _fields_of(b"m", "__func__", "__self__"),
    types.ModuleType: Walk.python_module,
    staticmethod: _fields_of(b"hs", "__func__"),
    classmethod: _fields_of(b"hc", "__func__"),
    property: _fields_of(b"hp", "fget", "fset"),
    functools.cached_property: _fields_of(b"hf", "func"),
    libraries.MEMO: _memo,
    weakref.ReferenceType: lambda walk, value, path: b"w" + walk.encode(value(), path),
    logging.Logger: lambda walk, value, path: b"h" + text_bytes(value.name),
    **dict.fromkeys((torch.jit.ScriptFunction, torch.UntypedStorage, torch.TypedStorage), Walk.unreadable),
    torch.fx.Graph: lambda walk, value, path: b"G" + walk.encode(libraries.graph_code(value), path),
    torch.fx.Node: _fields_of(b"G", "name", "graph"),
    **dict.fromkeys(libraries.OPERATORS, Walk.operator),
    **dict.fromkeys(GENERATORS, _generator),
    **dict.fromkeys(_FLEETING, _fleeting),
    contextvars.ContextVar: _variable,
    struct.Struct: _fields_of(b"hS", "format"),
    **dict.fromkeys(
        (
            *(type(threading.Lock()), type(threading.RLock()), SemLock),
            *(queue.SimpleQueue, ThreadPoolExecutor, ProcessPoolExecutor),
        ),
        _class_alone,
    ),
    **dict.fromkeys(
        (
            *(types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
            *(types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
            *(types.MethodWrapperType, np.ufunc),
        ),
        _builtin,
    ),
}


def _parts_of_tensor(value: Tensor) -> list[Any]:
    """The dense tensors and numbers that make up a tensor that is not dense; empty if unknown."""
    if value.layout == torch.sparse_coo and value.is_coalesced():
        return [value.detach().indices(), value.detach().values()]
    if value.layout == torch.sparse_csr:
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.is_quantized and value.qscheme() == torch.per_tensor_affine:
        return [value.q_scale(), value.q_zero_point(), value.int_repr()]
    if value.is_quantized and value.qscheme() in _PER_CHANNEL:
        scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        return [scales, points, value.q_per_channel_axis(), value.int_repr()]
    return []


# Types in annotations, such as ``int | None`` and type variables, are objects whose classes differ between
# versions of Python.
_FORMS = (type(typing.ClassVar), type(typing.List))  # noqa: UP006  such as Final, or List by itself
_PARAMS = ("ParamSpec", "ParamSpecArgs", "ParamSpecKwargs")
_NAMED_TYPES = tuple(
    getattr(typing, name)
    for name in ("TypeVar", "TypeVarTuple", "TypeAliasType", "ForwardRef", *_PARAMS)
    if hasattr(typing, name)
)
_TYPE_FIELDS = (
    *("__name__", "__bound__", "__constraints__", "__covariant__", "__contravariant__", "__value__"),
    *("__forward_arg__", "__origin__"),
)


def _parts_of_type(value: Any) -> list[Any] | None:
    """The parts of such a type, equal in every process; None for any other value."""
    if value is typing.Any:  # a class in some versions of Python
        return ["Any"]
    if isinstance(value, _NAMED_TYPES):
        return [type(value).__name__, *[getattr(value, field, None) for field in _TYPE_FIELDS]]
    origin = typing.get_origin(value)
    if origin is None:
        return [str(value)] if isinstance(value, _FORMS) else None
    return ["Union" if origin in (typing.Union, types.UnionType) else origin, list(typing.get_args(value))]


# Functions for `reads`: tuples of objects that stay identical as long as nothing changes.


def _class_of(value: Any) -> tuple[Any, ...]:
    return type(value), value.__dict__


def _is_empty(value: Any) -> tuple[bool]:
    return (len(value) == 0,)


def _module_of(lazy: Lazy) -> tuple[nn.Module | None]:
    return (lazy.module,)


def _of_this_thread(value: threading.local) -> tuple[Any, ...]:
    return (len(vars(value)), *vars(value), *vars(value).values())


def _of_this_context(value: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (value.get(),)
    except LookupError:  # no value in this context
        return ()


def _pickled(value: Any) -> list[Any]:
    """The parts of an object's pickle."""
    return [list(part) if hasattr(part, "__next__") else part for part in value.__reduce_ex__(4)]


def _has_unknown_numbers(kind: type, reduced: tuple[Any, ...]) -> bool:
    """Whether a pickle that nobody has written has numbers: of all fields of a class, by Cython.

    They may be pointers and handles, as in h5py.
    """
    is_unwritten = str(getattr(reduced[0], "__name__", "")).startswith("__pyx_unpickle_")
    numbers = int in map(type, _flat([reduced[1][2:], *reduced[2:3]]))  # the second is a checksum
    return is_unwritten and numbers and not kind.__module__.startswith("numpy.")


def _in_c(value: Any) -> list[Any]:
    """The parts of an object's pickle except its attributes, which are read directly."""
    fields = getattr(value, "__dict__", None)
    return [None if part is fields else part for part in _pickled(value)]


class _Told:
    """Reads the plain values that an object reports; its inner objects are watched separately."""

    def __init__(self, tell: Callable[[Any], Any], value: Any) -> None:
        self._tell = tell
        self._before = _flat(tell(value))
        self.is_short = len(self._before) <= _MOST_TOLD and self(value)[0] is self._before

    def __call__(self, value: Any) -> tuple[list[Any]]:
        now = _flat(self._tell(value))
        return (self._before if alike(now, self._before) else now,)


def _flat(value: Any) -> list[Any]:
    """The elements of plain containers and small arrays, in order, up to a limit.

    A long text becomes a unique object, so that not every call reads the text.
    """
    found, waiting = list[Any](), [value]
    while waiting and len(found) <= _MOST_TOLD:
        one = waiting.pop()
        kind = type(one)
        if kind in (tuple, list, dict):
            found += kind, len(one)
            waiting += one if kind is not dict else chain.from_iterable(one.items())
        elif kind is np.ndarray and one.nbytes <= _MOST_TOLD and not one.dtype.hasobject:
            found += one.dtype, one.shape, one.tobytes()
        else:
            found.append(object() if kind in (str, bytes) and len(one) > _MOST_TEXT else one)
    return found


def _version(tensor: Tensor) -> tuple[str]:
    return (sys.intern(str(private.version(tensor))) if private.has_version(tensor) else "",)


def _parts_of_tokenizer(value: Any) -> tuple[str]:
    """Values that reveal most changes of a tokenizer, in some 4 µs."""
    parts = (value.normalizer, value.pre_tokenizer, value.post_processor, value.decoder)
    # In old versions the text is the default repr, with an address.
    shown = [text if " at 0x" not in (text := repr(part)) else type(part) for part in parts]
    model = value.model
    return (sys.intern(f"{value.get_vocab_size()} {shown} {type(model)} {getattr(model, 'dropout', None)}"),)


def _tokenizer(value: Any) -> tuple[str, str]:
    return *_parts_of_tokenizer(value), sys.intern(f"{value.truncation} {value.padding}")


def _hidden(value: Any, state: Mapping[str, Any]) -> set[str]:
    """The attributes that cannot be pickled, such as pointers, if the object's class says what to pickle."""
    if not any(not _SAYS_WHAT_TO_PICKLE.isdisjoint(vars(base)) for base in type(value).__mro__[:-1]):
        return set()
    return {name for name, one in state.items() if not _can_pickle(one)}


def _can_pickle(value: Any) -> bool:
    """Whether an object can be pickled, or need not be, as the walk reads it in another way."""
    is_known = isinstance(value, (Tensor, np.ndarray, *CONTAINERS))  # whose pickle may be a large copy
    if is_known or has_plain_state(value) or not _TABLE.keys().isdisjoint(type(value).__mro__):
        return True
    try:
        value.__reduce_ex__(4)
    except Exception:
        return False
    return True


def has_plain_state(value: Any) -> bool:
    """Whether an object keeps all of its state in attributes, as all of its classes are made in Python."""
    return not any(map(_is_made_in_c, type(value).__mro__[:-1]))


def _is_made_in_c(kind: type) -> bool:
    if not kind.__flags__ & HEAP_TYPE:
        return True
    new = vars(kind).get("__new__")
    return isinstance(new, types.BuiltinFunctionType) or any(
        isinstance(one, _OF_C) and one.__objclass__ is kind and name not in ("__dict__", "__weakref__")
        for name, one in vars(kind).items()
    )


def _has_fields_alone(value: Any) -> bool:
    """Whether an object, other than a module, has all of its state in its ``__dict__``."""
    odd = (nn.Module, types.FunctionType, *CONTAINERS)
    if isinstance(value, odd) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return has_plain_state(value) and attributes(value).keys() == vars(value).keys()
