"""Values as bytes that describe themselves; docs/format.md specifies them byte by byte.

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

from torchcache2.core.values import fields_of, is_key, is_namedtuple, is_node, one_of
from torchcache2.engine.values.kinds import (
    NODES,
    Image,
    Numbers,
    NumpyArray,
    NumpyScalar,
    TVTensor,
    closed,
    opened,
    thawed,
)
from torchcache2.engine.values.nodes import (
    Column,
    Packed,
    Permuted,
    Raw,
    Unstorable,
    bytes_of,
    dense,
    listed,
)
from torchcache2.files import classnames as classes
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError

__all__ = ["pack", "unpack"]

_VERSION = 1
_MAX_DEPTH = 100
_DTYPES = {
    str(value)[6:]: value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and not name.startswith("q")  # quantized tensors are refused
}
_NAMES = {dtype: name for name, dtype in reversed(_DTYPES.items())}
_CONTAINERS: dict[Any, bytes] = {list: b"l", tuple: b"t", dict: b"d", collections.OrderedDict: b"o"}
_TAGS: dict[Any, bytes] = {NumpyArray: b"A", NumpyScalar: b"G", Permuted: b"X", Image: b"P", TVTensor: b"V"}
_NUMBERS = {np.dtype(name).kind.encode(): name for name in Numbers.dtypes.values()}
_KINDS = {tag: kind for kind, tag in _TAGS.items()}
_SIZED = struct.Struct("<cI")
_INT = struct.Struct("<cq")
_FLOAT = struct.Struct("<cd")
_COMPLEX = struct.Struct("<cdd")


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises
    ------
    Unstorable
        If a part of it is of no known type, or if it is nested more than 100 deep.
    """
    out = bytearray([_VERSION])
    _write(out, value, 0)
    return bytes(out)


def _write(out: bytearray, value: Any, depth: int) -> None:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise Unstorable(f"nested more than {_MAX_DEPTH} deep")
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is int:
        if -(2**63) <= value < 2**63:
            out += _INT.pack(b"i", value)
        else:
            _sized(out, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out += _FLOAT.pack(b"f", value)
    elif kind is complex:
        out += _COMPLEX.pack(b"c", value.real, value.imag)
    elif kind is str:
        _sized(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _sized(out, b"b", value)
    elif kind is Raw:
        _raw(out, torch.from_numpy(np.array(value.array, order="C")))
    elif kind is torch.Tensor:
        axes, value = dense(value)
        if axes is None:
            _raw(out, value)
        else:
            _node(out, Permuted, axes, [value], depth)
    elif kind is Packed:
        _write(out, value.context, depth)
    else:
        _node(out, *opened(value), depth)


def _node(out: bytearray, kind: Any, context: Any, children: Any, depth: int) -> None:
    steps: Any = range(len(children))
    if kind is Numbers:
        data = children[0].array
        code = data.dtype.kind.encode()
        out += b"n" if context == "list" else b"u"
        _sized(out, code, data.tobytes())
        return
    if kind in (dict, collections.OrderedDict):
        out += _SIZED.pack(_CONTAINERS[kind], _count(len(children)))
        for key in context:
            if not is_key(key):
                raise Unstorable(f"a dict with a key of type {type(key).__qualname__}", "use texts as keys")
        steps, pairs = context, zip(context, children, strict=True)
    elif kind in (list, tuple):
        out += _SIZED.pack(_CONTAINERS[kind], _count(len(children)))
    elif kind in _TAGS:
        out += _TAGS[kind]
        _write(out, context, depth + 1)
        out.append(len(children))
    else:
        cls, context = (context, None) if kind is collections.namedtuple else (kind, thawed(context))
        out += b"C"
        _sized(out, b"s", classes.name_of(cls, "").encode())
        _write(out, fields_of(cls), depth + 1)
        _context(out, context, depth + 1)
        out += struct.pack("<I", _count(len(children)))
    is_mapping = kind in (dict, collections.OrderedDict)
    for step, child in pairs if is_mapping else zip(steps, children, strict=True):
        try:
            if is_mapping:
                _write(out, step, depth + 1)
            _write(out, child, depth + 1)
        except Unstorable as error:
            raise error.inside("" if kind in _TAGS else f"[{step!r}]") from None


def _context(out: bytearray, context: Any, depth: int) -> None:
    """What a node of somebody's keeps: values, lists and tuples of them, and classes."""
    if depth > _MAX_DEPTH:
        raise Unstorable(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(context, type):
        _sized(out, b"K", classes.name_of(context, "").encode())
    elif type(context) in (list, tuple):
        out += _SIZED.pack(_CONTAINERS[type(context)], len(context))
        for item in context:
            _context(out, item, depth + 1)
    else:
        _write(out, context, depth)


def _raw(out: bytearray, value: torch.Tensor) -> None:
    name = _NAMES[value.dtype].encode()
    out += struct.pack(f"<cB{len(name)}sB{value.dim()}Q", b"R", len(name), name, value.dim(), *value.shape)
    out += bytes_of(value).numpy().data


def _sized(out: bytearray, tag: bytes, data: bytes) -> None:
    out += _SIZED.pack(tag, _count(len(data)))
    out += data


def _count(count: int) -> int:
    if count >= 2**32:
        raise Unstorable("too large for a packed value: 4 GiB")
    return count


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
        if version > _VERSION:
            raise NewerFormatError(f"a packed value of version {version}")
        if version != _VERSION:
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
        if depth > _MAX_DEPTH:
            raise DamagedError(f"a packed value that is nested more than {_MAX_DEPTH} deep")
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
        if tag not in _KINDS:
            raise DamagedError("a packed value of no known kind")
        context = self.value(depth + 1)
        columns = [self.column(depth + 1) for _ in range(self.take(1)[0])]
        return closed(_KINDS[tag], context, columns, 1)

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
        if name not in _DTYPES:
            raise DamagedError("a tensor of no known dtype")
        dtype = _DTYPES[name]
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
    return is_node(cls) and not one_of(cls, (*_CONTAINERS, *NODES))


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
