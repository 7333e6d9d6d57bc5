"""`ModuleCache`: the forward of a module, or a function, through a cache.

Decides for each call whether it can be cached, and has the forward run for the items that are missing.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcache2.arguments import BoundCall, Signature, UncachedArgumentError
from torchcache2.batch import NotStoredError
from torchcache2.cache import Cache, TierStack
from torchcache2.digest import digest
from torchcache2.explain import CallSeen, call_differences, fingerprint_differences
from torchcache2.fingerprint import Fingerprint
from torchcache2.keys import Keys, item_keys
from torchcache2.namespace import History, NamespaceKeeper, Seen
from torchcache2.purity import RandomState, Reason, versions
from torchcache2.settings import CacheSettings, disabled_by_environment
from torchcache2.sources import origin
from torchcache2.tracing import Steps, entry, is_traced

__all__ = ["ModuleCache"]

Forward = Callable[..., Any]

_MOST_RANDOM = 10_000

_ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first",
    "batch": "an item's output has to depend on that item alone; quantize statically, or cache parts",
    "parametrize": "call it outside of that context",
    "lazy": "the next call can be cached",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation",
    "state": "the forward changed a tensor or an attribute of its own module; if that happens at every "
    "call, it cannot be cached",
    "subclass": "pass dense tensors of torch's own type to have the call cached",
    "autocast": "change weights outside of the autocast context",
    "input": "the forward changed its input in place; have it work on a copy",
}


class ModuleCache(Cache):
    """The cache of one module or function.

    Parameters
    ----------
    root : nn.Module or function, optional
        What is cached; None: it is bound later.
    plain : callable
        The forward without a cache; of a module, bound to it.
    settings : CacheSettings
    tiers : TierStack, optional
        Tiers to share with other caches.
    history : History, optional
        Namespaces of other modules that `explain` compares with.
    """

    def __init__(
        self,
        root: Any,
        plain: Forward | None,
        settings: CacheSettings,
        tiers: TierStack | None = None,
        history: History | None = None,
    ) -> None:
        super().__init__(bytes(16), settings, tiers=tiers)
        self._running = threading.local()
        self._root: Callable[[], Any] = lambda: None
        self._keeper = NamespaceKeeper("a cache without a module", settings, history)
        self._calls: deque[CallSeen] = deque(maxlen=2)
        self._random: set[bytes] = set()
        self._entry: Forward | None = None
        if root is not None and plain is not None:
            self.bind(root, plain)

    def bind(self, root: Any, plain: Forward) -> None:
        """Say what is cached."""
        self._root = weakref.ref(root)
        self._keeper.name = type(root).__name__ if isinstance(root, nn.Module) else root.__name__
        self._signature = Signature(plain, shared=self.settings.shared_args)
        function = plain.__func__ if isinstance(plain, types.MethodType) else None
        self._entry = entry() if function and origin(function) == "torch" else None

    @property
    def root(self) -> Any:
        """The module or function; None if it is gone."""
        return self._root()

    @property
    def module_hash(self) -> str:
        """The namespace, 32 hexadecimal digits, as of now."""
        self.namespace = self._keeper.look(self._living_root()).namespace
        return self.namespace.hex()

    @property
    def fingerprint(self) -> Fingerprint:
        """The named parts behind the namespace, as of the last call."""
        return self._keeper.fingerprint

    def refresh(self) -> None:
        """Read the whole module again at the next call; needed after edits that are not noticed."""
        self._keeper.reset()

    def explain(self) -> str:
        """Why items of the last call may have been misses, one line for each reason.

        Compares the namespace with the one before: of this module, or if this is its first, of another
        one of this class under the same decorator. If the namespace has not changed, compares the
        arguments of the last two calls.
        """
        namespace = self.module_hash
        calls = list(self._calls)
        if len(calls) == 2 and calls[0].namespace == calls[1].namespace == self.namespace:
            lines = call_differences(*calls)
            return "\n".join(lines) or "nothing but the items differs between the last two calls"
        before = self._keeper.history.before(self.fingerprint)
        if before is None:
            return f"namespace {namespace} is the first of {self._name()} in this process"
        return "\n".join(fingerprint_differences(before, self.fingerprint))

    def call(self, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        """The output of ``plain(*args, **kwargs)``."""
        if getattr(self._running, "now", False) or not self.settings.enabled:
            return (yield plain, args, kwargs)  # inside of its own forward: the outermost call is cached
        if is_traced() or disabled_by_environment():
            return (yield plain, args, kwargs)
        root = self._living_root()
        reason = self._keeper.reason_to_bypass(root)
        if reason is None:
            try:
                call = self._signature.bind(args, kwargs)
            except UncachedArgumentError as error:
                return (yield from self._bypass(("subclass", str(error)), plain, args, kwargs))
            if torch.is_grad_enabled() and call.requires_grad:
                reason = "grad", "an input requires grad"
        if reason is not None:
            return (yield from self._bypass(reason, plain, args, kwargs))
        seen = self._keeper.look_at_tensors()
        self.namespace = seen.namespace
        if seen.doubt is not None:
            return (yield from self._bypass(seen.doubt, plain, args, kwargs))
        leaves = tuple([(path, tensor.dtype, tensor.shape[1:]) for path, tensor in call.leaves])
        self._calls.append(CallSeen(seen.namespace, call.context, leaves))
        computation = _Computation(self, root, plain, call, seen)
        if computation.context in self._random:
            reason = "random", "its output was random before"
            return (yield from self._bypass(reason, plain, args, kwargs))
        dtypes: set[torch.dtype] = set()
        if self.settings.verify:
            dtypes = {tensor.dtype for _, tensor in call.leaves} | seen.tensors.dtypes
        return (yield from self.steps(computation.keys(call), computation.steps, call.device, dtypes))

    def _bypass(
        self, reason: Reason, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Steps[Any]:
        name, why = reason
        if name == "grad":
            self._keeper.distrust_tensors()
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        sizes = [leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        self.count_bypass(name, sizes[0] if sizes else 1, f"{why}; {_ADVICE[name]}")
        return (yield from self.run(plain, args, kwargs))

    def run(self, plain: Forward, args: Any, kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Run the forward, and what it calls of itself, without the cache."""
        self._running.now = True
        try:
            if self._entry is not None and isinstance(plain, types.MethodType):
                return (yield self._entry, (plain.__func__, plain.__self__, args, kwargs), {})
            return (yield plain, args, kwargs)
        finally:
            self._running.now = False

    def remember_random(self, context: bytes) -> None:
        """Bypass such calls from now on: a forward that seeds its generator leaves no trace next time."""
        if len(self._random) >= _MOST_RANDOM:
            self._random = set()
        self._random.add(context)

    def _distrust(self) -> None:
        self.refresh()

    def _living_root(self) -> Any:
        root = self._root()
        if root is None:
            raise ReferenceError(
                "the module of this cache does not exist any more, or was not called since it was loaded"
            )
        return root

    def _name(self) -> str:
        return self._keeper.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        # As part of a module, it becomes the cache of the copied module, and shares the budget.
        copy = memo.get(id(self.root)) if isinstance(self.root, nn.Module) else None
        if copy is None:
            return self
        twin = ModuleCache(None, None, self.settings, self._tiers, self._keeper.history)
        twin._root, twin._signature = weakref.ref(copy), self._signature
        twin._keeper.name = self._keeper.name
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleCache, (None, None, self.settings)


class _Computation:
    """Runs the forward for some items of a call, and says if the outcome must not be stored."""

    def __init__(self, cache: ModuleCache, root: Any, plain: Forward, call: BoundCall, seen: Seen) -> None:
        self._cache = cache
        self._root = root
        self._plain = plain
        self._bound = call
        self._seen = seen
        self.context = digest([seen.namespace, call.context])

    def keys(self, call: BoundCall) -> Keys:
        """The keys of a call's items."""
        count = self._cache.settings.subsample_count
        return item_keys(self._seen.namespace, call.context, call.leaves, subsample_count=count)

    def steps(self, positions: Tensor) -> Steps[Any]:
        """Run the forward for the items at some positions."""
        call, cache = self._bound, self._cache
        whole = len(positions) == call.batch_size
        args, kwargs = (call.args, call.kwargs) if whole else call.take(positions)
        before = pytree.tree_leaves((args, dict(kwargs)))
        inputs = [leaf for leaf in before if isinstance(leaf, Tensor)]
        counts = versions(inputs)
        content = self._content(args, kwargs, inputs)
        buffers = [] if whole else [(b, b.clone()) for b in self._seen.tensors.small_buffers()]
        attributes = [] if whole else cache._keeper.attributes(self._root)
        state = RandomState(cache._keeper.generators)
        output = yield from cache.run(self._plain, args, kwargs)
        reason = None
        if state.moved():
            reason = "random"
            cache.remember_random(self.context)
        elif cache._keeper.changed_since(self._seen, self._root):
            reason = "state"
        elif (
            versions(inputs) != counts
            or not _same(pytree.tree_leaves((args, dict(kwargs))), before)
            or not np.array_equal(self._content(args, kwargs, inputs), content)
        ):
            reason = "input"
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output)):
            reason = "grad"
        if reason is not None:
            if not whole:
                # The caller is to see what one plain forward does.
                if reason == "random" and threading.active_count() == 1:
                    state.restore()
                with torch.no_grad():
                    for buffer, content_before in buffers:
                        buffer.copy_(content_before)
                for fields, fields_before in attributes if reason == "state" else ():
                    fields.clear()
                    fields.update(fields_before)
                output = yield from cache.run(self._plain, call.args, call.kwargs)
            raise NotStoredError(reason, _ADVICE[reason], output)
        return self._own(output, inputs) if whole else output

    def _content(self, args: Any, kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
        """What tells of changes in inference tensors, which have no version counters."""
        if not any(tensor.is_inference() for tensor in inputs):
            return None
        return self.keys(self._cache._signature.bind(tuple(args), kwargs)).data

    def _own(self, output: Any, inputs: list[Tensor]) -> Any:
        """The output, with copies of tensors that are parts or aliases of others."""
        borrowed = set(map(_storage, (*inputs, *self._seen.tensors.tensors)))

        def own(leaf: Any) -> Any:
            if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.is_nested:
                return leaf
            storage = leaf.untyped_storage()
            is_part = storage.nbytes() != leaf.numel() * leaf.element_size()
            return leaf.clone() if is_part or _storage(leaf) in borrowed else leaf

        return own(output) if isinstance(output, Tensor) else pytree.tree_map(own, output)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass or layout without storage of its own
        return 0
