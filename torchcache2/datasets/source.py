"""`Source`: loads the samples of a cached dataset, each as it was when loaded."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, StackDataset, Subset

from torchcache2.core.errors import UnreadableError
from torchcache2.core.private import pytree
from torchcache2.core.process import ProcessLock
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.samples import Samples, from_rows

_FIRST = 8  # samples that are always copied
_DEEPEST = 100
_IMMUTABLE = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device])
One = Callable[[Any], Any]
_Span = tuple[int, int]  # first byte, and the byte after the last
_BORROWED = (-1, 0)  # stands for unknown memory


class Apart:
    """Loads samples one by one.

    A function may reuse one buffer, so the first samples are copied before the next is loaded. Once samples
    have shared memory, all later ones are copied. Otherwise samples are returned as they are.

    Attributes
    ----------
    shares : bool
        Whether samples have shared memory.
    """

    def __init__(self) -> None:
        self.shares = False
        self._loaded = 0

    def each(self, load: Callable[[Any], Any], indices: Sequence[Any]) -> list[Any]:
        """The samples that ``load(index)`` returns.

        If samples first share memory after many did not, calls it once more for each index.
        """
        if len(indices) == 1:
            return [load(indices[0])]
        if not self.shares:
            is_copied = self._loaded < _FIRST
            self._loaded += len(indices)
            samples, copies = [], []
            for index in indices:
                samples.append(load(index))
                if is_copied:
                    copies += copied(samples[-1]) or [samples[-1]]
            self.shares = share_memory(indices, samples)
            if is_copied or not self.shares:
                return copies if self.shares else samples
        return [(copied(sample) or [sample])[0] for sample in map(load, indices)]


def copied(sample: Any) -> list[Any]:
    """A list with a copy of a sample in its own memory; empty if it cannot be stored, or read."""
    try:
        return [found for _, rows in Samples().to_rows([sample]).parts for found in from_rows(rows)]
    except UnreadableError:
        return []


def share_memory(indices: Iterable[Any], samples: Iterable[Any]) -> bool:
    """Whether samples of different indices share a byte of a tensor or array, or an object."""
    spans: list[tuple[int, int, int]] = []
    numbers: dict[Any, int] = {}
    for index, sample in zip(indices, samples, strict=True):
        found: list[_Span] = []
        _add(found, sample, 0)
        number = numbers.setdefault(index, len(numbers))
        spans += [(start, end, number) for start, end in found if start and start < end]
    last, owner = -2, -1
    for start, end, number in sorted(spans):
        if start < last and number != owner:
            return True
        last, owner = max(last, end), number
    return False


def _add(found: list[_Span], value: Any, depth: int) -> None:
    """Add a value's ranges of memory."""
    kind = type(value)
    if kind in _IMMUTABLE or depth > _DEEPEST:
        return
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            size, start = value.element_size(), value.data_ptr()
            if value.is_contiguous():
                found.append((start, start + size * value.numel()))
            else:
                _add_span(found, start, value.shape, [size * step for step in value.stride()], size)
        return
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            start = value.__array_interface__["data"][0]
            found.append((start, start + value.nbytes))
        else:
            _add_span(found, value.ctypes.data, value.shape, value.strides, value.itemsize)
        return
    children: Any = ()
    if kind is not tuple and not isinstance(value, tuple):
        if isinstance(value, np.generic):
            return
        found.append((id(value), id(value) + 1))
    if isinstance(value, (tuple, list)):
        children = () if _IMMUTABLE.issuperset(map(type, value)) else value
    elif isinstance(value, dict):
        children = value.values()
    elif kind in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    elif (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
        if value.readonly:  # made by `fromarray`, from an array that may change
            found.append(_BORROWED)
        children = [getattr(value, "fp", None)]
    for child in children:
        _add(found, child, depth + 1)


def _add_span(
    found: list[_Span], start: int, shape: Sequence[int], strides: Sequence[int], size: int
) -> None:
    if start and 0 not in shape:
        steps = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
        below, above = (sum(step for step in steps if (step < 0) is side) for side in (True, False))
        found.append((start + below, start + above + size))


_CHECKED = 64  # the first samples are all checked, later one in as many
_STRIKES = 4


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
        self._lock, self._apart, self._held = ProcessLock(), Apart(), threading.local()
        self._loaded = self._unchecked = self._strikes = 0
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
        samples = [] if one is not None else self._in_one(indices, state)
        samples = samples or self._apart.each(one or self._one, indices)
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
        self._strikes += 1
        if self._strikes >= _STRIKES:
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

    def _in_one(self, indices: Sequence[Any], state: RandomState | None) -> list[Any]:
        """The samples returned by one call of `__getitems__`; none if they must be loaded one by one."""
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
