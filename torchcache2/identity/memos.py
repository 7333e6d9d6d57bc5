"""What `functools.lru_cache` keeps for a function: a model that it has loaded, or a memo of its results.

A model counts, as does what a function returns that has no arguments, such as a table that it reads from a
file. All else is a memo: it follows from the function's code and its arguments, and may grow at each call.
"""

from __future__ import annotations

import enum
import functools
import pathlib
from collections.abc import Callable
from gc import get_referents
from typing import Any, NamedTuple

import torch
from torch import nn

from torchcache2.identity.encoding import Encoder, digest
from torchcache2.identity.names import is_plain

MEMO = type(functools.lru_cache(print))
_CONSTANTS = (type, enum.Enum, torch.device, torch.dtype, pathlib.PurePath)
_MOST = 128  # results of a function: more are a memo


class Result(NamedTuple):
    """A result that a function keeps, and whether it counts; `call` is the text of its arguments."""

    value: Any
    call: str
    counts: bool


def kept_by(memo: Any) -> dict[Any, Any] | None:
    """The dict in which a function behind `lru_cache` keeps results; None if it cannot be found."""
    return next((one for one in get_referents(memo) if type(one) is dict and one is not vars(memo)), None)


def results_of(memo: Any, kept: dict[Any, Any], label_of: Callable[[Any], str | None]) -> list[Result]:
    """The results for arguments that are values, or objects with a label: others are not of this walk."""
    if len(kept) > _MOST:
        return [Result(None, "", False)]
    found = list(kept.items())
    if found and type(found[0][1]).__name__ == "_lru_list_elem":  # it has no referents, but the memo has
        keys, each = set(map(id, kept)), iter(get_referents(memo))
        found = [(key, next(each, None)) for key in each if id(key) in keys]
    results = []
    for key, value in found:
        # A bare object is the mark before arguments by name.
        arguments = [one for one in (key if type(key) is tuple else (key,)) if type(one) is not object]
        texts = list(map(_text, arguments))
        labels = [text or label_of(one) for text, one in zip(texts, arguments, strict=True)]
        if None not in labels:
            is_constant = not any(texts) and not is_plain(value) and not isinstance(value, _CONSTANTS)
            results.append(Result(value, ", ".join(map(str, labels)), is_constant or _holds_module(value)))
    return sorted(results, key=lambda one: one.call)


def referents(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What some objects hold, to be compared by identity; sorted, as calls change the order in a memo."""
    return tuple(sorted(get_referents(*values), key=id))


def _text(argument: Any) -> str:
    """A text for an argument that counts by its value; empty for others."""
    if is_plain(argument):
        return repr(argument)
    try:
        return digest([Encoder().encode(argument, "")]).hex()
    except Exception:  # not only `UnencodableError`: fields of a dataclass may raise anything
        return ""


def _holds_module(value: Any, depth: int = 3) -> bool:
    if issubclass(type(value), nn.Module) or depth == 0:
        return depth > 0
    return any(_holds_module(one, depth - 1) for one in get_referents(value) if not isinstance(one, type))
