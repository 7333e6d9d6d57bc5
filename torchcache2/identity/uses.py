"""How code uses names: what it reads of each variable and attribute, and which it only writes.

A counter, a list that is only appended to, or an attention map that is kept for a plot changes no output. Of
a configuration, only those fields count that code takes. Attributes are told apart by their names alone,
whatever object they are taken of, as an object may have any number of names itself.
"""

from __future__ import annotations

import ast
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchcache2.identity.sourcecode import code_objects, names_in, parse

__all__ = ["UseTable", "Uses", "has_fields", "is_passive", "is_plain", "taken_by", "unmangled", "uses_of"]

_ALL = ""  # in place of an attribute: all of the value is read
_FILLING = ("append", "appendleft", "clear", "extend", "extendleft", "insert", "update", "__setitem__")
_ADDING = (*_FILLING, "add", "subtract")  # as statements, as those of tensors return something
# What is read of an object by these is not told by names.
_DYNAMIC = frozenset(
    (
        *(
            "getattr",
            "hasattr",
            "vars",
            "dir",
            "locals",
            "globals",
            "eval",
            "exec",
            "attrgetter",
            "getmembers",
        ),
        *("methodcaller", "format", "format_map", "getattr_static", "_getframe", "currentframe", "__dict__"),
        *("__getattribute__", "__getattr__", "__setattr__", "__delattr__"),
        *("__getstate__", "__reduce__", "__reduce_ex__", "__closure__", "__globals__"),
    )
)
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, complex, str, bytes)
_MAPPINGS = (dict, Counter, OrderedDict, defaultdict)
_UNCERTAIN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match, ast.Delete)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Uses(NamedTuple):
    """What a function does with names: ``name`` is a variable, ``.name`` an attribute of any object.

    A variable or attribute that is read after the function itself has assigned or cleared it does not count
    as read.
    """

    # The attributes that are taken of it; with an empty name if it is used otherwise.
    reads: Mapping[str, Collection[str]]
    assigned: set[str]  # ``global name; name = …``, ``self.name = …``, ``self.name += 1``
    added: set[str]  # ``self.name += 1``, ``name.append(1)``, ``name[key] = …``
    is_dynamic: bool = False  # it reads attributes by computed names
    passes_self: bool = False  # it uses its first argument otherwise than to take attributes of it
    catches: bool = False  # it may go on after an exception, such as that of a key that is missing
    refilled: Collection[str] = ()  # what it assigns or clears, and reads afterwards
    collected: Collection[str] = ()  # what it writes as a hook, for whoever reads it later

    def only_writes(self, key: str, value: Any) -> bool:
        """Whether nothing depends on the value of a variable or attribute, which is `value` now."""
        if self.is_dynamic or key in self.reads or (key in self.collected and key not in self.refilled):
            return False
        if f"{key}.clear" in self.added and type(value) not in (list, dict, set, OrderedDict):
            return False  # some have more than their content, such as a default
        if f"{key}[]" in self.added and (type(value) not in _MAPPINGS or self.catches):
            return False  # whether an element can be written depends on the content
        return is_passive(value) if key in self.added else key in self.assigned


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a bool or None, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in _PLAIN


def is_passive(value: Any) -> bool:
    """Whether to add to a value runs no code of the user's."""
    return is_plain(value) or type(value) in _CONTAINERS or isinstance(value, Tensor)


def has_fields(value: Any, names: set[str]) -> bool:
    """Whether attributes are plain fields of an object or class, which no code computes."""
    kind = type(value)
    bases = kind.__mro__[:-1] if kind is not type else ()
    try:
        fields = object.__getattribute__(value, "__dict__") if kind is not type else vars(value)
    except AttributeError:
        return False
    if kind is not type:
        odd = (nn.Module, Tensor, types.ModuleType, types.FunctionType)
        is_ours = str(kind.__module__).partition(".")[0] == __name__.partition(".")[0]
        if issubclass(kind, odd) or type(fields) is not dict or is_ours:
            return False
        if any("__getattribute__" in vars(one) for one in bases if one is not types.SimpleNamespace):
            return False
    above = [vars(base)[name] for base in bases for name in names & vars(base).keys()]
    own = [fields[name] for name in names & fields.keys()] if kind is type else []
    return names <= fields.keys() and not any(hasattr(type(one), "__get__") for one in (*above, *own))


def unmangled(name: str) -> str:
    """A private name as it stands in the code of its class."""
    is_mangled = "__" in name and name.startswith("_") and not name.startswith("__") and "__" in name[1:]
    return "__" + name[1:].partition("__")[2] if is_mangled else name


def uses_of(code: types.CodeType, source: str) -> Uses:
    """The uses in a function, and in all code that is nested in it; `source` is without indentation."""
    try:
        body = parse(source).body
    except SyntaxError:
        body = []
    node: Any = body[0] if len(body) == 1 else None
    node = node.value if isinstance(node, ast.Expr) else node
    if isinstance(node, _FUNCTIONS):
        return _Scan(node).uses()
    names = taken_by(code).union(code.co_freevars)
    reads = {key: {_ALL} for name in names for key in (name, f".{name}")}
    return Uses(reads, set(), set(), not _DYNAMIC.isdisjoint(names), passes_self=True, catches=True)


def taken_by(code: types.CodeType) -> set[str]:
    """Every name that code takes, and those in its texts."""
    texts = [text for inner in code_objects(code) for one in inner.co_consts for text in _texts(one)]
    return set(map(unmangled, names_in(code).union(texts)))


def _texts(constant: object) -> Iterator[str]:
    """The names in a text, as in ``"name"``, ``"name.attribute"`` and ``"{0.name}"``."""
    if isinstance(constant, str):
        if "{" in constant:
            parts = re.findall(r"\w+", constant)
        else:  # most texts are sentences
            parts = [] if " " in constant else constant.split(".")
            parts = parts if all(part.isidentifier() for part in parts) else []
        yield from map(unmangled, parts)
    elif isinstance(constant, (tuple, frozenset)):
        for one in constant:
            yield from _texts(one)


class _Scan:
    """Follows the statements of a function, and notes names that may be read before they are assigned."""

    def __init__(self, function: Any) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args]
        self._first = arguments[0].arg if arguments else None
        self._owners: set[int] = set()  # ids of nodes of which an attribute is taken
        self._outer: set[str] = set()
        self._taken: dict[int, str] = {}  # by id of a node, the attribute that is all that is read of it
        self._written: set[int] = set()  # ids of nodes to which the code only adds
        # Ids of ``getattr`` with a constant name, and of keys that are only written.
        self._constant: set[int] = set()
        self._cleared: dict[int, str] = {}  # by id of a statement, what it clears
        self._refilled: set[str] = set()
        self._reads: dict[str, set[str]] = {}
        self._assigned: set[str] = set()
        self._added: set[str] = set()
        self._is_dynamic = self._passes_self = self._catches = False
        self._prepare(function)
        for part in (function.args, *getattr(function, "decorator_list", ())):
            self._expressions(part, set())
        if isinstance(function, ast.Lambda):
            self._expressions(function.body, set())
        else:
            self._block(function.body, set())

    def uses(self) -> Uses:
        flags = self._is_dynamic, self._passes_self, self._catches
        return Uses(self._reads, self._assigned, self._added, *flags, self._refilled)

    def _prepare(self, function: ast.AST) -> None:
        """Note nodes whose use depends on what is around them."""
        nodes = list(ast.walk(function))
        again = [getattr(node, field, None) for node in nodes for field in ("arg", "name", "asname", "rest")]
        again += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        if again.count(self._first) > 1:
            self._passes_self, self._first = True, None  # the name may stand for something else
        for node in nodes:
            self._catches |= _catches(node)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self._outer.update(node.names)
            elif isinstance(node, ast.Attribute):
                self._owners.add(id(node.value))
                if isinstance(node.ctx, ast.Load):
                    self._taken[id(node.value)] = unmangled(node.attr)
                if node.attr.startswith("format") and isinstance(node.value, ast.Constant):
                    self._constant.add(id(node))
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, (ast.Name, ast.Attribute)):
                    self._written.add(id(node.value))
                    self._added.add(f"{_key(node.value)}[]")
                    self._constant.add(id(node.slice))
            elif isinstance(node, ast.alias):
                self._is_dynamic |= node.name.rpartition(".")[2] in _DYNAMIC
            elif isinstance(node, (ast.Expr, ast.Lambda)):
                self._prepare_call(node, node.value if isinstance(node, ast.Expr) else node.body)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                name = node.args[1]
                is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
                if node.func.id in ("getattr", "hasattr") and is_text:
                    self._constant.add(id(node.func))
                    self._taken[id(node.args[0])] = name.value  # type: ignore[attr-defined]
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
                self._added.add(_key(node.target))

    def _prepare_call(self, node: ast.AST, call: ast.expr) -> None:
        """Note what a call adds to, if it is a statement, or all of a lambda."""
        called = call.func if isinstance(call, ast.Call) else None
        names = _ADDING if isinstance(node, ast.Expr) else _FILLING
        if not isinstance(called, ast.Attribute) or called.attr not in names:
            return
        self._written.add(id(called.value))
        if isinstance(called.value, (ast.Name, ast.Attribute)):
            if called.attr == "__setitem__":
                self._added.add(f"{_key(called.value)}[]")
            is_own = isinstance(called.value, ast.Name) or self._own(called.value) is not None
            if called.attr == "clear" and is_own:
                self._cleared[id(node)] = _key(called.value)

    def _block(self, statements: list[ast.stmt], assigned: set[str]) -> None:
        for statement in statements:
            blocks = [
                block
                for _, block in ast.iter_fields(statement)
                if isinstance(block, list) and block and isinstance(block[0], (ast.stmt, ast.ExceptHandler))
            ]
            if isinstance(statement, _UNCERTAIN):
                # This statement may be skipped or left halfway, so nothing counts as assigned by it.
                self._expressions(statement, set())
                continue
            if not blocks:
                self._expressions(statement, assigned)
                continue
            for name, field in ast.iter_fields(statement):
                if isinstance(field, ast.expr):
                    # The target of a loop is not assigned if there is nothing to loop over.
                    self._expressions(field, set(assigned) if name == "target" else assigned)
                elif name == "items":
                    for item in field:
                        self._expressions(item, assigned)
            for block in blocks:
                for part in block:
                    if isinstance(part, ast.ExceptHandler):
                        if part.type is not None:
                            self._expressions(part.type, set(assigned))
                        self._block(part.body, set(assigned))
                # The block may not run, and under a `with` it may end early.
                self._block([part for part in block if isinstance(part, ast.stmt)], set(assigned))

    def _expressions(self, node: ast.AST, assigned: set[str]) -> None:
        stored = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and id(inner) not in self._constant:
                for text in _texts(inner.value):
                    self._read(f".{text}")
            elif isinstance(inner, ast.MatchClass):
                self._is_dynamic |= bool(inner.patterns)  # the class says which attributes these are
                for name in inner.kwd_attrs:
                    self._read(f".{name}")
            elif isinstance(inner, (ast.Name, ast.Attribute)):
                own = self._own(inner)
                key = _key(inner)
                if isinstance(inner, ast.Name) and inner.id == self._first:
                    self._passes_self |= id(inner) not in self._owners
                if key.removeprefix(".") in _DYNAMIC and id(inner) not in self._constant:
                    self._is_dynamic = True
                if isinstance(inner.ctx, ast.Store):
                    if own is not None:
                        stored.add((id(inner), own))
                elif isinstance(inner.ctx, ast.Del):
                    self._read(key)
                elif id(inner) in self._written:
                    self._added.add(key)
                elif f"{key}.clear" in assigned and (own is not None or isinstance(inner, ast.Name)):
                    self._added.add(f"{key}.clear")
                    self._refilled.add(key)
                elif own is not None and own in assigned:
                    self._refilled.add(key)
                else:
                    self._read(key, self._taken.get(id(inner), _ALL))
        self._assigned |= {own for _, own in stored}
        if isinstance(node, ast.Assign):  # other statements and expressions may not come to it
            targets = {id(inner) for target in node.targets for inner in ast.walk(target)}
            assigned |= {own for place, own in stored if place in targets}
        elif id(node) in self._cleared:
            assigned.add(f"{self._cleared[id(node)]}.clear")

    def _read(self, key: str, taken: str = _ALL) -> None:
        self._reads.setdefault(key, set()).add(taken)

    def _own(self, node: ast.AST) -> str | None:
        """The key of an outer variable, or of an attribute of the first argument."""
        if isinstance(node, ast.Name):
            return node.id if node.id in self._outer else None
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return _key(node) if is_own and node.value.id == self._first else None  # type: ignore[attr-defined]


def _key(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else f".{unmangled(node.attr)}"


def _catches(node: ast.AST) -> bool:
    """Whether what comes after a statement may run after an exception in it."""
    if isinstance(node, ast.With):
        return not all(ast.unparse(item.context_expr).startswith("torch.") for item in node.items)
    return bool(getattr(node, "handlers", ()))


class UseTable:
    """The uses in all code of a walk, as far as the forward may reach it.

    A method of a module is not reached as long as no code that is reached names it: it may read what the
    forward only writes.
    """

    def __init__(self) -> None:
        self.others: set[str] = set()  # names in code of installed packages, which may read attributes
        self.is_dynamic = False  # whether there is code that nothing is known about
        self.root: type | None = None  # a class of which any method may be called from outside
        self._codes: list[tuple[Uses, str | None, type | None]] = []
        self._counted: set[str] = set()  # of `others`, those that are in `_base`, which has their keys
        self._base: dict[str, frozenset[str]] = {}
        self._total: tuple[tuple[int, int, bool], Uses, set[type]] | None = None

    def add(self, uses: Uses, name: str | None = None, owner: type | None = None) -> None:
        """Add the code of a function, or of a method of a class."""
        self._codes.append((uses, name, owner))

    def meet(self, value: Any) -> None:
        """Note a class or function that code may call by any name, and that may read attributes."""
        self.is_dynamic |= getattr(value, "__name__", "") in _DYNAMIC

    def of(self, kind: type) -> Uses:
        """All uses of attributes, for objects of a class."""
        state = len(self._codes), len(self.others), self.is_dynamic
        if self._total is None or self._total[0] != state:
            self._total = state, *self._add_up()
        _, total, passing = self._total
        if any(issubclass(kind, owner) for owner in passing):
            return total._replace(is_dynamic=True)
        return total

    def _add_up(self) -> tuple[Uses, set[type]]:
        """The uses in code that is reached, and the classes of which a method passes on the object itself."""
        new = self.others - self._counted  # there are thousands, and some more each time
        self._counted |= new
        self._base |= {f".{name}": frozenset((_ALL,)) for name in new}
        reads: dict[str, Collection[str]] = dict(self._base)
        waiting, reached, passing = self._codes, list[Uses](), set[type]()
        while True:
            due = [one for one in waiting if self._is_reached(*one[1:], reads)]
            if not due:
                break
            waiting = [one for one in waiting if not self._is_reached(*one[1:], reads)]
            for uses, _, owner in due:
                reached.append(uses)
                for key, taken in uses.reads.items():
                    reads[key] = {*reads.get(key, ()), *taken}
                if uses.passes_self and owner is not None:
                    passing.add(owner)
        return Uses(
            reads,
            set().union(*[uses.assigned for uses in reached]),
            set().union(*[uses.added for uses in reached]),
            self.is_dynamic or any(uses.is_dynamic for uses in reached),
            catches=any(uses.catches for uses in reached),
            refilled=set().union(*[uses.refilled for uses in reached]),
            collected=set().union(*[uses.collected for uses in reached]),
        ), passing

    def _is_reached(self, name: str | None, owner: type | None, reads: Collection[str]) -> bool:
        """Whether the forward may call a function, or a method of a class."""
        if name is None or owner is None or not issubclass(owner, nn.Module):
            return True
        if name == "__init__":  # what it has made of a module is read, so only another that it makes matters
            return any(one in reads for one in (owner.__name__, f".{owner.__name__}", "type", ".__class__"))
        if self.root is not None and issubclass(self.root, owner):
            return True
        return name.startswith("__") or hasattr(nn.Module, name) or f".{unmangled(name)}" in reads
