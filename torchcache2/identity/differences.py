"""What differs between two fingerprints, one line for each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["at_most", "differences", "differences_of_state", "from_document"]

_MOST_LINES = 50
_MOST_ALIKE = 3  # more parts that differ in the same way share a line
_SOURCES = ("class", "function")
_STATE = ("attribute ", "attributes of ", "closure ", "constructor argument ", "global ", "hook ")
_CODE = ("class ", "function ", "import ", "named ")


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """One line for each part that differs, or for many that differ in the same way; the weights last."""
    alike: dict[tuple[str, str], list[str]] = {}
    names = sorted(
        before.parts.keys() | now.parts.keys(), key=lambda name: (name.startswith("weights "), name)
    )
    for name in names:
        if before.parts.get(name) == now.parts.get(name):
            continue
        kind, _, path = name.partition(" ")
        if kind == "tensor" and f"weights {path}" in names:
            continue  # the line about its content says so too
        alike.setdefault((kind, _difference(name, kind, before, now)), []).append(path)
    lines = []
    for (kind, text), paths in alike.items():
        title = "weights:" if kind == "weights" else f"source of {kind}" if kind in _SOURCES else kind
        shown = paths if len(paths) <= _MOST_ALIKE else paths[:1]
        lines += [f"{title} {path}".rstrip() + text for path in shown]
        if len(shown) < len(paths):
            others = ", ".join(paths[1:_MOST_ALIKE])
            lines[-1] += f", and {len(paths) - 1:,} more: {others}, …"
    return at_most(lines)


def differences_of_state(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The lines of `differences` if two modules with the same code and weights differ in state; else none.

    State brings code along, such as the class of an object: one of the two may have more code.
    """
    names = before.parts.keys() | now.parts.keys()
    apart = {name for name in names if before.parts.get(name) != now.parts.get(name)}
    state = {name for name in apart if name.startswith(_STATE)}
    code = apart - state
    both_have_more = code & before.parts.keys() and code & now.parts.keys()
    if both_have_more or not all(name.startswith(_CODE) for name in code):
        return []
    shown = [
        Fingerprint(one.namespace, {name: one.parts[name] for name in state & one.parts.keys()}, one.values)
        for one in (before, now)
    ]
    return differences(*shown)


def _difference(name: str, kind: str, before: Fingerprint, now: Fingerprint) -> str:
    """The text behind the name of a part that differs."""
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
    """The fingerprint that `CacheDirectory` keeps of a namespace; None if it has none."""
    try:
        parts = {str(name): bytes.fromhex(text) for name, text in document["parts"].items()}
        values = {str(name): str(text) for name, text in document.get("values", {}).items()}
        return Fingerprint(bytes.fromhex(namespace), parts, values)
    except (KeyError, AttributeError, TypeError, ValueError):
        return None  # somebody has edited it


def at_most(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"… and {left_out:,} more"]
