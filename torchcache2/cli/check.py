"""Whether a segment is what was written: every row is read, and every checksum compared."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.sizes import free_memory
from torchcache2.files.errors import DamagedError, NewerFormatError, UnreadableError
from torchcache2.files.filesystem import Descriptors, FileSystem
from torchcache2.files.segment import Segment

State = Literal["good", "damaged", "unreadable", "unchecked", "gone"]
STATES: tuple[State, ...] = ("good", "damaged", "unreadable", "unchecked", "gone")
_LEAST_LIMIT = 1 << 30
_MOST_SHOWN = 120


class Verdict(NamedTuple):
    """Whether a segment is what was written.

    It is "unreadable" if the system refuses to read it, "unchecked" if this process cannot tell, and "gone"
    if somebody has deleted it.
    """

    state: State
    rows: int = 0
    reason: str = ""  # why it is not good


def row_limit() -> int:
    """Bytes that a row may have to be checked: a quarter of what is free, so that no file can take it all."""
    return max(_LEAST_LIMIT, (free_memory(torch.device("cpu")) or 0) // 4)


def verdict(fs: FileSystem, path: str, namespace: str, limit: int) -> Verdict:
    """Read all of a segment, which must belong to a namespace, and compare every checksum.

    `namespace` is 32 hexadecimal digits, and `limit` the bytes that a row may have.
    """
    try:
        segment = Segment.open(fs, Descriptors(fs), path, limit=limit, structured=False)
        found = segment.layout.namespace.hex()
        if found != namespace:
            return Verdict("damaged", len(segment), f"belongs to namespace {found}")
        damaged = segment.check()
    except (OSError, UnreadableError, OptionError, MemoryError) as error:
        return trouble(error)
    count = len(segment)
    if damaged:
        return Verdict("damaged", count, f"{damaged:,} of {count:,} rows are not what was written")
    return Verdict("good", count)


def trouble(error: Exception) -> Verdict:
    """What an error says of the segment that could not be read."""
    if isinstance(error, FileNotFoundError):
        return Verdict("gone")
    if isinstance(error, OSError):
        return Verdict("unreadable", reason=f"cannot be read: {error.strerror or error}")
    if isinstance(error, MemoryError):
        return Verdict("unchecked", reason="needs more memory than there is")
    reason = str(error)
    if isinstance(error, NewerFormatError):
        reason = f"is of the newer format {error}: upgrade torchcache2"
    return Verdict("damaged" if isinstance(error, DamagedError) else "unchecked", reason=printable(reason))


def printable(text: str) -> str:
    """Text from a file, cut if it is long, and without characters that would control a terminal."""
    short = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in short)
