"""`AtExit`: calls a function when the process ends, however Python ends it."""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.util
from collections.abc import Callable

__all__ = ["AtExit"]


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

    def cancel(self) -> None:
        """Do not call the function, and drop the reference to it. This may be called several times."""
        if self._function is not None:
            atexit.unregister(self._function)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._function = self._finalizer = None
