"""`Listing`: lists a bucket's segments, and fetches their heads into the local folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import FINGERPRINT, CacheDirectory, contents_of
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.files.filesystem import FileInfo, made_at
from torchcache2.files.layout import (
    FORMAT_VERSION,
    HEAD,
    head_size,
    parse_head,
    read_head,
    unpack,
    write_head,
)
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder

_RETRY = 2.0  # seconds
_AT_ONCE = 32  # heads
_FIRST_READ, _MOST_READ = 16 << 10, 1 << 20  # bytes
_MOST_TEXT = 16 << 20
LEAST_PACKED, MOST_PACK = 32, 32 << 20  # heads, and bytes, of a pack


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
        self._longest = _FIRST_READ  # of the heads so far
        self._packs: set[str] = set()  # packs that were read
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
            self._fetch(dict(wanted), found.packs, found.others)
            if self._objects.cause is None:
                self._listed = time.monotonic()
            return True  # even if nothing is new: another process may have been faster

    def _known(self) -> set[str]:
        """The names of segments whose heads need not be fetched."""
        path = self._path("")
        names = {os.path.basename(one) for one in list(self._folder.heads) if one.startswith(path)}
        with contextlib.suppress(OSError):
            contents = self._directory.contents(self._namespace.hex())
            names |= {info.name.removesuffix(HEAD) for info in contents.heads}
        return names

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.folder(self._namespace), name)

    def _fetch(self, sizes: dict[str, int], packs: Sequence[FileInfo], others: Sequence[FileInfo]) -> None:
        """Write the heads of segments of these sizes to the local folder, or keep them in memory.

        Processes that do this at the same time begin with different heads, and skip what others have fetched.
        """
        fs = self._directory.fs
        writes = bool(sizes) and self._prepare(others)
        for heads in chain(self._packed(sizes, packs), self._alone(sizes)):
            for name, head in heads.items():
                sizes.pop(name)
                try:
                    if writes:
                        write_head(fs, self._path(name), head)
                except OSError:
                    writes = False  # such as that the disk is full
                if not writes:
                    self._folder.note(self._path(name), head)
            if self._objects.cause is not None:
                break

    def _packed(self, sizes: dict[str, int], packs: Sequence[FileInfo]) -> Iterator[dict[str, bytes]]:
        """The heads of segments that are in packs; a pack's name is that of its last segment."""
        folder = self._namespace.hex()
        for info in packs if len(sizes) >= LEAST_PACKED else ():
            if info.name in self._packs or info.size > MOST_PACK or info.name < min(sizes, default="~"):
                continue
            data = self._objects.read([(f"{folder}/{info.name}", 0, info.size)])[0]
            if data is None:
                return
            self._packs.add(info.name)
            heads = dict[str, bytes]()
            with contextlib.suppress(DamagedError):  # the rest is read from the segments
                for name, (size, head) in unpack(data).items():
                    with contextlib.suppress(DamagedError):
                        if sizes.get(name) == size:
                            self._check(head, size)
                            heads[name] = head
            yield heads

    def _alone(self, sizes: dict[str, int]) -> Iterator[dict[str, bytes]]:
        """The heads of segments, read from the bucket or from local segments."""
        fs, names = self._directory.fs, list(sizes)
        random.shuffle(names)
        for first in range(0, len(names), _AT_ONCE):
            some = [
                name for name in names[first : first + _AT_ONCE] if not fs.exists(self._path(name) + HEAD)
            ]
            heads = {name: head for name in some if (head := self._of_file(name, sizes[name]))}
            yield heads | self._read({name: sizes[name] for name in some if name not in heads})

    def _prepare(self, others: Sequence[FileInfo]) -> bool:
        """Make the local folder and its ``fingerprint.json``; returns whether that worked."""
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
        """The head of a local segment of the same size; None if there is none."""
        try:
            head, found = read_head(self._directory.fs, self._path(name))
            parse_head(head, found, self._limit, structured=False)
        except (OSError, UnreadableError):
            return None
        return head if found == size else None

    def _read(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """The checked heads of segments, by name and size; in one request each, unless they are long."""
        folder, heads, doubted = self._namespace.hex(), dict[str, bytes](), set[str]()
        data = dict.fromkeys(sizes, b"")
        ends = {name: min(size, self._longest) for name, size in sizes.items()}
        while ends:
            more: dict[str, int] = {}
            read = self._objects.read(
                [(f"{folder}/{name}", len(data[name]), end) for name, end in ends.items()]
            )
            for name, piece in zip(ends, read, strict=True):
                if piece is None:  # the object is gone, or the bucket fails
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
                    if name not in doubted:  # perhaps the transfer was damaged
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
