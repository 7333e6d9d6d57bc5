"""`SharedClaim`: "this call computes these keys now", so that others wait for the rows.

A claim stands where the location of a row will be, under a ticket of the board. It ends when the row is
published, or when the ticket is returned, whatever was claimed with it: that is one write. Whoever waits
looks at the locations again and again, and holds no claim meanwhile, so that no two wait for each other. What
was given up, also by a process that has ended or is stuck, is claimed by one of those who wait for it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import numpy as np

from torchcache2.core.keys import Array, Keys, Positions
from torchcache2.tiers.base import Claim
from torchcache2.tiers.shared.table import SharedTable
from torchcache2.tiers.shared.tickets import Ticket

_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds
_LOOK = 0.05  # seconds between looks at the processes that are waited for
_NOWHERE: Positions = np.empty(0, np.int64)


class Claims:
    """The claims of one process.

    Parameters
    ----------
    member : int
        The number of the process on the board.
    guarded : callable
        Calls a function, one thread at a time; None if the memory cannot be used any more.

    Attributes
    ----------
    waited, taken_over : int
        Rows that others have computed, and those that they have given up.
    """

    def __init__(self, member: int, guarded: Callable[[Callable[[], Positions]], Positions | None]) -> None:
        self.member, self.guarded = member, guarded
        self.waited = self.taken_over = 0
        self.thread: Callable[[], int] = threading.get_native_id  # in no two processes the same


class SharedClaim(Claim):
    """A claim in a table that processes share; made by one thread of them at a time."""

    _ticket: Ticket | None = None  # `__del__` needs it even if an interrupt came before `__init__`

    def __init__(self, keys: Keys, table: SharedTable, claims: Claims) -> None:
        super().__init__(len(keys))
        self._words, self._table, self._claims = keys.words, table, claims
        self._ordinals = np.full(len(keys), -1)
        self.mine = self._take(self.mine, frozenset())
        self.others = self._without(np.arange(len(keys)), self.mine)

    def wait(self) -> Positions:  # noqa: D102
        self.release()
        tickets, pause, look = self._table.board.tickets, _FIRST_PAUSE, time.monotonic() + _LOOK
        passed: frozenset[int] = frozenset()  # claims that are held, but will come to nothing
        while len(self.others):
            locations = self._locations[self._ordinals[self.others]]
            is_row = locations > 0
            if is_row.all():
                return self._decided(is_row, _NOWHERE)
            if time.monotonic() > look:
                passed |= set(tickets.hopeless(locations[tickets.held(locations)]))
                look = time.monotonic() + _LOOK
            is_open = ~is_row & ~tickets.held(locations)
            if passed:
                is_open |= np.isin(locations, list(passed))
            if not self._table.is_live:
                return self._decided(is_row, self.others[~is_row])
            if is_open.any():
                open_ = self.others[is_open]
                taken = self._claims.guarded(functools.partial(self._take, open_, passed))
                if taken is None:
                    return self._decided(is_row, self.others[~is_row])
                if len(taken):
                    return self._decided(is_row, taken)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self.appeared = _NOWHERE
        return _NOWHERE

    def release(self) -> None:  # noqa: D102
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._table.board.tickets.give_back(ticket)

    __del__ = release

    def _take(self, positions: Positions, passed: frozenset[int]) -> Positions:
        """Claim what can be; the positions that are this call's now, some perhaps without a claim."""
        table = self._table
        ticket, ordinals, locations = table.claim(self._words[positions], self._take_ticket, passed)
        self._ordinals[positions], self._locations = ordinals, table.locations
        is_mine = (ordinals < 0) if ticket is None else (ordinals < 0) | (locations == ticket.word)
        if (locations > 0).any():
            is_mine |= (locations > 0) & ~table.is_readable(locations)
        return positions[is_mine]

    def _take_ticket(self, file: int) -> Ticket | None:
        claims = self._claims
        return self._table.board.tickets.take(claims.member, claims.thread(), file, self._note)

    def _note(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def _without(self, positions: Positions, some: Positions) -> Positions:
        """The positions but for some of them, ascending."""
        left = np.zeros(len(self._words), bool)
        left[positions] = True
        left[some] = False
        return np.flatnonzero(left)

    def _decided(self, is_row: Array, taken: Positions) -> Positions:
        """Note which of `others` have rows, and that this call computes those that it has `taken`."""
        self.appeared = self.others[is_row]
        self.others = self._without(self.others[~is_row], taken)
        self._claims.waited += len(self.appeared)
        self._claims.taken_over += len(taken)
        return taken
