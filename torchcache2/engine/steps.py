"""How the cache runs outside of the graphs of `torch.compile`, and the forward inside of them.

A cache that a compiler sees becomes part of its graph: rows of one call would be returned for ever. But
`torch.compile` can leave a function out and still compile what that calls: the cache runs outside of the
graph, and the forward of the items that are missing is another graph.

For this, what runs between the caller and the forward is written as a generator that yields the calls to
make, and `run_steps` makes them: the compiler sees nothing of the generator, and all of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.decorators import skip

__all__ = ["Call", "Steps", "opaque", "run_steps", "transparent"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

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
        if running is not None:  # an interrupt came here, outside of the generator
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
    # No frame may keep the exception: its traceback keeps the frame, whose variables would live on.
    error = failures.pop() if failures else None
    try:
        try:
            return running, running.send(value) if error is None else running.throw(error)
        except StopIteration as stop:
            return None, stop.value
        except RuntimeError as wrapped:
            if error is None or wrapped.__cause__ is not error:
                raise
        raise error  # it is a StopIteration, which Python does not let out of a generator
    finally:
        del error
