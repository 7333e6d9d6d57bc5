"""The bytes of a block: zero bitmap, byte planes, brotli, blosc2; docs/format.md specifies them.

A block is one or more rows: for each leaf a part, the bytes of its elements. Rows, dtypes and sizes are known
from elsewhere, and are not in the block. Checksums are not the codec's task: from a changed block it makes a
`DamagedError` or wrong bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import brotli  # type: ignore[import-untyped]
import numpy as np
import torch

from torchcache2.core.errors import require
from torchcache2.core.keys import Array, Bytes
from torchcache2.files.errors import DamagedError

_MOST = (1 << 31) - 33  # bytes that a part may have: sizes have 31 bits, and a chunk has a header


class Lane(NamedTuple):
    """How the bytes of a leaf are split: a part for each byte of an element, of which there are `width`.

    The width is 1, 2, 4 or 8. If elements are `rotated` first, the sign bit goes to the end, so that the
    exponent fills one byte.
    """

    width: int
    rotated: bool


_LANES = {
    torch.float32: Lane(4, True),
    torch.float64: Lane(8, True),
    torch.bfloat16: Lane(2, True),
    torch.complex64: Lane(4, True),
    torch.complex128: Lane(8, True),
    # Rotated or not, their exponent shares a byte with the mantissa, so that rotation saves nothing.
    torch.float16: Lane(2, False),
    torch.complex32: Lane(2, False),
    **{dtype: Lane(2, False) for dtype in (torch.int16, torch.uint16)},
    **{dtype: Lane(4, False) for dtype in (torch.int32, torch.uint32)},
    **{dtype: Lane(8, False) for dtype in (torch.int64, torch.uint64)},
}


def lane(dtype: torch.dtype) -> Lane:
    """How a leaf that is stored as `dtype` is split; one of an unknown dtype is not split."""
    return _LANES.get(dtype, Lane(1, False))


def lane_of_part(split: Lane, part: Bytes) -> Lane:
    """The lane for a part; a part whose size is not a multiple of the width is not split."""
    return split if len(part) % split.width == 0 else Lane(1, False)


class Codec:
    """Turns the parts of a block, one for each leaf, into bytes and back. Any thread may use it.

    Parts are contiguous, uint8 of shape ``(bytes,)``. A block has the encoded ones one after another; a part
    of no bytes leaves nothing in it.
    """

    name: str

    def encode(self, parts: Sequence[Bytes], lanes: Sequence[Lane]) -> bytes:
        """The block of these parts; `ValueError` if one has 2 GiB or more."""
        pieces: list[Any] = []
        for part, split in zip(parts, lanes, strict=True):
            if len(part) > _MOST:
                raise ValueError(f"a part of {len(part):,} bytes: a compressing codec takes up to {_MOST:,}")
            if len(part):
                self._encode(part, lane_of_part(split, part), pieces)
        return b"".join(pieces)

    def decode(self, block: bytes | memoryview, outs: Sequence[Bytes], lanes: Sequence[Lane]) -> None:
        """Fill `outs` from a block; `DamagedError` if it does not hold exactly that.

        Whatever the block says, memory beside `outs` stays within a few times the largest of them.
        """
        data, at = memoryview(block), 0
        for out, split in zip(outs, lanes, strict=True):
            if len(out):
                at = self._decode(data, at, out, lane_of_part(split, out))
        if at != len(data):
            raise DamagedError(f"{len(data) - at} bytes after the last part")

    def _encode(self, part: Bytes, split: Lane, pieces: list[Any]) -> None:
        """Append the encoded part to `pieces`."""
        raise NotImplementedError

    def _decode(self, data: memoryview, at: int, out: Bytes, split: Lane) -> int:
        """Fill `out` from the encoded part that begins at `at`; where it ends."""
        raise NotImplementedError


_U32 = struct.Struct("<I")
_COMPRESSED = 1 << 31
_HAS_BITMAP = 1
_ZEROS_WORTH_A_BITMAP = 0.08
_WORTH_BROTLI = 0.95
_WINDOW = 18
_WIDE_WINDOWS = frozenset(range(5, 16, 2))  # first four bits of a brotli stream: a window over 2^18 bytes
_WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
# The header of a Blosc2 chunk: version, zstd's version, flags, type size, bytes held, bytes of a part of
# them, bytes of the chunk; six filters, codec, its setting, six filter settings, a reserved byte; more flags.
_HEADER = struct.Struct("<BBBBIII15sB")
_CHUNK_VERSION = 5
_CHUNK_FLAGS = (0x07, 0x85, 0x87, 0x95, 0x97)  # they say: a long header, zstd or raw, planes apart or not
_PIPELINE = bytes([1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0])  # shuffle, then zstd
_ZEROS = 0x10  # the chunk is zeros, and has no bytes after the header
_WORTH_THREADS = 1 << 19  # bytes of a part


def codec(name: str, quality: int = 1) -> Codec:
    """The codec of a name: ``brotli``, ``blosc2`` or ``none``. `OptionError` if blosc2 is not installed.

    The quality of brotli is 0 to 11, and the level of blosc2 0 to 9. Decoding does not need it.
    """
    if name == "none":
        return Plain()
    if name == "brotli":
        return Brotli(quality)
    if name == "blosc2":
        return Blosc2(quality)
    raise ValueError(f"no codec is called {name!r}")


class Plain(Codec):
    """The bytes as they are."""

    name = "none"

    def encode(self, parts: Sequence[Bytes], lanes: Sequence[Lane]) -> bytes:
        """The bytes of the parts, one after another."""
        return b"".join(part.data for part in parts)

    def decode(self, block: bytes | memoryview, outs: Sequence[Bytes], lanes: Sequence[Lane]) -> None:
        """Fill `outs` from a block; `DamagedError` if it does not hold exactly that."""
        data, at = np.frombuffer(block, np.uint8), 0
        if len(data) != sum(map(len, outs)):
            raise DamagedError(f"a block of {len(data)} bytes for {sum(map(len, outs))}")
        for out in outs:
            out[:] = data[at : at + len(out)]
            at += len(out)


class Brotli(Codec):
    """Byte planes, each of them brotli or raw, without the zeros if there are many."""

    name = "brotli"

    def __init__(self, quality: int = 1) -> None:
        self._quality = quality

    def _encode(self, part: Bytes, split: Lane, pieces: list[Any]) -> None:
        width, rotated = split
        words: Array = part.view(_WORDS[width])
        full = int(np.count_nonzero(words))
        if len(words) - full > _ZEROS_WORTH_A_BITMAP * len(words):
            nonzero = words != 0
            words = words[nonzero]
            pieces += (b"\x01", _U32.pack(full))
            self._write(np.packbits(nonzero, bitorder="little"), pieces)
        else:
            pieces.append(b"\x00")
        if rotated:
            words = (words << 1) | (words >> (8 * width - 1))
        planes = words.view(np.uint8).reshape(-1, width)
        for number in range(width):
            self._write(np.ascontiguousarray(planes[:, number]), pieces)

    def _decode(self, data: memoryview, at: int, out: Bytes, split: Lane) -> int:
        width, rotated = split
        count = len(out) // width
        flags = data[at] if at < len(data) else -1
        if flags == 0:
            return _join(data, at + 1, out, count, width, rotated)
        if flags != _HAS_BITMAP or at + 5 > len(data):
            raise DamagedError(f"flags {flags}")
        (full,) = _U32.unpack_from(data, at + 1)
        bitmap, at = _stream(data, at + 5, (count + 7) // 8)
        nonzero = np.unpackbits(bitmap, count=count, bitorder="little").view(np.bool_)
        if full != np.count_nonzero(nonzero) or (count % 8 and bitmap[-1] >> count % 8):
            raise DamagedError(f"a bitmap that is not of {full} in {count} elements")
        packed = np.empty(full * width, np.uint8)
        at = _join(data, at, packed, full, width, rotated)
        words: Array = out.view(_WORDS[width])
        words.fill(0)
        words[nonzero] = packed.view(_WORDS[width])
        return at

    def _write(self, plane: Bytes, pieces: list[Any]) -> None:
        # The sample is the whole plane: brotli passes noise on at gigabytes a second.
        packed = brotli.compress(plane.data, quality=self._quality, lgwin=_WINDOW)
        if len(packed) <= _WORTH_BROTLI * len(plane):
            pieces += (_U32.pack(_COMPRESSED | len(packed)), packed)
        else:
            pieces += (_U32.pack(len(plane)), plane.data)


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


def _join(data: memoryview, at: int, out: Bytes, count: int, width: int, rotated: bool) -> int:
    """Fill `out` with the elements whose planes begin at `at`; where they end."""
    table = out.reshape(-1, width)
    for number in range(width):
        table[:, number], at = _stream(data, at, count)
    if rotated:
        words: Array = out.view(_WORDS[width])
        signs = words << (8 * width - 1)
        words >>= 1
        words |= signs
    return at


def _stream(data: memoryview, at: int, size: int) -> tuple[Bytes, int]:
    """The `size` bytes that the stream at `at` holds, and where it ends."""
    begin = at + 4
    if begin > len(data):
        raise DamagedError("a block that ends too early")
    (head,) = _U32.unpack_from(data, at)
    stored = head & (_COMPRESSED - 1)
    end = begin + stored
    if end > len(data):
        raise DamagedError("a block that ends too early")
    if head < _COMPRESSED:
        if stored != size:
            raise DamagedError(f"{stored} raw bytes for {size}")
        return np.frombuffer(data[begin:end], np.uint8), end
    if not 0 < stored < size or data[begin] & 0xF in _WIDE_WINDOWS:
        raise DamagedError(f"a brotli stream of {stored} bytes for {size}, or one with too large a window")
    decompressor = brotli.Decompressor()
    try:
        # The limit is one byte too large: at the limit, brotli may stop without having seen the end.
        found = decompressor.process(data[begin:end], output_buffer_limit=size + 1)
    except brotli.error as error:
        raise DamagedError(str(error)) from None
    if len(found) != size or not decompressor.is_finished():
        raise DamagedError(f"a brotli stream that does not hold {size} bytes")
    return np.frombuffer(found, np.uint8), end


def _chunk(data: memoryview, at: int, size: int, width: int) -> tuple[memoryview, int]:
    """The chunk at `at`, whose header is one that `Blosc2` writes for `size` bytes, and where it ends."""
    begin = at + 4
    if begin + _HEADER.size > len(data):
        raise DamagedError("a block that ends too early")
    (stored,) = _U32.unpack_from(data, at)
    end = begin + stored
    version, _, flags, typesize, count, part, length, pipeline, special = _HEADER.unpack_from(data, begin)
    # The library obeys headers: they could name filters and codecs that it would go and load.
    if (
        stored != length
        or end > len(data)
        or (version, typesize, count, pipeline) != (_CHUNK_VERSION, width, size, _PIPELINE)
        or flags not in _CHUNK_FLAGS
        or not 0 < part <= size
        or special not in (0, _ZEROS)
        or (special == _ZEROS and stored != _HEADER.size)
    ):
        raise DamagedError(f"not a chunk of {size} bytes")
    return data[begin:end], end
