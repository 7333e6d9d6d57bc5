"""Writes the rows of a namespace to one plain safetensors file, for other programs.

docs/cli.md describes its content. Each row is decoded and checked. Rows are copied in pieces, so that the
file may be larger than memory; the index of each segment is whole in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import safetensors
import torch

from torchcache2.cli.report import Verdict, row_limit, trouble, verdict_of
from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Array, indices_of
from torchcache2.core.rows import Leaf
from torchcache2.core.version import __version__
from torchcache2.files.directory import CacheDirectory, Contents
from torchcache2.files.errors import UnreadableError
from torchcache2.files.filesystem import Descriptor, Descriptors, FileSystem, write_whole
from torchcache2.files.layout import DTYPES, nbytes_of, read_head, read_size
from torchcache2.files.segment import Segment, empty_columns

_VALUES = {  # dtype and shape of values other than tensors
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
        Name of the dtype in safetensors.
    unit : tuple of int
        Further dimensions of a row, for elements that safetensors does not support, such as complex ones.
    unit_bytes : int
        Bytes of an element.
    extents : ndarray of int64, shape (n, dimensions)
        The shape of each row.
    is_ragged : bool
        Whether shapes may differ.
    row_bytes, starts : ndarray of int64, shapes (n,), (n + 1,)
        Size and start of each row, in bytes.
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
        """Copy rows, uint8 ``(m, bytes)``, to their places in a piece that begins with row `first`."""
        if not self.is_ragged:
            if values.size:  # else `reshape` could not infer the number of rows
                piece.reshape(-1, values.shape[1])[positions - first] = values
            return
        for start, value in zip((self.starts[positions] - self.starts[first]).tolist(), values, strict=True):
            piece[start : start + len(value)] = value

    def add_to(self, tensors: Tensors, prefix: str) -> dict[str, str]:
        """Add the tensors; returns their names by content. The bytes of ``tensor`` must still be written."""
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
    """The columns of leaves with these shapes of rows, each ``(n, dimensions)``; None has no column."""
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
            dtype, is_ragged = "U8", True  # even if all lengths are equal
        elif leaf.stored in _COMPLEX:
            dtype, unit = _COMPLEX[leaf.stored], (2,)
        elif str(leaf.stored)[6:] in DTYPES:
            dtype = DTYPES[str(leaf.stored)[6:]]
        else:
            dtype, unit = "U8", () if unit_bytes == 1 else (unit_bytes,)
        columns.append(Column(number, name, dtype, unit, unit_bytes, shapes, is_ragged))
    return columns


class Tensors:
    """The tensors of a safetensors file, in file order: wide elements first.

    Attributes
    ----------
    nbytes : int
    starts : dict of str to int
        Start of each, after the header; known once the header is written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.starts: dict[str, int] = {}
        self._members: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._data: dict[str, Array] = {}

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Array | None = None) -> str:
        """Add a tensor; without `data`, the caller writes its bytes. Returns its name."""
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


_AT_ONCE = 128 << 20  # bytes of rows in memory at once
_UNSTEADY = Verdict("damaged", reason="reads differently each time")
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclasses.dataclass
class Dumped:
    """The rows and bytes written, and the segments left out."""

    rows: int = 0
    nbytes: int = 0  # of the file
    structures: int = 0
    length: int | None = None  # of the dataset, if it is one
    indexed: int = 0  # rows that are samples of it
    refused: dict[str, Verdict] = dataclasses.field(default_factory=dict)  # by the name of the segment


class _Refused(Exception):  # noqa: N818
    """A segment that cannot be read, or is damaged."""

    def __init__(self, name: str, found: Verdict) -> None:
        super().__init__(name)
        self.name, self.found = name, found


@dataclasses.dataclass
class _Part:
    """A segment, and the structure of its rows as JSON."""

    name: str
    segment: Segment
    structure: str


class _Group:
    """The rows of one structure, in file order: each is a row of one of the parts."""

    def __init__(self, parts: Sequence[_Part], of: Array, rows: Array) -> None:
        self.parts, self.of, self.rows = parts, of, rows
        leaves = parts[of[0]].segment.layout.schema.leaves
        extents = [np.empty((len(rows), len(leaf.shape)), np.int64) for leaf in leaves]
        for part, positions in self._by_part(0, len(rows)):
            for schema, which in part.segment.schemas(rows[positions]):
                for array, leaf in zip(extents, schema.leaves, strict=True):
                    array[positions[which]] = leaf.shape
        names = parts[of[0]].segment.layout.columns
        self.columns = leaf_columns(leaves, names, extents)
        self.row_bytes = sum((column.row_bytes for column in self.columns), np.zeros(len(rows), np.int64))

    def _by_part(self, first: int, end: int) -> Iterator[tuple[_Part, Array]]:
        """Each part with some of these rows, and their positions in the file."""
        order = np.argsort(self.of[first:end], kind="stable")
        numbers = self.of[first:end][order]
        bounds = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), end - first]
        for begin, stop in itertools.pairwise(bounds):
            yield self.parts[numbers[begin]], first + order[begin:stop]

    def windows(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that fit in memory: first row, and the row after the last."""
        ends, first = np.cumsum(self.row_bytes), 0
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
            yield first, end
            first = end

    def read(self, first: int, end: int) -> list[tuple[Column, Array]]:
        """The bytes of some rows for each column; `_Refused` if a segment is damaged."""
        pieces = [np.empty(int(one.starts[end] - one.starts[first]), np.uint8) for one in self.columns]
        parts = list(self._by_part(first, end))
        for part, positions in parts:
            try:
                part.segment.read_ahead(self.rows[positions])
            except OSError:
                continue  # reading the rows reports it
        for part, positions in parts:
            rows = self.rows[positions]
            for schema, which in part.segment.schemas(rows):
                try:
                    found = empty_columns(schema, len(which))
                    if not part.segment.read(rows[which], found, np.arange(len(which))):
                        found_now = verdict_of(part.segment)
                        is_steady = found_now.state == "damaged"
                        raise _Refused(part.name, found_now if is_steady else _UNSTEADY)
                except (OSError, UnreadableError, MemoryError) as error:
                    raise _Refused(part.name, trouble(error)) from None
                for column, piece in zip(self.columns, pieces, strict=True):
                    column.place(piece, first, positions[which], found[column.leaf])
        return list(zip(self.columns, pieces, strict=True))


def dump(directory: CacheDirectory, contents: Contents, path: str, progress: Progress) -> Dumped:
    """Write the rows of a namespace to a new file, which appears whole or not at all.

    Leaves out segments that are damaged or unreadable, and names them in the result. Enters
    ``progress(total)`` before writing `total` bytes, and calls what it yields with the number of new bytes.
    `OptionError` if the file exists.
    """
    fs, path, done = FileSystem(), os.path.abspath(path), Dumped()
    if fs.exists(path):
        raise OptionError(f"{path!r} exists already")
    done.length = _length(directory, contents.namespace)
    parts = _parts(directory, contents, done)
    while True:

        def fill(file: Descriptor, temporary: str) -> None:
            left = [part for part in parts if part.name not in done.refused]
            _write(fs, file, directory, contents.namespace, left, done, progress)
            with safetensors.safe_open(temporary, framework="np"):
                pass  # safetensors checks the header written

        try:
            write_whole(fs, path, fill, stem=f"{path}.", suffix=".tmp", replaces=False)
        except _Refused as error:  # try again without it: another segment may have these rows
            done.refused[error.name] = error.found
        else:
            return done


def _length(directory: CacheDirectory, namespace: str) -> int | None:
    stated = directory.fingerprint(namespace).get("dataset")
    length = stated.get("length") if isinstance(stated, dict) else None
    return length if type(length) is int and length >= 0 else None


def _parts(directory: CacheDirectory, contents: Contents, done: Dumped) -> list[_Part]:
    """The readable segments, oldest first."""
    fs, descriptors, found, limit = directory.fs, Descriptors(directory.fs), [], row_limit()
    for info in sorted(contents.segments):
        name = f"{contents.namespace}/{info.name}"
        path = os.path.join(directory.path, name)
        try:
            segment = Segment.open(fs, descriptors, path, limit=limit, structured=False)
            if segment.layout.namespace.hex() != contents.namespace:
                done.refused[name] = Verdict("damaged", reason="belongs to another namespace")
                continue
            found.append(_Part(name, segment, _structure(fs, path)))
        except (OSError, UnreadableError, OptionError, MemoryError) as error:
            done.refused[name] = trouble(error)
    return found


def _structure(fs: FileSystem, path: str) -> str:
    """The part that segments must share for their rows to be joined: structure, and leaves without shapes."""
    head, size = read_head(fs, path)
    end = 8 + read_size(head[:8], size)
    schema = json.loads(json.loads(head[8:end])["__metadata__"]["schema"])
    leaves = []
    for leaf in schema["leaves"]:
        said = {name: leaf[name] for name in ("path", "kind", "dtype", "stored") if name in leaf}
        leaves.append({**said, "dimensions": len(leaf["shape"])})
    return json.dumps({"structure": schema["structure"], "leaves": leaves})


def _write(
    fs: FileSystem,
    file: Descriptor,
    directory: CacheDirectory,
    namespace: str,
    parts: Sequence[_Part],
    done: Dumped,
    progress: Progress,
) -> None:
    keys, of, rows, index = _ordered(parts, done.length)
    structures = list(dict.fromkeys([part.structure for part in parts]))
    numbers = np.array([structures.index(part.structure) for part in parts], np.int64)
    tensors, groups, described = Tensors(), [], []
    tensors.add("keys", "U8", keys.shape, keys)
    if index is not None:
        tensors.add("index", "I64", index.shape, index)
    if len(structures) > 1:
        tensors.add("structure", "I64", of.shape, numbers[of])
    for number, structure in enumerate(structures):
        chosen = np.flatnonzero(numbers[of] == number)
        said = json.loads(structure)
        if len(chosen):
            group = _Group(parts, of[chosen], rows[chosen])
            prefix = f"structure{number}." if len(structures) > 1 else ""
            names = [column.add_to(tensors, prefix) for column in group.columns]
            groups.append((group, [of_leaf["tensor"] for of_leaf in names]))
            for column, of_leaf in zip(group.columns, names, strict=True):
                said["leaves"][column.leaf].update(of_leaf)
        described.append(said)
    fingerprint = directory.fingerprint(namespace)  # arguments, which may be secrets, are omitted
    metadata = {
        "written_by": f"torchcache2 dump {__version__}",
        "namespace": namespace,
        "class": str(fingerprint.get("class")),
        "dataset": json.dumps(fingerprint.get("dataset")),
        "structures": json.dumps(described),
    }
    start = tensors.write(fs, file, metadata)
    with progress(sum(int(group.row_bytes.sum()) for group, _ in groups)) as advance:
        for group, targets in groups:
            for first, end in group.windows():
                for name, (column, piece) in zip(targets, group.read(first, end), strict=True):
                    at = start + tensors.starts[name] + int(column.starts[first])
                    fs.write_all(file, [piece.data], at)
                    advance(len(piece))
    done.rows, done.nbytes, done.structures = len(keys), start + tensors.nbytes, len(structures)
    done.indexed = 0 if index is None else int(((index >= 0) & (index < (done.length or 0))).sum())


def _ordered(parts: Sequence[_Part], length: int | None) -> tuple[Array, Array, Array, Array | None]:
    """The rows in the order of the file, each key once.

    Returns keys (n, 16), numbers of parts (n,), rows in these (n,), and for a dataset indices (n,), with -1
    for keys of no int, which come last.
    """
    counts = [len(part.segment) for part in parts]
    keys = np.concatenate([np.empty((0, 16), np.uint8), *map(_keys, parts)])
    of = np.repeat(np.arange(len(parts)), counts)
    rows = np.concatenate([np.empty(0, np.int64), *map(np.arange, counts)])
    halves = keys.view("<u8")
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # equal keys stay in order, and the first one counts
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (halves[order[1:]] != halves[order[:-1]]).any(axis=1)
    chosen, index = np.sort(order[is_first]), None
    if length is not None:
        index, is_int = indices_of(keys[chosen])
        index = np.where(is_int, index, -1)
        by_index = np.lexsort((index, ~is_int))
        chosen, index = chosen[by_index], index[by_index]
    return keys[chosen], of[chosen], rows[chosen], index


def _keys(part: _Part) -> Array:
    assert part.segment.keys is not None
    return part.segment.keys
