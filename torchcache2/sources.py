"""Where code comes from, what its source says, and which names it uses.

Code has one of four origins. *Project* code is the user's own: it is read function by function, and so
is everything that it names. Code of *installed* packages is covered by its file and the package's version,
*torch*'s and the standard library's (*builtin*) by name.
"""

from __future__ import annotations

import ast
import dis
import importlib.machinery
import importlib.metadata
import inspect
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

from torchcache2.locks import ProcessLock

__all__ = [
    "code_objects",
    "defining_module",
    "file_digest",
    "function_source",
    "global_chains",
    "instructions",
    "module_file",
    "origin",
    "package_version",
    "parse",
]

Origin = Literal["project", "installed", "torch", "builtin"]

_PARSING = ProcessLock()
_PARSED_AGAIN = 10
_LOADED = time.time()  # files that are older than this are what was loaded
_OURS = __name__.partition(".")[0]
_SITE = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_SITE_NAMES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def defining_module(obj: Any) -> str:
    """Name of the module that the code of a class, function or module stands in."""
    if isinstance(obj, types.ModuleType):
        return obj.__name__
    if isinstance(obj, types.FunctionType):
        # Unlike __module__, this is not copied onto wrappers by functools.wraps.
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
    return "installed" if path is not None and _is_site(path) else "project"


def _is_site(path: str) -> bool:
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


def module_file(name: str, package: str | None) -> str:
    """Digest of the file of a project module that code imports; its name if it is no project module.

    Finds modules that have not been imported yet, and imports none.
    """
    for candidate in [name] if not package else [f"{package}.{name}".rstrip("."), name]:
        module = sys.modules.get(candidate)
        if module is not None:
            if origin(module) != "project":
                return name
            return file_digest(getattr(module, "__file__", None) or "")
        outer = candidate.rpartition(".")[0]
        if outer and outer not in sys.modules:
            continue
        places = getattr(sys.modules[outer], "__path__", []) if outer else None
        spec = importlib.machinery.PathFinder.find_spec(candidate, places)
        if spec is not None and spec.origin is not None:
            is_project = not _is_site(spec.origin) and candidate not in sys.stdlib_module_names
            return file_digest(spec.origin) if is_project else name
    return name


def function_source(function: types.FunctionType) -> str | None:
    """Source of a function without decorator lines and indentation; None if it cannot be had.

    Of a lambda, the lambda alone, as far as its line tells it from others.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    if _is_edited(code):
        return None
    try:
        lines, _ = inspect.getsourcelines(code)
    except (OSError, TypeError, IndentationError, SyntaxError):
        return None
    text = textwrap.dedent("".join(lines))
    try:
        tree = parse(text)
    except SyntaxError:
        # A lambda in the middle of a larger expression.
        return text + instructions(code)
    node = tree.body[0] if tree.body else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
        return "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if len(lambdas) == 1:
        return ast.get_source_segment(text, lambdas[0])
    return text + instructions(code)


def parse(text: str) -> ast.Module:
    """The syntax tree of source code; safe under threads.

    Before Python 3.12, parsing counts its depth for all threads together, and notices by a `SystemError`.
    """
    with _PARSING():
        for _ in range(_PARSED_AGAIN):
            try:
                return ast.parse(text)
            except SystemError:  # another library has parsed at the same time
                pass
        return ast.parse(text)


def _is_edited(code: types.CodeType) -> bool:
    """Whether a file has been changed since its code was loaded, as in a long notebook session."""
    try:
        if os.path.getmtime(code.co_filename) < _LOADED:
            return False
        with open(code.co_filename, "rb") as file:
            loaded = compile(file.read(), code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return False

    def same(other: types.CodeType) -> bool:
        return (
            other.co_name == code.co_name
            and other.co_code == code.co_code
            and other.co_names == code.co_names
            and [c for c in other.co_consts if not isinstance(c, types.CodeType)]
            == [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        )

    return not any(map(same, code_objects(loaded)))


def instructions(code: types.CodeType) -> str:
    """What code does, as text: tells functions of one line apart, but depends on Python's version."""
    steps = []
    for step in dis.get_instructions(code):
        nested = isinstance(step.argval, types.CodeType)
        steps.append(f"{step.opname} {instructions(step.argval) if nested else step.argrepr}")
    return "\n".join(steps)


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def global_chains(code: types.CodeType) -> list[tuple[str, ...]]:
    """The global names that code reads, each with the attributes read off it, as ``(name, attr, …)``.

    A module that is imported inside of the code is ``("import", name)``.
    """
    chains = set()
    for inner in code_objects(code):
        chain: list[str] = []
        imported = ""
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if chain:
                    chains.add(tuple(chain))
                chain = [str(step.argval)]
            elif step.opname == "IMPORT_NAME":
                imported = str(step.argval)
                chains.add(("import", imported))
            elif step.opname == "IMPORT_FROM":
                chains.add(("import", f"{imported}.{step.argval}".lstrip(".")))
            elif chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain.append(str(step.argval))
            elif chain and step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
                chains.add(tuple(chain))
                chain = []
        if chain:
            chains.add(tuple(chain))
    return sorted(chains)
