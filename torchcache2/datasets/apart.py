"""`Apart`: loads samples so that each stays what it was, although the next may be made in its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.private import pytree
from torchcache2.engine.values.samples import Samples, from_rows
from torchcache2.files.errors import UnreadableError

_FIRST = 64  # samples that are copied in any case
_DEEPEST = 100
_IMMUTABLE = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device])
_Span = tuple[int, int]  # the first byte, and the one behind the last
_BORROWED = (-1, 0)  # stands for memory that nobody knows


class Apart:
    """Loads samples one by one.

    A function may fill one buffer again and again, so the first samples are copied before the next is loaded.
    Once some samples have shared memory, all later ones are copied. Others are returned as they are.

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

        If samples share memory for the first time after many did not, it is called once more for each index.
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
    """The same sample in memory of its own, in a list that is empty if it cannot be stored, or read."""
    try:
        return [found for _, rows in Samples().to_rows([sample]).parts for found in from_rows(rows)]
    except UnreadableError:
        return []


def share_memory(indices: Iterable[Any], samples: Iterable[Any]) -> bool:
    """Whether samples of different indices have a byte of a tensor or an array, or an object, in common."""
    spans: list[tuple[int, int, int]] = []
    numbers: dict[Any, int] = {}
    for index, sample in zip(indices, samples, strict=True):
        found: list[_Span] = []
        _add(found, sample, 0)
        number = numbers.setdefault(index, len(numbers))
        spans += [(start, end, number) for start, end in found]
    last, owner = -2, -1
    for start, end, number in sorted(spans):
        if start < last and number != owner:
            return True
        last, owner = max(last, end), number
    return False


def _add(found: list[_Span], value: Any, depth: int) -> None:
    """Add the places in memory that decide what a value is."""
    kind = type(value)
    children: Any = ()
    if kind in _IMMUTABLE or isinstance(value, np.generic) or depth > _DEEPEST:
        return
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            size = value.element_size()
            _add_span(found, value.data_ptr(), value.shape, [size * step for step in value.stride()], size)
        return
    if isinstance(value, np.ndarray):
        _add_span(found, value.ctypes.data, value.shape, value.strides, value.itemsize)
        return
    if not isinstance(value, tuple):
        found.append((id(value), id(value) + 1))
    if isinstance(value, (tuple, list)):
        children = () if _IMMUTABLE.issuperset(map(type, value)) else value
    elif isinstance(value, dict):
        children = value.values()
    elif kind in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    elif (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
        if value.readonly:  # as made by `fromarray`, of an array that may change
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
