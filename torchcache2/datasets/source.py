"""`Source`: loads the samples of a dataset that is cached, and notices when it draws random numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, StackDataset, Subset

from torchcache2.core.process import ProcessLock
from torchcache2.datasets.apart import Apart, share_memory
from torchcache2.engine.randomness import RandomState

_CHECKED = 64  # samples that are all checked at first, and one in so many later
_STRIKES = 4


class Source:
    """Loads samples; one for each process.

    With `checks`, it looks whether a generator of random numbers moves while samples are loaded: a default
    one of torch, numpy or Python, or one of `generators`. If there is any code in `unseeded`, the dataset
    draws numbers that no generator tells of.

    Attributes
    ----------
    nanoseconds : int
        Spent in the dataset until now.
    """

    def __init__(
        self, dataset: Any, generators: Iterable[Any], unseeded: Sequence[str] = (), *, checks: bool
    ) -> None:
        self.nanoseconds = 0
        self.unseeded = unseeded if checks else ()
        self._dataset, self._generators, self._checks = dataset, list(generators), checks
        self._lock, self._apart = ProcessLock(), Apart()
        self._loaded = self._unchecked = self._strikes = 0
        self._has_batches = has_batches(dataset)
        is_abstract = getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__
        self._has_only_batches = self._has_batches and is_abstract

    def load(self, indices: Sequence[Any]) -> tuple[list[Any], bool]:
        """The samples, each as it was when it was loaded, and whether they may be cached.

        They may not if random numbers were drawn.
        """
        if self.unseeded:
            return self.plain(indices), False
        with self._lock():
            self._loaded += len(indices)
            self._unchecked += len(indices)
            is_checked = self._checks and (self._loaded <= _CHECKED or self._unchecked >= _CHECKED)
            if is_checked:
                self._unchecked = 0
        state = RandomState(self._generators) if is_checked else None
        start = time.perf_counter_ns()
        samples = self._in_one(indices, state) or self._apart.each(self._one, indices)
        self.nanoseconds += time.perf_counter_ns() - start
        return samples, state is None or not state.moved()

    def plain(self, indices: Sequence[Any]) -> list[Any]:
        """The samples, as the dataset gives them."""
        start = time.perf_counter_ns()
        is_batch = self._has_batches and len(indices) > 1
        samples = self._many(indices) if is_batch else [self._one(index) for index in indices]
        self.nanoseconds += time.perf_counter_ns() - start
        return samples

    def is_random(self, index: Any) -> bool:
        """Whether the dataset draws random numbers, after samples that seemed to: another thread may have."""
        if self.unseeded or threading.active_count() == 1:
            return True
        self._strikes += 1
        if self._strikes >= _STRIKES:
            return True
        for _ in range(2):
            state = RandomState(self._generators)
            try:
                self._one(index)
                if not state.moved():
                    return False
            finally:
                state.restore()  # the numbers that the caller draws next are those without a cache
        return True

    def _in_one(self, indices: Sequence[Any], state: RandomState | None) -> list[Any]:
        """The samples that one call of `__getitems__` gives; none if they have to be asked for one by one."""
        if len(indices) < 2 or not self._has_batches or self._apart.shares:
            return []
        samples = self._many(indices)
        if not share_memory(indices, samples):
            return samples
        self._apart.shares = True
        if state is not None:
            state.restore()
        return []

    def _one(self, index: Any) -> Any:
        return self._many([index])[0] if self._has_only_batches else self._dataset[index]

    def _many(self, indices: Sequence[Any]) -> list[Any]:
        samples = self._dataset.__getitems__(indices)
        said = f"{type(self._dataset).__name__}.__getitems__ has given"
        if isinstance(samples, (Mapping, str, bytes)):
            kind = type(samples).__name__
            raise TypeError(
                f"{said} a {kind}: a CachedDataset needs a list of samples, which it keeps each alone"
            )
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
