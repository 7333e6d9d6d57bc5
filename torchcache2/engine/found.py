"""What of a batch was found, and what is to be computed: `Hits` and `Misses`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcache2.core.arrays import Positions
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows

__all__ = ["Hits", "Misses"]


class Hits(NamedTuple):
    """What the tiers have of a batch.

    Attributes
    ----------
    positions : ndarray of int64, shape (h,)
        Where the items are in the batch, ascending.
    rows : Rows, optional
        Their h rows; None if there are none.
    checked : ndarray of int64, shape (c,)
        Those of the positions whose items are computed again, to be compared.
    """

    positions: Positions
    rows: Rows | None
    checked: Positions


class Misses(NamedTuple):
    """What the tiers do not have of a batch.

    Attributes
    ----------
    positions : ndarray of int64, shape (m,)
        Where the items are in the batch, ascending.
    distinct : ndarray of int64, shape (k,)
        Where each of their keys is first: these items are computed.
    inverse : ndarray of int64, shape (m,), optional
        Which of `distinct` has the key of each miss; None if all keys differ.
    """

    positions: Positions
    distinct: Positions
    inverse: Positions | None

    @classmethod
    def of(cls, keys: Keys, hits: Hits) -> Misses:
        """All items of a batch but the hits."""
        missing = np.ones(len(keys), bool)
        missing[hits.positions] = False
        positions = np.flatnonzero(missing)
        duplicates = keys.take(positions).first_positions()
        if duplicates is None:
            return cls(positions, positions, None)
        return cls(positions, positions[duplicates[0]], duplicates[1])
