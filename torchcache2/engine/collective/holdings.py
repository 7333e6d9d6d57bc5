"""`Holdings`: what one rank has of the rows of all, and which ranks have the same memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from weakref import WeakValueDictionary

import numpy as np

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.rows import Parts, Rows, merged
from torchcache2.engine.collective.replicas import Replicas
from torchcache2.engine.stack import TierStack
from torchcache2.identity.encoding import digest
from torchcache2.tiers.make import job_of
from torchcache2.tiers.meeting import machine

__all__ = ["AllHoldings", "Holdings"]


class Holdings:
    """The tiers of one rank, and the replicas of rows that other ranks own.

    Attributes
    ----------
    dropped : dict of bytes
        Namespaces that were dropped, in this order, until the other ranks have dropped them, too.
    """

    def __init__(self, tiers: TierStack) -> None:
        self._tiers = tiers
        self._replicas = Replicas(tiers)
        self._own = os.urandom(16)
        self.dropped: dict[bytes, None] = {}

    @functools.cached_property
    def place(self) -> bytes:
        """16 bytes that are equal for the ranks whose memory is one."""
        job = job_of(self._tiers.settings, self._tiers.name) if self._tiers.tiers[0].is_shared else None
        return self._own if job is None else digest([job, machine().encode()])

    def get(self, keys: Keys) -> Parts:
        """The rows that are in the tiers or among the replicas: one part for each schema."""
        parts = self._tiers.get(keys).parts
        missing = np.ones(len(keys), bool)
        for positions, _ in parts:
            missing[positions] = False
        if not missing.any():
            return list(parts)
        where = np.flatnonzero(missing)
        replicas = self._replicas.get(keys.take(where) if len(where) < len(keys) else keys).parts
        return merged([*parts, *((where[positions], rows) for positions, rows in replicas)])

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in the tiers now."""
        return self._tiers.has(keys)

    def put_replicas(self, keys: Keys, rows: Rows) -> None:
        """Keep rows that another rank owns, as long as there is room for them."""
        self._replicas.put(keys, rows)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""
        self._tiers.drop(namespace)
        self._replicas.drop(namespace)

    @property
    def tiers(self) -> int:
        """A number that is the same for holdings of the same tiers."""
        return id(self._tiers)


class AllHoldings:
    """What this rank has of the rows of all modules that it has called in step, as long as they live."""

    def __init__(self) -> None:
        self._found: WeakValueDictionary[tuple[bytes, int], Holdings] = WeakValueDictionary()

    def add(self, caller: bytes, holdings: Holdings) -> None:
        """Take in what is called now."""
        self._found.pop((caller, holdings.tiers), None)  # what is added again is the last one
        self._found[caller, holdings.tiers] = holdings

    def of(self, caller: bytes, default: Holdings) -> Holdings:
        """What was added last for a caller."""
        found = [holdings for (called, _), holdings in self._found.items() if called == caller]
        return found[-1] if found else default

    def drop(self, namespaces: Iterable[bytes]) -> None:
        """Forget every row of some namespaces, whatever modules they are of."""
        for holdings in list(self._found.values()):
            for namespace in namespaces:
                holdings.drop(namespace)
