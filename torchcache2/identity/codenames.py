"""The names that code uses: globals with their attributes, imports, and what cannot be followed."""

from __future__ import annotations

import dis
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import NamedTuple

from torchcache2.identity.sourcecode import code_objects, names_in

_SKIPPED = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "KW_NAMES")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_TAKING = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"))
_BY_NAME = ("getattr", "vars")
IMPORTING = ("import_module", "__import__")
# Attributes that lead to code without naming it.
_LEADS_ANYWHERE = ("__subclasses__", "__globals__")


class Names(NamedTuple):
    """What code names."""

    chains: list[tuple[str, ...]]  # globals and their attributes, as ``(name, attr, …)``
    imports: list[str]  # imports at run time, with imported names: ``..package.name``
    looked_up: list[tuple[str, ...]]  # chains whose attributes it reads by computed names
    unfollowed: list[str]  # other ways to reach what it does not name


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of code, with one name each: splits those of Python 3.13 that have two."""
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
    """Start and end of each chain of attributes; any instruction may begin one."""
    start = 0
    while start < len(steps):
        end = start + 1
        while end < len(steps) and steps[end].opname in _ATTRIBUTES:
            end += 1
        yield start, end
        start = end


def names_of(code: types.CodeType) -> Names:
    """The names in code and in its nested code."""
    chains, imports, looked_up = set[tuple[str, ...]](), set[str](), set[tuple[str, ...]]()
    unfollowed = names_in(code).intersection(_LEADS_ANYWHERE)
    for inner in code_objects(code):
        if _TAKING.isdisjoint(inner.co_code[::2]):  # most small functions use no name, and `dis` is slow
            continue
        steps = steps_of(inner)
        imported = ""
        is_lookup = False  # the chain is the first argument of ``getattr`` or the like
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
                elif is_lookup and is_text and _is_argument(steps[end + 1 :]):
                    chain += (str(steps[end].argval),)
                elif is_lookup:
                    looked_up.add(chain)
                chains.add(chain)
            is_lookup = len(chain) == 1 and chain[0] in _BY_NAME and not is_lookup
    return Names(sorted(chains), sorted(imports), sorted(looked_up), sorted(unfollowed))


def _is_argument(steps: list[dis.Instruction]) -> bool:
    """Whether a constant text is an argument: next comes the call, or a simple default."""
    if steps[0].opname.startswith("CALL"):
        return True
    _, end = next(chains_in(steps))
    is_default = steps[0].opname.startswith("LOAD_") and steps[0].opname not in _ATTRIBUTES
    return is_default and steps[end].opname.startswith("CALL") and steps[end].arg == 3


def _chain(steps: list[dis.Instruction]) -> tuple[str, ...]:
    """The names in a chain that begins with a global, or with a function that imports."""
    names = tuple(str(step.argval) for step in steps)
    if steps[0].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return names
    # The code may have imported the importing function itself.
    importing = [n for n, step in enumerate(steps) if step.argval in IMPORTING and "LOAD_" in step.opname]
    return names[importing[0] :] if importing else ()


def resolved(name: str, package: str | None) -> list[str]:
    """The full name of a module imported in a package; empty if there is no such package."""
    if not name.startswith("."):
        return [name]
    try:
        return [importlib.util.resolve_name(name, package or None)] if package else []
    except ImportError:
        return []


def spec_of(name: str) -> ModuleSpec | None:
    """Find a module without importing it; None if there is none."""
    outer = name.rpartition(".")[0]
    folders: list[str] | None = None
    if outer in sys.modules:
        folders = list(getattr(sys.modules[outer], "__path__", ()))
    elif outer:
        folders = list(getattr(spec_of(outer), "submodule_search_locations", None) or ())
    for finder in sys.meta_path if folders or not outer else ():
        try:
            spec = finder.find_spec(name, folders)
        except Exception:  # another library's finder may raise anything
            continue
        if spec is not None:
            return spec
    return None
