"""Which datasets a folder has samples of, and which of them is meant."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchcache2.core.errors import MissingSampleError, OptionError
from torchcache2.core.keys import Positions
from torchcache2.core.logs import listed
from torchcache2.core.sizes import size_text
from torchcache2.files.directory import NAMESPACE_NAME, CacheDirectory, Contents
from torchcache2.files.errors import NewerFormatError, UnreadableError
from torchcache2.files.filesystem import Descriptors
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.files import BucketError, BucketFiles
from torchcache2.tiers.bucket.objects import Objects

PAUSE = 0.5  # seconds after which a bucket that fails is asked again
_ANY = 2**63  # bytes that a row may have: any number, as only the index is read
_MOST_LISTED, _MOST_RANGES = 20, 5
_LEAST_DIGITS = 4  # of a namespace


@dataclasses.dataclass(frozen=True)
class Kept:
    """A dataset of which there are samples in a folder.

    Attributes
    ----------
    namespace : str
        32 hexadecimal digits.
    kind : str
        The qualified name of its class.
    length : int or None
        How many samples it has; None if it did not tell.
    name, version : str or None
        What the user has called it.
    document : dict
        What ``fingerprint.json`` says.
    """

    namespace: str
    kind: str
    length: int | None
    name: str | None
    version: str | None
    document: dict[str, Any]

    @classmethod
    def of(cls, directory: CacheDirectory, namespace: str) -> Kept | None:
        """What is in a namespace; None if it is not a dataset."""
        document = directory.fingerprint(namespace)
        said = document.get("dataset")
        if not isinstance(said, dict):
            return None
        length, kind = said.get("length"), _text(document.get("class")) or "?"
        is_length = type(length) is int and 0 <= length < _ANY
        called = _text(said.get("name")), _text(said.get("version"))
        return cls(namespace, kind, length if is_length else None, *called, document)

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or self.kind.rpartition(".")[2]

    def means(self, name: str) -> int:
        """How well a name fits: 3, it is that of the dataset; 2, of its class; 1, the first digits; 0, no."""
        if name == self.name:
            return 3
        if name in (self.kind, self.kind.rpartition(".")[2]):
            return 2
        return int(len(name) >= _LEAST_DIGITS and self.namespace.startswith(name))

    def line(self, directory: CacheDirectory) -> str:
        """A line about it for people who have to choose."""
        called = f"name={self.name!r}" if self.name is not None else f"no name, class {self.kind}"
        version = "" if self.version is None else f", version={self.version!r}"
        length = "unknown length" if self.length is None else f"{self.length:,} samples"
        contents = directory.contents(self.namespace)
        rows, size = _rows(directory, contents), size_text(contents.nbytes)
        return f"  {self.namespace[:8]}: {called}{version}: {length}, {rows:,} rows, {size}"

    def call(self, path: str, others: Sequence[Kept], *, partial: bool = False) -> str:
        """The Python that serves it from a folder which has `others` as well."""
        options = ""
        if others:
            alike = [one for one in others if one.name == self.name]
            is_named = self.name is not None and not [o for o in alike if o.version == self.version]
            options = f", name={self.name if is_named else self.namespace[:8]!r}"
            options += f", version={self.version!r}" if is_named and alike else ""
        return f"CachedDataset(None, {path!r}{options}{', partial=True' if partial else ''})"


def kept_in(directory: CacheDirectory) -> list[Kept]:
    """The datasets that a folder knows of; there may be no samples of some."""
    names = [info.name for info in directory.fs.listing(directory.path) if info.is_folder]
    found = [Kept.of(directory, name) for name in names if NAMESPACE_NAME.fullmatch(name)]
    return [kept for kept in found if kept is not None]


def with_samples(directory: CacheDirectory, kept: Sequence[Kept]) -> list[Kept]:
    """Those of some datasets that have samples in a folder, or in the bucket in which it is mirrored."""
    pairs = [(one, directory.contents(one.namespace)) for one in kept]
    return [one for one, contents in pairs if contents.segments or contents.heads]


def chosen_remotely(objects: Objects, name: str | None, version: str | int | None, patience: float) -> Kept:
    """The same as `chosen`, of a bucket; a `MissingSampleError` if that fails for `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            files = BucketFiles(objects)
            files.fetch_texts()
            return chosen(CacheDirectory(objects.bucket.url, files), name, version)
        except (BucketError, OptionError) as error:
            try:
                objects.check()  # the credentials may be refused, or there is no such bucket
            except NewerFormatError as newer:
                raise OptionError(str(newer)) from None
            if isinstance(error, OptionError):
                raise
            if time.monotonic() > end:
                raise MissingSampleError(f"nobody knows which samples are there: {error}") from None
        time.sleep(PAUSE)


def chosen(directory: CacheDirectory, name: str | None, version: str | int | None) -> Kept:
    """The dataset of a folder that is meant by a name and a version.

    Raises
    ------
    OptionError
        If it is not exactly one; the message says what there is.
    """
    try:
        directory.check()
        there = kept_in(directory)
        if len(there) > 1:
            there = with_samples(directory, there)
    except FileNotFoundError:
        raise OptionError(f"path={directory.path!r} does not exist, so there are no samples in it") from None
    except NewerFormatError as error:
        raise OptionError(str(error)) from None
    except OSError as error:
        raise OptionError(f"path={directory.path!r} cannot be read: {error}") from None
    fitting = there
    if name is not None:
        best = max([kept.means(name) for kept in there], default=0)
        fitting = [kept for kept in there if best and kept.means(name) == best]
    if version is not None:
        fitting = [kept for kept in fitting if kept.version == str(version)]
    if len(fitting) == 1:
        return fitting[0]
    if not there:
        raise OptionError(f"{directory.path!r} has no samples of a dataset: it has {_others(directory)}")
    wanted = "" if name is None else f" of name={name!r}"
    wanted += "" if version is None else f" of version={version!r}"
    shown = fitting or there
    lines = [kept.line(directory) for kept in shown[:_MOST_LISTED]]
    more = f"\n  … and {len(shown) - _MOST_LISTED:,} more" if len(shown) > _MOST_LISTED else ""
    count = f"{len(fitting):,} datasets{wanted}: pass" if fitting else f"no dataset{wanted}: pass"
    raise OptionError(
        f"{directory.path!r} has {count} the name= and version= of one of these; a name is also that of "
        "the class, or the first digits\n" + "\n".join(lines) + more
    )


def ranges_text(indices: Positions) -> str:
    """The first ranges of ascending numbers, such as ``0–63, 128–191, …``."""
    breaks = np.flatnonzero(np.diff(indices) != 1)
    firsts = indices[np.concatenate([[0], breaks + 1])][:_MOST_RANGES]
    lasts = indices[np.concatenate([breaks, [len(indices) - 1]])][:_MOST_RANGES]
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    texts = [f"{first}" if first == last else f"{first}–{last}" for first, last in pairs]
    return ", ".join(texts) + (", …" if len(breaks) >= _MOST_RANGES else "")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _rows(directory: CacheDirectory, contents: Contents) -> int:
    """How many rows the segments of a namespace have, as far as these can be opened."""
    count, descriptors = 0, Descriptors(directory.fs)
    for info in contents.segments:
        path = os.path.join(directory.path, contents.namespace, info.name)
        try:
            count += len(Segment.open(directory.fs, descriptors, path, limit=_ANY, structured=False))
        except (OSError, UnreadableError, OptionError):
            continue
    return count


def _others(directory: CacheDirectory) -> str:
    """What is in a folder without samples."""
    kinds, unknown = dict[str, None](), 0
    for one in directory.scan():
        kind = directory.fingerprint(one.namespace).get("class")
        if isinstance(kind, str) and kind:
            kinds[kind] = None
        else:
            unknown += 1
    parts = [f"rows of {listed(list(kinds))}"] if kinds else []
    if unknown:
        parts.append(f"{unknown:,} namespaces whose fingerprint.json does not say what they are")
    return " and ".join(parts) or "no rows at all"
