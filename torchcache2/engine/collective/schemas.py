"""`SchemaTable`: the schemas that the ranks of an exchange have told each other.

A schema travels once, as a JSON object: ``schema``, which docs/format.md specifies, and ``bytes``, those of
each leaf in one row. So a rank knows the size of a block even if it cannot make the schema. Afterwards a
schema is named by its digest, XXH3-128 of that text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from xxhash import xxh3_128_digest

from torchcache2.core.private import pytree
from torchcache2.core.rows import Leaf, Schema
from torchcache2.engine.collective.channel import Channel
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.files.schemajson import schema_from_json, schema_to_json

__all__ = ["SchemaTable"]

_LENGTH = struct.Struct("<I")
_MOST = 4096  # ragged rows have a schema for each shape
_MOST_BYTES = 1 << 48  # of a leaf in one row


class SchemaTable:
    """What all ranks have been told, and the schemas of this rank."""

    def __init__(self) -> None:
        self._digests: dict[tuple[Schema, tuple[bool, ...]], bytes | None] = {}
        self._texts: dict[bytes, bytes] = {}  # of the schemas of this rank
        self._told: dict[bytes, bytes] = {}  # this has the same digests on all ranks
        self._sizes: dict[bytes, Schema] = {}
        self._schemas: dict[bytes, Schema] = {}

    def digest(self, schema: Schema) -> bytes | None:
        """The 16 bytes that name a schema of this rank; None if it cannot be sent."""
        name = schema, schema.layout
        if name not in self._digests:
            try:
                data = {"schema": schema_to_json(schema), "bytes": [leaf.row_bytes for leaf in schema.leaves]}
            except UnserialisableError:
                self._digests[name] = None
                return None
            text = json.dumps(data, separators=(",", ":")).encode()
            digest = self._digests[name] = xxh3_128_digest(text)
            self._texts[digest] = text
            self._schemas[digest] = schema
        return self._digests[name]

    def tell(self, digests: Sequence[Sequence[bytes]], channel: Channel) -> None:
        """Have the ranks tell each other the schemas behind the digests of each rank, if some are new."""
        new = self.unknown([one for of_rank in digests for one in of_rank])
        if not new:
            return
        speakers = [next(rank for rank, theirs in enumerate(digests) if one in theirs) for one in new]
        pairs = list(zip(new, speakers, strict=True))
        texts = [self.text(one) for one, speaker in pairs if speaker == channel.rank]
        said = channel.gather("schema", b"".join(_LENGTH.pack(len(text)) + text for text in texts))
        begins = [0] * len(said)
        for one, speaker in pairs:
            (length,) = _LENGTH.unpack_from(said[speaker], begins[speaker])
            begin = begins[speaker] + _LENGTH.size
            self.learn(one, said[speaker][begin : begin + length])
            begins[speaker] = begin + length

    def unknown(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the digests of a step that were never told, sorted, each once; the same on all ranks.

        If there are many schemas, those that this step does not need are forgotten, on all ranks alike.
        """
        wanted = set(digests)
        if len(self._told) > _MOST or len(self._digests) > _MOST:
            self._forget_all_but(wanted)
        return sorted(wanted - self._told.keys())

    def text(self, digest: bytes) -> bytes:
        """The text of a schema of this rank; empty if it is of others only."""
        return self._texts.get(digest, b"")

    def learn(self, digest: bytes, text: bytes) -> None:
        """Take in what all ranks are told of a schema.

        Raises
        ------
        ValueError
            If this text has another digest, or is none of a schema.
        """
        text = bytes(text)
        if xxh3_128_digest(text) != digest:
            raise ValueError("a schema was told that is not the one of its digest")
        try:
            sizes = json.loads(text)["bytes"]
            if not all(type(size) is int and 0 <= size < _MOST_BYTES for size in sizes):
                raise ValueError("no sizes")
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("a schema was told that cannot be read") from None
        structure = pytree.tree_flatten([0] * len(sizes))[1]
        leaves = [Leaf("", "tensor", torch.uint8, torch.uint8, (size,)) for size in sizes]
        self._told[digest] = text
        self._sizes[digest] = Schema(structure, tuple(leaves))

    def schema(self, digest: bytes) -> Schema | None:
        """The schema, of this rank or told; None if this process cannot make it, as it lacks a class."""
        schema = self._schemas.get(digest)
        if schema is None and digest in self._told:
            schema = self._made(json.loads(self._told[digest]))
            if schema is not None:
                self._schemas[digest] = schema
        return schema

    def sizes(self, digest: bytes) -> Schema:
        """A list of leaves that have as many bytes as those of the schema, which was told."""
        return self._sizes[digest]

    def _made(self, data: Any) -> Schema | None:
        try:
            schema = schema_from_json(data["schema"])
        except (DamagedError, UnknownClassError, KeyError, TypeError):
            return None
        return schema if [leaf.row_bytes for leaf in schema.leaves] == data["bytes"] else None

    def _forget_all_but(self, wanted: set[bytes]) -> None:
        # All ranks must forget the same digests that were told. So only their number decides, which is equal
        # on all ranks.
        if len(self._told) > _MOST:
            self._told = {digest: text for digest, text in self._told.items() if digest in wanted}
            self._sizes = {digest: self._sizes[digest] for digest in self._told}
        self._digests = {name: digest for name, digest in self._digests.items() if digest in wanted}
        self._texts = {digest: text for digest, text in self._texts.items() if digest in wanted}
        kept = wanted | self._told.keys()
        self._schemas = {digest: made for digest, made in self._schemas.items() if digest in kept}
