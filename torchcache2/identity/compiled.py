"""What a source file compiles to, and whether code that runs is what the file says now."""

from __future__ import annotations
import __future__

import ast
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchcache2.core.process import ProcessLock

__all__ = [
    "CompiledText",
    "CompiledTexts",
    "code_objects",
    "is_rewritten",
    "names_in",
    "parse",
]

_T = TypeVar("_T")
_PARSING = ProcessLock()
_PARSED_AGAIN = 10
_MOST_TEXTS = 1000
_BEGINS = re.compile(r"[^\s#)\]}]")  # the first character of a line that begins an outermost statement
_IMPORTS = re.compile(r"import [\w., ]+(#|$)|from [\w.]+ import ")
_WORD = re.compile(r"[.'\"](\w+)")
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
_FIELDS = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)


class CompiledText:
    """What a text compiles to."""

    def __init__(self, code: types.CodeType) -> None:
        self.codes: dict[str, list[types.CodeType]] = {}  # by name
        for inner in code_objects(code):
            self.codes.setdefault(inner.co_name, []).append(inner)

    def has(self, code: types.CodeType, above: int) -> bool:
        """Whether the text, with `above` lines above it in its file, has this code at the same line."""
        return any(
            other.co_firstlineno + above == code.co_firstlineno and _same(other, code)
            for other in self.codes.get(code.co_name, ())
        )


class CompiledTexts:
    """What texts compile to. A text is compiled once; after a thousand texts, all are forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], tuple[str, CompiledText | None]] = {}
        self._words: dict[tuple[str, int, int], frozenset[str]] = {}
        self._read: dict[tuple[Callable[..., Any], int], tuple[tuple[Any, ...], Any]] = {}

    def once(self, read: Callable[..., _T], code: types.CodeType, *more: Any) -> _T:
        """What `read` returns for code, which is called again only if the other arguments have changed."""
        key = read, id(code)
        known = self._read.get(key)
        if known is None or known[0] != (code, *more):
            if len(self._read) >= _MOST_TEXTS:
                self._read.clear()
            known = self._read[key] = (code, *more), read(code, *more)
        found: _T = known[1]
        return found

    def words(self, file: str) -> frozenset[str]:
        """What a file takes by name: attributes, and names that begin a text."""
        try:
            status = os.stat(file)
            key = file, status.st_mtime_ns, status.st_size
            if key not in self._words:
                with open(file, encoding="utf-8", errors="replace") as opened:
                    self._words[key] = frozenset(_WORD.findall(opened.read()))
            return self._words[key]
        except OSError:
            return frozenset()

    def have(self, code: types.CodeType, lines: list[str]) -> bool:
        """Whether code is what these lines of its file compile to.

        Tries the statement that the code is in first, for compiling a whole file takes many times as long.
        It is compiled below the imports of its file: calls on an imported name compile to other
        instructions than calls on another global do.
        """
        first, last = _statement(lines, code.co_firstlineno - 1)
        imports = _imports(lines[:first])
        for above, text in (first - len(imports), [*imports, *lines[first:last]]), (0, lines):
            # Cells of a notebook have the ``__future__`` imports of earlier cells, as the flags say.
            found = self.get(code.co_filename, "".join(text), code.co_flags, above)
            if found is not None and found.has(code, above):
                return True
        return False

    def get(self, file: str, text: str, flags: int = 0, above: int = 0) -> CompiledText | None:
        """What a text compiles to, in a file with `above` lines above it; None if it does not compile."""
        key = file, flags & _FUTURE, above
        known = self._known.get(key)
        if known is not None and known[0] == text:
            return known[1]
        if len(self._known) >= _MOST_TEXTS:
            self._known.clear()
        found = _compiled(file, text, flags & _FUTURE)
        self._known[key] = text, found
        return found


def _statement(lines: list[str], position: int) -> tuple[int, int]:
    """Where what seems to be the outermost statement around a line begins, and where it ends."""
    first = min(position, len(lines) - 1)
    while first > 0 and not _BEGINS.match(lines[first]):
        first -= 1
    last = first + 1
    while last < len(lines) and (lines[last - 1].startswith("@") or not _BEGINS.match(lines[last])):
        last += 1
    return max(first, 0), last


def _imports(lines: list[str]) -> list[str]:
    """The lines that import something for the whole file, as far as that is easily told."""
    found: list[str] = []
    is_open = False  # within parentheses
    for line in lines:
        if is_open or _IMPORTS.match(line):
            found.append(line)
            is_open = ")" not in line if is_open else "(" in line and ")" not in line
    return found


def _compiled(file: str, text: str, flags: int) -> CompiledText | None:
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in the cells of a notebook
    try:
        with warnings.catch_warnings():  # the first compilation has shown these warnings already
            warnings.simplefilter("ignore")
            code = compile(text, file, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return CompiledText(code)


def _same(left: types.CodeType, right: types.CodeType) -> bool:
    """Whether two code objects do the same; Python's own comparison looks at lines and columns too."""
    return all(getattr(left, name) == getattr(right, name) for name in _FIELDS) and _alike(
        left.co_consts, right.co_consts
    )


def _alike(left: Any, right: Any) -> bool:
    """Whether two constants of code are the same, and of one type."""
    if type(left) is not type(right):
        return False
    if isinstance(left, types.CodeType):
        return _same(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, frozenset):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return repr(left) == repr(right)  # 0.0 and -0.0 are equal


def is_rewritten(code: types.CodeType) -> bool:
    """Whether pytest has rewritten the assertions in a function, so that no text compiles to it."""
    names = {name for inner in code_objects(code) for name in (*inner.co_names, *inner.co_varnames)}
    return any(name.startswith("@py") for name in names)


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def names_in(code: types.CodeType) -> set[str]:
    """Every name that code takes: of a global, an attribute, or an import."""
    return {name for inner in code_objects(code) for name in inner.co_names}


def parse(text: str) -> ast.Module:
    """The syntax tree of source code; safe under threads.

    Before Python 3.12, the parser counts its depth for all threads together, and raises a `SystemError` if
    the count is wrong in the end.
    """
    with _PARSING():
        for _ in range(_PARSED_AGAIN):
            try:
                return ast.parse(text)
            except SystemError:  # code outside of this lock has parsed at the same time
                pass
        return ast.parse(text)
