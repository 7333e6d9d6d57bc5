"""Copies of rows between chunks: the kernel, compiled and interpreted, and copies without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.helpers.late import Streams, chunks_of
from torchcache2.core import rowkernel
from torchcache2.core.rowcopy import RowCopier

ROWS = torch.arange(18, dtype=torch.uint8).view(6, 3)


def test_the_kernel_copies_rows_as_it_is_compiled_for_gpus_and_of_any_size_in_the_interpreter(
    tmp_path,
):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.helpers.rowchecks"],
        env=os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "compiled: copied 4 of 4\ninterpreted: copied 48 of 48\n", done.stderr


@pytest.fixture
def chunks():
    return chunks_of(ROWS, [4, 2])


def without_kernel():
    copier = RowCopier(Streams())
    copier._has_kernel = False
    return copier


@pytest.mark.parametrize("ordinals", [[5, 0, 3, 4, 4], [1, 1, 3], [5], []])
def test_rows_are_gathered_without_the_kernel(chunks, ordinals):
    picked = without_kernel().gather(chunks, np.array(ordinals, np.int64))
    assert torch.equal(picked, ROWS[ordinals])


@pytest.mark.parametrize(("sources", "targets"), [([4, 1, 2], [0, 5, 3]), ([1, 2], [0, 3]), ([], [])])
def test_rows_are_moved_without_the_kernel(chunks, sources, targets):
    without_kernel().move(chunks, np.array(sources, np.int64), np.array(targets, np.int64))
    expected = ROWS.clone()
    expected[targets] = ROWS[sources]
    assert torch.equal(torch.cat(chunks.tensors), expected)


def test_a_kernel_that_does_not_start_is_told_once_and_done_without(chunks, monkeypatch, log):
    class Broken:
        started = 0

        def __getitem__(self, grid):
            self.started += 1
            raise RuntimeError("no C compiler")

    kernel = Broken()
    monkeypatch.setattr(rowkernel, "copy_rows", kernel)
    copier = RowCopier(Streams())
    for _ in range(3):
        assert torch.equal(copier.gather(chunks, np.array([5, 0])), ROWS[[5, 0]])
    assert kernel.started == 1
    (record,) = log
    assert record.levelname == "INFO" and "Triton cannot be used" in record.getMessage()


def test_a_kernel_that_copies_other_bytes_is_not_used(chunks, monkeypatch, log):
    class Wrong:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(rowkernel, "copy_rows", Wrong())
    copier = RowCopier(Streams())
    for _ in range(2):
        assert torch.equal(copier.gather(chunks, np.array([5, 0])), ROWS[[5, 0]])
    (record,) = log
    assert record.levelname == "WARNING" and "has not copied rows" in record.getMessage()
