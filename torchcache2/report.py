"""What there is to say about a cache directory: of each namespace, of all of it, and of a segment's health."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from torchcache2.directory import FINGERPRINT, LOCK, TAG, CacheDirectory, Contents, NewerDirectoryError
from torchcache2.errors import OptionError
from torchcache2.schemajson import UnknownClassError
from torchcache2.segment import DamagedError, NewerFormatError, TooLargeError
from torchcache2.segmentread import Descriptors, Segment
from torchcache2.settings import free_memory
from torchcache2.storage import FileSystem, ShortFileError

__all__ = ["Namespace", "Verdict", "existing", "in_use", "namespace", "row_limit", "totals", "verdict"]

_ANY = 2**63  # bytes of a row: nothing is read of it
_LEAST_LIMIT = 1 << 30
_ALPHABET = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
_MOST_SHOWN = 120


@dataclasses.dataclass(frozen=True)
class Namespace:
    """What is to be said about a namespace.

    Attributes
    ----------
    id : str
        32 hexadecimal digits.
    name : str
        Of the class or function; "?" if its ``fingerprint.json`` does not say.
    segments, unreadable : int
        How many there are, and how many of them could not be opened.
    rows, row_bytes : int
        Of those that could, and the bytes of these rows as they are in memory.
    stored_bytes, nbytes : int
        Of the segments that could be opened, and of all files.
    codecs : mapping of str to int
        Segments by codec.
    created, last_used : float or None
        Seconds since the epoch.
    in_use : bool or None
        Whether a living process uses it; None if that cannot be told here.
    """

    id: str
    name: str
    segments: int
    unreadable: int
    rows: int
    row_bytes: int
    stored_bytes: int
    nbytes: int
    codecs: dict[str, int]
    created: float | None
    last_used: float | None
    in_use: bool | None

    @property
    def ratio(self) -> float | None:
        """Bytes of the rows in memory over bytes of their segments."""
        return self.row_bytes / self.stored_bytes if self.stored_bytes else None

    def to_json(self) -> dict[str, Any]:
        """The same for ``json.dumps``."""
        return {
            "namespace": self.id,
            "class": self.name,
            "segments": self.segments,
            "unreadable": self.unreadable,
            "rows": self.rows,
            "bytes": self.nbytes,
            "row_bytes": self.row_bytes,
            "ratio": self.ratio and round(self.ratio, 4),
            "codecs": self.codecs,
            "created": _iso(self.created),
            "last_used": _iso(self.last_used),
            "in_use": self.in_use,
        }


class Verdict(NamedTuple):
    """Whether a segment is what was written.

    Attributes
    ----------
    state : {"good", "damaged", "unchecked", "gone"}
        ``unchecked``: this process cannot tell. ``gone``: somebody has deleted it.
    rows : int
    reason : str
        Why it is not good.
    """

    state: Literal["good", "damaged", "unchecked", "gone"]
    rows: int = 0
    reason: str = ""


def existing(path: str, fs: FileSystem) -> CacheDirectory:
    """The cache directory at a path.

    Raises
    ------
    OptionError
        If there is none, or one of a later version of the format.
    OSError
        If it cannot be read.
    """
    directory = CacheDirectory(path, fs)
    try:
        names = [entry.name for entry in fs.entries(directory.path)]
        directory.check()
    except FileNotFoundError:
        raise OptionError(f"{path!r} does not exist") from None
    except NotADirectoryError:
        raise OptionError(f"{path!r} is a file, not a cache directory") from None
    except OptionError:
        raise OptionError(f"{path!r} is not a cache directory: it has no {TAG} of torchcache2") from None
    except NewerDirectoryError as error:
        raise OptionError(str(error)) from None
    if TAG not in names and not directory.scan():
        raise OptionError(f"{path!r} is not a cache directory: it has neither {TAG} nor a namespace")
    return directory


def namespace(directory: CacheDirectory, contents: Contents) -> Namespace:
    """Read what is to be said about a namespace: the indices of its segments, not their rows."""
    rows = row_bytes = stored = unreadable = 0
    codecs: collections.Counter[str] = collections.Counter()
    descriptors = Descriptors(directory.fs)
    for entry in contents.segments:
        path = os.path.join(directory.path, contents.namespace, entry.name)
        try:
            segment = Segment.open(directory.fs, descriptors, path, limit=_ANY, structured=False)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except (OSError, DamagedError, NewerFormatError, TooLargeError, UnknownClassError, OptionError):
            unreadable += 1
            continue
        rows += len(segment)
        for schema, which in segment.schemas(np.arange(len(segment))):
            row_bytes += schema.row_bytes * len(which)
        stored += segment.nbytes
        codecs[segment.layout.codec] += 1
    document = directory.fingerprint(contents.namespace)
    return Namespace(
        id=contents.namespace,
        name=_shown(document.get("class")),
        segments=len(contents.segments),
        unreadable=unreadable,
        rows=rows,
        row_bytes=row_bytes,
        stored_bytes=stored,
        nbytes=contents.nbytes,
        codecs=dict(sorted(codecs.items())),
        created=_created(document.get("created"), contents),
        last_used=contents.last_used or None,
        in_use=in_use(directory, contents.namespace),
    )


def totals(directory: CacheDirectory, contents: list[Contents]) -> dict[str, Any]:
    """Counts of the whole directory, for ``json.dumps``."""
    namespaces = [namespace(directory, one) for one in contents]
    codecs: collections.Counter[str] = collections.Counter()
    for one in namespaces:
        codecs.update(one.codecs)
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


def in_use(directory: CacheDirectory, namespace: str) -> bool | None:
    """Whether a living process uses a namespace; None where there are no locks that would say so."""
    path = os.path.join(directory.path, namespace, FINGERPRINT)
    try:
        locked = directory.fs.lock(directory.fs.open(path), exclusive=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if locked is None else not locked


def row_limit() -> int:
    """Bytes that a row may have to be checked: a quarter of what is free, so that no file can take it all."""
    return max(_LEAST_LIMIT, (free_memory(torch.device("cpu")) or 0) // 4)


def verdict(fs: FileSystem, path: str, namespace: str, limit: int) -> Verdict:
    """Read all of a segment, and compare every checksum.

    Parameters
    ----------
    fs : FileSystem
    path : str
    namespace : str
        The one that it must belong to: 32 hexadecimal digits.
    limit : int
        Bytes that a row may have.
    """
    descriptors = Descriptors(fs)
    try:
        segment = Segment.open(fs, descriptors, path, limit=limit, structured=False)
        found = segment.layout.namespace.hex()
        if found != namespace:
            return Verdict("damaged", len(segment), f"belongs to namespace {found}")
        damaged = segment.check()
    except FileNotFoundError:
        return Verdict("gone")
    except OSError as error:
        return Verdict("damaged", reason=f"cannot be read: {error.strerror}")
    except (DamagedError, ShortFileError) as error:
        return Verdict("damaged", reason=_printable(str(error)))
    except NewerFormatError as error:
        return Verdict("unchecked", reason=_printable(f"is of the newer format {error}: upgrade torchcache2"))
    except (TooLargeError, UnknownClassError, OptionError) as error:
        return Verdict("unchecked", reason=_printable(str(error)))
    except MemoryError:
        return Verdict("unchecked", reason="needs more memory than there is")
    if damaged:
        return Verdict(
            "damaged", len(segment), f"{damaged:,} of {len(segment):,} rows are not what was written"
        )
    return Verdict("good", len(segment))


def _foreign(directory: CacheDirectory, contents: list[Contents]) -> int:
    """Names in the directory and in its namespaces that are not the cache's, and are left alone."""
    ours = {LOCK, *(one.namespace for one in contents)}
    names = [entry.name for entry in directory.fs.entries(directory.path)]
    count = sum(name not in ours and name != TAG and not name.startswith(TAG + ".") for name in names)
    for one in contents:
        known = {entry.name for entry in (*one.segments, *one.corrupt, *one.temporary, *one.others)}
        folder = os.path.join(directory.path, one.namespace)
        try:
            count += sum(entry.name not in known for entry in directory.fs.entries(folder))
        except OSError:
            continue  # deleted meanwhile
    return count


def _created(stated: Any, contents: Contents) -> float | None:
    """When a namespace came: as its fingerprint says, else as the name of its oldest segment does."""
    try:
        when = datetime.datetime.fromisoformat(str(stated).replace("Z", "+00:00"))
        return (when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        pass
    oldest = min((entry.name for entry in contents.segments), default="")
    if not oldest:
        return None
    number = 0
    for letter in oldest[:10]:
        number = number << 5 | _ALPHABET[letter]
    return number / 1000  # milliseconds


def _iso(seconds: float | None) -> str | None:
    try:
        when = datetime.datetime.fromtimestamp(seconds or 0, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return when.isoformat(timespec="seconds") if seconds is not None else None


def _shown(name: Any) -> str:
    return _printable(name) if isinstance(name, str) and name else "?"


def _printable(text: str) -> str:
    """Text from a file, without what would steer a terminal, and not without end."""
    short = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in short)
