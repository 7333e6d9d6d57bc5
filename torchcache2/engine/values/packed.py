"""`pack`: encodes a value of any kind as self-describing bytes; `unpack` decodes them.

docs/format.md specifies the bytes. `unpack` imports and calls nothing that they name, except pytree node
types that this process already has. It compares every count and size with the bytes left, so that memory is
bounded by the size of the input, and raises `DamagedError` for anything that no writer produces.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.core.rows import plain_bytes
from torchcache2.core.values import UnstorableError, fields_of, is_key, is_namedtuple, is_node, one_of
from torchcache2.engine.values import kinds
from torchcache2.engine.values.kinds import Packed, bytes_of, dense, tensor_of
from torchcache2.files import schema as classes

_VERSION = 1
_MAX_DEPTH = 100
_DTYPES = {
    str(value)[6:]: value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and not name.startswith("q")  # quantized tensors are refused
}
_NAMES = {dtype: name for name, dtype in reversed(_DTYPES.items())}
_MAPPINGS = (dict, collections.OrderedDict)
_CONTAINERS: dict[Any, bytes] = {list: b"l", tuple: b"t", dict: b"d", collections.OrderedDict: b"o"}
_TAGS: dict[Any, bytes] = {
    kinds.NumpyArray: b"A",
    kinds.NumpyScalar: b"G",
    kinds.Permuted: b"X",
    kinds.Image: b"P",
    kinds.TVTensor: b"V",
}
_NUMBERS = {np.dtype(name).kind.encode(): name for name in kinds.Numbers.dtypes.values()}
_KINDS = {tag: kind for kind, tag in {**_CONTAINERS, **_TAGS}.items()}
_LETTERS = {"none": b"N", "int": b"i", "float": b"f", "complex": b"c", "str": b"s", "bytes": b"b"}
_SIZED = struct.Struct("<cI")


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises
    ------
    UnstorableError
        If a part of it has an unknown type, or it is nested more than 100 deep.
    """
    out = bytearray([_VERSION])
    _write(out, value, 0)
    return bytes(out)


def _write(out: bytearray, value: Any, depth: int, *, in_context: bool = False) -> None:
    kind, plain = type(value), plain_bytes(value)
    if depth > _MAX_DEPTH:
        raise UnstorableError(f"nested more than {_MAX_DEPTH} deep")
    if kind is bool:
        out += b"T" if value else b"F"
    elif plain is not None:
        if kind in (str, bytes):
            _sized(out, _LETTERS[plain[0]], plain[1])
        else:
            out += _LETTERS[plain[0]] + plain[1]
    elif kind is int:
        _sized(out, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is Packed:
        _write(out, value.context, depth)
    elif in_context and isinstance(value, type):
        _sized(out, b"K", classes.name_of(value, "").encode())
    elif (node := kinds.opened(value)) is not None:
        _write_node(out, *node, depth, in_context)
    else:
        value = dense(value)
        name = _NAMES[value.dtype].encode()
        form = f"<cB{len(name)}sB{value.dim()}Q"
        out += struct.pack(form, b"R", len(name), name, value.dim(), *value.shape)
        out += bytes_of(value).numpy().data


def _write_node(out: bytearray, kind: Any, context: Any, children: Any, depth: int, in_context: bool) -> None:
    steps = context if kind in _MAPPINGS else range(len(children))
    if kind is kinds.Numbers:
        out += b"n" if context == "list" else b"u"
        _sized(out, children[0].array.dtype.kind.encode(), children[0].array.tobytes())
        return
    if kind in _CONTAINERS:
        out += _SIZED.pack(_CONTAINERS[kind], _count(len(children)))
        for key in steps if kind in _MAPPINGS else ():
            if not is_key(key):
                what = f"a dict with a key of type {type(key).__qualname__}"
                raise UnstorableError(what, "use texts as keys")
    elif kind in _TAGS:
        out += _TAGS[kind]
        _write(out, context, depth + 1)
        out.append(len(children))
    else:
        cls, context = (context, None) if kind is collections.namedtuple else (kind, context)
        out += b"C"
        _sized(out, b"s", classes.name_of(cls, "").encode())
        _write(out, fields_of(cls), depth + 1)
        _write(out, context, depth + 1, in_context=True)
        out += struct.pack("<I", _count(len(children)))
    for step, child in zip(steps, children, strict=True):
        try:
            if kind in _MAPPINGS:
                _write(out, step, depth + 1)
            _write(out, child, depth + 1, in_context=in_context)
        except UnstorableError as error:
            raise error.inside("" if kind in _TAGS else f"[{step!r}]") from None


def _sized(out: bytearray, tag: bytes, data: bytes) -> None:
    out += _SIZED.pack(tag, _count(len(data)))
    out += data


def _count(count: int) -> int:
    if count >= 2**32:
        raise UnstorableError("too large for a packed value: 4 GiB")
    return count


def unpack(data: bytes) -> Any:
    """The value, which shares no memory with the bytes.

    Raises
    ------
    DamagedError
        If no version of this library wrote the bytes.
    NewerFormatError
        If a later version wrote them.
    UnknownClassError
        If they name a class that is unknown in this process.
    """
    reader = _Reader(data)
    try:
        version = reader.take(1)[0]
        if version > _VERSION:
            raise NewerFormatError(f"a packed value of version {version}")
        if version != _VERSION:
            raise DamagedError("a packed value without a version")
        value = reader.value(0)
        if reader.position != len(data):
            raise DamagedError("extra bytes after a packed value")
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # sizes were checked, so a type refused its value
        raise DamagedError(f"not a packed value: {error!r}") from None
    return value


class _Reader:
    """Reads values from the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise DamagedError("a packed value that ends too early")
        return self.data[start : self.position]

    def unpack(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def count(self) -> int:
        count: int = self.unpack("<I")[0]
        return count

    def sized(self) -> bytes:
        return bytes(self.take(self.count()))

    def values(self, count: int, depth: int) -> list[Any]:
        if count > len(self.data) - self.position:  # each has at least a byte
            raise DamagedError("more values than bytes")
        return [self.value(depth) for _ in range(count)]

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise DamagedError(f"a packed value that is nested more than {_MAX_DEPTH} deep")
        tag = bytes(self.take(1))
        kind = _KINDS.get(tag)
        if tag in _SIMPLE:
            return _SIMPLE[tag](self)
        if kind in (list, tuple):
            return kind(self.values(self.count(), depth + 1))
        if kind in _MAPPINGS:
            count = self.count()
            items = self.values(2 * count, depth + 1)
            found = kind(zip(items[::2], items[1::2], strict=True)) if all(map(is_key, items[::2])) else {}
            if len(found) != count:
                raise DamagedError("two equal keys, or one of a type that keys do not have")
            return found
        if tag == b"R":
            return self.tensor()
        if tag == b"C":
            return self.node(depth)
        if kind is None:
            raise DamagedError("a packed value of no known kind")
        context = self.value(depth + 1)
        return kinds.closed(kind, context, [self.value(depth + 1) for _ in range(self.take(1)[0])])

    def numbers(self) -> list[Any]:
        code, data = bytes(self.take(1)), self.sized()
        if code not in _NUMBERS or (code == b"b" and data.translate(None, b"\0\1")):
            raise DamagedError("numbers of no known kind")
        numbers: list[Any] = np.frombuffer(data, _NUMBERS[code]).tolist()
        return numbers

    def tensor(self) -> Tensor:
        name, dims = bytes(self.take(self.take(1)[0])).decode(), self.take(1)[0]
        shape = self.unpack(f"<{dims}Q")
        if name not in _DTYPES:
            raise DamagedError("a tensor of no known dtype")
        dtype = _DTYPES[name]
        data = self.take(math.prod(shape) * dtype.itemsize)
        if dtype is torch.bool and bytes(data).translate(None, b"\0\1"):
            raise DamagedError("not a boolean")
        return tensor_of(data).view(dtype).view(shape)

    def node(self, depth: int) -> Any:
        name, fields, context = [self.value(depth + 1) for _ in range(3)]
        children = self.values(self.count(), depth + 1)
        cls = classes.class_of(name, _may_be_read)
        classes.check_fields(cls, name, fields, len(children))
        kind, context = (collections.namedtuple, cls) if is_namedtuple(cls) else (cls, context)
        return kinds.closed(kind, context, children)

    def large(self) -> int:
        value = int.from_bytes(self.sized(), "little", signed=True)
        if -(2**63) <= value < 2**63:
            raise DamagedError("a small number written as a large one")
        return value


def _may_be_read(cls: Any) -> bool:
    """Whether a node may have this class: a namedtuple, or a node type without a tag."""
    return is_namedtuple(cls) or (is_node(cls) and not one_of(cls, (*_CONTAINERS, *kinds.NODES)))


_SIMPLE: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda reader: None,
    b"T": lambda reader: True,
    b"F": lambda reader: False,
    b"i": lambda reader: reader.unpack("<q")[0],
    b"I": _Reader.large,
    b"f": lambda reader: reader.unpack("<d")[0],
    b"c": lambda reader: complex(*reader.unpack("<dd")),
    b"s": lambda reader: reader.sized().decode("utf-8", "surrogatepass"),
    b"b": _Reader.sized,
    b"n": _Reader.numbers,
    b"u": lambda reader: tuple(reader.numbers()),
    b"K": lambda reader: classes.class_of(reader.sized().decode(), classes.is_storable),
}
