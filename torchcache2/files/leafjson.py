"""A leaf of a schema as JSON, and back."""

from __future__ import annotations

import re
from typing import Any

import torch

from torchcache2.core.schema import Leaf
from torchcache2.files.errors import DamagedError, UnknownClassError
from torchcache2.files.jsonparts import (
    list_of,
    members_of,
    text_from_json,
    text_to_json,
)

__all__ = ["NEEDED", "POSSIBLE", "leaf_from_json", "leaf_to_json"]

MAX_ROW = 2**48
MAX_DIMS = 64
NEEDED = {"path", "kind", "dtype", "shape"}
POSSIBLE = {"stored", "channels_last", "device"}
_DTYPES = {str(value)[6:]: value for value in vars(torch).values() if type(value) is torch.dtype}
_WIDTHS = {"none": 0, "bool": 1, "int": 8, "float": 8, "complex": 16, "str": None, "bytes": None}
_DEVICE = re.compile(r"(?!meta)[a-z]{1,32}(:(0|[1-9][0-9]?|1[01][0-9]|12[0-7]))?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    """A leaf as JSON."""
    data: dict[str, Any] = {
        "path": text_to_json(leaf.path),
        "kind": leaf.kind,
        "dtype": str(leaf.dtype)[6:],
        "shape": [None if extent == -1 else extent for extent in leaf.shape],
    }
    if leaf.stored != leaf.dtype:
        data["stored"] = str(leaf.stored)[6:]
    if leaf.channels_last:
        data["channels_last"] = True
    if leaf.device is not None:
        data["device"] = leaf.device
    return data


def leaf_from_json(data: Any) -> Leaf:
    """The leaf."""
    members = members_of(data, NEEDED, POSSIBLE)
    path, kind, last = text_from_json(members["path"]), members["kind"], members.get("channels_last", False)
    dtype = _dtype(members["dtype"])
    stored = _dtype(members["stored"]) if "stored" in members else dtype
    device = _device(members["device"]) if "device" in members else None
    extents = list_of(members["shape"])
    if len(extents) > MAX_DIMS:
        raise DamagedError(f"a shape of more than {MAX_DIMS} dimensions")
    size = 1
    for extent in extents:
        if extent is not None and not (type(extent) is int and 0 <= extent < MAX_ROW):
            raise DamagedError("an extent that is not a number of elements")
        size *= extent or 1
    if size >= MAX_ROW:
        raise DamagedError("a row of too many elements")
    if type(last) is not bool or (last and len(extents) not in (3, 4)):
        raise DamagedError("channels_last of a leaf without channels")
    if type(kind) is not str or (kind != "tensor" and kind not in _WIDTHS):
        raise DamagedError("a leaf of no known kind")
    if kind == "tensor":
        if stored != dtype and not (stored.is_floating_point and dtype.is_floating_point):
            raise DamagedError("a stored dtype that the dtype is not rounded to")
    elif not (dtype == stored == torch.uint8 and len(extents) == 1 and device is None):
        raise DamagedError("a value that is not kept as its bytes")
    elif _WIDTHS[kind] not in (None, extents[0]):
        raise DamagedError("a value of another width than its kind")
    shape = tuple([-1 if extent is None else extent for extent in extents])
    return Leaf(path, kind, dtype, stored, shape, last, device)


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise DamagedError("a dtype that is not a name")
    if name not in _DTYPES:
        raise UnknownClassError(name, "is not a dtype of this version of PyTorch")
    return _DTYPES[name]


def _device(name: Any) -> str:
    if type(name) is not str or not _DEVICE.fullmatch(name):
        raise DamagedError("a device that is not a name")
    try:
        torch.device(name)
    except Exception:  # of a backend that is not imported
        raise UnknownClassError(name, "is not a device of this process") from None
    return name
