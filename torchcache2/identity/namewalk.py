"""`NameWalk`: writes down what code names: globals, whole modules, imports, installed packages."""

from __future__ import annotations

import builtins
import importlib
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from operator import itemgetter
from typing import Any

from torchcache2.core.private import OPERATOR_FIELDS
from torchcache2.identity import sourcecode
from torchcache2.identity.codenames import IMPORTING, names_of
from torchcache2.identity.compiled import CompiledTexts, names_in
from torchcache2.identity.containers import MUTABLE
from torchcache2.identity.encoding import Encoder, public_module, text_bytes
from torchcache2.identity.imports import files_of, place_of, resolved
from torchcache2.identity.torchcode import (
    OPERATOR_NAMESPACES,
    definition,
    is_operator,
    operator_name,
    registered_otherwise,
)
from torchcache2.identity.uses import Uses, UseTable, has_fields, is_plain

__all__ = ["NameWalk", "values_of"]

_MISSING = object()
# With these, code reaches things that it does not name. `locals` is not one: its values are in the code.
_UNFOLLOWED = (eval, exec, globals, sys.modules)
_IMPORTERS = (importlib.import_module, __import__)
_CODE = (type, types.FunctionType, types.MethodType, types.ModuleType, staticmethod, classmethod, property)


class NameWalk(Encoder):
    """The part of a walk that goes from code to what it names."""

    def __init__(self, texts: CompiledTexts) -> None:
        super().__init__()
        self.ignore: dict[str, re.Pattern[str]] = {}  # what the user leaves out of the key
        self.ignored: dict[str, list[str]] = {}  # by path, the patterns for which something was left out
        self.parts: dict[str, bytes] = {}  # canonical bytes of each part
        self.scopes: list[tuple[Mapping[str, Any], str, Any]] = []  # globals and attributes that were read
        # Other things that were read: a function, and the object from which it reads them, as a tuple.
        self.reads: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self.dicts: list[Collection[Any]] = []  # attributes of objects and classes, to notice new ones
        self.uses = UseTable()
        # What code only writes, which counts nowhere, but is put back where a forward is undone.
        self.written: list[tuple[str, Any]] = []  # containers
        self.written_scopes: list[tuple[Mapping[str, Any], str]] = []
        self.written_cells: list[types.CellType] = []
        self.assigned: set[str] = set()  # the names of all of this
        self.refilled: dict[int, Any] = {}  # containers, by id, that a function clears and then reads
        self.taken: dict[int, tuple[Any, set[str]]] = {}  # objects of which only some fields are read, by id
        self.not_imported: set[str] = set()  # project modules that code imports as it runs
        self._texts = texts
        self.origins = sourcecode.Origins()
        self._versions: dict[str, str] = {}
        self._files: dict[tuple[str, int], bytes] = {}
        self.project_files: set[str] = set()  # files of whole modules, and of the modules that these import
        self._names: set[str] = set()  # names that project code takes
        self._whole: dict[int, types.ModuleType] = {}  # project modules that code takes as a whole
        self._done: set[tuple[int, str]] = set()  # what was written down of modules
        # Ids of constructors of modules. These may compute names, as the walk reads what they have made.
        self._constructors: set[int] = set()
        self._exempt: set[str] = set()
        self._labels: dict[int, bytes] = {}  # of classes, functions and modules that were met
        self._taken: dict[str, int] = {}
        self._kept_alive: list[Any] = []  # objects that must live as long as their ids are used

    def ignores(self, value: Any, path: str) -> bool:
        """Whether the user has said that a value at a path changes no output. Code always counts."""
        found = [text for text, pattern in self.ignore.items() if pattern.fullmatch(path)]
        if not found or isinstance(value, _CODE):
            return False
        self.ignored[path] = found
        return True

    def without_ignored(self, state: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The values whose paths, which are the names behind `where`, the user does not leave out."""
        return {name: one for name, one in state.items() if not self.ignores(one, f"{where}{name}")}

    def unreadable(self, value: Any, path: str) -> bytes:
        """Bytes that stand for what cannot be read."""
        raise NotImplementedError

    def named_globals(self, function: types.FunctionType, uses: Uses, owner: str) -> None:
        """Write down what a function names: one part for each global and each import."""
        names = self._texts.once(names_of, function.__code__)
        scope = function.__globals__
        taken = names_in(function.__code__)
        self._names |= taken
        package = scope.get("__package__")
        if id(function) in self._constructors:
            self._exempt.add(owner)
        for name in names.imports:
            self.parts[f"import {name} {owner}"] = self._imported(name, package, taken)
        for chain in names.chains:
            self._chain(chain, function, uses, owner)
        for chain in names.looked_up:
            value: Any = scope.get(chain[0])
            for attribute in chain[1:]:
                value = vars(value).get(attribute) if isinstance(value, types.ModuleType) else None
            if isinstance(value, types.ModuleType) and self.origins.of(value) == "project":
                self._unfollowed(function, f"attributes of {'.'.join(chain)} by computed names", owner)
        for name in names.unfollowed:
            self._unfollowed(function, name, owner)

    def _chain(self, chain: tuple[str, ...], function: types.FunctionType, uses: Uses, owner: str) -> None:
        name, *attributes = chain
        scope: Mapping[str, Any] = function.__globals__
        value = scope.get(name, _MISSING)
        path = key = name
        if self.ignores(value, path):
            return
        if is_left_out := self.only_writes(uses, name, value):
            self.leave_out(name, value)
            if name in uses.assigned:
                self.written_scopes.append((scope, name))
                return
        self.scopes.append((scope, name, None if value is _MISSING else value))
        if is_left_out:
            return
        if value is _MISSING:  # it is a builtin, or does not exist, so that reading it would fail
            if any(getattr(builtins, name, None) is one for one in _UNFOLLOWED):
                self._unfollowed(function, name, owner)
            return
        inside = value
        while attributes and isinstance(value, types.ModuleType):
            inside, scope, attribute = value, vars(value), attributes.pop(0)
            key = f".{attribute}"
            path += key
            if isinstance(value, OPERATOR_NAMESPACES):
                getattr(value, attribute, None)  # `torch.ops` loads an operator when it is first read
            if attribute not in scope and "__getattr__" in scope and self.origins.of(inside) == "project":
                self._unfollowed(function, path, owner)
            value = scope if attribute == "__dict__" else scope.get(attribute, None)
            if self.ignores(value, path):
                return
            self.scopes.append((scope, attribute, scope.get(attribute)))
        is_renamed = any(value is one for one in _IMPORTERS) and chain[-1] not in IMPORTING
        if is_renamed or any(value is one for one in _UNFOLLOWED):
            self._unfollowed(function, path, owner)
        elif isinstance(inside, types.ModuleType) and path.endswith(".__dict__"):
            if self.origins.of(inside) == "project":
                self._unfollowed(function, path, owner)
        elif not isinstance(inside, types.ModuleType) or self.origins.of(inside) == "project":
            for one, where in self.read_of(uses, key, value, path):
                self.parts[f"global {where} {owner}"] = self.encode(one, where)
        else:
            self.parts[f"global {path} {owner}"] = self._in_package(inside, value, path)

    def only_writes(self, uses: Uses, name: str, value: Any) -> bool:
        """Whether nothing depends on the value of a variable, as far as one function uses it."""
        if id(value) in self.refilled:  # the function that reads it has cleared it before
            uses = uses._replace(collected=())
        return uses.only_writes(name, value)

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
            self.taken.setdefault(id(value), (value, set()))[1].update(names)
            queue += [(f".{name}", getattr(value, name), f"{path}.{name}") for name in sorted(names)]
        return found

    def _in_package(self, module: types.ModuleType, value: Any, path: str) -> bytes:
        """Bytes of what code takes from an installed module: its name, or other code that was put there."""
        known = self.python_module(module, path)
        is_function = isinstance(value, types.FunctionType)
        if is_operator(value) or (is_function and self.origins.of(value) == "project"):
            return self.encode(value, path)
        is_read = is_function or isinstance(value, type) or is_plain(value)
        if is_read and self.origins.of(module) == "installed":
            return known + self.encode(value, path)
        return known

    def python_module(self, module: types.ModuleType, path: str) -> bytes:
        """Bytes of a Python module that code uses as a whole."""
        where = self.origins.of(module)
        if where != "project":
            version = self.installed(module, "") if where == "installed" else b""
            return b"M" + text_bytes(public_module(module.__name__)) + version
        if getattr(module, "__file__", None) is None and not hasattr(module, "__path__"):
            return self.unreadable(module, path)
        self._whole[id(module)] = module
        self._kept_alive.append(module)
        return b"M" + self._files_of(module.__name__, module)

    def _files_of(self, name: str, module: types.ModuleType | None) -> bytes:
        """Bytes of the files of a project module and of those that it imports; empty for other modules."""
        key = name, id(module)
        if key not in self._files:
            files = files_of(name, module)
            self.reads.append((_loaded, sorted(files)))  # once it is imported, its globals can be read
            self.project_files |= {place_of(found) or "" for found in files}
            loaded = {found: sys.modules.get(found) for found in files} | ({name: module} if files else {})
            data = b"".join([text_bytes(part) for item in sorted(files.items()) for part in item])
            for found, other in sorted(loaded.items()):
                if not files[found]:
                    data += self.unreadable(other or files, f"{found} (no file)")
                elif other is not None and sourcecode.loaded_differs(other, self._texts):
                    data += self.unreadable(other, f"{found} (its file has been changed)")
            self._files[key] = data
        return self._files[key]

    def _imported(self, name: str, package: str | None, names: Collection[str]) -> bytes:
        """Bytes of a module that code imports, or of a name that it takes from one."""
        data = name.encode()
        for full in resolved(name, package):
            for place in accumulate(full.split("."), "{}.{}".format):
                module = sys.modules.get(place)
                if module is not None:
                    if self.origins.of(module) in ("project", "installed"):
                        data += self.python_module(module, place)
                    self._take(module, names)
                    continue
                self.reads.append((_loaded, [place]))
                if not sourcecode.is_known_root(place) and (file := place_of(place)) is not None:
                    self.not_imported.add(place)
                    data += self._files_of(place, None) or text_bytes(sourcecode.file_digest(file))
        return data

    def _take(self, module: types.ModuleType, names: Collection[str]) -> None:
        """Write down what code may take from an installed module that it imports as it runs."""
        queue = [module]
        while queue:
            module = queue.pop()
            for name in sorted(names & vars(module).keys()):
                if self.origins.of(module) == "project" or name.startswith("__"):
                    continue  # `finish` writes down what is taken of a project's
                if (id(module), name) in self._done:
                    continue
                self._done.add((id(module), name))
                value = vars(module)[name]
                path = f"{module.__name__}.{name}"
                self.scopes.append((vars(module), name, value))
                if isinstance(value, types.ModuleType):
                    queue.append(value)
                    continue
                data = self._in_package(module, value, path)
                if self.origins.of(module) == "installed" or data != self.python_module(module, path):
                    self.parts[f"global {path}"] = data

    def _unfollowed(self, function: types.FunctionType, what: str, owner: str) -> None:
        if owner in self._exempt:
            return
        token = self.unreadable(function, f"what {owner.removeprefix('of ')} reaches by {what}")
        self.parts[f"unfollowed {what} {owner}"] = token

    def operator(self, value: Any, path: str) -> bytes:
        """Write down an operator of torch: its name, and the user's functions if it is a custom one."""
        name = operator_name(value)
        state = definition(value)
        if state is None:
            unknown = self.unreadable(value, path) if registered_otherwise(name) else b""
            return b"u" + text_bytes(str(value)) + unknown
        part = f"operator {name}"
        if part not in self.parts:
            self.parts[part] = b""  # this comes first, as its functions may refer to it
            kept = {field: state[field] for field in OPERATOR_FIELDS if field in state}
            self.scopes += [(state, field, content) for field, content in kept.items()]
            self.dicts += [content for content in kept.values() if isinstance(content, (dict, set))]
            self.reads += [(values_of, content) for content in kept.values() if isinstance(content, dict)]
            self.parts[part] = self.encode(kept, name)
        return b"u" + text_bytes(str(value))

    def installed(self, obj: Any, name: str) -> bytes:
        """Bytes of code of an installed package: its name, the package's version, and the file."""
        module = sourcecode.defining_module(obj)
        if module not in self._versions:
            loaded = sys.modules.get(module)
            file = getattr(loaded, "__file__", None) or ""
            version = f"{sourcecode.package_version(module.partition('.')[0])} {sourcecode.file_digest(file)}"
            if loaded and sourcecode.is_newer(file) and sourcecode.loaded_differs(loaded, self._texts):
                version += self.unreadable(loaded, f"{module} (its file has been changed)").hex()
            self._versions[module] = version
            self.uses.others |= self._texts.words(file)
        return text_bytes(f"{module} {name} {self._versions[module]}")

    def functions(self) -> list[types.FunctionType]:
        """The functions that were read."""
        return [value for _, value in self.reads if isinstance(value, types.FunctionType)]

    def watch_names(self, scope: Mapping[str, Any], names: Collection[str]) -> None:
        """Have it noticed when names of a scope stand for other objects."""
        if names:
            # There are two names at least, so that `itemgetter` always returns a tuple.
            self.reads.append((itemgetter(*sorted(names), min(names)), scope))

    def finish(self) -> None:
        """Write down what project code takes from the modules that it uses as a whole."""
        while True:
            new = [
                (module, name)
                for module in self._whole.values()
                for name in sorted(self._names & vars(module).keys())
                if not name.startswith("__") and (id(module), name) not in self._done
            ]
            if not new:
                return
            for module, name in new:
                self._done.add((id(module), name))
                value = vars(module).get(name)
                path = f"{module.__name__}.{name}"
                if self.ignores(value, path):
                    continue
                self.scopes.append((vars(module), name, value))
                self.parts[f"global {path}"] = self.encode(value, path)

    def label(self, obj: Any, label: str) -> bytes:
        """Give an object that is met for the first time a label, which is unique in this walk."""
        self._kept_alive.append(obj)
        self.uses.meet(obj)
        count = self._taken[label] = self._taken.get(label, 0) + 1
        self._labels[id(obj)] = (label if count == 1 else f"{label} ({count})").encode()
        return self._labels[id(obj)]


def _loaded(names: list[str]) -> tuple[Any, ...]:
    return tuple(map(sys.modules.get, names))


def values_of(registry: dict[Any, Any]) -> tuple[Any, ...]:
    """The values of a dict, to be compared by identity."""
    return tuple(registry.values())
