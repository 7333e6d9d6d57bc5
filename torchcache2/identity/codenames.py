"""Which names code takes: globals with their attributes, imports, and what cannot be followed."""

from __future__ import annotations

import dis
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from torchcache2.identity import sourcecode
from torchcache2.identity.sourcecode import code_objects, names_in

__all__ = [
    "IMPORTING",
    "Names",
    "chains_in",
    "files_of",
    "names_of",
    "place_of",
    "resolved",
    "steps_of",
]

_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES")
_TAKING = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"))
_BY_NAME = ("getattr", "vars")
IMPORTING = ("import_module", "__import__")
# Through these attributes code reaches other code that it does not name.
_LEADS_ANYWHERE = ("__subclasses__", "__globals__")


class Names(NamedTuple):
    """What code names."""

    chains: list[tuple[str, ...]]  # globals and their attributes, as ``(name, attr, …)``
    imports: list[str]  # what it imports as it runs, with names taken from that: ``..package.name``
    looked_up: list[tuple[str, ...]]  # chains of which it reads attributes by computed names
    unfollowed: list[str]  # other ways in which it reaches what it does not name


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of code, each of which has one name: Python 3.13 has some with two."""
    found = []
    for step in dis.get_instructions(code):
        names = re.findall("(?:LOAD|STORE)_FAST", step.opname)
        if len(names) == 2:
            pairs = zip(names, step.argval, strict=True)
            found += [step._replace(opname=name, argval=variable) for name, variable in pairs]
        elif step.opname not in _SKIPPED:
            found.append(step)
    return found


def chains_in(steps: list[dis.Instruction]) -> Iterator[tuple[int, int]]:
    """Where each chain of attributes begins and ends; what begins it may be any instruction."""
    start = 0
    while start < len(steps):
        end = start + 1
        while end < len(steps) and steps[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            end += 1
        yield start, end
        start = end


def names_of(code: types.CodeType) -> Names:
    """What code and the code nested in it name."""
    chains, imports, looked_up = set[tuple[str, ...]](), set[str](), set[tuple[str, ...]]()
    unfollowed = names_in(code).intersection(_LEADS_ANYWHERE)
    for inner in code_objects(code):
        if _TAKING.isdisjoint(inner.co_code[::2]):  # most small functions take no name, and `dis` is slow
            continue
        steps = steps_of(inner)
        imported = ""
        is_lookup = False  # the chain is the first argument of a function that takes attributes by name
        for start, end in chains_in(steps):
            step, chain = steps[start], _chain(steps[start:end])
            if step.opname == "IMPORT_NAME":
                imported = "." * steps[start - 2].argval + str(step.argval)
                imports.add(imported)
            elif step.opname == "IMPORT_FROM":
                imports.add(f"{imported}{'' if imported.endswith('.') else '.'}{step.argval}")
                if step.argval in IMPORTING and steps[end].argval != step.argval:
                    unfollowed.add(step.argval)  # it gets another name
            elif chain:
                is_text = steps[end].opname == "LOAD_CONST" and isinstance(steps[end].argval, str)
                if chain[-1] in IMPORTING and is_text and steps[end + 1].opname.startswith("CALL"):
                    imports.add(str(steps[end].argval))
                elif chain[-1] in IMPORTING:
                    unfollowed.add(chain[-1])
                elif is_lookup and is_text:
                    chain += (str(steps[end].argval),)
                elif is_lookup:
                    looked_up.add(chain)
                chains.add(chain)
            is_lookup = len(chain) == 1 and chain[0] in _BY_NAME and not is_lookup
    return Names(sorted(chains), sorted(imports), sorted(looked_up), sorted(unfollowed))


def _chain(steps: list[dis.Instruction]) -> tuple[str, ...]:
    """The names in a chain that begins with a global, or with what imports."""
    names = tuple(str(step.argval) for step in steps)
    if steps[0].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return names
    # The function may be of a module that the code has imported itself.
    importing = [n for n, step in enumerate(steps) if step.argval in IMPORTING and "LOAD_" in step.opname]
    return names[importing[0] :] if importing else ()


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
