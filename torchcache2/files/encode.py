"""Writes segments: `encode` makes the bytes of one, and `write` a file that is whole or not there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from torchcache2.core.keys import Bytes, Bytes2D, Keys
from torchcache2.core.memory import as_bytes
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.codec import Plain
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.lanes import Codec, Lane, lane
from torchcache2.files.layout import BLOCK_BYTES, Layout, schema_text
from torchcache2.files.whole import write_whole

SEGMENT = ".safetensors"
TEMPORARY = ".tmp"  # behind the name of a segment that is being written
_LEAST_SAVED = 0.1  # a codec that saves a smaller share of the bytes costs more time than that is worth
_HOPELESS = 0.98  # if a sample shrinks less than to this share, the rest is not tried
_MOST_PART = (1 << 31) - 64  # a codec accepts so many bytes of a leaf in one row
_SAMPLES = 32
_FEW = 4  # so few blocks are all tried
Batch = tuple[Keys, Rows]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The bytes of a segment.

    Attributes
    ----------
    layout : Layout
    head : bytes
        Header and index.
    data : sequence of memoryview
        The bytes of the rows, in the order in which they lie in the file.
    index : mapping of str to ndarray
        The tensors of `Layout.index`, with their shapes, by name.
    """

    layout: Layout
    head: bytes
    data: Sequence[memoryview]
    index: dict[str, np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.layout.row_data_bytes


def encode(batches: Sequence[Batch], codec: Codec, *, library: str = "") -> Encoded:
    """The bytes of a segment with these rows, at least one, all of one namespace and on the CPU.

    Schemas may differ only in the shapes of rows; `UnserialisableError` if their common schema has no JSON
    form, or one that is too long. Rows are not compressed if the codec would save less than 10 %. `library`
    is the version of this library, which the header states.
    """
    schemas = [rows.schema for _, rows in batches]
    schema = _common(schemas)
    schema_text(schema)  # this raises if the schema could not be read again
    pieces = [[as_bytes(c).numpy() for c in rows.in_logical_order().columns] for _, rows in batches]
    counts = [len(keys) for keys, _ in batches]
    layout = Layout(batches[0][0].namespace, schema, "none", sum(counts), library=library)
    pairs = zip(pieces, counts, strict=True)
    checksums = np.concatenate([row_checksums(columns, range(count)) for columns, count in pairs])
    lanes = [lane(leaf.stored) for leaf in schema.leaves]
    if any(column.shape[1] > _MOST_PART for columns in pieces for column in columns):
        codec = Plain()
    index: dict[str, np.ndarray[Any, Any]] = {}
    is_ragged = layout.extents > 0
    per_block = 1 if is_ragged else max(1, BLOCK_BYTES // max(1, schema.row_bytes))
    blocks = None
    if is_ragged:
        index["shapes"] = _shapes(schema, schemas, counts)
        blocks = _encoded(_blocks(pieces, per_block), codec, lanes, limit=None)
    elif codec.name != "none" and schema.row_bytes and _is_promising(pieces, per_block, codec, lanes):
        limit = int(layout.row_data_bytes * (1 - _LEAST_SAVED))
        blocks = _encoded(_blocks(pieces, per_block), codec, lanes, limit=limit)
    data: Sequence[Any]
    if blocks is None:
        data = [columns[i].reshape(-1) for i in layout.column_order for columns in pieces]
    else:
        data, ends = blocks, np.cumsum([0, *map(len, blocks)], dtype=np.int64)
        index["offsets"] = ends
        index["block_checksums"] = np.array([xxh3_64_intdigest(block) for block in blocks], np.uint64)
        size = int(ends[-1])
        layout = dataclasses.replace(layout, codec=codec.name, rows_per_block=per_block, payload_bytes=size)
    index["keys"] = np.concatenate([keys.data for keys, _ in batches])
    index["checksums"] = checksums
    head = layout.header([np.ascontiguousarray(index[name]).tobytes() for name in layout.index])
    return Encoded(layout, head, [memoryview(block) for block in data], index)


def write(fs: FileSystem, folder: str, name: str, encoded: Encoded) -> None:
    """Write a segment that is whole or not there."""
    path, stem = os.path.join(folder, name), os.path.join(folder, "")
    write_whole(fs, path, [memoryview(encoded.head), *encoded.data], stem=stem, suffix=SEGMENT + TEMPORARY)


def row_checksums(
    columns: Sequence[Bytes], rows: Sequence[int] | range
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """xxh3-64 of some rows, leaf after leaf; columns are contiguous uint8 ``(n, bytes)``."""
    views = [(column.reshape(-1).data, column.shape[1]) for column in columns if column.shape[1]]
    if len(views) == 1:
        view, size = views[0]
        digests = [xxh3_64_intdigest(view[row * size : row * size + size]) for row in rows]
    else:
        digests = []
        for row in rows:
            state = xxh3_64()
            for view, size in views:
                state.update(view[row * size : row * size + size])
            digests.append(state.intdigest())
    return np.array(digests, np.uint64)


def _common(schemas: Sequence[Schema]) -> Schema:
    """The schema of all rows, with -1 for extents that differ."""
    first, shapes = schemas[0], []
    for i, leaf in enumerate(first.leaves):
        others = np.array([schema.leaves[i].shape for schema in schemas], np.int64)
        same = (others == others[0]).all(axis=0)
        shapes.append(tuple(n if s else -1 for n, s in zip(leaf.shape, same.tolist(), strict=True)))
    return first.with_shapes(shapes)


def _shapes(schema: Schema, schemas: Sequence[Schema], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    rows = []
    for other in schemas:
        pairs = zip(schema.leaves, other.leaves, strict=True)
        rows.append([n for mine, leaf in pairs for m, n in zip(mine.shape, leaf.shape, strict=True) if m < 0])
    return np.repeat(np.array(rows, np.int64), counts, axis=0)


def _blocks(pieces: Sequence[Sequence[Bytes2D]], per_block: int) -> Iterator[list[Bytes]]:
    """The rows of each block, leaf by leaf."""
    left: list[list[Bytes2D]] = []  # rows of a block that is not full yet
    filled = 0
    for columns in pieces:
        count, start = len(columns[0]), 0
        while start < count:
            take = min(per_block - filled, count - start)
            left.append([column[start : start + take] for column in columns])
            filled, start = filled + take, start + take
            if filled == per_block:
                yield _joined(left)
                left, filled = [], 0
    if left:
        yield _joined(left)


def _joined(parts: Sequence[Sequence[Bytes2D]]) -> list[Bytes]:
    if len(parts) == 1:
        return [column.reshape(-1) for column in parts[0]]
    return [np.concatenate(columns).reshape(-1) for columns in zip(*parts, strict=True)]


def _encoded(
    blocks: Iterator[list[Bytes]], codec: Codec, lanes: Sequence[Lane], limit: int | None
) -> list[bytes] | None:
    """Encoded blocks; None if they are longer than `limit` together."""
    done, size = [], 0
    for block in blocks:
        done.append(codec.encode(block, lanes))
        size += len(done[-1])
        if limit is not None and size > limit:
            return None
    return done


def _is_promising(
    pieces: Sequence[Sequence[Bytes]], per_block: int, codec: Codec, lanes: Sequence[Lane]
) -> bool:
    """Whether a sample of the blocks, evenly spread, shrinks enough to try all of them."""
    counts = [len(columns[0]) for columns in pieces]
    if sum(counts) <= per_block * _FEW:
        return True  # the sample would be all of them
    step = max(1, sum(counts) // _SAMPLES)
    before = after = 0
    for columns in pieces[:: max(1, len(pieces) // _SAMPLES)]:
        for start in range(0, len(columns[0]), step):
            block = [column[start : start + per_block].reshape(-1) for column in columns]
            before += sum(map(len, block))
            after += len(codec.encode(block, lanes))
    return after <= _HOPELESS * before
