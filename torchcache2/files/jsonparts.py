"""The parts that the JSON of a schema is made of, each checked as it is read."""

from __future__ import annotations

import re
from typing import Any

from torchcache2.files.errors import DamagedError

__all__ = [
    "from_hex",
    "items_of",
    "list_of",
    "members_of",
    "tagged",
    "text_from_json",
    "text_to_json",
]

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
