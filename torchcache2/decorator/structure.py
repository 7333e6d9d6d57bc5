"""The structure of a call's arguments, which is the same for all lengths and contents of items."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor

from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest, qualified_name
from torchcache2.identity.entries import Lengths

__all__ = ["call_structure", "item_lengths"]

_MOST_ELEMENTS = 64  # so many elements of a sequence are looked at
_LONG = 64  # a text of more characters is content, rather than a choice of what to compute
_DEEPEST = 16
_NEUTRAL = (0.0, 1.0)  # such a factor may turn something off, and any other number turns it on


def call_structure(call: BoundCall, *, values: bool) -> bytes:
    """A digest of the structure of a call, 16 bytes.

    With `values`, integers and short texts count, since ``dim=0`` and ``dim=1`` are different computations.
    The values of items' entries never count.
    """
    arguments = [*zip(call.names, call.args, strict=True), *sorted(call.kwargs.items())]
    contents = call.taken | call.aligned_ids
    parts = [f"{name} {_structure(value, values, contents, _DEEPEST)}" for name, value in arguments]
    leaves = [path for path, _ in call.leaves]
    return digest([repr([parts, leaves]).encode("utf-8", "surrogatepass")])


def item_lengths(call: BoundCall) -> Lengths | None:
    """How long each item of a call is, int64 of shape ``(n,)``; None if all seem to be equally long.

    Entries, masks of zeros and ones, and integers say how long an item is. A forward may pad all items to the
    longest of a batch, or cut them.
    """
    found: list[Lengths] = [call.lengths] if call.lengths is not None else []
    for _, tensor in call.leaves:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() not in (1, 2):
            continue
        numbers = tensor.cpu().long()
        if tensor.dim() == 1:
            found.append(numbers.numpy())
        elif bool(((numbers == 0) | (numbers == 1)).all()):
            found.append(numbers.sum(1).numpy())
    total = sum(found[1:], found[0]) if found else np.zeros(1, np.int64)
    return total if bool((total != total[:1]).any()) else None


def _structure(value: Any, values: bool, contents: Set[int], deeper: int) -> str:
    kind = qualified_name(type(value))
    values = values and id(value) not in contents
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.dim()}"
    if isinstance(value, np.ndarray):
        # The dtype of an array of texts has the length of the longest text, which is left out.
        dtype = value.dtype.kind if value.dtype.kind in "SU" else value.dtype.str
        return f"{kind} {dtype} {value.ndim}"
    if value is None or isinstance(value, bool) or (isinstance(value, float) and value in _NEUTRAL):
        return repr(value)
    if isinstance(value, (int, str)) and values and len(str(value)) <= _LONG:
        return f"{kind} {value!r}"
    if deeper and isinstance(value, (list, tuple)):
        elements = {_structure(element, values, contents, deeper - 1) for element in value[:_MOST_ELEMENTS]}
        return f"{kind} {sorted(elements)}"
    if deeper and isinstance(value, (dict, UserDict)):
        items: Mapping[Any, Any] = value
        pairs = {
            (
                str(key) if values else qualified_name(type(key)),
                _structure(element, values, contents, deeper - 1),
            )
            for key, element in items.items()
        }
        return f"{kind} {sorted(pairs)}"
    return kind
