"""For people: values as `Encoder` has written them, and tensors by dtype and shape."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["INNER", "form", "readable", "split", "texts_of"]

INNER = "in "  # before the path of a value inside of an object or dict, among the texts for people
_MOST_SHOWN = 200
# A part of a walk with such a name is a single value.
_PLAIN_PARTS = (
    *("attribute ", "child ", "closure ", "constructor argument ", "default ", "global ", "option "),
    *("training", "value "),
)
_LABELS = (b"class ", b"function ", b"module ")  # of what has a part of its own
_SHOWN: dict[bytes, Callable[[bytes], str]] = {
    b"n": lambda rest: "None",
    b"b": lambda rest: str(rest == b"1"),
    b"i": lambda rest: str(int(rest[8:], 16)),
    b"f": lambda rest: repr(struct.unpack("<d", rest)[0]),
    b"c": lambda rest: repr(complex(*struct.unpack("<dd", rest))),
    b"s": lambda rest: repr(rest[8:].decode("utf-8", "surrogatepass")),
    b"p": lambda rest: split(rest)[1].decode("utf-8", "replace"),
}


def form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape, such as ``float32 (3, 4)``."""
    return f"{dtype} {tuple(shape)}".removeprefix("torch.")


def split(data: bytes) -> list[bytes]:
    """The parts that were joined behind their lengths."""
    parts, start = [], 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        parts.append(data[start + 8 : start + 8 + size])
        start += 8 + size
    return parts


def readable(data: bytes) -> str | None:
    """For people, the value that `Encoder` has written as `data`; None if it is long or has no short form."""
    tag, rest = data[:1], data[1:]
    if len(data) > _MOST_SHOWN:
        return None
    if data.startswith(_LABELS):
        return data.decode("utf-8", "replace")
    try:
        if tag in _SHOWN:
            return _SHOWN[tag](rest)
        if tag not in (b"(", b"["):
            return None
        parts = split(rest[8:])
        texts = [text for part in parts if (text := readable(part)) is not None]
    except (struct.error, ValueError, IndexError):
        return None  # not what the encoder has written
    if len(texts) < len(parts):
        return None
    listed = ", ".join(texts)
    return f"[{listed}]" if tag == b"[" else f"({listed},)" if len(texts) == 1 else f"({listed})"


def texts_of(parts: Mapping[str, bytes]) -> dict[str, str]:
    """For people, those parts of a walk that are single values with a short form."""
    plain = [name for name in parts if name.startswith(_PLAIN_PARTS)]
    return {name: text for name in plain if (text := readable(parts[name])) is not None}
