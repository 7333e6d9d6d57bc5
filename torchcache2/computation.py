"""`Computation`: runs the forward of one call for some of its items, and judges what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcache2.arguments import BoundCall, Signature
from torchcache2.batch import NotStoredError, WholeBatch
from torchcache2.keys import Keys, item_keys
from torchcache2.namespace import NamespaceKeeper, Seen
from torchcache2.purity import ADVICE, versions
from torchcache2.randomness import RandomContexts, RandomState
from torchcache2.settings import CacheSettings
from torchcache2.tracing import Steps

__all__ = ["Computation"]

_MOST_KINDS = 10_000


class Computing(Protocol):
    """The cache that a computation is for."""

    settings: CacheSettings
    keeper: NamespaceKeeper
    signature: Signature
    random: RandomContexts
    pure: set[bytes]

    def run(self, plain: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Run the forward without the cache."""
        ...


class Computation:
    """Runs the forward for some items of a call, and says if the outcome must not be stored."""

    def __init__(
        self,
        cache: Computing,
        root: Any,
        plain: Callable[..., Any],
        call: BoundCall,
        seen: Seen,
        context: bytes,
    ) -> None:
        self._cache = cache
        self._root = root
        self._plain = plain
        self._bound = call
        self._seen = seen
        self.context = context
        self.keys = self._keys(call)
        self._kind = self.keys.group

    def _keys(self, call: BoundCall) -> Keys:
        count = self._cache.settings.subsample_count
        return item_keys(self._seen.namespace, call.context, call.leaves, subsample_count=count)

    def steps(self, positions: Tensor) -> Steps[Any]:
        """Run the forward for the items at some positions.

        For a part of the batch only if calls like this one have left no trace before: what sets itself up
        when it first runs, or counts, does so once, and with the caller's own arguments.
        """
        call, cache = self._bound, self._cache
        suspect = cache.random.is_suspect(self.context)
        all_positions = len(positions) == call.batch_size
        if not (all_positions or suspect or self._kind in cache.pure):
            output = yield from self.steps(torch.arange(call.batch_size))
            return WholeBatch(output)
        # Of a suspect, the caller's own arguments are kept for a second run.
        whole = all_positions and not suspect
        args, kwargs = (call.args, call.kwargs) if whole else call.take(positions)
        before = pytree.tree_leaves((args, dict(kwargs)))
        inputs = [leaf for leaf in before if isinstance(leaf, Tensor)]
        counts = versions(inputs)
        content = self._content(args, kwargs, inputs)
        buffers = [] if whole else [(b, b.clone()) for b in self._seen.tensors.small_buffers()]
        attributes = None if whole else cache.keeper.attributes(self._root)
        state = RandomState(cache.keeper.generators)
        output = yield from self._run(args, kwargs, state if suspect else None)
        reason = None
        if (not suspect or cache.random.is_suspect(self.context)) and state.moved():
            reason = "random"
            cache.random.add(self.context)
        elif cache.keeper.changed_since(self._seen, self._root):
            reason = "state"
        elif (
            versions(inputs) != counts
            or not _same(pytree.tree_leaves((args, dict(kwargs))), before)
            or not np.array_equal(self._content(args, kwargs, inputs), content)
            or not self._has_same_context(args, kwargs)
        ):
            reason = "input"
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output)):
            reason = "grad"
        if reason is not None:
            if not whole:
                # The caller is to see what one plain forward does.
                if reason == "random" and (suspect or threading.active_count() == 1):
                    state.restore()
                with torch.inference_mode():  # which buffers may have been made in
                    for buffer, content_before in buffers:
                        buffer.copy_(content_before)
                if attributes is not None:
                    attributes.restore()
                output = yield from cache.run(self._plain, call.args, call.kwargs)
            raise NotStoredError(reason, ADVICE[reason], output)
        if len(cache.pure) >= _MOST_KINDS:
            cache.pure.clear()
        cache.pure.add(self._kind)
        return self._own(output, inputs) if all_positions else output

    def _run(self, args: Any, kwargs: Mapping[str, Any], disturbed: RandomState | None) -> Steps[Any]:
        """Run the forward; with other random numbers than the caller's, if it is to draw none."""
        if disturbed is None:
            return (yield from self._cache.run(self._plain, args, kwargs))
        disturbed.disturb()
        try:
            output = yield from self._cache.run(self._plain, args, kwargs)
        except BaseException:
            disturbed.restore()
            raise
        if not disturbed.moved():
            disturbed.restore()
            self._cache.random.clear(self.context)
        return output

    def _has_same_context(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments that are no tensors are what they were."""
        if not self._bound.can_change:
            return True
        try:
            return self._cache.signature.bind(tuple(args), kwargs).context == self._bound.context
        except Exception:  # one has become what cannot be put in a key
            return False

    def _content(self, args: Any, kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
        """What tells of changes in inference tensors, which have no version counters."""
        if not any(tensor.is_inference() for tensor in inputs):
            return None
        return self._keys(self._cache.signature.bind(tuple(args), kwargs)).data

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
