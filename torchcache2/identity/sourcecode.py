"""Where code comes from, and what its source says.

Code has one of four origins. *Project* code is the user's own: it is read function by function, and so
is everything that it names. Code of *installed* packages is covered by its file and the package's version,
*torch*'s and the standard library's (*builtin*) by name.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import linecache
import os
import sys
import sysconfig
import textwrap
import time
import types
from collections.abc import Iterator
from typing import Any, Literal

from xxhash import xxh3_128_hexdigest

from torchcache2.identity.compiled import CompiledTexts, is_rewritten, parse

__all__ = [
    "Origin",
    "Origins",
    "defining_module",
    "file_digest",
    "file_text",
    "function_source",
    "instructions",
    "is_known_root",
    "is_newer",
    "is_site",
    "loaded_differs",
    "origin",
    "package_version",
]

Origin = Literal["project", "installed", "torch", "builtin"]

_LOADED = time.time()  # an installed file that is older than this has not changed since it was loaded
_OURS = __name__.partition(".")[0]
_SITE = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_SITE_NAMES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def defining_module(obj: Any) -> str:
    """Name of the module that the code of a class, function or module stands in."""
    if isinstance(obj, types.ModuleType):
        return obj.__name__
    if isinstance(obj, types.FunctionType):
        # Unlike `__module__`, `functools.wraps` does not copy this to a wrapper.
        return str(obj.__globals__.get("__name__", ""))
    name = getattr(obj, "__module__", None)
    return name if isinstance(name, str) else "builtins"


def origin(obj: Any) -> Origin:
    """Where the code of a class, function or module comes from."""
    module = defining_module(obj)
    root = module.partition(".")[0]
    if root in ("torch", _OURS):
        return "torch"
    if root == "__main__":
        return "project"
    path = getattr(sys.modules.get(module), "__file__", None)
    if root in sys.stdlib_module_names and (path is None or os.path.realpath(path).startswith(_STDLIB)):
        return "builtin"
    return "installed" if path is not None and is_site(path) else "project"


class Origins:
    """Looks up where code comes from, once for each module."""

    def __init__(self) -> None:
        self._known: dict[str, Origin] = {}

    def of(self, obj: Any) -> Origin:
        """Where the code of a class, function or module comes from; see `origin`."""
        module = defining_module(obj)
        if module not in self._known:
            self._known[module] = origin(obj)
        return self._known[module]

    def is_project(self, value: Any) -> bool:
        """Whether a value is the user's own code, or an object of a class that is."""
        if isinstance(value, functools.partial):
            return self.is_project(value.func)
        value = getattr(value, "__func__", value)
        is_code = isinstance(value, (types.FunctionType, type))
        return self.of(value if is_code else type(value)) == "project"


def is_known_root(module: str) -> bool:
    """Whether a module belongs to the standard library, torch, or this library by its name."""
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", _OURS)


def is_site(path: str) -> bool:
    """Whether a file is part of an installed package."""
    path = os.path.realpath(path)
    return path.startswith(_SITE) or any(name in path for name in _SITE_NAMES)


def package_version(root: str) -> str:
    """Version of the installed package that provides a top-level module; empty if unknown."""
    version = getattr(sys.modules.get(root), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return ""


def file_digest(path: str) -> str:
    """Digest of a source file's content, hexadecimal; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return xxh3_128_hexdigest(file.read())
    except OSError:
        return ""


def file_text(file: str) -> str:
    """The text of a Python file as it is now, which nothing has cached; empty if there is none."""
    try:
        with open(file, "rb") as opened:
            return importlib.util.decode_source(opened.read()) if file.endswith(".py") else ""
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def function_source(function: types.FunctionType, texts: CompiledTexts | None = None) -> str | None:
    """Source of a function without decorator lines and indentation; None if it cannot be had.

    Of a lambda it is the lambda alone, if there is no other in its line. With `texts`, the source must
    compile to the code of the function, since a file may have been edited after it was imported.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    try:
        file_lines, start = inspect.findsource(code)
        if texts is not None and not _is_text_of(code, file_lines, texts):
            return None
        return (CompiledTexts() if texts is None else texts).once(_text_at, code, file_lines, start)
    except (OSError, TypeError, IndentationError, SyntaxError, IndexError):
        return None


def _text_at(code: types.CodeType, file_lines: list[str], start: int) -> str | None:
    lines = inspect.getblock(file_lines[start:])
    text = textwrap.dedent("".join(lines))
    try:
        tree = parse(text)
    except SyntaxError:
        # The lines around a lambda may be a part of an expression, which does not parse by itself.
        return text + instructions(code)
    node = tree.body[0] if tree.body else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
        return "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if len(lambdas) == 1:
        return ast.get_source_segment(text, lambdas[0])
    return text + instructions(code)


def _is_text_of(code: types.CodeType, lines: list[str], texts: CompiledTexts) -> bool:
    return not is_newer(code.co_filename) if is_rewritten(code) else texts.have(code, lines)


def loaded_differs(module: types.ModuleType, texts: CompiledTexts) -> bool:
    """Whether the functions of a module that has been imported are not what its file says now."""
    file = getattr(module, "__file__", None) or ""
    codes = [code for value in list(vars(module).values()) for code in _codes_of(value, file)]
    if not codes or not file.endswith(".py"):
        return False
    lines = io.StringIO(file_text(file)).readlines()
    return not all(_is_text_of(code, lines, texts) for code in codes)


def _codes_of(value: Any, file: str) -> Iterator[types.CodeType]:
    """Code of a function, or of the methods of a class, that stands in a file."""
    for inner in list(vars(value).values()) if isinstance(value, type) else [value]:
        inner = inner.fget if isinstance(inner, property) else getattr(inner, "__func__", inner)
        inner = inspect.unwrap(inner) if isinstance(inner, types.FunctionType) else inner
        if isinstance(inner, types.FunctionType) and inner.__code__.co_filename == file:
            yield inner.__code__


def is_newer(path: str) -> bool:
    """Whether a file may have been changed since this process has begun to import."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return max(status.st_mtime, status.st_ctime) >= _LOADED


def instructions(code: types.CodeType) -> str:
    """The instructions of code as text: they tell functions of one line apart, but depend on Python."""
    steps = []
    for step in dis.get_instructions(code):
        nested = isinstance(step.argval, types.CodeType)
        steps.append(f"{step.opname} {instructions(step.argval) if nested else step.argrepr}")
    return "\n".join(steps)
