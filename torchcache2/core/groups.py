"""The process group of an option: which ranks call a cached forward in step."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown

__all__ = ["check_group", "group_of"]


def check_group(value: Any, *, is_used: bool) -> None:
    """Raise `OptionError` if the option `process_group` cannot have this value."""
    if value is None:
        return
    if not is_used:
        raise OptionError(
            f"process_group={shown(value)}: expected None, as only distributed='collective' has one"
        )
    if not (callable(value) or (torch.distributed.is_available() and _is_group(value))):
        raise OptionError(
            f"process_group={shown(value)}: expected None for all ranks, a torch.distributed.ProcessGroup, "
            "or a function that returns one"
        )


def group_of(value: Any) -> Any:
    """The process group that the option stands for now; None if this process is alone.

    Raises
    ------
    OptionError
        If there are other ranks, and nobody has called `torch.distributed.init_process_group`; or if this
        rank is not of the group.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
            return None
        raise OptionError(
            "distributed='collective': the ranks speak to each other over torch.distributed, so call "
            "torch.distributed.init_process_group before the first call of the module"
        )
    group: Any = value() if callable(value) else value
    group = distributed.group.WORLD if group is None else group
    if not _is_group(group):
        raise OptionError(
            f"process_group={shown(value)}: this is {shown(group)}, and no group that this "
            "rank belongs to. Give each rank a group that it is in, or distributed='auto' to the ranks "
            "that are in none"
        )
    return group if group.size() > 1 else None


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.distributed.ProcessGroup)
