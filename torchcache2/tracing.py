"""How caching and PyTorch's compilers and tracers keep out of each other's way.

A cache that a tracer sees becomes part of its graph: rows of one call would be returned for ever. So a call
that is exported, traced or transformed is the plain forward. `torch.compile` is different: it can leave
a function out and still compile what that calls. The cache runs outside of the graph, and the
forward of the items that are missing is a graph of its own.

For this, what runs between the caller and the forward is written as a generator that yields the calls to
make, and `run_steps` makes them: the compiler sees nothing of the generator, and all of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.decorators import skip
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = [
    "Call",
    "Steps",
    "entry",
    "is_exported",
    "is_traced",
    "opaque",
    "run_steps",
    "transparent",
    "with_own_code",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
Steps = Generator[Call, Any, T]


def opaque(function: F) -> F:
    """Have `torch.compile` leave out a function and whatever it calls."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def transparent(function: F) -> F:
    """Have `torch.compile` leave out a function, but not what it calls.

    What ``torch.compiler.disable(recursive=False)`` once did: today it leaves out a wrapper, and the
    function itself becomes graphs with guards, which cost more than a hit does.
    """
    return cast(F, skip(function))


def with_own_code(function: F) -> F:
    """The same function with a code object of its own.

    `torch.compile` keeps what it compiles with the code, a few times only: functions of one ``def``, one for
    each module, would use that up together.
    """
    function.__code__ = function.__code__.replace()
    return function


def entry() -> Callable[..., Any]:
    """A function ``(method, module, args, kwargs)`` that makes a call compilable.

    `torch.compile` starts no graph in functions of torch's own, such as ``nn.Sequential.forward``, but
    follows calls of them.
    """

    def entry(
        method: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return method(module, *args, **kwargs)

    return with_own_code(entry)


def is_exported() -> bool:
    """Whether Dynamo sees this for `torch.export`, which permits nothing to be left out of the graph.

    Old versions of torch do not tell; there, an export has to be a non-strict one.
    """
    return bool(_is_exporting())


def is_traced() -> bool:
    """Whether a call is exported, traced or transformed. `torch.compile` is none of these."""
    return (
        torch.compiler.is_compiling()  # by a tracer that is not Dynamo: here is what Dynamo does not see
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
        or _get_current_dispatch_mode() is not None
        or _symbolic_trace._is_fx_tracing_flag
        or not all(isinstance(mode, DeviceContext) for mode in _function_modes())  # type: ignore[no-untyped-call]
    )


@transparent
def run_steps(steps: Callable[..., Steps[T]], *args: Any, **kwargs: Any) -> T:
    """What a generator function returns, after making the calls that it yields.

    It is sent what a call has returned; an exception of a call is raised inside of it.
    """
    running, call = _start(steps, args, kwargs)
    try:
        while running is not None:
            function, arguments, keywords = call
            value, failures = None, []
            try:
                value = function(*arguments, **keywords)
            except BaseException as error:
                failures.append(error)
            running, call = _resume(running, value, failures)
    finally:
        if running is not None:  # interrupted here, outside of the generator
            _close(running)
    return call  # type: ignore[no-any-return]


@opaque
def _start(steps: Callable[..., Steps[T]], args: Any, kwargs: Any) -> tuple[Steps[T] | None, Any]:
    return _advance(steps(*args, **kwargs), None, [])


@opaque
def _resume(running: Steps[T], value: Any, failures: list[BaseException]) -> tuple[Steps[T] | None, Any]:
    return _advance(running, value, failures)


@opaque
def _close(running: Steps[Any]) -> None:
    running.close()


def _advance(running: Steps[T], value: Any, failures: list[BaseException]) -> tuple[Steps[T] | None, Any]:
    """The generator and its next call, or None and what it has returned."""
    # No frame keeps the exception: its traceback would keep the frame, and both all that was in use.
    error = failures.pop() if failures else None
    try:
        try:
            return running, running.send(value) if error is None else running.throw(error)
        except StopIteration as stop:
            return None, stop.value
        except RuntimeError as wrapped:
            if error is None or wrapped.__cause__ is not error:
                raise
        raise error  # a StopIteration, which Python does not let out of a generator
    finally:
        del error
