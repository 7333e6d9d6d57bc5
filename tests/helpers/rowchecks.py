"""Checks of the kernel that copies rows, in Triton's interpreter: run with TRITON_INTERPRET=1.

A module's kernels are interpreted only if that is set before Triton is imported. So this is a program.
"""

import sys

import numpy as np
import torch

from tests.helpers.late import Streams
from torchcache2.core.rowcopy import RowCopier

ROW_BYTES = [*range(1, 18), 24, 33, 100, 1001, 3072, 8191, 8192, 8200, 16_400]
LENGTHS = [[1], [7], [1, 1, 2], [30, 5, 1], [6, 6, 6, 1, 4]]


def chunks_of(lengths, row_bytes, generator):
    """Chunks, what they hold as one array, and the numbers of their first rows."""
    everything = generator.integers(0, 256, (sum(lengths), row_bytes), dtype=np.uint8)
    chunks = list(torch.from_numpy(everything.copy()).split(lengths))
    starts = np.cumsum([0, *lengths[:-1]])
    return [chunk.clone() for chunk in chunks], everything, starts


class Counting(RowCopier):
    """Counts what the kernel has copied, as copies without it would be right, too."""

    kernels = 0

    def _run_kernel(self, *args):
        has_run = super()._run_kernel(*args)
        self.kernels += has_run
        return has_run


def check(copier, lengths, row_bytes, generator):
    chunks, everything, starts = chunks_of(lengths, row_bytes, generator)
    count = int(generator.integers(1, 12 if row_bytes > 1000 else 100))
    ordinals = generator.integers(0, len(everything), count)
    picked = copier.gather(chunks, starts, ordinals)
    np.testing.assert_array_equal(picked.numpy(), everything[ordinals])
    shuffled = generator.permutation(len(everything))
    half = len(shuffled) // 2
    sources, targets = shuffled[:half], shuffled[half : 2 * half]
    copier.move(chunks, starts, sources, targets)
    everything[targets] = everything[sources]
    np.testing.assert_array_equal(torch.cat(chunks).numpy(), everything)
    return 1 + (half > 0)


def main():
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
