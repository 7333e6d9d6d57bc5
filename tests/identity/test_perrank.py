"""What a module keeps of its rank makes another namespace of it on each, which one warning says."""

import pytest
import torch
from torch import nn

from torchcache2 import torchcache
from torchcache2.core.ranks import Place, place
from torchcache2.identity.perrank import per_rank

X = torch.arange(12.0).view(4, 3)
SECOND = Place(1, 4, 1)


class Net(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        vars(self).update(fields)

    def forward(self, x):
        return x * 2


def warnings_of(log):
    return [record.getMessage() for record in log if record.levelname == "WARNING"]


@pytest.fixture
def as_rank(monkeypatch):
    def change(rank, world=4, local=None):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_RANK", str(rank if local is None else local))

    return change


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("device", torch.device("cuda:1"), "attribute device: cuda:1"),
        ("target", "cuda:1", "attribute target: 'cuda:1'"),
        ("local_rank", 1, "attribute local_rank: 1"),
    ],
)
def test_an_attribute_that_names_the_rank_is_warned_of_once(field, value, text, as_rank, log):
    as_rank(1)
    net = torchcache(Net(**{field: value}))
    for step in range(3):
        net.step = step  # it is walked again
        net(X)
    (warning,) = warnings_of(log)
    assert warning.startswith(f"Net: {text}: ") and "persistent_module_hash" in warning
    namespace = net.cache_instance.module_hash
    other = Net(**{field: type(value)(str(value).replace("1", "0"))})
    other.step = net.step
    assert torchcache(other).cache_instance.module_hash != namespace


def test_globals_and_constructor_arguments_count_too(as_rank, monkeypatch, log):
    as_rank(1)
    monkeypatch.setitem(globals(), "RANK", 1)

    @torchcache
    def shifted(x):
        return x + RANK  # noqa: F821

    shifted(X)

    @torchcache
    class Placed(nn.Module):
        def __init__(self, gpu):
            super().__init__()

        def forward(self, x):
            return x

    Placed("cuda:1")(X)
    first, second = warnings_of(log)
    assert "RANK" in first and ": 1: this seems" in first
    assert second.startswith("Placed: constructor argument gpu: 'cuda:1': ")


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_one_rank_warns_for_all(rank, as_rank, log):
    as_rank(rank)
    torchcache(Net(device=torch.device(f"cuda:{rank}"), rank=rank))(X)
    assert warnings_of(log) == []


def test_what_a_module_keeps_for_all_ranks_is_no_reason_to_warn(as_rank, log):
    as_rank(1)
    torchcache(Net(layers=1, device=torch.device("cpu"), rank_of_matrix=1, gpu="cuda:0", ranks=1))(X)
    torchcache(persistent_module_hash="a name")(Net(rank=1))(X)
    as_rank(1, world=1)
    torchcache(Net(rank=1))(X)
    assert warnings_of(log) == []


def test_devices_are_those_of_the_machine():
    values = {"attribute device": "cuda:0", "attribute rank": "1", "attribute gpu": "0"}
    assert per_rank(values, Place(1, 2, 0)) == {"attribute rank": "1"}  # one rank on each machine
    assert per_rank({"attribute device": "cuda:1"}, SECOND) == {"attribute device": "cuda:1"}
    assert per_rank({"training": "1", "child rank": "1"}, SECOND) == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"RANK": "3"}, (0, 1, 0)),
        ({"RANK": "none", "WORLD_SIZE": "4"}, (0, 1, 0)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "2"}, (0, 1, 2)),  # as some launchers do: then every rank is alone
    ],
)
def test_ranks_are_read_from_the_environment(environment, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


def test_torch_knows_better_than_the_environment(as_rank):
    as_rank(3)
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert place() == (0, 1, 3)
    finally:
        dist.destroy_process_group()
