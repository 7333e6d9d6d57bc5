"""`Health`: what the faults of a cache directory are answered with.

Nothing is ever raised: a fault is counted, told once for each kind, and may end reading or writing, for a
while or for good.
"""

from __future__ import annotations

import contextlib
import time

from torchcache2.directory import CacheDirectory
from torchcache2.logs import logger
from torchcache2.segment import DamagedError, NewerFormatError
from torchcache2.storage import is_read_only

__all__ = ["Health"]

_LONGEST_PAUSE = 60.0  # seconds without a try to write, after it has failed again and again


class Health:
    """Of one directory, as one tier has found it.

    Attributes
    ----------
    reads, writes : bool
        Whether it can be read and written at all.
    corrupt, faults : int
        Damaged rows and files that were met, and calls of the system that failed.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self.reads = self.writes = True
        self.corrupt = self.faults = 0
        self._directory = directory
        self._failures = 0  # to write, one after another
        self._paused_until = 0.0
        self._told: set[str] = set()

    @property
    def may_write(self) -> bool:
        """Whether writing should be tried now."""
        return self.writes and time.monotonic() >= self._paused_until

    def fault(self, error: Exception, path: str) -> None:
        """Something failed while reading; a damaged segment is set aside."""
        if isinstance(error, NewerFormatError):
            self.newer(
                f"{path} is of a newer format: nothing is read or written in {self._directory.path}. "
                "Upgrade torchcache2"
            )
        elif isinstance(error, DamagedError):
            self.corrupt += 1
            self.tell("corrupt", "%s is damaged (%s): it is set aside, and computed again", path, str(error))
            with contextlib.suppress(OSError):
                self._directory.set_aside(path)
        else:
            self.faults += 1
            # Not the error itself: who keeps the record would keep files open, and their locks.
            self.tell(
                "fault", "the cache directory fails at %s, and goes on in memory: %s", path, repr(error)
            )

    def write_fault(self, error: Exception, path: str) -> None:
        """Something failed while writing: it is tried again, after longer and longer pauses."""
        if isinstance(error, OSError) and is_read_only(error):
            self.writes = False
            self.faults += 1
            self.tell("fault", "%s cannot be written: new rows stay in memory (%s)", path, str(error))
            return
        self.fault(error, path)
        self._failures += 1
        if self._failures > 1:
            self._paused_until = time.monotonic() + min(_LONGEST_PAUSE, 2.0**self._failures)

    def wrote(self) -> None:
        """Writing has succeeded."""
        self._failures = 0

    def newer(self, message: str) -> None:
        """A later version of the format is there."""
        self.reads = self.writes = False
        self.tell("newer", "%s", message)

    def full(self, budget: int) -> None:
        """There is no room, and none can be made for now."""
        self._paused_until = time.monotonic() + _LONGEST_PAUSE
        self.tell(
            "full",
            "the cache directory %s is full (%d bytes) of rows that are in use: new rows stay in memory. "
            "Raise max_persistent_cache_size, set policy='lru', or delete with `torchcache2 prune`",
            self._directory.path,
            budget,
        )

    def tell(self, kind: str, message: str, *args: object) -> None:
        """Warn, the first time for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message, *args)
