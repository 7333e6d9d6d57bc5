"""`Watch`: notices at every call whether code, attributes or modules have changed since they were read.

Attributes, submodules, hooks, globals and closures are compared by identity, and so are the elements of small
lists, dicts and other containers. Larger containers are compared only before and after a forward.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate, chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
from torch import nn

from torchcache2.core.private import BUFFERS, GLOBAL_HOOKS, HOOKS, MODULES, PARAMETERS, PRE_HOOKS
from torchcache2.identity.containers import Attributes, Contents, alike, content, size_of
from torchcache2.identity.marks import is_method
from torchcache2.identity.walk import Walk

__all__ = ["Watch"]

_ALWAYS = (
    "training",
    *(PARAMETERS, BUFFERS, MODULES, PRE_HOOKS, HOOKS),
)
# Containers up to the first limits are compared at every call, up to the second around a forward.
_SMALL = {"each": 64, "total": 2000, "each_bytes": 1024, "total_bytes": 16_384}
_LARGE = {"each": 5000, "total": 5000, "each_bytes": 1 << 20, "total_bytes": 1 << 20}
_MOST_LARGEST = 64
_MOST_COPIED = 1_000_000

_NUMBERS = (bytearray, array, np.ndarray)  # their content is not kept, as it may be large

_Fields = Callable[[dict[str, Any]], tuple[Any, ...]]

_values: Callable[[Any], Iterable[Any]] = dict.values


class Watch:
    """What a walk has seen of code, attributes and modules.

    The caller passes the root module each time. A reference to its attributes would make a cycle, as the
    cache is one of them.
    """

    def __init__(self, walk: Walk, root: Any) -> None:
        self._root: _Fields = _no_fields
        self._root_left_out: set[str] = set()
        self._root_methods: list[str] = []  # that are cached; they refer to the cache, so they are not kept
        self._fields: list[tuple[_Fields, dict[str, Any]]] = []
        self._left_out: list[tuple[dict[str, Any], set[str]]] = []
        self.modules: list[nn.Module] = []
        dicts: list[Collection[Any]] = list(GLOBAL_HOOKS)
        contents: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        for module, names, left_out in walk.modules:
            fields = vars(module)
            found = [fields.get(name) for name in _ALWAYS[1:]]  # in scripted modules these are no dicts
            contents += [content for content in found if isinstance(content, dict)]
            # Some wrappers of modules, such as those of `torch.compile`, lack some of these.
            watched = [*[name for name in _ALWAYS if name in fields], *names]
            # There are two names at least, so that `itemgetter` always returns a tuple.
            getter = itemgetter(*watched, watched[0]) if watched else _no_fields
            if module is root:
                self._root, self._root_left_out = getter, left_out
                self._root_methods = [name for name, value in fields.items() if is_method(value)]
                continue
            self.modules.append(module)
            self._fields.append((getter, fields))
            if left_out:
                self._left_out.append((fields, left_out))
            else:
                dicts.append(fields)
        self._dicts = [*dicts, *contents, *walk.dicts]
        self._filled = [content for content in contents if content]
        self._scopes = [(scope, name) for scope, name, _ in walk.scopes]
        self._cells = [cell for cell, _ in walk.cells]
        self._written = [container for _, container in walk.written]
        self._written_variables = walk.written_scopes, walk.written_cells
        self._reads = walk.reads
        read = walk.containers.values()
        self._containers = [container for container, _, _ in read]
        self._before = [one for one in read if not isinstance(one[0], _NUMBERS)]
        self._small = Contents(self._containers, **_SMALL)
        self.is_opaque, self.has_large = bool(walk.opaque), bool(self._small.left)
        self._large = Contents(self._small.left, **_LARGE)
        self._largest = [(container, content(container)) for container in self._large.left[:_MOST_LARGEST]]
        self._sizes = self._measure(root)
        self._seen = self._look(root)
        # If something has changed during the walk, its parts are not those of the state that is watched now.
        known = [value for _, _, value in walk.scopes] + [value for _, value in walk.cells]
        self._is_stale = not all(map(is_, self._seen, known))
        self._is_stale |= not all(alike(content(container), before) for container, before, _ in read)

    def same(self, root: Any) -> bool:
        """Whether nothing has changed, as far as it is compared at every call."""
        if self._is_stale or self._measure(root) != self._sizes:
            return False
        try:
            now = self._look(root)
        except (AttributeError, KeyError, ValueError):  # an attribute or the content of a cell was deleted
            return False
        return all(map(is_, now, self._seen)) and self._small.same()

    def contents_same(self) -> bool:
        """Whether larger containers have not changed, as far as they are compared."""
        return self._large.same() and all(alike(content(one), before) for one, before in self._largest)

    def changed_containers(self) -> dict[str, str]:
        """What has happened to the containers that have changed, by the path on which each was met."""
        found = {}
        for container, before, path in self._before:
            try:
                now = content(container)
            except RuntimeError:  # another thread is changing it at this moment
                now = ()
            if not alike(now, before):
                is_longer = isinstance(container, (list, deque)) and len(now) > len(before)
                is_appended = is_longer and alike(now[: len(before)], before)
                found[path] = "was appended to" if is_appended else "was edited"
        return found

    def attributes(self, root: Any) -> Attributes:
        """The content of modules, containers and variables as it is now, to be put back later."""
        modules = [*self.modules, *([root] if root is not None else [])]
        found = [*self._containers, *self._written]
        containers = [
            one
            for one, size in zip(found, accumulate(map(size_of, found)), strict=True)
            if size <= _MOST_COPIED
        ]
        scopes, cells = self._written_variables
        return Attributes(modules, containers, self._scopes + scopes, self._cells + cells)

    def _measure(self, root: Any) -> list[int]:
        """The numbers of attributes, parameters, submodules and hooks, which change when one is added."""
        sizes = list(map(len, self._dicts))
        for fields, left_out in self._left_out:
            sizes.append(len(fields) - len(left_out & fields.keys()))
        if root is not None:
            fields = vars(root)
            sizes.append(len(fields) - len(self._root_left_out & fields.keys()))
        return sizes

    def _look(self, root: Any) -> list[Any]:
        now = [scope.get(name) for scope, name in self._scopes]
        now += [cell.cell_contents for cell in self._cells]
        if root is not None:
            fields = vars(root)
            now.append(type(root))
            now += self._root(fields)
            now += [type(fields.get(name)) for name in self._root_methods]
        now += map(type, self.modules)
        now += chain.from_iterable([read(value) for read, value in self._reads])
        now += chain.from_iterable([getter(fields) for getter, fields in self._fields])
        now += chain.from_iterable(map(_values, self._filled))
        return now


def _no_fields(fields: dict[str, Any]) -> tuple[Any, ...]:
    return ()
