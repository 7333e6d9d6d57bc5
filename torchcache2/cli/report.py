"""Collects facts about a cache directory and each of its namespaces, for the commands."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from torchcache2.core.errors import DamagedError, NewerFormatError, OptionError, UnreadableError
from torchcache2.core.keys import Array, filled
from torchcache2.core.logs import WarnOnce
from torchcache2.core.places import Bucket, is_url
from torchcache2.core.sizes import free_memory
from torchcache2.files.directory import TAG, CacheDirectory, Contents, is_ours
from torchcache2.files.filesystem import Descriptors, FileSystem, made_at
from torchcache2.files.indexfile import IndexFile
from torchcache2.files.removal import in_use
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.files import BucketFiles
from torchcache2.tiers.bucket.objects import Objects

State = Literal["good", "damaged", "unreadable", "unchecked", "gone"]
STATES: tuple[State, ...] = ("good", "damaged", "unreadable", "unchecked", "gone")
_LEAST_LIMIT = 1 << 30
_MOST_SHOWN = 120


class Verdict(NamedTuple):
    """Whether a segment is intact.

    It is "unreadable" if the system refuses to read it, "unchecked" if this process cannot tell, and "gone"
    if it was deleted.
    """

    state: State
    rows: int = 0
    reason: str = ""  # why it is not good


def row_limit() -> int:
    """Most bytes of a row to check: a quarter of free memory, so that no file can take all of it."""
    return max(_LEAST_LIMIT, (free_memory(torch.device("cpu")) or 0) // 4)


def verdict(fs: FileSystem, path: str, namespace: str, limit: int) -> Verdict:
    """Read all of a segment, which must belong to a namespace, and compare every checksum.

    `namespace` is 32 hexadecimal digits, and `limit` the most bytes of a row.
    """
    try:
        segment = Segment.open(fs, Descriptors(fs), path, limit=limit, structured=False)
        found = segment.layout.namespace.hex()
        if found != namespace:
            return Verdict("damaged", len(segment), f"belongs to namespace {found}")
        damaged, count = segment.check(), len(segment)
    except (OSError, UnreadableError, OptionError, MemoryError) as error:
        return trouble(error)
    if damaged:
        return Verdict("damaged", count, f"{damaged:,} of {count:,} rows differ from what was written")
    return Verdict("good", count)


def verdict_of_index_file(fs: FileSystem, path: str) -> Verdict:
    """Read all of a run, and compare every checksum."""
    try:
        IndexFile(fs, Descriptors(fs), path).check()
    except (OSError, UnreadableError, MemoryError) as error:
        return trouble(error)
    return Verdict("good")


def trouble(error: Exception) -> Verdict:
    """The verdict on a segment that could not be read."""
    if isinstance(error, FileNotFoundError):
        return Verdict("gone")
    if isinstance(error, OSError):
        return Verdict("unreadable", reason=f"cannot be read: {error.strerror or error}")
    if isinstance(error, MemoryError):
        return Verdict("unchecked", reason="needs more memory than there is")
    reason = str(error)
    if isinstance(error, NewerFormatError):
        reason = f"has the newer format {error}: upgrade torchcache2"
    return Verdict("damaged" if isinstance(error, DamagedError) else "unchecked", reason=printable(reason))


def printable(text: str) -> str:
    """Text from a file, shortened if long, without terminal control characters."""
    short = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in short)


_ANY = 2**63  # no limit on bytes of a row, as only the index is read


@dataclasses.dataclass
class Namespace:
    """Facts about a namespace, for the commands."""

    id: str  # 32 hexadecimal digits
    name: str  # of the class or function; "?" if its ``fingerprint.json`` does not say
    label: str | None  # the user's name for it
    methods: list[str]  # that were cached; empty if unknown
    dataset: dict[str, Any] | None  # for a dataset: its description, and the share that is filled
    segments: int
    nbytes: int  # of all files
    created: float | None  # seconds since the epoch, as the next
    last_used: float | None
    in_use: bool | None  # by a living process; None if unknown
    unreadable: int = 0  # segments that could not be opened; the next four are about the others
    rows: int = 0
    row_bytes: int = 0  # as they are in memory
    stored_bytes: int = 0
    codecs: dict[str, int] = dataclasses.field(default_factory=dict)  # segments by codec

    @property
    def ratio(self) -> float | None:
        """Bytes of the rows in memory over bytes of their segments."""
        return self.row_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def title(self) -> str:
        """The name for people: class, methods and label; of a dataset, its given name and length."""
        said = {} if self.dataset is None else self.dataset
        name, length, share = f" {said['name']}" if said.get("name") else "", "", ""
        if said.get("filled") is not None:
            share = f", {math.floor(1e3 * said['filled']) / 10:g} % filled"
        if said.get("length") is not None:
            length = f" ({said['length']:,}{share})"
        methods = "" if self.methods in ([], ["forward"]) else f".{'/'.join(self.methods)}"
        return " ".join(filter(None, (self.name + methods + name + length, self.label)))

    def to_json(self) -> dict[str, Any]:
        """The report for ``json.dumps``."""
        facts = dataclasses.asdict(self)
        named = {"namespace": facts.pop("id"), "class": facts.pop("name"), "bytes": facts.pop("nbytes")}
        del facts["stored_bytes"]
        ratio = self.ratio and round(self.ratio, 4)
        return (
            named | facts | {"ratio": ratio} | {name: _iso(facts[name]) for name in ("created", "last_used")}
        )


def existing(path: str, fs: FileSystem) -> CacheDirectory:
    """The cache directory at a path or URL; an `OptionError` if there is none."""
    directory = CacheDirectory(path, fs)
    try:
        names = [info.name for info in fs.listing(directory.path)]
        if not is_url(path):  # other programs' objects may be beside ours
            directory.check()
    except FileNotFoundError:
        raise OptionError(f"{path!r} does not exist") from None
    except NotADirectoryError:
        raise OptionError(f"{path!r} is a file, not a cache directory") from None
    except OptionError:
        raise OptionError(f"{path!r} is not a cache directory: it has no {TAG} of torchcache2") from None
    if TAG not in names and not directory.scan():
        if is_url(path):
            raise OptionError(f"{path!r} is not a cache directory: it has neither {TAG} nor a namespace")
        raise OptionError(f"{path!r} is empty: no cache has written to it yet")  # else `check` raises
    return directory


def namespace(directory: CacheDirectory, contents: Contents) -> Namespace:
    """Collect facts about a namespace from the indices of its segments, without reading rows."""
    described = directory.fingerprint(contents.namespace)
    dataset, keys = _dataset(described.get("dataset")), list[Array]()
    facts = Namespace(
        contents.namespace,
        name(directory, contents.namespace),
        _text(described.get("label")),
        _texts(described.get("methods")),
        dataset,
        len(contents.segments),
        contents.nbytes,
        _created(described.get("created"), contents),
        contents.last_used or None,
        # A bucket has no locks, so its users are unknown.
        None if is_url(directory.path) else in_use(directory, contents.namespace),
    )
    descriptors = Descriptors(directory.fs)
    for info in contents.segments:
        path = os.path.join(directory.path, contents.namespace, info.name)
        try:
            segment = Segment.open(directory.fs, descriptors, path, limit=_ANY, structured=False)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except (OSError, UnreadableError, OptionError):
            facts.unreadable += 1
            continue
        facts.rows += len(segment)
        if dataset is not None and segment.keys is not None:
            keys.append(segment.keys)
        for schema, which in segment.schemas(np.arange(len(segment))):
            facts.row_bytes += schema.row_bytes * len(which)
        facts.stored_bytes += segment.nbytes
        facts.codecs[segment.layout.codec] = facts.codecs.get(segment.layout.codec, 0) + 1
    if dataset is not None:
        length = dataset["length"]  # 1.0 only if all samples are there
        dataset["filled"] = None if length is None else math.floor(1e4 * filled(length, keys)) / 1e4
    return facts


def name(directory: CacheDirectory, namespace: str) -> str:
    """The name of the class or function that computed a namespace; "?" if unknown."""
    return _text(directory.fingerprint(namespace).get("class")) or "?"


def _text(stated: Any) -> str | None:
    """A text from a file; None for anything else."""
    return printable(stated) if isinstance(stated, str) and stated else None


def _dataset(stated: Any) -> dict[str, Any] | None:
    """The known fields of a dataset's description."""
    if not isinstance(stated, dict):
        return None
    length = stated.get("length")
    return {
        "length": length if type(length) is int and 0 <= length < _ANY else None,
        **{key: _text(stated.get(key)) for key in ("name", "version")},
    }


def _texts(stated: Any) -> list[str]:
    """The texts of a list from a file."""
    return [text for text in map(_text, stated) if text] if isinstance(stated, list) else []


class Gone(NamedTuple):
    """How much of a namespace was deleted."""

    namespace: str
    files: int
    bytes: int


def chosen(cache: CacheDirectory, names: Sequence[str] | None) -> list[Contents]:
    """The namespaces that begin with these names, or are of a class or label, each once; None: all.

    `OptionError` if no namespace begins with one of them, or several do.
    """
    contents, some = cache.scan(), dict[str, Contents]()
    named = collections.defaultdict[str | None, list[Contents]](list)
    for one in contents if names else ():
        described = cache.fingerprint(one.namespace)
        for text in {_text(described.get("class")), _text(described.get("label"))}:
            named[text].append(one)
    for start in names or ():
        found = named.get(start) or [one for one in contents if start and one.namespace.startswith(start)]
        if not found:
            raise OptionError(f"there is no namespace {start!r} in {cache.path}, nor a class or label")
        if len(found) > 1 and start not in named:
            several = ", ".join(one.namespace for one in found)
            raise OptionError(f"{start!r} is the beginning of several namespaces: {several}")
        some |= {one.namespace: one for one in found}
    return list(some.values()) if names else contents


def gone(before: Sequence[Contents], after: Sequence[Contents]) -> list[Gone]:
    """The files that have disappeared since."""
    left = {(one.namespace, info.name) for one in after for info in one.files}
    found = []
    for one in before:
        sizes = [info.size for info in one.files if (one.namespace, info.name) not in left]
        if sizes:
            found.append(Gone(one.namespace, len(sizes), sum(sizes)))
    return found


def totals(directory: CacheDirectory, contents: list[Contents]) -> dict[str, Any]:
    """Counts of the whole directory, for ``json.dumps``."""
    namespaces = [namespace(directory, one) for one in contents]
    codecs = sum((collections.Counter(one.codecs) for one in namespaces), collections.Counter[str]())
    row_bytes, stored = sum(n.row_bytes for n in namespaces), sum(n.stored_bytes for n in namespaces)
    return {
        "directory": directory.path,
        "format": directory.format(),
        "namespaces": len(namespaces),
        "in_use": sum(n.in_use is True for n in namespaces),
        "segments": sum(n.segments for n in namespaces),
        "unreadable": sum(n.unreadable for n in namespaces),
        "rows": sum(n.rows for n in namespaces),
        "bytes": sum(n.nbytes for n in namespaces),
        "row_bytes": row_bytes,
        "ratio": round(row_bytes / stored, 4) if stored else None,
        "codecs": dict(sorted(codecs.items())),
        "corrupt": sum(len(one.corrupt) for one in contents),
        "temporary": sum(len(one.temporary) for one in contents),
        "foreign": _foreign(directory, contents),
    }


def _foreign(directory: CacheDirectory, contents: list[Contents]) -> int:
    """How many names in the directory and its namespaces are not the cache's."""
    count = sum(not is_ours(info) for info in directory.fs.listing(directory.path))
    for one in contents:
        known = {info.name for info in one.files}
        folder = os.path.join(directory.path, one.namespace)
        try:
            count += sum(info.name not in known for info in directory.fs.listing(folder))
        except OSError:
            continue  # deleted meanwhile
    return count


def _created(stated: Any, contents: Contents) -> float | None:
    """When a namespace was created: from its fingerprint, or else from the name of its oldest segment."""
    try:
        when = datetime.datetime.fromisoformat(str(stated).replace("Z", "+00:00"))
        return (when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        pass
    oldest = min((info.name for info in contents.segments), default="")
    return made_at(oldest) / 1000 if oldest else None


def _iso(seconds: float | None) -> str | None:
    try:
        when = datetime.datetime.fromtimestamp(seconds or 0, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return when.isoformat(timespec="seconds") if seconds is not None else None


_OPTIONS = ": for the command line, variables such as FSSPEC_S3_KEY, or fsspec's configuration"


@contextlib.contextmanager
def opened(path: str) -> Iterator[CacheDirectory]:
    """The cache directory at a path or URL; raises if there is none, or the bucket cannot be reached."""
    if not is_url(path):
        yield existing(path, FileSystem())
        return
    with contextlib.ExitStack() as stack:
        try:
            # A command reports a fault as an error, where a cache only warns.
            objects = Objects(Bucket.of(path, option="DIR"), WarnOnce(lambda _: False))
            stack.callback(objects.close)
            objects.check()
        except OptionError as error:
            advice = _OPTIONS if "storage_options" in str(error) else ""
            raise OptionError(f"{error}{advice}") from None
        yield existing(objects.bucket.url, BucketFiles(objects))


def folder(path: str, command: str) -> CacheDirectory:
    """The cache directory at a path; an `OptionError` if it is a URL."""
    if is_url(path):  # not shown, as it may contain a password
        raise OptionError(f"`torchcache2 {command}` takes a folder, not a URL: copy its files first")
    return existing(path, FileSystem())
