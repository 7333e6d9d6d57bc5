"""`BucketFolder`: the local folder of a bucket as a file system that contains every segment with a head.

The disk tier reads from it as from any folder. Until a segment is here, the ranges that a batch needs of it
are fetched into memory, all of a batch at once.

Segments are kept once the namespace is *wanted*: when processes have fetched more than a tenth of it, a file
says so, and one process brings whole segments (`BucketFolder.bring`), oldest first. Every file is
begun under the folder's lock for deleting, and its name states its full size: so all processes keep to the
budget.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from torchcache2.core.errors import AwayError, DamagedError
from torchcache2.core.process import ranks_here
from torchcache2.files.directory import ASKED, HEAD_NAME, SEGMENT_NAME, CacheDirectory
from torchcache2.files.filesystem import Descriptor, FileInfo, FileSystem, is_read_only
from torchcache2.files.layout import HEAD, SEGMENT, TEMPORARY, checked, read_size, stated
from torchcache2.files.removal import deleting, remove_leftovers, used_bytes
from torchcache2.tiers.bucket.objects import Objects, Pieces, merged

_GAP = 16 << 10  # unneeded bytes that cost less than another request
_REQUEST = 512 << 10  # bytes that cost as much as a request
_SHARE = 10  # a namespace is wanted once an nth part of it was fetched
_AT_ONCE = 8  # segments
_WAITED, _POLLED = 2.0, 0.005  # seconds
_MOST_WAIT = 10.0  # seconds that a thread waits in all for segments that are being brought, besides its share
_BEGINNING, _BETWEEN = 1.0, 0.1  # seconds until the first of these is begun, and between them
_LOOKED, _FULL_FOR = 2.0, 60.0  # seconds without another look for room, and after an error of the disk
_MOST_HEAD = 1 << 30
TRANSFER = "torchcache2 transfer"  # names of threads begin so
_OF_FILES_HERE = (  # methods of the plain folder that need no change
    *("create", "edit", "write", "sync", "sync_folder", "rename", "remove", "touch"),
    *("changed", "lock", "unlock", "same"),
)


class _Away(Descriptor):
    """A segment that was not here when opened; `local` is its file once it has come."""

    __slots__ = ("local", "path", "size", "start")

    def __init__(self, path: str, start: int, size: int) -> None:
        self.path, self.start, self.size = path, start, size
        self.local: Descriptor | None = None  # replaced in one assignment: threads share this

    def __del__(self) -> None:
        """There is nothing to close."""


class _Batch(threading.local):
    """What a thread has fetched for a batch."""

    def __init__(self) -> None:
        self.pieces = Pieces()


class BucketFolder(FileSystem):
    """A folder of `budget` bytes.

    A listing shows 0 bytes for a segment that is not here. Reads raise `FileNotFoundError` if the object is
    gone, `DamagedError` if it is too short, `AwayError` if the bucket fails.

    Attributes
    ----------
    used : set of str
        The namespaces that this process uses; of others, nothing is brought.
    asked : dict of str to int
        Bytes that this process has fetched, by folder of a namespace; -1: it is wanted.
    bad : set of str
        Names of segments that are damaged in the bucket, or gone from it.
    on_wanted : callable
        Called when this process has made a namespace wanted.
    """

    is_remote = True

    def __init__(self, objects: Objects, directory: CacheDirectory, budget: int) -> None:
        self.used = set[str]()
        self.asked: dict[str, int] = {}
        self.bad = set[str]()
        self.on_wanted: Callable[[], object] = lambda: None
        self._objects, self._directory, self._budget = objects, directory, budget
        self._fs = fs = directory.fs
        self._sizes: dict[str, tuple[int, int]] = {}  # sizes of heads and segments, by path
        self._doubted = set[str]()
        self._full_until = self._coming = self._took = 0.0
        self._may_wait = _MOST_WAIT
        self._batch = _Batch()
        for name in _OF_FILES_HERE:
            setattr(self, name, getattr(fs, name))

    # Listing and opening files.

    def listing(self, path: str) -> list[FileInfo]:
        """The files and folders in a folder, and the segments that have a head."""
        found = self._fs.listing(path)
        away = {info.name.removesuffix(HEAD) for info in found if HEAD_NAME.fullmatch(info.name)}
        away -= {info.name for info in found}
        return sorted([*found, *(FileInfo(name, False, 0, 0.0) for name in away)])

    def forget(self, path: str) -> None:
        """Show a segment no more unless it is here: its head is damaged, or the bucket lacks it."""
        self._sizes.pop(path, None)
        with contextlib.suppress(OSError):
            self._fs.remove(path + HEAD)

    def has_elsewhere(self, path: str) -> bool:
        """Whether the bucket has a file."""
        return path.endswith(SEGMENT) and self._fs.is_file(path + HEAD)

    def open(self, path: str) -> Descriptor:
        """Open a file, here or not; `FileNotFoundError` if it is neither here nor in the bucket."""
        try:
            return self._fs.open(path)
        except FileNotFoundError:
            if not SEGMENT_NAME.fullmatch(os.path.basename(path)):
                raise
            return _Away(path, *self.sizes_of(path))

    def is_away(self, file: Descriptor) -> bool:
        """Whether some of a file has to be fetched."""
        if isinstance(file, _Away) and file.local is None:
            with contextlib.suppress(OSError):
                file.local = self._fs.open(file.path)
            return file.local is None
        return False

    def size(self, file: Descriptor) -> int:
        """Bytes of an open file."""
        return file.size if isinstance(file, _Away) else self._fs.size(file)

    def sizes_of(self, path: str) -> tuple[int, int]:
        """Bytes of the head of a segment, and of all of it.

        `FileNotFoundError` if there is no head, or it is damaged.
        """
        if path not in self._sizes:
            try:
                head = self._fs.read_file(path + HEAD, _MOST_HEAD)
                start, checksum, size = stated(head[8 : 8 + read_size(head[:8], len(head))], None)
                if start != len(head) or not checked(head, checksum):
                    raise DamagedError("another checksum")
            except DamagedError as error:
                self._objects.corrupt += 1
                message = "%s is damaged (%s): it is fetched again"
                self._objects.tell("head", message, path + HEAD, str(error))
                self.forget(path)
                raise FileNotFoundError(path + HEAD) from None
            self._sizes[path] = start, size
        return self._sizes[path]

    # Reading.

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Note a range: this thread's next read of one fetches all of them."""
        if not isinstance(file, _Away) or file.local is not None:
            self._fs.will_need(getattr(file, "local", file), offset, size)
        elif size and self._batch.pieces.at(self._name(file.path), offset) is None:
            end = min(file.size, offset + size)
            self._batch.pieces.wanted.append((self._name(file.path), offset, end))

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into writable buffers, one after another; may read less. Fetches what is not here first."""
        if not isinstance(file, _Away):
            return self._fs.read(file, buffers, offset)
        if file.local is not None:
            return self._fs.read(file.local, buffers, offset)
        if offset < file.start:
            return self._fs.read(self._fs.open(file.path + HEAD), buffers, offset)
        end = min(file.size, offset + sum(map(len, buffers)))
        if offset >= end:
            return 0
        name = self._name(file.path)
        if (piece := self._batch.pieces.at(name, offset)) is None:
            self._batch.pieces.wanted.append((name, offset, end))
            self._fetch()
            if not self.is_away(file) and file.local is not None:  # it has just come
                return self._fs.read(file.local, buffers, offset)
            piece = self._batch.pieces.at(name, offset)
        if isinstance(piece, FileNotFoundError):
            self.forget(file.path)
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            raise AwayError(errno.EIO, "cannot be had", file.path)
        return _copied(piece, buffers)

    def done(self) -> None:
        """Forget this thread's fetched pieces."""
        self._batch.pieces = Pieces()

    def fetch_again(self, path: str) -> bool:
        """Discard a damaged segment, to fetch it again; False if that has happened before."""
        self.done()
        if not self.has_elsewhere(path):
            return False
        with contextlib.suppress(OSError):
            self._directory.set_aside(path)
        is_first = path not in self._doubted
        self._doubted.add(path)
        return is_first

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._directory.path)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _fetch(self) -> None:
        """Fetch what this thread is about to read; reads raise the errors."""
        wanted, self._batch.pieces.wanted = self._batch.pieces.wanted, []
        ranges = merged([one for one in wanted if not self._is_here(one[0])], _GAP)
        if ranges:  # the batch that makes a namespace wanted already waits for its segments
            folder = os.path.dirname(self._path(ranges[0][0]))  # a batch is of one namespace
            self._ask(folder, sum(max(_REQUEST, end - start) for _, start, end in ranges))
            self._give_way(folder, {name for name, _, _ in ranges})
        if ranges := [one for one in ranges if not self._is_here(one[0])]:
            begun = time.monotonic()
            self._batch.pieces.fetch(self._objects, ranges)
            self._took = time.monotonic() - begun

    def _is_here(self, name: str) -> bool:
        return self._fs.exists(self._path(name))

    def _give_way(self, folder: str, names: set[str]) -> None:
        """While segments are being brought, wait for these: as long as the last batch took to be fetched.

        Small requests take the line from large ones, so the epoch would take longer. At first, it waits some
        seconds in all: a namespace that has come by then is not fetched twice.
        """
        begun = now = time.monotonic()
        coming, end = self._coming, begun + max(self._may_wait, min(self._took, _MOST_WAIT))
        while now < end and not all(map(self._is_here, names)):
            with contextlib.suppress(OSError):
                if any(info.name.endswith(TEMPORARY) for info in self._fs.listing(folder)):
                    coming = now + _BETWEEN
            if now > coming:
                break
            time.sleep(4 * _POLLED)
            now = time.monotonic()
        self._may_wait = max(0.0, self._may_wait - (now - begun))

    # Keeping whole segments.

    def want(self, folder: str) -> None:
        """Have a namespace's segments brought from now on, as far as they fit."""
        self.asked[folder], self._coming = -1, time.monotonic() + _BEGINNING
        with contextlib.suppress(OSError):
            self._fs.create(os.path.join(folder, ASKED))
        self.on_wanted()

    def _ask(self, folder: str, size: int) -> None:
        """Count bytes that were fetched of a namespace, with the cost of requests."""
        if (asked := self.asked.get(folder, 0)) < 0:
            return
        self.asked[folder] = asked = asked + size
        worker = get_worker_info()
        asked *= _SHARE * ranks_here() * (1 if worker is None else worker.num_workers)
        with contextlib.suppress(OSError):
            names = [info.name for info in self._fs.listing(folder) if HEAD_NAME.fullmatch(info.name)]
            paths = [os.path.join(folder, name.removesuffix(HEAD)) for name in names]
            if asked > sum(self.sizes_of(path)[1] for path in paths):
                self.want(folder)

    def clear_up(self, namespace: str) -> None:
        """Delete what killed processes had begun: it takes room, and who waits for it waits in vain."""
        none = contextlib.suppress(OSError, NotImplementedError)
        with none, deleting(self._directory).acquire(timeout=0):  # else a file might not be locked yet
            remove_leftovers(self._directory, namespace)

    def bring(self, names: Sequence[str], stops: Callable[[], bool] = lambda: False) -> bool:
        """Fetch whole segments into the folder, as far as there is room; whether one came."""
        begun = self._begun(names)
        with ThreadPoolExecutor(_AT_ONCE, TRANSFER) as pool:
            return any(list(pool.map(lambda name: self._bring(name, begun[name], stops), begun)))

    def _bring(self, name: str, file: Descriptor, stops: Callable[[], bool]) -> bool:
        """Fetch a segment into its temporary file, which is locked, and name it; whether that worked."""
        path = self._path(name)
        size = self.sizes_of(path)[1]
        temporary = _coming(path, size)
        try:
            if stops():
                return False
            if (error := self._objects.download(name, temporary, size)) is not None:
                raise error
            head = self._fs.read_file(path + HEAD, _MOST_HEAD)
            there = self._fs.edit(temporary)
            if self._fs.size(there) != size:
                raise DamagedError(f"it has {self._fs.size(there)} bytes, not {size}")
            self._fs.write_all(there, [memoryview(head)], 0)  # this one is checked; rows have their checksums
            self._fs.rename(temporary, path)
            return True
        except AwayError:
            pass
        except (DamagedError, OSError) as error:
            if self._fs.is_file(path + HEAD):  # else the rows, or all of the folder, were dropped meanwhile
                self._failed(name, error)
        finally:
            with contextlib.suppress(OSError):
                self._fs.remove(temporary)
            self._fs.unlock(file)
        return False

    def _begun(self, names: Sequence[str]) -> dict[str, Descriptor]:
        """Temporary files of full size for segments, as far as there is room: names, and locked files."""
        begun = dict[str, Descriptor]()
        if time.monotonic() < self._full_until:
            return begun
        try:
            with deleting(self._directory).acquire(timeout=_WAITED, poll_interval=_POLLED):
                room = self._budget - used_bytes(self._directory.scan())
                for name in names:
                    path = self._path(name)
                    size = self.sizes_of(path)[1]
                    if size > room:
                        self._full_until = time.monotonic() + _LOOKED
                    elif not self._fs.exists(path):
                        with contextlib.suppress(FileExistsError):  # another process brings it
                            file = self._fs.create(_coming(path, size))
                            self._fs.lock(file, exclusive=True)
                            begun[name] = file
                            room -= size
        except (TimeoutError, NotImplementedError):
            pass  # another process makes room, or there are no locks
        except OSError as error:
            self._no_room(error)
        return begun

    def _failed(self, name: str, error: DamagedError | OSError) -> None:
        """Note why a segment did not come; one that is damaged or gone is not fetched as a whole again."""
        if not isinstance(error, (DamagedError, FileNotFoundError)):
            self._no_room(error)
            return
        self.bad.add(name)
        if isinstance(error, DamagedError):
            self._objects.corrupt += 1
            url = self._objects.bucket.url
            self._objects.tell("damaged", "%s in %s is damaged (%s): it stays there", name, url, str(error))

    def _no_room(self, error: OSError) -> None:
        self._full_until = time.monotonic() + _FULL_FOR
        if not is_read_only(error):
            message = "%s gets no segments from the bucket: %s"
            self._objects.tell("unwritten", message, self._directory.path, str(error))


def _coming(path: str, size: int) -> str:
    """The temporary file of a segment: its name says how much room it needs."""
    return f"{path}.{size}{TEMPORARY}"


def _copied(data: memoryview, buffers: Sequence[Any]) -> int:
    """Fill buffers as far as the data reach; returns how many bytes."""
    done = 0
    for buffer in buffers:
        part = data[done : done + len(buffer)]
        buffer[: len(part)] = part
        done += len(part)
    return done
