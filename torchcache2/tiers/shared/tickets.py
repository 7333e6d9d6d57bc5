"""`Tickets`: numbers under which the processes of a job hold claims, in a table of their `Board`.

A row counts while its serial number is not 0: so all that was claimed with a ticket is given up with one
write. A process that sees the number of an expired ticket knows that nobody computes this.
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
    """The number under which a claim is held: a row of the table, and its serial number at this time."""

    slot: int
    serial: int
    pid: int

    @property
    def word(self) -> int:
        """The word that marks it, in the place of a row's location."""
        return -(self.serial << _SLOT_BITS | self.slot)


class Tickets:
    """The tickets of all processes.

    Parameters
    ----------
    table : ndarray of int64, shape (at most `MOST`, `COLUMNS`)
        Serial number (0: free), the last one, member, thread, file, since when.
    longest : ndarray of int64, shape (1,)
        For how long any claim was held at most, in ns.
    is_alive : callable
        Whether the process goes on that is a member of this number.
    """

    MOST, COLUMNS = 1 << _SLOT_BITS, 6

    def __init__(self, table: Array, longest: Array, is_alive: Callable[[int], bool]) -> None:
        self._table, self._longest, self._is_alive = table, longest, is_alive

    def has_one(self, thread: int, file: int) -> bool:
        """Whether a thread holds a claim of a file's keys, through whichever cache of its process."""
        table = self._table
        is_held = table[:, _SERIAL] != 0  # read first: others may write to a free row before the rest is read
        return bool((is_held & (table[:, _THREAD] == thread) & (table[:, _FILE] == file)).any())

    def take(self, member: int, thread: int, file: int, note: Callable[[Ticket], None]) -> Ticket | None:
        """A ticket for one claim of a thread; under the job's lock. None if there are too many.

        `note` is called with it before it counts: if an interrupt comes then, the caller knows it and can
        give it back.
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
        """Give up whatever is claimed with a ticket; needs no lock, as one number says all."""
        row = self._table[ticket.slot]
        if row[_SERIAL] == ticket.serial and ticket.pid == os.getpid():
            took = time.monotonic_ns() - int(row[_SINCE])
            self._longest[0] = max(int(self._longest[0]), took)
            row[_SERIAL] = 0

    def give_back_all(self, member: int) -> None:
        """Give up whatever a process has claimed."""
        self._table[self._table[:, _MEMBER] == member, _SERIAL] = 0

    def held(self, words: Positions) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether the claims that stand where locations will be are held; not if they are 0."""
        held: np.ndarray[tuple[int], np.dtype[np.bool_]]
        held = self._table[-words & _SLOT, _SERIAL] == -words >> _SLOT_BITS
        return held & (words < 0)

    def hopeless(self, words: Positions) -> Iterator[int]:
        """Those of some claims whose process has ended, or whose computation is stuck."""
        stuck = max(_LEAST_STUCK, 4 * int(self._longest[0]))
        for word in set(words.tolist()):
            row = self._table[-word & _SLOT].tolist()
            if time.monotonic_ns() - row[_SINCE] > stuck or not self._is_alive(row[_MEMBER]):
                yield word
