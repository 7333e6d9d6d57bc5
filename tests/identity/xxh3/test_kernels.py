"""The kernels of XXH3-128, in Triton's interpreter, against `xxhash`; and compiled for real GPUs."""

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
from torchcache2.identity.xxh3.device import DeviceDigests
from torchcache2.identity.xxh3.launch import Places

DIGESTS = Interpreted()
SOAK = bool(os.environ.get("SOAK"))
WIDTHS = [1, 2, 4, 8]
WORDS = ["*u8", "*i16", "*i32", "*i64"]


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


def test_programs_of_the_sizes_that_a_gpu_gets():
    digests = Interpreted()
    digests.tiles = DeviceDigests.tiles
    for count, size in ((5, 248), (1, 9000), (2, 1030)):
        batch = random_bytes(count * size).view(count, size)
        assert [row.numpy().tobytes() for row in digests.of_items(batch)] == expected(batch)
    rows = [random_bytes(size) for size in (300, 9000, 1026, 1024, 242, 700)]
    found = digests.of_tensors(rows)
    assert [found[id(row)] for row in rows] == expected(rows)


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from torchcache2.identity.xxh3 import kernels

def check(kernel, tile, ahead, arch, word, depth, warps):
    names = kernel.arg_names
    constants = {"parts": {"*u8": 8, "*i16": 4, "*i32": 2, "*i64": 1}[word], "tile": tile, "depth": depth}
    constants |= {"ahead": ahead} if ahead else {}
    pointers = {"data": word, "table": "*i64", "secrets": "*i64", "sums": "*i64", "out": "*u8"}
    kinds = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(kernel, kinds, constants)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"]

for arch, word, depth in VARIANTS:
    assert len(check(kernels.block_sums, 8, 0, arch, word, depth, 2)) > 1000
    assert len(check(kernels.digests, 4, 16, arch, word, depth, 1)) > 1000
print("compiled")
"""


def test_the_kernels_compile_for_gpus(tmp_path):
    every_day = [(90, "*i64", 0), (80, "*i32", 17)]
    variants = [(arch, word, depth) for arch in (80, 90, 100) for word in WORDS for depth in (0, 17)]
    script = COMPILE.replace("VARIANTS", repr(variants if SOAK else every_day))
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environ["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr
