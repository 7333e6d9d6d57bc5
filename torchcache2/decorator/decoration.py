"""`Binding`: what all modules and functions share that one decorator caches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from torchcache2.core.locks import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.probes import Probes
from torchcache2.engine.stack import TierStack
from torchcache2.identity.namespace import History

__all__ = ["Binding"]

_PREFIX = "torchcache_"


class Binding:
    """One use of the decorator: its options, and what all of its caches share."""

    def __init__(self, settings: CacheSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.tiers = TierStack(settings, name)
        self.probes = Probes()
        self.histories: dict[type, History] = {}
        self.creation = ProcessLock(threading.RLock)

    def cache(self, root: Any, plain: Callable[..., Any]) -> ModuleCache:
        """A cache for a module or function, with the options that the module overrides."""
        options: dict[str, Any] = {}
        if isinstance(root, nn.Module):
            for scope in (*map(vars, reversed(type(root).__mro__)), vars(root)):
                options |= {
                    name.removeprefix(_PREFIX): value
                    for name, value in scope.items()
                    if name.startswith(_PREFIX)
                }
        settings = self.settings.replace(options)
        is_shared = settings.shares_tiers_with(self.settings)
        tiers = self.tiers if is_shared else TierStack(settings, self.name)
        history = self.histories.setdefault(type(root), History())
        cache = ModuleCache(settings, tiers, history, self.probes)
        cache.bind(root, plain)
        return cache
