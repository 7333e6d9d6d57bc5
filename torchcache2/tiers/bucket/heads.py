"""Which segments of a namespace a bucket has (`Listing`), and where the rows in them are (`Remote`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import FINGERPRINT, CacheDirectory, Contents, contents_of
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.files.filesystem import Descriptors, FileInfo, made_at
from torchcache2.files.layout import FORMAT_VERSION, HEAD, head_size, parse_head, read_head, write_head
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder
from torchcache2.tiers.disk.index import NamespaceIndex

_RETRY = 2.0  # seconds
_AT_ONCE = 32  # heads
_FIRST_READ, _MOST_READ = 16 << 10, 1 << 20  # bytes
_MOST_TEXT, _MOST_HEAD = 16 << 20, 1 << 30


class Changes(NamedTuple):
    """What a listing has shown of segments, by their names.

    `heads` could not be written to the local folder, and the bucket has those that are `gone` no more.
    """

    heads: dict[str, bytes]
    gone: set[str]


class Listing:
    """What a bucket has of one namespace; it is listed at most once in `every` seconds.

    A row may have `limit` bytes.

    Attributes
    ----------
    was_had : bool
        Whether the bucket has ever said what it has.
    """

    def __init__(
        self, objects: Objects, directory: CacheDirectory, namespace: bytes, limit: int, every: float
    ) -> None:
        self.was_had = False
        self._objects = objects
        self._directory = directory
        self._namespace = namespace
        self._limit = limit
        self._every = every
        self._lock = ProcessLock()
        self._listed = -math.inf
        self._longest = _FIRST_READ  # of the heads that were seen
        self._bad: dict[str, int] = {}  # objects that are no segments, and their sizes then

    def is_quiet(self) -> bool:
        """Whether `look` would do nothing, and no other thread is looking."""
        return time.monotonic() - self._listed < self._every and not self._lock().locked()

    def look(self, known: Collection[str], since: int) -> Changes | None:
        """Fetch the heads of segments that are not known, if it is time; None if nothing was done.

        Segments that were made up to `since`, in milliseconds since 1970, are left out.
        Threads wait for each other. `NewerFormatError` if a segment is of a later version of the format.
        """
        with self._lock():
            if time.monotonic() - self._listed < self._every:
                return None
            self._listed = time.monotonic() - self._every + min(self._every, _RETRY)  # unless all goes well
            local = self.local()
            listing = self._objects.listing(self._namespace.hex())
            if listing is None:
                return None
            self.was_had = True
            found = contents_of("", listing)
            sizes = {info.name: info.size for info in found.segments}
            gone = (local | set(known)) - sizes.keys()
            for name in local & gone:
                with contextlib.suppress(OSError):
                    self._directory.fs.remove(self._path(name) + HEAD)
            self._bad = {name: size for name, size in self._bad.items() if sizes.get(name) == size}
            new = sizes.keys() - local - set(known) - self._bad.keys()
            wanted = {name: sizes[name] for name in new if made_at(name) > since}
            heads = self._fetched(wanted, found.others)
            if self._objects.cause is None:
                self._listed = time.monotonic()
            return Changes(heads, gone)

    def local(self) -> set[str]:
        """The names of segments whose heads are in the local folder."""
        with contextlib.suppress(OSError):
            contents = self._directory.contents(self._namespace.hex())
            return {info.name.removesuffix(HEAD) for info in contents.heads}
        return set()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.folder(self._namespace), name)

    def _fetched(self, sizes: Mapping[str, int], others: Sequence[FileInfo]) -> dict[str, bytes]:
        """Write the heads of segments of these sizes to the local folder; those that cannot be written.

        Processes that do so at the same time begin with different ones, and leave out what others have had.
        """
        fs, names, unwritten = self._directory.fs, list(sizes), dict[str, bytes]()
        random.shuffle(names)
        writes = bool(names) and self._prepare(others)
        for first in range(0, len(names), _AT_ONCE):
            some = [
                name for name in names[first : first + _AT_ONCE] if not fs.exists(self._path(name) + HEAD)
            ]
            heads = {name: head for name in some if (head := self._of_file(name, sizes[name]))}
            heads |= self._read({name: sizes[name] for name in some if name not in heads})
            for name, head in heads.items():
                try:
                    if writes:
                        write_head(fs, self._path(name), head)
                except OSError:
                    writes = False  # such as that the disk is full
                if not writes:
                    unwritten[name] = head
            if self._objects.cause is not None:
                break
        return unwritten

    def _prepare(self, others: Sequence[FileInfo]) -> bool:
        """Make the local folder, and have it say what the namespace stands for; whether that has worked."""
        directory, fs = self._directory, self._directory.fs
        try:
            if directory.format() not in (None, FORMAT_VERSION):
                return False
            directory.create()
            fs.make_folder(directory.folder(self._namespace))
            sizes = [info.size for info in others if info.size <= _MOST_TEXT]
            if sizes and not fs.exists(self._path(FINGERPRINT)):
                data = self._objects.read([(f"{self._namespace.hex()}/{FINGERPRINT}", 0, sizes[0])])[0]
                with contextlib.suppress(ValueError, RecursionError):
                    document = json.loads(data or b"null")
                    if isinstance(document, dict):
                        directory.prepare(self._namespace, document)
        except OSError:
            return False
        return True

    def _of_file(self, name: str, size: int) -> bytes | None:
        """The head of a local segment that is as large as that of the bucket; None if there is none."""
        try:
            head, found = read_head(self._directory.fs, self._path(name))
            parse_head(head, found, self._limit, structured=False)
        except (OSError, UnreadableError):
            return None
        return head if found == size else None

    def _read(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """The heads of segments of these sizes, checked; at once, unless some are long."""
        folder, heads, doubted = self._namespace.hex(), dict[str, bytes](), set[str]()
        data = dict.fromkeys(sizes, b"")
        ends = {name: min(size, self._longest) for name, size in sizes.items()}
        while ends:
            more: dict[str, int] = {}
            read = self._objects.read(
                [(f"{folder}/{name}", len(data[name]), end) for name, end in ends.items()]
            )
            for name, piece in zip(ends, read, strict=True):
                if piece is None:  # it is gone by now, or the bucket fails
                    continue
                data[name] += piece
                try:
                    needed = head_size(data[name], sizes[name])
                    if needed > len(data[name]):
                        more[name] = needed
                        continue
                    head = data[name][:needed]
                    self._check(head, sizes[name])
                except DamagedError as error:
                    if name not in doubted:  # the object may be good, and the line not
                        doubted.add(name)
                        data[name], more[name] = b"", min(sizes[name], self._longest)
                        continue
                    self._bad[name] = sizes[name]
                    self._objects.corrupt += 1
                    message = "%s is damaged (%s): its rows are not used, and it is left alone"
                    where = f"{self._objects.bucket.url}/{folder}/{name}"
                    self._objects.tell("corrupt", message, where, str(error))
                    continue
                self._longest = max(self._longest, min(needed, _MOST_READ))
                heads[name] = head
            ends = more
        return heads

    def _check(self, head: bytes, size: int) -> None:
        try:
            parse_head(head, size, self._limit, structured=False)
        except (DamagedError, NewerFormatError):
            raise
        except UnreadableError:
            pass  # others may be able to read it


class Remote(NamespaceIndex):
    """The segments of one namespace in a bucket, known by their heads.

    Those that were made up to `since`, in milliseconds since 1970, are left out.

    Attributes
    ----------
    damaged : set of int
        Rows that are not what was written: numbers of segments, shifted by 32 bits, and of rows in them.
    """

    def __init__(
        self,
        namespace: bytes,
        directory: CacheDirectory,
        folder: BucketFolder,
        files: Descriptors,
        numbers: Iterator[int],
        limit: int,
        since: int,
        on_fault: Callable[[Exception, str], None],
    ) -> None:
        super().__init__(namespace, directory, files, numbers, limit, on_fault)
        self.since = since
        self._folder = folder
        self.damaged: set[int] = set()
        self._lost: set[str] = set()  # objects that were gone, by name; they are among the `names`
        self._heads: dict[str, bytes] = {}  # those that could not be written to the folder, by segment

    @property
    def known(self) -> set[str]:
        """Names of segments whose heads need not be fetched."""
        return self.names | self._numbers.keys() | self._heads.keys()

    @property
    def stored(self) -> dict[int, Segment]:
        """The segments that the local folder lacks."""
        some = [(number, one) for number, one in self.segments.items() if isinstance(one, Segment)]
        return {number: one for number, one in some if not self._directory.fs.is_file(one.path)}

    def count(self) -> int:
        """How many rows are in these."""
        return self.table.count(list(self.stored))

    def update(self, changes: Changes) -> None:
        """Note what a listing has shown."""
        self.remove_files(changes.gone)
        self.names -= self._lost | changes.gone  # what the bucket has again is opened again
        self._lost.clear()
        self._heads |= {name: head for name, head in changes.heads.items() if name not in self.known}
        self._changed = -1
        self.look_again()

    def lose(self, gone: Collection[int], damaged: Mapping[int, Collection[int]]) -> None:
        """Forget damaged rows, and segments whose objects are gone, until a listing has them again."""
        for number, rows in damaged.items():
            self.damaged.update(number << 32 | row for row in rows)
        some = [one for number in gone if (one := self.segments.get(number)) is not None]
        self._lost.update(os.path.basename(one.path) for one in some if isinstance(one, Segment))
        self.remove(gone, gone)

    def hold(self, *, is_used: bool = True) -> None:
        """The disk tier in front counts as the user of the namespace."""

    def _contents(self) -> Contents:
        contents = self._directory.contents(self.namespace.hex())
        there = {info.name.removesuffix(HEAD): info for info in contents.heads}
        for name in (*self._heads, *self._numbers):  # the bucket has these, whatever is in the folder
            there.setdefault(name, FileInfo(name, False, 0, 0.0))
        here = [info._replace(name=name) for name, info in there.items() if made_at(name) > self.since]
        return dataclasses.replace(contents, segments=here, runs=[])

    def _open(self, path: str) -> Segment:
        fs, name = self._directory.fs, os.path.basename(path)
        head = self._heads.get(name)
        try:
            if head is None:
                head = fs.read_file(path + HEAD, _MOST_HEAD)
            segment = Segment.of_head(self._folder, self._descriptors, path, head, limit=self._limit)
        except DamagedError as error:
            self._on_fault(error, path + HEAD)
            self._heads.pop(name, None)
            with contextlib.suppress(OSError):
                fs.remove(path + HEAD)
            raise FileNotFoundError(path + HEAD) from None  # so that it is fetched again
        self._heads.pop(name, None)
        self._folder.sizes[path] = segment.nbytes
        return segment
