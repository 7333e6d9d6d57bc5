"""`BucketSource`: the bucket below a disk tier, whose segments appear in its local folder.

If rows are missing, the tier asks it to `look`: it fetches the heads of the bucket's segments into the
folder. From then on the tier finds their rows like any others, and `BucketFolder` fetches what is read.
`Mirror` uploads segments sealed in the folder.

Safe under threads, under fork, and for any number of processes with one local folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.utils.data import get_worker_info

from torchcache2.core.places import Bucket
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.base import Signals
from torchcache2.tiers.bucket.heads import Listing
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder

LEAST_LIMIT = 1 << 30  # bytes allowed for a row of a bucket, however small the folder is
_MILLISECOND = 1_000_000  # nanoseconds


class BucketSource:
    """The bucket below one folder.

    Parameters
    ----------
    bucket : Bucket
    path : str
        The local folder.
    budget : int
        Most bytes of the folder. If it is full, or the budget 0, rows that are read are not kept there.
    fs : FileSystem, optional
    objects : Objects, optional
        This process's access to the bucket; closed with this.
    signals : Signals, optional
        Signals between the processes of a job.
    every : float
        Least seconds between listings of the bucket, when rows are missing.
    uploads : bool or None
        Whether to upload segments sealed in the folder; None: also download nothing but what is read.
    flush_first : callable, optional
        Seals unsealed rows; called when the process ends.
    temporary : bool
        Whether the folder is deleted when this is closed.

    Attributes
    ----------
    local, directory : CacheDirectory
        The folder as it is, and with the segments that the bucket has.
    """

    def __init__(
        self,
        bucket: Bucket,
        path: str,
        budget: int,
        *,
        fs: FileSystem | None = None,
        objects: Objects | None = None,
        signals: Signals | None = None,
        every: float = 60.0,
        uploads: bool | None = None,
        flush_first: Callable[[], None] = lambda: None,
        temporary: bool = False,
    ) -> None:
        signals = Signals() if signals is None else signals
        self.objects = Objects(bucket) if objects is None else objects
        if signals.tell is not None:
            self.objects.tell = signals.tell
        self.local = CacheDirectory(path, FileSystem() if fs is None else fs)
        self.folder = BucketFolder(self.objects, self.local, budget)
        self.directory = CacheDirectory(path, self.folder)
        self.limit = max(budget, LEAST_LIMIT)
        self._drops, self._every = signals.drops, every
        self._listings: dict[bytes, Listing] = {}
        self._dropped_at: dict[bytes, int] = {}  # in this process, in milliseconds since 1970
        self._mirror: Mirror | None = None
        if uploads is not None:
            self._mirror = Mirror(
                self.objects, self.local, budget, flush_first, uploads=uploads, temporary=temporary
            )

    def look(self, namespace: bytes, has_all: Callable[[], bool]) -> bool:
        """List a namespace's segments in the bucket, if due.

        Returns whether the folder may have changed. Asks the bucket if rows are missing (`has_all()` is
        False), and once in each process that uploads, except workers: heads of an earlier run may be from
        another bucket, or the bucket may have been emptied since. `NewerFormatError` if a segment is of a
        later version of the format.
        """
        if self._mirror is not None:
            self._mirror.begin()  # this may be a new child
        listing = self._listings.get(namespace) or self._listings.setdefault(
            namespace, Listing(self.objects, self.folder, self.local, namespace, self.limit)
        )
        doubts = self._mirror is not None and self._mirror.uploads and get_worker_info() is None
        if listing.is_quiet(self._every) or ((listing.was_had or not doubts) and has_all()):
            return False
        since = max(self._dropped_at.get(namespace, 0), self._drops() // _MILLISECOND)
        with self.folder.reading():  # its reads come next
            return listing.look(since, self._every)

    def drop(self, namespace: bytes) -> None:
        """Ignore what the bucket has now, without deleting it there."""
        self._dropped_at[namespace] = time.time_ns() // _MILLISECOND
        self.folder.heads.clear()  # those of other namespaces are fetched again

    def wake(self) -> None:
        """Upload the segments sealed just now at once."""
        if self._mirror is not None:
            self._mirror.wake()

    def flush(self) -> None:
        """Return once the folder's segments are in the bucket, or cannot be uploaded."""
        if self._mirror is not None:
            self._mirror.flush()

    def close(self) -> None:
        """Flush, and close the connections. Afterwards nothing in the bucket is found."""
        if self._mirror is not None:
            self._mirror.close()
        self.objects.close()

    def is_busy_here(self) -> bool:
        """Whether uploads depend on this thread, so that it cannot wait for them."""
        return self._mirror is not None and self._mirror.is_busy_here()
