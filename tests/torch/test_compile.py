"""Under `torch.compile` the cache stays outside of the graphs, and the forward of misses is one."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from torchcache2 import Cache, CacheSettings, Keys, LazyModule, torchcache

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.eval().requires_grad_(False)

    def forward(self, x, scale=1.0):
        return {"out": self.second(torch.relu(self.first(x))) * scale, "sum": x.sum(1)}


class Around(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        torch.manual_seed(2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        features = self.backbone(x * 2)
        return torch.tanh(self.head(features["out"]))


class Graphs:
    """A backend that runs graphs as they are and keeps the names of their operations."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        kinds = ("call_function", "call_method", "call_module")
        self.seen.append([str(node.target) for node in graph.graph.nodes if node.op in kinds])
        return graph.forward

    def __len__(self):
        return len(self.seen)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_flush_denormal(False)


def as_class(**options):
    class Cached(Net):
        forward = Net.forward

    return torchcache(**{"probe": False} | options)(Cached)()


def as_instance(**options):
    return torchcache(**{"probe": False} | options)(Net())


def as_function(**options):
    net = Net()

    @torchcache(**{"probe": False} | options)
    def function(x, scale=1.0):
        return net(x, scale)

    return function


KINDS = [as_class, as_instance, as_function]


def counts(cached):
    stats = cached.cache_instance.stats()
    assert not stats.bypasses
    return stats.hits, stats.misses


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name])


@pytest.mark.parametrize("make", KINDS)
def test_misses_run_compiled_and_nothing_else_does(make):
    plain, cached, graphs = Net(), make(), Graphs()
    compiled = torch.compile(cached, backend=graphs)
    assert_same(compiled(X), plain(X))
    assert len(graphs) == 1 and len(graphs.seen[0]) >= 4  # two layers, a product, a sum
    for x in (X, X.flip(0), X[2:4]):
        assert_same(compiled(x), plain(x))
    assert len(graphs) == 1
    assert counts(cached) == (14, 6)
    assert_same(compiled(torch.cat([X, -X])), plain(torch.cat([X, -X])))
    assert counts(cached) == (20, 12)


@pytest.mark.parametrize("make", KINDS)
def test_a_compiled_model_around_a_cached_module(make):
    cached, graphs = make(), Graphs()
    plain, model = Around(Net()), Around(cached)
    compiled = torch.compile(model, backend=graphs)
    for x in (X, X.flip(0), X):
        torch.testing.assert_close(compiled(x), plain(x))
    assert counts(cached) == (12, 6)
    # What comes before, the misses, and what comes after.
    assert len(graphs) == 3
    compiled(X).sum().backward()
    plain(X).sum().backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_a_module_that_compiles_itself_or_is_compiled_already(is_compiled_before):
    graphs = Graphs()
    if is_compiled_before:
        cached = torchcache(probe=False)(torch.compile(Net(), backend=graphs))
    else:
        cached = as_class()
        cached.compile(backend=graphs)
    for x in (X, X.flip(0), X[:2]):
        assert_same(cached(x), Net()(x))
    assert counts(cached) == (8, 6) and len(graphs) == 1


def sequential():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval().requires_grad_(False)


class Stacked(nn.Sequential):
    pass


without_probe = torchcache(probe=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "decorate", [without_probe, lambda net: without_probe(type("S", (Stacked,), {}))(*net)]
)
def test_modules_of_torch_itself_run_compiled(decorate):
    plain, graphs = sequential(), Graphs()
    others = [decorate(sequential().eval().requires_grad_(False)) for _ in range(9)]
    for cached in others:
        compiled = torch.compile(cached, backend=graphs)
        for x in (X, X.flip(0)):
            torch.testing.assert_close(compiled(x), plain(x))
        assert counts(cached) == (6, 6)
    assert len(graphs) == len(others) and all(len(names) == 2 for names in graphs.seen)


@pytest.mark.parametrize("make", KINDS)
def test_rows_from_before_compiling_are_found(make):
    cached, graphs = make(), Graphs()
    cached(X)
    compiled = torch.compile(cached, backend=graphs)
    assert_same(compiled(X), Net()(X))
    assert counts(cached) == (6, 6) and len(graphs) == 0
    compiled(-X)
    if isinstance(cached, nn.Module):
        cached.train().eval()  # and looks anew at what the compiler has left on it
    cached(X)
    assert counts(cached) == (12, 12)


@pytest.mark.parametrize("make", [as_class, as_instance])
def test_what_lightning_keeps_of_compiling_is_no_part_of_the_module(make):
    cached, graphs = make(), Graphs()
    compiled = torch.compile(cached, backend=graphs)
    compiled._compile_kwargs = {"backend": graphs}  # Lightning does this whenever anything is compiled
    assert vars(cached)["_compile_kwargs"] == {"backend": graphs}
    for _ in range(2):
        assert_same(compiled(X), Net()(X))
    assert counts(cached) == (6, 6) and len(graphs) == 1
    before = cached.cache_instance.module_hash
    del cached._compile_kwargs
    assert cached.cache_instance.module_hash == before


@pytest.mark.soak  # its compilers take most of a minute
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own code
def test_real_compiled_code():
    cached, plain = as_class(), Net()
    compiled = torch.compile(cached)
    with torch.no_grad():
        compiled(X + 9)  # code that old compilers make has the process flush denormals once it is loaded
        for x in (X, X.flip(0), torch.cat([X[:3], X + 1])):
            assert_same(compiled(x), plain(x))
    assert counts(cached) == (9, 18)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_modes(mode):
    cached, plain, graphs = as_class(), Net(), Graphs()
    compiled = torch.compile(cached, backend=graphs)
    with mode():
        for x in (X, X.flip(0)):
            assert_same(compiled(x), plain(x))
    assert counts(cached) == (6, 6) and len(graphs) == 1
    assert_same(compiled(X), plain(X))
    assert counts(cached) == ((12, 6) if mode in (torch.no_grad, torch.inference_mode) else (6, 12))


def test_a_module_in_training_runs_compiled_without_the_cache():
    cached, plain = as_class(), Net()
    graphs = Graphs()
    for net in (cached, plain):
        net.requires_grad_(True)
    compiled = torch.compile(cached, backend=graphs)
    for net in (compiled, plain):
        net(X)["out"].sum().backward()
    torch.testing.assert_close(cached.first.weight.grad, plain.first.weight.grad)
    assert cached.cache_instance.stats().bypasses == {"grad": 6} and len(graphs) == 1


def test_an_exception_of_a_compiled_forward_is_its_own():
    @torchcache
    def function(x, fail=False):
        if fail:
            raise KeyError("mine")
        return x + 1

    compiled = torch.compile(lambda x, fail: function(x * 2, fail=fail), backend="eager")
    with pytest.raises(KeyError, match="mine"):
        compiled(X, True)
    torch.testing.assert_close(compiled(X, False), X * 2 + 1)


@pytest.mark.slow
def test_arguments_of_many_kinds_outlast_the_compilers_patience():
    # More kinds than the compiler keeps graphs for: it gives up, the cache does not.
    cached, plain = as_function(), Net()
    compiled = torch.compile(cached, backend="eager", dynamic=False)
    for size in range(1, 11):
        x = torch.randn(size, 8)
        for _ in range(2):
            assert_same(compiled(x, scale=float(size)), plain(x, float(size)))
    assert counts(cached) == (55, 55)


def test_the_engine_alone():
    cache, graphs = Cache(b"engine, compiled", CacheSettings()), Graphs()
    keys = Keys(cache.namespace, np.arange(96, dtype=np.uint8).reshape(6, 16))

    def compute(positions):
        return X[positions] * 2 + 1

    def function(x):
        return cache.fetch(keys, compute) - x

    compiled = torch.compile(function, backend=graphs)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), X * 2 + 1 - X)
    assert cache.stats().misses == 6 and cache.stats().hits == 12
    assert len(graphs) == 2 and sum(map(len, graphs.seen)) == 4  # index, product, sum; the difference


@pytest.mark.parametrize("make", KINDS)
def test_fullgraph_is_an_error_of_torch(make):
    compiled = torch.compile(make(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        compiled(X)


# Batches of misses of every size


def hit_patterns(batch, rounds, seed):
    """Batches in which a random share of items is new."""
    rng = np.random.default_rng(seed)
    old = torch.zeros(batch, 8)
    for _ in range(rounds):
        fresh = torch.tensor(rng.random(batch) < rng.random() ** 2)
        x = torch.where(fresh[:, None], torch.randn(batch, 8), old)
        yield x
        old = x


@pytest.mark.parametrize("batch", [16, 24])
@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.slow
def test_padded_misses_compile_few_graphs(batch, dynamic):
    cached, plain, graphs = as_class(miss_batch="pad", probe=True), Net(), Graphs()
    # Found through the standard library, a set is not the state of the forward.
    sizes = threading.current_thread().sizes = set()
    cached.second.register_forward_hook(
        lambda module, args, output: threading.current_thread().sizes.add(len(output))
    )
    for x in hit_patterns(batch, 40, seed=batch):
        assert_same(cached(x), plain(x))
    assert sizes <= {1, 2, 4, 8, 16, batch} and len(sizes) >= 3

    cached = as_class(miss_batch="pad", probe=True)
    compiled = torch.compile(cached, backend=graphs, dynamic=dynamic)
    for x in hit_patterns(batch, 40, seed=batch + 1):
        assert_same(compiled(x), plain(x))
    hits, misses = counts(cached)
    assert hits + misses == 40 * batch and hits > batch
    assert len(graphs) <= math.ceil(math.log2(batch)) + 1


def test_positions_of_a_padded_batch():
    cache = Cache(b"padded positions", CacheSettings(miss_batch="pad"))
    asked = []

    def compute(positions):
        asked.append(positions.tolist())
        return positions.double()

    def fetch(names):
        data = np.zeros((len(names), 16), np.uint8)
        data[:, 0] = data[:, 8] = names
        return cache.fetch(Keys(cache.namespace, data), compute).tolist()

    assert fetch([1, 2, 3]) == [0, 1, 2]
    assert fetch([1, 4, 2, 5, 3, 6, 3, 1]) == [0, 1, 1, 3, 2, 5, 2, 0]
    assert fetch([7, 1, 2]) == [0, 0, 1]
    assert fetch([8, 9, 1]) == [0, 1, 0]
    assert fetch([10, 11, 12, 1]) == [0, 1, 2, 0]
    assert fetch([13, 13, 1, 14, 15]) == [0, 0, 0, 3, 4]
    assert asked == [[0, 1, 2], [1, 3, 5, 5], [0], [0, 1], [0, 1, 2, 3], [0, 3, 4, 4]]
    assert fetch([]) == []
    stats = cache.stats()
    assert (stats.misses, stats.memory_rows) == (15, 15)


def test_a_padded_batch_whose_output_cannot_be_kept():
    @torchcache(miss_batch="pad")
    def function(x):
        return {"y": x * 2, "kind": object if len(x) < 4 else "whole"}

    function(X[:4])
    output = function(torch.cat([X[:4], X[5:6] + 1, X[4:]]))
    assert torch.equal(output["y"], torch.cat([X[:4], X[5:6] + 1, X[4:]]) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_lazy_module_is_loaded_outside_of_graphs(tmp_path, is_cached):
    path, graphs = tmp_path / "net.pt", Graphs()
    torch.save(Net().state_dict(), path)

    def load():
        net = Net()
        net.load_state_dict(torch.load(path, weights_only=True))
        return net

    lazy = LazyModule(load, files=path)
    compiled = torch.compile(torchcache(probe=False)(lazy) if is_cached else lazy, backend=graphs)
    for _ in range(2):
        assert torch.equal(compiled(X)["out"], Net()(X)["out"])
        assert lazy.is_loaded and len(graphs.seen[-1]) > 2
        lazy.unload()
        compiled(X)
        assert lazy.is_loaded is not is_cached
        lazy.cache_instance.clear() if is_cached else None


def test_changed_weights_are_noticed():
    cached, plain = as_class(), Net()
    compiled = torch.compile(cached, backend="eager")
    compiled(X)
    for net in (cached, plain):
        net.second.weight.mul_(2)
        net.first.bias.data.add_(1)
    assert_same(compiled(X), plain(X))
    assert counts(cached) == (0, 12)


def test_a_module_that_compiles_itself():
    cached, plain, graphs = as_class(), Net(), Graphs()
    cached.compile(backend=graphs)
    for x in (X, X, X[:2]):
        assert_same(cached(x), plain(x))
    assert counts(cached) == (8, 6) and len(graphs) == 1


def test_an_instance_that_is_compiled_already():
    graphs = Graphs()
    cached = torchcache(probe=False)(torch.compile(Net(), backend=graphs))
    for x in (X, X.flip(0)):
        assert_same(cached(x), Net()(x))
    assert counts(cached) == (6, 6) and len(graphs) == 1
