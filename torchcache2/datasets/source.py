"""`Source`: loads the samples of a dataset that is cached, and notices when it draws random numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchcache2.core.locks import ProcessLock
from torchcache2.engine.randomness import RandomState

__all__ = ["Source"]

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
        self._lock = ProcessLock()
        self._loaded = self._unchecked = self._strikes = 0

    def load(self, indices: Sequence[Any]) -> tuple[list[Any], bool]:
        """The samples, and whether they may be cached: they may not if random numbers were drawn."""
        if self.unseeded:
            return self.plain(indices), False
        with self._lock():
            self._loaded += len(indices)
            self._unchecked += len(indices)
            is_checked = self._checks and (self._loaded <= _CHECKED or self._unchecked >= _CHECKED)
            if is_checked:
                self._unchecked = 0
        state = RandomState(self._generators) if is_checked else None
        samples = self.plain(indices)
        return samples, state is None or not state.moved()

    def plain(self, indices: Sequence[Any]) -> list[Any]:
        """The samples, as the dataset gives them."""
        if len(indices) == 0:
            return []  # many datasets cannot load no samples
        start = time.perf_counter_ns()
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(indices) if callable(many) else [self._dataset[index] for index in indices]
        said = f"{type(self._dataset).__name__}.__getitems__ has given"
        if isinstance(samples, (Mapping, str, bytes)):
            kind = type(samples).__name__
            raise TypeError(
                f"{said} a {kind}: a CachedDataset needs a list of samples, which it keeps each alone"
            )
        samples = list(samples)
        self.nanoseconds += time.perf_counter_ns() - start
        if len(samples) != len(indices):
            raise RuntimeError(f"{said} {len(samples)} samples for {len(indices)} indices")
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
                self._dataset[index]
                if not state.moved():
                    return False
            finally:
                state.restore()  # the numbers that the caller draws next are those without a cache
        return True
