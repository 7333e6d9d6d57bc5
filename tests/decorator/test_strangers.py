"""Objects that raise errors of their own wherever one looks: no call raises these."""

import monai.data
import monai.transforms
import pytest
import torch
from torch import nn

from tests.helpers.outputs import warnings_in
from torchcache2 import CachedDataset, cache_of, torchcache

X = torch.rand(4, 3)
HELD = None


def refuse(self, *args):
    raise ImportError("a stranger's")  # as MONAI's lazy imports raise it: no AttributeError


def refusing(*names, base=object, **members):
    return type("Stranger", (base,), {"value": 3.0, **dict.fromkeys(names, refuse), **members})


EVERYTHING = ("len", "iter", "next", "repr", "bool", "eq", "hash", "reduce_ex", "getstate", "getattr")
# By what is refused: a class, and whether it can be read all the same.
KINDS = {
    "all but attributes": (refusing(*[f"__{name}__" for name in EVERYTHING]), True),
    "__getattribute__": (refusing("__getattribute__"), False),
    "__class__": (refusing(__class__=property(refuse)), False),
    "__dict__": (refusing(__dict__=property(refuse)), False),
    "an empty slot": (refusing("__getattr__", __slots__=("slot",)), False),
    "of a dict": (refusing("__iter__", "__len__", "__eq__", "keys", "items", "values", base=dict), True),
    "of a list": (refusing("__iter__", "__len__", "__eq__", base=list), False),
    "of a text": (refusing("__iter__", "__len__", "__eq__", "__hash__", base=str), True),
    "of a module": (refusing("__getattr__", "__repr__", "__len__", "__iter__", base=nn.Module), True),
}


def value_of(held):
    return type.__getattribute__(type(held), "__dict__")["value"]


def of_global(held):
    global HELD
    HELD = held
    return torchcache(lambda x: x * value_of(HELD))


def of_closure(held):
    return torchcache(lambda x: x * value_of(held))


def of_default(held):
    return torchcache(lambda x, held=held: x * value_of(held))


def of_attribute(held):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "held", held)

        def forward(self, x):
            return x * value_of(self.held)

    return torchcache(Net())


class Samples:
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index] * value_of(self.held)


@pytest.mark.parametrize("place", [of_global, of_closure, of_default, of_attribute])
@pytest.mark.parametrize("kind", KINDS)
def test_what_code_refers_to_may_raise_wherever_one_looks(kind, place, log):
    make, is_readable = KINDS[kind]
    function = place(make())
    for _ in range(2):
        assert torch.equal(function(X), X * 3.0)
    said = warnings_in(log)
    if is_readable:
        assert cache_of(function).stats().hits == 4 and said == []
    else:
        assert len(said) == 1 and "held" in said[0].lower() and "raised ImportError" in said[0]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_outputs_and_datasets_may_raise_wherever_one_looks(kind, log):
    held = KINDS[kind][0]()
    scaled, paired = torchcache(lambda x, held: x * value_of(held)), torchcache(lambda x: (x, held))
    data = CachedDataset(Samples(held), memory_size="1MB")
    for _ in range(2):
        assert torch.equal(scaled(X, held), X * 3.0)
        assert paired(X)[1] is held
        assert torch.equal(torch.stack([data[i] for i in range(4)]), X * 3.0)
    assert data.stats().hits == 4
    assert all(one.count("not cached") == 1 for one in warnings_in(log))


@pytest.mark.parametrize("base", [object, nn.Module])
def test_what_is_cached_may_refuse_missing_attributes(base, log):
    kind = refusing("__getattr__", "__repr__", base=base, forward=lambda self, x: x * self.value)
    held = torchcache(kind(), methods="forward")
    for _ in range(2):
        assert torch.equal(held.forward(X), X * 3.0)
    assert cache_of(held).stats().hits == 4 and warnings_in(log) == []


def test_lazy_imports_of_monai(log):
    transform = monai.transforms.ScaleIntensity()
    scaled = torchcache(lambda x: torch.stack([transform(one).as_tensor() for one in x]))
    plain = monai.transforms.Compose([transform, monai.transforms.ToTensor(track_meta=False)])
    samples = monai.data.Dataset(list(X), transform=plain)
    data = CachedDataset(samples, memory_size="1MB")
    for _ in range(2):
        assert torch.equal(scaled(X), torch.stack([data[i] for i in range(4)]))
    assert cache_of(scaled).stats().hits == data.stats().hits == 4 and warnings_in(log) == []
