"""Checks what the kernels of digests compute when they are compiled for GPUs.

This is a program, as kernels are compiled only where TRITON_INTERPRET is not set when Triton is imported.
Its arguments are the widths of words that the kernels read, in bytes.
"""

import sys

import torch
import xxhash

from tests.helpers.compiled import Compiled
from torchcache2.identity.xxh3 import kernels
from torchcache2.identity.xxh3.constants import secrets
from torchcache2.identity.xxh3.device import DeviceDigests
from torchcache2.identity.xxh3.launch import Places, start

CAPABILITIES = {8: 90, 4: 80, 2: 100, 1: 90}
SIZES = [248, 1024, 1032, 5000]
ALONE = [*SIZES, 19_000]  # with more blocks than are read ahead


def check(rows, places):
    kernels.block_sums.memory[:] = kernels.digests.memory[:] = rows
    digests = start(places, torch.from_numpy(secrets()), DeviceDigests.tiles)
    expected = [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]
    assert [digest.numpy().tobytes() for digest in digests] == expected, [len(row) for row in rows]
    return len(rows)


def main():
    count, plain = 0, (kernels.block_sums, kernels.digests)
    generator = torch.Generator().manual_seed(0)
    for width in map(int, sys.argv[1:]):
        kernels.block_sums, kernels.digests = (Compiled(kernel, CAPABILITIES[width]) for kernel in plain)
        # Odd multiples of the width, so that no wider words fit.
        sizes = [size - size % (2 * width) + width for size in ALONE]
        batches = [torch.randint(0, 256, (5, size), dtype=torch.uint8, generator=generator) for size in sizes]
        count += sum(check(list(batch), Places.of_array(batch)) for batch in batches[: len(SIZES)])
        rows = [batch[2].clone() for batch in batches]
        count += check(rows, Places.of_rows(rows))
    print(f"{count} digests of compiled kernels")


if __name__ == "__main__":
    main()
