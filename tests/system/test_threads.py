"""Many threads on one module."""

import concurrent.futures
import os
import threading
import time

import pytest
import torch
from torch import nn

from torchcache2 import torchcache
from torchcache2.engine.stack import TierStack

SOAK = bool(os.environ.get("SOAK"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x, scale=1.0):
        return {"y": torch.relu(self.fc(x)) * scale, "x": x.sum(1)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "policy, budget, calls", [("keep", 10**8, 400), ("keep", 20_000, 160), ("lru", 20_000, 160)]
)
def test_sixteen_threads_on_one_module_get_no_wrong_output(policy, budget, calls):
    plain = Net().eval().requires_grad_(False)
    module = torchcache(policy=policy, max_memory_cache_size=budget)(Net().eval().requires_grad_(False))
    module.load_state_dict(plain.state_dict())
    # Powers of two: the sum of a row is exact, whatever the size of its batch.
    plain.fc.weight.copy_(torch.randint(-4, 4, (5, 6)) / 2)
    plain.fc.bias.copy_(torch.randint(-4, 4, (5,)) / 2)
    module.load_state_dict(plain.state_dict())
    items = torch.randint(-8, 8, (400, 6)).float()
    calls = (200_000 if SOAK else calls) // 16
    start = threading.Barrier(16)

    def batches(number):
        """What a thread calls with, and the outputs: they are made before, so that the threads only call."""
        generator = torch.Generator().manual_seed(number)
        counts = torch.randint(1, 9, (calls,), generator=generator).tolist()
        scales = torch.randint(1, 3, (calls,), generator=generator).tolist()
        numbers = torch.randint(len(items), (sum(counts),), generator=generator).split(counts)
        tables = {scale: plain(items, float(scale)) for scale in (1, 2)}
        for some, scale in zip(numbers, scales, strict=True):
            yield items[some], float(scale), {name: rows[some] for name, rows in tables[scale].items()}

    def work(batches):
        start.wait()
        wrong = 0
        for x, scale, expected in batches:
            output = module(x, scale)
            wrong += not all(torch.equal(output[name], expected[name]) for name in ("y", "x"))
        return wrong

    jobs = [list(batches(number)) for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, jobs)) == 0
    stats = module.cache_instance.stats()
    assert stats.memory_bytes <= budget and stats.hits > 0
    assert stats.hits + stats.misses + sum(stats.bypasses.values()) > 16 * calls


def test_caches_made_and_dropped_while_others_evict_do_not_deadlock():
    cached = torchcache(max_memory_cache_size=20_000, policy="lru")(type("Short", (Net,), {}))

    def work(number):
        for step in range(400 if SOAK else 6):
            module = cached().eval().requires_grad_(False)
            module(torch.randn(20, 6))
            if step % 3 == 0:
                module.cache_instance.close()
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8), timeout=600 if SOAK else 60))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(6))

    def forward(self, x):
        time.sleep(0.4)
        return x * self.weight


EDITS = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "numpy": lambda weight: weight.numpy().fill(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_rows_computed_while_another_thread_edits_weights_are_not_kept(name):
    module, x = torchcache(probe=False)(Slow()), torch.rand(4, 6)
    module(torch.rand(4, 6))  # the first call takes longer
    editor = threading.Timer(0.2, EDITS[name], [module.weight])
    editor.start()
    module(x)
    editor.join()
    module.weight.numpy().fill(1)
    assert torch.equal(module(x), x)


def test_rows_of_an_input_that_another_thread_writes_to_during_the_lookup_are_not_kept(monkeypatch):
    function, x = torchcache(lambda x: x * 2), torch.rand(4, 6)
    before, found = x.clone(), TierStack.get

    def slow(*args, **kwargs):
        x.zero_()
        return found(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TierStack, "get", slow)
        function(x)
    assert torch.equal(function(before), 2 * before)
