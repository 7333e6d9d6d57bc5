"""Names that a function assigns for others to read: counters, kept attention maps.

They are not part of what the function computes with, as long as it does not read what an earlier call
has left in them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchcache2.identity.compiled import parse

__all__ = ["assigned_for_others"]

_Names = set[str]
_UNCERTAIN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match, ast.Delete)


def assigned_for_others(source: str, helpers: Iterable[str] = ()) -> tuple[_Names, _Names]:
    """Attributes of its first argument and outer variables that a function assigns, and never reads first.

    Parameters
    ----------
    source : str
        Source of the function, without indentation.
    helpers : iterable of str
        Source of methods that it may call, which may read attributes as well. Attributes are left alone if
        one of these, or the function itself, does anything with its first argument but take attributes of it.

    Returns
    -------
    attributes, variables : set of str
        As in ``self.name = …`` and ``self.name += 1``; and as in ``global name; name += 1``.
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


def _parse(source: str) -> ast.FunctionDef | None:
    try:
        body = parse(source).body
    except SyntaxError:
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) else None


def _takes_attributes_only(function: ast.FunctionDef) -> bool:
    """Whether the first argument is only used as in ``self.name``, and not by name of a text."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    first = arguments[0].arg if arguments else None
    owners = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return first is not None and all(
        id(node) in owners for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == first
    )


class _Scan:
    """Follows a function's statements in order, and notes what is read before it is surely assigned."""

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
                # It may not run to its end, or not run at all: nothing counts as assigned by it.
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
