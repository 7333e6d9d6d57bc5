"""XXH3-128 of many rows at once, as Triton kernels.

The algorithm is XXH3 with 128 bits and without a seed, for inputs of more than 240 bytes, after the xxHash
specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). It has eight accumulators of
64 bits. Each 64 bytes of input are a stripe, and each 16 stripes a block. The amount that a block adds to the
accumulators depends only on its data; just the following scramble depends on earlier blocks. So `block_sums`
reads all blocks of all rows in parallel, at the speed of memory, and writes 64 bytes for each block of 1,024;
`digests` then processes these in order. One long row is as parallel as many short ones.

The rows are those of one array, of `size` bytes each, with `blocks` whole blocks before the last one. They
are read in words of 1, 2, 4 or 8 bytes; `parts` words make 64 bits. All numbers but addresses and positions
are unsigned 64-bit integers, which wrap.

`secrets` are the 168 words that `torchcache2.identity.xxh3` makes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles these functions, so Python's types do not apply to their parameters.

import triton
import triton.language as tl


@triton.jit
def _words(at, mask, parts: tl.constexpr):
    """64 bits each, little-endian, from the addresses `at`."""
    bits: tl.constexpr = 64 // parts
    low: tl.constexpr = (1 << bits) - 1
    value = tl.load(at, mask=mask, other=0).to(tl.uint64) & low
    for part in tl.static_range(1, parts):
        more = tl.load(at + part, mask=mask, other=0).to(tl.uint64) & low
        value = value | (more << (bits * part))
    return value


@triton.jit
def _products(words, secret):
    """The amounts that words add to their own accumulators."""
    keyed = words ^ secret
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _stripes(at, secrets, lane, count, mask, tile: tl.constexpr, parts: tl.constexpr):
    """The amounts that the first `count` stripes of blocks add to their own and neighbouring accumulators.

    `at`, of shape (tile, 8), has the addresses of the first stripes. The results have the same shape.
    """
    own = tl.zeros([tile, 8], tl.uint64)
    words = tl.zeros([tile, 8], tl.uint64)
    for stripe in tl.static_range(16):
        is_read = mask & (stripe < count)
        word = _words(at + stripe * 8 * parts, is_read, parts)
        secret = tl.load(secrets + stripe * 8 + lane).to(tl.uint64)
        own += tl.where(is_read, _products(word, secret), 0)
        words += word
    return own, words


@triton.jit
def _to_neighbours(words, tile: tl.constexpr):
    """Swap neighbouring words of shape (tile, 8), as each is added to its neighbour's accumulator."""
    even, odd = tl.split(tl.reshape(words, [tile, 4, 2]))
    return tl.reshape(tl.join(odd, even), [tile, 8])


@triton.jit(do_not_specialize=["data", "secrets", "sums", "size", "blocks", "total"])
def block_sums(data, secrets, sums, size, blocks, total, parts: tl.constexpr, tile: tl.constexpr):
    """The amounts that each whole block adds to its row's accumulators: `sums` has shape (total, 8).

    A program processes `tile` of the `total` blocks of all rows.
    """
    block = (tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile))[:, None]
    lane = tl.arange(0, 8)[None, :]
    is_there = block < total
    start = data + (block // blocks) * (size // (8 // parts))
    own, words = _stripes(
        start + (block % blocks * 128 + lane) * parts, secrets, lane, 16, is_there, tile, parts
    )
    added = own + _to_neighbours(words, tile)
    tl.store(sums + block * 8 + lane, added.to(tl.int64, bitcast=True), mask=is_there)


@triton.jit
def _folded(accumulators, secret, tile: tl.constexpr):
    """The 128-bit products of pairs of accumulators, folded to 64 bits and added up, of shape (tile,)."""
    one, other = tl.split(tl.reshape(accumulators ^ secret, [tile, 4, 2]))
    return tl.sum((one * other) ^ tl.umulhi(one, other), 1)


@triton.jit
def _avalanche(value):
    value = (value ^ (value >> 37)) * 0x165667919E3779F9
    return value ^ (value >> 32)


@triton.jit
def _store_big_endian(at, value, mask):
    byte = tl.arange(0, 8)[None, :]
    shifted = value[:, None] >> (56 - 8 * byte).to(tl.uint64)
    tl.store(at + byte, (shifted & 0xFF).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["data", "secrets", "sums", "out", "rows", "size", "blocks"])
def digests(
    data, secrets, sums, out, rows, size, blocks, parts: tl.constexpr, tile: tl.constexpr, ahead: tl.constexpr
):
    """The digests of rows, from their `block_sums` and the bytes after their last whole block.

    `out` has 16 bytes for each row. A program processes `tile` rows, and reads the sums of `ahead` blocks at
    once, to wait less often for memory.
    """
    row = (tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile))[:, None]
    lane = tl.arange(0, 8)[None, :]
    is_there = (row < rows) & (lane >= 0)
    whole = row * 0 + blocks
    accumulators = tl.load(secrets + 160 + lane).to(tl.uint64) + tl.zeros([tile, 8], tl.uint64)
    scramble = tl.load(secrets + 128 + lane).to(tl.uint64)
    at = sums + row * blocks * 8 + lane
    for done in range(0, blocks, ahead):
        for step in tl.static_range(ahead):
            is_block = is_there & (done + step < whole)
            mixed = accumulators + tl.load(at + step * 8, mask=is_block, other=0).to(tl.uint64)
            mixed = (mixed ^ (mixed >> 47) ^ scramble) * 0x9E3779B1
            accumulators = tl.where(is_block, mixed, accumulators)
        at += ahead * 8

    # After the last whole block: whole stripes, then the last 64 bytes, which may overlap them.
    start = data + row * (size // (8 // parts))
    stripes = (row * 0 + size - 1 - whole * 1024) // 64
    behind = start + (whole * 128 + lane) * parts
    own, words = _stripes(behind, secrets, lane, stripes, is_there, tile, parts)
    last = _words(start + (size - 64) // (8 // parts) + lane * parts, is_there, parts)
    own += _products(last, tl.load(secrets + 136 + lane).to(tl.uint64))
    accumulators += own + _to_neighbours(words + last, tile)

    count = tl.zeros([tile], tl.uint64) + size
    low = _folded(accumulators, tl.load(secrets + 144 + lane).to(tl.uint64), tile)
    high = _folded(accumulators, tl.load(secrets + 152 + lane).to(tl.uint64), tile)
    low = _avalanche(low + count * 0x9E3779B185EBCA87)
    high = _avalanche(high + ((count * 0xC2B2AE3D27D4EB4F) ^ 0xFFFFFFFFFFFFFFFF))
    _store_big_endian(out + row * 16, high, row < rows)
    _store_big_endian(out + row * 16 + 8, low, row < rows)


INTERPRETED = not isinstance(digests, triton.JITFunction)  # with TRITON_INTERPRET=1, on the CPU
