"""Datasets for tests of `CachedDataset`, which workers import by their names."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.helpers.outputs import assert_same

same = assert_same


def memory_of(sample):
    """The tensors and arrays of a sample."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return [sample] if sample.nbytes else []
    if isinstance(sample, dict):
        sample = list(sample.values())
    return (
        [leaf for value in sample for leaf in memory_of(value)] if isinstance(sample, (list, tuple)) else []
    )


class Counted(Dataset):
    """Samples 0, 1, …; `kind` says what they look like. Each load appends a line to the file `log`."""

    def __init__(self, count, kind="dict", log=None):
        self.count = count
        self.kind = kind
        self.log = None if log is None else str(log)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        index = int(index)
        if not -self.count <= index < self.count:
            raise IndexError(f"no sample {index}")
        index %= self.count
        if self.log is not None:
            note(self.log, index)
        return sample_of(index, self.kind)


class Batched(Counted):
    """The same, with a way to load several at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def note(log, word):
    """Append a line to a file; other processes may do so, too."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{word}\n".encode())
    os.close(file)


def noted(log):
    """How often each line was appended."""
    return Counter(Path(log).read_text().split()) if os.path.exists(log) else Counter()


def sample_of(index, kind):
    """A sample that its index tells."""
    random = np.random.default_rng(index)
    if kind == "tensor":
        return torch.from_numpy(random.standard_normal(8))
    if kind == "ragged":
        return torch.from_numpy(random.standard_normal((1 + index % 7, 2)).astype(np.float32))
    if kind == "coco":
        boxes = 1 + index % 5
        return {
            "image_id": index,
            "boxes": torch.from_numpy(random.random((boxes, 4), np.float32)),
            "labels": torch.from_numpy(random.integers(0, 90, boxes)),
            "file_name": f"{index:012}.jpg",
        }
    if kind == "large":
        return random.integers(0, 256, (30, 30, 3), np.uint8), index % 10
    assert kind == "dict"
    return {
        "x": torch.from_numpy(random.standard_normal(index % 5).astype(np.float32)),
        "y": index % 3,
        "name": "é" * (index % 4),
        "raw": bytes([index % 256]) * (index % 3),
        "more": (random.standard_normal(3), None, [0.5, index]) if index % 2 else [index, True],
    }
