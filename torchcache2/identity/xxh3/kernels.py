"""XXH3-128 of many rows of the same size at once, as Triton kernels.

The algorithm is XXH3 with 128 bits and without a seed, for inputs of more than 240 bytes, after the xxHash
specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). It has eight accumulators of
64 bits. Each 64 bytes of input are a stripe, and each 16 stripes a block. What a block adds to the
accumulators depends on its data alone, and only the scramble that follows depends on the block before it. So
`block_sums` reads all blocks of all rows in parallel, at the speed of memory. It leaves 64 bytes for each
block of 1,024, and `digests` goes through these in order. A single long row is as parallel as many short ones.

All numbers are unsigned integers of 64 bits, which wrap. Rows are read in words of 1, 2, 4 or 8 bytes:
`PARTS` of them make 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_sums", "digests"]


@triton.jit
def _words(at, mask, PARTS: tl.constexpr):
    """64 bits each, little-endian, from the addresses `at`."""
    bits: tl.constexpr = 64 // PARTS
    low: tl.constexpr = (1 << bits) - 1
    value = tl.load(at, mask=mask, other=0).to(tl.uint64) & low
    for part in tl.static_range(1, PARTS):
        more = tl.load(at + part, mask=mask, other=0).to(tl.uint64) & low
        value = value | (more << (bits * part))
    return value


@triton.jit
def _products(words, secret):
    """What words add to their own accumulators."""
    keyed = words ^ secret
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _to_neighbours(words, ROWS: tl.constexpr):
    """Words of shape (ROWS, 8), as what they add to the accumulators of their neighbours."""
    even, odd = tl.split(tl.reshape(words, [ROWS, 4, 2]))
    return tl.reshape(tl.join(odd, even), [ROWS, 8])


@triton.jit(do_not_specialize=["words_per_row", "blocks", "tiles"])
def block_sums(
    data,
    secrets,
    sums,
    words_per_row,
    blocks,
    tiles,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """What each whole block adds to the accumulators of its row: `sums` has shape (rows, blocks, 8).

    A program takes `TILE` blocks of a row, and there are `tiles` programs for each row.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    stripe = tl.arange(0, 16)
    lane = tl.arange(0, 8)
    within = stripe[:, None] * 8 + lane[None, :]
    place = block[:, None, None] * 128 + within[None, :, :]
    is_there = block < blocks
    words = _words(data + row * words_per_row + place * PARTS, is_there[:, None, None], PARTS)
    secret = tl.load(secrets + within).to(tl.uint64)
    own = tl.sum(_products(words, secret[None, :, :]), 1)
    added = own + _to_neighbours(tl.sum(words, 1), TILE)
    target = sums + (row * blocks + block)[:, None] * 8 + lane[None, :]
    tl.store(target, added.to(tl.int64, bitcast=True), mask=is_there[:, None])


@triton.jit
def _folded(accumulators, secret, ROWS: tl.constexpr):
    """Products of 128 bits of pairs of accumulators, folded to 64 bits and added up, of shape (ROWS,)."""
    one, other = tl.split(tl.reshape(accumulators ^ secret[None, :], [ROWS, 4, 2]))
    return tl.sum((one * other) ^ tl.umulhi(one, other), 1)


@triton.jit
def _avalanche(value):
    value = (value ^ (value >> 37)) * 0x165667919E3779F9
    return value ^ (value >> 32)


@triton.jit
def _store_big_endian(target, value, mask):
    byte = tl.arange(0, 8)
    shifted = value[:, None] >> (56 - 8 * byte).to(tl.uint64)[None, :]
    tl.store(target[:, None] + byte[None, :], (shifted & 0xFF).to(tl.uint8), mask=mask[:, None])


@triton.jit(do_not_specialize=["rows", "size", "blocks"])
def digests(
    data,
    secrets,
    sums,
    out,
    rows,
    size,
    blocks,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The digests of rows of `size` bytes, from their `block_sums` and what is behind their last whole block.

    `out` has 16 bytes for each row. A program takes `TILE` rows.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = row < rows
    stripe = tl.arange(0, 16)
    lane = tl.arange(0, 8)
    accumulators = tl.load(secrets + 160 + lane).to(tl.uint64)[None, :] + tl.zeros([TILE, 8], tl.uint64)
    scramble = tl.load(secrets + 128 + lane).to(tl.uint64)[None, :]
    at = sums + row[:, None] * blocks * 8 + lane[None, :]
    for _ in range(blocks):
        accumulators += tl.load(at, mask=is_there[:, None], other=0).to(tl.uint64)
        accumulators = (accumulators ^ (accumulators >> 47) ^ scramble) * 0x9E3779B1
        at += 8

    # Behind the last whole block: whole stripes, and then the last 64 bytes, which may overlap them.
    start = data + row * (size // (8 // PARTS))
    behind = blocks.to(tl.int64) * 1024
    stripes = (size - 1 - behind) // 64
    within = stripe[:, None] * 8 + lane[None, :]
    is_read = (stripe < stripes)[None, :, None] & is_there[:, None, None]
    words = _words(start[:, None, None] + (behind // 8 + within)[None, :, :] * PARTS, is_read, PARTS)
    secret = tl.load(secrets + within).to(tl.uint64)
    own = tl.sum(tl.where(is_read, _products(words, secret[None, :, :]), 0), 1)
    final = (size - 64) // (8 // PARTS) + lane * PARTS
    last = _words(start[:, None] + final[None, :], is_there[:, None], PARTS)
    own += _products(last, tl.load(secrets + 136 + lane).to(tl.uint64)[None, :])
    accumulators += own + _to_neighbours(tl.sum(words, 1) + last, TILE)

    length = size.to(tl.uint64)
    low = _folded(accumulators, tl.load(secrets + 144 + lane).to(tl.uint64), TILE)
    high = _folded(accumulators, tl.load(secrets + 152 + lane).to(tl.uint64), TILE)
    low = _avalanche(low + length * 0x9E3779B185EBCA87)
    high = _avalanche(high + ((length * 0xC2B2AE3D27D4EB4F) ^ 0xFFFFFFFFFFFFFFFF))
    _store_big_endian(out + row * 16, high, is_there)
    _store_big_endian(out + row * 16 + 8, low, is_there)
