"""`Layout`: the layout of a segment in version 2 of the format; see docs/format.md.

A segment is an immutable safetensors file with rows of one namespace. Everything before the rows is its
*head*: opening a segment reads only this, and checks it before using anything in it.

A file ``<ulid>.safetensors.head`` has exactly these bytes. In the local folder of a bucket, it shows that the
bucket has the segment, so rows can be read from there without a listing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from torchcache2.core.errors import DamagedError, NewerFormatError, TooLargeError, UnserialisableError
from torchcache2.core.keys import Array
from torchcache2.core.rows import Schema
from torchcache2.files.filesystem import FileSystem, write_whole
from torchcache2.files.schema import schema_from_json, schema_to_json

FORMAT_VERSION = 2
SEGMENT = ".safetensors"
INDEX_FILE = ".run"
TEMPORARY = ".tmp"  # suffix of a segment being written
HEAD = ".head"  # suffix of the head of a bucket's segment
MOST_SCHEMA_BYTES = 2 << 20  # the header escapes it, and repeats the paths of leaves
BLOCK_BYTES = 4096  # rows share a block up to this size: whoever wants one decodes all
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
}  # readable by all safetensors readers; other leaves are stored as bytes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything is in a segment.

    Attributes
    ----------
    namespace : bytes
    schema : Schema
        The schema of all rows, with -1 for extents that differ between them.
    codec : str
    count : int
        How many rows there are.
    rows_per_block : int
        0 if rows of equal size lie one after another; else rows are in blocks, at `offsets`.
    payload_bytes : int
        Bytes of the blocks.
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
        """Dtype and shape of the tensors before the rows, in file order."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "keys": ("U8", (self.count, 16)),
            "checksums": ("U64", (self.count,)),
        }
        if self.rows_per_block:
            tensors["offsets"] = ("I64", (self.blocks + 1,))
        if self.extents:
            tensors["shapes"] = ("I64", (self.count, self.extents))
        return tensors

    @property
    def index_bytes(self) -> int:
        """Bytes of the tensors of `index`."""
        return sum(nbytes_of(dtype, shape) for dtype, shape in self.index.values())

    @property
    def row_data_bytes(self) -> int:
        """Bytes of the rows as stored."""
        return self.payload_bytes if self.rows_per_block else self.count * self.schema.row_bytes

    def tensors(self) -> dict[str, Any]:
        """The header's members, without metadata."""
        tensors = self.index
        if self.rows_per_block:
            tensors["payload"] = ("U8", (self.payload_bytes,))
        elif len(self.schema.leaves) == 1:
            (leaf,) = self.schema.leaves
            path = re.sub(r"\['?|'?\]", ".", leaf.path).replace("..", ".").strip(".")
            dtype = DTYPES.get(str(leaf.stored)[6:])
            tensors[f"output.{path}" if path else "output"] = (
                dtype or "U8",
                (self.count, *(leaf.shape if dtype else (leaf.row_bytes,))),
            )
        else:
            tensors["payload"] = ("U8", (self.count, self.schema.row_bytes))
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
    """The JSON of a schema; `UnserialisableError` if it has none, or one that is too long."""
    text = json.dumps(schema_to_json(schema), separators=(",", ":"))
    if len(text) > MOST_SCHEMA_BYTES:
        raise UnserialisableError(f"a structure that takes {len(text):,} bytes to write down")
    return text


def nbytes_of(dtype: str, shape: Sequence[int] = ()) -> int:
    """Bytes of a tensor, with a dtype as in a header; without a shape, of one element."""
    is_wide = dtype not in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2")
    return math.prod(shape) * (int(dtype.lstrip("BFIU")) // 8 if is_wide else 1)


MOST_HEADER_BYTES = 16 << 20
_MOST_BLOCK_BYTES = 1 << 20  # most bytes of rows sharing a block that readers accept
_CODECS = ("none", "brotli", "blosc2")
_UNPARSABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


def read_size(start: bytes, file_bytes: int) -> int:
    """Bytes of the header, from the file's first 8 bytes; `DamagedError` if impossible."""
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > min(file_bytes - 8, MOST_HEADER_BYTES):
        raise DamagedError(f"a header of {size} bytes in a file of {file_bytes}")
    return size


def stated(text: bytes, file_bytes: int | None) -> tuple[int, bytes, int]:
    """How many bytes of a file its checksum covers, the checksum, and the file's size.

    `text` is the header's JSON, and `file_bytes` the file's size; None: as the header states. `DamagedError`
    if the header lacks them. Nothing else is read before the checksum was compared; it is at the same place
    in every version of the format.
    """
    end = 8 + len(text)
    try:
        header = json.loads(text)
        checksum = header.pop("__metadata__")["checksum"].encode()
        if file_bytes is None:
            file_bytes = end + max(tensor["data_offsets"][1] for tensor in header.values())
        rows = [name for name in header if name == "payload" or name.startswith("output")]
        start = end + min((header[name]["data_offsets"][0] for name in rows), default=file_bytes - end)
    except _UNPARSABLE as error:
        raise DamagedError(_unparsed(error)) from None
    are_numbers = type(start) is int and type(file_bytes) is int
    if not are_numbers or not end <= start <= file_bytes or len(checksum) != 16:
        raise DamagedError(f"rows that do not begin within the {file_bytes} bytes of the file")
    return start, checksum, file_bytes


def parse(text: bytes, file_bytes: int, limit: int, *, structured: bool = True) -> Layout:
    """The layout in a header's JSON. A row may have up to `limit` bytes.

    Without `structured`, rows can only be checked; see `schema_from_json`.

    Raises
    ------
    DamagedError
        If the header contradicts itself, the format, or the size of the file.
    NewerFormatError
        If a later version wrote it.
    TooLargeError
        If rows have more than `limit` bytes.
    UnknownClassError
        If the rows have a class that this process has not imported (yet).
    """
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise DamagedError("not a segment")
        if _number(metadata["format_version"]) != FORMAT_VERSION:
            raise NewerFormatError(f"format {metadata['format_version']}, and this one is {FORMAT_VERSION}")
        schema = schema_from_json(json.loads(metadata["schema"]), structured=structured)
        layout = Layout(
            namespace=bytes.fromhex(metadata["namespace"]),
            schema=schema,
            codec=metadata["codec"],
            count=header["keys"]["shape"][0],
            rows_per_block=(per_block := _number(metadata["rows_per_block"])),
            payload_bytes=header["payload"]["shape"][0] if per_block else 0,
            library=metadata["library"],
        )
        _check(layout, file_bytes - 8 - len(text), limit)
        if header != layout.tensors():
            raise DamagedError("tensors that contradict the schema")
    except _UNPARSABLE as error:
        raise DamagedError(_unparsed(error)) from None
    return layout


def _unparsed(error: Exception) -> str:
    # Cut, as a decoding error's message contains the whole header.
    return f"a header that does not parse, {type(error).__name__}: {str(error)[:200]}"


def _number(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,9}", text, re.ASCII):
        raise DamagedError(f"a number written as {text!r}")
    return int(text)


def _check(layout: Layout, data_bytes: int, limit: int) -> None:
    """Raise if numbers are impossible, before anything is computed or allocated with them."""
    counts = (layout.count, layout.rows_per_block, layout.payload_bytes)
    if any(type(count) is not int or count < 0 for count in counts) or layout.count == 0:
        raise DamagedError(f"counts of {counts}")
    if layout.codec not in _CODECS or len(layout.namespace) != 16:
        raise DamagedError(f"codec {layout.codec!r}, namespace of {len(layout.namespace)} bytes")
    if layout.count * 24 > data_bytes:
        raise DamagedError(f"{layout.count} rows in {data_bytes} bytes")
    fixed = layout.extents == 0
    if (layout.rows_per_block == 0) != (layout.codec == "none" and fixed):
        raise DamagedError(f"blocks of {layout.rows_per_block} rows, and codec {layout.codec}")
    if fixed:
        row_bytes = layout.schema.row_bytes
        most = max(row_bytes, _MOST_BLOCK_BYTES)
        if row_bytes > limit:
            raise TooLargeError(f"rows of {row_bytes} bytes, and the limit is {limit}")
        if layout.rows_per_block * max(1, row_bytes) > most:
            raise DamagedError(f"blocks of {layout.rows_per_block} rows of {row_bytes} bytes")
    elif layout.rows_per_block != 1:
        raise DamagedError("ragged rows that share a block")
    if layout.index_bytes + layout.row_data_bytes != data_bytes:
        raise DamagedError(f"{data_bytes} bytes, expected {layout.index_bytes + layout.row_data_bytes}")


def checked(head: bytes, checksum: bytes) -> bool:
    """Whether a head matches its checksum."""
    zeroed = head.replace(checksum, ZEROS, 1)
    return xxh3_64_hexdigest(zeroed).encode() == checksum


_FIRST_READ = 64 << 10  # bytes of the first read; most heads are shorter
_MOST_EXTENT = 1 << 48


def head_size(first: bytes, size: int) -> int:
    """Bytes of a head, from the `first` bytes of a segment of `size` bytes.

    If the result exceeds `first`, read that many bytes and call again. `DamagedError` if it is not a segment.
    """
    end = 8 + read_size(first[:8], size)
    return end if end > len(first) else stated(first[8:end], size)[0]


def read_head(fs: FileSystem, path: str) -> tuple[bytes, int]:
    """The head of a segment, not checked yet, and the size of the file."""
    file = fs.open(path)
    size = fs.size(file)
    buffer = bytearray(min(size, _FIRST_READ))
    first = bytes(buffer[: fs.read(file, [buffer], 0)])  # the rest may be in the bucket
    if len(first) < 8:
        first = fs.read_bytes(file, 0, min(size, 8))
    while (needed := head_size(first, size)) > len(first):
        first += fs.read_bytes(file, len(first), needed - len(first))
    return first[:needed], size


def write_head(fs: FileSystem, path: str, head: bytes) -> None:
    """Write the head of the segment at a path, which need not exist; replaces an older head.

    Does not sync: a head damaged by a power cut is noticed, and fetched again.
    """
    stem = os.path.join(os.path.dirname(path), "")
    content = [memoryview(head)]
    write_whole(fs, path + HEAD, content, stem=stem, suffix=SEGMENT + TEMPORARY, sync=False, sync_name=False)


def parse_head(
    head: bytes, size: int | None, limit: int, *, structured: bool = True
) -> tuple[Layout, dict[str, Array]]:
    """The layout of a segment, and the tensors of its index. A row may have up to `limit` bytes.

    The segment must have `size` bytes; None: as it states. Raises the errors of `parse`.
    """
    end = 8 + read_size(head[:8], len(head) if size is None else size)
    start, checksum, size = stated(head[8:end], size)
    if start != len(head) or not checked(head, checksum):
        raise DamagedError("another checksum")
    layout = parse(head[8:end], size, limit, structured=structured)
    index, position = {}, end
    for name, (dtype, shape) in layout.index.items():
        kind = {"U8": "<u1", "U64": "<u8", "I64": "<i8"}[dtype]
        array = np.frombuffer(head, kind, int(np.prod(shape)), position).reshape(shape)
        index[name] = array.copy()  # a view would keep the whole head in memory
        position += array.nbytes
    _check_index(layout, index, limit)
    return layout, index


def _check_index(layout: Layout, index: dict[str, Array], limit: int) -> None:
    """Raise if offsets or shapes are impossible: any program may have written them."""
    if "offsets" in index:
        offsets = index["offsets"]
        if offsets[0] != 0 or offsets[-1] != layout.payload_bytes or (offsets[1:] < offsets[:-1]).any():
            raise DamagedError("offsets that do not grow")
    if "shapes" in index:
        shapes = index["shapes"]
        if (shapes < 0).any() or (shapes > _MOST_EXTENT).any():
            raise DamagedError("impossible shapes")
        column = 0
        sizes = np.zeros(layout.count)
        with np.errstate(over="ignore", invalid="ignore"):
            for leaf in layout.schema.leaves:
                sizes_of_leaf = np.full(layout.count, float(leaf.stored.itemsize))
                for extent in leaf.shape:
                    sizes_of_leaf *= shapes[:, column] if extent < 0 else extent
                    column += extent < 0
                sizes += sizes_of_leaf
        if not (sizes <= limit).all():
            raise TooLargeError(f"a row of more than {limit} bytes")
