"""Segments: what was written is read again, and whatever else a file holds is refused or computed again.

The golden segments in ``golden/`` were written once, by `write_golden`, and stay as they are: every later
version must open them. A later format gets files of its own beside them.
"""

import collections
import copy
import dataclasses
import json
import os
import random
import re
import sys
import tracemalloc
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils import _pytree as pytree
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from torchcache2 import OptionError
from torchcache2.core.errors import (
    DamagedError,
    NewerFormatError,
    TooLargeError,
    UnknownClassError,
    UnreadableError,
    UnserialisableError,
)
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Leaf, Rows, Schema
from torchcache2.core.values import BARE
from torchcache2.files import schema as limits_of
from torchcache2.files.codec import buffer, lane
from torchcache2.files.codec import codec as codec_of
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import Descriptors, FileSystem
from torchcache2.files.layout import Layout
from torchcache2.files.segment import Segment, empty_columns, encode, rows_of, write

SOAK = bool(os.environ.get("SOAK"))
GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
FS = FileSystem()
NAMESPACE = bytes(range(16))
CODECS = ["none", "brotli", "blosc2"]
LIMIT = 1 << 20
DTYPES = sorted({value for value in vars(torch).values() if type(value) is torch.dtype}, key=str)
PLAIN = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
PLAIN += " float8_e4m3fn float8_e5m2"  # what every reader of safetensors knows
Pair = collections.namedtuple("Pair", "left right")


# Helpers.


def keys_of(count, first=0):
    data = np.zeros((count, 16), np.uint8)
    data.view("<u8")[:] = np.arange(first, first + count)[:, None] * [1, 1 << 40]
    return Keys(NAMESPACE, data)


def batches_of(*outputs_and_counts):
    """Batches with distinct keys, of pairs of an output and its number of rows."""
    batches, first = [], 0
    for output, count in outputs_and_counts:
        batches.append((keys_of(count, first), Rows.from_pytree(output, count, device=CPU)))
        first += count
    return batches


def file_of(batches, codec="none", **options):
    encoded = encode(batches, codec_of(codec), **options)
    data = b"".join([encoded.head, *map(buffer, encoded.data)])
    assert encoded.nbytes == len(data)
    return data


def write_anew(path, data):
    """Write a file that may be there; some systems write one to the disk at once that was emptied before."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def opened(path, data=None, limit=1 << 30):
    if data is not None:
        write_anew(path, data)
    return Segment.open(FS, Descriptors(FS), str(path), limit=limit)


def raw(tensor):
    """The bytes of a tensor, in the order of its dimensions; torch cannot copy every dtype."""
    last = tensor.permute(0, *range(2, tensor.dim()), 1) if tensor.dim() > 2 else tensor
    if not tensor.is_contiguous() and last.is_contiguous():
        items = last.reshape(-1).view(torch.uint8).view(*last.shape, tensor.itemsize)
        return items.movedim(-2, 1).contiguous().numpy().tobytes()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rows_in(batches):
    """Each row as the shape and bytes of its leaves."""
    rows = []
    for keys, some in batches:
        columns = []
        for leaf, column in zip(some.schema.leaves, some.columns, strict=True):
            items = (
                column.contiguous()
                .view(-1)
                .view(torch.uint8)
                .view(len(keys), *leaf.stored_shape, leaf.stored.itemsize)
            )
            columns.append(items.movedim(-2, 1) if leaf.channels_last else items)
        for i in range(len(keys)):
            pairs = zip(some.schema.leaves, columns, strict=True)
            rows.append([(leaf.shape, raw(column[i])) for leaf, column in pairs])
    return rows


def read(segment, numbers):
    """Rows likewise; None for those that are read together with a damaged one."""
    numbers = np.array(numbers, np.int64)
    segment.read_ahead(numbers)
    found = [None] * len(numbers)
    for schema, which in segment.schemas(numbers):
        columns = empty_columns(schema, len(which))
        if segment.read(numbers[which], columns, np.arange(len(which))):
            for i, position in enumerate(which.tolist()):
                pairs = zip(schema.leaves, columns, strict=True)
                found[position] = [(leaf.shape, column[i].tobytes()) for leaf, column in pairs]
    return found


def read_each(segment):
    return [read(segment, [number])[0] for number in range(len(segment))]


def check(segment, batches, numbers=None):
    """Whether a segment has these batches, read as given and as the outputs that they were made from."""
    expected = rows_in(batches)
    numbers = list(range(len(expected))) if numbers is None else numbers
    if segment.keys is not None:
        assert segment.keys.tobytes() == b"".join(keys.data.tobytes() for keys, _ in batches)
    assert len(segment) == len(expected)
    assert segment.layout.namespace == NAMESPACE
    assert read(segment, numbers) == [expected[number] for number in numbers]
    first = 0
    for keys, rows in batches:
        some = np.arange(first, first + len(keys))
        ((schema, which),) = segment.schemas(some)
        assert schema == rows.schema
        assert which.tolist() == list(range(len(keys)))
        columns = empty_columns(schema, len(keys))
        assert segment.read(some, columns, which)
        check_same(rows_of(schema, columns, len(keys)).to_pytree(device=CPU), rows.to_pytree(device=CPU))
        first += len(keys)
    assert segment.check() == 0


def check_same(left, right):
    lefts, spec = pytree.tree_flatten(left)
    rights, other = pytree.tree_flatten(right)
    assert spec == other
    for a, b in zip(lefts, rights, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert raw(a) == raw(b)
        else:
            assert a == b


def noise(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)


def filled(dtype, shape, seed=0, zeros=0.0):
    """A tensor of any bytes, some of its elements zero; of True and False for bool."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = noise(1, size, seed)[0]
    if dtype == torch.bool:
        data %= 2
    if zeros:
        generator = torch.Generator().manual_seed(seed)
        data.view(-1, dtype.itemsize)[torch.rand(size // dtype.itemsize, generator=generator) < zeros] = 0
    return data.view(dtype).view(shape)


# Round trips.


STRUCTURES = [
    (),
    [],
    {},
    [()],
    {"a": {}},
    (torch.arange(6.0).view(3, 2),),
    [torch.arange(3), [torch.ones(3, 1), (None,)]],
    {"a": torch.arange(3), 1: torch.ones(3, 2), (2, "b"): 5, None: "n", b"c": 1.5},
    {"output": torch.zeros(3), "keys": torch.ones(3), "": torch.zeros(3, 1), "a b": torch.ones(3, 3)},
    collections.OrderedDict(z=torch.zeros(3), a=torch.ones(3)),
    collections.defaultdict(list, a=torch.ones(3)),
    collections.deque([torch.ones(3), torch.zeros(3)], 2),
    Pair(torch.ones(3, 2), Pair("text", torch.zeros(3))),
    torch.return_types.max((torch.ones(3), torch.zeros(3, dtype=torch.int64))),
    {"x": {"y": torch.ones(3)}, "x.y": torch.zeros(3), "x.y 2": torch.ones(3), "x.y 1": torch.zeros(3)},
    [torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, dtype=torch.float64), torch.ones(3).half()],
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("output", STRUCTURES, ids=lambda output: repr(output)[:30].replace("\n", ""))
def test_every_structure_comes_back_and_is_a_safetensors_file(tmp_path, output, codec):
    batches = batches_of((output, 3))
    check(opened(tmp_path / "a", file_of(batches, codec)), batches, [2, 0, 0])
    loaded = load_file(tmp_path / "a")
    if codec == "none":
        leaves = list(batches[0][1].columns)
        if len(leaves) == 1:
            (found,) = [loaded[name] for name in loaded if name.startswith("output")]
            assert raw(found) == raw(leaves[0])
        else:  # a row is the bytes of its leaves
            rows = [b"".join(raw(leaf[i]) for leaf in leaves) for i in range(3)]
            assert [row.numpy().tobytes() for row in loaded["payload"]] == rows


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_last_of_every_dtype_come_back(tmp_path, dtype):
    x = filled(dtype, (3, 2, 4, 5)).permute(0, 3, 1, 2)
    plain = filled(dtype, (3, 5, 2, 4), seed=1)
    for pair in ((x, plain), (plain, x), (x, filled(dtype, (3, 5, 2, 2), seed=2))):
        batches = batches_of((pair[0], 3), (pair[1], 3))
        check(opened(tmp_path / "a", file_of(batches)), batches)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_a_stored_dtype_comes_back_with_the_dtype_of_the_output(tmp_path, stored):
    rows = Rows.from_pytree({"x": torch.rand(5, 3), "n": torch.arange(5)}, 5, device=CPU, dtype=stored)
    segment = opened(tmp_path / "a", file_of([(keys_of(5), rows)]))
    check(segment, [(keys_of(5), rows)])
    alone = Rows.from_pytree({"x": torch.rand(5, 3)}, 5, device=CPU, dtype=stored)
    (tmp_path / "a").write_bytes(file_of([(keys_of(5), alone)]))
    assert load_file(tmp_path / "a")["output.x"].dtype == stored


@pytest.mark.parametrize("codec", CODECS)
def test_ragged_rows_come_back(tmp_path, codec):
    def output(count, length, text):
        tokens = torch.arange(count * length * 3, dtype=torch.int32).view(count, length, 3)
        mask = torch.ones(count, 2, length, dtype=torch.bool)
        return {"tokens": tokens, "mask": mask, "fixed": torch.ones(count, 400), "text": text}

    batches = batches_of(
        (output(3, 7, "a"), 3), (output(1, 2, ""), 1), (output(2, 0, "äöü"), 2), (output(4, 7, "b"), 4)
    )
    segment = opened(tmp_path / "a", file_of(batches, codec))
    assert segment.layout.extents == 3
    assert [leaf.shape for leaf in segment.layout.schema.leaves] == [(-1, 3), (2, -1), (400,), (-1,)]
    assert (segment.layout.codec, segment.layout.rows_per_block) == (codec, 1)
    check(segment, batches, [9, 0, 4, 4, 3, 6, 9])
    schemas = list(segment.schemas(np.array([9, 3, 0, 5, 4])))
    assert sorted(which.tolist() for _, which in schemas) == [[0, 2], [1], [3, 4]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("floats", "per_block"),
    [(1, 1024), (3, 341), (500, 2), (512, 2), (513, 1), (1024, 1), (9000, 1)],
)
def test_rows_share_blocks_of_4_kb(tmp_path, floats, per_block, codec):
    x = torch.zeros(5000 if floats < 9 else 5, floats)
    batches = batches_of((x[:1], 1), (x[1:3] + 1, 2), (x[3:], len(x) - 3))
    segment = opened(tmp_path / "a", file_of(batches, codec))
    expected = (codec, 0 if codec == "none" else per_block)
    assert (segment.layout.codec, segment.layout.rows_per_block) == expected
    check(segment, batches, [4, 0, 0, len(x) - 1, 2, 1, 2])


def test_no_row_at_all_may_be_asked_for(tmp_path):
    for codec in CODECS:
        segment = opened(tmp_path / "a", file_of(batches_of((torch.zeros(9, 90), 9)), codec))
        assert read(segment, []) == []


@dataclasses.dataclass(frozen=True)
class Spec:
    """What Hypothesis draws for a tensor; extents that grow are larger in each batch."""

    dtype: torch.dtype
    shape: tuple
    grows: tuple
    zeros: float

    def build(self, count, number):
        extents = [n + number * grow for n, grow in zip(self.shape, self.grows, strict=True)]
        return filled(self.dtype, (count, *extents), number, self.zeros)


@dataclasses.dataclass(frozen=True)
class Text:
    text: str
    grows: bool

    def build(self, count, number):
        return self.text + "é" * number * self.grows


@dataclasses.dataclass(frozen=True)
class Constant:
    value: object

    def build(self, count, number):
        return self.value


@st.composite
def specs(draw):
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 60]), max_size=3).map(tuple))
    grows = draw(st.sampled_from([(0,) * len(shape), tuple(i % 2 for i in range(len(shape)))]))
    zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Spec(draw(st.sampled_from(DTYPES)), shape, grows, zeros)


LEAVES = st.one_of(
    specs(),
    specs(),
    st.builds(Text, st.text(max_size=5), st.booleans()),
    st.builds(
        Constant,
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)),
    ),
    st.builds(Constant, st.one_of(st.binary(max_size=9), st.complex_numbers(allow_nan=False))),
)
OUTPUTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 3)), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("segments")


@pytest.mark.slow
@hypothesis.settings(max_examples=100 if SOAK else 25)
@hypothesis.given(
    data=st.data(),
    spec=OUTPUTS,
    codec=st.sampled_from(CODECS),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_any_rows_come_back_in_any_order(folder, data, spec, codec, counts):
    pairs = []
    for number, count in enumerate(counts):
        pairs.append((pytree.tree_map(lambda leaf: leaf.build(count, number), spec), count))  # noqa: B023
    batches = batches_of(*pairs)
    path = folder / "any"
    bytes_of_file = file_of(batches, codec)
    segment = opened(path, bytes_of_file)
    numbers = data.draw(st.lists(st.integers(0, sum(counts) - 1), max_size=9))
    check(segment, batches, numbers)
    written = Segment.written(FS, Descriptors(FS), str(path), encode(batches, codec_of(codec)))
    check(written, batches, numbers)
    assert written.nbytes == segment.nbytes == len(bytes_of_file)
    assert written.layout == dataclasses.replace(segment.layout, library="")
    names = load_file(path)
    assert ("payload" in names) == (segment.layout.rows_per_block > 0 or len(batches[0][1].columns) != 1)


# The file.


def parts_of(data):
    """Header, and the bytes behind it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def index_of(data):
    """The tensors of a file's index, and where its rows begin, as the specification says."""
    header, body = parts_of(data)
    kinds = {"U8": "<u1", "U64": "<u8", "I64": "<i8"}
    arrays = {}
    for name in ("keys", "checksums", "offsets", "shapes"):
        if name in header:
            begin, end = header[name]["data_offsets"]
            arrays[name] = np.frombuffer(body[begin:end], kinds[header[name]["dtype"]]).reshape(
                header[name]["shape"]
            )
    return arrays, len(data) - len(body) + sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("codec", CODECS)
def test_the_header_is_as_specified(codec):
    data = file_of(batches_of((torch.zeros(3000, 2), 3000)), codec, library="1.2.3")
    header, body = parts_of(data)
    assert header["__metadata__"] == {
        "checksum": header["__metadata__"]["checksum"],
        "format": "torchcache2",
        "format_version": "2",
        "library": "1.2.3",
        "namespace": NAMESPACE.hex(),
        "codec": codec,
        "rows_per_block": "0" if codec == "none" else "512",
        "schema": '{"structure":null,"leaves":[{"path":"","kind":"tensor","dtype":"float32","shape":[2]}]}',
    }
    names = ["keys", "checksums", "output"]
    if codec != "none":
        names = ["keys", "checksums", "offsets", "payload"]
    assert list(header) == ["__metadata__", *names]
    ends = [header[name]["data_offsets"] for name in names]
    assert [begin for begin, _ in ends] == [0, *[end for _, end in ends[:-1]]]
    assert ends[-1][1] == len(body)
    index, start = index_of(data)
    assert start % 8 == 0
    digits = header["__metadata__"]["checksum"].encode()
    assert xxh3_64_hexdigest(data[:start].replace(digits, b"0" * 16, 1)).encode() == digits
    assert index["checksums"].tolist() == [xxh3_64_intdigest(bytes(8))] * 3000
    if codec != "none":
        assert index["offsets"].tolist() == sorted(index["offsets"])
        assert (len(index["offsets"]), index["offsets"][-1]) == (7, len(data) - start)


def test_ragged_rows_without_a_codec_lie_leaf_after_leaf():
    x, y = torch.arange(6, dtype=torch.int16).view(2, 3), torch.arange(1, dtype=torch.int16).view(1, 1)
    data = file_of(batches_of(((x, "ab"), 2), ((y, ""), 1)))
    index, start = index_of(data)
    blocks = [raw(x[0]) + b"ab", raw(x[1]) + b"ab", raw(y[0])]
    assert data[start:] == b"".join(blocks)
    assert index["offsets"].tolist() == [0, 8, 16, 18]
    assert index["shapes"].tolist() == [[3, 2], [3, 2], [1, 0]]
    assert index["checksums"].tolist() == list(map(xxh3_64_intdigest, blocks))


@pytest.mark.parametrize("floats", [1, 100, 262_143, 262_144, 300_000])
def test_rows_begin_at_a_page_if_they_are_many_bytes(floats):
    for namespace in range(12):  # the JSON has other lengths
        rows = Rows.from_pytree({"x" * namespace: torch.zeros(1, floats)}, 1, device=CPU)
        _, start = index_of(file_of([(keys_of(1), rows)]))
        assert start % (4096 if 4 * floats >= 1 << 20 else 8) == 0


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_several_leaves_lie_row_after_row(tmp_path, codec):
    dtypes = (torch.int8, torch.float64, torch.int16, torch.float32)
    output = [filled(dtype, (300, 5), zeros=0.5) for dtype in dtypes]
    batches = batches_of((output, 300))
    segment = opened(tmp_path / "a", file_of(batches, codec))
    check(segment, batches, [7, 0, 299, 7])
    read, calls = FS.read, []
    segment.fs = type("Counting", (FileSystem,), {"read": lambda _, *a: calls.append(a) or read(*a)})()
    assert all(read_each(segment)) and len(calls) == 300  # one for each row, whatever its leaves


@pytest.mark.parametrize(
    ("zeros", "expected"), [(0.0, "none"), (0.05, "none"), (0.12, "none"), (0.2, "brotli"), (1.0, "brotli")]
)
def test_a_codec_that_saves_less_than_a_tenth_is_not_used(zeros, expected):
    batches = batches_of((filled(torch.float32, (200, 500), zeros=zeros), 200))
    layout = encode(batches, codec_of("brotli")).layout
    assert layout.codec == expected
    assert (layout.row_data_bytes <= 0.9 * 400_000) == (expected == "brotli")


def test_the_sample_does_not_keep_step_with_what_recurs():
    output = (torch.arange(448) % 7)[:, None].repeat(1, 1000)  # every seventh row is zeros
    layout = encode(batches_of((output, 448)), codec_of("brotli")).layout
    assert layout.row_data_bytes < output.nbytes / 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_load_file_has_the_tensor_where_safetensors_knows_its_dtype(tmp_path, dtype):
    x = filled(dtype, (3, 2, 5))
    (tmp_path / "a").write_bytes(file_of(batches_of((x, 3))))
    found = load_file(tmp_path / "a")["output"]
    if str(dtype)[6:] in PLAIN.split():
        assert (found.dtype, found.shape) == (dtype, x.shape)
    else:
        assert (found.dtype, found.shape) == (torch.uint8, (3, 10 * dtype.itemsize))
    assert raw(found) == raw(x)


def test_load_file_and_safe_open_have_everything(tmp_path):
    batches = batches_of(({"x": [torch.rand(3, 2)]}, 3))
    (tmp_path / "a").write_bytes(file_of(batches, library="9"))
    loaded = load_file(tmp_path / "a")
    assert sorted(loaded) == ["checksums", "keys", "output.x.0"]
    assert torch.equal(loaded["output.x.0"], batches[0][1].columns[0])
    assert loaded["keys"].numpy().tobytes() == keys_of(3).data.tobytes()
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata()["library"] == "9"
    ragged = batches_of((torch.zeros(3, 200), 3), (torch.ones(3, 100), 3))
    (tmp_path / "a").write_bytes(file_of(ragged, "brotli"))
    loaded = load_file(tmp_path / "a")
    assert sorted(loaded) == ["checksums", "keys", "offsets", "payload", "shapes"]


# Golden segments: what version 2 has written once.


def golden(name):
    """The batches of a golden segment, by formulas that depend on no library."""
    if name == "none":
        x = torch.arange(24, dtype=torch.float32).view(4, 6) / 8 - 1
        image = torch.arange(48, dtype=torch.int16).view(4, 3, 2, 2).to(memory_format=torch.channels_last)
        half = (torch.arange(4, dtype=torch.float32) / 4).to(torch.bfloat16)
        return batches_of(
            ({"x": x, "image": image, "rest": [x[:, 0] > 0, half, "ä", 7, None, 0.5, x[:, :2] * 1j]}, 4)
        )
    if name == "brotli":
        x = torch.arange(120, dtype=torch.float32).view(60, 2).repeat(1, 150)
        x[:, ::3] = 0
        return batches_of((x[:7] - 50, 7), (x[7:], 53))
    if name == "ragged":
        tokens = torch.arange(900, dtype=torch.int64).view(3, 300) % 7
        pairs = [(tokens[:, :length], "t" * length) for length in (300, 1, 0, 120)]
        return batches_of(*[(pair, 3) for pair in pairs])
    x = (torch.arange(4000, dtype=torch.float32).view(40, 100) % 13).to(torch.float16)
    return batches_of(((x, x > 6), 40))


GOLDEN_CODECS = {"none": "none", "brotli": "brotli", "ragged": "brotli", "blosc2": "blosc2"}


def golden_file(name):
    return file_of(golden(name), GOLDEN_CODECS[name], library="0.1.0")


def write_golden():
    """Was run once, by `python -c "import tests.files.test_segment as t; t.write_golden()"`."""
    for name in GOLDEN_CODECS:
        path = GOLDEN / f"segment-2-{name}.safetensors"
        assert not path.exists(), "version 2 is what it is"
        path.write_bytes(golden_file(name))


@pytest.mark.parametrize("name", GOLDEN_CODECS)
def test_golden_segments_open(name):
    path = GOLDEN / f"segment-2-{name}.safetensors"
    assert path.stat().st_size < 5000
    segment = opened(path)
    assert (segment.layout.codec, segment.layout.library) == (GOLDEN_CODECS[name], "0.1.0")
    batches = golden(name)
    numbers = list(range(len(segment)))
    random.Random(0).shuffle(numbers)
    check(segment, batches, numbers + numbers[:3])
    assert "keys" in load_file(path)


def test_the_golden_segment_without_a_codec_is_written_byte_for_byte():
    assert golden_file("none") == (GOLDEN / "segment-2-none.safetensors").read_bytes()


@pytest.mark.parametrize("name", GOLDEN_CODECS)
def test_golden_segments_differ_at_most_in_their_blocks(name):
    # Of brotli and blosc2 another version may compress otherwise.
    old, new = ((GOLDEN / f"segment-2-{name}.safetensors").read_bytes(), golden_file(name))
    old_header, new_header = parts_of(old)[0], parts_of(new)[0]
    for header in (old_header, new_header):
        header.pop("payload", None)
        header["__metadata__"].pop("checksum")
    assert old_header == new_header
    old_index, new_index = index_of(old)[0], index_of(new)[0]
    for array in ("keys", "checksums", "shapes"):
        assert (array in old_index) == (array in new_index)
        if array in old_index:
            assert old_index[array].tobytes() == new_index[array].tobytes()


# The page with the specification.


def dumped(title, data, first):
    """A part of a file as the page shows it."""
    lines = [f"{'':8}-- {title}"]
    for start in range(0, len(data), 16):
        piece = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{first + start:06x}  {piece.hex(' '):47}  |{text}|")
    return lines


def dumps():
    """The segment and the block of the page's examples."""
    keys = Keys(NAMESPACE, np.arange(16, 48, dtype=np.uint8).reshape(2, 16))
    rows = Rows.from_pytree(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), 2, device=CPU)
    data = file_of([(keys, rows)], library="0.1.0")
    size = int.from_bytes(data[:8], "little")
    names = [
        ("keys", "keys: 2 × 16 bytes"),
        ("checksums", "checksums: 2 × u64"),
        ("output", "output: 2 × 2 float32"),
    ]
    lines = dumped(f"H = {size}", data[:8], 0)
    lines += dumped("header: JSON, and spaces up to a multiple of 8 bytes", data[8 : 8 + size], 8)
    for name, title in names:
        begin, end = parts_of(data)[0][name]["data_offsets"]
        lines += dumped(title, data[8 + size + begin : 8 + size + end], 8 + size + begin)
    block = codec_of("brotli").encode(
        [np.array([0, 0, 1.5, -2], "<f4").view(np.uint8)], [lane(torch.float32)]
    )
    titles = ["2 elements are not zero, and there is a bitmap", "no piece is compressed", "the bitmap"]
    titles += [f"plane {j}" for j in range(4)]
    position, others = 0, []
    for title, size in zip(titles, [4, 2, 1, 2, 2, 2, 2], strict=True):
        others += dumped(title, block[position : position + size], position)
        position += size
    assert position == len(block)
    return ["\n".join(lines), "\n".join(others)]


def page():
    return (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


def test_the_examples_on_the_page_are_real():
    for example in dumps():
        assert f"```text\n{example}\n```" in page()


def test_the_page_has_the_tag_of_a_directory(tmp_path):
    CacheDirectory(str(tmp_path), FS).create()
    assert f"```text\n{(tmp_path / 'CACHEDIR.TAG').read_text()}```" in page()


def test_the_page_names_every_tensor_key_and_limit():
    first = set(re.findall(r"^\| `(.*?)` \|", page(), re.MULTILINE))
    for name in ("none", "brotli", "ragged"):
        header, _ = parts_of((GOLDEN / f"segment-2-{name}.safetensors").read_bytes())
        assert {tensor for tensor in header if not tensor.startswith(("_", "output"))} <= first
        assert set(header["__metadata__"]) <= first
        for leaf in json.loads(header["__metadata__"]["schema"])["leaves"]:
            assert {*leaf, leaf["kind"]} <= first | {"tensor"}
    assert {field.name for field in dataclasses.fields(Leaf)} <= first
    limits = f"{limits_of.MAX_LEAVES:,}; {limits_of.MAX_ELEMENTS:,} and {limits_of.MAX_DEPTH}"
    assert f"| {limits} |" in page()
    assert f"| {limits_of.MAX_DIMS}; 2⁴⁸ |" in page()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_page_has_the_width_of_every_dtype(dtype):
    table = page().split("| stored dtype | *w* | rotated |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:4] for row in table.splitlines() if "`" in row]
    named = {
        name: (int(width), rotated.strip() == "yes")
        for names, width, rotated in rows
        for name in re.findall("`(.*?)`", names)
    }
    assert lane(dtype) == named.get(str(dtype)[6:], (1, False))


# Damage: bits, truncation, garbage.


def tiny(name):
    """Batches of a small segment of each kind, and its codec."""
    if name == "none":
        return batches_of(((torch.arange(4.0).view(2, 2), "ab"), 2)), "none"
    if name == "no bytes":
        return batches_of((torch.empty(2, 0), 2)), "none"
    if name == "ragged none":
        return batches_of((torch.arange(3.0).view(1, 3), 1), (torch.arange(4.0).view(2, 2), 2)), "none"
    if name == "ragged brotli":
        x = torch.arange(300, dtype=torch.int64).view(3, 100) % 4
        return batches_of((x, 3), (x[:1, :50], 1)), "brotli"
    if name == "nested":
        x = torch.ones(2, 3)
        output = {"a": Pair(x, [None, True]), 1: collections.deque([x], 2), "m": torch.max(x, 1)}
        output |= {
            (2, b"b"): collections.defaultdict(int, c=x),
            "o": collections.OrderedDict(d=2.5, e="text"),
        }
        return batches_of((output, 2)), "none"
    x = torch.zeros(5, 750)
    x[:, ::2] = torch.arange(5.0)[:, None] * (torch.arange(375.0) % 3)
    return batches_of((x, 5)), name


TINY = ["none", "no bytes", "ragged none", "ragged brotli", "brotli", "blosc2"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TINY)
def test_a_flipped_bit_is_found_and_costs_one_block(tmp_path, name):
    batches, codec = tiny(name)
    data, expected = file_of(batches, codec), rows_in(batches)
    path, bits = tmp_path / "a", random.Random(0)
    layout, (_, start) = opened(path, data).layout, index_of(data)
    assert layout.codec == codec
    with path.open("r+b", buffering=0) as file:
        # Every bit in `make soak`, and otherwise one of every third byte, other bytes in each run.
        for position in range(0 if SOAK else random.randrange(3), len(data), 1 if SOAK else 3):
            byte = data[position]
            for bit in range(8) if SOAK else [bits.randrange(8)]:
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                if position < start:
                    with pytest.raises(DamagedError):
                        opened(path)
                    continue
                segment = opened(path)
                rows = read_each(segment)
                lost = [number for number, row in enumerate(rows) if row is None]
                blocks = {number // max(1, layout.rows_per_block) for number in lost}
                # Compressed bytes may have bits that say nothing: then the rows are right.
                assert len(blocks) == 1 or (not blocks and layout.codec != "none")
                assert all(row in (None, right) for row, right in zip(rows, expected, strict=True))
                assert segment.check() == len(lost)
                assert (None in read(segment, range(len(rows)))) is bool(lost)
            os.pwrite(file.fileno(), bytes([byte]), position)
    check(opened(path), batches)


@pytest.mark.parametrize("name", TINY)
def test_any_truncation_is_damage(tmp_path, name):
    path, data = tmp_path / "a", file_of(*tiny(name))
    path.write_bytes(data)
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        with pytest.raises(DamagedError):
            opened(path)


@pytest.mark.parametrize("name", TINY)
def test_bytes_behind_the_end_are_damage(tmp_path, name):
    data = file_of(*tiny(name))
    for more in (b"\0", b" ", data, bytes(10_000)):
        with pytest.raises(DamagedError):
            opened(tmp_path / "a", data + more)
        with pytest.raises(DamagedError):
            opened(tmp_path / "a", more + data)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TINY)
def test_a_file_that_shrinks_after_it_was_opened_loses_rows_and_no_more(tmp_path, name):
    batches, codec = tiny(name)
    data, expected = file_of(batches, codec), rows_in(batches)
    for size in range(0, len(data) + 1, 7 if SOAK else 17):
        segment = opened(tmp_path / "a", data)
        os.truncate(tmp_path / "a", size)
        rows = read_each(segment)
        assert all(row in (None, right) for row, right in zip(rows, expected, strict=True))
        if size < len(data) - 4 and name != "no bytes":
            assert None in rows
        assert segment.check() == rows.count(None)


@hypothesis.settings(max_examples=200 if SOAK else 50)
@hypothesis.given(st.binary(max_size=300))
def test_garbage_is_damage(folder, data):
    for more in (data, len(data).to_bytes(8, "little") + data, b"\x02" + bytes(7) + b"{}" + data):
        with pytest.raises(DamagedError):
            opened(folder / "garbage", more)


@pytest.mark.parametrize("name", TINY)
def test_another_file_of_safetensors_is_damage(tmp_path, name):
    from safetensors.torch import save_file

    save_file(load_file_of(tmp_path, name), tmp_path / "b", {"format": "pt"})
    with pytest.raises(DamagedError):
        opened(tmp_path / "b")


def load_file_of(tmp_path, name):
    (tmp_path / "a").write_bytes(file_of(*tiny(name)))
    return load_file(tmp_path / "a")


# Lies: files whose checksums are right, made by somebody who wants harm or by a later version.


def assembled(header, body):
    """A file with this header and these bytes behind it, and the right checksum."""
    header = copy.deepcopy(header)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        if "schema" in metadata and not isinstance(metadata["schema"], str):
            metadata["schema"] = json.dumps(metadata["schema"], separators=(",", ":"))
        if isinstance(metadata.get("checksum"), str):
            metadata["checksum"] = "0" * 16
    text = json.dumps(header, separators=(",", ":")).encode()
    begins = []
    for name, tensor in header.items():
        if name == "payload" or name.startswith("output"):
            try:
                begins.append(int(tensor["data_offsets"][0]))
            except (TypeError, KeyError, IndexError, ValueError, OverflowError):
                begins.append(-1)
    start = min(begins, default=len(body))
    covered = len(text).to_bytes(8, "little") + text + body[: start if 0 <= start <= len(body) else None]
    digits = xxh3_64_hexdigest(covered).encode()
    return len(text).to_bytes(8, "little") + text.replace(b"0" * 16, digits, 1) + body


def harmless(path, data, limit=LIMIT):
    """What comes of opening and reading a file that may lie throughout: little memory, no imports."""
    write_anew(path, data)
    modules = set(sys.modules)
    tracemalloc.start()
    try:
        outcome = attempt(path, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(sys.modules) == modules
    assert peak < 64 * len(data) + 8 * limit + (32 << 20), peak
    return outcome


def attempt(path, limit):
    try:
        segment = opened(path, limit=limit)
    except (UnreadableError, OptionError) as error:
        return type(error)
    for number in range(min(len(segment), 5)):
        read(segment, [number])
    some = np.arange(min(len(segment), 5))
    for schema, which in segment.schemas(some):
        assert schema.row_bytes <= limit
        columns = empty_columns(schema, len(which))
        assert segment.read(some[which], columns, np.arange(len(which))) in (True, False)
        rows_of(schema, columns, len(which))
    assert 0 <= segment.check() <= len(segment)
    return Segment


def places(tree, path=()):
    """Every place of a JSON value."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, child in items:
        yield from places(child, (*path, name))


def at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


BASES = {}
for _name in (*TINY, "nested"):
    _header, _body = parts_of(file_of(*tiny(_name)))
    _header["__metadata__"]["schema"] = json.loads(_header["__metadata__"]["schema"])
    BASES[_name] = (_header, _body)
NUMBERS = [0, 1, -1, 2, 3, 5, 24, 750, 2**31, 2**47, 2**48, 2**63 - 1, 2**63, 2**64, 10**30, 1.0, 1e300]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
OTHERS = [
    *(*NUMBERS, *map(str, NUMBERS), None, True, False, [], {}, [None], "", "\ud800"),
    *("none", "brotli", "blosc2", "zstd", "float32", "uint8", "complex128", "int4", "bits16", "quint8"),
    *("tensor", "str", "none", "int", "U8", "F32", {"tuple": []}, {"list": [None, None]}),
    *(
        {"dict": [["a", None]]},
        {"node": ["os:system", None, None, []]},
        {"class": "os:system"},
        {"bytes": "0"},
    ),
    *("float99", "os:system", "antigravity:fly", "torch:Size", "tuple", "deque", "namedtuple", "defaultdict"),
]
OTHERS += [[2**40, 2**40], [0, 2**47, 2**47], [None] * 30, "cuda:0", "meta", "0" * 32, "f" * 31]


@hypothesis.settings(max_examples=400 if SOAK else 100)
@hypothesis.given(
    data=st.data(),
    name=st.sampled_from([*TINY, *["nested"] * 6]),
    extra=st.sampled_from([0, 0, 0, -8, 8, 4096]),
)
def test_headers_that_lie_do_no_harm(folder, data, name, extra):
    header, body = BASES[name]
    header = copy.deepcopy(header)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in places(header) if path]))
        parent, last = at(header, path[:-1]), path[-1]
        action = data.draw(
            st.sampled_from(["replace", "replace", "replace", "delete", "copy", "rename", "repeat"])
        )
        if action == "replace":
            parent[last] = copy.deepcopy(data.draw(st.sampled_from(OTHERS)))
        elif action == "delete":
            del parent[last]
        elif action == "copy":
            other = data.draw(st.sampled_from([path for path in places(header) if path]))
            parent[last] = copy.deepcopy(at(header, other))
        elif action == "rename" and isinstance(parent, dict):
            parent[data.draw(st.sampled_from(["keys", "payload", "output", "output.x", "shapes", "b"]))] = (
                parent.pop(last)
            )
        elif action == "repeat" and isinstance(parent, list):
            parent += [parent[last]] * data.draw(st.sampled_from([1, 7, 70]))
    try:
        file = assembled(header, body + bytes(extra) if extra >= 0 else body[:extra])
    except RecursionError:
        hypothesis.reject()
    harmless(folder / "lies", file)


def claiming(name, **changes):
    """A header of a tiny segment with other values, each given by its path, and what follows it."""
    header, body = copy.deepcopy(BASES[name])
    for path, value in changes.items():
        *parents, last = path.split("__")
        at(header, ["__metadata__" if parent == "metadata" else parent for parent in parents])[last] = value
    return header, body


@pytest.mark.parametrize("count", [0, -1, 3, 2**31, 2**40, 2**62, 2**63, 10**30, 1.5, 2.0, True, None, "2"])
@pytest.mark.parametrize("name", TINY)
def test_counts_of_rows_that_cannot_be_are_damage(tmp_path, name, count):
    if count == 3 and len(opened(tmp_path / "a", file_of(*tiny(name)))) == 3:
        count = 4
    header, body = copy.deepcopy(BASES[name])
    for tensor in ("keys", "checksums"):
        header[tensor]["shape"][0] = count
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["payload", "dtype"], "I8"),
        (["payload", "shape"], [2, 1, 10]),
        (["payload", "shape"], [20]),
        (["payload", "data_offsets"], [48, 67]),
        (["payload", "data_offsets"], [47, 68]),
        (["checksums", "data_offsets"], [0, 16]),
        (["checksums", "dtype"], "I64"),
        (["keys", "shape"], [2, 15]),
        (["more"], {"dtype": "U8", "shape": [0], "data_offsets": [68, 68]}),
        (["payload", "more"], 1),
    ],
    ids=str,
)
def test_tensors_that_contradict_the_schema_are_damage(tmp_path, path, value):
    header, body = copy.deepcopy(BASES["none"])
    parent = at(header, path[:-1])
    assert parent.get(path[-1]) != value
    parent[path[-1]] = value
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


def test_names_of_tensors_are_those_of_the_leaves(tmp_path):
    header, body = parts_of(file_of(batches_of(([torch.ones(2, 2)], 2))))
    header["output.x"] = header.pop("output.0")
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


def resized(
    count, rows_per_block, codec, shape, payload=b"", dtype=torch.float32, offsets=None, kind="tensor"
):
    """A file whose header, index and size agree with each other and say what they want."""
    schema = Schema(BARE, (Leaf("", kind, dtype, dtype, shape),))
    layout = Layout(NAMESPACE, schema, codec, count, rows_per_block, len(payload))
    arrays = {"keys": keys_of(count).data, "checksums": np.zeros(count, "<u8")}
    blocks = layout.blocks
    if offsets is None and blocks:
        offsets = [0] * blocks + [len(payload)]
    arrays["offsets"] = np.array(offsets, "<i8")
    head = layout.header([arrays[name].tobytes() for name in layout.index])
    return head + payload


def test_rows_beyond_the_limit_are_no_damage(tmp_path):
    # A smaller budget does not make the segment of another process a damaged one.
    for name in ("none", "ragged none", "ragged brotli", "brotli", "blosc2"):
        batches, codec = tiny(name)
        data = file_of(batches, codec)
        size = max(sum(len(leaf) for _, leaf in row) for row in rows_in(batches))
        check(opened(tmp_path / "a", data, limit=size), batches)
        with pytest.raises(TooLargeError):
            opened(tmp_path / "a", data, limit=size - 1)


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("extent", [2**20, 2**30, 2**45])
def test_small_files_with_giant_rows_are_refused(tmp_path, codec, extent):
    data = resized(3, 1, codec, (extent,), b"\0" * 50)
    assert harmless(tmp_path / "a", data) is TooLargeError


@pytest.mark.parametrize("codec", CODECS[1:])
def test_blocks_beyond_a_megabyte_that_rows_share_are_refused(tmp_path, codec):
    row = 1 << 18  # bytes
    assert harmless(tmp_path / "a", resized(9, 4, codec, (row // 4,), b"\0" * 50)) is Segment
    assert harmless(tmp_path / "a", resized(9, 5, codec, (row // 4,), b"\0" * 50)) is DamagedError


def test_a_row_that_was_made_to_explode_takes_memory_for_itself_alone(tmp_path):
    # 32 MB of zeros in a few bytes, thousands of times.
    size = 32 << 20
    batches = batches_of((torch.zeros(1, 1 << 23), 1))
    data = file_of(batches, "brotli")
    _, start = index_of(data)
    block = data[start:]
    assert len(block) < 1000
    count = 1000
    file = resized(
        count, 1, "brotli", (1 << 23,), block * count, offsets=[i * len(block) for i in range(count + 1)]
    )
    segment = opened(tmp_path / "a", file, limit=33 << 20)
    tracemalloc.start()
    columns = empty_columns(segment.layout.schema, 1)
    assert segment.read(np.array([count - 1]), columns, np.array([0])) is False  # another checksum
    assert tracemalloc.get_traced_memory()[1] < 4 * size
    tracemalloc.stop()
    assert harmless(tmp_path / "b", file) is TooLargeError


@pytest.mark.slow
def test_a_large_row_is_written_without_a_second_copy_of_it(tmp_path):
    row = torch.randn(1, 10_000_000, generator=torch.Generator().manual_seed(0))
    batches = batches_of((row, 1))
    tracemalloc.start()
    encoded = encode(batches, codec_of("brotli"))
    assert encoded.layout.codec == "brotli"
    write(FS, str(tmp_path), "a.safetensors", encoded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.7 * row.nbytes
    segment = opened(tmp_path / "a.safetensors")
    columns = empty_columns(segment.layout.schema, 1)
    assert segment.read(np.array([0]), columns, np.array([0]))
    assert columns[0].tobytes() == raw(row)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 2**63 - 1, -(2**63), -1, 50],
        [0, 60, 20, 30, 50],
        [1, 2, 3, 4, 50],
        [0, 10, 20, 30, 49],
        [0, 10, 20, 30, 51],
        [0, -1, 20, 30, 50],
        [0, 2**62, 2**62, 2**62, 50],
    ],
)
def test_offsets_that_do_not_grow_are_damage(tmp_path, offsets):
    data = resized(4, 1, "brotli", (100,), b"\0" * 50, offsets=offsets)
    assert harmless(tmp_path / "a", data) is DamagedError


def shaped(*extents):
    """A file of one row without bytes, whose extents are as it says."""
    schema = Schema(BARE, (Leaf("", "tensor", torch.uint8, torch.uint8, (-1,) * len(extents)),))
    arrays = {
        "keys": keys_of(1).data,
        "checksums": np.array([xxh3_64_intdigest(b"")], "<u8"),
        "offsets": np.zeros(2, "<i8"),
        "shapes": np.array([extents], "<i8"),
    }
    layout = Layout(NAMESPACE, schema, "none", 1, 1, 0)
    return layout.header([arrays[name].tobytes() for name in layout.index])


@pytest.mark.parametrize("extents", [(-1, 0), (0, -1), (2**62, 2), (2**63 - 1, 0), (2**48 + 1, 0)])
def test_shapes_that_cannot_be_are_damage(tmp_path, extents):
    assert harmless(tmp_path / "a", shaped(*extents)) is DamagedError
    assert read(opened(tmp_path / "a", shaped(7, 0)), [0]) == [[((7, 0), b"")]]


def test_many_open_extents_do_not_overflow(tmp_path):
    for extents in ([2**40] * 39 + [0], [0] + [2**40] * 39):
        harmless(tmp_path / "a", shaped(*extents))


@pytest.mark.parametrize("field", ["format_version", "rows_per_block"])
@pytest.mark.parametrize(
    "value",
    [float("inf"), float("nan"), 1e300, 1.0, True, None, [], "-1", "1.0", "1e9", "", " 1", "١", "9" * 5000],
)
def test_numbers_that_are_none_are_damage(tmp_path, field, value):
    header, body = claiming("none", **{f"metadata__{field}": value})
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 200_000, b'{"a":' * 100_000, b"[" + b"[]," * 50_000 + b"0]", b"1" * 10_000, b"\xff\xfe"),
        b'{"__metadata__":{"checksum":"0000000000000000"},"payload":{"data_offsets":[%s]}}' % (b"9" * 4300),
    ],
)
def test_json_that_was_made_to_explode_is_damage(tmp_path, text):
    assert harmless(tmp_path / "a", len(text).to_bytes(8, "little") + text) is DamagedError
    header, body = claiming("none", metadata__schema=text.decode("latin1"))
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


@pytest.mark.parametrize("size", [0, 1, 2**24 + 1, 2**31, 2**63, 2**64 - 1])
def test_headers_of_impossible_sizes_are_damage(tmp_path, size):
    data = file_of(*tiny("none"))
    assert harmless(tmp_path / "a", size.to_bytes(8, "little") + data[8:]) is DamagedError


def test_a_later_version_is_known_as_such(tmp_path):
    for name in TINY:
        for version in ("1", "3", "10", "999999999"):
            header, body = claiming(name, metadata__format_version=version, metadata__schema="another one")
            assert harmless(tmp_path / "a", assembled(header, body)) is NewerFormatError
    header, body = claiming("none", metadata__format_version="3")
    header["new"] = header.pop("checksums")
    assert harmless(tmp_path / "a", assembled(header, body)) is NewerFormatError
    header["__metadata__"]["format"] = "another"
    assert harmless(tmp_path / "a", assembled(header, body)) is DamagedError


def test_unknown_classes_and_dtypes_are_known_as_such(tmp_path):
    header, body = parts_of(file_of(batches_of((Pair(torch.ones(2), torch.ones(2)), 2))))
    schema = header["__metadata__"]["schema"]
    assert schema.count(":Pair") == 1
    for old, new in ((":Pair", ":Peer"), ("float32", "float99"), ('["left"', '["lost"')):
        header["__metadata__"]["schema"] = schema.replace(old, new)
        assert harmless(tmp_path / "a", assembled(header, body)) is UnknownClassError
    header["__metadata__"]["schema"] = schema
    assert harmless(tmp_path / "a", assembled(header, body)) is Segment


@pytest.mark.slow
def test_schemas_too_large_to_be_read_again_are_not_written(tmp_path):
    long = {"\u1234" * 2_000_000: torch.zeros(2)}
    with pytest.raises(UnserialisableError):
        file_of(batches_of((long, 2)))
