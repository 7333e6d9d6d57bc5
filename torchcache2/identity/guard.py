"""`Guard` notices changes of code, modules and containers since a walk; `Undo` reverts them.

Attributes, submodules, hooks, globals and closures are compared by identity, in flat lists that C functions
iterate over. So are the elements of containers, except plain values (by type and value) and nested containers
(by their own elements). Small containers are compared at every call, larger ones around a forward; of these,
every call compares the sizes, and the ends of arrays.
"""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from gc import get_referents
from itertools import accumulate, chain, islice
from operator import attrgetter, contains, getitem, is_
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128_digest

from torchcache2.core.memory import as_bytes
from torchcache2.core.private import BUFFERS, GLOBAL_HOOKS, HOOKS, MODULES, PARAMETERS, PRE_HOOKS
from torchcache2.identity.marks import is_method

MUTABLE = (list, dict, set, deque, bytearray, array, np.ndarray)

_DICTS = (PARAMETERS, BUFFERS, MODULES, PRE_HOOKS, HOOKS)  # of every module
# Most bytes to compare: of one container and of all at every call, and of all around a forward.
_SMALL, _ALL_SMALL, _LARGE = 13_600, 400_000, 1_050_000
_ELEMENT, _EMPTY = 200, 800  # comparing an element, or a container, takes as long as so many bytes
_MOST_LARGE, _MOST_SIZED = 400, 100
_MOST_COPIED = 1_000_000  # elements
_ENDS = 32  # elements at each end of a container that is too large to be compared whole

_MAPPINGS = (dict, OrderedDict, defaultdict)
_DIRECT = (*_MAPPINGS, list, set, deque)  # iterated directly, which takes half the time
_EXACT = (type(None), bool, int, str, bytes)
_PRINTED = (float, complex)  # compared as text: 0.0 equals -0.0, but differs; nan does not equal itself
_KINDS = (OrderedDict, dict, list, set, deque)
_MISSING = object()

_values: Callable[[Any], Iterable[Any]] = dict.values
_content_of: Callable[[CellType], Any] = attrgetter("cell_contents")


class Guard:
    """Compares everything that a walk has read: code, attributes, modules and containers.

    The caller passes the root module each time: a reference to its attributes, one of which is the cache,
    would be a cycle.
    """

    def __init__(self, walk: Any, root: Any) -> None:
        self.modules: list[nn.Module] = []
        self.is_opaque = bool(walk.opaque)
        # Names in dicts: what is compared by identity, what must stay away, and modules' dicts of parameters,
        # buffers, submodules or hooks, empty ones and filled ones.
        self._there, self._away, self._empty, self._filled = (_Places([], []) for _ in range(4))
        self._held = [*GLOBAL_HOOKS]
        self._dicts = [*{id(one): one for one in walk.dicts}.values()]  # several modules may share an object
        self._left_out: list[tuple[dict[str, Any], set[str]]] = []
        self._root_names: list[str] = []
        self._root_methods: list[str] = []  # cached ones; not kept, as they refer to the cache
        self._root_left_out: set[str] = set()
        for module, names, left_out in walk.modules:
            fields = vars(module)
            if module is root:
                dicts = [name for name in _DICTS if name in fields]
                self._root_names = [*names, *dicts, *(["training"] if "training" in fields else [])]
                self._held += [fields[name] for name in dicts if isinstance(fields[name], dict)]
                self._root_methods = [name for name, value in fields.items() if is_method(value)]
                self._root_left_out = left_out
            else:
                self._add(module, fields, names, left_out)
        # Reversed, so that what the walk has read first of a name is compared with what is there now.
        known = {(id(scope), name): (scope, name, value) for scope, name, value in reversed(walk.scopes)}
        scopes = [(scope, name) for scope, name, _ in known.values()]
        for scope, name in scopes:
            (self._there if name in scope else self._away).add(scope, name)
        self._cells = [cell for cell, _ in walk.cells]
        self._reads = [*{(read, id(value)): (read, value) for read, value in walk.reads}.values()]
        read = [*walk.containers.values()]
        # State that a forward may change, for `Undo`.
        self.containers = [container for container, _, _ in read] + [one for _, one in walk.written]
        self.scopes = scopes + walk.written_scopes
        self.cells = self._cells + walk.written_cells
        self._before = read
        self._watch_containers([container for container, _, _ in read])
        # `get_referents` is five times faster for dicts, but may leave out values of some.
        self._are_visited = all(len(get_referents(one)) >= len(one) for one in self._filled_dicts())
        self._sizes, seen = self._look(root)
        self._seen = [*seen]
        self._identities = _identities(self._seen, len(self._seen))
        # If something changed during the walk, the walk's parts do not describe the watched state.
        self._is_stale = not (
            all(scope.get(name) is value for scope, name, value in known.values())
            and all(cell.cell_contents is value for cell, value in walk.cells)
            and all(_has(container, before) for container, before, _ in read)
        )

    def _add(self, module: nn.Module, fields: dict[str, Any], names: list[str], left_out: set[str]) -> None:
        self.modules.append(module)
        names = [*names, *(["training"] if "training" in fields else [])]
        # Some wrappers, such as those of `torch.compile`, lack some dicts.
        for name in _DICTS:
            if isinstance(fields.get(name), dict):
                (self._filled if fields[name] else self._empty).add(fields, name)
            elif name in fields:
                names.append(name)
        for name in names:
            self._there.add(fields, name)
        if left_out:
            self._left_out.append((fields, left_out))
        else:
            self._dicts.append(fields)

    def _watch_containers(self, containers: list[Any]) -> None:
        ordered = sorted(containers, key=_cost)
        totals = accumulate(map(_cost, ordered))
        small = [
            one
            for one, total in zip(ordered, totals, strict=True)
            if total <= _ALL_SMALL and _cost(one) <= _SMALL
        ]
        self._direct = [one for one in small if type(one) in _DIRECT]
        self._mappings = [one for one in self._direct if type(one) in _MAPPINGS]
        self._others = [(one, content(one)) for one in small if type(one) not in _DIRECT]
        self._elements = self._small()
        left = ordered[len(small) :][:_MOST_LARGE]
        most = [_LARGE if total <= _LARGE else 0 for total in accumulate(map(_cost, left))]
        self._large = [(one, size, content(one, size)) for one, size in zip(left, most, strict=True)]
        self.has_large = len(left) > 0
        largest = ordered[len(small) :][-_MOST_SIZED:]
        self._arrays = [one for one in largest if isinstance(one, np.ndarray)]
        self._plain = [one for one in largest if type(one) in _DIRECT]
        self._sized = [one for one in largest if type(one) not in _DIRECT]
        self._outline = self._outlined()

    def same(self, root: Any) -> bool:
        """Whether nothing has changed among the things that every call compares."""
        if self._is_stale:
            return False
        try:
            if any(self._empty.values()) or any(map(contains, *self._away)):
                return False
            sizes, now = self._look(root)
            if sizes != self._sizes or _identities(now, len(self._seen)) != self._identities:
                return False
            if self._outlined() != self._outline:
                return False
            elements = self._small()
        except Exception:  # an attribute is gone or has another type, or another thread is changing it
            return False
        if not all(map(is_, elements, self._elements)):  # sizes were compared first
            if not alike(elements, self._elements):
                return False
            self._elements = elements
        return all(_has(one, before) for one, before in self._others)

    def contents_same(self) -> bool:
        """Whether the compared parts of larger containers are unchanged."""
        return all(_has(one, before, size) for one, size, before in self._large)

    def changed_containers(self) -> dict[str, str]:
        """How containers have changed, by path."""
        found = {}
        for container, before, path in self._before:
            now = _now(container)
            if not alike(now, before):
                is_longer = isinstance(container, (list, deque)) and len(now) > len(before)
                is_appended = is_longer and alike(now[: len(before)], before)
                found[path] = "was appended to" if is_appended else "was edited"
        return found

    def _look(self, root: Any) -> tuple[list[int], Iterable[Any]]:
        """The sizes of dicts, and all objects compared by identity, in a fixed order."""
        filled = self._filled_dicts()
        sizes = [*map(len, filled), *map(len, self._dicts)]
        sizes += [len(fields) - len(left_out & fields.keys()) for fields, left_out in self._left_out]
        held = get_referents(*filled) if self._are_visited else chain.from_iterable(map(_values, filled))
        cells, reads = map(_content_of, self._cells), (read(value) for read, value in self._reads)
        found = [cells, *reads, map(type, self.modules), self._there.values(), held]
        if root is not None:
            fields = vars(root)
            sizes.append(len(fields) - len(self._root_left_out & fields.keys()))
            own = [type(fields.get(name)) for name in self._root_methods]
            found.append([type(root), *map(fields.__getitem__, self._root_names), *own])
        return sizes, chain.from_iterable(found)

    def _filled_dicts(self) -> list[Any]:
        return [*self._held, *self._filled.values()]

    def _outlined(self) -> list[Any]:
        """The sizes of larger containers, and the bytes at both ends of larger arrays."""
        return [*map(len, self._plain), *map(size_of, self._sized), *map(_ends, self._arrays)]

    def _small(self) -> list[Any]:
        return [
            *map(len, self._direct),
            *chain.from_iterable(self._direct),
            *chain.from_iterable(map(_values, self._mappings)),
        ]


class _Places(NamedTuple):
    """Names, each in a dict."""

    owners: list[Mapping[str, Any]]
    names: list[str]

    def add(self, owner: Mapping[str, Any], name: str) -> None:
        self.owners.append(owner)
        self.names.append(name)

    def values(self) -> Iterator[Any]:
        return map(getitem, self.owners, self.names)


class Undo:
    """Remembers attributes of `owners`, what a `Guard` watches, small tensors and grad mode, to restore them.

    A forward that runs for a part of a batch may change state that its call must find, or leave, unchanged.
    """

    def __init__(self, guard: Guard | None, owners: Iterable[Any], tensors: Iterable[Tensor] = ()) -> None:
        self._grad = torch.is_grad_enabled()
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors]
        fields = list(map(vars, owners))
        fields += [own[name] for own in fields for name in _DICTS if type(own.get(name)) in _MAPPINGS]
        self._fields = [(own, dict(own)) for own in fields]
        self._contents: list[tuple[Any, Any]] = []
        self._variables: list[tuple[Any, str, Any]] = []
        if guard is not None:
            sizes = accumulate(map(size_of, guard.containers))
            few = [one for one, size in zip(guard.containers, sizes, strict=True) if size <= _MOST_COPIED]
            self._contents = [(one, _copied(one)) for one in few]
            for scope, name in guard.scopes:
                if type(scope) is dict:
                    self._variables.append((scope, name, scope.get(name, _MISSING)))
            for cell in guard.cells:
                with contextlib.suppress(ValueError):  # empty cell
                    self._variables.append((cell, "cell_contents", cell.cell_contents))

    def __call__(self, *, all_of_it: bool = True) -> None:
        """Restore everything, in small steps, as other threads may use these objects.

        Without `all_of_it`, restore only the attributes of objects and this thread's grad mode.
        """
        for fields, before in self._fields:
            _restore_fields(fields, before)
        torch.set_grad_enabled(self._grad)
        if not all_of_it:
            return
        for tensor, data in self._tensors:
            if not _is_same(tensor, data):
                with torch.inference_mode():  # buffers made in this mode can only be written in it
                    tensor.copy_(data)
        for scope, name, value in self._variables:
            if isinstance(scope, CellType):
                setattr(scope, name, value)
            elif value is _MISSING:
                scope.pop(name, None)
            elif scope.get(name, _MISSING) is not value:
                scope[name] = value
        for container, before in self._contents:
            _restore(container, before)


def _identities(objects: Iterable[Any], count: int) -> bytes:
    """The addresses of `count` objects, which identify them as long as they are alive."""
    return np.fromiter(objects, object, count).tobytes()


def size_of(container: Any) -> int:
    """How many elements a container has; for an array of numbers or bytes, how many bytes."""
    kind = _kind(container)
    if isinstance(container, np.ndarray):
        return int(container.nbytes if kind is None else container.size)
    return memoryview(container).nbytes if kind is None else int(kind.__len__(container))


def _ends(array: Any) -> bytes:
    """The first and the last numbers of an array. No view is kept: the array may be resized."""
    numbers = np.asarray(array)
    if numbers.dtype.hasobject or not numbers.size or not numbers.ndim:
        return b""
    first, last = (numbers[(place,) * (numbers.ndim - 1)] for place in (0, -1))
    found: bytes = first[:_ENDS].tobytes() + last[-_ENDS:].tobytes()
    return found


def content(container: Any, most: int = _LARGE) -> tuple[Any, ...]:
    """The content of a container; if it costs more than `most`, only its size and ends."""
    kind, is_whole = _kind(container), _cost(container) <= most
    if kind is None:
        return _bytes(container) if is_whole else (size_of(container),)
    parts = _elements(container, kind)
    if is_whole:
        return tuple(chain.from_iterable(parts))
    if hasattr(kind, "__reversed__"):
        parts.append(kind.__reversed__(container))
    return size_of(container), *chain.from_iterable(islice(part, _ENDS) for part in parts)


def _kind(container: Any) -> Any:
    """The class of a container of objects; None if it is an array of numbers or bytes."""
    if type(container) in _KINDS:  # the usual case
        return type(container)
    if isinstance(container, np.ndarray):
        return np.ndarray if container.dtype.hasobject else None
    return next((kind for kind in _KINDS if issubclass(type(container), kind)), None)


def _elements(container: Any, kind: Any) -> list[Iterable[Any]]:
    """The elements, or keys and values, even of a subclass with its own iteration."""
    if kind is np.ndarray:
        return [container.flat]
    return [kind.__iter__(container), *([kind.values(container)] if issubclass(kind, dict) else [])]


def _cost(container: Any) -> int:
    return _EMPTY + size_of(container) * (1 if _kind(container) is None else _ELEMENT)


def _bytes(numbers: Any) -> tuple[Any, ...]:
    if isinstance(numbers, np.ndarray):
        return xxh3_128_digest(numbers.tobytes()), numbers.dtype, *numbers.shape
    return (xxh3_128_digest(numbers),)


def _now(container: Any, most: int = _LARGE) -> tuple[Any, ...]:
    try:
        return content(container, most)
    except RuntimeError:  # another thread is changing it
        return (_MISSING,)


def _has(container: Any, before: tuple[Any, ...], most: int = _LARGE) -> bool:
    """Whether a container still has its earlier content."""
    return alike(_now(container, most), before)


def alike(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two contents are the same."""
    return len(left) == len(right) and all(map(_is_like, left, right))


def _is_like(left: Any, right: Any) -> bool:
    """Whether two elements are the same object, or the same plain value."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    return left == right if kind in _EXACT else kind in _PRINTED and repr(left) == repr(right)


def _copied(container: Any) -> Any:
    """A copy of the content of a container, for `_restore`; None if it is empty."""
    kind = _kind(container)
    if size_of(container) == 0:
        return None
    if kind is None or kind is np.ndarray:
        return copy.copy(container)
    parts = _elements(container, kind)
    return dict(zip(*parts, strict=True)) if issubclass(kind, dict) else [*parts[0]]


def _restore(container: Any, before: Any) -> None:
    """Restore the content of a container if it has changed, bypassing a subclass's own methods."""
    kind = _kind(container)
    if type(container) in _KINDS and not container and not before:
        return
    if isinstance(container, np.ndarray):
        if before is not None and _bytes(container) != _bytes(before):
            container[...] = before
    elif kind is None:
        container[:] = container[:0] if before is None else before
    elif issubclass(kind, dict):
        _restore_fields(container, before or {})
        if [*kind.__iter__(container)] != [*(before or ())]:
            for name in before:
                kind.__setitem__(container, name, kind.pop(container, name))  # to the end
    else:
        now, before = [*kind.__iter__(container)], before or []
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        if kind is list:
            list.__setitem__(container, slice(None), before)
        else:
            kind.clear(container)
            (kind.update if kind is set else kind.extend)(container, before)


def _restore_fields(fields: Any, before: dict[Any, Any]) -> None:
    """Give names their former values."""
    kind = _kind(fields)
    now = fields if kind is type(fields) else dict(zip(*_elements(fields, kind), strict=True))
    for name in now.keys() - before.keys():
        kind.pop(fields, name, None)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            kind.__setitem__(fields, name, value)


def _is_same(tensor: Tensor, before: Tensor) -> bool:
    try:
        return torch.equal(as_bytes(tensor[None]), as_bytes(before[None]))
    except (NotImplementedError, RuntimeError):  # the tensor is sparse, or has no data
        return True
