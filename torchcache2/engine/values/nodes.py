"""What a sample is made of besides containers: leaves, and the nodes around them that only schemas name.

A leaf is a dense tensor on the CPU, a number of 64 bits, a text, bytes or None. Arrays of numpy, images of
PIL, tv_tensors and lists of numbers are nodes around a tensor. Their types are the classes that are made with
`node_type`, which registers them with torch's pytrees under names that files have: docs/format.md specifies
them. No class of another library is registered.

Values come apart one by one, and are put together column by column, so that a batch costs few steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchcache2.core import values
from torchcache2.core.keys import Array
from torchcache2.core.memory import as_bytes
from torchcache2.core.values import has_attributes, node_type
from torchcache2.files import classnames as classes
from torchcache2.files.errors import DamagedError, UnknownClassError

__all__ = [
    "COMMON",
    "Column",
    "Node",
    "Opened",
    "Packed",
    "Permuted",
    "Placed",
    "Raw",
    "Unstorable",
    "advice",
    "axes_of",
    "bytes_of",
    "dense",
    "imported",
    "inverse",
    "is_plain",
    "listed",
    "node_type",
    "strange",
]

Column = Any  # of n values: a list of them, or a tensor (n, *shape) on the CPU
Opened = tuple[Any, Any, Sequence[Any]]  # the type of a node, its context, and its children

COMMON = frozenset(  # dtypes that torch copies
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    ]
)
_LARGE = 16 << 10  # bytes of a tensor
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Unstorable(Exception):  # noqa: N818
    """A value that cannot be kept.

    Attributes
    ----------
    what, advice : str
        What it is, and what to return in its place, where ``{}`` stands for it; the advice may be empty.
    path : str
        Where it is in the sample, as in ``['image'][0]``.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        self.what, self.advice, self.path = what, advice, ""

    def inside(self, step: str) -> Unstorable:
        """The same, seen from the value around it."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        place = f"sample{self.path}"
        return f"{place} is {self.what}, which cannot be cached{advice.replace('{}', place)}"


class Raw:
    """An array that is stored as a tensor of a dtype."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: Array, dtype: torch.dtype) -> None:
        self.array, self.dtype = array, dtype


class Node(values.Node):
    """A node type around the leaves of a value; values come apart one by one, and are made by columns."""

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """The values with these children."""
        raise NotImplementedError


@node_type
class Packed(Node):
    """A value as bytes; see `torchcache2.engine.values.packed`. As a child it stands for its `context`."""

    __module__ = "torchcache2.datasets.nodes"  # the name that files have


@node_type
class Placed(Node):
    """A tensor on the device of the call; the context is None."""

    __module__ = "torchcache2.datasets.nodes"  # the name that files have


@node_type
class Permuted(Node):
    """A tensor whose dimensions lie in memory in another order; the context is that order."""

    __module__ = "torchcache2.datasets.nodes"  # the name that files have

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Tensors with the strides that they had."""
        (column,) = columns
        order = inverse(context, column.dim() - 1)
        return [value.permute(order) for value in listed(column)]


def listed(column: Column) -> list[Any]:
    """The values of a column; each tensor has its own memory.

    The worker of a `DataLoader` is about to put the samples together, and does not keep them: there, large
    ones have each a storage of their own in the column's memory, which goes with the last of them.
    """
    if type(column) is list:
        return column
    if column.dtype in COMMON:
        is_large = column.nbytes >= _LARGE * len(column) > 0 and column.dtype != torch.bfloat16
        if is_large and column.is_contiguous() and get_worker_info() is not None:
            return list(map(torch.from_numpy, column.numpy()))
        rows: Any = torch.unbind_copy(column)  # type: ignore[func-returns-value]
        return list(rows)
    # Torch cannot copy all dtypes, but it can copy their bytes.
    dtype, shape = column.dtype, column.shape[1:]
    return [row.clone().view(dtype).view(shape) for row in as_bytes(column).unbind(0)]


def dense(value: Tensor) -> tuple[tuple[int, ...] | None, Tensor]:
    """A contiguous tensor with the same elements, and the order of dimensions for `Permuted`, if it has one.

    `Unstorable` if the tensor is not simply an array on the CPU.
    """
    if value.requires_grad:
        raise Unstorable("a tensor that requires gradients", "return {}.detach()")
    if not value.is_cpu:
        raise Unstorable(f"a tensor on {value.device}", "return it on the CPU, and move batches afterwards")
    if value.is_nested or value.is_quantized or value.layout != torch.strided:
        raise Unstorable("a tensor that is not dense", "return a dense one")
    if has_attributes(value):
        raise Unstorable("a tensor with attributes of its own", "return {}.clone()")
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.is_contiguous():
        return None, value
    axes = axes_of(value.stride())
    if value.permute(axes).is_contiguous():
        return axes, value.permute(axes)
    return None, value.contiguous()


def bytes_of(value: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 ``(bytes,)``, without a copy."""
    # A tensor of one element is contiguous whatever its strides are.
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def axes_of(strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions in the order in which they lie in memory, the widest stride first."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def inverse(axes: Any, dims: int) -> list[int]:
    """The dimensions that bring those back in order which `axes_of` has put in another one."""
    if type(axes) is not tuple or sorted(axes) != list(range(dims)):
        raise DamagedError("dimensions in no order")
    return sorted(range(dims), key=axes.__getitem__)


def is_plain(value: Any, depth: int = 8) -> bool:
    """Whether a value is a number, a text, bytes or None, or a tuple, list or dict of such values."""
    kind = type(value)
    if kind in (tuple, list):
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    if kind is dict:
        return depth > 0 and all(is_plain(item, depth - 1) for pair in value.items() for item in pair)
    return kind in _PLAIN


def imported(name: str) -> Any:
    """The module; `UnknownClassError` if it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UnknownClassError(name, "is not installed") from None


def strange(value: Any) -> Unstorable:
    """The error for a value of a type that cannot be kept."""
    return Unstorable(f"a {classes.qualified(type(value))}", advice(value))


def advice(value: Any) -> str:
    """What to return in place of a value that cannot be kept, which is called ``{}``."""
    if isinstance(value, Tensor):
        return "return {}.detach().as_subclass(torch.Tensor)"
    if isinstance(value, np.ndarray):
        return "return numpy.array({})"
    if isinstance(value, Mapping):
        return "return dict({})"
    if isinstance(value, (set, frozenset, range, Iterator)):
        return "return list({})"
    if hasattr(type(value), "__dataclass_fields__"):
        return "return dataclasses.asdict({})"
    for base in (bool, int, float, str, bytes, tuple):
        if isinstance(value, base):
            return f"return {base.__name__}({{}})"
    return "return tensors, arrays, images, numbers, texts, and tuples, lists and dicts of them"
