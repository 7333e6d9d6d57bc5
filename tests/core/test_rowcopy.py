"""Copies of rows between chunks: the kernel, compiled and interpreted, and copies without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.helpers.late import Streams
from torchcache2.core import rowkernel
from torchcache2.core.rowcopy import RowCopier

CHUNKS = [torch.arange(12, dtype=torch.uint8).view(4, 3), torch.arange(12, 18, dtype=torch.uint8).view(2, 3)]
STARTS = np.array([0, 4])


def test_the_kernel_is_compiled_for_gpus_and_copies_rows_of_any_size_in_the_interpreter(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.helpers.rowchecks"],
        env=os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "compiled\ncopied 48 of 48\n", done.stderr


def without_kernel():
    copier = RowCopier(Streams())
    copier._has_kernel = False
    return copier


@pytest.mark.parametrize("ordinals", [[5, 0, 3, 4, 4], [1, 1, 3], [5], []])
def test_rows_are_gathered_without_the_kernel(ordinals):
    picked = without_kernel().gather(CHUNKS, STARTS, np.array(ordinals, np.int64))
    assert torch.equal(picked, torch.cat(CHUNKS)[ordinals])


def test_rows_are_moved_without_the_kernel():
    copier = without_kernel()
    for sources, targets in [([4, 1, 2], [0, 5, 3]), ([1, 2], [0, 3]), ([], [])]:
        chunks, expected = [chunk.clone() for chunk in CHUNKS], torch.cat(CHUNKS)
        copier.move(chunks, STARTS, np.array(sources, np.int64), np.array(targets, np.int64))
        expected[targets] = expected[sources]
        assert torch.equal(torch.cat(chunks), expected)


def test_a_kernel_that_does_not_start_is_told_once_and_done_without(monkeypatch, log):
    class Broken:
        started = 0

        def __getitem__(self, grid):
            self.started += 1
            raise RuntimeError("no C compiler")

    kernel = Broken()
    monkeypatch.setattr(rowkernel, "copy_rows", kernel)
    copier = RowCopier(Streams())
    for _ in range(3):
        assert torch.equal(copier.gather(CHUNKS, STARTS, np.array([5, 0])), torch.cat(CHUNKS)[[5, 0]])
    assert kernel.started == 1
    (record,) = log
    assert record.levelname == "INFO" and "Triton cannot be used" in record.getMessage()
