"""What a miss says whose batch is on another device than the weights.

A module may be moved away once its items are cached, because hits need no weights. A miss needs them, and the
error that torch raises for it says neither that a cache is involved, nor what to do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchcache2.core.errors import DeviceError
from torchcache2.core.private import COMPILER_ERRORS
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.namespace import Seen

__all__ = ["are_weights_elsewhere", "with_device_hint"]

_META = {torch.device("meta")}


@contextlib.contextmanager
def with_device_hint(name: str, call: BoundCall, root: Any, seen: Seen, positions: Tensor) -> Iterator[None]:
    """Around the forward of some items: if torch refuses to run it with its weights elsewhere, say so.

    The forward is run as ever: it may move its weights or its inputs itself.
    """
    try:
        yield
    except RuntimeError as error:
        batch, weights = _devices(call, root, seen)
        if not (batch and weights and batch.isdisjoint(weights) and _is_torchs(error)):
            raise
        raise DeviceError(_text(name, call.batch_size, positions, batch, weights, error)) from error


def are_weights_elsewhere(call: BoundCall, root: Any, seen: Seen) -> bool:
    """Whether no weight is on a device that the batch is on."""
    batch, weights = _devices(call, root, seen)
    return bool(batch and weights) and batch.isdisjoint(weights)


def _text(
    name: str,
    batch_size: int,
    positions: Tensor,
    batch: set[torch.device],
    weights: set[torch.device],
    error: RuntimeError,
) -> str:
    items = f"{len(set(positions.tolist()))} of the {batch_size} items of this call"
    here, there = _named(batch), _named(weights)
    moved = "" if weights == _META else f", or the batch to {there}"  # tensors on meta have no content
    said = str(error).partition("\n")[0]
    return (
        f"{name}: {items} have to be computed, but they are on {here}, and all weights on "
        f"{there}. Move the module to {here}{moved}. Only a call whose items are all found needs no weights. "
        f"(The forward: {said})"
    )


def _devices(call: BoundCall, root: Any, seen: Seen) -> tuple[set[torch.device], set[torch.device]]:
    """The devices of the batch, and those of the weights."""
    own = chain(root.parameters(), root.buffers()) if isinstance(root, nn.Module) else ()
    weights = list(own) or seen.tensors.tensors  # a `LazyModule` has none itself
    return {tensor.device for _, tensor in call.leaves}, {tensor.device for tensor in weights}


def _is_torchs(error: RuntimeError) -> bool:
    """Whether torch may have raised it for tensors of differing devices: its texts name devices or types."""
    kind = type(error)
    is_known = kind in (RuntimeError, NotImplementedError) or kind.__module__ == COMPILER_ERRORS
    return is_known and re.search("device|type|backend|cpu|cuda|meta", str(error), re.IGNORECASE) is not None


def _named(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))
