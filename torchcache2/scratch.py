"""`Scratch`: a temporary cache directory, deleted at exit; those that killed runs have left go with it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import tempfile

from torchcache2.storage import Descriptor, FileSystem

__all__ = ["Scratch"]

_EXIT_PRIORITY = 0  # after the tier has closed
_PREFIX = "torchcache2-"
_ALIVE = ".alive"  # its lock says that the run that made the folder still goes on


class Scratch:
    """A folder that exists as long as this, and the process."""

    def __init__(self) -> None:
        fs = FileSystem()
        self._remove_leftovers(fs)
        self._pid = os.getpid()
        self._top = tempfile.mkdtemp(prefix=_PREFIX)
        self._alive: Descriptor | None = fs.create(os.path.join(self._top, _ALIVE))
        fs.lock(self._alive, exclusive=True)
        atexit.register(self.remove)
        if multiprocessing.process.parent_process() is not None:
            # Such a process ends without the handlers of `atexit`.
            multiprocessing.util.Finalize(None, self.remove, exitpriority=_EXIT_PRIORITY)

    @property
    def path(self) -> str:
        """The cache directory, which the tier makes."""
        return os.path.join(self._top, "cache")

    def remove(self) -> None:
        """Delete the folder; a forked child leaves it to its parent."""
        if os.getpid() == self._pid:
            atexit.unregister(self.remove)
            shutil.rmtree(self._top, ignore_errors=True)
            self._alive = None

    @staticmethod
    def _remove_leftovers(fs: FileSystem) -> None:
        """Delete the folders of this user whose processes are dead."""
        folder = tempfile.gettempdir()
        with contextlib.suppress(OSError):
            for entry in fs.entries(folder):
                if not entry.is_folder or not entry.name.startswith(_PREFIX):
                    continue
                top = os.path.join(folder, entry.name)
                with contextlib.suppress(OSError):
                    alive = fs.open(os.path.join(top, _ALIVE))
                    is_own = not hasattr(os, "getuid") or os.stat(top).st_uid == os.getuid()
                    if is_own and fs.lock(alive, exclusive=True):
                        shutil.rmtree(top, ignore_errors=True)
