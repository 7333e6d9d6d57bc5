"""Which process of a job with several ranks this one is."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

__all__ = ["Place", "place"]


class Place(NamedTuple):
    """The number of this process in its job, how many there are, and its number on this machine."""

    rank: int
    world_size: int
    local_rank: int


def place() -> Place:
    """As `torch.distributed` says, or if that is not initialised, what starts ranks: RANK and WORLD_SIZE."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world_size = _number("RANK", -1), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:  # this process is not of the group, or some variables are set, others not
        rank, world_size = 0, 1
    return Place(rank, world_size, _number("LOCAL_RANK", rank))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
