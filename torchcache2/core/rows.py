"""`Rows`: the result of a computation for a batch, one row per item.

An output is a pytree. Its tensors become columns of shape ``(n, *shape)``. Its numbers and texts become
columns too, with the same value in each row: they are data, not part of the schema.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError, hint
from torchcache2.core.keys import Positions
from torchcache2.core.memory import (
    CUDA,
    Runtime,
    Sending,
    as_bytes,
    as_words,
    empty_rows,
    moved,
    select,
    sent,
    to_device,
    with_ordinary_tensors,
)
from torchcache2.core.private import pytree
from torchcache2.core.process import computed_once
from torchcache2.core.values import (
    Opener,
    UnstorableError,
    closed,
    has_attributes,
    mapped,
    opened,
    rebuilt,
    same_structure,
    taken_apart,
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of an output.

    Attributes
    ----------
    path : str
        Its place in the output, such as ``['hidden'][0]``; empty for a bare tensor.
    kind : str
        ``tensor``, or the type tag of another value: ``int``, ``str``, ``none``, ...
    dtype, stored : torch.dtype
        The dtype of the output, and of the column that stores it.
    shape : tuple of int
        The shape of one row; an extent that differs between the rows of a segment is -1.
    channels_last : bool
        Whether rows, and the output, have a channels-last layout. This does not count in comparisons, since
        convolutions choose the layout by batch size.
    device : str, optional
        The device of the output, if it is not the device of the call.
    """

    path: str
    kind: str
    dtype: torch.dtype
    stored: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool = dataclasses.field(default=False, compare=False)
    device: str | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one row as stored in the column."""
        return (*self.shape[1:], self.shape[0]) if self.channels_last else self.shape

    def place(self, device: torch.device) -> torch.device:
        """The device of the output of a call on `device`."""
        return torch.device(self.device) if self.device else device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the column."""
        size = self.stored.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True, eq=False)
class Schema:
    """The structure of an output and its leaves; equal schemas can share a column."""

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Schema) or self.leaves != other.leaves:
            return False
        return same_structure(self.structure, other.structure)

    def __hash__(self) -> int:
        return hash(self.leaves)

    @computed_once
    def row_bytes(self) -> int:
        """Bytes of one row, all columns together."""
        return sum(leaf.row_bytes for leaf in self.leaves)

    @computed_once
    def family(self) -> Schema:
        """A schema that is the same for all schemas that differ only in the shapes of rows.

        Rows with their channels last are another family, so that they come back in that layout.
        """
        return self.with_shapes([(-1 - leaf.channels_last,) * len(leaf.shape) for leaf in self.leaves])

    @property
    def layout(self) -> tuple[bool, ...]:
        """Which leaves have a channels-last layout."""
        return tuple([leaf.channels_last for leaf in self.leaves])

    @property
    def in_logical_order(self) -> Schema:
        """The schema of the same rows in the usual, contiguous layout."""
        if not any(self.layout):
            return self
        leaves = tuple([dataclasses.replace(leaf, channels_last=False) for leaf in self.leaves])
        return Schema(self.structure, leaves)

    def with_shapes(self, shapes: Iterable[tuple[int, ...]]) -> Schema:
        """The same schema for rows whose leaves have other shapes."""
        leaves = []
        for leaf, shape in zip(self.leaves, shapes, strict=True):
            # several times faster than `dataclasses.replace`
            rest = leaf.channels_last, leaf.device
            leaves.append(Leaf(leaf.path, leaf.kind, leaf.dtype, leaf.stored, shape, *rest))
        return Schema(self.structure, tuple(leaves))


_HOST = torch.device("cpu")

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FLOATS = tuple(np.dtype(name) for name in ("f2", "f4", "f8"))


class Rows:
    """A schema and its columns, each ``(n, *stored_shape)`` in the leaf's stored dtype."""

    __slots__ = ("columns", "count", "schema")

    def __init__(self, schema: Schema, columns: Sequence[Tensor], count: int) -> None:
        self.schema = schema
        self.columns = tuple(columns)
        self.count = count

    def __len__(self) -> int:
        return self.count

    @classmethod
    def from_pytree(
        cls,
        output: Any,
        count: int,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        opened: Opener = lambda value, path: opened(value, objects=True),
    ) -> Rows:
        """The rows of a computation's output, a pytree, for a batch of `count` items.

        Its tensors have shape ``(count, ...)``; other values belong to the whole batch. `device` is that of
        the call, and `dtype` is the stored dtype of floating-point leaves. `opened` is as for `taken_apart`.

        Raises
        ------
        OutputError
            If a tensor's first dimension is not `count`.
        UnstorableError
            If a leaf is neither a dense tensor nor a number, text, or None, or if a container cannot be
            restored exactly.
        """
        leaves, columns = [], []
        try:
            pairs, structure = taken_apart(output, opened)
            for path, value in pairs:
                if isinstance(value, Tensor):
                    leaf, column = _tensor_column(path, value, count, device, dtype)
                else:
                    leaf, column = _value_column(path, value, count)
                leaves.append(leaf)
                columns.append(column)
        except UnstorableError as error:
            raise error.inside("output") from None
        return cls(Schema(structure, tuple(leaves)), columns, count)

    def to_pytree(
        self, *, device: torch.device, closed: Callable[[Any, Any, list[Any]], Any] = closed
    ) -> Any:
        """The output that these rows represent, its tensors on `device`; `closed` is as for `rebuilt`.

        Raises
        ------
        UnstorableError
            If a value other than a tensor differs between the rows, or if a container's class builds
            something else from these rows.
        """
        values = []
        for leaf, column in zip(self.schema.leaves, self.columns, strict=True):
            if leaf.kind == "tensor":
                column = to_device(column, leaf.place(device))
                column = column if leaf.stored is leaf.dtype else column.to(leaf.dtype)
                values.append(column.movedim(-1, 1) if leaf.channels_last else column)
            else:
                values.append(PLAIN[leaf.kind](_shared(leaf, column).cpu().numpy()))
        return rebuilt(self.schema.structure, iter(values), closed)

    def take(self, positions: Tensor) -> Rows:
        """A copy of some rows.

        Parameters
        ----------
        positions : Tensor of int64, shape (k,)
            From 0 to n - 1, in any order, possibly repeated.

        Returns
        -------
        Rows
            k rows, in the order of `positions`; each column stays on its device.
        """
        places = sent(positions, [column.device for column in self.columns])
        picked = [select(column, places[column.device]) for column in self.columns]
        return Rows(self.schema, picked, len(positions))

    def sent(self, device: torch.device, runtime: Runtime = CUDA) -> Callable[[], Rows]:
        """Start to copy the rows to where an output on `device` needs them, beside what is computed there.

        Returns what makes them wait for that on the current stream.
        """
        places = [leaf.place(device) if leaf.kind == "tensor" else _HOST for leaf in self.schema.leaves]
        pairs = zip(places, self.columns, strict=True)
        which = [i for i, (place, column) in enumerate(pairs) if place == device != column.device]
        sending = Sending([self.columns[i] for i in which], device, runtime)

        def arrived() -> Rows:
            columns = dict(enumerate(self.columns)) | dict(zip(which, sending.wait(), strict=True))
            return Rows(self.schema, list(columns.values()), self.count)

        return arrived

    def laid_out_as(self, schema: Schema) -> Rows:
        """The same rows in the layout of an equal schema."""
        columns = []
        for column, mine, other in zip(self.columns, self.schema.leaves, schema.leaves, strict=True):
            if mine.channels_last and not other.channels_last:
                column = column.movedim(-1, 1)
            elif other.channels_last and not mine.channels_last:
                column = column.movedim(1, -1)
            columns.append(column)
        return Rows(schema, columns, self.count)

    def in_logical_order(self) -> Rows:
        """The same rows in the usual layout: no leaf is channels-last."""
        pairs = zip(self.schema.leaves, self.columns, strict=True)
        columns = [moved(column, -1, 1) if leaf.channels_last else column for leaf, column in pairs]
        return Rows(self.schema.in_logical_order, columns, self.count)

    def head(self, count: int) -> Rows:
        """The first `count` rows, without a copy."""
        return Rows(self.schema, [column[:count] for column in self.columns], count)

    @staticmethod
    @with_ordinary_tensors
    def scatter(parts: Sequence[tuple[Positions, Rows]], count: int, *, device: torch.device) -> Rows:
        """One batch of `count` rows, put together from parts: rows, and their positions in the batch.

        The parts have one schema, and their positions cover the batch. `device` is that of the call.
        """
        schema = parts[0][1].schema
        places = [leaf.place(device) if leaf.kind == "tensor" else _HOST for leaf in schema.leaves]
        wheres = [sent(torch.from_numpy(positions), places) for positions, _ in parts]
        columns = []
        for i, (leaf, place) in enumerate(zip(schema.leaves, places, strict=True)):
            target = empty_rows(count, leaf.stored_shape, leaf.stored, place)
            flat = as_bytes(target).view(-1)
            for where, (_, rows) in zip(wheres, parts, strict=True):
                words = as_words(as_bytes(to_device(rows.laid_out_as(schema).columns[i], place)))
                flat.view(words.dtype).view(count, words.shape[1]).index_copy_(0, where[place], words)
            columns.append(target)
        return Rows(schema, columns, count)


Parts = list[tuple[Positions, Rows]]


def merged(parts: Parts) -> Parts:
    """Merge the parts (positions and rows) of a batch to one for each schema, ordered by position."""
    if len(parts) < 2:
        return parts
    by_schema: dict[Schema, Parts] = {}
    for part in parts:
        by_schema.setdefault(part[1].schema, []).append(part)
    return [_joined(same) if len(same) > 1 else same[0] for same in by_schema.values()]


def _joined(parts: Parts) -> tuple[Positions, Rows]:
    # A row may be in two parts, if it was read again after a damaged one: keep each position once.
    positions = np.unique(np.concatenate([where for where, _ in parts]))
    ranked = [(np.searchsorted(positions, where), rows) for where, rows in parts]
    columns = parts[0][1].columns
    device = columns[0].device if columns else _HOST
    return positions, Rows.scatter(ranked, len(positions), device=device)


def rounded(output: Any, dtype: torch.dtype) -> Any:
    """An output whose floating-point tensors are rounded as if they were stored in another dtype."""

    def leaf(value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype in _FLOATS:
            return leaf(torch.from_numpy(value.copy())).numpy()
        inexact = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype).to(value.dtype) if inexact else value

    try:
        return mapped(leaf, output, objects=True)
    except UnstorableError:  # never stored anyway
        return output


def _tensor_column(
    path: str, value: Tensor, count: int, device: torch.device, dtype: torch.dtype | None
) -> tuple[Leaf, Tensor]:
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
        kind = next((name for name, holds in kinds.items() if holds), str(value.layout))
        raise UnstorableError(f"a tensor that is {kind}, not dense").inside(path)
    if type(value) is not Tensor:
        raise UnstorableError(f"a {type(value).__qualname__}").inside(path)
    if has_attributes(value):
        raise UnstorableError("a tensor with attributes of its own").inside(path)
    if value.dim() == 0 or value.shape[0] != count:
        advice = ", and name lists with one entry per item in item_args" if value.dim() else ""
        raise OutputError(
            f"output{path} has shape {tuple(value.shape)} for a batch of {count}: the first dimension "
            "of every output tensor must be the batch. Compute what belongs to the batch as a whole "
            f"outside of the cached forward{advice}"
        )
    stored = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
    column = value.detach().resolve_conj().resolve_neg()
    place = None if value.device == device else str(value.device)
    last = _is_channels_last(column)
    leaf = Leaf(path, "tensor", value.dtype, stored, tuple(value.shape[1:]), last, place)
    return leaf, (column.movedim(1, -1) if last else column).to(stored)


def _is_channels_last(tensor: Tensor) -> bool:
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    if memory_format is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=memory_format)


def _value_column(path: str, value: Any, count: int) -> tuple[Leaf, Tensor]:
    found = plain_bytes(value)
    if found is None:
        what = "an int of more than 64 bits" if type(value) is int else f"a {type(value).__qualname__}"
        raise UnstorableError(what + hint(value)).inside(path)
    kind, data = found
    row = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    leaf = Leaf(path, kind, torch.uint8, torch.uint8, (len(data),))
    return leaf, row.expand(count, len(data))


def _shared(leaf: Leaf, column: Tensor) -> Tensor:
    """The first row of a column whose rows are all equal."""
    if len(column) == 0:
        raise UnstorableError("unknown for an empty batch").inside(f"output{leaf.path}")
    if len(column) > 1 and not torch.equal(column, column[:1].expand_as(column)):
        raise UnstorableError("different in rows of one batch").inside(f"output{leaf.path}")
    return column[0]


_PACKED = {"int": struct.Struct("<q"), "float": struct.Struct("<d"), "bool": struct.Struct("<?")}
_KINDS = {int: "int", float: "float", bool: "bool"}


def plain_bytes(value: Any) -> tuple[str, bytes] | None:
    """The kind of a number, text, bytes or None, and its bytes in a column; None for any other value."""
    kind = type(value)
    if kind in _KINDS and (kind is not int or -(2**63) <= value < 2**63):
        name = _KINDS[kind]
        return name, _PACKED[name].pack(value)
    if value is None:
        return "none", b""
    if kind is str:
        return "str", value.encode("utf-8", "surrogatepass")
    if kind is bytes:
        return "bytes", value
    if kind is complex:
        return "complex", struct.pack("<dd", value.real, value.imag)
    return None


def _number(form: struct.Struct) -> Callable[[Any], Any]:
    unpack = form.unpack
    return lambda data: unpack(data)[0]


# Functions that restore such a value from its bytes, by kind.
PLAIN: dict[str, Callable[[Any], Any]] = {
    "none": lambda data: None,
    "str": lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    "bytes": bytes,
    "complex": lambda data: complex(*struct.unpack("<dd", data)),
}
PLAIN.update({name: _number(form) for name, form in _PACKED.items()})
