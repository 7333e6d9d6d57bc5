"""Which rank a process is."""

import pytest
import torch

from torchcache2.core.ranks import place


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "3"}, (0, 1)),
        ({"RANK": "none", "WORLD_SIZE": "4"}, (0, 1)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "2"}, (0, 1)),  # as some launchers do: then every rank is alone
    ],
)
def test_ranks_are_read_from_the_environment(environment, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


def test_torch_knows_better_than_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert place() == (0, 1)
    finally:
        dist.destroy_process_group()
