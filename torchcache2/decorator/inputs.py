"""`Inputs`: the arguments of one run of the forward, and whether it has changed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from torchcache2.core.arrays import Bytes2D
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.entries import argument_leaves

__all__ = ["Inputs"]


class Inputs:
    """Arguments for some items of a call, as they are before the forward runs.

    Parameters
    ----------
    call : BoundCall
        The call of the whole batch.
    args, kwargs
        The arguments for the items at `positions`.
    positions : Tensor of int64, shape (k,)
    bind : callable
        ``bind(args, kwargs)`` names arguments, as `Signature.bind` does.
    keys_of : callable
        ``keys_of(call)`` are the keys of its items, uint8 of shape ``(k, 16)``.

    Attributes
    ----------
    tensors : list of Tensor
        All tensors among the arguments.
    """

    def __init__(
        self,
        call: BoundCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        positions: Tensor,
        bind: Callable[[tuple[Any, ...], Mapping[str, Any]], BoundCall],
        keys_of: Callable[[BoundCall], Bytes2D],
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._call, self._positions = call, positions
        self._bind, self._keys_of = bind, keys_of
        self._leaves = argument_leaves(args, kwargs)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._versions = _versions(self.tensors)
        self._content = self._uncounted()

    def changed(self) -> bool:
        """Whether the forward has changed an argument in place."""
        leaves = argument_leaves(self.args, self.kwargs)
        return (
            _versions(self.tensors) != self._versions
            or not (len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)))
            or not np.array_equal(self._uncounted(), self._content)  # type: ignore[arg-type]
            or not self._has_same_context()
        )

    def _uncounted(self) -> Bytes2D | None:
        """What tells of changes in inference tensors, which have no version counters."""
        if not any(tensor.is_inference() for tensor in self.tensors):
            return None
        return self._keys_of(self._bind(self.args, self.kwargs))

    def _has_same_context(self) -> bool:
        """Whether arguments that are no tensors are what they were."""
        if not self._call.can_change:
            return True
        try:
            return not self._call.is_changed(self._bind(self.args, self.kwargs), self._positions)
        except Exception:  # one has become what cannot be put in a key
            return False


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Version counters; inference tensors have none."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
