"""`ModuleCache`: runs the forward of a module, or a function, through a cache or past it."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torchcache2.core.environment import disabled_by_environment
from torchcache2.core.keys import Keys
from torchcache2.core.settings import CacheSettings
from torchcache2.decorator import bypass
from torchcache2.decorator.bypass import BypassError, not_stored
from torchcache2.decorator.elsewhere import telling
from torchcache2.decorator.explain import CallSeen, explained
from torchcache2.decorator.forward import Computation, Shapes
from torchcache2.decorator.passing import Forward, Passing
from torchcache2.decorator.probe import STRONGEST
from torchcache2.decorator.probes import DEPENDENT, Kind, ProbePlan, Probes
from torchcache2.decorator.shortcuts import glance
from torchcache2.decorator.tracing import Runner, is_traced
from torchcache2.decorator.warmup import warm_up
from torchcache2.engine.batch import NotStoredError
from torchcache2.engine.cache import Cache, now
from torchcache2.engine.collective.apart import apart
from torchcache2.engine.pressure import OwnMemoryError
from torchcache2.engine.randomness import RandomContexts
from torchcache2.engine.stack import TierStack
from torchcache2.engine.steps import Steps
from torchcache2.identity.arguments import BoundCall, Signature
from torchcache2.identity.encoding import digest, qualified_name
from torchcache2.identity.entries import first_batch_size
from torchcache2.identity.items import item_keys
from torchcache2.identity.modulewalk import Fingerprint
from torchcache2.identity.namespace import History, NamespaceKeeper

__all__ = ["ModuleCache"]

_RESULTS = range(DEPENDENT, STRONGEST + 1)


class ModuleCache(Passing):
    """The cache of one module or function, which `bind` names.

    Caches of one decorator share the `tiers`, the `history` that `explain` compares with, and the results of
    `probes`.
    """

    def __init__(
        self,
        settings: CacheSettings,
        tiers: TierStack | None = None,
        history: History | None = None,
        probes: Probes | None = None,
    ) -> None:
        super().__init__(bytes(16), settings, tiers=tiers)
        self._runner = Runner()
        self._made = now()
        self._root: Callable[[], Any] = lambda: None
        self.keeper = NamespaceKeeper("a cache without a module", settings, history)
        self._calls: deque[CallSeen] = deque(maxlen=2)
        self._random = RandomContexts()
        self._shapes: dict[bytes, Shapes | None] = {}
        self._probes = probes if probes is not None else Probes()
        self._walks = 1

    def bind(self, root: Any, plain: Forward) -> None:
        """Say what is cached. `plain` is its forward without the cache; of a module, the bound method."""
        self._root = weakref.ref(root)
        self.keeper.name = type(root).__name__ if isinstance(root, nn.Module) else root.__name__
        self._read_signature(plain)
        self._runner.bind(plain)

    def _read_signature(self, plain: Forward) -> None:
        settings = self.settings
        self.signature = Signature(plain, shared=settings.shared_args, item_args=settings.item_args)

    @property
    def root(self) -> Any:
        """The module or function; None if it does not exist any more."""
        return self._root()

    @property
    def module_hash(self) -> str:
        """The namespace, 32 hexadecimal digits, as of now."""
        self.namespace = self.keeper.look(self._living_root()).namespace
        return self.namespace.hex()

    @property
    def fingerprint(self) -> Fingerprint:
        """The named parts behind the namespace, as of the last call."""
        return self.keeper.fingerprint

    def refresh(self) -> None:
        """Read the whole module again at the next call; needed after edits that are not noticed."""
        self.keeper.reset()

    def explain(self) -> str:
        """Why items of the last call may have been misses, one line for each reason.

        If the last call was not cached, the first line says why. The namespace is compared with the one that
        this module had before; if this is its first, with that of another module of its class under the same
        decorator; or else with the one that was used last in the cache directory. If the namespace has not
        changed, the arguments of the last two calls are compared.
        """
        self.namespace = self.keeper.look(self._living_root()).namespace
        now, before = self.fingerprint, self.keeper.history.before(self.fingerprint)
        calls, directory = list(self._calls), self._tiers.directory
        return explained(
            self._name(), self._class(), now, before, calls, self._why_not_cached(), directory, self._made
        )

    warmup = warm_up  # a method, which is documented where it is written

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What a namespace of this cache stands for, as JSON, for people and `explain`."""
        document = super().description(namespace)
        document["class"] = self._class()
        fingerprint = self.fingerprint  # once: another thread may change it meanwhile
        if fingerprint.namespace == namespace:
            document["parts"] = {name: data.hex() for name, data in fingerprint.parts.items()}
            document["values"] = dict(fingerprint.values)
        document["probed"] = self._probes.found(namespace)
        return document

    def call(self, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        """The output of ``plain(*args, **kwargs)``."""
        # If the forward calls its own module, only the outermost call is cached.
        is_passed = self._runner.is_inside or not self.settings.enabled
        if is_passed or is_traced() or disabled_by_environment():
            return (yield plain, args, kwargs)
        return (yield from self._relieved(self._called_with, plain, args, kwargs))

    def _called_with(self, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        start = time.perf_counter()
        root = self._living_root()
        kind = glance(root, args, kwargs)
        try:
            computation = self._cacheable(root, plain, args, kwargs, kind)
        except Exception as error:
            self._stand_by(error)
            raise
        if computation is None:
            with self._stand_by():
                return (yield from self._runner.run(plain, args, kwargs))
        try:
            output = yield from self._cached(computation, start)
            self._shortcuts.clear(kind)
            return output
        except BypassError as stop:
            self._step_aside(stop, kind, first_batch_size(args, kwargs))
        except NotStoredError as stop:
            is_final = stop.reason != "random" or self._random.is_final(computation.context)
            self._step_aside(BypassError.of(stop, is_final=is_final), kind, len(computation.keys))
            return stop.output
        except OwnMemoryError as stop:
            if computation.is_sharded and not computation.ran:
                raise stop.error from None  # other ranks may not run this forward, which would wait for them
        if computation.ran:
            return computation.ran[0]
        with apart():  # the other ranks have taken their step
            return (yield from self._runner.run(plain, args, kwargs))

    def _computation(
        self, root: Any, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Computation | None:
        """What computes the items of a call; raises if the call cannot be cached.

        None if the arguments do not fit the signature: the plain forward then raises the usual error.
        """
        bypass.ask_module(self.keeper, root)
        if self._walks != self.keeper.walks:  # the source has been read again, so defaults may have changed
            self._read_signature(plain)
            self._walks = self.keeper.walks
        call = bypass.ask_arguments(self.signature, args, kwargs, self.keeper)
        if call is None:
            return None
        seen = self.keeper.look_at_tensors()
        if self.keeper.mistaken:
            self._drop_mistaken()
        self.namespace = seen.namespace
        bypass.ask_weights(seen)
        leaves = tuple([(path, tensor.dtype, tensor.shape[1:]) for path, tensor in call.leaves])
        self._calls.append(CallSeen(seen.namespace, call.context, leaves))
        context = digest([seen.namespace, call.context])
        bypass.ask_randomness(self._random, context)
        keys = self._keys(seen.namespace, call)
        if not self.keeper.holds():  # bytes of weights that have come with the keys show an edit
            self._calls.pop()
            return self._computation(root, plain, args, kwargs)
        is_on = self.settings.probe and seen.shards is None
        plan = ProbePlan(self._probes, self._probed_before, root, self.fingerprint, call, keys, is_on=is_on)
        plan.decide()
        return Computation(
            call,
            keys,
            context,
            functools.partial(self._runner.run, plain),
            root=root,
            keeper=self.keeper,
            seen=seen,
            plan=plan,
            random=self._random,
            shapes=self._shapes,
            bind=self.signature.bind,
            keys_of=lambda call: self._keys(seen.namespace, call).data,
            settings=self.settings,
        )

    def _keys(self, namespace: bytes, call: BoundCall) -> Keys:
        entries = [*call.entries, *call.aligned]
        count = self.settings.subsample_count
        return item_keys(namespace, call.context, call.leaves, entries, subsample_count=count)

    def _cached(self, computation: Computation, start: float) -> Steps[Any]:
        keys, plan, probes = computation.keys, computation.plan, bool(computation.plan.kinds)
        dtypes = computation.dtypes() if self.settings.verify or probes else ()
        try:
            output = yield from self.steps(
                keys,
                telling(computation),
                computation.device,
                dtypes,
                since=start,
                probes=probes,
                is_whole=computation.runs_whole_batch,
                is_sharded=computation.is_sharded,
                note=lambda: plan.note(has_run=computation.has_run),
                is_known=plan.is_known,
            )
        except NotStoredError as stop:
            if stop.reason == "batch":
                for kind in plan.overlooked():
                    self._probed(kind, DEPENDENT)
                self._drop(keys.namespace)
            raise
        for kind, result in plan.kinds.items() if computation.has_run else ():
            self._probed(kind, result)
        return output

    def _probed(self, kind: Kind, result: int) -> None:
        """Remember what a probe has found, in the cache directory too."""
        self._probes.add(kind, result)
        self._tiers.describe(kind.namespace, self.description(kind.namespace), create=result == DEPENDENT)

    def _probed_before(self, namespace: bytes) -> dict[str, int]:
        """The results of probes that earlier runs have left in the cache directory, for a namespace."""
        found = self._tiers.description(namespace).get("probed")
        return {str(k): v for k, v in found.items() if v in _RESULTS} if isinstance(found, dict) else {}

    def _not_stacked(self, output: Any) -> Any:
        if not self.settings.probe:
            return output
        # All items of a batch have outputs of one shape. If it differs between batches, it depends on them.
        raise not_stored("batch", output, "items have outputs of another shape in another batch")

    def _distrust(self) -> None:
        self.refresh()

    def _drop_mistaken(self) -> None:
        """Drop rows that may have been computed with other weights than those of their namespace."""
        mistaken, self.keeper.mistaken = self.keeper.mistaken, []
        for namespace in mistaken if not self._closed else ():
            self._drop(namespace)
        self._told(
            "edited",
            "%s: weights were edited through .data or numpy, which leaves no sign, so it was noticed some "
            "calls later. Rows that may be wrong are dropped. After such an edit, call "
            ".cache_instance.refresh(); one in place, under torch.no_grad(), is noticed at once",
            self._name(),
        )

    def _living_root(self) -> Any:
        root = self._root()
        if root is None:
            text = "the module of this cache does not exist any more, or was not called since it was loaded"
            raise ReferenceError(text)
        return root

    def _name(self) -> str:
        return self.keeper.name

    def _class(self) -> str:
        root = self.root
        return qualified_name(type(root) if isinstance(root, nn.Module) else root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        # If the module is copied with it, the copy gets a cache of its own, within the same budget.
        copy = memo.get(id(self.root)) if isinstance(self.root, nn.Module) else None
        if copy is None:
            return self
        twin = ModuleCache(self.settings, self._tiers, self.keeper.history, self._probes)
        twin._root, twin.signature = weakref.ref(copy), self.signature
        twin.keeper.name = self.keeper.name
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_cache, (self.settings,)


def _load_cache(settings: CacheSettings) -> ModuleCache:
    return ModuleCache(settings)


_load_cache.__module__ = "torchcache2"  # the path that pickles name, wherever this file is
