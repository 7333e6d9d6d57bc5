"""Checks of the kernel that copies rows: it is compiled for GPUs, and runs in Triton's interpreter.

This is a program, as a kernel is interpreted only if TRITON_INTERPRET=1 is set before Triton is imported.
"""

import itertools
import sys

import numpy as np
import torch
import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.helpers.late import Streams, chunks_of
from torchcache2.core import rowcopy
from torchcache2.core.rowcopy import RowCopier
from torchcache2.core.rowkernel import copy_rows

ROW_BYTES = [*range(1, 18), 24, 33, 100, 1001, 3072, 8191, 8192, 8200, 16_400]
LENGTHS = [[1], [7], [1, 1, 2], [30, 5, 1], [6, 6, 6, 1, 4]]


class Counting(RowCopier):
    """Counts what the kernel has copied, as copies without it would be right, too."""

    kernels = 0

    def _run_kernel(self, *args):
        has_run = super()._run_kernel(*args)
        self.kernels += has_run
        return has_run


def check(copier, lengths, row_bytes, generator):
    rows = generator.integers(0, 256, (sum(lengths), row_bytes), dtype=np.uint8)
    chunks = chunks_of(torch.from_numpy(rows), lengths)
    ordinals = generator.integers(0, len(rows), generator.integers(1, 12 if row_bytes > 1000 else 100))
    np.testing.assert_array_equal(copier.gather(chunks, ordinals).numpy(), rows[ordinals])
    shuffled, half = generator.permutation(len(rows)), len(rows) // 2
    sources, targets = shuffled[:half], shuffled[half : 2 * half]
    copier.move(chunks, sources, targets)
    rows[targets] = rows[sources]
    np.testing.assert_array_equal(torch.cat(chunks.tensors).numpy(), rows)
    return 1 + (half > 0)


def check_compilation():
    """Compile the kernel without a GPU: rows at multiples of 16 bytes are copied 16 bytes at a time."""
    kernel = JITFunction(copy_rows.fn)
    types = dict.fromkeys(["sources", "targets"], "*i64") | dict.fromkeys(["rows", "units", "tiles"], "i32")
    for architecture, alignment in itertools.product([80, 90], [1, 16]):
        dtype, per_unit = rowcopy._KINDS[alignment]
        types["unit"] = "*u8" if dtype == torch.uint8 else f"*i{8 * dtype.itemsize}"
        constants = {"PER_UNIT": per_unit, "ALIGNMENT": alignment, "ROWS": 4, "WORDS": 256}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source, target = ASTSource(kernel, signature, constants), GPUTarget("cuda", architecture, 32)
        code = triton.compile(source, target=target, options=rowcopy._OPTIONS).asm["ptx"]
        assert all((f"{way}.global.v2.b64" in code) == (alignment == 16) for way in ("ld", "st"))
    print("compiled")


def main():
    check_compilation()
    generator = np.random.default_rng(0)
    copier = Counting(Streams())
    expected = 0
    for number, row_bytes in enumerate(ROW_BYTES):
        expected += check(copier, LENGTHS[number % len(LENGTHS)], row_bytes, generator)
    expected += check(copier, [3000, 1], 2, generator)  # more rows than a program copies
    print("copied", copier.kernels, "of", expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
