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

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.arrays import Positions
from torchcache2.core.errors import OutputError
from torchcache2.core.gather import with_ordinary_tensors
from torchcache2.core.private import pytree
from torchcache2.core.rows import Rows
from torchcache2.core.schema import Leaf
from torchcache2.core.spare import SpareMemory
from torchcache2.core.values import specs_of
from torchcache2.engine.values.flat import NUMBERS, PACKED, Flat, Structure
from torchcache2.engine.values.nodes import COMMON, Column, Packed, Placed, Raw, Unstorable, bytes_of, listed
from torchcache2.engine.values.trees import closed
from torchcache2.engine.values.unpacked import unpack
from torchcache2.files.errors import DamagedError, UnreadableError

__all__ = ["SampleRows", "Samples", "from_rows"]

_STRUCTURES = 16  # of one namespace; each is a file of its own on the disk
_LEAVES = 256


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
        self._structures: dict[Any, Structure] = {}
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
                flat = Flat(device, packs=self._packs)
                flat.add(sample)
                structure = self._structure(tuple(flat.structure)) if self._fits(flat) else None
                if structure is None:
                    flat = Flat()
                    flat.packed(sample)
                    structure = PACKED
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

    def _fits(self, flat: Flat) -> bool:
        return len(flat.values) <= _LEAVES or not self._packs

    def _structure(self, tokens: tuple[Any, ...]) -> Structure | None:
        """The structure; None if it comes after the first 16."""
        found = self._structures.get(tokens)
        if found is None and (len(self._structures) < _STRUCTURES or not self._packs):
            found = self._structures[tokens] = Structure(tokens)
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
    if leaf.kind in NUMBERS:
        numbers = np.array(values, NUMBERS[leaf.kind])
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
    if leaf.kind in NUMBERS:
        raw = column.contiguous().numpy().reshape(-1).view(NUMBERS[leaf.kind])
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
