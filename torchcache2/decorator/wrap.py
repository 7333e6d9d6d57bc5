"""Where a cached call begins: replacements of functions, and of methods of classes or objects.

A class is patched in place, so that `isinstance`, `super` and pickle still work: functions that call the
instance's cache, made at the first call, replace its methods. In an object's ``__dict__``, callables replace
its methods.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from torchcache2.core.errors import DecorationError
from torchcache2.core.private import REPLICA_MARK, REPLICATE
from torchcache2.core.process import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.decorator.lazymodule import LazyModule
from torchcache2.decorator.modulecache import ModuleCache
from torchcache2.decorator.probe import Probes
from torchcache2.decorator.tracing import is_exported, is_traced, with_own_code
from torchcache2.engine.running import Compiler, Forward, outside
from torchcache2.engine.stack import TierStack
from torchcache2.identity.marks import (
    ADDED_ATTRIBUTE,
    BINDING,
    METHOD,
    ORIGINAL_ATTRIBUTE,
    is_method,
    is_ours,
    without_ours,
)
from torchcache2.identity.namespace import History

_ASKS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
DEFERRED = "calling it returns a coroutine or generator, not an output. Decorate what computes the output"

_PREFIX = "torchcache_"


class Binding:
    """One use of the decorator: its options, and the state that its caches share."""

    def __init__(self, settings: CacheSettings, name: str, methods: tuple[str, ...] = ("forward",)) -> None:
        self.settings = settings
        self.name = name
        self.methods = methods
        self.tiers = TierStack(settings, name)
        self.probes = Probes()
        self.histories: dict[type, History] = {}
        self.creation = ProcessLock(threading.RLock)

    def settings_of(self, root: Any) -> CacheSettings:
        """The options, including overrides by an object or its class."""
        options: dict[str, Any] = {}
        if not isinstance(root, types.FunctionType):
            for scope in (*map(vars, reversed(type(root).__mro__)), vars(root)):
                options |= {
                    name.removeprefix(_PREFIX): value
                    for name, value in scope.items()
                    if name.startswith(_PREFIX)
                }
        return self.settings.replace(options)

    def cache(
        self,
        root: Any,
        plain: Callable[..., Any],
        method: str = "forward",
        others: Sequence[Callable[..., Any]] = (),
        beside: ModuleCache | None = None,
    ) -> ModuleCache:
        """A cache for a function, or for a method, `beside` the caches of the object's other methods."""
        settings = self.settings_of(root)
        tiers: TierStack | None = None
        if beside is None or not settings.shares_tiers_with(beside.settings):
            is_shared = settings.shares_tiers_with(self.settings)
            tiers = self.tiers if is_shared else TierStack(settings, self.name)
        history = self.histories.setdefault(type(root), History())
        cache = ModuleCache(settings, tiers, history, self.probes, beside)
        cache.bind(root, plain, method, others)
        return cache

    def __reduce__(self) -> tuple[Any, ...]:
        return Binding, (self.settings, self.name, self.methods)


# Functions


def decorate_function(
    function: Callable[..., Any], binding: Binding | None, method: str | None = None
) -> Callable[..., Any]:
    """A replacement that calls the cache, for a function or for a `method` in the body of a class.

    For a method, it calls the instance's cache; without a `binding`, the class's one applies.
    """
    own: list[Callable[..., Any]] = []  # a function that closes over itself is an endless loop to dill

    # Dynamo compiles this function, so keep it minimal.
    @with_own_code
    @functools.wraps(function)
    def cached(*args: Any, **kwargs: Any) -> Any:
        if is_exported():
            return function(*args, **kwargs)
        return outside(_call, own[0], method, args, kwargs)

    own.append(cached)
    setattr(cached, ORIGINAL_ATTRIBUTE, function)
    if method is not None:
        setattr(cached, BINDING, binding)
    elif binding is not None:
        cached.cache_instance = binding.cache(function, function)  # type: ignore[attr-defined]
    return cached


def _call(
    compiler: Compiler,
    wrapper: Callable[..., Any],
    name: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    # Read the original at each call: a notebook that reloads code in place replaces it.
    if name is None:
        cache: ModuleCache = getattr(wrapper, "cache_instance")  # noqa: B009
        function = getattr(wrapper, ORIGINAL_ATTRIBUTE)
        if cache.root is None:  # the wrapper was unpickled
            cache.bind(function, function)
        return cache.call(Forward(function, compiler), args, kwargs)
    if not args:
        return getattr(wrapper, ORIGINAL_ATTRIBUTE)(**kwargs)  # without `self`: Python raises
    obj, rest = args[0], args[1:]
    kind, forward = type(obj), Forward(_original_method(obj, name, wrapper), compiler)
    # The key identifies the method of the object's own class. If a subclass calls this one by `super()`, that
    # is another computation, not cached by itself.
    is_other = getattr(kind, name, None) is not wrapper and not _is_own(kind, name, wrapper)
    # A traced call makes no cache, as some exporters reject attributes added by a call. A replica of
    # `nn.DataParallel` has copies of the weights, and lives for one call.
    fields = getattr(obj, "__dict__", ())
    if is_other or REPLICA_MARK in fields or ("cache_instance" not in fields and is_traced()):
        return forward(*rest, **kwargs)
    return cache_of_object(obj, name).call(forward, rest, kwargs)


def is_cached_function(value: Any) -> bool:
    """Whether a function replaces another one, or a method of a class."""
    return isinstance(value, types.FunctionType) and is_ours(value) and hasattr(value, ORIGINAL_ATTRIBUTE)


# Classes


def decorate_class(cls: Any, binding: Binding) -> Any:
    """Patch a class and its future subclasses, and return it."""
    setattr(cls, BINDING, binding)
    setattr(cls, "cache_instance", _CacheAttribute(cache_of_object))  # noqa: B010  mypy knows no such attribute
    _patch_methods(cls)
    inherited = cls.__dict__.get("__init_subclass__")

    def init_subclass(subclass: type, /, **kwargs: Any) -> None:
        if inherited is not None:
            inherited.__get__(None, subclass)(**kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        if hasattr(subclass, BINDING):
            _patch_methods(subclass)

    setattr(init_subclass, ADDED_ATTRIBUTE, True)
    cls.__init_subclass__ = classmethod(init_subclass)
    return cls


def _patch_methods(cls: Any) -> None:
    for name in getattr(cls, BINDING).methods:
        method = getattr(cls, name, None)
        if method is None or is_cached_function(method):
            continue  # already wrapped, here or in a base class
        wrapper = decorate_function(method, None, name)
        if name not in cls.__dict__:
            setattr(wrapper, ADDED_ATTRIBUTE, _AddedTo(cls))
        setattr(cls, name, wrapper)


def _original_method(obj: Any, name: str, wrapper: Any = None) -> Callable[..., Any]:
    """An object's method without the cache: what is now inside of a class's wrapper, by default its class's.

    A notebook may reload classes in place.
    """
    function = getattr(type(obj), name) if wrapper is None else wrapper
    if is_cached_function(function):
        added_to = getattr(function, ADDED_ATTRIBUTE, None)
        if added_to is not None and (owner := added_to()) is not None and isinstance(obj, owner):
            return getattr(super(owner, obj), name)  # type: ignore[no-any-return]
        function = getattr(function, ORIGINAL_ATTRIBUTE)
    return types.MethodType(function, obj)


def _is_own(kind: type, name: str, wrapper: Callable[..., Any]) -> bool:
    """Whether a class has this wrapper as its method, possibly below other decorators."""
    found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    if not any(wrapper in _layers(value) for value in found):
        raise DecorationError(
            f"torchcache cannot cache {wrapper.__qualname__}: it was called with an object whose class does "
            "not have it as a method. Put @torchcache above the decorators that hide it, and write a "
            "staticmethod or classmethod as a function outside of the class"
        )
    return wrapper in _layers(found[0])


def _layers(function: Any) -> Iterator[Any]:
    """A function, and the functions that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


# Ray and Spark pickle a class of ``__main__`` with everything in its ``__dict__``, so these support pickle.


class _AddedTo(weakref.ref[type]):
    """The class to which the decorator has added a method."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _AddedTo, (self(),)


class _CacheAttribute(property):
    """``object.cache_instance`` of a decorated class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _CacheAttribute, (self.fget,)


setattr(_CacheAttribute, ADDED_ATTRIBUTE, True)


def bindings_of(kind: type) -> dict[str, Binding]:
    """The decorators of a class's methods, by name."""
    found: dict[str, Binding] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            for ours in _layers(value):
                if is_cached_function(ours) and BINDING in vars(ours):
                    found[name] = vars(ours)[BINDING] or getattr(kind, BINDING)
    return found


def cache_of_object(obj: Any, name: str | None = None) -> ModuleCache:
    """The cache of a decorated object, or of an object of a decorated class; or of a named method.

    `DecorationError` if there is none.
    """
    cache = getattr(obj, "__dict__", {}).get("cache_instance")
    if cache is None or cache.root is not obj:
        cache = None
    elif name is None or cache.method == name:
        return cache  # type: ignore[no-any-return]
    found = cache.methods.get(name) if cache is not None else None
    return found or _make(obj, name)


def _make(obj: Any, name: str | None) -> ModuleCache:
    """Make the caches of the decorated methods of an object's class."""
    kind = type(obj)
    bindings = bindings_of(kind)
    if not bindings:
        raise DecorationError(f"this {kind.__name__} is not cached: decorate it by torchcache")
    _check_slots(obj)
    with next(iter(bindings.values())).creation():
        first: Any = obj.__dict__.get("cache_instance")
        first = first if first is not None and first.root is obj else None
        plains = {method: _original_method(obj, method) for method in bindings}
        for method, binding in bindings.items():
            if first is None or method not in first.methods:
                others = [plains[one] for one in plains if bindings[one] is binding and one != method]
                cache = binding.cache(obj, plains[method], method, others, first)
                if first is None:
                    first = obj.__dict__["cache_instance"] = cache
                else:
                    first.kept.append(cache)
        found: ModuleCache = first if name is None else first.methods[name]
        return found


# Objects


class CachedMethod:
    """A cached method in the ``__dict__`` of its object, with which it is copied and pickled.

    It holds the object weakly: a reference cycle would keep an unused model in memory until the next garbage
    collection. One that is handed out `holds` it, like a bound method.
    """

    def __init__(
        self, obj: Any, name: str, own: Callable[..., Any] | None, cache: ModuleCache, holds: bool = False
    ) -> None:
        self.cache = cache
        self.own = own  # the object's own attribute of this name, if any
        self._object = weakref.ref(obj)
        self._held = obj if holds else None
        setattr(self, ORIGINAL_ATTRIBUTE, own)
        function = own or getattr(type(obj), name)
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.__code__ = getattr(function, "__code__", type(self).__call__.__code__)  # torch.export reads it
        self.__signature__ = inspect.signature(self.plain())
        self._evaluates = _evaluates(function, name)

    @property
    def __self__(self) -> Any:
        """The object."""
        obj = self._object()
        if obj is None:
            name = self.__name__
            raise ReferenceError(
                f"the object of this {name} does not exist any more: keep it, or what "
                f"torchcache(object.{name}) returns, which holds it"
            )
        return obj

    def plain(self) -> Callable[..., Any]:
        """The method without the cache."""
        return self.own or _original_method(self.__self__, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, found or computed."""
        if is_exported():
            if self.own is not None:
                return self.own(*args, **kwargs)
            obj: Any = self._object()  # Dynamo follows this, but not `plain`
            return getattr(type(obj), self.__name__)(obj, *args, **kwargs)
        return outside(self._call, args, kwargs)

    def _call(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._evaluates and self.__self__.training and not kwargs.get("pool"):
            self.__self__.eval()
        return self.cache.call(Forward(self.plain(), compiler), args, kwargs)

    def replicate(self) -> nn.Module:
        """A replica of the module for `nn.DataParallel`: it has copies of the weights, and is not cached."""
        replica: nn.Module = getattr(type(self.__self__), REPLICATE)(self.__self__)
        replica.__dict__ = without_ours(vars(replica))
        return replica

    def holding(self) -> CachedMethod:
        """A copy that keeps the object alive, for callers that do not."""
        return CachedMethod(self.__self__, self.__name__, self.own, self.cache, holds=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedMethod:
        obj = memo.get(id(self._object()))
        return self if obj is None else self.of(obj, copy.deepcopy(self.own, memo), memo)

    def of(self, obj: Any, own: Callable[..., Any] | None, memo: dict[int, Any]) -> CachedMethod:
        """The method for a copy of the object, with its own cache; `memo` is that of the copy."""
        cache = copy.deepcopy(self.cache, memo)
        return type(self)(obj, self.__name__, own, cache, self._held is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = self._object(), self.__name__, self.own, self.cache, self._held is not None
        return _load_instance, parts


setattr(CachedMethod, ADDED_ATTRIBUTE, METHOD)


def _evaluates(method: Callable[..., Any], name: str) -> bool:
    """Whether a method calls ``self.eval()`` before it computes, like those of sentence-transformers.

    Models are created in training mode. With that in the key, the first call of each process would differ
    from later ones, and a script with one call would never have a hit. This cannot be inferred from source:
    code before `eval` may depend on the mode.
    """
    package = str(getattr(method, "__module__", "")).partition(".")[0]
    return package == "sentence_transformers" and (name.startswith("encode") or name == "predict")


def _load_instance(
    obj: Any, name: str, own: Callable[..., Any] | None, cache: ModuleCache, holds: bool
) -> CachedMethod:
    cache.bind(obj, own or _original_method(obj, name), name)
    return CachedMethod(obj, name, own, cache, holds)


_load_instance.__module__ = "torchcache2"  # the path that pickles name, wherever this file is


def methods_of(obj: Any) -> dict[str, CachedMethod]:
    """The cached methods of an object."""
    fields = getattr(obj, "__dict__", {})
    return {name: value for name, value in fields.items() if type(value) is CachedMethod}


def decorate_object(obj: Any, binding: Binding, *, exactly: bool) -> None:
    """Cache methods of an object: `exactly` those of the binding, or these in addition to others."""
    _check_slots(obj)
    known, settings = methods_of(obj), binding.settings_of(obj)
    before = {name: method.cache.settings for name, method in known.items()}
    if not known and (cache := obj.__dict__.get("cache_instance")) is not None and cache.root is obj:
        before = {name: one.settings for name, one in cache.methods.items()}  # by its decorated class
    wanted = dict.fromkeys(binding.methods, settings)
    if before == wanted if exactly else wanted.items() <= before.items():
        return
    owns = {name: own_method(obj, name) for name in binding.methods}
    plains = {name: own or _original_method(obj, name) for name, own in owns.items()}
    first = None if exactly else next((known[name].cache for name in known if name not in owns), None)
    caches: dict[str, ModuleCache] = {}
    for name, plain in plains.items():
        others = [other for other in plains.values() if other is not plain]
        caches[name] = binding.cache(obj, plain, name, others, first)
        first = first or caches[name]
    if not known and before:
        obj.__dict__["cache_instance"].close()
    restore_object(obj, known if exactly else known.keys() & owns.keys())
    for name, cache in caches.items():
        obj.__dict__[name] = CachedMethod(obj, name, owns[name], cache)
    _refer(obj)
    _patch_copy(type(obj))


def _check_slots(obj: Any) -> None:
    if not (hasattr(obj, "__dict__") and type(obj).__weakrefoffset__):
        lacks = "__weakref__" if hasattr(obj, "__dict__") else "__dict__"
        raise DecorationError(f"this {type(obj).__name__} cannot be cached: it has no {lacks}")


def own_method(obj: Any, name: str) -> Any:
    """The object's own attribute that overrides a method, if any; raises if the method cannot be cached."""
    own: Any = obj.__dict__.get(name)
    if isinstance(own, CachedMethod):
        return own.own
    raw = inspect.getattr_static(type(obj), name, None)
    if own is None and raw is None and isinstance(obj, LazyModule):
        return obj.method(name)
    part = getattr(obj, name, None) if raw is None else None
    check_method(type(obj), name, part if isinstance(part, nn.Module) else own)
    return own


def check_method(kind: type, name: str, own: Any = None, *, in_body: bool = False) -> None:
    """Raise if an attribute of a class, or an object's `own` one, cannot be cached.

    Special methods, which Python looks up in the class, can be cached `in_body` only.
    """
    raw = inspect.getattr_static(kind, name, None)
    why = ""
    if isinstance(own, nn.Module):
        why = f"it is a module. Decorate that: torchcache(model.{name})"
    elif own is None and raw is None:
        why = f"{kind.__name__} has no method of this name"
    elif hasattr(type(raw), "__set__"):
        why = f"it is a {type(raw).__name__}. Name the method that it calls"
    elif name.startswith("__") and not in_body:
        why = f"Python looks it up in the class. Put @torchcache above it in the body of {kind.__name__}"
    elif own is None and not isinstance(raw, types.FunctionType):
        why = f"it is a {type(raw).__name__}. Decorate a function that calls it"
    elif is_deferred(own or raw):
        why = DEFERRED
    if why:
        raise DecorationError(f"torchcache cannot decorate the method {name!r}: {why}")


def is_deferred(function: Any) -> bool:
    """Whether calling a function returns a coroutine or generator."""
    return any(asks(function) for asks in _ASKS)


def restore_object(obj: Any, names: Collection[str]) -> None:
    """Restore some methods of an object."""
    for name in names:
        method = obj.__dict__.pop(name)
        method.cache.leave()
        if method.own is not None:
            obj.__dict__[name] = method.own
    _refer(obj)


def _patch_copy(kind: Any) -> None:
    """Make `copy.copy` give a copy its own cached methods: the original's would compute with the original."""
    own = getattr(kind, "__copy__", None)
    if is_cached_function(own):
        return

    def copied(obj: Any) -> Any:
        twin = copy.copy(_Reduced(obj)) if own is None else own(obj)
        if isinstance(twin, _Reduced):  # the name of a global object
            return obj
        memo = {id(obj): twin}
        for name, method in [*getattr(twin, "__dict__", {}).items()]:
            if is_method(method) and name == method.__name__:
                vars(twin)[name] = method.of(twin, method.own, memo)
                _refer(twin)
        return twin

    setattr(copied, ORIGINAL_ATTRIBUTE, own)
    if "__copy__" not in vars(kind):
        setattr(copied, ADDED_ATTRIBUTE, True)
    with contextlib.suppress(TypeError):  # a class written in C
        kind.__copy__ = copied


class _Reduced:
    """Stands for an object in `copy.copy`, which would call the ``__copy__`` of the object's class again."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._obj.__reduce_ex__(protocol)


def _refer(obj: Any) -> None:
    """Set an object's references to the caches of its methods."""
    known, fields = list(methods_of(obj).values()), obj.__dict__
    fields.pop("cache_instance", None)
    fields.pop(REPLICATE, None)
    if known:
        fields["cache_instance"] = known[0].cache
    if known and isinstance(obj, nn.Module):
        fields[REPLICATE] = known[0].replicate
