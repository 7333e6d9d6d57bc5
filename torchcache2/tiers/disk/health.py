"""`Health`: what the faults of a cache directory are answered with.

Nothing is ever raised: a fault is counted, told once for each kind, and may end reading or writing, for a
while or for good. A fault of writing is that of one namespace, such as one that another user has made, while
files can be made beside it; else it is that of the whole directory.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import Counter

from torchcache2.core.logs import logger
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError, NewerFormatError
from torchcache2.files.filesystem import is_read_only

__all__ = ["Health"]

_LONGEST_PAUSE = 60.0  # seconds without a try to write, after it has failed again and again
_MOST_NAMED = 3  # namespaces that cannot be written
_OF_ALL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # wherever they are met


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
        # By namespace, and of the whole directory under None.
        self._failures: Counter[bytes | None] = Counter()  # to write, one after another
        self._paused_until: dict[bytes | None, float] = {}
        self._told: set[str] = set()

    def may_write(self, namespace: bytes) -> bool:
        """Whether writing rows of a namespace should be tried now."""
        until = max(self._paused_until.get(None, 0.0), self._paused_until.get(namespace, 0.0))
        return self.writes and time.monotonic() >= until

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

    def write_fault(self, error: Exception, path: str, namespace: bytes | None = None) -> None:
        """Something failed while writing: it is tried again, after longer and longer pauses."""
        is_forbidden = isinstance(error, OSError) and is_read_only(error)
        if namespace is not None and self._is_of_one(error):
            self.faults += 1
            self._tell_unwritable(path, str(error))
        elif is_forbidden:
            self.writes = False
            self.faults += 1
            self.tell("fault", "%s cannot be written: new rows stay in memory (%s)", path, str(error))
            return
        else:
            namespace = None
            self.fault(error, path)
        self._failures[namespace] += 1
        if self._failures[namespace] > 1 or is_forbidden:
            pause = min(_LONGEST_PAUSE, 2.0 ** self._failures[namespace])
            self._paused_until[namespace] = time.monotonic() + pause

    def _is_of_one(self, error: Exception) -> bool:
        """Whether a fault in a namespace says nothing about the others."""
        if not isinstance(error, OSError) or error.errno in _OF_ALL:
            return False
        return self._directory.is_writable()

    def _tell_unwritable(self, path: str, reason: str) -> None:
        """Warn about a namespace; of many, only the first are named."""
        message = "%s cannot be written: new rows of this namespace stay in memory (%s)"
        if f"{message} {path}" in self._told:
            return
        named = sum(told.startswith(message) for told in self._told)
        if named < _MOST_NAMED:
            self.tell(f"{message} {path}", message, path, reason)
        else:
            self.tell("others", "other namespaces of %s cannot be written either", self._directory.path)

    def wrote(self, namespace: bytes) -> None:
        """Writing has succeeded."""
        self._failures.pop(namespace, None)
        self._failures.pop(None, None)

    def newer(self, message: str) -> None:
        """A later version of the format is there."""
        self.reads = self.writes = False
        self.tell("newer", "%s", message)

    def full(self, budget: int) -> None:
        """There is no room, and none can be made for now."""
        self._paused_until[None] = time.monotonic() + _LONGEST_PAUSE
        self.tell(
            "full",
            "the cache directory %s is full (%d bytes) of rows that are in use, or not ours to delete: new "
            "rows stay in memory. Raise max_persistent_cache_size, set policy='lru', or delete with "
            "`torchcache2 prune`",
            self._directory.path,
            budget,
        )

    def tell(self, kind: str, message: str, *args: object) -> None:
        """Warn, the first time for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message, *args)
