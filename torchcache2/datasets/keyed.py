"""`CacheLoader` and `CachedStream`: values and samples under keys that the caller chooses, not indices."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from torch.utils.data import IterableDataset
from xxhash import xxh3_128_digest

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import listed, shown
from torchcache2.core.settings import CacheSettings, Policy
from torchcache2.core.sizes import Size
from torchcache2.datasets.cached import CachedDataset
from torchcache2.datasets.identity import Index, as_index, keys_of
from torchcache2.datasets.mapped import watchable
from torchcache2.datasets.options import CAPACITY, check, check_others
from torchcache2.datasets.recipe import Keeper, Recipe
from torchcache2.datasets.source import owned
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE
from torchcache2.identity.namespace import NamespaceKeeper
from torchcache2.identity.sourcecode import cells_of

_OF_LOADER = "the key of a CacheLoader is one int, str or bytes, or a tuple of them; get_many takes a list"
_OF_SAMPLE = "the key of a sample of a CachedStream is one int, str or bytes, or a tuple of them"
_OF_STREAM = ("name", "cache_dir", "transform", "batch_size")  # options that are arguments of a stream
_MOST_FUNCTIONS, _MOST_NAMES = 64, 1024
_NOT_HERE = ("keys", "map", "collate_fn", "views", "seed", "partial")  # only for samples with an index
Key = Index | tuple["Key", ...]


def _index(key: Any, expected: str) -> Index:
    """A key as an index: a tuple counts as the digest of the keys of its parts."""
    if not isinstance(key, tuple):
        return as_index(key, expected)
    parts = keys_of(bytes(16), [_index(part, expected) for part in key])
    return xxh3_128_digest(b"t" + parts.data.tobytes())


class CacheLoader(Keeper):
    """Caches a function's results by key, on Redis servers or on this machine.

    **With a `key_prefix`, the function is not part of the key.** `key_prefix`, `version` and the key alone
    identify a value: change one of them when the function, or the files that it reads, change. The function
    should be deterministic, such as reading and decoding; augment at random after `get`.

    All processes that get one loader share it: pass it to a dataset, whose workers may be forked or spawned.
    Several loaders and datasets may use one server, with different `key_prefix` or `version`.

    Parameters
    ----------
    backend : {"redis", "local"}
        Where values are kept: on Redis servers, or in memory and a folder of this machine, as in
        `CachedDataset`.
    key_prefix : str
        A name for the keys, such as that of a data set: all loaders with one `key_prefix` share values, on a
        server, in a folder, or among the ranks of a machine. Without one, the function stands for it, with
        all that it refers to, as for a cached function.
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
    _has_prefix: bool

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
        self.__setstate__({"_recipe": recipe, "_has_prefix": key_prefix != ""})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._functions = dict[tuple[int, ...], tuple[Any, NamespaceKeeper]]()
        # A function that its own calls change, as by a counter, or a file opened late, keeps its first name.
        self._names = dict[bytes, bytes]()

    def _read(self, function: Any) -> tuple[bytes, list[str]]:
        """A function and all that it refers to, as it is now, as 16 bytes; and what cannot be read of it."""
        parts: list[Any] = [function]  # those of a lambda that is made anew for each call are the same
        if (code := getattr(function, "__code__", None)) is not None:
            cells = [part for name, _, value in cells_of(function) for part in (name, value)]
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            parts = [code, function.__globals__, getattr(function, "__self__", None), *cells, *defaults]
        if (place := tuple(map(id, parts))) not in self._functions:
            if len(self._functions) >= _MOST_FUNCTIONS:
                self._functions.clear()
            keeper = NamespaceKeeper(repr(self), CacheSettings())
            self._functions[place] = parts, keeper  # kept alive, as ids are reused
        _, keeper = self._functions[place]
        namespace = keeper.look(watchable(function)).namespace
        keeper.distrust_structure(large=False)
        return namespace, keeper.unread

    def _name(self, state: bytes, unread: list[str]) -> bytes:
        """Stands for a function in keys, by what `_read` has found."""
        if unread and state not in self._names:
            raise OptionError(
                f"{self!r} has no key_prefix, and load_fn has {listed(unread)}, which cannot be "
                "read: pass key_prefix= to identify the values"
            )
        return self._names.get(state, state)

    def get(self, key: Key, load_fn: Callable[[Any], Any]) -> Any:
        """The value of a key; if there is none, calls ``load_fn(key)`` and keeps the result.

        Parameters
        ----------
        key : int, str or bytes, or a tuple of these
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
        if type(key) is int and self._has_prefix and self._store is not None and callable(load_fn):
            for value in self._store.find_one(key):
                return value
        return self.get_many([key], load_fn)[0]

    def get_many(
        self,
        keys: Sequence[Key],
        load_fn: Callable[[Any], Any] | None = None,
        *,
        load_many: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> list[Any]:
        """The values of n keys, with one round trip to each server.

        Calls ``load_fn(key)`` once for each distinct key without a value, in order; or ``load_many(keys)``
        for a list of these, which returns as many values. If a call raises, nothing is kept.
        """
        if (load_fn is None) is (load_many is None):
            raise TypeError("expected one of load_fn, which takes a key, and load_many, which takes a list")
        function = load_fn if load_many is None else load_many
        if not callable(function):
            raise TypeError(
                f"load_fn is of type {type(function).__name__}: expected a callable that takes a key"
            )
        if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
            raise TypeError(f"keys is of type {type(keys).__name__}: expected a list of keys; get takes one")
        store, given = self._store, list(keys)
        wanted = [_index(key, _OF_LOADER) for key in given]
        is_named = not self._has_prefix and store is not None
        state, unread = self._read(function) if is_named else (b"", [])
        if is_named:
            name = self._name(state, unread)
            wanted = [_index((name, index), _OF_LOADER) for index in wanted]
        pairs = zip(wanted, given, strict=True)
        key_of: dict[Index, Any] = {i: key if isinstance(key, tuple) else as_index(key) for i, key in pairs}
        distinct, loaded = list(key_of), dict[Index, Any]()

        def load(index: Index) -> Any:
            if load_many is None:
                loaded[index] = function(key_of[index])
            elif index not in loaded:
                is_here = store.levels.has(keys_of(store.levels.namespace, distinct)) if store else None
                rest = distinct if is_here is None else itertools.compress(distinct, ~is_here)
                missing = list(dict.fromkeys([index, *[one for one in rest if one not in loaded]]))
                values = load_many([key_of[one] for one in missing])
                loaded.update(zip(missing, values, strict=True))
            return loaded[index]

        if store is None or not wanted:
            return [load(index) for index in wanted]
        values = dict(zip(distinct, store.fetch(distinct, load), strict=True))
        if is_named and loaded and (after := self._read(function)[0]) != state:
            self._names[after] = self._names.pop(state, state)
            for old in [*self._names][:-_MOST_NAMES]:  # left if several threads change one object
                self._names.pop(old, None)
        if len(distinct) == len(wanted):
            return list(values.values())
        store.tally.add(memory_hits=len(wanted) - len(distinct))
        found, seen = [], set[Index]()
        for key in wanted:  # a repeated key's values have memory of their own
            found.append(owned(values[key]) if key in seen else values[key])
            seen.add(key)
        return found

    def num_keys(self) -> int:
        """How many keys of this prefix and version have a value, from any process."""
        return 0 if self._store is None else self._store.levels.count()

    def __enter__(self) -> CacheLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        settings = self._recipe.settings
        folder = settings.persistent_cache_dir
        where = (
            f"in {folder or 'memory'}"
            if self._recipe.serving is None
            else f"on {settings.servers or 'no server'}"
        )
        return f"<{self._recipe.title} {where}>"


# In the key of a dataset or module that refers to a loader, the loader's prefix and version stand for it.
setattr(CacheLoader, ADDED_ATTRIBUTE, True)
setattr(CacheLoader, ORIGINAL_ATTRIBUTE, property(lambda self: self._recipe.identity.namespace))


class _Decoder:
    """Stands for the dataset: its samples are those that ``load`` makes of raw ones."""

    def __init__(self, name: str, load: Callable[[Any], Any], key: Callable[[Any], Any] | str) -> None:
        self.name, self.load, self.key = name, load, key


setattr(_Decoder, ADDED_ATTRIBUTE, True)  # only the user's arguments count
setattr(_Decoder, ORIGINAL_ATTRIBUTE, property(lambda self: (self.name, self.load, self.key)))


class CachedStream(Keeper, IterableDataset[Any]):
    """A stream whose samples are decoded once, and then found by their key.

    The source still delivers its raw samples, such as the bytes of files, in its own order to its own choice
    of workers and ranks. The results of `load` are kept, as in a `CachedDataset`.

    Parameters
    ----------
    iterable : iterable
        The source, such as a `webdataset.WebDataset` that does not decode, or a streamed dataset of Hugging
        Face. A stream of samples, not of batches.
    key : str or callable
        ``key(raw)`` identifies the sample: an int, str or bytes, or a tuple of these. A str is the name of a
        field. Raw samples with equal keys are one sample, whatever else they contain.
    load : callable
        ``load(raw)`` makes the sample. Its code, and what that refers to, are part of the key.
    name : str
        A name for the keys, such as ``"coco-train"``. Streams with equal name, `key` and `load` share
        samples.
    cache_dir : path or URL, optional
        A folder that keeps all samples for later runs, as for `CachedDataset`.
    transform : callable, optional
        Called with each sample after the cache, for example for random augmentation.
    batch_size : int
        How many raw samples to look up together.
    **options
        Other options of a `CachedDataset`, such as `memory_size`, `version`, or `backend`.

    Raises
    ------
    OptionError
        If an option has an invalid value, or if `load` cannot be read and there is a `cache_dir` or a server.

    Examples
    --------
    >>> from torchcache2 import CachedStream
    >>> def decode(raw):
    ...     print("decoded", raw["id"])
    ...     return float(raw["text"])

    >>> raw = [{"id": 1, "text": "1.5"}, {"id": 2, "text": "2.5"}]
    >>> stream = CachedStream(raw, key="id", load=decode, name="numbers", memory_size="1MB")
    >>> list(stream), list(stream)
    decoded 1
    decoded 2
    ([1.5, 2.5], [1.5, 2.5])
    """

    __module__ = "torchcache2"
    _iterable: Iterable[Any]
    _batch: int

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        key: Callable[[Any], Any] | str,
        load: Callable[[Any], Any],
        name: str,
        cache_dir: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> None:
        is_key, is_name = callable(key) or isinstance(key, str), isinstance(name, str) and name
        for option, value, holds, expected in (
            ("iterable", iterable, hasattr(iterable, "__iter__"), "an iterable of raw samples"),
            ("key", key, is_key, "a function of a raw sample, or a field"),
            ("load", load, callable(load), "a function of a raw sample"),
            ("name", name, is_name, "a text, such as 'coco-train'"),
        ):
            if not holds:
                raise OptionError(f"{option}={shown(value)}: expected {expected}")
        parameters = inspect.signature(CachedDataset).parameters.values()
        usual = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        own = [*_OF_STREAM, *_NOT_HERE]
        known = ["key", "load", *_OF_STREAM, *(one for one in usual if one not in own)]
        check_others([one for one in options if one not in usual or one in own], known, "CachedStream")
        given = usual | options | {"cache_dir": cache_dir, "transform": transform, "batch_size": batch_size}
        check(given)
        recipe = Recipe.of_dataset(_Decoder(name, load, key), given)
        recipe.title = recipe.document["class"] = f"CachedStream {name}"
        del recipe.document["dataset"]  # its samples are unknown without its source
        self.__setstate__({"_recipe": recipe, "_batch": batch_size, "_iterable": iterable})

    def __iter__(self) -> Iterator[Any]:
        source, transform = iter(self._iterable), self._recipe.transform
        while raw := list(itertools.islice(source, self._batch)):
            for sample in self._found(raw):
                yield sample if transform is None else transform(sample)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also during unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._iterable, name)  # such as `set_epoch`

    def _found(self, raw: list[Any]) -> list[Any]:
        load, key, store = self._recipe.dataset.load, self._recipe.dataset.key, self._store
        keys = [_index(one[key] if isinstance(key, str) else key(one), _OF_SAMPLE) for one in raw]
        by_key = dict(zip(keys, raw, strict=True))

        def decoded(key: Index) -> Any:
            return load(by_key[key])

        return list(map(decoded, keys)) if store is None or not keys else store.fetch(keys, decoded)

    def __repr__(self) -> str:
        return f"<{self._recipe.title} {self._recipe.identity.namespace.hex()}>"
