"""One sample as its structure and its leaves, and the schema of samples of one structure."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcache2.core.private import pytree
from torchcache2.core.schema import BARE, Leaf, Schema
from torchcache2.engine.values.nodes import Node, Packed, Permuted, Placed, Raw, Unstorable, dense
from torchcache2.engine.values.packed import pack
from torchcache2.engine.values.trees import opened, thawed

__all__ = ["NUMBERS", "PACKED", "Flat", "Structure"]

_ITEMS = 16  # a longer list or tuple is packed, as its length usually differs between samples
_KEYS = 64
_DEPTH = 16
NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8", "complex": "<c16"}  # dtypes of rows, by kind of leaf
_KINDS: dict[Any, tuple[tuple[str, int], tuple[int]]] = {  # what `Flat` says of a leaf, and its shape
    bool: (("bool", 1), (1,)),
    int: (("int", 1), (8,)),
    float: (("float", 1), (8,)),
    complex: (("complex", 1), (16,)),
    type(None): (("none", 1), (0,)),
}
_MAPPINGS = (dict, collections.OrderedDict)


class Flat:
    """A sample as its leaves.

    Parameters
    ----------
    device : torch.device, optional
        Tensors may be on this device, too.
    packs : bool
        Whether values of varying length are bytes; else they are only to be compared.

    Attributes
    ----------
    structure : list
        All but the shapes and values of the leaves, to be compared exactly: a type, a context and a number of
        children for each node, and a kind and a number of dimensions for each leaf, from the root down.
    shapes, values : list
        Of the leaves.
    """

    __slots__ = ("device", "packs", "shapes", "structure", "values")

    def __init__(self, device: torch.device | None = None, *, packs: bool = True) -> None:
        self.device, self.packs = device, packs
        self.structure: list[Any] = []
        self.shapes: list[Any] = []
        self.values: list[Any] = []

    def leaf(self, kind: Any, shape: Any, value: Any) -> None:
        """Add a leaf."""
        self.structure.append((kind, len(shape)))
        self.shapes.append(shape)
        self.values.append(value)

    def packed(self, value: Any) -> None:
        """Add a value as bytes."""
        data = pack(value)
        self.structure.append((Packed, None, 1))
        self.leaf("bytes", (len(data),), data)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value; `Unstorable` if a part of it is of no known type."""
        kind = type(value)
        if kind is Tensor:
            if not value.is_cpu and value.device == self.device:
                self.structure.append((Placed, None, 1))
                value = value.cpu()
            axes, value = dense(value)
            if axes is not None:
                self.structure.append((Permuted, axes, 1))
            shape = value.shape
            self.structure.append((value.dtype, len(shape)))
            self.shapes.append(shape)
            self.values.append(value)
        elif kind in _KINDS:
            if kind is int and not -(2**63) <= value < 2**63:
                self.packed(value)
            else:
                token, shape = _KINDS[kind]
                self.structure.append(token)
                self.shapes.append(shape)
                self.values.append(value)
        elif kind is str:
            data = value.encode("utf-8", "surrogatepass")
            self.leaf("str", (len(data),), data)
        elif kind is bytes:
            self.leaf("bytes", (len(value),), value)
        elif kind is Raw:
            self.leaf(value.dtype, value.array.shape, value)
        elif kind is Packed:
            self.packed(value.context)
        else:
            self._node(value, *opened(value), depth)

    def _node(self, value: Any, kind: Any, context: Any, children: Sequence[Any], depth: int) -> None:
        is_mapping = kind in _MAPPINGS
        most = _KEYS if is_mapping else _ITEMS
        is_fixed = not is_mapping or all(type(key) is str for key in context)
        if self.packs and (len(children) > most or depth >= _DEPTH or not is_fixed):
            self.packed(value)
            return
        self.structure.append((kind, context, len(children)))
        i = 0
        try:
            for child in children:
                self.add(child, depth + 1)
                i += 1
        except Unstorable as error:
            raise error.inside(_step(kind, context, i)) from None


class Structure:
    """What samples of one structure have in common.

    Attributes
    ----------
    leaves : list of (str, kind)
        Path and kind of each; the kind of a tensor is its dtype.
    """

    def __init__(self, tokens: tuple[Any, ...]) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self.spec = self._spec(iter(tokens), "")

    def schema(self, shapes: Sequence[Any]) -> Schema:
        """The schema of rows of these shapes."""
        leaves = []
        for (path, kind), shape in zip(self.leaves, shapes, strict=True):
            if type(kind) is torch.dtype:
                leaves.append(Leaf(path, "tensor", kind, kind, tuple(shape)))
            else:
                leaves.append(Leaf(path, kind, torch.uint8, torch.uint8, shape))
        return Schema(self.spec, tuple(leaves))

    def _spec(self, tokens: Iterator[Any], path: str) -> pytree.TreeSpec:
        token = next(tokens)
        if len(token) == 2:
            self.leaves.append((path, token[0]))
            return BARE
        kind, context, count = token
        steps = [_step(kind, context, i) for i in range(count)]
        children = [self._spec(tokens, path + step) for step in steps]
        return pytree.TreeSpec(kind, list(context) if kind in _MAPPINGS else thawed(context), children)


def _step(kind: Any, context: Any, i: int) -> str:
    """What the path of a leaf says of a child."""
    if kind in _MAPPINGS:
        return f"[{context[i]!r}]"
    if kind is collections.namedtuple:
        return f".{context._fields[i]}"
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind.steps[i]
    return f"[{i}]"


PACKED = Structure(((Packed, None, 1), ("bytes", 1)))
