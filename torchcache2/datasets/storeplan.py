"""`StorePlan`: what the processes that use one store agree on, and what a pickle of it holds."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

from torchcache2.core.private import is_given_work
from torchcache2.core.settings import CacheSettings, disabled_by_environment
from torchcache2.datasets.fingerprint import Identity
from torchcache2.datasets.levels import Levels
from torchcache2.datasets.serving import Serving
from torchcache2.datasets.store import SampleStore
from torchcache2.datasets.tally import Tally
from torchcache2.tiers.redis.holding import hold


@dataclasses.dataclass(kw_only=True)
class StorePlan:
    """How samples under keys are kept.

    Attributes
    ----------
    title : str
        What messages call the store.
    identity : Identity
        Which samples they are.
    document : dict
        What ``fingerprint.json`` says about it.
    settings : CacheSettings
        Those of the tiers, with budgets in bytes.
    options : str
        The options as they were given. Ranks whose options are equal share, though they may have measured
        different numbers of free bytes.
    serving : Serving or None
        Which servers keep samples; None if none do.
    tally : Tally
        What all processes have counted.
    job : bytes or None
        By which processes find each other; None before the first one has begun.
    """

    title: str
    identity: Identity
    document: dict[str, Any]
    settings: CacheSettings
    options: str
    serving: Serving | None
    tally: Tally
    job: bytes | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_of_earlier_run:
            self.job = None
            if self.serving is not None:  # a server of our own has ended with that run
                self.settings = self.settings.replace({"persistent_cache_dir": None})

    @property
    def is_of_earlier_run(self) -> bool:
        """Whether this comes from the pickle of a run that has ended."""
        # A process that is spawned has no parent yet while it is given its work.
        is_child = multiprocessing.parent_process() is not None or is_given_work()
        return self.tally.is_new and not is_child

    def store(self) -> SampleStore | None:
        """The part of this process in the store; None if nothing is kept."""
        sizes = self.settings.max_memory_cache_size, self.settings.is_persistent
        if disabled_by_environment() or not any(sizes):
            return None
        if self.serving is not None:
            servers = self.settings.servers or self.serving.servers()
            self.settings = self.settings.replace({"persistent_cache_dir": servers})
            hold(servers)
        return self.opened()

    def opened(self, **options: Any) -> SampleStore:
        """The same, whatever else says that nothing is kept; the options are those of `Levels`."""
        namespace, tally = self.identity.namespace, self.tally
        levels = Levels(self.settings, namespace, self.document, self.options, self.job, tally, **options)
        self.job = levels.job
        return SampleStore(self.title, levels, tally)
