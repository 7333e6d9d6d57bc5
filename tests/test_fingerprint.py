"""What shares a namespace, and what does not."""

import array
import collections
import copy
import dataclasses
import enum
import functools
import importlib.util
import io
import json
import logging
import math
import operator
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import textwrap
import types
import weakref
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import _zoo
from torchcache2 import torchcache

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _without_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a Python file and import it; two files may have one name."""

    def load(name, source):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def seeded(build):
    torch.manual_seed(0)
    return build()


def hash_of(thing):
    """The namespace of a module or function that is not decorated yet."""
    return torchcache(thing).cache_instance.module_hash


def in_one_budget(*things):
    """Each as the only submodule or attribute of an instance of one decorated class."""

    @torchcache
    class Shared(nn.Module):
        def forward(self, x):
            return self.thing(x)

    instances = [Shared() for _ in things]
    for instance, thing in zip(instances, things, strict=True):
        instance.thing = thing
    return instances


def equal(first, second):
    return first.dtype == second.dtype and torch.equal(first, second)


def assert_apart(build_first, build_second, x):
    """Two things with different outputs have different namespaces, and one cache tells them apart."""
    things = [seeded(build_first), seeded(build_second)]
    expected = [thing(x) for thing in things]
    assert not equal(*expected), "the two compute the same, so that nothing is tested"
    cached = in_one_budget(*things)
    for hits in (0, len(x)):
        for module, output in zip(cached, expected, strict=True):
            assert equal(module(x), output)
            assert module.cache_instance.stats().hits == hits
    assert hash_of(seeded(build_first)) != hash_of(seeded(build_second))


class Holder(nn.Module):
    """Adds a number that tells what its attribute prints as."""

    def forward(self, x):
        return x + zlib.crc32(repr(self.value).encode()) % 9973


def holder(value):
    module = Holder()
    module.value = value
    return module


class Config:
    def __init__(self, **options):
        vars(self).update(options)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    def scale(self, x):
        return x * self.rate


@dataclasses.dataclass
class Options:
    rate: float
    deep: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rate: float


Pair = collections.namedtuple("Pair", "a b")


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Name(str):
    __slots__ = ()

    def __repr__(self):
        return f"Name({super().__repr__()})"


def first_of(a, b):
    return a


def second_of(a, b):
    return b


PARENTS = [nn.Linear(2, 2), nn.Linear(2, 2)]

VALUES = {
    "int or float": (2, 2.0),
    "zero and negative zero": (0.0, -0.0),
    "bool or int": (True, 1),
    "None or False": (None, False),
    "adjacent floats": (0.1, math.nextafter(0.1, 1)),
    "complex": (1j, -1j),
    "text or bytes": ("a", b"a"),
    "bytes or bytearray": (b"a", bytearray(b"a")),
    "text of a number": ("2", 2),
    "subclass of str": ("a", Name("a")),
    "list or tuple": ([1, 2], (1, 2)),
    "nesting": ([[1], [2]], [[1, 2], []]),
    "lists that run together": (["ab", "c"], ["a", "bc"]),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "keys of a dict": ({1: 0}, {"1": 0}),
    "default of a defaultdict": (collections.defaultdict(int), collections.defaultdict(float)),
    "deque bounds": (collections.deque([1], 1), collections.deque([1], 2)),
    "set": ({1, 2, 3}, {1, 2, 4}),
    "frozenset": (frozenset("ab"), frozenset("ac")),
    "set or frozenset": ({1}, frozenset({1})),
    "range": (range(3), range(1, 3)),
    "slice": (slice(3), slice(0, 3)),
    "tensor": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "tensor dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "tensor shape": (torch.ones(2), torch.ones(1, 2)),
    "tensor in a list": ([1, torch.ones(1)], [1, torch.zeros(1)]),
    "tensor in a dict in a tuple": (({"a": torch.ones(1)},), ({"a": torch.zeros(1)},)),
    "sparse tensor": (torch.tensor([0.0, 1.0]).to_sparse(), torch.tensor([1.0, 0.0]).to_sparse()),
    "array": (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
    "array dtype": (np.zeros(2, np.float32), np.zeros(2, np.int32)),
    "array shape": (np.zeros((2, 1)), np.zeros((1, 2))),
    "array of objects": (np.array([1, "a"], object), np.array([1, "b"], object)),
    "numpy scalar": (np.float32(1), np.float64(1)),
    "array of the standard library": (array.array("f", [1.0]), array.array("f", [2.0])),
    "dtype": (torch.float16, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "memory format": (torch.channels_last, torch.contiguous_format),
    "enum member": (Mode.FAST, Mode.EXACT),
    "dataclass": (Options(1.0), Options(2.0)),
    "dataclass in a dataclass": (Options(1.0, Options(1)), Options(1.0, Options(2))),
    "frozen dataclass": (Frozen(1.0), Frozen(2.0)),
    "namedtuple": (Pair(1, 2), Pair(2, 1)),
    "partial": (functools.partial(torch.add, alpha=2), functools.partial(torch.add, alpha=3)),
    "partial of another": (functools.partial(torch.add, 2), functools.partial(torch.mul, 2)),
    "function": (first_of, second_of),
    "torch function": (F.relu, F.gelu),
    "torch function by flag": (F.max_pool1d, F.max_pool2d),
    "torch builtin": (torch.sin, torch.cos),
    "torch method": (torch.Tensor.sin, torch.Tensor.cos),
    "torch operator": (torch.Tensor.__add__, torch.Tensor.__mul__),
    "torch property": (torch.Tensor.real, torch.Tensor.imag),
    "aten operator": (torch.ops.aten.sin, torch.ops.aten.cos),
    "aten overload": (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar),
    "ufunc": (np.sin, np.cos),
    "operator": (operator.add, operator.mul),
    "slot of a builtin": (float.__add__, float.__mul__),
    "bound slot": ((2.0).__mul__, (3.0).__mul__),
    "bound builtin": ([1].count, [2].count),
    "itemgetter": (operator.itemgetter(0), operator.itemgetter(1)),
    "attrgetter": (operator.attrgetter("real"), operator.attrgetter("imag")),
    "methodcaller": (operator.methodcaller("sin"), operator.methodcaller("cos")),
    "struct": (struct.Struct("<f"), struct.Struct("<d")),
    "class": (nn.ReLU, nn.GELU),
    "list of classes": ([nn.ReLU], [nn.GELU]),
    "modules in a plain list": ([nn.ReLU()], [nn.GELU()]),
    "module in a dict": ({"a": nn.Softmax(0)}, {"a": nn.Softmax(1)}),
    "object": (Config(rate=1), Config(rate=1.0)),
    "object in an object": (Config(deep=Config(rate=1)), Config(deep=Config(rate=2))),
    "name in an object": (Config(a=1), Config(b=1)),
    "object with slots": (Slotted(1), Slotted(2)),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "method of an object": (Slotted(1).scale, Slotted(2).scale),
    "cell of a lambda": tuple((lambda n: lambda x: x * n)(n) for n in (1, 2)),
    "lambdas of one line": ((lambda x: x * 2), (lambda x: x * 3)),
    "weakly held module": (weakref.ref(PARENTS[0]), weakref.ref(PARENTS[1])),
    "path": (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
}


@pytest.mark.parametrize(("first", "second"), VALUES.values(), ids=VALUES)
def test_modules_with_different_attributes_are_apart(first, second, log):
    assert_apart(lambda: holder(first), lambda: holder(second), torch.rand(3, 2))
    assert [record.getMessage() for record in log if record.levelno >= logging.WARNING] == []


def test_ints_of_any_size_can_be_read():
    hashes = [hash_of(holder(10**5000 + i)) for i in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


class SelfAttention(nn.Module):
    def __init__(self, heads, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Sign(nn.Module):
    """Tells whether it is in training."""

    def forward(self, x):
        return x if self.training else -x


class Relay(nn.Module):
    """Computes with whatever it is given, registered or not."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.step(x)


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("scale", torch.ones(4, dtype=dtype))

    def forward(self, x):
        return x * self.scale


def layer(change=None):
    """A linear layer, changed a little."""
    module = nn.Linear(4, 4)
    if change is not None:
        change(module)
    return module


def edited(name, value, where=(1, 2)):
    def edit(module):
        getattr(module, name)[where] = value

    return lambda: layer(edit)


def hooked(hook, **options):
    return lambda: layer(lambda module: module.register_forward_hook(hook, **options))


def prehooked(hook, **options):
    return lambda: layer(lambda module: module.register_forward_pre_hook(hook, **options))


def twice(*names):
    hooks = {"double": lambda m, args, output: output * 2, "add": lambda m, args, output: output + 1}

    def change(module):
        for name in names:
            module.register_forward_hook(hooks[name])

    return lambda: layer(change)


def times(factor):
    return lambda module, args, output: output * factor


def patched(factor):
    def forward(x):
        return x * factor

    return lambda: layer(lambda module: setattr(module, "forward", forward))


def swapped(first, second):
    def build():
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        return nn.Sequential(layers[first], nn.Tanh(), layers[second])

    return build


def buffered(value):
    norm = nn.BatchNorm1d(4).eval()
    norm.running_mean[2] = value
    return norm


def half_in_training(which):
    module = nn.Sequential(Sign(), nn.ReLU(), Sign()).eval()
    module[which].train()
    return module


def closure(module):
    return lambda x: module(x)


ROWS, SEQUENCES, IMAGES = (5, 4), (5, 3, 4), (5, 3, 8, 8)

MODULES = {
    "heads": (lambda: SelfAttention(2), lambda: SelfAttention(4), SEQUENCES),
    "zero attention": (lambda: SelfAttention(2), lambda: SelfAttention(2, add_zero_attn=True), SEQUENCES),
    "stride": (lambda: nn.Conv2d(3, 4, 3, stride=1), lambda: nn.Conv2d(3, 4, 3, stride=2), IMAGES),
    "padding": (lambda: nn.Conv2d(3, 4, 3, padding=1), lambda: nn.Conv2d(3, 4, 3, padding=2), IMAGES),
    "padding mode": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        IMAGES,
    ),
    "dilation": (lambda: nn.Conv2d(3, 4, 3, dilation=1), lambda: nn.Conv2d(3, 4, 3, dilation=2), IMAGES),
    "output padding": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        IMAGES,
    ),
    "ceil mode": (
        lambda: nn.MaxPool2d(3, ceil_mode=False),
        lambda: nn.MaxPool2d(3, ceil_mode=True),
        IMAGES,
    ),
    "padding counts": (
        lambda: nn.AvgPool2d(3, padding=1, count_include_pad=True),
        lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False),
        IMAGES,
    ),
    "upsampling": (
        lambda: nn.Upsample(scale_factor=2, mode="nearest"),
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        IMAGES,
    ),
    "eps": (lambda: nn.LayerNorm(4, eps=1e-5), lambda: nn.LayerNorm(4, eps=1e-2), ROWS),
    "groups of a norm": (lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(1, 4), ROWS),
    "approximation": (nn.GELU, lambda: nn.GELU("tanh"), ROWS),
    "dim": (lambda: nn.Softmax(1), lambda: nn.Softmax(2), SEQUENCES),
    "slope": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.LeakyReLU(0.1)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.LeakyReLU(0.2)),
        ROWS,
    ),
    "nonlinearity": (
        lambda: _zoo.First(nn.RNN(4, 3, batch_first=True)),
        lambda: _zoo.First(nn.RNN(4, 3, batch_first=True, nonlinearity="relu")),
        SEQUENCES,
    ),
    "norm first": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=False).eval(),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True).eval(),
        SEQUENCES,
    ),
    "order of children": (swapped(0, 1), swapped(1, 0), ROWS),
    "one element": (edited("weight", 0.25), edited("weight", 0.5), ROWS),
    "one bit": (edited("weight", 1.0), edited("weight", math.nextafter(1.0, 2.0) + 1e-7), ROWS),
    "bias": (edited("bias", 0.25, 3), edited("bias", 0.5, 3), ROWS),
    "buffer": (lambda: buffered(0.0), lambda: buffered(0.5), ROWS),
    "no bias": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), ROWS),
    "training flag of a submodule": (lambda: half_in_training(0), lambda: half_in_training(2), ROWS),
    "hook or none": (layer, hooked(lambda module, args, output: output * 2), ROWS),
    "hook": (
        hooked(lambda module, args, output: output * 2),
        hooked(lambda module, args, output: output * 3),
        ROWS,
    ),
    "closure of a hook": (hooked(times(2)), hooked(times(3)), ROWS),
    "order of hooks": (twice("double", "add"), twice("add", "double"), ROWS),
    "hook with keywords": (
        hooked(lambda *args: args[-1] * len(args)),
        hooked(lambda *args: args[-1] * len(args), with_kwargs=True),
        ROWS,
    ),
    "pre-hook": (
        prehooked(lambda module, args: (args[0] * 2,)),
        prehooked(lambda module, args: (args[0] * 3,)),
        ROWS,
    ),
    "forward put on an instance": (patched(2), patched(3), ROWS),
    "attribute of an unregistered module": (
        lambda: Relay(step=closure(nn.LayerNorm(4, eps=1e-5))),
        lambda: Relay(step=closure(nn.LayerNorm(4, eps=1e-2))),
        ROWS,
    ),
    "weights of an unregistered module": (
        lambda: Relay(step=closure(edited("weight", 0.25)())),
        lambda: Relay(step=closure(edited("weight", 0.5)())),
        ROWS,
    ),
    "hook of an unregistered module": (
        lambda: Relay(step=closure(hooked(times(2))())),
        lambda: Relay(step=closure(hooked(times(3))())),
        ROWS,
    ),
    "forward of another module": (
        lambda: Relay(step=nn.LayerNorm(4, eps=1e-5).forward),
        lambda: Relay(step=nn.LayerNorm(4, eps=1e-2).forward),
        ROWS,
    ),
    "partial": (
        lambda: Relay(step=functools.partial(torch.clamp, max=0.3)),
        lambda: Relay(step=functools.partial(torch.clamp, max=0.4)),
        ROWS,
    ),
    "traced graph": (
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU())),
        ROWS,
    ),
    "traced number": (
        lambda: torch.fx.symbolic_trace(Relay(step=lambda x: x * 2)),
        lambda: torch.fx.symbolic_trace(Relay(step=lambda x: x * 3)),
        ROWS,
    ),
    "weight dtype": (lambda: Scaled(torch.float32), lambda: Scaled(torch.float64), ROWS),
    "mapped over another dimension": (
        lambda: Relay(step=torch.vmap(torch.diag, in_dims=0)),
        lambda: Relay(step=torch.vmap(torch.diag, in_dims=0, out_dims=1)),
        (4, 4, 4),
    ),
}


@pytest.mark.parametrize(("first", "second", "shape"), MODULES.values(), ids=MODULES)
def test_modules_that_differ_a_little_are_apart(first, second, shape, log):
    assert_apart(first, second, torch.rand(shape))
    assert [record.getMessage() for record in log if record.levelno >= logging.WARNING] == []


# Of each, two files are written, with the first and with the second text in place of HERE.
CODE = {
    "global number": (
        """
SCALE = HERE

def build():
    return Net()

class Net(nn.Module):
    def forward(self, x):
        return x * SCALE
""",
        "2.0",
        "3.0",
    ),
    "int or float": ("SCALE = HERE\ndef build(): return lambda x: (x * 10).int() * SCALE", "2", "2.0"),
    "global function": (
        """
def helper(x):
    return x * HERE

class Net(nn.Module):
    def forward(self, x):
        return helper(x)

build = Net
""",
        "2",
        "3",
    ),
    "global of a global function of a global function": (
        """
SCALE = HERE

def inner(x):
    return [y * SCALE for y in x]

def outer(x):
    return torch.stack(inner(x))

def build():
    return lambda x: outer(x)
""",
        "2",
        "3",
    ),
    "alias of a torch function": (
        """
activation = F.HERE

def model(x):
    return activation(x - 0.5)

def build():
    return model
""",
        "relu",
        "gelu",
    ),
    "attribute of torch": ("def build(): return lambda x: torch.HERE(x)", "sin", "cos"),
    "container": (
        "TABLE = {'a': [1, HERE]}\ndef build(): return lambda x: x * TABLE['a'][1]",
        "2",
        "3",
    ),
    "global module": (
        """
torch.manual_seed(0)
NORM = nn.LayerNorm(4, eps=HERE)

def build():
    return lambda x: NORM(x)
""",
        "1e-5",
        "1e-2",
    ),
    "global object": (
        """
class Config:
    def __init__(self, scale):
        self.scale = scale

CONFIG = Config(HERE)

def build():
    return lambda x: x * CONFIG.scale
""",
        "2",
        "3",
    ),
    "global dataclass": (
        """
@dataclasses.dataclass
class Config:
    scale: float = HERE

CONFIG = Config()

def build():
    return lambda x: x * CONFIG.scale
""",
        "2",
        "3",
    ),
    "class used as a namespace": (
        """
class Config:
    scale = HERE

def build():
    return lambda x: x * Config.scale
""",
        "2",
        "3",
    ),
    "value of an enum": (
        """
class Scale(enum.Enum):
    LARGE = HERE

def model(x):
    return x * Scale.LARGE.value

def build():
    return model
""",
        "2",
        "3",
    ),
    "value of an int enum that is kept": (
        """
class Scale(enum.IntEnum):
    LARGE = HERE

class Net(nn.Module):
    def forward(self, x):
        return x * self.scale

def build():
    net = Net()
    net.scale = Scale.LARGE
    return net
""",
        "2",
        "3",
    ),
    "default argument": (
        """
DEFAULT = HERE

def make(default=DEFAULT):
    def model(x, scale=default):
        return x * scale
    return model

def build():
    return make()
""",
        "2",
        "3",
    ),
    "default of a keyword": (
        """
DEFAULT = HERE

def make(default=DEFAULT):
    def model(x, *, scale=default):
        return x * scale
    return model

def build():
    return make()
""",
        "2",
        "3",
    ),
    "closure": (
        """
def make(scale):
    def model(x):
        return x * scale
    return model

def build():
    return make(HERE)
""",
        "2",
        "3",
    ),
    "closure of a closure": (
        """
def make(scale):
    def helper(x):
        return x * scale
    def model(x):
        return helper(x)
    return model

def build():
    return make(HERE)
""",
        "2",
        "3",
    ),
    "one of two lambdas on a line": (
        """
PAIR = (lambda x: x * 2, lambda x: x * 3)

def build():
    return PAIR[HERE]
""",
        "0",
        "1",
    ),
    "one of two lambdas on a line that call the same": (
        """
PAIR = (lambda x: torch.add(x, 1), lambda x: torch.add(x, 1.5))

class Net(nn.Module):
    def forward(self, x):
        return self.step(x)

def build():
    net = Net()
    net.step = PAIR[HERE]
    return net
""",
        "0",
        "1",
    ),
    "lambda over several lines": (
        """
MODEL = [
    lambda x: (
        x
        * HERE
    ),
]

def build():
    return MODEL[0]
""",
        "2",
        "3",
    ),
    "function attribute": (
        """
def model(x):
    return x * model.scale

model.scale = HERE

def build():
    return model
""",
        "2",
        "3",
    ),
    "class attribute": (
        """
class Net(nn.Module):
    scale = HERE
    def forward(self, x):
        return x * self.scale

build = Net
""",
        "2",
        "3",
    ),
    "attribute put on the class": (
        """
class Net(nn.Module):
    def forward(self, x):
        return x * self.scale

Net.scale = HERE
build = Net
""",
        "2",
        "3",
    ),
    "method put on the class": (
        """
class Net(nn.Module):
    def forward(self, x):
        return self.helper(x)

def double(self, x):
    return x * 2

def triple(self, x):
    return x * 3

Net.helper = HERE
build = Net
""",
        "double",
        "triple",
    ),
    "method put on a class of torch": (
        """
def forward(self, x):
    return x * HERE

class Identity(nn.Identity):
    pass

Identity.forward = forward
build = Identity
""",
        "2",
        "3",
    ),
    "method put on the instance": (
        """
class Net(nn.Module):
    def forward(self, x):
        return self.helper(x)

def helper(self, x):
    return x * HERE

def build():
    net = Net()
    net.helper = types.MethodType(helper, net)
    return net
""",
        "2",
        "3",
    ),
    "base class": (
        """
class Base(nn.Module):
    def helper(self, x):
        return x * HERE

class Net(Base):
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "2",
        "3",
    ),
    "which base comes first": (
        """
class Double:
    def helper(self, x):
        return x * 2

class Triple:
    def helper(self, x):
        return x * 3

class Net(HERE, nn.Module):
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "Double, Triple",
        "Triple, Double",
    ),
    "subclass that overrides a helper": (
        """
class Base(nn.Module):
    def helper(self, x):
        return x * 2
    def forward(self, x):
        return self.helper(x)

class Other(Base):
    def helper(self, x):
        return x * 3

def build():
    return HERE()
""",
        "Base",
        "Other",
    ),
    "cached helper": (
        """
@functools.lru_cache
def scale():
    return HERE

def build():
    return lambda x: x * scale()
""",
        "2",
        "3",
    ),
    "property": (
        """
class Net(nn.Module):
    @property
    def scale(self):
        return HERE
    def forward(self, x):
        return x * self.scale

build = Net
""",
        "2",
        "3",
    ),
    "cached property": (
        """
class Net(nn.Module):
    @functools.cached_property
    def scale(self):
        return HERE
    def forward(self, x):
        return x * self.scale

build = Net
""",
        "2",
        "3",
    ),
    "static method": (
        """
class Net(nn.Module):
    @staticmethod
    def helper(x):
        return x * HERE
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "2",
        "3",
    ),
    "class method": (
        """
class Net(nn.Module):
    @classmethod
    def helper(cls, x):
        return x * HERE
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "2",
        "3",
    ),
    "static or class method": (
        """
class Net(nn.Module):
    @HERE
    def helper(*args):
        return args[-1] * len(args)
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "staticmethod",
        "classmethod",
    ),
    "partial method": (
        """
class Net(nn.Module):
    def scaled(self, x, scale):
        return x * scale
    helper = functools.partialmethod(scaled, scale=HERE)
    def forward(self, x):
        return self.helper(x)

build = Net
""",
        "2",
        "3",
    ),
    "descriptor": (
        """
class Scale:
    def __get__(self, instance, owner):
        return HERE

class Net(nn.Module):
    scale = Scale()
    def forward(self, x):
        return x * self.scale

build = Net
""",
        "2",
        "3",
    ),
    "metaclass": (
        """
class Meta(type):
    @property
    def scale(cls):
        return HERE

class Net(nn.Module, metaclass=Meta):
    def forward(self, x):
        return x * type(self).scale

build = Net
""",
        "2",
        "3",
    ),
    "no_grad method": (
        """
class Net(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * HERE

build = Net
""",
        "2",
        "3",
    ),
    "decorator of the user's own": (
        """
def scaled(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * HERE
    return wrapper

class Net(nn.Module):
    @scaled
    def forward(self, x):
        return x + 1

build = Net
""",
        "2",
        "3",
    ),
    "argument of a decorator of the user's own": (
        """
def scaled(scale):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * scale
        return wrapper
    return decorate

class Net(nn.Module):
    @scaled(HERE)
    def forward(self, x):
        return x + 1

build = Net
""",
        "2",
        "3",
    ),
    "argument of a decorator of torch": (
        """
class Net(nn.Module):
    @torch.autocast("cpu", dtype=torch.HERE)
    def forward(self, x):
        return x @ x.T @ torch.ones(len(x), 1)

build = Net
""",
        "bfloat16",
        "float16",
    ),
    "argument of a decorator of torch that maps": (
        """
@functools.partial(torch.vmap, out_dims=HERE)
def helper(x):
    return torch.diag(x)

def build():
    return lambda x: helper(torch.stack([x.flatten()[:5]] * 5))
""",
        "0",
        "1",
    ),
    "argument of a decorator of the standard library": (
        """
@functools.singledispatch
def helper(x):
    return x

@helper.register(torch.Tensor)
def _(x):
    return x * HERE

def build():
    return lambda x: helper(x)
""",
        "2",
        "3",
    ),
    "context manager": (
        """
@contextlib.contextmanager
def scale():
    yield HERE

def model(x):
    with scale() as s:
        return x * s

def build():
    return model
""",
        "2",
        "3",
    ),
    "custom autograd function": (
        """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * HERE

def build():
    return lambda x: Scale.apply(x)
""",
        "2",
        "3",
    ),
    "parametrisation": (
        """
class Scale(nn.Module):
    def forward(self, weight):
        return weight * HERE

def build():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Scale())
    return layer
""",
        "2",
        "3",
    ),
    "nested function": (
        """
def model(x):
    def inner(y):
        return [z * SCALE for z in y]
    return torch.stack(inner(x))

SCALE = HERE

def build():
    return model
""",
        "2",
        "3",
    ),
    "callable object": (
        """
class Scale:
    def __call__(self, x):
        return x * HERE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = Scale()
    def forward(self, x):
        return self.step(x)

build = Net
""",
        "2",
        "3",
    ),
    "generated method": (
        """
def make(scale):
    def forward(self, x):
        return x * scale
    return type("Net", (nn.Module,), {"forward": forward})

def build():
    return make(HERE)()
""",
        "2",
        "3",
    ),
    "order of the fields of a dataclass": (
        """
@dataclasses.dataclass
class Options:
    HERE

class Net(nn.Module):
    def forward(self, x):
        return x * dataclasses.astuple(self.options)[0]

def build():
    net = Net()
    net.options = Options(a=2, b=3)
    return net
""",
        "a: int; b: int",
        "b: int; a: int",
    ),
}

PRELUDE = """
import contextlib, dataclasses, enum, functools, types
import torch
import torch.nn.functional as F
from torch import nn

"""


@pytest.mark.parametrize(("source", "first", "second"), CODE.values(), ids=CODE)
def test_code_that_differs_a_little_is_apart(source, first, second, load, log):
    files = [
        load(f"written_{i}", PRELUDE + source.replace("HERE", text)) for i, text in enumerate((first, second))
    ]
    assert_apart(files[0].build, files[1].build, torch.rand(5, 4))
    assert [record.getMessage() for record in log if record.levelno >= logging.WARNING] == []


def test_a_number_in_another_project_module_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "written_config.py").write_text("SCALE = 2\n")
    (tmp_path / "written_model.py").write_text(
        "import written_config as config\n\ndef model(x):\n    return x * config.SCALE\n"
    )
    config, model = map(importlib.import_module, ("written_config", "written_model"))
    monkeypatch.setitem(sys.modules, "written_config", config)
    monkeypatch.setitem(sys.modules, "written_model", model)
    cached, x = torchcache(model.model), torch.rand(4, 2)
    assert equal(cached(x), x * 2)
    before = cached.cache_instance.module_hash
    config.SCALE = 3
    assert equal(cached(x), x * 3)
    assert cached.cache_instance.module_hash != before
    config.SCALE = 2
    assert equal(cached(x), x * 2)
    assert cached.cache_instance.stats().hits == 4
    assert cached.cache_instance.module_hash == before


# Ways to reach HERE in another file; each with the text of that file.
REACHES = {
    "module": ("import other\ndef model(x): return x * other.SCALE", "SCALE = HERE"),
    "name": ("from other import SCALE\ndef model(x): return x * SCALE", "SCALE = HERE"),
    "function": ("import other\ndef model(x): return other.f(x)", "def f(x):\n    return x * HERE"),
    "what a function names": (
        "from other import f\ndef model(x): return f(x)",
        "SCALE = HERE\ndef f(x):\n    return x * SCALE",
    ),
    "class": (
        "import other\ndef model(x): return x * other.Config.inner.SCALE",
        "class Inner: SCALE = HERE\nclass Config: inner = Inner",
    ),
    "import within": ("def model(x):\n    import other\n    return x * other.SCALE", "SCALE = HERE"),
    "import of a name within": (
        "def model(x):\n    from other import SCALE\n    return x * SCALE",
        "SCALE = HERE",
    ),
    "module as a whole": (
        "import other\ndef model(x):\n    config = other\n    return x * config.SCALE",
        "SCALE = HERE",
    ),
    "module kept in an object": (
        "import other\nclass Holder:\n    config = other\ndef model(x): return x * Holder.config.SCALE",
        "SCALE = HERE",
    ),
}


@pytest.mark.parametrize(("model", "other"), REACHES.values(), ids=REACHES)
def test_what_is_reached_in_another_file_counts(model, other, load):
    x, hashes = torch.rand(4, 2), []
    for scale in (2, 3):
        load("other", other.replace("HERE", str(scale)))
        cached = torchcache(load(f"model_{scale}", model).model)
        assert equal(cached(x), x * scale)
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    "text", ["import other\n    return x * other.SCALE", "from other import SCALE\n    return x * SCALE"]
)
def test_a_file_that_is_imported_during_the_first_call_counts(text, load, tmp_path, monkeypatch):
    hashes = []
    for scale in (2, 3):
        folder = tmp_path / f"folder {scale}"
        folder.mkdir()
        (folder / "written_late.py").write_text(f"SCALE = {scale}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            cached = torchcache(
                load("model", f"def model(x):\n    {text}".replace("other", "written_late")).model
            )
            before = cached.cache_instance.module_hash
            assert equal(cached(torch.ones(2)), torch.full((2,), float(scale)))
            assert cached.cache_instance.module_hash == before
            hashes.append(before)
            sys.modules.pop("written_late")
    assert hashes[0] != hashes[1]


@torchcache
class Built(nn.Module):
    """`scale` is not kept, and `bias` only in what is built."""

    def __init__(self, width, scale=1.0, *, bias=True, **options):
        super().__init__()
        self.layer = nn.Linear(4, width, bias=bias)

    def forward(self, x):
        return self.layer(x)


def built(*args, **kwargs):
    torch.manual_seed(0)
    return Built(*args, **kwargs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1.0, 2.0),
        (1, 1.0),
        (torch.ones(2), torch.zeros(2)),
        ([nn.ReLU], [nn.GELU]),
        (Config(a=1), Config(a=2)),
        (lambda x: x * 2, lambda x: x * 3),
    ],
    ids=["float", "type", "tensor", "class", "object", "lambda"],
)
def test_constructor_arguments_count_even_if_they_are_not_kept(first, second):
    hashes = [built(3, value).cache_instance.module_hash for value in (first, first, second)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_stored_dtype_counts():
    hashes = {
        torchcache(cache_dtype=dtype)(nn.ReLU()).cache_instance.module_hash
        for dtype in (None, torch.float16, torch.bfloat16)
    }
    assert len(hashes) == 3


def test_a_given_name_replaces_the_fingerprint():
    named = [torchcache(persistent_module_hash=name)(layer()) for name in ("a", "a", "b")]
    hashes = [module.cache_instance.module_hash for module in named]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hash_of(layer()) not in hashes


SAME_ARGUMENTS = [
    lambda: built(3, 1.0, bias=True, a=1, b=2),
    lambda: built(3, bias=True, a=1, b=2),
    lambda: built(3, a=1, b=2),
    lambda: built(b=2, a=1, width=3),
    lambda: built(scale=1.0, b=2, bias=True, a=1, width=3),
    lambda: built(*[3], **{"b": 2, "a": 1}),
]


@pytest.mark.parametrize("build", SAME_ARGUMENTS)
def test_the_way_to_pass_constructor_arguments_does_not_count(build):
    assert build().cache_instance.module_hash == SAME_ARGUMENTS[0]().cache_instance.module_hash


MOVED = """
LIMIT = 5

def helper(x):
    return x.clamp(max=LIMIT)

{decorator}
class Net(nn.Module):
    factor = 2

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width)

    @staticmethod
    def scaled(x):
        return x * 2

    def forward(self, x):
        return helper(self.scaled(self.layer(x))) * self.factor

{decorator}
def function(x, *, power=2):
    return helper(x) ** power
"""
HEADER = PRELUDE + "from torchcache2 import torchcache\n"


@pytest.mark.parametrize(
    "decorator",
    [
        "@torchcache()",
        "@torchcache(max_memory_cache_size='1MB')",
        "@torchcache(policy='lru', max_memory_cache_size=0.5)",
        "@torchcache(memory_cache_device=None)",
        "@torchcache(subsample_count=10)",
        "@torchcache(\n    policy='mru',\n    # For the sake of a comment.\n    enabled=True,\n)",
        "import builtins, types as types_again  # more lines\nUNUSED = [1]\n\n@torchcache",
    ],
)
@pytest.mark.parametrize("name", ["Net", "function"])
def test_neither_file_nor_decorator_options_count(name, decorator, load):
    def module_hash(file, source):
        thing = getattr(load(file, source), name)
        thing = seeded(lambda: thing(3)) if name == "Net" else thing
        return thing.cache_instance.module_hash

    here = module_hash("written_here", HEADER + MOVED.format(decorator="@torchcache"))
    there = HEADER + "def shim():\n    pass\n" * 3 + MOVED.format(decorator=decorator)
    assert module_hash("written_there", there) == here


def test_indentation_does_not_count(load):
    nested = "def make():\n" + textwrap.indent(MOVED.format(decorator="@torchcache"), "    ")
    nested = nested.replace("    LIMIT = 5", "    global LIMIT\n    LIMIT = 5")
    flat = load("written_flat", HEADER + MOVED.format(decorator="@torchcache"))
    assert "helper" in nested
    deep = load(
        "written_deep",
        HEADER
        + nested.replace("    def helper", "    global helper\n    def helper")
        + "    return Net\nNet = make()\n",
    )
    assert hash_of_built(deep.Net) == hash_of_built(flat.Net)


def hash_of_built(kind):
    module = seeded(lambda: kind(3))
    return module.cache_instance.module_hash


def test_a_decorated_instance_is_the_same_thing_wherever_it_was_decorated():
    first = torchcache(policy="lru")(layer())
    second = torchcache(layer())
    assert first.cache_instance.module_hash != hash_of(layer(lambda m: m.weight.mul_(2)))
    torch.manual_seed(0)
    third = torchcache(max_memory_cache_size=10)(layer())
    torch.manual_seed(0)
    assert third.cache_instance.module_hash == hash_of(layer())
    assert first.cache_instance.module_hash != second.cache_instance.module_hash


def make_project():
    torch.manual_seed(0)
    return _zoo.project()


def make_instance():
    torch.manual_seed(0)
    return torchcache(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.GELU()).eval())


def retrained(module):
    module.train()
    module.eval()


def restored(module):
    state = copy.deepcopy(module.state_dict())
    for parameter in module.parameters():
        parameter.mul_(2)
    assert module.cache_instance.module_hash
    module.load_state_dict(state)


def restrided(module):
    for parameter in module.parameters():
        wide = parameter.new_empty((*parameter.shape, 2))
        wide[..., 1] = parameter
        parameter.data = wide[..., 1]
        assert not parameter.is_contiguous()


def frozen(module):
    for parameter in module.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def overridden(module):
    module.torchcache_max_memory_cache_size = "2MB"
    module.torchcache_policy = "lru"


def called(module):
    x = torch.rand(3, 4)
    assert equal(module(x), module(x))
    module(torch.rand(4, 4))


def hooked_and_unhooked(module):
    handle = next(module.children()).register_forward_hook(times(2))
    assert module.cache_instance.module_hash
    handle.remove()


def held_by_grad(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("make", [make_project, make_instance])
@pytest.mark.parametrize(
    "change",
    [retrained, restored, restrided, frozen, overridden, called, hooked_and_unhooked, held_by_grad],
)
def test_what_does_not_change_the_outputs_does_not_count(change, make):
    expected = make().cache_instance.module_hash if make is make_instance else None
    module, other = make(), make()
    change(module)
    expected = other.cache_instance.module_hash
    assert module.cache_instance.module_hash == expected
    assert module.cache_instance.module_hash == expected


def saved(module):
    twin = type(module)(3, settings=module.settings, activation=torch.sin, b=1, a=(2, None))
    twin.load_state_dict(module.state_dict())
    return twin


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def torch_saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [make_project, make_instance])
@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, pickled, torch_saved])
@pytest.mark.parametrize("warm", [False, True])
def test_copies_are_the_same_thing(twin, make, warm):
    module = make()
    if make is make_project:  # a lambda cannot be pickled
        module.layer._forward_hooks.clear()
    if warm:
        module(torch.rand(3, 4))
    module_hash = module.cache_instance.module_hash
    copied = twin(module)
    assert copied.cache_instance.module_hash == module_hash
    called(copied)
    assert copied.cache_instance.module_hash == module_hash


def test_weights_that_are_loaded_into_a_new_instance_make_it_the_same_thing():
    module = make_project()
    torch.manual_seed(1)
    twin = _zoo.project()
    assert twin.cache_instance.module_hash != module.cache_instance.module_hash
    twin.load_state_dict(module.state_dict())
    assert twin.cache_instance.module_hash == module.cache_instance.module_hash


def test_copies_of_sets_of_modules_are_the_same_thing():
    def build():
        layers = [nn.Linear(2, 2) for _ in range(20)]
        return Relay(step=torch.sin, layers=set(layers), listed=nn.ModuleList(layers))

    module = seeded(build)
    assert len({hash_of(copy.deepcopy(module)) for _ in range(5)}) == 1


@pytest.fixture(scope="module")
def processes():
    """What two other processes say of the zoo."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests._zoo"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return found


@pytest.mark.parametrize("name", [*_zoo.READABLE, "bert"])
def test_other_processes_agree(name, processes):
    torch.manual_seed(0)
    module = _zoo.decorated(name)
    here = [module.cache_instance.module_hash, 0]
    assert [found[name] for found in processes] == [here, here]


@pytest.mark.parametrize("name", _zoo.READABLE)
def test_a_fingerprint_is_stable_and_silent(name, log):
    x = torch.rand(_zoo.READABLE[name][1])
    plain = _zoo.build(name)
    if name not in ("project", "function"):
        expected = plain(x)
    module = _zoo.decorated(name)
    cache = module.cache_instance
    before, hits = cache.module_hash, cache.stats().hits
    assert cache.module_hash == before
    first = module(x)
    assert cache.module_hash == before
    second = module(x)
    assert cache.module_hash == before
    assert equal(first, second)
    if name not in ("project", "function"):
        assert equal(first, expected)
    assert cache.stats().hits == hits + len(x)
    assert not cache.stats().bypasses
    cache.refresh()
    assert cache.module_hash == before
    assert [record.getMessage() for record in log if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", _zoo.UNREADABLE)
def test_what_cannot_be_read_is_named_once_and_cached_here(name, log, processes):
    module, place = _zoo.decorated(name), _zoo.UNREADABLE[name][1]
    x = torch.rand(3, 4)
    plain = _zoo.build(name)(x)
    assert equal(module(x), plain)
    assert equal(module(x), plain)
    assert module.cache_instance.stats().hits == 3
    module.cache_instance.refresh()
    assert equal(module(x), plain)
    assert module.cache_instance.stats().hits == 6
    warned = [record.getMessage() for record in log if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert f"cannot read {place}" in warned[0]
    elsewhere = [found[name] for found in processes]
    assert [warnings for _, warnings in elsewhere] == [1, 1]
    assert len({module.cache_instance.module_hash, *(found for found, _ in elsewhere)}) == 3


def test_two_unreadable_things_are_apart(log):
    modules = [torchcache(seeded(lambda: _zoo.holding(io.StringIO()))) for _ in range(2)]
    first, second = (module.cache_instance.module_hash for module in modules)
    assert first != second


def test_a_model_of_transformers_is_read_and_cached(log):
    torch.manual_seed(0)
    plain = _zoo.bert()
    module = torchcache(copy.deepcopy(plain))
    before = module.cache_instance.module_hash
    ids = torch.randint(0, 11, (4, 6))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    expected = plain(input_ids=ids, attention_mask=mask)
    for hits in (0, 4):
        output = module(input_ids=ids, attention_mask=mask)
        assert type(output) is type(expected)
        assert list(output) == list(expected)
        assert equal(output.last_hidden_state, expected.last_hidden_state)
        assert equal(output.pooler_output, expected.pooler_output)
        assert module.cache_instance.stats().hits == hits
    assert module.cache_instance.module_hash == before
    assert not module.cache_instance.stats().bypasses
    assert [record.getMessage() for record in log if record.levelno >= logging.WARNING] == []
    module.config.hidden_act = "relu"
    assert module.cache_instance.module_hash != before
    module.config.hidden_act = "gelu"
    assert module.cache_instance.module_hash == before
    module.encoder.layer[1].attention.self.scaling = 2.0
    assert module.cache_instance.module_hash != before
