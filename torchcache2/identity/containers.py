"""The content of containers and modules: noticed when it changes, and put back.

Elements are compared by identity, and plain values by type and value. An element that is a container is
compared by itself, so that only the direct elements of each container matter here.
"""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import attrgetter, is_
from types import CellType
from typing import Any

import numpy as np

__all__ = ["MUTABLE", "Attributes", "Contents", "alike", "content", "size_of"]

MUTABLE = (list, dict, set, deque, bytearray, array, np.ndarray)
_COPIED = (dict, OrderedDict, defaultdict, list, set)

_MISSING = object()
_EXACT = (type(None), bool, int, str, bytes)
_PRINTED = (float, complex)  # 0.0 and -0.0 are equal, but are not the same; with nan it is the reverse
_WHOLE = 1000
_WHOLE_BYTES = 1 << 16
_ENDS = 32

# How to get the size and the elements of a container, even of a subclass that overrides both.
_Readers = tuple[Callable[[Any], int], tuple[Callable[[Any], Iterable[Any]], ...]]
_READERS: dict[type, _Readers] = {
    list: (list.__len__, (list.__iter__,)),
    deque: (deque.__len__, (deque.__iter__,)),
    set: (set.__len__, (set.__iter__,)),
    OrderedDict: (dict.__len__, (OrderedDict.__iter__, OrderedDict.values)),
    dict: (dict.__len__, (dict.__iter__, dict.values)),
    np.ndarray: (attrgetter("size"), (attrgetter("flat"),)),  # of objects
}


class Contents:
    """The content of containers of the kinds in `MUTABLE`, of so many that a comparison has a bounded cost.

    One container may have `each` elements, and all together `total`; `each_bytes` and `total_bytes` are the
    limits for byte arrays and NumPy arrays. Containers over the limits are in `left`.
    """

    def __init__(
        self, containers: Iterable[Any], *, each: int, total: int, each_bytes: int, total_bytes: int
    ) -> None:
        self.left: list[Any] = []
        self._arrays: list[Any] = []
        groups: dict[tuple[type, bool], list[Any]] = {}
        for container in containers:
            kind, size = _kind(container), size_of(container)
            if kind is None and size <= min(each_bytes, total_bytes):
                total_bytes -= size + 64
                self._arrays.append(container)
            elif kind is not None and size <= min(each, total):
                total -= size + 4  # an empty container takes some time too
                is_exact = type(container) is kind is not np.ndarray
                groups.setdefault((kind, is_exact), []).append(container)
            else:
                self.left.append(container)
        self._groups = [
            (len if is_exact else _READERS[kind][0], _READERS[kind][1], is_exact, group)
            for (kind, is_exact), group in groups.items()
        ]
        self._seen = self._look()

    def same(self) -> bool:
        """Whether the containers have not changed."""
        try:
            now = self._look()
        except RuntimeError:  # another thread is changing one at this moment
            return False
        (sizes, arrays, elements), (sizes_before, arrays_before, before) = now, self._seen
        if sizes != sizes_before or arrays != arrays_before:
            return False
        if not all(map(is_, elements, before)):
            if not all(map(_alike, elements, before)):
                return False
            self._seen = now
        return True

    def _look(self) -> tuple[list[int], list[Any], list[Any]]:
        sizes: list[int] = []
        elements: list[Any] = []
        for length, (read, *more), is_exact, group in self._groups:
            sizes += map(length, group)
            # Containers of exactly this type are iterated directly, which takes half the time.
            elements += chain.from_iterable(group if is_exact else map(read, group))
            for read in more:
                elements += chain.from_iterable(map(read, group))
        return sizes, list(map(_bytes, self._arrays)), elements


class Attributes:
    """The content of modules and their containers, other containers, globals and closures, to be put back.

    The root may be another object with a ``__dict__``.
    It is put back into the same objects: a forward that sets itself up when it first runs may set a flag, and
    add a hook to the dict of hooks.
    """

    def __init__(
        self,
        modules: Iterable[Any],
        containers: Iterable[Any] = (),
        variables: Iterable[tuple[Mapping[str, Any], str]] = (),
        cells: Iterable[CellType] = (),
    ) -> None:
        self._fields = [(fields, dict(fields)) for fields in map(vars, modules)]
        self._contents = [
            (value, value.copy() if value else None)
            for _, fields in self._fields
            for value in fields.values()
            if type(value) in _COPIED
        ]
        own = {id(value) for value, _ in self._contents}
        self._contents += [(value, _copied(value)) for value in containers if id(value) not in own]
        self._variables: list[tuple[Any, str, Any]] = [
            (scope, name, scope.get(name, _MISSING)) for scope, name in variables if type(scope) is dict
        ]
        for cell in cells:
            with contextlib.suppress(ValueError):  # the cell is empty
                self._variables.append((cell, "cell_contents", cell.cell_contents))

    def restore(self) -> None:
        """Put back what has changed, in small steps, as other threads may use these objects."""
        self.restore_fields()
        for scope, name, value in self._variables:
            if isinstance(scope, CellType):
                setattr(scope, name, value)
            elif value is _MISSING:
                scope.pop(name, None)
            elif scope.get(name, _MISSING) is not value:
                scope[name] = value
        for container, content in self._contents:
            _restore(container, content)

    def restore_fields(self) -> None:
        """Put back the attributes of modules alone."""
        for fields, before in self._fields:
            _restore_fields(fields, before)


def size_of(container: Any) -> int:
    """How many elements a container has; how many bytes, if it is an array of numbers or bytes."""
    kind = _kind(container)
    if kind is None:
        return int(container.nbytes) if isinstance(container, np.ndarray) else memoryview(container).nbytes
    return _READERS[kind][0](container)


def content(container: Any) -> tuple[Any, ...]:
    """The content of a container; of a large one, its size and its first and last elements."""
    kind = _kind(container)
    if kind is None:
        return _bytes(container) if size_of(container) <= _WHOLE_BYTES else (size_of(container),)
    length, readers = _READERS[kind]
    parts = [read(container) for read in readers]
    if length(container) <= _WHOLE:
        return tuple(chain.from_iterable(parts))
    if kind in (list, dict, deque):
        parts.append(kind.__reversed__(container))
    return length(container), *chain.from_iterable(islice(part, _ENDS) for part in parts)


def alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether two contents are the same."""
    return len(left) == len(right) and all(map(_alike, left, right))


def _copied(container: Any) -> Any:
    """A copy of the content of a container, for `_restore`; None if it is empty."""
    kind = _kind(container)
    if size_of(container) == 0:
        return None
    if kind is None or kind is np.ndarray:
        return copy.copy(container)
    if kind is OrderedDict:
        return dict(list(OrderedDict.items(container)))
    return dict.copy(container) if kind is dict else [*_READERS[kind][1][0](container)]


def _restore(container: Any, before: Any) -> None:
    """Put back the content of a container if it has changed, in small steps as other threads may use it."""
    if isinstance(container, dict):
        _restore_fields(container, before or {})
        if list(container) != list(before or ()):
            for name in before:
                container[name] = container.pop(name)  # to the end
    elif isinstance(container, np.ndarray):
        if before is not None and _bytes(container) != _bytes(before):
            container[...] = before
    elif len(container) != len(before or ()) or not all(map(is_, container, before or ())):
        if isinstance(container, (set, deque)):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(before or ())
        else:
            container[:] = before or ()


def _restore_fields(fields: Any, before: Mapping[Any, Any]) -> None:
    """Give names their former values."""
    for name in list(fields.keys() - before.keys()):
        fields.pop(name, None)
    for name, value in before.items():
        if fields.get(name, _MISSING) is not value:
            fields[name] = value


def _kind(container: Any) -> type | None:
    """The kind of a container of objects; None if it is an array of numbers or bytes."""
    kind = type(container)
    if kind not in _READERS:
        kind = next((base for base in _READERS if issubclass(kind, base)), bytearray)
    if kind is bytearray or (kind is np.ndarray and not container.dtype.hasobject):
        return None
    return kind


def _bytes(numbers: Any) -> tuple[Any, ...]:
    if isinstance(numbers, np.ndarray):
        return numbers.tobytes(), numbers.dtype, *numbers.shape
    return (bytes(numbers),)


def _alike(left: Any, right: Any) -> bool:
    """Whether two elements are the same object, or the same plain value."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    return left == right if kind in _EXACT else kind in _PRINTED and repr(left) == repr(right)
