"""Which rank a process is."""

import pytest
import torch

from torchcache2.core.process import place, ranks_of_each


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


@pytest.mark.parametrize(
    ("environment", "rank", "expected"),
    [
        ({}, 1, None),
        ({"LOCAL_WORLD_SIZE": "2"}, 1, 2),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}, 3, 2),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 3, None),  # ranks that are dealt to machines in turn
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}, 3, None),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}, 1, None),  # 2 here, 4 there
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, 0, None),  # no divisor of 6
        ({"LOCAL_WORLD_SIZE": "6"}, 5, 6),
    ],
)
def test_ranks_of_each_machine_are_known_if_all_machines_have_equally_many(
    environment, rank, expected, monkeypatch
):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_each(0, 1) == 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_each(rank, 6) == expected
