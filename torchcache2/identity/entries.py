"""Arguments with one entry per item: texts, numbers, images and arrays beside, or instead of, tensors.

Mappings that are no dicts are here too, such as the output of a tokenizer: their tensors are batched like
those of a dict.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from xxhash import xxh3_128_digest

from torchcache2.core.values import leaves_of, mapped
from torchcache2.identity.encoding import Encoder, UnencodableError, dtype_text, qualified_name, text_bytes

__all__ = [
    "Digests",
    "ValueEncoder",
    "argument_leaves",
    "entry_digests",
    "first_batch_size",
    "is_plain_sequence",
    "is_sequence",
    "mapping_state",
    "take_entries",
    "take_mapping",
]

Digests = np.ndarray[Any, np.dtype[np.uint8]]

_ARRAYS = (np.ndarray, np.memmap)  # compared with the exact type, as a masked array also has a mask
_ENTRIES = "_encodings"  # the attribute of a tokenizer's output with one object per text


class ValueEncoder(Encoder):
    """Canonical bytes of plain values, tensors by content, and images."""

    def other(self, value: Any, path: str) -> bytes:
        """Encode images of PIL, and the encodings of a tokenizer."""
        images = sys.modules.get("PIL.Image")
        if images is not None and isinstance(value, images.Image):
            return b"B" + self._image(value, path)
        if qualified_name(type(value)) == "tokenizers.Encoding":
            return b"N" + self.encode(value.__getstate__(), path)
        return super().other(value, path)

    def _image(self, image: Any, path: str) -> bytes:
        if getattr(image, "is_animated", False):
            raise UnencodableError(path, image, "with several frames, of which only one could count")
        image.load()  # an image that was opened from a file has all of its `info` only now
        # Besides its pixels, conversions of an image read its palette and `info`.
        palette = image.palette and image.getpalette(image.palette.mode)
        head = [image.mode, image.size, palette, image.format, dict(image.info)]
        return self.encode(head, path) + xxh3_128_digest(image.tobytes())


def is_sequence(value: Any) -> bool:
    """Whether a value may have one entry per item."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


def is_plain_sequence(value: Any) -> bool:
    """Whether a value is a sequence that has nothing but its entries, so that some can be taken."""
    return type(value) in (list, tuple, *_ARRAYS) and is_sequence(value)


def entry_digests(value: Any, path: str, encode: Callable[[Any, str], bytes]) -> Digests:
    """A digest of each entry of a list, tuple or array of n entries, shape ``(n, 16)``."""
    if isinstance(value, np.ndarray):
        head = text_bytes(f"{dtype_text(value)} {value.shape[1:]}")
        if value.dtype.hasobject:
            rows = [encode(entry, f"{path}[{i}]") for i, entry in enumerate(value.tolist())]
        else:
            rows = [row.tobytes() for row in value]
    else:
        head, rows = b"", [encode(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
    digests = [xxh3_128_digest(head + row) for row in rows]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(value), 16)


def take_entries(value: Any, positions: Tensor) -> Any:
    """The entries at some positions, in a sequence of the same kind."""
    if isinstance(value, np.ndarray):
        return value[positions.numpy()]
    # Containers are copied: a forward that changes one runs again, and must change the caller's only once.
    taken = [mapped(_own, value[i]) for i in positions.tolist()]
    return tuple(taken) if isinstance(value, tuple) else taken


def _own(leaf: Any) -> Any:
    return leaf.copy() if type(leaf) in (np.ndarray, set, bytearray) else leaf


def mapping_state(value: UserDict[Any, Any]) -> tuple[dict[str, Any], list[Any] | None]:
    """The attributes that a mapping has besides its items, and its attribute with one entry per item."""
    state = {name: item for name, item in vars(value).items() if name != "data"}
    entries = state.get(_ENTRIES)
    if isinstance(entries, list) and entries:
        del state[_ENTRIES]
        return state, entries
    return state, None


def take_mapping(
    value: UserDict[Any, Any], positions: Tensor, pick: Callable[[Any], Any]
) -> UserDict[Any, Any]:
    """A copy of a mapping whose values are what `pick` makes of them."""
    taken = copy.copy(value)
    taken.data = {key: pick(item) for key, item in value.data.items()}
    entries = mapping_state(value)[1]
    if entries is not None:
        setattr(taken, _ENTRIES, take_entries(entries, positions))
    return taken


def argument_leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Everything that is no container among the arguments of a call."""
    leaves = []
    for leaf in leaves_of((args, dict(kwargs))):
        if isinstance(leaf, UserDict):
            leaves += argument_leaves((), leaf.data)
        else:
            leaves.append(leaf)
    return leaves


def first_batch_size(args: Any, kwargs: Mapping[str, Any]) -> int:
    """How many items a call that is not cached seems to have; 1 if that cannot be told."""
    values = [*args, *kwargs.values()]
    try:
        for value in values:
            if isinstance(value, Tensor) and value.dim():
                return value.size(0)  # nested tensors have no `shape`
        leaves = [leaf for leaf in argument_leaves(args, kwargs) if isinstance(leaf, Tensor)]
        return next((leaf.size(0) for leaf in leaves if leaf.dim()), 1)
    except Exception:  # a list that contains itself, or a tensor whose class raises
        return 1
