"""The contract of a tier: a store of rows by key, batches only.

A tier may forget any row at any time, and never returns a row under a key that it was not put under.
All methods may be called from several threads. A fault inside of a tier is a counted miss and one
warning, never an exception.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from torchcache2.core.arrays import Positions
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.files.directory import CacheDirectory

__all__ = ["Claim", "Found", "NoClaim", "Tier", "TierStats"]


@dataclasses.dataclass(frozen=True)
class Found:
    """Which keys of a batch a tier has.

    Attributes
    ----------
    parts : sequence of (ndarray of int64, Rows)
        Positions in the batch and their rows, one part for each schema. No tier refers to the memory of
        these rows, so the caller may write to it.
    """

    parts: Sequence[tuple[Positions, Rows]]


@dataclasses.dataclass(frozen=True)
class TierStats:
    """What is in a tier now, and what has happened.

    Attributes
    ----------
    rows, bytes : int
        The rows that the tier has, and how many bytes they take.
    evictions : int
        Rows forgotten to make room.
    corrupt : int
        Damaged rows and files that were met.
    faults : int
        Calls of the system that failed.
    """

    rows: int
    bytes: int
    evictions: int
    corrupt: int = 0
    faults: int = 0


class Claim(Protocol):
    """Which of some missing keys the caller computes, and which others are computing; see `Tier.claim`.

    Attributes
    ----------
    mine : ndarray of int64, shape (m,)
        Positions of the keys that the caller computes now, ascending.
    others : ndarray of int64, shape (o,)
        Positions of the keys that others compute, or have put meanwhile, ascending.
    """

    mine: Positions
    others: Positions

    def wait(self) -> Positions:
        """Return when some of `others` are decided, which are then others no more.

        The positions that the caller has to compute now, as who had claimed them has given up. Those that
        are decided otherwise have been put. What the caller still claims is released first.
        """
        ...

    def release(self) -> None:
        """Give up what is claimed and was not put; may be called again."""
        ...


class NoClaim:
    """The caller computes everything: nobody else could."""

    def __init__(self, count: int) -> None:
        self.mine: Positions = np.arange(count)
        self.others: Positions = np.empty(0, np.int64)

    def wait(self) -> Positions:
        """Nothing is waited for."""
        return self.others

    def release(self) -> None:
        """Nothing is claimed."""


class Tier(abc.ABC):
    """A store of rows by key.

    Attributes
    ----------
    name : str
        The name of the tier in `CacheStats`, as in ``disk_rows``.
    is_lasting : bool
        Whether rows stay when the cache that put them is closed. Their namespaces are then described, for
        whoever finds the rows later.
    directory : CacheDirectory or None
        The folder where its rows are; None if they are in no folder.
    """

    name: ClassVar[str]
    is_lasting: ClassVar[bool] = False
    directory: CacheDirectory | None = None

    @abc.abstractmethod
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here."""

    @abc.abstractmethod
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, or only some of them, or none; returns how many were kept."""

    def claim(self, keys: Keys) -> Claim | None:
        """Claim distinct keys that are missing here; None if the tier has no claims, as nobody shares it."""
        return None

    def offer(self, keys: Keys, rows: Rows) -> int:
        """Keep rows as `put` does, but forget no row that is in use for them: a slower tier has them too."""
        return self.put(keys, rows)

    @abc.abstractmethod
    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Return when everything that was put is as durable as the tier makes it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and free every resource. From then on the tier has no rows, and keeps none."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """What is here now."""

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of this tier; counts of the same name are added up over all tiers."""
        stats = self.stats()
        own = {"rows": stats.rows, "bytes": stats.bytes, "evictions": stats.evictions}
        shared = {"corrupt": stats.corrupt, "faults": stats.faults}
        return {f"{self.name}_{count}": value for count, value in own.items()} | shared

    def describe(self, namespace: bytes, description: Mapping[str, Any], *, create: bool) -> None:  # noqa: B027
        """Keep a newer description of a namespace; if there is none yet, only with `create`."""
