"""`Schema`: the structure of an output, and the dtype and shape of each of its leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from torchcache2.core.private import pytree
from torchcache2.core.values import BARE, same_structure

__all__ = ["BARE", "Leaf", "Schema"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of an output.

    Attributes
    ----------
    path : str
        Where it is in the output, as in ``['hidden'][0]``; empty for a bare tensor.
    kind : str
        ``tensor``, or the type tag of a value that is not one: ``int``, ``str``, ``none``, ...
    dtype, stored : torch.dtype
        The dtype of the output, and that of the column that stores it.
    shape : tuple of int
        The shape of one row; an extent that differs between the rows of a segment is -1.
    channels_last : bool
        Whether rows, and the output, are laid out with their channels last. Leaves that differ in nothing
        else are equal, since convolutions choose a layout by the batch size.
    device : str, optional
        The device of the output, if it is not the device of the call.
    """

    path: str
    kind: str
    dtype: torch.dtype
    stored: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool = dataclasses.field(default=False, compare=False)
    device: str | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one row as it lies in the column."""
        return (*self.shape[1:], self.shape[0]) if self.channels_last else self.shape

    def place(self, device: torch.device) -> torch.device:
        """The device of the output of a call on `device`."""
        return torch.device(self.device) if self.device else device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the column."""
        size = self.stored.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True, eq=False)
class Schema:
    """The structure of an output and its leaves; equal schemas can share a column."""

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Schema) or self.leaves != other.leaves:
            return False
        return same_structure(self.structure, other.structure)

    def __hash__(self) -> int:
        return hash(self.leaves)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all columns together."""
        return sum(leaf.row_bytes for leaf in self.leaves)

    @functools.cached_property
    def family(self) -> Schema:
        """A schema that is the same for all schemas that differ only in the shapes of rows.

        Rows with their channels last are another family, so that they come back in that layout.
        """
        return self.with_shapes([(-1 - leaf.channels_last,) * len(leaf.shape) for leaf in self.leaves])

    @property
    def layout(self) -> tuple[bool, ...]:
        """Which leaves have their channels last."""
        return tuple([leaf.channels_last for leaf in self.leaves])

    @property
    def in_logical_order(self) -> Schema:
        """The same schema for columns that are contiguous in the order of their dimensions."""
        if not any(self.layout):
            return self
        leaves = tuple([dataclasses.replace(leaf, channels_last=False) for leaf in self.leaves])
        return Schema(self.structure, leaves)

    def with_shapes(self, shapes: Iterable[tuple[int, ...]]) -> Schema:
        """The same schema for rows whose leaves have other shapes."""
        leaves = []
        for leaf, shape in zip(self.leaves, shapes, strict=True):
            # `dataclasses.replace` takes several times as long.
            rest = leaf.channels_last, leaf.device
            leaves.append(Leaf(leaf.path, leaf.kind, leaf.dtype, leaf.stored, shape, *rest))
        return Schema(self.structure, tuple(leaves))
