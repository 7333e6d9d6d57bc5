"""Decorated instances of modules: a callable takes the place of their forward."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torchcache2.core.errors import DecorationError
from torchcache2.core.private import REPLICATE
from torchcache2.decorator.decoration import Binding
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.tracing import is_exported
from torchcache2.engine.steps import Steps, run_steps
from torchcache2.identity.marks import ADDED_ATTRIBUTE, BINDING, ORIGINAL_ATTRIBUTE

__all__ = ["decorate_instance"]


def decorate_instance(module: nn.Module, binding: Binding) -> nn.Module:
    """Patch a module, and return it."""
    if hasattr(type(module), BINDING) or isinstance(module.__dict__.get("forward"), _InstanceForward):
        raise DecorationError(f"this {type(module).__name__} is cached already")
    own = module.__dict__.get("forward")
    forward = _InstanceForward(module, own, binding.cache(module, _plain(module, own)))
    module.__dict__["cache_instance"] = forward.cache
    module.__dict__["forward"] = forward
    module.__dict__[REPLICATE] = forward.replicate
    return module


class _InstanceForward:
    """The forward of a decorated instance. It is copied and pickled as a part of its module.

    It refers to the module weakly: with a cycle of references, a model that nobody uses any more would stay
    in memory until the next garbage collection.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, cache: ModuleCache) -> None:
        self.cache = cache
        self._module = weakref.ref(module)
        self._own = own  # the forward that the instance had as an attribute, if any
        setattr(self, ORIGINAL_ATTRIBUTE, own)
        function = own or type(module).forward
        self.__name__ = "forward"
        self.__doc__ = function.__doc__
        self.__code__ = getattr(function, "__code__", type(self).__call__.__code__)  # torch.export reads it
        self.__signature__ = inspect.signature(self.plain())

    def plain(self) -> Callable[..., Any]:
        """The forward without the cache."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward does not exist any more")
        return _plain(module, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exported():
            if self._own is not None:
                return self._own(*args, **kwargs)
            module: Any = self._module()  # Dynamo follows this, but not `plain`
            return type(module).forward(module, *args, **kwargs)
        return run_steps(self._call, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
        return (yield from self.cache.call(self.plain(), args, kwargs))

    def replicate(self) -> nn.Module:
        """A replica of the module for `nn.DataParallel`, with the same cache."""
        module = self._module()
        replica: nn.Module = getattr(type(module), REPLICATE)(module)
        replica.__dict__["forward"] = _InstanceForward(replica, self._own, self.cache)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> _InstanceForward:
        module = memo.get(id(self._module()))
        if module is None:
            return self
        return _InstanceForward(module, copy.deepcopy(self._own, memo), copy.deepcopy(self.cache, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_instance, (self._module(), self._own, self.cache)


setattr(_InstanceForward, ADDED_ATTRIBUTE, True)


def _plain(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return own or types.MethodType(type(module).forward, module)


def _load_instance(module: nn.Module, own: Callable[..., Any] | None, cache: ModuleCache) -> _InstanceForward:
    cache.bind(module, _plain(module, own))
    return _InstanceForward(module, own, cache)


_load_instance.__module__ = "torchcache2"  # the path that pickles name, wherever this file is
