"""Explains misses: the differences of two calls, or of a namespace and its predecessor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchcache2.core.keys import Keys
from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import form, readable, split
from torchcache2.identity.fingerprint import Fingerprint, at_most, differences, from_document

NOTHING_DIFFERS = "nothing but the items differs between the last two calls"

Leaf = tuple[torch.dtype, tuple[int, ...]]


class CallSeen(NamedTuple):
    """The common parts of all items of a call.

    `leaves` has the path, dtype and item shape of each batched tensor; `group` is as in `Keys`.
    """

    namespace: bytes
    context: bytes
    leaves: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    group: bytes

    @classmethod
    def of(cls, keys: Keys, call: BoundCall) -> CallSeen:
        """Of one call."""
        leaves = tuple([(path, tensor.dtype, tensor.shape[1:]) for path, tensor in call.leaves])
        return cls(keys.namespace, call.context, leaves, keys.group)


def of_calls(before: CallSeen, now: CallSeen) -> str:
    """Why items of the second of two calls may be misses: one line for each argument or mode that differs."""
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
    return "\n".join(at_most(lines)) or NOTHING_DIFFERS


def _differ_in_length(left: Leaf, right: Leaf) -> bool:
    """Whether just one length differs; it may appear in the shape several times, as in a mask."""
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


def compared(
    name: str,
    kind: str,
    now: Fingerprint,
    before: Fingerprint | None,
    bypass: str | None,
    directory: CacheDirectory | None,
    since: str,
) -> str:
    """Why rows of `name`, whose class is `kind`, may not have been found.

    `before` is the fingerprint before `now`, `bypass` says why nothing is cached, and `since` is the start of
    this run, as an ISO time.
    """
    lines = [f"not cached: {bypass}"] if bypass is not None else []
    if before is not None:
        lines += differences(before, now)
    if lines:
        return "\n".join(lines)
    first = f"namespace {now.namespace.hex()} is the first of {name} in this process"
    if directory is None:
        return first
    known = _latest(directory, kind, now.namespace, since)
    if known is None:
        return f"{first}, and in {directory.path}"
    if known.namespace == now.namespace:
        return f"{first}; an earlier run has left rows of it in {directory.path}"
    lines = differences(known, now)
    return "\n".join([f"compared with {known.namespace.hex()} in {directory.path}:", *lines])


def _latest(directory: CacheDirectory, kind: str, namespace: bytes, since: str) -> Fingerprint | None:
    """The fingerprint that earlier runs left for a namespace, or else for the class's last used one."""
    try:
        contents = [one for one in directory.scan() if one.segments]
    except OSError:
        return None
    contents.sort(key=lambda one: (one.namespace == namespace.hex(), one.last_used), reverse=True)
    for one in contents:
        document = directory.fingerprint(one.namespace)
        if one.namespace == namespace.hex() and str(document.get("created")) >= since:
            continue  # written by this run
        if document.get("class") == kind and (fingerprint := from_document(one.namespace, document)):
            return fingerprint
    return None
