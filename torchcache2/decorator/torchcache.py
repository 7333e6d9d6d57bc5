"""`torchcache`: the decorator of classes, functions and module instances.

A class is patched in place, so that it stays the class it was for `isinstance`, `super` and pickle.
An instance gets a callable in the place of its forward. Either way the cache of a module is its attribute
``cache_instance``.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torchcache2.core.errors import DecorationError
from torchcache2.core.logs import shown
from torchcache2.core.settings import CacheSettings, Compression, Distributed, MissBatch, Policy
from torchcache2.core.sizes import Size
from torchcache2.decorator.classes import decorate_class
from torchcache2.decorator.decoration import Binding
from torchcache2.decorator.instances import decorate_instance
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.tracing import is_exported, with_own_code
from torchcache2.engine.steps import Steps, run_steps
from torchcache2.identity.encoding import qualified_name
from torchcache2.identity.marks import ORIGINAL_ATTRIBUTE

__all__ = ["torchcache"]

T = TypeVar("T", bound=Callable[..., Any])
_DEFERRED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


@overload
def torchcache(target: T, /) -> T: ...


@overload
def torchcache(
    *,
    enabled: bool = True,
    subsample_count: int | None = None,
    persistent: bool | None = None,
    persistent_cache_dir: str | os.PathLike[str] | None = None,
    persistent_module_hash: str | None = None,
    max_memory_cache_size: Size = 1_000_000_000,
    max_persistent_cache_size: Size = 10_000_000_000,
    compression: Compression = "brotli",
    compression_quality: int = 1,
    memory_cache_device: torch.device | str | None = "cpu",
    cache_dtype: torch.dtype | None = None,
    policy: Policy = "mru",
    shared_args: Sequence[str] = (),
    item_args: Sequence[str] = (),
    ignore: Sequence[str] = (),
    probe: bool = True,
    strict: bool = False,
    miss_batch: MissBatch = "exact",
    verify: float = 0.0,
    distributed: Distributed = "auto",
    process_group: Any = None,
    claims: bool = True,
    local_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_size: Size | None = None,
) -> Callable[[T], T]: ...


def torchcache(target: Any = None, /, **options: Any) -> Any:
    """Cache the outputs of a module or function per batch item.

    Use it with or without parentheses, on a subclass of `torch.nn.Module`, on a function, or on a
    module that exists already: ``backbone = torchcache(policy="lru")(backbone)``.

    Every tensor argument that is not named in `shared_args` has the batch in its first dimension, and
    so has every tensor of the output; arguments named in `item_args` are sequences with one entry per item.
    An item's output must not depend on the rest of its batch, which is checked once. A module sets
    ``self.torchcache_<option>`` in its constructor to override an option.

    Parameters
    ----------
    target : class, function or nn.Module
        What to cache, if used without parentheses.
    **options
        The fields of `CacheSettings`:
        `enabled`, `subsample_count`, `persistent`, `persistent_cache_dir`, `persistent_module_hash`,
        `max_memory_cache_size`, `max_persistent_cache_size`, `compression`, `compression_quality`,
        `memory_cache_device`, `cache_dtype`, `policy`, `shared_args`, `item_args`, `ignore`, `probe`,
        `strict`, `miss_batch`, `verify`, `distributed`, `process_group`, `claims`, `local_dir`,
        `storage_options`, `remote_size`.

    Returns
    -------
    class, function or nn.Module
        A class is patched and returned; a function is wrapped; an instance is patched and returned.

    Raises
    ------
    DecorationError
        If `target` is neither a module (class or instance) nor a function.
    OptionError
        If there is no such option, or it cannot have this value.

    Examples
    --------
    >>> @torchcache
    ... class Square(nn.Module):
    ...     def forward(self, x):
    ...         return x ** 2
    >>> square = Square()
    >>> square(torch.tensor([1., 2., 2.]))
    tensor([1., 4., 4.])
    >>> square.cache_instance.stats().misses
    2
    """
    settings = CacheSettings(**options)

    def decorate(target: Any) -> Any:
        binding = Binding(settings, qualified_name(type(target) if isinstance(target, nn.Module) else target))
        forward = getattr(target, "forward", target)
        if any(is_deferred(forward) for is_deferred in _DEFERRED):
            raise DecorationError(
                f"torchcache cannot decorate {shown(target)}: calling it returns a coroutine or generator, "
                "not an output. Decorate what computes the output"
            )
        if isinstance(target, type) and issubclass(target, nn.Module):
            return decorate_class(target, binding)
        if isinstance(target, nn.Module) and not isinstance(target, torch.jit.ScriptModule):
            return decorate_instance(target, binding)
        if isinstance(target, types.FunctionType):
            return _decorate_function(target, binding)
        raise DecorationError(
            f"torchcache cannot decorate {shown(target)}, {_article(target)}: expected a subclass or "
            "instance of torch.nn.Module, or a plain function"
        )

    if target is None:
        return decorate
    return decorate(target)


torchcache.__module__ = "torchcache2"  # the path that pickles name, wherever this file is


def _decorate_function(function: types.FunctionType, binding: Binding) -> Callable[..., Any]:
    cache = binding.cache(function, function)

    @with_own_code
    @functools.wraps(function)
    def cached(*args: Any, **kwargs: Any) -> Any:
        if is_exported():
            return function(*args, **kwargs)
        return run_steps(_call_function, cached, args, kwargs)

    setattr(cached, ORIGINAL_ATTRIBUTE, function)
    cached.cache_instance = cache  # type: ignore[attr-defined]
    return cached


def _call_function(wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    # Both are read at each call: a notebook that reloads the function in place gives the wrapper others.
    cache: ModuleCache = getattr(wrapper, "cache_instance")  # noqa: B009
    return (yield from cache.call(getattr(wrapper, ORIGINAL_ATTRIBUTE), args, kwargs))


def _article(target: object) -> str:
    name = type(target).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
