"""How code uses names: which it names, and what it reads from each variable and attribute, or only writes.

Bytecode tells the globals with their attributes, and the imports. Source tells what
is read: a counter, a list that is only appended to, or an attention map kept for a plot changes no output.
Of a configuration, only fields that code reads count. Attributes are identified by name alone, whatever their
object, as an object may be reached under many names.
"""

from __future__ import annotations

import ast
import dis
import importlib.util
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchcache2.core.errors import attribute
from torchcache2.identity.sourcecode import code_objects, names_in, parse

_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_TAKING = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"))


class Names(NamedTuple):
    """What code names."""

    chains: list[tuple[str, ...]]  # globals and their attributes, as ``(name, attr, …)``
    imports: list[str]  # imports at run time, with imported names: ``..package.name``


def names_of(code: types.CodeType) -> Names:
    """The names in code and in its nested code."""
    chains, imports = set[tuple[str, ...]](), set[str]()
    for inner in code_objects(code):
        if _TAKING.isdisjoint(inner.co_code[::2]):  # most small functions use no name, and `dis` is slow
            continue
        steps = [step for step in dis.get_instructions(inner) if step.opname not in _SKIPPED]
        imported = ""
        for start, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                imported = "." * steps[start - 2].argval + str(step.argval)
                imports.add(imported)
            elif step.opname == "IMPORT_FROM":
                imports.add(f"{imported}{'' if imported.endswith('.') else '.'}{step.argval}")
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                taken = takewhile(lambda one: one.opname in _ATTRIBUTES, steps[start + 1 :])
                chains.add((str(step.argval), *[str(one.argval) for one in taken]))
    return Names(sorted(chains), sorted(imports))


def resolved(name: str, package: str | None) -> list[str]:
    """The full name of a module imported in a package; empty if there is no such package."""
    if not name.startswith("."):
        return [name]
    try:
        return [importlib.util.resolve_name(name, package or None)] if package else []
    except ImportError:
        return []


_ALL = ""  # instead of an attribute: all of the value is read
_FILLING = ("append", "appendleft", "clear", "extend", "extendleft", "insert", "update", "__setitem__")
_ADDING = (*_FILLING, "add", "subtract")  # as statements only: tensors' methods return results
# These read objects in ways that names do not show.
_DYNAMIC = frozenset(
    (
        *("getattr", "hasattr", "vars", "dir", "locals", "globals", "eval", "exec", "attrgetter"),
        *("getmembers", "methodcaller", "getattr_static", "_getframe"),
        *("currentframe", "__dict__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__"),
        *("__getstate__", "__reduce__", "__reduce_ex__", "__closure__", "__globals__"),
    )
)
_PLAIN = (bool, int, float, complex, str, bytes)
_MAPPINGS = (dict, Counter, OrderedDict, defaultdict)
_CONTAINERS = (list, set, deque, *_MAPPINGS)
# Code in these may run at another time than the code around them.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Uses(NamedTuple):
    """How a function uses names: ``name`` is a variable, ``.name`` an attribute of any object.

    A variable or attribute does not count as read if the function has assigned or cleared it before.
    """

    # The attributes read from it; an empty name if it is used in another way.
    reads: Mapping[str, Collection[str]]
    assigned: set[str]  # ``global name; name = …``, ``self.name = …``, ``self.name += 1``
    added: set[str]  # ``self.name += 1``, ``name.append(1)``; ``name[]`` of ``name[key] = …``; ``name.clear``
    is_dynamic: bool = False  # it reads attributes by computed names
    passes_self: bool = False  # it uses its first argument other than for attributes
    refilled: Collection[str] = ()  # names that it assigns or clears, then reads
    collected: Collection[str] = ()  # names that it writes as a hook, to be read later
    others: Collection[str] = ()  # attributes that unknown code may read

    def read_of(self, key: str) -> set[str]:
        """The attributes read from a variable or attribute; empty if it is not read."""
        is_named = key.startswith(".") and key[1:] in self.others
        return {*self.reads.get(key, ()), *((_ALL,) if is_named else ())}

    def only_writes(self, key: str, value: Any) -> bool:
        """Whether nothing depends on a variable or attribute, whose value is `value` now."""
        if self.is_dynamic or self.read_of(key) or (key in self.collected and key not in self.refilled):
            return False
        if f"{key}.clear" in self.added and type(value) not in (list, dict, set, OrderedDict):
            return False  # others have more state, such as a default
        if f"{key}[]" in self.added and type(value) not in _MAPPINGS:
            return False
        # Adding to other types may run the user's code.
        is_passive = is_plain(value) or type(value) in _CONTAINERS or isinstance(value, Tensor)
        return is_passive if key in self.added else key in self.assigned


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a bool or None, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in _PLAIN


def has_fields(value: Any, names: set[str]) -> bool:
    """Whether attributes are plain fields of an object or class, not computed by code."""
    kind = type(value)
    bases = kind.__mro__[:-1] if kind is not type else ()
    try:
        fields = object.__getattribute__(value, "__dict__") if kind is not type else vars(value)
    except Exception:
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
    """A private name as its class's code spells it."""
    is_mangled = "__" in name and name.startswith("_") and not name.startswith("__") and "__" in name[1:]
    return "__" + name[1:].partition("__")[2] if is_mangled else name


def taken_by(code: types.CodeType) -> set[str]:
    """Every name that code takes, and those in its texts."""
    texts = [text for inner in code_objects(code) for one in inner.co_consts for text in _texts(one)]
    return set(map(unmangled, names_in(code).union(texts)))


def _texts(constant: object) -> Iterator[str]:
    """The names in a text, as in ``"name"`` and ``"name.attribute"``."""
    if isinstance(constant, str):
        parts = constant.split(".")
        if all(part.isidentifier() for part in parts):  # most texts are sentences
            yield from map(unmangled, parts)
    elif isinstance(constant, (tuple, frozenset)):
        for one in constant:
            yield from _texts(one)


def uses_of(code: types.CodeType, source: str) -> Uses:
    """The uses in a function and its nested code; `source` is without indentation."""
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
    return Uses(reads, set(), set(), not _DYNAMIC.isdisjoint(names), passes_self=True)


class _Scan:
    """Follows a function's statements, and notes names that may be read before they are assigned."""

    def __init__(self, function: Any) -> None:
        self._reads: dict[str, set[str]] = {}
        self._assigned: set[str] = set()
        self._added: set[str] = set()
        self._refilled: set[str] = set()
        nodes = list(ast.walk(function))
        # The pattern's class decides which attributes it reads.
        self._is_dynamic = any(isinstance(node, ast.MatchClass) for node in nodes)
        self._outer = {n for one in nodes if isinstance(one, (ast.Global, ast.Nonlocal)) for n in one.names}
        arguments = [*function.args.posonlyargs, *function.args.args]
        self._first = arguments[0].arg if arguments else None
        bound = [getattr(node, field, None) for node in nodes for field in ("arg", "name", "asname", "rest")]
        bound += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self._passes_self = bound.count(self._first) > 1
        if self._passes_self:
            self._first = None  # the name may stand for something else
        self._visit(function, set())

    def uses(self) -> Uses:
        flags = self._is_dynamic, self._passes_self
        return Uses(self._reads, self._assigned, self._added, *flags, self._refilled)

    def _visit_all(self, nodes: list[Any], assigned: set[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self._visit(node, assigned)

    def _visit(self, node: Any, assigned: set[str], taken: str | None = _ALL) -> None:
        """Note how code uses names; those in `assigned` have been assigned or cleared before.

        `taken` is the attribute read from this expression; None if something is added to it.
        """
        if isinstance(node, (ast.Name, ast.Attribute)):
            self._name(node, assigned, taken)
            return
        if isinstance(node, ast.Constant):
            for text in _texts(node.value):
                self._read(f".{text}")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            self._adds(node.value, assigned, "[]")
            if not isinstance(node.slice, ast.Constant):
                self._visit(node.slice, assigned)
            return
        elif isinstance(node, ast.Call):
            if self._call(node, assigned):
                return
        elif isinstance(node, (ast.Expr, ast.Lambda)):
            if self._addition(node, assigned):
                return
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
            self._added.add(_key(node.target))
        elif isinstance(node, ast.alias):
            self._is_dynamic |= node.name.rpartition(".")[2] in _DYNAMIC
        before = set[str]() if isinstance(node, _LATER) else assigned
        for _, field in ast.iter_fields(node):
            if isinstance(field, list):  # a block may not run, or may end early
                self._visit_all(field, set(before))
            else:
                self._visit_all([field], before)
        if isinstance(node, ast.Assign):  # other statements may not reach their assignments
            assigned |= {
                own for target in node.targets for inner in ast.walk(target) if (own := self._stored(inner))
            }

    def _name(self, node: Any, assigned: set[str], taken: str | None) -> None:
        key, own = _key(node), self._own(node)
        self._is_dynamic |= key.removeprefix(".") in _DYNAMIC
        if isinstance(node.ctx, ast.Store):
            self._assigned |= {own} if own else set()
        elif isinstance(node.ctx, ast.Del):
            self._read(key)
        elif taken is None:
            self._added.add(key)
        elif key in assigned and (own or isinstance(node, ast.Name)):
            self._refilled.add(key)
        else:
            self._read(key, taken)
        if isinstance(node, ast.Name):
            self._passes_self |= node.id == self._first
        elif not (isinstance(node.value, ast.Name) and node.value.id == self._first):
            attribute = unmangled(node.attr) if isinstance(node.ctx, ast.Load) else _ALL
            self._visit(node.value, assigned, attribute)

    def _call(self, node: ast.Call, assigned: set[str]) -> bool:
        """Visit a call of ``getattr`` with a constant name."""
        called, args = node.func, list[Any](node.args)
        if not (isinstance(called, ast.Name) and called.id in ("getattr", "hasattr") and len(args) > 1):
            return False
        name = getattr(args[1], "value", None)
        if not isinstance(args[1], ast.Constant) or not isinstance(name, str):
            return False
        self._visit(args.pop(0), assigned, name)
        self._visit_all([*args, *node.keywords], assigned)
        return True

    def _addition(self, node: Any, assigned: set[str]) -> bool:
        """Visit code that only adds to a value, such as the statement ``self.seen.append(x)``."""
        is_statement = isinstance(node, ast.Expr)
        call = node.value if is_statement else node.body
        called = call.func if isinstance(call, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr not in (
            _ADDING if is_statement else _FILLING
        ):
            return False
        before = assigned if is_statement else set[str]()
        self._visit_all([*call.args, *call.keywords, *([] if is_statement else [node.args])], before)
        self._adds(called.value, before, "[]" if called.attr == "__setitem__" else "")
        is_known = isinstance(called.value, ast.Name) or self._own(called.value)
        if called.attr == "clear" and is_known:
            self._added.add(f"{_key(called.value)}.clear")
            before.add(_key(called.value))
        return True

    def _adds(self, node: Any, assigned: set[str], what: str) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            self._added.add(f"{_key(node)}{what}")
        self._visit(node, assigned, None)

    def _read(self, key: str, taken: str = _ALL) -> None:
        self._reads.setdefault(key, set()).add(taken)

    def _own(self, node: Any) -> str:
        """The key of an outer variable, or of an attribute of the first argument; empty for others."""
        if isinstance(node, ast.Name):
            return node.id if node.id in self._outer else ""
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return _key(node) if is_own and node.value.id == self._first else ""

    def _stored(self, node: Any) -> str:
        return self._own(node) if isinstance(getattr(node, "ctx", None), ast.Store) else ""


def _key(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else f".{unmangled(node.attr)}"


class UseTable:
    """The uses in all code of a walk that the forward may reach.

    A module's method counts as reached only if reached code names it: others may read what the forward only
    writes.
    """

    def __init__(self) -> None:
        self.others: set[str] = set()  # names in code of installed packages: attributes they may read
        self.is_dynamic = False  # whether some code is unknown
        self.root: type | None = None  # a class whose methods may all be called from outside
        self._codes: list[tuple[Uses, str | None, type | None]] = []
        self._total: tuple[tuple[int, int, bool], Uses, set[type]] | None = None

    def add(self, uses: Uses, name: str | None = None, owner: type | None = None) -> None:
        """Add the code of a function, or of a method of a class."""
        self._codes.append((uses, name, owner))

    def meet(self, value: Any) -> None:
        """Note a class or function that code may call under any name, and that may read attributes."""
        if attribute(value, "__name__") in _DYNAMIC:
            self.is_dynamic = True

    def of(self, kind: type) -> Uses:
        """All uses of attributes, for instances of a class."""
        state = len(self._codes), len(self.others), self.is_dynamic
        if self._total is None or self._total[0] != state:
            self._total = state, *self._add_up()
        _, total, passing = self._total
        return total._replace(is_dynamic=True) if passing.intersection(kind.__mro__) else total

    def _add_up(self) -> tuple[Uses, set[type]]:
        """The uses in reached code, and the classes with a method that passes on its object."""
        reads: dict[str, set[str]] = {}
        refilled, collected = set[str](), set[str]()
        total = Uses(reads, set(), set(), self.is_dynamic, False, refilled, collected, self.others)
        waiting, passing, count = self._codes, set[type](), -1
        while len(waiting) != count:
            count, left = len(waiting), []
            for one in waiting:
                uses, name, owner = one
                if not self._is_reached(name, owner, total):
                    left.append(one)
                    continue
                for key, taken in uses.reads.items():
                    reads.setdefault(key, set()).update(taken)
                total.assigned.update(uses.assigned)
                total.added.update(uses.added)
                refilled.update(uses.refilled)
                collected.update(uses.collected)
                total = total._replace(is_dynamic=total.is_dynamic or uses.is_dynamic)
                if uses.passes_self and owner is not None:
                    passing.add(owner)
            waiting = left
        return total, passing

    def _is_reached(self, name: str | None, owner: type | None, total: Uses) -> bool:
        """Whether the forward may call a function, or a method of a class."""
        if name is None or owner is None or not issubclass(owner, nn.Module):
            return True
        if name == "__init__":  # its results are read, so it matters only if code makes another module
            makers = (owner.__name__, f".{owner.__name__}", "type", ".__class__")
            return any(map(total.read_of, makers))
        if self.root is not None and issubclass(self.root, owner):
            return True
        return name.startswith("__") or hasattr(nn.Module, name) or bool(total.read_of(f".{unmangled(name)}"))
