"""`Scratch`: a temporary cache directory, deleted at exit. It also deletes those of runs that were killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from torchcache2.core.exits import AtExit
from torchcache2.files.filesystem import Descriptor, FileSystem

__all__ = ["Scratch"]

_EXIT_PRIORITY = 0  # lower than the writer's, which still writes into the folder
_PREFIX = "torchcache2-"
_CACHE = "cache"
_ALIVE = ".alive"  # a file in the folder; it is locked as long as the run that made the folder goes on


class Scratch:
    """A folder that exists until `remove` is called or the process ends; `OSError` if none can be made."""

    def __init__(self) -> None:
        fs = FileSystem()
        self._remove_leftovers(fs)
        self._pid = os.getpid()
        self._alive: Descriptor | None = None
        while self._alive is None:
            self._top = tempfile.mkdtemp(prefix=_PREFIX)
            alive = fs.create(os.path.join(self._top, _ALIVE))
            if fs.lock(alive, exclusive=True) is not False and fs.links(alive):
                self._alive = alive  # else another run has deleted the folder before the lock
        self._exit = AtExit(self.remove, _EXIT_PRIORITY)

    @property
    def path(self) -> str:
        """The cache directory, which the tier makes."""
        return os.path.join(self._top, _CACHE)

    def remove(self) -> None:
        """Delete the folder; a forked child leaves it to its parent."""
        if os.getpid() == self._pid:
            self._exit.cancel()
            _delete(self._top)
            self._alive = None

    @staticmethod
    def _remove_leftovers(fs: FileSystem) -> None:
        """Delete the folders of this user whose processes are dead."""
        folder = tempfile.gettempdir()
        with contextlib.suppress(OSError):
            for info in fs.listing(folder):
                if not info.is_folder or not info.name.startswith(_PREFIX):
                    continue
                top = os.path.join(folder, info.name)
                with contextlib.suppress(OSError):
                    if not _is_scratch(fs, top):
                        continue
                    alive = fs.open(os.path.join(top, _ALIVE))
                    if fs.lock(alive, exclusive=True):
                        _delete(top)


def _delete(top: str) -> None:
    """Delete a folder; ``.alive`` goes last, so that the next run finds what could not be deleted."""
    cache = os.path.join(top, _CACHE)
    shutil.rmtree(cache, ignore_errors=True)
    if not os.path.lexists(cache):
        shutil.rmtree(top, ignore_errors=True)


def _is_scratch(fs: FileSystem, top: str) -> bool:
    """Whether a run of this user has made a folder, and nobody has put anything else there."""
    if hasattr(os, "getuid") and os.lstat(top).st_uid != os.getuid():
        return False
    listing = {info.name: info.is_folder for info in fs.listing(top)}
    is_known = listing in ({_ALIVE: False}, {_ALIVE: False, _CACHE: True})
    return is_known and len(os.listdir(top)) == len(listing)
