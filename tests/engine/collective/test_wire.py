"""What ranks send each other as bytes: it comes back to the last bit, and other bytes are refused."""

import collections
import contextlib
import enum
import json
import os
import struct

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
    place=st.binary(min_size=16, max_size=16),
) | st.builds(
    Offer,
    flags=st.sampled_from([0, Flag.FAILED, Flag.NOT_STORED]),
    reason=st.sampled_from(["", "random", "state"]),
    text=TEXTS,
    numbers=st.lists(st.integers(0, 2**16 - 1), max_size=9).map(lambda some: np.array(some, "<u2")),
    schemas=st.lists(st.binary(max_size=16), max_size=3),
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
@hypothesis.given(MESSAGES)
def test_what_is_said_comes_back(said):
    again = type(said).of(said.to_bytes())
    for one, other in zip(said, again, strict=True):
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
        assert type(one) is type(other)


@hypothesis.settings(max_examples=500 if SOAK else 40)
@hypothesis.given(MESSAGES, st.data())
def test_other_bytes_are_refused_or_understood_but_raise_nothing_else(said, data):
    good = said.to_bytes()
    cut = data.draw(st.integers(0, len(good) - 1).filter(lambda cut: cut not in ends_of(good)))
    for wrong in (good[:cut], good + b"x"):
        with pytest.raises(ValueError, match="bytes"):
            type(said).of(wrong)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ValueError, TypeError):  # which `Exchange` shows as one error
        type(said).of(bytes(bad))


def ends_of(data):
    """Where the head of a message ends, and each of its pieces."""
    ends = [16]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 4 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "little"))
    return ends


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


def test_the_bytes_are_those_of_the_specification():
    keys, place = np.ones((1, 16), np.uint8), b"p" * 16
    said = Ask(7, Flag.WHOLE | Flag.CUDA, "Net", b"n" * 16, b"", "é", keys, place).to_bytes()
    tail = pieces(b"Net", b"n" * 16, b"", b"\xc3\xa9", keys.tobytes(), place)
    assert said == struct.pack("<IIQ", 3, 40, 7) + tail
    said = Offer(Flag.NOT_STORED, "state", "why", np.array([1, 0], "<u2"), [b"{}"]).to_bytes()
    assert said == struct.pack("<IIQ", 3, 128, 0) + pieces(b"state", b"why", b"\1\0\0\0", b"{}")


def pieces(*some):
    return b"".join(struct.pack("<I", len(piece)) + piece for piece in some)


# Schemas


def schema_of(output, count=2):
    return Rows.from_pytree(output, count, device=CPU).schema


OUTPUTS = [
    torch.zeros(2, 768),
    {"a": torch.zeros(2, 3), "b": [torch.zeros(2), 1.5, None, "text"]},
    Point(torch.zeros(2, 0), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    (),
    [torch.zeros(2, 1, dtype=dtype) for dtype in DTYPES],
]


@pytest.mark.parametrize("output", OUTPUTS, ids=["bare", "dict", "last", "empty", "dtypes"])
def test_a_schema_comes_back(output):
    mine, other, schema = Schemas(), Schemas(), schema_of(output)
    text = mine.text(schema)
    assert mine.text(schema_of(output)) is text
    there = other.told(text)
    assert there.schema == schema and there.schema.layout == schema.layout
    assert there.sizes == [leaf.row_bytes for leaf in schema.leaves]
    assert other.told(text).schema is there.schema
    assert other.text(there.schema) == text == other.text(schema)


def test_layouts_have_texts_of_their_own():
    schemas, maps = Schemas(), torch.zeros(2, 3, 4, 5)
    plain, last = schema_of(maps), schema_of(maps.to(memory_format=torch.channels_last))
    assert plain == last and schemas.text(plain) != schemas.text(last)
    assert schemas.told(schemas.text(last)).schema.layout == (True,)


def test_what_has_no_json_form_cannot_be_sent():
    schemas, schema = Schemas(), schema_of(Holder([torch.zeros(2)], Kept.ONE))
    assert schemas.text(schema) is None and schemas.text(schema) is None


def test_rows_of_a_class_that_a_rank_lacks_have_sizes_still(monkeypatch):
    other = Schemas()
    rows = Rows.from_pytree(Point(torch.randn(3, 5), torch.arange(3)), 3, device=CPU)
    text = Schemas().text(rows.schema)
    with monkeypatch.context() as patched:
        patched.delitem(globals(), "Point")
        told = other.told(text)
        assert told.schema is None
        data, sizes = packed([[all_of(rows)]], CPU)
        assert sizes == [told.bytes_of(3)]
        assert unpacked(torch.cat([data, data]), [(told, 3), (told, 3)]) == [None, None]
    assert other.told(text).schema == rows.schema  # the class has been imported meanwhile


@pytest.mark.parametrize("change", ["dtype", "bytes"])
def test_a_schema_that_cannot_be_made_has_sizes_still(change):
    data = json.loads(Schemas().text(schema_of(torch.zeros(2, 3))))
    if change == "dtype":  # of another version of torch
        data["schema"]["leaves"][0]["dtype"] = "float5_e2m2"
    else:
        data["bytes"] = [16]
    told = Schemas().told(json.dumps(data).encode())
    assert told.schema is None and told.sizes == data["bytes"]


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
        Schemas().told(text)


def test_many_schemas_are_forgotten(monkeypatch):
    monkeypatch.setattr(wire, "_MOST_SCHEMAS", 10)
    schemas = Schemas()
    for width in range(40):
        schema = schema_of(torch.zeros(2, width))
        assert schemas.told(schemas.text(schema)).schema == schema
        assert len(schemas._texts) <= 10 and len(schemas._told) <= 10


# Rows


def rows_of(output, count, **options):
    return Rows.from_pytree(output, count, device=CPU, **options)


def random_tensor(dtype, *shape):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(-1).view(dtype).view(shape)


def all_of(rows):
    return rows, np.arange(len(rows))


def told_of(rows):
    schemas = Schemas()
    return schemas.told(schemas.text(rows.schema))


def received(parts):
    """What each receiver unpacks of what it is sent: `parts` has its rows."""
    data, sizes = packed([[all_of(rows) for rows in some] for some in parts], CPU)
    told = [[(told_of(rows), len(rows)) for rows in some] for some in parts]
    assert data.dtype == torch.uint8 and data.dim() == 1 and sum(sizes) == len(data)
    assert sizes == [sum(one.bytes_of(count) for one, count in some) for some in told]
    assert all(size % 16 == 0 for size in sizes)
    return [unpacked(piece, some) for piece, some in zip(data.split(sizes), told, strict=True)]


def assert_rows(there, here):
    assert there.schema == here.schema and there.schema.layout == here.schema.layout
    assert len(there) == len(here)
    assert_same(there.columns, tuple(column.contiguous() for column in here.columns))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_dtype(dtype, count):
    torch.manual_seed(0)
    shapes = [(), (3,), (1,), (0,), (2, 3), (5, 0, 2)]
    rows = rows_of([random_tensor(dtype, count, *shape) for shape in shapes], count)
    ((there,),) = received([[rows]])
    assert_rows(there, rows)
    assert_same(there.to_pytree(device=CPU), rows.to_pytree(device=CPU))


@hypothesis.settings(max_examples=300 if SOAK else 15)
@hypothesis.given(
    st.lists(st.tuples(nested(st.one_of(LEAVES, OTHERS)), st.integers(1, 5)), max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
    st.sampled_from([None, torch.float16]),
)
def test_any_outputs_for_any_receivers(outputs, receivers, dtype):
    made = [rows_of(build(output, torch.arange(n)), n, dtype=dtype) for output, n in outputs]
    parts = [[made[i] for i in some if i < len(made)] for some in receivers]
    for there, here in zip(received(parts), parts, strict=True):
        assert len(there) == len(here)
        for one, other in zip(there, here, strict=True):
            assert_rows(one, other)
            assert_same(one.to_pytree(device=CPU), other.to_pytree(device=CPU))


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (1, 4, 5)])
def test_channels_that_are_last_stay_last(shape):
    last = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
    output = torch.randn(4, *shape).to(memory_format=last)
    rows = rows_of({"maps": output, "n": 3}, 4)
    ((there,),) = received([[rows]])
    assert_rows(there, rows)
    again = there.to_pytree(device=CPU)
    assert_same(again, {"maps": output, "n": 3})
    assert again["maps"].is_contiguous(memory_format=last)


def test_columns_that_are_not_contiguous():
    wide = torch.arange(60).reshape(10, 6)
    rows = rows_of([wide[::2], wide.T[:5], torch.ones(1, 4).expand(5, 4), "text", None], 5)
    assert not any(column.is_contiguous() for column in rows.columns[:3])
    ((there,),) = received([[rows]])
    assert_rows(there, rows)


@pytest.mark.parametrize("width", [1, 3, 768, 100_000])
def test_some_rows_in_any_order(width):
    rows = rows_of({"a": torch.randn(40, width), "b": torch.arange(40), "c": "text"}, 40)
    orders = [np.array(which, np.int64) for which in ([], [3], [39, 0, 0, 7], range(40))]
    data, sizes = packed([[(rows, which)] for which in orders], CPU)
    for piece, which in zip(data.split(sizes), orders, strict=True):
        (there,) = unpacked(piece, [(told_of(rows), len(which))])
        assert_rows(there, rows.take(torch.from_numpy(which)))


def test_nothing_is_sent_to_nobody():
    data, sizes = packed([[], []], CPU)
    assert len(data) == 0 and sizes == [0, 0]
    assert unpacked(data, []) == []


def test_rows_of_another_size_are_refused():
    rows = rows_of(torch.randn(3, 5), 3)
    data, _ = packed([[all_of(rows)]], CPU)
    for wrong in (data[:-16], torch.cat([data, data])):
        with pytest.raises(ValueError, match="another size than was told"):
            unpacked(wrong, [(told_of(rows), 3)])


def test_rows_that_came_in_inference_mode_can_be_written():
    rows = rows_of(torch.randn(3, 5), 3)
    with torch.inference_mode():
        data, _ = packed([[all_of(rows)]], CPU)
        (there,) = unpacked(data, [(told_of(rows), 3)])
    there.columns[0].add_(1)
    assert torch.equal(there.columns[0], rows.columns[0] + 1)
