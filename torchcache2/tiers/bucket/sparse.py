"""`BucketFolder`: the local folder of a bucket as a file system that contains every segment with a head.

The disk tier reads from it as from any folder. The first read of a block fetches it, so each block crosses
the network once. Until a segment is whole, its blocks are in a sparse file ``<segment>.part``, and
``<segment>.part.map`` has a byte for each: `_MISSING`, `_HERE`, or `_COMING` while a process fetches it. All
processes of the machine share both. With the last block, the file is renamed to the segment.

A process's first batch fetches just the blocks that it needs, so that it is quick. Later ones also fetch the
missing blocks around them, the more, the more this process has fetched: an epoch makes few, large requests,
and whoever reads little fetches little. The mirror fills in the rest when no process has read for a moment.
If the folder has no room for a segment, its ranges are fetched but not kept.

Segments are never locked, and nothing waits for the disk. A race, a kill or a power cut may spoil the content
of a block; the checksums of its rows show that, and `doubt` has the file fetched anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from torchcache2.core.errors import AwayError, DamagedError
from torchcache2.files.directory import ASKED, HEAD_NAME, MAP, PART, SEGMENT_NAME, CacheDirectory
from torchcache2.files.filesystem import Descriptor, FileInfo, FileSystem, open_to_lock
from torchcache2.files.layout import HEAD, SEGMENT, checked, read_head, read_size, stated
from torchcache2.files.removal import used_bytes
from torchcache2.tiers.bucket.objects import Objects

_BLOCK = 64 << 10  # bytes
_MISSING, _HERE, _COMING = range(3)
_GAP = 16 << 10  # unneeded bytes that cost less than another request
_KEPT_GAP = 512 << 10  # likewise, if they are kept and may be needed later
_PIECE = 8 << 20  # bytes of one request; several at once are faster than a long one
# A batch may read ahead this multiple of the bytes that its process has fetched so far, up to these bytes.
_AHEAD, _MOST_AHEAD = 4, 64 << 20
_LOOK_EVERY, _READERS_EVERY = 0.005, 0.1  # seconds
_QUIET = 0.5  # seconds without a read after which the mirror fills segments: readers pause briefly
_TRIES = 20
_STALE = 5.0  # seconds without a new block after which the fetching process counts as dead
_SCAN_EVERY, _FULL_FOR = 1.0, 60.0  # seconds
_MOST_HEAD = 1 << 30
_OF_FILES_HERE = (  # methods of the plain folder that need no change
    *("create", "edit", "write", "sync", "sync_folder", "rename", "remove", "touch"),
    *("lock", "unlock", "same"),
)


class _Open(NamedTuple):
    """The open files of a segment: sparse file and map; or a whole file, without map; or nothing."""

    data: Descriptor | None = None
    map: Descriptor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the file has all blocks."""
        return self.data is not None and self.map is None


class _Sparse(Descriptor):
    """A segment that was not wholly here when opened."""

    __slots__ = ("files", "path", "size", "start")

    def __init__(self, path: str, start: int, size: int) -> None:
        self.path, self.start, self.size = path, start, size
        self.files = _Open()  # replaced in one assignment: threads share this

    def __del__(self) -> None:
        """There is nothing to close."""


class _Range(NamedTuple):
    """Bytes to fetch; `is_kept` if they are blocks of a sparse file."""

    file: _Sparse
    start: int
    end: int
    is_kept: bool


class _Batch(threading.local):
    """The ranges that a thread is about to read, and pieces fetched but not kept, or their errors.

    Also the last head read, as opening a segment needs it twice.
    """

    def __init__(self) -> None:
        self.wanted: list[tuple[_Sparse, int, int]] = []
        self.pieces: dict[str, list[tuple[int, int, bytes | Exception]]] = {}
        self.head = "", b""


class BucketFolder(FileSystem):
    """A folder of `budget` bytes; what is fetched uses those that are free.

    A listing shows 0 bytes for a segment that is not here. Reads raise `FileNotFoundError` if the object is
    gone, `DamagedError` if it is too short, `AwayError` if the bucket fails.

    Attributes
    ----------
    heads : dict of str to bytes
        Heads that could not be written to the folder, by path of the segment; see `note`.
    """

    is_remote = True

    def __init__(self, objects: Objects, directory: CacheDirectory, budget: int) -> None:
        self.heads: dict[str, bytes] = {}
        self._objects, self._directory, self._budget = objects, directory, budget
        self._fs = fs = directory.fs
        self._sizes: dict[str, tuple[int, int]] = {}  # sizes of heads and segments, by path
        self._noted = 0
        self._away: dict[str, set[str]] = {}  # segments listed without being here, by folder
        self._asked = os.path.join(directory.path, ASKED)
        self._room, self._scan_at = 0, 0.0
        self._fetched = 0  # bytes of batches
        self._batch = _Batch()
        self._doubted, self._bad = set[str](), set[str]()
        for name in _OF_FILES_HERE:
            setattr(self, name, getattr(fs, name))

    # Listing and opening files.

    def listing(self, path: str) -> list[FileInfo]:
        """The files and folders in a folder, and the segments that have a head."""
        away = {os.path.basename(one) for one in list(self.heads) if os.path.dirname(one) == path}
        try:
            found = self._fs.listing(path)
        except FileNotFoundError:
            if not away:
                raise
            found = []
        away |= {info.name.removesuffix(HEAD) for info in found if HEAD_NAME.fullmatch(info.name)}
        away -= {info.name for info in found}
        self._away[path] = away
        return sorted([*found, *(FileInfo(name, False, 0, 0.0) for name in away)])

    def changed(self, path: str) -> int:
        """When a folder last changed, in nanoseconds, plus the number of noted changes."""
        try:
            return self._fs.changed(path) + self._noted
        except FileNotFoundError:
            if not self._noted:
                raise
            return self._noted

    def note(self, path: str, head: bytes) -> None:
        """Show a segment whose head could not be written."""
        self.heads[path] = head
        self._noted += 1

    def forget(self, path: str) -> None:
        """Show a segment no more unless it is whole: its head is damaged, or the bucket lacks it."""
        self._sizes.pop(path, None)
        self._batch.head = "", b""
        if self.heads.pop(path, None) is not None:
            self._noted += 1
        with contextlib.suppress(OSError):
            self._fs.remove(path + HEAD)

    def has_elsewhere(self, path: str) -> bool:
        """Whether the bucket has a file."""
        return path in self.heads or (path.endswith(SEGMENT) and self._fs.is_file(path + HEAD))

    def open(self, path: str) -> Descriptor:
        """Open a file, whole or not; `FileNotFoundError` if it is neither here nor in the bucket."""
        folder, name = os.path.split(path)
        if name in self._away.get(folder, ()):
            with contextlib.suppress(FileNotFoundError):
                return _Sparse(path, *self.sizes_of(path))
        try:
            return self._fs.open(path)
        except FileNotFoundError:
            if not SEGMENT_NAME.fullmatch(name):
                raise
            return _Sparse(path, *self.sizes_of(path))

    def is_away(self, file: Descriptor) -> bool:
        """Whether some of a file may have to be fetched."""
        return isinstance(file, _Sparse) and not file.files.is_whole

    def size(self, file: Descriptor) -> int:
        """Bytes of an open file."""
        return file.size if isinstance(file, _Sparse) else self._fs.size(file)

    def sizes_of(self, path: str) -> tuple[int, int]:
        """Bytes of the head of a segment, and of all of it.

        `FileNotFoundError` if there is no head, or it is damaged.
        """
        if path not in self._sizes:
            head = self._head(path)
            try:
                start, checksum, size = stated(head[8 : 8 + read_size(head[:8], len(head))], None)
                if start != len(head) or not checked(head, checksum):
                    raise DamagedError("another checksum")
            except DamagedError as error:
                self._lose_head(path, error)
            self._sizes[path] = start, size
        return self._sizes[path]

    def _head(self, path: str) -> bytes:
        if (head := self.heads.get(path)) is not None:
            return head
        if self._batch.head[0] != path:
            try:
                self._batch.head = path, self._fs.read_file(path + HEAD, _MOST_HEAD)
            except DamagedError as error:
                self._lose_head(path, error)
        return self._batch.head[1]

    def _lose_head(self, path: str, error: DamagedError) -> NoReturn:
        self._objects.corrupt += 1
        self._objects.tell("head", "%s is damaged (%s): it is fetched again", path + HEAD, str(error))
        self.forget(path)
        raise FileNotFoundError(path + HEAD) from None

    # Reading.

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Note a range: this thread's next read of one fetches all of them."""
        if not isinstance(file, _Sparse):
            self._fs.will_need(file, offset, size)
        elif size and self._piece(file, offset) is None:
            self._batch.wanted.append((file, offset, min(file.size, offset + size)))

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into writable buffers, one after another; may read less. Fetches missing blocks first."""
        if not isinstance(file, _Sparse):
            return self._fs.read(file, buffers, offset)
        if offset < file.start:
            return _copied(memoryview(self._head(file.path))[offset : file.start], buffers)
        end = min(file.size, offset + sum(map(len, buffers)))
        for left in (2, 1, 0):
            if (here := self._here_until(file, offset, end)) > offset or offset >= end:
                data = file.files.data
                return 0 if data is None else self._fs.read(data, _cut(buffers, here - offset), offset)
            if (piece := self._piece(file, offset)) is not None:
                if isinstance(piece, FileNotFoundError):
                    self.forget(file.path)
                if isinstance(piece, Exception):
                    raise piece
                return _copied(piece, buffers)
            if left:
                self._batch.wanted.append((file, offset, end))
                self.fetch()
        raise AwayError(errno.EIO, "cannot be had", file.path)

    def fetch(self) -> None:
        """Fetch what this thread is about to read, into the folder or memory; reads raise the errors."""
        wanted, self._batch.wanted = self._batch.wanted, []
        files, ranges = dict[str, _Sparse](), dict[str, list[tuple[int, int]]]()
        for file, start, end in wanted:
            files[file.path] = file  # the one that was opened last
            ranges.setdefault(file.path, []).append((start, end))
        claimed, others = list[_Range](), list[tuple[_Sparse, int, int]]()
        left = min(_MOST_AHEAD, _AHEAD * self._fetched)
        for path, file in files.items():
            is_kept = self._attach(file)
            for start, end in _merged(ranges[path], _KEPT_GAP if is_kept else _GAP):
                if not is_kept:
                    claimed.append(_Range(file, start, end, False))
                elif not file.files.is_whole:
                    some = self._claim(file, start, end, left)
                    left -= max(0, _bytes_of(some) - (end - start))
                    claimed += some
                    others.append((file, start, end))
        self._fetched += _bytes_of(claimed)
        with self.reading() if claimed else contextlib.nullcontext():
            self._fetch(claimed)
        self._await(others)

    def done(self) -> None:
        """Forget this thread's fetched pieces that were not kept."""
        self._batch.wanted, self._batch.pieces, self._batch.head = [], {}, ("", b"")

    def fill(self, path: str) -> bool | None:
        """Fetch the missing blocks of a segment while no process reads; False if it is damaged or gone.

        None: try again later, as the bucket fails or there is no room.
        """
        file = _Sparse(path, *self.sizes_of(path))
        if not self._attach(file):
            return None
        while not file.files.is_whole:
            if file.files.data is None or self._objects.is_closed:  # it is not what its head says
                return False if path in self._bad else None
            if self.has_readers():
                time.sleep(_READERS_EVERY)
                continue
            states = self._states(file, 0, file.size)
            first = states.find(_MISSING)
            if first >= 0:
                end = min(file.size, first * _BLOCK + _PIECE)
                if not self._fetch(self._claim(file, first * _BLOCK, end, 0)):
                    *_, error = self._batch.pieces[path][0]
                    self.done()
                    if isinstance(error, DamagedError):
                        self._damaged(path, error)
                    return False if isinstance(error, (DamagedError, FileNotFoundError)) else None
            elif _COMING in states:
                self._await([(file, 0, file.size)])
            else:
                self._finish(file)
        return True

    def doubt(self, path: str) -> bool:
        """Discard a damaged segment, to fetch it again; False if that has happened before."""
        self.done()
        if not self.has_elsewhere(path):
            return False
        self._discard(path)
        with contextlib.suppress(OSError):
            self._directory.set_aside(path)
        is_first = path not in self._doubted
        self._doubted.add(path)
        return is_first

    # Blocks that are in the folder.

    def _attach(self, file: _Sparse) -> bool:
        """Open the files of a segment, or begin them if there is room."""
        with contextlib.suppress(OSError):
            if file.files.data is not None and self._fs.links(file.files.data):
                return True
        file.files = _Open()
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                file.files = _Open(self._fs.open(file.path))
                break
            try:
                data = self._fs.edit(file.path + PART)
                found = _Open(data, self._fs.edit(file.path + MAP))
                # If another process has just deleted both and begun anew, the map may belong to the new file.
                if self._fs.same(data, file.path + PART):
                    file.files = found
                    break
            except FileNotFoundError:
                if not self._begin(file):
                    break
            except OSError:
                break
            time.sleep(_LOOK_EVERY)
        return file.files.data is not None

    def _begin(self, file: _Sparse) -> bool:
        """Make an empty sparse file, if there is room; True if another process has begun or finished it."""
        if not self._has_room(file.size):
            return False
        try:
            data = self._fs.create(file.path + PART)
            if self._fs.is_file(file.path):  # another process has just finished it
                self._fs.remove(file.path + PART)
                return True
            with contextlib.suppress(FileNotFoundError):  # left by a process killed in `_finish`
                self._fs.remove(file.path + MAP)
            self._fs.write_all(data, [memoryview(b"\0")], file.size - 1)
            found = _Open(data, self._fs.create(file.path + MAP))
            assert found.map is not None
            self._fs.write_all(found.map, [memoryview(bytes(-(-file.size // _BLOCK)))], 0)
            file.files = found
        except FileExistsError:
            with contextlib.suppress(OSError):  # its maker may have been killed before it made the map
                if time.time_ns() - self._fs.changed(file.path + PART) > _STALE * 1e9:
                    self._discard(file.path)
            return True
        except OSError as error:
            self._no_room(error)
            self._discard(file.path)
        return False

    def _discard(self, path: str) -> None:
        """Delete an unfinished segment: first the map, which must never remain alone."""
        for name in (path + MAP, path + PART):
            with contextlib.suppress(OSError):
                self._fs.remove(name)

    def _has_room(self, size: int) -> bool:
        """Whether a file fits into the folder without deleting anything."""
        now = time.monotonic()
        if now >= self._scan_at:
            self._scan_at = now + _SCAN_EVERY
            self._room = self._budget - used_bytes(self._directory.scan())
        if size > self._room:
            return False
        self._room -= size
        return True

    def _no_room(self, error: OSError) -> None:
        self._room, self._scan_at = 0, time.monotonic() + _FULL_FOR
        message = "%s gets no segments from the bucket: %s"
        self._objects.tell("unwritten", message, self._directory.path, str(error))

    def _states(self, file: _Sparse, start: int, end: int) -> bytes:
        """The states of the blocks of a range."""
        first, last = start // _BLOCK, -(-end // _BLOCK)
        if file.files.is_whole:
            return bytes([_HERE]) * (last - first)
        if file.files.map is not None:
            with contextlib.suppress(OSError, DamagedError):
                return self._fs.read_bytes(file.files.map, first, last - first)
        return bytes(last - first)

    def _here_until(self, file: _Sparse, start: int, end: int) -> int:
        """Start of the first missing block from `start` on; at most `end`."""
        states = self._states(file, start, end)
        count = len(states) - len(states.lstrip(bytes([_HERE])))
        return min(end, (start // _BLOCK + count) * _BLOCK) if count else start

    def _piece(self, file: _Sparse, start: int) -> memoryview | Exception | None:
        """Fetched bytes from `start` on that were not kept, or the error; None if not fetched."""
        for first, last, data in self._batch.pieces.get(file.path, ()):
            if first <= start < last:
                return data if isinstance(data, Exception) else memoryview(data)[start - first :]
        return None

    def _mark(self, file: _Sparse, start: int, end: int, state: int) -> None:
        """Write the state of blocks, as far as possible: others fetch a block that is never marked."""
        first, last = start // _BLOCK, -(-end // _BLOCK)
        if file.files.map is not None:
            with contextlib.suppress(OSError):
                self._fs.write_all(file.files.map, [memoryview(bytes([state]) * (last - first))], first)

    # Fetching blocks.

    def _claim(self, file: _Sparse, start: int, end: int, ahead: int) -> list[_Range]:
        """Claim the missing blocks of a range, and those around it if they have at most `ahead` bytes."""
        states, piece = self._states(file, 0, file.size), _PIECE // _BLOCK
        first, last = start // _BLOCK, -(-end // _BLOCK)
        wide = slice(first // piece * piece, -(-last // piece) * piece)
        if _BLOCK * states[wide].count(_MISSING) - (end - start) <= ahead:
            first, last = wide.start, min(len(states), wide.stop)
        claimed = list[_Range]()
        at = states.find(_MISSING, first, last)
        while at >= 0:
            stop = at
            while stop < last and stop - at < piece and states[stop] == _MISSING:
                stop += 1
            claimed.append(_Range(file, at * _BLOCK, min(file.size, stop * _BLOCK), True))
            at = states.find(_MISSING, stop, last)
        for one in claimed:
            self._mark(file, one.start, one.end, _COMING)
        return claimed

    def _fetch(self, claimed: Sequence[_Range]) -> bool:
        """Fetch ranges at once; whether all were kept. The others become pieces of this batch, or errors."""
        parts = [
            one._replace(start=at, end=min(at + _PIECE, one.end))
            for one in claimed
            for at in range(one.start, one.end, _PIECE)
        ]
        root = self._directory.path
        ranges = [(os.path.relpath(one.file.path, root), one.start, one.end) for one in parts]
        data: Sequence[bytes | Exception] = [OSError()] * len(parts)
        try:
            data = self._objects.fetch(ranges)
        finally:
            for one, got in zip(parts, data, strict=True):
                if isinstance(got, Exception) and one.is_kept:
                    self._mark(one.file, one.start, one.end, _MISSING)
        is_kept = True
        for one, got in zip(parts, data, strict=True):
            if isinstance(got, Exception) or not (one.is_kept and self._keep(one, got)):
                is_kept = False
                self._batch.pieces.setdefault(one.file.path, []).append((one.start, one.end, got))
        for file in {id(one.file): one.file for one in parts if one.is_kept}.values():
            if not file.files.is_whole and self._here_until(file, 0, file.size) == file.size:
                self._finish(file)
        return is_kept

    def _keep(self, one: _Range, data: bytes) -> bool:
        assert one.file.files.data is not None
        try:
            self._fs.write_all(one.file.files.data, [memoryview(data)], one.start)
        except OSError as error:
            self._no_room(error)
            self._mark(one.file, one.start, one.end, _MISSING)
            return False
        self._mark(one.file, one.start, one.end, _HERE)
        return True

    def _await(self, ranges: Sequence[tuple[_Sparse, int, int]]) -> None:
        """Wait for blocks that other processes fetch; reading fetches what they fail to deliver."""
        for file, start, end in ranges:
            seen, heard = b"", time.monotonic()
            while _COMING in (states := self._states(file, start, end)):
                now = time.monotonic()
                if states != seen:
                    seen, heard = states, now
                elif now - heard > _STALE:
                    for block, state in enumerate(states, start // _BLOCK):
                        if state == _COMING:
                            self._mark(file, block * _BLOCK, block * _BLOCK + 1, _MISSING)
                    break
                time.sleep(_LOOK_EVERY)

    def _finish(self, file: _Sparse) -> None:
        """Rename a complete file to its segment, unless it contradicts its head."""
        path, is_whole = file.path, True
        try:
            head = self._fs.read_file(path + HEAD, _MOST_HEAD)
            if read_head(self._fs, path + PART) != (head, file.size):
                raise DamagedError("its header is another one")
            self._fs.rename(path + PART, path)
            self._fs.remove(path + MAP)
        except DamagedError as error:
            is_whole = False
            if path in self._doubted:
                self._damaged(path, error)
            self._doubted.add(path)  # perhaps only the local copy is bad
        except OSError:  # another process was faster, or the segment was dropped
            is_whole = self._fs.is_file(path)
        if not is_whole:
            self._discard(path)
        file.files = _Open(file.files.data) if is_whole else _Open()

    def _damaged(self, path: str, error: Exception) -> None:
        self._objects.corrupt += 1
        self._bad.add(path)
        url, name = self._objects.bucket.url, os.path.relpath(path, self._directory.path)
        self._objects.tell("damaged", "%s in %s is damaged (%s): it stays there", name, url, str(error))
        self._discard(path)

    # Readers come first.

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep mirrors from filling segments meanwhile, by a lock that ends with the process."""
        file = None
        try:
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileExistsError):
                    self._fs.create(self._asked)
                file = self._fs.open(self._asked)
                self._fs.lock(file, exclusive=False)
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    self._fs.touch(self._asked)
                self._fs.unlock(file)  # explicitly: a child forked meanwhile has the file too

    def has_readers(self) -> bool:
        """Whether a process reads, or did a moment ago."""
        with contextlib.suppress(OSError):
            if abs(time.time_ns() - self._fs.changed(self._asked)) < _QUIET * 1e9:
                return True
            file = open_to_lock(self._fs, self._asked)
            is_locked = self._fs.lock(file, exclusive=True) is False
            self._fs.unlock(file)
            return is_locked
        return False


def _bytes_of(ranges: Sequence[_Range]) -> int:
    return sum(one.end - one.start for one in ranges)


def _merged(ranges: list[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Ranges in order, neighbours up to `gap` bytes apart as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _cut(buffers: Sequence[Any], size: int) -> list[Any]:
    """The first buffers, which together have at most `size` bytes."""
    some = []
    for buffer in buffers:
        if size > 0:
            some.append(memoryview(buffer)[:size])
        size -= len(buffer)
    return some


def _copied(data: memoryview, buffers: Sequence[Any]) -> int:
    """Fill buffers as far as the data reach; returns how many bytes."""
    done = 0
    for buffer in buffers:
        part = data[done : done + len(buffer)]
        buffer[: len(part)] = part
        done += len(part)
    return done
