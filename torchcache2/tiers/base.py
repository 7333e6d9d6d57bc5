"""The contract of a tier: a store of rows by key, batches only.

A tier may forget any row at any time, and never returns a row under a key that it was not put under.
All methods may be called from several threads. A fault inside of a tier is a counted miss and one
warning, never an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows

__all__ = ["Found", "Positions", "Tier", "TierStats"]

Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True)
class Found:
    """Which keys of a batch a tier has.

    Attributes
    ----------
    parts : sequence of (ndarray of int64, Rows)
        Positions in the batch and their rows, one part for each schema. The rows' memory is the
        caller's own.
    """

    parts: Sequence[tuple[Positions, Rows]]


@dataclasses.dataclass(frozen=True)
class TierStats:
    """What a tier holds now, and what has happened.

    Attributes
    ----------
    rows, bytes : int
        Held now.
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


class Tier(Protocol):
    """A store of rows by key."""

    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here."""
        ...

    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys; how many were kept. Zero is a fine answer."""
        ...

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""
        ...

    def flush(self) -> None:
        """Return when everything that was put is as durable as the tier makes it."""
        ...

    def close(self) -> None:
        """Flush and let go of every resource; the tier is empty and keeps nothing from then on."""
        ...

    def stats(self) -> TierStats:
        """What is here now."""
        ...
