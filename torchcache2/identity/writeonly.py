"""Names that a function assigns for others to read, such as counters and kept attention maps.

The output does not depend on them, as long as the function does not read what an earlier call has left in
them.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable

from torch import nn

from torchcache2.identity.compiled import code_objects, names_in, parse
from torchcache2.identity.marks import original
from torchcache2.identity.sourcecode import function_source, origin

__all__ = ["assigned_by_forward", "assigned_for_others"]

_Names = set[str]
_UNCERTAIN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match, ast.Delete)


def assigned_for_others(source: str, helpers: Iterable[str] = ()) -> tuple[_Names, _Names]:
    """Attributes of its first argument, and outer variables, that a function assigns before it reads them.

    Parameters
    ----------
    source : str
        Source of the function, without indentation.
    helpers : iterable of str
        Source of methods that it may call, and that may read attributes too. No attributes are returned if
        one of these, or the function itself, does more with its first argument than take attributes of it.

    Returns
    -------
    attributes, variables : set of str
        Attributes as in ``self.name = …`` or ``self.name += 1``; variables as in ``global name; name += 1``.
    """
    function = _parse(source)
    if function is None:
        return set(), set()
    scan = _Scan(function)
    scan.block(function.body, set())
    parsed = list(map(_parse, helpers))
    for helper in filter(None, parsed):
        inner = _Scan(helper)
        inner.block(helper.body, set())
        scan.read |= {name for name in inner.read | inner.stored if name.startswith(".")}
    safe = scan.stored - scan.read
    if None in parsed or not all(_takes_attributes_only(part) for part in (function, *parsed) if part):
        safe = {name for name in safe if not name.startswith(".")}
    return (
        {name[1:] for name in safe if name.startswith(".")},
        {name for name in safe if not name.startswith(".")},
    )


def assigned_by_forward(kind: type) -> set[str]:
    """Attributes that the forward of a class assigns, and that no method that it calls reads first."""
    text = {method: function_source(method) or "" for method in _reached_by_forward(kind) or ()}
    names: set[str] = set()
    for forward in [method for method in text if method.__name__ == "forward"]:
        others = [text[other] for other in text if other is not forward]
        names |= assigned_for_others(text[forward], others)[0]
    # An attribute may also be read by its name as a text, as in ``getattr(self, "calls")``.
    return names - {constant for method in text for constant in _texts(method)}


def _reached_by_forward(kind: type) -> list[types.FunctionType] | None:
    """The forwards of a class, and the methods that they may call; None if that cannot be told."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    if any(origin(base) in ("torch", "builtin") for base in bases):
        return None  # methods of such a base may read any attribute
    if any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in bases):
        return None
    reached: list[types.FunctionType] = []
    queue = ["forward"]
    seen = set()
    while queue:
        name = queue.pop()
        seen.add(name)
        for value in [vars(base)[name] for base in bases if name in vars(base)]:
            method = value.fget if isinstance(value, property) else value
            method = original(method) if isinstance(method, types.FunctionType) else method
            if isinstance(method, types.FunctionType) and not hasattr(method, "__wrapped__"):
                reached.append(method)
                found = {*_texts(method)}
                found |= names_in(method.__code__)
                queue += found - seen
            elif {"__call__", "__get__"} & set(dir(type(method))):
                return None
    return reached


def _texts(function: types.FunctionType) -> set[str]:
    codes = code_objects(function.__code__)
    return {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}


def _parse(source: str) -> ast.FunctionDef | None:
    try:
        body = parse(source).body
    except SyntaxError:
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) else None


def _takes_attributes_only(function: ast.FunctionDef) -> bool:
    """Whether the first argument is used only as in ``self.name``."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    first = arguments[0].arg if arguments else None
    owners = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return first is not None and all(
        id(node) in owners for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == first
    )


class _Scan:
    """Follows the statements of a function, and notes names that may be read before they are assigned."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args]
        self._first = arguments[0].arg if arguments else None
        self._outer = {
            name
            for node in ast.walk(function)
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }
        self.stored: _Names = set()
        self.read: _Names = set()

    def block(self, statements: list[ast.stmt], assigned: _Names) -> None:
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
                handlers = [part for part in block if isinstance(part, ast.ExceptHandler)]
                for handler in handlers:
                    self.block(handler.body, set(assigned))
                if not handlers:
                    # The block may not run, and under a `with` it may end early.
                    self.block(block, set(assigned))

    def _expressions(self, node: ast.AST, assigned: _Names) -> None:
        stored, plain = set(), not isinstance(node, ast.AugAssign)
        for inner in ast.walk(node):
            name = self._name(inner)
            if name is None:
                continue
            if isinstance(inner.ctx, ast.Load):  # type: ignore[attr-defined]
                if name not in assigned:
                    self.read.add(name)
            else:
                stored.add(name)
        self.stored |= stored
        if plain and not (isinstance(node, ast.AnnAssign) and node.value is None):
            assigned |= stored

    def _name(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name) and node.id in self._outer:
            return node.id
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return f".{node.attr}" if is_own and node.value.id == self._first else None  # type: ignore
