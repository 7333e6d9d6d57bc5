"""Serves samples from a folder without their dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchcache2.core.errors import (
    DamagedError,
    MissingSampleError,
    NewerFormatError,
    NotCachedError,
    OptionError,
    UnknownClassError,
    UnreadableError,
)
from torchcache2.core.keys import Positions
from torchcache2.core.logs import shown
from torchcache2.core.sizes import size_text
from torchcache2.datasets.identity import Identity, Index, as_index
from torchcache2.datasets.options import check_served
from torchcache2.datasets.recipe import Recipe, settings_of
from torchcache2.datasets.samplekeys import SampleKeys
from torchcache2.datasets.source import One, Source
from torchcache2.datasets.store import Levels, Store
from torchcache2.datasets.tally import Tally
from torchcache2.files.directory import NAMESPACE_NAME, CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.identity.fingerprint import Fingerprint, from_document
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE
from torchcache2.tiers.bucket.files import BucketError, BucketFiles
from torchcache2.tiers.bucket.objects import Objects

PAUSE = 0.5  # seconds after which a bucket that fails is asked again
_MOST_LISTED, _MOST_RANGES = 20, 5
_LEAST_DIGITS = 4  # of a namespace


@dataclasses.dataclass(frozen=True)
class Kept:
    """A dataset with samples in a folder.

    Attributes
    ----------
    namespace : str
        32 hexadecimal digits.
    kind : str
        The qualified name of its class.
    length : int or None
        How many samples it has; None if unknown.
    name, version : str or None
        As given by the user.
    document : dict
        The content of ``fingerprint.json``.
    """

    namespace: str
    kind: str
    length: int | None
    name: str | None
    version: str | None
    document: dict[str, Any]

    @classmethod
    def of(cls, directory: CacheDirectory, namespace: str) -> Kept | None:
        """The dataset of a namespace; None if its rows are not a dataset's."""
        document = directory.fingerprint(namespace)
        said = document.get("dataset")
        if not isinstance(said, dict):
            return None
        length, kind = said.get("length"), _text_of(document.get("class")) or "?"
        is_length = type(length) is int and 0 <= length < 2**63
        called = _text_of(said.get("name")), _text_of(said.get("version"))
        return cls(namespace, kind, length if is_length else None, *called, document)

    @property
    def views(self) -> int:
        """How many variants each sample has."""
        views = self.document["dataset"].get("views", 1)
        return views if type(views) is int and views > 0 else 1

    @property
    def has_keys(self) -> bool:
        """Whether its samples are kept by keys that the user gave."""
        return self.document["dataset"].get("keys") is True

    def check_keys(self, keys: Any) -> None:
        """Raise `OptionError` if there are keys and its samples have none, or the other way around."""
        if self.has_keys is (keys is None):
            theirs = "keys: give them as keys=" if self.has_keys else "no keys, only indices"
            raise OptionError(f"keys={shown(keys)}: the samples of {self.title} have {theirs}")

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name or self.kind.rpartition(".")[2]

    def means(self, name: str) -> int:
        """How well a name fits: 3: the dataset's name; 2: its class; 1: first digits; 0: not at all."""
        if name == self.name:
            return 3
        if name in (self.kind, self.kind.rpartition(".")[2]):
            return 2
        return int(len(name) >= _LEAST_DIGITS and self.namespace.startswith(name))

    def line(self, directory: CacheDirectory) -> str:
        """A line of a list to choose from."""
        called = f"name={self.name!r}" if self.name is not None else f"no name, class {self.kind}"
        version = "" if self.version is None else f", version={self.version!r}"
        length = "unknown length" if self.length is None else f"{self.length:,} samples"
        size = size_text(directory.contents(self.namespace).nbytes)
        return f"  {self.namespace[:8]}: {called}{version}: {length}, {size}"


def kept_in(directory: CacheDirectory) -> list[Kept]:
    """The datasets described in a folder; some may have no samples."""
    names = [info.name for info in directory.fs.listing(directory.path) if info.is_folder]
    found = [Kept.of(directory, name) for name in names if NAMESPACE_NAME.fullmatch(name)]
    return [kept for kept in found if kept is not None]


def with_samples(directory: CacheDirectory, kept: Sequence[Kept]) -> list[Kept]:
    """Those datasets that have samples in a folder or in its bucket."""
    pairs = [(one, directory.contents(one.namespace)) for one in kept]
    return [one for one, contents in pairs if contents.segments or contents.heads]


def chosen_remotely(objects: Objects, name: str | None, version: str | int | None, patience: float) -> Kept:
    """Like `chosen`, in a bucket; `MissingSampleError` if that fails for `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            files = BucketFiles(objects)
            files.fetch_texts()
            return chosen(CacheDirectory(objects.bucket.url, files), name, version)
        except (BucketError, OptionError) as error:
            try:
                objects.check()  # raises if credentials are refused, or the bucket does not exist
            except NewerFormatError as newer:
                raise OptionError(str(newer)) from None
            if isinstance(error, OptionError):
                raise
            if time.monotonic() > end:
                raise MissingSampleError(f"cannot tell which samples are there: {error}") from None
        time.sleep(PAUSE)


def chosen(directory: CacheDirectory, name: str | None, version: str | int | None) -> Kept:
    """The dataset of a folder with this name and version.

    Raises
    ------
    OptionError
        If there is not exactly one; the message lists them.
    """
    try:
        directory.check()
        there = kept_in(directory)
        if len(there) > 1:
            there = with_samples(directory, there)
    except FileNotFoundError:
        raise OptionError(
            f"cache_dir={directory.path!r} does not exist, so there are no samples in it"
        ) from None
    except NewerFormatError as error:
        raise OptionError(str(error)) from None
    except OSError as error:
        raise OptionError(f"cache_dir={directory.path!r} cannot be read: {error}") from None
    fitting = there
    if name is not None:
        best = max([kept.means(name) for kept in there], default=0)
        fitting = [kept for kept in there if best and kept.means(name) == best]
    if version is not None:
        fitting = [kept for kept in fitting if kept.version == str(version)]
    if len(fitting) == 1:
        return fitting[0]
    if not there:
        raise OptionError(
            f"{directory.path!r} has no samples of a dataset; `torchcache2 ls` says what it has"
        )
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


def _text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_MOST_REASONS = 3
_MANY = 1 << 20  # most samples to check, as a length in a file may be wrong


class ServedStore(Store):
    """Serves samples without a dataset in one process. A missing sample is an error."""

    patience = 60.0  # seconds to retry while a bucket fails

    def __init__(self, name: str, levels: Levels, tally: Tally, place: str, length: int | None) -> None:
        super().__init__(name, levels, tally)
        self._where, self._length = f"{name} in {place}", length
        if length is not None:
            self.end = length

    def fetch(self, indices: Sequence[Any], one: One | None = None) -> list[Any]:
        """The samples at n indices."""
        start = time.perf_counter_ns()
        indices = [self._index(index) for index in indices]
        keys, end = self.levels.keys(indices), start / 1e9 + self.patience
        sought = self.find(keys)
        missing = np.flatnonzero(~sought.found)
        while len(missing):
            self.levels.look_again()
            self.seek(keys, missing, sought)
            for place in np.flatnonzero(~sought.found if not self._faults() else []):
                self.seek(keys, np.array([place]), sought)  # one by one, as the rows of a file fail together
            missing = np.flatnonzero(~sought.found)
            if len(missing):
                unread = [sought.unread[place] for place in missing.tolist() if place in sought.unread]
                if unread or not self._faults() or time.perf_counter() > end:
                    first = int(missing[0])
                    raise self._missing(indices[first], sought.unread.get(first))
                time.sleep(PAUSE)
        self.tally.add(**sought.counts, spent=time.perf_counter_ns() - start)
        return sought.samples

    def fill(self, indices: Sequence[int]) -> tuple[int, int, int]:
        """Raise `MissingSampleError`: there is nothing to load samples from."""
        raise self._incomplete(self.levels.absent(self._length or 0))

    def check(self, *, partial: bool) -> None:
        """Raise `MissingSampleError` if samples are missing, or need classes that this process lacks."""
        length = self._length
        absent = self._absent(1 if length is None else length)
        unknown = [error for error in self._reasons() if not isinstance(error, (DamagedError, OSError))]
        if unknown and (len(absent) or length is None):
            raise MissingSampleError(f"{self._where} cannot be read{_because(unknown)}")
        if length is None and not partial:
            raise MissingSampleError(
                f"{self._where}: the dataset had no length, so it is unknown whether all samples are "
                f"there: pass partial=True to serve those that are"
            )
        if len(absent) and not partial:
            raise self._incomplete(absent)

    def _absent(self, count: int) -> Positions:
        """Which of the first `count` samples are missing; retries while a bucket fails."""
        end = time.monotonic() + self.patience
        while True:
            absent = self.levels.absent(count, _MANY)
            if len(absent) == 0 or not self._faults() or time.monotonic() > end:
                return absent
            time.sleep(PAUSE)

    def _index(self, index: Any) -> Index:
        """The index under which the sample was kept; negative ints count from the end."""
        plain, length = as_index(index), self._length
        if not isinstance(plain, int) or length is None:
            return plain
        if not -length <= plain < length:
            raise IndexError(f"index {plain} of {length:,} samples")
        return plain % length

    def _faults(self) -> list[Exception]:
        """Current faults of buckets."""
        causes = [tier.cause for tier in self.levels.tiers]
        return [cause for cause in causes if cause is not None]

    def _reasons(self) -> list[Exception]:
        lists = [tier.reasons(self.levels.namespace) for tier in self.levels.tiers]
        return [error for reasons in lists for error in reasons]

    def _missing(self, index: Index, error: UnreadableError | None) -> MissingSampleError:
        if error is not None:
            return MissingSampleError(f"sample {index!r} of {self._where} cannot be read{_because([error])}")
        return MissingSampleError(
            f"sample {index!r} of {self._where} is missing, or damaged{_because(self._reasons())}. "
            "To restore it, call CachedDataset(dataset, cache_dir).warmup() where the dataset is; missing() "
            f"lists all that are missing, and `torchcache2 verify` names damaged files"
        )

    def _incomplete(self, absent: Positions) -> MissingSampleError:
        count = f"{'at least ' * (len(absent) >= _MANY)}{len(absent):,} of {self._length:,}"
        return MissingSampleError(
            f"{self._where}: {count} samples are not there: "
            f"{ranges_text(absent)}{_because(self._reasons())}. Fill it with CachedDataset(dataset, "
            "cache_dir).warmup() where the dataset is, or pass partial=True to serve the others"
        )


def _because(errors: Sequence[Exception]) -> str:
    """The reasons in parentheses, to end a sentence."""
    texts = list(dict.fromkeys(map(_text, errors)))
    return f" ({'; '.join(texts[:_MOST_REASONS])})" if texts else ""


def _text(error: Exception) -> str:
    """The error, and how to fix it here."""
    if isinstance(error, UnknownClassError):
        return f"{error}: import what defines it before CachedDataset is made"
    if isinstance(error, NewerFormatError):
        return f"the newer format {error}: upgrade torchcache2"
    return str(error)


_ANY_ROW = 1 << 62  # no limit on the bytes of a row


class _NoDataset:
    """Stands in for the dataset whose samples are served."""

    def __init__(self, kept: Kept, path: str) -> None:
        self._title, self._path = kept.title, path
        self._length, self._namespace = kept.length, bytes.fromhex(kept.namespace)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self._title} in {self._path} has no length: the dataset did not tell it")
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise MissingSampleError(f"sample {index!r} of {self._title}: CachedDataset(None) has been closed")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"CachedDataset(None) has no attribute {name!r}: the folder keeps the samples of the dataset, "
            f"not its attributes"
        )


# In the key of an outer dataset, this counts by the samples' namespace, not by their folder.
setattr(_NoDataset, ADDED_ATTRIBUTE, True)
setattr(_NoDataset, ORIGINAL_ATTRIBUTE, property(lambda self: self._namespace))


@dataclasses.dataclass(kw_only=True)
class ServedRecipe(Recipe):
    """How samples are served without their dataset.

    Attributes
    ----------
    place : str
        The folder or bucket of the samples.
    length : int or None
        How many samples the dataset has.
    partial : bool
        Whether samples may be missing.
    is_checked : bool
        Whether it was checked that all are there.
    opening : Objects or None
        The connections used to choose the dataset, until the tiers take them over.
    """

    place: str
    length: int | None
    partial: bool
    is_checked: bool = False
    opening: Objects | None = None

    @classmethod
    def of_folder(cls, options: Mapping[str, Any]) -> ServedRecipe:
        """Choose the dataset of a folder; `OptionError` if the choice is ambiguous."""
        check_served(options)
        settings, kept_as = settings_of(options)
        settings = settings.replace({"persistent": True})
        called, bucket, opening = (options["name"], options["version"]), settings.bucket, None
        if bucket is None:
            place = str(settings.persistent_cache_dir)
            kept = chosen(CacheDirectory(place, FileSystem()), *called)
            kept.check_keys(options["keys"])
            # Nothing is written to the folder, so its budget only limits the size of rows.
            settings = settings.replace({"max_persistent_cache_size": _ANY_ROW})
        else:
            place, opening = bucket.url, Objects(bucket)
            with contextlib.ExitStack() as stack:
                stack.callback(opening.close)
                kept = chosen_remotely(opening, *called, ServedStore.patience)
                kept.check_keys(options["keys"])
                stack.pop_all()
        sample_keys = SampleKeys(options["keys"], kept.length).of_views(kept.views)
        kept = dataclasses.replace(kept, length=sample_keys.length)
        fingerprint = from_document(kept.namespace, kept.document)
        return cls(
            title=kept.title,
            identity=Identity(fingerprint or Fingerprint(bytes.fromhex(kept.namespace), {}), [], []),
            document=kept.document | {"class": kept.kind},
            settings=settings,
            tally=Tally(),
            dataset=_NoDataset(kept, place),
            sample_keys=sample_keys,
            transform=options["transform"],
            place=place,
            length=kept.length,
            partial=options["partial"],
            views=kept.views,
            opening=opening,
            **kept_as,
        )

    def _read_again(self) -> None:
        self.is_checked = False  # samples may have gone since

    def store(self, source: Source | None = None) -> ServedStore:
        """The store of this process."""
        opening, self.opening = self.opening, None
        levels = self.levels(writes=False, opened=opening)
        if self.settings.bucket is not None and levels.directory is not None:
            with contextlib.suppress(OSError):  # else the tier fetches it from the bucket again
                levels.directory.prepare(self.identity.namespace, self.document)
        store = ServedStore(self.title, levels, self.tally, self.place, self.length)
        if not self.is_checked:
            try:
                store.check(partial=self.partial)
            except BaseException:
                levels.close()
                raise
            self.is_checked = True
        return store

    def check_clear(self) -> None:
        """Raise `NotCachedError`, as these samples could not be loaded again."""
        place, namespace = self.place, self.identity.namespace.hex()
        raise NotCachedError(
            f"this would delete the samples of {self.title} in {place}, which nothing here could load "
            f"again, so nothing was deleted. To delete them anyway, run `torchcache2 rm {place} "
            f"{namespace}`"
        )

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """The served dataset and its place."""
        if directory is None:
            return "closed: no sample is served"
        document = self.document
        made = f"{document.get('created', 'an unknown time')} by torchcache2 {document.get('library', '?')}"
        return (
            f"namespace {self.identity.namespace.hex()} in {self.place} is served without its dataset, "
            f"so nothing is loaded: samples of {document['class']}, kept since {made}"
        )
