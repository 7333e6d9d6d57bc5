"""`AtExit`: a function that is called when the process ends, in each way in which Python ends it."""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.util
from collections.abc import Callable

__all__ = ["AtExit"]


class AtExit:
    """Calls a function at the end of the process that makes this, and keeps what it needs alive until then.

    The function that was registered last is called first, as with `atexit`. A process of `multiprocessing`
    ends without the handlers of `atexit`, but with its own finalizers: there the highest `priority` is first.

    A child that was made by `os.fork` inherits the handlers of `atexit`: the function itself must see that
    it is called in another process.
    """

    def __init__(self, function: Callable[[], None], priority: int) -> None:
        self._function: Callable[[], None] | None = function
        atexit.register(function)
        self._finalizer = None
        if multiprocessing.process.parent_process() is not None:
            self._finalizer = multiprocessing.util.Finalize(None, function, exitpriority=priority)

    def cancel(self) -> None:
        """Do not call the function any more, and let go of it; may be called again."""
        if self._function is not None:
            atexit.unregister(self._function)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._function = self._finalizer = None
