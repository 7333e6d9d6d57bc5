"""Checks of the kernel that copies rows: as it is compiled for GPUs, and in Triton's interpreter.

This is a program, as a kernel is interpreted only if TRITON_INTERPRET=1 is set before Triton is imported.
"""

import sys

import numpy as np
import torch
import triton

from tests.helpers.compiled import Compiled
from tests.helpers.late import Streams, chunks_of
from torchcache2.core import rowkernel
from torchcache2.core.rowcopy import RowCopier

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


class Known(Counting):
    """Tells a compiled kernel which memory it is given the addresses of."""

    def _start_kernel(self, alignment, chunks, sources, others, targets):
        rowkernel.copy_rows.memory[:] = chunks.tensors + others.tensors
        super()._start_kernel(alignment, chunks, sources, others, targets)


def check_compiled(generator):
    """Rows are copied by what the kernel is compiled to for GPUs: 16 bytes at a time, if they are aligned."""
    plain, copier = rowkernel.copy_rows, Known(Streams())
    count = 0
    for capability, row_bytes, way in ((90, 48, "v2.b64"), (80, 33, "b8")):
        rowkernel.copy_rows = kernel = Compiled(triton.JITFunction(plain.fn), capability)
        count += check(copier, [2, 5, 1], row_bytes, generator)
        for text in kernel.texts.values():
            assert f"ld.global.{way}" in text and f"st.global.{way}" in text
    rowkernel.copy_rows = plain
    print("compiled: copied", copier.kernels, "of", count)


def main():
    generator = np.random.default_rng(0)
    check_compiled(generator)
    copier = Counting(Streams())
    expected = 0
    for number, row_bytes in enumerate(ROW_BYTES):
        expected += check(copier, LENGTHS[number % len(LENGTHS)], row_bytes, generator)
    expected += check(copier, [3000, 1], 2, generator)  # more rows than a program copies
    print("interpreted: copied", copier.kernels, "of", expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
