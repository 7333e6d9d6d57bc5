"""Why an item was not found: what differs between two fingerprints, and between two calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.describe import describe, split
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["CallSeen", "call_differences", "fingerprint_differences", "latest_fingerprint"]

_MOST_LINES = 50
_SOURCES = ("class", "function")


class CallSeen(NamedTuple):
    """What the items of a call had in common."""

    namespace: bytes
    context: bytes
    leaves: tuple[tuple[str, object, tuple[int, ...]], ...]


def fingerprint_differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """One line for each part that differs, the weights last."""
    lines = []
    names = sorted(
        before.parts.keys() | now.parts.keys(), key=lambda name: (name.startswith("weights "), name)
    )
    for name in names:
        if before.parts.get(name) == now.parts.get(name):
            continue
        kind, _, path = name.partition(" ")
        if kind == "tensor" and f"weights {path}" in names:
            continue  # that line says it
        lines.append(_line(name, kind, path, before, now))
    return _at_most(lines)


def _line(name: str, kind: str, path: str, before: Fingerprint, now: Fingerprint) -> str:
    title = f"{kind}: {path}" if kind == "weights" else f"source of {name}" if kind in _SOURCES else name
    if name not in before.parts:
        return f"{title} is new" + _value(now, name)
    if name not in now.parts:
        return f"{title} is gone" + _value(before, name)
    old, new = before.values.get(name), now.values.get(name)
    if old is not None and new is not None:
        return f"{title}: {old} → {new}"
    return f"{title} has another class or submodules" if kind == "module" else f"{title} changed"


def _value(fingerprint: Fingerprint, name: str) -> str:
    value = fingerprint.values.get(name)
    return "" if value is None else f": {value}"


def latest_fingerprint(
    directory: CacheDirectory, kind: str, namespace: bytes, since: str
) -> Fingerprint | None:
    """The fingerprint that earlier runs have left of a namespace, else of the class's one that was used last.

    `since` is when this run began, as an ISO time.
    """
    try:
        contents = [one for one in directory.scan() if one.segments]
    except OSError:
        return None
    contents.sort(key=lambda one: (one.namespace == namespace.hex(), one.last_used), reverse=True)
    for one in contents:
        document = directory.fingerprint(one.namespace)
        if one.namespace == namespace.hex() and str(document.get("created")) >= since:
            continue  # this run's own
        if document.get("class") == kind and (fingerprint := _from_document(one.namespace, document)):
            return fingerprint
    return None


def _from_document(namespace: str, document: Mapping[str, Any]) -> Fingerprint | None:
    try:
        parts = {str(name): bytes.fromhex(text) for name, text in document["parts"].items()}
        values = {str(name): str(text) for name, text in document.get("values", {}).items()}
    except (KeyError, AttributeError, TypeError, ValueError):
        return None  # somebody has edited it
    return Fingerprint(bytes.fromhex(namespace), parts, values)


def call_differences(before: CallSeen, now: CallSeen) -> list[str]:
    """One line for each argument or mode that differs."""
    lines = []
    old, new = _named(before.context), _named(now.context)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            lines.append(f"{name}: {_described(old, name)} → {_described(new, name)}")
    old_leaves, new_leaves = (
        {path: f"{dtype} {tuple(shape)}".removeprefix("torch.") for path, dtype, shape in call.leaves}
        for call in (before, now)
    )
    for path in sorted(old_leaves.keys() | new_leaves.keys()):
        left, right = old_leaves.get(path, "not given"), new_leaves.get(path, "not given")
        if left != right:
            lines.append(f"items of {path}: {left} → {right}")
    return _at_most(lines)


def _named(context: bytes) -> dict[str, bytes]:
    *arguments, modes = split(context)
    named = {f"argument {name.decode()}": data for name, data in _pairs(arguments)}
    return {name: data for name, data in named.items() if not data.startswith(b"T")} | {"modes": modes[8:]}


def _pairs(parts: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    iterator = iter(parts)
    return zip(iterator, iterator, strict=True)


def _described(named: Mapping[str, bytes], name: str) -> str:
    data = named.get(name)
    if data is None:
        return "not given"
    if name == "modes":
        return data.decode()
    return describe(data) or "another value"


def _at_most(lines: list[str]) -> list[str]:
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"… and {left_out:,} more"]
