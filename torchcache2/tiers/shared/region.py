"""`Region`: a file in memory that several processes map.

It has no name in any folder: a process opens it through ``/proc/<pid>/fd/<n>`` of a living process that has
it open, which the system allows only to the same user. The system frees it when the last process that maps it
ends, even if killed. It is sparse: its size is address space; only reserved or written parts take memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Array

PAGE = mmap.PAGESIZE
_NAME = "torchcache2"  # which the system shows
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; Python does not define it


class SharingError(Exception):
    """The system, or this process, cannot share memory; the message says why."""


def pages(size: int) -> int:
    """A size rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def start_time(pid: int) -> int:
    """When a process was started, in the system's ticks; 0 if it has ended.

    A zombie counts as ended. Pid and start time together identify a process, as the system reuses pids.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # a name may have spaces and parentheses
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_alive(pid: int, start: int) -> bool:
    """Whether the process that was started at that time still runs."""
    return start != 0 and start_time(pid) == start


class Place(NamedTuple):
    """A process, by its pid and start time, and its descriptor of a file with this inode."""

    pid: int
    start: int
    descriptor: int
    inode: int


class Region:
    """A file in memory and its mapping; two descriptors.

    Attributes
    ----------
    descriptor : int
        Others open the file through it.
    inode : int
        Identifies the file.
    size : int
        Bytes of address space.
    """

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        self.descriptor, self.inode, self.size = descriptor, status.st_ino, status.st_size
        # Never closed explicitly: the mapping ends with the last array or tensor in it.
        self._map = mmap.mmap(descriptor, self.size)
        self._rows: dict[int, Tensor] = {}

    @classmethod
    def create(cls, size: int) -> Region:
        """A new file of zeros, none of which takes memory yet."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def place(self) -> Place:
        """Where others find the file while this process lives and keeps it."""
        pid = os.getpid()
        return Place(pid, start_time(pid), self.descriptor, self.inode)

    @classmethod
    def open(cls, pid: int, start: int, descriptor: int, inode: int) -> Region | None:
        """The file at a `Place`; None if the process has ended, or the descriptor is closed or reused."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            # Opening an unknown file may block, or worse. A file on disk may have such a name and inode, too.
            is_ours = os.readlink(path).startswith(f"/memfd:{_NAME} ")
            if not is_ours or not is_alive(pid, start) or os.stat(path).st_ino != inode:
                return None
            new = cls.create(PAGE)  # all of them are on one device
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        status = os.fstat(mine)
        if (status.st_dev, status.st_ino) != (os.fstat(new.descriptor).st_dev, inode):
            os.close(mine)
            return None
        return cls(mine)

    def array(self, dtype: str, offset: int, count: int) -> Array:
        """`count` numbers from a byte on; writing to them writes to the file."""
        return np.frombuffer(self._map, dtype, count, offset)

    def rows(self, row_bytes: int) -> Tensor:
        """The whole file as rows, uint8 ``(n, row_bytes)``: row i begins at byte ``i * row_bytes``."""
        found = self._rows.get(row_bytes)
        if found is None:
            count = self.size // row_bytes
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=count * row_bytes)
            found = self._rows[row_bytes] = data.view(count, row_bytes)
        return found

    def reserve(self, offset: int, size: int) -> None:
        """Give a range memory, so that writing there never fails; `OSError` if there is none."""
        os.posix_fallocate(self.descriptor, offset, size)

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of whole pages back; they read as zeros from then on."""
        self._map.madvise(mmap.MADV_REMOVE, offset, size)

    def populate(self, start: int, end: int) -> None:
        """Map the pages of a range now, to write there: cheaper than a page fault for each."""
        start = start // PAGE * PAGE
        with contextlib.suppress(OSError):  # an older kernel
            self._map.madvise(_POPULATE_WRITE, start, end - start)
