"""The bytes of a block: zero bitmap, byte planes, brotli, blosc2; docs/format.md specifies them.

A block is one or more rows: for each leaf a part, the bytes of its elements. Rows, dtypes and sizes are known
from elsewhere, and are not in the block. Leaves of one lane are compressed together, so that a row takes one
stream whatever its leaves are. Checksums are not the codec's task: a changed block raises
`DamagedError`, or decodes to wrong bytes.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import brotli  # type: ignore[import-untyped]
import numpy as np
import torch

from torchcache2.core.errors import DamagedError, require
from torchcache2.core.keys import Array, Bytes, Bytes2D

MOST_PART = (1 << 31) - 64  # most bytes of a lane in one block: sizes have 31 bits, and chunks a header
_U32 = struct.Struct("<I")
_WORDS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class Lane(NamedTuple):
    """How the bytes of a leaf are split into planes: one for each of the `width` bytes of an element.

    The width is 1, 2, 4 or 8. If elements are `rotated` first, the sign bit moves to the end, so that the
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
    # Their exponent shares a byte with the mantissa anyway, so rotation saves nothing.
    torch.float16: Lane(2, False),
    torch.complex32: Lane(2, False),
    **{dtype: Lane(2, False) for dtype in (torch.int16, torch.uint16)},
    **{dtype: Lane(4, False) for dtype in (torch.int32, torch.uint32)},
    **{dtype: Lane(8, False) for dtype in (torch.int64, torch.uint64)},
}


def lane(dtype: torch.dtype) -> Lane:
    """How to split a leaf stored as `dtype`; unknown dtypes are not split."""
    return _LANES.get(dtype, Lane(1, False))


class _Group(NamedTuple):
    """The leaves of a block with the same lane; their parts are joined, in `size` bytes."""

    lane: Lane
    leaves: list[int]
    size: int


def _groups(lanes: Sequence[Lane], sizes: Sequence[int]) -> list[_Group]:
    """The leaves by lane, in order of first appearance; without leaves that have no bytes."""
    found: dict[Lane, list[int]] = {}
    for leaf, (split, size) in enumerate(zip(lanes, sizes, strict=True)):
        if size:
            found.setdefault(split if size % split.width == 0 else Lane(1, False), []).append(leaf)
    return [_Group(split, leaves, sum(sizes[leaf] for leaf in leaves)) for split, leaves in found.items()]


@dataclasses.dataclass(frozen=True)
class Plane:
    """A byte plane of many elements, made when it is needed: all planes take as much memory as the elements.

    The lowest plane has number 0.
    """

    words: Array
    rotated: bool
    number: int

    def __len__(self) -> int:
        return len(self.words)

    def make(self) -> Bytes:
        """The bytes of the plane."""
        shift = 8 * self.number - self.rotated
        made = np.empty(len(self), np.uint8)
        for start in range(0, len(self), _AT_ONCE):
            some = self.words[start : start + _AT_ONCE]
            if shift < 0:
                some = (some << 1) | (some >> (8 * some.itemsize - 1))
            elif shift:
                some = some >> shift
            made[start : start + len(some)] = some
        return made


Piece = bytes | Bytes | Plane
Plan = frozenset[tuple[Lane, int]]  # the pieces to compress, by lane and number


class Codec:
    """Converts the parts of a block, one for each leaf, to bytes and back. Thread-safe.

    Parts are contiguous, uint8 of shape ``(bytes,)``.
    """

    name: str

    def plan(self, blocks: Iterable[Sequence[Bytes]], lanes: Sequence[Lane]) -> Plan:
        """Decide what to compress in blocks like these."""
        return frozenset()

    def encode(self, parts: Sequence[Bytes], lanes: Sequence[Lane], plan: Plan | None = None) -> bytes:
        """The block of these parts, as one; see `pieces`."""
        return b"".join(map(buffer, self.pieces(parts, lanes, plan)))

    def pieces(
        self, parts: Sequence[Bytes], lanes: Sequence[Lane], plan: Plan | None = None
    ) -> Sequence[Piece]:
        """The block of these parts, in pieces; `ValueError` if a lane's parts have 2 GiB or more.

        The `plan` saves trying what compresses well; decoding does not need it. Pieces may be views of parts.
        """
        raise NotImplementedError

    def decode(self, block: bytes | memoryview, outs: Sequence[Bytes], lanes: Sequence[Lane]) -> None:
        """Fill `outs` from a block; `DamagedError` if it does not fit exactly."""
        self.decode_all([block], [out[None] for out in outs], lanes)

    def decode_all(
        self, blocks: Sequence[bytes | memoryview], outs: Sequence[Bytes2D], lanes: Sequence[Lane]
    ) -> None:
        """Fill `outs` from n blocks of equal sizes: for each leaf, uint8 ``(n, bytes of its part)``.

        `DamagedError` if a block does not fit exactly. Even for damaged blocks, memory besides `outs` is at
        most a few times their size.
        """
        raise NotImplementedError


class Plain(Codec):
    """The bytes as they are."""

    name = "none"

    def pieces(
        self, parts: Sequence[Bytes], lanes: Sequence[Lane], plan: Plan | None = None
    ) -> Sequence[Piece]:
        """The parts."""
        return parts

    def decode_all(
        self, blocks: Sequence[bytes | memoryview], outs: Sequence[Bytes2D], lanes: Sequence[Lane]
    ) -> None:
        """Split the blocks."""
        size = sum(out.shape[1] for out in outs)
        for i, block in enumerate(blocks):
            data, at = np.frombuffer(block, np.uint8), 0
            if len(data) != size:
                raise DamagedError(f"a block of {len(data)} bytes for {size}")
            for out in outs:
                out[i] = data[at : at + out.shape[1]]
                at += out.shape[1]


def buffer(piece: Piece) -> memoryview:
    """The bytes of a piece."""
    if isinstance(piece, bytes):
        return memoryview(piece)
    return (piece.make() if isinstance(piece, Plane) else piece).data


def _joined(parts: Sequence[Bytes], group: _Group) -> Bytes:
    """The bytes of a group."""
    if group.size > MOST_PART:
        raise ValueError(f"a part of {group.size:,} bytes: a compressing codec takes up to {MOST_PART:,}")
    if len(group.leaves) == 1:
        return parts[group.leaves[0]]
    return np.concatenate([parts[leaf] for leaf in group.leaves])


# Brotli. A block begins with a head for each group: its number of nonzero elements (or a mark for no bitmap),
# and which of its pieces are compressed. The pieces of a group are the bitmap and the byte planes of its
# elements, without zeros if there is a bitmap. After the heads come all raw pieces, then the compressed ones
# as one stream.

_HEAD = struct.Struct("<IH")
_NO_BITMAP = 0xFFFFFFFF
_BITMAP = 15  # the bitmap's number and flag bit; planes are numbered from 0
_ZEROS_WORTH_A_BITMAP = 0.08
_WORTH_BROTLI = 0.95
_WINDOW = 18
_AT_ONCE = 1 << 16  # elements that are split into planes, or joined: they stay in the CPU cache
_WIDE_WINDOWS = frozenset(range(5, 16, 2))  # first four bits of brotli streams with a window over 2^18 bytes


class _Spans(NamedTuple):
    """Where a block's pieces are, according to its heads.

    `groups` has, for each group, the number of nonzero elements or -1, and the spans of its pieces (the
    bitmap first): whether it is in the stream, its start and end. Raw pieces end at `raw_end`; the stream
    decompresses to `packed` bytes.
    """

    groups: list[tuple[int, list[tuple[bool, int, int]]]]
    raw_end: int
    packed: int


class Brotli(Codec):
    """Byte planes, without zeros if there are many; those that compress well form one brotli stream."""

    name = "brotli"

    def __init__(self, quality: int = 1) -> None:
        self._quality = quality

    def plan(self, blocks: Iterable[Sequence[Bytes]], lanes: Sequence[Lane]) -> Plan:
        """The pieces that get at least 5 % smaller."""
        sizes: dict[tuple[Lane, int], tuple[int, int]] = {}
        for parts in blocks:
            for split, _, pieces in _pieces(parts, lanes):
                for number, piece in pieces:
                    packed = brotli.compress(buffer(piece), quality=self._quality, lgwin=_WINDOW)
                    before, after = sizes.get((split, number), (0, 0))
                    sizes[split, number] = before + len(piece), after + len(packed)
        return frozenset(one for one, (before, after) in sizes.items() if after <= _WORTH_BROTLI * before)

    def pieces(
        self, parts: Sequence[Bytes], lanes: Sequence[Lane], plan: Plan | None = None
    ) -> Sequence[Piece]:
        """Heads, raw pieces, and the stream of the others."""
        if plan is None:
            plan = self.plan([parts], lanes)
        heads, stream = [], []
        raw: list[Piece] = []
        compressor = None
        for split, full, pieces in _pieces(parts, lanes):
            flags = 0
            for number, piece in pieces:
                if (split, number) in plan and len(piece):
                    if compressor is None:
                        compressor = brotli.Compressor(quality=self._quality, lgwin=_WINDOW)
                    else:  # each plane has its own statistics, so give it its own meta-blocks
                        stream.append(compressor.flush())
                    stream.append(compressor.process(buffer(piece)))
                    flags |= 1 << number
                else:
                    raw.append(piece)
            heads.append(_HEAD.pack(full, flags))
        if compressor is not None:
            stream.append(compressor.finish())
        return [b"".join(heads), *raw, *stream]

    def decode_all(
        self, blocks: Sequence[bytes | memoryview], outs: Sequence[Bytes2D], lanes: Sequence[Lane]
    ) -> None:
        """Decompress each block, and join the planes of all of them."""
        groups = _groups(lanes, [out.shape[1] for out in outs])
        size = len(groups) * _HEAD.size
        data = [memoryview(block) for block in blocks]
        heads = [bytes(one[:size]) for one in data]
        known = {head: _spans(head, groups) for head in set(heads)}
        spans = [known[head] for head in heads]
        streams = [_stream(one, span) for one, span in zip(data, spans, strict=True)]
        for number, group in enumerate(groups):
            full, pieces = spans[0].groups[number]
            if len(known) == 1 and full < 0:  # all pieces have the same places
                raw = _table([one[size : spans[0].raw_end] for one in data])
                packed = _table(streams)
                planes = [packed[:, a:b] if p else raw[:, a - size : b - size] for p, a, b in pieces]
                _assemble(group, outs, list(range(len(data))), planes, None)
                continue
            for has_bitmap in (False, True):
                rows = [i for i, span in enumerate(spans) if (span.groups[number][0] >= 0) is has_bitmap]
                if rows:
                    found = [spans[i].groups[number] for i in rows]
                    buffers = [
                        [(streams[i] if p else data[i])[a:b] for p, a, b in some]
                        for i, (_, some) in zip(rows, found, strict=True)
                    ]
                    columns = [
                        np.frombuffer(b"".join(column), np.uint8) for column in zip(*buffers, strict=True)
                    ]
                    _assemble(group, outs, rows, columns, [full for full, _ in found] if has_bitmap else None)


def _table(buffers: list[memoryview]) -> Bytes2D:
    """Buffers of one size as the rows of an array."""
    data = b"".join(buffers) if len(buffers) > 1 else buffers[0]
    return np.frombuffer(data, np.uint8).reshape(len(buffers), -1)


def _stream(data: memoryview, spans: _Spans) -> memoryview:
    """Decompress a block's stream; `DamagedError` if the block's size contradicts its heads."""
    if spans.raw_end > len(data) or (not spans.packed and spans.raw_end != len(data)):
        raise DamagedError(f"a block of {len(data)} bytes")
    return _decompressed(data[spans.raw_end :], spans.packed) if spans.packed else data[:0]


def _pieces(
    parts: Sequence[Bytes], lanes: Sequence[Lane]
) -> Iterator[tuple[Lane, int, list[tuple[int, Piece]]]]:
    """For each group its lane, number of nonzero elements or `_NO_BITMAP`, and numbered pieces."""
    for group in _groups(lanes, [len(part) for part in parts]):
        width, rotated = group.lane
        words: Array = _joined(parts, group).view(_WORDS[width])
        pieces: list[tuple[int, Piece]] = []
        full = int(np.count_nonzero(words))
        if len(words) - full > _ZEROS_WORTH_A_BITMAP * len(words):
            nonzero = words != 0
            words = words[nonzero]
            pieces.append((_BITMAP, np.packbits(nonzero, bitorder="little")))
        else:
            full = _NO_BITMAP
        if len(words) > _AT_ONCE:
            pieces += [(number, Plane(words, rotated, number)) for number in range(width)]
        else:
            if rotated:
                words = (words << 1) | (words >> (8 * width - 1))
            pieces += enumerate(np.ascontiguousarray(words.view(np.uint8).reshape(-1, width).T))
        yield group.lane, full, pieces


def _spans(head: bytes, groups: Sequence[_Group]) -> _Spans:
    """Parse the heads of a block; `DamagedError` if they are impossible."""
    if len(head) < len(groups) * _HEAD.size:
        raise DamagedError("a block that ends too early")
    raw_end, packed, found = len(head), 0, []
    for group, (full, flags) in zip(groups, _HEAD.iter_unpack(head), strict=True):
        width, count = group.lane.width, group.size // group.lane.width
        has_bitmap = full != _NO_BITMAP
        if flags & ~((1 << width) - 1 | has_bitmap << _BITMAP) or (has_bitmap and full > count):
            raise DamagedError(f"{full} of {count} elements, and flags {flags}")
        pieces = []
        for piece in ([_BITMAP] if has_bitmap else []) + list(range(width)):
            size = (count + 7) // 8 if piece == _BITMAP else full if has_bitmap else count
            if is_packed := bool(flags >> piece & 1):
                if size == 0:
                    raise DamagedError("an empty piece among the compressed ones")
                begin, packed = packed, packed + size
            else:
                begin, raw_end = raw_end, raw_end + size
            pieces.append((is_packed, begin, begin + size))
        found.append((full if has_bitmap else -1, pieces))
    return _Spans(found, raw_end, packed)


def _assemble(
    group: _Group,
    outs: Sequence[Bytes2D],
    rows: list[int],
    pieces: list[Array],
    fulls: list[int] | None,
) -> None:
    """Fill rows of a group's outputs from the pieces of their blocks, block by block."""
    (width, rotated), count = group.lane, group.size // group.lane.width
    whole = outs[group.leaves[0]]
    is_direct = len(group.leaves) == 1 and len(rows) == len(whole)
    target = whole if is_direct else np.empty((len(rows), group.size), np.uint8)
    words: Array = target.view(_WORDS[width])
    if fulls is None:
        _merge([piece.reshape(-1, count) for piece in pieces], rotated, words)
    else:
        bitmaps = pieces[0].reshape(len(rows), -1)
        bits = np.unpackbits(bitmaps, axis=1, bitorder="little")
        nonzero = bits[:, :count].view(np.bool_)
        if bits[:, count:].any() or nonzero.sum(axis=1).tolist() != fulls:
            raise DamagedError(f"bitmaps that are not of {fulls[:8]} elements")
        packed: Array = np.empty(sum(fulls), words.dtype)
        _merge(pieces[1:], rotated, packed)
        words.fill(0)
        words[nonzero] = packed
    if not is_direct:
        at = 0
        for leaf in group.leaves:
            size = outs[leaf].shape[1]
            outs[leaf][rows] = target[:, at : at + size]
            at += size


def _merge(planes: Sequence[Array], rotated: bool, words: Array) -> None:
    """Fill `words` from their byte planes, the lowest first."""
    for start in range(0, words.shape[-1], _AT_ONCE):
        some = words[..., start : start + _AT_ONCE]
        np.copyto(some, planes[-1][..., start : start + _AT_ONCE])
        for plane in planes[-2::-1]:
            some <<= 8
            some |= plane[..., start : start + _AT_ONCE]
        if rotated:
            signs = some << (8 * words.itemsize - 1)
            some >>= 1
            some |= signs


def _decompressed(stream: memoryview, size: int) -> memoryview:
    """Decompress a brotli stream to `size` bytes."""
    if not len(stream) or stream[0] & 0xF in _WIDE_WINDOWS:
        raise DamagedError(f"no brotli stream for {size} bytes, or one with too large a window")
    decompressor = brotli.Decompressor()
    try:
        # One byte more than needed: at the limit, brotli may stop before the end of the stream.
        found = decompressor.process(stream, output_buffer_limit=size + 1)
    except brotli.error as error:
        raise DamagedError(str(error)) from None
    if len(found) != size or not decompressor.is_finished():
        raise DamagedError(f"a brotli stream that does not hold {size} bytes")
    return memoryview(found)


# Blosc2. For each group, a block has the chunk's size, u32, and the chunk; or, if that would be no smaller,
# the raw size with bit 31 set, and the raw bytes. The header of a chunk: version, zstd's version, flags, type
# size, bytes held, bytes of a part of them, bytes of the chunk; six filters, codec, its setting, six filter
# settings, a reserved byte; more flags.
_HEADER = struct.Struct("<BBBBIII15sB")
_CHUNK_VERSION = 5
_CHUNK_FLAGS = (0x07, 0x85, 0x87, 0x95, 0x97)  # a long header, zstd or raw, split planes or not
_PIPELINE = bytes([1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0])  # shuffle, then zstd
_ZEROS = 0x10  # all zeros: no bytes after the header
_RAW = 1 << 31
_WORTH_THREADS = 1 << 19  # bytes of a part


class Blosc2(Codec):
    """Blosc2 chunks; needs the extra ``blosc2``."""

    name = "blosc2"

    def __init__(self, level: int = 1) -> None:
        # Imported only if used, as that takes 0.3 s and two threads.
        self._library = require("blosc2", "blosc2", "compression='blosc2'")
        self._level = level

    def pieces(
        self, parts: Sequence[Bytes], lanes: Sequence[Lane], plan: Plan | None = None
    ) -> Sequence[Piece]:
        """A chunk for each group."""
        library = self._library
        pieces: list[Piece] = []
        for group in _groups(lanes, [len(part) for part in parts]):
            data = _joined(parts, group)
            chunk = library.compress2(
                data,
                typesize=group.lane.width,
                clevel=self._level,
                codec=library.Codec.ZSTD,
                filters=[library.Filter.SHUFFLE],
                filters_meta=[0],
                **_threads(len(data)),
            )
            if len(chunk) < len(data):
                pieces += [_U32.pack(len(chunk)), chunk]
            else:
                pieces += [_U32.pack(len(data) | _RAW), data]
        return pieces

    def decode_all(
        self, blocks: Sequence[bytes | memoryview], outs: Sequence[Bytes2D], lanes: Sequence[Lane]
    ) -> None:
        """Decompress each chunk."""
        groups = _groups(lanes, [out.shape[1] for out in outs])
        for i, block in enumerate(blocks):
            data, at = memoryview(block), 0
            for group in groups:
                whole = outs[group.leaves[0]][i]
                target = whole if len(group.leaves) == 1 else np.empty(group.size, np.uint8)
                at = self._decode(data, at, target, group.lane.width)
                start = 0
                for leaf in group.leaves if target is not whole else []:
                    outs[leaf][i] = target[start : start + outs[leaf].shape[1]]
                    start += outs[leaf].shape[1]
            if at != len(data):
                raise DamagedError(f"{len(data) - at} bytes after the last part")

    def _decode(self, data: memoryview, at: int, out: Bytes, width: int) -> int:
        """Fill `out` from the group that begins at `at`; returns its end."""
        begin = at + _U32.size
        if begin > len(data):
            raise DamagedError("a block that ends too early")
        size: int = _U32.unpack_from(data, at)[0]
        if size & _RAW:
            end = begin + len(out)
            if size != len(out) | _RAW or end > len(data):
                raise DamagedError(f"raw bytes that are not {len(out)}")
            out[:] = np.frombuffer(data[begin:end], np.uint8)
            return end
        chunk = _chunk(data[begin:], size, len(out), width)
        try:
            self._library.decompress2(chunk, out, **_threads(len(out)))
        except (ValueError, RuntimeError) as error:
            raise DamagedError(str(error)) from None
        return begin + size


def _threads(size: int) -> dict[str, int]:
    """No threads for small parts, where they cost more than they save."""
    return {"nthreads": 1} if size < _WORTH_THREADS else {}


def _chunk(data: memoryview, stored: int, size: int, width: int) -> memoryview:
    """The first `stored` bytes, if they begin with a header that `Blosc2` writes for `size` bytes."""
    if not _HEADER.size <= stored <= len(data):
        raise DamagedError("a block that ends too early")
    version, _, flags, typesize, count, part, length, pipeline, special = _HEADER.unpack_from(data)
    # The library obeys headers: they could name filters and codecs to load.
    if (
        stored != length
        or (version, typesize, count, pipeline) != (_CHUNK_VERSION, width, size, _PIPELINE)
        or flags not in _CHUNK_FLAGS
        or not 0 < part <= size
        or special not in (0, _ZEROS)
        or (special == _ZEROS and stored != _HEADER.size)
    ):
        raise DamagedError(f"not a chunk of {size} bytes")
    return data[:stored]


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
