"""Pairs of modules and functions that differ in something small, so that their outputs differ."""

import array
import collections
import dataclasses
import datetime
import enum
import functools
import math
import operator
import pathlib
import re
import textwrap
import types
import weakref
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import zoo


class Holder(nn.Module):
    """Adds a number that tells what its attribute is and prints as, and what is noted on that."""

    def forward(self, x):
        noted = [getattr(self.value, name, None) for name in ("note", "pattern")]
        text = f"{type(self.value)} {self.value!r} {noted}"
        return x.double() + zlib.crc32(text.encode())


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


class Table(dict):
    pass


class Text(str):
    pass


class Number(int):
    pass


def a_day(zone):
    return datetime.datetime(2024, 1, 1, tzinfo=zone)


def annotated(value, note):
    value.note = note
    return value


def adds(number):
    return lambda x: x + number


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
    "class": (nn.ReLU, nn.GELU),
    "list of classes": ([nn.ReLU], [nn.GELU]),
    "modules in a plain list": ([nn.ReLU()], [nn.GELU()]),
    "module in a dict": ({"a": nn.Softmax(0)}, {"a": nn.Softmax(1)}),
    "attribute of a dataclass that is no field": (annotated(Options(1), 1), annotated(Options(1), 2)),
    "attribute of a dict": (annotated(Table(a=1), 1), annotated(Table(a=1), 2)),
    "attribute of a text": (annotated(Text("a"), 1), annotated(Text("a"), 2)),
    "attribute of a parameter": tuple(annotated(nn.Parameter(torch.ones(1)), i) for i in (1, 2)),
    "mask of an array": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    "object": (Config(rate=1), Config(rate=1.0)),
    "object in an object": (Config(deep=Config(rate=1)), Config(deep=Config(rate=2))),
    "name in an object": (Config(a=1), Config(b=1)),
    "object with slots": (Slotted(1), Slotted(2)),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "method of an object": (Slotted(1).scale, Slotted(2).scale),
    "cell of a lambda": (adds(1), adds(2)),
    "lambdas of one line": ((lambda x: x * 2), (lambda x: x * 3)),
    "weakly held module": (weakref.ref(PARENTS[0]), weakref.ref(PARENTS[1])),
    "path": (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    "names of fields of records": (
        np.ones(1, [("a", "i4"), ("b", "i4")]),
        np.ones(1, [("b", "i4"), ("a", "i4")]),
    ),
    "pattern": (re.compile("a" * 300), re.compile("a" * 301)),
    "attribute of an int": (annotated(Number(1), 1), annotated(Number(1), 2)),
    "names of a namedtuple": (
        collections.namedtuple("P", "a b")(1, 2),
        collections.namedtuple("P", "b a")(1, 2),
    ),
    "time zone": (a_day(datetime.timezone.utc), a_day(datetime.timezone(datetime.timedelta(0), "London"))),
    "time zone or none": (a_day(None), a_day(datetime.timezone.utc)),
    "list or deque": ([1, 2], collections.deque([1, 2])),
}


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


class Tied(nn.Module):
    """Its output tells whether its two weights are one."""

    def __init__(self, is_tied):
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.second = self.first if is_tied else nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * (2 if self.first is self.second else 3)


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


def either(kind, *args, **options):
    """Two makers of a module that differ in the option that has a pair of values."""
    (pair,) = [name for name, value in options.items() if isinstance(value, list)]
    return tuple(lambda v=value: kind(*args, **options | {pair: v}).eval() for value in options[pair])


def rnn(**options):
    return zoo.First(nn.RNN(4, 3, batch_first=True, **options))


def leaky(slope):
    return nn.Sequential(nn.LayerNorm(4), nn.LeakyReLU(slope))


def encoder(**options):
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)


MODULES = {
    "heads": (lambda: SelfAttention(2), lambda: SelfAttention(4), SEQUENCES),
    "zero attention": (*either(SelfAttention, 2, add_zero_attn=[False, True]), SEQUENCES),
    "stride": (*either(nn.Conv2d, 3, 4, 3, stride=[1, 2]), IMAGES),
    "padding": (*either(nn.Conv2d, 3, 4, 3, padding=[1, 2]), IMAGES),
    "padding mode": (*either(nn.Conv2d, 3, 4, 3, padding=1, padding_mode=["reflect", "circular"]), IMAGES),
    "dilation": (*either(nn.Conv2d, 3, 4, 3, dilation=[1, 2]), IMAGES),
    "output padding": (*either(nn.ConvTranspose2d, 3, 4, 3, stride=2, output_padding=[0, 1]), IMAGES),
    "ceil mode": (*either(nn.MaxPool2d, 3, ceil_mode=[False, True]), IMAGES),
    "padding counts": (*either(nn.AvgPool2d, 3, padding=1, count_include_pad=[True, False]), IMAGES),
    "upsampling": (*either(nn.Upsample, scale_factor=2, mode=["nearest", "bilinear"]), IMAGES),
    "eps": (*either(nn.LayerNorm, 4, eps=[1e-5, 1e-2]), ROWS),
    "groups of a norm": (lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(1, 4), ROWS),
    "approximation": (*either(nn.GELU, approximate=["none", "tanh"]), ROWS),
    "dim": (*either(nn.Softmax, dim=[1, 2]), SEQUENCES),
    "slope": (*either(leaky, slope=[0.1, 0.2]), ROWS),
    "nonlinearity": (*either(rnn, nonlinearity=["tanh", "relu"]), SEQUENCES),
    "norm first": (*either(encoder, norm_first=[False, True]), SEQUENCES),
    "order of children": (swapped(0, 1), swapped(1, 0), ROWS),
    "one element": (edited("weight", 0.25), edited("weight", 0.5), ROWS),
    "one bit": (edited("weight", 1.0), edited("weight", math.nextafter(1.0, 2.0) + 1e-7), ROWS),
    "bias": (edited("bias", 0.25, 3), edited("bias", 0.5, 3), ROWS),
    "tied weights": (lambda: Tied(True), lambda: Tied(False), ROWS),
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


# Of each, two files are written: «a|b» stands for a in the first and for b in the second.
CODE = {
    "value of an int enum that is kept": """
class Scale(enum.IntEnum):
    LARGE = «2|3»

class Net(nn.Module):
    def forward(self, x):
        return x * self.scale

def build():
    net = Net()
    net.scale = Scale.LARGE
    return net
""",
    "function attribute": """
def model(x):
    return x * model.scale

model.scale = «2|3»

def build():
    return model
""",
    "attribute put on the class": """
class Net(nn.Module):
    def forward(self, x):
        return x * self.scale

Net.scale = «2|3»
build = Net
""",
    "method put on the class": """
class Net(nn.Module):
    def forward(self, x):
        return self.helper(x)

def double(self, x):
    return x * 2

def triple(self, x):
    return x * 3

Net.helper = «double|triple»
build = Net
""",
    "method put on a class of torch": """
def forward(self, x):
    return x * «2|3»

class Identity(nn.Identity):
    pass

Identity.forward = forward
build = Identity
""",
    "method put on the instance": """
class Net(nn.Module):
    def forward(self, x):
        return self.helper(x)

def helper(self, x):
    return x * «2|3»

def build():
    net = Net()
    net.helper = types.MethodType(helper, net)
    return net
""",
    "base class": """
class Base(nn.Module):
    def helper(self, x):
        return x * «2|3»

class Net(Base):
    def forward(self, x):
        return self.helper(x)

build = Net
""",
    "which base comes first": """
class Double:
    def helper(self, x):
        return x * 2

class Triple:
    def helper(self, x):
        return x * 3

class Net(«Double, Triple|Triple, Double», nn.Module):
    def forward(self, x):
        return self.helper(x)

build = Net
""",
    "subclass that overrides a helper": """
class Base(nn.Module):
    def helper(self, x):
        return x * 2
    def forward(self, x):
        return self.helper(x)

class Other(Base):
    def helper(self, x):
        return x * 3

def build():
    return «Base|Other»()
""",
    "metaclass": """
class Meta(type):
    @property
    def scale(cls):
        return «2|3»

class Net(nn.Module, metaclass=Meta):
    def forward(self, x):
        return x * type(self).scale

build = Net
""",
    "parametrisation": """
class Scale(nn.Module):
    def forward(self, weight):
        return weight * «2|3»

def build():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Scale())
    return layer
""",
    "generated method": """
def make(scale):
    def forward(self, x):
        return x * scale
    return type("Net", (nn.Module,), {"forward": forward})

def build():
    return make(«2|3»)()
""",
    "order of the fields of a dataclass": """
@dataclasses.dataclass
class Options:
    «a: int; b: int|b: int; a: int»

class Net(nn.Module):
    def forward(self, x):
        return x * dataclasses.astuple(self.options)[0]

def build():
    net = Net()
    net.options = Options(a=2, b=3)
    return net
""",
}
FUNCTIONS = {  # what a file defines, and what its function returns
    "int or float": ("SCALE = «2|2.0»", "(x * 10).int() * SCALE"),
    "global number": ("SCALE = «2.0|3.0»", "x * SCALE"),
    "global function": ("def helper(x):\n    return x * «2|3»", "helper(x)"),
    "global of a global function of a global function": (
        "SCALE = «2|3»\ndef inner(x):\n    return [y * SCALE for y in x]\ndef outer(x):\n"
        "    return torch.stack(inner(x))",
        "outer(x)",
    ),
    "alias of a torch function": ("activation = F.«relu|gelu»", "activation(x - 0.5)"),
    "attribute of torch": ("", "torch.«sin|cos»(x)"),
    "container": ("TABLE = {'a': [1, «2|3»]}", "x * TABLE['a'][1]"),
    "global module": ("torch.manual_seed(0)\nNORM = nn.LayerNorm(4, eps=«1e-5|1e-2»)", "NORM(x)"),
    "global object": (
        "class Config:\n    def __init__(self, scale):\n        self.scale = scale\nCONFIG = Config(«2|3»)",
        "x * CONFIG.scale",
    ),
    "global dataclass": (
        "@dataclasses.dataclass\nclass Config:\n    scale: float = «2|3»\nCONFIG = Config()",
        "x * CONFIG.scale",
    ),
    "class used as a namespace": ("class Config:\n    scale = «2|3»", "x * Config.scale"),
    "value of an enum": ("class Scale(enum.Enum):\n    LARGE = «2|3»", "x * Scale.LARGE.value"),
    "default argument": (
        "def make(default=«2|3»):\n    def helper(x, scale=default):\n        return x * scale\n"
        "    return helper\nhelper = make()",
        "helper(x)",
    ),
    "default of a keyword": (
        "def make(default=«2|3»):\n    def helper(x, *, scale=default):\n        return x * scale\n"
        "    return helper\nhelper = make()",
        "helper(x)",
    ),
    "closure": (
        "def make(scale):\n    def helper(x):\n        return x * scale\n    return helper\n"
        "helper = make(«2|3»)",
        "helper(x)",
    ),
    "closure of a closure": (
        "def make(scale):\n    def helper(x):\n        return x * scale\n    def both(x):\n"
        "        return helper(x)\n    return both\nboth = make(«2|3»)",
        "both(x)",
    ),
    "one of two lambdas on a line": (
        "PAIR = (lambda x: x * 2, lambda x: x * 3)\nstep = PAIR[«0|1»]",
        "step(x)",
    ),
    "one of two lambdas on a line that call the same": (
        "PAIR = (lambda x: torch.add(x, 1), lambda x: torch.add(x, 1.5))\nstep = PAIR[«0|1»]",
        "step(x)",
    ),
    "lambda over several lines": (
        "STEPS = [\n    lambda x: (\n        x\n        * «2|3»\n    ),\n]",
        "STEPS[0](x)",
    ),
    "callable object": (
        "class Scale:\n    def __call__(self, x):\n        return x * «2|3»\nSTEP = Scale()",
        "STEP(x)",
    ),
    "cached helper": ("@functools.lru_cache\ndef scale():\n    return «2|3»", "x * scale()"),
    "argument of a decorator of torch that maps": (
        "@functools.partial(torch.vmap, out_dims=«0|1»)\ndef helper(x):\n    return torch.diag(x)",
        "helper(torch.stack([x.flatten()[:5]] * 5))",
    ),
    "argument of a decorator of the standard library": (
        "@functools.singledispatch\ndef helper(x):\n    return x\n@helper.register(torch.Tensor)\n"
        "def _(x):\n    return x * «2|3»",
        "helper(x)",
    ),
    "context manager": (
        "@contextlib.contextmanager\ndef scale():\n    yield «2|3»\ndef helper(x):\n"
        "    with scale() as s:\n        return x * s",
        "helper(x)",
    ),
    "custom autograd function": (
        "class Scale(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * «2|3»",
        "Scale.apply(x)",
    ),
    "nested function": (
        "def helper(x):\n    def inner(y):\n        return [z * SCALE for z in y]\n"
        "    return torch.stack(inner(x))\nSCALE = «2|3»",
        "helper(x)",
    ),
}
METHODS = {  # what a class defines, and what its forward returns
    "class attribute": ("scale = «2|3»", "x * self.scale"),
    "no_grad method": ("@torch.no_grad()\ndef helper(self, x):\n    return x * «2|3»", "self.helper(x)"),
    "property": ("@property\ndef scale(self):\n    return «2|3»", "x * self.scale"),
    "cached property": ("@functools.cached_property\ndef scale(self):\n    return «2|3»", "x * self.scale"),
    "static method": ("@staticmethod\ndef helper(x):\n    return x * «2|3»", "self.helper(x)"),
    "class method": ("@classmethod\ndef helper(cls, x):\n    return x * «2|3»", "self.helper(x)"),
    "static or class method": (
        "@«staticmethod|classmethod»\ndef helper(*args):\n    return args[-1] * len(args)",
        "self.helper(x)",
    ),
    "partial method": (
        "def scaled(self, x, scale):\n    return x * scale\n"
        "helper = functools.partialmethod(scaled, scale=«2|3»)",
        "self.helper(x)",
    ),
    "descriptor": (
        "class Scale:\n    def __get__(self, instance, owner):\n        return «2|3»\nscale = Scale()",
        "x * self.scale",
    ),
    "decorator of the user's own": (
        "def scaled(function):\n    @functools.wraps(function)\n    def wrapper(*args):\n"
        "        return function(*args) * «2|3»\n    return wrapper\n@scaled\ndef helper(self, x):\n"
        "    return x + 1",
        "self.helper(x)",
    ),
    "argument of a decorator of the user's own": (
        "def scaled(scale):\n    def decorate(function):\n        @functools.wraps(function)\n"
        "        def wrapper(*args):\n            return function(*args) * scale\n"
        "        return wrapper\n    return decorate\n@scaled(«2|3»)\ndef helper(self, x):\n"
        "    return x + 1",
        "self.helper(x)",
    ),
    "argument of a decorator of torch": (
        "@torch.autocast(torch.get_default_device().type, dtype=torch.«bfloat16|float16»)\n"
        "def helper(self, x):\n    return x @ x.T @ torch.ones(len(x), 1)",
        "self.helper(x)",
    ),
}
for _name, (_text, _output) in FUNCTIONS.items():
    CODE[_name] = f"{_text}\ndef model(x):\n    return {_output}\ndef build():\n    return model\n"
for _name, (_text, _output) in METHODS.items():
    CODE[_name] = (
        f"class Net(nn.Module):\n{textwrap.indent(_text, '    ')}\n"
        f"    def forward(self, x):\n        return {_output}\nbuild = Net\n"
    )

PRELUDE = """
import contextlib, dataclasses, enum, functools, types
import torch
import torch.nn.functional as F
from torch import nn

"""
