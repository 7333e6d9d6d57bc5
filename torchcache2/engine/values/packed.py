"""Writes a value as bytes that describe themselves; docs/format.md specifies them byte by byte."""

from __future__ import annotations

import collections
import struct
from typing import Any

import numpy as np
import torch

from torchcache2.core.values import fields_of, is_key
from torchcache2.engine.values.arrays import Numbers, NumpyArray, NumpyScalar
from torchcache2.engine.values.images import Image, TVTensor
from torchcache2.engine.values.nodes import Packed, Permuted, Raw, Unstorable, bytes_of, dense
from torchcache2.engine.values.trees import opened, thawed
from torchcache2.files import classnames as classes

__all__ = ["CONTAINERS", "DTYPES", "MAX_DEPTH", "OURS", "VERSION", "pack"]

VERSION = 1
MAX_DEPTH = 100
DTYPES = {
    str(value)[6:]: value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and not name.startswith("q")  # quantized tensors are refused
}
_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}
CONTAINERS: dict[Any, bytes] = {list: b"l", tuple: b"t", dict: b"d", collections.OrderedDict: b"o"}
OURS: dict[Any, bytes] = {NumpyArray: b"A", NumpyScalar: b"G", Permuted: b"X", Image: b"P", TVTensor: b"V"}
_SIZED = struct.Struct("<cI")
_INT = struct.Struct("<cq")
_FLOAT = struct.Struct("<cd")
_COMPLEX = struct.Struct("<cdd")


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises
    ------
    Unstorable
        If a part of it is of no known type, or if it is nested more than 100 deep.
    """
    out = bytearray([VERSION])
    _write(out, value, 0)
    return bytes(out)


def _write(out: bytearray, value: Any, depth: int) -> None:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise Unstorable(f"nested more than {MAX_DEPTH} deep")
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is int:
        if -(2**63) <= value < 2**63:
            out += _INT.pack(b"i", value)
        else:
            _sized(out, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out += _FLOAT.pack(b"f", value)
    elif kind is complex:
        out += _COMPLEX.pack(b"c", value.real, value.imag)
    elif kind is str:
        _sized(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _sized(out, b"b", value)
    elif kind is Raw:
        _raw(out, torch.from_numpy(np.array(value.array, order="C")))
    elif kind is torch.Tensor:
        axes, value = dense(value)
        if axes is None:
            _raw(out, value)
        else:
            _node(out, Permuted, axes, [value], depth)
    elif kind is Packed:
        _write(out, value.context, depth)
    else:
        _node(out, *opened(value), depth)


def _node(out: bytearray, kind: Any, context: Any, children: Any, depth: int) -> None:
    steps: Any = range(len(children))
    if kind is Numbers:
        data = children[0].array
        code = data.dtype.kind.encode()
        out += b"n" if context == "list" else b"u"
        _sized(out, code, data.tobytes())
        return
    if kind in (dict, collections.OrderedDict):
        out += _SIZED.pack(CONTAINERS[kind], _count(len(children)))
        for key in context:
            if not is_key(key):
                raise Unstorable(f"a dict with a key of type {type(key).__qualname__}", "use texts as keys")
        steps, pairs = context, zip(context, children, strict=True)
    elif kind in (list, tuple):
        out += _SIZED.pack(CONTAINERS[kind], _count(len(children)))
    elif kind in OURS:
        out += OURS[kind]
        _write(out, context, depth + 1)
        out.append(len(children))
    else:
        cls, context = (context, None) if kind is collections.namedtuple else (kind, thawed(context))
        out += b"C"
        _sized(out, b"s", classes.name_of(cls, "").encode())
        _write(out, fields_of(cls), depth + 1)
        _context(out, context, depth + 1)
        out += struct.pack("<I", _count(len(children)))
    is_mapping = kind in (dict, collections.OrderedDict)
    for step, child in pairs if is_mapping else zip(steps, children, strict=True):
        try:
            if is_mapping:
                _write(out, step, depth + 1)
            _write(out, child, depth + 1)
        except Unstorable as error:
            raise error.inside("" if kind in OURS else f"[{step!r}]") from None


def _context(out: bytearray, context: Any, depth: int) -> None:
    """What a node of somebody's keeps: values, lists and tuples of them, and classes."""
    if depth > MAX_DEPTH:
        raise Unstorable(f"nested more than {MAX_DEPTH} deep")
    if isinstance(context, type):
        _sized(out, b"K", classes.name_of(context, "").encode())
    elif type(context) in (list, tuple):
        out += _SIZED.pack(CONTAINERS[type(context)], len(context))
        for item in context:
            _context(out, item, depth + 1)
    else:
        _write(out, context, depth)


def _raw(out: bytearray, value: torch.Tensor) -> None:
    name = _NAMES[value.dtype].encode()
    out += struct.pack(f"<cB{len(name)}sB{value.dim()}Q", b"R", len(name), name, value.dim(), *value.shape)
    out += bytes_of(value).numpy().data


def _sized(out: bytearray, tag: bytes, data: bytes) -> None:
    out += _SIZED.pack(tag, _count(len(data)))
    out += data


def _count(count: int) -> int:
    if count >= 2**32:
        raise Unstorable("too large for a packed value: 4 GiB")
    return count
