"""Which calls are compiled, exported, traced or transformed, and how the plain forward runs.

A cache that a tracer sees becomes part of its graph: rows of one call would be returned for ever. So a call
that is exported, traced or transformed is the plain forward.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchcache2.engine.steps import Steps
from torchcache2.identity.sourcecode import origin

__all__ = ["Runner", "is_exported", "is_traced", "with_own_code"]

F = TypeVar("F", bound=Callable[..., Any])

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def with_own_code(function: F) -> F:
    """The same function with a code object of its own.

    `torch.compile` keeps what it compiles with the code, a few times only: functions of one ``def``, one for
    each module, would use that up together.
    """
    function.__code__ = function.__code__.replace()
    return function


def _compilable_call() -> Callable[..., Any]:
    """A function ``(method, module, args, kwargs)`` that makes a call compilable.

    `torch.compile` starts no graph in functions of torch's own, such as ``nn.Sequential.forward``, but
    follows calls of them.
    """

    def call(
        method: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return method(module, *args, **kwargs)

    return with_own_code(call)


def is_exported() -> bool:
    """Whether Dynamo sees this for `torch.export`, which permits nothing to be left out of the graph.

    Old versions of torch do not tell; there, an export has to be a non-strict one.
    """
    return bool(_is_exporting())


def is_traced() -> bool:
    """Whether a call is exported, traced or transformed. `torch.compile` is none of these."""
    return (
        torch.compiler.is_compiling()  # Dynamo does not see this function, so another tracer is at work
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
        or _get_current_dispatch_mode() is not None
        or _symbolic_trace._is_fx_tracing_flag
        or not all(isinstance(mode, DeviceContext) for mode in _function_modes())  # type: ignore[no-untyped-call]
    )


class Runner:
    """Runs the forward of one module or function, and knows in which threads it runs at this moment."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._call: Callable[..., Any] | None = None

    def bind(self, plain: Callable[..., Any]) -> None:
        """Say what the forward is; of a module, bound to it."""
        function = plain.__func__ if isinstance(plain, types.MethodType) else None
        self._call = _compilable_call() if function and origin(function) == "torch" else None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside of the forward already, which calls itself."""
        return getattr(self._thread, "is_inside", False)

    def run(self, plain: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Run the forward; if it calls its own module, that runs without the cache as well."""
        self._thread.is_inside = True
        try:
            if self._call is not None and isinstance(plain, types.MethodType):
                return (yield self._call, (plain.__func__, plain.__self__, args, kwargs), {})
            return (yield plain, args, kwargs)
        finally:
            self._thread.is_inside = False
