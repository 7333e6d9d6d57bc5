"""`apart`: a context in which this thread does something that not all ranks do, so that it takes no steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["apart", "is_apart"]

_APART = ContextVar("torchcache2_apart", default=False)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within this context, cached modules answer this thread without the other ranks."""
    token = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)


def is_apart() -> bool:
    """Whether this thread is within `apart`."""
    return _APART.get()
