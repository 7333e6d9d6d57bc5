"""Arguments with one entry per item: texts, numbers, images and arrays beside, or instead of, tensors.

They are lists, tuples, arrays, or columns of tables of other libraries. Mappings that are no dicts are here
too, such as the output of a tokenizer: their tensors are batched like those of a dict.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_digest

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
_SHORT = 256  # bytes; to copy so few is cheaper than to hash in two steps
_ENTRIES = "_encodings"  # the attribute of a tokenizer's output with one object per text


class ValueEncoder(Encoder):
    """Canonical bytes of plain values, tensors by content, and images."""

    def other(self, value: Any, path: str) -> bytes:
        """Encode columns of tables, images of PIL, and the encodings of a tokenizer."""
        if (column := _column(value)) is not None:
            entries = [self.kind(type(value), path).hex(), column.form(value), list(column.entries(value))]
            return b"V" + self.encode(entries, path)
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
    return (type(value) in (list, tuple, *_ARRAYS) and is_sequence(value)) or _column(value) is not None


class _Column(NamedTuple):
    """A class of another library for a column of a table, by the module that has it."""

    module: str
    name: str
    form: Callable[
        [Any], list[Any]
    ]  # what a column has besides its entries; a text about their type is first
    entries: Callable[[Any], Any]
    take: Callable[[Any, list[int]], Any]  # a column of the entries at some positions


def _is_numbered(series: Any) -> bool:
    """Whether the labels of a series of pandas are the positions, so that they say nothing of an entry."""
    index = series.index
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1


def _series_entries(series: Any) -> list[Any]:
    entries = series.tolist()
    return entries if _is_numbered(series) else list(zip(series.index.tolist(), entries, strict=True))


def _of_series(series: Any, positions: list[int]) -> Any:
    taken = series.iloc[positions]
    return taken.reset_index(drop=True) if _is_numbered(series) else taken


def _of_dataset(column: Any, positions: list[int]) -> Any:
    if hasattr(column.source, "select"):
        return type(column)(column.source.select(positions), column.column_name)
    return column[positions]  # a column inside of another one, as a list


_COLUMNS = (
    _Column("pandas", "Series", lambda c: [str(c.dtype), c.name, c.attrs], _series_entries, _of_series),
    *[
        _Column("pyarrow", name, lambda c: [str(c.type)], lambda c: c.to_pylist(), lambda c, at: c.take(at))
        for name in ("Array", "ChunkedArray")
    ],
    _Column(
        "datasets.arrow_dataset",
        "Column",
        lambda c: [repr(c.features), c.column_name],
        lambda c: c[:],
        _of_dataset,
    ),
)


def _column(value: Any) -> _Column | None:
    """How to read a column of a table; None if it is no column, or has categories beside its entries."""
    for column in _COLUMNS:
        kind = getattr(sys.modules.get(column.module), column.name, None)
        # Only the library's own classes: a user's subclass may have state that is not in its entries.
        if kind is not None and isinstance(value, kind) and type(value).__module__.startswith(column.module):
            return None if column.form(value)[0].startswith(("category", "dictionary")) else column
    return None


def entry_digests(value: Any, path: str, encode: Callable[[Any, str], bytes]) -> Digests:
    """A digest of each entry of a list, tuple, array or column of n entries, shape ``(n, 16)``."""
    if isinstance(value, np.ndarray):
        head = text_bytes(f"{dtype_text(value)} {value.shape[1:]}")
        if value.dtype.hasobject:
            rows = [encode(entry, f"{path}[{i}]") for i, entry in enumerate(value.tolist())]
        elif value.ndim > 1 and value.nbytes > _SHORT * len(value):
            return _joined([_digest_of(head, row) for row in value])
        else:
            rows = [row.tobytes() for row in value]
    elif (column := _column(value)) is not None:
        head = encode(column.form(value), path)
        rows = [encode(entry, f"{path}[{i}]") for i, entry in enumerate(column.entries(value))]
    else:
        head, rows = b"", [encode(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
    return _joined([xxh3_128_digest(head + row) for row in rows])


def _digest_of(head: bytes, row: Any) -> bytes:
    """The digest of a head and the bytes of a row, which are not copied if they lie in order."""
    state = xxh3_128(head)
    state.update(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data)
    return state.digest()


def _joined(digests: list[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)


def take_entries(value: Any, positions: Tensor) -> Any:
    """The entries at some positions, in a sequence of the same kind."""
    if isinstance(value, np.ndarray):
        return value[positions.numpy()]
    if (column := _column(value)) is not None:
        return column.take(value, positions.tolist())
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
        leaves = argument_leaves(args, kwargs)
        sizes = [leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        sizes += [len(leaf) for leaf in leaves if type(leaf) in _ARRAYS and leaf.ndim]
        return next(iter(sizes), 1)
    except Exception:  # a list that contains itself, or a tensor whose class raises
        return 1
