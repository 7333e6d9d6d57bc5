"""`torchcache`: the decorator of classes, functions and module instances.

A class is patched in place, so that `isinstance`, `super` and pickle still work. For an instance, a callable
replaces its forward. Either way, a module's cache is its attribute ``cache_instance``.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torchcache2.core.errors import DecorationError, OptionError
from torchcache2.core.logs import shown
from torchcache2.core.settings import CacheSettings, Compression, Distributed, MissBatch, Policy
from torchcache2.core.sizes import Size
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.wrap import (
    DEFERRED,
    Binding,
    CachedMethod,
    bindings_of,
    cache_of_object,
    check_method,
    decorate_class,
    decorate_function,
    decorate_object,
    is_cached_function,
    is_deferred,
    methods_of,
    restore_object,
)
from torchcache2.identity.encoding import qualified_name
from torchcache2.identity.marks import BINDING, ORIGINAL_ATTRIBUTE

T = TypeVar("T")
_CALL_IT = "write a function that calls it, and decorate that"
_INSTEAD: tuple[tuple[Any, str], ...] = (  # unsupported targets, and what to write instead
    ((str, os.PathLike), "decorate what computes: torchcache(persistent_cache_dir=folder)(model)"),
    (
        (torch.jit.ScriptModule, torch.jit.ScriptFunction),
        "its code cannot be followed. Decorate the module before it is scripted, or a function that calls it",
    ),
    ((classmethod, staticmethod), "put @torchcache above a function outside of the class"),
    (
        (property, functools.cached_property),
        "it has no arguments that tell items apart. Put @torchcache above a method that computes it",
    ),
    (torch.utils.data.Dataset, "CachedDataset(dataset) caches the samples of a dataset"),
    (torch.utils.data.DataLoader, "cache its dataset: CachedDataset(dataset)"),
    ((list, tuple, dict, set), "decorate each by itself: for model in models: torchcache(model)"),
    (type, 'name the methods, torchcache(methods=("encode",)), or put @torchcache above them'),
    (types.MethodType, 'name it, torchcache(object, methods=("encode",)); of a module, decorate the module'),
    ((type(len), functools.partial), _CALL_IT),
)


@overload
def torchcache(target: T, /, **options: Any) -> T: ...


@overload
def torchcache(
    *,
    methods: Sequence[str] = ...,
    enabled: bool = True,
    subsample_count: int | None = None,
    persistent: bool | None = None,
    persistent_cache_dir: str | os.PathLike[str] | None = None,
    persistent_module_hash: str | None = None,
    version: str | int | None = None,
    code_version: str | int | None = None,
    label: str | None = None,
    max_memory_cache_size: Size = 1_000_000_000,
    max_persistent_cache_size: Size = 10_000_000_000,
    compression: Compression = "brotli",
    compression_quality: int = 1,
    memory_cache_device: torch.device | str | None = "cpu",
    cache_dtype: torch.dtype | None = None,
    policy: Policy = "keep",
    shared_args: Sequence[str] = (),
    item_args: Sequence[str] = (),
    ignore: Sequence[str] = (),
    probe: bool = True,
    strict: bool = False,
    miss_batch: MissBatch = "exact",
    verify: float = 0.0,
    distributed: Distributed = "auto",
    claims: bool = True,
    local_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_size: Size | None = None,
) -> Callable[[T], T]: ...


def torchcache(target: Any = None, /, **options: Any) -> Any:
    """Cache the outputs of a module, method or function per batch item.

    Use it with or without parentheses: on an existing module, ``torchcache(backbone)``; on a method of any
    object, ``torchcache(model.encode)``; above a function, above a method in the body of a class, or above a
    class. The target is patched in place and returned. Decorating it again with other options replaces its
    cache.

    The first dimension of every tensor, in the arguments (except those named in `shared_args`) and in the
    output, is the batch; arguments named in `item_args` are sequences with one entry per item. An item's
    output must not depend on the rest of its batch; the cache checks that now and then. A module can set
    ``self.torchcache_<option>`` in its constructor to override an option.

    Parameters
    ----------
    target : nn.Module, method, function or class
        What to cache, if used without parentheses.
    **options
        ``methods``: the names of the methods to cache, exactly these; by default that is ``forward``. And the
        fields of `CacheSettings`:
        `enabled`, `subsample_count`, `persistent`, `persistent_cache_dir`, `persistent_module_hash`,
        `version`, `code_version`, `label`, `max_memory_cache_size`, `max_persistent_cache_size`,
        `compression`, `compression_quality`, `memory_cache_device`, `cache_dtype`, `policy`, `shared_args`,
        `item_args`, `ignore`, `probe`, `strict`, `miss_batch`, `verify`, `distributed`, `claims`,
        `local_dir`, `storage_options`, `remote_size`.

    Returns
    -------
    nn.Module, method, function or class
        The patched class or object; for a function or method, its replacement.

    Raises
    ------
    DecorationError
        If `target` cannot be cached. The text says what to write instead.
    OptionError
        If an option does not exist, or has an invalid value.

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
    names = options.pop("methods", None)
    methods: tuple[str, ...] = (names,) if isinstance(names, str) else ()
    if isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names):
        methods = tuple(names)
    if names is not None and not methods:
        raise OptionError(f"methods={shown(names)}: expected names of methods, such as ('encode_image',)")
    settings = CacheSettings(**options)

    def decorate(target: Any) -> Any:
        is_module = isinstance(target, nn.Module) or (
            isinstance(target, type) and issubclass(target, nn.Module)
        )
        if isinstance(target, (types.MethodType, CachedMethod)):
            return _decorate_bound(target, settings, methods)
        if isinstance(target, types.FunctionType) and not methods:
            return _decorate_function(target, settings)
        if not (is_module or methods) or isinstance(target, (torch.jit.ScriptModule, types.FunctionType)):
            raise _refusal(target)
        named = methods or ("forward",)
        if isinstance(target, type):
            return _decorate_class(target, settings, named)
        if not hasattr(target, "__dict__"):
            raise _refusal(target)
        decorate_object(target, Binding(settings, qualified_name(type(target)), named), exactly=True)
        return target

    if target is None:
        return decorate
    return decorate(target)


torchcache.__module__ = "torchcache2"  # the path in pickles, wherever this file is


def _decorate_class(cls: type, settings: CacheSettings, methods: tuple[str, ...]) -> type:
    for name in methods:
        check_method(cls, name, in_body=True)
    known, binding = vars(cls).get(BINDING), Binding(settings, qualified_name(cls), methods)
    if known is not None and known.methods != methods:
        raise DecorationError(f"{cls.__name__} is decorated for {', '.join(known.methods)}: name all at once")
    if known is None:
        decorate_class(cls, binding)
    elif known.settings != settings:
        setattr(cls, BINDING, binding)  # of its next objects
    return cls


def _decorate_function(function: types.FunctionType, settings: CacheSettings) -> Callable[..., Any]:
    if is_cached_function(function):
        cache = vars(function).get("cache_instance")
        before = cache.settings if cache is not None else getattr(vars(function)[BINDING], "settings", None)
        if before == settings:
            return function
        if cache is not None:
            cache.close()
        function = getattr(function, ORIGINAL_ATTRIBUTE)
    if is_deferred(function):
        raise DecorationError(f"torchcache cannot decorate {shown(function)}: {DEFERRED}")
    binding = Binding(settings, qualified_name(function))
    if _is_in_class_body(function):
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise _refusal(staticmethod(function))
        return decorate_function(function, binding, function.__name__)
    return decorate_function(function, binding)


def _is_in_class_body(function: types.FunctionType) -> bool:
    """Whether a function is being defined in the body of a class."""
    *path, name = function.__qualname__.split(".")
    if not path or path[-1].startswith("<"):  # as in ``<locals>`` or ``<listcomp>``
        return False
    scope: Any = sys.modules.get(function.__module__)
    for part in path:
        scope = getattr(scope, part, None)
    return getattr(scope, name, None) is not function


def _decorate_bound(method: Any, settings: CacheSettings, methods: tuple[str, ...]) -> Callable[..., Any]:
    obj, name = method.__self__, method.__name__
    is_call = isinstance(obj, nn.Module) and name in ("__call__", "_wrapped_call_impl")
    if methods or isinstance(obj, type) or is_call or getattr(obj, name, None) != method:
        raise _refusal(method)
    decorate_object(obj, Binding(settings, qualified_name(type(obj)), (name,)), exactly=False)
    cached = methods_of(obj).get(name)
    return cached.holding() if cached is not None else method  # else its class is decorated


def _refusal(target: Any) -> DecorationError:
    """The error for an unsupported target, which says what to write instead."""
    advice = next((text for kind, text in _INSTEAD if isinstance(target, kind)), None)
    if isinstance(target, types.MethodType) and isinstance(target.__self__, type):
        advice = _CALL_IT
    elif advice is None and hasattr(target, "__getitem__") and hasattr(target, "__len__"):
        advice = "CachedDataset(dataset) caches the samples of a dataset"
    elif advice is None and hasattr(target, "__dict__"):
        advice = (
            'name its methods, torchcache(object, methods=("encode",)), or one: torchcache(object.encode)'
        )
    elif advice is None:
        advice = "expected a module, a method of an object, a function or a class"
    name = type(target).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return DecorationError(f"torchcache cannot decorate {shown(target)}, {article} {name}: {advice}")


def uncache(target: T, /) -> T:
    """Undo `torchcache`: restore a module, object, method or function, and return it.

    Frees rows in memory; rows on disk stay, and are found when the target is cached again.

    Parameters
    ----------
    target : nn.Module, object, method or function
        The decorated target, or a method of it. For a function, use the returned plain one.

    Raises
    ------
    DecorationError
        If it is not cached, or is a class or an object of a decorated class: remove ``@torchcache`` there.
    """
    cached: Any = target
    if is_cached_function(cached) and (cache := vars(cached).get("cache_instance")) is not None:
        cache.close()
        return getattr(cached, ORIGINAL_ATTRIBUTE)  # type: ignore[no-any-return]
    is_bound = isinstance(cached, (types.MethodType, CachedMethod))
    obj = cached.__self__ if is_bound else cached
    known = methods_of(obj)
    names = [cached.__name__] if is_bound else list(known)
    if known and set(names) <= known.keys():
        restore_object(obj, names)
        return getattr(obj, names[0]) if is_bound else target
    kind = obj if isinstance(obj, type) else type(obj)
    why = f"remove it from {kind.__name__}" if bindings_of(kind) else "torchcache has not decorated it"
    raise DecorationError(f"{shown(target)} is not cached by a call of torchcache: {why}")


def cache_of(target: Any, /) -> ModuleCache:
    """The cache of a decorated object; unlike ``.cache_instance``, known to type checkers.

    Parameters
    ----------
    target : nn.Module, object, method or function
        For a method, this is the cache of its object; select one by
        ``cache_of(model).stats(method="encode")``.

    Raises
    ------
    DecorationError
        If it is not cached.

    Examples
    --------
    >>> backbone = torchcache(nn.Linear(4, 2)).eval().requires_grad_(False)
    >>> features = backbone(torch.rand(3, 4))
    >>> cache_of(backbone).stats().misses
    3
    """
    obj = target.__self__ if isinstance(target, (types.MethodType, CachedMethod)) else target
    if is_cached_function(obj) and "cache_instance" in vars(obj):
        return vars(obj)["cache_instance"]  # type: ignore[no-any-return]
    if not (methods_of(obj) or bindings_of(type(obj))):
        raise DecorationError(f"{shown(target)} is not cached: decorate it by torchcache")
    return cache_of_object(obj)


for _function in (uncache, cache_of):
    _function.__module__ = "torchcache2"
del _function
