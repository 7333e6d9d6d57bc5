"""`ObjectWalk`: writes down objects of any kind: their class and their state."""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from multiprocessing.synchronize import SemLock
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.private import COMPILED_FROM
from torchcache2.identity.annotations import parts_of_type
from torchcache2.identity.encoding import (
    CONTAINERS,
    INNER,
    UNCOUNTED,
    Bulk,
    Encoder,
    attributes,
    qualified_name,
    readable,
    sized,
    text_bytes,
)
from torchcache2.identity.guard import MUTABLE, content
from torchcache2.identity.leftout import OwnerWalk, left_out
from torchcache2.identity.libraries import graph_code, is_operator, script_code
from torchcache2.identity.marks import (
    ADDED_ATTRIBUTE,
    ORIGINAL_ATTRIBUTE,
    cache_options,
    is_method,
    is_ours,
    without_ours,
)
from torchcache2.identity.sourcecode import CompiledTexts
from torchcache2.identity.uses import is_plain

__all__ = ["GENERATORS", "ObjectWalk", "has_plain_state"]

_NO_STATE = (type(threading.Lock()), type(threading.RLock()), SemLock)
# The content of these depends on the thread, or on which other objects are alive.
_FLEETING = (threading.local, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_LOGGER_FIELDS = frozenset(vars(logging.Logger(""))) | {"manager"}
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LRU_CACHE = type(functools.lru_cache(print))
_BUILTIN_CODE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    np.ufunc,
)
_MOST_NOTES = 500
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")


class ObjectWalk(OwnerWalk):
    """The part of a walk that reads objects.

    `tokens` are random bytes, by id, for objects that cannot be read, `texts` what source files compile to.
    A caller that walks again passes both again, so that an object keeps its token.
    """

    most_objects = most_before_bulk = 100_000
    held_in_bulk: tuple[type, ...] = (tuple,)  # containers in bulk are not watched, so they must not change

    def __init__(self, tokens: MutableMapping[int, tuple[object, bytes]], texts: CompiledTexts) -> None:
        super().__init__(texts)
        self.generators: list[Any] = []  # random generators, whose state is not part of the namespace
        self.unread: list[str] = []  # where something was met that cannot be read
        self.opaque: list[str] = []  # where something was met whose changes leave no sign
        # Containers by id, with their content at that time, and where they were met.
        self.containers: dict[int, tuple[Any, tuple[Any, ...], str]] = {}
        self._tokens, self._objects = tokens, 0
        self._notes: dict[str, Any] = {}  # plain values inside of objects, by path
        self._noted: set[int] = set()
        self._too_much = os.urandom(16)
        self._bulk = Bulk(self.most_before_bulk, self.held_in_bulk)

    def encode(self, value: Any, path: str) -> bytes:
        """The bytes of `value`, or a token if there is too much of it."""
        if self.ignore and self.ignores(value, path):
            return b"-"
        if isinstance(value, UNCOUNTED):
            return super().encode(value, path)
        self._objects += 1
        if self._objects > self.most_objects:
            if self._objects == self.most_objects + 1:
                self.unread.append(f"{path} (more than {self.most_objects} objects)")
            return self._too_much
        if issubclass(type(value), MUTABLE):  # the type is asked, as an object may claim another `__class__`
            self.containers.setdefault(id(value), (value, content(value), path))
        try:
            return super().encode(value, path)
        except RecursionError:
            return self.unreadable(value, f"{path} (too deep)")

    def kind(self, kind: type, path: str) -> bytes:
        """Walk a class."""
        return self.klass(kind, path)

    def contents(self, value: Any, path: str) -> bytes:
        """Read a set in an order that does not depend on the process, as labels are given in this order."""
        if (data := self._bulk.read(value, self._objects)) is not None:
            return data
        if isinstance(value, (set, frozenset)):
            ordered = sorted(value, key=self.rank)
            return b"".join(map(sized, sorted(self.encode(element, f"{path}{{…}}") for element in ordered)))
        if isinstance(value, dict) and left_out(type(value)):
            value = self.without_skipped(type(value), dict(value), path)
        if isinstance(value, dict):
            self._note(value, value, path)
        return super().contents(value, path)

    def texts(self) -> dict[str, str]:
        """For people, the plain values inside of objects, so that it can be told which one has changed."""
        texts = {path: readable(Encoder().encode(value, path)) for path, value in self._notes.items()}
        return {f"{INNER}{path}": text for path, text in texts.items() if text is not None}

    def _note(self, owner: Any, state: Mapping[Any, Any], path: str) -> None:
        if (
            id(owner) in self._noted or len(self._notes) > _MOST_NOTES
        ):  # several modules may share a configuration
            return
        self._noted |= {id(owner), id(getattr(owner, "__dict__", None))}
        where = "{}[{!r}]" if isinstance(owner, dict) else "{}.{}"
        plain = {name: value for name, value in state.items() if isinstance(name, str) and is_plain(value)}
        self._notes |= {where.format(path, name): value for name, value in plain.items()}

    def rank(self, element: Any) -> bytes:
        """Bytes to sort the elements of a set by."""
        raise NotImplementedError

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Walk a subclass of a container or a dataclass, with the attributes that it has besides."""
        if not hasattr(kind, "__dataclass_fields__") and not isinstance(value, CONTAINERS):
            return self.other(value, path)
        return super().compound(value, kind, path)

    def fields(self, value: Any, path: str) -> dict[str, Any]:
        """The fields of a dataclass by name, without those that are left out."""
        fields = self.without_ignored(super().fields(value, path), f"{path}.")
        fields = self.without_skipped(type(value), fields, path)
        self._note(value, fields, path)
        return fields

    def besides(self, value: Any, path: str) -> bytes:
        """The bytes of further attributes, those in slots included; they are watched from then on."""
        fields = getattr(type(value), "__dataclass_fields__", ())
        state = self.without_ignored(attributes(value), f"{path}.")
        self.watch(value, state)
        state = {name: item for name, item in state.items() if name not in fields}
        state = self.without_skipped(type(value), state, path)
        if isinstance(value, defaultdict):
            state["default_factory"] = value.default_factory
        return self.state(state, path)

    def other(self, value: Any, path: str) -> bytes:
        """Walk code and objects."""
        if hasattr(type(value), ADDED_ATTRIBUTE):
            if not is_ours(value):  # somebody's subclass of `Cache` may compute something
                return self.klass(type(value), path) + self.unreadable(value, path)
            if is_method(value):
                return b"z" + self.encode(value.plain(), path)  # with the object whose method it is
            # A wrapper may refer to a cached forward: it counts as the forward that it caches.
            return b"z" + self.encode(getattr(value, ORIGINAL_ATTRIBUTE, None), path)
        if (parts := parts_of_type(value)) is not None:
            return b"t" + self.encode(parts, path)
        if isinstance(value, type):
            return self.klass(value, path)
        if isinstance(value, types.FunctionType):
            compiled = vars(value).get(COMPILED_FROM)
            return self.function(value, path) if compiled is None else self.encode(compiled, path)
        if isinstance(value, types.MethodType):
            return b"m" + self.items([(value.__func__, path), (value.__self__, path)])
        if isinstance(value, types.ModuleType):
            return self.python_module(value, path)
        if isinstance(value, _BUILTIN_CODE):
            self.uses.meet(value)
            owner = getattr(value, "__self__", None)
            bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
            name = text_bytes(qualified_name(value) + repr(getattr(value, "__objclass__", "")))
            return b"u" + name + (self.encode(owner, path) if bound else b"")
        if isinstance(value, (staticmethod, classmethod)):
            return b"h" + self.items([(type(value).__name__, path), (value.__func__, path)])
        if isinstance(value, property):
            return b"h" + self.items([(value.fget, path), (value.fset, path)])
        if isinstance(value, functools.cached_property):
            return b"h" + self.encode(value.func, path)
        if isinstance(value, _LRU_CACHE):
            return b"h" + self.encode(value.__wrapped__, path)
        if isinstance(value, weakref.ReferenceType):
            return b"w" + self.encode(value(), path)
        if isinstance(value, logging.Logger):
            return self._logger(value, path)
        if is_operator(value):
            return self.operator(value, path)
        if isinstance(value, torch.jit.ScriptFunction):
            code = script_code([value])
            return self.unreadable(value, path) if code is None else b"J" + self.encode(code, path)
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            return b"B" + self.encode(_as_tensor(value), path)
        if isinstance(value, torch.fx.Graph):
            return b"G" + self.encode(graph_code(value), path)
        if isinstance(value, torch.fx.Node):
            return b"G" + self.encode([value.name, value.graph], path)
        if isinstance(value, _FLEETING):
            return self._fleeting(value, path)
        if isinstance(value, (*GENERATORS, *_NO_STATE)) or type(value) is object:
            if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
                self.generators.append(value)
            return _class_alone(value)
        return self._object(value, path)

    def _logger(self, value: logging.Logger, path: str) -> bytes:
        """A logger by its name; unreadable if it has more state than the standard library's own."""
        self.dicts.append(vars(value))
        state = {name: item for name, item in vars(value).items() if name not in _LOGGER_FIELDS}
        head, origin = b"h" + text_bytes(value.name), self.origins.of(type(value))
        if origin == "installed" or (origin == "builtin" and not state):
            return head
        self.watch(value, state)
        return head + self.unreadable(value, path) + self.klass(type(value), path) + self.state(state, path)

    def _fleeting(self, value: Any, path: str) -> bytes:
        """An object whose content depends on the thread, or on weak references."""
        head = _class_alone(value)
        if self.is_foreign:  # for example the cache of functools.singledispatch
            return head
        if not isinstance(value, threading.local):
            self.reads.append((_is_empty, value))
            return self.unreadable(value, path) if len(value) else head
        self.reads.append((_of_this_thread, value))
        if not vars(value) and type(value) is threading.local:
            return head
        token = self.unreadable(value, path)
        return token + self.klass(type(value), path) + self.state(dict(vars(value)), path)

    def _object(self, value: Any, path: str) -> bytes:
        before, origin = self.is_foreign, self.origins.of(type(value))
        self.is_foreign = origin in ("installed", "torch") or (before and origin == "builtin")
        try:
            return self._object_of_class(value, path)
        finally:
            self.is_foreign = before

    def _object_of_class(self, value: Any, path: str) -> bytes:
        kind = type(value)
        state = self.without_ignored(attributes(value), f"{path}.")
        if hasattr(kind, "__enter__") and self.origins.of(kind) == "torch":
            # Such an attribute is the state that a context manager goes back to, and changes with each use.
            state = {name: item for name, item in state.items() if not name.startswith("prev")}
        self.watch(value, state)
        if hasattr(kind, "set_truncation_and_padding") and hasattr(state.get("_tokenizer"), "to_str"):
            # Each call of such a tokenizer sets the first two members of its JSON anew, so they do not count.
            self.reads.append((_parts_of_tokenizer, state["_tokenizer"]))
            text = state["_tokenizer"].to_str()  # "truncation", "padding", "added_tokens", …
            state["_tokenizer"] = text[max(0, text.find('"added_tokens"')) :]
        cached = cache_options(value) if "cache_instance" in state else []
        state = self.without_skipped(kind, without_ours(state), path)
        if (signs := _SIGNS.get(qualified_name(kind))) is not None:
            self.reads.append((signs, value))
        self._note(value, state, path)
        head = self.klass(kind, path) + self.state(state, path)
        head += self.encode(cached, path) if cached else b""
        if has_plain_state(value):
            return b"o" + head
        if hasattr(kind, "__next__"):
            return self.unreadable(value, path)  # an iterator's position changes as it is used
        try:
            reduced = value.__reduce_ex__(4)  # this includes state that only C code can read
        except Exception:
            reduced = None
        if isinstance(reduced, str):
            return b"R" + head + text_bytes(reduced)
        if isinstance(reduced, tuple):
            if not qualified_name(kind).startswith(("tokenizers.", "functools.")):
                self.opaque.append(path)
            parts = [list(part) if hasattr(part, "__next__") else part for part in reduced]
            if self.ignore and type(fields := getattr(value, "__dict__", None)) is dict:
                kept = self.without_ignored(fields, f"{path}.")
                parts = [kept if part is fields else part for part in parts]
            return b"R" + head + self.encode(parts, path)
        text = repr(value)
        if self.origins.of(kind) != "torch" or _ADDRESS.search(text):
            return self.unreadable(value, path)
        return b"r" + head + text_bytes(text)  # such as torch.finfo

    def state(self, state: Mapping[str, Any], path: str) -> bytes:
        """Bytes of named values."""
        names = sorted(state)
        pairs = [(state[name], f"{path}.{name}") for name in names]
        return text_bytes(" ".join(names)) + self.items(pairs)

    def watch(self, value: Any, state: Mapping[str, Any]) -> None:
        """Have it noticed when an attribute of an object changes."""
        scope = getattr(value, "__dict__", None)
        if type(scope) is dict:
            self.dicts.append(scope)
            self.reads.append((_class_of, value))
        else:
            scope = {}
        self.scopes += [(scope, name, item) for name, item in state.items() if name in scope]
        slots = [name for name in state if name not in scope and hasattr(value, name)]
        if slots:
            # There are two names at least, so that `attrgetter` always returns a tuple.
            self.reads.append((attrgetter("__class__", *slots), value))

    def unreadable(self, value: Any, path: str) -> bytes:
        """A token that stands for this object in this process."""
        self.uses.is_dynamic = True  # nothing is known about what this reads
        self.unread.append(path or type(value).__qualname__)
        _, token = self._tokens.setdefault(id(value), (value, os.urandom(16)))
        return b"?" + token


def _as_tensor(storage: torch.UntypedStorage | torch.TypedStorage) -> Tensor:
    if isinstance(storage, torch.TypedStorage):
        return torch.empty(0, dtype=storage.dtype, device=storage.device).set_(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _class_alone(value: Any) -> bytes:
    """The bytes of an object whose state does not count."""
    return b"z" + text_bytes(qualified_name(type(value)))


def _class_of(value: Any) -> tuple[Any, ...]:
    return type(value), value.__dict__


def _is_empty(value: Any) -> tuple[bool]:
    return (len(value) == 0,)


def _of_this_thread(value: threading.local) -> tuple[Any, ...]:
    return (len(vars(value)), *vars(value), *vars(value).values())


def _parts_of_tokenizer(value: Any) -> tuple[str]:
    """What shows most changes of a tokenizer, in some 4 µs; the same object as long as it is equal."""
    parts = (value.normalizer, value.pre_tokenizer, value.post_processor, value.decoder)
    # In old versions a text is that of an object, and then names its address.
    shown = [text if " at 0x" not in (text := repr(part)) else type(part) for part in parts]
    model = value.model
    return (sys.intern(f"{value.get_vocab_size()} {shown} {type(model)} {getattr(model, 'dropout', None)}"),)


def _tokenizer(value: Any) -> tuple[str, str]:
    return *_parts_of_tokenizer(value), sys.intern(f"{value.truncation} {value.padding}")


# For types that keep their state in C code: what is cheap to read at every call and shows changes.
_SIGNS = {"tokenizers.Tokenizer": _tokenizer}


def has_plain_state(value: Any) -> bool:
    """Whether an object keeps all of its state in attributes."""
    return all(map(_made_by_class_statement, type(value).__mro__[:-1]))


def _made_by_class_statement(kind: type) -> bool:
    """Whether a class is written in Python, so that its state is in attributes; others have C methods."""
    return not any(
        isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType))
        and value.__objclass__ is kind
        for value in vars(kind).values()
    )
