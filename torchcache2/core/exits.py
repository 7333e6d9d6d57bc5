"""`AtExit`: calls a function when the process ends, however Python ends it. `before_pools_end` is earlier."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # it registers before `before_pools_end`, which so comes first
import multiprocessing.process
import multiprocessing.util
import weakref
from collections.abc import Callable
from typing import Any

from torchcache2.core.private import register_before_pools_end

__all__ = ["AtExit", "before_pools_end"]


class AtExit:
    """Calls a function when the process ends, and keeps it alive until then.

    The function that was registered last is called first, as with `atexit`. A process of `multiprocessing`
    does not run the handlers of `atexit` but its own finalizers, the one with the highest `priority` first.

    A child of `os.fork` inherits the handlers: the function has to check in which process it is called.
    """

    def __init__(self, function: Callable[[], None], priority: int) -> None:
        self._function: Callable[[], None] | None = function
        atexit.register(function)
        self._finalizer = None
        if multiprocessing.process.parent_process() is not None:
            self._finalizer = multiprocessing.util.Finalize(None, function, exitpriority=priority)

    def call(self) -> None:
        """Call the function now, and not at the end."""
        function = self._function
        self.cancel()
        if function is not None:
            function()

    def cancel(self) -> None:
        """Do not call the function, and drop the reference to it. This may be called several times."""
        if self._function is not None:
            atexit.unregister(self._function)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._function = self._finalizer = None


def before_pools_end(method: Callable[[], None]) -> None:
    """Call a method when the main thread has ended, unless its object is gone; it comes before `AtExit`.

    After that, nothing may be given to a `concurrent.futures` pool any more. `asyncio` looks up the names of
    hosts in one, so that a network client can make no new connection when the functions of `atexit` run.
    """
    reference: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    register_before_pools_end(call)
