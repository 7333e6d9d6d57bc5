"""`Runner`: runs the forward of a module without its cache."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from torchcache2.decorator.tracing import compilable_call
from torchcache2.engine.steps import Steps
from torchcache2.identity.sourcecode import origin

__all__ = ["Runner"]


class Runner:
    """Runs the forward of one module or function, and knows in which threads it runs at this moment."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._call: Callable[..., Any] | None = None

    def bind(self, plain: Callable[..., Any]) -> None:
        """Say what the forward is; of a module, bound to it."""
        function = plain.__func__ if isinstance(plain, types.MethodType) else None
        self._call = compilable_call() if function and origin(function) == "torch" else None

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
