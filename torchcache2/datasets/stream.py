"""`CachedStream`: a stream whose raw samples have a key, and are decoded once."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from torch.utils.data import IterableDataset

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown
from torchcache2.datasets.cached import CachedDataset
from torchcache2.datasets.identity import Index, as_index
from torchcache2.datasets.options import check, check_others
from torchcache2.datasets.recipe import Keeper, Recipe
from torchcache2.datasets.source import Source
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE

_EXPECTED = "the key of a sample of a CachedStream is one int, str or bytes"
_OF_STREAM = ("name", "cache_dir", "transform", "batch_size")  # options that are arguments here
_NOT_HERE = ("partial",)  # only for samples with an index


class _Decoder:
    """A dataset that applies `load` to this thread's raw samples; their keys are the indices."""

    def __init__(self, name: str, load: Callable[[Any], Any], key: Callable[[Any], Any] | str) -> None:
        self.name, self.load, self.key = name, load, key
        self._here = threading.local()

    def keys(self, raw: list[Any]) -> list[Index]:
        """The keys of raw samples; remembers these for `__getitem__`."""
        key = itemgetter(self.key) if isinstance(self.key, str) else self.key
        keys = [as_index(key(one), _EXPECTED) for one in raw]
        self._here.raw = dict(zip(keys, raw, strict=True))
        return keys

    def __getitem__(self, key: Index) -> Any:
        return self.load(self._here.raw[key])

    def __reduce__(self) -> tuple[Any, ...]:
        return _Decoder, (self.name, self.load, self.key)


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
        ``key(raw)`` identifies the sample: an int, str or bytes. A str is the name of a field. Raw samples
        with equal keys are one sample, whatever else they contain.
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
    _source: Source
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
        for option, value, holds, expected in (
            ("iterable", iterable, hasattr(iterable, "__iter__"), "an iterable of raw samples"),
            (
                "key",
                key,
                callable(key) or isinstance(key, str),
                "a function of a raw sample, or a field",
            ),
            ("load", load, callable(load), "a function of a raw sample"),
            ("name", name, isinstance(name, str) and name, "a text, such as 'coco-train'"),
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
        self.__setstate__(
            {"_recipe": recipe, "_is_closed": False, "_batch": batch_size, "_iterable": iterable}
        )

    def __iter__(self) -> Iterator[Any]:
        source, transform, failure = iter(self._iterable), self._recipe.transform, None
        while failure is None:
            raw: list[Any] = []
            try:
                while len(raw) < self._batch:
                    raw.append(next(source))
            except (Exception, StopIteration) as error:  # yield samples before it first
                failure = error
            for sample in self._samples(raw):
                yield sample if transform is None else transform(sample)
        if not isinstance(failure, StopIteration):
            try:
                raise failure
            finally:
                failure = None  # avoid a cycle with this frame

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also during unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._iterable, name)  # such as `set_epoch`

    def _samples(self, raw: list[Any]) -> Iterable[Any]:
        """The samples of raw ones; if `load` fails for one, yields those before it first."""
        try:
            return self._found(raw)
        except Exception:
            if len(raw) < 2:
                raise
        return (sample for one in raw for sample in self._found([one]))

    def _found(self, raw: list[Any]) -> list[Any]:
        keys, store = self._recipe.dataset.keys(raw), self._store
        return self._source.plain(keys) if store is None or not keys else store.fetch(keys)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_recipe", "_is_closed", "_batch", "_iterable")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._source = self._recipe.source()
        self._store = None if self._is_closed else self._recipe.store(self._source)

    def __repr__(self) -> str:
        return f"<{self._recipe.title} {self._recipe.identity.namespace.hex()}>"
