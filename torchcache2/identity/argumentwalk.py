"""`ArgumentEncoder`: collects what is batched among the arguments of a call, and writes down the rest."""

from __future__ import annotations

import contextlib
import types
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import InputError, UnhashableArgumentError, hint
from torchcache2.core.memory import is_channels_last
from torchcache2.core.values import has_attributes, opened_or_none
from torchcache2.identity.argumentobjects import ObjectKeepers, ObjectSeen
from torchcache2.identity.encoding import Encoder, UnencodableError, sized
from torchcache2.identity.entries import (
    Digests,
    ValueEncoder,
    entry_digests,
    is_plain_sequence,
    is_sequence,
    mapping_state,
)
from torchcache2.identity.marks import cache_options
from torchcache2.identity.walk import has_plain_state

__all__ = ["ArgumentEncoder", "UncachedArgumentError", "batch_size_of"]


class UncachedArgumentError(Exception):
    """An argument with which a call is passed to the plain forward; the text says where it is, and what."""


class ArgumentEncoder(ValueEncoder):
    """Collects what is batched, or may be, and encodes the rest.

    `elsewhere` says where objects that cannot be read belong, and `keepers` read the others. With
    `takes_arrays`, arrays are batched as tensors are.
    """

    def __init__(self, elsewhere: str, keepers: ObjectKeepers, *, takes_arrays: bool = False) -> None:
        super().__init__()
        self.objects: list[ObjectSeen] = []
        self._keepers = keepers
        self._is_in_entry = False
        self._elsewhere = elsewhere
        self._takes_arrays = takes_arrays
        self.leaves: list[tuple[str, Tensor]] = []  # batched tensors
        self.shared: list[Tensor] = []  # tensors that count by content
        self.entries: list[tuple[str, Digests]] = []  # of sequences with one entry per item
        self.taken: set[int] = set()  # the identities of those that are arguments, or in one
        self.sequences: list[tuple[str, Any]] = []  # others, which may have one entry per item
        self._is_shared = False
        self._unregistered = ""

    def argument(self, value: Any, path: str, *, is_shared: bool, has_entries: bool) -> bytes:
        """Collect what is batched in an argument; the bytes of the rest."""
        if has_entries and not is_plain_sequence(value):
            raise InputError(
                f"argument {path} is a {type(value).__qualname__}: item_args expects a list, tuple, array or "
                "column with one entry per item"
            )
        self._is_shared = is_shared or has_entries
        try:
            if not has_entries:
                return self.encode(value, path)
            return self._taken(value, path)
        except UnencodableError as error:
            raise UnhashableArgumentError(
                f"argument {error.path} is a {type(error.value).__qualname__}"
                f"{f' ({error.reason})' if error.reason else ''}, which cannot be put in a key. Pass "
                f"tensors, numbers, texts, and containers of them; {self._elsewhere}{hint(error.value)}"
            ) from None

    def _taken(self, value: Any, path: str) -> bytes:
        self._add_entries(value, path)
        self.taken.add(id(value))
        return b"E" + self.kind(type(value), path)

    def _add_entries(self, value: Any, path: str) -> None:
        self._is_in_entry = True
        digests = entry_digests(value, path, self.encode)
        self._is_in_entry = False
        self.entries.append((path, digests))

    def tensor(self, value: Tensor, path: str) -> bytes:
        """Collect a batched tensor, or encode the content of one that belongs to the whole batch."""
        if value.is_nested or value.layout != torch.strided or value.is_quantized:
            kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
            raise UnencodableError(path, value, f"{kind}, not dense")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise UncachedArgumentError(f"argument {path} is a {type(value).__qualname__}, a kind of Tensor")
        if value.is_meta:
            raise UncachedArgumentError(f"argument {path} is a meta tensor, without data")
        if self._is_shared:
            self.shared.append(value)
            # Convolutions pass the memory format on to their output, so it counts as for batched tensors.
            is_last = value.dim() in (4, 5) and is_channels_last(value)
            return super().tensor(value, path) + (b"channels last" if is_last else b"")
        if self._unregistered:
            reason = (
                f"inside of {self._unregistered}, which is not a registered pytree node that can be rebuilt"
            )
            raise UnencodableError(path, value, reason)
        if has_attributes(value):
            raise UncachedArgumentError(f"argument {path} is a tensor with attributes of its own")
        for other, leaf in self.leaves:
            if leaf is value:
                return b"the same as " + other.encode()  # a forward may ask whether ``query is key``
        self.leaves.append((path, value))
        return path.encode()

    def other(self, value: Any, path: str) -> bytes:
        """Read modules, functions, tokenizers and other objects that compute, as closures are read.

        Objects that cannot be called may be data, such as what a model keeps for its next call.
        """
        is_code = isinstance(value, (torch.nn.Module, types.FunctionType, types.MethodType))
        is_object = callable(value) and hasattr(value, "__dict__") and has_plain_state(value)
        if self._is_in_entry or not (is_code or is_object):
            return super().other(value, path)
        found = self._keepers.look(value, path)
        self.objects.append(found)
        options = cache_options(value) if isinstance(value, torch.nn.Module) else []
        return b"M" + found.seen.namespace + self.encode(options, path)

    def inside_itself(self, value: Any, path: str) -> bytes:
        """Refuse a container that contains itself, as no part of it could be taken."""
        raise UnencodableError(path, value, "that holds itself")

    def _encode_compound(self, value: Any, kind: type, path: str) -> bytes:
        is_array = isinstance(value, np.ndarray) and is_plain_sequence(value)
        if is_array and self._takes_arrays and not (self._is_shared or self._unregistered):
            return self._taken(value, path)
        found = len(self.leaves)
        data = super()._encode_compound(value, kind, path)
        if is_sequence(value) and not self._is_shared and len(self.leaves) == found:
            self.sequences.append((path, value))
        return data

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Go into what `take` can rebuild: mappings, and registered pytree nodes."""
        if isinstance(value, UserDict):
            return self._mapping(value, kind, path)
        node = opened_or_none(value)
        if node is None or node[0] is not kind:  # such as a named tuple
            with self._outside_pytree(value):
                return super().compound(value, kind, path)
        head = self.kind(kind, path) + sized(self.encode(node[1], path))
        return b"P" + head + self.items([(c, f"{path}[{i}]") for i, c in enumerate(node[2])])

    def _mapping(self, value: UserDict[Any, Any], kind: type, path: str) -> bytes:
        """A mapping that is no dict, such as a tokenizer's output."""
        state, entries = mapping_state(value)
        if entries is not None:
            self._add_entries(entries, f"{path}.entries")
        with self._outside_pytree(value):
            besides = self.encode(state, path)
        return b"U" + self.kind(kind, path) + sized(besides) + Encoder.contents(self, value.data, path)

    def contents(self, value: Any, path: str) -> bytes:
        """Go into containers."""
        with self._outside_pytree(value):
            return super().contents(value, path)

    @contextlib.contextmanager
    def _outside_pytree(self, value: Any) -> Iterator[None]:
        """Make tensors an error inside of a container that `BoundCall.take` cannot rebuild."""
        outer = self._unregistered
        if type(value) not in (tuple, list, dict) and opened_or_none(value) is None:
            self._unregistered = type(value).__qualname__
        try:
            yield
        finally:
            self._unregistered = outer


def batch_size_of(leaves: list[tuple[str, Tensor]], entries: list[tuple[str, Digests]]) -> int:
    """How many items a call has; raises if nothing is batched, or batch sizes differ."""
    if not leaves and not entries:
        raise InputError(
            "no batched tensor among the arguments: the first dimension of at least one tensor or array must "
            "be the batch, and its name not in shared_args. Name lists with one entry per item in item_args"
        )
    sizes = []
    for path, tensor in leaves:
        if tensor.dim() == 0:
            raise InputError(
                f"argument {path} is a tensor without dimensions: the batch must be its first. Pass it as "
                "a number, or name it in shared_args"
            )
        sizes.append((tensor.shape[0], path, f"shape {tuple(tensor.shape)}"))
    sizes += [(len(digests), path, f"{len(digests)} entries") for path, digests in entries]
    count, first, what = sizes[0]
    for size, path, other in sizes:
        if size != count:
            raise InputError(
                f"batch sizes differ: {first} has {what}, {path} has {other}. Name arguments that belong "
                "to the whole batch in shared_args"
            )
    return count
