"""Memos: dicts in which a method only keeps results for its argument: no output depends on them.

For example, a tokenizer remembers its tokens for each word. `memos_of` searches an object's classes for such
dicts, and `Memo` watches one: its first entries are part of the key, and so is any other change.
"""

from __future__ import annotations

import ast
import dis
import re
import types
from collections.abc import Mapping
from itertools import chain, islice
from operator import is_
from typing import Any

from torchcache2.core.process import computed_once
from torchcache2.identity import sourcecode
from torchcache2.identity.codenames import chains_in, steps_of
from torchcache2.identity.encoding import Encoder, digest
from torchcache2.identity.guard import alike
from torchcache2.identity.sourcecode import CompiledTexts, code_objects, functions_in, names_in
from torchcache2.identity.uses import is_plain

_COMPARED = 32  # entries that every call compares
_KEYS = (str, bytes)  # no numbers, as 1, 1.0 and True would share an entry
_BUILTINS = {  # pure functions
    *("abs", "all", "any", "bool", "bytes", "chr", "dict", "enumerate", "float", "frozenset", "int", "len"),
    *("isinstance", "list", "max", "min", "ord", "range", "reversed", "round", "set", "sorted", "str", "sum"),
    *("tuple", "zip", "Exception", "IndexError", "KeyError", "ValueError"),
}
_REFUSED = (
    *("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "LOAD_NAME"),
    "LOAD_BUILD_CLASS",
)
_ITEM_CHANGES = ("STORE_SUBSCR", "DELETE_SUBSCR")
_CHANGING = {
    *("setattr", "delattr", "__setattr__", "__delattr__", "__setitem__", "__delitem__", "add", "append"),
    *("clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort"),
    "update",
}
_ODD_FLAGS = 0x2AC  # code with *args or **kwargs, generators, coroutines
_DEEPEST = 5


class Memo:
    """A dict at a path that is a memo according to its object's classes, and its entries at that time.

    `names` are its attribute, and the other attributes that its filling method reads. `own` are the functions
    of these classes.
    """

    def __init__(
        self, path: str, value: dict[Any, Any], names: set[str], own: list[types.FunctionType]
    ) -> None:
        self.path, self.value = path, value
        self._names, self._own, self._count = names, set(map(id, own)), 0
        self._take(dict(value))

    @computed_once
    def data(self) -> bytes:
        """The part of the key: a digest of the entries when first seen, or at the last `count`."""
        return digest([Encoder().encode(self._entries, self.path)])

    def count(self) -> None:
        """Make all entries accepted so far part of the key."""
        vars(self).pop("data", None)

    def is_named_by(self, function: types.FunctionType) -> bool:
        """Whether a function outside of these classes names the dict, or what its method reads."""
        return id(function) not in self._own and any(_names(function, name) for name in self._names)

    def same(self) -> bool:
        """Whether nothing was added or removed, and the first entries are unchanged."""
        try:
            return len(self.value) == self._count and alike(_first(self.value, _COMPARED), self._start)
        except RuntimeError:  # another thread is adding to it at this moment
            return False

    def accept(self) -> bool:
        """Accept entries that a forward added, with an unchanged key; False if anything else changed."""
        now, count = dict(self.value), max(0, self._count)
        before, after = _first(self._entries, count), _first(now, count)
        is_kept = len(before) == len(after) and (all(map(is_, before, after)) or alike(before, after))
        if not (self._count >= 0 and is_kept and is_memo(dict(islice(now.items(), count, None)))):
            self._count = -1  # it is read again
            return False
        self._take(now)
        return True

    def _take(self, entries: dict[Any, Any]) -> None:
        self._entries, self._count, self._start = entries, len(entries), _first(entries, _COMPARED)


def memos_of(value: Any, state: Mapping[str, Any], path: str, texts: CompiledTexts) -> dict[str, Memo]:
    """The attributes of an object, at `path`, that are memos; `state` has all of its attributes."""
    found: dict[str, Memo] = {}
    dicts = {name: one for name, one in state.items() if type(one) is dict}
    scopes = [vars(base) for base in type(value).__mro__[:-1]]
    raw = [one for scope in scopes for one in list(scope.values())] if dicts else []
    own = [function for one in raw for function in functions_in(one)]
    used = [one for one in own if one.__name__ != "__init__"]
    for name, memo in dicts.items():
        users = [one for one in used if _names(one, name)]
        is_method = len(users) == 1 and any(scope.get(users[0].__name__) is users[0] for scope in scopes)
        is_computed = any(name in scope or "__getattribute__" in scope for scope in scopes)
        if not is_method or is_computed or not _is_filler(users[0], name, texts) or not is_memo(dict(memo)):
            continue
        reads = _pure_reads(users[0], users[0].__code__.co_varnames[0])
        if reads is None or any(one not in state or not _is_data(state[one]) for one in reads - {name}):
            continue
        if not any(_may_change(one, read) for one in used if one is not users[0] for read in reads):
            found[name] = Memo(f"{path}.{name}", memo, reads, own)
    return found


def is_memo(value: dict[Any, Any]) -> bool:
    """Whether the keys of a dict are texts or bytes, and its values immutable."""
    return all(type(key) in _KEYS and is_plain(one) for key, one in value.items())


def _first(value: dict[Any, Any], count: int) -> list[Any]:
    return [*islice(value, count), *islice(value.values(), count)]


def _is_data(value: Any) -> bool:
    if type(value) is dict:
        return all(map(is_plain, chain(value, value.values())))
    return all(map(is_plain, value)) if type(value) in (list, set, frozenset) else is_plain(value)


def _names(function: types.FunctionType, name: str) -> bool:
    """Whether code uses this name, or has it in a text such as ``"tokenizer.cache"``."""
    constants = [one for code in code_objects(function.__code__) for one in code.co_consts]
    constants += [inner for one in constants if isinstance(one, (tuple, frozenset)) for inner in one]
    attribute = re.compile(rf"[\w\]{{]\.{name}\b")  # as in ``"{0.cache}"``
    is_said = any(isinstance(one, str) and (one == name or attribute.search(one)) for one in constants)
    return is_said or name in names_in(function.__code__)


def _may_change(function: types.FunctionType, name: str) -> bool:
    """Whether code that uses this name may assign to it, or change its value."""
    if not _names(function, name):
        return False
    steps = [step for code in code_objects(function.__code__) for step in dis.get_instructions(code)]
    is_set = any(
        step.opname in _ITEM_CHANGES or (step.opname in _REFUSED and step.argval == name) for step in steps
    )
    return is_set or not _CHANGING.isdisjoint(names_in(function.__code__))


def _is_filler(function: types.FunctionType, name: str, texts: CompiledTexts) -> bool:
    """Whether a method of one argument returns the memo's entry for it, else computes and stores it."""
    code, source = function.__code__, sourcecode.function_source(function, texts)
    if source is None or code.co_argcount != 2 or code.co_kwonlyargcount or function.__dict__:
        return False
    node: Any = sourcecode.parse(source).body[0]
    own, key = code.co_varnames[:2]
    memo, body = f"{own}.{name}", node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = [ast.unparse(one) for one in body]
    result = lines[-1].removeprefix("return ")
    is_kept = result.isidentifier() and [f"{memo}[{key}] = {result}", f"return {result}"] == lines[-2:]
    is_known = f"if {key} in {memo}:\n    return {memo}[{key}]" in lines[:-2]
    is_rebound = any(
        isinstance(one, ast.Name) and one.id in (own, key) and not isinstance(one.ctx, ast.Load)
        for one in ast.walk(node)
    )
    uses = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == name]
    return is_known and is_kept and len(uses) == 3 and not is_rebound


def _pure_reads(function: types.FunctionType, own: str = "", depth: int = 0) -> set[str] | None:
    """The attributes of `own` that code reads; None if it depends on anything else but its arguments."""
    code, reads = function.__code__, set[str]()
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    is_odd = code.co_freevars or code.co_flags & _ODD_FLAGS or not all(map(is_plain, defaults))
    if is_odd or any(name.startswith("__") for name in names_in(code)):
        return None
    for inner in code_objects(code):
        steps = steps_of(inner)
        for start, end in chains_in(steps):
            step, name = steps[start], steps[start].argval
            is_cell = step.opname.startswith("LOAD_FAST") and name in inner.co_cellvars  # for a lambda
            if step.opname in _REFUSED:
                return None
            if name == own and step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and not is_cell:
                if end == start + 1:
                    return None  # the object itself
                reads.add(steps[start + 1].argval)
            elif step.opname == "LOAD_GLOBAL" and (name not in _BUILTINS or name in function.__globals__):
                called = function.__globals__.get(name)
                if not isinstance(called, types.FunctionType) or end > start + 1 or depth == _DEEPEST:
                    return None
                if _pure_reads(called, "", depth + 1) is None:
                    return None
    return reads
