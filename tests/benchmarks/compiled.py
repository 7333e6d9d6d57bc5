"""Under `torch.compile`: the fixed cost of a call, and how often misses are compiled again."""

import math
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.benchmarks.costs import make_blocks
from tests.benchmarks.hits import make_features
from tests.benchmarks.report import at_most, time_rows
from tests.benchmarks.timing import interleave, progress
from torchcache2 import torchcache

EAGER, INSIDE, AROUND = "decorated, not compiled", "torch.compile(net)", "a compiled model around it"
PLAIN = "torch.compile(net), not decorated: computes"
BATCH, BATCHES = 64, 150


class Model(nn.Module):
    """A cached backbone and the head that is trained on it."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


def run(report):
    with torch.no_grad():
        call(report)
        recompiles(report)


def call(report):
    """One item that hits, through the module of `costs.call`."""
    progress("compiled: fixed cost of a call")
    x = torch.randn(1, 16)
    plain = make_blocks()().eval()

    def cached():
        # A class of its own each: instances of one class share their rows.
        net = torchcache(make_blocks())().eval()
        net.load_state_dict(plain.state_dict())
        return net

    model = Model(cached())
    nets = {EAGER: cached(), INSIDE: cached(), AROUND: model.backbone}
    with fresh_dynamo() as (count, compile_with):
        functions = {
            EAGER: nets[EAGER],
            INSIDE: compile_with(nets[INSIDE]),
            AROUND: compile_with(model),
            PLAIN: compile_with(plain),
        }
        expected = plain(x)
        for name, function in functions.items():
            value = model.head(expected) if name == AROUND else expected
            graphs = count()
            for _ in range(3):
                assert torch.allclose(function(x), value, atol=1e-5), name
            # The miss ran compiled, the model's head besides.
            assert (count() > graphs) == (name != EAGER), name
        graphs = count()
        measured = interleave({n: lambda f=f: f(x) for n, f in functions.items()}, rounds=600, warmup=50)
        assert count() == graphs, "compiled again while timed"
    for name, net in nets.items():
        assert net.cache_instance.stats().misses == 1, name
    report.times(
        "One item that hits, 200 parameters in 150 submodules, backend `eager`",
        time_rows("(16,)", measured, 1),
    )
    times = measured[INSIDE]
    what = "fixed cost of a call of torch.compile(net)"
    report.targets([at_most(what, times.median * 1e6, 450, " µs", times.cold * 1e6)])


def recompiles(report):
    """Graphs compiled over random hit patterns, a different number of misses in each batch."""
    rows, padded = [], 0
    for dynamic in (None, False, True):
        for miss_batch in ("exact", "pad"):
            progress(f"compiled: misses with miss_batch={miss_batch!r}, dynamic={dynamic}")
            graphs, sizes = compilations(miss_batch, dynamic)
            rows.append((f"`{miss_batch!r}`", f"`{dynamic}`", sizes, graphs))
            if miss_batch == "pad":
                padded = max(padded, graphs)
    report.table(
        f"{BATCHES} batches of {BATCH} with random numbers of misses: compilations of the forward",
        ("`miss_batch`", "`dynamic` of torch.compile", "numbers of misses", "compilations"),
        rows,
    )
    bound = int(math.log2(BATCH)) + 1
    report.targets([at_most('compilations with miss_batch="pad", at most', padded, bound, "")])


def compilations(miss_batch, dynamic):
    """How often a forward was compiled, and how many numbers of misses it has seen."""
    generator = torch.Generator().manual_seed(3)
    plain, net = make_features()().eval(), torchcache(miss_batch=miss_batch)(make_features())().eval()
    seen, sizes = torch.empty(0, 16), set()
    with fresh_dynamo() as (count, compile_with):
        function = compile_with(net, dynamic=dynamic)
        for turn in range(BATCHES):
            # All of the first batch is new; later up to all of it.
            new = BATCH if turn == 0 else int(torch.randint(BATCH + 1, (), generator=generator))
            found = torch.randperm(len(seen), generator=generator)[: BATCH - new]
            x = torch.cat([torch.randn(new, 16, generator=generator), seen[found]])
            x = x[torch.randperm(BATCH, generator=generator)]
            misses = net.cache_instance.stats().misses
            assert torch.allclose(function(x), plain(x), atol=1e-4)
            assert net.cache_instance.stats().misses - misses == new
            sizes |= {new} - {0}
            seen = torch.cat([seen, x]).unique(dim=0)
        return count(), len(sizes)


@contextmanager
def fresh_dynamo():
    """Nothing compiled yet, no limit on compilations; a counter, and a `torch.compile` that counts."""
    torch._dynamo.reset()
    backend = CompileCounter()  # runs graphs as they are
    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 1000, f"accumulated_{limit}": 1000}):
        try:
            yield (
                lambda: backend.frame_count,
                lambda module, **options: torch.compile(module, backend=backend, **options),
            )
        finally:
            torch._dynamo.reset()
