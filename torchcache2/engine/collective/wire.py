"""Messages between ranks, as bytes: requests, offers, and rows.

Each rank sends an `Ask` at the beginning of a step, and an `Offer` about the rows that it has. A message is a
JSON array with the protocol's version, the message's fields, and the number of bytes that follow: keys or
numbers::

    uint32 length of the JSON | [version, fields …, bytes] | bytes

Schemas are sent as docs/format.md specifies them.

Rows are sent column after column, as stored; each column begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Array, Bytes2D, Positions
from torchcache2.core.memory import as_bytes, empty_bytes, gather_into, with_ordinary_tensors
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.files.schema import schema_from_json, schema_to_json

VERSION = 5
_LENGTH = struct.Struct("<I")
NO_KEYS: Bytes2D = np.empty((0, 16), np.uint8)
_LONGEST = 1000  # characters of a text
_MOST_SCHEMAS = 4096  # ragged rows have a schema for each shape
_ALIGNMENT = 16  # the widest element, complex128, has so many bytes


class Flag:
    """Flags of a rank in a step: ints, as each operation of `enum.IntFlag` takes a microsecond."""

    BYPASS = 1  # it takes part without keys
    FAILED = 2  # it raises; its message has the text
    DONE = 4  # it has left `join`
    WHOLE = 8  # its forward can run only for the whole batch
    SHARDED = 16  # its forward has collectives: all ranks run it, or none
    CUDA = 32  # its rows are used on CUDA
    RUN = 64  # it must run its forward, whatever it finds
    NOT_STORED = 128  # its rows must not be stored, for a reason


class Ask(NamedTuple):
    """A rank's message at the beginning of a step.

    Attributes
    ----------
    step : int
        How many steps this exchange has taken.
    flags : int
        Of `Flag`.
    caller : str
        The name of the called module or function.
    namespace, dropped : bytes
        The namespace of the keys, and one that all ranks must drop, if any.
    error : str
        Why it fails.
    keys : ndarray of uint8, shape (k, 16)
        The distinct keys that were not found locally.
    place : bytes
        Equal for ranks that share memory.
    """

    step: int
    flags: int
    caller: str
    namespace: bytes
    dropped: bytes = b""
    error: str = ""
    keys: Bytes2D = NO_KEYS
    place: bytes = bytes(16)

    def pairs(self) -> list[bytes]:
        """Namespace and key of each of the keys, 32 bytes."""
        keys = self.keys.tobytes()
        return [self.namespace + keys[start : start + 16] for start in range(0, len(keys), 16)]

    def to_bytes(self) -> bytes:
        """The message; the place comes last."""
        step, flags, caller, namespace, dropped, error, keys, place = self
        names = namespace.hex(), dropped.hex()
        return _joined(keys.tobytes() + place, step, flags, caller, *names, error[:_LONGEST])

    @classmethod
    def of(cls, data: bytes) -> Ask:
        """Decode a message; `ValueError` if another version wrote it, or it is invalid."""
        (step, flags, caller, namespace, dropped, error), rest = _split(data)
        keys, place = np.frombuffer(rest[:-16], np.uint8).reshape(-1, 16), rest[-16:]
        return cls(step, flags, caller, bytes.fromhex(namespace), bytes.fromhex(dropped), error, keys, place)


class Offer(NamedTuple):
    """A rank's message about the rows that it has.

    Attributes
    ----------
    flags : int
        `Flag.FAILED`, `Flag.NOT_STORED` or none.
    reason : str
        The reason, as in the statistics, if its output is not stored. Else what this rank knows about such
        calls, for ranks whose forward can run only for the whole batch.
    text : str
        Why it fails, or does not store.
    numbers : ndarray of uint16, shape (n,)
        For each key in question: 0 if its row is not offered, else 1 + the number of its part.
    schemas : sequence of str
        The schemas of the parts of its rows, as JSON.
    """

    flags: int = 0
    reason: str = ""
    text: str = ""
    numbers: Array = np.empty(0, "<u2")
    schemas: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """The message."""
        flags, reason, text, numbers, schemas = self
        return _joined(numbers.tobytes(), flags, reason, text[:_LONGEST], list(schemas))

    @classmethod
    def of(cls, data: bytes) -> Offer:
        """Decode a message; `ValueError` if it is invalid."""
        (flags, reason, text, schemas), rest = _split(data)
        return cls(flags, reason, text, np.frombuffer(rest, "<u2"), schemas)


def _joined(rest: bytes, *fields: Any) -> bytes:
    head = json.dumps([VERSION, *fields, len(rest)]).encode()
    return _LENGTH.pack(len(head)) + head + rest


def _split(data: bytes) -> tuple[list[Any], bytes]:
    """The fields of a message, and what follows them."""
    end = _LENGTH.size + int.from_bytes(data[: _LENGTH.size], "little")
    version, *fields, size = json.loads(data[_LENGTH.size : end])
    if version != VERSION:
        raise ValueError(f"version {version} of the protocol, and this is version {VERSION}")
    if size != len(data) - end:
        raise ValueError(f"{len(data)} bytes where {end + size} belong")
    return fields, data[end:]


class Told(NamedTuple):
    """A schema from a message (None if its classes are unknown here), and the bytes of its leaves."""

    schema: Schema | None
    sizes: list[int]

    def bytes_of(self, count: int) -> int:
        """How many bytes `count` rows take."""
        return sum(_aligned(count * size) for size in self.sizes)


class Schemas:
    """Texts of schemas, and schemas of texts: makes each once, up to a limit."""

    def __init__(self) -> None:
        self._texts: dict[tuple[Schema, tuple[bool, ...]], str | None] = {}
        self._told: dict[str, Told] = {}

    def text(self, schema: Schema) -> str | None:
        """The text of a schema; None if it cannot be sent."""
        name = schema, schema.layout
        if name not in self._texts:
            try:
                text = json.dumps(schema_to_json(schema), separators=(",", ":"))
            except UnserialisableError:
                text = None
            _remember(self._texts, name, text)
        return self._texts[name]

    def told(self, text: str) -> Told:
        """The content of a text; `ValueError` if it cannot be decoded."""
        told = self._told.get(text) or _told(text)
        if told.schema is not None:  # else its class may be imported later
            _remember(self._told, text, told)
        return told


def _remember(known: dict[Any, Any], name: Any, value: Any) -> None:
    if len(known) >= _MOST_SCHEMAS:
        known.clear()
    known[name] = value


def _told(text: str) -> Told:
    try:
        data = json.loads(text)
        sizes = [leaf.row_bytes for leaf in schema_from_json(data, structured=False).leaves]
    except (ValueError, TypeError, RecursionError, DamagedError, UnknownClassError):
        raise ValueError("a schema that cannot be read") from None
    try:
        return Told(schema_from_json(data), sizes)
    except (DamagedError, UnknownClassError):
        return Told(None, sizes)


@with_ordinary_tensors
def packed(
    parts: Sequence[Sequence[tuple[Rows, Positions]]], device: torch.device
) -> tuple[Tensor, list[int]]:
    """The bytes of the rows for all receivers, one after another.

    Parameters
    ----------
    parts : sequence of sequence of (Rows, ndarray of int64)
        For each receiver: rows, on any device, and the positions of those to send, shape ``(k,)``.
    device : torch.device
        Device of the result.

    Returns
    -------
    data : Tensor of uint8, shape (bytes,)
    sizes : list of int
        How many bytes are for each receiver.
    """
    sizes = [
        sum(_aligned(len(which) * leaf.row_bytes) for rows, which in some for leaf in rows.schema.leaves)
        for some in parts
    ]
    is_host = device.type == "cpu"
    data = empty_bytes(sum(sizes)) if is_host else torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    start = 0
    for rows, which in [part for some in parts for part in some]:
        for column in rows.columns:
            flat, index = as_bytes(column), torch.from_numpy(which)
            target = data[start : start + len(which) * flat.shape[1]].view(len(which), flat.shape[1])
            start += _aligned(target.numel())
            if is_host and flat.is_cpu and target.numel():
                gather_into(target, flat, index)
            else:
                target.copy_(flat.index_select(0, index.to(flat.device)))
    return data, sizes


@with_ordinary_tensors
def unpacked(data: Tensor, parts: Sequence[tuple[Told, int]]) -> list[Rows | None]:
    """The rows that one rank has sent, by schema and count; they share the memory of `data`.

    None for a part of unknown classes. Raises `ValueError` if `data` has another size.
    """
    if len(data) != sum(told.bytes_of(count) for told, count in parts):
        raise ValueError(f"rows of {len(data)} bytes, expected another size")
    found: list[Rows | None] = []
    start = 0
    for (schema, sizes), count in parts:
        columns = []
        for size in sizes:
            columns.append(data[start : start + count * size])
            start += _aligned(count * size)
        if schema is not None:
            pairs = zip(columns, schema.leaves, strict=True)
            columns = [column.view(leaf.stored).view(count, *leaf.stored_shape) for column, leaf in pairs]
        found.append(None if schema is None else Rows(schema, columns, count))
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
