"""Modules that hold what differs from process to process, each by a function without arguments.

`tests/identity/test_stable_names.py` copies this file into two folders, and runs it in a process in each. The
first argument says how much the process has done before.
"""

import collections
import copy
import enum
import functools
import inspect
import json
import logging
import struct
import sys
import threading
import typing
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from torchcache2 import torchcache


def shift(x):
    return x + 0.5


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval().requires_grad_(False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))
        self.rate = 0.1

    def forward(self, x):
        return shift(torch.relu(self.layer(x))) * self.rate + self.offset + torch.tensor([1.0, 2.0, 3.0])


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Interpreted(Outer):
    def forward(self, x):
        return torch.fx.Interpreter(self.inner).run(x)


SCRIPTED = None


class CallsScripted(nn.Module):
    def forward(self, x):
        return SCRIPTED(x)


class Thing:
    def __init__(self, value):
        self.value = value


class Colour(enum.Flag):
    RED = enum.auto()
    BLUE = enum.auto()


@functools.singledispatch
def dispatched(x):
    return x * 2


@dispatched.register
def _(x: int):
    return x * 3


class Dispatching(nn.Module):
    def forward(self, x):
        return dispatched(x)


T, P, N = typing.TypeVar("T"), typing.ParamSpec("P"), typing.NewType("N", int)
TYPES = [
    *(int | None, typing.Optional["Later"], list[int], list["Later"], T, P, P.args, N, typing.Any),  # noqa: F821
    *(typing.Callable[[int], str], typing.Literal["a"], typing.ForwardRef("Later"), typing.Generic),
    *(typing.Annotated[int, "x"], typing.ClassVar[int], tuple[int, ...], type[int]),
    *(typing.Union, typing.Final, typing.Dict),  # noqa: UP006
]


def holding(value):
    module = plain()
    module.held = value
    return module


def with_handle():
    module = plain()
    module.handle = module[0].register_forward_hook(lambda module, args, out: out * 2)
    return module


def with_set_of_modules():
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    module.skipped = {module[0], module[2]}
    module.others = ({nn.Linear(2, size) for size in range(2, 9)},)
    return module


def with_types():
    def function(a: int | None = 3, *b: "Later", c: typing.Optional[str] = None) -> list[int]:  # noqa: F821, UP045
        return []

    wrapped = functools.update_wrapper(functools.partial(function, 1), function)
    return holding([TYPES, inspect.signature(function), function.__annotations__, wrapped])


class HasGraph(nn.Module):
    """Names some of what is left out of a graph module, but not that of it which differs."""

    def __init__(self):
        super().__init__()
        shapes = ({0: torch.export.Dim("items")},)
        program = torch.export.export(Net().eval(), (torch.rand(3, 3),), dynamic_shapes=shapes)
        self.graph = program.module()

    def forward(self, x):
        return self.graph(x)


def exported():
    return torch.export.export(Net().eval().requires_grad_(False), (torch.rand(2, 3),)).module()


def compiled():
    module = torch.compile(Net().eval(), backend="eager")
    module(torch.rand(2, 3))
    return module


def called():
    dispatched(3)
    return Dispatching()


def objects_of_libraries():
    """What has addresses, memos and hashes among its state, or in the code that was made for its class."""
    import attrs
    import pydantic
    import scipy.spatial
    import sympy
    from sklearn.feature_extraction.text import TfidfVectorizer

    @attrs.frozen
    class Attrs:
        scale: float = 2.0

    class Model(pydantic.BaseModel):
        scale: float = 2.0

        @pydantic.field_validator("scale")
        @classmethod
        def positive(cls, scale):
            return abs(scale)

    @pydantic.dataclasses.dataclass
    class Data:
        scale: float = 2.0

    points = torch.arange(150.0).view(50, 3).sin().numpy()
    texts = TfidfVectorizer().fit(["a cat sat", "the dog ran"])
    tree = scipy.spatial.KDTree(points)
    pool, form = ThreadPoolExecutor(1), struct.Struct("<i")
    return holding([Attrs(), Model(), Data(), texts, tree, sympy.sin(sympy.symbols("x")), pool, form])


MAKERS = {
    "graph": lambda: torch.fx.symbolic_trace(Net()),
    "graph in a module": lambda: Outer(torch.fx.symbolic_trace(Net())),
    "copied graph": lambda: Outer(copy.deepcopy(torch.fx.symbolic_trace(Net()))),
    "two graphs": lambda: nn.Sequential(torch.fx.symbolic_trace(Net()), torch.fx.symbolic_trace(plain())),
    "interpreted graph": lambda: Interpreted(torch.fx.symbolic_trace(Net())),
    "graph as a value": lambda: holding([torch.fx.symbolic_trace(Net()).graph]),
    "exported in a module": lambda: Outer(exported()),
    "exported for any batch": HasGraph,
    "compiled": lambda: Outer(compiled()),
    "handle of a hook": with_handle,
    "objects of libraries": objects_of_libraries,
    "set of functions": lambda: holding({lambda x: x + 1, lambda x: x * 2, lambda x: x * 3, shift}),
    "set of objects": lambda: holding([{Thing(i) for i in range(9)}, frozenset({Thing("a"), Thing("b")})]),
    "set of modules": with_set_of_modules,
    "set of tensors": lambda: holding({torch.ones(2), torch.zeros(2), torch.ones(3), torch.zeros(3)}),
    "set of tuples": lambda: holding({(i, str(i), shift) for i in range(9)}),
    "types": with_types,
    "singledispatch": called,
    "loggers": lambda: holding([logging.getLogger("stable"), logging.getLogger()]),
    "empty": lambda: holding([threading.local(), weakref.WeakSet(), weakref.WeakKeyDictionary()]),
    "collections": lambda: holding(
        [Colour.RED | Colour.BLUE, collections.Counter("abca"), collections.ChainMap({"a": 1})]
    ),
}


def main(history):
    warnings.simplefilter("ignore")
    for _ in range(history):
        nn.Linear(2, 2).register_forward_hook(lambda *_: None)
        torch.fx.symbolic_trace(plain())
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torchcache2").handlers = [handler]
    found = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        said.clear()
        module = make()
        found[name] = torchcache(module).cache_instance.module_hash, said[:]
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
