"""`Schema` as JSON and back, so that a file can carry it.

A node of the structure is ``null`` for a leaf, else an object with one tag::

    {"tuple": [child, ...]}                            {"deque": [maxlen, [child, ...]]}
    {"list": [child, ...]}                             {"namedtuple": [class, fields, [child, ...]]}
    {"dict": [[key, child], ...]}                      {"node": [class, fields, context, [child, ...]]}
    {"OrderedDict": [[key, child], ...]}               {"defaultdict": [factory, [[key, child], ...]]}

A key or context is itself, an array for a list, or an object with one tag: ``tuple``, ``dict``, ``bytes``,
``text`` (one with surrogates), ``float`` (not a finite one), ``class``. A class is ``module:qualname``, and
its fields are the names that it had when it was written.

Reading imports nothing and calls nothing that the JSON names: a class is looked up among the modules that
are imported already, through their plain attributes, and must be a node type of the pytree registry.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchcache2.rows import BARE, Leaf, Schema

__all__ = ["SchemaError", "UnknownClassError", "UnserialisableError", "schema_from_json", "schema_to_json"]

MAX_LEAVES = 10_000
MAX_DEPTH = 100
MAX_ELEMENTS = 100_000
MAX_ROW = 2**48
MAX_DIMS = 64
MAX_NAME = 1_000

_DTYPES = {str(value)[6:]: value for value in vars(torch).values() if type(value) is torch.dtype}
_BUILTINS = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in _BUILTINS}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict}
_TAGGED = (*_SEQUENCES.values(), *_MAPPINGS.values(), collections.defaultdict, collections.deque)
_WIDTHS = {"none": 0, "bool": 1, "int": 8, "float": 8, "complex": 16, "str": None, "bytes": None}
_DEVICE = re.compile(r"(?!meta)[a-z]{1,32}(:(0|[1-9][0-9]?|1[01][0-9]|12[0-7]))?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NEEDED = {"path", "kind", "dtype", "shape"}  # of a leaf
_POSSIBLE = {"stored", "channels_last", "device"}
_HEX = re.compile(r"([0-9a-f]{2})*")


class SchemaError(Exception):
    """JSON that no version of this library wrote."""


class UnknownClassError(Exception):
    """A class, dtype or device that this process does not know, or a class with other fields by now.

    Attributes
    ----------
    name : str
        What is unknown; a class as ``module:qualname``.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r} {reason}")
        self.name = name


class UnserialisableError(Exception):
    """A schema that has no JSON form, with the type that has none and where it is."""


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as what ``json.dumps`` takes, the same for the same schema.

    Raises
    ------
    UnserialisableError
        If the output has a class that cannot be found by its name, or a node that keeps something
        other than plain values and node classes, or is too large.
    """
    data = {
        "structure": _Writer().node(schema.structure, "output", 0),
        "leaves": [_leaf_to_json(leaf) for leaf in schema.leaves],
    }
    try:  # so that the limits of the reader are those of the writer too
        schema_from_json(data)
    except (SchemaError, UnknownClassError) as error:
        raise UnserialisableError(f"the schema of the output could not be read back: {error}") from None
    return data


def schema_from_json(data: Any, *, structured: bool = True) -> Schema:
    """The schema that `schema_to_json` made the JSON from.

    Parameters
    ----------
    data : JSON
        As ``json.loads`` returns it. It may be any JSON.
    structured : bool
        False: the structure is a list of the leaves, whatever classes the JSON names. That is enough to
        check rows.

    Raises
    ------
    SchemaError
        If no version of this library wrote it.
    UnknownClassError
        If it names a class, dtype or device that this process does not know (yet).
    """
    members = _members(data, {"structure", "leaves"})
    leaves = _list(members["leaves"])
    if len(leaves) > MAX_LEAVES:
        raise SchemaError(f"more than {MAX_LEAVES} leaves")
    if not structured:
        structure = pytree.tree_flatten([0] * len(leaves))[1]
        named = [_members(leaf, _NEEDED, _POSSIBLE) for leaf in leaves]
        leaves = [{name: leaf[name] for name in leaf if name != "device"} for leaf in named]
        return Schema(structure, tuple([_leaf_from_json(leaf) for leaf in leaves]))
    structure = _Reader().node(members["structure"], 0)
    if structure.num_leaves != len(leaves):
        raise SchemaError(f"{len(leaves)} leaves for a structure of {structure.num_leaves}")
    return Schema(structure, tuple([_leaf_from_json(leaf) for leaf in leaves]))


class _Counter:
    """Counts the elements of one structure, and bounds their number and depth."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self._left = MAX_ELEMENTS

    def count(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error(f"the output's structure has more than {MAX_ELEMENTS} elements")
        if depth > MAX_DEPTH:
            raise self._error(f"the output's structure is nested more than {MAX_DEPTH} deep")


class _Writer(_Counter):
    def __init__(self) -> None:
        super().__init__(UnserialisableError)

    def node(self, spec: pytree.TreeSpec, where: str, depth: int) -> Any:
        self.count(depth)
        kind, context = spec.type, spec.context
        specs = spec.children() if hasattr(spec, "children") else spec.children_specs

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
        if _one_of(kind, _SEQUENCES.values()):
            return {kind.__name__: children(numbers)}
        if _one_of(kind, _MAPPINGS.values()):
            return {kind.__name__: pairs(context)}
        if kind is collections.defaultdict:
            factory, keys = context
            if factory is not None and not _one_of(factory, _BUILTINS):
                raise UnserialisableError(
                    f"{where} is a defaultdict of {_name(factory)}, not of a builtin type"
                )
            return {"defaultdict": [factory and factory.__name__, pairs(keys)]}
        if kind is collections.deque:
            return {"deque": [context, children(numbers)]}
        if kind is collections.namedtuple:
            fields = list(context._fields)
            return {"namedtuple": [_written(context, where), fields, children([f".{f}" for f in fields])]}
        what = f"what {where} of type {_name(kind)} keeps beside its children"
        return {
            "node": [
                _written(kind, where),
                _fields(kind),
                self.value(context, what, depth + 1),
                children(numbers),
            ]
        }

    def key(self, value: Any, where: str, depth: int) -> Any:
        if not _is_key(value, MAX_DEPTH):
            raise UnserialisableError(f"{where} has a key of type {_name(type(value))}, or with one inside")
        return self.value(value, where, depth)

    def value(self, value: Any, where: str, depth: int) -> Any:
        self.count(depth)
        kind = type(value)
        if value is None or kind is bool or (kind is int and -(2**63) <= value < 2**63):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is str:
            return _text_to_json(value)
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
            return {"class": _written(value, where)}
        what = "an int of more than 64 bits" if kind is int else f"of type {_name(kind)}"
        raise UnserialisableError(f"{where} is {what}, or has one inside")


class _Reader(_Counter):
    def __init__(self) -> None:
        super().__init__(SchemaError)

    def node(self, data: Any, depth: int) -> pytree.TreeSpec:
        self.count(depth)
        if data is None:
            return BARE  # one object for all leaves, as in the pytree module
        tag, body = _tagged(data)
        items = _list(body)
        if tag in _SEQUENCES:
            return pytree.TreeSpec(_SEQUENCES[tag], None, self.nodes(items, depth))
        if tag in _MAPPINGS:
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(_MAPPINGS[tag], keys, nodes)
        if tag == "defaultdict":
            factory, items = _items(items, 2)
            if factory is not None and (type(factory) is not str or factory not in _FACTORIES):
                raise SchemaError("a defaultdict of no builtin type")
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(collections.defaultdict, [factory and _FACTORIES[factory], keys], nodes)
        if tag == "deque":
            length, items = _items(items, 2)
            nodes = self.nodes(items, depth)
            if length is not None and not (type(length) is int and len(nodes) <= length < 2**63):
                raise SchemaError("a deque without room for its items")
            return pytree.TreeSpec(collections.deque, length, nodes)
        if tag == "namedtuple":
            name, fields, items = _items(items, 3)
            cls, nodes = _found(name, _is_namedtuple), self.nodes(items, depth)
            _check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(collections.namedtuple, cls, nodes)
        if tag == "node":
            name, fields, context, items = _items(items, 4)
            cls = _found(name, lambda cls: _is_registered(cls) and not _one_of(cls, _TAGGED))
            context, nodes = self.value(context, depth + 1), self.nodes(items, depth)
            _check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(cls, context, nodes)
        raise SchemaError("a node of no known kind")

    def nodes(self, items: Any, depth: int) -> list[Any]:
        return [self.node(item, depth + 1) for item in _list(items)]

    def pairs(self, items: Any, depth: int, read: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
        pairs = [_items(_list(item), 2) for item in _list(items)]
        keys = [self.value(key, depth + 1) for key, _ in pairs]
        if not all(_is_key(key, MAX_DEPTH) for key in keys):
            raise SchemaError("a key of a type that keys do not have")
        if len(set(keys)) != len(keys):
            raise SchemaError("two equal keys")
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
        tag, body = _tagged(data)
        if tag == "text":
            return _text_from_json(data)
        if tag == "bytes":
            return _from_hex(body)
        if tag == "float" and body in ("nan", "inf", "-inf"):
            return math.nan if body == "nan" else float(body)
        if tag == "tuple":
            return tuple([self.value(item, depth + 1) for item in _list(body)])
        if tag == "dict":
            keys, values = self.pairs(body, depth, self.value)
            return dict(zip(keys, values, strict=True))
        if tag == "class":
            return _found(body, _is_storable)
        raise SchemaError("a value of no known kind")


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    data: dict[str, Any] = {
        "path": _text_to_json(leaf.path),
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


def _leaf_from_json(data: Any) -> Leaf:
    members = _members(data, _NEEDED, _POSSIBLE)
    path, kind, last = _text_from_json(members["path"]), members["kind"], members.get("channels_last", False)
    dtype = _dtype(members["dtype"])
    stored = _dtype(members["stored"]) if "stored" in members else dtype
    device = _device(members["device"]) if "device" in members else None
    extents = _list(members["shape"])
    if len(extents) > MAX_DIMS:
        raise SchemaError(f"a shape of more than {MAX_DIMS} dimensions")
    size = 1
    for extent in extents:
        if extent is not None and not (type(extent) is int and 0 <= extent < MAX_ROW):
            raise SchemaError("an extent that is not a number of elements")
        size *= extent or 1
    if size >= MAX_ROW:
        raise SchemaError("a row of too many elements")
    if type(last) is not bool or (last and len(extents) not in (3, 4)):
        raise SchemaError("channels_last of a leaf without channels")
    if type(kind) is not str or (kind != "tensor" and kind not in _WIDTHS):
        raise SchemaError("a leaf of no known kind")
    if kind == "tensor":
        if stored != dtype and not (stored.is_floating_point and dtype.is_floating_point):
            raise SchemaError("a stored dtype that the dtype is not rounded to")
    elif not (dtype == stored == torch.uint8 and len(extents) == 1 and device is None):
        raise SchemaError("a value that is not kept as its bytes")
    elif _WIDTHS[kind] not in (None, extents[0]):
        raise SchemaError("a value of another width than its kind")
    shape = tuple([-1 if extent is None else extent for extent in extents])
    return Leaf(path, kind, dtype, stored, shape, last, device)


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise SchemaError("a dtype that is not a name")
    if name not in _DTYPES:
        raise UnknownClassError(name, "is not a dtype of this version of PyTorch")
    return _DTYPES[name]


def _device(name: Any) -> str:
    if type(name) is not str or not _DEVICE.fullmatch(name):
        raise SchemaError("a device that is not a name")
    try:
        torch.device(name)
    except Exception:  # of a backend that is not imported
        raise UnknownClassError(name, "is not a device of this process") from None
    return name


# Classes: by name, and without running any code (no import, no `__getattr__`, no descriptor, no `__class__`)


def _written(cls: Any, where: str) -> str:
    name = _name(cls, ":")
    if name.startswith("__mp_main__:"):  # what a spawned process calls the script of its parent
        name = "__main__:" + name.partition(":")[2]
    try:
        _found(name, lambda found: found is cls)
    except (SchemaError, UnknownClassError):
        raise UnserialisableError(f"{where} needs {name}, which is not found by that name") from None
    if not _is_storable(cls):
        raise UnserialisableError(f"{where} needs {name}, which is not a node type of pytrees")
    return name


def _found(name: Any, accepted: Callable[[Any], bool]) -> Any:
    if type(name) is not str or len(name) > MAX_NAME or not name.isprintable():
        raise SchemaError("a class that is not a name")
    module, _, qualname = name.partition(":")
    if not module or not all(qualname.split(".")):
        raise SchemaError("a class that is not a name")
    value: Any = sys.modules.get(module)
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


def _static(cls: Any, name: str) -> Any:
    spaces = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(cls, "__mro__")]
    return next((space[name] for space in spaces if name in space), None)


def _one_of(cls: Any, classes: Any) -> bool:
    return any(cls is other for other in list(classes))  # some classes have no hash


def _is_registered(cls: Any) -> bool:
    return _one_of(cls, pytree.SUPPORTED_NODES)


def _is_namedtuple(cls: Any) -> bool:
    fields = _static(cls, "_fields")
    return issubclass(cls, tuple) and type(fields) is tuple and all(type(field) is str for field in fields)


def _is_storable(cls: Any) -> bool:
    return _one_of(cls, _BUILTINS) or _is_registered(cls) or _is_namedtuple(cls)


def _fields(cls: Any) -> list[str] | None:
    if _is_namedtuple(cls):
        return list(_static(cls, "_fields"))
    if _is_struct_sequence(cls):
        return list(_static(cls, "__match_args__"))
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def _is_struct_sequence(cls: Any) -> bool:
    return issubclass(cls, tuple) and _static(cls, "n_sequence_fields") is not None


def _check_fields(cls: Any, name: str, fields: Any, children: int) -> None:
    if fields is not None and not all(type(field) is str for field in _list(fields)):
        raise SchemaError("fields that are not names")
    known = _fields(cls)
    if known != fields:
        raise UnknownClassError(name, "has other fields than when its schema was written")
    if known is not None and (_is_namedtuple(cls) or _is_struct_sequence(cls)) and len(known) != children:
        raise SchemaError("another number of children than of fields")


def _name(cls: Any, separator: str = ".") -> str:
    return (
        f"{getattr(cls, '__module__', '')}{separator}{getattr(cls, '__qualname__', type(cls).__qualname__)}"
    )


# Parts of the JSON


def _is_key(value: Any, depth: int) -> bool:
    if type(value) is tuple:
        return depth > 0 and all(_is_key(item, depth - 1) for item in value)
    return value is None or type(value) in (str, int, float, bool, bytes)


def _step(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int, float, bool, bytes) else f"[{type(key).__qualname__}]"


def _text_to_json(text: str) -> Any:
    surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return {"text": text.encode("utf-8", "surrogatepass").hex()} if surrogates else text


def _text_from_json(data: Any) -> str:
    if type(data) is str:
        return data
    tag, body = _tagged(data)
    try:
        if tag == "text":
            return _from_hex(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        pass
    raise SchemaError("a text that is not one")


def _from_hex(data: Any) -> bytes:
    if type(data) is not str or not _HEX.fullmatch(data):
        raise SchemaError("bytes that are not hexadecimal")
    return bytes.fromhex(data)


def _tagged(data: Any) -> tuple[Any, Any]:
    if type(data) is not dict or len(data) != 1:
        raise SchemaError("neither a plain value nor an object with one tag")
    return next(iter(data.items()))


def _members(data: Any, needed: set[str], optional: set[str] | None = None) -> dict[str, Any]:
    if type(data) is not dict or not needed <= set(data) <= needed | (optional or set()):
        raise SchemaError(f"not an object with {', '.join(sorted(needed))}")
    return data


def _list(data: Any) -> list[Any]:
    if type(data) is not list:
        raise SchemaError("something else where a list belongs")
    return data


def _items(items: list[Any], count: int) -> list[Any]:
    if len(items) != count:
        raise SchemaError(f"{len(items)} items where {count} belong")
    return items
