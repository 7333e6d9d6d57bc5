"""How the cache runs outside of the graphs of `torch.compile`, and the forward inside of them.

A cache that a compiler sees becomes part of its graph: every later call would return the rows of the
first one. But `torch.compile` can leave out a function and still compile the functions that it calls: the
cache runs outside of the graph, and the forward of the items that are missing is a graph of its own.

Therefore the code between the caller and the forward is a generator: it yields the calls that it wants to be
made, and `run_steps` makes them. The compiler does not see the generator, but it sees those calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

from torchcache2.core.private import leave_out

__all__ = ["Call", "Steps", "opaque", "run_steps", "transparent"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
Steps = Generator[Call, Any, T]


def opaque(function: F) -> F:
    """Have `torch.compile` leave out a function and everything that it calls."""
    return leave_out(function, with_calls=True)


def transparent(function: F) -> F:
    """Have `torch.compile` leave out a function, but not the functions that it calls."""
    return leave_out(function, with_calls=False)


@transparent
def run_steps(steps: Callable[..., Steps[T]], *args: Any, **kwargs: Any) -> T:
    """Run a generator function, make the calls that it yields, and return what it returns.

    The generator is sent what each call has returned. An exception of a call is raised inside of it.
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
        if running is not None:  # an interrupt came while this function ran, so the generator has not ended
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


class _CarriedError(Exception):
    """Takes the place of an error of a call that a generator may not raise, or that would only close it."""


def _advance(running: Steps[T], value: Any, failures: list[BaseException]) -> tuple[Steps[T] | None, Any]:
    """Resume the generator; returns it and its next call, or None and what it has returned."""
    # This frame must not refer to the exception when it ends: the traceback of the exception refers to the
    # frame, and this cycle would keep the tensors of the call in memory.
    error = failures.pop() if failures else None
    thrown = _CarriedError(error) if isinstance(error, (StopIteration, GeneratorExit)) else error
    try:
        try:
            return running, running.send(value) if thrown is None else running.throw(thrown)
        except StopIteration as stop:
            return None, stop.value
        except _CarriedError:
            pass
        raise cast(BaseException, error)
    finally:
        del error, thrown
