"""`Mirror`: keeps a local folder and a bucket alike, in threads of its own.

What is sealed in the folder is uploaded, whichever process has written it; what the bucket has comes down as
long as there is room. Of the processes that share a folder one does this, and when it ends another one takes
over. Nothing depends on how a process ends, since what the bucket lacks is found by looking.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from torch.utils.data import get_worker_info

from torchcache2.core.process import ProcessLock, before_pools_end
from torchcache2.files.directory import CacheDirectory
from torchcache2.tiers.bucket.mirroring import Mirroring
from torchcache2.tiers.bucket.objects import Objects

_LOOP = "fsspecIO"  # the thread in which fsspec waits for servers


class Mirror:
    """The mirror of one folder, in each process that uses it.

    A worker of a `DataLoader` mirrors nothing, as its parent does. In a forked child `begin` is to be called.

    Parameters
    ----------
    objects : Objects
    directory : CacheDirectory
        The local folder.
    budget : int
        How many bytes the folder may have; uploads do not depend on it.
    flush_first : callable, optional
        Seals what waits to be written to the folder; called when the process ends.
    uploads : bool
        Whether anything is uploaded; else files only come down.
    temporary : bool
        Whether the folder is deleted when this is closed.
    pause : float
        Seconds between two looks at the folder, for what other processes write.
    silence : float
        Seconds. Who waits for uploads of another process gives up after so long without a sign of them.
    """

    def __init__(
        self,
        objects: Objects,
        directory: CacheDirectory,
        budget: int,
        flush_first: Callable[[], None] = lambda: None,
        *,
        uploads: bool = True,
        temporary: bool = False,
        pause: float = 0.2,
        silence: float = 10.0,
    ) -> None:
        self.uploads = uploads
        self._flush_first = flush_first
        self._make = functools.partial(
            Mirroring,
            objects,
            directory,
            budget,
            self._close_at_exit,
            uploads=uploads,
            temporary=temporary,
            pause=pause,
            silence=silence,
        )
        self._lock = ProcessLock(threading.RLock)  # the garbage collector may close this at any point
        self._running: Mirroring | None = None
        self._is_closed = False
        before_pools_end(self._flush_at_end)

    def begin(self) -> None:
        """Begin to mirror in this process, if it should and does not yet; this may be called often."""
        if self._is_closed or self._mine() is not None or get_worker_info() is not None:
            return
        with self._lock():
            if self._mine() is None:
                self._running = self._make()
                self._running.start()

    def wake(self) -> None:
        """Have what was written to the folder just now be uploaded at once."""
        running = self._mine()
        if running is not None:
            running.wake()

    def flush(self) -> None:
        """Return when the bucket has what is sealed in the folder now; warns if that cannot be had."""
        self.begin()
        running = self._mine()
        if running is not None and not self.is_busy_here():
            running.flush()

    def close(self) -> None:
        """Flush, and end the threads; not to be called where this `is_busy_here`."""
        if self._is_closed:
            return
        self.flush()
        with self._lock():
            self._is_closed = True
            running, self._running = self._mine(), None
        if running is not None:
            running.end()

    def is_busy_here(self) -> bool:
        """Whether uploads depend on this thread, so that it cannot wait for them.

        The garbage collector may close a tier in any thread.
        """
        running = self._mine()
        here = threading.current_thread()
        return here.name == _LOOP or (running is not None and running.is_one_of_ours(here))

    def _mine(self) -> Mirroring | None:
        """The threads of this process, if there are any; a forked child has not inherited its parent's."""
        running = self._running
        return running if running is not None and running.pid == os.getpid() else None

    def _flush_at_end(self) -> None:
        if self._mine() is not None:
            self._flush_first()
            self.flush()

    def _close_at_exit(self) -> None:
        if self._mine() is not None:
            self.close()
