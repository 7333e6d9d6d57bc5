"""Classes of modules, patched in place: each stays the class it was for `isinstance`, `super` and pickle.

The forward of a class is replaced by one that calls the cache of the instance, which is made at the first
call.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torchcache2.core.private import REPLICA_MARK, REPLICATE
from torchcache2.decorator.decoration import Binding
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.tracing import is_exported, is_traced, with_own_code
from torchcache2.engine.steps import Steps, run_steps
from torchcache2.identity.marks import ADDED_ATTRIBUTE, BINDING, INIT_ATTRIBUTE, ORIGINAL_ATTRIBUTE, is_ours
from torchcache2.identity.modulewalk import argument_digests

__all__ = ["decorate_class"]

_STARTING = "_torchcache_starting"  # an instance has this attribute while its outermost constructor runs


def decorate_class(cls: type[nn.Module], binding: Binding) -> type[nn.Module]:
    """Patch a class and those that will be derived from it, and return it."""
    setattr(cls, BINDING, binding)
    setattr(cls, "cache_instance", _CacheAttribute())  # noqa: B010  mypy knows no such attribute
    _patch_methods(cls)
    inherited = cls.__dict__.get("__init_subclass__")
    if hasattr(getattr(inherited, "__func__", None), ADDED_ATTRIBUTE):
        return cls

    def init_subclass(subclass: type[nn.Module], /, **kwargs: Any) -> None:
        if inherited is not None:
            inherited.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        _patch_methods(subclass)

    setattr(init_subclass, ADDED_ATTRIBUTE, True)
    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    return cls


def _patch_methods(cls: type[nn.Module]) -> None:
    wrappers = {"forward": _cached_forward, "__init__": _recording_init, REPLICATE: _cached_replicate}
    for name, wrap in wrappers.items():
        method = getattr(cls, name, None)
        if method is None or (hasattr(method, ORIGINAL_ATTRIBUTE) and is_ours(method)):
            continue  # it is wrapped already, here or in the base class
        wrapper = wrap(method)
        setattr(wrapper, ORIGINAL_ATTRIBUTE, method)
        if name not in cls.__dict__:
            setattr(wrapper, ADDED_ATTRIBUTE, weakref.ref(cls))
        setattr(cls, name, wrapper)


def _cached_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamo compiles this function, so it does no more than it must.
    @with_own_code
    @functools.wraps(forward)
    def cached_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exported():
            return forward(self, *args, **kwargs)
        return run_steps(_call_method, self, cached_forward, args, kwargs)

    return cached_forward


def _call_method(
    module: nn.Module, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Steps[Any]:
    # The original is read at each call: a notebook that reloads the class in place gives the wrapper another.
    forward = types.MethodType(getattr(wrapper, ORIGINAL_ATTRIBUTE), module)
    added_to = getattr(wrapper, ADDED_ATTRIBUTE, None)
    if added_to is not None and (owner := added_to()) is not None:
        forward = super(owner, module).forward  # the base class may have got another forward since
    # The namespace stands for the forward of the module's own class. If a subclass calls this one by
    # `super()`, that is another computation, which is not cached by itself.
    if type(module).forward is not wrapper:
        return (yield forward, args, kwargs)
    # A traced call makes no cache, as some exporters look for attributes that a forward adds.
    if "cache_instance" not in module.__dict__ and is_traced():
        return (yield forward, args, kwargs)
    return (yield from _cache_of(module).call(forward, args, kwargs))


def _recording_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def recording_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _STARTING in self.__dict__:
            init(self, *args, **kwargs)
            return
        self.__dict__[_STARTING] = True
        try:
            _record_arguments(self, init, args, kwargs)
            init(self, *args, **kwargs)
        finally:
            self.__dict__.pop(_STARTING, None)

    return recording_init


def _cached_replicate(replicate: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(replicate)
    def cached_replicate(self: nn.Module) -> nn.Module:
        _cache_of(self)  # the cache is made before the replicas are, so that they share it
        return replicate(self)

    return cached_replicate


def _record_arguments(
    module: nn.Module, init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = inspect.signature(init)
    try:
        bound = signature.bind(module, *args, **kwargs)
    except TypeError:
        return  # the constructor itself will raise
    bound.apply_defaults()
    _, *names = bound.arguments
    arguments = {name: bound.arguments[name] for name in names}
    for name in names:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    module.__dict__[INIT_ATTRIBUTE] = argument_digests(arguments)


class _CacheAttribute:
    """``module.cache_instance`` of a decorated class."""

    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        return self if module is None else _cache_of(module)

    def __set__(self, module: nn.Module, value: object) -> None:
        raise AttributeError("cache_instance cannot be set")


setattr(_CacheAttribute, ADDED_ATTRIBUTE, True)


def _cache_of(module: nn.Module) -> ModuleCache:
    """The cache of an instance of a decorated class."""
    cache = module.__dict__.get("cache_instance")
    # A replica of `nn.DataParallel` has copies of the weights, and is gone after this call.
    if cache is not None and (cache.root is module or getattr(module, REPLICA_MARK, False)):
        return cache  # type: ignore[no-any-return]
    binding: Binding = getattr(type(module), BINDING)
    with binding.creation():
        cache = module.__dict__.get("cache_instance")
        if cache is None or cache.root is not module:
            forward = getattr(type(module).forward, ORIGINAL_ATTRIBUTE, type(module).forward)
            plain = types.MethodType(forward, module)
            cache = binding.cache(module, plain)
            module.__dict__["cache_instance"] = cache
        return cache
