"""Compares found rows with the same rows computed again.

A forward may round differently for another batch size, so floating-point columns are compared with a
tolerance: the square root of the precision of the coarsest dtype involved, relative to the largest magnitude
in the row (3e-4 for float32, 3e-2 for float16, 9e-2 for bfloat16). Everything else must be equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Positions
from torchcache2.core.private import product_precision
from torchcache2.core.rows import Leaf, Rows, Schema
from torchcache2.engine.values.outputs import ItemRows, entry_parts

_PLACES = ("cpu", "cuda")
_DOUBLES = ("float", "complex")  # kinds of values stored as bytes of float64


Differences = np.ndarray[Any, np.dtype[np.float64]]


def differences(old: Rows, fresh: Rows, dtypes: Collection[torch.dtype] = ()) -> Differences:
    """The largest difference in each row, or 0 if it is within the tolerance.

    Infinite if the schemas differ, or values other than numbers. `dtypes` are the inputs' dtypes.
    """
    if old.schema != fresh.schema:
        return np.full(len(old), np.inf)
    found = leaf_differences(old, fresh, dtypes)
    return np.max([np.zeros(len(old)), *found.values()], axis=0)  # type: ignore[no-any-return]


def leaf_differences(
    old: Rows, fresh: Rows, dtypes: Collection[torch.dtype] = (), *, power: float = 0.5
) -> dict[str, Differences]:
    """Like `differences`, but for each leaf, by path; for rows of one schema.

    The tolerance is the precision to this `power`: 0.5 is the square root.
    """
    count = len(old)
    found, columns = {}, fresh.laid_out_as(old.schema).columns
    for leaf, left, right in zip(old.schema.leaves, old.columns, columns, strict=True):
        sides = (left.reshape(count, -1).cpu(), right.reshape(count, -1).cpu())
        found[leaf.path] = _column_differences(*sides, leaf, dtypes, power).numpy()
    if isinstance(old, ItemRows) and isinstance(fresh, ItemRows):
        found[".entries"] = _entry_differences(old, fresh, dtypes, power)
    return found


def _entry_differences(
    old: ItemRows, fresh: ItemRows, dtypes: Collection[torch.dtype], power: float
) -> Differences:
    """The largest difference of each item's entries, in lists with an entry per item."""
    apart = np.full(len(old), np.inf)
    theirs = defaultdict[Schema, list[tuple[Positions, Rows]]](list)
    for others, their_rows in entry_parts(fresh):
        theirs[their_rows.schema].append((others, their_rows))
    for positions, rows in entry_parts(old):
        for others, their_rows in theirs[rows.schema]:
            shared, mine, other = np.intersect1d(positions, others, return_indices=True)
            if len(shared):
                sides = rows.take(torch.from_numpy(mine)), their_rows.take(torch.from_numpy(other))
                found = leaf_differences(*sides, dtypes, power=power)
                apart[shared] = np.max([np.zeros(len(shared)), *found.values()], axis=0)
    return apart


def _column_differences(
    left: Tensor, right: Tensor, leaf: Leaf, dtypes: Collection[torch.dtype], power: float
) -> Tensor:
    if left.shape[1] == 0:
        return torch.zeros(len(left), dtype=torch.float64, device="cpu")
    if leaf.kind in _DOUBLES:
        left, right = (side.contiguous().view(torch.float64) for side in (left, right))
    elif leaf.kind != "tensor":
        return torch.where((left == right).all(1), 0.0, math.inf).double()
    if left.is_complex():
        left, right = (torch.view_as_real(side).flatten(1) for side in (left, right))
    if left.is_floating_point():
        precision = _precision(leaf, dtypes)
        left, right = left.double(), right.double()
        same = (left == right) | (left.isnan() & right.isnan())
        apart = (left - right).abs().nan_to_num(math.inf, math.inf)
    else:
        precision = 0.0
        same = left == right
        # At least 1, as two different large integers may be equal as float64.
        apart = (left.double() - right.double()).abs().clamp_min(1.0)
    apart = torch.where(same, 0.0, apart).amax(1)
    scale = torch.maximum(left.abs(), right.abs()).nan_to_num(0.0, 0.0).amax(1) if precision else 0.0
    # The last term allows for cancellation, which leaves noise.
    within = apart <= precision**power * scale + precision**2
    return torch.where(within, 0.0, apart)


def _precision(leaf: Leaf, dtypes: Collection[torch.dtype]) -> float:
    """The relative precision of the coarsest dtype involved in a column's values."""
    kept = [leaf.dtype, leaf.stored] if leaf.kind == "tensor" else [torch.float64]
    kept += [torch.get_autocast_dtype(place) for place in _PLACES if torch.is_autocast_enabled(place)]
    inexact = [dtype for dtype in (*kept, *dtypes) if dtype.is_floating_point or dtype.is_complex]
    return max(product_precision(), *(torch.finfo(dtype).eps for dtype in inexact))
