"""The probe: whether the output of an item depends on the rest of its batch.

Parts of a batch are computed by themselves, in another order, and their rows are compared with those of the
whole batch. Some parts share no item, since one part may hide a dependence: if every item is divided by the
largest of its batch, a part that has the largest one equals the whole batch. And two parts of one size begin
with the same items. A forward rounds alike for batches of one size, but not for batches of two sizes: so
these two parts show an influence that is hardly larger than rounding.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import shown
from torchcache2.core.rows import Rows, UnstorableError
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.engine.batch import computed_again
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.outputs import Lists, rows_of
from torchcache2.engine.verify import leaf_differences
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = ["Comparison", "Forward", "Probe"]

Forward = Callable[[Any, Mapping[str, Any]], Any]

_ALIKE = 0.75  # rows from batches of one size differ by less than the precision to this power


def _parts(keys: Keys) -> list[tuple[int, ...]]:
    """The positions of the items of each part; of 12 or more items, all parts together have half at most."""
    found = keys.first_positions()
    distinct = np.arange(len(keys)) if found is None else found[0]
    size = max(1, len(distinct) // 6)
    shared, last, rest = (size + 1) // 2, distinct[::-1][:size], distinct[::-1][size:]
    first, second = rest[::3][:size], rest[1::3]
    chosen = [last, first, np.concatenate([first[:shared], second[: size - shared]])]
    return list(dict.fromkeys(tuple(part.tolist()) for part in chosen if len(part)))


class Difference(NamedTuple):
    """How an item's output depends on its batch, and how that showed; see `batch_advice`."""

    text: str
    cause: str


class Comparison:
    """The rows of a whole batch of `items`, and of parts of it that were computed by themselves.

    `device` is that of the call, and `dtypes` are what the forward computes with. `lists` says which lists
    in the output have an entry for each item.
    """

    def __init__(
        self,
        output: Any,
        items: int,
        device: torch.device,
        dtypes: Collection[torch.dtype],
        lists: Lists | None = None,
    ) -> None:
        self._items = items
        self._lists = lists
        self._device = device
        self._dtypes = dtypes
        self._parts: list[tuple[Sequence[int], Rows]] = []
        try:
            self._whole: Rows | None = rows_of(output, items, lists, device=device)
        except (UnstorableError, OutputError):
            self._whole = None  # such an output cannot be stored, so there is nothing to compare

    @property
    def is_possible(self) -> bool:
        """Whether the output can be stored, so that there is something to compare."""
        return self._whole is not None

    def difference(self, output: Any, part: Sequence[int]) -> Difference | None:
        """How the output for some items differs from their rows of the whole batch; None if it does not."""
        if self._whole is None:
            return None
        batches = f"in a batch of {len(part)} and of {self._items}"
        try:
            rows = rows_of(output, len(part), self._lists, device=self._device)
        except (UnstorableError, OutputError) as error:
            return Difference(str(error), "shape")
        expected = self._whole.take(torch.tensor(part, dtype=torch.int64, device="cpu"))
        if rows.schema != expected.schema:
            shapes = [
                f"output{leaf.path} is {leaf.dtype} {leaf.shape} and {other.dtype} {other.shape} an item"
                for leaf, other in zip(rows.schema.leaves, expected.schema.leaves, strict=False)
                if leaf != other
            ]
            if rows.schema.structure != expected.schema.structure:
                return Difference(f"the output has another structure {batches}", "structure")
            return Difference(f"{next(iter(shapes), 'the output has another structure')} {batches}", "shape")
        found = self._worst(expected, rows, part, 0.5)
        if found is not None:
            return Difference(f"{found} {batches}", "values")
        for other, others_rows in self._parts:
            shared = next((i for i, (a, b) in enumerate(zip(part, other, strict=False)) if a != b), len(part))
            if 0 < shared < len(part) == len(other):
                found = self._worst(others_rows.head(shared), rows.head(shared), part, _ALIKE)
                if found is not None:
                    return Difference(f"{found} in two batches of {len(part)}", "rounding")
        self._parts.append((part, rows))
        return None

    def repetition(self, keys: Keys) -> Difference | None:
        """How the outputs for equal items of the batch differ; None if they do not."""
        found = keys.first_positions()
        if self._whole is None or found is None:
            return None
        first, inverse = found
        expected = self._whole.take(torch.from_numpy(first[inverse]))
        text = self._worst(expected, self._whole, range(self._items), 0.5)
        if text is None:
            return None
        return Difference(f"{text} from that of an equal item of its batch", "repeat")

    def _worst(self, left: Rows, right: Rows, part: Sequence[int], power: float) -> str | None:
        apart_by, path, item = 0.0, "", 0
        for name, apart in leaf_differences(left, right, self._dtypes, power=power).items():
            if apart.max() > apart_by:
                apart_by, path, item = float(apart.max()), name, part[int(apart.argmax())]
        return f"output{path} of item {item} differs by {apart_by:.3g}" if apart_by else None


@dataclasses.dataclass
class Probe:
    """One probe of a batch: runs the forward for parts of it, and undoes what that has changed."""

    call: BoundCall
    keys: Keys
    compare: Comparison | None
    forward: Forward
    keeper: NamespaceKeeper
    seen: Seen
    root: Any
    pads: bool  # whether batches are padded to few sizes
    is_conclusive: bool = True  # False if a part could not be computed for lack of memory

    def dependence(self) -> Difference | None:
        """How items depend on their batch; None if they do not."""
        aligned = bool(self.call.aligned)
        assert self.compare is not None
        found = self.compare.repetition(self.keys)
        if found is not None:
            return found
        for part in _parts(self.keys):
            found = self._difference(part, aligned)
            if found is not None and aligned:
                # An argument as long as the batch has one entry per item, or it belongs to the whole batch.
                found = self._difference(part, False)
            if found is not None and found.cause == "raises":
                # The forward may need its items in the order of the caller, such as the longest first.
                found = self._difference(sorted(part), aligned)
            if found is not None or not self.is_conclusive:
                return found
        return None

    def alone(self, part: Sequence[int], aligned: bool) -> Any:
        """The output of some items, computed by themselves; what that has changed is undone."""
        undo = self.keeper.undo(self.seen, self.root, self.call.objects)
        state = RandomState(self.keeper.generators)
        try:
            positions = torch.tensor(part, dtype=torch.int64, device="cpu")
            with computed_again():
                return self.forward(*self.call.take(positions, aligned=aligned))
        finally:
            # The forward has just run for the whole batch, and has changed at most attributes that it never
            # reads. These are put back. Everything else is put back only if there is no other thread, which
            # might have made the change.
            undo.attributes()
            if threading.active_count() == 1:
                undo()
                state.restore()

    def _difference(self, part: Sequence[int], aligned: bool) -> Difference | None:
        """How the output of some items differs if they are computed by themselves; None if it does not."""
        count = len(part)
        if self.pads:
            size = min(1 << (count - 1).bit_length(), self.call.batch_size)
            part = [*part, *[part[-1]] * (size - count)]
        assert self.compare is not None
        try:
            return self.compare.difference(self.alone(part, aligned), part)
        except Exception as error:
            if is_out_of_memory(error):
                self.is_conclusive = False
                return None
            text = f"the forward of {count} of its {self.call.batch_size} items raises {shown(error)}"
            return Difference(text, "raises")
