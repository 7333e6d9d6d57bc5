"""Converts outputs of a computation to rows, and rows to outputs.

The tensors and arrays of an output have a row for each item; most of its other values belong to the whole
batch. But a list or tuple may have an entry for each item, ragged or not. An item's row then has the values
outside of such lists, and its entry of each list, stored like a sample of a dataset::

    rows = rows_of(output, n, lists, device=device)
    for positions, part in stored(rows):          # one part for each schema
        tier.put(keys.take(positions), part)

    parts = [(positions, found(part)) for positions, part in tier.get(keys).parts]
    output = output_of(joined(parts, n, device=device), device=device)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Positions
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.private import pytree
from torchcache2.core.rows import Parts, Rows, Schema, rounded
from torchcache2.core.values import (
    Node,
    Opened,
    UnstorableError,
    closed,
    mapped,
    opened,
    opened_or_none,
    specs_of,
    taken_apart,
)
from torchcache2.engine.values.kinds import NumpyArray, dense
from torchcache2.engine.values.samples import Samples, from_rows


class Items(Node, module="values"):
    """A list or tuple with an entry for each item, stored elsewhere; the context is its type."""


class Itemised(Node, module="values"):
    """A row with entries: its children are the values outside of the lists, and a tuple of the entries."""

    steps = ("", "")


class Lists:
    """Which lists and tuples in the outputs of one kind of call have an entry for each item.

    A list as long as the batch may have that length by chance: only outputs of two batch sizes tell.

    Attributes
    ----------
    known : dict of str to bool
        Whether the list at a path has an entry for each item; missing: unknown.
    """

    def __init__(self, samples: Samples, known: dict[str, bool]) -> None:
        self.known, self.samples = known, samples

    def leaves(self, output: Any) -> tuple[dict[str, int], list[Any]]:
        """The lengths of lists, by path, and the leaves, outside of lists with an entry for each item."""
        lengths = {}

        def node(value: Any, path: str) -> Opened | None:
            if type(value) in (list, tuple):
                lengths[path] = len(value)
                if self.known.get(path):
                    return Items, None, []
            return opened_or_none(value, objects=True)

        return lengths, [leaf for _, leaf in taken_apart(output, node)[0]]

    def unsettled(self, output: Any, count: int) -> list[str]:
        """The paths of lists, in an output for `count` items, that may or may not have an entry per item."""
        lengths, _ = self.leaves(output)
        if count:
            self.known.update(
                {path: False for path, n in lengths.items() if n != count and path not in self.known}
            )
        return [path for path, n in lengths.items() if 0 < n == count and path not in self.known]

    def settle(self, paths: Collection[str], output: Any, count: int) -> None:
        """Decide about the lists at these paths by an output for another number of items."""
        lengths, _ = self.leaves(output)
        self.known.update({path: lengths.get(path) == count for path in paths})

    def has_entries(self, value: Any, path: str, count: int) -> bool:
        """Whether a list in an output for `count` items has an entry for each of them.

        `UnstorableError` if its length is wrong, or if this is unknown.
        """
        known = self.known.get(path)
        if known and len(value) != count:
            raise UnstorableError(f"a list that has {len(value)} entries for a batch of {count}")
        if known is None and 0 < len(value) == count:
            raise UnstorableError(
                f"a list that has {count} entries, as the batch, and no batch of another size says whether "
                "it has one for each item"
            )
        return bool(known) and count > 0


class ItemRows(Rows):
    """Rows of outputs that have lists with an entry for each item.

    Schema and columns are those of the values outside of the lists. For each row, `entries` names immutable
    `Rows` and the position in them of the item's entries, one from each list.
    """

    __slots__ = ("entries",)

    def __init__(
        self, schema: Schema, columns: Sequence[Tensor], count: int, entries: list[tuple[Rows, int]]
    ) -> None:
        super().__init__(schema, columns, count)
        self.entries = entries

    def take(self, positions: Tensor) -> ItemRows:
        """A copy of some rows; see `Rows.take`."""
        rows = super().take(positions)
        return ItemRows(rows.schema, rows.columns, rows.count, [self.entries[i] for i in positions.tolist()])

    def head(self, count: int) -> ItemRows:
        """The first `count` rows, without a copy."""
        return ItemRows(self.schema, [column[:count] for column in self.columns], count, self.entries[:count])

    def by_schema(self) -> Iterator[tuple[Positions, Rows]]:
        """The entries, one part for each of their `Rows`, which must not be changed."""
        places: dict[int, tuple[Rows, list[int], list[int]]] = {}
        for position, (rows, i) in enumerate(self.entries):
            _, positions, which = places.setdefault(id(rows), (rows, [], []))
            positions.append(position)
            which.append(i)
        for rows, positions, which in places.values():
            if which != list(range(rows.count)):
                rows = rows.take(torch.tensor(which, dtype=torch.int64, device="cpu"))
            yield np.array(positions, np.int64), rows

    def values(self, device: torch.device) -> list[tuple[Any, ...]]:
        """The entries of each row, one from each list, in their own memory."""
        parts = [(positions, from_rows(rows, device)) for positions, rows in self.by_schema()]
        return _spread(parts, self.count)


def rows_of(
    output: Any, count: int, lists: Lists | None, *, device: torch.device, dtype: torch.dtype | None = None
) -> Rows:
    """The rows of a computation's output; see `Rows.from_pytree`. Without `lists`, no list has entries."""
    if isinstance(output, Tensor):
        return Rows.from_pytree(output, count, device=device, dtype=dtype)
    entries: dict[str, Any] = {}

    def node(value: Any, path: str) -> Opened | None:
        kind = type(value)
        if kind is np.ndarray:
            return _opened_array(value)
        if kind in (list, tuple) and lists is not None and lists.has_entries(value, path, count):
            entries[path] = value
            return Items, kind.__name__, []
        return opened(value, objects=True)

    rows = Rows.from_pytree(output, count, device=device, dtype=dtype, opened=node)
    if lists is None or not entries:
        return rows
    values = list(zip(*entries.values(), strict=True))
    batch = lists.samples.to_rows(values if dtype is None else rounded(values, dtype), device, dtype)
    for position, error in batch.refused.items():
        text = str(error)
        for i, path in enumerate(entries):
            text = text.replace(f"sample[{i}]", f"output{path}[{position}]")
        raise OutputError(text)
    parts = [(positions, [(part, i) for i in range(len(part))]) for positions, part in batch.parts]
    return ItemRows(rows.schema, rows.columns, rows.count, _spread(parts, count))


@with_ordinary_tensors
def output_of(rows: Rows, *, device: torch.device) -> Any:
    """The output that rows represent; see `Rows.to_pytree`."""
    values = rows.values(device) if isinstance(rows, ItemRows) else []
    numbers = iter(range(len(values[0]) if values else 0))

    def node(kind: Any, context: Any, children: list[Any]) -> Any:
        if kind is NumpyArray:
            return NumpyArray.batched(context, children[0])
        if kind is Items:
            i = next(numbers)
            entries = [of_item[i] for of_item in values]
            return entries if context == "list" else tuple(entries)
        return closed(kind, context, children)

    return rows.to_pytree(device=device, closed=node)


def stored(rows: Rows) -> Parts:
    """Rows as tiers keep them: positions and rows, one part for each schema."""
    if not isinstance(rows, ItemRows):
        return [(np.arange(len(rows)), rows)]
    parts = []
    for positions, inner in rows.by_schema():
        outer = Rows(rows.schema, rows.columns, rows.count).take(torch.from_numpy(positions))
        structure = pytree.TreeSpec(Itemised, None, [outer.schema.structure, inner.schema.structure])
        schema = Schema(structure, outer.schema.leaves + inner.schema.leaves)
        parts.append((positions, Rows(schema, outer.columns + inner.columns, len(positions))))
    return parts


def found(rows: Rows) -> Rows:
    """Undo `stored` for rows of one schema."""
    if rows.schema.structure.type is not Itemised:
        return rows
    outer, inner = specs_of(rows.schema.structure)
    leaves, columns, split = rows.schema.leaves, rows.columns, outer.num_leaves
    entries = Rows(Schema(inner, leaves[split:]), columns[split:], rows.count)
    places = [(entries, i) for i in range(rows.count)]
    return ItemRows(Schema(outer, leaves[:split]), columns[:split], rows.count, places)


def items_of(rows: Rows) -> list[Any]:
    """The output of each item, without the dimension of the batch."""
    if is_like_samples(rows.schema):
        return from_rows(rows)
    batch, cpu = found(rows), torch.device("cpu")
    entries = batch.values(cpu) if isinstance(batch, ItemRows) else [()] * len(rows)

    def item(i: int) -> Any:
        entry = iter(entries[i])

        def node(kind: Any, context: Any, children: list[Any]) -> Any:
            if kind is NumpyArray:
                return NumpyArray.batched(context, children[0])[0]
            if kind is Items:
                return _Entry(next(entry))
            return closed(kind, context, children)

        outer = Rows(batch.schema, batch.columns, len(rows)).take(torch.tensor([i]))
        return mapped(_single, outer.to_pytree(device=cpu, closed=node), objects=True)

    return [item(i) for i in range(len(rows))]


class _Entry:
    """An item's entry of a list."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _single(leaf: Any) -> Any:
    if type(leaf) is _Entry:
        return leaf.value
    return leaf[0] if isinstance(leaf, Tensor) else leaf


def is_like_samples(schema: Schema) -> bool:
    """Whether rows of a schema read the same as outputs of items, and as samples: it has plain tensors."""
    kinds, specs = set[Any](), [schema.structure]
    for spec in specs:  # grows meanwhile
        kinds.add(spec.type)
        specs += specs_of(spec)
    return kinds <= {None, tuple, list, dict} and all(leaf.kind == "tensor" for leaf in schema.leaves)


def joined(parts: Parts, count: int, *, device: torch.device) -> Rows | None:
    """Join parts to one batch of `count` rows; see `Rows.scatter`. None if they do not stack."""
    schema = parts[0][1].schema
    if any(rows.schema != schema for _, rows in parts):
        return None
    rows = Rows.scatter(parts, count, device=device)
    entries = [(positions, part.entries) for positions, part in parts if isinstance(part, ItemRows)]
    return ItemRows(rows.schema, rows.columns, count, _spread(entries, count)) if entries else rows


def _spread(parts: Iterable[tuple[Positions, Sequence[Any]]], count: int) -> list[Any]:
    """One list with the parts' values at their positions in the batch."""
    values: list[Any] = [None] * count
    for positions, part in parts:
        for position, value in zip(positions.tolist(), part, strict=True):
            values[position] = value
    return values


def entry_parts(rows: ItemRows) -> Parts:
    """The entries of rows, for comparison: unpacked, so equal structures have equal schemas."""
    return list(Samples(packs=False).to_rows(rows.values(torch.device("cpu"))).parts)


def _opened_array(value: Any) -> Opened:
    if value.dtype.kind in "SU":
        raise UnstorableError(
            f"an array of {value.dtype}, as wide as the longest text", "return a list of texts"
        )
    kind, context, (raw,) = NumpyArray.opened(np.ascontiguousarray(value) if value.ndim else value)
    return kind, context, [dense(raw)]
