"""`ModuleCache`: runs a function, or a method of a module or another object, with or without its cache."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcache2.core.errors import NotCachedError, OptionError
from torchcache2.core.logs import logger
from torchcache2.core.settings import CacheSettings, disabled_by_environment, strict_by_environment
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.decorator import bypass
from torchcache2.decorator.bypass import EDITED, STALE, Backoff, BypassError, glance, not_stored
from torchcache2.decorator.forward import Computation, Known, Names, given_back, may_check
from torchcache2.decorator.probe import CallChecks, Probes
from torchcache2.decorator.tracing import Runner, is_traced, turns_grad_off
from torchcache2.decorator.warmup import arguments_of, estimate, warm_up
from torchcache2.engine.batch import Checks, NotStoredError, WrongRowsError
from torchcache2.engine.cache import Cache, now
from torchcache2.engine.explain import NOTHING_DIFFERS, CallSeen, compared, of_calls
from torchcache2.engine.running import Forward, OwnMemoryError
from torchcache2.engine.stack import TierStack
from torchcache2.engine.stats import ADDED_UP, CacheStats
from torchcache2.engine.values.outputs import found, joined, output_of
from torchcache2.files.contents import FileDigests
from torchcache2.identity.arguments import Signature
from torchcache2.identity.encoding import qualified_name
from torchcache2.identity.fingerprint import Fingerprint, at_most
from torchcache2.identity.marks import ADDED_ATTRIBUTE
from torchcache2.identity.namespace import History, NamespaceKeeper

Plain = Callable[..., Any]
_CPU = torch.device("cpu")
_MANY = 1000  # items before a hint says why none was found
_LENGTHS = 4  # shapes of items that may come from padding


class Owner:
    """Shared by the caches of one object's methods, so that its state is watched only once.

    It holds the caches weakly: a reference cycle would keep their rows alive after the object.
    """

    def __init__(self, history: History | None) -> None:
        self.root: Callable[[], Any] = lambda: None
        self.thread = threading.local()
        self.history = history
        self.methods: weakref.WeakValueDictionary[str, ModuleCache] = weakref.WeakValueDictionary()
        self.last = ""  # the method of the last call
        self._keepers: dict[tuple[Any, ...], NamespaceKeeper] = {}

    def keeper(self, settings: CacheSettings) -> NamespaceKeeper:
        """The keeper of the object's namespace, by the options that are part of it."""
        names = ("persistent_module_hash", "version", "code_version", "cache_dtype", "distributed", "ignore")
        options = tuple(getattr(settings, name) for name in names)
        if options not in self._keepers:
            keeper = NamespaceKeeper("a cache without a module", settings, self.history)
            self.history = keeper.history
            self._keepers[options] = keeper
        return self._keepers[options]

    def add(self, name: str, cache: ModuleCache) -> None:
        """Register the cache of a method."""
        self.methods[name] = cache
        for keeper in self._keepers.values():
            if name not in keeper.methods:
                keeper.methods = {*keeper.methods, name}
                keeper.reset()


class ModuleCache:
    """The cache of a module, another object, or a function, set by `bind`.

    Each cached method has one; an object's first one is its ``cache_instance``, which represents all of them.
    Caches of one decorator share `tiers`, `probes`, and the `history` that `explain` uses; those `beside`
    each other belong to one object, and share its `owner`. ``names(namespace, call)`` makes the keys of a
    call's items, if these have names of their own.
    """

    __module__ = "torchcache2"

    def __init__(
        self,
        settings: CacheSettings,
        tiers: TierStack | None = None,
        history: History | None = None,
        probes: Probes | None = None,
        beside: ModuleCache | None = None,
        owner: Owner | None = None,
        names: Names | None = None,
    ) -> None:
        if beside is not None and tiers is None and settings.shares_tiers_with(beside.settings):
            tiers = beside.engine.tiers
        self.settings: CacheSettings = settings
        self.engine: Cache = Cache(bytes(16), settings, tiers=tiers)
        self.engine.face, self.engine.must_stack = weakref.ref(self), settings.probe
        self._owner: Owner = owner or (beside._owner if beside is not None else Owner(history))
        self.kept: list[ModuleCache] = []  # other methods' caches without other references
        self._made = now()
        self.method = "forward"
        self._sealed: tuple[bytes, torch.device] | None = None  # the namespace, and where outputs were made
        self.keeper = self._owner.keeper(settings)
        self._known = Known(settings, self.keeper, Runner(self._owner.thread), names)
        self._calls: deque[CallSeen] = deque(maxlen=2)
        self._backoff = Backoff(4, 16)
        self.bypass: str | None = None  # why the last call was not cached
        self.reasons: dict[str, str] = {}  # the last text for each reason
        self._probes = probes if probes is not None else Probes()
        self._walks = 1
        self._is_without_grad = False
        self._hint_at: float = _MANY  # how many items, until the next look

    def bind(self, root: Any, plain: Plain, method: str = "forward", others: Sequence[Plain] = ()) -> None:
        """Set the target: `plain` is the function, or the bound method of an object, without the cache.

        `others` are methods under the same decorator, which may have the arguments that options name.
        """
        self.method, self._others = method, tuple(map(inspect.signature, others))
        self._owner.root = weakref.ref(root)
        self.keeper.name = root.__name__ if _is_function(root) else type(root).__name__
        self._read_signature(plain)
        self._known.runner.bind(plain)
        self.engine.name = self.name
        if not _is_function(root):
            self._owner.add(method, self)

    def _read_signature(self, plain: Plain) -> None:
        shared, items = (
            self._own(names, plain) for names in (self.settings.shared_args, self.settings.item_args)
        )
        self._known.signature = Signature(
            plain,
            shared=shared,
            item_args=items,
            method=self.method,
            ignore=self.settings.ignore,
            code_version=self.settings.code_version,
            content=FileDigests(self.settings.folder).of,
        )
        self.keeper.arguments |= self._known.signature.ignored
        self._is_without_grad = turns_grad_off(plain)

    def _own(self, names: Sequence[str], plain: Plain) -> tuple[str, ...]:
        """The names without those that only other methods have."""
        own = inspect.signature(plain)
        return tuple(
            name for name in names if _has(own, name) or not any(_has(other, name) for other in self._others)
        )

    @property
    def methods(self) -> Mapping[str, ModuleCache]:
        """The caches of one object, by method; for a function, under ``"forward"``."""
        return dict(self._owner.methods) or {self.method: self}

    def of(self, method: str | None) -> ModuleCache:
        """The cache of one method; None: the only one.

        Raises
        ------
        OptionError
            If the method is not cached, or None is ambiguous.
        """
        if method is None and len(self.methods) == 1:
            return self
        if method is None or method not in self.methods:
            given = "is not cached" if method else "has to be named"
            raise OptionError(f"method={method!r}: the method {given}; cached are {', '.join(self.methods)}")
        return self.methods[method]

    @property
    def root(self) -> Any:
        """The object or function; None if it no longer exists."""
        return self._owner.root()

    def stats(self, method: str | None = None) -> CacheStats:
        """Statistics of all methods of this object so far, or of one."""
        chosen = [self.of(method)] if method is not None else self.methods.values()
        return functools.reduce(_added, [one.engine.stats() for one in chosen])

    @property
    def namespace(self) -> bytes:
        """The namespace of the last call, 16 bytes."""
        return self.engine.namespace

    @property
    def cache_dir(self) -> Path | None:
        """The folder of the rows; None if they are in memory only."""
        return self.engine.cache_dir

    @property
    def module_hash(self) -> str:
        """The namespace, 32 hexadecimal digits, as of now."""
        self.engine.namespace = self.keeper.look(self.living_root()).namespace
        return self.namespace.hex()

    @property
    def fingerprint(self) -> Fingerprint:
        """The named parts behind the namespace, as of the last call."""
        return self.keeper.fingerprint

    def refresh(self) -> None:
        """Read the whole module again at the next call; needed after edits that the cache does not notice."""
        for cache in self.methods.values():
            cache.keeper.reset()

    def explain(self, method: str | None = None) -> str:
        """Why items of the last call may have been misses: one line per reason.

        The call is the last one of the object, or of one method. If it was not cached, the first line says
        why. The namespace is compared with this module's previous one; if there is none, with that of another
        module of its class under the same decorator; or else with the last used one in the cache directory.
        If the namespace is unchanged, the arguments of the last two calls are compared. At the end comes what
        `ignore` leaves out.
        """
        asked = self.of(method) if method is not None else self.methods.get(self._owner.last, self)
        return asked._explained()

    def _explained(self) -> str:
        stop = bypass.of_reading(self.keeper, self.living_root())
        if isinstance(stop, BypassError):
            return f"not cached: {stop.reason}: {stop.text}"
        self.engine.namespace = self.keeper.look(self.living_root()).namespace
        now, before = self.fingerprint, self.keeper.history.before(self.fingerprint)
        calls, directory, why = list(self._calls), self.engine.tiers.directory, self._why_not_cached()
        if len(calls) == 2 and calls[0].namespace == calls[1].namespace == now.namespace:
            text = of_calls(*calls) if why is None else f"not cached: {why}"
        else:
            text = compared(self.name, self._class(), now, before, why, directory, self._made)
        if not (self._owner.last or self.stats().misses):
            text += f"\n{self.name} was not called yet; if you call another method, name it in methods="
        names = self._known.signature.ignored - {*self.keeper.ignored}
        paths = [*self.keeper.ignored, *[f"argument {name}" for name in sorted(names)]]
        ignored = at_most([f"left out by ignore: {path}" for path in paths])
        return "\n".join([text, *ignored])

    warmup, estimate = warm_up, estimate  # methods; documented in `warmup.py`

    def description(self, namespace: bytes) -> dict[str, Any]:
        """A description of the namespace as JSON, for people and `explain`."""
        document = self.engine.document()
        document |= {"class": self._class(), "label": self.settings.label, "methods": sorted(self.methods)}
        fingerprint = self.fingerprint  # read once: another thread may change it
        if fingerprint.namespace == namespace:
            document["parts"] = {name: data.hex() for name, data in fingerprint.parts.items()}
            document["values"] = dict(fingerprint.values)
        return document

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of ``forward(*args, **kwargs)``."""
        # If the forward calls its own module, only the outermost call is cached.
        self._owner.last = self.method
        is_passed = self._known.runner.is_inside or not self.settings.enabled
        if is_passed or is_traced() or disabled_by_environment():
            return forward(*args, **kwargs)
        if self._sealed is not None:
            return self._found_only(*self._sealed, args, kwargs)
        try:
            output = self._call(forward, args, kwargs)
        except torch.cuda.OutOfMemoryError as error:
            self.engine.relieve(error)
            raise
        if self.engine.counters.hits + self.engine.counters.misses >= self._hint_at:
            self._hint()
        return given_back(output, args, kwargs)

    def seal(self, method: str | None = None) -> None:
        """Find what is kept, and compute nothing more: an item that is not there is then an error.

        The key stays what it is now. The module is not used any more: it may be changed, freed, or moved to
        ``meta``. Returns once all rows are as durable as the tiers make them.
        """
        cache = self.of(method)
        stop = bypass.of_reading(cache.keeper, cache.living_root())
        if isinstance(stop, BypassError):
            raise stop.as_error(cache.name)
        seen = cache.keeper.look(cache.living_root())
        cache.engine.namespace = seen.namespace
        cache.engine.flush()
        device = next((tensor.device for tensor in seen.tensors.tensors), _CPU)
        cache._sealed = seen.namespace, device

    def missing(self, batches: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None) -> list[int]:
        """The numbers of the items, counted over all batches, that would be computed; reads no row.

        Parameters
        ----------
        batches : iterable
            Batches of inputs, as for `warmup`.
        inputs : callable, optional
            As for `warmup`.
        """
        root, found, done = self.living_root(), list[int](), 0
        namespace = self._sealed[0] if self._sealed is not None else self.keeper.look(root).namespace
        for batch in batches:
            call = self._known.signature.bind(*arguments_of(batch, inputs))
            keys = self._known.keys(namespace, call)
            found += (np.flatnonzero(~self.engine.tiers.has(keys)) + done).tolist()
            done += len(keys)
        return found

    def _found_only(
        self, namespace: bytes, device: torch.device, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The output of a call from rows alone; `NotCachedError` if one is missing."""
        call = self._known.signature.bind(args, kwargs)
        keys, device = self._known.keys(namespace, call), call.device or device
        parts = [(positions, found(rows)) for positions, rows in self.engine.tiers.get(keys).parts]
        count = sum(len(positions) for positions, _ in parts)
        rows = joined(parts, len(keys), device=device) if count == len(keys) > 0 else None
        if rows is None:
            text = f"{len(keys) - count} of {len(keys)} items are not there, and the cache is sealed"
            raise NotCachedError(f"{self.name}: {text}")
        self.engine.counters.add(hits=len(keys))
        output = output_of(rows, device=device)
        return given_back(output[0] if call.is_one else output, args, kwargs)

    def _hint(self) -> None:
        """After 1,000 items, say once why none was found; later, whether padding may be why few were."""
        found, items = self.engine.counters.hits, self.engine.counters.hits + self.engine.counters.misses
        is_first, self._hint_at = self._hint_at == _MANY, 2 * items
        if found == 0 and is_first:
            why = self.explain()
            # In the first epoch, all items are new.
            log = logger.info if why.startswith(("namespace ", NOTHING_DIFFERS)) else logger.warning
            text = "%s: none of the first %s items was found; explain() says: %s"
            self.engine.tell("hint", text, self.name, f"{items:,}", why, log=log)
        elif items // 100 < found < items // 2 and self._known.lengths() >= _LENGTHS:
            saved = self.engine.counters.stats().seconds_saved or 0.0
            if saved < 0.0:
                text = "%s: only %s of %s items were found, and caching took %.1f s more than that saved: %s"
                advice = bypass.advice_for("batch", "padding")
                self.engine.tell("padding", text, self.name, f"{found:,}", f"{items:,}", -saved, advice)

    def _call(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        start, root, runner = time.perf_counter(), self.living_root(), self._known.runner
        computation = self._cacheable(root, forward, args, kwargs)
        if computation is None:
            return runner.run(forward, args, kwargs)
        try:
            output = self._cached(computation, start)
            if self._backoff:
                self._backoff.clear(glance(root, args, kwargs))
            return output[0] if computation.call.is_one else output
        except BypassError as stop:
            self._step_aside(stop, len(computation.keys), lambda: glance(root, args, kwargs))
        except NotStoredError as stop:
            is_final = stop.reason != "random" or computation.context in self._known.random
            aside = BypassError(stop.reason, stop.text, stop.error, is_final=is_final)
            self._step_aside(aside, len(computation.keys), lambda: glance(root, args, kwargs))
            return computation.singles[0] if computation.singles else stop.output
        except OwnMemoryError:
            pass
        if computation.singles:
            return computation.singles[0]
        return computation.ran[0] if computation.ran else runner.run(forward, args, kwargs)

    def _cacheable(
        self, root: Any, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Computation | None:
        """The computation of a call; None if it is not cached, which is counted."""
        reason = self._backoff.reason(glance(root, args, kwargs)) if self._backoff else None
        self.bypass = None if reason is None or self._is_strict() else reason
        if self.bypass is not None:
            self.engine.count_bypass(self.bypass, self._known.signature.count(args, kwargs), "")
            return None
        try:
            return self._computation(root, forward, args, kwargs)
        except BypassError as stop:
            items = self._known.signature.count(args, kwargs)
            self._step_aside(stop, items, lambda: glance(root, args, kwargs))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.engine.do_without(self._known.signature.count(args, kwargs), error)
        return None

    def _step_aside(self, stop: BypassError, items: int, kind: Callable[[], Hashable]) -> None:
        """Count a call that is not cached, or raise with ``strict``."""
        self.reasons[stop.reason] = stop.text
        self.bypass = stop.reason
        if self._is_strict():
            raise stop.as_error(self.name) from None
        self.engine.count_bypass(stop.reason, items, stop.text)
        if stop.is_final:
            self._backoff.add(kind(), stop.reason)

    def _is_strict(self) -> bool:
        return self.settings.strict or strict_by_environment()

    def _why_not_cached(self) -> str | None:
        """Why the last call was not cached; None if it was."""
        if self.engine.is_closed:
            return "the cache is closed"
        if not self.settings.enabled:
            return "enabled=False"
        if disabled_by_environment():
            return "TORCHCACHE_DISABLE is set"
        return None if self.bypass is None else f"{self.bypass}: {self.reasons[self.bypass]}"

    def _computation(
        self, root: Any, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Computation | None:
        """The computation of a call; raises if the call cannot be cached.

        None if the arguments do not fit the signature: the plain forward then raises the usual error.
        """
        keeper, known = self.keeper, self._known
        stops = bypass.of_module(keeper, root, is_without_grad=self._is_without_grad)
        walks = keeper.walks
        if stops and stops[0].reason in self.reasons and not self._is_strict():
            raise BypassError.all_of(stops)  # the arguments' reasons were reported
        if self._walks != walks:  # code was read again, so defaults may have changed
            self._read_signature(forward.function)
            self._walks = walks
        call = bypass.ask_arguments(
            known.signature, args, kwargs, keeper, stops, is_without_grad=self._is_without_grad
        )
        if call is None:
            return None
        seen = keeper.look_at_tensors()
        if keeper.mistaken:
            self._drop_mistaken()
        self.engine.namespace = seen.namespace
        bypass.ask_weights(seen)
        keys = known.keys(seen.namespace, call)
        if not keeper.holds():  # bytes of weights that arrived with the keys show an edit
            return self._computation(root, forward, args, kwargs)
        is_alike = len(self._calls) > 0 and self._calls[-1].group == keys.group
        self._calls.append(self._calls[-1] if is_alike else CallSeen.of(keys, call))
        if known.random and known.context(seen.namespace, call) in known.random:
            raise BypassError.because("random", "its output was random before")
        checks = Checks()
        if self.settings.probe:
            kind = self._probes.kind(keys.group or keys.namespace, self.fingerprint, call, self.method)
            may_run = functools.partial(may_check, known, root, call, seen)
            checks = CallChecks(self._probes, kind, keys, may_run)
        return Computation(known, call, keys, forward, root, seen, checks, self.description, self.refresh)

    def _cached(self, computation: Computation, start: float) -> Any:
        keys, checks = computation.keys, computation.checks
        try:
            return self.engine.output(keys, computation, start)
        except WrongRowsError as stop:
            text = self._stale(computation, stop.text)
            if text is None:
                raise not_stored("batch", stop.output, stop.text, cause="padding") from None
            if self._is_strict():
                raise NotCachedError(text) from None
            self.engine.tell("stale", "%s", text)
            self.engine.counters.add(misses=len(keys))
            return stop.output
        except NotStoredError as stop:
            if stop.reason == "stack":
                stop = not_stored("batch", stop.output, stop.text, cause="padding")
            if stop.reason == "batch":
                is_first = isinstance(checks, CallChecks) and checks.is_first_batch
                if not is_first:  # else no row of such calls is read in this run: those of other methods stay
                    self._drop(keys.namespace)
                if isinstance(checks, CallChecks):
                    self._probes.depends(checks.kind)
            raise stop from None

    def _stale(self, computation: Computation, why: str) -> str | None:
        """What to say about found rows that were outdated; None if items depend on their batch.

        They do if parts of the batch, computed by themselves, differ from it. All rows have been dropped.
        """
        namespace, checks = computation.keys.namespace, computation.checks
        self._probes.start_anew(namespace)
        text = f"{self.name}: {why}. All its rows are dropped, and computed anew: "
        if self.keeper.look(computation.root).namespace != namespace:
            return text + EDITED
        if isinstance(checks, CallChecks):
            is_steady = self._probes.is_steady(checks.kind)
            if not is_steady or computation.dependence() is not None:
                self._probes.depends(checks.kind)
                return None
        return text + STALE

    def _drop(self, namespace: bytes) -> None:
        self.engine.drop(namespace)
        self._probes.start_anew(namespace)

    def flush(self) -> None:
        """Return once all rows computed by this process are as durable as the tiers make them.

        Workers, which have a cache of their own, write rows a second after the last one, and at their end.
        """
        for cache in self.methods.values():
            cache.engine.flush()

    def clear(self) -> None:
        """Forget every row of this object: in memory, on servers, and on disk unless others use them there.

        What others use in a folder is found again. `free_memory` leaves all that is outside of memory.
        """
        for cache in self.methods.values():
            cache.engine.clear()
            cache._probes.forget()
            cache._backoff = Backoff(4, 16)

    def free_memory(self) -> None:
        """Free the rows in memory, also those that ranks share; later calls find them on disk, or compute."""
        self.flush()
        for cache in self.methods.values():
            cache.engine.tiers.forget(cache.namespace)

    def close(self) -> None:
        """Stop caching and free the rows in memory; later calls compute everything.

        Waiting rows are on disk when this returns.
        """
        for cache in (self, *self.methods.values()):
            cache.engine.close()

    def leave(self) -> None:
        """Close only this cache: its method is no longer cached."""
        if self._owner.methods.get(self.method) is self:
            del self._owner.methods[self.method]
        others = self._owner.methods.values()  # their rows are in the same namespace
        self.engine.close(forgets=all(one.engine.tiers is not self.engine.tiers for one in others))

    def _drop_mistaken(self) -> None:
        """Drop rows that may have been computed with weights other than their namespace's."""
        mistaken, self.keeper.mistaken = self.keeper.mistaken, []
        for namespace in mistaken if not self.engine.is_closed else ():
            self._drop(namespace)
        self.engine.tell(
            "edited",
            "%s: weights were edited through .data or numpy, which torch does not record, so the edit was "
            "noticed some calls later. Rows that may be wrong are dropped. After such an edit, call "
            ".cache_instance.refresh(); edits in place, under torch.no_grad(), are noticed at once",
            self.name,
        )

    def living_root(self) -> Any:
        """The object or function; raises `ReferenceError` if it no longer exists."""
        root = self.root
        if root is None:
            text = "the module of this cache no longer exists, or was not called since it was loaded"
            raise ReferenceError(text)
        return root

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.keeper.name + f".{self.method}" * (self.method != "forward")

    def _class(self) -> str:
        root = self.root
        return qualified_name(root if _is_function(root) else type(root))

    def __enter__(self) -> ModuleCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ModuleCache {self.namespace.hex()}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleCache:
        # A copied object gets its own cache, within the same budget.
        copy = None if _is_function(self.root) else memo.get(id(self.root))
        if copy is None:
            return self
        first = memo.get(id(self._owner))  # the copy of another method's cache
        twin = ModuleCache(self.settings, self.engine.tiers, self.keeper.history, self._probes, first)
        memo.setdefault(id(self._owner), twin)
        twin.method, twin._others = self.method, self._others
        twin._known.signature = self._known.signature
        twin._is_without_grad = self._is_without_grad
        twin.keeper.name, twin.engine.name = self.keeper.name, self.engine.name
        twin._owner.root = weakref.ref(copy)
        twin._owner.add(twin.method, twin)
        twin.kept = deepcopy(self.kept, memo)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        first = next(iter(self.methods.values()))
        return _load_cache, (self.settings, None if first is self else first)


def _load_cache(settings: CacheSettings, first: ModuleCache | None = None) -> ModuleCache:
    return ModuleCache(settings, beside=first)


def _is_function(root: Any) -> bool:
    return isinstance(root, types.FunctionType)


def _has(signature: inspect.Signature, name: str) -> bool:
    """Whether a function accepts an argument of this name."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _added(left: CacheStats, right: CacheStats) -> CacheStats:
    """The sum of two methods' statistics; rows and bytes are shared, not added."""
    counts = {name: getattr(left, name) + getattr(right, name) for name in ADDED_UP}
    reasons = {*left.bypasses, *right.bypasses}
    bypasses = {why: left.bypasses.get(why, 0) + right.bypasses.get(why, 0) for why in sorted(reasons)}
    saved = None if None in (a := (left.seconds_saved, right.seconds_saved)) else sum(a)  # type: ignore[arg-type]
    return dataclasses.replace(left, **counts, bypasses=bypasses, seconds_saved=saved)


setattr(ModuleCache, ADDED_ATTRIBUTE, True)
_load_cache.__module__ = "torchcache2"  # the path that pickles name, wherever this file is
