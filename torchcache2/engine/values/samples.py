"""`Samples`: a batch of samples as rows of a few schemas, and `rebuilder`: rows as samples again.

A sample is any nesting of tensors, tv_tensors, numpy arrays and scalars, PIL images, numbers, texts, bytes
and None. It is restored with the same types, dtypes, order of keys and bits, and owns its memory::

    samples = Samples()                           # one for each namespace
    batch = samples.to_rows([dataset[i] for i in indices])
    for positions, rows in batch.parts:
        tier.put(keys.take(positions), rows)      # batch.refused says what is not there, and why

    for positions, rows in tier.get(keys).parts:
        found = from_rows(rows)                   # one sample for each position

    rebuild = rebuilder(schema)                   # once for each schema, if samples come one by one
    sample = rebuild(row)                         # the bytes of each of its leaves

Samples of one structure and one shape are stacked, column by column. Each row has its own numbers, texts and
bytes, unlike the rows of a module's output. Values that vary in length are packed into bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchcache2.core.errors import DamagedError, OutputError, UnreadableError
from torchcache2.core.keys import Positions
from torchcache2.core.memory import LEAST_SPARE, SpareMemory, as_bytes, to_host, with_ordinary_tensors
from torchcache2.core.private import pytree
from torchcache2.core.rows import PLAIN, Leaf, Rows, Schema, plain_bytes
from torchcache2.core.values import BARE, Opened, Opener, UnstorableError, specs_of, taken_apart
from torchcache2.engine.values import kinds
from torchcache2.engine.values.kinds import (
    COMMON,
    NUMPY,
    NumpyArray,
    Packed,
    Placed,
    Raw,
    bytes_of,
    dense,
    tensor_of,
)
from torchcache2.engine.values.packed import pack, unpack

_STRUCTURES = 16  # of one namespace; each has its own files on disk
_LEAVES = 256
_ITEMS = 16  # a longer list or tuple is packed, as its length usually differs between samples
_KEYS = 64
_FORMS = 1024  # of samples to remember, with their schemas
_LARGE = 1 << 10  # bytes of a tensor
_HOST = torch.device("cpu")
_PACKED = pytree.TreeSpec(Packed, None, [BARE])


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """A batch of samples as rows.

    Attributes
    ----------
    parts : sequence of (ndarray of int64, Rows)
        Positions in the batch and their rows, one part for each schema. The rows share no memory with the
        samples.
    refused : mapping of int to OutputError
        For each position of a sample that cannot be stored, an error to raise or report: it names the leaf,
        its type, and what to do.
    """

    parts: Sequence[tuple[Positions, Rows]]
    refused: dict[int, OutputError]


class Samples:
    """Converts the samples of one namespace to rows.

    The first 16 structures get a column for each leaf. Samples of later structures are packed into bytes,
    since each structure needs its own files on disk. Shapes and lengths are not part of a structure. Threads
    may share one object.

    Parameters
    ----------
    packs : bool
        Whether to pack values of varying length into bytes; False: for comparisons only.
    """

    def __init__(self, *, packs: bool = True) -> None:
        self._packs = packs
        self._families: set[Schema] = set()
        self._schemas: dict[Any, Schema] = {}  # by form and dtype; also by the schema itself
        self._leaf = functools.lru_cache(1024)(Leaf)  # several times faster than a new `Leaf`
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
            A device, besides the CPU, where their tensors may be.
        dtype : torch.dtype, optional
            Dtype for storing floating-point tensors and arrays, which are already rounded to it.

        Returns
        -------
        SampleRows
            One part for each schema, and the samples that cannot be stored.
        """
        groups: dict[int, tuple[Schema, list[int], list[list[Any]]]] = {}
        refused, opened = {}, self._opener(device)
        if len(self._schemas) > _FORMS:
            self._schemas.clear()
        for position, sample in enumerate(samples):
            try:
                schema, values = self._described(sample, opened, dtype)
            except UnstorableError as error:
                refused[position] = OutputError(str(error.inside("sample")))
                continue
            group = groups.get(id(schema))
            _, positions, rows = group or groups.setdefault(id(schema), (schema, [], []))
            positions.append(position)
            rows.append(values)
        parts = []
        for schema, positions, rows in groups.values():
            pairs = zip(schema.leaves, zip(*rows, strict=True), strict=True)
            columns = [self._column(leaf, values) for leaf, values in pairs]
            parts.append((np.array(positions, np.int64), Rows(schema, columns, len(positions))))
        return SampleRows(parts, refused)

    def _described(self, sample: Any, opened: Opener, dtype: torch.dtype | None) -> tuple[Schema, list[Any]]:
        """The schema of a sample, one object for equal schemas, and the values for its columns."""
        looked_at: list[Any] = []
        try:
            form = _form_of(sample, looked_at), dtype
            known = self._schemas.get(form)
            if known is not None:
                return known, looked_at
        except (_UnusualError, RuntimeError):  # `RuntimeError`: by torch, such as for nested tensors
            form = None
        new, values = self._taken_apart(*taken_apart(sample, opened), dtype)
        schema = self._schemas.get(new)
        if schema is None:
            if self._packs and not self._has_columns(new):
                new, values = self._taken_apart([("", pack(sample))], _PACKED, None)
            schema = self._schemas.setdefault(new, new)
        if form is not None and len(values) == len(looked_at) and all(map(_is_same, values, looked_at)):
            self._schemas[form] = schema
        return schema, values

    def _taken_apart(
        self, pairs: Sequence[tuple[str, Any]], structure: pytree.TreeSpec, dtype: torch.dtype | None
    ) -> tuple[Schema, list[Any]]:
        """The schema of leaves with these paths, and the values for their columns."""
        leaves: list[Leaf] = []
        values: list[Any] = []
        for path, value in pairs:
            plain = plain_bytes(value)
            if plain is not None:
                values.append(plain[1])
                leaf = self._leaf(path, plain[0], torch.uint8, torch.uint8, (len(plain[1]),))
            else:
                values.append(value if type(value) is Raw else dense(value))
                stored = value.dtype
                if dtype is not None and stored.is_floating_point and not getattr(value, "is_exact", False):
                    stored = dtype
                leaf = self._leaf(path, "tensor", value.dtype, stored, tuple(value.shape))
            leaves.append(leaf)
        return Schema(structure, tuple(leaves)), values

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
            is_mapping = node[0] in (dict, collections.OrderedDict)
            is_fixed = not is_mapping or all(type(key) is str for key in node[1])
            is_long = len(node[2]) > (_KEYS if is_mapping else _ITEMS)
            return (Packed, None, [pack(value)]) if is_long or not is_fixed else node

        return opened

    def _has_columns(self, schema: Schema) -> bool:
        """Whether samples of a schema get a column for each leaf."""
        if len(schema.leaves) > _LEAVES:
            return False
        if len(self._families) < _STRUCTURES:
            self._families.add(schema.family)
        return schema.family in self._families

    def _column(self, leaf: Leaf, values: Sequence[Any]) -> Tensor:
        """The column of one leaf's values, in its own memory."""
        count, dtype = len(values), leaf.dtype
        if leaf.kind != "tensor":
            return tensor_of(b"".join(values)).view(count, *leaf.shape)
        if type(values[0]) is not Raw and dtype not in COMMON:  # slow in torch: copy bytes
            data = torch.cat([bytes_of(value) for value in values])
            return data.view(dtype).view(count, *leaf.shape).to(leaf.stored)
        size = count * math.prod(leaf.shape) * dtype.itemsize
        column: Tensor | None = None
        if size >= LEAST_SPARE:
            column = self._spare.empty(size).view(dtype).view(count, *leaf.shape)
        if type(values[0]) is Raw:
            out = None if column is None else column.numpy()
            column = torch.from_numpy(np.ascontiguousarray(np.stack([raw.array for raw in values], out=out)))
        else:
            column = torch.stack(list(values), out=column)
        return column.to(leaf.stored)


# Most samples have common types, and look like an earlier one. The *form* of a sample determines its schema,
# and is found in a tenth of the time of taking the sample apart.


class _UnusualError(Exception):
    """Raised for a sample that must be taken apart."""


# These tell dense CPU tensors from all others.
_TENSOR_FORM = attrgetter("dtype", "shape", "layout", "is_cpu", "is_nested", "requires_grad")


def _form_of(value: Any, values: list[Any], depth: int = 4) -> Any:
    """The form of a sample of common types; adds the values for its columns to `values`.

    It includes every type, length, dtype and shape, and all that `kinds.opened` checks.
    """
    kind, plain = type(value), plain_bytes(value)
    if plain is not None:
        values.append(plain[1])
        return plain[0], len(plain[1])
    if kind is Tensor and not (vars(value) or value.is_neg() or value.is_conj()) and value.is_contiguous():
        values.append(value)
        return _TENSOR_FORM(value)
    if kind is np.ndarray and value.flags.c_contiguous and kinds.is_native(value.dtype):
        values.append(Raw(value, is_exact=False))
        return kind, value.dtype.char, value.shape
    if isinstance(value, np.generic) and kinds.is_native(value.dtype):
        values.append(Raw(np.asarray(value)))
        return kind, value.dtype.char
    if depth and (kind is tuple or kind is list) and len(value) <= _ITEMS:
        return kind, *[_form_of(child, values, depth - 1) for child in value]
    if depth and kind is dict and len(value) <= _KEYS and all(type(key) is str for key in value):
        return kind, *value, *[_form_of(child, values, depth - 1) for child in value.values()]
    raise _UnusualError


def _is_same(value: Any, other: Any) -> bool:
    """Whether two leaves of one sample, taken apart and by form, are the same."""
    if type(value) is type(other) is Raw:
        arrays = value.array, other.array
        return value.is_exact is other.is_exact and arrays[0].tobytes() == arrays[1].tobytes()
    return value is other or (type(value) is bytes and value == other)


# Rows to samples: compiles a schema into nested functions, once for all of its rows.

_Read = Callable[[Any], Any]  # the value of a leaf, from its bytes
_Build = Callable[[Iterator[Any]], Any]  # a value, from as many leaf values as it needs


@with_ordinary_tensors
def from_rows(rows: Rows, device: torch.device = _HOST, *, shares: bool = False) -> list[Any]:
    """The samples that rows represent, each with its own memory.

    Who `shares` is about to collate the samples, and does not keep them, as a `DataLoader` worker: large
    tensors are then views, with separate storages, of the rows' memory.

    Parameters
    ----------
    rows : Rows
        n rows made by `Samples.to_rows`, in this process or another one.
    device : torch.device
        Device for the tensors that were on the call's device when the rows were made.

    Raises
    ------
    DamagedError
        If no version of this library made them.
    NewerFormatError
        If a later version made them.
    UnknownClassError
        If they need a class or library that this process lacks.
    """
    try:
        readers, build = _functions(rows.schema, device)
        columns = zip(readers, to_host(rows.columns), strict=True)
        shares |= get_worker_info() is not None
        leaves = [_each(read, leaf, column, shares) for (read, leaf), column in columns]
        values = zip(*leaves, strict=True) if leaves else repeat((), len(rows))
        return [build(iter(row)) for row in values]
    except Exception as error:
        raise _damaged(error) from None


def _each(read: _Read, plain: Leaf | None, column: Tensor, shares: bool) -> Iterator[Any]:
    """The values of a leaf in each row; `plain` tensors are copied as fast as torch can."""
    if plain is None:
        return map(read, as_bytes(column).numpy())
    is_large = plain.row_bytes >= _LARGE and plain.stored in NUMPY
    if is_large and column.is_contiguous() and shares:
        return map(torch.from_numpy, column.numpy())
    rows: Any = torch.unbind_copy(column)  # type: ignore[func-returns-value]
    return iter(rows)


def rebuilder(schema: Schema) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a sample from one row; it raises the same errors as `from_rows`.

    It takes the row as one buffer per leaf, and copies them. Not for use in inference mode.
    """
    try:
        found, build = _functions(schema, _HOST)
        readers = [read for read, _ in found]
    except Exception as error:
        raise _damaged(error) from None

    def rebuild(row: Sequence[Any]) -> Any:
        try:
            return build(iter([read(data) for read, data in zip(readers, row, strict=True)]))
        except Exception as error:
            raise _damaged(error) from None

    return rebuild


def _damaged(error: Exception) -> Exception:
    """The error to raise: a damaged schema may make any code fail."""
    is_known = isinstance(error, (UnreadableError, MemoryError))
    return error if is_known else DamagedError(f"rows that are not samples: {error!r}")


def _functions(schema: Schema, device: torch.device) -> tuple[list[tuple[_Read, Leaf | None]], _Build]:
    """A reader for each leaf (with the leaf, if it is a plain tensor), and what joins their values."""
    readers: list[tuple[_Read, Leaf | None]] = []
    leaves = iter(schema.leaves)

    def builder(spec: pytree.TreeSpec) -> _Build:
        kind, context, specs = spec.type, spec.context, specs_of(spec)
        if kind is None or (kind is NumpyArray and [child.type for child in specs] == [None]):
            readers.append(_reader(next(leaves), kind, context))
            return next
        builders, count = list(map(builder, specs)), len(specs)
        make: Callable[[Any], Any]
        if kind is tuple or kind is list:
            make = kind
        elif kind is dict:
            make = lambda children: dict(zip(context, children, strict=True))  # noqa: E731
        elif kind is Packed:
            make = lambda children: unpack(*children)  # noqa: E731
        elif kind is Placed:
            make = lambda children: next(iter(children)).to(device)  # noqa: E731
        else:
            make = lambda children: kinds.closed(kind, context, list(children))  # noqa: E731
        if all(build is next for build in builders):
            return make if spec is schema.structure else lambda values: make(islice(values, count))
        return lambda values: make([build(values) for build in builders])

    build = builder(schema.structure)
    return readers, build


def _reader(leaf: Leaf, kind: Any, context: Any) -> tuple[_Read, Leaf | None]:
    """The reader of a leaf, or of a NumPy array around it."""
    if leaf.kind != "tensor":
        return PLAIN[leaf.kind], None
    shape, dtype, stored, last = leaf.stored_shape, leaf.dtype, leaf.stored, leaf.channels_last
    is_plain, name = dtype == stored in COMMON and not last, NUMPY.get(stored)

    def read(data: Any) -> Tensor:
        return torch.from_numpy(np.ndarray(shape, name, bytearray(data)))  # the fastest copy

    def read_unusual(data: Any) -> Tensor:
        value = tensor_of(data).view(stored).view(shape).to(dtype)
        return value.movedim(-1, 0) if last else value

    if kind is NumpyArray and is_plain and context == name:
        return lambda data: np.ndarray(shape, name, data).copy(), None
    one = read if is_plain and name is not None else read_unusual
    if kind is NumpyArray:
        return lambda data: NumpyArray.closed(context, [one(data)]), None
    return one, leaf if is_plain else None
