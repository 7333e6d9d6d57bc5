"""Whether a forward talks to other processes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchcache2.identity.compiled import code_objects
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["has_collectives"]

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}


def has_collectives(root: Any, fingerprint: Fingerprint) -> bool:
    """Whether a forward may talk to other processes, which would wait for parts that this one computes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    named = [name.split()[1].rpartition(".")[2] for name in fingerprint.parts if name.startswith("global ")]
    if not _COLLECTIVES.isdisjoint(named):
        return True
    modules = root.modules() if isinstance(root, nn.Module) else ()
    bases = {base for module in modules for base in type(module).__mro__ if base not in (nn.Module, object)}
    return any(map(_names_collectives, bases))


def _names_collectives(kind: type) -> bool:
    # Torch's own modules that talk to other processes: DDP, FSDP, batch norm over all of them.
    if kind.__module__.startswith(("torch.distributed", "torch.nn.parallel.distributed")):
        return True
    names = {
        name
        for function in _functions(kind)
        for code in code_objects(function.__code__)
        for name in code.co_names
    }
    return kind is nn.SyncBatchNorm or not _COLLECTIVES.isdisjoint(names)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, types.FunctionType):
            yield function
