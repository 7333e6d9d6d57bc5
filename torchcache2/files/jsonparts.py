"""The parts that the JSON of a schema is made of, and its leaves; each is checked as it is read."""

from __future__ import annotations

import re
from typing import Any

import torch

from torchcache2.core.rows import Leaf
from torchcache2.files.errors import DamagedError, UnknownClassError

MAX_ROW = 2**48
MAX_DIMS = 64
NEEDED = {"path", "kind", "dtype", "shape"}
POSSIBLE = {"stored", "channels_last", "device"}
_DTYPES = {str(value)[6:]: value for value in vars(torch).values() if type(value) is torch.dtype}
_WIDTHS = {"none": 0, "bool": 1, "int": 8, "float": 8, "complex": 16, "str": None, "bytes": None}
_DEVICE = re.compile(r"(?!meta)[a-z]{1,32}(:(0|[1-9][0-9]?|1[01][0-9]|12[0-7]))?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HEX = re.compile(r"([0-9a-f]{2})*")


def text_to_json(text: str) -> Any:
    """A text as JSON, which has no place for surrogates."""
    surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return {"text": text.encode("utf-8", "surrogatepass").hex()} if surrogates else text


def text_from_json(data: Any) -> str:
    """The text."""
    if type(data) is str:
        return data
    tag, body = tagged(data)
    try:
        if tag == "text":
            return from_hex(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        pass
    raise DamagedError("a text that is not one")


def from_hex(data: Any) -> bytes:
    """The bytes."""
    if type(data) is not str or not _HEX.fullmatch(data):
        raise DamagedError("bytes that are not hexadecimal")
    return bytes.fromhex(data)


def tagged(data: Any) -> tuple[Any, Any]:
    """The one tag of an object, and what it has."""
    if type(data) is not dict or len(data) != 1:
        raise DamagedError("neither a plain value nor an object with one tag")
    return next(iter(data.items()))


def members_of(data: Any, needed: set[str], optional: set[str] | None = None) -> dict[str, Any]:
    """An object with certain members."""
    if type(data) is not dict or not needed <= set(data) <= needed | (optional or set()):
        raise DamagedError(f"not an object with {', '.join(sorted(needed))}")
    return data


def list_of(data: Any) -> list[Any]:
    """A list."""
    if type(data) is not list:
        raise DamagedError("something else where a list belongs")
    return data


def items_of(items: list[Any], count: int) -> list[Any]:
    """The items of a list of a certain length."""
    if len(items) != count:
        raise DamagedError(f"{len(items)} items where {count} belong")
    return items


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
    except Exception:  # the backend is not imported
        raise UnknownClassError(name, "is not a device of this process") from None
    return name
