"""Modules whose weights are sharded over processes, so that their forwards wait for each other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchcache2.core.private import FSDP_MARK, FSDP_MODULES, buffers_of, fsdp_policy, parameters_of
from torchcache2.identity.unsteady import UnsteadyLayer, unsteady

_ZERO_MARK = "ds_id"  # DeepSpeed's ZeRO-3 sets it on each sharded parameter


class ShardedError(Exception):
    """Raised for a module that needs other processes to compute."""

    def __init__(self, part: nn.Module, text: str) -> None:
        super().__init__(text)
        self.part = weakref.ref(part)


def sharding(module: nn.Module) -> str | None:
    """How a module's own parameters (not its submodules') are sharded; None if they are not.

    Recognises libraries by names and marks, as importing them takes seconds.
    """
    name = type(module).__name__
    bases = type(module).__mro__
    if FSDP_MARK in vars(module) or any(base.__module__.startswith(FSDP_MODULES) for base in bases):
        return f"{name} is sharded by FSDP"
    for tensor in chain(parameters_of(module).values(), buffers_of(module).values()):
        if type(tensor).__name__ == "DTensor":
            return f"{name} has a DTensor parameter"
        if hasattr(tensor, _ZERO_MARK):
            return f"{name} is sharded by ZeRO"
    return None


class _Met(set[int]):
    """What was met, by identity."""

    def __contains__(self, module: object) -> bool:
        return super().__contains__(id(module))

    def add(self, module: object) -> None:
        super().add(id(module))


def modules_of(root: Any) -> Iterator[nn.Module]:
    """A module and its submodules, each once; none for other values. Modules need not be hashable."""
    if isinstance(root, nn.Module):
        met: Any = _Met()
        yield from (module for _, module in nn.Module.named_modules(root, met))


def weights_of(root: Any) -> Iterator[Tensor]:
    """The parameters and buffers of a module; none for other values."""
    for module in modules_of(root):
        yield from chain(module.parameters(recurse=False), module.buffers(recurse=False))


class Shards:
    """The sharded modules that a walk has found; by weak references, as one may own the cache.

    If they `are_cached`, `persistent_module_hash` identifies them, and their content is not read. Otherwise
    the first one ends the walk.
    """

    def __init__(self, *, are_cached: bool = False) -> None:
        self._are_cached = are_cached
        self._found: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []

    def __bool__(self) -> bool:
        return len(self._found) > 0

    def takes(self, module: nn.Module) -> bool:
        """Whether a module, or a part of it, is sharded, so that the walk must skip it.

        Raises `ShardedError` if the module is sharded and such modules are not cached.
        """
        if not self._are_cached:
            if (text := sharding(module)) is not None:
                raise ShardedError(module, text)
            return False
        part = next((part for part in modules_of(module) if sharding(part) is not None), None)
        if part is not None:
            self._found.append((weakref.ref(module), weakref.ref(part)))
        return part is not None

    def same(self) -> bool:
        """Whether each module still exists, and its sharded part is still sharded."""
        parts = [part() for _, part in self._found]
        return all(part is not None and sharding(part) is not None for part in parts)

    def parts(self) -> Iterator[nn.Module]:
        """The modules, and all of their submodules."""
        for module, _ in self._found:
            if (living := module()) is not None:
                yield from modules_of(living)

    def tensors(self) -> Iterator[Tensor]:
        """Their parameters and buffers, as they are now."""
        for part in self.parts():
            every = chain(parameters_of(part).values(), buffers_of(part).values())
            yield from [tensor for tensor in every if tensor is not None]

    def buffers(self) -> dict[str, Tensor]:
        """The unsharded buffers, by name. Parameters are not state: gathering makes and frees them."""
        buffers: dict[str, Tensor] = {}
        for number, part in enumerate(self.parts()):
            for name, buffer in buffers_of(part).items():
                if type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta:
                    buffers[f"{name} of part {number}"] = buffer
        return buffers

    def held(self, kinds: tuple[type, ...]) -> list[Any]:
        """Their attributes that are instances of some classes."""
        return [value for part in self.parts() for value in vars(part).values() if isinstance(value, kinds)]

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of their tensors, and those in which FSDP computes."""
        dtypes = {tensor.dtype for tensor in self.tensors()}
        for part in self.parts():
            policies = fsdp_policy(part), getattr(part, "mixed_precision", None)
            named = [getattr(policy, "param_dtype", None) for policy in policies]
            dtypes |= {dtype for dtype in named if isinstance(dtype, torch.dtype)}
        return dtypes

    def unsteady(self) -> UnsteadyLayer | None:
        """Their first layer that draws random numbers or mixes items now."""
        return next(filter(None, map(unsteady, self.parts())), None)
