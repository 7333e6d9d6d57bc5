"""What `torchcache2 dump` makes of the leaves of rows: the tensors of a plain safetensors file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.keys import Array
from torchcache2.core.rows import Leaf
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.files.layout import DTYPES, nbytes_of

_VALUES = {  # dtype of values that are no tensors, and their shape
    "bool": ("BOOL", ()),
    "int": ("I64", ()),
    "float": ("F64", ()),
    "complex": ("F64", (2,)),
}
_COMPLEX = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}


@dataclasses.dataclass
class Column:
    """The values of one leaf for n rows.

    Attributes
    ----------
    leaf : int
        The number of the leaf.
    name : str
    dtype : str
        As safetensors has it.
    unit : tuple of int
        What comes behind the shape of a row: the parts of an element that safetensors does not know.
    unit_bytes : int
        Bytes of an element.
    extents : ndarray of int64, shape (n, dimensions)
        The shape of each row.
    is_ragged : bool
        Whether shapes may differ.
    row_bytes, starts : ndarray of int64, shapes (n,), (n + 1,)
        How many bytes each row has, and where they begin.
    """

    leaf: int
    name: str
    dtype: str
    unit: tuple[int, ...]
    unit_bytes: int
    extents: Array
    is_ragged: bool

    def __post_init__(self) -> None:
        self.row_bytes = self.extents.prod(axis=1) * self.unit_bytes
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.row_bytes)])

    def place(self, piece: Array, first: int, positions: Array, values: Array) -> None:
        """Copy rows, uint8 ``(m, bytes)``, to where they belong in a piece that begins with row `first`."""
        if not self.is_ragged:
            if values.size:  # else numpy could not tell how many rows without bytes there are
                piece.reshape(-1, values.shape[1])[positions - first] = values
            return
        for start, value in zip((self.starts[positions] - self.starts[first]).tolist(), values, strict=True):
            piece[start : start + len(value)] = value

    def add_to(self, tensors: Tensors, prefix: str) -> dict[str, str]:
        """Add the tensors; what each holds, and its name. The bytes of ``tensor`` are still to be written."""
        count, dimensions = self.extents.shape
        if not self.is_ragged:
            shape = tuple(self.extents[0].tolist())
            return {"tensor": tensors.add(prefix + self.name, self.dtype, (count, *shape, *self.unit))}
        if is_long := bool((self.extents[:, 1:] == self.extents[:1, 1:]).all()):  # only the first one differs
            lengths, rest = self.extents[:, 0], tuple(self.extents[0, 1:].tolist())
        else:
            lengths, rest = self.extents.prod(axis=1), ()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        shape = (int(offsets[-1]), *rest, *self.unit)
        name = tensors.add(prefix + self.name, self.dtype, shape)
        names = {"tensor": name, "offsets": tensors.add(f"{name}.offsets", "I64", offsets.shape, offsets)}
        if not is_long:
            shapes = np.ascontiguousarray(self.extents)
            names["shapes"] = tensors.add(f"{name}.shapes", "I64", (count, dimensions), shapes)
        return names


def leaf_columns(leaves: Sequence[Leaf], names: Sequence[str], extents: Sequence[Array]) -> list[Column]:
    """The columns of leaves whose rows have these shapes, each ``(n, dimensions)``; None has no column."""
    columns = []
    for number, (leaf, name, shapes) in enumerate(zip(leaves, names, extents, strict=True)):
        if leaf.kind == "none":
            continue
        unit: tuple[int, ...] = ()
        unit_bytes, is_ragged = leaf.stored.itemsize, bool((shapes != shapes[:1]).any())
        if leaf.kind in _VALUES:
            dtype, unit = _VALUES[leaf.kind]
            unit_bytes, shapes, is_ragged = leaf.row_bytes, shapes[:, :0], False
        elif leaf.kind != "tensor":
            dtype, is_ragged = "U8", True  # also if all happen to have one length
        elif leaf.stored in _COMPLEX:
            dtype, unit = _COMPLEX[leaf.stored], (2,)
        elif str(leaf.stored)[6:] in DTYPES:
            dtype = DTYPES[str(leaf.stored)[6:]]
        else:
            dtype, unit = "U8", () if unit_bytes == 1 else (unit_bytes,)
        columns.append(Column(number, name, dtype, unit, unit_bytes, shapes, is_ragged))
    return columns


class Tensors:
    """The tensors of a safetensors file, in the order in which they lie: those of wide elements first.

    Attributes
    ----------
    nbytes : int
    starts : dict of str to int
        Where each begins, behind the header; they are there when the header has been written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.starts: dict[str, int] = {}
        self._members: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._data: dict[str, Array] = {}

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Array | None = None) -> str:
        """Add a tensor; without `data`, its bytes are written by somebody else. Returns its name."""
        plain, number = name, 1
        while name in self._members:
            name, number = f"{plain} {number}", number + 1
        self._members[name] = dtype, tuple(shape)
        if data is not None:
            self._data[name] = np.ascontiguousarray(data)
        return name

    def write(self, fs: FileSystem, file: Descriptor, metadata: Mapping[str, str]) -> int:
        """Write the header, and the tensors whose data is known; returns where the header ends."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name in sorted(self._members, key=lambda name: -nbytes_of(self._members[name][0])):
            dtype, shape = self._members[name]
            self.starts[name] = self.nbytes
            self.nbytes += nbytes_of(dtype, shape)
            offsets = [self.starts[name], self.nbytes]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        end = fs.write_all(file, [memoryview(len(text).to_bytes(8, "little") + text)], 0)
        for name, data in self._data.items():
            fs.write_all(file, [data.reshape(-1).view(np.uint8).data], end + self.starts[name])
        return end
