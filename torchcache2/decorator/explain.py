"""Why an item was not found: what differs between two fingerprints, and between two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchcache2.engine.earlier import compared
from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import form, readable, split
from torchcache2.identity.fingerprint import Fingerprint, at_most

__all__ = ["NOTHING_DIFFERS", "CallSeen", "explained"]

NOTHING_DIFFERS = "nothing but the items differs between the last two calls"

Leaf = tuple[torch.dtype, tuple[int, ...]]


class CallSeen(NamedTuple):
    """What the items of a call have in common.

    `leaves` has for each batched tensor its path, its dtype, and the shape of an item.
    """

    namespace: bytes
    context: bytes
    leaves: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, namespace: bytes, call: BoundCall) -> CallSeen:
        """Of one call."""
        leaves = tuple([(path, tensor.dtype, tensor.shape[1:]) for path, tensor in call.leaves])
        return cls(namespace, call.context, leaves)


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
    """Why items may have been misses; see `ModuleCache.explain`, and `compared` for the arguments.

    `calls` are the last two.
    """
    if len(calls) == 2 and calls[0].namespace == calls[1].namespace == now.namespace:
        lines = [f"not cached: {bypass}"] if bypass is not None else _call_differences(*calls)
        return "\n".join(lines) or NOTHING_DIFFERS
    return compared(name, kind, now, before, bypass, directory, since)


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
    return at_most(lines)


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
