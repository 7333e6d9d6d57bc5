"""Sharded modules in ranks that call in step: all of them run a forward, or none does."""

import re

import pytest
import torch
from torch import nn

from tests.helpers.gloo import run_ranks
from tests.helpers.outputs import bypasses, frozen, hits
from torchcache2 import torchcache
from torchcache2.core.rows import Rows
from torchcache2.engine.cache import Cache
from torchcache2.identity.sharded import Shards

# torch 2.4 says so whenever such tensors are made.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")

try:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate, distribute_tensor

X = torch.arange(24.0).view(6, 4)


class Spread(nn.LayerNorm):
    """A norm with weights that are tensors of a mesh; it takes and gives ordinary tensors."""

    def __init__(self, mesh):
        super().__init__(4)
        self.mesh_of, self.sizes = {"mesh": mesh}, []
        self.register_buffer("calls", torch.zeros(()))
        for name, weight in list(self.named_parameters()):
            spread = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
            setattr(self, name, spread)

    def forward(self, x):
        self.sizes.append(len(x))
        return super().forward(DTensor.from_local(x, self.mesh_of["mesh"], [Replicate()])).full_tensor()


class Outer(nn.Module):
    """A whole module with a sharded part, and something to do that a test chooses."""

    def __init__(self, mesh, also=lambda module, y: y):
        super().__init__()
        self.inner, self.dropout, self.also = Spread(mesh), nn.Dropout(), also
        self.generator = torch.Generator()

    def forward(self, x):
        return self.also(self, self.dropout(self.inner(x)))


def cached(module, **options):
    options = {"distributed": "collective", "persistent_module_hash": "net", **options}
    return frozen(torchcache(**options)(module))


def sizes(module):
    """The batch sizes of the forwards since the last time, in one list."""
    taken, module.inner.sizes[:] = list(module.inner.sizes), []
    return taken


def plain(x):
    return nn.functional.layer_norm(x, (4,))


def test_whole_batches_are_computed_once_and_found(mesh, log):
    module = cached(Outer(mesh))
    for batch in (X, X + 24, X):
        assert torch.equal(module(batch), plain(batch))
    assert sizes(module) == [6, 6]
    mixed = torch.cat([X[:5], X[:1] + 99])
    assert torch.equal(module(mixed), plain(mixed))
    assert torch.equal(module(mixed[[0, 5, 5]]), plain(mixed[[0, 5, 5]]))
    assert sizes(module) == [6]
    assert (hits(module), bypasses(module)) == (6 + 5 + 3, {})
    assert [record.levelname for record in log] == ["INFO"]  # of the namespace
    assert module.cache_instance.module_hash == cached(Outer(mesh)).cache_instance.module_hash


def test_a_function_that_names_such_a_module(mesh):
    module = frozen(Outer(mesh))

    @torchcache(distributed="collective", persistent_module_hash="function")
    def function(x):
        return module(x) + 1

    for batch in (X, X[2:], X[:2] + 24):
        assert torch.equal(function(batch), plain(batch) + 1)
    assert (sizes(module), bypasses(function)) == ([6, 2], {})


@pytest.mark.parametrize("options", [{"distributed": "off"}, {"persistent_module_hash": None}], ids=str)
def test_without_a_name_or_a_step_it_is_passed_through(mesh, options):
    module = cached(Outer(mesh), **options)
    module(X)
    assert bypasses(module) == {"sharded": 6}


def test_calls_that_are_not_cached_run_once_too(mesh):
    def moves(module, y):
        return y + torch.rand(1, generator=module.generator) * 0

    def counts(module, y):
        module.inner.calls += 1
        return y

    for also, reason in ((moves, "random"), (counts, "state"), (lambda module, y: y.sum(), "output")):
        module = cached(Outer(mesh, also))
        for _ in range(2):
            module(X)
            assert sizes(module) == [6]
        assert bypasses(module) == {reason: 12}


@pytest.mark.parametrize("name", ["from_pytree", "to_pytree"])
def test_without_memory_for_the_caches_own_work_it_runs_once_or_not_at_all(mesh, monkeypatch, name):
    def fail(*args, **options):
        raise torch.cuda.OutOfMemoryError("no memory")

    module = cached(Outer(mesh))
    module(X)
    assert sizes(module) == [6]
    monkeypatch.setattr(Rows, name, fail)
    assert torch.equal(module(X + 24), plain(X + 24))
    assert sizes(module) == [6]
    if name == "to_pytree":  # other ranks may have found their rows
        monkeypatch.setattr(Cache, "find", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            module(X)
        assert sizes(module) == []


def test_what_was_random_once_is_not_cached(mesh):
    module = cached(Outer(mesh, lambda module, y: torch.manual_seed(5) and y + torch.rand(1)))
    for _ in range(8):
        module(X)
    assert (sizes(module), bypasses(module)) == ([6] * 8, {"random": 48})


def test_layers_are_looked_at_before_each_call(mesh):
    module = cached(Outer(mesh))
    module(X)
    module.train()
    module(X)
    assert bypasses(module) == {"training": 6}
    module.eval()
    module(X)
    module.inner.weight.requires_grad_(True)
    module(X)
    with torch.no_grad():
        module(X)
    assert (hits(module), bypasses(module)) == (12, {"training": 6, "grad": 6})


def test_it_is_walked_again_when_it_is_whole(mesh):
    module = cached(Outer(mesh))
    module(X)
    keeper = module.cache_instance.keeper
    assert keeper.looks_sharded(module)
    module.inner = nn.LayerNorm(4).requires_grad_(False)
    assert torch.equal(module(X), plain(X))
    assert not keeper.looks_sharded(module)
    assert hits(module) == 6


def test_the_device_and_the_dtypes_of_shards(mesh):
    module = Outer(mesh)
    shards = Shards(are_cached=True)
    assert shards.takes(module) and not shards.takes(nn.Linear(2, 2))
    assert len(list(shards.tensors())) == 3 and list(shards.buffers()) == ["calls of part 1"]
    assert shards.dtypes() == {torch.float32}
    policy = type("Policy", (), {"param_dtype": torch.bfloat16})
    module.inner.mixed_precision = policy
    assert shards.dtypes() == {torch.float32, torch.bfloat16}
    assert shards.same()
    del module
    assert not shards.same()


# What two ranks do: each function is one case.
RANKS = """
import random
import traceback
import warnings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchcache2 import RankError

HAS_FSDP2 = torch.__version__ >= (2, 6)  # before, it needs CUDA
if HAS_FSDP2:
    from torch.distributed.fsdp import fully_shard

join()
mesh = init_device_mesh("cpu", (WORLD,))
x = torch.arange(96.0).view(24, 4) / 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.sizes = nn.Linear(4, 4), nn.Linear(4, 2), []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.last(self.first(x).tanh())


class Outer(nn.Module):
    def __init__(self, inner, also=lambda x, y: y):
        super().__init__()
        self.inner, self.also = inner, also

    def forward(self, x):
        return self.also(x, self.inner(x))


def build():
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def sharded(net):
    return fully_shard(net, mesh=mesh) if HAS_FSDP2 else of_first_kind(net)


def of_first_kind(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is meant for CUDA
        return FSDP(net, device_id=torch.device("cpu"))


def in_step(name, module, **options):
    return torchcache(distributed="collective", persistent_module_hash=name, **options)(module)


def around(name, also=lambda x, y: y, **options):
    net = build()
    return in_step(name, Outer(sharded(net), also), **options), net


def called(model, net, *batches):
    batch = batches[RANK]
    output, sizes = model(batch), list(net.sizes)
    net.sizes.clear()
    assert sizes in ([], [len(batch)]), sizes
    same = build()(batch)
    for leaf in output if isinstance(output, tuple) else [output]:
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, same)  # other batch sizes round differently
    return len(sizes)


def all_ranks_of_fsdp_run_or_none():
    net = build()
    models = [(*around("around"), 0), (in_step("first", Outer(of_first_kind(net))), net, 0)]
    if HAS_FSDP2:
        net, part = in_step("itself", build()), in_step("part", build())
        fully_shard(net.first, mesh=mesh)
        fully_shard(part.first, mesh=mesh)
        models += [(fully_shard(net, mesh=mesh), net, 1), (fully_shard(Outer(part), mesh=mesh), part, 1)]
    for model, net, number in models:
        cache = (model, net)[number].cache_instance
        a, b, c = x[:6], x[6:12], x[12:18]
        assert called(model, net, a, b) == 1  # nobody has anything
        assert called(model, net, b, a) == 0  # each has what the other asks for
        assert called(model, net, a, c) == 1  # one misses
        assert called(model, net, c[:2], c[3:]) == 0
        mixed = torch.cat([a[:2], x[20:21], c[:1]])
        assert called(model, net, mixed, b[:3]) == 1
        assert called(model, net, b[:3], mixed[[0, 2, 2]]) == 0
        assert called(model, net, x[:0], a) == 1  # an empty batch is computed, for its output
        assert called(model, net, x[:0], x[22:]) == 1
        stats = cache.stats()
        assert stats.bypasses == {}, stats
        misses = [6 + 1, 6 + 6 + 2][RANK]
        assert stats.misses == misses, (RANK, stats)


def tensor_parallelism_of_equal_batches():
    if not HAS_FSDP2:
        return  # not on the CPU
    net = in_step("parallel", build())
    parallelize_module(net, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    for batch, forwards in (x[:6], 1), (x[6:12], 1), (x[8:12], 0), (x[8:20], 1), (x[:20], 0):
        assert called(net, net, batch, batch) == forwards
    assert net.cache_instance.stats().bypasses == {}


def a_rank_that_passes_by_or_verifies_or_cannot_use_its_rows_makes_all_run():
    a, b = x[:6], x[6:12]
    model, net = around("verify", verify=[0.0, 1.0][RANK])
    assert called(model, net, a, b) == 1
    assert called(model, net, a, b) == 1
    assert model.cache_instance.stats().verified == [0, 6][RANK]

    model, net = around("bypass")
    assert called(model, net, a, b) == 1
    for step in range(8):  # the second rank goes straight to the forward after some of them
        assert called(model, net, a, b.clone().requires_grad_(True)) == 1
    assert called(model, net, a, b) == 0
    assert model.cache_instance.stats().bypasses == [{}, {"grad": 48}][RANK]

    # Within a forward that all run, a cached module takes its own steps.
    net = build()
    part = in_step("in", Outer(sharded(net)))
    outer = in_step("out", Outer(part))
    assert called(outer, net, a, b) == 1
    c = torch.cat([b[:2], a[:2]])
    d = torch.cat([b[:2], x[20:22]])
    with torch.set_grad_enabled(bool(RANK)):
        assert called(outer, net, c, c.clone().requires_grad_(bool(RANK))) == 1
    outer.cache_instance.clear()
    assert called(outer, net, c, c) == 0
    assert called(outer, net, c, d) == 1
    assert called(outer, net, d, c) == 0

    # A value of the whole batch that differs between batches: rows of both cannot be put together.
    model, net = around("value", lambda x, y: (y, int(x[0, 0] * 24)))
    assert called(model, net, a, b) == 1
    assert called(model, net, a, b) == 0
    assert called(model, net, a, torch.cat([a[:2], b[:2]])) == 1
    assert called(model, net, torch.cat([a[:2], b[:2]]), b) == 1
    assert called(model, net, b, a) == 0


def random_batches_with_hits_and_misses():
    os.environ["TORCHCACHE_JOB"] = f"node {RANK}"  # they share no memory
    model, net = around("many")
    items = torch.arange(800.0).view(200, 4) / 200
    draws, known = random.Random(0), set()
    for step in range(60):
        picked = [[int(200 * draws.random() ** 2) for _ in range(draws.randrange(9))] for _ in range(WORLD)]
        passes = draws.random() < 0.1  # then one rank passes its call by
        must_run = passes or not all(batch and known.issuperset(batch) for batch in picked)
        batches = [items[batch] for batch in picked]
        batches[step % WORLD].requires_grad_(passes)
        assert called(model, net, *batches) == must_run, step
        for rank, batch in enumerate(picked):
            if must_run and not (passes and rank == step % WORLD):
                known.update(batch)
    del os.environ["TORCHCACHE_JOB"]
    stats = model.cache_instance.stats()
    assert min(stats.received, stats.sent) > 20 and stats.hits > stats.received, stats


def half_precision_is_known():
    if not HAS_FSDP2:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torchcache2.identity.sharded import Shards

    net = fully_shard(build(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = in_step("half", Outer(net), verify=1.0)
    for step in range(3):
        assert model(x[6 * RANK :][:6]).dtype == torch.bfloat16
    stats = model.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.verified, stats.mismatched) == (12, 6, 12, 0)
    shards = Shards(are_cached=True)
    assert shards.takes(model) and torch.bfloat16 in shards.dtypes()


def what_one_rank_does_not_store_is_computed_by_all():
    model, net = around("random", lambda x, y: y + torch.rand(1) * 0 if RANK else y)
    for step in range(4):
        assert called(model, net, x[:6], x[6:12]) == 1
    assert model.cache_instance.stats().bypasses == [{}, {"random": 24}][RANK]

    added = []
    model, net = around("wrong", lambda x, y: y + len(added), verify=[0.0, 1.0][RANK])
    assert called(model, net, x[:6], x[6:12]) == 1
    added += [None] * RANK  # which is not noticed, because of the name
    y = model((x[:6], x[6:12])[RANK])  # the second rank drops its rows, and computes them in this forward
    torch.testing.assert_close(y, build()((x[:6], x[6:12])[RANK]) + RANK)
    added.clear()
    assert net.sizes == [6]
    net.sizes.clear()
    for step in range(3):  # in the first, all drop what they had
        assert called(model, net, x[:6], x[6:12]) == 1
    stats = model.cache_instance.stats()
    assert (stats.verified, stats.mismatched) == [(0, 0), (18, 6)][RANK], stats


def a_warmup_and_a_rank_that_has_left():
    for name, given in (("set", data.TensorDataset(x[:13])), ("loader", data.DataLoader(x[:13], 3))):
        model, net = around(name)
        inputs = {"set": None, "loader": lambda batch: (batch,)}[name]
        warmed = model.eval().cache_instance.warmup(given, inputs=inputs, batch_size=3)
        assert net.sizes == [3, 3, 1] and warmed.computed + warmed.found == 7
        net.sizes.clear()
        assert called(model, net, x[:13], x[:13]) == 0

    model, net = around("left")
    try:
        with model.cache_instance.join():
            for step in range(1 + RANK):
                model(x[step : step + 3])
    except RankError as error:
        assert "has left join" in str(error)
    else:
        raise AssertionError("no error")


for name in ARGUMENTS:
    try:
        globals()[name]()
    except Exception:
        print(f"rank {RANK}:", traceback.format_exc())
        break
    print(name, "is well")
torch.distributed.barrier()  # whoever ends closes connections in which the other may still read
"""
CASES = re.findall(r"^def (\w+)\(\):$", RANKS, re.M)[1:]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    ranks = run_ranks(RANKS, tmp_path_factory.mktemp("ranks"), *CASES)
    return [rank.out for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_in_two_ranks(told, case):
    assert all(f"{case} is well" in out for out in told), "\n".join(told)
