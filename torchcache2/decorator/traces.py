"""`Inputs` notices whether a forward has changed its arguments.

A forward may fill the dict that it gets and return it. That is allowed: `filling` gives it a copy, the added
entries are its output, and `given_back` puts them into the caller's dict.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from torchcache2.core.keys import Bytes2D
from torchcache2.core.private import has_version, version
from torchcache2.identity.arguments import BoundCall, argument_leaves

_FILLED = ("filled by the forward",)  # the only key of such an output: the added entries


def filling(
    forward: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Wrap a forward: if it fills its only dict and returns that, the output is just the added entries."""

    def filled(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = _only_dict(args, kwargs)
        if given is None:
            return forward(args, kwargs)
        copied = copy.copy(given)
        own: dict[int, Any] = {id(given): copied}
        output: Any = None
        args = tuple([own.get(id(value), value) for value in args])
        try:
            output = forward(args, {name: own.get(id(v), v) for name, v in kwargs.items()})
        finally:
            added = {
                name: value for name, value in copied.items() if name not in given or given[name] is not value
            }
            is_plain = not any(value is copied for value in added.values())
            is_filled = is_plain and output is copied and added and list(copied)[: len(given)] == list(given)
            if not is_filled and (added or list(copied) != list(given)):
                given.clear()  # so that the change of this argument is noticed
                given.update({name: given if one is copied else one for name, one in copied.items()})
        return {_FILLED: added} if is_filled else given if output is copied else output

    return filled


def given_back(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The output for the caller: the caller's dict, with the entries added to its copy."""
    if type(output) is not dict or output.keys() != {_FILLED}:
        return output
    given = _only_dict(args, kwargs)
    given.update(output[_FILLED])
    return given


def _only_dict(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    found = {id(v): v for v in (*args, *kwargs.values()) if type(v) is dict or isinstance(v, UserDict)}
    return next(iter(found.values())) if len(found) == 1 else None


class Inputs:
    """The arguments for some items of a call, and their state before the forward runs.

    ``bind(args, kwargs)`` names arguments, like `Signature.bind`, and ``keys_of(call)`` returns the keys of
    its items, uint8 of shape ``(k, 16)``.
    """

    def __init__(
        self,
        call: BoundCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        positions: Tensor,
        bind: Callable[[tuple[Any, ...], Mapping[str, Any]], BoundCall],
        keys_of: Callable[[BoundCall], Bytes2D],
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._call, self._positions = call, positions
        self._bind, self._keys_of = bind, keys_of
        self._leaves = argument_leaves(args, kwargs)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._before = self._versions()
        self._content = self._uncounted()

    def changed(self) -> bool:
        """Whether the forward has changed an argument in place."""
        try:
            leaves = argument_leaves(self.args, self.kwargs)
        except RecursionError:  # an argument now contains itself
            return True
        return (
            self._versions() != self._before
            or not (len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)))
            or not np.array_equal(self._uncounted(), self._content)  # type: ignore[arg-type]
            or not self._has_same_context()
        )

    def _versions(self) -> list[int]:
        """The version counters of tensors; inference tensors have none."""
        return [version(tensor) for tensor in self.tensors if has_version(tensor)]

    def _uncounted(self) -> Bytes2D | None:
        """The keys of the items, to detect changes of inference tensors; None if there are none."""
        if all(map(has_version, self.tensors)):
            return None
        return self._keys_of(self._bind(self.args, self.kwargs))

    def _has_same_context(self) -> bool:
        """Whether arguments other than tensors are unchanged."""
        if not self._call.can_change:
            return True
        try:
            return not self._call.is_changed(self._bind(self.args, self.kwargs), self._positions)
        except Exception:  # a changed argument cannot be put in a key
            return False
