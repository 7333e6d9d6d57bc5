"""Which samples of a dataset a rank has in an epoch: a plan, which reads nothing and waits for nobody.

The samples are put in an order that the seed gives, and dealt to the ranks as cards are: rank r of w has
those at places r, r + w, r + 2w and so on. What some ranks have together can be dealt among them again in
each epoch. So all ranks agree without talking to each other.

**The order never changes.** It is how a sort, which keeps the order of equals, arranges raw numbers of
Philox, a generator whose numbers depend on nothing but its key and its counter. numpy promises that these
stay the same in all versions, which it does not promise of its ``permutation``.
"""

from __future__ import annotations

import numpy as np

from torchcache2.core.keys import Array, Positions


def permutation(count: int, seed: int, stream: int, part: int = 0) -> Positions:
    """The numbers from 0 to `count` - 1 in a random order that these numbers alone determine.

    Each is from 0 to 2**64 - 1. Orders of different streams, or parts of a stream, are independent.
    """
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, 0, part], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


class Shard:
    """What one rank has of the numbers from 0 to `count` - 1.

    Parameters
    ----------
    count : int
        Samples of the dataset.
    rank, ranks : int
        The number of the rank, and how many there are.
    together : int
        Ranks that follow on each other and are dealt their samples together, anew in each epoch; a divisor
        of `ranks`. 1: a rank always has the same samples.
    seed : int
        From 0 to 2**64 - 1.
    shuffle : bool
        Whether the order of samples changes by epoch; else it is ascending.
    even : {None, "drop", "repeat"}
        Make all ranks have equally many samples: leave out up to ``ranks - 1`` samples of the dataset, or
        give some ranks one of theirs twice. None: they differ by one at most.
    most : int, optional
        Samples that a rank has at most. The others are left out, and are the same ones in each epoch.

    Attributes
    ----------
    samples : ndarray of int64
        What the ranks that are dealt together have in each epoch.
    left_out : int
        Samples that these ranks have not because of `most`.
    least : int
        Samples that every rank has, if `most` is the same for all.
    is_even : bool
        Whether no rank has more than that.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        ranks: int,
        *,
        together: int = 1,
        seed: int = 13,
        shuffle: bool = False,
        even: str | None = None,
        most: int | None = None,
    ) -> None:
        self._seed, self._shuffle, self._together = seed, shuffle, together
        self._group, self._member = divmod(rank, together)
        order = permutation(count, seed, 0)
        mine = order[np.arange(count) % ranks // together == self._group]
        least, rest = divmod(count, ranks)
        each = {None: least + (rest > 0), "drop": least, "repeat": least + (rest > 0)}[even]
        bound = each if most is None else min(each, most)
        self.least = bound if even is not None else min(least, bound)
        self.is_even = self.least == bound
        self.left_out = max(0, min(len(mine), each * together) - bound * together)
        if even == "repeat" and len(mine) < bound * together:
            # Fewer samples than ranks: those that have none get what others have.
            mine = np.resize(mine if len(mine) else order, bound * together)
        self.samples: Array = mine[: bound * together].copy()  # and not a view that keeps all others

    def __len__(self) -> int:
        """Samples of this rank, the same number in each epoch."""
        return max(0, -(-(len(self.samples) - self._member) // self._together))

    def order(self, epoch: int) -> Positions:
        """The samples of this rank in an epoch from 0 on, int64 ``(len(self),)``."""
        dealt = self.samples
        if self._shuffle or self._together > 1:
            dealt = dealt[permutation(len(dealt), self._seed, epoch + 1, self._group)]
        mine = dealt[self._member :: self._together]
        return mine if self._shuffle else np.sort(mine)
