"""`Recipe`: what all processes that use one cache of samples agree on; it is what gets pickled."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping
from typing import Any

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Positions
from torchcache2.core.logs import listed
from torchcache2.core.private import is_given_work
from torchcache2.core.settings import CacheSettings, disabled_by_environment
from torchcache2.datasets.identity import (
    Identity,
    as_array,
    document,
    document_of,
    identify,
    identify_prefix,
    length_of,
)
from torchcache2.datasets.mapped import Map, Mapped, MappedStore
from torchcache2.datasets.options import Serving, level_settings
from torchcache2.datasets.samplekeys import SampleKeys
from torchcache2.datasets.source import Source
from torchcache2.datasets.store import Levels, Store
from torchcache2.datasets.tally import DatasetStats, Tally
from torchcache2.datasets.views import Views
from torchcache2.engine.explain import compared
from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.fingerprint import at_most
from torchcache2.tiers.redis.server import hold

OF_PROCESS = ("_source", "_store", "_functions")  # attributes of a `Keeper` that each process makes


@dataclasses.dataclass(kw_only=True)
class Recipe:
    """How the samples of a dataset, or the values of a loader, are kept.

    Attributes
    ----------
    title : str
        Its name in messages.
    identity : Identity
        Identifies the samples.
    document : dict
        The content of ``fingerprint.json``.
    settings : CacheSettings
        The settings of the tiers, with budgets in bytes.
    options : str
        The given options. Ranks with equal options share, even if they measured different numbers of free
        bytes.
    serving : Serving or None
        Which servers keep samples; None if none do.
    tally : Tally
        The counts of all processes.
    job : bytes or None
        The name by which processes find each other; None before the first one begins.
    dataset, transform : object
        The source, and the function called with each sample after the cache.
    reading : dict
        How the dataset is identified: options of `identify`.
    sample_keys : SampleKeys
        Which sample an index is.
    checks : bool
        Whether to watch the dataset for drawing random numbers.
    verify : float
        Share of hits to load again.
    map : Map or None
        What is made of samples, which is then kept in their place; pickles have none.
    views : int
        How many variants each sample has.
    mode : bytes or None
        See `Levels`.
    """

    title: str
    identity: Identity
    document: dict[str, Any]
    settings: CacheSettings
    options: str
    serving: Serving | None
    tally: Tally
    job: bytes | None = None
    dataset: Any = None
    transform: Any = None
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)
    sample_keys: SampleKeys = dataclasses.field(default_factory=SampleKeys)
    checks: bool = False
    verify: float = 0.0
    map: Map | None = None
    views: int = 1
    mode: bytes | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether rows were made by a map."""
        return "map" in (self.document.get("dataset") or {})

    def variants(self, indices: Any, view: int) -> Positions:
        """Where a variant of n samples is among all variants of all samples; see `as_array`."""
        plain = as_array(indices)
        if self.views == 1 or len(plain) == 0:
            return plain
        count = (length_of(self.dataset) or 0) // self.views
        if plain.max() >= count or plain.min() < -count:
            raise IndexError(f"index {plain.max()} of {count:,} samples")
        return plain % count + view % self.views * count

    @classmethod
    def of_dataset(cls, dataset: Any, options: Mapping[str, Any]) -> Recipe:
        """Read the dataset; an `OptionError` if later runs could not identify it."""
        settings, kept = settings_of(options)
        name, views = options["name"], options.get("views", 1)
        title = type(dataset).__name__ if name is None else name
        length = length_of(dataset)
        sample_keys = SampleKeys(options.get("keys"), length, settings.folder)
        if views > 1:
            dataset = Views(dataset, views, options["seed"], sample_keys)
            sample_keys = sample_keys.of_views(views)
            length = length_of(dataset)
        names = ("name", "version", "ignore", "code_version")
        reading: dict[str, Any] = {option: options.get(option) for option in names}
        reading["by_key"] = sample_keys.are_given
        is_mapped, made_of = options.get("map") is not None, None
        identity = identify(dataset, **reading, is_mapped=is_mapped)
        if is_mapped:
            own = settings.replace({name: reading[name] for name in ("ignore", "code_version")})
            function, collate, seed = (options[name] for name in ("map", "collate_fn", "seed"))
            made_of = Map(function, collate, own, identity.fingerprint, sample_keys, seed)
            identity = identity._replace(
                fingerprint=made_of.keeper.fingerprint, unread=[*identity.unread, *made_of.keeper.unread]
            )
        recipe = cls(
            title=title,
            identity=identity,
            document=document(identity, dataset, **reading, made_of=made_of, views=views),
            map=made_of,
            views=views,
            settings=settings,
            tally=Tally(),
            sample_keys=sample_keys,
            dataset=dataset,
            checks=not options["allow_random"],
            reading=reading,
            **{option: options[option] for option in ("transform", "verify")},
            **kept,
        )
        if identity.unread and (recipe.serving or settings.persistent_cache_dir is not None):
            where = "in cache_dir" if recipe.serving is None else "on the server"
            has, advice = "has", "pass name= and version= to identify the dataset"
            if made_of is not None and made_of.keeper.unread:
                has, advice = "has a map= with", "keep such objects out of what map= refers to"
            raise OptionError(
                f"{recipe.title} {has} {listed(identity.unread)}, which cannot be read, so later runs could "
                f"not tell whether the samples {where} are theirs: {advice}"
            )
        return recipe

    @classmethod
    def of_loader(cls, key_prefix: str, version: str | int | None, options: Mapping[str, Any]) -> Recipe:
        """The recipe of a loader's values, by prefix."""
        settings, kept = settings_of(options)
        identity = identify_prefix(key_prefix, version)
        text = document_of(identity, "torchcache2.CacheLoader")
        title = f"CacheLoader {key_prefix!r}"
        return cls(title=title, identity=identity, document=text, settings=settings, tally=Tally(), **kept)

    def renew(self) -> None:
        """Identify what the map would make now: its weights may have changed."""
        if self.map is not None:
            _, self.mode = self.map.now()
            self.identity = self.identity._replace(fingerprint=self.map.keeper.fingerprint)

    def __getstate__(self) -> dict[str, Any]:
        self.renew()
        return vars(self) | {"map": None}  # it runs in this process only

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle; if an earlier run made it, read the dataset again, as code may have changed."""
        self.__dict__.update(state)
        if not self.is_of_earlier_run:
            return
        self.job = None
        if self.serving is not None:  # that run's own server has ended
            self.settings = self.settings.replace({"persistent_cache_dir": None})
        self._read_again()

    def _read_again(self) -> None:
        if self.dataset is not None and not self.is_mapped:
            self.identity = identify(self.dataset, **self.reading)
            self.document = document(self.identity, self.dataset, **self.reading, views=self.views)

    @property
    def is_of_earlier_run(self) -> bool:
        """Whether this comes from a pickle of an ended run."""
        # A spawned process has no parent yet while it unpickles its work.
        is_child = multiprocessing.parent_process() is not None or is_given_work()
        return self.tally.is_new and not is_child

    def source(self) -> Source:
        """The source that loads samples in this process."""
        identity = self.identity
        return Source(self.dataset, identity.generators, identity.unseeded, checks=self.checks)

    def store(self, source: Source | None = None) -> Store | None:
        """The part of this process in the cache; None if nothing is cached."""
        sizes = self.settings.memory_budget(), self.settings.is_persistent
        if disabled_by_environment() or not any(sizes):
            return None
        if self.serving is not None:
            servers = self.settings.servers or self.serving.servers()
            self.settings = self.settings.replace({"persistent_cache_dir": servers})
            hold(servers)
        levels = self.levels()
        if not self.is_mapped or source is None:
            return Store(self.title, levels, self.tally, source, self.verify)
        mapped = None
        if self.map is not None:
            own = {name: self.reading.get(name) for name in ("ignore", "code_version")}
            settings = self.settings.replace({"verify": self.verify, **own})
            mapped = Mapped(self.map, source, levels.by.of, settings, levels, lambda: self.document)
        return MappedStore(self.title, levels, self.tally, source, mapped)

    def levels(self, **options: Any) -> Levels:
        """The tiers in this process, even if nothing is kept; for the options, see `Levels`."""
        namespace, tally = self.identity.namespace, self.tally
        own = self.settings, namespace, self.document, self.options, self.job, tally, self.sample_keys
        levels = Levels(*own, **options)
        self.job, levels.mode = levels.job, self.mode
        return levels

    def seen(self) -> bytes:
        """A digest of the dataset as it is now, 16 bytes, even if it has a name."""
        return identify(self.dataset).namespace

    def check_clear(self) -> None:
        """Raise `NotCachedError` if samples must not be forgotten."""

    def explained(self, directory: CacheDirectory | None, *, is_cached: bool) -> str:
        """Why samples were not found; see `CachedDataset.explain`."""
        bypass = None
        if not is_cached:
            bypass = "closed, or turned off by TORCHCACHE_DISABLE, or both sizes are 0"
        elif self.tally.is_random:
            bypass = "it draws random numbers"
        self.renew()
        now = self.identity.fingerprint
        if self.serving is not None and bypass is None:
            return (
                f"namespace {now.namespace.hex()}: a server stores only this number of a dataset, so there "
                f"is nothing to compare with. Samples of other runs are found if they have the same number"
            )
        if directory is None and bypass is None:
            return "samples are in memory only, so there is no folder to compare with: give a cache_dir"
        kind, created = self.document["class"], self.document["created"]
        text = compared(self.title, kind, now, None, bypass, directory, created)
        left_out = [f"left out by ignore: {path}" for path in self.identity.ignored]
        left_out += [
            f"left out, as it has an entry for each sample: {path}" for path in self.identity.by_sample
        ]
        return "\n".join([text, *at_most(left_out)])


class Keeper:
    """What a `CachedDataset` and a `CacheLoader` have in common: how they find and keep samples or values."""

    _recipe: Recipe
    _source: Source
    _store: Store | None
    _is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._source = self._recipe.source()
        self._store = None if self._is_closed else self._recipe.store(self._source)

    def stats(self) -> DatasetStats:
        """Statistics of all processes so far."""
        tiers = {} if self._store is None else self._store.levels.stats()
        return DatasetStats.of(self._recipe.tally, tiers)

    def flush(self) -> None:
        """Return once the samples of all processes are as durable as possible, such as on a server.

        Processes that have samples which only they can write are asked for them, and waited for while they
        live, at most half a minute.
        """
        if self._store is not None:
            self._store.levels.flush()

    def clear(self) -> None:
        """Forget all samples, on disk and on servers too. Waits while workers write samples.

        `NotCachedError` if there is no dataset, as nothing could load the samples again.
        """
        self._recipe.check_clear()
        if self._store is not None:
            self._store.follow()
            self._store.levels.clear()

    def close(self) -> None:
        """Write samples as `flush` does, and release memory and servers; from now on, every one is loaded."""
        self._is_closed = True
        store, self._store = self._store, None
        if store is not None:
            store.close()


def settings_of(options: Mapping[str, Any]) -> tuple[CacheSettings, dict[str, Any]]:
    """The settings of the tiers, and the other options of a `Recipe` about places and sizes."""
    serving = Serving.of(options)
    settings = level_settings(options, serving)
    sizes = (options["memory_size"], options["disk_size"], settings.persistent_cache_dir)
    given = repr((*sizes, settings.policy, settings.compression, serving, options.get("allow_random")))
    return settings, {"serving": serving, "options": given}
