"""`Plan`: what the processes that use one `CachedDataset` agree on, and what a pickle of one holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import listed
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.explain import document, explained_dataset
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.fingerprint import identify, length_of
from torchcache2.datasets.serving import Serving
from torchcache2.datasets.source import Source
from torchcache2.datasets.storeplan import StorePlan
from torchcache2.datasets.tally import Tally
from torchcache2.files.directory import CacheDirectory


@dataclasses.dataclass(kw_only=True)
class Plan(StorePlan):
    """How samples of a dataset are cached.

    Attributes
    ----------
    dataset, transform : object
        The source, and what is called with each sample after the cache.
    name, version : str or int, optional
        What stands for the dataset, instead of what is read of it or besides.
    checks : bool
        Whether the dataset is watched for random numbers that it draws.
    verify : float
        Share of hits that are loaded again.
    """

    dataset: Any
    transform: Any
    name: str | None
    version: str | int | None
    checks: bool
    verify: float

    @classmethod
    def of(
        cls,
        dataset: Any,
        settings: CacheSettings,
        serving: Serving | None,
        *,
        name: str | None,
        version: str | int | None,
        transform: Any,
        options: str,
        checks: bool,
        verify: float,
    ) -> Plan:
        """Read the dataset; an `OptionError` if no later run could know what is kept of it."""
        length, identity = length_of(dataset), identify(dataset, name=name, version=version)
        plan = cls(
            dataset=dataset,
            transform=transform,
            title=type(dataset).__name__ if name is None else name,
            identity=identity,
            document=document(identity, dataset, length, name, version),
            settings=settings,
            options=options,
            serving=serving,
            name=name,
            version=version,
            checks=checks,
            verify=verify,
            tally=Tally(length),
        )
        plan._check_readable()
        return plan

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds; if an earlier run has made it, the code may have changed since."""
        super().__setstate__(state)
        if self.is_of_earlier_run:
            self.identity = identify(self.dataset, name=self.name, version=self.version)
            length = length_of(self.dataset)
            self.document = document(self.identity, self.dataset, length, self.name, self.version)

    def _check_readable(self) -> None:
        is_kept = self.serving is not None or self.settings.persistent_cache_dir is not None
        if self.identity.unread and is_kept:
            where = "in path" if self.serving is None else "on the server"
            raise OptionError(
                f"{self.title} has {listed(self.identity.unread)}, which cannot be read, so that no later "
                f"run could know whether the samples {where} are its own: pass name= and version=, which "
                "stand for it"
            )

    def check_clear(self) -> None:
        """Raise `NotCachedError` if samples must not be forgotten."""

    def seen(self) -> bytes:
        """What the dataset is now, as 16 bytes: it is read although it may have a name."""
        return identify(self.dataset).namespace

    def source(self) -> Source:
        """What loads samples in this process."""
        identity = self.identity
        return Source(self.dataset, identity.generators, identity.unseeded, checks=self.checks)

    def fetcher(self, source: Source) -> Fetcher | None:
        """The part of this process in the cache; None if nothing is cached."""
        store = self.store()
        return None if store is None else Fetcher(store, source, self.verify)

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """Why samples were not found; see `CachedDataset.explain`."""
        bypass = None
        if not is_cached:
            bypass = "closed, or turned off by TORCHCACHE_DISABLE, or both sizes are 0"
        elif self.tally.is_random:
            bypass = "it draws random numbers"
        kind, created = self.document["class"], self.document["created"]
        now = self.identity.fingerprint
        if self.serving is not None and bypass is None:
            return (
                f"namespace {now.namespace.hex()}: a server knows no more of a dataset than this number, so "
                "there is nothing to compare with. What other runs have left is found if it has the same"
            )
        return explained_dataset(self.title, kind, now, directory, created, bypass)
