"""Copies from an accelerator, whose runtime stands in here: its copies happen when they are waited for."""

import functools

import pytest
import torch

from tests.helpers import storage
from tests.helpers.late import POISON, Late, Sends, Streams
from tests.helpers.storage import NAMESPACES, keys_of
from torchcache2.core.memory import (
    Arriving,
    StreamOrder,
    as_words,
    empty_bytes,
    gather,
    sent,
    to_host,
)
from torchcache2.core.rows import Rows
from torchcache2.tiers.memory.tier import MemoryTier

CPU = torch.device("cpu")
NAMESPACE = NAMESPACES[0]


def put(tier, runtime, names, *, scale=1.0, width=40):
    values = torch.tensor(names, dtype=torch.float32)[:, None].expand(-1, width) * scale
    output = {
        "a": runtime.on_device(values.contiguous()),
        "b": runtime.on_device(values.to(torch.float64) + 1),
    }
    return tier.put(keys_of(names), Rows.from_pytree(output, len(names), device=CPU))


def check_outputs(output, names, width):
    expected = torch.tensor(names, dtype=torch.float32)[:, None].expand(-1, width)
    assert torch.equal(output["a"], expected)
    assert torch.equal(output["b"], expected.double() + 1)


found = functools.partial(storage.found, width=40, check=check_outputs)


def test_rows_are_published_when_their_copies_have_arrived():
    runtime = Late()
    tier = MemoryTier(1_000_000, runtime=runtime)
    assert put(tier, runtime, [1, 2, 3]) == 3
    assert len(runtime.queue) == 2 and "synchronize" not in runtime.log
    assert found(tier, [3, 4, 1]) == [1, 3]
    assert put(tier, runtime, [4, 1]) == 1
    assert put(tier, runtime, [5]) == 1
    assert tier.stats().rows == 5
    assert found(tier, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5]


def test_what_the_caller_does_with_a_tensor_on_the_host_is_not_stored():
    runtime = Late()
    tier = MemoryTier(1_000_000, runtime=runtime)
    near, far = torch.arange(4.0).view(2, 2), runtime.on_device(torch.ones(2, 3))
    tier.put(keys_of([1, 2]), Rows.from_pytree([near, far], 2, device=CPU))
    near.zero_()
    ((_, rows),) = tier.get(keys_of([1, 2])).parts
    assert torch.equal(rows.columns[0], torch.arange(4.0).view(2, 2))
    assert torch.equal(rows.columns[1], torch.ones(2, 3))


def test_what_is_on_its_way_counts_in_the_budget():
    runtime = Late()
    budget = 100_000
    tier = MemoryTier(budget, runtime=runtime)
    kept, first = 0, 1
    for _ in range(40):
        names = list(range(first, first + 6))
        kept += put(tier, runtime, names, width=100)
        first += 6
        assert tier._used() <= budget
    assert 10 < kept < 240
    assert len(found(tier, list(range(1, first)), width=100)) == kept == tier.stats().rows


@pytest.mark.parametrize("end", ["drop", "close"])
def test_rows_on_their_way_are_dropped_with_their_namespace(end):
    runtime = Late()
    tier = MemoryTier(1_000_000, runtime=runtime)
    put(tier, runtime, [1, 2])
    tier.drop(NAMESPACE) if end == "drop" else tier.close()
    assert found(tier, [1, 2]) == [] and tier.stats().rows == 0
    assert put(tier, runtime, [1, 3]) == (2 if end == "drop" else 0)
    assert found(tier, [1, 2, 3]) == ([1, 3] if end == "drop" else [])


def test_a_failed_copy_is_a_miss_and_one_warning(log):
    class Broken(Late):
        def event(self, device):
            if self.is_broken:
                raise RuntimeError("the device is gone")
            return super().event(device)

        is_broken = False

    runtime = Broken()
    tier = MemoryTier(1_000_000, runtime=runtime)
    put(tier, runtime, [1, 2])
    runtime.is_broken = True
    assert put(tier, runtime, [3]) == 0
    assert found(tier, [1, 2, 3]) == []
    runtime.is_broken = False
    put(tier, runtime, [4])
    assert found(tier, [1, 4]) == [4]
    assert len([record for record in log if "the device is gone" in record.getMessage()]) == 1


def test_rows_for_an_accelerator_are_gathered_into_pinned_memory():
    runtime = Late()
    data = torch.arange(60, dtype=torch.uint8).view(10, 6)
    picked = gather(data, torch.tensor([3, 0, 9]), runtime=runtime)
    assert torch.equal(picked, data[[3, 0, 9]])
    assert bool((empty_bytes(5, runtime=runtime) == POISON).all())


def test_all_tensors_are_waited_for_once():
    runtime = Late()
    host = torch.arange(4)
    tensors = [runtime.on_device(torch.arange(6.0).view(2, 3).t()), host, runtime.on_device(torch.ones(2))]
    arriving = Arriving(tensors, runtime)
    assert arriving.nbytes == 64 and len(runtime.queue) == 2
    assert all(bool((target.view(-1).view(torch.uint8) == POISON).all()) for target, _ in runtime.queue)
    first, second, third = arriving.wait()
    assert torch.equal(first, torch.arange(6.0).view(2, 3).t()) and second is host
    assert torch.equal(third, torch.ones(2))
    assert runtime.log == ["event", "synchronize"] and arriving.nbytes == 0
    assert to_host([host], runtime)[0] is host


def test_work_on_the_same_memory_is_put_in_order():
    runtime = Late()
    order = StreamOrder(torch.device("cuda:0"), runtime)
    tensor = torch.ones(2)
    order.begin([tensor])
    order.end()
    order.renew()
    order.begin([tensor, tensor])
    order.end()
    assert runtime.log == ["keep", "event", "wait", "keep", "keep", "event"]
    del runtime.log[:]
    order.begin([tensor, tensor])  # this stream keeps both already
    order.end()
    runtime.current_stream = "side"
    order.begin([tensor, tensor])
    assert runtime.log == ["wait", "event", "wait", "keep", "keep"]
    assert order.is_needed and not StreamOrder(CPU, runtime).is_needed


def test_positions_are_sent_once_to_each_device():
    runtime = Streams()
    positions = torch.tensor([2, 0])
    places = sent(positions, [CPU, CPU], runtime)
    assert list(places) == [CPU] and torch.equal(places[CPU], positions)
    assert places[CPU] is not positions and runtime.log == ["pinned"]


def test_words_are_no_wider_than_their_place_in_memory_allows():
    memory = torch.arange(72, dtype=torch.uint8)
    for offset, word in ((0, torch.int64), (4, torch.int32), (6, torch.int16), (1, torch.uint8)):
        rows = torch.frombuffer(memory.numpy(), dtype=torch.uint8, offset=offset, count=64).view(4, 16)
        words = as_words(rows)  # the offset is in the address, not in the tensor
        assert words.dtype == word and torch.equal(words.view(torch.uint8), rows)


def test_rows_that_are_sent_arrive_on_the_stream_that_uses_them():
    runtime, device = Sends(), torch.device("meta")
    output = {"a": torch.rand(3, 4), "b": torch.arange(3), "c": "text"}
    rows = Rows.from_pytree(output, 3, device=CPU)
    arrived = rows.sent(device, runtime)
    assert runtime.log == ["pinned", "pinned", "event of aside"]
    assert len(runtime.queue) == 2
    found = arrived()
    assert runtime.log[3:] == ["wait of default", "synchronize", "keep", "keep"]
    back = found.to_pytree(device=CPU)
    assert torch.equal(back["a"], output["a"]) and torch.equal(back["b"], output["b"])
    assert back["c"] == "text"
