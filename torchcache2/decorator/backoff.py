"""`Backoff`: calls that could not be cached bypass the cache for a while, and are then tried again.

Finding out that a call cannot be cached costs as much as caching it: hashing its arguments, checking the
module, comparing generators and containers. After a few such calls, further calls of the kind skip all that:
a glance at a call's arguments shows its kind. Calls whose forward drew random numbers are identified more
precisely, by a digest of all arguments that are not batched.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_CALLS = 1024  # most bypassing calls before the next try
_MOST_KINDS = 10_000
_LONG = 64  # longer texts are content, not a choice of what to compute


def glance(root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind of a call, cheaply: types of arguments, dimensions of tensors, flags and texts."""
    marks = [torch.is_grad_enabled(), getattr(root, "training", None)]
    marks += map(_mark, args)
    for name, value in kwargs.items():
        marks += [name, _mark(value)]
    return tuple(marks)


def _mark(value: Any) -> Any:
    if type(value) in (Tensor, torch.nn.Parameter):  # reading attributes of subclasses may run any code
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
    """The kinds of calls that were not cached, and why. Thread-safe.

    After `tries` failures, `calls` calls bypass the cache before the next try; each further failure doubles
    that number.
    """

    def __init__(self, tries: int, calls: int) -> None:
        self._tries, self._calls = tries, calls
        self._seen: dict[Hashable, _Failed] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._seen

    def reason(self, kind: Hashable) -> str | None:
        """The reason for a call to bypass the cache; None if caching should be tried. Counts the call."""
        failed = self._seen.get(kind)
        if failed is None or failed.left == 0:
            return None
        self._seen[kind] = failed._replace(left=failed.left - 1)  # harmless if a thread has just cleared it
        return failed.reason

    def is_final(self, kind: Hashable) -> bool:
        """Whether such calls are never tried again."""
        return kind in self._seen and self._seen[kind].left == math.inf

    def add(self, kind: Hashable, reason: str, *, is_final: bool = False) -> None:
        """Record that a call of this kind was not cached; if this `is_final`, none is tried again."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen = {}
        tries = 1 + (self._seen[kind].tries if kind in self._seen else 0)
        rounds = tries - self._tries
        left = min(self._calls << rounds, _MOST_CALLS) if rounds >= 0 else 0
        self._seen[kind] = _Failed(tries, reason, math.inf if is_final else left)

    def clear(self, kind: Hashable) -> None:
        """Record that a call of this kind was cached."""
        self._seen.pop(kind, None)
