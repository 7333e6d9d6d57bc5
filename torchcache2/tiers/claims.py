"""`Claim`: "this call computes these keys now", so that others wait for the rows instead of computing them.

A claim may span several tiers, such as the memory of one machine and servers of all machines: the call
computes only keys that every tier has granted. A waiting call polls, and holds no claim meanwhile, so two
calls never wait for each other. If the holder gives keys up, is killed or gets stuck, one of the waiting
calls claims them.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from torchcache2.core.keys import Flags, Positions

_NOWHERE: Positions = np.empty(0, np.int64)


@dataclasses.dataclass
class Tally:
    """Counts rows that other processes were computing: those they delivered, and those they gave up."""

    waited: int = 0
    taken_over: int = 0

    def counts(self) -> dict[str, int]:
        """The counts, as `CacheStats` names them."""
        return dataclasses.asdict(self)


class TierClaim(abc.ABC):
    """What one call claims in one tier, of a batch of distinct keys; positions are those of the batch.

    Attributes
    ----------
    pauses : (float, float)
        Seconds between polls: the first, and the longest.
    tally : Tally
        The counts of the tier.
    """

    pauses: tuple[float, float]
    tally: Tally

    @abc.abstractmethod
    def take(self, positions: Positions) -> Positions:
        """Claim keys that have no row and no claim; returns what this call may compute.

        If the tier cannot tell, because of a fault, the call may compute without a claim.
        """

    @abc.abstractmethod
    def look(self, positions: Positions) -> tuple[Flags, Flags]:
        """Whether each key has a row now, and whether it is open: no row, and no process computes it."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give up the claimed keys. Other processes find rows put earlier before they see this release."""


class Claim:
    """Which keys of a batch one call computes, and which it waits for. Used by one thread.

    Without tiers, the call computes all keys, as no other process shares its rows.

    Parameters
    ----------
    count : int
        How many keys there are.
    tiers : sequence of TierClaim
        The fastest first.

    Attributes
    ----------
    mine : ndarray of int64
        Positions in the batch that the call computes.
    others : ndarray of int64
        Positions that another process computes, or has computed since this call missed them; see `wait`.
    appeared : ndarray of int64
        Positions whose rows were there when `wait` last returned. A tier may forget rows: if one is gone
        again, compute it without a claim.
    """

    def __init__(self, count: int, tiers: Sequence[TierClaim] = ()) -> None:
        self._tiers = tiers
        self.mine = self._take(np.arange(count))
        left = np.ones(count, bool)
        left[self.mine] = False
        self.others: Positions = np.flatnonzero(left)
        self.appeared = _NOWHERE

    def wait(self) -> Positions:
        """Block until all of `others` have rows, or their holder gives some up.

        First gives up the keys that this call has claimed and not put.

        Returns
        -------
        ndarray of int64
            Positions that were given up: this call now computes them. `others` loses them, and the keys whose
            rows have `appeared`.
        """
        self.release()
        pauses, due = [tier.pauses[0] for tier in self._tiers], [0.0] * len(self._tiers)
        there, taken = np.zeros(len(self.others), bool), _NOWHERE
        while not there.all():
            asked = np.flatnonzero(~there)
            for depth, tier in enumerate(self._tiers):  # ask a slower tier only for keys open in this one
                if len(asked) == 0 or time.monotonic() < due[depth]:
                    asked = _NOWHERE
                    break
                rows, is_open = tier.look(self.others[asked])
                due[depth] = time.monotonic() + pauses[depth]
                pauses[depth] = min(2 * pauses[depth], tier.pauses[1])
                there[asked[rows]] = True
                tier.tally.waited += int(rows.sum())
                asked = asked[is_open]
            if len(asked):
                taken = self._take(self.others[asked])
                if len(taken):
                    self._tiers[-1].tally.taken_over += len(taken)
                    break
                self.release()  # a slower tier refused what a faster one had granted
            if not there.all():
                time.sleep(max(0.0, due[0] - time.monotonic()))
        self.appeared = self.others[there]
        self.others = np.setdiff1d(self.others[~there], taken, assume_unique=True)
        return taken

    def release(self) -> None:
        """Give up what was claimed and not put; may be called again."""
        for tier in reversed(self._tiers):  # a waiter claims in the faster tier first
            tier.release()

    def _take(self, positions: Positions) -> Positions:
        for tier in self._tiers:
            if len(positions):
                positions = tier.take(positions)
        return positions
