"""`Source`: loads the samples of a cached dataset, each as it was when loaded."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, StackDataset, Subset

from torchcache2.core.process import ProcessLock
from torchcache2.core.values import mapped
from torchcache2.engine.randomness import RandomState

One = Callable[[Any], Any]


def owned(sample: Any) -> Any:
    """A sample in memory of its own; what cannot be made again stays as it is."""
    try:
        return mapped(_owned, sample, objects=True)
    except Exception:  # whatever its class raises
        return sample


def _owned(leaf: Any) -> Any:
    pil = sys.modules.get("PIL.Image")
    if isinstance(leaf, np.ndarray) or (pil is not None and isinstance(leaf, pil.Image)):
        return leaf.copy()
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    clone = leaf.clone()
    return clone if vars(clone).keys() == vars(leaf).keys() else leaf  # a class of its own may keep more


_CHECKED = 64  # the first samples are all checked, later one in as many


class Source:
    """Loads samples; one for each process.

    With `checks`, it watches whether random generators advance while samples load: the default ones of torch,
    NumPy and Python, and `generators`. Code in `unseeded` means that the dataset draws numbers without these.

    Attributes
    ----------
    nanoseconds : int
        Time spent in the dataset so far.
    """

    def __init__(
        self, dataset: Any, generators: Iterable[Any], unseeded: Sequence[str] = (), *, checks: bool
    ) -> None:
        self.nanoseconds = 0
        self.unseeded = unseeded if checks else ()
        self._dataset, self._generators, self._checks = dataset, list(generators), checks
        self._lock, self._held = ProcessLock(), threading.local()
        self._loaded = self._unchecked = 0
        self._has_batches = has_batches(dataset)
        is_abstract = getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__
        self._has_only_batches = self._has_batches and is_abstract

    def load(self, indices: Sequence[Any], one: One | None = None) -> tuple[list[Any], bool]:
        """The samples, each as it was when it was loaded, and whether they may be cached.

        They may not if random numbers were drawn. ``one(index)`` loads them in place of the dataset.
        """
        held = self.held()
        if held is None or one is not None:
            return self._load(indices, one)
        absent = [index for index in dict.fromkeys(indices) if index not in held]
        loaded, is_steady = self._load(absent, None) if absent else ([], True)
        held.update(zip(absent, loaded, strict=True))
        return [held[index] for index in indices], is_steady

    @contextlib.contextmanager
    def holding(self, samples: dict[Any, Any]) -> Iterator[None]:
        """Use samples that workers have loaded, by index, in this thread, and add to them what it loads."""
        before, self._held.samples = self.held(), samples
        try:
            yield
        finally:
            self._held.samples = before

    def held(self) -> dict[Any, Any] | None:
        """The samples that this thread holds now."""
        return getattr(self._held, "samples", None)

    def _load(self, indices: Sequence[Any], one: One | None) -> tuple[list[Any], bool]:
        if self.unseeded:
            return self.plain(indices, one), False
        with self._lock():
            self._loaded += len(indices)
            self._unchecked += len(indices)
            is_checked = self._checks and (self._loaded <= _CHECKED or self._unchecked >= _CHECKED)
            if is_checked:
                self._unchecked = 0
        state = RandomState(self._generators) if is_checked else None
        start = time.perf_counter_ns()
        load, is_many = one or self._one, len(indices) > 1
        if is_many and one is None and self._has_batches:
            samples = self._many(indices)
        else:  # the source may fill one buffer again and again
            samples = [owned(load(index)) if is_many else load(index) for index in indices]
        self.nanoseconds += time.perf_counter_ns() - start
        return samples, state is None or not state.moved()

    def plain(self, indices: Sequence[Any], one: One | None = None) -> list[Any]:
        """The samples, as the dataset, or ``one(index)``, gives them."""
        start = time.perf_counter_ns()
        held = self.held() or {}
        if one is None and all(index in held for index in indices):
            return [held[index] for index in indices]
        is_batch = self._has_batches and len(indices) > 1 and one is None
        samples = self._many(indices) if is_batch else list(map(one or self._one, indices))
        self.nanoseconds += time.perf_counter_ns() - start
        return samples

    def is_random(self, index: Any, one: One | None = None) -> bool:
        """Whether the dataset draws random numbers, after samples that seemed to: another thread may have."""
        if self.unseeded or threading.active_count() == 1:
            return True
        for _ in range(2):
            state = RandomState(self._generators)
            try:
                (one or self._one)(index)
                if not state.moved():
                    return False
            finally:
                state.restore()  # the caller must draw the same numbers as without a cache
        return True

    def _one(self, index: Any) -> Any:
        return self._many([index])[0] if self._has_only_batches else self._dataset[index]

    def _many(self, indices: Sequence[Any]) -> list[Any]:
        samples = self._dataset.__getitems__(indices)
        said = f"{type(self._dataset).__name__}.__getitems__ has given"
        if isinstance(samples, (Mapping, str, bytes)):
            kind = type(samples).__name__
            raise TypeError(f"{said} a {kind}: a CachedDataset needs a list with one sample for each index")
        samples = list(samples)
        if len(samples) != len(indices):
            raise RuntimeError(f"{said} {len(samples)} samples for {len(indices)} indices")
        return samples


def has_batches(dataset: Any) -> bool:
    """Whether `__getitems__` gives what `__getitem__` gives: no class overrides the latter alone.

    What ``__getattr__`` finds belongs to another dataset, whose samples a wrapper may change.
    """
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            inner: Any = ()
            if kind is Subset:
                inner = [dataset.dataset]
            elif kind is StackDataset:
                datasets = dataset.datasets
                inner = datasets.values() if isinstance(datasets, dict) else datasets
            return vars(kind)["__getitems__"] is not None and all(map(has_batches, inner))
        if "__getitem__" in vars(kind):
            return False
    return False
