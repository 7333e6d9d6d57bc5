"""Schemas that ranks tell each other: each travels once, and what all know stays the same on all."""

import collections
import enum
import json

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from xxhash import xxh3_128_digest

from tests.helpers.storage import CPU, DTYPES
from torchcache2.core.rows import Rows
from torchcache2.engine.collective import schemas
from torchcache2.engine.collective.blocks import block_bytes, packed, unpacked
from torchcache2.engine.collective.schemas import SchemaTable

Point = collections.namedtuple("Point", "x y")


class Kept(enum.Enum):
    ONE = 1


class Holder:
    """A node that keeps an object that has no JSON form."""

    def __init__(self, children, kept):
        self.children, self.kept = children, kept


pytree.register_pytree_node(Holder, lambda h: (h.children, h.kept), lambda c, k: Holder(c, k))


def all_of(rows):
    return rows, np.arange(len(rows))


def schema_of(output, count=2):
    return Rows.from_pytree(output, count, device=CPU).schema


def tell(tables, *digests):
    """The rounds "tell" and "schema" among some ranks: all are told what any of them does not know."""
    unknown = [table.unknown(digests) for table in tables]
    assert all(some == unknown[0] for some in unknown)
    for digest in unknown[0]:
        text = next(filter(None, [table.text(digest) for table in tables]))
        for table in tables:
            table.learn(digest, text)
    return unknown[0]


OUTPUTS = [
    torch.zeros(2, 768),
    {"a": torch.zeros(2, 3), "b": [torch.zeros(2), 1.5, None, "text"]},
    Point(torch.zeros(2, 0), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    (),
    [torch.zeros(2, 1, dtype=dtype) for dtype in DTYPES],
]


@pytest.mark.parametrize("output", OUTPUTS, ids=["bare", "dict", "last", "empty", "dtypes"])
def test_a_schema_is_told_once(output):
    mine, other = SchemaTable(), SchemaTable()
    schema = schema_of(output)
    digest = mine.digest(schema)
    assert len(digest) == 16 and mine.digest(schema_of(output)) == digest
    assert other.text(digest) == b"" and other.schema(digest) is None
    assert tell([mine, other], digest, digest) == [digest]
    assert tell([mine, other], digest) == []
    there = other.schema(digest)
    assert there == schema and there.layout == schema.layout and mine.schema(digest) is schema
    assert other.schema(digest) is there
    assert other.digest(there) == digest == other.digest(schema)
    for table in (mine, other):
        assert [leaf.row_bytes for leaf in table.sizes(digest).leaves] == [
            leaf.row_bytes for leaf in schema.leaves
        ]


def test_layouts_have_digests_of_their_own():
    table, maps = SchemaTable(), torch.zeros(2, 3, 4, 5)
    plain, last = schema_of(maps), schema_of(maps.to(memory_format=torch.channels_last))
    assert plain == last and table.digest(plain) != table.digest(last)
    assert table.schema(table.digest(last)).layout == (True,)


def test_two_ranks_that_have_made_the_same_need_not_be_told_apart():
    tables = [SchemaTable(), SchemaTable()]
    digests = [table.digest(schema_of(OUTPUTS[1])) for table in tables]
    assert digests[0] == digests[1] and tell(tables, *digests) == digests[:1]


def test_unknown_ones_come_sorted_each_once():
    table = SchemaTable()
    digests = [table.digest(schema_of(torch.zeros(2, width))) for width in range(9)]
    assert table.unknown(digests[::-1] + digests) == sorted(digests)


def test_what_has_no_json_form_cannot_be_sent():
    table = SchemaTable()
    schema = schema_of(Holder([torch.zeros(2)], Kept.ONE))
    assert table.digest(schema) is None and table.digest(schema) is None


def test_rows_of_a_class_that_a_rank_lacks_have_sizes_still(monkeypatch):
    mine, other = SchemaTable(), SchemaTable()
    rows = Rows.from_pytree(Point(torch.randn(3, 5), torch.arange(3)), 3, device=CPU)
    digest = mine.digest(rows.schema)
    with monkeypatch.context() as patched:
        patched.delitem(globals(), "Point")
        tell([mine, other], digest)
        assert other.schema(digest) is None
        data, sizes = packed([[all_of(rows)]], CPU)
        assert sizes == [block_bytes([(other.sizes(digest), 3)])]
        (raw,) = unpacked(data, [(other.sizes(digest), 3)])
        assert len(raw) == 3
    assert other.schema(digest) == rows.schema  # the class has been imported meanwhile


def test_dtypes_of_another_version_of_torch_have_sizes_still():
    table, schema = SchemaTable(), schema_of(torch.zeros(2, 3))
    data = json.loads(table.text(table.digest(schema)))
    data["schema"]["leaves"][0]["dtype"] = "float5_e2m2"
    text = json.dumps(data).encode()
    table.learn(xxh3_128_digest(text), text)
    assert table.schema(xxh3_128_digest(text)) is None
    assert table.sizes(xxh3_128_digest(text)).row_bytes == 12


def test_sizes_must_be_those_of_the_leaves():
    table, schema = SchemaTable(), schema_of(torch.zeros(2, 3))
    data = json.loads(table.text(table.digest(schema)))
    data["bytes"] = [16]
    text = json.dumps(data).encode()
    table.learn(xxh3_128_digest(text), text)
    assert table.schema(xxh3_128_digest(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"bytes":3}',
        b'{"bytes":[-1]}',
        b'{"bytes":["x"]}',
        b'{"bytes":[[]]}',
        b'{"bytes":[1e999]}',
        b'{"bytes":[true]}',
        b'{"bytes":[281474976710656]}',
        b"[" * 100_000,
    ],
    ids=range(12),
)
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(ValueError, match="cannot be read"):
        SchemaTable().learn(xxh3_128_digest(text), text)


def test_a_text_with_another_digest_is_refused():
    table = SchemaTable()
    digest = table.digest(schema_of(torch.zeros(2)))
    for text in (b"", table.text(digest) + b" "):
        with pytest.raises(ValueError, match="not the one of its digest"):
            table.learn(digest, text)
    assert table.unknown([digest]) == [digest]


def test_many_schemas_are_forgotten_on_all_ranks_alike(monkeypatch):
    monkeypatch.setattr(schemas, "_MOST", 10)
    tables = [SchemaTable() for _ in range(3)]
    tables[1].digest(schema_of(torch.zeros(2, 99)))  # it has more schemas than the others
    for step in range(40):
        new = [schema_of(torch.zeros(2, 3 * step + i)) for i in range(3)]
        digests = [table.digest(schema) for table, schema in zip(tables, new, strict=True)]
        kept = tables[0].digest(schema_of(torch.zeros(2, 7777)))
        tell(tables, *digests, kept)
        for table in tables:
            assert [table.schema(digest) for digest in digests] == new
            assert all(table.sizes(digest).row_bytes >= 0 for digest in (*digests, kept))
            assert len(table._told) <= 14 and len(table._schemas) <= 30 and len(table._texts) <= 14
    assert tell(tables, kept) == []
    again = tables[2].digest(schema_of(torch.zeros(2, 0)))  # forgotten, so it is told once more
    assert tell(tables, again) == [again]
