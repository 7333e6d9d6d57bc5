"""`Plan`: what the processes that use one `CachedDataset` agree on, and what a pickle of one holds."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

from torchcache2.core.environment import disabled_by_environment
from torchcache2.core.errors import OptionError
from torchcache2.core.logs import listed
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.explain import document, explained_dataset
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.fingerprint import Identity, identify, length_of
from torchcache2.datasets.levels import Levels
from torchcache2.datasets.source import Source
from torchcache2.datasets.tally import Tally
from torchcache2.files.directory import CacheDirectory

__all__ = ["Plan"]


@dataclasses.dataclass
class Plan:
    """How samples of a dataset are cached.

    Attributes
    ----------
    dataset, transform : object
        The source, and what is called with each sample after the cache.
    identity : Identity
        Which dataset it is.
    document : dict
        What ``fingerprint.json`` says about it.
    settings : CacheSettings
        Those of the tiers, with budgets in bytes.
    options : str
        The options as they were given. Ranks whose options are equal share, though they may have measured
        different numbers of free bytes.
    name, version : str or int, optional
        What stands for the dataset, instead of what is read of it or besides.
    checks : bool
        Whether the dataset is watched for random numbers that it draws.
    verify : float
        Share of hits that are loaded again.
    tally : Tally
        What all processes have counted.
    job : bytes or None
        By which processes find each other; None before the first one has begun.
    is_closed : bool
        Whether nothing is cached any more.
    """

    dataset: Any
    transform: Any
    identity: Identity
    document: dict[str, Any]
    settings: CacheSettings
    options: str
    name: str | None
    version: str | int | None
    checks: bool
    verify: float
    tally: Tally
    job: bytes | None = None
    is_closed: bool = False

    @property
    def title(self) -> str:
        """What messages call the dataset."""
        return type(self.dataset).__name__ if self.name is None else self.name

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds; if an earlier run has made it, the code may have changed since."""
        self.__dict__.update(state)
        if self.tally.is_new and multiprocessing.parent_process() is None:
            self.identity = identify(self.dataset, name=self.name, version=self.version)
            length = length_of(self.dataset)
            self.document = document(self.identity, self.dataset, length, self.name, self.version)
            self.job = None

    def check_readable(self) -> None:
        """Raise `OptionError` if the folder would be of no use to a later run."""
        if self.identity.unread and self.settings.persistent_cache_dir is not None:
            raise OptionError(
                f"{self.title} has {listed(self.identity.unread)}, which cannot be read, so that no later "
                "run could know whether the samples in path are its own: pass name= and version=, which "
                "stand for it"
            )

    def seen(self) -> bytes:
        """What the dataset is now, as 16 bytes: it is read although it may have a name."""
        return identify(self.dataset).namespace

    def source(self) -> Source:
        """What loads samples in this process."""
        return Source(self.dataset, self.identity.generators, checks=self.checks)

    def fetcher(self, source: Source) -> Fetcher | None:
        """The part of this process in the cache; None if nothing is cached."""
        sizes = self.settings.max_memory_cache_size, self.settings.is_persistent
        if self.is_closed or disabled_by_environment() or not any(sizes):
            return None
        levels = Levels(
            self.settings, self.identity.namespace, self.document, self.options, self.job, self.tally
        )
        self.job = levels.job
        return Fetcher(self.title, levels, source, self.tally, self.verify)

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """Why samples were not found; see `CachedDataset.explain`."""
        bypass = None
        if not is_cached:
            bypass = "closed, or turned off by TORCHCACHE_DISABLE, or both sizes are 0"
        elif self.tally.is_random:
            bypass = "it draws random numbers"
        kind, created = self.document["class"], self.document["created"]
        now = self.identity.fingerprint
        return explained_dataset(self.title, kind, now, directory, created, bypass)
