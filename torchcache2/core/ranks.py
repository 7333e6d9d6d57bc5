"""Which process of a job with several ranks this one is."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

__all__ = ["Place", "has_ranks", "node_number", "place", "ranks_here", "ranks_of_each", "ranks_on_each"]


class Place(NamedTuple):
    """The number of this process in its job, and how many there are."""

    rank: int
    world_size: int


def place() -> Place:
    """As `torch.distributed` says, or if that is not initialised, what starts ranks: RANK and WORLD_SIZE."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world_size = _number("RANK", -1), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:  # this process is not of the group, or some variables are set, others not
        rank, world_size = 0, 1
    return Place(rank, world_size)


def has_ranks() -> bool:
    """Whether this process is one of several ranks, as far as is known now."""
    distributed = torch.distributed
    return (
        _number("LOCAL_WORLD_SIZE", 1) > 1
        or ("LOCAL_RANK" in os.environ and _number("WORLD_SIZE", 1) > 1)  # Lightning says no more
        or (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
    )


def ranks_here() -> int:
    """How many ranks this machine has; at most, where the launcher says how many there are in all."""
    return max(1, _number("LOCAL_WORLD_SIZE", place().world_size))


def ranks_on_each() -> int | None:
    """How many ranks this machine has as the launcher says; None if it does not."""
    return _number("LOCAL_WORLD_SIZE", 0) or None


def node_number() -> int:
    """Which machine of the job this is, from 0 on; 0 if nothing says it."""
    return _number("GROUP_RANK", place().rank // ranks_here())


def ranks_of_each(rank: int, world_size: int) -> int | None:
    """How many ranks each machine has, counted one machine after the other.

    None if that is not known, or if this rank is not where it would be then.
    """
    here = _number("LOCAL_WORLD_SIZE", 1 if world_size == 1 else 0)
    if (
        here == 0
        or world_size % here != 0
        or _number("GROUP_WORLD_SIZE", world_size // here) * here != world_size
    ):
        return None
    machine, local = divmod(rank, here)
    is_there = _number("GROUP_RANK", machine) == machine and _number("LOCAL_RANK", local) == local
    return here if is_there else None


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
