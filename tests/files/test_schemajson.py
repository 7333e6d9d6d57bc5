"""Schemas as JSON: what is written comes back equal, and nothing else is believed, imported or run.

Schemas with random changes are in `test_segment.py`, where they are read from.
"""

import collections
import dataclasses
import enum
import importlib.util
import json
import math
import os
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from tests.helpers.outputs import assert_same
from torchcache2.core.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.core.rows import Leaf, Rows, Schema
from torchcache2.core.values import BARE
from torchcache2.files import schema as schemajson
from torchcache2.files.schema import schema_from_json, schema_to_json

SOAK = bool(os.environ.get("SOAK"))
CPU = torch.device("cpu")


class Point(NamedTuple):
    x: Any
    y: Any = None


Pair = collections.namedtuple("Pair", "first second")


class Outer:
    class Inner(NamedTuple):
        value: Any


class Tagged:
    """A node that keeps a plain value beside its children."""

    def __init__(self, children, tag):
        self.children, self.tag = children, tag


class Kept(Tagged):
    """A node that keeps whatever it is given, a schema of which may have no JSON form."""


class Unregistered:
    pass


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Registered:
    logits: Any
    extra: Any = None


@dataclasses.dataclass
class Scored(ModelOutput):
    scores: Any = None
    hidden: Any = None


def _flatten_registered(value):
    fields = vars(value)
    present = [name for name in fields if fields[name] is not None]
    return [fields[name] for name in present], [present, [name for name in fields if name not in present]]


def _unflatten_registered(values, context):
    return Registered(**dict(zip(context[0], values, strict=True)), **dict.fromkeys(context[1]))


for _cls in (Tagged, Kept):
    pytree.register_pytree_node(
        _cls, lambda node: (node.children, node.tag), lambda children, tag, cls=_cls: cls(list(children), tag)
    )
if hasattr(pytree, "register_dataclass"):
    pytree.register_dataclass(Registered)
else:
    pytree.register_pytree_node(Registered, _flatten_registered, _unflatten_registered)


def x(*shape, dtype=torch.float32):
    return torch.arange(3 * math.prod(shape)).reshape(3, *shape).to(dtype)


def rows(output, **options):
    return Rows.from_pytree(output, 3, device=CPU, **options)


def schema_of(output, **options):
    return rows(output, **options).schema


def through_text(schema):
    return schema_from_json(json.loads(json.dumps(schema_to_json(schema))))


def assert_same_schema(read, schema):
    assert read == schema
    assert schema == read
    assert hash(read) == hash(schema)
    assert repr(read.structure) == repr(schema.structure)  # where == is lax: 1 and True, list and tuple
    assert [dataclasses.astuple(leaf) for leaf in read.leaves] == [
        dataclasses.astuple(leaf) for leaf in schema.leaves
    ]
    assert all(type(extent) is int for leaf in read.leaves for extent in leaf.shape)


OUTPUTS = {
    "a tensor": x(4),
    "a tensor without dimensions of its own": x(),
    "a number": 5,
    "a text": "ok \udc80",
    "None": None,
    "an empty tuple": (),
    "an empty dict": {},
    "a tuple": (x(4), x(2, 2)),
    "a list": [x(4), (x(1),), [], [x()]],
    "values that are not tensors": (None, True, 1, 1.5, math.inf, 1j, "text", b"\x00\xff", x(2)),
    "a dict in no order": {"b": x(4), "a": x(2), "": x(1)},
    "a dict with every type of key": {
        "1": x(1), 1: x(2), 2.5: x(3), None: x(4), b"1": x(5), (1, ("a", b"b", None)): x(6), -math.inf: x(7),
        math.nan: x(1), "\ud83d\ude00": x(1), "\U0001f600": x(1), "\udc80": x(1), 2**62: x(1), -(2**63): x(1),
    },
    "a dict with a bool as key": {True: x(1), False: x(2), 2: x(1), 3.0: x(1)},
    "a dict with a float as key": {1.0: x(1), -0.0: x(2), 1e-320: x(1), 0.1: x(1)},
    "an OrderedDict": collections.OrderedDict(b=x(1), a=[x(2)]),
    "a defaultdict": collections.defaultdict(list, b=x(1), a=x(2)),
    "a defaultdict without a factory": collections.defaultdict(None, b=x(1)),
    "a deque": collections.deque([x(1), x(2)]),
    "a deque with a length": collections.deque([x(1)], maxlen=4),
    "a namedtuple": Pair(x(1), second=Point(Outer.Inner(x(2)), None)),
    "a struct sequence": torch.max(x(4), dim=1),
    "struct sequences": [torch.topk(x(4), 2, dim=1), torch.sort(x(4), dim=1), torch.linalg.slogdet(x(2, 2))],
    "a ModelOutput": BaseModelOutput(x(4), hidden_states=(x(1), x(2))),
    "a ModelOutput in another order": Seq2SeqLMOutput(logits=x(4), decoder_attentions=(x(1),)),
    "a ModelOutput of this module": Scored(scores=x(4), hidden=[{"a": x(1)}]),
    "a dataclass": Registered(x(4)),
    "a dataclass with all fields": Registered(x(4), {"a": (x(1),)}),
    "a node without a context": Tagged([x(1), x(2)], None),
    "a node without children": Tagged([], "constant"),
    "a node with a context": Tagged(
        [Tagged([x(1)], [True, 1, 1.0, "a", b"a", ("t", ["l", ()])])],
        {"a": (1, [2, {"b": None, 3: -0.0, (1, 2): math.inf}]), "\ud800": [-math.inf, b"\x00"]},
    ),
    "a node with classes in its context": Tagged(
        [x(1)], [list, str, Point, Tagged, Scored, torch.return_types.max, collections.OrderedDict]
    ),
    "channels last": (x(2, 4, 5).to(memory_format=torch.channels_last), x(2, 3, 4, 5)),
    "rows without elements": x(4, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_schema_is_the_same_through_json(output):
    stored = rows(output)
    read = through_text(stored.schema)
    assert_same_schema(read, stored.schema)
    assert_same_schema(read, schema_of(output))
    assert_same(Rows(read, stored.columns, 3).to_pytree(device=CPU), output)


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_the_json_is_plain_and_deterministic(output):
    text = json.dumps(schema_to_json(schema_of(output)), allow_nan=False, ensure_ascii=False)
    text.encode()  # no surrogates
    assert json.dumps(schema_to_json(schema_of(output)), ensure_ascii=False) == text
    assert json.dumps(schema_to_json(schema_from_json(json.loads(text))), ensure_ascii=False) == text


def test_the_json_of_a_bare_tensor():
    assert schema_to_json(schema_of(x(4, 2))) == {
        "structure": None,
        "leaves": [{"path": "", "kind": "tensor", "dtype": "float32", "shape": [4, 2]}],
    }


def test_the_stored_dtype_and_the_layout_come_back():
    output = (x(2, 4, 5).to(memory_format=torch.channels_last), x(3, dtype=torch.int64))
    schema = schema_of(output, dtype=torch.bfloat16)
    read = through_text(schema)
    assert_same_schema(read, schema)
    assert [(leaf.dtype, leaf.stored) for leaf in read.leaves] == [
        (torch.float32, torch.bfloat16),
        (torch.int64, torch.int64),
    ]
    assert [leaf.channels_last for leaf in read.leaves] == [True, False]


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype):
    schema = Schema(BARE, (Leaf("", "tensor", dtype, dtype, (2, 3)),))
    assert_same_schema(through_text(schema), schema)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:127", "mps", "xpu:1"])
def test_the_device_of_a_leaf_comes_back(device):
    schema = Schema(BARE, (Leaf("", "tensor", torch.float32, torch.float32, (2,), device=device),))
    assert_same_schema(through_text(schema), schema)


def test_ragged_extents_are_null_in_the_json():
    leaves = (
        Leaf("[0]", "tensor", torch.float32, torch.float32, (-1, 4, -1)),
        Leaf("[1]", "str", torch.uint8, torch.uint8, (-1,)),
    )
    schema = Schema(pytree.tree_flatten([0, 0])[1], leaves)
    data = schema_to_json(schema)
    assert [leaf["shape"] for leaf in data["leaves"]] == [[None, 4, None], [None]]
    assert_same_schema(through_text(schema), schema)


STRUCT_SEQUENCES = [cls for cls in pytree.SUPPORTED_NODES if hasattr(cls, "n_sequence_fields")]


@pytest.mark.parametrize("cls", STRUCT_SEQUENCES, ids=lambda cls: cls.__qualname__)
def test_every_struct_sequence_of_torch_comes_back(cls):
    output = cls([x(1)] * cls.n_sequence_fields)
    assert_same_schema(through_text(schema_of(output)), schema_of(output))


def cyclic():
    items = []
    items.append(items)
    return items


def bushy():
    items = []
    for _ in range(90):
        items = [items, items]
    return items


def nested(depth):
    output = x(1)
    for _ in range(depth):
        output = [output]
    return output


def local_namedtuple():
    return collections.namedtuple("Local", "a")(x(1))


def nested_key(depth):
    key = ()
    for _ in range(depth):
        key = (key,)
    return key


def renamed():
    cls = collections.namedtuple("Pair", "first second third")  # the module's Pair is another class
    cls.__module__ = __name__
    return cls(x(1), x(1), x(1))


UNSERIALISABLE = {
    "a class of a function": (lambda: {"a": [local_namedtuple()]}, r"output\['a'\]\[0\] needs .*Local"),
    "a class hidden by another": (renamed, "output needs .*test_schemajson:Pair, which is not found"),
    "an enum member as key": (lambda: [{Colour.RED: x(1)}], r"output\[0\] has a key of type .*Colour"),
    "an IntEnum member as key": (lambda: {Number.ONE: x(1)}, "output has a key of type .*Number"),
    "a key with an enum member": (lambda: {(1, Colour.RED): x(1)}, "output has a key of type builtins.tuple"),
    "a frozenset as key": (lambda: {frozenset("a"): x(1)}, "output has a key of type builtins.frozenset"),
    "an object as key": (lambda: {Unregistered(): x(1)}, "output has a key of type .*Unregistered"),
    "a class as key": (lambda: {int: x(1)}, "output has a key of type builtins.type"),
    "an int of many bits as key": (lambda: {2**63: x(1)}, "output is an int of more than 64 bits"),
    "equal keys": (lambda: {float("nan"): x(1), math.nan: x(1)}, "two equal keys"),
    "a key nested too deep": (lambda: {nested_key(101): x(1)}, "output has a key of type builtins.tuple"),
    "a key nested much too deep": (
        lambda: {nested_key(500): x(1)},
        "output has a key of type builtins.tuple",
    ),
    "a namedtuple with an item less": (lambda: tuple.__new__(Pair, [1]), "output has 1 children for 2 names"),
    "a defaultdict of a lambda": (
        lambda: (collections.defaultdict(lambda: 0, a=x(1)),),
        r"output\[0\] is a defaultdict of .*<lambda>",
    ),
    "a defaultdict of a class": (
        lambda: collections.defaultdict(Unregistered, a=x(1)),
        "output is a defaultdict of .*Unregistered",
    ),
    "an object in a context": (lambda: (Kept([], [Colour.RED]),), r"output\[0\] of type .*Kept .*Colour"),
    "a class that is no node": (
        lambda: Kept([x(1)], Unregistered),
        "output.* needs .*Unregistered, which is not a",
    ),
    "a function": (lambda: Kept([], os.system), "builtin_function_or_method"),
    "a dtype": (lambda: Kept([], torch.float32), "torch.dtype"),
    "an enum member": (lambda: Kept([], {"a": Number.ONE}), "Number"),
    "a set": (lambda: Kept([], {1}), "builtins.set"),
    "a complex number": (lambda: Kept([], 1j), "builtins.complex"),
    "an int of many bits": (lambda: Kept([], [-(2**63) - 1]), "an int of more than 64 bits"),
    "a key of a dict in a context": (lambda: Kept([], {Colour.RED: 1}), "key of type .*Colour"),
    "a context in itself": (lambda: Kept([], cyclic()), "nested more than 100 deep"),
    "a context with 2**90 lists": (lambda: Kept([], bushy()), "more than 100000 elements"),
    "an output nested too deep": (lambda: nested(101), "nested more than 100 deep"),
    "too many leaves": (lambda: [1] * 10_001, "more than 10000 leaves"),
}


@pytest.mark.parametrize(("make", "message"), UNSERIALISABLE.values(), ids=UNSERIALISABLE)
def test_what_has_no_json_form_is_refused_by_type_and_place(make, message):
    with pytest.raises(UnserialisableError, match=message):
        schema_to_json(schema_of(make()))


def test_a_class_of_a_script_is_named_alike_in_the_processes_that_it_spawns(monkeypatch):
    script = types.ModuleType("__mp_main__")
    script.Out = collections.namedtuple("Out", "a")
    script.Out.__module__ = "__mp_main__"
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    monkeypatch.setitem(sys.modules, "__main__", script)  # as multiprocessing.spawn does
    data = schema_to_json(schema_of(script.Out(x(1))))
    assert data["structure"] == {"namedtuple": ["__main__:Out", ["a"], [None]]}
    assert_same_schema(schema_from_json(data), schema_of(script.Out(x(1))))


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (Pair(x(1), x(1)), "Pair"),
        (Scored(x(1)), "Scored"),
        (Registered(x(1)), "Registered"),
        (torch.max(x(2), dim=1), "torch.return_types:max"),
    ],
)
@pytest.mark.parametrize(
    "change", [lambda fields: fields[:-1], lambda fields: fields[::-1], lambda fields: None]
)
def test_a_class_with_other_fields_than_were_written_is_unknown(output, name, change):
    data = schema_to_json(schema_of(output))
    ((_, node),) = data["structure"].items()
    node[1] = change(node[1])
    with pytest.raises(UnknownClassError, match="has other fields") as caught:
        schema_from_json(data)
    assert caught.value.name.endswith(name)


def one_leaf(structure=None, **members):
    leaf = {"path": "", "kind": "tensor", "dtype": "float32", "shape": [4], **members}
    return {"structure": structure, "leaves": [{k: v for k, v in leaf.items() if v is not ...}]}


def no_leaves(structure):
    return {"structure": structure, "leaves": []}


def context(value):
    return no_leaves({"node": ["tests.files.test_schemajson:Tagged", None, value, []]})


def deep(start, depth, wrap):
    value = start
    for _ in range(depth):
        value = wrap(value)
    return value


SELF = "tests.files.test_schemajson"
HOSTILE = {
    "null": None,
    "a number": 7,
    "a text": "schema",
    "a list": [],
    "an empty object": {},
    "no leaves": {"structure": None},
    "no structure": {"leaves": []},
    "a member more": {**one_leaf(), "more": 1},
    "fewer leaves than the structure": no_leaves(None),
    "more leaves than the structure": one_leaf({"tuple": []}),
    "leaves that are an object": {"structure": None, "leaves": {"0": {}}},
    "too many leaves": {"structure": {"tuple": [None] * 10_001}, "leaves": one_leaf()["leaves"] * 10_001},
    "too many elements": no_leaves({"tuple": [{"tuple": []}] * 100_001}),
    "too deep": no_leaves(deep({"tuple": []}, 101, lambda node: {"tuple": [node]})),
    "much too deep": lambda: no_leaves(deep({"tuple": []}, 50_000, lambda node: {"tuple": [node]})),
    "a context much too deep": lambda: context(deep([], 50_000, lambda value: [value])),
    "a key much too deep": lambda: no_leaves(
        {"dict": [[deep(1, 50_000, lambda value: {"tuple": [value]}), None]]}
    ),
    "an exponential structure": no_leaves(deep({"tuple": []}, 99, lambda node: {"tuple": [node, node]})),
    "an exponential context": context(deep([], 95, lambda value: [value, value])),
    "a node that is a text": no_leaves("tuple"),
    "a node that is a list": no_leaves([]),
    "a node that is true": one_leaf(True),
    "a node without a tag": no_leaves({}),
    "a node with two tags": no_leaves({"tuple": [], "list": []}),
    "a node of no kind": no_leaves({"set": []}),
    "a tag that is not text": no_leaves({None: []}),
    "a tuple that is no list": no_leaves({"tuple": None}),
    "a dict with a list as key": one_leaf({"dict": [[[], None]]}),
    "a dict with a dict as key": one_leaf({"dict": [[{"dict": []}, None]]}),
    "a dict with a class as key": one_leaf({"dict": [[{"class": "builtins:int"}, None]]}),
    "a dict with a list inside a key": one_leaf({"dict": [[{"tuple": [1, []]}, None]]}),
    "a dict with equal keys": no_leaves({"dict": [[1, {"tuple": []}], [True, {"tuple": []}]]}),
    "a dict with a key alone": no_leaves({"dict": [["a"]]}),
    "a dict with no pairs": no_leaves({"dict": ["ab"]}),
    "a dict that is an object": no_leaves({"dict": {"a": None}}),
    "a defaultdict of print": no_leaves({"defaultdict": ["print", []]}),
    "a defaultdict of os.system": no_leaves({"defaultdict": ["os:system", []]}),
    "a defaultdict of a list": no_leaves({"defaultdict": [["list"], []]}),
    "a defaultdict without keys": no_leaves({"defaultdict": ["list"]}),
    "a deque of a negative length": no_leaves({"deque": [-1, []]}),
    "a deque of a length of true": one_leaf({"deque": [True, [None]]}),
    "a deque of a length of 2**63": no_leaves({"deque": [2**63, []]}),
    "a deque shorter than its items": one_leaf({"deque": [0, [None]]}),
    "a namedtuple with a child less": one_leaf({"namedtuple": [f"{SELF}:Pair", ["first", "second"], [None]]}),
    "a namedtuple with numbers as fields": no_leaves({"namedtuple": [f"{SELF}:Pair", [1, 2], []]}),
    "a struct sequence with a child less": one_leaf(
        {"node": ["torch.return_types:max", ["values", "indices"], None, [None]]}
    ),
    "a class that is a number": no_leaves({"node": [1, None, None, []]}),
    "a class without a module": no_leaves({"node": ["Tagged", None, None, []]}),
    "a class without a name": no_leaves({"node": ["torch:", None, None, []]}),
    "a class with a dot too many": no_leaves({"node": [f"{SELF}:Outer..Inner", None, None, []]}),
    "a class with a newline": no_leaves({"node": ["torch:Size\n", None, None, []]}),
    "a class with a surrogate": no_leaves({"node": ["torch:\udc80", None, None, []]}),
    "a class with a long name": no_leaves({"node": ["torch:" + "a" * 2_000, None, None, []]}),
    "a node with an item less": no_leaves({"node": [f"{SELF}:Tagged", None, []]}),
    "a node with an item more": no_leaves({"node": [f"{SELF}:Tagged", None, None, [], []]}),
    "nan in a context": context(math.nan),
    "a float of another text": context({"float": "1.0"}),
    "a float that is a list": context({"float": ["nan"]}),
    "an int of many bits": context(2**63),
    "an int of very many digits": context(10**5_000),
    "bytes with spaces": context({"bytes": "00 00"}),
    "bytes of half a byte": context({"bytes": "000"}),
    "bytes with a newline": context({"bytes": "00\n"}),
    "bytes that are a number": context({"bytes": 5}),
    "a text that is not utf-8": context({"text": "ff"}),
    "a tag of no kind": context({"complex": [1, 2]}),
    "an object of Python": context(object()),
    "a leaf that is a list": {"structure": None, "leaves": [[]]},
    "a leaf without a path": one_leaf(path=...),
    "a leaf with a member more": one_leaf(more=1),
    "a path that is a number": one_leaf(path=1),
    "a path of no text": one_leaf(path={"bytes": ""}),
    "a kind of no kind": one_leaf(kind="object"),
    "a kind that is a list": one_leaf(kind=["tensor"]),
    "a kind that is null": one_leaf(kind=None),
    "a dtype that is a number": one_leaf(dtype=1),
    "a dtype with a dot": one_leaf(dtype="torch.float32"),
    "a dtype with a newline": one_leaf(dtype="float32\n"),
    "a dtype with a long name": one_leaf(dtype="a" * 100),
    "a dtype that is null": one_leaf(dtype=None),
    "a stored dtype that is null": one_leaf(stored=None),
    "a stored dtype of integers": one_leaf(stored="int8"),
    "floats for integers": one_leaf(dtype="int64", stored="float32"),
    "a shape that is null": one_leaf(shape=None),
    "a shape that is a number": one_leaf(shape=4),
    "a negative extent": one_leaf(shape=[-1]),
    "an extent that is a float": one_leaf(shape=[4.0]),
    "an extent that is true": one_leaf(shape=[True]),
    "an extent that is a text": one_leaf(shape=["4"]),
    "a large extent": one_leaf(shape=[2**48]),
    "a very large extent": one_leaf(shape=[10**5_000]),
    "a large row": one_leaf(shape=[2**24, 2**24]),
    "a large row of no elements": one_leaf(shape=[2**24, 2**24, 0]),
    "too many dimensions": one_leaf(shape=[1] * 65),
    "channels_last that is a number": one_leaf(shape=[2, 3, 4], channels_last=1),
    "channels_last of a vector": one_leaf(channels_last=True),
    "channels_last of a text": one_leaf(kind="str", dtype="uint8", channels_last=True),
    "a device that is null": one_leaf(device=None),
    "a device that is a number": one_leaf(device=0),
    "a device that is empty": one_leaf(device=""),
    "a device without storage": one_leaf(device="meta"),
    "a device with a path": one_leaf(device="/dev/null"),
    "a device with a negative index": one_leaf(device="cuda:-1"),
    "a device whose index is too large": one_leaf(device="cuda:128"),
    "a device whose index is padded": one_leaf(device="cuda:01"),
    "a text of floats": one_leaf(kind="str"),
    "a text in two dimensions": one_leaf(kind="str", dtype="uint8", shape=[2, 2]),
    "a text without a shape": one_leaf(kind="str", dtype="uint8", shape=[]),
    "a text on a device": one_leaf(kind="str", dtype="uint8", device="cuda:0"),
    "an int of four bytes": one_leaf(kind="int", dtype="uint8", shape=[4]),
    "an int of any number of bytes": one_leaf(kind="int", dtype="uint8", shape=[None]),
    "None of a byte": one_leaf(kind="none", dtype="uint8", shape=[1]),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_json_that_was_never_written_is_refused(data):
    modules = set(sys.modules)
    data = data() if callable(data) else data
    with pytest.raises(DamagedError):
        schema_from_json(data)
    assert set(sys.modules) == modules


def test_the_helper_of_the_hostile_table_makes_a_schema():
    assert schema_from_json(one_leaf()) == schema_of(x(4))
    assert schema_from_json(context([1])) == schema_of(Tagged([], [1]))


UNKNOWN = {
    "antigravity:fly": "antigravity:fly",
    "os:system": "os:system",
    "builtins:eval": "builtins:eval",
    "builtins:object": "builtins:object",
    "builtins:dict": "builtins:dict",
    "builtins:tuple": "builtins:tuple",
    "collections:namedtuple": "collections:namedtuple",
    "collections:OrderedDict": "collections:OrderedDict",
    "subprocess:Popen": "subprocess:Popen",
    "a class that is not registered": f"{SELF}:Unregistered",
    "a class that is gone": f"{SELF}:Gone",
    "a method": f"{SELF}:Tagged.__init__",
    "an attribute of an instance": f"{SELF}:CPU.type",
    "the class of an object": f"{SELF}:CPU.__class__",
    "a path of modules": "torch:utils._pytree.Unregistered",
    "a generic alias": f"{SELF}:ALIAS",
    "a module that is None": "absent_module:Thing",
}
ALIAS = list[int]


@pytest.mark.parametrize("name", UNKNOWN.values(), ids=UNKNOWN)
def test_a_name_that_is_no_imported_node_type_is_neither_imported_nor_called(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "absent_module", None)
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("called"))
    modules = set(sys.modules)
    for structure in ({"node": [name, None, None, []]}, {"namedtuple": [name, [], []]}):
        with pytest.raises(UnknownClassError) as caught:
            schema_from_json(no_leaves(structure))
        assert caught.value.name == name
        assert not isinstance(caught.value, DamagedError)
    assert set(sys.modules) == modules
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", f"{SELF}:Unregistered", "builtins:object"])
def test_a_class_in_a_context_must_be_a_node_type_or_a_builtin(name):
    with pytest.raises(UnknownClassError) as caught:
        schema_from_json(context([{"class": name}]))
    assert caught.value.name == name


def test_a_namedtuple_is_no_node_and_a_node_no_namedtuple():
    for structure in (
        {"node": [f"{SELF}:Pair", ["first", "second"], None, []]},
        {"namedtuple": [f"{SELF}:Tagged", None, []]},
        {"namedtuple": ["torch.return_types:max", ["values", "indices"], []]},
    ):
        with pytest.raises(UnknownClassError):
            schema_from_json(no_leaves(structure))


@pytest.mark.parametrize("dtype", ["float7_e9m9", "double", "softmax", "float", "strided", "channels_last"])
def test_a_dtype_that_this_torch_lacks_is_unknown(dtype):
    modules = set(sys.modules)
    with pytest.raises(UnknownClassError) as caught:
        schema_from_json(one_leaf(dtype=dtype))
    assert caught.value.name == dtype
    assert set(sys.modules) == modules


@pytest.mark.parametrize("device", ["npulike", "npulike:1"])
def test_a_device_that_this_process_lacks_is_unknown(device):
    with pytest.raises(UnknownClassError) as caught:
        schema_from_json(one_leaf(device=device))
    assert caught.value.name == device


def test_a_lookup_runs_no_code_of_the_modules_and_classes_on_its_way(tmp_path, monkeypatch):
    ran = []

    class Meta(type):
        def __getattribute__(cls, name):
            ran.append(name)
            return super().__getattribute__(name)

        def __eq__(cls, other):  # and so no hash
            ran.append("__eq__")
            return True

    class Proxy:
        @property
        def __class__(self):
            ran.append("__class__")
            return type

        def __getattr__(self, name):
            ran.append(name)
            return self

    (tmp_path / "lazy_outputs.py").write_text("raise SystemExit('executed')")
    spec = importlib.util.spec_from_file_location("lazy_outputs", tmp_path / "lazy_outputs.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    module = types.ModuleType("tricky_outputs")
    module.__getattr__ = lambda name: ran.append(name) or Point
    module.Watched = Meta("Watched", (), {"Inner": property(lambda cls: ran.append("property"))})
    module.proxy = Proxy()
    for name, value in {"lazy_outputs": lazy, "tricky_outputs": module, "proxy_outputs": Proxy()}.items():
        monkeypatch.setitem(sys.modules, name, value)
    ran.clear()
    for name in (
        "lazy_outputs:Thing",
        "tricky_outputs:Absent",
        "tricky_outputs:Watched",
        "tricky_outputs:Watched.Absent",
        "tricky_outputs:Watched.Inner",
        "tricky_outputs:proxy",
        "tricky_outputs:proxy.Thing",
        "proxy_outputs:Thing",
    ):
        for structure in ({"node": [name, None, None, []]}, {"namedtuple": [name, [], []]}):
            with pytest.raises(UnknownClassError):
                schema_from_json(no_leaves(structure))
    assert ran == []


def test_the_limits_are_those_of_the_tests():
    assert (schemajson.MAX_LEAVES, schemajson.MAX_DEPTH, schemajson.MAX_ELEMENTS) == (10_000, 100, 100_000)
    assert (schemajson.MAX_ROW, schemajson.MAX_DIMS, schemajson.MAX_NAME) == (2**48, 64, 1_000)
