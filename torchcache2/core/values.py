"""Takes outputs, samples and arguments apart into nodes and leaves, and rebuilds them exactly.

Named tuples and dataclasses are rebuilt without calling their class, which may compute. Other pytree nodes
are rebuilt by their registered function, and taken apart once more to compare. Nodes that differ after that
are refused.

With `objects=True`, for outputs and samples, there are more nodes than in pytrees: unregistered dataclasses,
mappings like `UserDict`, and classes known to `register_value`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor

from torchcache2.core.errors import OptionError, attribute
from torchcache2.core.logs import shown
from torchcache2.core.private import pytree

BARE = pytree.tree_flatten(0)[1]  # the structure of a value that is one leaf

_DEEPEST = 100  # nested nodes
_MAPPINGS = (dict, collections.OrderedDict)
_VALUE = "_torchcache_value"  # attribute of a class: the functions given to `register_value`
_MARKS = ("_dynamo", "_is_")  # attributes that torch sets on tensors (and `persistent` on buffers)

Opened = tuple[Any, Any, Sequence[Any]]  # the type of a node, its context, and its children
Opener = Callable[[Any, str], "Opened | None"]  # of a value and its path; None for a leaf


class Node:
    """A pytree node type used only in schemas: describes a value besides its tensors.

    Parameters
    ----------
    module : str
        The module named in files. It stays when code moves, like the name of the class.

    Attributes
    ----------
    steps : tuple of str
        The part of a leaf's path for each child.
    """

    steps: ClassVar[tuple[str, ...]] = ("",)

    def __init_subclass__(cls, *, module: str) -> None:
        cls.__module__ = f"torchcache2.{module}"
        pytree.register_pytree_node(cls, lambda node: (list(node.children), node.context), cls)

    def __init__(self, children: Sequence[Any], context: Any) -> None:
        self.children, self.context = children, context

    @classmethod
    def closed(cls, context: Any, children: Sequence[Any]) -> Any:
        """The value with a context and children."""
        raise NotImplementedError


class UnstorableError(Exception):
    """A value that cannot be stored, or not restored exactly.

    Attributes
    ----------
    what, advice : str
        What it is, and what to return instead; ``{}`` in the advice stands for its path; the advice may be
        empty.
    path : str
        Its place, such as ``output['image'][0]``.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what, advice)
        self.what, self.advice, self.path = what, advice, ""

    def inside(self, path: str) -> UnstorableError:
        """The same error, from the view of an outer value that has it at a path."""
        self.path = path + self.path
        return self

    def __str__(self) -> str:
        if self.advice:
            return (
                f"{self.path} is {self.what}, which cannot be cached: {self.advice.replace('{}', self.path)}"
            )
        return (
            f"{self.path} is {self.what}; return dense tensors, arrays, numbers, texts, or lists, dicts and "
            "dataclasses of these. For others, see torchcache2.register_value"
        )


def register_value(cls: type, take_apart: Callable[[Any], Any], rebuild: Callable[[Any], Any]) -> None:
    """Register how to cache objects of a class, in outputs of cached functions and in samples.

    Subclasses are not included. In a process where the class is not imported, or not registered, its rows are
    misses. Register it before the first cached call.

    Parameters
    ----------
    cls : type
        A Python class that can be imported by its name, also a subclass of `torch.Tensor`.
    take_apart : callable
        ``take_apart(value)`` returns the parts of an object: tensors and arrays with a first dimension for
        the batch, lists with an entry per item, numbers, texts, and tuples, lists and dicts of them.
    rebuild : callable
        ``rebuild(parts)`` returns a new object of the class with these parts.

    Raises
    ------
    OptionError
        If `cls` is not a class, takes no attributes, or is already a pytree node type.

    Examples
    --------
    >>> import torch
    >>> from torchcache2 import register_value, torchcache
    >>> class Boxes:
    ...     def __init__(self, corners, size):
    ...         self.corners, self.size = corners, size
    >>> register_value(Boxes, lambda boxes: (boxes.corners, boxes.size), lambda parts: Boxes(*parts))
    >>> @torchcache
    ... def detect(images):
    ...     return Boxes(images.sum((1, 2))[:, None] + torch.arange(4.0), size=(8, 8))
    >>> images = torch.rand(3, 8, 8)
    >>> detect(images).corners.equal(detect(images).corners), detect.cache_instance.stats().hits
    (True, 3)
    """
    if not isinstance(cls, type) or not callable(take_apart) or not callable(rebuild):
        raise OptionError(
            f"register_value({shown(cls)}, ...): expected a class, a function that takes an object of it "
            "apart, and one that rebuilds it of these parts"
        )
    if is_registered(cls) or is_namedtuple(cls):
        raise OptionError(
            f"cls={_name(cls)} is a node type of pytrees already: its objects are cached as such"
        )
    try:
        setattr(cls, _VALUE, (take_apart, lambda cls, parts: rebuild(parts)))
    except TypeError:
        text = "takes no attributes: register it with torch.utils._pytree.register_pytree_node"
        raise OptionError(f"cls={_name(cls)} {text}") from None


register_value.__module__ = "torchcache2"  # its public path


def _encoding(cls: Any, state: bytes) -> Any:
    value = cls()
    value.__setstate__(state)  # JSON, which the library parses
    return value


def _opened_tensordict(value: Any) -> tuple[Any, ...]:
    if any(name is not None for name in value.names):
        raise UnstorableError("a TensorDict with names of dimensions")
    return dict(value.items()), value.batch_dims, value.device is not None, value.is_locked


def _tensordict(cls: Any, parts: tuple[Any, ...]) -> Any:
    entries, dimensions, has_device, is_locked = parts
    if not entries:
        raise UnstorableError("a TensorDict without entries")
    first = next(iter(entries.values()))
    value = cls(entries, first.shape[:dimensions], device=first.device if has_device else None)
    return value.lock_() if is_locked else value


# Functions that take objects of a class apart, and that rebuild them from class and parts.
_Functions = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
_KNOWN: dict[str, _Functions] = {
    "diffusers.models.autoencoders.vae.DiagonalGaussianDistribution": (
        lambda value: (value.parameters, value.deterministic),
        lambda cls, parts: cls(*parts),
    ),
    "tensordict._td.TensorDict": (_opened_tensordict, _tensordict),
    "tokenizers.Encoding": (lambda value: value.__getstate__(), _encoding),
}


def _functions(cls: Any) -> _Functions | None:
    """The functions for a class that is neither a pytree node nor a dataclass."""
    functions = type.__getattribute__(cls, "__dict__").get(_VALUE)
    if functions is not None:
        return functions  # type: ignore[no-any-return]
    return _KNOWN.get(_path_of(cls))


def _path_of(cls: Any) -> str:
    names = (type.__getattribute__(cls, name) for name in ("__module__", "__qualname__"))
    return ".".join(map(str, names))


def _is_mapping(cls: Any) -> bool:
    """Whether a class is like `UserDict`, with all state in attributes."""
    return one_of(collections.UserDict, type.__getattribute__(cls, "__mro__")) and _is_of_python(cls)


def is_node(cls: Any) -> bool:
    """Whether instances of a class are taken apart in outputs and samples; runs no code of it."""
    return is_registered(cls) or is_record(cls) or _is_mapping(cls) or _functions(cls) is not None


def opened(value: Any, *, objects: bool = False) -> tuple[Any, Any, list[Any]] | None:
    """The type, context and children of a node; None for a leaf.

    Raises
    ------
    UnstorableError
        If `closed` would build another value from them.
    """
    kind: Any = type(value)
    if kind is tuple or kind is list:
        return kind, None, list(value)
    if kind is dict:
        return kind, list(value), list(value.values())
    is_known, is_tuple = is_registered(kind), is_namedtuple(kind)
    if not (is_known or is_tuple or (objects and is_node(kind))):
        return None
    if issubclass(kind, Tensor) and not (objects and _VALUE in vars(kind)):
        return None
    context, functions, rest = None, None if is_known else _functions(kind), {}
    if kind is collections.OrderedDict:
        context, children, rest = list(value), list(value.values()), attributes(value)
    elif is_tuple:
        kind, context = collections.namedtuple, kind
        children, rest = list(tuple.__iter__(value)), attributes(value)
    elif functions is not None:
        try:
            children = [functions[0](value)]
            closed(kind, None, children)
        except Exception as error:  # whatever these functions raise
            what = error.what if isinstance(error, UnstorableError) else repr(error)
            raise UnstorableError(f"a {_name(kind)} that cannot be taken apart and rebuilt: {what}") from None
    elif is_record(kind):
        rest, names = attributes(value), fields_of(kind) or []
        if not set(names) <= set(rest):
            raise UnstorableError(f"a {_name(kind)} without an attribute for each of its fields")
        children = [rest.pop(name) for name in names]
    elif not is_known:
        context, children = list(vars(value)), list(vars(value).values())
    else:
        try:
            context, children = _flattened(kind, value)
            context = copy.deepcopy(context)  # may change with the value
            state = attributes(closed(kind, context, children))
            is_same = same(sorted(state.items()), sorted(attributes(value).items()))
        except Exception:  # whatever the functions of that class raise
            is_same = False
        if not is_same:
            raise UnstorableError(f"a {_name(kind)} that differs after it is rebuilt from its parts")
    if rest:
        raise UnstorableError(f"a {_name(type(value))} with other attributes: {', '.join(sorted(rest))}")
    return kind, context, children


def closed(kind: Any, context: Any, children: Iterable[Any]) -> Any:
    """The node of a type with a context and children; `UnstorableError` if its class refuses them."""
    if kind is tuple or kind is list:
        return kind(children)
    if kind in _MAPPINGS:
        return kind(zip(context, children, strict=True))
    if kind is collections.namedtuple:
        return tuple.__new__(context, children)
    children, is_known = list(children), is_registered(kind)
    functions = None if is_known else _functions(kind)
    if functions is not None:
        value: Any = functions[1](kind, *children)
        if type(value) is not kind:
            raise UnstorableError(f"a {_name(kind)} that is rebuilt as a {_name(type(value))}")
    elif is_record(kind) or not is_known:
        value, names = object.__new__(kind), fields_of(kind) or [] if is_record(kind) else context
        for name, child in zip(names, children, strict=True):
            if type(static(kind, name)) is types.MemberDescriptorType:
                object.__setattr__(value, name, child)
            else:  # bypass descriptors, which may compute
                vars(value)[name] = child
    else:
        value = pytree.SUPPORTED_NODES[kind].unflatten_fn(children, copy.deepcopy(context))
        if type(value) is not kind or not same(_flattened(kind, value), (context, children)):
            raise UnstorableError(f"a {_name(kind)} that its class does not rebuild from these parts")
    return value


def _flattened(kind: Any, value: Any) -> tuple[Any, list[Any]]:
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    return context, list(children)


def taken_apart(value: Any, opened: Opener) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """The leaves of a value with their paths, as in ``['hidden'][0]``, and its structure.

    `UnstorableError` if a node cannot be restored, or nodes are nested too deep.
    """
    leaves: list[tuple[str, Any]] = []
    return leaves, _structure(value, "", 0, opened, leaves)


def _structure(
    value: Any, path: str, depth: int, opened: Opener, leaves: list[tuple[str, Any]]
) -> pytree.TreeSpec:
    """The structure of a value at a path; appends its leaves to `leaves`.

    No closure: one that calls itself is a cycle, which would keep the leaves until the collector runs.
    """
    try:
        node = opened(value, path)
        if node is not None and depth > _DEEPEST:
            raise UnstorableError(f"nested more than {_DEEPEST} deep")
    except UnstorableError as error:
        raise error.inside(path) from None
    if node is None:
        leaves.append((path, value))
        return BARE
    pairs = zip(_steps(value, *node), node[2], strict=True)
    children = [_structure(child, path + step, depth + 1, opened, leaves) for step, child in pairs]
    return pytree.TreeSpec(*node[:2], children)


def _steps(value: Any, kind: Any, context: Any, children: Sequence[Any]) -> Sequence[str]:
    """The part of a leaf's path for each child."""
    numbers = [f"[{i}]" for i in range(len(children))]
    if kind is tuple or kind is list:
        return numbers
    if kind in _MAPPINGS:
        return [f"[{key!r}]" for key in context]
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind.steps[: len(children)]
    is_known = kind is not collections.namedtuple and is_registered(kind)
    if is_record(type(value)) or not is_known:
        names = context if type(context) is list else fields_of(type(value))
        if names is None:  # classes of `register_value` have one child
            return [""]
        return [f".{name}" for name in names] if len(names) == len(children) else numbers
    keyed = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    return [pytree.keystr((key,)) for key, _ in keyed(value)[0]] if keyed else numbers


def rebuilt(
    spec: pytree.TreeSpec, leaves: Iterator[Any], closed: Callable[[Any, Any, list[Any]], Any] = closed
) -> Any:
    """Rebuild a value from structure and leaves; `UnstorableError` if a class refuses them.

    ``closed(kind, context, children)`` makes each node.
    """
    if spec.type is None:
        return next(leaves)
    return closed(spec.type, spec.context, [rebuilt(child, leaves, closed) for child in specs_of(spec)])


def specs_of(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures of the children of a node."""
    children: list[pytree.TreeSpec] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return children


def opened_or_none(value: Any, *, objects: bool = False) -> tuple[Any, Any, list[Any]] | None:
    """Like `opened`, but None also for a node that cannot be restored."""
    try:
        return opened(value, objects=objects)
    except UnstorableError:
        return None


def leaves_of(value: Any, *, objects: bool = False) -> list[Any]:
    """All leaves of a value, including containers that cannot be restored."""
    node = opened_or_none(value, objects=objects)
    if node is None:
        return [value]
    return [leaf for child in node[2] for leaf in leaves_of(child, objects=objects)]


def mapped(
    function: Callable[[Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool] = lambda value: False,
    *,
    objects: bool = False,
) -> Any:
    """A value of the same structure, with a function applied to each of `leaves_of`.

    `UnstorableError` if a class refuses them.
    """
    node = None if is_leaf(value) else opened_or_none(value, objects=objects)
    if node is None:
        return function(value)
    kind, context, children = node
    return closed(kind, context, [mapped(function, child, is_leaf, objects=objects) for child in children])


def same(left: Any, right: Any, met: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values are equal in type and content; a tensor is equal to itself only.

    `met` has pairs of containers already compared, as containers may be shared.
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
    except Exception:  # raised by arrays
        return False


def same_structure(left: pytree.TreeSpec, right: pytree.TreeSpec) -> bool:
    """Whether two structures build the same values, unlike ``==``, where 1 equals True."""
    if left is right:
        return True
    ours, theirs = specs_of(left), specs_of(right)
    is_same = left.type is right.type and same(left.context, right.context) and len(ours) == len(theirs)
    return is_same and all(map(same_structure, ours, theirs))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and its slots."""
    state = getattr(value, "__dict__", {})
    # A class whose `__getattr__` answers every name has a ``__dict__`` that need not be a dictionary.
    state = dict(state) if isinstance(state, (dict, types.MappingProxyType)) else {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                name = f"_{base.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
                state.setdefault(name, attribute(value, name))
    return state


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def is_key(value: Any, depth: int = 100) -> bool:
    """Whether a value may be a key of a dictionary in a file."""
    if type(value) is tuple:
        return depth > 0 and all(is_key(item, depth - 1) for item in value)
    return value is None or type(value) in (str, int, float, bool, bytes)


def has_attributes(tensor: Tensor) -> bool:
    """Whether a tensor has attributes set by the user."""
    own = vars(tensor)
    return own != {} and any(name != "persistent" and not name.startswith(_MARKS) for name in own)


def static(cls: Any, name: str) -> Any:
    """The attribute of a class by name, without running any code."""
    spaces = [type.__getattribute__(base, "__dict__") for base in type.__getattribute__(cls, "__mro__")]
    return next((space[name] for space in spaces if name in space), None)


def one_of(cls: Any, classes: Any) -> bool:
    """Whether a class is one of some classes, which need not be hashable."""
    return any(cls is other for other in list(classes))


def is_registered(cls: Any) -> bool:
    """Whether a class is a node type of pytrees, and is taken apart as such."""
    try:
        return cls in pytree.SUPPORTED_NODES and _path_of(cls) not in _KNOWN
    except Exception:  # a class whose own class has no hash
        return False


def is_namedtuple(cls: Any) -> bool:
    """Whether a class is a named tuple."""
    if not issubclass(cls, tuple):
        return False
    fields = static(cls, "_fields")
    return type(fields) is tuple and all(type(field) is str for field in fields)


def is_record(cls: Any) -> bool:
    """Whether a class is a dataclass without C base classes (unlike ``ModelOutput``, which extends dict)."""
    return static(cls, "__dataclass_fields__") is not None and _is_of_python(cls)


def _is_of_python(cls: Any) -> bool:
    is_of_python = 1 << 9
    bases = type.__getattribute__(cls, "__mro__")[:-1]
    return all(type.__getattribute__(base, "__flags__") & is_of_python for base in bases)


def fields_of(cls: Any) -> list[str] | None:
    """The names of a class's children; None if they have none."""
    if is_namedtuple(cls):
        return list(static(cls, "_fields"))
    if issubclass(cls, tuple) and static(cls, "n_sequence_fields") is not None:  # such as `torch.max` returns
        return list(static(cls, "__match_args__"))
    if not is_registered(cls) and _functions(cls) is not None:
        return None
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
