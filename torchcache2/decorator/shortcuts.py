"""`Shortcuts`: kinds of calls that were never cached go straight to the forward, and are tried at times.

To find out that a call cannot be cached costs as much as caching it: its arguments are put in a key, the
module is looked at, generators and containers are compared. A kind of call that has come to nothing a few
times is told from others by a glance at its arguments, and spared all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Shortcuts", "glance"]

_STRIKES = 4  # calls that were not cached, before the next ones go straight to the forward
_FEWEST, _MOST = 16, 1024  # calls that do so before the next try; twice as many each time
_MOST_KINDS = 1000
_LONG = 64  # characters from which a text is content, rather than a choice

Glance = tuple[Any, ...]


def glance(root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Glance:
    """What tells kinds of calls apart at once: types of arguments, dimensions of tensors, flags and texts."""
    marks = [torch.is_grad_enabled(), getattr(root, "training", None)]
    marks += map(_mark, args)
    for name, value in kwargs.items():
        marks += [name, _mark(value)]
    return tuple(marks)


def _mark(value: Any) -> Any:
    if type(value) in (Tensor, torch.nn.Parameter):  # attributes of subclasses may run any code
        return type(value), value.is_nested, value.layout, value.device.type, value.dim(), value.dtype
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= _LONG):
        return value
    return type(value)


class Shortcuts:
    """Kinds of calls that are not cached, and why. Other threads may add some at the same time."""

    def __init__(self) -> None:
        self._seen: dict[Glance, tuple[int, str, int]] = {}  # strikes, why, calls before the next try

    def reason(self, kind: Glance) -> str | None:
        """Why a call is to go straight to the forward; None if it is to be tried. Counts the call."""
        strikes, why, left = self._seen.get(kind, (0, "", 0))
        if left == 0:
            return None
        self._seen[kind] = strikes, why, left - 1
        return why

    def add(self, kind: Glance, reason: str) -> None:
        """A call of this kind was not cached."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen = {}
        strikes = self._seen.get(kind, (0, "", 0))[0] + 1
        rounds = strikes - _STRIKES
        self._seen[kind] = strikes, reason, min(_FEWEST << rounds, _MOST) if rounds >= 0 else 0

    def clear(self, kind: Glance) -> None:
        """A call of this kind was cached."""
        self._seen.pop(kind, None)
