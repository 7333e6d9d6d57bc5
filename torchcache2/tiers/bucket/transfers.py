"""Uploads what a bucket lacks of a local folder (`Uploads`), and downloads its segments (`Downloads`).

It uploads ``CACHEDIR.TAG`` first, then the segments, and the ``fingerprint.json`` of each namespace last.
Once the bucket has a segment, its head is written locally: now the local file may be deleted. An interrupted
upload leaves no head, so the next process compares sizes, and uploads the segment again.

Segments are downloaded as long as they fit, without deleting anything. Segments that were here before are not
downloaded again: they had to make room for new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from torchcache2.core.errors import DamagedError, UnreadableError
from torchcache2.core.sizes import parse_size
from torchcache2.files.directory import (
    CORRUPT,
    FINGERPRINT,
    NAMESPACE_NAME,
    PACK,
    PACK_NAME,
    PART,
    TAG,
    TAG_TEXT,
    CacheDirectory,
    Contents,
    stated_format,
)
from torchcache2.files.layout import FORMAT_VERSION, HEAD, pack, parse_head, read_head, write_head
from torchcache2.files.removal import deleting, in_use, used_bytes
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder

_MOST_TEXT = 16 << 20  # bytes of a fingerprint
LEAST_PACKED, MOST_PACK = 32, 32 << 20  # heads, and bytes, of a pack


class Transfer(NamedTuple):
    """A file to upload or download; the namespace is 32 hexadecimal digits."""

    namespace: str
    name: str


def lacking(contents: Contents) -> list[Transfer]:
    """The segments that have no head, the oldest first."""
    heads = {info.name for info in contents.heads}
    names = [info.name for info in contents.segments]
    return [Transfer(contents.namespace, name) for name in names if name + HEAD not in heads]


def absent(contents: Contents) -> list[Transfer]:
    """The segments that have a head and are neither here nor set aside; newest head first."""
    here = {info.name for info in contents.segments}
    here |= {info.name.removesuffix(CORRUPT) for info in contents.corrupt}
    heads = sorted(contents.heads, key=lambda info: (-info.mtime, info.name))
    names = [info.name.removesuffix(HEAD) for info in heads]
    return [Transfer(contents.namespace, name) for name in names if name not in here]


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _behind(contents: Contents, stem: str) -> list[str]:
    """The segments with a head that come after `stem`, in order."""
    names = sorted(info.name.removesuffix(HEAD) for info in contents.heads)
    return [name for name in names if _stem(name) > stem]


_ANY_SIZE = 1 << 62


class _Namespace:
    """State of one namespace; its lock is held while it is listed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.there: dict[str, int] | None = None  # sizes of the bucket's objects; None: not listed
        self.done: set[str] = set()  # files that the bucket has, or that cannot be read here
        self.is_written = False  # by this process
        self.packed = ""  # heads up to this segment need no pack
        self.is_described = False  # whether the bucket has the fingerprint


class Uploads:
    """Uploads of one process. One thread calls `wanted`, several call `upload`.

    Attributes
    ----------
    ended : str
        Why uploads have ended; empty if they have not.
    """

    def __init__(self, objects: Objects, directory: CacheDirectory) -> None:
        self.ended = ""
        self._objects = objects
        self._directory = directory
        self._fs = directory.fs
        self._lock = threading.Lock()
        self._names: set[str] | None = None  # names at the top of the bucket, when first listed
        self._namespaces: dict[str, _Namespace] = defaultdict(_Namespace)
        size = objects.bucket.remote_size
        self._most = None if size is None else parse_size("remote_size", size, free=None)
        self._bytes: int | None = None  # of all objects in the bucket, as far as known

    def wanted(self, contents: list[Contents]) -> list[Transfer]:
        """Files that the bucket lacks, or may lack before it is listed."""
        found = []
        for one in contents:
            known = self._namespaces[one.namespace]
            found += [transfer for transfer in lacking(one) if transfer.name not in known.done]
            fresh = _behind(one, known.packed) if known.is_written and not lacking(one) else []
            if len(fresh) >= LEAST_PACKED:
                found.append(Transfer(one.namespace, _stem(fresh[-1]) + PACK))
            if (one.segments or one.heads) and one.others and not known.is_described:
                found.append(Transfer(one.namespace, FINGERPRINT))
        return found

    def upload(self, transfer: Transfer) -> bool:
        """Upload a file, unless it is gone; False if that must be tried again."""
        known = self._namespaces[transfer.namespace]
        if not self._begin() or not self._list(transfer.namespace, known):
            return False
        if transfer.name == FINGERPRINT:
            return self._describe(transfer.namespace, known)
        if transfer.name.endswith(PACK):
            self._pack(transfer.namespace, known)
            return True
        path = os.path.join(self._directory.path, *transfer)
        try:
            head, size = read_head(self._fs, path)
            layout, _ = parse_head(head, size, _ANY_SIZE, structured=False)
        except FileNotFoundError:
            return True
        except UnreadableError as error:
            known.done.add(transfer.name)  # even if it cannot be set aside
            if isinstance(error, DamagedError):
                self._objects.corrupt += 1
                self._objects.tell("corrupt", "%s is damaged (%s): it is set aside", path, str(error))
                with contextlib.suppress(OSError):
                    self._directory.set_aside(path)
            return True
        except OSError as error:
            self._objects.tell("unread", "%s cannot be uploaded: %s", path, repr(error))
            return False
        if layout.namespace.hex() != transfer.namespace:  # the folder was renamed
            known.done.add(transfer.name)
            return True
        assert known.there is not None
        if known.there.get(transfer.name) != size:
            if not self._upload_segment(path, transfer, size):
                return False
            known.there[transfer.name] = size
            known.is_written = True
        try:
            if self._fs.is_file(path):  # if it was dropped meanwhile, write no head
                write_head(self._fs, path, head)
        except OSError:
            known.done.add(transfer.name)
        return True

    def _begin(self) -> bool:
        """Check or write the bucket's tag; False if the bucket fails, or is not for us."""
        with self._lock:
            if self._names is not None or self.ended:
                return not self.ended
            listing = self._objects.listing()
            if listing is None:
                return False
            names = {info.name for info in listing}
            if TAG in names:
                tag = self._objects.texts([TAG]).get(TAG)
                if tag is None and self._objects.cause is not None:
                    return False
                if stated_format(tag or b"") != FORMAT_VERSION:
                    self._end(f"its {TAG} is of a newer format, or of another program")
                    return False
            elif not self._objects.write(TAG, TAG_TEXT.encode()):
                return False
            self._names = names
            return True

    def _list(self, namespace: str, known: _Namespace) -> bool:
        """List a namespace of the bucket, once, and delete the heads of segments that it has lost."""
        with known.lock:
            if known.there is not None:
                return True
            before = self._directory.contents(namespace)  # first: heads written meanwhile are right
            is_new = self._names is not None and namespace not in self._names
            listing = [] if is_new and not before.heads else self._objects.listing(namespace)
            if listing is None:
                return False
            there = {info.name: info.size for info in listing if not info.is_folder}
            here = {info.name: info.size for info in before.segments}
            names = [info.name.removesuffix(HEAD) for info in before.heads]
            lost = [name for name in names if name not in there or here.get(name, there[name]) != there[name]]
            if lost:
                with contextlib.suppress(OSError), deleting(self._directory):
                    for name in lost:
                        with contextlib.suppress(FileNotFoundError):
                            self._fs.remove(os.path.join(self._directory.path, namespace, name + HEAD))
            known.there = there
            return True

    def _upload_segment(self, path: str, transfer: Transfer, size: int) -> bool:
        """Upload a segment, if `remote_size` allows."""
        if self._most is None:
            return self._objects.upload(path, "/".join(transfer))
        with self._lock:
            if self._bytes is None and (found := self._bytes_there()) is not None:
                self._bytes = found
            if self._bytes is None or self.ended:
                return False
            if self._bytes + size > self._most:
                self._end(f"the bucket has {self._bytes} bytes, and remote_size={self._most}")
                return False
            self._bytes += size
        if self._objects.upload(path, "/".join(transfer)):
            return True
        with self._lock:
            self._bytes -= size
        return False

    def _bytes_there(self) -> int | None:
        """Bytes of all objects of the cache in the bucket; None if it fails."""
        listings = [self._objects.listing()]
        for info in listings[0] or []:
            if info.is_folder and NAMESPACE_NAME.fullmatch(info.name):
                listings.append(self._objects.listing(info.name))
        if any(listing is None for listing in listings):
            return None
        return sum(info.size for listing in listings if listing is not None for info in listing)

    def _end(self, reason: str) -> None:
        self.ended = reason
        self._objects.tell(
            "ended",
            "nothing more is uploaded to %s: %s. New rows stay in %s",
            self._objects.bucket.url,
            reason,
            self._directory.path,
        )

    def _pack(self, namespace: str, known: _Namespace) -> None:
        """Upload one pack of heads that are in no pack, so that readers fetch few objects."""
        assert known.there is not None
        packs = [name for name in known.there if PACK_NAME.fullmatch(name)]
        names = _behind(self._directory.contents(namespace), _stem(max(packs, default="")))
        heads, left = dict[str, tuple[int, bytes]](), MOST_PACK // 2
        for name in names:
            with contextlib.suppress(OSError, DamagedError, KeyError):  # readers get it from the segment
                head = self._fs.read_file(os.path.join(self._directory.path, namespace, name + HEAD), left)
                heads[name], left = (known.there[name], head), left - len(head)
        known.packed = _stem(max(heads if left < MOST_PACK // 4 else names, default=known.packed))
        if len(heads) >= LEAST_PACKED:
            name, data = _stem(max(heads)) + PACK, pack(heads)
            if self._objects.write(f"{namespace}/{name}", data):
                known.there[name] = len(data)

    def _describe(self, namespace: str, known: _Namespace) -> bool:
        """Upload the fingerprint, unless the bucket has one."""
        document = self._directory.fingerprint(namespace)
        if document and known.there is not None and FINGERPRINT not in known.there:
            text = json.dumps(document, indent=1, sort_keys=True).encode()
            if not self._objects.write(f"{namespace}/{FINGERPRINT}", text):
                return False
            known.there[FINGERPRINT] = len(text)
        known.is_described = True
        return True


_ABOUT_TO_WRITE = 1.0  # seconds
_UNUSED = 0.3  # seconds until an unused namespace is asked for again
_UNKNOWN = 1 << 62
_SIZES = 64  # most heads read in one look


class Downloads:
    """Downloads of one process. One thread calls `wanted`, several call `download`.

    The folder may have up to `budget` bytes.
    """

    def __init__(self, objects: Objects, directory: CacheDirectory, budget: int) -> None:
        self._objects = objects
        self._directory = directory
        self._folder = BucketFolder(objects, directory, budget)
        self._budget = budget
        self._here: set[Transfer] = set()  # at the last look
        self._been_here: set[Transfer] = set()  # segments that were ever here, or are damaged in the bucket
        self._not_before = 0.0

    def note(self, contents: list[Contents]) -> None:
        """Record local segments, so that deleted segments are not downloaded again.

        A deleted segment made room for one about to be written: pause, to leave that room free.
        """
        here = {Transfer(one.namespace, info.name) for one in contents for info in one.segments}
        if self._here - here:
            self._not_before = max(self._not_before, time.monotonic() + _ABOUT_TO_WRITE)
        self._here = here
        self._been_here |= here

    def wanted(self, contents: list[Contents], running: Collection[Transfer], most: int) -> list[Transfer]:
        """Up to `most` segments to download that fit into the folder, newest head first."""
        found: list[Transfer] = []
        if most <= 0 or time.monotonic() < self._not_before:
            return found
        room, opened, is_unused = self._budget - used_bytes(contents), 0, False
        for one in contents:
            begun = {info.name.removesuffix(PART) for info in one.parts}
            some = [transfer for transfer in absent(one) if transfer not in self._been_here]
            if some and in_use(self._directory, one.namespace) is False:
                is_unused = True
            elif some:
                for transfer in sorted(some, key=lambda transfer: transfer.name not in begun):
                    opened += 1
                    size = 0 if transfer.name in begun else self._size(transfer)
                    if transfer not in running and size <= room:
                        room -= size
                        found.append(transfer)
                    if len(found) == most or opened == _SIZES:
                        return found
        if is_unused and not found:
            # Look again only later: each look locks the namespace briefly, and a process that begins to use
            # it meanwhile cannot mark it as used.
            self._not_before = time.monotonic() + _UNUSED
        return found

    def download(self, transfer: Transfer) -> None:
        """Download the missing blocks of a segment."""
        self._been_here.add(transfer)
        try:
            if self._folder.fill(os.path.join(self._directory.path, *transfer)) is None:
                self._been_here.discard(transfer)
        except (OSError, DamagedError):  # it was dropped meanwhile
            pass

    def _size(self, transfer: Transfer) -> int:
        """Bytes of a segment, as its head says."""
        try:
            return self._folder.sizes_of(os.path.join(self._directory.path, *transfer))[1]
        except (OSError, DamagedError):
            return _UNKNOWN
