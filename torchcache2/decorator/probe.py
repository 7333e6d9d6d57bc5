"""The probe: whether the output of an item depends on the rest of its batch.

Parts of a batch are computed by themselves, in another order, and their rows are compared with those of the
whole batch. Some parts share no item, which shows what one part may hide: where every item is divided by the
largest of its batch, a part that has the largest one equals the whole batch. And two parts of one size begin
with the same items. Those are computed alike to nearly the last bit, while those of another batch size may be
rounded otherwise: so an influence shows that is hardly larger than rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows, UnstorableError
from torchcache2.engine.verify import leaf_differences
from torchcache2.identity.entries import Lengths

__all__ = ["STRONGEST", "Comparison", "parts", "strength", "strength_of"]

STRONGEST = 4
_ALIKE = 0.75  # items that are computed twice in the same way agree to this power of the precision


def strength(keys: Keys) -> int:
    """How much a probe of a batch can show."""
    distinct = keys.first_positions()
    return strength_of(len(keys) if distinct is None else len(distinct[0]))


def strength_of(items: int) -> int:
    """How much a probe of so many distinct items can show, from 1 to `STRONGEST`."""
    return 1 if items == 1 else 2 if items < 4 else 3 if items < 12 else STRONGEST


def parts(keys: Keys, lengths: Lengths | None = None) -> list[tuple[int, ...]]:
    """Positions of the parts to compute by themselves, of half of the batch at most.

    Where items have `lengths`, one part has the shortest: alone, they are not padded as in the whole batch.
    """
    found = keys.first_positions()
    distinct = np.arange(len(keys)) if found is None else found[0]
    order, strongest = distinct[::-1], strength_of(len(distinct))
    if lengths is not None:
        order = order[np.argsort(lengths[order], kind="stable")]
    if strongest == 1:
        chosen = [np.arange(len(keys) // 2)]
    elif strongest == 2:
        chosen = [order[:1]]
    elif strongest == 3:
        size = len(order) // 4
        chosen = [order[:size], order[size::3][:size]]
    else:
        size = len(order) // 6
        shared, rest = (size + 1) // 2, order[size:]
        first, second = rest[::3][:size], rest[1::3]
        chosen = [order[:size], first, np.concatenate([first[:shared], second[: size - shared]])]
    return [tuple(part.tolist()) for part in chosen]


class Comparison:
    """The rows of a whole batch, and of parts of it that were computed by themselves.

    Parameters
    ----------
    output : pytree
        For the whole batch.
    items : int
        Number of items of the whole batch.
    device : torch.device
        Device of the call.
    dtypes : collection of torch.dtype
        What the forward computes with.
    """

    def __init__(
        self, output: Any, items: int, device: torch.device, dtypes: Collection[torch.dtype]
    ) -> None:
        self._items = items
        self._device = device
        self._dtypes = dtypes
        self._parts: list[tuple[Sequence[int], Rows]] = []
        try:
            self._whole: Rows | None = Rows.from_pytree(output, items, device=device)
        except (UnstorableError, OutputError):
            self._whole = None  # such an output is not kept, so nothing is compared

    @property
    def is_possible(self) -> bool:
        """Whether the output can be kept: else nothing depends on what it is."""
        return self._whole is not None

    def difference(self, output: Any, part: Sequence[int]) -> str | None:
        """How the output for some items differs from that of their batch; None if it does not."""
        if self._whole is None:
            return None
        batches = f"in a batch of {len(part)} and of {self._items}"
        try:
            rows = Rows.from_pytree(output, len(part), device=self._device)
        except (UnstorableError, OutputError) as error:
            return str(error)
        expected = self._whole.take(torch.tensor(part, dtype=torch.int64, device="cpu"))
        if rows.schema != expected.schema:
            shapes = [
                f"output{leaf.path} is {leaf.dtype} {leaf.shape} and {other.dtype} {other.shape} an item"
                for leaf, other in zip(rows.schema.leaves, expected.schema.leaves, strict=False)
                if leaf != other
            ]
            return f"{next(iter(shapes), 'the output has another structure')} {batches}"
        found = self._worst(expected, rows, part, 0.5)
        if found is not None:
            return f"{found} {batches}"
        for other, others_rows in self._parts:
            shared = next((i for i, (a, b) in enumerate(zip(part, other, strict=False)) if a != b), len(part))
            if 0 < shared < len(part) == len(other):
                found = self._worst(others_rows.head(shared), rows.head(shared), part, _ALIKE)
                if found is not None:
                    return f"{found} in two batches of {len(part)}"
        self._parts.append((part, rows))
        return None

    def repetition(self, keys: Keys) -> str | None:
        """How the outputs for equal items of the batch differ; None if they do not."""
        found = keys.first_positions()
        if self._whole is None or found is None:
            return None
        first, inverse = found
        expected = self._whole.take(torch.from_numpy(first[inverse]))
        text = self._worst(expected, self._whole, range(self._items), 0.5)
        return None if text is None else f"{text} from that of an equal item of its batch"

    def _worst(self, left: Rows, right: Rows, part: Sequence[int], power: float) -> str | None:
        apart_by, path, item = 0.0, "", 0
        for name, apart in leaf_differences(left, right, self._dtypes, power=power).items():
            if apart.max() > apart_by:
                apart_by, path, item = float(apart.max()), name, part[int(apart.argmax())]
        return f"output{path} of item {item} differs by {apart_by:.3g}" if apart_by else None
