"""The table of kinds of values: how each comes apart into nodes and leaves, and is put together again.

Arrays and scalars of numpy, lists of numbers, images of PIL and tensor classes of torchvision are nodes
around a tensor; neither library but numpy is needed. `core.values` takes everything else apart.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.core import values
from torchcache2.core.keys import Array
from torchcache2.core.values import node_type
from torchcache2.engine.values.nodes import (
    Column,
    Node,
    Opened,
    Packed,
    Permuted,
    Placed,
    Raw,
    Unstorable,
    advice,
    axes_of,
    imported,
    inverse,
    is_plain,
    listed,
    strange,
)
from torchcache2.files import classnames as classes
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError

__all__ = ["NODES", "Image", "Numbers", "NumpyArray", "NumpyScalar", "TVTensor", "closed", "opened", "thawed"]

_NATIVE = {  # dtypes of numpy that torch has
    np.dtype(kind).str: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in ("?", "b", "B", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
}
_CHARS = {np.dtype(name).char: name for name in _NATIVE}
_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?|[ilqILQ]")
_MOST_EMPTY = 1 << 16  # pixels of a side of an image without pixels, as PIL takes memory for each line


@node_type
class NumpyArray(Node):
    """A numpy array; the context is its dtype, or a tuple of that and the order of dimensions in memory."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    @classmethod
    def opened(cls, value: Array) -> Opened:
        """The dtype, and the array as one that torch has."""
        name, is_native = _dtype_name(value.dtype)
        context: Any = name
        if not value.flags.c_contiguous:
            axes = axes_of(value.strides)
            if value.transpose(axes).flags.c_contiguous:
                context, value = (name, axes), value.transpose(axes)
        return cls, context, [_raw(value, is_native)]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Arrays that own their memory."""
        name, axes = context if type(context) is tuple else (context, None)
        data = cls.batched(name, *columns)
        arrays = [data[i, ...].copy() for i in range(len(data))]
        if axes is None:
            return arrays
        order = inverse(axes, data.ndim - 1)
        return [array.transpose(order) for array in arrays]

    @staticmethod
    def batched(context: Any, column: Column) -> Array:
        """One array with a row for each item, which shares memory with the column."""
        return _of_dtype(column, context)


@node_type
class NumpyScalar(Node):
    """A scalar of numpy; the context is its dtype, or ``U`` or ``S`` for a text or bytes."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The dtype, and a 0-d array; texts and bytes are leaves."""
        if type(value) is np.str_:
            return cls, "U", [str.__str__(value)]  # `str(value)` drops zeros at the end
        if type(value) is np.bytes_:
            return cls, "S", [bytes(value)]
        array = np.asarray(value)
        if array.dtype.type is not type(value):
            raise strange(value)
        name, is_native = _dtype_name(array.dtype)
        return cls, name, [_raw(array, is_native)]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Scalars."""
        (column,) = columns
        if context in ("U", "S"):
            kind, scalar = (str, np.str_) if context == "U" else (bytes, np.bytes_)
            if type(column) is not list or not all(type(value) is kind for value in column):
                raise DamagedError("another leaf than a text of numpy has")
            return list(map(scalar, column))
        data = _of_dtype(column, context)
        if data.ndim != 1:
            raise DamagedError("a scalar that is none")
        return list(data)


@node_type
class Numbers(Node):
    """A list or tuple of numbers of one type; the context says which of the two."""

    __module__ = "torchcache2.datasets.arrays"  # the name that files have

    dtypes: ClassVar[dict[type, str]] = {int: "<i8", float: "<f8", bool: "|b1", complex: "<c16"}

    @classmethod
    def opened(cls, value: Any) -> Opened | None:
        """One array; None if not all items are numbers of one type, or if one has more than 64 bits."""
        dtype = cls.dtypes.get(type(value[0])) if value else None
        if dtype is None or len(set(map(type, value))) > 1:
            return None
        try:
            array = np.array(value, dtype)
        except OverflowError:
            return None
        return cls, type(value).__name__, [Raw(array, _NATIVE[dtype])]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Lists or tuples."""
        (column,) = columns
        data = column.numpy()
        if data.ndim != 2 or data.dtype.str not in cls.dtypes.values() or context not in ("list", "tuple"):
            raise DamagedError("numbers that are none")
        lists: list[Any] = data.tolist()
        return lists if context == "list" else list(map(tuple, lists))


def _dtype_name(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """The name of a dtype in a context, and whether torch has the dtype."""
    if dtype.isnative and dtype.char in _CHARS and not dtype.metadata:
        return _CHARS[dtype.char], True
    if dtype.kind not in "biufcmMSU" or dtype.itemsize == 0 or dtype.metadata:
        raise Unstorable(f"an array of {dtype}", "return a dict or a list of its parts")
    # Two types of integers may have the same size and the same name; a character tells them apart.
    is_native = dtype.str in _NATIVE
    return dtype.char if is_native else dtype.str, is_native


def _raw(array: Array, is_native: bool) -> Raw:
    if is_native:
        name = _CHARS.get(array.dtype.char)
        if name is None:
            name = array.dtype.str
            array = array.view(name)
        return Raw(array, _NATIVE[name])
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Raw(data.reshape(*array.shape, array.dtype.itemsize), torch.uint8)


def _of_dtype(column: Column, name: Any) -> Array:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise DamagedError("a dtype that is none")
    data: Array = column.numpy()
    dtype = np.dtype(name)
    if dtype.str in _NATIVE:
        if data.dtype != dtype:
            raise DamagedError("an array of another dtype")
        return data.view(dtype)
    if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] != dtype.itemsize:
        raise DamagedError("an array of another size")
    return data.view(dtype)[..., 0]


@node_type
class Image(Node):
    """An image of PIL; the context is its mode, and the mode of its palette or None."""

    __module__ = "torchcache2.datasets.images"  # the name that files have

    steps = (".pixels", ".info", ".palette")

    # By mode: the mode in which the pixels are stored, their dtype, and how many elements a pixel has.
    modes: ClassVar[dict[str, tuple[str, str, int]]] = {
        "1": ("1;8", "|u1", 1),
        **{mode: (mode, "|u1", 1) for mode in ("L", "P")},
        **{mode: (mode, "|u1", 2) for mode in ("LA", "La", "PA", "I;16B")},
        **{mode: (mode, "|u1", 3) for mode in ("RGB", "YCbCr", "LAB", "HSV")},
        **{mode: (mode, "|u1", 4) for mode in ("RGBA", "RGBa", "RGBX", "CMYK")},
        **{mode: (mode, "<u2", 1) for mode in ("I;16", "I;16L")},
        "I": ("I", "<i4", 1),
        "F": ("F", "<f4", 1),
    }

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The pixels, the plain part of `info`, and the palette; the image is loaded for that."""
        try:
            value.load()
        except (OSError, SyntaxError) as error:  # what PIL raises for a damaged file
            raise Unstorable(f"an image that cannot be loaded ({error})") from None
        mode, (width, height) = value.mode, value.size
        if mode not in cls.modes:
            raise Unstorable(f"an image of mode {mode}", "convert it to another mode")
        if width * height == 0 and max(width, height) > _MOST_EMPTY:
            raise Unstorable("an image without pixels")
        _, dtype, channels = cls.modes[mode]
        data = value.tobytes("raw", "L" if mode == "1" else mode)
        shape = (height, width) if channels == 1 else (height, width, channels)
        info = {key: item for key, item in value.info.items() if type(key) is str and is_plain(item)}
        children = [Raw(np.frombuffer(data, dtype).reshape(shape), _NATIVE[dtype]), Packed([], info)]
        palette = None
        if mode in ("P", "PA"):
            palette = value.palette.mode if value.palette else "RGB"
            if palette not in ("RGB", "RGBA"):
                raise Unstorable(f"an image with a palette of mode {palette}", "convert it to another mode")
            colors = np.frombuffer(value.im.getpalette(palette, palette), np.uint8)
            children.append(Raw(colors, torch.uint8))
        return cls, (mode, palette), children

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Images that are in memory, of type `PIL.Image.Image`."""
        pil, (mode, palette) = imported("PIL.Image"), context
        raw, dtype, channels = cls.modes[mode]
        data = columns[0].numpy()
        shape = data.shape[1:]
        is_empty = 0 in shape
        if data.dtype != dtype or data.ndim != 3 + (channels > 1) or (channels > 1 and shape[2] != channels):
            raise DamagedError("pixels that are none")
        if (is_empty and max(shape) > _MOST_EMPTY) or len(columns) != 2 + (palette is not None):
            raise DamagedError("an image that is none")
        images = [pil.frombytes(mode, (shape[1], shape[0]), row.tobytes(), "raw", raw) for row in data]
        if palette is not None:
            for image, colors in zip(images, columns[2].numpy(), strict=True):
                if len(colors):
                    image.putpalette(colors.tobytes(), palette)
        for image, info in zip(images, columns[1], strict=True):
            image.info = dict(info)
        return images


@node_type
class TVTensor(Node):
    """A tensor class of ``torchvision.tv_tensors``; the context is its name, format, and mode of clamping.

    The size of the canvas belongs to a sample rather than to its structure, so that it is two leaves.
    """

    __module__ = "torchcache2.datasets.images"  # the name that files have

    steps = ("", ".canvas_size[0]", ".canvas_size[1]")
    sizes: ClassVar[dict[str, Any]] = {"tuple": tuple, "list": list, "Size": torch.Size}
    names = ("Image", "Mask", "Video", "BoundingBoxes", "KeyPoints")

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The plain tensor, and the size of the canvas."""
        name, attributes = type(value).__name__, dict(vars(value))
        size, form = attributes.pop("canvas_size", None), attributes.pop("format", None)
        clamping = attributes.pop("clamping_mode", cls)
        kind = None if size is None else type(size).__name__
        is_known = name in cls.names and not attributes and (size is None or len(size) == 2)
        if not is_known or kind not in (None, *cls.sizes) or not (clamping is cls or is_plain(clamping)):
            raise strange(value)
        marks = (form and form.name, () if clamping is cls else (clamping,), kind)
        return cls, (name, *marks), [value.as_subclass(Tensor), *map(int, size or ())]

    @classmethod
    def closed(cls, context: Any, columns: Sequence[Column]) -> list[Any]:
        """Tensors of that class."""
        name, form, clamping, kind = context
        module = imported("torchvision.tv_tensors")
        if name not in cls.names or not hasattr(module, name):
            raise UnknownClassError(f"torchvision.tv_tensors:{name}", "is not there")
        tensors = [value.as_subclass(getattr(module, name)) for value in listed(columns[0])]
        for value in tensors:
            if form is not None:
                value.format = module.BoundingBoxFormat[form]
        if kind is not None:
            for value, height, width in zip(tensors, *columns[1:], strict=True):
                value.canvas_size = cls.sizes[kind]((height, width))
        if clamping:
            for value in tensors:
                (value.clamping_mode,) = clamping
        return tensors


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
