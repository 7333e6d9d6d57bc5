"""Arrays and scalars of numpy, and lists of numbers, as nodes around a tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from torchcache2.core.arrays import Array
from torchcache2.engine.values.nodes import (
    Column,
    Node,
    Opened,
    Raw,
    Unstorable,
    axes_of,
    inverse,
    node_type,
    strange,
)
from torchcache2.files.errors import DamagedError

__all__ = ["NATIVE", "Numbers", "NumpyArray", "NumpyScalar"]

NATIVE = {  # dtypes of numpy that torch has
    np.dtype(kind).str: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in ("?", "b", "B", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
}
_CHARS = {np.dtype(name).char: name for name in NATIVE}
_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?|[ilqILQ]")


@node_type
class NumpyArray(Node):
    """A numpy array; the context is its dtype, or a tuple of that and the order of dimensions in memory."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    @classmethod
    def opened(cls, value: Array) -> Opened:
        """The dtype, and the array as one that torch has."""
        name, is_native = _dtype_name(value.dtype)
        context: Any = name
        if not value.flags.c_contiguous:
            axes = axes_of(value.strides)
            if value.transpose(axes).flags.c_contiguous:
                context, value = (name, axes), value.transpose(axes)
        return cls, context, [_raw(value, is_native)]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Arrays that own their memory."""
        name, axes = context if type(context) is tuple else (context, None)
        data = cls.batched(name, *columns)
        arrays = [data[i, ...].copy() for i in range(len(data))]
        if axes is None:
            return arrays
        order = inverse(axes, data.ndim - 1)
        return [array.transpose(order) for array in arrays]

    @staticmethod
    def batched(context: Any, column: Column) -> Array:
        """One array with a row for each item, which shares memory with the column."""
        return _of_dtype(column, context)


@node_type
class NumpyScalar(Node):
    """A scalar of numpy; the context is its dtype, or ``U`` or ``S`` for a text or bytes."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The dtype, and a 0-d array; texts and bytes are leaves."""
        if type(value) is np.str_:
            return cls, "U", [str.__str__(value)]  # `str(value)` drops zeros at the end
        if type(value) is np.bytes_:
            return cls, "S", [bytes(value)]
        array = np.asarray(value)
        if array.dtype.type is not type(value):
            raise strange(value)
        name, is_native = _dtype_name(array.dtype)
        return cls, name, [_raw(array, is_native)]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Scalars."""
        (column,) = columns
        if context in ("U", "S"):
            kind, scalar = (str, np.str_) if context == "U" else (bytes, np.bytes_)
            if type(column) is not list or not all(type(value) is kind for value in column):
                raise DamagedError("another leaf than a text of numpy has")
            return list(map(scalar, column))
        data = _of_dtype(column, context)
        if data.ndim != 1:
            raise DamagedError("a scalar that is none")
        return list(data)


@node_type
class Numbers(Node):
    """A list or tuple of numbers of one type; the context says which of the two."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    dtypes: ClassVar[dict[type, str]] = {int: "<i8", float: "<f8", bool: "|b1", complex: "<c16"}

    @classmethod
    def opened(cls, value: Any) -> Opened | None:
        """One array; None if not all items are numbers of one type, or if one has more than 64 bits."""
        dtype = cls.dtypes.get(type(value[0])) if value else None
        if dtype is None or len(set(map(type, value))) > 1:
            return None
        try:
            array = np.array(value, dtype)
        except OverflowError:
            return None
        return cls, type(value).__name__, [Raw(array, NATIVE[dtype])]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Lists or tuples."""
        (column,) = columns
        data = column.numpy()
        if data.ndim != 2 or data.dtype.str not in cls.dtypes.values() or context not in ("list", "tuple"):
            raise DamagedError("numbers that are none")
        lists: list[Any] = data.tolist()
        return lists if context == "list" else list(map(tuple, lists))


def _dtype_name(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """The name of a dtype in a context, and whether torch has the dtype."""
    if dtype.isnative and dtype.char in _CHARS and not dtype.metadata:
        return _CHARS[dtype.char], True
    if dtype.kind not in "biufcmMSU" or dtype.itemsize == 0 or dtype.metadata:
        raise Unstorable(f"an array of {dtype}", "return a dict or a list of its parts")
    # Two types of integers may have the same size and the same name; a character tells them apart.
    is_native = dtype.str in NATIVE
    return dtype.char if is_native else dtype.str, is_native


def _raw(array: Array, is_native: bool) -> Raw:
    if is_native:
        name = _CHARS.get(array.dtype.char)
        if name is None:
            name = array.dtype.str
            array = array.view(name)
        return Raw(array, NATIVE[name])
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Raw(data.reshape(*array.shape, array.dtype.itemsize), torch.uint8)


def _of_dtype(column: Column, name: Any) -> Array:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise DamagedError("a dtype that is none")
    data: Array = column.numpy()
    dtype = np.dtype(name)
    if dtype.str in NATIVE:
        if data.dtype != dtype:
            raise DamagedError("an array of another dtype")
        return data.view(dtype)
    if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] != dtype.itemsize:
        raise DamagedError("an array of another size")
    return data.view(dtype)[..., 0]
