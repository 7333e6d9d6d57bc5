"""Memory that processes share, all of which is there from the start: no later write can fail."""

from __future__ import annotations

import os

import torch

from torchcache2.core.sizes import free_memory
from torchcache2.tiers.shared.region import Region

_GIB = 1 << 30
_STEP = 1 << 28  # bytes that are reserved at once: a signal in between does not start it all over


def get_shm_size() -> int:
    """The size of ``/dev/shm`` in whole GiB.

    `SharedCache` takes no memory from there, so that its size limit is not bounded by it.
    """
    status = os.statvfs("/dev/shm")
    return status.f_frsize * status.f_blocks // _GIB


get_shm_size.__module__ = "torchcache2"  # the path that pickles name, wherever this file is


def reserved(size: int) -> Region:
    """A file in memory, all of whose pages are there."""
    if not hasattr(os, "memfd_create"):
        raise NotImplementedError(
            "SharedCache shares memory on Linux only; elsewhere use torch.zeros(...).share_memory_()"
        )
    free = free_memory(torch.device("cpu"))
    reason = ""
    if free is None or size <= free:
        try:
            region = Region.create(size)
            for start in range(0, size, _STEP):
                region.reserve(start, min(_STEP, size - start))
            return region
        except OSError as error:
            reason = f" ({error})"
    available = "an unknown number" if free is None else f"{free:,}"
    raise MemoryError(
        f"a SharedCache of {size:,} bytes does not fit in memory, of which {available} are available{reason}"
        ": use a smaller size_limit_gib, which caches fewer samples, or free memory"
    )
