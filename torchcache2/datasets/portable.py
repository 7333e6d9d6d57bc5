"""`PortablePlan`: samples that are served from a folder without the dataset that they come from."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torchcache2.core.errors import MissingSampleError, NotCachedError
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.fingerprint import Identity, check_called
from torchcache2.datasets.folders import Kept, chosen, chosen_remotely
from torchcache2.datasets.plan import Plan
from torchcache2.datasets.portablefetch import PortableFetcher
from torchcache2.datasets.source import Source
from torchcache2.datasets.tally import Tally
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.identity.fingerprint import Fingerprint, from_document
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE
from torchcache2.tiers.bucket.objects import Objects

_ANY_ROW = 1 << 62  # bytes of a row: what is served has been written


class _NoDataset:
    """Stands for the dataset whose samples are served."""

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
            f"CachedDataset(None) has no attribute {name!r}: the folder has the samples of the dataset, but "
            "not its attributes"
        )


# In a dataset that is cached, it stands for the samples, wherever their folder is.
setattr(_NoDataset, ADDED_ATTRIBUTE, True)
setattr(_NoDataset, ORIGINAL_ATTRIBUTE, property(lambda self: self._namespace))


@dataclasses.dataclass(kw_only=True)
class PortablePlan(Plan):
    """How samples are served without their dataset.

    Attributes
    ----------
    place : str
        Where the samples are.
    length : int or None
        How many samples the dataset has.
    partial : bool
        Whether some of them may be missing.
    is_checked : bool
        Whether it was looked at if all are there.
    opening : Objects or None
        The connections by which the dataset was chosen, until the tiers take them over.
    """

    place: str
    length: int | None
    partial: bool
    is_checked: bool = False
    opening: Objects | None = None

    @classmethod
    def served(
        cls,
        settings: CacheSettings,
        name: str | None,
        version: str | int | None,
        *,
        partial: bool,
        transform: Any,
        options: str,
    ) -> PortablePlan:
        """Choose the dataset of a folder; an `OptionError` if it is not clear which one is meant."""
        check_called(name, version)
        settings = settings.replace({"persistent": True})
        bucket, opening = settings.bucket, None
        if bucket is None:
            place = str(settings.persistent_cache_dir)
            kept = chosen(CacheDirectory(place, FileSystem()), name, version)
        else:
            place, opening = bucket.url, Objects(bucket)
            with contextlib.ExitStack() as stack:
                stack.callback(opening.close)
                kept = chosen_remotely(opening, name, version, PortableFetcher.patience)
                stack.pop_all()
        namespace = bytes.fromhex(kept.namespace)
        fingerprint = from_document(kept.namespace, kept.document) or Fingerprint(namespace, {})
        # As nothing is written to the folder, its budget only limits how large a row may be that is read.
        budget = {"max_persistent_cache_size": _ANY_ROW} if bucket is None else {}
        return cls(
            dataset=_NoDataset(kept, place),
            transform=transform,
            title=kept.title,
            identity=Identity(fingerprint, [], []),
            document=kept.document | {"class": kept.kind},
            settings=settings.replace(budget),
            options=options,
            serving=None,
            name=kept.name,
            version=kept.version,
            checks=False,
            verify=0.0,
            tally=Tally(kept.length),
            place=place,
            length=kept.length,
            partial=partial,
            opening=opening,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds; if an earlier run has made it, samples may be gone since."""
        super(Plan, self).__setstate__(state)
        self.is_checked = self.is_checked and not self.is_of_earlier_run

    def fetcher(self, source: Source) -> Fetcher:
        """The part of this process."""
        opening, self.opening = self.opening, None
        store = self.opened(writes=False, opened=opening)
        if self.settings.bucket is not None and (local := store.levels.directory) is not None:
            with contextlib.suppress(OSError):  # else the tier asks the bucket for it, again
                local.prepare(self.identity.namespace, self.document)
        fetcher = PortableFetcher(store, source, self.place, self.length)
        if not self.is_checked:
            try:
                fetcher.check(partial=self.partial)
            except BaseException:
                fetcher.levels.close()
                raise
            self.is_checked = True
        return fetcher

    def check_clear(self) -> None:
        """Raise `NotCachedError`: these samples cannot be loaded again."""
        place, namespace = self.place, self.identity.namespace.hex()
        raise NotCachedError(
            f"clear() would delete the samples of {self.title} in {place}, which nothing here could load "
            f"again: nothing is deleted. If you want that, `torchcache2 rm {namespace} --dir {place}` does it"
        )

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """What is served, and from where."""
        if directory is None:
            return "closed: no sample is served"
        document = self.document
        made = f"{document.get('created', 'an unknown time')} by torchcache2 {document.get('library', '?')}"
        return (
            f"namespace {self.identity.namespace.hex()} in {self.place} is served without its dataset, "
            f"so nothing is loaded: samples of {document['class']}, kept since {made}"
        )
