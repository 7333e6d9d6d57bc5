"""`CacheLoader`: caches values under keys that the caller chooses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size
from torchcache2.datasets.identity import Index, as_index, keys_of
from torchcache2.datasets.options import CAPACITY, check, check_others
from torchcache2.datasets.recipe import Keeper, Recipe
from torchcache2.datasets.source import Apart, copied
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE

_EXPECTED = "the key of a CacheLoader is one int, str or bytes; get_many takes a list of them"


class CacheLoader(Keeper):
    """Caches a function's results by key, on Redis servers or on this machine.

    **The function is not part of the key.** `key_prefix`, `version` and the key alone identify a value:
    change one of them when the function, or the files that it reads, change. The function should be
    deterministic, such as reading and decoding; augment at random after `get`.

    All processes that get one loader share it: pass it to a dataset, whose workers may be forked or spawned.
    Several loaders and datasets may use one server, with different `key_prefix` or `version`.

    Parameters
    ----------
    backend : {"redis", "local"}
        Where values are kept: on Redis servers, or in memory and a folder of this machine, as in
        `CachedDataset`.
    key_prefix : str
        A name for the keys, such as that of a data set. Required, because all loaders with one `key_prefix`
        share values, on a server, in a folder, or among the ranks of a machine.
    writer_buffer_size : int
        How many values to gather before sending them to a server. They are sent after at most a second; the
        process that loaded them finds them meanwhile.
    hosts : str, dict, or sequence of these, optional
        The servers, each of which keeps a part of the values: a URL such as
        ``redis://:password@host:6379/0``, also ``rediss://`` and ``unix://``, or a dict such as ``{"host":
        "node1", "port": 6379}``, also with ``password``, ``username`` and options of TLS. None: this library
        starts a server on each machine, which ends with the job.
    cluster_mode : bool
        Whether each machine uses the servers of all machines. False: only its own, or one of `hosts`.
    capacity_per_node : int, str or float
        How much memory a server that this library starts may take: bytes, a text like ``"4GB"``, or a share
        of what is free.
    policy : {"keep", "lru"}
        What a full folder, or a full server that this library started, does: keep what came first, or drop
        the least recently used. Servers in `hosts` keep their own configuration.
    version : str or int, optional
        Change it when values change, although keys do not.
    compression : {"none", "brotli", "blosc2"}
        How values are compressed on the server or in the folder.
    cache_dir : path, optional
        A folder that keeps all values for later runs, with ``backend="local"``.
    memory_size : int, str or float, optional
        How much memory values may take, once for all processes of the machine. None: 0 in front of a server,
        else a share of 0.25.
    disk_size : int, str or float, optional
        How much the folder may take, as for `CachedDataset`, with ``backend="local"``.

    Raises
    ------
    OptionError
        If an option has an invalid value, or a server refuses the password.

    Notes
    -----
    Values may have the types of a `CachedDataset`'s samples, or be None. They are restored exactly, in memory
    of their own. While a server does not answer, values are loaded, with one warning.

    Examples
    --------
    >>> from torchcache2 import CacheLoader
    >>> loader = CacheLoader("local", "squares", memory_size="10MB")
    >>> def load(key):
    ...     print("loaded", key)
    ...     return {"square": key**2}

    >>> loader.get(3, load)
    loaded 3
    {'square': 9}
    >>> loader.get_many([2, 3], load)
    loaded 2
    [{'square': 4}, {'square': 9}]
    >>> loader.num_keys()
    2
    """

    __module__ = "torchcache2"

    def __init__(
        self,
        backend: Literal["redis", "local"] = "redis",
        key_prefix: str = "",
        writer_buffer_size: int = 1,
        *,
        hosts: Any = None,
        cluster_mode: bool = True,
        capacity_per_node: Size = CAPACITY,
        policy: Policy = "keep",
        version: str | int | None = None,
        compression: str = "none",
        cache_dir: str | os.PathLike[str] | None = None,
        memory_size: Size | None = None,
        disk_size: Size | None = None,
        **others: Any,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "others")}
        check_others(others, [*options], "CacheLoader")
        check(options)
        recipe = Recipe.of_loader(key_prefix, version, options)
        self.__setstate__({"_recipe": recipe, "_is_closed": False})

    def get(self, key: Index, load_fn: Callable[[Any], Any]) -> Any:
        """The value of a key; if there is none, calls ``load_fn(key)`` and keeps the result.

        Parameters
        ----------
        key : int, str or bytes
            ``1`` and ``"1"`` are two keys. NumPy ints and tensors without dimensions count as ints.
        load_fn : callable
            Called with the key. Its errors reach the caller, and nothing is kept then.

        Raises
        ------
        TypeError
            If the key is of another type.
        OutputError
            If the value cannot be stored, and none was stored before. Otherwise this is a warning.
        """
        if type(key) is int and self._store is not None and callable(load_fn):
            for value in self._store.find_one(key):
                return value
        return self.get_many([key], load_fn)[0]

    def get_many(self, keys: Sequence[Index], load_fn: Callable[[Any], Any]) -> list[Any]:
        """The values of n keys, with one round trip to each server.

        Calls ``load_fn(key)`` once for each distinct key without a value, in order. If a call raises, nothing
        is kept.
        """
        if not callable(load_fn):
            raise TypeError(
                f"load_fn is of type {type(load_fn).__name__}: expected a callable that takes a key"
            )
        if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
            raise TypeError(f"keys is of type {type(keys).__name__}: expected a list of keys; get takes one")
        start, wanted = time.perf_counter_ns(), [as_index(key, _EXPECTED) for key in keys]
        store = self._store
        if store is None or not wanted:
            return [load_fn(key) for key in wanted]
        digests, drops = keys_of(store.levels.namespace, wanted), store.tally.drops
        values, found, counts, _ = store.find(digests)
        first: dict[Index, int] = {}  # first position of each key without a value
        again = [i for i in np.flatnonzero(~found).tolist() if first.setdefault(wanted[i], i) != i]
        before = time.perf_counter_ns()
        places, loaded = list(first.values()), self._apart.each(load_fn, list(first))
        for place, value in zip(places, loaded, strict=True):
            values[place] = value
        taken = time.perf_counter_ns() - before
        if first:
            store.keep(digests.take(np.array(places)), loaded, drops)
        for place in again:
            (values[place],) = copied(values[first[wanted[place]]]) or [load_fn(wanted[place])]
        counts["memory_hits"] = counts.get("memory_hits", 0) + len(again)
        spent = time.perf_counter_ns() - start - taken
        store.tally.add(**counts, nanoseconds=taken, spent=spent)
        return values

    def num_keys(self) -> int:
        """How many keys of this prefix and version have a value, from any process."""
        return 0 if self._store is None else self._store.levels.count()

    def __enter__(self) -> CacheLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_recipe": self._recipe, "_is_closed": self._is_closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._recipe, self._is_closed = state["_recipe"], state["_is_closed"]
        self._store = None if self._is_closed else self._recipe.store()
        self._apart = Apart()

    def __repr__(self) -> str:
        settings = self._recipe.settings
        folder = settings.persistent_cache_dir
        where = (
            f"in {folder or 'memory'}"
            if self._recipe.serving is None
            else f"on {settings.servers or 'no server'}"
        )
        return f"<{self._recipe.title} {where}>"


# In the key of a cached dataset or module, a loader counts by its prefix and version.
setattr(CacheLoader, ADDED_ATTRIBUTE, True)
setattr(CacheLoader, ORIGINAL_ATTRIBUTE, property(lambda self: self._recipe.identity.namespace))
