"""The arguments of a call: what is batched, and canonical bytes of everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OptionError
from torchcache2.core.memory import select, sent
from torchcache2.core.private import modes
from torchcache2.core.values import mapped
from torchcache2.identity.argumentobjects import ObjectKeepers, ObjectSeen
from torchcache2.identity.argumentwalk import ArgumentEncoder, UncachedArgumentError, batch_size_of
from torchcache2.identity.encoding import UnencodableError, sized, text_bytes
from torchcache2.identity.entries import (
    Digests,
    ValueEncoder,
    entry_digests,
    first_batch_size,
    is_plain_sequence,
    is_sequence,
    take_entries,
    take_mapping,
)

__all__ = ["BoundCall", "Signature", "UncachedArgumentError"]

_DEFAULT = b"default"
_KINDS = inspect.Parameter
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_UNCHANGING = (Tensor, torch.nn.Parameter, *_PLAIN)
_MISSING = object()
_VARIADIC = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """One call of a forward."""

    args: tuple[Any, ...]  # as the caller gave them
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]  # the parameter that each of `args` goes to
    leaves: list[tuple[str, Tensor]]  # batched tensors with their paths
    entries: list[tuple[str, Digests]]  # digests of the entries of arguments with one entry per item
    # Other sequences as long as the batch: nobody has said whether they have one entry per item.
    aligned: list[tuple[str, Digests]]
    context: bytes  # canonical bytes of the other arguments, `aligned` ones included
    batch_size: int
    taken: set[int]  # ids of the sequences of `entries`
    aligned_ids: set[int]  # ids of those of `aligned`
    shared: tuple[str, ...]  # parameters whose tensors belong to the whole batch
    shared_tensors: list[Tensor]  # tensors that belong to the whole batch, or are in entries
    objects: list[ObjectSeen]  # modules and other objects with state

    @property
    def device(self) -> torch.device | None:
        """The device of the first batched tensor, else of the first of an object; None if there is none."""
        tensors = [tensor for _, tensor in self.leaves] or [
            t for one in self.objects for t in one.seen.tensors.tensors
        ]
        return tensors[0].device if tensors else None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of batched tensors, and of the tensors of objects."""
        return {t.dtype for _, t in self.leaves}.union(*[one.seen.tensors.dtypes for one in self.objects])

    @property
    def requires_grad(self) -> bool:
        """Whether an argument requires grad."""
        tensors = [*self.shared_tensors, *(tensor for _, tensor in self.leaves)]
        return any(tensor.requires_grad for tensor in tensors)

    @property
    def can_change(self) -> bool:
        """Whether an argument that is no tensor may be changed in place."""
        return any(type(value) not in _UNCHANGING for value in (*self.args, *self.kwargs.values()))

    def take(self, positions: Tensor, *, aligned: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a call with the items at `positions` (int64, CPU) alone.

        With `aligned`, the arguments as long as the batch are taken too, as if they had one entry per item.
        """
        index = sent(positions, [tensor.device for _, tensor in self.leaves])
        picked = {id(t): select(t, index[t.device]) for _, t in self.leaves}
        taken = self.taken | self.aligned_ids if aligned else self.taken

        def has_entries(value: Any) -> bool:
            return id(value) in taken

        def replaced(leaf: Any) -> Any:
            if has_entries(leaf):
                return take_entries(leaf, positions)
            if isinstance(leaf, UserDict):
                return take_mapping(leaf, positions, each)
            return picked.get(id(leaf), leaf)

        def each(value: Any) -> Any:
            return mapped(replaced, value, is_leaf=has_entries)

        def pick(name: str, value: Any) -> Any:
            if name in self.shared:
                return value
            if isinstance(value, Tensor):
                return picked[id(value)]
            return each(value)

        args = tuple([pick(name, value) for name, value in zip(self.names, self.args, strict=True)])
        return args, {name: pick(name, value) for name, value in self.kwargs.items()}

    def is_changed(self, now: BoundCall, positions: Tensor) -> bool:
        """Whether arguments that were taken at some positions, and are `now` bound again, have changed."""
        entries = [digests[positions.numpy()] for _, digests in self.entries]
        same = len(entries) == len(now.entries) and all(
            np.array_equal(before, after) for before, (_, after) in zip(entries, now.entries, strict=True)
        )
        return not same or self.context != now.context


class Signature:
    """Names the arguments of a forward; that of a module is a bound method.

    `method` is the name of the method, as arguments of two methods of an object may be equal.
    `shared` are parameters whose tensors belong to the whole batch, and `item_args` have one entry per item.
    An `OptionError` is raised if one of these is no parameter.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        shared: Iterable[str],
        item_args: Iterable[str] = (),
        method: str = "forward",
    ) -> None:
        self._head = [b"()", method.encode()] if method != "forward" else []
        self._signature = inspect.signature(function)
        parameters = list(self._signature.parameters.values())
        self._shared, self._item_args = tuple(shared), tuple(item_args)
        self._keepers = ObjectKeepers()
        self._renamed: dict[str, Any] = {}  # what parameters are called now, by older names of them
        if inspect.ismethod(function):
            self._elsewhere = "keep other objects as attributes of the module"
        elif parameters and parameters[0].name == "self":
            self._elsewhere = "decorate the method in the body of its class, or of one object: object.method"
        else:
            self._elsewhere = "have the function close over other objects"
        self._variadic = None
        self._keywords = None
        positional = []
        for parameter in parameters:
            if parameter.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD):
                positional.append(parameter.name)
            elif parameter.kind == _KINDS.VAR_POSITIONAL:
                self._variadic = parameter.name
            elif parameter.kind == _KINDS.VAR_KEYWORD:
                self._keywords = parameter.name
        self._positional = tuple(positional)
        # Large models have dozens of parameters with such defaults, so these are not encoded at each call.
        plain = [parameter for parameter in parameters if type(parameter.default) in _PLAIN]
        self._defaults = {p.name: (p.name.encode(), self._encode_default(p)) for p in plain}
        # How many arguments have to be given by position if none is given by name.
        required = [p for p in parameters if p.default is _KINDS.empty and p.kind not in _VARIADIC]
        is_simple = all(p.kind is not _KINDS.KEYWORD_ONLY for p in required)
        self._required = len(required) if is_simple else len(positional) + 1
        names = [parameter.name for parameter in parameters]
        for option, given in (("shared_args", self._shared), ("item_args", self._item_args)):
            for name in given:
                if name in names:
                    continue
                if (new := _new_name(function, name)) in names:
                    self._renamed[name] = new
                elif self._keywords is None:
                    raise OptionError(
                        f"{option}: {method} has no parameter {name!r}; it has {', '.join(names)}"
                    )
        self._shared += tuple(self._renamed[name] for name in self._shared if name in self._renamed)
        self._item_args += tuple(self._renamed[name] for name in self._item_args if name in self._renamed)
        if self._variadic in self._item_args:
            raise OptionError(f"item_args: *{self._variadic} is not one sequence with one entry per item")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Name the arguments of a call, and tell batched tensors from the rest.

        Raises
        ------
        TypeError
            If the arguments do not fit the signature, as Python would.
        InputError
            If nothing is batched, or batch sizes differ.
        UnhashableArgumentError
            If an argument cannot be put in a key.
        UncachedArgumentError
            If an argument is of a subclass of Tensor, or has no data.
        """
        if kwargs or len(args) > len(self._positional) or len(args) < self._required:
            named = {self._renamed.get(name, name): value for name, value in kwargs.items()}
            if len(named) < len(kwargs):
                raise TypeError("an argument by both of its names")
            arguments: Mapping[str, Any] = self._signature.bind(*args, **named).arguments
        else:
            arguments = dict(zip(self._positional, args, strict=False))
        # An array is a batch only if no tensor and no `item_args` is one: beside these, it may be shared.
        is_told = self._item_args or any(
            isinstance(value, Tensor) and name not in self._shared for name, value in arguments.items()
        )
        encoder, parts = self._read(arguments, takes_arrays=not is_told)
        if not is_told and encoder.leaves and encoder.taken:
            encoder, parts = self._read(arguments, takes_arrays=False)
        batch_size = batch_size_of(encoder.leaves, encoder.entries)
        aligned = [(path, value) for path, value in encoder.sequences if len(value) == batch_size > 0]
        extra = len(args) - len(self._positional)
        names = self._positional[: len(args)]
        if extra > 0:
            names += (self._variadic or "",) * extra
        kinds = {tensor.device.type for _, tensor in encoder.leaves}
        context = b"".join(map(sized, [*parts, text_bytes(modes(kinds))]))
        return BoundCall(
            args,
            kwargs,
            names,
            encoder.leaves,
            encoder.entries,
            [(path, entry_digests(value, path, ValueEncoder().encode)) for path, value in aligned],
            context,
            batch_size,
            encoder.taken,
            {id(value) for _, value in aligned},
            self._shared,
            encoder.shared,
            encoder.objects,
        )

    def _read(
        self, arguments: Mapping[str, Any], *, takes_arrays: bool
    ) -> tuple[ArgumentEncoder, list[bytes]]:
        """What is batched among named arguments, and the bytes of the rest."""
        encoder = ArgumentEncoder(self._elsewhere, self._keepers, takes_arrays=takes_arrays)
        parts = [*self._head]
        for name, parameter in self._signature.parameters.items():
            value = arguments.get(name, _MISSING)
            if value is _MISSING and name in self._defaults:
                parts += self._defaults[name]
            elif value is _MISSING:
                if parameter.default is _KINDS.empty:
                    continue  # *args or **kwargs without any
                data = self._encode_default(parameter)
                parts += [name.encode(), data]
                if is_sequence(parameter.default) and name not in self._shared and data != _DEFAULT:
                    encoder.sequences.append((name, parameter.default))
            elif name == self._keywords:
                for keyword, argument in value.items():
                    path = f"{name}[{keyword!r}]"
                    parts += [path.encode(), self._encode(encoder, keyword, argument, path)]
            else:
                parts += [name.encode(), self._encode(encoder, name, value, name)]
        return encoder, parts

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """How many items a call that is not cached seems to have; 1 if that cannot be told."""
        named = dict(zip(self._positional, args, strict=False)) | dict(kwargs)
        listed = [named[name] for name in self._item_args if is_plain_sequence(named.get(name))]
        if listed:
            return len(listed[0])
        others = args[len(self._positional) :]
        return first_batch_size(others, {k: v for k, v in named.items() if k not in self._shared})

    def _encode(self, encoder: ArgumentEncoder, name: str, value: Any, path: str) -> bytes:
        # A single text has no entries: all items share it.
        has_entries = name in self._item_args and not isinstance(value, (Tensor, str, type(None)))
        return encoder.argument(value, path, is_shared=name in self._shared, has_entries=has_entries)

    def _encode_default(self, parameter: inspect.Parameter) -> bytes:
        # The value is part of the namespace already. It is encoded so that a call that gives that value has
        # the same key.
        try:
            return ValueEncoder().encode(parameter.default, parameter.name)
        except UnencodableError:
            return _DEFAULT


def _new_name(function: Any, name: str) -> Any:
    """The parameter that a wrapper passes an argument of an older name to; None if it has none.

    The wrapper has a dict of such names, as sentence-transformers has ``{"sentences": "inputs"}``.
    """
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                if isinstance(cell.cell_contents, dict) and name in cell.cell_contents:
                    return cell.cell_contents[name]
        function = getattr(function, "__wrapped__", None)
    return None
