"""The kernels of XXH3-128 against `xxhash` in Triton's interpreter; and that they compile for GPUs."""

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
from torchcache2.core.memory import as_words
from torchcache2.identity import xxh3

DIGESTS = Interpreted()
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]
SOAK = bool(os.environ.get("SOAK"))
WIDTHS = [1, 2, 4, 8]


def random_bytes(size, seed=0):
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)


def expected(rows):
    return [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]


def check(rows):
    """The digests of rows of one size are those of `xxhash`."""
    assert [row.numpy().tobytes() for row in DIGESTS.of_items(rows)] == expected(rows), len(rows[0])


def contents(size):
    """Rows of any bytes, of bytes that are the same, and that cancel the secret or fill the accumulators."""
    same = torch.tensor([[0x00], [0x01], [0x7F], [0x80], [0xFF]], dtype=torch.uint8).repeat(1, size)
    secret = torch.frombuffer(bytearray(xxh3._SECRET * (size // len(xxh3._SECRET) + 1)), dtype=torch.uint8)
    pattern = torch.tensor([0, 0, 0, 0x80] * (size // 4 + 1), dtype=torch.uint8)
    others = torch.stack([secret[:size], 0xFF - secret[:size], pattern[:size]])
    return torch.cat([random_bytes(2 * size, size).view(2, size), same, others])


def test_sizes():
    """Around multiples of a stripe in two blocks, and of some numbers of blocks; of words of each width."""
    sizes = {241, *(n + d for n in (256, 960, 1024, 1280) for d in (-1, 0, 1))}
    sizes |= {n * 1024 + d for n in (2, 17) for d in (-64, 0, 63)} | {5000, 7679, 20_000}
    sizes |= {n + width for n in (240, 1024) for width in WIDTHS}
    widths = set()
    for size in range(241, 4201) if SOAK else sorted(sizes):
        check(rows := contents(size))
        widths.add((as_words(rows[:1]).element_size(), size > 1024))
    assert widths == {(width, is_long) for width in WIDTHS for is_long in (False, True)}


def test_short_rows_are_hashed_on_the_host():
    assert DIGESTS.of_items(random_bytes(480).view(2, 240)) is None


@settings(max_examples=100 if SOAK else 15)
@given(st.data())
def test_a_batch_of_any_size_and_any_place_in_memory(data):
    size = data.draw(st.integers(241, 2100), label="size")
    count = data.draw(st.integers(1, 9), label="count")
    offset = data.draw(st.integers(0, 9), label="offset")
    memory = random_bytes(offset + count * size, data.draw(st.integers(0, 99), label="seed"))
    check(memory[offset:].view(count, size))


def test_the_kernels_are_compiled_for_gpus(tmp_path):
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environ["TRITON_INTERPRET"]
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.helpers.compiled",
        *(["1", "2", "4"] if SOAK else []),
        "8",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["block_sums: 1 kernel for sm_90", "digests: 1 kernel for sm_90"], done.stderr
    assert len(lines) == (8 if SOAK else 2) and all(": 1 kernel for sm_" in line for line in lines)
