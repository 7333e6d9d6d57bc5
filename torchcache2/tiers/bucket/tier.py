"""`RemoteTier`: rows that a bucket has, read by ranges.

It is behind the disk tier of the local folder, and keeps nothing itself: rows reach the bucket as segments of
that folder. Which segments the bucket has is told by their heads there, so that most processes never ask.

Safe under threads, under fork, and for any number of processes with one local folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.places import Bucket
from torchcache2.core.process import AtExit, holds
from torchcache2.core.rows import Rows
from torchcache2.files.directory import CacheDirectory
from torchcache2.tiers.base import Found, Signals, Tier, TierStats
from torchcache2.tiers.bucket.arrivals import Arrivals
from torchcache2.tiers.bucket.known import Known
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.reading import read

_EXIT_PRIORITY = 5  # lower than that of the disk tier's writer, higher than that of a temporary folder
_LEAST_LIMIT = 1 << 30


class RemoteTier(Tier):
    """Rows in a bucket.

    Parameters
    ----------
    bucket : Bucket
    local : CacheDirectory
        The folder of the disk tier in front.
    limit : int
        Bytes that a row may have; at least 1 GiB.
    signals : Signals, optional
        What the processes of a job tell each other.
    objects : Objects, optional
        What this process asks of the bucket; the tier closes it.
    mirror : callable, optional
        Makes what brings segments of the folder to the bucket, and back; see `Mirror`.
    every : float
        Seconds after which the bucket may be asked again which segments it has, if rows are missing.
    closed : callable, optional
        Called at the end of `close`, such as to delete a temporary folder.
    """

    name = "remote"
    is_lasting = True

    def __init__(
        self,
        bucket: Bucket,
        local: CacheDirectory,
        limit: int = _LEAST_LIMIT,
        *,
        signals: Signals | None = None,
        objects: Objects | None = None,
        mirror: Callable[[Objects], Mirror] | None = None,
        every: float = 60.0,
        closed: Callable[[], None] | None = None,
    ) -> None:
        signals = Signals() if signals is None else signals
        self.bucket = bucket
        self.objects = Objects(bucket) if objects is None else objects
        if signals.tell is not None:
            self.objects.tell = signals.tell
        self._arrivals = Arrivals(local)
        self._on_closed = closed
        self._pid = os.getpid()
        self._mirror = None if mirror is None else mirror(self.objects)
        self._known = Known(
            self.objects,
            local,
            max(limit, _LEAST_LIMIT),
            every,
            signals.drops,
            self._begin,
            doubts=self._mirror is not None and self._mirror.uploads,
        )
        self._exit = AtExit(self._close_at_exit, _EXIT_PRIORITY)
        self._begin()

    @property
    def cause(self) -> Exception | None:
        """Why the bucket is left out now; None if it is not."""
        return self.objects.cause

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that the bucket has, in fresh memory."""
        try:
            return Found(read(self.objects, self._known, keys, self._arrivals))
        except Exception as error:  # such as a lack of memory; a fault is a miss
            self._known.fault(error, self.bucket.url)
            return Found([])

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in the bucket, as far as its segments were seen."""
        here = np.zeros(len(keys), bool)
        try:
            here[self._known.sought(keys).positions] = True
        except Exception as error:
            self._known.fault(error, self.bucket.url)
        return here

    def look_again(self, namespace: bytes) -> None:
        """Look for heads that other processes have written at the next call."""
        self._known.look_again(namespace)

    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep nothing: rows reach the bucket through the local folder."""
        return 0

    def drop(self, namespace: bytes) -> None:
        """Leave out what the bucket has now; nothing there is deleted."""
        if self.is_busy_here():
            self.later(self.drop, namespace)  # the garbage collector calls this while tables are changed
            return
        self._known.drop(namespace)

    def flush(self) -> None:
        """Return when what was put into the local folder is in the bucket, or cannot be."""
        if self._mirror is not None:
            self._mirror.flush()

    def close(self) -> None:
        """Flush, and close the connections. From then on nothing is found."""
        if self._known.closed:
            return
        if self.is_busy_here():
            self.later(self.close)
            return
        if self._mirror is not None:
            self._mirror.close()
        self._known.close()
        self._exit.cancel()
        self.objects.close()
        if self._on_closed is not None:
            self._on_closed()

    def stats(self) -> TierStats:
        """What the bucket has and the local folder lacks, of the namespaces that were asked for."""
        faults = self._known.faults + self.objects.faults
        return TierStats(self._known.count(), self._known.nbytes, 0, self.objects.corrupt, faults)

    def count(self, namespace: bytes) -> int:
        """How many rows of a namespace the bucket has and the local folder lacks."""
        return self._known.count(namespace)

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of this tier."""
        return super().counts() | {"bytes_up": self.objects.bytes_up, "bytes_down": self.objects.bytes_down}

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Why segments of the bucket cannot be opened, and why it cannot be asked now."""
        return self._known.unopened(namespace) + ([] if self.cause is None else [self.cause])

    def is_busy_here(self) -> bool:
        """Whether this thread is at work in this tier, and the garbage collector calls from there."""
        mirrors = self._mirror is not None and self._mirror.is_busy_here()
        return mirrors or holds(self._known.lock())

    def _begin(self) -> None:
        if self._mirror is not None:
            self._mirror.begin()  # this may be a new child

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child has the handlers of its parent
            self.close()
