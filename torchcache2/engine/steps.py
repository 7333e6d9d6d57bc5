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

__all__ = ["Call", "Steps", "opaque", "run_steps", "transparent"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
Steps = Generator[Call, Any, T]


def opaque(function: F) -> F:
    """Have `torch.compile` leave out a function and whatever it calls."""
    return _left_out(function, with_calls=True)


def transparent(function: F) -> F:
    """Have `torch.compile` leave out a function, but not what it calls.

    What ``torch.compiler.disable(recursive=False)`` once did: today it leaves out a wrapper, and the
    function itself becomes graphs with guards, which cost more than a hit does.
    """
    return _left_out(function, with_calls=False)


def _left_out(function: F, with_calls: bool) -> F:
    """The function, marked as `torch.compiler.disable` marks one, without its wrapper.

    The compiler takes seconds to import, which is as long as torch itself takes, and most programs never
    compile. So the mark is set where the compiler will look for it: in its C extension, which torch loads.
    """
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        for_calls = action.SKIP if with_calls else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, for_calls)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):  # an older torch marks functions in the compiler itself
        from torch._dynamo.decorators import disable, skip

        return cast(F, (disable if with_calls else skip)(function))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # calls from a graph look for this
    return function


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
