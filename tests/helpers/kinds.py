"""Values of many kinds, made of a tensor, and a strict equality of them."""

import collections
import dataclasses
import enum
import types
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from torchcache2 import register_value


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Scaled(collections.namedtuple("_Scaled", "x y")):
    __slots__ = ()

    def __new__(cls, x, y):
        return super().__new__(cls, x * 2, y)


class Noted(Point):
    """Has a dictionary of attributes beside its items."""


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Doubled:
    x: Any
    y: Any = None
    constant: ClassVar[int] = 3

    def __post_init__(self):
        self.x = self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    total: Any = dataclasses.field(init=False)
    y: Any = 1

    def __post_init__(self):
        object.__setattr__(self, "total", self.x + 1)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None

    def __post_init__(self):
        self.x = self.x * 3


class Doubling:
    """A descriptor that computes when it is set."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner):
        if instance is None:
            raise AttributeError(self.name)
        return vars(instance)[self.name]

    def __set__(self, instance, value):
        vars(instance)[self.name] = value * 2


@dataclasses.dataclass
class Described:
    x: Any = Doubling()


@dataclasses.dataclass(init=False)
class Hidden:
    """Keeps its value under another name than that of its field."""

    x: Any

    def __init__(self, x):
        self.x = x

    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._x = value * 2


@dataclasses.dataclass
class Output(ModelOutput):
    logits: Any = None
    states: Any = None


@dataclasses.dataclass
class Clamped(ModelOutput):
    """Rebuilding it changes nothing, unless a row is larger."""

    logits: Any = None

    def __post_init__(self):
        super().__post_init__()
        self["logits"] = self.logits * 1


class Node:
    """A node with a list beside its children."""

    def __init__(self, children, tags):
        self.children, self.tags = children, tags


class Summed(Node):
    """A node whose function adds one to its first child each time that it is rebuilt."""


class Largest(Node):
    """A node that divides its child by the largest element, and so stays as it is if it is rebuilt."""

    def __init__(self, children, tags):
        super().__init__([child / child.max() if child.max() != 1 else child for child in children], tags)


class Turned(Node):
    """A node of which its functions make one of another class."""


class Forgetful(Node):
    """A node with an attribute that its functions do not know."""


for _cls in (Record, Doubled, Frozen, Slotted, Described, Hidden):
    if hasattr(pytree, "register_dataclass"):
        pytree.register_dataclass(_cls)
    else:
        torch.export.register_dataclass(_cls)
for _cls in (Node, Largest, Forgetful):
    pytree.register_pytree_node(
        _cls, lambda node: (node.children, node.tags), lambda c, tags, cls=_cls: cls(list(c), tags)
    )
pytree.register_pytree_node(
    Summed, lambda node: (node.children, node.tags), lambda c, tags: Summed([c[0] + 1, *c[1:]], tags)
)
pytree.register_pytree_node(Turned, lambda node: (node.children, node.tags), lambda c, tags: Node(c, tags))


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Items(list):
    pass


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None

    def __post_init__(self):
        self.x = self.x * 2


class Registered:
    """Computes more attributes of its parts than it can be rebuilt from."""

    def __init__(self, x, factor):
        self.x, self.factor = x, factor
        self.product = x * factor


register_value(Registered, lambda value: {"x": value.x, "factor": value.factor}, lambda p: Registered(**p))


class Keyed(dict):
    pass


class Mapped(collections.UserDict):
    pass


class Mine(torch.Tensor):
    pass


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


def _with(value, **attributes):
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _rows(x):
    return x.reshape(-1, 4)


# What is made of a tensor `x`, or of any value with elements; and whether outputs and samples keep it.
KINDS = {
    "tensor": (lambda x: x, True, True),
    "tuple": (lambda x: (x, x * 2), True, True),
    "list": (lambda x: [x, []], True, True),
    "dict": (lambda x: {"b": x, "a": {}}, True, True),
    "dict of numbers": (lambda x: {1: x, 2.5: None}, True, True),
    "dict of a bool": (lambda x: {True: x, 2.5: None}, True, True),
    "empty dict under a number": (lambda x: [{1: {}}, x], True, True),
    "empty dict under a bool": (lambda x: [{True: {}}, x], True, True),
    "plain values": (lambda x: (None, True, 1, -0.0, float("nan"), 1j, "é", b"\0", x), True, True),
    "ordered": (lambda x: collections.OrderedDict(b=x, a=1), True, True),
    "ordered with an attribute": (lambda x: _with(collections.OrderedDict(b=x), note=1), False, False),
    "defaultdict": (lambda x: collections.defaultdict(list, a=x), True, True),
    "deque": (lambda x: collections.deque([x], 3), True, True),
    "named tuple": (lambda x: Point(x, Point(1, None)), True, True),
    "named tuple that computes": (lambda x: Scaled(x, 1), True, True),
    "named tuple without attributes": (lambda x: Noted(x, 1), True, True),
    "named tuple with an attribute": (lambda x: _with(Noted(x), note=1), False, False),
    "dataclass": (lambda x: Record(x, [1, "a"]), True, True),
    "dataclass with None": (lambda x: Record(x), True, True),
    "dataclass with an attribute": (lambda x: _with(Record(x), note=1), False, False),
    "dataclass that computes": (lambda x: Doubled(x), True, True),
    "frozen dataclass": (lambda x: Frozen(x), True, True),
    "dataclass with slots": (lambda x: Slotted(x, 1), True, True),
    "dataclass with a descriptor": (lambda x: Described(x), True, True),
    "dataclass with a property": (lambda x: Hidden(x), False, False),
    "model output": (lambda x: Output(logits=x, states=(x, x + 1)), True, True),
    "model output with a gap": (lambda x: Output(states=(x,)), True, True),
    "model output with an attribute": (lambda x: _with(Output(logits=x), note=1), False, False),
    "model output that computes": (lambda x: Clamped(logits=x), False, False),
    "node": (lambda x: Node([x, 1], ["a", 1]), True, True),
    "node with True": (lambda x: Node([x, 1], ["a", True]), True, True),
    "node that computes": (lambda x: Summed([x, 1], []), False, False),
    "node that turns": (lambda x: Turned([x, 1], []), False, False),
    "node that forgets": (lambda x: _with(Forgetful([x], []), note=1), False, False),
    "size": (lambda x: [torch.Size([2, 3]), x], False, False),
    "max": (lambda x: torch.max(_rows(x), 1), True, True),
    "topk": (lambda x: torch.topk(_rows(x), 2), True, True),
    "parameter": (lambda x: torch.nn.Parameter(x, requires_grad=False), False, False),
    "tensor with an attribute": (lambda x: _with(x * 1, note="a"), False, False),
    "subclass of Tensor": (lambda x: (x * 1).as_subclass(Mine), False, False),
    "subclass of Tensor with an attribute": (lambda x: _with((x * 1).as_subclass(Mine), a=1), False, False),
    "subclass of str": (lambda x: [Text("a"), x], False, False),
    "subclass of int": (lambda x: [_with(Whole(3), note=1), x], False, False),
    "subclass of list": (lambda x: Items([x]), False, False),
    "subclass of dict": (lambda x: Keyed(a=x), False, False),
    "UserDict": (lambda x: Mapped(a=x), True, True),
    "dataclass that nobody registered": (lambda x: Plain(x, [1, "a"]), True, True),
    "value that was registered": (lambda x: Registered(x, 2), True, True),
    "SimpleNamespace": (lambda x: types.SimpleNamespace(x=x), False, False),
    "mappingproxy": (lambda x: types.MappingProxyType({"a": x}), False, False),
    "enum": (lambda x: [Colour.RED, x], False, False),
    "int enum": (lambda x: [Number.ONE, x], False, False),
    "numpy scalar": (lambda x: [np.float32(1.5), x], False, True),
    "numpy text": (lambda x: [np.str_("a\0"), x], False, True),
    "numpy 0-d": (lambda x: [np.array(3, ">i2"), x], False, True),
    "numpy array": (lambda x: [np.arange(6).reshape(2, 3).T, x], False, True),
    "numpy dates": (lambda x: [np.array(["2020-01-01"], "M8[D]"), x], False, True),
    "numpy structured": (lambda x: [np.array([(1, 2.5)], [("a", ">i4"), ("b", "f8")]), x], False, True),
    "numpy nested": (lambda x: [np.ones(1, [("a", "u1"), ("b", [("c", "f8", (2,))])])[0], x], False, True),
    "numpy of objects": (lambda x: [np.zeros(2, [("a", object)]), x], False, False),
    "numpy metadata": (lambda x: [np.zeros(2, np.dtype("i4", metadata={"a": 1})), x], False, False),
    "masked array": (lambda x: [np.ma.array([1, 2], mask=[0, 1]), x], False, False),
    "set": (lambda x: [{1, 2}, x], False, False),
    "range": (lambda x: [range(3), x], False, False),
    "bytearray": (lambda x: [bytearray(b"a"), x], False, False),
    "ellipsis": (lambda x: [..., x], False, False),
    "dtype": (lambda x: [torch.float32, x], False, False),
}  # fmt: skip


def build(spec, x):
    """A value of nested kinds; a spec is a name, or several, of which each is made around the one before."""
    if isinstance(spec, str):
        return KINDS[spec][0](x)
    value = x
    for name in spec:
        value = AROUND[name](value)
    return value


AROUND = {
    "tuple": lambda value: (value, 1),
    "list": lambda value: [value, "a"],
    "dict": lambda value: {"a": value},
    "ordered": lambda value: collections.OrderedDict(a=value),
    "defaultdict": lambda value: collections.defaultdict(list, a=value),
    "deque": lambda value: collections.deque([value]),
    "named tuple": lambda value: Point(value),
    "attributes": lambda value: _with(Noted(1, value), note=1),
    "dataclass": lambda value: Record(1, value),
    "frozen": lambda value: Frozen([value]) if isinstance(value, list) else Record(value),
    "slots": lambda value: Slotted(1, value),
    "model output": lambda value: Output(logits=value),
    "node": lambda value: Node([1, value], ["a"]),
    **{name: kind[0] for name, kind in KINDS.items() if not kind[1] or name == "plain values"},
}
