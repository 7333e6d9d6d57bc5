"""Why an item was not found: what differs between two fingerprints, and between two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.modulewalk import Fingerprint
from torchcache2.identity.readable import form, readable, split

__all__ = ["CallSeen", "explained"]

_MOST_LINES = 50
_MOST_ALIKE = 3  # more parts that differ in the same way share a line
_SOURCES = ("class", "function")

Leaf = tuple[torch.dtype, tuple[int, ...]]


class CallSeen(NamedTuple):
    """What the items of a call have in common.

    `leaves` has for each batched tensor its path, its dtype, and the shape of an item.
    """

    namespace: bytes
    context: bytes
    leaves: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def explained(
    name: str,
    kind: str,
    now: Fingerprint,
    before: Fingerprint | None,
    calls: Sequence[CallSeen],
    bypass: str | None,
    directory: CacheDirectory | None,
    since: str,
) -> str:
    """Why items may have been misses, of a module of this name and class; see `ModuleCache.explain`.

    `before` is the fingerprint before the one of `now`, `calls` are the last two, `bypass` says why the last
    one was not cached, and `since` is when this run began, as an ISO time.
    """
    lines = [f"not cached: {bypass}"] if bypass is not None else []
    if len(calls) == 2 and calls[0].namespace == calls[1].namespace == now.namespace:
        lines = lines or _call_differences(*calls)
        return "\n".join(lines) or "nothing but the items differs between the last two calls"
    if before is not None:
        lines += _fingerprint_differences(before, now)
    if lines:
        return "\n".join(lines)
    first = f"namespace {now.namespace.hex()} is the first of {name} in this process"
    if directory is None:
        return first
    known = _latest_fingerprint(directory, kind, now.namespace, since)
    if known is None:
        return f"{first}, and in {directory.path}"
    if known.namespace == now.namespace:
        return f"{first}; an earlier run has left rows of it in {directory.path}"
    lines = _fingerprint_differences(known, now)
    return "\n".join([f"compared with {known.namespace.hex()} in {directory.path}:", *lines])


def _fingerprint_differences(before: Fingerprint, now: Fingerprint) -> list[str]:
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
    return _at_most(lines)


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


def _latest_fingerprint(
    directory: CacheDirectory, kind: str, namespace: bytes, since: str
) -> Fingerprint | None:
    """The fingerprint that earlier runs have left of a namespace, else of the class's last used one."""
    try:
        contents = [one for one in directory.scan() if one.segments]
    except OSError:
        return None
    contents.sort(key=lambda one: (one.namespace == namespace.hex(), one.last_used), reverse=True)
    for one in contents:
        document = directory.fingerprint(one.namespace)
        if one.namespace == namespace.hex() and str(document.get("created")) >= since:
            continue  # this run has written it
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


def _call_differences(before: CallSeen, now: CallSeen) -> list[str]:
    """One line for each argument or mode that differs."""
    lines = []
    old, new = _named(before.context), _named(now.context)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            lines.append(f"{name}: {_shown(old, name)} → {_shown(new, name)}")
    old_leaves, new_leaves = (
        {path: (dtype, shape) for path, dtype, shape in call.leaves} for call in (before, now)
    )
    for path in sorted(old_leaves.keys() | new_leaves.keys()):
        left, right = old_leaves.get(path), new_leaves.get(path)
        if left != right:
            texts = [form(*leaf) if leaf else "not given" for leaf in (left, right)]
            padding = ": another padding?" if left and right and _differ_in_length(left, right) else ""
            lines.append(f"items of {path}: {texts[0]} → {texts[1]}{padding}")
    return _at_most(lines)


def _differ_in_length(left: Leaf, right: Leaf) -> bool:
    """Whether only one length differs; it may be in the shape several times, as in that of a mask."""
    (dtype, shape), (other_dtype, other) = left, right
    lengths = {pair for pair in zip(shape, other, strict=False) if pair[0] != pair[1]}
    return dtype == other_dtype and len(shape) == len(other) and len(lengths) == 1


def _named(context: bytes) -> dict[str, bytes]:
    *arguments, modes = split(context)
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    named = {f"argument {name.decode()}": data for name, data in pairs if not data.startswith(b"T")}
    return named | {"modes": modes[8:]}


def _shown(named: Mapping[str, bytes], name: str) -> str:
    data = named.get(name)
    if data is None:
        return "not given"
    if name == "modes":
        return data.decode()
    return readable(data) or "another value"


def _at_most(lines: list[str]) -> list[str]:
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"… and {left_out:,} more"]
