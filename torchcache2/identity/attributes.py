"""`Attributes`: what modules and containers hold, to be put back."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from types import CellType
from typing import Any

from torch import nn

from torchcache2.identity.containers import copied, restore, restore_fields

__all__ = ["Attributes"]

_MISSING = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class Attributes:
    """What some modules, containers and variables hold, to be put back.

    A forward that sets itself up when it first runs does so on the same objects: a flag, and a hook in the
    dict of hooks.

    Parameters
    ----------
    modules : iterable of nn.Module
        Their attributes, and what their dicts, lists and sets hold.
    containers : iterable
        Other containers.
    variables : iterable of (mapping, name)
        Globals and attributes of objects.
    cells : iterable of cell
        Variables of functions around.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        containers: Iterable[Any] = (),
        variables: Iterable[tuple[Mapping[str, Any], str]] = (),
        cells: Iterable[CellType] = (),
    ) -> None:
        self._fields = [(fields, dict(fields)) for fields in map(vars, modules)]
        self._contents = [
            (value, value.copy() if value else None)
            for _, fields in self._fields
            for value in fields.values()
            if type(value) in _CONTAINERS
        ]
        own = {id(value) for value, _ in self._contents}
        self._contents += [(value, copied(value)) for value in containers if id(value) not in own]
        self._variables: list[tuple[Any, str, Any]] = [
            (scope, name, scope.get(name, _MISSING)) for scope, name in variables if type(scope) is dict
        ]
        for cell in cells:
            with contextlib.suppress(ValueError):  # one that is empty
                self._variables.append((cell, "cell_contents", cell.cell_contents))

    def restore(self) -> None:
        """Put back what is another; one step at a time, as other threads use these objects."""
        self.restore_fields()
        for scope, name, value in self._variables:
            if isinstance(scope, CellType):
                setattr(scope, name, value)
            elif value is _MISSING:
                scope.pop(name, None)
            elif scope.get(name, _MISSING) is not value:
                scope[name] = value
        for container, content in self._contents:
            restore(container, content)

    def restore_fields(self) -> None:
        """Put back the attributes of modules alone."""
        for fields, before in self._fields:
            restore_fields(fields, before)
