"""Where code comes from, and its source.

Code has one of four origins. *Project* code is the user's own: the key covers each of its functions, and
everything that it names. Code of *installed* packages is covered by the package's version and content,
*torch*'s and the standard library's (*builtin*) by name.
"""

from __future__ import annotations
import __future__

import ast
import base64
import contextlib
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import linecache
import marshal
import os
import re
import sys
import sysconfig
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, Literal, TypeVar

from xxhash import xxh3_128_hexdigest

from torchcache2.core.errors import attribute
from torchcache2.core.process import ProcessLock

Origin = Literal["project", "installed", "torch", "builtin"]

_LOADED = time.time()  # older files have not changed since they were loaded
_OURS = __name__.partition(".")[0]
_SITE = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_T = TypeVar("_T")
_PARSING = ProcessLock()
_MOST_TEXTS = 1000
_MARSHAL_VERSION = 2  # the last version whose bytes do not depend on reference counts
_WORD = re.compile(r"[.'\"](\w+)")
_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_SITE_NAMES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

# Classes made by `ABCMeta(…)`, `types.new_class(…)` or `exec` get these modules' names.
_MAKERS = ("abc", "types", "builtins")
HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`: set for every class made by Python code


def defining_module(obj: Any) -> str:
    """Name of the module that contains the code of a class, function or module."""
    if isinstance(obj, types.ModuleType):
        return obj.__name__
    if isinstance(obj, types.FunctionType):
        # Unlike `__module__`, which `functools.wraps` copies to a wrapper.
        return str(obj.__globals__.get("__name__", ""))
    name = getattr(obj, "__module__", None)
    is_made = name in _MAKERS and isinstance(obj, type) and not is_builtin(obj)
    if is_made and vars(sys.modules[str(name)]).get(obj.__name__) is not obj:
        return ""
    return name if isinstance(name, str) else "builtins"


def is_builtin(kind: type) -> bool:
    """Whether a class is one of Python's own, not one that `exec` has made without a module."""
    return kind.__module__ == "builtins" and not kind.__flags__ & HEAP_TYPE


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
    real = "" if path is None else os.path.realpath(path)
    is_installed = real.startswith(_SITE) or any(name in real for name in _SITE_NAMES)
    return "installed" if is_installed else "project"


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
        """Whether a value is project code, or an instance of a project class."""
        if issubclass(type(value), functools.partial):
            return self.is_project(value.func)
        value = attribute(value, "__func__", value)
        is_code = issubclass(type(value), (types.FunctionType, type))
        return self.of(value if is_code else type(value)) == "project"


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


def function_source(function: types.FunctionType, texts: CompiledTexts) -> str | None:
    """Source of a function without decorators and indentation; None if unavailable.

    For a lambda, just the lambda, if its line has no other. The source must compile to the function's code,
    since its file may have been edited after the import.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    try:
        lines, start = inspect.findsource(code)
        return texts.once(_text_at, code, lines, start) if texts.have(code, lines) else None
    except (OSError, TypeError, IndentationError, SyntaxError, IndexError):
        return None


def _text_at(code: types.CodeType, file_lines: list[str], start: int) -> str | None:
    text = textwrap.dedent("".join(inspect.getblock(file_lines[start:])))
    try:
        tree = parse(text)
    except SyntaxError:
        # A lambda's lines may be part of an expression, which does not parse by itself.
        return text + compiled(code)
    node = tree.body[0] if tree.body else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
        return "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return ast.get_source_segment(text, lambdas[0]) if len(lambdas) == 1 else text + compiled(code)


def _is_as_loaded(path: str) -> bool:
    """Whether this is a file that has not changed since this process began to import."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return max(status.st_mtime, status.st_ctime) < _LOADED


def compiled(code: types.CodeType) -> str:
    """Compiled code as text, in place of its source: independent of its position, not of Python's version."""
    return f"{importlib.util.MAGIC_NUMBER.hex()} {_marshalled(_without_place(code)).hex()}"


def _without_place(code: types.CodeType) -> types.CodeType:
    constants = tuple(
        _without_place(one) if isinstance(one, types.CodeType) else one for one in code.co_consts
    )
    return code.replace(co_consts=constants, co_filename="", co_firstlineno=1, co_linetable=b"")


class CompiledTexts:
    """Caches the code that texts compile to, and facts read from code: a thousand of each."""

    def __init__(self) -> None:
        self._compiled = functools.lru_cache(_MOST_TEXTS)(_compiled)
        self._words = functools.lru_cache(_MOST_TEXTS)(_words)
        self._digest = functools.lru_cache(_MOST_TEXTS)(file_digest)
        self._read: dict[tuple[Callable[..., Any], int], tuple[tuple[Any, ...], Any]] = {}

    def once(self, read: Callable[..., _T], code: types.CodeType, *more: Any) -> _T:
        """The result of `read` for code; calls it again only if the other arguments have changed."""
        key = read, id(code)
        known = self._read.get(key)
        if known is None or known[0] != (code, *more):
            if len(self._read) >= _MOST_TEXTS:
                self._read.clear()
            known = self._read[key] = (code, *more), read(code, *more)
        found: _T = known[1]
        return found

    def extension(self, module: types.ModuleType) -> str:
        """Digest of the file of an extension module, whose code has no source; empty for other modules."""
        file = getattr(module, "__file__", None) or ""
        return self._digest(file) if file.endswith(tuple(EXTENSION_SUFFIXES)) else ""

    def words(self, file: str) -> frozenset[str]:
        """The words of a file that may be names: attributes, and those that begin a text."""
        try:
            status = os.stat(file)
            return self._words(file, status.st_mtime_ns, status.st_size)
        except OSError:
            return frozenset()

    def have(self, code: types.CodeType, lines: list[str]) -> bool:
        """Whether these lines of its file compile to this code, which an edit may have changed since."""
        if _is_as_loaded(code.co_filename):
            return True
        # Notebook cells inherit the ``__future__`` imports of earlier cells; the flags tell which.
        texts = self._compiled(code.co_filename, "".join(lines), code.co_flags & _FUTURE)
        return _marshalled(code) in texts


def _words(file: str, *_: int) -> frozenset[str]:
    with open(file, encoding="utf-8", errors="replace") as opened:
        return frozenset(_WORD.findall(opened.read()))


def _compiled(file: str, text: str, flags: int) -> frozenset[bytes]:
    """The marshalled code objects that a text compiles to; none if it does not compile."""
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in the cells of a notebook
    try:
        with warnings.catch_warnings():  # the first compilation has shown the warnings
            warnings.simplefilter("ignore")
            code = compile(text, file, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(map(_marshalled, code_objects(code)))


def _marshalled(code: types.CodeType) -> bytes:
    return marshal.dumps(_with_sorted_sets(code), _MARSHAL_VERSION)


def _with_sorted_sets(code: types.CodeType) -> types.CodeType:
    """Code with sorted sets: before Python 3.11, their order depends on the process."""
    constants = [
        _with_sorted_sets(one)
        if isinstance(one, types.CodeType)
        else ("set", *sorted(map(repr, one)))
        if isinstance(one, frozenset)
        else one
        for one in code.co_consts
    ]
    return code.replace(co_consts=tuple(constants))


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType, Any]]:
    """The variables that a function has captured, with their cells and their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable is not assigned yet
            yield name, cell, cell.cell_contents


def names_in(code: types.CodeType) -> set[str]:
    """Every name in code: of globals, attributes and imports."""
    return {name for inner in code_objects(code) for name in inner.co_names}


def parse(text: str) -> ast.Module:
    """The syntax tree of source code; safe under threads.

    Before Python 3.12, the parser counts its depth for all threads together, and raises `SystemError` if the
    count ends up wrong.
    """
    with _PARSING():
        try:
            return ast.parse(text)
        except SystemError:  # other code has parsed at the same time, without this lock
            return ast.parse(text)


# The content of installed packages: of their Python files, and of extension modules that were built here. A
# package's ``RECORD`` has the hash of each of its files. A file that is not in it, has another size or is
# newer is read. So a package counts alike wherever and whenever it was installed, and an edit counts. The
# extension modules of a released version differ between Pythons and platforms: its version stands for them.

_CODE = (".py", *EXTENSION_SUFFIXES)
_OF_BUILD = "__config__.py"  # where NumPy and SciPy note which compiler and which Python built them
_INSTALLED_FROM = b".dist-info/direct_url.json"  # a folder, a repository or a file, not an index


class Packages:
    """Remembers each package's digest, until a file that somebody asks for has changed."""

    def __init__(self) -> None:
        # By place and name: the digest, and time and size of each file by path.
        self._known: dict[tuple[str, str], tuple[str, dict[str, tuple[int, int]]]] = {}

    def digest(self, module: str, file: str) -> str:
        """What a module's package counts by, besides its version."""
        try:
            status = os.stat(file)
        except OSError:  # it is in an archive, or part of Python
            return ""
        root, *inner = module.split(".")
        place = os.path.dirname(file)
        for _ in range(len(inner) + os.path.basename(file).startswith("__init__.")):
            place = os.path.dirname(place)
        digest, seen = self._known.get((place, root), ("", {}))
        if seen.get(file) != _time_and_size(status):
            files = dict(_files(place, root)) or {os.path.basename(file): status}
            text = repr(sorted(_hashes(place, root, files).items()))
            digest = xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
            seen = {os.path.join(place, name): _time_and_size(status) for name, status in files.items()}
            self._known[place, root] = digest, seen | {file: _time_and_size(status)}
        return digest


PACKAGES = Packages()


def _time_and_size(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _hashes(place: str, root: str, files: dict[str, os.stat_result]) -> dict[str, str]:
    """The hash and size of each file that counts."""
    newest, is_released, recorded = _recorded(place, root)
    found = {}
    for name, status in files.items():
        known = line = recorded.get(name, "")
        if status.st_mtime_ns > newest or not known.endswith(f",{status.st_size}"):
            line = f"{_recorded_hash(f'{place}{os.sep}{name}')},{status.st_size}"
        if not is_released or line != known or name.endswith(".py"):
            found[name] = line
    return found


def _files(place: str, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files with code of a package, by their paths in its place, with ``/``."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(f"{place}{os.sep}{folder}") as entries:
            for entry in entries:
                if not folder and entry.name.partition(".")[0] != root:
                    continue
                if entry.name.endswith(_CODE) and entry.name != _OF_BUILD and entry.is_file():
                    yield folder + entry.name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{folder}{entry.name}/")


def _recorded(place: str, root: str) -> tuple[int, bool, dict[str, str]]:
    """When a package was installed, whether from an index, and the hash and size of each of its files."""
    newest, is_released, recorded = 0, False, dict[str, str]()
    start = root.encode()
    found = glob.glob("*.dist-info", root_dir=place)
    for name in sorted(found, key=lambda name: (not name.startswith(root), name)):
        with contextlib.suppress(OSError), open(os.path.join(place, name, "RECORD"), "rb") as file:
            data = b"\n" + file.read()
            if not any(b"\n" + start + one in data for one in (b"/", b".")):
                continue
            is_released = _INSTALLED_FROM not in data
            newest = max(newest, os.fstat(file.fileno()).st_mtime_ns)
            for line in data.decode("utf-8", "surrogateescape").splitlines():
                path, _, rest = line.partition(",")  # a path with a comma is read
                if path.partition("/")[0].partition(".")[0] == root:
                    recorded[path] = rest
            if name.startswith(root):
                break
    return newest, is_released, recorded


def _recorded_hash(path: str) -> str:
    """The hash of a file, as a ``RECORD`` has it; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = hashlib.sha256(file.read()).digest()
    except OSError:
        return ""
    return f"sha256={base64.urlsafe_b64encode(data).rstrip(b'=').decode()}"
