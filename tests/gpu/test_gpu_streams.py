"""Streams, graphs and the memory of CUDA: what no other device has."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

from tests.helpers.outputs import assert_same, bypasses, frozen, hits, misses
from torchcache2 import CachedDataset, torchcache

pytestmark = pytest.mark.cuda_only
PLACES = ["device", "cpu"]


class Encoder(nn.Module):
    """An item's output does not depend on its batch, not even in its last bits."""

    def __init__(self, width=512):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return (x * self.scale).sin()


def pair(place, device, **options):
    plain = frozen(Encoder().to(device))
    where = device if place == "device" else place
    return torchcache(memory_cache_device=where, **options)(copy.deepcopy(plain)), plain


def waits(call):
    """How often a call makes the host wait for the device, as the profiler sees it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("the call"):
            call()
        torch.cuda.synchronize()
    on_host = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    (span,) = [event.time_range for event in on_host if event.name == "the call"]
    return [
        event.name
        for event in on_host
        if "Synchronize" in event.name and span.start <= event.time_range.start <= span.end
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(256, 3, 64, 64), (256, 2048)])
def test_a_call_waits_once(shape, place, device):
    cached = torchcache(memory_cache_device=device if place == "device" else place)(
        lambda x: x.flatten(1)[:, :768] * 2
    )
    x = torch.randn(shape)
    for _ in range(3):
        cached(x)
    found = waits(lambda: cached(x))
    assert len(found) == 1, found
    assert not any("DeviceSynchronize" in name for name in found)


@pytest.mark.parametrize("place", PLACES)
def test_no_operation_of_a_hit_waits_without_need(place, device):
    cached, plain = pair(place, device)
    x = torch.randn(64, 512)
    for _ in range(3):
        cached(x)
    torch.cuda.set_sync_debug_mode("error")  # torch then raises where one of its functions waits
    try:
        output = cached(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(output, plain(x))


@pytest.mark.parametrize("place", PLACES)
def test_batches_that_are_still_being_made_on_a_side_stream(place, device):
    cached, plain = pair(place, device, max_memory_cache_size="200kB", policy="lru")
    pool = torch.randn(300, 512)
    expected = plain(pool)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    outputs = []
    for _ in range(30):
        chosen = torch.randint(300, (32,))
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            batch = torch.full((32, 512), torch.nan)
            torch.cuda._sleep(20_000_000)  # the stream is busy for some milliseconds
            batch.copy_(pool[chosen])  # a key or a forward that did not wait would see the NaNs
            outputs.append((chosen, cached(batch)))
            batch.fill_(torch.nan)  # and one that is late would see these
    torch.cuda.synchronize(device)
    for chosen, output in outputs:
        assert torch.equal(output, expected[chosen])
    assert hits(cached) > 0 and not bypasses(cached)


def test_batches_of_a_loader_are_on_the_device(device, tmp_path):
    plain, pool = frozen(Encoder().to(device)), torch.randn(320, 512, device="cpu")
    data = torch.utils.data.TensorDataset(pool)
    options = {"map": lambda batch: plain(batch[0].to(device)), "memory_size": 0}
    with contextlib.closing(CachedDataset(data, tmp_path, **options)) as features:
        expected = plain(pool.to(device))
        for _ in range(3):
            batches = []
            for batch in features.loader(32, device=device):
                assert batch.device == device
                torch.cuda._sleep(20_000_000)  # this stream is busy when the next batch arrives
                batches.append(batch)
            assert_same(torch.cat(batches), expected)
        assert features.stats().misses == 320


if torch.cuda.device_count() > 1:

    def test_two_devices(device):
        first, second = torch.device("cuda:0"), torch.device("cuda:1")
        with torch.device(second):
            cached, plain = pair("device", second)
            pool = torch.randn(60, 512)
            for current in (first, second, first):
                with torch.cuda.device(current):
                    for start in (0, 20, 40):
                        assert_same(cached(pool[start : start + 20]), plain(pool[start : start + 20]))
        assert (hits(cached), misses(cached)) == (120, 60)
        there, expected = pool.to(first), plain(pool)
        assert_same(cached(there), expected.to(first))  # the key does not depend on the device


def test_a_head_in_a_graph_of_cuda(device):
    cached, plain = pair("device", device)
    head = frozen(nn.Linear(512, 10))
    pool = torch.randn(64, 512)
    static = cached(pool[:16]).clone()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        head(static)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = head(static)
    for start in (16, 32, 0, 48, 16):
        static.copy_(cached(pool[start : start + 16]))
        graph.replay()
        torch.testing.assert_close(output, head(plain(pool[start : start + 16])))
    assert misses(cached) == 64 and not bypasses(cached)


def test_a_cached_module_in_a_graph_runs_its_plain_forward(device):
    cached, plain = pair("device", device)
    static = torch.randn(16, 512)
    cached(static)
    before = cached.cache_instance.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cached(static)
    static.copy_(torch.randn(16, 512))
    graph.replay()
    assert_same(output, plain(static))
    assert cached.cache_instance.stats() == before


@pytest.mark.parametrize("place", PLACES)
def test_misses_that_are_compiled_to_graphs(place, device):
    # Such a forward returns the same memory at each run: rows must be copies.
    cached, plain = pair(place, device, miss_batch="pad")
    compiled = torch.compile(cached, mode="reduce-overhead", dynamic=False)
    pool = torch.randn(96, 512)
    expected = plain(pool)
    for _ in range(6):
        for start in range(0, 96, 16):
            torch.compiler.cudagraph_mark_step_begin()
            output = compiled(pool[start : start + 16]).clone()
            torch.testing.assert_close(output, expected[start : start + 16])
    assert hits(cached) >= 5 * 96 and not bypasses(cached)


# Memory that runs out


def rest_of(device):
    """Tensors that take what is free on a device, to the last half megabyte."""
    taken, size = [], torch.cuda.mem_get_info(device)[0]
    while size >= 1 << 19:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.cuda.OutOfMemoryError:
            size //= 2
    return taken


def test_rows_make_room_before_an_error_for_memory_is_raised(device, log):
    def forward(x, more=0):
        return x * 2 + torch.empty(more, dtype=torch.uint8, device=x.device).numel()

    cached = torchcache(memory_cache_device=device)(forward)
    x = torch.randn(64, 512)
    cached(x)
    assert cached.cache_instance.stats().memory_rows == 64
    with pytest.raises(torch.cuda.OutOfMemoryError):
        cached(x, 1 << 50)
    assert cached.cache_instance.stats().memory_rows == 0
    assert len([record for record in log if record.levelname == "WARNING"]) == 1
    assert_same(cached(x), x * 2)


@pytest.mark.parametrize("place", PLACES)
def test_a_device_without_memory(place, device):
    cached, plain = pair(place, device)
    pool = torch.randn(256, 512)
    expected = plain(pool)
    cached(pool[:64])
    taken = rest_of(device)
    for start in (0, 64, 128, 0, 192, 64):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):  # of the forward itself, as without a cache
            output = cached(pool[start : start + 64])
            assert torch.equal(output, expected[start : start + 64])
    del taken
    gc.collect()
    torch.cuda.empty_cache()
    for start in range(0, 256, 64):
        assert_same(cached(pool[start : start + 64]), expected[start : start + 64])
