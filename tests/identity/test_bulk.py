"""Long lists of plain values, as they are read in bulk: no two that differ give the same bytes."""

import collections
import enum
import pathlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchcache2.identity.encoding import Bulk, Encoder
from torchcache2.identity.sourcecode import CompiledTexts
from torchcache2.identity.walk import Walk

Named = collections.namedtuple("Named", "a b")


class Word(str):
    pass


class Number(int):
    pass


class Colour(enum.IntEnum):
    RED = 1


NAN = float("nan")
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
POOL = [
    *(0, 1, -1, True, False, None, 0.0, -0.0, 1.0, NAN, OTHER_NAN, float("inf"), 1j, complex(-0.0, 1)),
    *(255, 2**31 - 1, 2**31, 2**64, -(2**70), 1e300, 5e-324),
    *("", "1", "a", "é", "\ud800", "\udcff", "a\0", "a\0b", "'", "',", '"', "\\", "n", "None", "…"),
    *(b"", b"1", b"a", b"a\0", b"\xff", "1".encode("utf-16-le"), np.int64(1).tobytes()),
    *((), (1,), (True,), (1.0,), ("1",), ((1,),), (1, 2), ((1, 2),), (1, (2,)), ((), ()), ("1", "2")),
    *(("1', '2",), ("1,", "2"), "e\u0301"),
    *([], [1], [(1,)], [[1]], [1, 2], ([1],), {}, {1: 2}, {1: (2,)}, {2: 1}, {1: 2, 3: 4}, {3: 4, 1: 2}),
    *({"1": 2}, {(1,): 2}),
    *(pathlib.PurePosixPath("1"), pathlib.PureWindowsPath("1"), pathlib.Path("1"), (pathlib.Path("1"),)),
    *(np.int64(1), np.int32(1), np.uint8(1), np.float64(1), np.float32(1), np.bool_(True), np.str_("1")),
    *(np.bytes_(b"1"), np.datetime64("2026-01-01"), np.timedelta64(1, "s")),
    *((np.int64(1), 2), ([pathlib.Path("1")],), {pathlib.Path("1"): 1}, {1: pathlib.Path("1")}),
]  # fmt: skip


def typed(value):
    """A value as a text that tells types and bits."""
    kind = type(value)
    if kind in (tuple, list):
        return f"{kind.__name__}({', '.join(map(typed, value))})"
    if kind is dict:
        return f"dict({', '.join(f'{typed(key)}: {typed(item)}' for key, item in value.items())})"
    if kind is float:
        return f"float {struct.pack('<d', value).hex()}"
    if isinstance(value, np.generic):
        return f"{value.dtype.str} {value.tobytes().hex()}"
    return f"{kind.__name__} {value!r}"


def read(value, held=(tuple, list, dict)):
    return Bulk(-1, held).read(value, 0)


def long(values, at=0):
    """A list that is long enough, with some values in it."""
    return [0] * at + list(values) + [0] * (1000 - at)


def test_values_of_other_types_or_bits_differ_alone_and_beside_each_other():
    found = {}
    for value in POOL:
        for one in ([value], [(value, 1)], [[value]], [{1: value}]):
            found.setdefault(read(long(one)), set()).add(typed(one))
    assert None not in found
    assert all(len(texts) == 1 for texts in found.values())
    assert len(found) == len(set.union(*found.values()))


@pytest.mark.slow
@given(st.data())
def test_lists_give_the_same_bytes_exactly_if_their_types_and_values_are_the_same(data):
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    element = st.sampled_from(POOL) | st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3).map(tuple)
    )
    lists = st.lists(element, max_size=4)
    left = data.draw(lists)
    right = data.draw(lists | st.permutations(left) | st.just(left) | st.just(left + left[-1:]))
    at = data.draw(st.sampled_from([0, 999]))
    assert (read(long(left, at)) == read(long(right, at))) == (typed(left) == typed(right))


@pytest.mark.parametrize("size", [1000, 8191, 8192, 8193, 20_000])
def test_each_element_and_its_place_count(size):
    values = [(f"path {i}", i % 10) for i in range(size)]
    seen = {read(values), read([*values[:-1], ("path", 1)]), read([*values, values[-1]])}
    for place in {0, size // 2, size - 1}:
        seen.add(read([*values[:place], (*values[place], None), *values[place + 1 :]]))
        seen.add(read([*values[:place], list(values[place]), *values[place + 1 :]]))
    seen.add(read([values[-1], *values[:-1]]))
    seen.add(read([*values[0], *values[1:]]))
    assert len(seen - {None}) == 5 + 2 * 3


def test_a_dict_counts_by_keys_values_and_order_and_a_set_by_its_elements():
    pairs = {str(i): i for i in range(2000)}
    other = dict(reversed(pairs.items()))
    assert read(pairs) == read(dict(pairs)) == read(collections.OrderedDict(pairs))
    assert read(collections.defaultdict(int, pairs)) == read(pairs)
    moved = collections.OrderedDict(pairs)
    moved.move_to_end("0")
    found = [read(one) for one in (pairs, other, moved, pairs | {"0": 0.0}, pairs | {"0": "0"})]
    assert len(set(found)) == 5
    words = list(pairs)
    assert read(set(words)) == read(frozenset(reversed(words)))
    assert read(set(words)) != read({*words[1:], 0})


cycle = [0] * 1000
cycle.append([cycle])
deep = [0] * 1000
for _ in range(12):
    deep = [deep, *[0] * 1000]


@pytest.mark.parametrize(
    "element",
    [
        *(Named(1, 2), (Named(1, 2),), Word("a"), Number(1), (Colour.RED,), {1}, collections.OrderedDict()),
        *(bytearray(b"1"), memoryview(b"1"), np.zeros(1), np.void(b"1"), ..., (..., "PosixPath", "1")),
        *(object(), len, int, (x for x in ()), compile("1", "", "eval"), cycle, deep),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_read_one_by_one(element):
    assert read(long([element])) is None
    assert read([*range(9000), (element,)]) is None
    assert read({**dict.fromkeys(range(1000)), 1000: element}) is None


def test_a_module_has_no_list_in_bulk_in_which_an_edit_would_not_be_noticed():
    assert read(long([(1,)]), held=(tuple,)) is not None
    for element in ([1], {1: 2}, ([],)):
        assert read(long([element]), held=(tuple,)) is None


def test_the_bytes_are_those_of_every_version():
    values = long([(f"é {i}", i, -0.5, None, True, b"x", (2**70,), [1], {"a": 1j}) for i in range(3)])
    assert read(values)[-16:].hex() == "e5f2f457699ad68ecedf93f6dcdc4293"
    assert (
        read([*values, pathlib.PurePosixPath("a/b"), np.float32(1)])[-16:].hex()
        == "4c0404e056fdda56319bef9a8f0623bf"
    )


def walk(value):
    module = nn.Identity()
    module.held = value
    return Walk(module, {}, CompiledTexts())


MANY = [(f"path {i}", i) for i in range(100_001)]


@pytest.mark.slow
@pytest.mark.parametrize("value", [MANY, tuple(MANY), dict.fromkeys(MANY, 0), set(MANY)], ids=type)
def test_a_module_with_more_tuples_than_could_be_read_has_a_namespace_for_every_process(value):
    found = walk(value)
    assert found.unread == []
    assert found.parts == walk(value).parts
    other = type(value)([*MANY[:-1], ("path", 0)]) if not isinstance(value, dict) else {**value, MANY[5]: 1}
    assert found.parts["attribute held"] != walk(other).parts["attribute held"]
    assert walk([value, value, [value]]).unread == []
    assert [found.parts["attribute held"][:1]] == [Encoder().encode(type(value)(), "")[:1]]


@pytest.mark.slow
def test_lists_of_tuples_in_bulk_leave_room_for_other_objects():
    found = walk([MANY, MANY, [[i] for i in range(20_000)]])
    assert found.unread == []
