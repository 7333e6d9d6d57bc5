"""Columns that grow by chunks, as on an accelerator, against a plain list."""

from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tests.helpers.late import Streams
from tests.helpers.storage import found, put
from torchcache2.tiers.memory import arena
from torchcache2.tiers.memory.arena import _ChunkedColumn
from torchcache2.tiers.memory.tier import MemoryTier

CPU = torch.device("cpu")
SMALL = {"_MOST": 4096, "_LARGE": 3000, "_LARGE_UNIT": 1024, "_MOST_UNASKED": 1024}


def column_of(row_bytes):
    return _ChunkedColumn(row_bytes, CPU, Streams())


def grow(column, rows):
    """Grow, and check that only new memory was taken, exactly as much as was said."""
    cost, before, there = column.cost(rows), column.nbytes, [c.data_ptr() for c in column.memory]
    taken, empty = [], torch.empty
    with mock.patch.object(torch, "empty", lambda size, **how: taken.append(size) or empty(size, **how)):
        column.grow(rows)
    assert column.nbytes == before + cost == sum(c.untyped_storage().nbytes() for c in column.memory)
    assert sum(taken) == cost and all(size % 512 == 0 for size in taken)
    assert [c.data_ptr() for c in column.memory][: len(there)] == there
    assert column.capacity == sum(map(len, column.memory)) >= rows and column.cost(rows) == 0


@pytest.mark.slow
@hypothesis.given(
    st.sampled_from([1, 3, 8, 100, 512, 700, 5000]),
    st.lists(st.tuples(st.sampled_from(["add", "add", "shrink", "remove"]), st.integers(0, 60)), max_size=12),
    st.randoms(use_true_random=False),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_column_is_a_list_that_grows_without_copies(row_bytes, steps, chance):
    with mock.patch.multiple(arena, **SMALL):
        column, rows = column_of(row_bytes), []
        for step, count in steps:
            if step == "add":
                values = torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8)
                grow(column, len(rows) + count)
                column.write(len(rows), values)
                rows += values.tolist()
            elif step == "remove":  # the last rows move into the places of others
                count = min(count, len(rows) // 2)
                kept = len(rows) - count
                targets, sources = chance.sample(range(kept), count), range(kept, len(rows))
                column.move(np.array(sources, np.int64), np.array(targets, np.int64))
                for target, source in zip(targets, sources, strict=True):
                    rows[target] = rows[source]
                del rows[kept:]
            else:
                before, had = column.nbytes, column.capacity
                column.shrink(len(rows))
                assert column.capacity >= len(rows)
                assert (column.nbytes < before) == (column.capacity < had)
                assert not column.memory or column.capacity - len(column.memory[-1]) < max(len(rows), 1)
            if rows:
                picked = chance.choices(range(len(rows)), k=9)
                assert column.gather(np.array(picked, np.int64)).tolist() == [rows[i] for i in picked]


def test_single_rows_do_not_make_very_many_chunks():
    column = column_of(64)
    for rows in range(1, 4097):
        column.grow(rows)
    assert len(column.memory) < 200
    assert column.nbytes < 4096 * 64 * 1.05


@pytest.mark.parametrize("row_bytes", [1000, 600_000, 100 << 20])
def test_chunks_are_what_the_allocator_gives_out(row_bytes):
    column = _ChunkedColumn(row_bytes, torch.device("meta"), Streams())
    column.grow((200 << 20) // row_bytes)
    sizes = [chunk.untyped_storage().nbytes() for chunk in column.memory]
    assert all(size % (2 << 20 if size >= 10 << 20 else 512) == 0 for size in sizes)
    assert max(sizes) <= max(64 << 20, row_bytes + (2 << 20)) and sum(sizes) == column.nbytes


def test_work_of_all_streams_on_all_chunks_is_put_in_order(monkeypatch):
    def chunked(row_bytes, limit, device, runtime, are_remote):
        return _ChunkedColumn(row_bytes, device, runtime)

    monkeypatch.setattr(arena, "row_column", chunked)
    runtime = Streams()
    tier = MemoryTier(10**6, runtime=runtime)

    def work_of(stream, method, names):
        runtime.current_stream = stream
        del runtime.log[:]
        assert method(tier, names, 200) in (len(names), list(names))
        return [call for call in runtime.log if call != "pinned"]

    assert work_of("main", put, range(3)) == ["keep", "event"]
    assert work_of("main", found, range(3)) == ["wait", "event"]
    assert work_of("side", found, range(3)) == ["wait", "keep", "event"]
    # There are two chunks now, which neither stream is known to use.
    assert work_of("side", put, range(10, 15)) == ["wait", "keep", "keep", "event"]
    assert work_of("main", found, range(10, 15)) == ["wait", "keep", "keep", "event"]
    assert work_of("side", found, range(3)) == ["wait", "event"]
