"""How outputs, samples and arguments come apart, and how they are put together again as they were.

Neither named tuples nor dataclasses are rebuilt by calling their class, which may compute. Any other node of
a pytree is made by the function that its class is registered with, and taken apart once more. A node that
does not come back as it was is refused.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from torchcache2.core.private import pytree

__all__ = [
    "BARE",
    "NotRebuiltError",
    "attributes",
    "closed",
    "fields_of",
    "has_attributes",
    "is_key",
    "is_namedtuple",
    "is_record",
    "is_registered",
    "leaves_of",
    "mapped",
    "one_of",
    "opened",
    "opened_or_none",
    "rebuilt",
    "same",
    "same_structure",
    "specs_of",
    "static",
    "taken_apart",
]

BARE = pytree.tree_flatten(0)[1]  # the structure of a value that is one leaf

_MAPPINGS = (dict, collections.OrderedDict)
_MARKS = ("_dynamo", "_is_")  # attributes that torch puts on tensors; `persistent` is another, on buffers


class NotRebuiltError(Exception):
    """A node that would not come back as it was; the text says what it is."""


def opened(value: Any) -> tuple[Any, Any, list[Any]] | None:
    """The type, context and children of a node; None for a leaf.

    Raises
    ------
    NotRebuiltError
        If `closed` would make another value of them.
    """
    kind: Any = type(value)
    context: Any = None
    rest: dict[str, Any] = {}
    if kind is tuple or kind is list:
        return kind, None, list(value)
    if kind is dict:
        return kind, list(value), list(value.values())
    if isinstance(value, Tensor):
        return None
    if kind is collections.OrderedDict:
        context, children, rest = list(value), list(value.values()), attributes(value)
    elif is_namedtuple(kind):
        context, children, rest = kind, list(tuple.__iter__(value)), attributes(value)
        kind = collections.namedtuple
    elif not is_registered(kind):
        return None
    elif is_record(kind):
        rest, names = attributes(value), fields_of(kind) or []
        if not set(names) <= set(rest):
            raise NotRebuiltError(f"a {_name(kind)} without an attribute for each of its fields")
        children = [rest.pop(name) for name in names]
    else:
        try:
            context, children = _flattened(kind, value)
            context = copy.deepcopy(context)  # it may be changed with the value
            state = attributes(closed(kind, context, children))
            is_same = same(sorted(state.items()), sorted(attributes(value).items()))
        except Exception:  # whatever the functions of that class raise
            is_same = False
        if not is_same:
            raise NotRebuiltError(f"a {_name(kind)} that is another one when it is rebuilt from its parts")
    if rest:
        raise NotRebuiltError(f"a {_name(type(value))} with other attributes: {', '.join(sorted(rest))}")
    return kind, context, children


def closed(kind: Any, context: Any, children: Iterable[Any]) -> Any:
    """The node of a type with a context and children; `NotRebuiltError` if its class refuses them."""
    if kind is tuple or kind is list:
        return kind(children)
    if kind in _MAPPINGS:
        return kind(zip(context, children, strict=True))
    if kind is collections.namedtuple:
        return tuple.__new__(context, children)
    children = list(children)
    if is_record(kind):
        value = object.__new__(kind)
        for name, child in zip(fields_of(kind) or [], children, strict=True):
            if type(static(kind, name)) is types.MemberDescriptorType:
                object.__setattr__(value, name, child)
            else:  # not through a descriptor of the class, which may compute
                vars(value)[name] = child
        return value
    value = pytree.SUPPORTED_NODES[kind].unflatten_fn(children, copy.deepcopy(context))
    if type(value) is not kind or not same(_flattened(kind, value), (context, children)):
        raise NotRebuiltError(f"a {_name(kind)} that its class makes of other parts")
    return value


def _flattened(kind: Any, value: Any) -> tuple[Any, list[Any]]:
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    return context, list(children)


def taken_apart(value: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """The leaves of a value with their paths, as in ``['hidden'][0]``, and its structure.

    Raises
    ------
    NotRebuiltError
        If a node would not come back; the text begins with its path.
    """
    leaves: list[tuple[str, Any]] = []

    def spec_of(value: Any, path: str) -> pytree.TreeSpec:
        try:
            node = opened(value)
        except NotRebuiltError as error:
            raise NotRebuiltError(f"{path} is {error}") from None
        if node is None:
            leaves.append((path, value))
            return BARE
        steps = _steps(value, *node)
        pairs = zip(steps, node[2], strict=True)
        return pytree.TreeSpec(*node[:2], [spec_of(child, path + step) for step, child in pairs])

    return leaves, spec_of(value, "")


def _steps(value: Any, kind: Any, context: Any, children: list[Any]) -> list[str]:
    """What the path of a leaf says of each child."""
    names = fields_of(type(value)) or []
    if kind in _MAPPINGS:
        return [f"[{key!r}]" for key in context]
    if len(names) == len(children) and (kind is collections.namedtuple or is_record(kind)):
        return [f".{name}" for name in names]
    keyed = (
        None
        if kind in (tuple, list, collections.namedtuple)
        else pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    )
    if keyed is None:
        return [f"[{i}]" for i in range(len(children))]
    return [pytree.keystr((key,)) for key, _ in keyed(value)[0]]


def rebuilt(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """The value with a structure and leaves; `NotRebuiltError` if a class refuses them."""
    if spec.type is None:
        return next(leaves)
    return closed(spec.type, spec.context, [rebuilt(child, leaves) for child in specs_of(spec)])


def specs_of(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures of the children of a node."""
    children: list[pytree.TreeSpec] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return children


def opened_or_none(value: Any) -> tuple[Any, Any, list[Any]] | None:
    """What `opened` returns; None also for a node that would not come back."""
    try:
        return opened(value)
    except NotRebuiltError:
        return None


def leaves_of(value: Any) -> list[Any]:
    """Everything in a value that is no container, and the containers that would not come back."""
    node = opened_or_none(value)
    return [value] if node is None else [leaf for child in node[2] for leaf in leaves_of(child)]


def mapped(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A value of the same structure, with what a function makes of each of `leaves_of`.

    `NotRebuiltError` if a class refuses them.
    """
    node = None if is_leaf is not None and is_leaf(value) else opened_or_none(value)
    if node is None:
        return function(value)
    kind, context, children = node
    return closed(kind, context, [mapped(function, child, is_leaf) for child in children])


def same(left: Any, right: Any, met: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values are equal in type and content; a tensor is equal to itself only.

    `met` are pairs of containers that are compared elsewhere, as one may be in others many times.
    """
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right) or isinstance(left, Tensor):
        return False
    if kind in (tuple, list, *_MAPPINGS):
        met = set() if met is None else met
        if len(left) != len(right) or (id(left), id(right)) in met:
            return len(left) == len(right)
        met.add((id(left), id(right)))
        if kind in _MAPPINGS:
            left, right = chain.from_iterable(left.items()), chain.from_iterable(right.items())
        return all(same(one, other, met) for one, other in zip(left, right, strict=True))
    if kind in (float, complex):
        return repr(left) == repr(right)
    try:
        return bool(left == right)
    except Exception:  # arrays raise it
        return False


def same_structure(left: pytree.TreeSpec, right: pytree.TreeSpec) -> bool:
    """Whether two structures make the same values of leaves, unlike ``==``, for which 1 and True are one."""
    if left is right:
        return True
    ours, theirs = specs_of(left), specs_of(right)
    is_same = left.type is right.type and same(left.context, right.context) and len(ours) == len(theirs)
    return is_same and all(map(same_structure, ours, theirs))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and its slots."""
    state = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                name = f"_{base.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
                state.setdefault(name, getattr(value, name, None))
    return state


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def is_key(value: Any, depth: int = 100) -> bool:
    """Whether a value may be a key of a dictionary in a file."""
    if type(value) is tuple:
        return depth > 0 and all(is_key(item, depth - 1) for item in value)
    return value is None or type(value) in (str, int, float, bool, bytes)


def has_attributes(tensor: Tensor) -> bool:
    """Whether somebody has given a tensor attributes of its own."""
    return any(name != "persistent" and not name.startswith(_MARKS) for name in vars(tensor))


def static(cls: Any, name: str) -> Any:
    """What a class has by a name, without running any code."""
    spaces = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(cls, "__mro__")]
    return next((space[name] for space in spaces if name in space), None)


def one_of(cls: Any, classes: Any) -> bool:
    """Whether a class is one of some classes, some of which have no hash."""
    return any(cls is other for other in list(classes))


def is_registered(cls: Any) -> bool:
    """Whether a class is a node type of pytrees."""
    return one_of(cls, pytree.SUPPORTED_NODES)


def is_namedtuple(cls: Any) -> bool:
    """Whether a class is a named tuple."""
    if not issubclass(cls, tuple):
        return False
    fields = static(cls, "_fields")
    return type(fields) is tuple and all(type(field) is str for field in fields)


def is_record(cls: Any) -> bool:
    """Whether a class is a dataclass that extends no class of C, as a ``ModelOutput`` extends dicts."""
    is_of_python = 1 << 9
    bases = type.__getattribute__(cls, "__mro__")[:-1]
    return dataclasses.is_dataclass(cls) and all(base.__flags__ & is_of_python for base in bases)


def fields_of(cls: Any) -> list[str] | None:
    """The names of the children of a class, if these have names."""
    if is_namedtuple(cls):
        return list(static(cls, "_fields"))
    if issubclass(cls, tuple) and static(cls, "n_sequence_fields") is not None:  # such as `torch.max` returns
        return list(static(cls, "__match_args__"))
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
