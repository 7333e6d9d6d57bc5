"""`Health`: how a tier responds to faults of its cache directory.

It never raises an exception. It counts each fault, warns once of each kind, and may stop reading or writing,
for a while or for good. If one namespace cannot be written, but its parent folder can, such as one that
another user owns, the others go on; otherwise the whole directory pauses.
"""

from __future__ import annotations

import contextlib
import errno
import time

from torchcache2.core.errors import DamagedError, NewerFormatError
from torchcache2.core.logs import WarnOnce
from torchcache2.core.sizes import size_text
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import is_read_only
from torchcache2.tiers.base import LONGEST_PAUSE, Breaker

# These errors concern the whole directory, whichever namespace shows them.
_OF_ALL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Health(Breaker):
    """The state of one directory as one tier sees it; a breaker of writes.

    Attributes
    ----------
    reads, writes : bool
        Whether the directory can be read, and written, at all.
    faults, corrupt : int
        System calls that failed; damaged rows and files.
    tell : WarnOnce
        Warns once of each kind of fault.
    serves_only : bool
        Whether the directory is read-only for us: change nothing there.
    last : list of Exception
        The last failed system call, if any, as one exception.
    """

    def __init__(
        self, directory: CacheDirectory, tell: WarnOnce | None = None, *, serves_only: bool = False
    ) -> None:
        super().__init__()
        self.tell = WarnOnce() if tell is None else tell
        self.reads, self.writes = True, not serves_only
        self.serves_only = serves_only
        self.faults = self.corrupt = 0
        self.last: list[Exception] = []
        self._directory = directory
        self._refused: dict[str, float] = {}  # folders that cannot be written, and when to try again

    def left_for(self, folder: str) -> float:
        """Seconds until writing to a namespace's folder may be tried; 0 or less: now."""
        return max(self.left, self._refused.get(folder, 0.0) - time.monotonic())

    def may_write(self, folder: str) -> bool:
        """Whether writing to a namespace's folder should be tried now."""
        return self.writes and self.left_for(folder) <= 0.0

    def fault(self, error: Exception, path: str) -> None:
        """Respond to an error of reading; a damaged segment is set aside."""
        if isinstance(error, NewerFormatError):
            self.newer(
                f"{path} is of another version of the format: nothing is read or written in "
                f"{self._directory.path}. Upgrade torchcache2, or give another folder"
            )
        elif isinstance(error, DamagedError):
            self.corrupt += 1
            if self.serves_only:
                self.tell("corrupt", "%s is damaged (%s): rows of it are missing", path, str(error))
                return
            self.tell("corrupt", "%s is damaged (%s): it is set aside, and computed again", path, str(error))
            with contextlib.suppress(OSError):
                self._directory.set_aside(path)
        else:
            self.faults += 1
            # Without the error itself: its frames would keep files open and locked.
            self.last = [OSError(f"{type(error).__name__}: {error}")]
            message = "the cache directory fails at %s, and the cache continues in memory: %s"
            self.tell("fault", message, path, repr(error))

    def damaged(self, path: str, error: Exception, rows: int) -> None:
        """Count damaged rows of a segment that stays as it is."""
        self.corrupt += rows
        self.tell("corrupt", "%s is damaged (%s): rows of it are missing", path, str(error))

    def write_fault(self, error: Exception, path: str) -> None:
        """Respond to an error of writing in a namespace's folder, or in the directory itself.

        If it concerns only that namespace, that is tried again after a minute; otherwise all is, after longer
        and longer pauses.
        """
        if path != self._directory.path and self._is_of_one(error):
            self.faults += 1
            self._refused[path] = time.monotonic() + LONGEST_PAUSE
            message = "%s cannot be written: new rows of this namespace stay in memory (%s)"
            self.tell("unwritable", message, path, str(error))
        elif isinstance(error, OSError) and is_read_only(error):
            self.writes = False
            self.faults += 1
            self.tell("fault", "%s cannot be written: new rows stay in memory (%s)", path, str(error))
        else:
            self.fault(error, path)
            self.failed(is_spared=True)

    def _is_of_one(self, error: Exception) -> bool:
        """Whether an error concerns one namespace, and the others can be written."""
        if not isinstance(error, OSError) or error.errno in _OF_ALL:
            return False
        return self._directory.is_writable()

    def newer(self, message: str) -> None:
        """Stop reading and writing, as the directory is of a later version of the format."""
        self.reads = self.writes = False
        self.tell("newer", "%s", message)

    def full(self, budget: int, *, mirrored: bool = False) -> None:
        """Pause writing: there is no room, and none can be made."""
        self.pause()
        message = (
            "the cache directory %s is full (%s) of rows that are in use, or not ours to delete: new rows "
            "stay in memory. Raise max_persistent_cache_size (of a dataset, disk_size), set policy='lru', or "
            "delete with `torchcache2 prune`"
        )
        if mirrored:
            message = (
                "the local folder %s is full (%s) of rows that the bucket does not have yet, and they are "
                "not uploaded fast enough: new rows stay in memory. Raise max_persistent_cache_size (of a "
                "dataset, disk_size)"
            )
        self.tell("full", message, self._directory.path, size_text(budget))
