"""The files of the user's own modules that a module imports, and those that they import in turn."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from torchcache2.identity import sourcecode

__all__ = ["files_of", "place_of", "resolved"]

# The pattern also matches within texts and comments; then some files are read that need not be.
_IMPORT = re.compile(
    rb"\bfrom[ \t]+([.\w]+)[ \t]*import\b[ \t]*(\([^)]*\)|[^\n;#]*)"
    rb"|\bimport[ \t]+([^\n;#]*)"
    rb"|\b(?:import_module|__import__)\([ \t\n]*[\"']([.\w]+)[\"']"
)
_NAME = re.compile(r"[.\w]+")


class _Place(NamedTuple):
    file: str | None
    folders: list[str]  # of a package


def files_of(name: str, module: types.ModuleType | None = None) -> dict[str, str]:
    """Digests of the files of a project module and of those that it imports, by the module's name.

    Finds modules that have not been imported yet, and imports none. A file that cannot be read has no digest.
    Of the packages that a module is in, the ``__init__`` files count, but not what these import. The result
    is empty if the module is no project's. `module` is the module itself, if it has been imported, as not
    every module can be found by its name.
    """
    found: dict[str, str] = {}
    queue = [name]
    read: set[str] = set()
    while queue:
        name = queue.pop()
        if name in read:
            continue
        place = _place(name) if read or module is None else _place_of(module)
        read.add(name)
        if place is None or not _is_project(name, place):
            continue
        content = b""  # of a package that has no file
        try:
            if place.file is not None:
                with open(place.file, "rb") as file:
                    content = file.read()
            found[name] = xxh3_128_hexdigest(content)
        except OSError:
            found[name] = ""
        outer = name.rpartition(".")[0]
        package = name if place.folders else outer
        while outer:
            above = _place(outer)
            if outer not in found and above is not None and above.file is not None:
                found[outer] = sourcecode.file_digest(above.file)
            outer = outer.rpartition(".")[0]
        if place.file is not None and place.file.endswith(".py"):
            for wanted in _imports(content.replace(b"\\\n", b" ").replace(b"\\\r\n", b" ")):
                queue += resolved(wanted, package)
    return found


def place_of(name: str) -> str | None:
    """The file of a module, whether it has been imported or not; None if it has none."""
    place = _place(name)
    return None if place is None else place.file


def resolved(name: str, package: str | None) -> list[str]:
    """The full name of a module, by the package that it is imported in; none if there is no such package."""
    if not name.startswith("."):
        return [name]
    try:
        return [importlib.util.resolve_name(name, package or None)] if package else []
    except ImportError:
        return []


def _imports(content: bytes) -> Iterator[str]:
    """Names of what a file imports: modules, and names in them, which may be modules."""
    for match in _IMPORT.finditer(content):
        groups = [group.decode("utf-8", "replace") if group else "" for group in match.groups()]
        base, names, modules, text = groups
        if text:
            yield text
        for part in modules.split(","):
            if named := _NAME.match(part.strip()):
                yield named[0]
        if base:
            yield base.rstrip(".") or base
            dot = "" if base.endswith(".") else "."
            for line in names.strip("() \t\r\n").split("\n"):
                for part in line.partition("#")[0].split(","):
                    if named := _NAME.match(part.strip()):
                        yield f"{base}{dot}{named[0]}"


def _place_of(module: types.ModuleType) -> _Place:
    return _Place(getattr(module, "__file__", None), list(getattr(module, "__path__", ())))


def _place(name: str) -> _Place | None:
    """Where a module is; None if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        return _place_of(module)
    outer, _, last = name.rpartition(".")
    if not last:
        return None
    places = None
    if outer:
        above = _place(outer)
        if above is None or not above.folders:
            return None
        places = above.folders
    elif name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, places)
        except Exception:  # somebody else's finder may raise anything
            continue
        if spec is not None:
            file = spec.origin if spec.has_location else None
            return _Place(file, list(spec.submodule_search_locations or ()))
    return None


def _is_project(name: str, place: _Place) -> bool:
    if name in sys.modules:
        return sourcecode.origin(sys.modules[name]) == "project"
    paths = [place.file] if place.file is not None else place.folders
    return not sourcecode.is_known_root(name) and not any(
        map(sourcecode.is_site, map(os.path.realpath, paths))
    )
