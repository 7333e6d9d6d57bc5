"""The arguments of a call: which tensors are batched, and canonical bytes of everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcache2.digest import Encoder, UnencodableError, sized, text_bytes
from torchcache2.errors import InputError, OptionError, UnhashableArgumentError
from torchcache2.gather import select
from torchcache2.modes import modes

__all__ = ["BoundCall", "Signature", "UncachedArgumentError"]

_DEFAULT = b"default"
_KINDS = inspect.Parameter
_UNCHANGING = (Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, torch.dtype)
_MARKS = ("_dynamo", "_is_")  # what torch puts on tensors, as it does `persistent` on buffers
_VARIADIC = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)


class UncachedArgumentError(Exception):
    """An argument of a kind that is passed to the plain forward; where it is, and what."""


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """One call of a forward.

    Attributes
    ----------
    args, kwargs
        As the caller gave them.
    names : tuple of str
        The parameter that each of `args` goes to.
    leaves : list of (str, Tensor)
        Batched tensors with their paths.
    context : bytes
        Canonical bytes of the other arguments.
    batch_size : int
    shared : tuple of str
        Parameters whose tensors belong to the whole batch.
    shared_tensors : list of Tensor
        Those tensors.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    leaves: list[tuple[str, Tensor]]
    context: bytes
    batch_size: int
    shared: tuple[str, ...]
    shared_tensors: list[Tensor]

    @property
    def device(self) -> torch.device:
        """The device of the first batched tensor."""
        return self.leaves[0][1].device

    @property
    def requires_grad(self) -> bool:
        """Whether an argument requires grad."""
        tensors = [*self.shared_tensors, *(tensor for _, tensor in self.leaves)]
        return any(tensor.requires_grad for tensor in tensors)

    @property
    def can_change(self) -> bool:
        """Whether an argument may be changed in place and is no tensor."""
        return any(type(value) not in _UNCHANGING for value in (*self.args, *self.kwargs.values()))

    def take(self, positions: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for a call with the items at `positions` (int64, CPU) alone."""
        index = {device: positions.to(device) for device in {t.device for _, t in self.leaves}}
        picked = {id(t): select(t, index[t.device]) for _, t in self.leaves}

        def pick(name: str, value: Any) -> Any:
            if name in self.shared:
                return value
            if isinstance(value, Tensor):
                return picked[id(value)]
            return pytree.tree_map(lambda leaf: picked.get(id(leaf), leaf), value)

        args = [pick(name, value) for name, value in zip(self.names, self.args, strict=True)]
        return args, {name: pick(name, value) for name, value in self.kwargs.items()}


class Signature:
    """How the arguments of a function are named.

    Parameters
    ----------
    function : callable
        The forward; of a module, bound to it.
    shared : tuple of str
        Parameters whose tensors belong to the whole batch.

    Raises
    ------
    OptionError
        If a shared argument is not a parameter.
    """

    def __init__(self, function: Callable[..., Any], *, shared: tuple[str, ...]) -> None:
        self._signature = inspect.signature(function)
        parameters = list(self._signature.parameters.values())
        self._shared = shared
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
        # What has to be given by position, if nothing is given by name.
        required = [p for p in parameters if p.default is _KINDS.empty and p.kind not in _VARIADIC]
        is_simple = all(p.kind is not _KINDS.KEYWORD_ONLY for p in required)
        self._required = len(required) if is_simple else len(positional) + 1
        names = [parameter.name for parameter in parameters]
        for name in shared:
            if name not in names and self._keywords is None:
                raise OptionError(
                    f"shared_args: forward has no parameter {name!r}; it has {', '.join(names)}"
                )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Name the arguments of a call, and tell batched tensors from the rest.

        Raises
        ------
        TypeError
            If the arguments do not fit the signature, as Python would.
        InputError
            If there is no tensor, or batch sizes differ.
        UnhashableArgumentError
            If an argument cannot be put in a key.
        UncachedArgumentError
            If an argument is of a subclass of Tensor, or has no data.
        """
        if kwargs or len(args) > len(self._positional) or len(args) < self._required:
            arguments: Mapping[str, Any] = self._signature.bind(*args, **kwargs).arguments
        else:
            arguments = dict(zip(self._positional, args, strict=False))
        encoder = _ArgumentEncoder()
        parts = []
        for name, parameter in self._signature.parameters.items():
            value = arguments.get(name, _MISSING)
            if value is _MISSING:
                if parameter.default is _KINDS.empty:
                    continue  # *args or **kwargs without any
                parts += [name.encode(), self._encode_default(parameter)]
            elif name == self._keywords:
                for keyword, argument in value.items():
                    path = f"{name}[{keyword!r}]"
                    data = encoder.argument(argument, path, keyword in self._shared)
                    parts += [path.encode(), data]
            else:
                parts += [name.encode(), encoder.argument(value, name, name in self._shared)]
        batch_size = _batch_size(encoder.leaves)
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
            context,
            batch_size,
            self._shared,
            encoder.shared,
        )

    def _encode_default(self, parameter: inspect.Parameter) -> bytes:
        # The value is part of the namespace; here it only has to equal the same value given by hand.
        try:
            return Encoder().encode(parameter.default, parameter.name)
        except UnencodableError:
            return _DEFAULT


_MISSING = object()


class _ArgumentEncoder(Encoder):
    """Collects batched tensors, and encodes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[tuple[str, Tensor]] = []
        self.shared: list[Tensor] = []
        self._is_shared = False
        self._unregistered = ""

    def argument(self, value: Any, path: str, is_shared: bool) -> bytes:
        self._is_shared = is_shared
        try:
            return self.encode(value, path)
        except UnencodableError as error:
            raise UnhashableArgumentError(
                f"argument {error.path} is a {type(error.value).__qualname__}"
                f"{f' ({error.reason})' if error.reason else ''}, which cannot be put in a key. Pass "
                "tensors, numbers, texts, and containers of them; keep other objects as attributes of "
                "the module, or set enabled=False"
            ) from None

    def tensor(self, value: Tensor, path: str) -> bytes:
        if value.is_nested or value.layout != torch.strided or value.is_quantized:
            kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
            raise UnencodableError(path, value, f"{kind}, not dense")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise UncachedArgumentError(f"argument {path} is a {type(value).__qualname__}, a kind of Tensor")
        if value.is_meta:
            raise UncachedArgumentError(f"argument {path} is a meta tensor, without data")
        if self._is_shared:
            self.shared.append(value)
            return super().tensor(value, path)
        if self._unregistered:
            raise UnencodableError(
                path, value, f"inside of {self._unregistered}, which is not a registered pytree node"
            )
        if any(name != "persistent" and not name.startswith(_MARKS) for name in vars(value)):
            raise UncachedArgumentError(f"argument {path} is a tensor with attributes of its own")
        for other, leaf in self.leaves:
            if leaf is value:
                return b"the same as " + other.encode()  # forwards ask ``query is key``
        self.leaves.append((path, value))
        return path.encode()

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        node = pytree.SUPPORTED_NODES.get(kind)
        if node is None:
            with self._outside_pytree(value):
                return super().compound(value, kind, path)
        children, context = node.flatten_fn(value)
        head = self.kind(kind, path) + sized(self.encode(context, path))
        return b"P" + head + self.items([(c, f"{path}[{i}]") for i, c in enumerate(children)])

    def contents(self, value: Any, path: str) -> bytes:
        with self._outside_pytree(value):
            return super().contents(value, path)

    @contextlib.contextmanager
    def _outside_pytree(self, value: Any) -> Iterator[None]:
        """While inside of something that `take` cannot rebuild, tensors are an error."""
        outer = self._unregistered
        if type(value) not in pytree.SUPPORTED_NODES:
            leaves = pytree.tree_leaves(value)  # named tuples are nodes though not registered
            if len(leaves) == 1 and leaves[0] is value:
                self._unregistered = type(value).__qualname__
        try:
            yield
        finally:
            self._unregistered = outer


def _batch_size(leaves: list[tuple[str, Tensor]]) -> int:
    if not leaves:
        raise InputError(
            "no batched tensor among the arguments: the first dimension of at least one must be the "
            "batch, and its name not in shared_args"
        )
    first_path, first = leaves[0]
    for path, tensor in leaves:
        if tensor.dim() == 0:
            raise InputError(
                f"argument {path} is a tensor without dimensions: the batch must be its first. Pass it as "
                "a number, or name it in shared_args"
            )
        if tensor.shape[0] != first.shape[0]:
            raise InputError(
                f"batch sizes differ: {first_path} has shape {tuple(first.shape)}, {path} has shape "
                f"{tuple(tensor.shape)}. Name arguments that belong to the whole batch in shared_args"
            )
    return first.shape[0]
