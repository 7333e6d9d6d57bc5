"""`Probing`: runs a forward for parts of a batch, and leaves no trace of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcache2.core.keys import Keys
from torchcache2.decorator.probe import Comparison, parts
from torchcache2.decorator.randomness import RandomState
from torchcache2.decorator.structure import item_lengths
from torchcache2.decorator.undo import Undo
from torchcache2.engine.steps import Steps
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = ["Forward", "Probing", "copied"]

Forward = Callable[[Any, Mapping[str, Any]], Steps[Any]]


class Probing:
    """One probe.

    Parameters
    ----------
    keeper : NamespaceKeeper
        Of the module.
    seen : Seen
    root : nn.Module or function
    pads : bool
        Whether batches are padded to few sizes.

    Attributes
    ----------
    is_conclusive : bool
        Whether it says something about the forward.
    """

    def __init__(self, keeper: NamespaceKeeper, seen: Seen, root: Any, pads: bool) -> None:
        self.is_conclusive = True
        self._keeper = keeper
        self._seen = seen
        self._root = root
        self._pads = pads

    def dependence(
        self, call: BoundCall, keys: Keys, compare: Comparison, forward: Forward
    ) -> Steps[str | None]:
        """How items depend on their batch; None if they do not. ``forward(args, kwargs)`` computes some."""
        aligned = bool(call.aligned)
        found = compare.repetition(keys)
        if found is not None:
            return found
        for part in parts(keys, item_lengths(call)):
            found = yield from self._difference(call, part, aligned, compare, forward)
            if found is not None and aligned:
                # An argument as long as the batch has one entry per item, or else belongs to the whole batch.
                found = yield from self._difference(call, part, False, compare, forward)
            if isinstance(found, _RaisedText):
                # The forward may want its items in some order, such as longest first: the caller's is good.
                found = yield from self._difference(call, sorted(part), aligned, compare, forward)
            if found is not None or not self.is_conclusive:
                return found
        return None

    def _difference(
        self, call: BoundCall, part: Sequence[int], aligned: bool, compare: Comparison, forward: Forward
    ) -> Steps[str | None]:
        """How the output of some items differs if they are computed by themselves; None if it does not."""
        count = len(part)
        if self._pads:
            size = min(1 << (count - 1).bit_length(), call.batch_size)
            part = [*part, *[part[-1]] * (size - count)]
        undo, state = Undo(self._keeper, self._seen, self._root), RandomState(self._keeper.generators)
        try:
            positions = torch.tensor(part, dtype=torch.int64, device="cpu")
            alone = yield from forward(*call.take(positions, aligned=aligned))
            return compare.difference(alone, part)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            self.is_conclusive = False
            return None
        except Exception as error:
            return _RaisedText(f"the forward of {count} of its {call.batch_size} items raises {error!r}")
        finally:
            # The same forward has just run and left no trace but attributes that others read. What else it
            # has changed for a part is put back only if no other thread can have made that change.
            undo.attributes()
            if threading.active_count() == 1:
                undo()
                state.restore()


class _RaisedText(str):
    """What is said of an exception."""

    __slots__ = ()


def copied(leaf: Any) -> Any:
    """A dense tensor in memory of its own; anything else as it is."""
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided
    return leaf.clone() if is_plain and not (leaf.is_nested or leaf.is_quantized) else leaf
