"""`CodeWalk`: reads classes and functions as named parts, with everything that their code names.

It reads project code function by function: source, defaults, closure, and the globals and imports that it
names. Each class and function becomes one part, under a label that does not depend on its file's location. If
code uses a module as a whole, or imports one inside a function, only the names that project code uses count.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import MISSING
from functools import partial
from itertools import accumulate
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from torchcache2.core.errors import attribute
from torchcache2.identity import libraries, marks, sourcecode
from torchcache2.identity.encoding import Encoder, public_module, qualified_name, sized, text_bytes
from torchcache2.identity.guard import MUTABLE
from torchcache2.identity.names import (
    Uses,
    UseTable,
    has_fields,
    is_plain,
    names_of,
    resolved,
    taken_by,
    uses_of,
)
from torchcache2.identity.sourcecode import PACKAGES, CompiledTexts, cells_of, names_in

_MISSING = object()
_ENVIRONMENT = (os.environ, os.getenv)
# Variables that only say which rank a process is: ranks compute the same, and share rows.
_OF_RANKS = re.compile(
    "((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC)_.*"
)
_CODE = (type, types.FunctionType, types.MethodType, types.ModuleType, staticmethod, classmethod, property)
_FUNCTIONAL = sorted(
    name
    for name, value in vars(nn.functional).items()
    if callable(value) and not isinstance(value, type) and not name.startswith("_")
)
# Attributes that every class statement adds.
_CLASS_NOISE = frozenset(
    (
        *("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__"),
        *("__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
        *("__slots__", "__slotnames__", "__dataclass_fields__", "__dataclass_params__"),
        *("__signature__", "__classdictcell__", "_member_map_", "_value2member_map_", "_unhashable_values_"),
        *("_hashable_values_", "_value_repr_", "__new_member__", "_generate_next_value_"),
        # Compiled from the fields, with the address of the class.
        *("__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__"),
    )
)
# Methods that a dataclass or named tuple gets from its fields; others of code without a file are the user's.
_GENERATED = (
    *("__init__", "__new__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
    *("__setattr__", "__delattr__"),
)
_CODE_PARTS = ("class", "function", "import", "extension")
_DEFINED = (b"class ", b"function ", b"u", b"z")  # the bytes of what has a name of its own begin like this
_NAMED = (b"M", b"h")  # and those of modules, loggers and wrapped functions like this
_FUNCTION_FIELDS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WRAPPER_FIELDS = attrgetter("__dict__", "__code__")


class CodeWalk(Encoder):
    """The part of a walk that follows code to what it names.

    `tokens` are random bytes, by id, for unreadable objects; `texts` caches compiled source files. Pass both
    again in later walks, so that objects keep their tokens. Leaves out what the patterns in `ignore` match,
    and, unless `counts_code`, source code and versions, but not the values that code names.
    """

    counts_code = True

    def __init__(
        self,
        tokens: MutableMapping[int, tuple[object, bytes]],
        texts: CompiledTexts,
        ignore: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.parts: dict[str, bytes] = {}  # canonical bytes of each part
        self.unread: list[str] = []  # paths of unreadable values
        self.not_imported: set[str] = set()  # modules that code imports at run time
        self.ignore: dict[str, re.Pattern[str]] = {}  # patterns that the user leaves out of the key
        for text in ignore:
            pattern = re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")
            self.ignore[text] = re.compile(pattern, re.DOTALL)
        self.ignored: dict[str, list[str]] = {}  # by path, the patterns that left it out
        # Values read, to notice changes: globals and attributes, and cells of closures.
        self.scopes: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.dicts: list[Collection[Any]] = []  # compared by number of elements, as new ones count
        # Functions that read a tuple from an object, compared by identity.
        self.reads: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        # What code only writes: it is not in the key, but `Undo` restores it.
        self.written: list[tuple[str, Any]] = []  # containers
        self.written_scopes: list[tuple[Mapping[str, Any], str]] = []
        self.written_cells: list[types.CellType] = []
        self.assigned: set[str] = set()  # names of all of these
        self.sources: dict[types.FunctionType, str] = {}  # of project functions
        self.uses = UseTable()
        self.in_hook = False  # values that hooks only write count, as others may read them
        self.origins = sourcecode.Origins()
        self.is_foreign = False  # whether the code being read is not the user's own
        self._tokens, self._texts = tokens, texts
        self._refilled: dict[int, Any] = {}  # containers, by id, that a function clears and then reads
        self._taken: dict[int, tuple[Any, set[str]]] = {}  # objects read only in part: their fields, by id
        self._versions: dict[str, str] = {}
        self._taken_names: set[str] = set()  # names and texts in project code
        self._whole: dict[int, types.ModuleType] = {}  # modules used as a whole
        self._reads_environment = False  # whether project code reads environment variables
        self._constants: set[str] = set()  # texts in globals
        self._done: set[Any] = set()  # what was written of modules and the environment
        self._methods: dict[int, tuple[str, type]] = {}  # by id of a function of the class being read
        self._uses_of_methods: dict[int, Uses] = {}
        self._labels: dict[int, bytes] = {}  # of the classes, functions and modules seen
        self._label_counts: dict[str, int] = {}
        self._kept_alive: list[Any] = []  # objects that must live as long as their ids are used

    def label(self, obj: Any, label: str) -> bytes:
        """Give a new object a label, unique in this walk."""
        self._kept_alive.append(obj)
        self.uses.meet(obj)
        count = self._label_counts[label] = self._label_counts.get(label, 0) + 1
        self._labels[id(obj)] = (label if count == 1 else f"{label} ({count})").encode()
        return self._labels[id(obj)]

    def unreadable(self, value: Any, path: str) -> bytes:
        """A token for an unreadable object, valid in this process."""
        self.uses.is_dynamic = True  # nothing is known about what this reads
        self.unread.append(path or type(value).__qualname__)
        _, token = self._tokens.setdefault(id(value), (value, os.urandom(16)))
        return b"?%d " % os.getpid() + token  # forked siblings may each change what they have inherited

    def ignores(self, value: Any, path: str) -> bool:
        """Whether the user ignores the value at a path. Code always counts."""
        found = [text for text, pattern in self.ignore.items() if pattern.fullmatch(path)]
        if not found or isinstance(value, _CODE):
            return False
        self.ignored[path] = found
        return True

    def without_ignored(self, state: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The values whose paths (`where` and their name) the user does not ignore."""
        return {name: one for name, one in state.items() if not self.ignores(one, f"{where}{name}")}

    def without_skipped(self, kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of an object without those that `left_out` names."""
        kept = dict(state)
        for name in libraries.left_out(kind):
            attribute, _, key = name.partition(".")
            value = kept.get(attribute, _MISSING)
            if not key and value is not _MISSING:
                del kept[attribute]
            elif key and isinstance(value, dict) and key in value:
                kept[attribute] = {other: item for other, item in value.items() if other != key}
        return kept

    def watch_names(self, scope: Mapping[str, Any], names: Collection[str]) -> None:
        """Watch names of a scope for other objects."""
        if names:
            # At least two names, so that `itemgetter` returns a tuple.
            self.reads.append((itemgetter(*sorted(names), min(names)), scope))

    @contextlib.contextmanager
    def inside(self, code: Any) -> Iterator[None]:
        """Note whose code a class or function is, while reading it."""
        before, origin = self.is_foreign, self.origins.of(code)
        is_theirs = origin == "installed" or isinstance(code, types.FunctionType)
        is_theirs = is_theirs or (origin == "torch" and not issubclass(code, nn.Module))
        self.is_foreign = origin != "project" and (before or is_theirs)
        try:
            yield
        finally:
            self.is_foreign = before

    def write_all(self) -> bool:
        """Write what becomes known only after reading code; returns whether there was more."""
        before = len(self._done)
        for module in list(self._whole.values()):
            names = {name for name in vars(module).keys() & self._taken_names if not name.startswith("__")}
            for name in sorted(names):
                if (id(module), name) not in self._done:
                    self._done.add((id(module), name))
                    self._name_of_module(module, name)
        for name in self._variables():
            if f"os.environ.{name}" not in self._done:
                self._done.add(f"os.environ.{name}")
                if not self.ignores(value := os.environ[name], f"os.environ.{name}"):
                    self.parts[f"environment {name}"] = self.encode(value, name)
        return len(self._done) > before

    def _variables(self) -> list[str]:
        """The environment variables that project code names, if it reads any, and that are set."""
        names = [*os.environ] if self._reads_environment else []
        named = [name for name in names if name in self._taken_names or name in self._constants]
        return sorted(name for name in named if not _OF_RANKS.fullmatch(name))

    def leave_out_code(self, root: Any) -> None:
        """Leave out the parts of classes, functions and imports, and variables that only name these.

        Instead, the name of the root counts. The code of lambdas counts, as nothing else tells them apart.
        """
        self.parts["name"] = place_of(root).encode()
        for part, data in [*self.parts.items()]:
            kind, _, rest = part.partition(" ")
            name = rest.partition(" of ")[0].rpartition(".")[2].encode()
            is_code = data.startswith(_DEFINED) and name in data
            is_code |= data.startswith(_NAMED) and not data.startswith(b"hS")
            is_code |= not data or name == b"__class__"
            is_code = is_code if kind in ("global", "closure") else kind in _CODE_PARTS
            if is_code and "<lambda>" not in rest.partition(" of ")[0]:
                del self.parts[part]

    def write_replaced(self) -> None:
        """Write the functions that somebody has put into `torch.nn.functional`, which others call."""
        for name in _FUNCTIONAL:
            value = getattr(nn.functional, name, None)
            if isinstance(value, partial) or self.origins.of(value) in ("project", "installed"):
                self.parts[f"global torch.nn.functional.{name}"] = self.encode(value, f"functional.{name}")

    def watch_all(self) -> None:
        """Watch the places that were looked at, besides the values read."""
        self.watch_names(vars(nn.functional), _FUNCTIONAL)
        if self._reads_environment:
            self.reads.append((partial(_values_in, self._variables()), os.environ))
        self.reads += [(attrgetter("__class__", *sorted(names)), one) for one, names in self._taken.values()]

    def _name_of_module(self, module: types.ModuleType, name: str) -> None:
        """Write a name that code may use from a module used as a whole, or imported at run time."""
        value, path = vars(module)[name], f"{module.__name__}.{name}"
        if self.ignores(value, path):
            return
        self._reads_environment |= any(value is one for one in _ENVIRONMENT)
        self.scopes.append((vars(module), name, value))
        if self.origins.of(module) == "project":
            self.parts[f"global {path}"] = self.encode(value, path)
        elif isinstance(value, types.ModuleType):
            self._whole[id(value)] = value
        else:
            data = self._in_package(module, value, path)
            if self.origins.of(module) == "installed" or data != self.python_module(module, path):
                self.parts[f"global {path}"] = data

    # Classes.

    def klass(self, kind: type, path: str) -> bytes:
        """Write a class and its bases; returns the label of its part."""
        known = self._labels.get(id(kind))
        if known is not None:
            return known
        label = self.label(kind, f"class {_short_name(kind)}")
        where = self.origins.of(kind)
        is_module = issubclass(kind, nn.Module)
        with self.inside(kind):
            if where in ("torch", "builtin"):
                parts = [text_bytes(qualified_name(kind))]
            else:
                metaclass = [type(kind)] if type(kind) is not type else []
                parts = [self.items([(base, path) for base in (*kind.__bases__, *metaclass)])]
            if where == "installed":
                parts.append(self.installed(kind, qualified_name(kind)))
                self.dicts.append(vars(kind))
            elif where == "project":
                parts += [text_bytes(kind.__name__), self._fields(kind)]
            # If a function made the class, its arguments are not in the file.
            is_made = where == "installed" and "<locals>" in kind.__qualname__
            parts += self._class_contents(kind, label.decode(), everything=where == "project" or is_made)
            own = {name: one for name, one in vars(kind).items() if isinstance(one, types.FunctionType)}
            is_layer = where == "torch" and is_module and kind is not nn.Module
            if where == "installed" or is_layer:
                self.watch_names(vars(kind), own)
            self.uses.others |= _reached(own) if is_layer else set()
        self.parts[label.decode()] = b"".join(map(sized, parts))
        return label

    def _fields(self, kind: type) -> bytes:
        """Bytes of a dataclass's fields, their defaults and default factories."""
        said = attrgetter("default", "default_factory", "repr", "compare", "hash")
        fields = [
            [name, *(None if one is MISSING else one for one in said(field))]
            for name, field in vars(kind).get("__dataclass_fields__", {}).items()
        ]
        return self.encode(fields, f"{kind.__name__} fields")

    def _class_contents(self, kind: type, owner: str, *, everything: bool) -> list[bytes]:
        parts = list[bytes]()
        for name, value in sorted(vars(kind).items()):
            path = f"{kind.__name__}.{name}"
            is_noise = name in _CLASS_NOISE or name.startswith(("torchcache_", "_torchcache_"))
            if is_noise or self.ignores(value, path):
                continue
            raw = (
                getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
            )
            is_function = isinstance(raw, types.FunctionType)
            own = vars(raw) if is_function else vars(type(raw))
            if marks.ADDED_ATTRIBUTE in own and marks.is_ours(raw):
                continue
            if marks.ORIGINAL_ATTRIBUTE in own and marks.is_ours(raw):
                value = own[marks.ORIGINAL_ATTRIBUTE]
                self.reads.append((_WRAPPER_FIELDS, raw))  # a notebook that reloads its code changes these
                self.scopes.append((own, marks.ORIGINAL_ATTRIBUTE, value))
            if is_function and (code := _generated(kind, raw)) is not None:
                self.uses.others |= names_in(code) if name != "__init__" else set()
                count = code.co_argcount + code.co_kwonlyargcount
                parts.append(text_bytes(" ".join((name, str(code.co_argcount), *code.co_varnames[:count]))))
                continue  # the rest follows from the fields
            if not everything and not self._is_put_there(kind, name, value):
                continue
            inner = _function_in(value)
            if isinstance(inner, types.FunctionType):
                self._methods[id(inspect.unwrap(inner))] = name, kind
            data = self.encode(value, path)
            if is_function or hasattr(type(value), "__get__"):
                parts += [name.encode(), data]
            else:
                self.parts[f"value {path} of {owner}"] = data
            self.scopes.append((vars(kind), name, vars(kind)[name]))
        if everything:
            self.dicts.append(vars(kind))
        return parts

    def _is_put_there(self, kind: type, name: str, value: Any) -> bool:
        """Whether an attribute of a class of torch or an installed package is code from elsewhere."""
        raw = _function_in(value)
        if not isinstance(raw, types.FunctionType):
            return False
        is_far = sourcecode.defining_module(raw) != kind.__module__ and not hasattr(raw, "__wrapped__")
        where = self.origins.of(raw)
        return where == "project" or (where == "installed" and name == "forward" and is_far)

    # Functions.

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write a function and what it names; returns the label of its part."""
        options = marks.cache_options(function) if marks.is_ours(function) else []
        if marks.is_ours(function) and marks.own_attributes(function):
            # A cached function may keep values as its own attributes, such as a count of its calls.
            self.parts[f"attributes of {_short_name(function)} at {path}"] = self._own(function, path)
        function = marks.original(function)
        if options:
            self.parts[f"cached {_short_name(function)} at {path}"] = self.encode(options, path)
        method = self._methods.pop(id(function), ())
        known = self._labels.get(id(function))
        if known is not None:
            if id(function) in self._uses_of_methods:  # it has another name too, or is called without one
                self.uses.add(self._in_hook(self._uses_of_methods[id(function)]), *method)
            return known
        label = self.label(function, f"function {_short_name(function)}")
        where, owner, uses = self.origins.of(function), f"of {label.decode()}", None
        with self.inside(function):
            if where == "project":
                source, uses = self._source(function, method)
                parts = [source.encode("utf-8", "surrogatepass"), self._own(function, function.__name__)]
                self._named(function, uses, owner)
            elif where == "installed":
                parts = [self.installed(function, function.__name__)]
            else:
                module = sourcecode.defining_module(function)
                names = f"{function.__qualname__} {function.__code__.co_name}"
                if marks.is_ours(function):
                    module, names = public_module(module), _short_name(function)
                wrapped = self.encode(getattr(function, "__wrapped__", None), path)
                parts = [text_bytes(f"{module} {names}"), wrapped]
            self._captured(function, uses, owner)
            if where in ("project", "installed"):
                self.reads.append((_FUNCTION_FIELDS, function))
                keywords = function.__kwdefaults__ or {}
                self.scopes += [(keywords, *item) for item in keywords.items()]
                for name, value in _defaults_of(function).items():
                    # If a function made an installed one, its defaults are not in the file.
                    is_made = "<locals>" in function.__qualname__
                    is_code = is_plain(value) and not is_made
                    if (where == "project" or is_made or is_code) and (self.counts_code or not is_code):
                        self.parts[f"default {name} {owner}"] = self.encode(value, name)
        self.parts[label.decode()] = b"".join(map(sized, parts))
        return label

    def _source(self, function: types.FunctionType, method: tuple[Any, ...]) -> tuple[str, Uses]:
        """The source of a project function, and its uses of names; `method` is its name and class."""
        source = sourcecode.function_source(function, self._texts)
        if source is None:  # made by `exec`, pickled in another process, or its file has been edited
            self.uses.is_dynamic = True
            source = sourcecode.compiled(function.__code__)
        self.sources[function] = source
        uses = self._in_hook(self._texts.once(uses_of, function.__code__, source))
        captured = {variable: value for variable, _, value in cells_of(function)}
        local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
        for name in set(uses.refilled) - local:
            value = captured.get(name, function.__globals__.get(name))
            if isinstance(value, MUTABLE):  # hooks may fill it for this function
                self._refilled[id(value)] = value
        self.uses.add(uses, *method)
        if method:
            self._uses_of_methods[id(function)] = uses
        elif function.__code__.co_varnames[:1] == ("self",):  # a wrapped method
            self.uses.is_dynamic |= uses.passes_self
        return source, uses

    def _in_hook(self, uses: Uses) -> Uses:
        return uses._replace(collected=uses.assigned | uses.added) if self.in_hook else uses

    def _own(self, function: types.FunctionType, path: str) -> bytes:
        """Bytes of the attributes of a function."""
        own = marks.own_attributes(function)
        self.scopes += [(vars(function), *item) for item in own.items()]
        self.dicts.append(vars(function))
        return self.encode(own, path)

    def _captured(self, function: types.FunctionType, uses: Uses | None, owner: str) -> None:
        """Write down what a function reads of the variables that it has captured: one part for each."""
        self.reads += [(_is_unset, cell) for cell in function.__closure__ or () if _is_unset(cell)[0]]
        for name, cell, value in cells_of(function):
            if uses is not None and self.ignores(value, name):
                continue
            is_left_out = uses is not None and self._only_writes(uses, name, value)
            if is_left_out and name in uses.assigned:  # type: ignore[union-attr]
                self.written_cells.append(cell)
                continue
            self.cells.append((cell, value))
            read = [(value, name)] if uses is None else self.read_of(uses, name, value, name)
            for one, where in () if is_left_out else read:
                self.parts[f"closure {where} {owner}"] = self.encode(one, where)

    # What code names.

    def _named(self, function: types.FunctionType, uses: Uses, owner: str) -> None:
        """Write down what a function names: one part for each global and each import."""
        names = self._texts.once(names_of, function.__code__)
        self._taken_names |= self._texts.once(taken_by, function.__code__)
        for name in names.imports:
            package = function.__globals__.get("__package__")
            self.parts[f"import {name} {owner}"] = self._imported(name, package)
        for chain in names.chains:
            self._chain(chain, function, uses, owner)

    def _chain(self, chain: tuple[str, ...], function: types.FunctionType, uses: Uses, owner: str) -> None:
        """Record the value of a global or, if it is a module, of an attribute of it."""
        name, *attributes = chain
        scope: Mapping[str, Any] = function.__globals__
        value = scope.get(name, _MISSING)
        path = key = name
        if self.ignores(value, path):
            return
        is_left_out = self._only_writes(uses, name, value)
        if is_left_out and name in uses.assigned:
            self.written_scopes.append((scope, name))
            return
        self.scopes.append((scope, name, None if value is _MISSING else value))
        if is_left_out or value is _MISSING:  # a builtin, or nothing, so that reading it would fail
            return
        inside = value
        while attributes and issubclass(type(value), types.ModuleType):
            inside, scope, attribute = value, vars(value), attributes.pop(0)
            self.extension(inside)
            key = f".{attribute}"
            path += key
            if isinstance(value, libraries.OPERATOR_NAMESPACES):
                getattr(value, attribute, None)  # `torch.ops` loads an operator when it is first read
            value = scope.get(attribute)
            if self.ignores(value, path):
                return
            self.scopes.append((scope, attribute, value))
        self._constants |= {value} if type(value) is str else set()
        if any(value is one for one in _ENVIRONMENT):  # only the variables that code names count
            self._reads_environment |= function.__name__ != "__init__"  # its results are read
        elif not issubclass(type(inside), types.ModuleType) or self._is_read(inside, value):
            for one, where in self.read_of(uses, key, value, path):
                self.parts[f"global {where} {owner}"] = self.encode(one, where)
        else:
            self.parts[f"global {path} {owner}"] = self._in_package(inside, value, path)

    def _is_read(self, module: types.ModuleType, value: Any) -> bool:
        """Whether code that names a value in a module reads its content: users' own, and others' settings."""
        if self.origins.of(module) == "project":
            return True
        return self.origins.of(type(value)) == "installed" and type(attribute(value, "__dict__")) is dict

    def _only_writes(self, uses: Uses, name: str, value: Any) -> bool:
        """Whether nothing depends on the value of a variable, as far as one function uses it."""
        if id(value) in self._refilled:  # the function that reads it has cleared it before
            uses = uses._replace(collected=())
        is_left_out = uses.only_writes(name, value)
        if is_left_out:
            self.leave_out(name, value)
        return is_left_out

    def leave_out(self, name: str, value: Any) -> None:
        """Note a variable or attribute that code only writes, so that its value counts nowhere."""
        self.assigned.add(name)
        if isinstance(value, MUTABLE):
            self.written.append((name, value))

    def read_of(self, uses: Uses, key: str, value: Any, path: str) -> list[tuple[Any, str]]:
        """What code reads of the value of a variable or attribute: some plain fields of it, or all of it."""
        found: list[tuple[Any, str]] = []
        queue, seen = [(key, value, path)], set()
        while queue:
            key, value, path = queue.pop()
            names = set() if uses.is_dynamic else uses.read_of(key)
            if not names or id(value) in seen or not has_fields(value, names):
                found.append((value, path))
                continue
            seen.add(id(value))
            names = {name for name in names if not self.ignores(getattr(value, name), f"{path}.{name}")}
            self._taken.setdefault(id(value), (value, set()))[1].update(names)
            queue += [(f".{name}", getattr(value, name), f"{path}.{name}") for name in sorted(names)]
        return found

    # Modules and packages.

    def _in_package(self, module: types.ModuleType, value: Any, path: str) -> bytes:
        """Bytes of what code takes from an installed module: its name, and users' code or data in it."""
        known = self.python_module(module, path)
        known = known if self.counts_code else b""
        is_function = isinstance(value, types.FunctionType)
        if isinstance(value, libraries.OPERATORS) or (is_function and self.origins.of(value) == "project"):
            return self.encode(value, path)
        is_code = is_function or isinstance(value, (type, libraries.MEMO))
        is_code = is_code and self.origins.of(module) == "installed"
        return known + (self.encode(value, path) if is_code or self._is_users(module, value) else b"")

    def _is_users(self, owner: types.ModuleType, value: Any) -> bool:
        """Whether a value in another package's module is user code, or data that users may set."""
        value = _function_in(value)
        if is_plain(value) or self.origins.is_project(value):
            return True
        is_python = self.origins.of(owner) == "builtin"  # as is `sys.path`
        return not is_python and isinstance(value, (*MUTABLE, Tensor, SimpleNamespace, Namespace))

    def python_module(self, module: types.ModuleType, path: str) -> bytes:
        """Bytes of a Python module that code uses as a whole."""
        where = self.origins.of(module)
        head = b"M" + text_bytes(public_module(module.__name__))
        if where != "project":
            return head + (self.installed(module, "") if where == "installed" else b"")
        self.extension(module)
        self._whole[id(module)] = module
        return head

    def extension(self, module: Any) -> None:
        """Write the file of a project's extension module, once."""
        if not isinstance(module, types.ModuleType) or self.origins.of(module) != "project":
            return
        if data := self._texts.extension(module):
            self.parts[f"extension {module.__name__}"] = data.encode()

    def _imported(self, name: str, package: str | None) -> bytes:
        """Bytes of a module that code imports as it runs, or of a name that it takes from one."""
        data = name.encode()
        for full in resolved(name, package):
            for place in accumulate(full.split("."), "{}.{}".format):
                module = sys.modules.get(place)
                if module is not None:
                    if self.origins.of(module) in ("project", "installed"):
                        data += self.python_module(module, place)
                    self._whole[id(module)] = module
                    continue
                self.reads.append((_loaded, place))  # once it is imported, its names can be read
                self.not_imported.add(place)
        return data

    def installed(self, obj: Any, name: str) -> bytes:
        """Bytes of code of an installed package: its name, and the package's version and content."""
        module = sourcecode.defining_module(obj)
        if module not in self._versions:
            root, loaded = module.partition(".")[0], sys.modules.get(module)
            file = getattr(loaded, "__file__", None) or ""
            version = f"{sourcecode.package_version(root)} {PACKAGES.digest(module, file)}"
            self._versions[module] = version
            words = self._texts.words(file)
            self.uses.others |= words
        if not self.counts_code:
            return text_bytes(f"{module} {name}")
        return text_bytes(f"{module} {name} {self._versions[module]}")

    def operator(self, value: Any, path: str) -> bytes:
        """Bytes of an operator of torch: its name, and the user's functions if it is a custom one."""
        code = libraries.code_of_operator(value)
        return b"u" + text_bytes(str(value)) + (self.encode(code, path) if code else b"")


def place_of(obj: Any) -> str:
    """The module and name of a function, or of the class of an object; for a script its file's name."""
    name = qualified_name(obj if isinstance(obj, types.FunctionType) else type(obj))
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.basename(script) + name if name.startswith("__main__.") else name


def _reached(methods: Mapping[str, types.FunctionType]) -> set[str]:
    """The names in a class's forward and in the methods that it names."""
    names, more = set[str](), {"forward"}
    while more:
        found = [names_in(methods[name].__code__) for name in more & methods.keys()]
        names, more = names | more, set().union(*found) - names - more
    return names


def _generated(kind: type, function: Any) -> types.CodeType | None:
    """The code of a function generated from the fields of a dataclass, a named tuple or an attrs class."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    has_fields = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")
    file, name = getattr(code, "co_filename", ""), getattr(code, "co_name", "")
    # That of attrs for a hash contains Python's hash of a text, which differs in each process.
    is_generated = (has_fields and file == "<string>") or file.startswith("<attrs generated ")
    return code if is_generated and name in _GENERATED else None


def _function_in(value: Any) -> Any:
    """The function of a property, static method or class method; other values as they are."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function, by the names of its parameters."""
    count, values = function.__code__.co_argcount, function.__defaults__ or ()
    names = function.__code__.co_varnames[count - len(values) : count]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


def _short_name(obj: Any) -> str:
    if marks.is_ours(obj):  # the function that `torchcache(policy="lru")` returns counts as `torchcache`
        return str(obj.__qualname__).partition(".<locals>")[0]
    return str(obj.__qualname__).rpartition("<locals>.")[2]


def _is_unset(cell: types.CellType) -> tuple[bool]:
    return (cell == types.CellType(),)


def _loaded(name: str) -> tuple[Any, ...]:
    return (sys.modules.get(name),)


def _values_in(names: Iterable[str], environment: Mapping[str, str]) -> tuple[Any, ...]:
    """Which variables there are, and the values of some: equal texts are identical."""
    values = [" ".join(environment), *[environment.get(name, "") for name in names]]
    return tuple(map(sys.intern, values))
