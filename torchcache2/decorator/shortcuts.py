"""`Shortcuts`: calls of a kind that could not be cached go straight to the forward, and are tried at times.

To find out that a call cannot be cached costs as much as caching it: its arguments are put in a key, the
module is looked at, generators and containers are compared. After a few such calls, further calls of the kind
skip all that: a glance at the arguments of a call shows its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_STRIKES = 4  # calls that were not cached, before the next ones go straight to the forward
_FEWEST, _MOST = 16, 1024  # calls that go straight before the next try; twice as many each time
_MOST_KINDS = 1000
_LONG = 64  # a text of more characters is content, rather than a choice of what to compute

Glance = tuple[Any, ...]


def glance(root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Glance:
    """What shows the kind of a call at once: types of arguments, dimensions of tensors, flags and texts."""
    marks = [torch.is_grad_enabled(), getattr(root, "training", None)]
    marks += map(_mark, args)
    for name, value in kwargs.items():
        marks += [name, _mark(value)]
    return tuple(marks)


def _mark(value: Any) -> Any:
    if type(value) in (Tensor, torch.nn.Parameter):  # to read attributes of subclasses may run any code
        return type(value), value.is_nested, value.layout, value.device.type, value.dim(), value.dtype
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= _LONG):
        return value
    return type(value)


class Shortcuts:
    """The kinds of calls that are not cached, and why. Several threads may use this at the same time."""

    def __init__(self) -> None:
        self._seen: dict[Glance, tuple[int, str, int]] = {}  # failed tries, reason, calls before the next try

    def reason(self, kind: Glance) -> str | None:
        """The reason to pass a call straight to the forward; None if it should be tried. Counts the call."""
        strikes, why, left = self._seen.get(kind, (0, "", 0))
        if left == 0:
            return None
        self._seen[kind] = strikes, why, left - 1
        return why

    def add(self, kind: Glance, reason: str) -> None:
        """Note that a call of this kind was not cached."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen = {}
        strikes = self._seen.get(kind, (0, "", 0))[0] + 1
        rounds = strikes - _STRIKES
        self._seen[kind] = strikes, reason, min(_FEWEST << rounds, _MOST) if rounds >= 0 else 0

    def clear(self, kind: Glance) -> None:
        """Note that a call of this kind was cached."""
        self._seen.pop(kind, None)
