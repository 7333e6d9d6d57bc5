"""`SharedClaim`: claims in memory that processes share.

A claim is a ticket's number in the place where the row's location will be. It ends when the row is published,
or when the call returns its ticket: one write ends all claims under that ticket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.tiers.claims import Tally, TierClaim
from torchcache2.tiers.shared.table import SharedTable
from torchcache2.tiers.shared.tickets import Ticket

_BETWEEN_LOOKS = 0.05  # seconds between checks of the claiming processes


class Claims:
    """The claims of one process.

    Parameters
    ----------
    member : int
        The number of the process on the board.
    guarded : callable
        Calls a function, one thread at a time; returns None if the memory is no longer usable.
    """

    def __init__(self, member: int, guarded: Callable[[Callable[[], Positions]], Positions | None]) -> None:
        self.member, self.guarded = member, guarded
        self.tally = Tally()
        self.thread: Callable[[], int] = threading.get_native_id  # unique over all processes


class SharedClaim(TierClaim):
    """A claim in a table that processes share."""

    pauses = 50e-6, 2e-3
    _ticket: Ticket | None = None  # `__del__` needs it even if `__init__` was interrupted

    def __init__(self, keys: Keys, table: SharedTable, claims: Claims) -> None:
        self.tally = claims.tally
        self._words, self._table, self._claims = keys.words, table, claims
        self._ordinals = np.full(len(keys), -1)
        self._passed: frozenset[int] = frozenset()  # held claims of dead or stuck processes
        self._next_look = 0.0

    def take(self, positions: Positions) -> Positions:  # noqa: D102
        taken = self._claims.guarded(partial(self._take, positions))
        return positions if taken is None else taken

    def look(self, positions: Positions) -> tuple[Flags, Flags]:  # noqa: D102
        tickets, ordinals = self._table.board.tickets, self._ordinals[positions]
        locations = np.where(ordinals < 0, 0, self._table.locations[ordinals])
        is_row, now = locations > 0, time.monotonic()
        is_held = tickets.held(locations)
        if now > self._next_look and not is_row.all():
            if self._next_look:  # skip fresh claims
                self._passed |= set(tickets.hopeless(locations[is_held]))
            self._next_look = now + _BETWEEN_LOOKS
        if self._passed:
            is_held &= ~np.isin(locations, list(self._passed))
        if not self._table.is_live:
            is_held[:] = False
        return is_row, ~is_row & ~is_held

    def release(self) -> None:  # noqa: D102
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._table.board.tickets.give_back(ticket)

    __del__ = release

    def _take(self, positions: Positions) -> Positions:
        """Claim what is open; returns the positions that this call computes, some perhaps without a claim."""
        table = self._table
        words = self._words[positions]
        ticket, ordinals, locations = table.claim(words, self._take_ticket, self._passed)
        self._ordinals[positions] = ordinals
        is_mine = (ordinals < 0) if ticket is None else (ordinals < 0) | (locations == ticket.word)
        if (locations > 0).any():
            is_mine |= (locations > 0) & ~table.is_readable(locations)
        return positions[is_mine]

    def _take_ticket(self, file: int) -> Ticket | None:
        claims = self._claims
        return self._table.board.tickets.take(claims.member, claims.thread(), file, self._note)

    def _note(self, ticket: Ticket) -> None:
        self._ticket = ticket
