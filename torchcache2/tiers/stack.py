"""`TierStack`: the tiers of one budget, and who uses them."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from torchcache2.locks import ProcessLock
from torchcache2.settings import CacheSettings
from torchcache2.tiers.memory import MemoryTier

__all__ = ["TierStack"]


class NamespaceUser(Protocol):
    """A cache."""

    namespace: bytes


class TierStack:
    """The tiers of one budget, and the caches that use them.

    The tiers are made when the first rows come.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._lock = ProcessLock(threading.RLock)  # the garbage collector may close a cache at any point
        self._caches: weakref.WeakSet[NamespaceUser] = weakref.WeakSet()
        self._memory: MemoryTier | None = None

    @property
    def memory(self) -> MemoryTier:
        """The memory tier."""
        with self._lock():
            if self._memory is None:
                device = self.settings.memory_cache_device
                self._memory = MemoryTier(
                    self.settings.memory_budget(),
                    self.settings.policy,
                    None if device is None else torch.device(device),
                    self._in_use,
                )
            return self._memory

    def join(self, cache: NamespaceUser) -> None:
        """Count a cache among those whose namespaces are in use, as long as it lives."""
        with self._lock():
            self._caches.add(cache)

    def leave(self, cache: NamespaceUser) -> None:
        """The cache is closed. The last one takes the tiers with it."""
        with self._lock():
            self._caches.discard(cache)
            memory = self._memory
            if memory is None or self._caches:
                return
            self._memory = None
        memory.close()  # not under the lock: a full tier asks who is left while it holds its own

    def _in_use(self) -> set[bytes]:
        with self._lock():
            return {cache.namespace for cache in list(self._caches)}
