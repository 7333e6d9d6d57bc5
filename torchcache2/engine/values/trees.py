"""How any value of a sample comes apart, and how it is put together again."""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torchcache2.core import values
from torchcache2.engine.values.arrays import Numbers, NumpyArray, NumpyScalar
from torchcache2.engine.values.images import Image, TVTensor
from torchcache2.engine.values.nodes import (
    Column,
    Node,
    Opened,
    Packed,
    Permuted,
    Placed,
    Unstorable,
    advice,
    listed,
    strange,
)
from torchcache2.files import classnames as classes
from torchcache2.files.errors import UnserialisableError

__all__ = ["NODES", "closed", "opened", "thawed"]

NODES: tuple[type[Node], ...] = (Packed, Permuted, Placed, NumpyArray, NumpyScalar, Numbers, Image, TVTensor)


def opened(value: Any) -> Opened:
    """The type, context and children of a value that is no leaf; `Unstorable` if it is of no known type."""
    kind = type(value)
    if kind is tuple or kind is list:
        return Numbers.opened(value) or (kind, None, value)
    if kind is dict:
        return kind, tuple(value), list(value.values())
    if kind is np.ndarray:
        return NumpyArray.opened(value)
    if isinstance(value, np.generic):
        return NumpyScalar.opened(value)
    if isinstance(value, Tensor) and kind.__module__.startswith("torchvision.tv_tensors"):
        return TVTensor.opened(value)
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        return Image.opened(value)
    try:
        node = values.opened(value, objects=True)
    except values.NotRebuiltError as error:
        raise Unstorable(str(error), advice(value)) from None
    if node is None or kind in NODES:
        raise strange(value)
    if kind is collections.OrderedDict:
        return kind, tuple(value), node[2]
    _check_name(kind)
    if node[0] is collections.namedtuple:
        return node
    try:
        return kind, _frozen(node[1]), node[2]
    except Unstorable as error:
        raise Unstorable(f"a {classes.qualified(kind)} that keeps {error.what}", advice(value)) from None


def closed(kind: Any, context: Any, columns: Sequence[Column], count: int) -> list[Any]:
    """The `count` values of a type with a context, whose children are the columns."""
    if kind in NODES:
        return kind.closed(context, columns)  # type: ignore[no-any-return]
    children = list(zip(*map(listed, columns), strict=True)) if columns else [()] * count
    return [values.closed(kind, context, parts) for parts in children]


def thawed(context: Any) -> Any:
    """The context of a node, from the one that `opened` gives for it, which can be compared exactly."""
    if type(context) is tuple and context and context[0] in (list, tuple):
        return context[0](map(thawed, context[1:]))
    return context


def _frozen(context: Any) -> Any:
    kind = type(context)
    if isinstance(context, type):
        _check_name(context)
        return context
    if context is None or kind in (str, bytes) or (kind is int and abs(context) < 2**63):
        return context
    if kind in (list, tuple):
        return (kind, *map(_frozen, context))
    raise Unstorable(f"a {classes.qualified(kind)}")


def _check_name(cls: Any) -> None:
    try:
        classes.name_of(cls, "")
    except UnserialisableError:
        advice = "define it at the top level of a module, where its name finds it"
        raise Unstorable(f"a {classes.qualified(cls)}", advice) from None
