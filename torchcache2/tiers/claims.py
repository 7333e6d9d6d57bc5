"""`Claim`: "this call computes these keys now", so that others wait for the rows instead of computing them.

A claim may be held in several tiers, such as the memory of a machine and servers of all machines: the call
computes what all of them have granted. Whoever waits looks again and again, and holds nothing meanwhile, so
that no two wait for each other. What was given up, also by a process that was killed or is stuck, is claimed
by one of those that wait for it.
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
    """Rows that a tier has waited for: those that others have computed, and those that they have given up."""

    waited: int = 0
    taken_over: int = 0

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of them."""
        return dataclasses.asdict(self)


class TierClaim(abc.ABC):
    """What one call claims in one tier, of a batch of distinct keys; positions are those of the batch.

    Attributes
    ----------
    pauses : (float, float)
        Seconds between looks: at first, and at most.
    tally : Tally
        That of the tier.
    """

    pauses: tuple[float, float]
    tally: Tally

    @abc.abstractmethod
    def take(self, positions: Positions) -> Positions:
        """Claim what nobody has claimed, and what has no row; returns what this call may compute.

        If the tier cannot tell, because of a fault, the call may compute without a claim.
        """

    @abc.abstractmethod
    def look(self, positions: Positions) -> tuple[Flags, Flags]:
        """Whether each key has a row now, and whether it is open: has no row, and nobody computes it."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give up what was taken. Rows that were put before are found before others see this."""


class Claim:
    """What one call computes of a batch of distinct keys, and what it waits for. It belongs to one thread.

    Without tiers, it computes all: nobody else puts rows where it does.

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
        Those that somebody else computes, or has computed since they were missed; `wait` decides about them.
    appeared : ndarray of int64
        Those whose rows were there when `wait` returned last. A tier may forget rows: compute what it does
        not find without a claim.
    """

    def __init__(self, count: int, tiers: Sequence[TierClaim] = ()) -> None:
        self._tiers = tiers
        self.mine = self._take(np.arange(count))
        left = np.ones(count, bool)
        left[self.mine] = False
        self.others: Positions = np.flatnonzero(left)
        self.appeared = _NOWHERE

    def wait(self) -> Positions:
        """Block until all of `others` have rows, or some of them were given up.

        What this call has claimed is given up before, unless its rows were put.

        Returns
        -------
        ndarray of int64
            Positions that were given up: this call computes them now. They are no longer in `others`, and
            neither are keys whose rows have `appeared`.
        """
        self.release()
        pauses, due = [tier.pauses[0] for tier in self._tiers], [0.0] * len(self._tiers)
        there, taken = np.zeros(len(self.others), bool), _NOWHERE
        while not there.all():
            asked = np.flatnonzero(~there)
            for depth, tier in enumerate(self._tiers):  # a slower one is asked for what is open in this one
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
                self.release()  # a slower tier has refused what a faster one has granted
            if not there.all():
                time.sleep(max(0.0, due[0] - time.monotonic()))
        self.appeared = self.others[there]
        self.others = np.setdiff1d(self.others[~there], taken, assume_unique=True)
        return taken

    def release(self) -> None:
        """Give up what was claimed and not put; may be called again."""
        for tier in reversed(self._tiers):  # whoever waits in a faster tier claims it in the slower one next
            tier.release()

    def _take(self, positions: Positions) -> Positions:
        for tier in self._tiers:
            if len(positions):
                positions = tier.take(positions)
        return positions
