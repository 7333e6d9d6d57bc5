"""Codec ``blosc2``: Blosc2 chunks, as `torchcache2.files.codec` describes them."""

from __future__ import annotations

import struct
from typing import Any

from torchcache2.core.arrays import Bytes
from torchcache2.core.settings import require
from torchcache2.files.errors import DamagedError
from torchcache2.files.lanes import Codec, Lane

__all__ = ["Blosc2"]

_U32 = struct.Struct("<I")
# The header of a Blosc2 chunk: version, zstd's version, flags, type size, bytes held, bytes of a part of
# them, bytes of the chunk; six filters, codec, its setting, six filter settings, a reserved byte; more flags.
_HEADER = struct.Struct("<BBBBIII15sB")
_CHUNK_VERSION = 5
_CHUNK_FLAGS = (0x07, 0x85, 0x87, 0x95, 0x97)  # they say: a long header, zstd or raw, planes apart or not
_PIPELINE = bytes([1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0])  # shuffle, then zstd
_ZEROS = 0x10  # the chunk is zeros, and has no bytes after the header
_WORTH_THREADS = 1 << 19  # bytes of a part


class Blosc2(Codec):
    """Blosc2 chunks; needs the extra ``blosc2``."""

    name = "blosc2"

    def __init__(self, level: int = 1) -> None:
        # Its import takes 0.3 s and two threads, so only those who want it wait for it.
        self._library = require("blosc2", "blosc2", "compression='blosc2'")
        self._level = level

    def _encode(self, part: Bytes, split: Lane, pieces: list[Any]) -> None:
        library = self._library
        # Threads cost more than they bring to small parts; their number is the library's setting.
        threads = {"nthreads": 1} if len(part) < _WORTH_THREADS else {}
        chunk = library.compress2(
            part,
            typesize=split.width,
            clevel=self._level,
            codec=library.Codec.ZSTD,
            filters=[library.Filter.SHUFFLE],
            filters_meta=[0],
            **threads,
        )
        pieces += (_U32.pack(len(chunk)), chunk)

    def _decode(self, data: memoryview, at: int, out: Bytes, split: Lane) -> int:
        chunk, end = _chunk(data, at, len(out), split.width)
        threads = {"nthreads": 1} if len(out) < _WORTH_THREADS else {}
        try:
            self._library.decompress2(chunk, out, **threads)
        except (ValueError, RuntimeError) as error:
            raise DamagedError(str(error)) from None
        return end


def _chunk(data: memoryview, at: int, size: int, width: int) -> tuple[memoryview, int]:
    """The chunk at `at`, whose header is one that `Blosc2` writes for `size` bytes, and where it ends."""
    begin = at + 4
    if begin + _HEADER.size > len(data):
        raise DamagedError("a block that ends too early")
    (stored,) = _U32.unpack_from(data, at)
    end = begin + stored
    version, _, flags, typesize, held, part, length, pipeline, special = _HEADER.unpack_from(data, begin)
    # The library obeys headers: they could name filters and codecs that it would go and load.
    if (
        stored != length
        or end > len(data)
        or (version, typesize, held, pipeline) != (_CHUNK_VERSION, width, size, _PIPELINE)
        or flags not in _CHUNK_FLAGS
        or not 0 < part <= size
        or special not in (0, _ZEROS)
        or (special == _ZEROS and stored != _HEADER.size)
    ):
        raise DamagedError(f"not a chunk of {size} bytes")
    return data[begin:end], end
