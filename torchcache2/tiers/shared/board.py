"""`Board`: what the processes of a job tell each other, in a small region that all of them map.

Tables consist of 64-bit numbers. One number makes a row valid; it is written last and cleared first, so what
a killed process leaves unfinished is invalid. Rows are written under the job's lock, with four exceptions:
dropping a file, giving a ticket back and a process removing itself are single writes, and for a word of the
head the last writer wins.

==================  =====================================================================================
head                magic, the job's name, its lock, and the words of `Board`
members             the processes: pid, start time
files               of each namespace: inode, dropped inode, bytes, rows, the namespace
holders             which process has which file open: file + 1, member, descriptor
tickets             the numbers under which claims are held; see `Tickets`
==================  =====================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from torchcache2.core.keys import Array, Flags, Positions
from torchcache2.tiers.shared.region import PAGE, Region, is_alive, pages

_SERIAL, _LAST, _MEMBER_OF, _THREAD, _FILE_OF, _SINCE = range(6)  # of a ticket
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
        return bool((is_held & (table[:, _THREAD] == thread) & (table[:, _FILE_OF] == file)).any())

    def take(self, member: int, thread: int, file: int, note: Callable[[Ticket], None]) -> Ticket | None:
        """Take a ticket for one claim of a thread; call with the job's lock. None if none is free.

        Passes the ticket to `note` before it is valid, so that after an interrupt the caller can give it
        back.
        """
        free = np.flatnonzero(self._table[:, _SERIAL] == 0)
        if len(free) == 0:
            for dead in set(self._table[:, _MEMBER_OF].tolist()):
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
        self._table[self._table[:, _MEMBER_OF] == member, _SERIAL] = 0

    def held(self, words: Positions) -> Flags:
        """Whether each word is a claim that is still held; False for 0 and for locations."""
        held: Flags = self._table[-words & _SLOT, _SERIAL] == -words >> _SLOT_BITS
        return held & (words < 0)

    def hopeless(self, words: Positions) -> Iterator[int]:
        """Those claims whose process has ended, or whose computation is stuck."""
        stuck = max(_LEAST_STUCK, 4 * int(self._longest[0]))
        for word in set(words.tolist()):
            row = self._table[-word & _SLOT].tolist()
            if time.monotonic_ns() - row[_SINCE] > stuck or not self._is_alive(row[_MEMBER_OF]):
                yield word


class _Word:
    """A number in the board's head, which is read and written at once."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, board: Board, _: type) -> int:
        return int(board.words[self.place])

    def __set__(self, board: Board, value: int) -> None:
        board.words[self.place] = value


_MAGIC = 0x31_6B6E_6172_6374  # "tcrank1"
_MEMBERS, _FILES, _HOLDERS = 512, 512, 2048  # rows
_SHAPES = [(_MEMBERS, 2), (_FILES, 6), (_HOLDERS, 3), (Tickets.MOST, Tickets.COLUMNS)]
_SIZE = PAGE + sum(pages(8 * rows * columns) for rows, columns in _SHAPES)
_NAME, _LOCK, _LONGEST = 1, 3, 5  # words of the head, beside those of `Board`
_PID, _START = range(2)
_PID_BITS = 22  # the most that Linux gives a pid
_INODE, _DROPPED, _BYTES, _ROWS, _NAMESPACE = range(5)  # of a file; its namespace is two words
_FILE, _MEMBER, _DESCRIPTOR = range(3)
_SMALL, _SUFFICIENT = 30_000, 200_000  # bytes: a budget from the first on counts as at least the second


class Board:
    """The tables of a job.

    Parameters
    ----------
    region : Region or None
        Where they are; None: make them.
    name : bytes
        The job's, 16 bytes.
    lock : int
        Inode of the lock file. A process that has locked another file must not write here.
    budget : int
        Bytes for all processes together; the first process decides.

    Attributes
    ----------
    budget : int
        Bytes that the files and this board together never exceed.
    is_full : int
        1 if rows found no room, and none was made since.
    pressure : int
        Grows when a process needs room: each process then frees what it does not use.
    """

    budget, is_full, pressure = _Word(4), _Word(6), _Word(7)
    _drainer = _Word(8)  # pid and start time of the process that `drains`

    def __init__(self, region: Region | None, name: bytes, lock: int, budget: int) -> None:
        is_new = region is None
        self.region = Region.create(_SIZE) if region is None else region
        self.head = self.region.array("<i8", 0, PAGE // 8)
        self.words = self.head.data  # reading one is several times faster than from an array
        tables, offset = [], PAGE
        for rows, columns in _SHAPES:
            tables.append(self.region.array("<i8", offset, rows * columns).reshape(rows, columns))
            offset += pages(8 * rows * columns)
        self._members, self._files, self._holders, tickets = tables
        # Not a method: the board and `tickets` would form a reference cycle.
        self._is_alive = functools.partial(_is_alive, self._members)
        self.tickets = Tickets(tickets, self.head[_LONGEST : _LONGEST + 1], self._is_alive)
        if is_new:
            self.region.reserve(0, _SIZE)
            self.head[_NAME : _NAME + 2] = np.frombuffer(name, np.int64)
            self.head[_LOCK], self.budget = lock, budget
            self.head[0] = _MAGIC

    @staticmethod
    def is_one(region: Region, name: bytes, lock: int) -> bool:
        """Whether a region has the board of a job."""
        if region.size != _SIZE:
            return False
        head = region.array("<i8", 0, _LOCK + 1)
        return head[0] == _MAGIC and head[_NAME:_LOCK].tobytes() == name and head[_LOCK] == lock

    # Bytes and rows

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return int(self._files[self._files[:, _INODE] != 0, _BYTES].sum())

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return int(self._files[self._live, _ROWS].sum())

    def rows_of(self, file: int) -> int:
        """Rows in a file."""
        return int(self._files[file, _ROWS])

    @property
    def free(self) -> int:
        """Bytes that are left."""
        budget = self.budget
        return (budget if budget < _SMALL else max(budget, _SUFFICIENT)) - _SIZE - self.nbytes

    def charge(self, file: int, size: int) -> bool:
        """Add bytes, or subtract them, for a file; False if so many are not free."""
        if size > 0 and size > self.free:
            return False
        self._files[file, _BYTES] += size
        return True

    def count_rows(self, file: int, count: int) -> None:
        """Add rows, or subtract them, for a file."""
        self._files[file, _ROWS] += count

    # Members

    def enter(self, pid: int, start: int) -> int:
        """List a process as a member; returns its number. `OSError` if there are too many."""
        self.remove_dead()
        free = np.flatnonzero(self._members[:, _PID] == 0)
        if len(free) == 0:
            raise OSError(f"more than {_MEMBERS} processes share one cache")
        member = int(free[0])
        self._members[member, _START] = start
        self._members[member, _PID] = pid
        return member

    def leave(self, member: int) -> None:
        """Remove a process that has left or is dead, with its open files and its claims."""
        self.tickets.give_back_all(member)
        for file in self.strike_out(member):
            self._free_if_unheld(file)

    def strike_out(self, member: int) -> set[int]:
        """Remove a process and its open files; returns these.

        A process may do this to itself without the lock: `remove_dead` then frees the files.
        """
        mine = (self._holders[:, _FILE] != 0) & (self._holders[:, _MEMBER] == member)
        files = set((self._holders[mine, _FILE] - 1).tolist())
        self._holders[mine, _FILE] = 0
        if self._drainer == self._name(member):
            self._drainer = 0
        self._members[member, _PID] = 0
        return files

    def drains(self, member: int) -> bool:
        """Whether this process copies rows to a lasting tier for all: the first to ask, until it leaves.

        Should two ask at once, both do so until they ask again.
        """
        start, pid = divmod(self._drainer, 1 << _PID_BITS)
        if pid != 0 and is_alive(pid, start):
            return self._drainer == self._name(member)
        self._drainer = self._name(member)
        return True

    def _name(self, member: int) -> int:
        return int(self._members[member, _START] << _PID_BITS | self._members[member, _PID])

    def remove_dead(self) -> None:
        """Remove the processes that have ended without leaving."""
        for member in np.flatnonzero(self._members[:, _PID]).tolist():
            if not self._is_alive(member):
                self.leave(member)
        for file in np.flatnonzero(self._files[:, _INODE]).tolist():
            self._free_if_unheld(file)

    # Files

    @property
    def _live(self) -> Flags:
        """Which files are there, and not dropped."""
        inodes = self._files[:, _INODE]
        live: Flags = (inodes != 0) & (inodes != self._files[:, _DROPPED])
        return live

    def file_of(self, namespace: bytes) -> int | None:
        """The number of a namespace's file; None if it has none."""
        same = self._files[:, _NAMESPACE : _NAMESPACE + 2] == np.frombuffer(namespace, np.int64)
        found = np.flatnonzero(self._live & same.all(axis=1))
        return int(found[0]) if len(found) else None

    def inodes(self, file: int) -> memoryview:
        """The inode of a file, and the one that a process has dropped; changes show in them."""
        return self._files[file, :_BYTES].data

    def add_file(self, namespace: bytes, region: Region, member: int, size: int) -> int | None:
        """List a new file of `size` bytes; returns its number, or None if there are too many."""
        free = np.flatnonzero(self._files[:, _INODE] == 0)
        if len(free) == 0:
            return None
        file = int(free[0])
        words = np.frombuffer(namespace, np.int64).tolist()
        self._files[file, 1:] = [0, size, 0, *words]
        if not self.hold(file, region, member):
            return None
        self._files[file, _INODE] = region.inode
        return file

    def hold(self, file: int, region: Region, member: int) -> bool:
        """Record that a process has a file open; False if the table of holders is full."""
        free = np.flatnonzero(self._holders[:, _FILE] == 0)
        if len(free) == 0:
            return False
        self._holders[free[0], 1:] = member, region.descriptor
        self._holders[free[0], _FILE] = file + 1
        return True

    def open(self, file: int) -> Region | None:
        """Open a file through a living process that has it open; None if there is none."""
        inode = int(self._files[file, _INODE])
        for _, member, descriptor in self._holders[self._holders[:, _FILE] == file + 1].tolist():
            pid, start = self._members[member].tolist()
            region = Region.open(pid, start, descriptor, inode)
            if region is not None:
                return region
        return None

    def let_go(self, file: int, member: int) -> None:
        """Record that a process has closed a file; the last one to do so frees it."""
        mine = (self._holders[:, _FILE] == file + 1) & (self._holders[:, _MEMBER] == member)
        self._holders[mine, _FILE] = 0
        self._free_if_unheld(file)

    def drop(self, namespace: bytes) -> None:
        """Hide a namespace's rows from all processes; its memory is freed once all have closed it.

        This needs no lock: dropping rows must work even if the lock is stuck. Should another file take the
        place meanwhile, it has another inode, and stays.
        """
        inodes = self._files[:, _INODE].copy()
        file = self.file_of(namespace)
        if file is not None:
            self._files[file, _DROPPED] = inodes[file]

    def _free_if_unheld(self, file: int) -> None:
        members = self._holders[self._holders[:, _FILE] == file + 1, _MEMBER]
        if self._files[file, _INODE] != 0 and not any(map(self._is_alive, members.tolist())):
            self._holders[self._holders[:, _FILE] == file + 1, _FILE] = 0
            self._files[file, _INODE] = 0
            self.is_full = 0


def _is_alive(members: Array, member: int) -> bool:
    pid, start = members[member].tolist()
    return pid != 0 and is_alive(pid, start)
