"""Images of PIL and tensor classes of torchvision as nodes around a tensor; neither library is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.engine.values.arrays import NATIVE
from torchcache2.engine.values.nodes import (
    Column,
    Node,
    Opened,
    Packed,
    Raw,
    Unstorable,
    imported,
    is_plain,
    listed,
    node_type,
    strange,
)
from torchcache2.files.errors import DamagedError, UnknownClassError

__all__ = ["Image", "TVTensor"]

_MOST_EMPTY = 1 << 16  # pixels of a side of an image without pixels, as PIL takes memory for each line


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
        children = [Raw(np.frombuffer(data, dtype).reshape(shape), NATIVE[dtype]), Packed([], info)]
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
        values = [value.as_subclass(getattr(module, name)) for value in listed(columns[0])]
        for value in values:
            if form is not None:
                value.format = module.BoundingBoxFormat[form]
        if kind is not None:
            for value, height, width in zip(values, *columns[1:], strict=True):
                value.canvas_size = cls.sizes[kind]((height, width))
        if clamping:
            for value in values:
                (value.clamping_mode,) = clamping
        return values
