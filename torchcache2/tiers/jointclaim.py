"""`JointClaim`: a claim in two tiers, such as of the ranks of a machine, and of those of all machines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchcache2.core.keys import Keys, Positions
from torchcache2.tiers.base import Claim

_NOWHERE: Positions = np.empty(0, np.int64)


class JointClaim(Claim):
    """What was claimed in both tiers.

    What the near one grants is claimed in the far one, now and whenever others have given it up. This call
    computes what both have granted. While it waits in one of them, it holds nothing in the other.

    Parameters
    ----------
    near : Claim
        Of all keys.
    keys : Keys
    claim : callable
        Claims keys in the far tier.
    """

    def __init__(self, near: Claim, keys: Keys, claim: Callable[[Keys], Claim]) -> None:
        super().__init__(len(keys))
        self._near, self._keys, self._claim = near, keys, claim
        self._far: list[tuple[Positions, Claim]] = []  # and where its keys are in the batch
        self.mine = self._claimed(near.mine)
        self.others = self._undecided()

    def wait(self) -> Positions:  # noqa: D102
        appeared = [_NOWHERE]
        taken = self._wait(appeared)
        self.appeared, self.others = np.sort(np.concatenate(appeared)), self._undecided()
        return taken

    def release(self) -> None:  # noqa: D102
        for _, far in self._far:  # first: whoever is waiting near claims it there next
            far.release()
        self._near.release()

    def _wait(self, appeared: list[Positions]) -> Positions:
        self.release()
        self._far = [(where, far) for where, far in self._far if len(far.others)]
        while len(self._near.others):
            left = self._near.wait()
            appeared.append(self._near.appeared)
            if len(left) and len(taken := self._claimed(left)):
                return taken
        self._near.release()  # what it has granted is somebody else's in the far tier
        for where, far in self._far:
            if len(far.others):
                left = far.wait()
                appeared.append(where[far.appeared])
                if len(left):
                    return where[left]
        return _NOWHERE

    def _claimed(self, positions: Positions) -> Positions:
        """Those of some positions that the far tier grants, too."""
        far = self._claim(self._keys.take(positions))
        self._far.append((positions, far))
        return positions[far.mine]

    def _undecided(self) -> Positions:
        return np.sort(np.concatenate([self._near.others, *(where[far.others] for where, far in self._far)]))
