"""Detects calls that are exported, traced or transformed, and runs the plain forward.

A tracer would turn the rows of one call into constants of its graph. So calls that are exported, traced or
transformed run the plain forward.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from torchcache2.core.private import (
    in_dispatch_mode,
    in_foreign_mode,
    in_forward_ad,
    in_transform,
    is_fx_traced,
    is_jit_traced,
)
from torchcache2.engine.running import Forward
from torchcache2.identity.sourcecode import origin

F = TypeVar("F", bound=Callable[..., Any])

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def with_own_code(function: F) -> F:
    """The same function with a code object of its own.

    `torch.compile` compiles a code object only a few times. Functions made by one ``def``, one for each
    module, would share that limit with the code object.
    """
    function.__code__ = function.__code__.replace()
    return function


def _compilable_call() -> Callable[..., Any]:
    """A function that calls ``method(module, *args, **kwargs)``, so that `torch.compile` can compile it.

    `torch.compile` starts no graph in torch's own functions, such as ``nn.Sequential.forward``, but follows
    calls of them.
    """

    def call(
        method: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return method(module, *args, **kwargs)

    return with_own_code(call)


def is_exported() -> bool:
    """Whether Dynamo runs this for `torch.export`, where nothing may be left out of the graph.

    Always False in old versions of torch: there, only non-strict export works.
    """
    return bool(_is_exporting())


def is_traced() -> bool:
    """Whether a call is exported, traced or transformed. `torch.compile` does not count."""
    return bool(
        torch.compiler.is_compiling()  # Dynamo leaves this function out, so it is another tracer
        or is_jit_traced()
        or in_transform()
        or in_forward_ad()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
        or in_dispatch_mode()
        or is_fx_traced()
        or in_foreign_mode()
    )


def turns_grad_off(forward: Callable[..., Any]) -> bool:
    """Whether `torch.no_grad` or `torch.inference_mode` decorates a forward, so that it makes no graph."""
    function, is_off = getattr(forward, "__func__", forward), False
    while isinstance(function, types.FunctionType) and origin(function) == "torch":
        for cell in function.__closure__ or ():
            mode = getattr(cell.cell_contents, "__self__", cell.cell_contents)
            if isinstance(mode, (torch.no_grad, torch.inference_mode)):
                is_off = getattr(mode, "mode", True)  # the innermost one counts
        function = getattr(function, "__wrapped__", None)
    return is_off


class Runner:
    """Runs a method of an object, or a function, and knows whether this `thread` is inside a call of it."""

    def __init__(self, thread: threading.local) -> None:
        self._thread = thread
        self._call: Callable[..., Any] | None = None

    def bind(self, plain: Callable[..., Any]) -> None:
        """Set the forward; for a module, the bound method."""
        function = plain.__func__ if isinstance(plain, types.MethodType) else None
        self._call = _compilable_call() if function and origin(function) == "torch" else None

    @property
    def is_inside(self) -> bool:
        """Whether the object is calling itself in this thread."""
        return getattr(self._thread, "is_inside", False)

    def run(self, forward: Forward, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the method. If it calls its own object, that call bypasses the cache, too."""
        plain = forward.function
        self._thread.is_inside = True
        try:
            if self._call is not None and isinstance(plain, types.MethodType):
                call = Forward(self._call, forward.compiler)
                return call(plain.__func__, plain.__self__, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self._thread.is_inside = False
