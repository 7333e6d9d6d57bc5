"""Names and values (`Records`) of rows on a server; docs/format.md specifies the bytes.

Each value carries its schema, so it can be read alone: a server may forget any other. Its checksum also
covers the key, so a value under another key counts as damaged.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from torchcache2.core.errors import DamagedError, OptionError, UnknownClassError
from torchcache2.core.keys import Array, Keys, Positions
from torchcache2.core.memory import as_bytes
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.codec import Codec, Lane, lane
from torchcache2.files.codec import codec as codec_of
from torchcache2.files.layout import MOST_SCHEMA_BYTES, schema_text
from torchcache2.files.schema import schema_from_json
from torchcache2.files.segment import Columns, empty_columns, rows_of

MOST_ROW_BYTES = 256 << 20  # a server takes values of up to 512 MB
_MAGIC = b"tc2\x02"  # the last byte is the version
_START = struct.Struct("<4sBI")  # magic, codec, bytes of the schema
_CODECS = ("none", "brotli", "blosc2")
_SUM_BYTES = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE = 1 << 20  # bytes joined at once, so that they stay in the CPU cache
_LARGE = 1 << 15  # larger values are copied alone
_MOST_HEADS = 1000
_SAMPLES = 4  # rows compressed to see if it pays
_LEAST_SAVED = 0.1
_UNPARSABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


_ROWS = b"torchcache2:"
_CLAIMS = b"torchcache2:claim:"  # never a row's name: there, 32 hexadecimal digits follow


def row_names(keys: Keys) -> list[bytes]:
    """The name of each key's row."""
    return _names(_ROWS, keys)


def claim_names(keys: Keys) -> list[bytes]:
    """The name of each key's claim, which lies on the server of the row."""
    return _names(_CLAIMS, keys)


def pattern(namespace: bytes) -> bytes:
    """The pattern that SCAN takes for the rows of a namespace; digits need no escape in it."""
    return b"%s%s:*" % (_ROWS, namespace.hex().encode())


def _names(start: bytes, keys: Keys) -> list[bytes]:
    start = b"%s%s:" % (start, keys.namespace.hex().encode())
    return [start + key for key in split(keys.data)]


def split(data: Array) -> list[bytes]:
    """Each of some keys, uint8 ``(n, 16)``, as bytes."""
    whole = data.tobytes()
    return [whole[at : at + 16] for at in range(0, len(whole), 16)]


class Decoded(NamedTuple):
    """Decoded values.

    Attributes
    ----------
    parts : list of (ndarray of int64, Rows)
        Positions in the batch and their rows; several parts may have the same schema.
    damaged : list of int
        Positions of values that differ from what was written under their keys.
    """

    parts: list[tuple[Positions, Rows]]
    damaged: list[int]


class _Parsed(NamedTuple):
    schema: Schema
    codec: Codec
    lanes: list[Lane]


class Records:
    """Encodes rows with a codec, and decodes rows of any codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._plain = codec_of("none")
        self._parsed: dict[bytes, _Parsed] = {}

    def encode(self, keys: Keys, rows: Rows) -> list[bytes]:
        """The value of each row, on the CPU; `UnserialisableError` if their schema has no JSON form.

        Rows stay uncompressed if the codec saves less than 10 % of the first ones.
        """
        columns = [as_bytes(column).numpy() for column in rows.in_logical_order().columns]
        lanes = [lane(leaf.stored) for leaf in rows.schema.leaves]
        codec = self._codec if self._saves(columns, lanes, len(rows)) else self._plain
        text, values = schema_text(rows.schema).encode(), list[bytes]()
        head = _START.pack(_MAGIC, _CODECS.index(codec.name), len(text)) + text
        views = [(column.reshape(-1).data, column.shape[1]) for column in columns if column.shape[1]]
        for i, seed in enumerate(_seeds(keys)):
            pieces: list[Any]
            if codec is self._plain:
                pieces = [view[i * size : i * size + size] for view, size in views]
            else:
                pieces = [codec.encode([column[i] for column in columns], lanes)]
            state = xxh3_64(head, seed)
            for piece in pieces:
                state.update(piece)
            values.append(b"".join((head, *pieces, state.intdigest().to_bytes(_SUM_BYTES, "little"))))
        return values

    def decode(self, keys: Keys, values: Sequence[bytes | None]) -> Decoded:
        """Decode the values found under `keys`; None where there was none.

        Skips values of unknown classes or codecs, which do not count as damaged.
        """
        groups: dict[bytes, list[int]] = {}
        damaged: list[int] = []
        seeds, head = _seeds(keys), b""
        for i, value in enumerate(values):
            if value is None:
                continue
            if not head or not value.startswith(head):
                head = _head_of(value)
            stored = memoryview(value)
            if head and xxh3_64_intdigest(stored[:-_SUM_BYTES], seeds[i]) == int.from_bytes(
                stored[-_SUM_BYTES:], "little"
            ):
                groups.setdefault(head, []).append(i)
            else:
                damaged.append(i)
        parts = []
        for head, positions in groups.items():
            try:
                parsed = self._parse(head)
            except DamagedError:
                damaged += positions
                continue
            except (UnknownClassError, OptionError):
                continue
            if parsed.codec.name == "none":
                good, columns = _split(head, parsed.schema, values, positions)
            else:
                good, columns = _unpacked(head, parsed, values, positions)
            if len(good) < len(positions):
                damaged += sorted(set(positions).difference(good))
            if good:
                parts.append((np.array(good, np.int64), rows_of(parsed.schema, columns, len(good))))
        return Decoded(parts, damaged)

    def _saves(self, columns: Columns, lanes: Sequence[Lane], count: int) -> bool:
        """Whether compressing the first rows is worth it."""
        if self._codec.name == "none" or count == 0:
            return False
        before = after = 0
        for i in range(min(count, _SAMPLES)):
            row = [column[i] for column in columns]
            before += sum(map(len, row))
            after += len(self._codec.encode(row, lanes))
        return after < (1 - _LEAST_SAVED) * before

    def _parse(self, head: bytes) -> _Parsed:
        """The content of a head that `_head_of` has accepted."""
        parsed = self._parsed.get(head)
        if parsed is None:
            try:
                schema = schema_from_json(json.loads(head[_START.size :]))
            except _UNPARSABLE as error:
                raise DamagedError(f"a schema that does not parse, {type(error).__name__}") from None
            if any(-1 in leaf.shape for leaf in schema.leaves) or schema.row_bytes > MOST_ROW_BYTES:
                raise DamagedError("a schema that is not of one row")
            codec = codec_of(_CODECS[_START.unpack_from(head)[1]])
            parsed = _Parsed(schema, codec, [lane(leaf.stored) for leaf in schema.leaves])
            if len(self._parsed) >= _MOST_HEADS:
                self._parsed = {}
            self._parsed[head] = parsed
        return parsed


def _seeds(keys: Keys) -> list[int]:
    """The checksum's seed for each key."""
    first, second = np.frombuffer(keys.namespace, "<u8")
    words = keys.words
    seeds: list[int] = ((words[:, 0] ^ first) * _MIX + (words[:, 1] ^ second)).tolist()
    return seeds


def _head_of(value: bytes) -> bytes:
    """The head of a value, before its row; empty if it is not a value of this version."""
    if len(value) < _START.size + _SUM_BYTES:
        return b""
    magic, codec, size = _START.unpack_from(value)
    most = min(MOST_SCHEMA_BYTES, len(value) - _START.size - _SUM_BYTES)
    if magic != _MAGIC or codec >= len(_CODECS) or size > most:
        return b""
    return value[: _START.size + size]


def _split(
    head: bytes, schema: Schema, values: Sequence[bytes | None], positions: list[int]
) -> tuple[list[int], Columns]:
    """The positions of values that have the right size, and their rows."""
    size = len(head) + schema.row_bytes + _SUM_BYTES
    good = [i for i in positions if len(values[i] or b"") == size]
    columns = empty_columns(schema, len(good))
    # Join small values, so that few calls copy many rows; copy large ones just once.
    step = _AT_ONCE // size if size < _LARGE else 1
    for start in range(0, len(good), step):
        some = good[start : start + step]
        table = np.frombuffer(b"".join([values[i] or b"" for i in some]), np.uint8).reshape(-1, size)
        at = len(head)
        for column in columns:
            column[start : start + len(some)] = table[:, at : at + column.shape[1]]
            at += column.shape[1]
    return good, columns


def _unpacked(
    head: bytes, parsed: _Parsed, values: Sequence[bytes | None], positions: list[int]
) -> tuple[list[int], Columns]:
    """The positions of values that can be decompressed, and their rows."""
    columns = empty_columns(parsed.schema, len(positions))
    good: list[int] = []
    for i in positions:
        outs = [column[len(good)] for column in columns]
        try:
            parsed.codec.decode(memoryview(values[i] or b"")[len(head) : -_SUM_BYTES], outs, parsed.lanes)
        except DamagedError:
            continue
        good.append(i)
    return good, [column[: len(good)] for column in columns]
