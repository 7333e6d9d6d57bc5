"""`Layout`: where everything is in a segment of version 1 of the format, which docs/format.md specifies.

A segment is an immutable safetensors file with rows of one namespace. Everything before the rows is the
*index*: to open a segment, this is all that is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

from torchcache2.core.rows import Schema
from torchcache2.files.errors import UnserialisableError
from torchcache2.files.schemajson import schema_to_json

FORMAT_VERSION = 1
MOST_SCHEMA_BYTES = 2 << 20  # the header escapes it, and has the paths of its leaves once more
BLOCK_BYTES = 8192  # rows share a block up to this size
FORMAT = "torchcache2"
ZEROS = b"0" * 16
_PAGE = 4096
_ALIGNED = 1 << 20
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # what every reader of safetensors can read; other leaves are stored as their bytes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything is in a segment.

    Attributes
    ----------
    namespace : bytes
    schema : Schema
        The schema of all rows; extents that differ between them are -1.
    codec : str
    count : int
        How many rows there are.
    rows_per_block : int
        0 if rows are stored as columns, one for each leaf; else they are stored as blocks in the payload.
    payload_bytes : int
    library : str
        The version that wrote the segment.
    """

    namespace: bytes
    schema: Schema
    codec: str
    count: int
    rows_per_block: int = 0
    payload_bytes: int = 0
    library: str = ""

    @property
    def blocks(self) -> int:
        """Blocks of the payload."""
        return -(-self.count // self.rows_per_block) if self.rows_per_block else 0

    @property
    def extents(self) -> int:
        """Extents that differ between rows."""
        return sum(leaf.shape.count(-1) for leaf in self.schema.leaves)

    @property
    def index(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the tensors that are not rows, in the order in which they lie."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "keys": ("U8", (self.count, 16)),
            "checksums": ("U64", (self.count,)),
        }
        if self.rows_per_block:
            tensors["block_checksums"] = ("U64", (self.blocks,))
            tensors["offsets"] = ("I64", (self.blocks + 1,))
        if self.extents:
            tensors["shapes"] = ("I64", (self.count, self.extents))
        return tensors

    @property
    def index_bytes(self) -> int:
        """Bytes of the tensors of `index`."""
        return sum(nbytes_of(dtype, shape) for dtype, shape in self.index.values())

    @property
    def columns(self) -> list[str]:
        """The name of each leaf's tensor."""
        names: dict[str, None] = {}
        for leaf in self.schema.leaves:
            path = re.sub(r"\['?|'?\]", ".", leaf.path).replace("..", ".").strip(".")
            plain = name = f"output.{path}" if path else "output"
            number = len(names)
            while name in names:
                name, number = f"{plain} {number}", number + 1
            names[name] = None
        return list(names)

    @property
    def column_starts(self) -> list[int]:
        """Where each leaf's tensor begins, in bytes behind the beginning of the first tensor of rows."""
        starts = [0] * len(self.schema.leaves)
        position = 0
        for i in self.column_order:
            starts[i] = position
            position += self.count * self.schema.leaves[i].row_bytes
        return starts

    @property
    def column_order(self) -> list[int]:
        """Numbers of the leaves as their tensors lie in the file: wide elements first, so all are aligned."""
        stored = [str(leaf.stored)[6:] for leaf in self.schema.leaves]
        return sorted(range(len(stored)), key=lambda i: -nbytes_of(DTYPES.get(stored[i], "U8")))

    @property
    def row_data_bytes(self) -> int:
        """Bytes of the rows as stored."""
        return self.payload_bytes if self.rows_per_block else self.count * self.schema.row_bytes

    def tensors(self) -> dict[str, Any]:
        """The header's members, without metadata."""
        tensors = self.index
        if self.rows_per_block:
            tensors["payload"] = ("U8", (self.payload_bytes,))
        else:
            names = self.columns
            for i in self.column_order:
                leaf = self.schema.leaves[i]
                dtype = DTYPES.get(str(leaf.stored)[6:])
                shape = leaf.shape if dtype else (leaf.row_bytes,)
                tensors[names[i]] = (dtype or "U8", (self.count, *shape))
        members, position = {}, 0
        for name, (kind, extents) in tensors.items():
            end = position + nbytes_of(kind, extents)
            members[name] = {"dtype": kind, "shape": list(extents), "data_offsets": [position, end]}
            position = end
        return members

    def header(self, index: Sequence[bytes]) -> bytes:
        """The file's bytes up to the rows, with the tensors of `index` in its order."""
        metadata = {
            "checksum": ZEROS.decode(),
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "library": self.library,
            "namespace": self.namespace.hex(),
            "codec": self.codec,
            "rows_per_block": str(self.rows_per_block),
            "schema": schema_text(self.schema),
        }
        text = json.dumps({"__metadata__": metadata, **self.tensors()}, separators=(",", ":")).encode()
        unit = _PAGE if self.row_data_bytes >= _ALIGNED else 8
        text += b" " * (-(8 + len(text) + self.index_bytes) % unit)
        start = len(text).to_bytes(8, "little")
        digits = xxh3_64_hexdigest(b"".join([start, text, *index])).encode()
        return b"".join([start, text.replace(ZEROS, digits, 1), *index])


def schema_text(schema: Schema) -> str:
    """The JSON of a schema; `UnserialisableError` if it has none, or one too long to be read again."""
    text = json.dumps(schema_to_json(schema), separators=(",", ":"))
    if len(text) > MOST_SCHEMA_BYTES:
        raise UnserialisableError(f"a structure that takes {len(text):,} bytes to write down")
    return text


def nbytes_of(dtype: str, shape: Sequence[int] = ()) -> int:
    """Bytes of a tensor, whose dtype is named as in a header; without a shape, of one element."""
    is_wide = dtype not in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2")
    return math.prod(shape) * (int(dtype.lstrip("BFIU")) // 8 if is_wide else 1)
