"""`Board`: what the processes of a job tell each other, in a small region that all of them map.

Tables consist of 64-bit numbers. One number makes a row valid; it is written last and cleared first, so what
a killed process leaves unfinished is invalid. Rows are written under the job's lock, with four exceptions:
dropping a file, giving a ticket back and a process removing itself are single writes, and for a word of the
head the last writer wins.

==================  =====================================================================================
head                magic, the job's name, and the words `LOCK` … `WARNED`, and those of `Budget`
members             the processes: pid, start time
files               one for each namespace: state, inode, bytes, rows, flags, the namespace, ranks
holders             which process has which file open: file + 1, member, descriptor
tickets             the numbers under which claims are held; see `Tickets`
==================  =====================================================================================
"""

from __future__ import annotations

import functools

import numpy as np

from torchcache2.core.keys import Array
from torchcache2.tiers.shared.budget import (
    BUDGET,
    DEAD,
    FULL,
    INODE,
    LIVE,
    NAMESPACE,
    RANKS,
    REPLICAS,
    STATE,
    Budget,
)
from torchcache2.tiers.shared.region import PAGE, Region, is_alive, pages
from torchcache2.tiers.shared.tickets import Tickets

_MAGIC = 0x31_6B6E_6172_6374  # "tcrank1"
_MEMBERS, _FILES, _HOLDERS = 512, 512, 2048  # rows
_SHAPES = [(_MEMBERS, 2), (_FILES, 8), (_HOLDERS, 3), (Tickets.MOST, Tickets.COLUMNS)]
_SIZE = PAGE + sum(pages(8 * rows * columns) for rows, columns in _SHAPES)

# Words of the head; `Budget` uses others.
_NAME, _LOCK, _LONGEST, _CHANGES, _PROGRESS, _WARNED = 1, 3, 5, 8, 9, 10
_PID, _START = range(2)
_FILE, _MEMBER, _DESCRIPTOR = range(3)


class Board(Budget):
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
    rank : int
        The bit that stands for this process's rank.
    """

    def __init__(self, region: Region | None, name: bytes, lock: int, budget: int, rank: int) -> None:
        is_new = region is None
        self.rank = rank
        self.region = Region.create(_SIZE) if region is None else region
        head = self.region.array("<i8", 0, PAGE // 8)
        tables, offset = [], PAGE
        for rows, columns in _SHAPES:
            tables.append(self.region.array("<i8", offset, rows * columns).reshape(rows, columns))
            offset += pages(8 * rows * columns)
        self._members, files, self._holders, tickets = tables
        super().__init__(head, files, _SIZE)
        # Not a method: the board and `tickets` would form a reference cycle.
        self._is_alive = functools.partial(_is_alive, self._members)
        self.tickets = Tickets(tickets, self._head[_LONGEST : _LONGEST + 1], self._is_alive)
        if is_new:
            self.region.reserve(0, _SIZE)
            self._head[_NAME : _NAME + 2] = np.frombuffer(name, np.int64)
            self._head[_LOCK], self._head[BUDGET] = lock, budget
            self._head[0] = _MAGIC

    @staticmethod
    def is_one(region: Region, name: bytes, lock: int) -> bool:
        """Whether a region has the board of a job."""
        if region.size != _SIZE:
            return False
        head = region.array("<i8", 0, _LOCK + 1)
        return head[0] == _MAGIC and head[_NAME:_LOCK].tobytes() == name and head[_LOCK] == lock

    def read_progress(self) -> int:
        """A number that grows while the holder of the lock does long work."""
        return int(self._head[_PROGRESS])

    def go_on(self) -> None:
        """Tell processes that wait for the lock that its holder is still working."""
        self._head[_PROGRESS] += 1

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
        self._members[member, _PID] = 0
        return files

    def remove_dead(self) -> None:
        """Remove the processes that have ended without leaving."""
        for member in np.flatnonzero(self._members[:, _PID]).tolist():
            if not self._is_alive(member):
                self.leave(member)
        for file in np.flatnonzero(self._files[:, STATE]).tolist():
            self._free_if_unheld(file)

    # Files

    @property
    def changes(self) -> int:
        """A number that grows when a file is added."""
        return int(self._head[_CHANGES])

    def file_of(self, namespace: bytes) -> int | None:
        """The number of a namespace's file; None if it has none."""
        same = self._files[:, NAMESPACE : NAMESPACE + 2] == np.frombuffer(namespace, np.int64)
        found = np.flatnonzero((self._files[:, STATE] == LIVE) & same.all(axis=1))
        return int(found[0]) if len(found) else None

    def is_live(self, file: int, inode: int) -> bool:
        """Whether no process has dropped a file."""
        files = self._files
        return bool(files.item(file, STATE) == LIVE and files.item(file, INODE) == inode)

    def add_file(
        self, namespace: bytes, region: Region, member: int, size: int, are_replicas: bool = False
    ) -> int | None:
        """List a new file of `size` bytes; returns its number, or None if there are too many."""
        free = np.flatnonzero(self._files[:, STATE] == 0)
        if len(free) == 0:
            return None
        file = int(free[0])
        words = np.frombuffer(namespace, np.int64).tolist()
        self._files[file, 1:] = [region.inode, size, 0, REPLICAS * are_replicas, *words, 0]
        if not self.hold(file, region, member):
            return None
        self._files[file, STATE] = LIVE
        self._head[_CHANGES] += 1
        return file

    def hold(self, file: int, region: Region, member: int) -> bool:
        """Record that a process has a file open; False if the table of holders is full."""
        free = np.flatnonzero(self._holders[:, _FILE] == 0)
        if len(free) == 0:
            return False
        self._holders[free[0], 1:] = member, region.descriptor
        self._holders[free[0], _FILE] = file + 1
        self._files[file, RANKS] |= self.rank
        return True

    def ranks_of(self, file: int) -> int:
        """How many ranks have ever had a file open."""
        return int(self._files[file, RANKS]).bit_count()

    def strangers(self, file: int) -> list[int]:
        """The files of ranks that never had any file in common with the ranks of this one."""
        ranks = self._files[:, RANKS]
        met = np.bitwise_or.reduce(ranks[ranks & ranks[file] != 0])
        return np.flatnonzero((ranks & met == 0) & (self._files[:, STATE] == LIVE)).tolist()

    def warns(self) -> bool:
        """Whether this process is the first one that warns of namespaces; under the lock."""
        before, self._head[_WARNED] = int(self._head[_WARNED]), 1
        return before == 0

    def open(self, file: int) -> Region | None:
        """Open a file through a living process that has it open; None if there is none."""
        inode = int(self._files[file, INODE])
        for _, member, descriptor in self._holders[self._holders[:, _FILE] == file + 1].tolist():
            region = Region.open(int(self._members[member, _PID]), descriptor, inode)
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

        This needs no lock: dropping rows must work even if the lock is stuck.
        """
        file = self.file_of(namespace)
        if file is not None:
            self._files[file, STATE] = DEAD

    def _free_if_unheld(self, file: int) -> None:
        members = self._holders[self._holders[:, _FILE] == file + 1, _MEMBER]
        if self._files[file, STATE] != 0 and not any(map(self._is_alive, members.tolist())):
            self._holders[self._holders[:, _FILE] == file + 1, _FILE] = 0
            self._files[file, STATE] = 0
            if not self.are_replicas(file):
                self._head[FULL] = 0


def _is_alive(members: Array, member: int) -> bool:
    pid, start = members[member].tolist()
    return pid != 0 and is_alive(pid, start)
