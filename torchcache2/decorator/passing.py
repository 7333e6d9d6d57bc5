"""`Passing`: calls that are not cached, how they are counted, and what is known of them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchcache2.core.settings import CacheSettings, disabled_by_environment, strict_by_environment
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.decorator.bypass import BypassError
from torchcache2.decorator.forward import Computation
from torchcache2.decorator.shortcuts import Glance, Shortcuts
from torchcache2.engine.cache import Cache
from torchcache2.engine.running import Forward
from torchcache2.engine.stack import TierStack
from torchcache2.identity.arguments import Signature

__all__ = ["Passing"]


class Passing(Cache):
    """A cache that some calls pass by, each for a reason."""

    signature: Signature

    def __init__(self, namespace: bytes, settings: CacheSettings, *, tiers: TierStack | None = None) -> None:
        super().__init__(namespace, settings, tiers=tiers)
        self._shortcuts = Shortcuts()
        self._bypass: str | None = None  # the reason of the last call, if it was not cached
        self._reasons: dict[str, str] = {}  # the last text for each reason

    def _cacheable(
        self,
        root: Any,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        kind: Glance,
    ) -> Computation | None:
        """What computes the items of a call; None if it is not cached, which is counted."""
        reason = None if self._is_strict() else self._shortcuts.reason(kind)
        self._bypass = reason
        if reason is not None:
            self.count_bypass(reason, self.signature.count(args, kwargs), "")
            return None
        try:
            return self._computation(root, forward, args, kwargs)
        except BypassError as stop:
            self._step_aside(stop, kind, self.signature.count(args, kwargs))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._do_without(self.signature.count(args, kwargs), error)
        return None

    def _computation(
        self, root: Any, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Computation | None:
        """What computes the items of a call; raises `BypassError` if the call cannot be cached."""
        raise NotImplementedError

    def _why_not_cached(self) -> str | None:
        """Why the last call was not cached; None if it was."""
        if self._closed:
            return "the cache is closed"
        if not self.settings.enabled:
            return "enabled=False"
        if disabled_by_environment():
            return "TORCHCACHE_DISABLE is set"
        reason = self._bypass
        return None if reason is None else f"{reason}: {self._reasons[reason]}"

    def _step_aside(self, stop: BypassError, kind: Glance, items: int) -> None:
        """Count a call that is not cached, or raise if such calls are errors."""
        self._reasons[stop.reason] = stop.text
        self._bypass = stop.reason
        if self._is_strict():
            raise stop.as_error(self._name()) from None
        self.count_bypass(stop.reason, items, stop.text)
        if stop.is_final:
            self._shortcuts.add(kind, stop.reason)

    def _is_strict(self) -> bool:
        return self.settings.strict or strict_by_environment()
