"""Samples as rows and back: the same types, dtypes, order of keys and bits, in memory of their own."""

import collections
import contextlib
import enum
import json
import math
import os
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import example, given, settings
from torch.utils import _pytree as pytree

from tests.helpers.storage import DTYPES, NAMESPACES, key_of
from torchcache2 import CachedDataset
from torchcache2.core.errors import DamagedError, OutputError, UnknownClassError, UnreadableError
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.core.values import UnstorableError
from torchcache2.engine.values.kinds import Image, Packed
from torchcache2.engine.values.packed import pack, unpack
from torchcache2.engine.values.samples import Samples, from_rows, rebuilder
from torchcache2.files.schema import schema_from_json, schema_to_json
from torchcache2.tiers.memory.tier import MemoryTier

SOAK = bool(os.environ.get("SOAK"))


class Point(NamedTuple):
    x: Any
    y: Any


class Tagged:
    """A node type of somebody's, which keeps a list beside its children."""

    def __init__(self, children, tags):
        self.children, self.tags = children, tags


pytree.register_pytree_node(Tagged, lambda node: (node.children, node.tags), lambda c, t: Tagged(list(c), t))


def same(a, b):
    """Assert that two samples are the same, but that images are in memory."""
    if isinstance(a, PIL.Image.Image):
        assert type(b) is PIL.Image.Image
        assert (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
        same(a.info, b.info)
        assert a.getpalette(None) == b.getpalette(None)
        assert (a.palette and a.palette.mode) == (b.palette and b.palette.mode)
        return
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert bits(a) == bits(b)
        assert not is_dense(a.shape, a.stride(), 1) or a.stride() == b.stride()
        if type(a) is not torch.Tensor:
            same(vars(a), vars(b))
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.dtype.type, a.dtype.str) == (b.dtype, b.dtype.type, b.dtype.str)
        assert a.shape == b.shape and a.tobytes() == b.tobytes() and b.flags.writeable
        assert not is_dense(a.shape, a.strides, a.itemsize) or a.strides == b.strides
    elif isinstance(a, np.generic):
        if isinstance(a, (np.str_, np.bytes_)):
            assert a == b and len(a) == len(b)
        elif isinstance(a, np.longdouble):  # six of its bytes are padding
            assert a.tobytes()[:10] == b.tobytes()[:10]
        else:
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    elif isinstance(a, (tuple, list, collections.deque)):
        assert len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, dict):
        assert getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
        same(list(a), list(b))
        same(list(a.values()), list(b.values()))
    elif isinstance(a, Tagged):
        same((a.children, a.tags), (b.children, b.tags))
    elif isinstance(a, (float, complex)):
        assert np.array(a).tobytes() == np.array(b).tobytes()
    else:
        assert a == b


def bits(tensor):
    if tensor.numel() == 0:
        return b""
    plain = tensor.as_subclass(torch.Tensor).contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def is_dense(shape, strides, itemsize):
    """Whether the elements fill their memory, in whatever order the dimensions have; it is kept then."""
    expected = itemsize
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent < 2 or stride != expected:
            return False
        expected *= extent
    return True


def through(samples, batch):
    """A batch as rows and back, each schema by way of its JSON."""
    rows = samples.to_rows(batch)
    assert rows.refused == {}
    found = [None] * len(batch)
    for positions, part in rows.parts:
        schema = schema_from_json(json.loads(json.dumps(schema_to_json(part.schema))))
        assert schema == part.schema and hash(schema) == hash(part.schema)
        for leaf, column in zip(schema.leaves, part.columns, strict=True):
            assert column.shape == (len(positions), *leaf.stored_shape) and column.dtype == leaf.stored
            assert column.is_contiguous() and column.device.type == "cpu"
        pairs = zip(positions.tolist(), from_rows(Rows(schema, part.columns, len(part))), strict=True)
        for position, sample in pairs:
            found[position] = sample
        rebuild = rebuilder(schema)
        for i, position in enumerate(positions.tolist()):
            columns = [column.reshape(len(positions), -1) for column in part.columns]
            row = [bytearray(bits(column[i])) for column in columns]
            same(found[position], rebuild(row))
    return found


def one(sample):
    (found,) = through(Samples(), [sample])
    return found


# What can be stored, by hypothesis.

NUMPY = ["?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">u4", "<i8", "<u8", "<f2", "<f4", ">f4", "<f8", "<c8"]
NUMPY += [">c16", "M8[ns]", "m8[D]", ">M8[s]", "g", "S3", "U2", ">U2", "q", "Q", "l", "i"]
SIDES = st.integers(0, 3)
SHAPES = st.lists(SIDES, max_size=3)


def noise(size, seed):
    return bytearray(np.random.default_rng(seed).bytes(size))


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    data = noise(math.prod(shape) * dtype.itemsize, draw(st.integers(0, 99)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = tensor.view(shape)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.integers(0, 4)) == 0 and dtype.itemsize > 1:
        if draw(st.booleans()):
            tensor = tensor[..., ::2]
        elif len(tensor):
            tensor = tensor[:1].expand(2, *tensor.shape[1:])
    return tensor


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), np.dtype(draw(st.sampled_from(NUMPY)))
    data = noise(math.prod(shape) * dtype.itemsize, draw(st.integers(0, 99)))
    if dtype.kind == "U":
        array = np.full(shape, draw(st.text(st.characters(codec="utf-8"), max_size=2)), dtype)
    else:
        array = np.frombuffer(bytearray(b & 1 for b in data) if dtype.kind == "b" else data, dtype).reshape(
            shape
        )
    if shape and draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.integers(0, 4)) == 0:
        array = array[::-1] if draw(st.booleans()) else array[..., ::2]
    if draw(st.booleans()) and not shape:
        return array[()]
    return array


@st.composite
def images(draw):
    mode, size = draw(st.sampled_from(sorted(Image.modes))), (draw(st.integers(1, 9)), draw(SIDES))
    image = PIL.Image.new(mode, size)
    if all(size):
        image.frombytes(bytes(noise(len(image.tobytes()), draw(st.integers(0, 99)))))
    if mode in ("P", "PA") and draw(st.booleans()):
        palette = draw(st.sampled_from(["RGB", "RGBA"]))
        image.putpalette(bytes(noise(draw(st.integers(1, 256)) * len(palette), 5)), palette)
    image.info = draw(st.dictionaries(st.text(max_size=3), INFO, max_size=2))
    return image


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=5),
)
INFO = st.one_of(PLAIN, st.tuples(PLAIN, PLAIN), st.lists(PLAIN, max_size=3))
NUMBERS = st.one_of(*[st.lists(one, max_size=20) for one in (st.integers(), st.floats(), st.booleans())])
SCALARS = st.one_of(st.text(max_size=3).map(np.str_), st.binary(max_size=3).map(np.bytes_))
LEAVES = st.one_of(PLAIN, NUMBERS, NUMBERS.map(tuple), tensors(), arrays(), images(), SCALARS)
TEXTS = st.text(max_size=3)
KEYS = st.one_of(
    TEXTS, st.integers(), st.booleans(), st.none(), st.binary(max_size=2), st.tuples(st.integers())
)


def nested(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXTS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(TEXTS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(TEXTS, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 3)),
        st.builds(Point, inner, inner),
        st.builds(Tagged, st.lists(inner, max_size=2), st.lists(TEXTS | st.integers(0, 9), max_size=2)),
    )


SAMPLES = st.recursive(LEAVES, nested, max_leaves=8)


@settings(max_examples=150 if SOAK else 40)
@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_any_sample_comes_back_as_it_was(batch):
    samples = Samples()
    for one_more in (batch, batch[::-1]):
        for sample, found in zip(one_more, through(samples, one_more), strict=True):
            same(sample, found)


@settings(max_examples=150 if SOAK else 40)
@given(SAMPLES)
@example(np.array([True])[::-1])
@example(np.arange(5)[None][::-1])
def test_any_sample_can_be_packed(sample):
    same(sample, unpack(pack(sample)))


@settings(max_examples=60 if SOAK else 20)
@given(SAMPLES, st.data())
def test_damaged_bytes_are_refused_or_a_sample(sample, data):
    packed = bytearray(pack(sample))
    for size in {0, 1, len(packed) // 2, len(packed) - 1}:
        with pytest.raises(UnreadableError):
            unpack(bytes(packed[:size]))
    with pytest.raises(DamagedError):
        unpack(bytes(packed) + b"N")
    for _ in range(8):
        place, byte = data.draw(st.integers(0, len(packed) - 1)), data.draw(st.integers(0, 255))
        other = bytearray(packed)
        other[place] = byte
        with contextlib.suppress(UnreadableError, UnstorableError):
            pack(unpack(bytes(other)))


# What the bytes are.

GOLDEN = [
    (None, "4e"),
    ([True, None, False], "6c03000000544e46"),
    (-2, "69feffffffffffffff"),
    (2**64, "4909000000000000000000000001"),
    (1.5, "66000000000000f83f"),
    (1 - 2j, "63000000000000f03f00000000000000c0"),
    ("aé\ud800", "730600000061c3a9eda080"),
    (b"\0\1", "62020000000001"),
    (("a",), "74010000007301000000 61"),
    ({(1, None): 0.0}, "6401000000 7402000000 690100000000000000 4e 660000000000000000"),
    (collections.OrderedDict(a=None), "6f01000000 730100000061 4e"),
    ([1, -1], "6e69 10000000 0100000000000000 ffffffffffffffff"),
    ((True, False), "7562 02000000 0100"),
    ([1j], "6e63 10000000 0000000000000000 000000000000f03f"),
    (torch.tensor([1, 2], dtype=torch.int16), "52 05 696e743136 01 0200000000000000 01000200"),
    (np.float32(1), "47 73030000003c6634 01 52 07 666c6f61743332 00 0000803f"),
    (np.str_("a"), "47 730100000055 01 730100000061"),
    (np.array([[1], [2]], ">u2"), "41 73030000003e7532 01 52 05 75696e7438 03 0200000000000000"
     "0100000000000000 0200000000000000 00010002"),
    (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, "58 7569 10000000 0100000000000000"
     "0000000000000000 01 52 05 75696e7438 02 0200000000000000 0200000000000000 01020304"),
    (PIL.Image.new("L", (2, 1), 7), "50 7402000000 73010000004c 4e 02 52 05 75696e7438 02 0100000000000000"
     "0200000000000000 0707 6400000000"),
    (collections.deque([None], 2), "43 7311000000 636f6c6c656374696f6e733a6465717565 4e"
     "690200000000000000 01000000 4e"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"), GOLDEN, ids=[str(type(value).__name__) for value, _ in GOLDEN]
)
def test_packed_bytes_stay_as_they_are(value, expected):
    assert pack(value).hex() == "01" + expected.replace(" ", "")
    same(value, unpack(bytes.fromhex("01" + expected)))


def test_the_example_on_the_page_is_real():
    packed = pack((torch.tensor([1, 2], dtype=torch.int16), "a", {3: [0.5]}))
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    dump = page.split("a tuple of 3\n")[1].split("```")[0]
    found = b""
    for line in dump.splitlines():
        if not line.startswith(" "):
            assert int(line[:6], 16) == len(found)
            found += bytes.fromhex(line[6:].split("|")[0])
    assert found == packed


STRUCTURE = {
    "dict": [
        [
            "image",
            {
                "node": [
                    "torchcache2.datasets.images:Image",
                    None,
                    {"tuple": ["P", "RGB"]},
                    [None, PACKED, None],
                ]
            },
        ]
        for PACKED in [{"node": ["torchcache2.datasets.nodes:Packed", None, None, [None]]}]
    ]
    + [
        ["array", {"node": ["torchcache2.datasets.arrays:NumpyArray", None, ">f4", [None]]}],
        ["number", {"node": ["torchcache2.datasets.arrays:NumpyScalar", None, "<f8", [None]]}],
        ["box", {"node": ["torchcache2.datasets.arrays:Numbers", None, "list", [None]]}],
        ["x", {"node": ["torchcache2.datasets.nodes:Permuted", None, {"tuple": [1, 0]}, [None]]}],
        ["y", {"tuple": [None, None, None]}],
    ]
}


def test_the_schema_stays_as_it_is():
    sample = {
        "image": PIL.Image.new("P", (3, 2)),
        "array": np.zeros((2, 1), ">f4"),
        "number": np.float64(1),
        "box": [1, 2, 3],
        "x": torch.zeros(2, 3).T,
        "y": (1, "ab", None),
    }
    ((_, rows),) = Samples().to_rows([sample]).parts
    data = schema_to_json(rows.schema)
    assert data["structure"] == STRUCTURE
    assert [(leaf["path"], leaf["kind"], leaf["dtype"], leaf["shape"]) for leaf in data["leaves"]] == [
        ("['image'].pixels", "tensor", "uint8", [2, 3]),
        ("['image'].info", "bytes", "uint8", [6]),
        ("['image'].palette", "tensor", "uint8", [len(sample["image"].im.getpalette("RGB", "RGB"))]),
        ("['array']", "tensor", "uint8", [2, 1, 4]),
        ("['number']", "tensor", "float64", []),
        ("['box']", "tensor", "int64", [3]),
        ("['x']", "tensor", "float32", [2, 3]),
        ("['y'][0]", "int", "uint8", [8]),
        ("['y'][1]", "str", "uint8", [2]),
        ("['y'][2]", "none", "uint8", [0]),
    ]


# What is damaged, or lies.

WORD = "ffffffff"
LONG = "ffffffffffffffff"
LIES = {
    "nothing": "",
    "a later version": "024e",
    "no version": "004e",
    "no value": "01",
    "no known tag": "017a",
    "a text that is too long": f"0173{WORD}61",
    "a list that is too long": f"016c{WORD}4e",
    "a dict that is too long": f"0164{WORD}4e4e",
    "a text that is no text": "017301000000ff",
    "a large number that is small": "01490100000005",
    "a large number of nothing": "014900000000",
    "a key twice": "0164020000004e4e4e4e",
    "a list as key": "0164010000006c000000004e",
    "a tensor as key": "01640100000052 05 75696e7438 00 05 4e",
    "numbers of no kind": "016e7a01000000ff",
    "half a number": "016e690700000000000000000000",
    "a boolean that is none": "016e620100000002",
    "a tensor without dtype": "0152 00 00 05",
    "a tensor of no dtype": "0152 03 666f6f 00 05",
    "a quantized tensor": "0152 06 7175696e7438 00 05",
    "a tensor that is too long": f"0152 05 75696e7438 01 {LONG} 05",
    "a tensor whose size overflows": f"0152 05 75696e7438 03 {LONG} {LONG} {LONG} 05",
    "a tensor without elements whose shape overflows": f"0152 05 75696e7438 02 {LONG} 0000000000000000",
    "a boolean tensor that is none": "0152 04 626f6f6c 00 07",
    "an array of objects": "0141 73020000007c4f 01 52 05 75696e7438 01 0800000000000000 0000000000000000",
    "an array of records": "0141 73030000007c5634 01 52 05 75696e7438 01 0400000000000000 00000000",
    "an array of another dtype": "0141 73030000003c6634 01 52 05 75696e7438 01 0400000000000000 00000000",
    "an array of another size": "0141 73030000003e6634 01 52 05 75696e7438 01 0300000000000000 000000",
    "an array without a child": "0141 73030000003c6634 00",
    "an array of a text": "0141 73030000003c6634 01 730100000061",
    "a scalar with dimensions": "0147 73030000007c7531 01 52 05 75696e7438 01 0100000000000000 00",
    "a text of numpy that is none": "0147 730100000055 01 4e",
    "an order that is none": "0158 7569 08000000 0500000000000000 01 52 05 75696e7438 01 0100000000000000 00",
    "an image of no mode": "0150 7402000000 73010000005a 4e 02 52 05 75696e7438 02 0100000000000000"
    "0100000000000000 07 6400000000",
    "an image of another dtype": "0150 7402000000 73010000004c 4e 02 52 05 75696e7438 01 0100000000000000 07"
    "6400000000",
    "an image of signed pixels": "0150 7402000000 73010000004c 4e 02 52 04 696e7438 02 0100000000000000"
    "0100000000000000 07 6400000000",
    "an image of many empty lines": "0150 7402000000 73010000004c 4e 02 52 05 75696e7438 02 00000000ffffff00"
    "0000000000000000 6400000000",
    "an image without a palette": "0150 7402000000 730100000050 7303000000524742 02 52 05 75696e7438 02"
    "0100000000000000 0100000000000000 07 6400000000",
    "a class that is none": "0143 730600000061206220 63 4e 4e 00000000",
    "a class that is not imported": "0143 7307000000 6e6f6e653a4e6f 4e 4e 00000000",
    "a class that is no node": "0143 730d000000 6275696c74696e733a696e74 30 4e 4e 00000000",
    "a function for a class": "0143 7309000000 6f733a73797374656d 4e 4e 00000000",
    "a node that has a tag": "0143 730d000000 6275696c74696e733a6c697374 4e 4e 00000000",
    "too many children": f"0143 7311000000 636f6c6c656374696f6e733a6465717565 4e 4e {WORD}",
    "a deque without room": "0143 7311000000 636f6c6c656374696f6e733a6465717565 4e 690000000000000000"
    "01000000 4e",
    "a class that may not be named": "014b09000000 6f733a73797374656d",
    "too deep": "01" + "6c01000000" * 101 + "4e",
}


@pytest.mark.parametrize("lie", LIES)
def test_bytes_that_lie_are_refused(lie):
    data = bytes.fromhex(LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_deepest_value_is_packed_and_a_deeper_one_is_refused():
    value = None
    for _ in range(100):
        value = [value]
    same(value, unpack(pack(value)))
    same(value, one(value))
    for _ in range(100):
        value = [value]
    rows = Samples().to_rows([value, 1])
    assert "sample[0][0]" in str(rows.refused[0]) and "nested more than 100 deep" in str(rows.refused[0])
    value = []
    value.append(value)
    assert "nested more than" in str(Samples().to_rows([value]).refused[0])


HONEST = [
    np.zeros((2, 3), ">f4"),
    np.float32(1),
    torch.zeros(2, 3).T,
    [1, 2],
    PIL.Image.new("RGB", (2, 2)),
    np.str_("a"),
    {1: 2},
]


@pytest.mark.parametrize("sample", HONEST, ids=lambda sample: type(sample).__name__)
@pytest.mark.parametrize(
    "context",
    [None, "", "x", "<f8", "|O", "|V4", "<U999999999", "tuple", 1, [], {"tuple": []}, {"tuple": [1, 2]},
     {"tuple": ["RGB", "RGB"]}, {"tuple": ["F", None]}, {"tuple": ["<f4", {"tuple": [0, 0]}]}],
)  # fmt: skip
def test_a_schema_that_lies_makes_no_sample(sample, context):
    ((_, rows),) = Samples().to_rows([sample]).parts
    data = schema_to_json(rows.schema)
    data["structure"]["node"][2] = context
    with contextlib.suppress(UnreadableError):
        from_rows(Rows(schema_from_json(data), rows.columns, 1))


# Who owns the memory.


def everything():
    return {
        "x": torch.arange(6.0).view(2, 3),
        "t": torch.arange(6.0).view(2, 3).T,
        "a": np.arange(4),
        "b": np.arange(4).astype(">i2"),
        "l": [1, 2, 3],
        "m": ["a", [torch.zeros(2)], {"b": np.zeros(2)}] * 20,
        "i": PIL.Image.new("RGB", (2, 2)),
    }


def spoil(sample):
    sample["x"].fill_(9)
    sample["t"].fill_(9)
    sample["a"][:] = 9
    sample["b"][:] = 9
    sample["l"][0] = sample["m"][0] = 9
    sample["m"][1][0].fill_(9)
    sample["m"][2]["b"][:] = 9
    sample["i"].putpixel((0, 0), (9, 9, 9))
    sample["i"].info["new"] = 1


def test_no_memory_is_shared():
    batch = [everything() for _ in range(3)]
    ((_, rows),) = Samples().to_rows(batch).parts
    spoil(batch[0])
    found = from_rows(rows)
    same(everything(), found[0])
    for column in rows.columns:
        column.view(-1).view(torch.uint8).fill_(3)
    spoil(found[1])
    same(everything(), found[0])
    same(everything(), found[2])
    for tensor in (found[0]["x"], found[0]["t"], found[0]["m"][1][0]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert found[0]["a"].base is None and found[0]["b"].base is None


def test_tensors_of_inference_mode_come_back_as_ordinary_ones():
    with torch.inference_mode():
        sample = torch.arange(3.0)
        ((_, rows),) = Samples().to_rows([sample, sample]).parts
        (found, _) = from_rows(rows)
    assert not found.is_inference() and torch.equal(found, torch.arange(3.0))
    found.requires_grad_()


def test_a_default_device_and_views_of_complex_numbers_do_not_matter():
    z = torch.tensor([1 + 2j, 3 - 1j])
    batch = [z.conj(), z.conj().imag, torch.tensor([1.0]), "", 5, [1.5]]
    with torch.device("meta"):
        found = through(Samples(), batch)
    for sample, back in zip(batch, found, strict=True):
        same(sample.resolve_conj().resolve_neg() if isinstance(sample, torch.Tensor) else sample, back)


# Structures, shapes, schemas.


def test_samples_of_one_shape_are_one_part():
    batch = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i) for i in range(100)]
    ((positions, rows),) = Samples().to_rows(batch).parts
    assert positions.tolist() == list(range(100)) and len(rows.columns) == 2
    for sample, found in zip(batch, from_rows(rows), strict=True):
        same(sample, found)


def test_ragged_samples_have_one_structure_and_a_part_for_each_shape():
    batch = [(torch.zeros(i % 3, 4), i, "a" * (i % 2)) for i in range(60)]
    parts = Samples().to_rows(batch).parts
    assert len(parts) == 6 and len({rows.schema.family for _, rows in parts}) == 1
    assert sorted(np.concatenate([positions for positions, _ in parts]).tolist()) == list(range(60))


def test_structures_after_the_first_sixteen_are_packed():
    samples = Samples()
    batch = [{f"key {i}": torch.tensor([i])} for i in range(100)]
    for _ in range(2):
        parts = samples.to_rows(batch).parts
        assert len({rows.schema.family for _, rows in parts}) == 17
        assert len({rows.schema.structure.type for _, rows in parts}) == 2
        for sample, found in zip(batch, through(samples, batch), strict=True):
            same(sample, found)
    assert sum(rows.schema.structure.type is Packed for _, rows in parts) >= 1


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: None}, {True: None}),
        ({0.0: None}, {-0.0: None}),
        ({1: {}}, {1.0: {}}),
        ((1, 2), [1, 2]),
        ((), []),
        ([1], [True]),
        (np.int64(1), np.array(1)),
        (np.longlong(1), np.int64(1)),
        (Tagged([], ["a"]), Tagged([], [["a"]])),
        (collections.OrderedDict(), {}),
        (torch.zeros(2, 2), torch.zeros(2, 2).T),
        (torch.zeros(2, 2), np.zeros((2, 2), "f4")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_that_compare_equal_are_told_apart_in_a_tier(a, b):
    tier = MemoryTier(1 << 20)
    for order in ([a, b], [b, a]):
        namespace = NAMESPACES[order[0] is a]
        keys = Keys(namespace, np.frombuffer(key_of(1) + key_of(2), np.uint8).reshape(2, 16))
        for positions, rows in Samples().to_rows(order).parts:
            assert tier.put(keys.take(positions), rows) == len(positions)
        found = {}
        for positions, rows in tier.get(keys).parts:
            found |= zip(positions.tolist(), from_rows(rows), strict=True)
        same(order, [found[0], found[1]])


# What cannot be stored.


class Colour(enum.IntEnum):
    RED = 1


class Mine(torch.Tensor):
    pass


def local_point():
    class Local(NamedTuple):
        x: Any

    return Local(1)


REFUSED = [
    ({1, 2}, "set", "return list({})"),
    (Colour.RED, "Colour", "return {}.value"),
    (object(), "object", "return tensors"),
    (torch.zeros(2).as_subclass(Mine), "Mine", "as_subclass(torch.Tensor)"),
    (torch.nn.Parameter(torch.zeros(2)), "Parameter", "detach()"),
    (torch.zeros(2, requires_grad=True), "requires gradients", "detach()"),
    (torch.zeros(2).to_sparse(), "not dense", "dense"),
    (torch.zeros(2, device="meta"), "on meta", "on the CPU"),
    (np.array([object()]), "array of object", "parts"),
    (np.zeros(2, [("a", object)]), "array of", "parts"),
    (np.ma.array([1]), "MaskedArray", "return numpy.array({})"),
    (np.void(b"a"), "array of |V1", "parts"),
    (local_point(), "Local", "top level of a module"),
    (collections.defaultdict(lambda: 1), "defaultdict that keeps a builtins.function", ""),
    (Tagged([], [{1}]), "Tagged that keeps a builtins.set", ""),
    ({frozenset(): 1}, "key of type frozenset", "texts"),
    (PIL.Image.open, "function", "return tensors"),
]


@pytest.mark.parametrize(("value", "what", "advice"), REFUSED, ids=[what for _, what, _ in REFUSED])
def test_what_cannot_be_stored_is_named_with_its_place(value, what, advice):
    plain = {"x": torch.zeros(2), "y": [1, "a"]}
    samples = Samples()
    batch = samples.to_rows([plain, {"x": 1, "y": ("a", value)}, plain, {"y": ["a"] * 20 + [{3: value}]}])
    assert list(batch.refused) == [1, 3]
    for position, place in ((1, "sample['y'][1]"), (3, "sample['y'][20][3]")):
        assert type(batch.refused[position]) is OutputError
        text = str(batch.refused[position])
        assert what in text and advice.replace("{}", place) in text
        assert place in text
    ((positions, rows),) = batch.parts
    assert positions.tolist() == [0, 2]
    same(plain, from_rows(rows)[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: setattr(tensor, "mark", 1),
        lambda tensor: tensor.requires_grad_(),
        lambda tensor: setattr(tensor, "__class__", Mine),
    ],
)
def test_what_looks_like_a_sample_before_is_looked_at_all_the_same(change):
    samples, other = Samples(), torch.zeros(2)
    change(other)
    batch = samples.to_rows([(torch.zeros(2), 1), (torch.zeros(2), 1), (other, 1), (torch.zeros(2), True)])
    assert list(batch.refused) == [2] and [len(rows) for _, rows in batch.parts] == [2, 1]


# Images from files, and tensor classes of torchvision.


@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "tiff", "bmp"])
def test_an_image_that_was_opened_comes_back_in_memory(tmp_path, form):
    image = PIL.Image.new("P" if form in ("png", "gif") else "RGB", (7, 5))
    image.frombytes(bytes(noise(len(image.tobytes()), 3)))
    extra = {"transparency": 3} if form in ("png", "gif") else {}
    image.save(tmp_path / "file", form, dpi=(72, 72), **extra)
    with PIL.Image.open(tmp_path / "file") as opened:
        (found,) = through(Samples(), [opened])
        kept = {name: value for name, value in opened.info.items() if name in found.info}
        plain = PIL.Image.Image()._new(opened.im)
        plain.palette, plain.info = opened.palette, kept
        same(plain, found)
        assert found.convert("RGBA").tobytes() == opened.convert("RGBA").tobytes()
        left_out = {name: value for name, value in opened.info.items() if name not in found.info}
        assert all(
            "IFDRational" in repr([type(v) for v in np.ravel(np.array(value, object))])
            for value in left_out.values()
        )


def test_an_image_that_is_cut_off_is_refused(tmp_path):
    PIL.Image.effect_noise((50, 50), 50).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    with PIL.Image.open(tmp_path / "b.png") as image:
        assert "cannot be loaded" in str(Samples().to_rows([image]).refused[0])


@pytest.fixture(params=["stand-in", "real"])
def tv(request, monkeypatch):
    if request.param == "real":
        return pytest.importorskip("torchvision.tv_tensors")
    module = types.ModuleType("torchvision.tv_tensors")
    for name in ("Image", "Mask", "Video", "BoundingBoxes", "KeyPoints"):
        setattr(module, name, type(name, (torch.Tensor,), {"__module__": "torchvision.tv_tensors._x"}))
    module.BoundingBoxFormat = enum.Enum("BoundingBoxFormat", "XYXY XYWH")
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", module)
    return module


def boxes(tv, *shape, form="XYXY", canvas=(4, 5)):
    value = torch.rand(*shape, 4).as_subclass(tv.BoundingBoxes)
    value.format, value.canvas_size, value.clamping_mode = tv.BoundingBoxFormat[form], canvas, "soft"
    return value


def test_tv_tensors_come_back_with_their_class_and_marks(tv):
    batch = [
        {"image": torch.rand(3, 4, 5).as_subclass(tv.Image), "boxes": boxes(tv, 2, canvas=(4, i)), "label": i}
        for i in range(3)
    ]
    batch += [boxes(tv, 0, form="XYWH", canvas=[3, 3]), boxes(tv, 3, canvas=torch.Size([2, 2]))]
    batch += [
        torch.rand(4, 5, 3).permute(2, 0, 1).as_subclass(tv.Image),
        torch.ones(2, 2).bool().as_subclass(tv.Mask),
    ]
    batch += [[boxes(tv, 1)] * 30]
    samples = Samples()
    for sample, found in zip(batch, through(samples, batch), strict=True):
        same(sample, found)
    assert len({rows.schema.family for _, rows in samples.to_rows(batch[:3]).parts}) == 1


def test_a_tv_tensor_where_torchvision_is_not_is_unknown_and_not_damaged(tv, monkeypatch):
    ((_, rows),) = Samples().to_rows([boxes(tv, 1)]).parts
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", None)
    with pytest.raises(UnknownClassError, match=r"torchvision\.tv_tensors"):
        from_rows(rows)


def test_a_tensordict_is_a_sample_and_an_output(path):
    tensordict = pytest.importorskip("tensordict")

    def made(x, **options):
        return tensordict.TensorDict({"y": x * 2, "z": {"w": x[..., 0]}}, x.shape[:1], **options)

    samples = [made(torch.ones(i, 2), **({"device": "cpu"} if i % 2 else {})) for i in range(1, 5)]
    samples[1].lock_()
    with contextlib.closing(CachedDataset(samples, path, name="dicts")) as cached:
        cached.warmup()
    with contextlib.closing(CachedDataset(None, path)) as served:
        for found, sample in zip(served, samples, strict=True):
            assert type(found) is type(sample) and (found == sample).all()
            for name in ("batch_size", "device", "is_locked"):
                assert getattr(found, name) == getattr(sample, name)
    with contextlib.closing(CachedDataset(torch.rand(8, 2), memory_size="1MB", map=made)) as features:
        for size in (4, 3):
            found = next(iter(features.loader(size)))
            assert (found == made(features._recipe.dataset[:size])).all() and found.batch_size == (size,)
        assert features.stats().misses == 4
