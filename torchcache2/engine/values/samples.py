"""`Samples`: a batch of samples as rows of a few schemas, and rows as samples again; `pack`: one as bytes.

A sample is any nesting of tensors, tv_tensors, numpy arrays and scalars, PIL images, numbers, texts, bytes
and None. It comes back with the types, dtypes, order of keys and bits that it had, and owns its memory::

    samples = Samples()                           # one for each namespace
    batch = samples.to_rows([dataset[i] for i in indices])
    for positions, rows in batch.parts:
        tier.put(keys.take(positions), rows)      # batch.refused says what is not there, and why

    for positions, rows in tier.get(keys).parts:
        found = from_rows(rows)                   # one sample for each position

Samples of one structure and one shape are stacked, column by column. Each row has its own numbers, texts and
bytes, unlike the rows of a module's output.

What varies in length is packed into bytes that describe themselves; docs/format.md specifies them byte by
byte. Nothing that they name is imported or called, but for node types of pytrees that this process has. Every
count and size is compared with the bytes that are left, so that memory is bounded by the size of the input,
and whatever no writer writes is a `DamagedError`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Positions
from torchcache2.core.memory import SpareMemory, with_ordinary_tensors
from torchcache2.core.private import pytree
from torchcache2.core.rows import Leaf, Rows, Schema, plain_bytes, values_of
from torchcache2.core.values import (
    BARE,
    Opened,
    Opener,
    UnstorableError,
    fields_of,
    is_key,
    is_namedtuple,
    is_node,
    one_of,
    rebuilt,
    taken_apart,
)
from torchcache2.engine.values import kinds
from torchcache2.engine.values.kinds import COMMON, Column, Packed, Placed, Raw, dense, listed
from torchcache2.files import schema as classes
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError

_STRUCTURES = 16  # of one namespace; each is a file of its own on the disk
_LEAVES = 256
_ITEMS = 16  # a longer list or tuple is packed, as its length usually differs between samples
_KEYS = 64
_HOST = torch.device("cpu")
_MAPPINGS = (dict, collections.OrderedDict)


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """A batch of samples as rows.

    Attributes
    ----------
    parts : sequence of (ndarray of int64, Rows)
        Positions in the batch and their rows, one part for each schema. The rows share no memory with the
        samples.
    refused : mapping of int to OutputError
        Positions of samples that cannot be stored, and for each an error to raise or to report: it names the
        leaf, its type, and what to do.
    """

    parts: Sequence[tuple[Positions, Rows]]
    refused: dict[int, OutputError]


class Samples:
    """Turns the samples of one namespace to rows.

    The first 16 structures that it meets are columns, a column for each leaf. Later ones are packed into
    bytes, all of one structure, since each structure is a file of its own on the disk. A shape or a length is
    no part of a structure. Threads may share one.

    Parameters
    ----------
    packs : bool
        Whether values of varying length are bytes; else they are only to be compared.
    """

    def __init__(self, *, packs: bool = True) -> None:
        self._packs = packs
        self._families: set[Schema] = set()
        self._leaf = functools.lru_cache(1024)(Leaf)  # to make one anew takes several times as long
        self._spare = SpareMemory()

    @with_ordinary_tensors
    def to_rows(
        self, samples: Sequence[Any], device: torch.device = _HOST, dtype: torch.dtype | None = None
    ) -> SampleRows:
        """The rows of a batch of samples, copied.

        Parameters
        ----------
        samples : sequence
            n samples, of any structures.
        device : torch.device
            Where their tensors may be, besides the CPU.
        dtype : torch.dtype, optional
            In which floating-point tensors and arrays are stored. They are rounded to it already.

        Returns
        -------
        SampleRows
            One part for each schema, and the samples that cannot be stored.
        """
        groups: dict[Schema, tuple[list[int], list[list[Any]]]] = {}
        refused, opened = {}, self._opener(device)
        for position, sample in enumerate(samples):
            try:
                schema, values = self._described(*taken_apart(sample, opened), dtype)
                group = groups.get(schema)
                if group is None and self._packs and not self._has_columns(schema):
                    schema, values = self._described([("", pack(sample))], _PACKED, None)
            except UnstorableError as error:
                refused[position] = OutputError(str(error.inside("sample")))
                continue
            positions, rows = group or groups.setdefault(schema, ([], []))
            positions.append(position)
            rows.append(values)
        parts = []
        for schema, (positions, rows) in groups.items():
            pairs = zip(schema.leaves, zip(*rows, strict=True), strict=True)
            columns = [self._column(leaf, values) for leaf, values in pairs]
            parts.append((np.array(positions, np.int64), Rows(schema, columns, len(positions))))
        return SampleRows(parts, refused)

    def _opener(self, device: torch.device) -> Opener:
        def opened(value: Any, path: str) -> Opened | None:
            kind = type(value)
            if kind is Tensor and value.device == device != _HOST:
                return Placed, None, [value.cpu()]
            if kind is Packed or (kind is int and not -(2**63) <= value < 2**63):
                return Packed, None, [pack(value)]
            node = kinds.opened(value)
            if node is None or not self._packs:
                return node
            is_mapping = node[0] in _MAPPINGS
            is_fixed = not is_mapping or all(type(key) is str for key in node[1])
            is_long = len(node[2]) > (_KEYS if is_mapping else _ITEMS)
            return (Packed, None, [pack(value)]) if is_long or not is_fixed else node

        return opened

    def _described(
        self, pairs: Sequence[tuple[str, Any]], structure: pytree.TreeSpec, dtype: torch.dtype | None
    ) -> tuple[Schema, list[Any]]:
        """The schema of leaves with these paths, and what their columns are made of."""
        leaves, values = [], []
        for path, value in pairs:
            plain = plain_bytes(value)
            if plain is not None:
                data = plain[1]
                leaf = self._leaf(path, plain[0], torch.uint8, torch.uint8, (len(data),))
            else:
                data, stored = value, value.dtype
                if dtype is not None and stored.is_floating_point and not getattr(value, "is_exact", False):
                    stored = dtype
                leaf = self._leaf(path, "tensor", value.dtype, stored, tuple(value.shape))
            leaves.append(leaf)
            values.append(data)
        return Schema(structure, tuple(leaves)), values

    def _has_columns(self, schema: Schema) -> bool:
        """Whether samples of a schema have a column for each leaf."""
        if len(schema.leaves) > _LEAVES:
            return False
        if len(self._families) < _STRUCTURES:
            self._families.add(schema.family)
        return schema.family in self._families

    def _column(self, leaf: Leaf, values: Sequence[Any]) -> Tensor:
        """The column of one leaf's values, in memory that is theirs."""
        count, dtype = len(values), leaf.dtype
        if leaf.kind != "tensor":
            return _tensor_of(b"".join(values)).view(count, *leaf.shape)
        if type(values[0]) is not Raw and dtype not in COMMON:
            column = torch.cat([_bytes_of(dense(value)) for value in values]).view(dtype)
            return column.view(count, *leaf.shape).to(leaf.stored)
        size = count * math.prod(leaf.shape) * dtype.itemsize
        column = self._spare.empty(size).view(dtype).view(count, *leaf.shape)
        if type(values[0]) is Raw:
            np.stack([value.array for value in values], out=column.numpy())
        else:
            torch.stack([value.resolve_conj().resolve_neg() for value in values], out=column)
        return column.to(leaf.stored)


@with_ordinary_tensors
def from_rows(rows: Rows, device: torch.device = _HOST) -> list[Any]:
    """The samples that rows stand for, each with its own memory.

    Parameters
    ----------
    rows : Rows
        n rows that `Samples.to_rows` has made, in this process or another one.
    device : torch.device
        Where the tensors are put that were there when the rows were made.

    Raises
    ------
    DamagedError
        If no version of this library has made them.
    NewerFormatError
        If a later version has made them.
    UnknownClassError
        If they need a class or a library that this process does not have.
    """

    def closed(kind: Any, context: Any, columns: list[Any]) -> Any:
        if kind is Packed:
            return [unpack(data) for data in columns[0]]
        if kind is Placed:
            (column,) = columns
            return column.to(device) if isinstance(column, Tensor) else [value.to(device) for value in column]
        return kinds.closed(kind, context, columns, len(rows))

    try:
        pairs = zip(rows.schema.leaves, rows.columns, strict=True)
        columns = iter([values_of(leaf, column, _HOST) for leaf, column in pairs])
        return listed(rebuilt(rows.schema.structure, columns, closed))
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:
        # Anybody may have written the schema, such as one with a dtype that a node cannot have.
        raise DamagedError(f"rows that are no samples: {error!r}") from None


def _tensor_of(data: Any) -> Tensor:
    """A copy of some bytes, uint8 ``(bytes,)``."""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _bytes_of(value: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 ``(bytes,)``, without a copy."""
    # A tensor of one element is contiguous whatever its strides are.
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


# The packed encoding.

_VERSION = 1
_MAX_DEPTH = 100
_DTYPES = {
    str(value)[6:]: value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and not name.startswith("q")  # quantized tensors are refused
}
_NAMES = {dtype: name for name, dtype in reversed(_DTYPES.items())}
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
_PACKED = pytree.TreeSpec(Packed, None, [BARE])


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises
    ------
    UnstorableError
        If a part of it is of no known type, or if it is nested more than 100 deep.
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
        out += _bytes_of(value).numpy().data


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
        value = reader.value(0)
        if reader.position != len(data):
            raise DamagedError("bytes behind a packed value")
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # sizes were checked, so this is a value that its own type refuses
        raise DamagedError(f"a packed value that is none: {error!r}") from None
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

    def value(self, depth: int) -> Any:
        return listed(self.column(depth))[0]

    def values(self, count: int, depth: int) -> list[Any]:
        if count > len(self.data) - self.position:  # each has a byte at least
            raise DamagedError("more values than bytes")
        return [self.value(depth) for _ in range(count)]

    def column(self, depth: int) -> Column:
        """A value as a column of one value."""
        if depth > _MAX_DEPTH:
            raise DamagedError(f"a packed value that is nested more than {_MAX_DEPTH} deep")
        tag = bytes(self.take(1))
        kind = _KINDS.get(tag)
        if tag in _SIMPLE:
            return [_SIMPLE[tag](self)]
        if kind in (list, tuple):
            return [kind(self.values(self.count(), depth + 1))]
        if kind in _MAPPINGS:
            count = self.count()
            items = self.values(2 * count, depth + 1)
            found = kind(zip(items[::2], items[1::2], strict=True)) if all(map(is_key, items[::2])) else {}
            if len(found) != count:
                raise DamagedError("two equal keys, or one of a type that keys do not have")
            return [found]
        if tag == b"R":
            return self.tensor()
        if tag == b"C":
            return self.node(depth)
        if kind is None:
            raise DamagedError("a packed value of no known kind")
        context = self.value(depth + 1)
        columns = [self.column(depth + 1) for _ in range(self.take(1)[0])]
        return kinds.closed(kind, context, columns, 1)

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
            raise DamagedError("a boolean that is none")
        return _tensor_of(data).view(dtype).view(1, *shape)

    def node(self, depth: int) -> list[Any]:
        name, fields, context = [self.value(depth + 1) for _ in range(3)]
        children = self.values(self.count(), depth + 1)
        cls = classes.class_of(name, _may_be_read)
        classes.check_fields(cls, name, fields, len(children))
        kind, context = (collections.namedtuple, cls) if is_namedtuple(cls) else (cls, context)
        return kinds.closed(kind, context, [[child] for child in children], 1)

    def large(self) -> int:
        value = int.from_bytes(self.sized(), "little", signed=True)
        if -(2**63) <= value < 2**63:
            raise DamagedError("a large number that is small")
        return value


def _may_be_read(cls: Any) -> bool:
    """Whether a class may be that of a node: a namedtuple, or a node type that has no tag."""
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
