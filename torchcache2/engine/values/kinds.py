"""The table of kinds of values: how to take each apart into nodes and leaves, and rebuild it.

A leaf is a dense tensor, an array inside a node, a number, a text, bytes or None. NumPy arrays, lists of
numbers, PIL images and torchvision's tensor classes are nodes around a tensor; only NumPy must be installed.
`core.values` takes everything else apart.
"""

from __future__ import annotations

import ast
import enum
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.core import values
from torchcache2.core.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.core.keys import Array
from torchcache2.core.values import Node, Opened, UnstorableError, has_attributes
from torchcache2.files import schema as classes

_NATIVE = {  # names of NumPy's dtypes that torch has, by character
    np.dtype(name).char: np.dtype(name).str
    for name in ("?", "b", "B", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
}
_TORCH = {char: torch.from_numpy(np.zeros(0, name)).dtype for char, name in _NATIVE.items()}
_NAMES = frozenset(_NATIVE.values())
NUMPY = {dtype: _NATIVE[char] for char, dtype in _TORCH.items()}  # names of dtypes
COMMON = frozenset((torch.bfloat16, *NUMPY)) - {torch.uint16, torch.uint32, torch.uint64}  # torch copies them
_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?|[ilqILQ]")
_MOST_EMPTY = 1 << 16  # longest side of an image without pixels, as PIL allocates each line
_ADVICE: tuple[tuple[Any, str], ...] = (  # what to return instead of a value ``{}`` of a type
    (Tensor, "{}.detach().as_subclass(torch.Tensor)"),
    (np.ndarray, "numpy.array({})"),
    (Mapping, "dict({})"),
    (enum.Enum, "{}.value"),
    ((set, frozenset, range, Iterator), "list({})"),
    *((base, base.__name__ + "({})") for base in (bool, int, float, str, bytes, tuple)),
)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class Raw:
    """An array to store as a tensor; if `is_exact`, only in its own dtype."""

    __slots__ = ("array", "dtype", "is_exact", "shape")

    def __init__(self, array: Array, *, is_exact: bool = True) -> None:
        self.array, self.is_exact = array, is_exact
        self.dtype, self.shape = _TORCH[array.dtype.char], array.shape


class Packed(Node, module="datasets.nodes"):
    """A value as bytes; see `torchcache2.engine.values.packed`. As a child, it represents its `context`."""


class Placed(Node, module="datasets.nodes"):
    """A tensor on the device of the call; the context is None."""


class Permuted(Node, module="datasets.nodes"):
    """A tensor whose dimensions have another order in memory; the context is that order."""

    @classmethod
    def opened(cls, value: Tensor) -> Opened | None:
        """The order of dimensions; None if it is the usual one, or if there are gaps in memory.

        `UnstorableError` if the tensor is not a plain dense one on the CPU.
        """
        if value.requires_grad:
            raise UnstorableError("a tensor that requires gradients", "return {}.detach()")
        if not value.is_cpu:
            what = f"a tensor on {value.device}"
            raise UnstorableError(what, "return it on the CPU, and move batches afterwards")
        if value.is_nested or value.is_quantized or value.layout != torch.strided:
            raise UnstorableError("a tensor that is not dense", "return a dense one")
        if has_attributes(value):
            raise UnstorableError("a tensor with attributes of its own", "return {}.clone()")
        if value.is_contiguous():
            return None
        axes = _axes_of(value.stride())
        return (cls, axes, [value.permute(axes)]) if value.permute(axes).is_contiguous() else None

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """The tensor, with its original strides."""
        (value,) = children
        return value.permute(_inverse(context, value.dim()))


class NumpyArray(Node, module="datasets.arrays"):
    """A NumPy array; the context is its dtype, or a tuple of dtype and order of dimensions in memory."""

    @classmethod
    def opened(cls, value: Array) -> Opened:
        """The dtype, and the array in a dtype that torch has."""
        axes = None if value.flags.c_contiguous else _axes_of(value.strides)
        if axes is not None and value.transpose(axes).flags.c_contiguous:
            name, raw = _as_raw(value.transpose(axes), is_exact=False)
            return cls, (name, axes), [raw]
        name, raw = _as_raw(value, is_exact=False)
        return cls, name, [raw]

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """An array that owns its memory."""
        name, axes = context if type(context) is tuple else (context, None)
        array = _typed(name, *children).copy()
        return array if axes is None else array.transpose(_inverse(axes, array.ndim))

    @staticmethod
    def batched(context: Any, column: Tensor) -> Array:
        """One array with a row for each item, sharing the column's memory."""
        return _typed(context, column, 1)


class NumpyScalar(Node, module="datasets.arrays"):
    """A NumPy scalar; the context is its dtype, or ``U`` or ``S`` for text or bytes."""

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The dtype, and a 0-d array; texts and bytes are leaves."""
        if type(value) is np.str_:
            return cls, "U", [str.__str__(value)]  # `str(value)` drops zeros at the end
        if type(value) is np.bytes_:
            return cls, "S", [bytes(value)]
        array = np.asarray(value)
        if array.dtype.type is not type(value):
            raise _strange(value)
        name, raw = _as_raw(array)
        return cls, name, [raw]

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """A scalar."""
        (value,) = children
        if context in ("U", "S"):
            kind, scalar = (str, np.str_) if context == "U" else (bytes, np.bytes_)
            if type(value) is not kind:
                raise DamagedError("not the leaf of a NumPy text")
            return scalar(value)
        array = _typed(context, value)
        if array.ndim:
            raise DamagedError("not a scalar")
        return array.copy()[()] if array.dtype.names else array[()]


class Numbers(Node, module="datasets.arrays"):
    """A list or tuple of numbers of one type; the context names the container."""

    dtypes: ClassVar[dict[type, str]] = {int: "<i8", float: "<f8", bool: "|b1", complex: "<c16"}

    @classmethod
    def opened(cls, value: Any) -> Opened | None:
        """One array; None if the items are not all numbers of one type, or exceed 64 bits."""
        dtype = cls.dtypes.get(type(value[0])) if value else None
        if dtype is None or len(set(map(type, value))) > 1:
            return None
        try:
            return cls, type(value).__name__, [Raw(np.array(value, dtype))]
        except OverflowError:
            return None

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """A list or tuple."""
        data = children[0].numpy()
        if data.ndim != 1 or data.dtype.str not in cls.dtypes.values() or context not in ("list", "tuple"):
            raise DamagedError("not numbers")
        return data.tolist() if context == "list" else tuple(data.tolist())


class Image(Node, module="datasets.images"):
    """A PIL image; the context is its mode, and its palette's mode or None."""

    steps = (".pixels", ".info", ".palette")

    # By mode: raw mode of the stored pixels, their dtype, and elements per pixel.
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
        """The pixels, the plain part of `info`, and the palette; loads the image."""
        try:
            value.load()
        except (OSError, SyntaxError) as error:  # raised by PIL for a damaged file
            raise UnstorableError(f"an image that cannot be loaded ({error})") from None
        mode, (width, height) = value.mode, value.size
        if mode not in cls.modes:
            raise UnstorableError(f"an image of mode {mode}", "convert it to another mode")
        if width * height == 0 and max(width, height) > _MOST_EMPTY:
            raise UnstorableError("an image without pixels")
        _, dtype, channels = cls.modes[mode]
        data = value.tobytes("raw", "L" if mode == "1" else mode)
        shape = (height, width) if channels == 1 else (height, width, channels)
        info = {key: item for key, item in value.info.items() if type(key) is str and _is_plain(item)}
        children = [Raw(np.frombuffer(data, dtype).reshape(shape)), Packed([], info)]
        palette = None
        if mode in ("P", "PA"):
            palette = value.palette.mode if value.palette else "RGB"
            if palette not in ("RGB", "RGBA"):
                what = f"an image with a palette of mode {palette}"
                raise UnstorableError(what, "convert it to another mode")
            children.append(Raw(np.frombuffer(value.im.getpalette(palette, palette), np.uint8)))
        return cls, (mode, palette), children

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """A loaded image, of type `PIL.Image.Image`."""
        pil, (mode, palette) = _imported("PIL.Image"), context
        raw, dtype, channels = cls.modes[mode]
        data = children[0].numpy()
        shape = data.shape
        if data.dtype != dtype or data.ndim != 2 + (channels > 1) or (channels > 1 and shape[2] != channels):
            raise DamagedError("not pixels")
        if (0 in shape and max(shape) > _MOST_EMPTY) or len(children) != 2 + (palette is not None):
            raise DamagedError("not an image")
        image = pil.frombytes(mode, (shape[1], shape[0]), data.tobytes(), "raw", raw)
        if palette is not None and len(children[2]):
            image.putpalette(children[2].numpy().tobytes(), palette)
        image.info = dict(children[1])
        return image


class TVTensor(Node, module="datasets.images"):
    """A tensor class of ``torchvision.tv_tensors``; the context is its name, format and clamping mode.

    The canvas size belongs to the sample, not to its structure, so it is two leaves.
    """

    steps = ("", ".canvas_size[0]", ".canvas_size[1]")
    sizes: ClassVar[dict[str, Any]] = {"tuple": tuple, "list": list, "Size": torch.Size}
    names = ("Image", "Mask", "Video", "BoundingBoxes", "KeyPoints")

    @classmethod
    def opened(cls, value: Any) -> Opened:
        """The plain tensor, and the size of the canvas."""
        name, attributes = type(value).__name__, dict(vars(value))
        size, form = attributes.pop("canvas_size", None), attributes.pop("format", None)
        clamping = (attributes.pop("clamping_mode"),) if "clamping_mode" in attributes else ()
        kind = None if size is None else type(size).__name__
        is_known = name in cls.names and not attributes and (size is None or len(size) == 2)
        if not is_known or kind not in (None, *cls.sizes) or not _is_plain(clamping):
            raise _strange(value)
        context = (name, form and form.name, clamping, kind)
        return cls, context, [value.as_subclass(Tensor), *map(int, size or ())]

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """A tensor of that class."""
        name, form, clamping, kind = context
        module = _imported("torchvision.tv_tensors")
        if name not in cls.names or not hasattr(module, name):
            raise UnknownClassError(f"torchvision.tv_tensors:{name}", "is not there")
        value = children[0].as_subclass(getattr(module, name))
        if form is not None:
            value.format = module.BoundingBoxFormat[form]
        if kind is not None:
            value.canvas_size = cls.sizes[kind](children[1:])
        if clamping:
            (value.clamping_mode,) = clamping
        return value


NODES: tuple[type[Node], ...] = (Packed, Permuted, Placed, NumpyArray, NumpyScalar, Numbers, Image, TVTensor)


def opened(value: Any) -> Opened | None:
    """The type, context and children of a value; None for a leaf.

    `UnstorableError` if its type is unknown, or it could not be restored exactly.
    """
    kind: Any = type(value)
    if kind in _PLAIN or kind is Raw:
        return None
    if kind is tuple or kind is list:
        return Numbers.opened(value) or (kind, None, value)
    if kind is dict:
        return kind, list(value), list(value.values())
    if kind is Tensor:
        return Permuted.opened(value)
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
    except UnstorableError as error:
        raise UnstorableError(error.what, _advice(value)) from None
    if node is None or kind in NODES:
        raise _strange(value)
    _check(kind)
    try:
        _check(node[1])
    except UnstorableError as error:
        raise UnstorableError(
            f"a {classes.qualified(kind)} that keeps {error.what}", _advice(value)
        ) from None
    return node


def closed(kind: Any, context: Any, children: Sequence[Any]) -> Any:
    """Rebuild a value from type, context and children, whose tensors own their memory."""
    if kind in NODES:
        return kind.closed(context, children)
    return values.closed(kind, context, children)


def dense(leaf: Any) -> Tensor:
    """A tensor or `Raw` as a contiguous tensor, for reading only."""
    if type(leaf) is Raw:
        array = np.require(leaf.array, requirements=["C", "W"])
        # NumPy ignores the strides of dimensions of length 1; torch refuses negative ones.
        return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())
    return leaf.resolve_conj().resolve_neg().contiguous()  # type: ignore[no-any-return]


def tensor_of(data: Any) -> Tensor:
    """A copy of some bytes, uint8 ``(bytes,)``."""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def bytes_of(value: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 ``(bytes,)``, without a copy."""
    # A tensor of one element is contiguous with any strides.
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def is_native(dtype: np.dtype[Any]) -> bool:
    """Whether torch has exactly this NumPy dtype."""
    return dtype.isnative and dtype.char in _NATIVE and not dtype.metadata


def _as_raw(array: Array, *, is_exact: bool = True) -> tuple[str, Raw]:
    """The name of an array's dtype, and the array in a dtype that torch has, as bytes if need be."""
    dtype = array.dtype
    if is_native(dtype):
        return _NATIVE[dtype.char], Raw(array, is_exact=is_exact)
    name = dtype.str
    if dtype.type is np.void and dtype.names and not dtype.hasobject:
        name = repr(np.lib.format.dtype_to_descr(dtype))
    is_fields = name != dtype.str and _fields(name) == dtype
    if not (is_fields or dtype.kind in "biufcmMSU") or dtype.itemsize == 0 or dtype.metadata:
        raise UnstorableError(f"an array of {dtype}", "return a dict or a list of its parts")
    if dtype.str in _NAMES:  # two integer types share this name: their characters differ
        return dtype.char, Raw(array.view(dtype.str), is_exact=is_exact)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return name, Raw(data.reshape(*array.shape, dtype.itemsize))


def _fields(name: str) -> np.dtype[Any] | None:
    """The dtype of a structured array, from NumPy's description as text; None if it is none."""
    try:
        dtype = np.lib.format.descr_to_dtype(ast.literal_eval(name))
    except Exception:  # any text may be in a file
        return None
    return dtype if dtype.names and not dtype.hasobject and dtype.itemsize else None


def _typed(name: Any, stored: Tensor, dims: int = 0) -> Array:
    """The array of a dtype from its stored tensor of at least `dims` dimensions, without a copy."""
    data = stored.numpy()
    if type(name) is str and name in _NAMES:
        if data.dtype != name:
            raise DamagedError("an array of another dtype")
        return data.view(name)
    if type(name) is not str:
        raise DamagedError("not a dtype")
    dtype = np.dtype(name) if _DTYPE.fullmatch(name) else _fields(name)
    if dtype is None:
        raise DamagedError("not a dtype")
    if dtype.str in _NAMES:  # another integer type with the same name
        return _typed(dtype.str, stored).view(dtype)
    if data.dtype != np.uint8 or data.ndim <= dims or data.shape[-1] != dtype.itemsize:
        raise DamagedError("an array of another size")
    array: Array = data.view(dtype)[..., 0]
    return array


def _axes_of(strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions in memory order: widest stride first."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _inverse(axes: Any, dims: int) -> list[int]:
    """The permutation that undoes `_axes_of`."""
    if type(axes) is not tuple or sorted(axes) != list(range(dims)):
        raise DamagedError("dimensions in no order")
    return sorted(range(dims), key=axes.__getitem__)


def _is_plain(value: Any, depth: int = 8) -> bool:
    """Whether a value is a number, a text, bytes or None, or a tuple, list or dict of such values."""
    kind = type(value)
    if kind in (tuple, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if kind is dict:
        return depth > 0 and all(_is_plain(item, depth - 1) for pair in value.items() for item in pair)
    return kind in _PLAIN


def _check(kept: Any) -> None:
    """`UnstorableError` if a class, or a part of a node's context, cannot be written."""
    if isinstance(kept, type):
        try:
            classes.name_of(kept, "")
        except UnserialisableError:
            advice = "define it at the top level of a module, where its name finds it"
            raise UnstorableError(f"a {classes.qualified(kept)}", advice) from None
    elif type(kept) in (list, tuple):
        for part in kept:
            _check(part)
    elif not _is_plain(kept):
        raise UnstorableError(f"a {classes.qualified(type(kept))}")


def _imported(name: str) -> Any:
    """The module; `UnknownClassError` if it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UnknownClassError(name, "is not installed") from None


def _strange(value: Any) -> UnstorableError:
    """The error for a value of an unsupported type."""
    return UnstorableError(f"a {classes.qualified(type(value))}", _advice(value))


def _advice(value: Any) -> str:
    """What to return instead of an unsupported value, written as ``{}``."""
    for of, advice in _ADVICE:
        if isinstance(value, of):
            return f"return {advice}"
    others = ""
    if hasattr(value, "__dict__") and not callable(value):
        name = type(value).__name__
        others = f", or call torchcache2.register_value({name}, vars, lambda parts: {name}(**parts)) before"
    return f"return tensors, arrays, images, numbers, texts, and tuples, lists and dicts of them{others}"
