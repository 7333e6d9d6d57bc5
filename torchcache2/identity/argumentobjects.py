"""`ObjectKeepers`: modules, tokenizers, functions and other objects among the arguments of calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from torchcache2.core.logs import listed
from torchcache2.core.process import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.identity import sourcecode
from torchcache2.identity.encoding import UnencodableError
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = ["ObjectKeepers", "ObjectSeen"]

_MOST = 64


class ObjectSeen(NamedTuple):
    """An object among the arguments of a call, its keeper, and what that has seen of it for this call."""

    value: Any
    keeper: NamespaceKeeper
    seen: Seen


class ObjectKeepers:
    """A `NamespaceKeeper` for each object that calls have as an argument. Safe under threads.

    Modules are held weakly: what is given to calls for a while, such as a text encoder, can be freed.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._keepers: dict[int, tuple[Callable[[], Any], NamespaceKeeper]] = {}

    def look(self, value: Any, path: str) -> ObjectSeen:
        """What an object is now, by its state and code; `UnencodableError` if that cannot be read."""
        keeper = self._keeper(value)
        # An object of the user's own class may hold data that changes between two calls.
        is_own = sourcecode.origin(type(value)) not in ("installed", "torch")
        if not (isinstance(value, nn.Module) or keeper.notices_all(large=is_own)):
            keeper.distrust_structure()
        seen = keeper.look(value)
        if keeper.unread:
            raise UnencodableError(path, value, f"of which {listed(sorted(keeper.unread))} cannot be read")
        if keeper.generators:
            raise UnencodableError(path, value, "that has a generator of random numbers")
        return ObjectSeen(value, keeper, seen)

    def _keeper(self, value: Any) -> NamespaceKeeper:
        with self._lock():
            reference, keeper = self._keepers.get(id(value), (None, None))
            if reference is None or keeper is None or reference() is not value:
                if len(self._keepers) >= _MOST:
                    self._keepers.clear()
                keeper = NamespaceKeeper(type(value).__name__, CacheSettings(), is_argument=True)
                self._keepers[id(value)] = self._reference(value), keeper
            return keeper

    def _reference(self, value: Any) -> Callable[[], Any]:
        keepers, key = self._keepers, id(value)
        try:
            # A keeper keeps submodules and weights alive, so it goes with its module. `dict.pop` is atomic.
            return weakref.ref(value, lambda _: keepers.pop(key, None) and None)
        except TypeError:
            return lambda: value
