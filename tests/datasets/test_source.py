"""`cached[i]` is `dataset[i]`, however a dataset is wrapped, and whatever memory it makes its samples in."""

import contextlib
import copy
import pickle
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset

from tests.helpers.datasets import Batched, Counted, same, sample_of
from torchcache2 import CachedDataset, CacheLoader, LazyShardDataset

COUNT = 12
MEMORY = {"memory_size": "1MB"}


class Passing:
    """A wrapper that changes samples, and has all else from what it wraps."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return "passed", self.dataset[index]

    def __getattr__(self, name):
        if name == "dataset":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)


class Part(Subset):
    """A subclass of `Subset` that overrides one of its methods only, which new versions refuse to make."""

    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index):
        return "part", super().__getitem__(index)


class Plus(Batched):
    """Overrides one of two methods of its class."""

    def __getitem__(self, index):
        return "plus", sample_of(range(self.count)[index], self.kind)


class Beside:
    """Has only the other method, and needs a class beside it."""

    def __getitems__(self, indices):
        self.batches.append(len(indices))
        return [self[index] for index in indices]


class Both(Beside, Counted):
    batches: ClassVar = []


class OnlyBatches(Dataset):
    """Has no `__getitem__` of its own."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        return [torch.tensor([range(self.count)[index]]) for index in indices]


WRAPPERS = {
    "passing": Passing,
    "passing twice": lambda data: Passing(Passing(data)),
    "part": lambda data: Part(data, list(range(len(data)))),
    "subset of passing": lambda data: Subset(Passing(data), list(range(len(data)))),
    "subset": lambda data: Subset(data, list(reversed(range(len(data))))),
    "stack of passing": lambda data: StackDataset(data, Passing(data)),
    "stack by name": lambda data: StackDataset(a=Passing(data), b=data),
    "concat of passing": lambda data: ConcatDataset([Passing(data), Subset(data, [0, 1])]),
    "cached": lambda data: CachedDataset(data, **MEMORY),
    "passing cached": lambda data: Passing(CachedDataset(data, **MEMORY)),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("kind", [*WRAPPERS, "plus"])
def test_a_wrapper_counts_for_one_sample_and_for_several(kind, batch):
    plain = Plus(COUNT) if kind == "plus" else WRAPPERS[kind](Batched(COUNT))
    expected = [plain[index] for index in range(len(plain))]
    with contextlib.closing(CachedDataset(plain, **MEMORY)) as cached:
        for _ in range(2):
            batches = [range(len(plain))[i : i + batch] for i in range(0, len(plain), batch)]
            same([sample for some in batches for sample in cached.__getitems__(list(some))], expected)
        same([cached[index] for index in range(len(plain))], expected)


@pytest.mark.parametrize(
    "inside", [lambda data: data, lambda data: LazyShardDataset(data, rank=0, num_replicas=1)]
)
def test_a_wrapper_around_it_is_not_passed_by(inside):
    """A `DataLoader` asks for `__getitems__` first, which must not be that of what is wrapped."""
    cached = CachedDataset(Counted(COUNT, "tensor"), **MEMORY)
    around = Passing(inside(cached))
    assert hasattr(cached, "__getitems__") and not hasattr(around, "__getitems__")
    for _ in range(2):
        (batch,) = DataLoader(around, COUNT, collate_fn=list)
        same(batch, [("passed", sample_of(index, "tensor")) for index in range(COUNT)])
    cached.close()


def test_batches_are_asked_for_where_they_are_those_of_the_dataset():
    for make in (Both, lambda count: Subset(Both(count), list(range(count)))):
        Both.batches.clear()
        with contextlib.closing(CachedDataset(make(COUNT), **MEMORY)) as cached:
            same(cached.__getitems__([0, 3, 4]), [sample_of(index, "dict") for index in (0, 3, 4)])
            same(cached.__getitems__([3, 5]), [sample_of(index, "dict") for index in (3, 5)])
            assert Both.batches == [3]  # and one sample by its index


def test_a_dataset_may_have_batches_only():
    with contextlib.closing(CachedDataset(OnlyBatches(COUNT), **MEMORY)) as cached:
        assert [cached[3].item(), *map(int, cached.__getitems__([3, 4, 5]))] == [3, 3, 4, 5]
        assert cached.warmup().computed == COUNT - 3


def _fill(buffer, index):
    if isinstance(buffer, torch.Tensor):
        buffer.fill_(index)
    elif isinstance(buffer, np.ndarray):
        buffer[...] = index
    elif isinstance(buffer, list):
        buffer[:] = [index] * (1 + index % 3)
    elif isinstance(buffer, dict):
        buffer["index"] = index
    else:
        buffer.paste(index, (0, 0, 2, 2))


def _image():
    return pytest.importorskip("PIL.Image").new("L", (2, 2))


def _of_array(array):
    return pytest.importorskip("PIL.Image").fromarray(array)


BUFFERS = {
    "tensor": lambda: torch.zeros(4),
    "array": lambda: np.zeros((2, 2)),
    "list": list,
    "dict": dict,
    "image": _image,
}
SAMPLES = {  # what is returned of a buffer
    **{kind: lambda buffer, index: buffer for kind in BUFFERS},
    "tensor inside": lambda buffer, index: {"x": [buffer[1:], index]},
    "every other number": lambda buffer, index: (buffer[::2], buffer[1::2]),
    "backwards": lambda buffer, index: (buffer[::-1, ::-1],),
    "of numpy": lambda buffer, index: torch.from_numpy(buffer),
    "image of an array": lambda buffer, index: _of_array(buffer),
    "list inside": lambda buffer, index: (index, {"labels": buffer}),
}
KINDS = {kind: kind for kind in BUFFERS} | {
    "tensor inside": "tensor",
    "every other number": "tensor",
    "backwards": "array",
    "of numpy": "array",
    "image of an array": "array",
    "list inside": "list",
}


class Reused:
    """Fills one of some buffers again and again."""

    def __init__(self, kind, buffers=1):
        make = BUFFERS[KINDS[kind]]
        self.kind = kind
        self.buffers = [make() for _ in range(buffers)]
        if kind == "image of an array":
            self.buffers = [np.zeros((2, 2), np.uint8) for _ in range(buffers)]
        self.turn = self.loads = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        index = range(COUNT)[index]
        self.loads += 1
        self.turn = (self.turn + 1) % len(self.buffers)
        buffer = self.buffers[self.turn]
        _fill(buffer, index)
        return SAMPLES[self.kind](buffer, index)


def plain_of(sample):
    """A sample as numbers, which nobody overwrites."""
    if isinstance(sample, dict):
        return {key: plain_of(value) for key, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return [plain_of(value) for value in sample]
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return sample.tolist()
    return sample if isinstance(sample, (int, str)) else np.asarray(sample).tolist()


def expected_of(kind):
    source = Reused(kind)
    return [plain_of(source[index]) for index in range(COUNT)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_is_filled_again_is_copied_before(kind, buffers, path):
    expected = expected_of(kind)
    with contextlib.closing(CachedDataset(Reused(kind, buffers), path, name="reused")) as cached:
        cached.warmup(batch_size=4)
        same([plain_of(cached[index]) for index in range(COUNT)], expected)
        assert (cached.stats().misses, cached.stats().hits) == (COUNT, COUNT)
        cached.clear()
        loader = DataLoader(cached, 4, shuffle=True, collate_fn=list, generator=torch.Generator())
        for _ in range(2):
            given = sorted((plain_of(sample) for batch in loader for sample in batch), key=str)
            same(given, sorted(expected, key=str))
    with contextlib.closing(CachedDataset(None, path)) as served:
        same([plain_of(sample) for sample in served.__getitems__(list(range(COUNT)))], expected)


def test_a_shard_of_a_dataset_that_fills_one_buffer():
    shard = LazyShardDataset(Reused("array"), memory_size="1MB", rank=0, num_replicas=1)
    for _ in range(2):
        (batch,) = DataLoader(shard, COUNT, collate_fn=list)
        same([plain_of(sample) for sample in batch], expected_of("array"))
    shard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_fills_one_buffer(kind):
    source, expected = Reused(kind), expected_of(kind)
    with CacheLoader("local", "reused", memory_size="1MB") as loader:
        for _ in range(2):
            wanted = [3, 1, 4, 1, 5]
            given = loader.get_many(wanted, source.__getitem__)
            same([plain_of(value) for value in given], [expected[index] for index in wanted])
        assert source.loads == 4  # once for each of them


class Moody:
    """Cannot be made of anything but its first tensor."""

    known = torch.zeros(2)

    def __init__(self, children):
        if children[0] is not self.known:  # `assert` would make pytest a part of the dataset
            raise ValueError(children)
        self.children = children


pytree.register_pytree_node(Moody, lambda node: (node.children, None), lambda children, _: Moody(children))


def test_what_cannot_be_made_again_is_given_as_it_is():
    with contextlib.closing(CachedDataset([Moody([Moody.known]), 1, 2], **MEMORY)) as cached:
        assert type(cached.__getitems__([0, 1])[0]) is Moody


MAKERS = st.sampled_from(
    [
        lambda: Batched(COUNT, "coco"),
        lambda: Counted(COUNT, "large"),
        lambda: Plus(COUNT, "tensor"),
        lambda: Both(COUNT, "ragged"),
        *(lambda kind=kind: Reused(kind) for kind in ("tensor", "list", "backwards")),
        *(lambda kind=kind: Reused(kind, 2) for kind in ("array", "dict", "tensor inside")),
    ]
)
ROUNDS = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=6), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(make=MAKERS, wraps=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3), rounds=ROUNDS)
@example(make=lambda: Reused("array", 2), wraps=[], rounds=[[0, 0, 1]])  # the third overwrites the first
def test_it_is_as_a_dict_of_the_samples(make, wraps, rounds):
    source = make()
    for name in wraps:
        source = WRAPPERS[name](source)
    kept = {index: plain_of(source[index]) for index in range(len(source))}
    with contextlib.closing(CachedDataset(source, name="any", **MEMORY)) as cached:
        for indices in rounds:
            samples = [cached[indices[0]]] if len(indices) == 1 else cached.__getitems__(indices)
            same([plain_of(sample) for sample in samples], [kept[index] for index in indices])


def test_a_copy_that_is_open_is_not_closed_with_another():
    for make in (
        lambda: CachedDataset(Batched(COUNT), **MEMORY),
        lambda: CacheLoader("local", "copies", memory_size="1MB"),
    ):
        first = make()
        second = copy.copy(first)
        first.close()
        for other in (second, pickle.loads(pickle.dumps(second))):
            if isinstance(other, CachedDataset):
                same(other[3], sample_of(3, "dict"))
                assert other.missing().tolist() == [0, 1, 2, *range(4, COUNT)]
            else:
                assert other.get(3, str) == "3" and other.num_keys() == 1
        second.close()
