"""`Fingerprint`: the named parts behind a namespace, and the differences of two, one line for each part."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchcache2.core.process import computed_once
from torchcache2.identity.encoding import INNER, digest

_MOST_LINES = 50
_MOST_ALIKE = 3  # more parts with the same difference share a line
_TITLES = {
    "weights": "weights:",
    "class": "source of class",
    "function": "source of function",
    "closure": "closure variable",
}
_NAMED = ("attribute", "closure", "default", "global", "weights", "value")  # what `ignore` can leave out


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The named parts behind a namespace.

    Attributes
    ----------
    namespace : bytes
        16 bytes.
    parts : mapping of str to bytes
        Digest of each part by its name, such as ``attribute blocks.0.heads``.
    values : mapping of str to str
        The text of each part that is a short value. The namespace does not depend on these texts.
    """

    namespace: bytes
    parts: Mapping[str, bytes]
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @computed_once
    def code(self) -> bytes:
        """A digest of everything but the content of tensors."""
        parts = {name: data for name, data in self.parts.items() if not name.startswith("weights ")}
        return Fingerprint.of_parts(parts).namespace

    @classmethod
    def of_parts(cls, parts: Mapping[str, bytes], values: Mapping[str, str] | None = None) -> Fingerprint:
        """The fingerprint made of some parts."""
        namespace = digest([data for name in sorted(parts) for data in (name.encode(), parts[name])])
        return cls(namespace, dict(parts), values or {})


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """One line for each different part, or for many with the same difference; weights last."""
    alike: dict[tuple[str, str], list[str]] = {}
    for kind, path, text in _changed(before, now):
        alike.setdefault((kind, text), []).append(path)
    lines = []
    for (kind, text), paths in alike.items():
        title = _TITLES.get(kind, kind)
        shown = paths if len(paths) <= _MOST_ALIKE else paths[:1]
        lines += [f"{title} {path}".rstrip() + text for path in shown]
        if len(shown) < len(paths):
            others = ", ".join(paths[1:_MOST_ALIKE])
            lines[-1] += f", and {len(paths) - 1:,} more: {others}, …"
    return at_most(lines)


def changes(
    before: Fingerprint, now: Fingerprint, containers: Mapping[str, str], module: Any
) -> dict[str, str]:
    """The changes between two fingerprints of a function or of this module, with their paths.

    The path is empty for a change of code.

    `containers` has the changes of containers, by path; see `Guard.changed_containers`.
    """
    imports = [name for name in now.parts if name.startswith("import ")]
    if late := [name for name in imports if before.parts.get(name) != now.parts[name]]:
        return {f"{name} ran for the first time": "" for name in late}  # so that its names are new
    lines: dict[str, str] = {}
    told = set()
    for kind, path, text in _changed(before, now):
        place, of, owner = path.partition(" of ")
        inside = (f"{place}.", f"{place}[")
        verbs = {at: verb for at, verb in containers.items() if at == place or at.startswith(inside)}
        for at, verb in (verbs or {place: f"was assigned{text}" if text.startswith(":") else text}).items():
            told.add(at)
            is_own = kind in ("attribute", "weights")
            name = of_root(module, at) if is_own else f"{_TITLES.get(kind, kind)} {at}{of}{owner}"
            lines[f"{name} {verb.strip()}"] = at if kind in _NAMED else ""
    for at in containers.keys() - told:  # in addition to plain values of the same object
        if any(one.startswith(f"{at.removesuffix('[2]')}.") for one in told if at.endswith("[2]")):
            continue  # the same values, as in the object's pickled state
        lines[f"{of_root(module, at)} {containers[at]}"] = at
    return lines


def of_root(module: Any, path: str) -> str:
    """The path of an attribute, with ``self.`` if it belongs to this module."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    return f"self.{path}" if module is not None and name in dir(module) else path


def _changed(before: Fingerprint, now: Fingerprint) -> Iterator[tuple[str, str, str]]:
    """Kind, path and difference of each different part; weights last.

    Replaces an object by those of its attributes whose values are known.
    """
    parts = before.parts.keys() | now.parts.keys()
    inner = [
        (name.removeprefix(INNER), f": {before.values[name]} → {now.values[name]}")
        for name in sorted(before.values.keys() & now.values.keys())
        if name.startswith(INNER) and before.values[name] != now.values[name]
    ]
    apart = {name for name in parts if before.parts.get(name) != now.parts.get(name)}
    for name in sorted(apart, key=lambda name: (name.startswith("weights "), name)):
        kind, _, path = name.partition(" ")
        if kind == "tensor" and f"weights {path}" in parts:
            continue  # the line about its content includes this
        text = _difference(name, kind, before, now)
        place, of, owner = path.partition(" of ")
        deeper = [(at, how) for at, how in inner if at.startswith((f"{place}.", f"{place}["))]
        if text != " changed" or not deeper:
            yield kind, path, text
        else:
            yield from ((kind, f"{at}{of}{owner}", how) for at, how in deeper)


def _difference(name: str, kind: str, before: Fingerprint, now: Fingerprint) -> str:
    """The text after the name of a different part."""
    old, new = before.values.get(name), now.values.get(name)
    if name not in before.parts:
        return " is new" + ("" if new is None else f": {new}")
    if name not in now.parts:
        return " is gone" + ("" if old is None else f": {old}")
    if old is not None and new is not None and old != new:
        if kind == "weights" and old.partition(" ")[2] == new.partition(" ")[2]:  # only the dtype differs
            old, new = old.partition(" ")[0], new.partition(" ")[0]
        return f": {old} → {new}"
    return " has another class or submodules" if kind == "module" else " changed"


def from_document(namespace: str, document: Mapping[str, Any]) -> Fingerprint | None:
    """The fingerprint in a namespace's document from `CacheDirectory`; None if there is none."""
    try:
        parts = {str(name): bytes.fromhex(text) for name, text in document["parts"].items()}
        values = {str(name): str(text) for name, text in document.get("values", {}).items()}
        return Fingerprint(bytes.fromhex(namespace), parts, values)
    except (KeyError, AttributeError, TypeError, ValueError):
        return None  # it was edited


def at_most(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"… and {left_out:,} more"]
