"""How a forward runs: in graphs of `torch.compile`, while the cache around it stays out of them.

If the compiler traced the cache, later calls would return the rows of the first one. So a cached call begins
with `outside`, which turns the compiler off, and a `Forward` turns it on again while it runs. A `Forward`
also marks its own out-of-memory errors, since the cache's own are handled differently; see `OwnMemoryError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchcache2.core.private import CAN_TURN_ON, leave_out, set_compiler
from torchcache2.core.sizes import is_out_of_memory

_OF_FORWARD = "_torchcache2_of_forward"
Compiler = Any  # torch's state of a thread in which it compiles
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def opaque(function: F) -> F:
    """Keep `torch.compile` out of a function and everything that it calls."""
    return leave_out(function, with_calls=True)


def transparent(function: F) -> F:
    """Keep `torch.compile` out of a function, but not out of a `Forward` that it calls."""
    return leave_out(function, with_calls=not CAN_TURN_ON)


@transparent
def outside(function: Callable[..., T], *args: Any) -> T:
    """Call ``function(compiler, *args)`` with `torch.compile` turned off.

    A `Forward` needs the `compiler` to be compiled; None if nothing is being compiled. If this torch cannot
    turn the compiler on again, it is always None, and no forward is compiled.
    """
    compiler = set_compiler(None)
    if compiler is None:
        return function(None, *args)
    try:
        return function(compiler, *args)
    finally:
        set_compiler(compiler)


class Forward:
    """A function that a cache calls for its misses, compiled as it would be without the cache."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler = None) -> None:
        self.function = function
        self.compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        try:
            if self.compiler is None:
                return self.function(*args, **kwargs)
            set_compiler(self.compiler)
            try:
                return self.function(*args, **kwargs)
            finally:
                set_compiler(None)
        except BaseException as error:
            if is_out_of_memory(error):
                setattr(error, _OF_FORWARD, True)  # keeping the error would keep the call's tensors
            raise


class OwnMemoryError(Exception):
    """Raised when the cache's own work has no memory: the caller then computes without the cache."""


def is_of_forward(error: BaseException) -> bool:
    """Whether a `Forward` raised an out-of-memory error, rather than the cache's own work."""
    return hasattr(error, _OF_FORWARD)


def device_of(error: torch.cuda.OutOfMemoryError) -> torch.device | None:
    """The device that has no memory, if the message of the error says so."""
    found = re.search(r"\bGPU (\d+)", str(error))
    return None if found is None else torch.device("cuda", int(found[1]))
