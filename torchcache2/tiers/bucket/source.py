"""`BucketSource`: the bucket below a disk tier, whose segments appear in its local folder.

If rows are missing, the tier asks it to `look`: it fetches the heads of the bucket's segments into the
folder. From then on the tier finds their rows like any others, and `BucketFolder` fetches what is read.
`Mirror` uploads segments written to the folder.

Safe under threads, under fork, and for any number of processes with one local folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from torchcache2.core.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.core.places import Bucket
from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import FINGERPRINT, CacheDirectory, contents_of
from torchcache2.files.filesystem import FileInfo, FileSystem, made_at
from torchcache2.files.layout import (
    FORMAT_VERSION,
    HEAD,
    head_size,
    parse_head,
    write_head,
)
from torchcache2.tiers.base import Signals
from torchcache2.tiers.bucket.folder import BucketFolder
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects, read_heads

_RETRY = 2.0  # seconds
_AT_ONCE = 32  # heads
_MOST_TEXT = 16 << 20
_MILLISECOND = 1_000_000  # nanoseconds
LEAST_LIMIT = 1 << 30  # bytes allowed for a row of a bucket, however small the folder is


class Listing:
    """A bucket's segments of one namespace. A row may have up to `limit` bytes.

    Attributes
    ----------
    was_had : bool
        Whether the bucket has ever been listed.
    """

    def __init__(
        self, objects: Objects, folder: BucketFolder, local: CacheDirectory, namespace: bytes, limit: int
    ) -> None:
        self.was_had = False
        self._objects = objects
        self._folder = folder
        self._directory = local
        self._namespace = namespace
        self._limit = limit
        self._lock = ProcessLock()
        self._listed = -math.inf
        self._bad: dict[str, int] = {}  # damaged objects, and their sizes then

    def is_quiet(self, every: float) -> bool:
        """Whether `look` would do nothing now."""
        return time.monotonic() - self._listed < every and not self._lock().locked()

    def look(self, since: int, every: float) -> bool:
        """Fetch the heads of new segments, and forget those of deleted objects.

        Returns whether the folder may have changed. Ignores segments made up to `since`, in milliseconds
        since 1970. Asks the bucket at most once in `every` seconds; threads wait for each other.
        `NewerFormatError` if a segment is of a later version of the format.
        """
        with self._lock():
            if time.monotonic() - self._listed < every:
                return True  # another thread has looked
            self._listed = time.monotonic() - every + min(every, _RETRY)  # unless all goes well
            known = self._known()
            listing = self._objects.listing(self._namespace.hex())
            if listing is None:
                return False
            self.was_had = True
            found = contents_of("", listing)
            sizes = {info.name: info.size for info in found.segments}
            for name in known - sizes.keys():
                self._folder.forget(self._path(name))
            self._bad = {name: size for name, size in self._bad.items() if sizes.get(name) == size}
            new = sizes.keys() - known - self._bad.keys()
            wanted = {name: sizes[name] for name in new if made_at(name) > since}
            self._fetch(wanted, found.others)
            if self._objects.cause is None:
                self._listed = time.monotonic()
            return True  # even if nothing is new: another process may have been faster

    def _known(self) -> set[str]:
        """The names of segments whose heads are here."""
        with contextlib.suppress(OSError):
            heads = self._directory.contents(self._namespace.hex()).heads
            return {info.name.removesuffix(HEAD) for info in heads}
        return set()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.folder(self._namespace), name)

    def _fetch(self, sizes: Mapping[str, int], others: Sequence[FileInfo]) -> None:
        """Write the heads of segments of these sizes to the local folder.

        Processes that do this at the same time begin with different heads, and skip what others have fetched.
        """
        fs, names = self._directory.fs, list(sizes)
        random.shuffle(names)
        try:
            if not sizes or not self._prepare(others):
                return
            for first in range(0, len(names), _AT_ONCE):
                some = [
                    one for one in names[first : first + _AT_ONCE] if not fs.exists(self._path(one) + HEAD)
                ]
                for name, head in self._read({name: sizes[name] for name in some}).items():
                    write_head(fs, self._path(name), head)
                if self._objects.cause is not None:
                    break
        except OSError as error:  # such as that the disk is full
            message = "%s cannot keep what the bucket has, whose rows are missing: %s"
            self._objects.tell("unkept", message, self._directory.path, str(error))

    def _prepare(self, others: Sequence[FileInfo]) -> bool:
        """Make the local folder and its ``fingerprint.json``; False if it is of a later version."""
        directory, fs = self._directory, self._directory.fs
        if directory.format() not in (None, FORMAT_VERSION):
            return False
        directory.create()
        fs.make_folder(directory.folder(self._namespace))
        if others and not fs.exists(self._path(FINGERPRINT)):
            name = f"{self._namespace.hex()}/{FINGERPRINT}"
            with contextlib.suppress(ValueError, RecursionError):
                document = json.loads(self._objects.texts([name], _MOST_TEXT).get(name, b"null"))
                if isinstance(document, dict):
                    directory.prepare(self._namespace, document)
        return True

    def _read(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """The checked heads of segments, by name and size; in one request each, unless they are long."""
        folder, heads, left = self._namespace.hex(), dict[str, bytes](), sizes
        for is_last in (False, True):  # what is damaged is fetched again, as the transfer may have failed
            damaged = dict[str, int]()
            paths = {f"{folder}/{name}": size for name, size in left.items()}
            for path, data in read_heads(self._objects, paths).items():
                name, size = path.rpartition("/")[2], paths[path]
                try:
                    head = data[: head_size(data, size)]
                    self._check(head, size)
                except DamagedError as error:
                    damaged[name] = size
                    if is_last:
                        self._bad[name] = size
                        self._objects.corrupt += 1
                        message = "%s is damaged (%s): its rows are not used, and it is left alone"
                        where = f"{self._objects.bucket.url}/{path}"
                        self._objects.tell("corrupt", message, where, str(error))
                    continue
                heads[name] = head
            left = damaged
        return heads

    def _check(self, head: bytes, size: int) -> None:
        try:
            parse_head(head, size, self._limit, structured=False)
        except (DamagedError, NewerFormatError):
            raise
        except UnreadableError:
            pass  # others may be able to read it


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
        Whether to upload segments written to the folder; None: also download nothing but what is read.
    flush_first : callable, optional
        Writes rows that wait; called when the process ends.
    temporary : bool
        Whether the folder is deleted when this is closed.

    Attributes
    ----------
    local, directory : CacheDirectory
        The folder as it is, and with the segments that the bucket has.
    mirror : Mirror
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
        options: dict[str, Any] = {"uploads": uploads, "temporary": temporary}
        self.mirror = Mirror(self.objects, self.local, self.folder, budget, flush_first, **options)
        self.folder.on_wanted = self.mirror.wake

    def look(self, namespace: bytes, has_all: Callable[[], bool]) -> bool:
        """List a namespace's segments in the bucket, if due.

        Returns whether the folder may have changed. Asks the bucket if rows are missing (`has_all()` is
        False), and once in each process that uploads, except workers: heads of an earlier run may be from
        another bucket, or the bucket may have been emptied since. `NewerFormatError` if a segment is of a
        later version of the format.
        """
        listing = self._listings.get(namespace) or self._listings.setdefault(
            namespace, Listing(self.objects, self.folder, self.local, namespace, self.limit)
        )
        self.folder.used.add(namespace.hex())
        doubts, has_changed = self.mirror.uploads and get_worker_info() is None, False
        if not listing.is_quiet(self._every) and ((doubts and not listing.was_had) or not has_all()):
            since = max(self._dropped_at.get(namespace, 0), self._drops() // _MILLISECOND)
            has_changed = listing.look(since, self._every)
        self.mirror.begin()  # this may be a new child; and it uploads what the bucket was seen to lack
        return has_changed

    def drop(self, namespace: bytes) -> None:
        """Ignore what the bucket has now, without deleting it there."""
        self._dropped_at[namespace] = time.time_ns() // _MILLISECOND
        self.folder.asked.clear()

    def bring(self, namespace: bytes) -> None:
        """Have a namespace's segments brought to the folder, as far as they fit."""
        self.folder.want(self.local.folder(namespace))

    def close(self) -> None:
        """Flush, and close the connections. Afterwards nothing in the bucket is found."""
        self.mirror.close()
        self.objects.close()
