import struct
import tracemalloc

import brotli
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import warm
from torchcache2.core.errors import DamagedError
from torchcache2.files.codec import Lane, codec, lane

NAMES = ["none", "brotli", "blosc2"]
COMPRESSING = ["brotli", "blosc2"]
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
BLOCK = 8192


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def normal(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype("<f4")


def raw(array):
    """A part: the bytes of an array or tensor."""
    if isinstance(array, torch.Tensor):
        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decoded(method, block, sizes, lanes):
    outs = [np.full(size, 0xA5, np.uint8) for size in sizes]
    method.decode(block, outs, lanes)
    return [out.tobytes() for out in outs]


def check_round_trip(method, parts, lanes):
    block = method.encode(parts, lanes)
    assert type(block) is bytes
    sizes = [len(part) for part in parts]
    assert decoded(method, block, sizes, lanes) == [part.tobytes() for part in parts]
    assert decoded(method, memoryview(block), sizes, lanes) == [part.tobytes() for part in parts]
    return block


def plain(part):
    return len(brotli.compress(part.tobytes(), quality=1, lgwin=18))


# Round trips.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_round_trips(name, dtype):
    method = codec(name)
    assert lane(dtype).width in (1, dtype.itemsize, dtype.itemsize // 2)
    for shape in [(0,), (3, 0, 2), (1,), (7,), (1, 9), (5, 3, 4), (1000,)]:
        size = torch.Size(shape).numel() * dtype.itemsize
        for part in (noise(size), np.zeros(size, np.uint8), np.full(size, 255, np.uint8)):
            check_round_trip(method, [part], [lane(dtype)])


@pytest.mark.parametrize("name", NAMES)
def test_several_leaves_round_trip_and_empty_ones_take_nothing(name):
    method = codec(name)
    floats, counts, empty = raw(normal(300)), raw(np.arange(70)), np.empty(0, np.uint8)
    wide, narrow = Lane(4, True), Lane(8, False)
    block = check_round_trip(method, [empty, floats, empty, counts], [narrow, wide, wide, narrow])
    assert block == method.encode([floats, counts], [wide, narrow])
    assert check_round_trip(method, [empty], [wide]) == check_round_trip(method, [], []) == b""


LANES = [Lane(width, rotated) for width in (1, 2, 4, 8) for rotated in (False, True)]


@st.composite
def leaves(draw):
    """A part and its lane: many zeros, few values, or anything."""
    split = draw(st.sampled_from(LANES))
    element = st.one_of(
        st.just(bytes(split.width)),
        st.sampled_from([bytes([1, *[0] * (split.width - 1)]), bytes([*[0] * (split.width - 1), 0x80])]),
        st.binary(min_size=split.width, max_size=split.width),
    )
    part = b"".join(draw(st.lists(element, max_size=40))) * draw(st.sampled_from([1, 1, 30]))
    return np.frombuffer(part, np.uint8), split


@given(st.sampled_from(NAMES), st.lists(leaves(), max_size=3), st.integers(0, 9))
def test_anything_round_trips(name, drawn, quality):
    parts, lanes = [part for part, _ in drawn], [split for _, split in drawn]
    block = check_round_trip(codec(name, quality), parts, lanes)
    # How it was written does not matter to who reads it.
    assert decoded(codec(name), block, [len(p) for p in parts], lanes) == [p.tobytes() for p in parts]


@pytest.mark.parametrize("name", NAMES)
def test_parts_need_neither_alignment_nor_to_be_writable(name):
    method, split = codec(name), [lane(torch.float64)]
    buffer = np.zeros(8 * 100 + 1, np.uint8)
    buffer[1:] = raw(np.maximum(normal(200), 0))
    part = buffer[1:]
    part.flags.writeable = False
    block = check_round_trip(method, [part], split)
    target = np.zeros(8 * 100 + 2, np.uint8)
    method.decode(block, [target[1:-1]], split)
    assert target.tobytes() == b"\0" + part.tobytes() + b"\0"


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_is_not_a_multiple_of_its_width_round_trips(name):
    for size in (1, 3, 5, 1001):
        check_round_trip(codec(name), [noise(size)], [Lane(4, True)])


@pytest.mark.parametrize("name", NAMES)
def test_large_parts_round_trip(name):
    # Over the sizes at which brotli's reader and Blosc2 begin to do things in several steps.
    values = normal(300_000)
    for part in (raw(values), raw(np.maximum(values, 0)), np.zeros(1 << 20, np.uint8), noise(1 << 20)):
        check_round_trip(codec(name), [part], [lane(torch.float32)])
    # Brotli's reader gives 2^15 - 16 bytes first, then 2^16 - 16 more: the end of a stream may be just there.
    for size in (32751, 32752, 32753, 98271, 98272, 98273):
        check_round_trip(
            codec(name), [raw(np.arange(size) // 9 % 251).view("<i8").astype(np.uint8)], [Lane(1, False)]
        )


@pytest.mark.parametrize("quality", range(12))
def test_blocks_of_every_quality_are_read(quality):
    parts = [raw(np.maximum(normal(3000), 0)), raw(np.arange(3000))]
    lanes = [lane(torch.float32), lane(torch.int64)]
    block = check_round_trip(codec("brotli", quality), parts, lanes)
    assert decoded(codec("brotli"), block, [12000, 24000], lanes) == [part.tobytes() for part in parts]


# What is split how.


def test_the_exponent_is_the_last_plane():
    part = raw(np.array([1.0, -1.0, 1.5, -1.5] * 500, "<f4"))
    block = codec("brotli").encode([part], [lane(torch.float32)])
    assert block[:6] == head(None, 0, 1, 2, 3)
    planes = brotli.decompress(block[6:])
    assert len(planes) == 8000
    assert set(planes[6000:]) == {127}
    assert set(planes[:2000]) == {0, 1}


def head(full, *packed):
    """What a block begins with: how many elements are not zero, and the pieces that are in the stream."""
    return struct.pack("<IH", 0xFFFFFFFF if full is None else full, sum(1 << piece for piece in packed))


@pytest.mark.parametrize(("zeros", "flags"), [(0, 0), (80, 0), (81, 1), (1000, 1)])
def test_there_is_a_bitmap_if_over_8_percent_are_zero(zeros, flags):
    values = np.random.default_rng(0).permutation(np.where(np.arange(1000) < zeros, 0, 3 + np.arange(1000)))
    block = check_round_trip(codec("brotli"), [raw(values.astype("<i4"))], [lane(torch.int32)])
    full, packed = struct.unpack_from("<IH", block)
    assert full == (1000 - zeros if flags else 0xFFFFFFFF)
    if flags:
        sizes = {15: 125} | dict.fromkeys(range(4), full)
        raw_end = 6 + sum(size for piece, size in sizes.items() if not packed >> piece & 1)
        held = {0: block[6:raw_end], 1: brotli.decompress(block[raw_end:])}
        pieces, places = {}, {0: 0, 1: 0}
        for piece, size in sizes.items():
            kind = packed >> piece & 1
            pieces[piece], places[kind] = held[kind][places[kind] : places[kind] + size], places[kind] + size
        assert list(places.values()) == [len(held[0]), len(held[1])]
        assert pieces[15] == np.packbits(values != 0, bitorder="little").tobytes()
        full_values = raw(values[values != 0].astype("<i4")).reshape(-1, 4)
        assert [pieces[plane] for plane in range(4)] == [full_values[:, j].tobytes() for j in range(4)]


def test_a_plane_that_saves_less_than_5_percent_is_kept_raw():
    for values, is_raw in ((210, True), (160, False)):
        part = np.random.default_rng(0).integers(0, values, 100_000).astype(np.uint8) + np.uint8(1)
        saved = 1 - plain(part) / len(part)
        assert 0 < saved < 0.05 if is_raw else saved > 0.06
        block = check_round_trip(codec("brotli"), [part], [Lane(1, False)])
        assert (len(block) == len(part) + 6) is is_raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [BLOCK, 1 << 18])
def test_features_get_smaller_than_with_plain_brotli(dtype, size):
    values = torch.from_numpy(normal(size))
    for features in (values, values.relu(), torch.nn.functional.dropout(values, 0.2)):
        part = raw(features.to(dtype))[:size]
        assert len(codec("brotli").encode([part], [lane(dtype)])) < 0.95 * plain(part)


# The format: these bytes are what every later version must read.

F32, BF16, F64, I16, I32 = (
    lane(getattr(torch, n)) for n in ("float32", "bfloat16", "float64", "int16", "int32")
)
CASES = {
    "two leaves": (
        [raw(np.array([1, -2], "<i2")), raw(np.array([True, False, True]))],
        [I16, Lane(1, False)],
    ),
    "floats": ([raw(np.array([1, -1, -0.0, 1.5], "<f4"))], [F32]),
    "bfloat16": ([raw(np.array([0x3F80, 0xBF80, 0x8000], "<u2"))], [BF16]),
    "some zeros": ([raw(np.array([0, 1, 0, 0, -2, 0, 0, 0, -0.0], "<f4"))], [F32]),
    "only zeros": ([np.zeros(16, np.uint8)], [F64]),
    "counts": ([raw(np.arange(1, 65, dtype="<i4"))], [I32]),
    "repeated": ([raw(np.repeat(np.array([1, -1.5, 0.25], "<f4"), 40))], [F32]),
}
# What encoding gives too, whatever the version of a library: nothing in them is compressed.
GOLDEN_RAW = [
    ("none", "two leaves", "0100feff010001"),
    ("none", "floats", "0000803f000080bf000000800000c03f"),
    ("brotli", "two leaves", "ffffffff000002000000000001fe00ff050101"),
    ("brotli", "floats", "ffffffff00000001010000000000000000807f7f007f"),
    ("brotli", "bfloat16", "ffffffff00000001017f7f00"),
    ("brotli", "some zeros", "03000000000012010001010000000000007f8000"),
    ("brotli", "only zeros", "00000000000000"),
    ("blosc2", "floats", "100000800000803f000080bf000000800000c03f"),
]
GOLDEN = [
    *GOLDEN_RAW,
    (
        "brotli",
        "counts",
        "ffffffff0e000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a"
        "2b2c2d2e2f303132333435363738393a3b3c3d3e3f40831f00002000d800ce71d67036800b70583a03f801000002800d"
        "e01c670d6703b80087a53300f801000002800de01c670d6703b80087a51b",
    ),
    (
        "brotli",
        "repeated",
        "ffffffff0f00833b0000a00002d001e774f6614ac1019c4821a02efdb1c400b803000002800de0c0359c506703b80087"
        "e5c700b80300000a00101d704e671fa6141cc0891402ead21f4b0cb8030000aaef0f1d704eb10f4f88b1015c80c3e607"
        "f601",
    ),
    (
        "blosc2",
        "counts",
        "740000000501850400010000000100007400000001000000000005000000000000000000240000004000000001020304"
        "05060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334"
        "35363738393a3b3c3d3e3f40000000000000000000000000",
    ),
    (
        "blosc2",
        "repeated",
        "6000000005018504e0010000e00100006000000001000000000005000000000000000000240000000000000000000000"
        "1600000028b52ffd20786d0000208080c0800310004a51de0f161600000028b52ffd20786d0000203f3fbf3e0310004a"
        "51de0f16",
    ),
]


@pytest.mark.parametrize(("name", "case", "block"), GOLDEN)
def test_golden_blocks_are_read(name, case, block):
    parts, lanes = CASES[case]
    held = decoded(codec(name), bytes.fromhex(block), [len(part) for part in parts], lanes)
    assert held == [part.tobytes() for part in parts]


@pytest.mark.parametrize(("name", "case", "block"), GOLDEN_RAW)
def test_golden_blocks_are_written(name, case, block):
    assert codec(name).encode(*CASES[case]).hex() == block


# Damage.


def refused(method, block, parts, lanes):
    """Whether a block is refused; if not, every byte of the parts comes from it."""
    outs = []
    for rest in (0, 255):
        # What lies around a part is none of its business.
        around = [np.full(len(part) + 128, rest, np.uint8) for part in parts]
        try:
            method.decode(block, [buffer[64:-64] for buffer in around], lanes)
            outs.append([buffer[64:-64].tobytes() for buffer in around])
        except DamagedError:
            outs.append(None)
        assert all(set(buffer[:64]) | set(buffer[-64:]) == {rest} for buffer in around)
    assert outs[0] == outs[1]
    return outs[0] is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_every_truncation_and_every_extension_is_refused(name, case):
    parts, lanes = CASES[case]
    method = codec(name)
    block = method.encode(parts, lanes)
    for end in range(len(block)):
        assert refused(method, block[:end], parts, lanes)
    for more in (b"\0", b"\1", block):
        assert refused(method, block + more, parts, lanes)
    assert not refused(method, block, parts, lanes)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_every_changed_byte_is_refused_or_gives_other_bytes(name, case):
    parts, lanes = CASES[case]
    method = codec(name)
    block = bytearray(method.encode(parts, lanes))
    results = set()
    for place, old in enumerate(block):
        for new in {old ^ 1 << bit for bit in range(8)} | {0, 127, 255} - {old}:
            block[place] = new
            results.add(refused(method, bytes(block), parts, lanes))
        block[place] = old
    assert results >= ({True} if name != "none" else {False})


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_other_sizes_or_lanes_is_refused(name):
    method = codec(name)
    part = raw(np.maximum(normal(2000), 0))
    block = method.encode([part], [F32])
    for parts in ([part[:-4]], [part[:4]], [np.zeros(8004, np.uint8)], [part, part], []):
        assert refused(method, block, parts, [F32] * len(parts))
    if name != "none":
        assert refused(method, block, [part], [F64])


def unfinished(data):
    compressor = brotli.Compressor(quality=1, lgwin=18)
    return compressor.process(data) + compressor.flush()


ZEROS = brotli.compress(bytes(1000), quality=1, lgwin=18)
RAW, PACKED = head(None), head(None, 0)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        RAW,
        RAW[:5],
        head(None, 1) + bytes(1000),  # there is one plane
        head(None, 15) + ZEROS,  # there is no bitmap
        RAW + bytes(999),
        RAW + bytes(1001),
        PACKED,
        PACKED + ZEROS[:-1],
        PACKED + ZEROS + b"\0",
        PACKED + unfinished(bytes(1000)),
        PACKED + brotli.compress(bytes(999)),
        PACKED + brotli.compress(bytes(1001)),
        PACKED + brotli.compress(bytes(1000), quality=5, lgwin=24),
        PACKED + brotli.compress(bytes(1000), quality=5, lgwin=19),
        head(0),
        head(0) + bytes(124),
        head(0) + bytes(126),
        head(1) + bytes(125),
        head(1) + bytes(126),
        head(0) + bytes([1] + [0] * 124),
        head(0, 0) + bytes(125) + brotli.compress(b""),  # a plane of no bytes that is compressed
        head(1001) + b"\xff" * 125 + bytes(1001),
        head(0xFFFFFFFE) + b"\xff" * 125,
    ],
)
def test_what_the_brotli_codec_cannot_have_written_is_refused(block):
    # 1000 elements of one byte.
    assert refused(codec("brotli"), block, [np.zeros(1000, np.uint8)], [Lane(1, False)])


@pytest.mark.parametrize(
    "block",
    [
        RAW + bytes(1000),
        PACKED + ZEROS,
        PACKED + brotli.compress(bytes(1000), quality=11, lgwin=10),
        PACKED + brotli.compress(bytes(1000), quality=0, lgwin=18),
        head(0) + bytes(125),
        head(0, 15) + brotli.compress(bytes(125), lgwin=18),
    ],
)
def test_other_writers_of_the_format_may_choose_otherwise(block):
    assert decoded(codec("brotli"), block, [1000], [Lane(1, False)]) == [bytes(1000)]


def test_bits_of_a_bitmap_after_the_last_element_are_zero():
    # Three elements, of which the second is 7.
    for bits, is_refused in ((0b010, False), (0b1010, True), (0b10000010, True)):
        block = head(1) + bytes([bits, 7])
        assert refused(codec("brotli"), block, [np.zeros(3, np.uint8)], [Lane(1, False)]) is is_refused


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_are_decoded_together_whatever_is_in_each(name):
    values = [normal(500, seed) * (np.arange(500) % (1 + seed % 3) == 0) for seed in range(9)]
    parts = [[raw(some), raw(np.arange(seed, seed + 9)), raw(-some)] for seed, some in enumerate(values)]
    lanes, method = [F32, Lane(8, False), F32], codec(name)
    plan = method.plan(parts[:3], lanes)
    blocks = [method.encode(some, lanes, plan if i % 2 else None) for i, some in enumerate(parts)]
    outs = [np.empty((9, len(part)), np.uint8) for part in parts[0]]
    method.decode_all(blocks, outs, lanes)
    for i, some in enumerate(parts):
        assert [out[i].tobytes() for out in outs] == [part.tobytes() for part in some]
    if name == "brotli":  # what a block is does not depend on the plan alone
        assert refused(method, blocks[0] + b"\0", parts[0], lanes)


BOMB = """
import resource, sys
import brotli
import numpy as np
from torchcache2.files.codec import codec
from torchcache2.files.codec import Lane
from torchcache2.core.errors import DamagedError

assert "blosc2" not in sys.modules
block = bytes.fromhex(sys.argv[1])
out, split = np.zeros(8192, np.uint8), [Lane(1, False)]
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
try:
    codec("brotli").decode(block, [out], split)
except DamagedError as error:
    print(error)
try:
    brotli.decompress(block[6:])
except MemoryError:
    print("too much for plain brotli")
"""


def test_a_bomb_is_refused_within_little_memory():
    compressor = brotli.Compressor(quality=2, lgwin=18)
    data = b"".join(compressor.process(bytes(1 << 20)) for _ in range(128)) + compressor.finish()
    assert len(data) < 8192
    block = PACKED + data
    tracemalloc.start()
    try:
        assert refused(codec("brotli"), block, [np.zeros(8192, np.uint8)], [Lane(1, False)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    # Brotli's own memory is not Python's.
    run = warm.run(BOMB, block.hex())
    assert run.err == ""
    assert run.out.splitlines() == [
        "a brotli stream that does not hold 8192 bytes",
        "too much for plain brotli",
    ]


# Blosc2.


def chunk(part, **options):
    import blosc2

    options = {"codec": "ZSTD", "filters": ["SHUFFLE"], "typesize": 4, "nthreads": 1} | options
    options["codec"] = blosc2.Codec[options["codec"]]
    options["filters"] = [blosc2.Filter[name] for name in options["filters"]]
    held = blosc2.compress2(part, filters_meta=[0] * len(options["filters"]), **options)
    return struct.pack("<I", len(held)) + held


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "LZ4"},
        {"codec": "BLOSCLZ"},
        {"codec": "ZLIB"},
        {"filters": ["BITSHUFFLE"]},
        {"filters": ["NOFILTER"]},
        {"filters": ["DELTA", "SHUFFLE"]},
        {"filters": ["NOFILTER", "SHUFFLE"]},
        {"typesize": 8},
        {"use_dict": True},
    ],
)
def test_chunks_of_other_settings_are_refused(options):
    part = raw(np.arange(100_000, dtype="<i4"))
    assert not refused(codec("blosc2"), chunk(part), [part], [I32])
    assert refused(codec("blosc2"), chunk(part, **options), [part], [I32])


HEADERS = [
    (0, "<B", [0, 4, 6, 255]),  # the chunk's version
    (2, "<B", [0x01, 0x05, 0x25, 0x85 ^ 4, 0x8D, 0xC5, 0xE5]),  # delta, other codecs
    (3, "<B", [0, 1, 8, 255]),  # the type size
    (4, "<I", [0, 1, 3999, 4001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]),  # bytes held
    (8, "<I", [0, 4001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]),  # bytes of a part of them
    (12, "<I", [0, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]),  # bytes of the chunk
    *((place, "<B", [2, 3, 32, 160, 255]) for place in range(16, 22)),  # filters
    (22, "<B", [0, 1, 32, 160, 255]),  # a codec of somebody's
    *((place, "<B", [1, 255]) for place in range(23, 31)),  # settings of codec and filters
    (31, "<B", [0x01, 0x08, 0x10, 0x20, 0x30, 0x40, 0x70, 0xFF]),  # dictionary, lazy, runs
]


@pytest.mark.parametrize(("place", "kind", "values"), HEADERS)
def test_headers_that_the_codec_does_not_write_are_refused(place, kind, values):
    part = raw(np.arange(1000, dtype="<i4"))
    block = codec("blosc2").encode([part], [I32])
    for value in values:
        changed = bytearray(block)
        struct.pack_into(kind, changed, 4 + place, value)
        assert refused(codec("blosc2"), bytes(changed), [part], [I32]), value


@pytest.mark.parametrize("level", range(10))
def test_chunks_of_every_level_are_read(level):
    for part in (raw(normal(5000)), raw(np.arange(5000)), np.zeros(40_000, np.uint8), noise(40_000)):
        block = check_round_trip(codec("blosc2", level), [part], [I32])
        assert decoded(codec("blosc2"), block, [len(part)], [I32]) == [part.tobytes()]


# The rest.


def test_an_unknown_codec_is_an_error():
    with pytest.raises(ValueError, match="'zip'"):
        codec("zip")


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_part_of_2_gib_is_an_error_and_not_a_wrong_size(name):
    part = np.broadcast_to(np.uint8(0), (1 << 31,))  # one byte of memory
    with pytest.raises(ValueError, match="2,147,483,648 bytes"):
        codec(name).encode([part], [Lane(8, False)])
