"""The kernels of XXH3-128 against `xxhash`: in Triton's interpreter, and as they are compiled for GPUs."""

import os
import random
import subprocess
import sys

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.interpreter import Interpreted
from torchcache2.identity.xxh3 import constants
from torchcache2.identity.xxh3.launch import Places

DIGESTS = Interpreted()
SOAK = bool(os.environ.get("SOAK"))
WIDTHS = [1, 2, 4, 8]


def random_bytes(size, seed=0):
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)


def expected(rows):
    return [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]


def computed(rows):
    """The digests of rows that are anywhere; `None` for those that are left to the host."""
    found = DIGESTS.of_tensors(rows)
    return [found.get(id(row)) for row in rows]


def of_batch(batch):
    digests = DIGESTS.of_items(batch)
    return [row.numpy().tobytes() for row in digests]


def test_every_size_up_to_4_200():
    rows = [random_bytes(size, size) for size in range(1, 4201)]
    digests = computed(rows)
    assert digests[:240] == [None] * 240  # these are hashed on the host
    assert digests[240:] == expected(rows[240:])


def test_sizes_around_each_multiple_of_a_block_up_to_70_000():
    near = range(-66, 67) if SOAK else (-64, -1, 0, 1, 63)
    rows = [random_bytes(blocks * 1024 + more, more) for blocks in range(1, 69) for more in near]
    assert computed(rows) == expected(rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_each_width_of_words(width):
    rows = [random_bytes(size - size % width) for size in (241 + width, 1024, 1025 + width, 4096, 20_000)]
    assert Places.of_rows(rows).variant[1] >= width
    assert computed(rows) == expected(rows)
    for row in rows:
        batch = torch.stack([row, row.flip(0), torch.zeros_like(row)])
        assert of_batch(batch) == expected(batch)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_bytes_that_are_all_the_same(byte):
    rows = [torch.full((size,), byte, dtype=torch.uint8) for size in (241, 1024, 1032, 2048, 17 * 1024)]
    assert computed(rows) == expected(rows)


def test_bytes_that_cancel_the_secret_or_fill_the_accumulators():
    secret = constants._SECRET * 40
    rows = [torch.frombuffer(bytearray(secret[:size]), dtype=torch.uint8) for size in (248, 1024, 5000)]
    rows += [0xFF - row for row in rows]
    pattern = torch.tensor([0, 0, 0, 0x80] * 5000, dtype=torch.uint8)
    rows += [pattern[:size].clone() for size in (1024, 1028, 19_999)]
    assert computed(rows) == expected(rows)


@settings(max_examples=100 if SOAK else 15)
@given(st.data())
def test_a_batch_of_any_size_and_any_place_in_memory(data):
    size = data.draw(st.integers(241, 2100), label="size")
    count = data.draw(st.integers(1, 9), label="count")
    offset = data.draw(st.integers(0, 9), label="offset")
    memory = random_bytes(offset + count * size, data.draw(st.integers(0, 99), label="seed"))
    batch = memory[offset:].view(count, size)
    assert of_batch(batch) == expected(batch)


def test_the_kernels_compute_digests_when_they_are_compiled_for_gpus(tmp_path):
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environ["TRITON_INTERPRET"]
    widths = WIDTHS if SOAK else [8]
    command = [sys.executable, "-W", "error", "-m", "tests.helpers.digestchecks", *map(str, widths)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{25 * len(widths)} digests of compiled kernels\n", done.stderr
