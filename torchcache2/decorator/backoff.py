"""`Backoff`: what could not be cached goes straight to the forward for a while, and is then tried again.

To find out that a call cannot be cached costs as much as caching it: its arguments are put in a key, the
module is looked at, generators and containers are compared. After a few such calls, further calls of the kind
skip all that: a glance at the arguments of a call shows its kind. Calls whose forward drew random numbers are
known by more, the digest of all arguments that are not batched.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_CALLS = 1024  # that go straight to the forward before the next try
_MOST_KINDS = 10_000
_LONG = 64  # a text of more characters is content, rather than a choice of what to compute


def glance(root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
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


class _Failed(NamedTuple):
    """How often caching has failed, why, and how many calls are left before the next try."""

    tries: int
    reason: str
    left: float


class Backoff:
    """The kinds of calls that were not cached, and why. Several threads may use this at the same time.

    After `tries` failures, so many `calls` pass before the next try, and twice as many after each further
    failure.
    """

    def __init__(self, tries: int, calls: int) -> None:
        self._tries, self._calls = tries, calls
        self._seen: dict[Hashable, _Failed] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._seen

    def reason(self, kind: Hashable) -> str | None:
        """The reason to pass a call straight to the forward; None if it should be tried. Counts the call."""
        failed = self._seen.get(kind)
        if failed is None or failed.left == 0:
            return None
        self._seen[kind] = failed._replace(left=failed.left - 1)  # harmless if a thread has just cleared it
        return failed.reason

    def is_final(self, kind: Hashable) -> bool:
        """Whether such calls are never tried again."""
        return kind in self._seen and self._seen[kind].left == math.inf

    def add(self, kind: Hashable, reason: str, *, is_final: bool = False) -> None:
        """Note that a call of this kind was not cached; if that `is_final`, none is tried again."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen = {}
        tries = 1 + (self._seen[kind].tries if kind in self._seen else 0)
        rounds = tries - self._tries
        left = min(self._calls << rounds, _MOST_CALLS) if rounds >= 0 else 0
        self._seen[kind] = _Failed(tries, reason, math.inf if is_final else left)

    def clear(self, kind: Hashable) -> None:
        """Note that a call of this kind was cached."""
        self._seen.pop(kind, None)
