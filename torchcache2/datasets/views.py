"""`Views`: a dataset in which each sample has several random variants, each drawn under its own seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from xxhash import xxh3_64_intdigest

from torchcache2.datasets.samplekeys import SampleKeys
from torchcache2.engine.randomness import RandomState


class Views(Dataset[Any]):
    """Variant v of sample i of n has index ``v * n + i``; its random numbers depend on `seed`, v and i's key.

    The generators of Python, NumPy and torch are seeded before a variant is loaded, and restored afterwards.
    So a variant is a function of its index, and may be kept.
    """

    def __init__(self, dataset: Any, views: int, seed: int, keys: SampleKeys) -> None:
        self.dataset, self.views, self.seed, self._keys = dataset, views, seed, keys

    def __len__(self) -> int:
        return len(self.dataset) * self.views

    def __getitem__(self, index: int) -> Any:
        view, number = divmod(index, len(self.dataset))
        key = self._keys.of(bytes(16), [number]).data.tobytes()
        return seeded((self.seed, key, view), self.dataset.__getitem__, number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "_keys"):  # of a copy without attributes yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seeded(name: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function under generators that are seeded by a name; they then go on from where they were."""
    number, before = _seed(name), RandomState([])
    try:
        random.seed(number)
        np.random.seed(number & (2**32 - 1))
        torch.default_generator.manual_seed(number >> 1)
        return function(*args)
    finally:
        before.restore()


def generator(name: tuple[Any, ...]) -> torch.Generator:
    """A generator that is seeded by a name."""
    return torch.Generator().manual_seed(_seed(name) >> 1)


def _seed(name: tuple[Any, ...]) -> int:
    return xxh3_64_intdigest(repr(name).encode())
