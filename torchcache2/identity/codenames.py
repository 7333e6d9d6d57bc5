"""Which names code takes: globals with their attributes, imports, and what cannot be followed."""

from __future__ import annotations

import dis
import types
from typing import NamedTuple

from torchcache2.identity.compiled import code_objects, names_in

__all__ = ["IMPORTING", "Names", "names_of"]

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


def names_of(code: types.CodeType) -> Names:
    """What code and the code nested in it name."""
    scan = _Scan()
    for inner in code_objects(code):
        scan.code(inner)
    unfollowed = scan.unfollowed.union(names_in(code).intersection(_LEADS_ANYWHERE))
    return Names(*map(sorted, (scan.chains, scan.imports, scan.looked_up, unfollowed)))  # type: ignore[arg-type]


class _Scan:
    """Follows instructions in order, and notes chains of names."""

    def __init__(self) -> None:
        self.chains: set[tuple[str, ...]] = set()
        self.imports: set[str] = set()
        self.looked_up: set[tuple[str, ...]] = set()
        self.unfollowed: set[str] = set()

    def code(self, code: types.CodeType) -> None:
        if _TAKING.isdisjoint(code.co_code[::2]):  # most small functions take no name, and `dis` is slow
            return
        chain: list[str] = []
        lookup = ""  # the function of which the chain is an argument
        imported = ""
        constants: list[object] = [0, 0]
        steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain.append(str(step.argval))
                continue
            if not chain and step.argval in IMPORTING and step.opname.startswith("LOAD_"):
                chain = [str(step.argval)]  # of a module that the code has imported itself
                continue
            is_importer = step.opname == "IMPORT_FROM" and step.argval in IMPORTING
            if is_importer and after is not None and after.argval != step.argval:
                self.unfollowed.add(step.argval)  # it gets another name
            is_text = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
            if chain and chain[-1] in IMPORTING:
                if is_text and after is not None and after.opname.startswith("CALL"):
                    self.imports.add(str(step.argval))
                else:
                    self.unfollowed.add(chain[-1])
            elif chain and lookup and is_text:
                chain.append(str(step.argval))
            elif chain and lookup:
                self.looked_up.add(tuple(chain))
            if chain:
                self.chains.add(tuple(chain))
            lookup = chain[0] if len(chain) == 1 and chain[0] in _BY_NAME and not lookup else ""
            chain = []
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = [str(step.argval)]
            elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants = [constants[-1], step.argval]
            elif step.opname == "IMPORT_NAME":
                level = constants[0] if isinstance(constants[0], int) else 0
                imported = "." * level + str(step.argval)
                self.imports.add(imported)
            elif step.opname == "IMPORT_FROM":
                dot = "" if imported.endswith(".") else "."
                self.imports.add(f"{imported}{dot}{step.argval}")
        if chain:
            self.chains.add(tuple(chain))
