"""Finds classes by name without running any code.

Nothing is imported, and no ``__getattr__``, descriptor or ``__class__`` is asked: a class must be in the
dictionary of a module that is imported already, or of a class in one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from torchcache2.core.private import pytree
from torchcache2.core.values import fields_of, is_namedtuple, is_node, is_record, one_of
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.files.jsonparts import list_of

MAX_NAME = 1_000
BUILTINS = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)


def name_of(cls: Any, where: str) -> str:
    """What a class is called in a file."""
    name = qualified(cls, ":")
    if name.startswith("__mp_main__:"):  # in a spawned process, this is the script of the parent
        name = "__main__:" + name.partition(":")[2]
    try:
        class_of(name, lambda found: found is cls)
    except (DamagedError, UnknownClassError):
        raise UnserialisableError(f"{where} needs {name}, which is not found by that name") from None
    if not is_storable(cls):
        raise UnserialisableError(f"{where} needs {name}, which is not a node type of pytrees")
    return name


def class_of(name: Any, accepted: Callable[[Any], bool]) -> Any:
    """The class of that name, if this process has it and it is accepted."""
    if type(name) is not str or len(name) > MAX_NAME or not name.isprintable():
        raise DamagedError("a class that is not a name")
    module, _, qualname = name.partition(":")
    if not module or not all(qualname.split(".")):
        raise DamagedError("a class that is not a name")
    value: Any = sys.modules.get(module)
    if module.startswith("torchcache2."):  # our own names stay when the code moves
        for cls in list(pytree.SUPPORTED_NODES):
            if qualified(cls, ":") == name and accepted(cls):
                return cls
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


def is_storable(cls: Any) -> bool:
    """Whether a class may be named in a file."""
    return one_of(cls, BUILTINS) or is_node(cls) or is_namedtuple(cls)


def check_fields(cls: Any, name: str, fields: Any, children: int) -> None:
    """Raise if a class has other fields than when it was written."""
    if fields is not None and not all(type(field) is str for field in list_of(fields)):
        raise DamagedError("fields that are not names")
    known = fields_of(cls)
    if known != fields:
        raise UnknownClassError(name, "has other fields than when its schema was written")
    if known is not None and (issubclass(cls, tuple) or is_record(cls)) and len(known) != children:
        raise DamagedError("another number of children than of fields")


def qualified(cls: Any, separator: str = ".") -> str:
    """Module and name of a class, for people or for a file."""
    return (
        f"{getattr(cls, '__module__', '')}{separator}{getattr(cls, '__qualname__', type(cls).__qualname__)}"
    )
