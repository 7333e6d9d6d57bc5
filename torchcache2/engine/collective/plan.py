"""`planned`: which rank is the source of each key of a step: it has the row, or it computes it.

Every rank derives the same plan from what was gathered, so the plan itself is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchcache2.core.keys import Array, Flags, Positions, Words

__all__ = ["Plan", "planned"]


_MANY = 64  # sets of ranks with keys in common


class Plan(NamedTuple):
    """Who does what in a step.

    Attributes
    ----------
    source : ndarray of int64, shape (n,)
        The rank that has the row of each key, or computes it; -1 if nobody has it or asks for it.
    runs : ndarray of bool, shape (W,)
        Which of the ranks that run whole batches only run theirs.
    """

    source: Positions
    runs: Flags


def planned(words: Words, asked: Flags, held: Flags, whole: Flags, turn: int) -> Plan:
    """The plan of a step of W ranks that need n distinct keys.

    Parameters
    ----------
    words : ndarray of uint64, shape (n, 2)
        The keys.
    asked, held : ndarray of bool, shape (n, W)
        Which ranks ask for each key, and which have its row. A rank computes only what it asks for.
    whole : ndarray of bool, shape (W,)
        Which ranks run their whole batch or nothing.
    turn : int
        Ranks that are equal otherwise come in an order that begins with rank ``turn % W``.

    Notes
    -----
    Those that have a row take turns by key. Keys that nobody has are *open*. A `whole` rank gets all of its
    open keys, if no other has one of them yet, and before ranks that can compute parts: then each soon has
    its turn, after which it can compute parts, too. It also runs if nobody else can compute one of its keys.
    The others share the remaining keys, so that each computes as few as possible.
    """
    count, size = asked.shape
    asked, held = np.ascontiguousarray(asked.T), np.ascontiguousarray(held.T)  # there are few ranks
    source, runs = _holders(words, held), np.zeros(size, bool)
    open_keys = asked & (source < 0)
    if not open_keys.any():
        return Plan(source, runs)
    order = [(turn + i) % size for i in range(size)]
    if whole.any():
        _assign_whole(source, runs, open_keys, [rank for rank in order if whole[rank]])
    left = open_keys & (source < 0)
    left[whole] = False
    which = np.flatnonzero(left.any(axis=0))
    if len(which):
        source[which] = _shared(left if len(which) == count else left[:, which], order)
    return Plan(source, runs)


def _holders(words: Words, held: Flags) -> Positions:
    """For each key one of the ranks that have its row, (W, n): the key says which; -1 if none has it."""
    source = np.full(len(words), -1, np.int64)
    holders = held.view(np.uint8).sum(axis=0, dtype=np.int64)
    if not holders.any():
        return source
    left = (words[:, 0] % np.maximum(holders, 1).astype(np.uint64)).astype(np.int64)
    for rank, flags in enumerate(held):
        source[flags & (left == 0)] = rank
        left -= flags
    return source


def _assign_whole(source: Positions, runs: Flags, open_keys: Flags, ranks: Sequence[int]) -> None:
    """Say which `ranks`, in this order, run their whole batch, and give them their open keys, (W, n)."""
    askers = np.count_nonzero(open_keys, axis=0)
    alone = [rank for rank in ranks if (open_keys[rank] & (askers == 1)).any()]
    others = [rank for rank in ranks if rank not in alone]
    for rank in alone:
        _take_all(source, runs, open_keys, rank)
    for rank in others:
        mine = source[open_keys[rank]]
        if len(mine) and (mine < 0).all():
            _take_all(source, runs, open_keys, rank)
    # What is left is open for ranks that also ask for a key that another one has got. Some may have no
    # other asker than such ranks, so these must run after all.
    parts = np.ones(len(open_keys), bool)
    parts[list(ranks)] = False
    needy = (source < 0) & ~open_keys[parts].any(axis=0)
    for rank in others:
        if not runs[rank] and (open_keys[rank] & needy & (source < 0)).any():
            _take_all(source, runs, open_keys, rank)


def _take_all(source: Positions, runs: Flags, open_keys: Flags, rank: int) -> None:
    """Have a rank run its whole batch, and be the source of its open keys that have none."""
    source[open_keys[rank] & (source < 0)] = rank
    runs[rank] = True


def _shared(asked: Flags, order: Sequence[int]) -> Positions:
    """A rank for each key, one of those that ask for it, (W, n), so that their loads are as even as possible.

    Of ranks with equal loads, the first in `order` comes first.
    """
    number, first = _sets(asked)
    sizes = np.bincount(number).tolist()
    which, askers = asked[:, first].T.nonzero()
    ends = np.bincount(which).cumsum().tolist()
    members = [askers[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]
    # A rank's level is its load, and behind it its place in the order, so that levels can be compared.
    levels = [0] * len(asked)
    for place, rank in enumerate(order):
        levels[rank] = place
    parts: list[list[int]] = [[]] * len(members)
    # Those that few ask for come first: the others can then even out the loads. A few large sets may leave
    # uneven loads, so they are given out once more; many small ones do not.
    fewest_first = sorted(range(len(members)), key=lambda i: len(members[i]))
    for i in fewest_first * (1 if len(members) > _MANY else 2):
        for rank, given in zip(members[i], parts[i], strict=False):
            levels[rank] -= given * len(levels)
        members[i].sort(key=levels.__getitem__)
        parts[i] = _filled(levels, members[i], sizes[i])
    ranks = [rank for some, part in zip(members, parts, strict=True) for rank in some[: len(part)]]
    source = np.empty(asked.shape[1], np.int64)
    source[np.argsort(number, kind="stable")] = np.repeat(ranks, [count for part in parts for count in part])
    return source


def _filled(levels: list[int], ranks: Sequence[int], count: int) -> list[int]:
    """Give `count` keys to those of `ranks` whose levels are lowest; they come in this order.

    Returns how many each gets; the last ones, which get none, are left out.
    """
    step = len(levels)
    loads = [levels[rank] // step for rank in ranks]
    total, used = count + loads[0], 1
    while used < len(ranks) and total > used * loads[used]:
        total += loads[used]
        used += 1
    level, more = divmod(total, used)
    given = [level + (i < more) - loads[i] for i in range(used)]
    for rank, added in zip(ranks, given, strict=False):
        levels[rank] += added * step
    return given


def _sets(flags: Flags) -> tuple[Array, Array]:
    """For each column of flags, (W, n), the number of its set; and for each set a column that has it."""
    number: Array = np.zeros(flags.shape[1], np.int64)
    first = number[:1]
    for start in range(0, len(flags), 16):  # sorting is much faster for numbers of 16 bits
        word = np.zeros(len(number), np.uint16)
        for i, row in enumerate(flags[start : start + 16]):
            word |= np.left_shift(row, i, dtype=np.uint16)
        _, first, inverse = np.unique(word, return_index=True, return_inverse=True)
        if start:
            both = number * len(first) + inverse.reshape(-1)
            _, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        number = inverse.reshape(-1)
    return number, first
