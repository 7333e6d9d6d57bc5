"""Reads the header of a segment: nothing that it states is used before it is checked."""

from __future__ import annotations

import json
import re
from typing import Any

from xxhash import xxh3_64_hexdigest

from torchcache2.files.errors import DamagedError, NewerFormatError, TooLargeError
from torchcache2.files.layout import FORMAT, FORMAT_VERSION, ZEROS, Layout
from torchcache2.files.schemajson import schema_from_json

MOST_HEADER_BYTES = 16 << 20
_MOST_BLOCK_BYTES = 1 << 20  # a reader accepts so many bytes of rows that share a block
_CODECS = ("none", "brotli", "blosc2")
_UNPARSABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


def read_size(start: bytes, file_bytes: int) -> int:
    """How many bytes the header has, from the file's first 8 bytes; `DamagedError` if it cannot have them."""
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > min(file_bytes - 8, MOST_HEADER_BYTES):
        raise DamagedError(f"a header of {size} bytes in a file of {file_bytes}")
    return size


def stated(text: bytes, file_bytes: int | None) -> tuple[int, bytes, int]:
    """How many bytes of a file its checksum covers, the checksum, and the bytes of the file.

    `text` is the header's JSON, and `file_bytes` what the file has; None: as many as the header states.
    `DamagedError` if it does not say. Nothing else is read before the checksum has been compared. Both are at
    the same place in every version of the format.
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
    """The layout that a header's JSON states. A row may have `limit` bytes.

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
        If the rows have a class that this process has not imported.
    """
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise DamagedError("not a segment")
        if _number(metadata["format_version"]) > FORMAT_VERSION:
            raise NewerFormatError(f"format {metadata['format_version']}")
        schema = schema_from_json(json.loads(metadata["schema"]), structured=structured)
        layout = Layout(
            namespace=bytes.fromhex(metadata["namespace"]),
            schema=schema,
            codec=metadata["codec"],
            count=header["keys"]["shape"][0],
            rows_per_block=_number(metadata["rows_per_block"]),
            payload_bytes=header["payload"]["shape"][0] if "payload" in header else 0,
            library=metadata["library"],
        )
        _check(layout, file_bytes - 8 - len(text), limit)
        if header != layout.tensors():
            raise DamagedError("tensors that contradict the schema")
    except _UNPARSABLE as error:
        raise DamagedError(_unparsed(error)) from None
    return layout


def _unparsed(error: Exception) -> str:
    # The message of a decoding error has the whole header in it, so it is cut.
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
    if layout.rows_per_block == 0 and (layout.codec != "none" or not fixed):
        raise DamagedError("no blocks")
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
    """Whether a file's bytes up to the rows are what was written."""
    zeroed = head.replace(checksum, ZEROS, 1)
    return xxh3_64_hexdigest(zeroed).encode() == checksum
