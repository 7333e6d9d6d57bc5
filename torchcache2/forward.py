"""`ModuleCache`: the forward of a module, or a function, through a cache.

Decides for each call whether it can be cached, keeps the namespace true to the module, and has the
forward run for the items that are missing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcache2.arguments import BoundCall, Signature
from torchcache2.cache import Cache, NotStoredError, TierStack
from torchcache2.digest import digest
from torchcache2.fingerprint import Fingerprint, Walk
from torchcache2.keys import item_keys
from torchcache2.logs import logger
from torchcache2.purity import RandomState, depends_on_batch, versions
from torchcache2.settings import CacheSettings, disabled_by_environment
from torchcache2.watch import TensorWatch, Watch

__all__ = ["ModuleCache"]

Forward = Callable[..., Any]

_ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first",
    "lazy": "a parameter is uninitialised; the next call can be cached",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation",
    "state": "the forward changed a tensor or an attribute of its own module; if that happens at every "
    "call, it cannot be cached",
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
    """

    def __init__(
        self,
        root: Any,
        plain: Forward | None,
        settings: CacheSettings,
        tiers: TierStack | None = None,
    ) -> None:
        super().__init__(bytes(16), settings, tiers=tiers)
        self._lock = threading.RLock()
        self._running = threading.local()
        self._tokens: dict[int, tuple[object, bytes]] = {}
        self._told: set[str] = set()
        self._root: Callable[[], Any] = lambda: None
        self._is_module = False
        self._reset()
        if root is not None and plain is not None:
            self.bind(root, plain)

    def bind(self, root: Any, plain: Forward) -> None:
        """Say what is cached."""
        self._is_module = isinstance(root, nn.Module)
        self._root = weakref.ref(root)
        self._root_name = type(root).__name__ if self._is_module else root.__name__
        self._signature = Signature(plain, shared=self.settings.shared_args)

    @property
    def root(self) -> Any:
        """The module or function; None if it is gone."""
        return self._root()

    @property
    def module_hash(self) -> str:
        """The namespace, 32 hexadecimal digits, as of now."""
        root = self._living_root()
        with self._lock:
            self._notice_structure(root)
            self._notice_content()
            return self.namespace.hex()

    @property
    def fingerprint(self) -> Fingerprint:
        """The named parts behind the namespace, as of the last call."""
        return self._fingerprint

    def refresh(self) -> None:
        """Read the whole module again at the next call; needed after edits that are not noticed."""
        with self._lock:
            self._reset()

    def call(self, plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of ``plain(*args, **kwargs)``."""
        root = self._living_root()
        if getattr(self._running, "now", False) or not self.settings.enabled:
            return plain(*args, **kwargs)  # inside of its own forward: the outermost call is cached
        if disabled_by_environment():
            return plain(*args, **kwargs)
        reason = self._reason_to_bypass(root)
        if reason is None:
            call = self._signature.bind(args, kwargs)
            if torch.is_grad_enabled() and any(t.requires_grad for _, t in call.leaves):
                reason = ("grad", "an input requires grad")
        if reason is not None:
            return self._bypass(reason, plain, args, kwargs)
        with self._lock:
            self._notice_content()
            namespace, tensors = self.namespace, self._tensors
        keys = item_keys(namespace, call.context, call.leaves, subsample_count=self.settings.subsample_count)
        computation = _Computation(self, plain, call, namespace, tensors)
        return self.fetch(keys, computation, device=call.device)

    def _reason_to_bypass(self, root: Any) -> tuple[str, str] | None:
        with self._lock:
            # A module in training: nothing else needs to be known.
            reason = self._reason_grad()
            if reason is None:
                self._notice_structure(root)
                reason = self._reason or self._reason_grad()
            return reason

    def _reason_grad(self) -> tuple[str, str] | None:
        if torch.is_grad_enabled():
            for tensor in self._tensors.tensors:
                if tensor.requires_grad:
                    return "grad", "grad mode is on and a parameter requires grad"
        return None

    def _bypass(
        self, reason: tuple[str, str], plain: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        name, why = reason
        if name == "grad":
            with self._lock:
                self._tensors.forget()  # an optimizer may step now, which not every tensor tells
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        self.count_bypass(name, sizes[0] if sizes else 1, f"{why}; {_ADVICE[name]}")
        self._running.now = True
        try:
            return plain(*args, **kwargs)
        finally:
            self._running.now = False

    def _reset(self) -> None:
        self._watch: Watch | None = None
        self._tensors = TensorWatch({})
        self._reason: tuple[str, str] | None = None
        self._generators: list[Any] = []
        self._parts: dict[str, bytes] = {}
        self._fingerprint = Fingerprint(bytes(16), {})
        self._has_namespace = False

    def _notice_structure(self, root: Any) -> None:
        """Walk the module again if anything but the content of its tensors has changed."""
        module = root if self._is_module else None
        if self._watch is not None and not self._tensors.has_lazy and self._watch.same(module):
            return
        walk = Walk(root, self._tokens)
        self._parts = {name: digest([data]) for name, data in walk.parts.items()}
        self._parts["option cache_dtype"] = str(self.settings.cache_dtype).encode()
        self._tensors = TensorWatch(walk.tensors)
        self._watch = Watch(walk, module)
        self._generators = walk.generators
        self._has_namespace = False
        self._reason = None
        if self._tensors.has_lazy:
            self._reason = "lazy", "a parameter is uninitialised"
        for part, _, _ in walk.modules:
            if self._reason is None and (why := depends_on_batch(part)):
                self._reason = "training", why
        for name in sorted(walk.assigned):
            self._tell(logger.info, f"{name} is assigned by forward and not part of the key")
        if walk.unread and self.settings.persistent_module_hash is None:
            names = ", ".join(sorted(set(walk.unread)))
            self._tell(
                logger.warning,
                f"cannot read {names}: the cache is good for this process only, and changes there are "
                "not noticed. Keep such objects out of the module, or set persistent_module_hash",
            )

    def _notice_content(self) -> None:
        """Read the tensors again if their content may have changed, and make the namespace."""
        if self._has_namespace and self._tensors.same():
            return
        name = self.settings.persistent_module_hash
        self._tensors.refresh(read=name is None)
        if name is None:
            parts = dict(self._parts)
            parts.update((f"weights {path}", data) for path, data in self._tensors.digests.items())
        else:
            parts = {"persistent_module_hash": name.encode()}
        self._fingerprint = Fingerprint.of_parts(parts)
        self._has_namespace = True
        if self.namespace != self._fingerprint.namespace:
            self.namespace = self._fingerprint.namespace
            logger.info("%s: namespace %s", self._root_name, self.namespace.hex())

    def _living_root(self) -> Any:
        root = self._root()
        if root is None:
            raise ReferenceError(
                "the module of this cache does not exist any more, or was not called since it was loaded"
            )
        return root

    def _tell(self, log: Callable[[str, str, str], None], text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log("%s: %s", self._root_name, text)

    def _name(self) -> str:
        return self._root_name

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        # As part of a module, it becomes the cache of the copied module, and shares the budget.
        copy = memo.get(id(self.root)) if self._is_module else None
        if copy is None:
            return self
        twin = ModuleCache(None, None, self.settings, self._tiers)
        twin._is_module, twin._root = True, weakref.ref(copy)
        twin._root_name, twin._signature = self._root_name, self._signature
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleCache, (None, None, self.settings)


class _Computation:
    """Runs the forward for some items of a call, and says if the outcome must not be stored."""

    def __init__(
        self,
        cache: ModuleCache,
        plain: Forward,
        call: BoundCall,
        namespace: bytes,
        tensors: TensorWatch,
    ) -> None:
        self._cache = cache
        self._plain = plain
        self._bound = call
        self._namespace = namespace
        self._tensors = tensors

    def __call__(self, positions: Tensor) -> Any:
        call = self._bound
        whole = len(positions) == call.batch_size
        args, kwargs = (call.args, call.kwargs) if whole else call.take(positions)
        inputs = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        before = versions(inputs)
        state = RandomState(self._cache._generators)
        output = self._run(args, kwargs)
        reason = None
        if state.moved():
            reason = "random"
        elif self._changed_itself():
            reason = "state"
        elif versions(inputs) != before:
            reason = "input"
        elif torch.is_grad_enabled() and any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output)
        ):
            reason = "grad"
        if reason is not None:
            if not whole:
                if reason == "random":
                    state.restore()
                output = self._run(call.args, call.kwargs)
            raise NotStoredError(reason, _ADVICE[reason], output)
        return self._own(output, inputs) if whole else output

    def _run(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        running = self._cache._running
        running.now = True
        try:
            return self._plain(*args, **kwargs)
        finally:
            running.now = False

    def _changed_itself(self) -> bool:
        cache = self._cache
        root = cache.root
        with cache._lock:
            module = root if cache._is_module else None
            if not self._tensors.moved() and cache._watch is not None and cache._watch.same(module):
                return False
            # Something was touched, perhaps only to be what it was: pruning does so at every call.
            cache._notice_structure(root)
            cache._notice_content()
            return cache.namespace != self._namespace

    def _own(self, output: Any, inputs: list[Tensor]) -> Any:
        """The output, with copies of tensors that are parts or aliases of others."""
        borrowed = {t.untyped_storage().data_ptr() for t in (*inputs, *self._tensors.tensors)}

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                return leaf
            storage = leaf.untyped_storage()
            is_part = storage.nbytes() != leaf.numel() * leaf.element_size()
            return leaf.clone() if is_part or storage.data_ptr() in borrowed else leaf

        return own(output) if isinstance(output, Tensor) else pytree.tree_map(own, output)
