"""Canonical bytes of values, and digests of tensors.

`Encoder` writes a Python value as bytes that are equal exactly if type and value are: each value has a type
tag and, if its length varies, a length, so that no two values run together. The bytes do not depend on the
process, the platform, or the version of Python or torch. Subclasses encode tensors and unknown values in the
hooks `tensor` and `other`.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import marshal
import pathlib
import re
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from torchcache2.core.memory import is_channels_last, item_bytes
from torchcache2.core.values import attributes
from torchcache2.identity.sourcecode import is_builtin
from torchcache2.identity.xxh3 import DIGESTS

_OURS = __name__.partition(".")[0]
_PRINTED = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    range,
    type(Ellipsis),
    type(NotImplemented),
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.timedelta,
    datetime.timezone,
    uuid.UUID,
    pathlib.PurePath,
)
# Classes of plain values in these packages add neither state nor a user's code to the value.
_STANDARD = frozenset(
    (*("builtins", "datetime", "decimal", "fractions", "pathlib", "uuid"), *("numpy", "pandas", "torch"))
)


class UnencodableError(Exception):
    """A value without canonical bytes, at `path`."""

    def __init__(self, path: str, value: object, reason: str = "") -> None:
        super().__init__(path, value, reason)
        self.path = path
        self.value = value
        self.reason = reason


def digest(parts: Iterable[bytes]) -> bytes:
    """xxh3-128 over length-prefixed parts, 16 bytes."""
    return xxh3_128_digest(b"".join(map(sized, parts)))


def qualified_name(obj: Any) -> str:
    """``module.qualname`` of a class or function; see `public_module`."""
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", type(obj).__qualname__)
    module = str(getattr(obj, "__module__", None) or "")  # in some metaclasses this is a descriptor
    return f"{public_module(module)}.{name}"


def public_module(name: str) -> str:
    """The module name used in keys: moving files of this library must not change keys."""
    return _OURS if name.startswith(f"{_OURS}.") else name


def tensor_digest(tensor: Tensor, content: bytes | None = None) -> bytes:
    """Digest of a whole strided tensor: dtype, shape, content, and whether channels are last, 16 bytes.

    The output of a convolution has the memory format of its weights. `content` is the digest of the content,
    if known.
    """
    is_last = tensor.dim() in (4, 5) and is_channels_last(tensor)
    head = f"{tensor.dtype} {tuple(tensor.shape)}{' channels last' * is_last}".encode()
    if content is None and tensor.device.type != "cpu":
        content = DIGESTS.of_tensors([tensor]).get(id(tensor))
    if content is None:
        content = xxh3_128_digest(item_bytes(tensor.reshape(1, -1)).cpu().numpy()[0])
    return digest([head, content])


def dtype_text(value: Any) -> str:
    """The dtype of a NumPy array or scalar, with byte order and names of fields."""
    return str(value.dtype.descr if value.dtype.names else value.dtype.str)


def sized(data: bytes) -> bytes:
    """Bytes with their length in front."""
    return struct.pack("<Q", len(data)) + data


def _field(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # raised by a property
        return attributes(value).get(name)


def _is_standard(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _STANDARD


def besides_value(value: Any) -> dict[str, Any]:
    """The attributes of an object except its plain value and caches of it, such as a path's."""
    state = attributes(value)
    if isinstance(value, enum.Enum):
        return {name: one for name, one in state.items() if not (name[:1] == name[-1:] == "_")}
    if isinstance(value, (datetime.time, np.generic, *_PRINTED)):
        base = next(base for base in type(value).__mro__ if _is_standard(base))
        return {name: one for name, one in state.items() if not hasattr(base, name)}
    return state


class Encoder:
    """Canonical bytes of values; subclasses decide about tensors and unknown objects."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # ids of containers being encoded, with their depth

    def encode(self, value: Any, path: str) -> bytes:
        """The bytes of `value`, met at `path`."""
        kind = type(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        if isinstance(value, Tensor):
            return b"T" + sized(self.tensor(value, path))
        if id(value) in self._open:
            return self.inside_itself(value, path)
        self._open[id(value)] = len(self._open)
        try:
            return self._encode_compound(value, kind, path)
        finally:
            del self._open[id(value)]

    def tensor(self, value: Tensor, path: str) -> bytes:
        """Bytes that stand for a tensor; by default its content."""
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
            raise UnencodableError(path, value, kind)
        return tensor_digest(value)

    def inside_itself(self, value: Any, path: str) -> bytes:
        """Bytes for a container that contains itself; by default how many levels up it is."""
        return b"^" + text_bytes(str(len(self._open) - self._open[id(value)]))

    def kind(self, kind: type, path: str) -> bytes:
        """Bytes that stand for a class; by default its name."""
        return text_bytes(qualified_name(kind))

    def other(self, value: Any, path: str) -> bytes:
        """Bytes of a value of unknown type; by default raises `UnencodableError`."""
        raise UnencodableError(path, value)

    def items(self, pairs: Iterable[tuple[Any, str]]) -> bytes:
        """The bytes of several values, each with its path."""
        encoded = [sized(self.encode(value, path)) for value, path in pairs]
        return struct.pack("<Q", len(encoded)) + b"".join(encoded)

    def _encode_compound(self, value: Any, kind: type, path: str) -> bytes:
        if kind in (np.ndarray, np.memmap):
            if value.dtype.hasobject:
                fields = text_bytes(dtype_text(value)) if value.dtype.names else b""
                return b"O" + fields + self.items([(value.shape, path), (value.tolist(), path)])
            head = text_bytes(f"{dtype_text(value)} {value.shape}")
            whole = np.ascontiguousarray(value).reshape(-1)
            return b"A" + head + xxh3_128_digest(whole.view(np.uint8).data if whole.nbytes else b"")
        if isinstance(value, np.generic):
            data = b"g" + text_bytes(dtype_text(value)) + value.tobytes()
            return data + self._of_subclass(value, kind, path)
        if isinstance(value, enum.Enum):
            name = text_bytes(value.name or "")  # combined flags have none
            data = b"e" + self.kind(kind, path) + name + self.encode(value.value, path)
            return data + (self.besides(value, path) if besides_value(value) else b"")
        if isinstance(value, slice):
            return b"l" + self.items([(value.start, path), (value.stop, path), (value.step, path)])
        if isinstance(value, re.Pattern):
            return b"x" + self.items([(value.pattern, path), (value.flags, path)])
        if kind.__module__ == "_regex" and kind.__name__ == "Pattern":  # of the regex package
            parts = [(value.pattern, path), (value.flags, path), (value.named_lists, path)]
            return b"x" + self.items(parts) + self.kind(kind, path)
        if isinstance(value, (datetime.datetime, datetime.time)):
            details = f"{value.isoformat()} {value.fold} {value.tzinfo!r}"
            data = b"p" + text_bytes(kind.__name__) + text_bytes(details)
            return data + self._of_subclass(value, kind, path)
        if isinstance(value, _PRINTED):
            data = b"p" + text_bytes(kind.__name__) + text_bytes(str(value))
            return data + self._of_subclass(value, kind, path)
        if isinstance(value, type) and kind is not types.GenericAlias and is_builtin(value):
            return b"k" + text_bytes(value.__qualname__)
        tag = _CONTAINERS.get(kind)
        if tag is None:
            return self.compound(value, kind, path)
        return tag + self.contents(value, path)

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Bytes of a subclass of a container, a dataclass, or another object."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = self.fields(value, path)
            pairs = [(item, f"{path}.{name}") for name, item in fields.items()]
            head = self.kind(kind, path) + text_bytes(" ".join(fields))
            return b"D" + head + self.items(pairs) + self.besides(value, path)
        for base, plain in _SIMPLE.items():
            if isinstance(value, base):
                content = _PLAIN[base](value) if base in _PLAIN else base(value)
                return b"C" + self.kind(kind, path) + plain(content) + self.besides(value, path)
        if isinstance(value, deque):
            data = b"q" + self.kind(kind, path) + self.items([(value.maxlen, path), (list(value), path)])
            return data + (b"" if kind is deque else self.besides(value, path))
        for base, tag in _CONTAINERS.items():
            if isinstance(value, base):
                head = self.kind(kind, path) + text_bytes(" ".join(getattr(kind, "_fields", ())))
                return b"C" + head + tag + self.contents(value, path) + self.besides(value, path)
        return self.other(value, path)

    def fields(self, value: Any, path: str) -> dict[str, Any]:
        """The fields of a dataclass by name."""
        return {field.name: _field(value, field.name) for field in dataclasses.fields(value)}

    def besides(self, value: Any, path: str) -> bytes:
        """The bytes of attributes that a container or dataclass has besides its content."""
        fields = getattr(type(value), "__dataclass_fields__", ())
        state = {name: item for name, item in besides_value(value).items() if name not in fields}
        return self.encode(state, path) if state else b""

    def _of_subclass(self, value: Any, kind: type, path: str) -> bytes:
        """The code and attributes that a user's subclass adds to a plain value."""
        if _is_standard(kind):
            return b""
        return self.kind(kind, path) + self.besides(value, path)

    def contents(self, value: Any, path: str) -> bytes:
        """The bytes of a container's elements."""
        if isinstance(value, (dict, types.MappingProxyType)):
            pairs = []
            for number, (key, element) in enumerate(plain_dict(value).items()):
                place = f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[… {number}]"
                pairs += [(key, place), (element, place)]
            return self.items(pairs)
        if isinstance(value, (set, frozenset)):
            elements = sorted(self.encode(element, f"{path}{{…}}") for element in list(value))
            return b"".join(map(sized, elements))
        return self.items([(element, f"{path}[{i}]") for i, element in enumerate(list(value))])


def plain_dict(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a dict of any class holds, whatever its methods say; a copy, as other threads may add elements."""
    if isinstance(value, OrderedDict):  # its order may differ from that of its underlying dict
        return dict(OrderedDict.items(value))
    return dict(dict.items(value) if isinstance(value, dict) else value)


# The containers and values whose subclasses `Encoder.compound` can read.
CONTAINERS = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, deque)
_CONTAINERS: dict[type, bytes] = {
    tuple: b"(",
    list: b"[",
    dict: b"{",
    set: b"<",
    frozenset: b">",
    types.MappingProxyType: b"|",
}


def text_bytes(text: str) -> bytes:
    """A text with its length in front."""
    return sized(text.encode("utf-8", "surrogatepass"))


# Convert a subclass to its plain value, ignoring the conversions that it defines.
_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
_SIMPLE: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"n",
    bool: lambda value: b"b1" if value else b"b0",
    int: lambda value: b"i" + text_bytes(f"{value:x}"),
    float: lambda value: b"f" + struct.pack("<d", value),
    complex: lambda value: b"c" + struct.pack("<dd", value.real, value.imag),
    str: lambda value: b"s" + text_bytes(value),
    bytes: lambda value: b"y" + sized(value),
    bytearray: lambda value: b"Y" + sized(bytes(value)),
}


UNCOUNTED = (str, int, float, bytes)  # read so quickly that a walk may meet any number of them
_LONG = (list, tuple, dict, set, frozenset, defaultdict, OrderedDict)
_SHORT = 1000
_DEEPEST = 10
_CHUNK = 8192
# The last version of the `marshal` format that ignores reference counts. It distinguishes the types of
# `_PLAIN_TYPES`, and has lengths, so that no two values run together.
_VERSION = 2
_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes))
_PATHS = frozenset((pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath))
_SCALARS = frozenset(np.dtype(code).type for code in "?bBhHiIlLqQefdFDSUMm")  # each has the stated length


class Bulk:
    """Reads long containers of plain values.

    They may hold paths, NumPy scalars, and containers of the types `held`. Reads them only if an `Encoder`
    would in all have met more than `least` objects one by one.
    """

    def __init__(self, least: int, held: Collection[type]) -> None:
        self._least = least
        self._held = frozenset(held)
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id; holding the container keeps its id unique

    def read(self, value: Any, objects: int) -> bytes | None:
        """The bytes of a container's elements; None if they must be read one by one.

        `objects` is how many were met before. The bytes differ if a type, a value or the order does, and are
        equal in every process and version of Python.
        """
        if type(value) not in _LONG or len(value) < _SHORT:
            return None
        if id(value) not in self._known:
            elements = list(chain.from_iterable(value.items()) if isinstance(value, dict) else value)
            is_set = isinstance(value, (set, frozenset))
            parts: list[bytes] = []
            for start in range(0, len(elements), _CHUNK):
                chunk = elements[start : start + _CHUNK]
                count, has_others = self._census(chunk)
                if count is None:
                    return None
                objects += count
                plain = [*map(_stand_in, chunk)] if has_others or is_set else chunk
                try:
                    data = [marshal.dumps(one, _VERSION) for one in (plain if is_set else [plain])]
                except ValueError:  # a text of 2 GB
                    return None
                parts += map(xxh3_128_digest, data)
            if objects <= self._least:
                return None
            data = [b"in bulk ", struct.pack("<Q", len(value)), digest(sorted(parts) if is_set else parts)]
            self._known[id(value)] = value, b"".join(data)
        return self._known[id(value)][1]

    def _census(self, level: list[Any]) -> tuple[int | None, bool]:
        """How many elements are not `UNCOUNTED`, and whether there are paths or NumPy scalars among them.

        The count is None if something cannot be read in bulk.
        """
        objects, has_others = 0, False
        for _ in range(_DEEPEST):
            kinds = Counter(map(type, level))
            others = kinds.keys() - _PLAIN_TYPES - self._held
            if not others <= _PATHS | _SCALARS:
                return None, True
            has_others = has_others or bool(others)
            objects += sum(count for kind, count in kinds.items() if not issubclass(kind, UNCOUNTED))
            if kinds.keys().isdisjoint(self._held):
                return objects, has_others
            inner = [one for one in level if type(one) in self._held]
            level = list(chain.from_iterable(inner))
            level += chain.from_iterable([one.values() for one in inner if type(one) is dict])
        return None, True  # too deep, or a container that holds itself


def _stand_in(value: Any) -> Any:
    """A substitute that `marshal` can write: the ellipsis (no plain value is one), type and value."""
    write = _WRITERS.get(type(value))
    return value if write is None else write(value)


_WRITERS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: tuple(map(_stand_in, value)),
    list: lambda value: [*map(_stand_in, value)],
    # A dict as a list, because substitutes of different keys might be equal.
    dict: lambda value: (..., "dict", [*map(_stand_in, chain.from_iterable(value.items()))]),
    **dict.fromkeys(_PATHS, lambda value: (..., type(value).__name__, str(value))),
    **dict.fromkeys(_SCALARS, lambda value: (..., dtype_text(value), value.tobytes())),
}


INNER = "in "  # prefix of the path of a value inside an object or dict, in the texts for people
_MOST_SHOWN = 200
# A part of a walk with such a name is a single value.
_PLAIN_PARTS = (
    *("attribute ", "child ", "closure ", "default ", "global ", "option "),
    *("training", "value "),
)
_LABELS = (b"class ", b"function ", b"module ")  # of values with a part of their own
_SHOWN: dict[bytes, Callable[[bytes], str]] = {
    b"n": lambda rest: "None",
    b"b": lambda rest: str(rest == b"1"),
    b"i": lambda rest: str(int(rest[8:], 16)),
    b"f": lambda rest: repr(struct.unpack("<d", rest)[0]),
    b"c": lambda rest: repr(complex(*struct.unpack("<dd", rest))),
    b"s": lambda rest: repr(rest[8:].decode("utf-8", "surrogatepass")),
    b"p": lambda rest: split(rest)[1].decode("utf-8", "replace"),
}


def form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape, such as ``float32 (3, 4)``."""
    return f"{dtype} {tuple(shape)}".removeprefix("torch.")


def split(data: bytes) -> list[bytes]:
    """The parts that were joined behind their lengths."""
    parts, start = [], 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        parts.append(data[start + 8 : start + 8 + size])
        start += 8 + size
    return parts


def readable(data: bytes) -> str | None:
    """For people, the value that `Encoder` has written as `data`; None if it is long or has no short form."""
    tag, rest = data[:1], data[1:]
    if len(data) > _MOST_SHOWN:
        return None
    if data.startswith(_LABELS):
        return data.decode("utf-8", "replace")
    try:
        if tag in _SHOWN:
            return _SHOWN[tag](rest)
        if tag not in (b"(", b"["):
            return None
        parts = split(rest[8:])
        texts = [text for part in parts if (text := readable(part)) is not None]
    except (struct.error, ValueError, IndexError):
        return None  # not what the encoder has written
    if len(texts) < len(parts):
        return None
    listed = ", ".join(texts)
    return f"[{listed}]" if tag == b"[" else f"({listed},)" if len(texts) == 1 else f"({listed})"


def texts_of(parts: Mapping[str, bytes]) -> dict[str, str]:
    """For people, those parts of a walk that are single values with a short form."""
    plain = [name for name in parts if name.startswith(_PLAIN_PARTS)]
    return {name: text for name in plain if (text := readable(parts[name])) is not None}
