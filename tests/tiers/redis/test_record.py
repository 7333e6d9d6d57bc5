"""Rows as values of a server: what comes back, what is damaged, and the bytes of version 2.

The golden values in ``golden/`` were written once, by `write_golden`, and stay as they are.
"""

import collections
import os
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from tests.helpers.outputs import assert_same
from tests.helpers.storage import CPU, NAMESPACES, keys_of, rows_of
from torchcache2.core import sizes
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.files.codec import codec
from torchcache2.files.layout import MOST_SCHEMA_BYTES
from torchcache2.tiers.redis.record import Records

SOAK = bool(os.environ.get("SOAK"))
CODECS = ("none", "brotli", "blosc2")
GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(params=CODECS)
def records(request):
    return Records(codec(request.param))


def output_rows(output, count):
    return Rows.from_pytree(output, count, device=CPU)


def back(records, keys, values):
    """The one part of what values hold, as the output that it stands for."""
    decoded = Records(codec("none")).decode(keys, values)
    assert decoded.damaged == []
    ((positions, rows),) = decoded.parts
    return positions.tolist(), rows.to_pytree(device=CPU)


def codec_in(value):
    return CODECS[value[4]]


def summed(keys, body):
    """A value whose checksum is right, whatever its bytes are; the first of the keys is its key."""
    words, spaces = struct.unpack("<2Q", keys.data[0].tobytes()), struct.unpack("<2Q", keys.namespace)
    seed = ((words[0] ^ spaces[0]) * 0x9E3779B97F4A7C15 + (words[1] ^ spaces[1])) % 2**64
    return body + xxh3_64_intdigest(body, seed).to_bytes(8, "little")


def test_what_was_encoded_comes_back_in_any_order_with_gaps(records):
    keys, rows = keys_of(range(40)), rows_of(range(40), 300)
    values = records.encode(keys, rows)
    order = np.random.default_rng(0).permutation(40)
    some = [values[i] if i % 3 else None for i in order.tolist()]
    positions, output = back(records, keys.take(order), some)
    assert positions == [i for i, value in enumerate(some) if value is not None]
    assert torch.equal(output, rows.columns[0][order[positions]])
    output += 1  # nothing else has this memory, and what is read once more is as before
    assert torch.equal(back(records, keys, values)[1], rows.columns[0])
    assert records.decode(keys_of([]), []) == ([], [])


def test_a_plain_layout_is_not_taken_for_one_that_was_met_before():
    records, image = Records(codec("none")), torch.randn(2, 3, 4, 5)
    keys = keys_of(range(2))
    for form in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        same = image.to(memory_format=form)
        _, output = back(records, keys, records.encode(keys, output_rows(same, 2)))
        assert torch.equal(output, image) and output.stride() == same.stride()


@pytest.mark.parametrize("name", CODECS[1:])
def test_rows_that_shrink_by_less_than_a_tenth_are_not_compressed(name):
    records, keys = Records(codec(name)), keys_of(range(20))
    noise = output_rows(torch.randint(0, 256, (20, 4000), dtype=torch.uint8), 20)
    assert {codec_in(value) for value in records.encode(keys, noise)} == {"none"}
    assert {codec_in(value) for value in records.encode(keys, rows_of(range(20), 1000))} == {name}


def test_large_rows_are_split_as_small_ones_are():
    records, keys = Records(codec("none")), keys_of(range(3))
    for width in (5_000, 300_000, 1 << 20):
        output = {"a": torch.randint(0, 256, (3, width), dtype=torch.uint8), "b": torch.rand(3, 7)}
        assert_same(back(records, keys, records.encode(keys, output_rows(output, 3)))[1], output)


def test_a_class_that_is_unknown_here_is_no_damage(records, monkeypatch):
    module = types.ModuleType("a_module_of_tests")
    module.Pair = collections.namedtuple("Pair", "x y", module="a_module_of_tests")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    keys, pair = keys_of(range(2)), module.Pair(torch.rand(2, 3), torch.zeros(2, 90))
    values = records.encode(keys, output_rows(pair, 2))
    reader = Records(codec("none"))
    monkeypatch.delitem(sys.modules, module.__name__)
    assert reader.decode(keys, values) == ([], [])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert_same(back(reader, keys, values)[1], pair)


# Damage.


def damaged(keys, value):
    """Whether a value is damaged; if not, it is what is expected."""
    decoded = Records(codec("none")).decode(keys, [value])
    assert decoded.parts == [] or decoded.damaged == []
    return decoded.damaged == [0]


@pytest.mark.parametrize("name", CODECS)
def test_every_flipped_bit_is_damage(name):
    keys, rows = keys_of(["a"]), rows_of(["a"], 400)
    records = Records(codec(name))
    (value,) = records.encode(keys, rows)
    assert codec_in(value) == name and not damaged(keys, value)
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert records.decode(keys, [bytes(flipped)]) == ([], [0])


@pytest.mark.parametrize("name", CODECS)
def test_every_truncated_or_longer_value_is_damage(name):
    keys = keys_of(["a"])
    records = Records(codec(name))
    (value,) = records.encode(keys, rows_of(["a"], 400))
    for size in range(len(value)):
        assert records.decode(keys, [value[:size]]) == ([], [0])
        assert records.decode(keys, [value[size:]]) == ([], [0]) or size == 0
    for more in (b"\0", b"\0" * 8, value):
        assert records.decode(keys, [value + more]) == ([], [0])


def test_a_value_under_another_key_or_namespace_is_damage():
    (value,) = Records(codec("none")).encode(keys_of(["a"]), rows_of(["a"], 4))
    assert not damaged(keys_of(["a"]), value)
    assert damaged(keys_of(["b"]), value)
    assert damaged(keys_of(["a"], NAMESPACES[1]), value)
    data = keys_of(["a"]).data
    for bit in range(128):
        near = data.copy()
        near[0, bit // 8] ^= 1 << bit % 8
        assert damaged(Keys(NAMESPACES[0], near), value)
        space = bytearray(NAMESPACES[0])
        space[bit // 8] ^= 1 << bit % 8
        assert damaged(Keys(bytes(space), data), value)
    assert damaged(Keys(NAMESPACES[0], np.roll(data, 8, axis=1)), value)


SCHEMA = b'{"structure":null,"leaves":[{"path":"","kind":"tensor","dtype":"float32","shape":[2]}]}'


def body(schema=SCHEMA, row=b"12345678", *, magic=b"tc2\x02", code=0, size=None):
    return magic + bytes([code]) + struct.pack("<I", len(schema) if size is None else size) + schema + row


def test_heads_that_lie_are_damage_even_if_the_checksum_is_right():
    keys = keys_of(["a"])
    assert not damaged(keys, summed(keys, body()))
    huge = [b"281474976710655", b"100000000", b"4611686018427387904", b"-1", b"null", b"1e9", b"true", b'"2"']
    schemas = [SCHEMA.replace(b"[2]", b"[%s]" % number) for number in huge]
    schemas += [
        SCHEMA.replace(b"[2]", b"[0,100000000000]"),
        SCHEMA.replace(b"float32", b"Float"),
        b"[]",
        b"",
        b"{",
    ]
    schemas += [
        SCHEMA.replace(b"null", b"[" * 50_000),
        b"[" * 50_000,
        b"\xff\xfe",
        SCHEMA[:-1],
        SCHEMA + b" x",
    ]
    schemas += [SCHEMA.replace(b'"kind"', b'"kinds"'), SCHEMA.replace(b"[{", b"[{},{")]
    lies = [body(schema) for schema in schemas]
    lies += [body(row=b"1234567"), body(row=b"123456789"), body(row=b"")]
    lies += [body(code=code) for code in (1, 2, 3, 255)]
    lies += [body(size=size) for size in (0, 1, len(SCHEMA) - 1, len(SCHEMA) + 1, len(SCHEMA) + 9, 2**32 - 1)]
    lies += [body(magic=magic) for magic in (b"tc2\x00", b"tc2\x01", b"tc2\x03", b"tc3\x02", b"\0\0\0\0")]
    for lie in lies:
        assert damaged(keys, summed(keys, lie))
    for code in (1, 2):  # a row that claims to be large takes no memory that the value does not have
        for number in (b"67108864", b"67108865"):
            assert damaged(keys, summed(keys, body(SCHEMA.replace(b"[2]", b"[%s]" % number), code=code)))


# Golden values: what version 2 has written once.


def golden():
    """Keys and rows of the golden values, by formulas that depend on no library."""
    x = torch.arange(12, dtype=torch.float32).view(2, 6).repeat(1, 40) / 8 - 1
    image = torch.arange(24, dtype=torch.int16).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    output = {"x": x, "image": image, "rest": [x[:, 0] > 0, "ä", 7, None]}
    data = np.arange(16, 48, dtype=np.uint8).reshape(2, 16)
    return Keys(bytes(range(16)), data), output_rows(output, 2)


def golden_path(name, number):
    return GOLDEN / f"value-2-{name}-{number}.bin"


def write_golden():
    """Was run once, by `python -c "import tests.tiers.redis.test_record as t; t.write_golden()"`."""
    for name in CODECS:
        for number, value in enumerate(Records(codec(name)).encode(*golden())):
            assert not golden_path(name, number).exists(), "version 2 is what it is"
            golden_path(name, number).write_bytes(value)


@pytest.mark.parametrize("name", CODECS)
def test_golden_values_are_read(name):
    keys, rows = golden()
    values = [golden_path(name, number).read_bytes() for number in range(2)]
    assert {codec_in(value) for value in values} == {name}
    assert_same(back(None, keys, values)[1], rows.to_pytree(device=CPU))


def test_golden_values_without_a_codec_are_written_byte_for_byte():
    for number, value in enumerate(Records(codec("none")).encode(*golden())):
        assert golden_path("none", number).read_bytes() == value


# The page with the specification.


def example():
    """A value as the page shows it."""
    keys = Keys(bytes(range(16)), np.arange(16, 32, dtype=np.uint8).reshape(1, 16))
    (value,) = Records(codec("none")).encode(keys, output_rows(torch.tensor([[1.0, 2.0]]), 1))
    size = int.from_bytes(value[5:9], "little")
    lines, at = [], 0
    for title, count in [
        ("`tc2`, version 2, codec 0", 5),
        (f"S = {size}", 4),
        ("schema", size),
        ("2 float32", 8),
        ("checksum", 8),
    ]:
        lines.append(f"{'':8}-- {title}")
        for start in range(at, at + count, 16):
            piece = value[start : min(start + 16, at + count)]
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
            lines.append(f"{start:06x}  {piece.hex(' '):47}  |{text}|")
        at += count
    assert at == len(value)
    return "\n".join(lines)


def test_the_example_on_the_page_is_real():
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
    assert f"```text\n{example()}\n```" in page


def test_values_that_stand_for_more_than_half_of_what_is_free_are_not_decoded(monkeypatch):
    records, keys = Records(codec("brotli")), keys_of(range(8))
    values = records.encode(keys, output_rows(torch.zeros(8, 10**5), 8))
    assert sum(map(len, values)) < 20_000
    monkeypatch.setattr(sizes, "_UNASKED", 10**5)
    monkeypatch.setattr(sizes, "free_memory", lambda device: 6 * 10**6)
    with pytest.raises(MemoryError, match="of rows at once"):
        records.decode(keys, values)
    assert len(records.decode(keys, values[:4]).parts) == 1


def test_a_value_whose_schema_is_longer_than_any_is_damaged():
    keys = keys_of([1])
    (value,) = Records(codec("none")).encode(keys, rows_of([1], 4))
    start, size = struct.Struct("<4sBI"), MOST_SCHEMA_BYTES + 1
    magic, number, before = start.unpack_from(value)
    text = value[start.size :][:before].ljust(size)
    body = start.pack(magic, number, size) + text + value[start.size + before : -8]
    assert Records(codec("none")).decode(keys, [summed(keys, body)]).damaged == [0]
