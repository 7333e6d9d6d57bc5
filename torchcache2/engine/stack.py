"""`TierStack`: the tiers of one budget, fastest first, and the caches that use them."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Parts, Rows, merged
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.files.directory import CacheDirectory
from torchcache2.tiers.base import Claim, Found, Tier, claim_in
from torchcache2.tiers.make import Description, InUse, Opened, check_place, job_of, make_tiers

_MOST_DESCRIBED = _MOST_DROPS = 256


class Describer(Protocol):
    """Describes namespaces."""

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """The description of a namespace, as JSON."""
        ...


class NamespaceUser(Describer, Protocol):
    """A cache."""

    namespace: bytes


class Users:
    """The living caches that use some tiers, and the descriptions of their namespaces."""

    def __init__(self) -> None:
        self.described: dict[bytes, Mapping[str, Any]] = {}
        self._lock = ProcessLock(threading.RLock)  # reentrant, as in `TierStack`
        self._caches: weakref.WeakSet[NamespaceUser] = weakref.WeakSet()

    def add(self, cache: NamespaceUser) -> None:
        """Add a cache."""
        with self._lock():
            self._caches.add(cache)

    def discard(self, cache: NamespaceUser) -> bool:
        """Remove a cache; returns whether it was the last one."""
        with self._lock():
            self._caches.discard(cache)
            return not self._caches

    def namespaces(self) -> set[bytes]:
        """The namespaces in use."""
        with self._lock():
            return {cache.namespace for cache in list(self._caches)}

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember the description of a namespace."""
        if len(self.described) >= _MOST_DESCRIBED:
            self.described.clear()
        self.described[namespace] = description

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """The description of a namespace; empty if it is neither remembered nor in use."""
        if namespace in self.described:
            return self.described[namespace]
        with self._lock():
            caches = [cache for cache in list(self._caches) if cache.namespace == namespace]
        return caches[0].description(namespace) if caches else {}


class TierStack:
    """The tiers of one budget, and the caches that use them.

    The tiers are made at the first use.

    Attributes
    ----------
    fills_up : bool
        Whether each row is only in the first tier with room, so that the tiers' capacities add up.

    Raises
    ------
    OptionError
        If rows cannot be kept where the settings say; see `check_place`.
    """

    fills_up = False

    def __init__(self, settings: CacheSettings, name: str = "") -> None:
        self.settings = settings
        self.name = name
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may close a cache
        self._users = Users()  # separate: tiers refer to it, but must not keep the stack alive
        self._tiers: Sequence[Tier] = ()
        self._drops: dict[bytes, object] = {}  # a new object after each drop of a namespace
        self._drops_forgotten = object()  # a new object whenever `_drops` is emptied
        self._finalizer: Any = None
        self._opened = self._check_place()  # connections to a bucket, until tiers take them over

    def _check_place(self) -> Opened | None:
        return check_place(self.settings)

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, fastest first."""
        tiers = self._tiers  # read once: another thread may replace it
        if not tiers:
            with self._lock():
                tiers = self._tiers
                if not tiers:
                    opened, self._opened = self._opened, None
                    tiers = self._made(self._users.namespaces, self._users.description, opened)
                    self._finalizer = weakref.finalize(self, _close, tiers)
                    self._finalizer.atexit = False  # tiers that need it close themselves at exit
                    self._tiers = tiers
        return tiers

    def _made(self, in_use: InUse, description: Description, opened: Opened | None) -> Sequence[Tier]:
        """New tiers; see `make_tiers`."""
        return make_tiers(self.settings, in_use, description, job_of(self.settings, self.name), opened)

    @property
    def directory(self) -> CacheDirectory | None:
        """The folder of the rows; None if no tier has one."""
        return next((tier.directory for tier in self.tiers if tier.directory is not None), None)

    def get(self, keys: Keys) -> Found:
        """The rows that any tier has for these keys.

        Each tier looks for what the faster ones lack, and offers them the rows that it finds.
        """
        return Found(merged(list(chain.from_iterable(self.found(keys)))))

    def found(self, keys: Keys) -> list[Parts]:
        """The parts that `get` merges, by tier."""
        tiers, before = self.tiers, self._last_drop(keys.namespace)
        found = [list(tiers[0].get(keys).parts)]
        for depth, tier in enumerate(tiers[1:], start=1):
            if sum(len(rows) for parts in found for _, rows in parts) == len(keys):
                break
            missing = np.ones(len(keys), bool)
            for positions, _ in chain.from_iterable(found):
                missing[positions] = False
            wanted = np.flatnonzero(missing)
            asked = keys.take(wanted) if len(wanted) < len(keys) else keys
            found.append([])
            for positions, rows in tier.get(asked).parts:
                if self._last_drop(keys.namespace) == before:
                    self._offer(tiers[:depth], asked.take(positions), rows)
                found[-1].append((wanted[positions], rows))
            if self._last_drop(keys.namespace) != before:
                # Rows may have been dropped while they were offered.
                for faster in tiers[:depth]:
                    faster.drop(keys.namespace)
        return found

    def _offer(self, tiers: Sequence[Tier], keys: Keys, rows: Rows) -> None:
        """Offer a slower tier's rows to faster ones, each key once, if memory suffices."""
        try:
            distinct = keys.first_positions()
            if distinct is not None:
                keys, rows = keys.take(distinct[0]), rows.take(torch.from_numpy(distinct[0]))
            for tier in tiers:
                tier.keep_if_room(keys, rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in any tier now."""
        return has_any(self.tiers, keys)

    def claim(self, keys: Keys) -> Claim:
        """Claim distinct keys that `get` has missed; the result says which ones the caller computes.

        Claims them in each tier that supports claims, fastest first.
        """
        return claim_in(self.tiers if self.settings.claims else [], keys)

    def put(self, source: Describer, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys in every tier; returns the most that a tier kept."""
        namespace, tiers = keys.namespace, self.tiers
        if namespace not in self._users.described and any(tier.is_lasting for tier in tiers):
            self._users.describe(namespace, source.description(namespace))
        return max([tier.put(keys, rows) for tier in tiers])

    def forget(self, namespace: bytes) -> None:
        """Forget the rows of a namespace in tiers that are not lasting."""
        for tier in self._tiers:
            tier.let_go(namespace)

    def give_back(self, device: torch.device | None) -> int:
        """Forget the rows in the memory of a device, or of all but the host; returns their bytes there."""
        return sum(tier.give_back(device) for tier in self._tiers)

    def drop_ours(self, namespace: bytes) -> None:
        """Delete the rows of a namespace, but those on disk that others use."""
        self._each(namespace, lambda tier: tier.clear(namespace))

    def drop(self, namespace: bytes) -> None:
        """Delete the rows of a namespace everywhere."""
        self._each(namespace, lambda tier: tier.drop(namespace))

    def _each(self, namespace: bytes, forget: Callable[[Tier], None]) -> None:
        # The slowest tier first: rows that `get` read from it before are then either in a faster tier, which
        # comes next, or are no longer offered.
        for tier in reversed(self.tiers):
            forget(tier)
            if len(self._drops) >= _MOST_DROPS:
                self._drops_forgotten = object()  # first, as `_last_drop` reads it last
                self._drops = {}
            self._drops[namespace] = object()

    def _last_drop(self, namespace: bytes) -> tuple[object, object]:
        """A value that changes with each drop of a namespace."""
        return self._drops.get(namespace), self._drops_forgotten

    def flush(self) -> None:
        """Return once all rows are as durable as the tiers make them."""
        for tier in self._tiers:
            tier.flush()

    def stats(self) -> dict[str, int]:
        """The fields of `CacheStats` about the tiers."""
        counts: Counter[str] = Counter()
        for tier in self.tiers:
            counts.update(tier.counts())
        return dict(counts)

    def join(self, cache: NamespaceUser) -> None:
        """Register a cache as a user of these tiers, as long as it lives."""
        self._users.add(cache)

    def leave(self, cache: NamespaceUser) -> None:
        """Unregister a closed cache; closes the tiers with the last one."""
        with self._lock():
            is_last, opened = self._users.discard(cache), None
            tiers, finalizer = self._tiers, self._finalizer
            if is_last:
                self._tiers, self._finalizer = (), None
                opened, self._opened = self._opened, None
        # Release our lock before tiers take theirs: the garbage collector may call this in a thread that
        # holds a tier's lock.
        if not is_last:
            for tier in tiers:
                if tier.is_lasting:
                    tier.flush()
        elif finalizer is not None:
            finalizer()
        if opened is not None:
            opened.close()


def has_any(tiers: Sequence[Tier], keys: Keys) -> Flags:
    """Whether each key has a row in any of some tiers now."""
    found = np.zeros(len(keys), bool)
    for tier in tiers:
        missing = np.flatnonzero(~found)
        if len(missing):
            found[missing] = tier.has(keys.take(missing) if len(missing) < len(keys) else keys)
    return found


def _close(tiers: Sequence[Tier]) -> None:
    for tier in reversed(tiers):  # a lasting tier first takes what others have
        tier.close()
