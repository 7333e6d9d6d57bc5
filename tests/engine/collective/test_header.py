"""What ranks say in a step as bytes: it comes back as it was, and other bytes are refused."""

import contextlib
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from torchcache2.engine.collective.header import VERSION, Flag, Header, Status, Told

SOAK = bool(os.environ.get("SOAK"))
NAMES = st.binary(max_size=16)
TEXTS = st.sampled_from(["", "out of memory", "größer ☃", "x" * 200])
KEYS = st.binary(max_size=80).map(lambda data: np.frombuffer(data[: len(data) // 16 * 16], np.uint8))


def same(one, other):
    left, right = vars(one), vars(other)
    return left.keys() == right.keys() and all(
        np.array_equal(left[name], right[name]) if isinstance(left[name], np.ndarray) else left[name] == value
        for name, value in right.items()
    )


HEADERS = st.builds(
    Header,
    step=st.integers(0, 2**64 - 1),
    flags=st.integers(0, 255).map(Flag),
    caller=NAMES,
    namespace=NAMES,
    place=NAMES,
    dropped=NAMES,
    message=TEXTS,
    keys=KEYS.map(lambda flat: flat.reshape(-1, 16)),
)
TOLD = st.builds(
    Told,
    status=st.sampled_from(Status),
    reason=st.sampled_from(["", "random", "state"]),
    text=TEXTS,
    digests=st.lists(st.binary(min_size=16, max_size=16), max_size=3),
    numbers=st.lists(st.integers(0, 2**16 - 1), max_size=9).map(lambda some: np.array(some, np.uint16)),
)


@hypothesis.settings(max_examples=500 if SOAK else 40)
@hypothesis.given(HEADERS | TOLD, st.sampled_from([bytes, bytearray, memoryview]))
def test_what_is_said_comes_back(said, kind):
    data = said.to_bytes()
    assert same(type(said).of(kind(data)), said)


@hypothesis.settings(max_examples=500 if SOAK else 40)
@hypothesis.given(HEADERS | TOLD, st.data())
def test_other_bytes_are_refused_or_understood_but_raise_nothing_else(said, data):
    good = said.to_bytes()
    with pytest.raises(ValueError, match="bytes"):
        type(said).of(good[: data.draw(st.integers(2 if type(said) is Header else 0, len(good) - 1))])
    with pytest.raises(ValueError, match="belong"):
        type(said).of(good + b"x")
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ValueError):
        type(said).of(bad)


def test_another_version_is_refused_whatever_follows():
    for data in ((VERSION + 1).to_bytes(2, "little"), (7).to_bytes(2, "little") + b"x" * 99):
        with pytest.raises(ValueError, match=rf"version {data[0]} .* version {VERSION}$"):
            Header.of(data)


@pytest.mark.parametrize("text", ["é" * 999, "x" + "é" * 999, "☃" * 999, "\ud800" * 999, "x" * 9999])
def test_long_texts_are_cut_between_characters(text):
    message = Header(0, message=text).to_bytes()
    assert len(message) <= len(Header(0).to_bytes()) + 200
    shown = text.encode("utf-8", "backslashreplace").decode()
    for cut, most in (
        (Header.of(message).message, 200),
        (Told.of(Told(text=text).to_bytes()).text, 1000),
        (Told.of(Told(reason=text).to_bytes()).reason, 100),
    ):
        assert shown.startswith(cut) and most - 4 < len(cut.encode()) <= most


def test_what_was_read_does_not_change_with_the_buffer_it_came_in():
    keys = np.arange(64, dtype=np.uint8).reshape(4, 16)
    buffer = bytearray(Header(1, namespace=b"n" * 16, keys=keys).to_bytes())
    told = bytearray(Told(digests=[b"d" * 16], numbers=np.array([1, 0], np.uint8)).to_bytes())
    header, said = Header.of(memoryview(buffer)), Told.of(memoryview(told))
    buffer[:], told[:] = bytes(len(buffer)), bytes(len(told))
    assert header.namespace == b"n" * 16 and np.array_equal(header.keys, keys)
    assert said.digests == [b"d" * 16] and said.numbers.tolist() == [1, 0]


def test_the_bytes_are_those_of_the_specification():
    header = Header(
        0x0102030405060708, Flag.WHOLE | Flag.CUDA, b"cc", b"n", b"", b"ddd", "é", np.ones((1, 16), np.uint8)
    )
    numbers = "0100 4800 0807060504030201 02 01 00 03 0200 0000 01000000"
    assert header.to_bytes() == bytes.fromhex(numbers) + b"ccnddd" + "é".encode() + b"\1" * 16
    told = Told(Status.NOT_STORED, "state", "why", [b"d" * 16], np.array([1, 0], np.uint8))
    numbers = "02 05 0300 0100 0000 02000000"
    assert told.to_bytes() == bytes.fromhex(numbers) + b"statewhy" + b"d" * 16 + bytes([1, 0, 0, 0])
