"""`Schema` as JSON and back, so that a file can carry it; docs/format.md specifies the JSON.

Reading imports nothing and calls nothing that the JSON names. A class is looked up among the modules that are
imported already, through their plain attributes, and must be a node type of the pytree registry.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from torchcache2.core import values
from torchcache2.core.private import pytree
from torchcache2.core.rows import Schema
from torchcache2.files import classnames as classes
from torchcache2.files import jsonparts as parts
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError

MAX_LEAVES = 10_000
MAX_DEPTH = 100
MAX_ELEMENTS = 100_000

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in classes.BUILTINS}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict}
_TAGGED = (*_SEQUENCES.values(), *_MAPPINGS.values(), collections.defaultdict, collections.deque)


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as a value for ``json.dumps``; equal schemas give equal values.

    `UnserialisableError` if the output has a class that cannot be found by its name, if a node keeps more
    than plain values and node classes, or if the schema is too large.
    """
    data = {
        "structure": _Writer().node(schema.structure, "output", 0),
        "leaves": [parts.leaf_to_json(leaf) for leaf in schema.leaves],
    }
    try:  # a reader has limits, so that the writer must respect them
        schema_from_json(data)
    except (DamagedError, UnknownClassError) as error:
        raise UnserialisableError(f"the schema of the output could not be read back: {error}") from None
    return data


def schema_from_json(data: Any, *, structured: bool = True) -> Schema:
    """The schema that `schema_to_json` has turned into this JSON; `data` may be any JSON.

    Without `structured`, the structure is a list of the leaves, whatever classes the JSON names: that is
    enough to check rows.

    Raises
    ------
    DamagedError
        If no version of this library wrote it.
    UnknownClassError
        If it names a class, dtype or device that this process does not know (yet).
    """
    members = parts.members_of(data, {"structure", "leaves"})
    leaves = parts.list_of(members["leaves"])
    if len(leaves) > MAX_LEAVES:
        raise DamagedError(f"more than {MAX_LEAVES} leaves")
    if not structured:
        structure = pytree.tree_flatten([0] * len(leaves))[1]
        named = [parts.members_of(leaf, parts.NEEDED, parts.POSSIBLE) for leaf in leaves]
        leaves = [{name: leaf[name] for name in leaf if name != "device"} for leaf in named]
        return Schema(structure, tuple([parts.leaf_from_json(leaf) for leaf in leaves]))
    structure = _Reader().node(members["structure"], 0)
    if structure.num_leaves != len(leaves):
        raise DamagedError(f"{len(leaves)} leaves for a structure of {structure.num_leaves}")
    return Schema(structure, tuple([parts.leaf_from_json(leaf) for leaf in leaves]))


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
        specs = values.specs_of(spec)

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
        if values.one_of(kind, _SEQUENCES.values()):
            return {kind.__name__: children(numbers)}
        if values.one_of(kind, _MAPPINGS.values()):
            return {kind.__name__: pairs(context)}
        if kind is collections.defaultdict:
            factory, keys = context
            if factory is not None and not values.one_of(factory, classes.BUILTINS):
                raise UnserialisableError(
                    f"{where} is a defaultdict of {classes.qualified(factory)}, not of a builtin type"
                )
            return {"defaultdict": [factory and factory.__name__, pairs(keys)]}
        if kind is collections.deque:
            return {"deque": [context, children(numbers)]}
        if kind is collections.namedtuple:
            fields = list(context._fields)
            return {
                "namedtuple": [classes.name_of(context, where), fields, children([f".{f}" for f in fields])]
            }
        what = f"what {where} of type {classes.qualified(kind)} keeps beside its children"
        return {
            "node": [
                classes.name_of(kind, where),
                values.fields_of(kind),
                self.value(context, what, depth + 1),
                children(numbers),
            ]
        }

    def key(self, value: Any, where: str, depth: int) -> Any:
        if not values.is_key(value):
            raise UnserialisableError(
                f"{where} has a key of type {classes.qualified(type(value))}, or with one inside"
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
            return parts.text_to_json(value)
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
            return {"class": classes.name_of(value, where)}
        what = "an int of more than 64 bits" if kind is int else f"of type {classes.qualified(kind)}"
        raise UnserialisableError(f"{where} is {what}, or has one inside")


class _Reader(_Counter):
    _error = DamagedError

    def node(self, data: Any, depth: int) -> pytree.TreeSpec:
        self.count(depth)
        if data is None:
            return values.BARE  # all leaves are one object, as in the pytree module
        tag, body = parts.tagged(data)
        items = parts.list_of(body)
        if tag in _SEQUENCES:
            return pytree.TreeSpec(_SEQUENCES[tag], None, self.nodes(items, depth))
        if tag in _MAPPINGS:
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(_MAPPINGS[tag], keys, nodes)
        if tag == "defaultdict":
            factory, items = parts.items_of(items, 2)
            if factory is not None and (type(factory) is not str or factory not in _FACTORIES):
                raise DamagedError("a defaultdict of no builtin type")
            keys, nodes = self.pairs(items, depth, self.node)
            return pytree.TreeSpec(collections.defaultdict, [factory and _FACTORIES[factory], keys], nodes)
        if tag == "deque":
            length, items = parts.items_of(items, 2)
            nodes = self.nodes(items, depth)
            if length is not None and not (type(length) is int and len(nodes) <= length < 2**63):
                raise DamagedError("a deque without room for its items")
            return pytree.TreeSpec(collections.deque, length, nodes)
        if tag == "namedtuple":
            name, fields, items = parts.items_of(items, 3)
            cls, nodes = classes.class_of(name, values.is_namedtuple), self.nodes(items, depth)
            classes.check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(collections.namedtuple, cls, nodes)
        if tag == "node":
            name, fields, context, items = parts.items_of(items, 4)
            cls = classes.class_of(name, _has_no_tag)
            context, nodes = self.value(context, depth + 1), self.nodes(items, depth)
            classes.check_fields(cls, name, fields, len(nodes))
            return pytree.TreeSpec(cls, context, nodes)
        raise DamagedError("a node of no known kind")

    def nodes(self, items: Any, depth: int) -> list[Any]:
        return [self.node(item, depth + 1) for item in parts.list_of(items)]

    def pairs(self, items: Any, depth: int, read: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
        pairs = [parts.items_of(parts.list_of(item), 2) for item in parts.list_of(items)]
        keys = [self.value(key, depth + 1) for key, _ in pairs]
        if not all(values.is_key(key) for key in keys):
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
        tag, body = parts.tagged(data)
        if tag == "text":
            return parts.text_from_json(data)
        if tag == "bytes":
            return parts.from_hex(body)
        if tag == "float" and body in ("nan", "inf", "-inf"):
            return math.nan if body == "nan" else float(body)
        if tag == "tuple":
            return tuple([self.value(item, depth + 1) for item in parts.list_of(body)])
        if tag == "dict":
            keys, values = self.pairs(body, depth, self.value)
            return dict(zip(keys, values, strict=True))
        if tag == "class":
            return classes.class_of(body, classes.is_storable)
        raise DamagedError("a value of no known kind")


def _has_no_tag(cls: Any) -> bool:
    return values.is_node(cls) and not values.one_of(cls, _TAGGED)


def _step(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int, float, bool, bytes) else f"[{type(key).__qualname__}]"
