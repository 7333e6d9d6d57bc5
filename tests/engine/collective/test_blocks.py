"""Blocks of rows: what one rank packs, another unpacks, to the last bit."""

import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tests.helpers.outputs import assert_same
from tests.helpers.storage import CPU, DTYPES
from tests.helpers.trees import LEAVES, OTHERS, build, nested
from torchcache2.core.rows import Rows
from torchcache2.engine.collective.blocks import block_bytes, packed, unpacked

SOAK = bool(os.environ.get("SOAK"))


def rows_of(output, count, **options):
    return Rows.from_pytree(output, count, device=CPU, **options)


def random_tensor(dtype, *shape):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(-1).view(dtype).view(shape)


def all_of(rows):
    return rows, np.arange(len(rows))


def received(parts):
    """What each receiver unpacks of what it is sent: `parts` has its rows."""
    data, sizes = packed([[all_of(rows) for rows in some] for some in parts], CPU)
    assert data.dtype == torch.uint8 and data.dim() == 1 and sum(sizes) == len(data)
    assert sizes == [block_bytes([(rows.schema, len(rows)) for rows in some]) for some in parts]
    assert all(size % 16 == 0 for size in sizes)
    pieces = data.split(sizes)
    return [
        unpacked(piece, [(rows.schema, len(rows)) for rows in some])
        for piece, some in zip(pieces, parts, strict=True)
    ]


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


def test_a_block_at_any_place_of_a_buffer():
    rows = rows_of([torch.randn(3, 5, dtype=torch.complex128), torch.arange(3), True], 3)
    data, (size,) = packed([[all_of(rows)]], CPU)
    for offset in (0, 1, 4, 8, 16, 24):
        buffer = torch.empty(size + offset, dtype=torch.uint8)[offset:]
        buffer.copy_(data)
        (there,) = unpacked(buffer, [(rows.schema, 3)])
        assert_rows(there, rows)
        shared = there.columns[0].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert shared == (buffer.data_ptr() % 16 == 0)


@pytest.mark.parametrize("width", [1, 3, 768, 100_000])
def test_some_rows_in_any_order(width):
    rows = rows_of({"a": torch.randn(40, width), "b": torch.arange(40), "c": "text"}, 40)
    orders = [np.array(which, np.int64) for which in ([], [3], [39, 0, 0, 7], range(40))]
    data, sizes = packed([[(rows, which)] for which in orders], CPU)
    for piece, which in zip(data.split(sizes), orders, strict=True):
        (there,) = unpacked(piece, [(rows.schema, len(which))])
        assert_rows(there, rows.take(torch.from_numpy(which)))


def test_nothing_is_sent_to_nobody():
    data, sizes = packed([[], []], CPU)
    assert len(data) == 0 and sizes == [0, 0]
    assert unpacked(data, []) == []


def test_a_block_of_another_size_is_refused():
    rows = rows_of(torch.randn(3, 5), 3)
    data, _ = packed([[all_of(rows)]], CPU)
    for wrong in (data[:-16], torch.cat([data, data])):
        with pytest.raises(ValueError, match="where 64 belong"):
            unpacked(wrong, [(rows.schema, 3)])


def test_rows_that_came_in_inference_mode_can_be_written():
    rows = rows_of(torch.randn(3, 5), 3)
    with torch.inference_mode():
        data, _ = packed([[all_of(rows)]], CPU)
        (there,) = unpacked(data, [(rows.schema, 3)])
    (shifted,) = unpacked(torch.cat([data[:4], data])[4:], [(rows.schema, 3)])
    for columns in (there.columns, shifted.columns):
        columns[0].add_(1)
        assert torch.equal(columns[0], rows.columns[0] + 1)
