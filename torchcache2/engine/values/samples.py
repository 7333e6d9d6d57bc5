"""`Samples`: a batch of samples as rows of a few schemas, and rows as samples again.

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
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Positions
from torchcache2.core.memory import SpareMemory, with_ordinary_tensors
from torchcache2.core.private import pytree
from torchcache2.core.rows import Leaf, Rows, Schema
from torchcache2.core.values import BARE, specs_of
from torchcache2.engine.values.kinds import closed, opened, thawed
from torchcache2.engine.values.nodes import (
    COMMON,
    Column,
    Node,
    Packed,
    Permuted,
    Placed,
    Raw,
    Unstorable,
    bytes_of,
    dense,
    listed,
)
from torchcache2.engine.values.packed import pack, unpack
from torchcache2.files.errors import DamagedError, UnreadableError

__all__ = ["SampleRows", "Samples", "from_rows"]

_STRUCTURES = 16  # of one namespace; each is a file of its own on the disk
_LEAVES = 256
_ITEMS = 16  # a longer list or tuple is packed, as its length usually differs between samples
_KEYS = 64
_DEPTH = 16
_NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8", "complex": "<c16"}  # dtypes of rows, by kind of leaf
_KINDS: dict[Any, tuple[tuple[str, int], tuple[int]]] = {  # what `_Flat` says of a leaf, and its shape
    bool: (("bool", 1), (1,)),
    int: (("int", 1), (8,)),
    float: (("float", 1), (8,)),
    complex: (("complex", 1), (16,)),
    type(None): (("none", 1), (0,)),
}
_MAPPINGS = (dict, collections.OrderedDict)


class _Flat:
    """A sample as its leaves.

    Parameters
    ----------
    device : torch.device, optional
        Tensors may be on this device, too.
    packs : bool
        Whether values of varying length are bytes; else they are only to be compared.

    Attributes
    ----------
    structure : list
        All but the shapes and values of the leaves, to be compared exactly: a type, a context and a number of
        children for each node, and a kind and a number of dimensions for each leaf, from the root down.
    shapes, values : list
        Of the leaves.
    """

    __slots__ = ("device", "packs", "shapes", "structure", "values")

    def __init__(self, device: torch.device | None = None, *, packs: bool = True) -> None:
        self.device, self.packs = device, packs
        self.structure: list[Any] = []
        self.shapes: list[Any] = []
        self.values: list[Any] = []

    def leaf(self, kind: Any, shape: Any, value: Any) -> None:
        """Add a leaf."""
        self.structure.append((kind, len(shape)))
        self.shapes.append(shape)
        self.values.append(value)

    def packed(self, value: Any) -> None:
        """Add a value as bytes."""
        data = pack(value)
        self.structure.append((Packed, None, 1))
        self.leaf("bytes", (len(data),), data)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value; `Unstorable` if a part of it is of no known type."""
        kind = type(value)
        if kind is Tensor:
            if not value.is_cpu and value.device == self.device:
                self.structure.append((Placed, None, 1))
                value = value.cpu()
            axes, value = dense(value)
            if axes is not None:
                self.structure.append((Permuted, axes, 1))
            shape = value.shape
            self.structure.append((value.dtype, len(shape)))
            self.shapes.append(shape)
            self.values.append(value)
        elif kind in _KINDS:
            if kind is int and not -(2**63) <= value < 2**63:
                self.packed(value)
            else:
                token, shape = _KINDS[kind]
                self.structure.append(token)
                self.shapes.append(shape)
                self.values.append(value)
        elif kind is str:
            data = value.encode("utf-8", "surrogatepass")
            self.leaf("str", (len(data),), data)
        elif kind is bytes:
            self.leaf("bytes", (len(value),), value)
        elif kind is Raw:
            self.leaf(value.dtype, value.array.shape, value)
        elif kind is Packed:
            self.packed(value.context)
        else:
            self._node(value, *opened(value), depth)

    def _node(self, value: Any, kind: Any, context: Any, children: Sequence[Any], depth: int) -> None:
        is_mapping = kind in _MAPPINGS
        most = _KEYS if is_mapping else _ITEMS
        is_fixed = not is_mapping or all(type(key) is str for key in context)
        if self.packs and (len(children) > most or depth >= _DEPTH or not is_fixed):
            self.packed(value)
            return
        self.structure.append((kind, context, len(children)))
        i = 0
        try:
            for child in children:
                self.add(child, depth + 1)
                i += 1
        except Unstorable as error:
            raise error.inside(_step(kind, context, i)) from None


class _Structure:
    """What samples of one structure have in common.

    Attributes
    ----------
    leaves : list of (str, kind)
        Path and kind of each; the kind of a tensor is its dtype.
    """

    def __init__(self, tokens: tuple[Any, ...]) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self.spec = self._spec(iter(tokens), "")

    def schema(self, shapes: Sequence[Any]) -> Schema:
        """The schema of rows of these shapes."""
        leaves = []
        for (path, kind), shape in zip(self.leaves, shapes, strict=True):
            if type(kind) is torch.dtype:
                leaves.append(Leaf(path, "tensor", kind, kind, tuple(shape)))
            else:
                leaves.append(Leaf(path, kind, torch.uint8, torch.uint8, shape))
        return Schema(self.spec, tuple(leaves))

    def _spec(self, tokens: Iterator[Any], path: str) -> pytree.TreeSpec:
        token = next(tokens)
        if len(token) == 2:
            self.leaves.append((path, token[0]))
            return BARE
        kind, context, count = token
        steps = [_step(kind, context, i) for i in range(count)]
        children = [self._spec(tokens, path + step) for step in steps]
        return pytree.TreeSpec(kind, list(context) if kind in _MAPPINGS else thawed(context), children)


def _step(kind: Any, context: Any, i: int) -> str:
    """What the path of a leaf says of a child."""
    if kind in _MAPPINGS:
        return f"[{context[i]!r}]"
    if kind is collections.namedtuple:
        return f".{context._fields[i]}"
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind.steps[i]
    return f"[{i}]"


_PACKED = _Structure(((Packed, None, 1), ("bytes", 1)))


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
    """

    def __init__(self, *, packs: bool = True) -> None:
        self._packs = packs
        self._structures: dict[Any, _Structure] = {}
        self._spare = SpareMemory()

    @with_ordinary_tensors
    def to_rows(self, samples: Sequence[Any], device: torch.device | None = None) -> SampleRows:
        """The rows of a batch of samples, copied.

        Parameters
        ----------
        samples : sequence
            n samples, of any structures.
        device : torch.device, optional
            Where their tensors may be, besides the CPU.

        Returns
        -------
        SampleRows
            One part for each schema, and the samples that cannot be stored.
        """
        groups: dict[Any, tuple[list[int], list[list[Any]]]] = {}
        refused = {}
        for position, sample in enumerate(samples):
            try:
                flat = _Flat(device, packs=self._packs)
                flat.add(sample)
                structure = self._structure(tuple(flat.structure)) if self._fits(flat) else None
                if structure is None:
                    flat = _Flat()
                    flat.packed(sample)
                    structure = _PACKED
            except Unstorable as error:
                refused[position] = OutputError(str(error))
                continue
            positions, values = groups.setdefault((structure, tuple(flat.shapes)), ([], []))
            positions.append(position)
            values.append(flat.values)
        parts = []
        for (structure, shapes), (positions, values) in groups.items():
            schema, count = structure.schema(shapes), len(positions)
            pairs = zip(schema.leaves, zip(*values, strict=True), strict=True)
            columns = [_column(leaf, of_leaf, self._spare) for leaf, of_leaf in pairs]
            parts.append((np.array(positions, np.int64), Rows(schema, columns, count)))
        return SampleRows(parts, refused)

    def _fits(self, flat: _Flat) -> bool:
        return len(flat.values) <= _LEAVES or not self._packs

    def _structure(self, tokens: tuple[Any, ...]) -> _Structure | None:
        """The structure; None if it comes after the first 16."""
        found = self._structures.get(tokens)
        if found is None and (len(self._structures) < _STRUCTURES or not self._packs):
            found = self._structures[tokens] = _Structure(tokens)
        return found


@with_ordinary_tensors
def from_rows(rows: Rows, device: torch.device | None = None) -> list[Any]:
    """The samples that rows stand for, each with its own memory.

    Parameters
    ----------
    rows : Rows
        n rows that `Samples.to_rows` has made, in this process or another one.
    device : torch.device, optional
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
    try:
        columns = iter(
            [_values(leaf, column) for leaf, column in zip(rows.schema.leaves, rows.columns, strict=True)]
        )
        return listed(_closed(rows.schema.structure, columns, len(rows), device))
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:
        # Anybody may have written the schema, such as one with a dtype that a node cannot have.
        raise DamagedError(f"rows that are no samples: {error!r}") from None


def _column(leaf: Leaf, values: Sequence[Any], spare: SpareMemory) -> Tensor:
    """The column of one leaf's values, in memory that is theirs."""
    count = len(values)
    if leaf.kind == "tensor":
        if type(values[0]) is not Raw and leaf.dtype not in COMMON:
            raw = torch.cat([bytes_of(value) for value in values])
            return raw.view(leaf.dtype).view(count, *leaf.shape)
        column = spare.empty(count * leaf.row_bytes).view(leaf.dtype).view(count, *leaf.shape)
        if type(values[0]) is Raw:
            np.stack([value.array for value in values], out=column.numpy())
        else:
            torch.stack(values, out=column)  # type: ignore[arg-type]
        return column
    if leaf.kind in _NUMBERS:
        numbers = np.array(values, _NUMBERS[leaf.kind])
        return torch.from_numpy(numbers.view(np.uint8).reshape(count, -1))
    if leaf.shape[0] == 0:
        return torch.empty((count, 0), dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8).view(count, -1)


def _values(leaf: Leaf, column: Tensor) -> Column:
    """What a column stands for: a tensor, or a list of values."""
    column = column.cpu()
    if leaf.kind == "tensor":
        column = column if column.dtype == leaf.dtype else column.to(leaf.dtype)
        return column.movedim(-1, 1) if leaf.channels_last else column
    if leaf.kind == "none":
        return [None] * len(column)
    if leaf.kind in _NUMBERS:
        raw = column.contiguous().numpy().reshape(-1).view(_NUMBERS[leaf.kind])
        return raw.tolist()
    size, data = column.shape[1], column.contiguous().numpy().tobytes()
    parts = [data[i * size : i * size + size] for i in range(len(column))]
    return parts if leaf.kind == "bytes" else [part.decode("utf-8", "surrogatepass") for part in parts]


def _closed(
    spec: pytree.TreeSpec, columns: Iterator[Column], count: int, device: torch.device | None
) -> Column:
    if spec.type is None:
        return next(columns)
    children = [_closed(child, columns, count, device) for child in specs_of(spec)]
    if spec.type is Packed:
        return [unpack(data) for data in children[0]]
    if spec.type is Placed:
        (column,) = children
        return column.to(device) if isinstance(column, Tensor) else [value.to(device) for value in column]
    return closed(spec.type, spec.context, children, count)
