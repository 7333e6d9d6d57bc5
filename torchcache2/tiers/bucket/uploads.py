"""`Uploads`: uploads what a bucket lacks of a local folder.

It uploads ``CACHEDIR.TAG`` first, then the segments, and the ``fingerprint.json`` of each namespace last.
Once the bucket has a segment, its head is written locally: now the local file may be deleted. An interrupted
upload leaves no head, so the next process compares sizes, and uploads the segment again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torchcache2.core.errors import DamagedError, UnreadableError
from torchcache2.core.sizes import parse_size
from torchcache2.files.directory import (
    FINGERPRINT,
    NAMESPACE_NAME,
    PACK,
    PACK_NAME,
    TAG,
    TAG_TEXT,
    CacheDirectory,
    Contents,
    stated_format,
)
from torchcache2.files.layout import FORMAT_VERSION, HEAD, pack, parse_head, read_head, write_head
from torchcache2.files.removal import deleting
from torchcache2.tiers.bucket.objects import Objects

LEAST_PACKED, MOST_PACK = 32, 32 << 20  # heads, and bytes, of a pack
_ANY_SIZE = 1 << 62


class Transfer(NamedTuple):
    """A file to upload; the namespace is 32 hexadecimal digits."""

    namespace: str
    name: str


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _behind(contents: Contents, stem: str) -> list[str]:
    """The segments with a head that come after `stem`, in order."""
    names = sorted(info.name.removesuffix(HEAD) for info in contents.heads)
    return [name for name in names if _stem(name) > stem]


class _Namespace:
    """State of one namespace; its lock is held while it is listed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.there: dict[str, int] | None = None  # sizes of the bucket's objects; None: not listed
        self.done: set[str] = set()  # files that the bucket has, or that cannot be read here
        self.packed: str | None = None  # heads up to this segment need no pack; None: nothing was uploaded


class Uploads:
    """Uploads of one process. Several threads call `upload`.

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
        self._coming = 0  # bytes that are being uploaded

    def wanted(self, contents: list[Contents], *, is_sole: bool) -> list[Transfer]:
        """Files that the bucket lacks, or may lack; only the sole uploader looks after more than segments."""
        found = []
        for one in contents:
            known, heads = self._namespaces[one.namespace], {info.name for info in one.heads}
            names = [info.name for info in one.segments if info.name + HEAD not in heads]
            if is_sole and not names and known.packed is not None:
                fresh = _behind(one, known.packed)
                names += [_stem(fresh[-1]) + PACK] if len(fresh) >= LEAST_PACKED else []
            if is_sole and (one.segments or one.heads) and one.others:
                names.append(FINGERPRINT)
            found += [Transfer(one.namespace, name) for name in names if name not in known.done]
        return found

    def upload(self, transfer: Transfer) -> bool:
        """Upload a file, unless it is gone; False if that must be tried again."""
        known = self._namespaces[transfer.namespace]
        if not self._begin() or (there := self._listed(transfer.namespace, known)) is None:
            return False
        if transfer.name == FINGERPRINT:
            return self._describe(transfer.namespace, known, there)
        if transfer.name.endswith(PACK):
            self._pack(transfer.namespace, known, there)
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
        if there.get(transfer.name) != size:
            if not self._upload_segment(path, transfer, size):
                return False
            there[transfer.name] = size
            known.packed = known.packed or ""
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
            if (listing := self._objects.listing()) is None:
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

    def _listed(self, namespace: str, known: _Namespace) -> dict[str, int] | None:
        """What the bucket has of a namespace, listed once; deletes the heads of segments that it has lost."""
        with known.lock:
            if known.there is None:
                before = self._directory.contents(namespace)  # first: heads written meanwhile are right
                is_new = self._names is not None and namespace not in self._names
                listing = [] if is_new and not before.heads else self._objects.listing(namespace)
                if listing is None:
                    return None
                there = known.there = {info.name: info.size for info in listing if not info.is_folder}
                here = {info.name: info.size for info in before.segments}
                names = [info.name.removesuffix(HEAD) for info in before.heads]
                lost = [one for one in names if one not in there or here.get(one, there[one]) != there[one]]
                if lost:
                    with contextlib.suppress(OSError), deleting(self._directory):
                        self._remove_heads(namespace, lost)
            return known.there

    def _remove_heads(self, namespace: str, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.remove(os.path.join(self._directory.path, namespace, name + HEAD))

    def _upload_segment(self, path: str, transfer: Transfer, size: int) -> bool:
        """Upload a segment, if `remote_size` allows."""
        with self._lock:
            if self._most is not None:
                there = self._bytes_there()  # each time, as other machines upload too
                if there is None or self.ended:
                    return False
                if there + self._coming + size > self._most:
                    self._end(f"the bucket has {there} bytes, and remote_size={self._most}")
                    return False
            self._coming += size
        try:
            return self._objects.upload(path, "/".join(transfer))
        finally:
            with self._lock:
                self._coming -= size

    def _bytes_there(self) -> int | None:
        """Bytes of all objects of the cache in the bucket; None if it fails."""
        listings = [self._objects.listing()]
        folders = [info.name for info in listings[0] or [] if info.is_folder]
        listings += [self._objects.listing(name) for name in folders if NAMESPACE_NAME.fullmatch(name)]
        if any(listing is None for listing in listings):
            return None
        return sum(info.size for listing in listings for info in listing or [])

    def _end(self, reason: str) -> None:
        self.ended = reason
        message = "nothing more is uploaded to %s: %s. New rows stay in %s"
        url = self._objects.bucket.url
        self._objects.tell("ended", message, url, reason, self._directory.path)

    def _pack(self, namespace: str, known: _Namespace, there: dict[str, int]) -> None:
        """Upload one pack of heads that are in no pack, so that readers fetch few objects."""
        packs = [name for name in there if PACK_NAME.fullmatch(name)]
        names = _behind(self._directory.contents(namespace), _stem(max(packs, default="")))
        heads, left = dict[str, tuple[int, bytes]](), MOST_PACK // 2
        for name in names:
            with contextlib.suppress(OSError, DamagedError, KeyError):  # readers get it from the segment
                head = self._fs.read_file(os.path.join(self._directory.path, namespace, name + HEAD), left)
                heads[name], left = (there[name], head), left - len(head)
        known.packed = _stem(max(heads if left < MOST_PACK // 4 else names, default=known.packed or ""))
        if len(heads) >= LEAST_PACKED:
            name, data = _stem(max(heads)) + PACK, pack(heads)
            if self._objects.write(f"{namespace}/{name}", data):
                there[name] = len(data)

    def _describe(self, namespace: str, known: _Namespace, there: dict[str, int]) -> bool:
        """Upload the fingerprint, unless the bucket has one."""
        document = self._directory.fingerprint(namespace)
        if document and FINGERPRINT not in there:
            text = json.dumps(document, indent=1, sort_keys=True).encode()
            if not self._objects.write(f"{namespace}/{FINGERPRINT}", text):
                return False
            there[FINGERPRINT] = len(text)
        known.done.add(FINGERPRINT)
        return True
