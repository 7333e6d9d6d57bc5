"""Calls of cached modules whose tensors are on an accelerator: outputs are those of the plain forward."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.helpers.gloo import run_ranks
from tests.helpers.outputs import assert_same, bypasses, frozen, hits, misses
from torchcache2 import DeviceError, torchcache

PLACES = ["device", "cpu", None]  # where rows are kept


class Encoder(nn.Module):
    """An item's output does not depend on its batch, not even in its last bits."""

    def __init__(self, width=64):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x):
        y = x * self.scale + self.shift
        return {"tokens": y[:, None].repeat(1, 3, 1).sin(), "pooled": y.relu()}


def pair(place=None, device=None, **options):
    """A cached module, and the same without a cache."""
    plain = frozen(Encoder())
    where = device if place == "device" else place
    return torchcache(memory_cache_device=where, **options)(copy.deepcopy(plain)), plain


def some_batches(pool, rounds, size=16):
    for _ in range(rounds):
        yield pool[torch.randint(len(pool), (size,))]


@pytest.mark.parametrize("place", PLACES)
def test_lists_with_an_entry_for_each_item_come_back_where_they_were(place, device):
    def ragged(x):
        lengths = [int(value) % 5 for value in x[:, 0]]
        pairs = zip(lengths, x, strict=True)
        entries = [{"t": torch.stack([item] * n).T if n else item[:0], "c": n} for n, item in pairs]
        return {"e": entries, "a": x.cpu().numpy(), "host": [item.cpu() for item in x], "x": x + 1}

    where = device if place == "device" else place
    function, pool = torchcache(ragged, memory_cache_device=where), torch.arange(90.0).reshape(30, 3)
    for batch in some_batches(pool, 10):
        assert_same(ragged(batch), function(batch))
    assert hits(function) > 100 and not bypasses(function)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("budget", ["20kB", "1MB"])
def test_outputs_are_those_of_the_plain_forward(place, budget, device):
    cached, plain = pair(place, device, max_memory_cache_size=budget, policy="lru")
    for batch in some_batches(torch.randn(100, 64), 60):
        assert_same(cached(batch), plain(batch))
    stats = cached.cache_instance.stats()
    assert stats.hits > 0 and not stats.bypasses
    assert stats.misses == 100 if budget == "1MB" else stats.memory_bytes <= 20_000


def test_rows_come_back_on_the_device_of_the_batch(device):
    cached, plain = pair("device", device)
    x = torch.randn(16, 64)
    output = cached(x)
    elsewhere = copy.deepcopy(plain).cpu()
    assert_same(cached(x), output)
    cached.cpu()
    assert_same(cached(x), output)
    on_cpu = cached(x.cpu())
    assert {tensor.device.type for tensor in on_cpu.values()} == {"cpu"}
    torch.testing.assert_close(on_cpu, elsewhere(x.cpu()))
    assert (hits(cached), misses(cached)) == (48, 16)


@pytest.mark.cuda_only
def test_weights_that_are_moved_away_free_their_memory(device):
    encoder = torchcache(frozen(nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 16))))
    x = torch.randn(8, 4096)
    expected, namespace = encoder(x), encoder.cache_instance.module_hash
    before = torch.cuda.memory_allocated(device)
    encoder.cpu()
    assert_same(encoder(x), expected)
    assert before - torch.cuda.memory_allocated(device) > 60_000_000
    assert encoder.cache_instance.module_hash == namespace
    with pytest.raises(
        DeviceError, match=rf"2 of the 10 items .* they are on {device}, and all weights on cpu"
    ):
        encoder(torch.cat([x, x[:2] + 1]))
    encoder.to(device)
    assert_same(encoder(torch.cat([x, x[:2] + 1]))[:8], expected)
    assert misses(encoder) == 10


def test_autocast_has_rows_of_its_own(device):
    plain = frozen(nn.Linear(64, 32))
    cached, x = torchcache(copy.deepcopy(plain)), torch.randn(16, 64)
    full = cached(x)
    with torch.autocast(device.type, torch.bfloat16):
        low = cached(x)
        assert_same(low, plain(x))
        assert_same(cached(x), low)
    assert low.dtype == torch.bfloat16
    assert_same(cached(x), full)
    assert (hits(cached), misses(cached), bypasses(cached)) == (32, 32, {})


@pytest.mark.parametrize("place", PLACES)
def test_threads_on_streams_of_their_own(place, device, streams):
    cached, plain = pair(place, device, max_memory_cache_size="60kB", policy="lru")
    pool = torch.randn(200, 64)
    expected = plain(pool)
    failures = []

    def work(seed):
        try:
            generator = torch.Generator("cpu").manual_seed(seed)
            with streams():
                for _ in range(50):
                    chosen = torch.randint(200, (16,), generator=generator, device="cpu").to(device)
                    output = cached(pool[chosen])
                    for name, value in output.items():
                        assert torch.equal(value, expected[name][chosen]), name
        except BaseException as error:
            failures.append(error)

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what this stream has made is read on others
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hits(cached) + misses(cached) == 8 * 50 * 16 and not bypasses(cached)


LOADED = """
class Images(data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


if __name__ == "__main__":
    device = torch.device(ARGUMENTS[0])
    net = torchcache(nn.Flatten()).eval()
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "pin_memory": device.type == "cuda"}
    for epoch in range(2):
        for images, labels in data.DataLoader(Images(), 8, shuffle=True, **options):
            features = net(images.to(device, non_blocking=True))
            assert features.device.type == device.type
            assert torch.equal(features[:, 0].cpu(), labels.float())
    stats = net.cache_instance.stats()
    assert (stats.hits, stats.misses) == (40, 40), stats
"""

DDP = """
device = torch.device(ARGUMENTS[0])
backend = "nccl" if device.type == "cuda" else "gloo"
torch.distributed.init_process_group(backend, init_method=f"file://{STORE}", rank=RANK, world_size=WORLD)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval().requires_grad_(False).to(device)
backbone = torchcache(plain)
inputs, labels = torch.rand(64, 8, device=device), torch.arange(64, device=device) % 4
weights = []
for disabled in ("", "1"):
    os.environ["TORCHCACHE_DISABLE"] = disabled
    torch.manual_seed(1)
    head = nn.parallel.DistributedDataParallel(nn.Linear(16, 4).to(device))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(8):
        batch = slice(step % 4 * 16, step % 4 * 16 + 16)
        nn.functional.cross_entropy(head(backbone(inputs[batch])), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights.append([weight.detach().clone() for weight in head.parameters()])
stats = backbone.cache_instance.stats()
assert (stats.hits, stats.misses, stats.bypasses) == (64, 64, {}), stats
for left, right in zip(*weights):
    torch.testing.assert_close(left, right)
"""


def test_a_loader_with_spawned_workers_and_pinned_batches(device, tmp_path):
    run_ranks(LOADED, tmp_path, device, count=1)


def test_a_head_that_is_distributed(device, tmp_path):
    run_ranks(DDP, tmp_path, device, count=1)
