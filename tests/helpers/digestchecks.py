"""Checks what the kernels of digests compute when they are compiled for GPUs.

This is a program, as kernels are compiled only where TRITON_INTERPRET is not set when Triton is imported.
Its arguments are the widths of words that the kernels read, in bytes.
"""

import sys

import torch
import xxhash

from tests.helpers.compiled import Compiled
from torchcache2.identity import kernels
from torchcache2.identity.xxh3 import DeviceDigests, secrets, start

CAPABILITIES = {8: 90, 4: 80, 2: 100, 1: 90}
SIZES = [248, 1024, 1032, 5000, 19_000]  # the last with more blocks than are read ahead


def main():
    count, plain = 0, (kernels.block_sums, kernels.digests)
    generator = torch.Generator().manual_seed(0)
    for width in map(int, sys.argv[1:]):
        kernels.block_sums, kernels.digests = (Compiled(kernel, CAPABILITIES[width]) for kernel in plain)
        for size in SIZES:
            size += width - size % (2 * width)  # an odd multiple of the width, so that no wider words fit
            batch = torch.randint(0, 256, (5, size), dtype=torch.uint8, generator=generator)
            digests = start(batch, torch.from_numpy(secrets()), DeviceDigests.tiles)
            expected = [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in batch]
            assert [digest.numpy().tobytes() for digest in digests] == expected, size
            count += len(batch)
    print(f"{count} digests of compiled kernels")


if __name__ == "__main__":
    main()
