"""Reads the bytes that `torchcache2.engine.values.packed` writes.

Nothing that the bytes name is imported or called, but for node types of pytrees that this process has. Every
count and size is compared with the bytes that are left, so that memory is bounded by the size of the input,
and whatever no writer writes is a `DamagedError`.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchcache2.core.values import is_key, is_namedtuple, is_node, one_of
from torchcache2.engine.values.arrays import Numbers
from torchcache2.engine.values.nodes import Column, listed
from torchcache2.engine.values.packed import CONTAINERS, DTYPES, MAX_DEPTH, OURS, VERSION
from torchcache2.engine.values.trees import NODES, closed
from torchcache2.files import classnames as classes
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError

__all__ = ["unpack"]

_NUMBERS = {np.dtype(name).kind.encode(): name for name in Numbers.dtypes.values()}
_OURS = {tag: kind for kind, tag in OURS.items()}


def unpack(data: bytes) -> Any:
    """The value, which shares no memory with the bytes.

    Raises
    ------
    DamagedError
        If no version of this library wrote the bytes.
    NewerFormatError
        If a later version has written them.
    UnknownClassError
        If they name a class that this process does not have.
    """
    reader = _Reader(data)
    try:
        version = reader.take(1)[0]
        if version > VERSION:
            raise NewerFormatError(f"a packed value of version {version}")
        if version != VERSION:
            raise DamagedError("a packed value without a version")
        (value,) = listed(reader.column(0))
        if reader.position != len(data):
            raise DamagedError("bytes behind a packed value")
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # sizes were checked, so this is a value that its own type refuses
        raise DamagedError(f"a packed value that is none: {error!r}") from None
    return value


class _Reader:
    """Reads values from the front of some bytes. Each is given as a column of one value."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        end = self.position + size
        if end > len(self.data):
            raise DamagedError("a packed value that ends too early")
        start, self.position = self.position, end
        return self.data[start:end]

    def unpack(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def sized(self) -> memoryview:
        return self.take(self.unpack("<I")[0])

    def value(self, depth: int) -> Any:
        return listed(self.column(depth))[0]

    def values(self, count: int, depth: int) -> list[Any]:
        if count > len(self.data) - self.position:  # each has a byte at least
            raise DamagedError("more values than bytes")
        return [self.value(depth) for _ in range(count)]

    def column(self, depth: int) -> Column:
        if depth > MAX_DEPTH:
            raise DamagedError(f"a packed value that is nested more than {MAX_DEPTH} deep")
        tag = bytes(self.take(1))
        simple = _SIMPLE.get(tag)
        if simple is not None:
            return [simple(self)]
        if tag in (b"l", b"t"):
            items = self.values(self.unpack("<I")[0], depth + 1)
            return [items if tag == b"l" else tuple(items)]
        if tag in (b"d", b"o"):
            (count,) = self.unpack("<I")
            items = self.values(2 * count, depth + 1)
            if not all(map(is_key, items[::2])):
                raise DamagedError("a key of a type that keys do not have")
            kind = dict if tag == b"d" else collections.OrderedDict
            found = kind(zip(items[::2], items[1::2], strict=True))
            if len(found) != count:
                raise DamagedError("two equal keys")
            return [found]
        if tag in (b"n", b"u"):
            return self.numbers("list" if tag == b"n" else "tuple")
        if tag == b"R":
            return self.raw()
        if tag == b"C":
            return self.node(depth)
        if tag not in _OURS:
            raise DamagedError("a packed value of no known kind")
        context = self.value(depth + 1)
        columns = [self.column(depth + 1) for _ in range(self.take(1)[0])]
        return closed(_OURS[tag], context, columns, 1)

    def numbers(self, context: str) -> list[Any]:
        code, data = bytes(self.take(1)), self.sized()
        if code not in _NUMBERS:
            raise DamagedError("numbers of no known kind")
        if code == b"b":
            _check_booleans(data)
        numbers = np.frombuffer(data, _NUMBERS[code]).tolist() if len(data) else []
        return [numbers if context == "list" else tuple(numbers)]

    def raw(self) -> torch.Tensor:
        name, dims = bytes(self.take(self.take(1)[0])).decode(), self.take(1)[0]
        shape = self.unpack(f"<{dims}Q")
        if name not in DTYPES:
            raise DamagedError("a tensor of no known dtype")
        dtype = DTYPES[name]
        data = self.take(math.prod(shape) * dtype.itemsize)
        if len(data) == 0:
            return torch.empty((1, *shape), dtype=dtype, device="cpu")
        if dtype is torch.bool:
            _check_booleans(data)
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).view(1, *shape)

    def node(self, depth: int) -> list[Any]:
        name, fields, context = [self.value(depth + 1) for _ in range(3)]
        children = self.values(self.unpack("<I")[0], depth + 1)
        cls = classes.class_of(name, _may_be_read)
        classes.check_fields(cls, name, fields, len(children))
        kind, context = (collections.namedtuple, cls) if is_namedtuple(cls) else (cls, context)
        return closed(kind, context, [[child] for child in children], 1)

    def number(self) -> int:
        data = self.sized()
        value = int.from_bytes(data, "little", signed=True)
        if -(2**63) <= value < 2**63:
            raise DamagedError("a large number that is small")
        return value


def _check_booleans(data: memoryview) -> None:
    if len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise DamagedError("a boolean that is none")


def _may_be_read(cls: Any) -> bool:
    """Whether a class may be that of a node: a namedtuple, or a node type that has no tag."""
    if is_namedtuple(cls):
        return True
    return is_node(cls) and not one_of(cls, (*CONTAINERS, *NODES))


_SIMPLE: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda reader: None,
    b"T": lambda reader: True,
    b"F": lambda reader: False,
    b"i": lambda reader: reader.unpack("<q")[0],
    b"I": _Reader.number,
    b"f": lambda reader: reader.unpack("<d")[0],
    b"c": lambda reader: complex(*reader.unpack("<dd")),
    b"s": lambda reader: bytes(reader.sized()).decode("utf-8", "surrogatepass"),
    b"b": lambda reader: bytes(reader.sized()),
    b"K": lambda reader: classes.class_of(bytes(reader.sized()).decode(), classes.is_storable),
}
