"""Modules whose weights are spread over processes: a rank must not skip a forward in which others wait."""

import contextlib
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.helpers import warm
from tests.helpers.outputs import bypasses, frozen, hits, warnings_in
from torchcache2 import NotCachedError, torchcache
from torchcache2.identity.libraries import sharding

# torch 2.4 says so whenever such tensors are made.
pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support"),
]

try:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate, distribute_tensor

X = torch.arange(24.0).view(6, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def distributed(module, mesh):
    """Its weights as tensors that are spread over a mesh."""
    for name, weight in list(module.named_parameters()):
        spread = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]), requires_grad=False)
        setattr(module, name, spread)
    return module


class Whole(nn.Module):
    """Takes and gives ordinary tensors. A norm, as torch 2.4 multiplies no matrices on a mesh of one rank."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh_of = {"mesh": mesh}
        self.inner = distributed(nn.LayerNorm(4), mesh)

    def forward(self, x):
        spread = DTensor.from_local(x, self.mesh_of["mesh"], [Replicate()])
        return self.inner(spread).full_tensor()


def test_a_distributed_parameter_is_passed_through(mesh, log):
    module = frozen(torchcache(Whole(mesh)))
    plain = nn.LayerNorm(4)(X)
    for _ in range(4):
        assert torch.equal(module(X), plain)
    assert (hits(module), bypasses(module)) == (0, {"sharded": 24})
    (warning,) = warnings_in(log)
    assert "LayerNorm has a DTensor parameter" in warning and "whole on each rank" in warning
    assert len(warning) < 400
    assert module.cache_instance.explain().startswith("not cached: sharded: LayerNorm has a DTensor")
    with pytest.raises(NotCachedError, match="sharded"):
        module.cache_instance.warmup(X)


def test_a_function_that_names_such_a_module_is_passed_through(mesh):
    module = frozen(Whole(mesh))

    @torchcache
    def function(x):
        return module(x) + 1

    for _ in range(2):
        assert torch.equal(function(X), module(X) + 1)
    assert bypasses(function) == {"sharded": 12}


def test_a_module_is_cached_until_it_is_sharded_and_afterwards_again(mesh):
    net = frozen(torchcache(Net()))
    plain = net(X)
    before = net.first
    weight = before.weight
    distributed(net.first, mesh)
    with contextlib.suppress(RuntimeError):  # torch itself may not mix both kinds of tensors
        net(X)
    assert bypasses(net) == {"sharded": 6}
    before.weight, before.bias = weight, nn.Parameter(before.bias.full_tensor(), requires_grad=False)
    assert torch.equal(net(X), plain)
    assert (hits(net), bypasses(net)) == (6, {"sharded": 6})


@pytest.mark.filterwarnings("ignore")  # it is meant for several ranks
def test_fsdp_of_the_first_kind_is_known(mesh):
    wrapped = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    assert sharding(wrapped) == "FullyShardedDataParallel is sharded by FSDP"
    assert sharding(wrapped.module) == "Net is sharded by FSDP"


def test_zero_is_known_by_its_mark():
    linear = nn.Linear(4, 2)
    assert sharding(linear) is None
    linear.bias.ds_id = 5
    assert sharding(linear) == "Linear is sharded by ZeRO"


FSDP = (
    """
import os, sys
import torch
import torch._dynamo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchcache2 import torchcache
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard

other = os.fork()  # after the imports, which take seconds
rank = int(other == 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


"""
    + inspect.getsource(Net)
    + """

class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def build():
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


mesh = init_device_mesh("cpu", (2,))
plain = build()
for where in ("parts", "outside"):
    net = torchcache(build())
    if where == "parts":
        fully_shard(net.first, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = fully_shard(Outer(net), mesh=mesh)
    x = torch.arange(24.0).view(6, 4)
    for step in range(4):
        # What the first rank would find, the second has to compute.
        batch = x + step * rank
        assert torch.equal(model(batch), plain(batch) + (where == "outside"))
    stats = net.cache_instance.stats()
    sys.stdout.write(f"{rank} {where} {stats.hits} {stats.misses} {dict(stats.bypasses)}\\n")
assert rank or os.waitpid(other, 0)[1] == 0
"""
)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 6), reason="FSDP2 of this torch needs CUDA")
def test_ranks_of_fsdp_compute_all_and_say_so_in_one_line_each(tmp_path):
    process = warm.run(FSDP, tmp_path / "store")
    expected = [f"{rank} {where} 0 0 {{'sharded': 24}}" for rank in (0, 1) for where in ("outside", "parts")]
    assert sorted(process.out.splitlines()) == expected
    lines = [line for line in process.err.splitlines() if "torchcache2" in line]
    assert len(lines) == 4 and all("is sharded by FSDP" in line and len(line) < 400 for line in lines)
