"""Datasets whose identity another process finds again, each by a function without arguments.

`tests/datasets/test_fingerprint.py` runs this file in processes with other hash seeds and start methods.
"""

import collections
import dataclasses
import enum
import functools
import json
import multiprocessing
import pathlib
import sys
import threading
import types

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from torchcache2.datasets.identity import identify

SHIFT = types.SimpleNamespace(by=2)


class Split(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, x):
        return x * self.size + SHIFT.by


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.register_buffer("bias", torch.ones(2))

    def forward(self, x):
        return x * self.factor + self.bias


@dataclasses.dataclass
class Options:
    size: int = 3
    mean: tuple = (0.5, 0.25)
    words: dict = dataclasses.field(default_factory=dict)


class Source(Dataset):
    """A dataset that fails if a sample is read, or an attribute set."""

    def __init__(self, held=None, transform=None):
        self.held = held
        self.transform = transform
        self.is_made = True

    def __setattr__(self, name, value):
        assert not vars(self).get("is_made"), name
        super().__setattr__(name, value)

    def __getitem__(self, index):
        raise AssertionError("a sample was read")

    __getitems__ = __iter__ = __getitem__


class Counted(Source):
    def __len__(self):
        return len(self.held)


class Wrapper(Dataset):
    """A dataset that has the attributes of another one."""

    def __init__(self, dataset, transform=None):
        self.dataset = dataset
        self.transform = transform

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __getitem__(self, index):
        return self.transform(self.dataset[index])


class Slots:
    """One that has slots only, and answers whatever it is asked."""

    __slots__ = ("dataset", "unset")

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "dataset"), name)

    def __getitem__(self, index):
        return self.dataset[index]


@dataclasses.dataclass
class Table(Dataset):
    samples: list
    options: Options

    def __getitem__(self, index):
        return self.samples[index]


class OwnList(list):
    def __getitem__(self, index):
        raise AssertionError("a sample was read")


def image_paths(count=2000):
    return [(f"n{i % 7}/{i}.jpg", i % 7) for i in range(count)]


def shared_base():
    base = Source(image_paths())
    return ConcatDataset([Subset(base, range(5)), Subset(base, [7, 8])])


MAKERS = {
    "nothing": Source,
    "paths": lambda: Counted(image_paths()),
    "Path objects": lambda: Counted([pathlib.PurePosixPath(path) for path, _ in image_paths()]),
    "words": lambda: Counted({path for path, _ in image_paths()}),
    "few words": lambda: Counted({"a", "b", "c", "d"}),
    "annotations": lambda: Source({i: {"box": [0.5, i], "id": i, "parts": [[1, 2]]} for i in range(2000)}),
    "grouped": lambda: Source(collections.defaultdict(list, {i: [i, str(i)] for i in range(2000)})),
    "objects": lambda: Source([Options(i) for i in range(200)]),
    "tensors": lambda: TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10)),
    "arrays": lambda: Source([np.arange(5), np.array(["a"], object), np.float32(1), np.zeros((0, 2))]),
    "transforms": lambda: Source(
        Split.TRAIN, Compose(Resize(3), Scale(0.5), functools.partial(max, 1), lambda x: x + SHIFT.by)
    ),
    "options": lambda: Table([1, 2], Options(words={"a": 1})),
    "chain": shared_base,
    "wrapped": lambda: Wrapper(Subset(Source([1, 2]), [0]), Resize(2)),
    "slots": lambda: Slots(Source([1, 2])),
    "own list": lambda: OwnList([1, 2, 3]),
    "locks": lambda: Source([threading.Lock(), threading.RLock(), threading.Event(), multiprocessing.Lock()]),
    "generators": lambda: Source([torch.Generator(), np.random.default_rng(3)]),
    "shared memory": lambda: Source(torch.zeros(1, dtype=torch.int64).share_memory_()),
}


def found():
    """Namespaces by name, and what could not be read."""
    identities = {name: identify(make()) for name, make in MAKERS.items()}
    return {name: [one.namespace.hex(), one.unread] for name, one in identities.items()}


def put_found(queue):
    queue.put(found())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        context = multiprocessing.get_context(sys.argv[1])
        queue = context.SimpleQueue()
        process = context.Process(target=put_found, args=(queue,))
        process.start()
        print(json.dumps(queue.get()))
        process.join()
    else:
        print(json.dumps(found()))
