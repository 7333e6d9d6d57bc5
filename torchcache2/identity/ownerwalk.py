"""`OwnerWalk`: whose code is being read, and what is left out because nobody's code names it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torchcache2.identity import sourcecode
from torchcache2.identity.codewalk import CodeWalk, original
from torchcache2.identity.compiled import CompiledTexts
from torchcache2.identity.imports import place_of
from torchcache2.identity.leftout import LeftOut, left_out

__all__ = ["OwnerWalk"]


class OwnerWalk(CodeWalk):
    """The part of a walk that knows whose code it has met.

    Attributes
    ----------
    skipped : list of LeftOut, str and object
        What `torchcache2.identity.leftout` names, and where it was met.
    is_foreign : bool
        Whether an object or function of somebody else's code is being read.
    """

    def __init__(self, texts: CompiledTexts | None = None) -> None:
        super().__init__(texts)
        self.skipped: list[tuple[LeftOut, str, Any]] = []
        self.is_foreign = False
        self._code: dict[int, types.CodeType] = {}

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class, and know whose code is read meanwhile."""
        before, self.is_foreign = self.is_foreign, self.is_foreign and sourcecode.origin(kind) != "project"
        try:
            return super().klass(kind, path)
        finally:
            self.is_foreign = before

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write down a function, and know whose code is read meanwhile."""
        code = original(function).__code__
        before, self.is_foreign = self.is_foreign, sourcecode.origin(original(function)) != "project"
        if not self.is_foreign:
            self._code[id(code)] = code
        try:
            return super().function(function, path)
        finally:
            self.is_foreign = before

    def without_skipped(self, kind: type, state: Mapping[str, Any], path: str) -> dict[str, Any]:
        """What of the attributes of an object is read."""
        kept = dict(state)
        for name, rule in left_out(kind).items():
            attribute, _, key = name.partition(".")
            if attribute not in kept:
                continue
            value = kept[attribute]
            if not key:
                del kept[attribute]
            elif isinstance(value, dict) and key in value:
                value = value[key]
                kept[attribute] = {other: item for other, item in kept[attribute].items() if other != key}
            else:
                continue
            self.skipped.append((rule, f"{path}.{name}", value))
        return kept

    def count_what_is_named(self) -> bool:
        """Write down what was left out although code that is met names it; whether there is any."""
        counted: set[int] = set()
        while True:
            named = {rule for rule in {one[0] for one in self.skipped} if self._is_named(rule)}
            due = [n for n, one in enumerate(self.skipped) if one[0] in named and n not in counted]
            if not due:
                return bool(counted)
            for number in due:  # its class may name, and leave out, something else
                _, path, value = self.skipped[number]
                self.parts[f"named {path} {number}"] = self.encode(value, path)
            counted.update(due)

    def _is_named(self, rule: LeftOut) -> bool:
        """Whether code names what is left out: a project's, or that of another package."""
        files = [*self.project_files]
        for name in self._versions:
            module = name.removeprefix("import ")  # written down for an import inside of a function
            if module.partition(".")[0] not in rule.readers:
                files.append(place_of(module) or "")
        return any(map(rule.is_in_code, self._code.values())) or any(map(rule.is_in_file, files))
