"""What ranks send each other as bytes: it comes back to the last bit, and other bytes are refused."""

import collections
import contextlib
import enum
import json
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.helpers.outputs import assert_same
from tests.helpers.storage import CPU, DTYPES
from tests.helpers.trees import LEAVES, OTHERS, build, nested
from torchcache2.core.rows import Rows
from torchcache2.engine.collective import wire
from torchcache2.engine.collective.wire import VERSION, Ask, Flag, Offer, Schemas, packed, unpacked

SOAK = bool(os.environ.get("SOAK"))
TEXTS = st.sampled_from(["", "out of memory", "größer ☃", "\ud800", "x" * 200])
NAMES = st.binary(min_size=16, max_size=16)
KEYS = st.binary(max_size=80).map(lambda data: np.frombuffer(data[: len(data) // 16 * 16], np.uint8))
MESSAGES = st.builds(
    Ask,
    step=st.integers(0, 2**64 - 1),
    flags=st.integers(0, 255),
    caller=TEXTS,
    namespace=NAMES,
    dropped=NAMES,
    error=TEXTS,
    keys=KEYS.map(lambda flat: flat.reshape(-1, 16)),
    place=NAMES,
) | st.builds(
    Offer,
    flags=st.sampled_from([0, Flag.FAILED, Flag.NOT_STORED]),
    reason=st.sampled_from(["", "random", "state"]),
    text=TEXTS,
    numbers=st.lists(st.integers(0, 2**16 - 1), max_size=9).map(lambda some: np.array(some, "<u2")),
    schemas=st.lists(TEXTS, max_size=3),
)
Point = collections.namedtuple("Point", "x y")


class Kept(enum.Enum):
    ONE = 1


class Holder:
    """A node that keeps an object that has no JSON form."""

    def __init__(self, children, kept):
        self.children, self.kept = children, kept


pytree.register_pytree_node(Holder, lambda h: (h.children, h.kept), lambda c, k: Holder(c, k))


@hypothesis.settings(max_examples=500 if SOAK else 40)
@hypothesis.given(MESSAGES, st.data())
def test_what_is_said_comes_back_and_other_bytes_raise_nothing_but_errors_that_are_shown(said, data):
    good = said.to_bytes()
    for one, other in zip(said, type(said).of(good), strict=True):
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
        assert type(one) is type(other)
    for wrong in (good[: data.draw(st.integers(0, len(good) - 1))], good + b"x"):
        with pytest.raises(ValueError):
            type(said).of(wrong)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ValueError, TypeError):  # which `Exchange` shows as one error
        type(said).of(bytes(bad))


@pytest.mark.parametrize("said", [Ask(0, 0, "Net", bytes(16)), Offer()], ids=["ask", "offer"])
def test_another_version_is_refused(said, monkeypatch):
    monkeypatch.setattr(wire, "VERSION", VERSION + 1)
    data = said.to_bytes()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"version {VERSION + 1} .* version {VERSION}$"):
        type(said).of(data)


def test_long_texts_are_cut():
    assert Ask.of(Ask(0, Flag.FAILED, "Net", b"", error="☃" * 9999).to_bytes()).error == "☃" * 1000
    assert Offer.of(Offer(text="x" * 9999).to_bytes()).text == "x" * 1000


# Schemas


def rows_of(output, count, **options):
    return Rows.from_pytree(output, count, device=CPU, **options)


MAPS = torch.arange(240.0).view(4, 3, 4, 5)
WIDE = torch.arange(48).reshape(8, 6)
OUTPUTS = {  # for 4 items
    "tensor": torch.randn(4, 768),
    "dict": {"a": torch.randn(4, 3), "b": [torch.randn(4), 1.5, None, "text"]},
    "class": Point(torch.randn(4, 0), torch.randn(4, 3)),
    "no leaves": (),
    "channels last": {"maps": MAPS.to(memory_format=torch.channels_last), "n": 3},
    "volumes": torch.randn(4, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "not contiguous": [WIDE[::2], WIDE.T[:4], torch.ones(1, 4).expand(4, 4)],
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_schema_comes_back(output):
    mine, other, schema = Schemas(), Schemas(), rows_of(output, 4).schema
    text = mine.text(schema)
    assert mine.text(rows_of(output, 4).schema) is text
    there = other.told(text)
    assert there.schema == schema and there.schema.layout == schema.layout
    assert there.sizes == [leaf.row_bytes for leaf in schema.leaves]
    assert other.told(text).schema is there.schema
    assert other.text(there.schema) == text == other.text(schema)


def test_layouts_have_texts_of_their_own():
    schemas = Schemas()
    plain, last = rows_of(MAPS, 4).schema, rows_of(OUTPUTS["channels last"]["maps"], 4).schema
    assert plain == last and schemas.text(plain) != schemas.text(last)


def test_what_has_no_json_form_cannot_be_sent():
    schemas, schema = Schemas(), rows_of(Holder([torch.zeros(2)], Kept.ONE), 2).schema
    assert schemas.text(schema) is None and schemas.text(schema) is None


def test_rows_of_a_class_that_a_rank_lacks_have_sizes_still(monkeypatch):
    other, rows = Schemas(), rows_of(OUTPUTS["class"], 4)
    text = Schemas().text(rows.schema)
    with monkeypatch.context() as patched:
        patched.delitem(globals(), "Point")
        told = other.told(text)
        assert told.schema is None
        data, sizes = packed([[all_of(rows)]], CPU)
        assert sizes == [told.bytes_of(4)]
        assert unpacked(torch.cat([data, data]), [(told, 4), (told, 4)]) == [None, None]
    assert other.told(text).schema == rows.schema  # the class has been imported meanwhile


def test_what_is_no_schema_is_refused():
    unknown = json.loads(Schemas().text(rows_of(torch.zeros(2, 3), 2).schema))
    unknown["leaves"][0]["dtype"] = "float5_e2m2"  # of another version of torch
    for text in ("", "[]", "{}", '{"structure":null,"leaves":3}', "[" * 100_000, json.dumps(unknown)):
        with pytest.raises(ValueError, match="cannot be read"):
            Schemas().told(text)


def test_many_schemas_are_forgotten(monkeypatch):
    monkeypatch.setattr(wire, "_MOST_SCHEMAS", 10)
    schemas = Schemas()
    for width in range(40):
        schema = rows_of(torch.zeros(2, width), 2).schema
        assert schemas.told(schemas.text(schema)).schema == schema
        assert len(schemas._texts) <= 10 and len(schemas._told) <= 10


# Rows


def random_tensor(dtype, *shape):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(-1).view(dtype).view(shape)


def all_of(rows):
    return rows, np.arange(len(rows))


def told_of(rows):
    schemas = Schemas()
    return schemas.told(schemas.text(rows.schema))


def check_sent(parts):
    """Each receiver unpacks what it is sent: `parts` has, for each, rows and which of them."""
    data, sizes = packed(parts, CPU)
    told = [[(told_of(rows), len(which)) for rows, which in some] for some in parts]
    assert data.dtype == torch.uint8 and data.dim() == 1 and sum(sizes) == len(data)
    assert sizes == [sum(one.bytes_of(count) for one, count in some) for some in told]
    assert all(size % 16 == 0 for size in sizes)
    for piece, some, here in zip(data.split(sizes), told, parts, strict=True):
        for there, (rows, which) in zip(unpacked(piece, some), here, strict=True):
            rows = rows.take(torch.from_numpy(which))
            assert there.schema == rows.schema and there.schema.layout == rows.schema.layout
            assert_same(there.columns, tuple(column.contiguous() for column in rows.columns))
            if len(rows):
                assert_same(there.to_pytree(device=CPU), rows.to_pytree(device=CPU))


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_any_layout(output):
    check_sent([[all_of(rows_of(output, 4))]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_dtype(dtype, count):
    shapes = [(), (3,), (1,), (0,), (2, 3), (5, 0, 2)]
    check_sent([[all_of(rows_of([random_tensor(dtype, count, *shape) for shape in shapes], count))]])


@hypothesis.settings(max_examples=300 if SOAK else 15)
@hypothesis.given(
    st.lists(st.tuples(nested(st.one_of(LEAVES, OTHERS)), st.integers(1, 5)), max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
    st.sampled_from([None, torch.float16]),
)
def test_any_outputs_for_any_receivers(outputs, receivers, dtype):
    made = [rows_of(build(output, torch.arange(n)), n, dtype=dtype) for output, n in outputs]
    check_sent([[all_of(made[i]) for i in some if i < len(made)] for some in receivers])


@pytest.mark.parametrize("width", [1, 3, 768, 100_000])
def test_some_rows_in_any_order(width):
    rows = rows_of({"a": torch.randn(40, width), "b": torch.arange(40), "c": "text"}, 40)
    check_sent([[(rows, np.array(which, np.int64))] for which in ([], [3], [39, 0, 0, 7], range(40))])


def test_rows_of_another_size_are_refused():
    rows = rows_of(torch.randn(3, 5), 3)
    data, _ = packed([[all_of(rows)]], CPU)
    for wrong in (data[:-16], torch.cat([data, data])):
        with pytest.raises(ValueError, match="expected another size"):
            unpacked(wrong, [(told_of(rows), 3)])


def test_rows_that_came_in_inference_mode_can_be_written():
    rows = rows_of(torch.randn(3, 5), 3)
    with torch.inference_mode():
        data, _ = packed([[all_of(rows)]], CPU)
        (there,) = unpacked(data, [(told_of(rows), 3)])
    there.columns[0].add_(1)
    assert torch.equal(there.columns[0], rows.columns[0] + 1)
