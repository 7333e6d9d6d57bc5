"""`Schema` as JSON and back, so that a file can carry it; docs/format.md specifies the JSON.

Reading imports nothing and calls nothing that the JSON names. A class is looked up among imported modules,
only in the dictionaries of modules and classes: this runs no ``__getattr__``, descriptor or ``__class__``. It
must be a node type of the pytree registry.
"""

from __future__ import annotations

import collections
import math
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from torchcache2.core import values as kinds
from torchcache2.core.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.core.private import pytree
from torchcache2.core.rows import Leaf, Schema

MAX_NAME = 1_000
BUILTINS = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)


def name_of(cls: Any, where: str) -> str:
    """The name of a class in a file."""
    name = qualified(cls, ":")
    if name.startswith("__mp_main__:"):  # the parent's script, in a spawned process
        name = "__main__:" + name.partition(":")[2]
    try:
        class_of(name, lambda found: found is cls)
    except (DamagedError, UnknownClassError):
        raise UnserialisableError(f"{where} needs {name}, which is not found by that name") from None
    if not is_storable(cls):
        raise UnserialisableError(f"{where} needs {name}, which is not a node type of pytrees")
    return name


def class_of(name: Any, accepted: Callable[[Any], bool]) -> Any:
    """The class of a name, if this process has it and accepts it."""
    if type(name) is not str or len(name) > MAX_NAME or not name.isprintable():
        raise DamagedError("a class that is not a name")
    module, _, qualname = name.partition(":")
    if not module or not all(qualname.split(".")):
        raise DamagedError("a class that is not a name")
    value: Any = sys.modules.get(module)
    if module.startswith("torchcache2."):  # our own names stay valid when code moves
        for cls in list(pytree.SUPPORTED_NODES):
            if qualified(cls, ":") == name and accepted(cls):
                return cls
    for part in qualname.split("."):
        namespace: Any = {}
        if issubclass(type(value), types.ModuleType):
            namespace = types.ModuleType.__getattribute__(value, "__dict__")
        elif issubclass(type(value), type):
            namespace = type.__getattribute__(value, "__dict__")
        if part not in namespace:
            raise UnknownClassError(name, "is not imported")
        value = namespace[part]
    if not issubclass(type(value), type) or not accepted(value):
        raise UnknownClassError(name, "is not a node type of pytrees in this process")
    return value


def is_storable(cls: Any) -> bool:
    """Whether a class may be named in a file."""
    return kinds.one_of(cls, BUILTINS) or kinds.is_node(cls) or kinds.is_namedtuple(cls)


def check_fields(cls: Any, name: str, fields: Any, children: int) -> None:
    """Raise if a class's fields have changed since it was written."""
    if fields is not None and not all(type(field) is str for field in list_of(fields)):
        raise DamagedError("fields that are not names")
    known = kinds.fields_of(cls)
    if known != fields:
        raise UnknownClassError(name, "has other fields than when its schema was written")
    if known is not None and (issubclass(cls, tuple) or kinds.is_record(cls)) and len(known) != children:
        raise DamagedError("another number of children than of fields")


def qualified(cls: Any, separator: str = ".") -> str:
    """Module and name of a class, for people or for a file."""
    return (
        f"{getattr(cls, '__module__', '')}{separator}{getattr(cls, '__qualname__', type(cls).__qualname__)}"
    )


MAX_ROW = 2**48
MAX_DIMS = 64
NEEDED = {"path", "kind", "dtype", "shape"}
POSSIBLE = {"stored", "channels_last", "device"}
_DTYPES = {str(value)[6:]: value for value in vars(torch).values() if type(value) is torch.dtype}
_WIDTHS = {"none": 0, "bool": 1, "int": 8, "float": 8, "complex": 16, "str": None, "bytes": None}
_DEVICE = re.compile(r"(?!meta)[a-z]{1,32}(:(0|[1-9][0-9]?|1[01][0-9]|12[0-7]))?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HEX = re.compile(r"([0-9a-f]{2})*")


def text_to_json(text: str) -> Any:
    """A text as JSON; surrogates, which JSON cannot hold, become hexadecimal."""
    surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return {"text": text.encode("utf-8", "surrogatepass").hex()} if surrogates else text


def text_from_json(data: Any) -> str:
    """The text."""
    if type(data) is str:
        return data
    tag, body = tagged(data)
    try:
        if tag == "text":
            return from_hex(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        pass
    raise DamagedError("not a text")


def from_hex(data: Any) -> bytes:
    """The bytes."""
    if type(data) is not str or not _HEX.fullmatch(data):
        raise DamagedError("bytes that are not hexadecimal")
    return bytes.fromhex(data)


def tagged(data: Any) -> tuple[Any, Any]:
    """The single tag of an object, and its value."""
    if type(data) is not dict or len(data) != 1:
        raise DamagedError("neither a plain value nor an object with one tag")
    return next(iter(data.items()))


def members_of(data: Any, needed: set[str], optional: set[str] | None = None) -> dict[str, Any]:
    """An object with certain members."""
    if type(data) is not dict or not needed <= set(data) <= needed | (optional or set()):
        raise DamagedError(f"not an object with {', '.join(sorted(needed))}")
    return data


def list_of(data: Any) -> list[Any]:
    """A list."""
    if type(data) is not list:
        raise DamagedError("not a list")
    return data


def items_of(items: list[Any], count: int) -> list[Any]:
    """The items of a list of a certain length."""
    if len(items) != count:
        raise DamagedError(f"{len(items)} items where {count} belong")
    return items


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    """A leaf as JSON."""
    data: dict[str, Any] = {
        "path": text_to_json(leaf.path),
        "kind": leaf.kind,
        "dtype": str(leaf.dtype)[6:],
        "shape": [None if extent == -1 else extent for extent in leaf.shape],
    }
    if leaf.stored != leaf.dtype:
        data["stored"] = str(leaf.stored)[6:]
    if leaf.channels_last:
        data["channels_last"] = True
    if leaf.device is not None:
        data["device"] = leaf.device
    return data


def leaf_from_json(data: Any) -> Leaf:
    """The leaf."""
    members = members_of(data, NEEDED, POSSIBLE)
    path, kind, last = text_from_json(members["path"]), members["kind"], members.get("channels_last", False)
    dtype = _dtype(members["dtype"])
    stored = _dtype(members["stored"]) if "stored" in members else dtype
    device = _device(members["device"]) if "device" in members else None
    extents = list_of(members["shape"])
    if len(extents) > MAX_DIMS:
        raise DamagedError(f"a shape of more than {MAX_DIMS} dimensions")
    size = 1
    for extent in extents:
        if extent is not None and not (type(extent) is int and 0 <= extent < MAX_ROW):
            raise DamagedError("an extent that is not a number of elements")
        size *= extent or 1
    if size >= MAX_ROW:
        raise DamagedError("a row of too many elements")
    if type(last) is not bool or (last and len(extents) not in (3, 4)):
        raise DamagedError("channels_last of a leaf without channels")
    if type(kind) is not str or (kind != "tensor" and kind not in _WIDTHS):
        raise DamagedError("a leaf of no known kind")
    if kind == "tensor":
        if stored != dtype and not (stored.is_floating_point and dtype.is_floating_point):
            raise DamagedError("a stored dtype that the dtype is not rounded to")
    elif not (dtype == stored == torch.uint8 and len(extents) == 1 and device is None):
        raise DamagedError("a value that is not kept as its bytes")
    elif _WIDTHS[kind] not in (None, extents[0]):
        raise DamagedError("a value of another width than its kind")
    shape = tuple([-1 if extent is None else extent for extent in extents])
    return Leaf(path, kind, dtype, stored, shape, last, device)


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise DamagedError("a dtype that is not a name")
    if name not in _DTYPES:
        raise UnknownClassError(name, "is not a dtype of this version of PyTorch")
    return _DTYPES[name]


def _device(name: Any) -> str:
    if type(name) is not str or not _DEVICE.fullmatch(name):
        raise DamagedError("a device that is not a name")
    try:
        torch.device(name)
    except Exception:  # the backend is not imported
        raise UnknownClassError(name, "is not a device of this process") from None
    return name


MAX_LEAVES = 10_000
MAX_DEPTH = 100
MAX_ELEMENTS = 100_000

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in BUILTINS}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict}
_TAGGED = (*_SEQUENCES.values(), *_MAPPINGS.values(), collections.defaultdict, collections.deque)


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as a value for ``json.dumps``; equal schemas give equal values.

    `UnserialisableError` if a class cannot be found by its name, if a node keeps more than plain values and
    node classes, or if the schema is too large.
    """
    data = {
        "structure": _Writer().node(schema.structure, "output", 0),
        "leaves": [leaf_to_json(leaf) for leaf in schema.leaves],
    }
    try:  # readers have limits, which the writer must respect
        schema_from_json(data)
    except (DamagedError, UnknownClassError) as error:
        raise UnserialisableError(f"the schema of the output could not be read back: {error}") from None
    return data


def schema_from_json(data: Any, *, structured: bool = True) -> Schema:
    """The schema of JSON from `schema_to_json`; `data` may be any JSON.

    Without `structured`, the structure is just a list of the leaves, whatever classes the JSON names: enough
    to check rows.

    Raises
    ------
    DamagedError
        If no version of this library wrote it.
    UnknownClassError
        If it names a class, dtype or device that is unknown in this process (yet).
    """
    members = members_of(data, {"structure", "leaves"})
    leaves = list_of(members["leaves"])
    if len(leaves) > MAX_LEAVES:
        raise DamagedError(f"more than {MAX_LEAVES} leaves")
    if not structured:
        structure = pytree.tree_flatten([0] * len(leaves))[1]
        named = [members_of(leaf, NEEDED, POSSIBLE) for leaf in leaves]
        leaves = [{name: leaf[name] for name in leaf if name != "device"} for leaf in named]
        return Schema(structure, tuple([leaf_from_json(leaf) for leaf in leaves]))
    structure = _Reader().node(members["structure"], 0)
    if structure.num_leaves != len(leaves):
        raise DamagedError(f"{len(leaves)} leaves for a structure of {structure.num_leaves}")
    return Schema(structure, tuple([leaf_from_json(leaf) for leaf in leaves]))


class _Counter:
    """Counts the elements of one structure, and bounds their number and depth."""

    _error: type[Exception]
    _left = MAX_ELEMENTS

    def count(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error(f"the output's structure has more than {MAX_ELEMENTS} elements")
        if depth > MAX_DEPTH:
            raise self._error(f"the output's structure is nested more than {MAX_DEPTH} deep")


class _Writer(_Counter):
    _error = UnserialisableError

    def node(self, spec: pytree.TreeSpec, where: str, depth: int) -> Any:
        self.count(depth)
        kind, context = spec.type, spec.context
        specs = kinds.specs_of(spec)

        def children(steps: list[str]) -> list[Any]:
            if len(steps) != len(specs):
                raise UnserialisableError(f"{where} has {len(specs)} children for {len(steps)} names")
            return [
                self.node(child, where + step, depth + 1) for step, child in zip(steps, specs, strict=True)
            ]

        def pairs(keys: list[Any]) -> list[list[Any]]:
            nodes = children([_step(key) for key in keys])
            return [[self.key(key, where, depth + 1), node] for key, node in zip(keys, nodes, strict=True)]

        numbers = [_step(i) for i in range(len(specs))]
        if kind is None:
            return None
        if kinds.one_of(kind, _SEQUENCES.values()):
            return {kind.__name__: children(numbers)}
        if kinds.one_of(kind, _MAPPINGS.values()):
            return {kind.__name__: pairs(context)}
        if kind is collections.defaultdict:
            factory, keys = context
            if factory is not None and not kinds.one_of(factory, BUILTINS):
                raise UnserialisableError(
                    f"{where} is a defaultdict of {qualified(factory)}, not of a builtin type"
                )
            return {"defaultdict": [factory and factory.__name__, pairs(keys)]}
        if kind is collections.deque:
            return {"deque": [context, children(numbers)]}
        if kind is collections.namedtuple:
            fields = list(context._fields)
            return {"namedtuple": [name_of(context, where), fields, children([f".{f}" for f in fields])]}
        what = f"what {where} of type {qualified(kind)} keeps beside its children"
        return {
            "node": [
                name_of(kind, where),
                kinds.fields_of(kind),
                self.value(context, what, depth + 1),
                children(numbers),
            ]
        }

    def key(self, value: Any, where: str, depth: int) -> Any:
        if not kinds.is_key(value):
            raise UnserialisableError(
                f"{where} has a key of type {qualified(type(value))}, or with one inside"
            )
        return self.value(value, where, depth)

    def value(self, value: Any, where: str, depth: int) -> Any:
        self.count(depth)
        kind = type(value)
        if value is None or kind is bool or (kind is int and -(2**63) <= value < 2**63):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is str:
            return text_to_json(value)
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is list or kind is tuple:
            items = [self.value(item, where, depth + 1) for item in value]
            return items if kind is list else {"tuple": items}
        if kind is dict:
            keys = [self.key(key, where, depth + 1) for key in value]
            items = [self.value(item, where, depth + 1) for item in value.values()]
            return {"dict": [[key, item] for key, item in zip(keys, items, strict=True)]}
        if issubclass(kind, type):
            return {"class": name_of(value, where)}
        what = "an int of more than 64 bits" if kind is int else f"of type {qualified(kind)}"
        raise UnserialisableError(f"{where} is {what}, or has one inside")


class _Reader(_Counter):
    _error = DamagedError

    def node(self, data: Any, depth: int) -> pytree.TreeSpec:
        self.count(depth)
        if data is None:
            return kinds.BARE  # all leaves are one object, as in the pytree module
        tag, body = tagged(data)
        items = list_of(body)
        if tag in _SEQUENCES:
            return pytree.TreeSpec(_SEQUENCES[tag], None, self.nodes(items, depth))
        if tag in _MAPPINGS:
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(_MAPPINGS[tag], keys, nodes)
        if tag == "defaultdict":
            factory, items = items_of(items, 2)
            if factory is not None and (type(factory) is not str or factory not in _FACTORIES):
                raise DamagedError("a defaultdict of no builtin type")
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(collections.defaultdict, [factory and _FACTORIES[factory], keys], nodes)
        if tag == "deque":
            length, items = items_of(items, 2)
            nodes = self.nodes(items, depth)
            if length is not None and not (type(length) is int and len(nodes) <= length < 2**63):
                raise DamagedError("a deque without room for its items")
            return pytree.TreeSpec(collections.deque, length, nodes)
        if tag == "namedtuple":
            name, fields, items = items_of(items, 3)
            cls, nodes = class_of(name, kinds.is_namedtuple), self.nodes(items, depth)
            check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(collections.namedtuple, cls, nodes)
        if tag == "node":
            name, fields, context, items = items_of(items, 4)
            cls = class_of(name, _has_no_tag)
            context, nodes = self.value(context, depth + 1), self.nodes(items, depth)
            check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(cls, context, nodes)
        raise DamagedError("a node of no known kind")

    def nodes(self, items: Any, depth: int) -> list[Any]:
        return [self.node(item, depth + 1) for item in list_of(items)]

    def pairs(self, items: Any, depth: int, read: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
        pairs = [items_of(list_of(item), 2) for item in list_of(items)]
        keys = [self.value(key, depth + 1) for key, _ in pairs]
        if not all(kinds.is_key(key) for key in keys):
            raise DamagedError("a key of a type that keys do not have")
        if len(set(keys)) != len(keys):
            raise DamagedError("two equal keys")
        return keys, [read(value, depth + 1) for _, value in pairs]

    def value(self, data: Any, depth: int) -> Any:
        self.count(depth)
        kind = type(data)
        if data is None or kind is bool or (kind is int and -(2**63) <= data < 2**63):
            return data
        if kind is str or (kind is float and math.isfinite(data)):
            return data
        if kind is list:
            return [self.value(item, depth + 1) for item in data]
        tag, body = tagged(data)
        if tag == "text":
            return text_from_json(data)
        if tag == "bytes":
            return from_hex(body)
        if tag == "float" and body in ("nan", "inf", "-inf"):
            return math.nan if body == "nan" else float(body)
        if tag == "tuple":
            return tuple([self.value(item, depth + 1) for item in list_of(body)])
        if tag == "dict":
            keys, values = self.pairs(body, depth, self.value)
            return dict(zip(keys, values, strict=True))
        if tag == "class":
            return class_of(body, is_storable)
        raise DamagedError("a value of no known kind")


def _has_no_tag(cls: Any) -> bool:
    return kinds.is_node(cls) and not kinds.one_of(cls, _TAGGED)


def _step(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int, float, bool, bytes) else f"[{type(key).__qualname__}]"
