"""The disk itself: how fast it is written and read, and what makes measuring it fair."""

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

BATCH = 256
WAYS = {
    "preadv": {},
    "WILLNEED, preadv": {"advise": True},
    "WILLNEED, 2 threads": {"advise": True, "threads": 2},
    "4 threads": {"threads": 4},
    "8 threads": {"threads": 8},
    "16 threads": {"threads": 16},
}  # that a batch is read in; see `Machine`
CHUNK = 4 << 20  # bytes that are given to the system at once


class Machine:
    """One file with all rows, one after the other: the best that the machine can do.

    It is written in chunks of 4 MB and synced, and read in several ways into memory that is there already.
    """

    is_slow = False
    name = "the machine, one file"

    def __init__(self, folder, items, way=None):
        self.folder, self.items = folder, items
        self.path = folder / "rows"
        if way is not None:
            self.name = f"the machine, {way}"
            self.read = partial(self.read, **WAYS[way])

    def write(self):
        data = memoryview(self.items.rows.numpy()).cast("B")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for first in range(0, len(data), CHUNK):
            part = data[first : first + CHUNK]
            assert os.write(descriptor, part) == len(part)
        os.fsync(descriptor)
        os.close(descriptor)

    def open(self):
        self.out = torch.ones(self.items.batch, self.items.width)
        self.targets = [memoryview(row) for row in self.out.numpy()]
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self.threads = ThreadPoolExecutor(16)
        list(self.threads.map(id, range(64)))

    def close(self):
        os.close(self.descriptor)
        self.threads.shutdown()

    def _advise(self, positions):
        size = self.items.row_bytes
        for position in positions.tolist():
            os.posix_fadvise(self.descriptor, position * size, size, os.POSIX_FADV_WILLNEED)

    def _preadv(self, positions, order):
        size = self.items.row_bytes
        for place, position in zip(order.tolist(), positions[order].tolist(), strict=True):
            assert os.preadv(self.descriptor, [self.targets[place]], position * size) == size

    def read(self, positions, threads=1, advise=False):
        order = np.argsort(positions)  # as they lie in the file
        if advise:
            self._advise(positions[order])
        if threads == 1:
            self._preadv(positions, order)
        else:
            list(self.threads.map(lambda i: self._preadv(positions, order[i::threads]), range(threads)))
        return self.out


def seconds(function):
    """That a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def files(folder):
    """The files below a folder."""
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def drop_page_cache(paths):
    """Make the system forget the data of files that are on the disk.

    Directories and inodes stay known, which is to the advantage of stores with many files. Pages that are
    mapped are not dropped, nor are those that are not written yet.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def touch_memory(size):
    """Have the machine provide so much memory, and free it again.

    A virtual machine gives memory that is free back to its host after some seconds, and whoever uses it next,
    the page cache included, would pay for its return: up to 40 times as much as for memory it still has.
    """
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def resident(path):
    """Bytes of a file that are in the page cache."""
    if path.stat().st_size == 0:
        return 0
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    address, result = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(address, ctypes.c_size_t(len(mapped)), result):
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE
