"""`Tickets`: numbers under which processes hold claims, in a table of their job's `Board`.

A row is valid while its serial number is not 0, so one write gives up all claims of a ticket. A process that
sees the number of an expired ticket knows that no process computes that key.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from torchcache2.core.keys import Array, Positions

_SERIAL, _LAST, _MEMBER, _THREAD, _FILE, _SINCE = range(6)
_LEAST_STUCK = 60_000_000_000  # ns
_SLOT_BITS = 10  # of a ticket's word
_SLOT = (1 << _SLOT_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A claim's ticket: a row of the table, and the row's serial number at the time."""

    slot: int
    serial: int
    pid: int

    @property
    def word(self) -> int:
        """The negative number that marks a claimed key, instead of its row's location."""
        return -(self.serial << _SLOT_BITS | self.slot)


class Tickets:
    """The tickets of all processes.

    Parameters
    ----------
    table : ndarray of int64, shape (at most `MOST`, `COLUMNS`)
        Serial number (0: free), last serial number, member, thread, file, time of claiming.
    longest : ndarray of int64, shape (1,)
        The longest time that any claim was held, in ns.
    is_alive : callable
        Whether the process of a member number is alive.
    """

    MOST, COLUMNS = 1 << _SLOT_BITS, 6

    def __init__(self, table: Array, longest: Array, is_alive: Callable[[int], bool]) -> None:
        self._table, self._longest, self._is_alive = table, longest, is_alive

    def has_one(self, thread: int, file: int) -> bool:
        """Whether a thread holds a claim on a file's keys, through any cache of its process."""
        table = self._table
        is_held = table[:, _SERIAL] != 0  # read first: a free row may change before the rest is read
        return bool((is_held & (table[:, _THREAD] == thread) & (table[:, _FILE] == file)).any())

    def take(self, member: int, thread: int, file: int, note: Callable[[Ticket], None]) -> Ticket | None:
        """Take a ticket for one claim of a thread; call with the job's lock. None if none is free.

        Passes the ticket to `note` before it is valid, so that after an interrupt the caller can give it
        back.
        """
        free = np.flatnonzero(self._table[:, _SERIAL] == 0)
        if len(free) == 0:
            for dead in set(self._table[:, _MEMBER].tolist()):
                if not self._is_alive(dead):
                    self.give_back_all(dead)
            free = np.flatnonzero(self._table[:, _SERIAL] == 0)
        if len(free) == 0:
            return None
        slot = int(free[0])
        row = self._table[slot]
        serial = int(row[_LAST]) + 1
        row[_LAST:] = serial, member, thread, file, time.monotonic_ns()
        ticket = Ticket(slot, serial, os.getpid())
        note(ticket)
        row[_SERIAL] = serial
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Give up all claims of a ticket; needs no lock, as this is one write."""
        row = self._table[ticket.slot]
        if row[_SERIAL] == ticket.serial and ticket.pid == os.getpid():
            took = time.monotonic_ns() - int(row[_SINCE])
            self._longest[0] = max(int(self._longest[0]), took)
            row[_SERIAL] = 0

    def give_back_all(self, member: int) -> None:
        """Give up all claims of a process."""
        self._table[self._table[:, _MEMBER] == member, _SERIAL] = 0

    def held(self, words: Positions) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each word is a claim that is still held; False for 0 and for locations."""
        held: np.ndarray[tuple[int], np.dtype[np.bool_]]
        held = self._table[-words & _SLOT, _SERIAL] == -words >> _SLOT_BITS
        return held & (words < 0)

    def hopeless(self, words: Positions) -> Iterator[int]:
        """Those claims whose process has ended, or whose computation is stuck."""
        stuck = max(_LEAST_STUCK, 4 * int(self._longest[0]))
        for word in set(words.tolist()):
            row = self._table[-word & _SLOT].tolist()
            if time.monotonic_ns() - row[_SINCE] > stuck or not self._is_alive(row[_MEMBER]):
                yield word
