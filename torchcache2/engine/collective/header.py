"""`Header` and `Told`: what each rank says in the rounds "ask" and "tell", as bytes.

All numbers are little-endian. A header is::

    2 version   2 flags   8 step   4 × 1 bytes of caller, namespace, place, dropped
    2 bytes of the message   2 zeros   4 number of keys k
    caller   namespace   place   dropped   message (UTF-8, at most 200 bytes)   k × 16 keys

and what is told::

    1 status   1 bytes of the reason   2 bytes of the text   2 number of digests d   2 zeros   4 numbers n
    reason   text (UTF-8, at most 1000 bytes)   d × 16 digests   n × 2 numbers
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence

import numpy as np

from torchcache2.core.keys import Array, Bytes2D

__all__ = ["VERSION", "Flag", "Header", "Status", "Told", "are_alike", "out_of_step"]

VERSION = 1
_HEADER = struct.Struct("<HHQ4BHHI")
_TOLD = struct.Struct("<BBHHHI")
_KEY_BYTES = 16
_MESSAGE_BYTES, _TEXT_BYTES, _REASON_BYTES = 200, 1000, 100
_NO_KEYS: Bytes2D = np.empty((0, _KEY_BYTES), np.uint8)
Data = bytes | bytearray | memoryview


class Flag(enum.IntFlag):
    """What a rank says of itself in a step."""

    BYPASS = 1  # it takes part without keys
    FAILED = 2  # it raises; the message says what
    DONE = 4  # it has left `join`
    WHOLE = 8  # its forward runs for the whole batch only
    DROP = 16  # rows of the dropped namespace were found to be wrong, or cleared
    SHARDED = 32  # its forward has collectives, so that all ranks run it or none
    CUDA = 64  # its rows end on CUDA
    RUN = 128  # it has to run its forward, whatever it finds


_NONE = Flag(0)


class Status(enum.IntEnum):
    """What became of the rows that a rank computes."""

    OK = 0
    FAILED = 1
    NOT_STORED = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """What a rank says at the begin of a step.

    Attributes
    ----------
    step : int
        How many steps this exchange has made before.
    flags : Flag
    caller : bytes
        Which module or function is called.
    namespace : bytes
        Of the keys.
    place : bytes
        Whose memory this rank shares.
    dropped : bytes
        The namespace that all drop.
    message : str
        Why it fails; what exceeds 200 bytes is cut off.
    keys : ndarray of uint8, shape (k, 16)
        The distinct keys that were not found locally.
    """

    step: int
    flags: Flag = _NONE
    caller: bytes = b""
    namespace: bytes = b""
    place: bytes = b""
    dropped: bytes = b""
    message: str = ""
    keys: Bytes2D = dataclasses.field(default_factory=lambda: _NO_KEYS)

    @property
    def is_content(self) -> bool:
        """Whether this rank has found everything, and needs nothing else."""
        return not len(self.keys) and not self.flags & ~(Flag.SHARDED | Flag.CUDA)

    def to_bytes(self) -> bytes:
        """The header as bytes."""
        names = self.caller, self.namespace, self.place, self.dropped
        message = _cut(self.message, _MESSAGE_BYTES)
        sizes = *map(len, names), len(message), 0, len(self.keys)
        return b"".join(
            (_HEADER.pack(VERSION, self.flags, self.step, *sizes), *names, message, self.keys.tobytes())
        )

    @classmethod
    def of(cls, data: Data) -> Header:
        """The header that some bytes are; `ValueError` if another version wrote them, or if they are none."""
        if len(data) >= 2 and (version := int.from_bytes(data[:2], "little")) != VERSION:
            raise ValueError(f"version {version} of the protocol, and this is version {VERSION}")
        if len(data) < _HEADER.size:
            raise ValueError(f"a header of {len(data)} bytes")
        _, flags, step, *sizes, _, count = _HEADER.unpack_from(data)
        pieces, _, keys = _split(data, _HEADER.size, sizes, 0, count * _KEY_BYTES)
        matrix = np.frombuffer(keys, np.uint8).reshape(count, _KEY_BYTES).copy()
        caller, namespace, place, dropped, message = pieces
        return cls(step, Flag(flags), caller, namespace, place, dropped, _text(message), matrix)


@dataclasses.dataclass(eq=False)
class Told:
    """What a rank says of the keys of which it is the source.

    Attributes
    ----------
    status : Status
    reason : str
        The word for statistics, if its output is not stored. Else what this rank knows of such calls, for
        ranks whose forward runs for the whole batch only.
    text : str
        Why it fails, or does not store; what exceeds 1000 bytes is cut off.
    digests : list of bytes
        The digests of the schemas of its rows, 16 bytes each.
    numbers : ndarray of uint16, shape (n,)
        For each key that others ask for: 0 if it cannot be delivered, else 1 + the number of its digest.
    """

    status: Status = Status.OK
    reason: str = ""
    text: str = ""
    digests: list[bytes] = dataclasses.field(default_factory=list)
    numbers: Array = dataclasses.field(default_factory=lambda: np.empty(0, np.uint16))

    def to_bytes(self) -> bytes:
        """What is told as bytes."""
        reason, text = _cut(self.reason, _REASON_BYTES), _cut(self.text, _TEXT_BYTES)
        sizes = len(reason), len(text), len(self.digests), 0, len(self.numbers)
        numbers = self.numbers.astype("<u2", copy=False).tobytes()
        return b"".join((_TOLD.pack(self.status, *sizes), reason, text, *self.digests, numbers))

    @classmethod
    def of(cls, data: Data) -> Told:
        """What some bytes tell; `ValueError` if they are none."""
        if len(data) < _TOLD.size:
            raise ValueError(f"{len(data)} bytes where a rank tells what it delivers")
        status, *sizes, digest_count, _, count = _TOLD.unpack_from(data)
        names, digests, numbers = _split(data, _TOLD.size, sizes, digest_count * _KEY_BYTES, count * 2)
        reason, text = map(_text, names)
        table = [bytes(digests[i : i + _KEY_BYTES]) for i in range(0, len(digests), _KEY_BYTES)]
        return cls(Status(status), reason, text, table, np.frombuffer(numbers, "<u2").copy())


def are_alike(one: bytes, other: bytes) -> bool:
    """Whether the headers of two ranks, which have all names, differ in the place only."""
    place = _HEADER.size + 2 * _KEY_BYTES
    behind = place + _KEY_BYTES
    return one[:place] == other[:place] and one[behind:] == other[behind:]


def out_of_step(headers: Sequence[Header]) -> str:
    """Why the ranks that have said this cannot take a step together; empty if they can."""
    active = [(rank, one) for rank, one in enumerate(headers) if not one.flags & Flag.DONE]
    if len(active) < len(headers) and any(one.flags & Flag.SHARDED for one in headers):
        return "a rank has left join(), but the forward of a sharded module waits for it"
    for rank, one in active[1:]:
        first, other = active[0]
        if one.caller != other.caller:
            return (
                f"the ranks are out of step: rank {first} calls {other.message}, and rank {rank} calls "
                f"{one.message}. With distributed='collective' all ranks call the same modules in the same "
                "order; for calls of some ranks only there are cache_instance.alone() and join()"
            )
        # A rank that passes its call by does not say whether its module is sharded.
        if (one.flags ^ other.flags) & Flag.SHARDED and not (one.flags | other.flags) & Flag.BYPASS:
            return f"{one.message} is sharded on some ranks, and whole on others"
    return ""


def _cut(text: str, most: int) -> bytes:
    """A text in UTF-8, at most so many bytes, without half a character at the end."""
    data = text.encode("utf-8", "backslashreplace")
    return data if len(data) <= most else data[:most].decode("utf-8", "ignore").encode()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _split(
    data: Data, start: int, sizes: list[int], *rest: int
) -> tuple[list[bytes], memoryview, memoryview]:
    """The pieces of some bytes, from `start` on; the first ones are copied."""
    if start + sum(sizes) + sum(rest) != len(data):
        raise ValueError(f"{len(data)} bytes where {start + sum(sizes) + sum(rest)} belong")
    view, pieces = memoryview(data), []
    for size in (*sizes, *rest):
        pieces.append(view[start : start + size])
        start += size
    return [bytes(piece) for piece in pieces[:-2]], pieces[-2], pieces[-1]
