"""Types as they stand in annotations: ``int | None``, ``list[int]``, type variables.

These are objects whose classes differ between versions of Python.
"""

from __future__ import annotations

import types
import typing
from typing import Any

__all__ = ["parts_of_type"]

_UNIONS = (typing.Union, types.UnionType)
_FORMS = (type(typing.ClassVar), type(typing.List))  # noqa: UP006  such as Final, or List by itself
_NAMED = tuple(
    getattr(typing, name)
    for name in ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAliasType")
    if hasattr(typing, name)
)
_FIELDS = ("__name__", "__bound__", "__constraints__", "__covariant__", "__contravariant__", "__value__")


def parts_of_type(value: Any) -> list[Any] | None:
    """The parts of such a type, which are the same in every process; None for any other value."""
    if value is typing.Any:  # a class in some versions of Python
        return ["Any"]
    if isinstance(value, _NAMED):
        return [type(value).__name__, *[getattr(value, field, None) for field in _FIELDS]]
    if isinstance(value, typing.ForwardRef):
        return ["ForwardRef", value.__forward_arg__]
    if isinstance(value, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return [type(value).__name__, value.__origin__]
    origin = typing.get_origin(value)
    if origin is None:
        return [str(value)] if isinstance(value, _FORMS) else None
    return ["Union" if origin in _UNIONS else origin, list(typing.get_args(value))]
