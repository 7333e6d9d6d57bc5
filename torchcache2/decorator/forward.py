"""`Computation`: runs the forward of one call for some of its items, and judges what came of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcache2.core.keys import Keys
from torchcache2.core.settings import CacheSettings
from torchcache2.decorator.bypass import ADVICE
from torchcache2.decorator.probe import Comparison
from torchcache2.decorator.probes import Kind
from torchcache2.decorator.probing import Probing, copied
from torchcache2.decorator.randomness import RandomContexts, RandomState
from torchcache2.decorator.undo import Undo
from torchcache2.engine.batch import NotStoredError, WholeBatch
from torchcache2.engine.steps import Steps
from torchcache2.identity.arguments import BoundCall, Signature
from torchcache2.identity.entries import argument_leaves
from torchcache2.identity.items import item_keys
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = ["Computation", "Shapes"]

_MOST_KINDS = 10_000

Shapes = tuple[tuple[int, ...], ...]


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Version counters; inference tensors have none."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class Computing(Protocol):
    """The cache that a computation is for."""

    settings: CacheSettings
    keeper: NamespaceKeeper
    signature: Signature
    random: RandomContexts
    pure: dict[bytes, Shapes | None]

    def decide_on_probe(self, computation: Computation, *, computes: bool) -> None:
        """Have a computation probe its batch."""
        ...

    def run(self, plain: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Run the forward without the cache."""
        ...


class Computation:
    """Runs the forward for some items of a call, and says if the outcome must not be stored.

    Attributes
    ----------
    keys : Keys
    bound : BoundCall
        The call.
    context : bytes
        A digest of the namespace and the arguments that are not batched.
    probes : dict of Kind to int
        If there are any, the whole batch is computed, and parts of it are computed by themselves and
        compared: the kinds of call that this tells about, and the strength of the probe.
    """

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
        self.bound = call
        self._seen = seen
        self.context = context
        self.probes: dict[Kind, int] = {}
        self._is_decided = False
        self.keys = self._keys(call)
        self._kind = self.keys.group

    def _keys(self, call: BoundCall) -> Keys:
        count = self._cache.settings.subsample_count
        entries = [*call.entries, *call.aligned]
        return item_keys(self._seen.namespace, call.context, call.leaves, entries, subsample_count=count)

    @property
    def device(self) -> torch.device:
        """Where outputs are expected: with the batch or, if that is no tensor, with the weights."""
        tensors = self._seen.tensors.tensors
        return self.bound.device or (tensors[0].device if tensors else torch.device("cpu"))

    def dtypes(self) -> set[torch.dtype]:
        """What the forward computes with."""
        return {tensor.dtype for _, tensor in self.bound.leaves} | self._seen.tensors.dtypes

    def steps(self, positions: Tensor) -> Steps[Any]:
        """Run the forward for the items at some positions.

        For a part of the batch only if calls like this one have left no trace before: what sets itself up
        when it first runs, or counts, does so once, and with the caller's own arguments. And only if it is
        known which arguments belong to the items.
        """
        call, cache = self.bound, self._cache
        if not self._is_decided:
            self._is_decided = True
            cache.decide_on_probe(self, computes=True)
        suspect = cache.random.is_suspect(self.context)
        all_positions = len(positions) == call.batch_size
        may_take = not self.probes and not call.aligned and (suspect or self._kind in cache.pure)
        if not (all_positions or may_take):
            output = yield from self.steps(torch.arange(call.batch_size))
            return WholeBatch(output)
        # A second run of a suspect needs the caller's own arguments as they were.
        whole = all_positions and not suspect
        args, kwargs = (call.args, call.kwargs) if whole else call.take(positions)
        before = argument_leaves(args, kwargs)
        inputs = [leaf for leaf in before if isinstance(leaf, Tensor)]
        counts = versions(inputs)
        content = self._content(args, kwargs, inputs)
        undo = None if whole else Undo(cache.keeper, self._seen, self._root)
        state = RandomState(cache.keeper.generators)
        failure = ""
        try:
            output = yield from self._run(args, kwargs, state if suspect else None)
        except Exception as error:
            if all_positions:
                raise
            failure = f"the forward of {len(positions)} of its {call.batch_size} items raises {error!r}"
        if failure:
            # If the whole batch raises, too, the caller sees that exception, as without a cache.
            if undo is not None:
                undo()
            output = yield from cache.run(self._plain, call.args, call.kwargs)
            raise NotStoredError("batch", f"{failure}; {ADVICE['batch']}", output)
        reason = None
        if (not suspect or cache.random.is_suspect(self.context)) and state.moved():
            reason = "random"
            cache.random.add(self.context)
        elif cache.keeper.changed_since(self._seen, self._root):
            reason = "state"
        elif (
            versions(inputs) != counts
            or not _same(argument_leaves(args, kwargs), before)
            or not np.array_equal(self._content(args, kwargs, inputs), content)
            or not self._has_same_context(args, kwargs, positions)
        ):
            reason = "input"
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output)):
            reason = "grad"
        if reason is not None:
            if undo is not None:
                # The caller is to see what one plain forward does.
                if reason == "random" and (suspect or threading.active_count() == 1):
                    state.restore()
                undo()
                output = yield from cache.run(self._plain, call.args, call.kwargs)
            raise NotStoredError(reason, ADVICE[reason], output)
        shapes = _shapes_of_items(output, len(positions))
        # All items of a batch have outputs of one shape: if other batches have others, it is the batch's.
        known = cache.pure.get(self._kind)
        is_odd = cache.settings.probe and None not in (known, shapes) and known != shapes
        if is_odd and not all_positions:
            if undo is not None:
                undo()
            output = yield from self.steps(torch.arange(call.batch_size))
            if _shapes_of_items(output, call.batch_size) != shapes:
                raise NotStoredError("batch", _odd_text(known, shapes), output)
            return WholeBatch(output)
        if self.probes or is_odd:
            compare = Comparison(output, call.batch_size, self.device, self.dtypes())
            if not compare.is_possible:  # the output cannot be kept
                self.probes = {}
                return output
            if is_odd and call.lengths is None:
                raise NotStoredError("batch", _odd_text(known, shapes), output)
        if self.probes or (is_odd and call.batch_size > 1):
            probing = Probing(cache.keeper, self._seen, self._root, cache.settings.miss_batch == "pad")
            # The forward may use the memory of its output again, for a part.
            output = pytree.tree_map(copied, output)
            forward = functools.partial(cache.run, self._plain)
            found = yield from probing.dependence(call, self.keys, compare, forward)
            if found is not None:
                raise NotStoredError("batch", f"{found}; {ADVICE['batch']}", output)
            if not probing.is_conclusive:
                self.probes = {}
        if len(cache.pure) >= _MOST_KINDS:
            cache.pure.clear()
        cache.pure[self._kind] = shapes
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

    def _has_same_context(self, args: Any, kwargs: Mapping[str, Any], positions: Tensor) -> bool:
        """Whether arguments that are no tensors are what they were."""
        if not self.bound.can_change:
            return True
        try:
            return not self.bound.is_changed(self._cache.signature.bind(tuple(args), kwargs), positions)
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


def _shapes_of_items(output: Any, count: int) -> Shapes | None:
    """The shapes of the tensors of an item's output; None where there are none, or they are not batched."""
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    shapes = [leaf.shape for leaf in leaves if type(leaf) is Tensor and not leaf.is_nested]
    if count == 0 or not all(shape and shape[0] == count for shape in shapes):
        return None
    return tuple([tuple(shape[1:]) for shape in shapes])


def _odd_text(before: Shapes | None, now: Shapes | None) -> str:
    return f"items of one shape have outputs of the shapes {before} and {now}; {ADVICE['batch']}"


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass or layout without storage of its own
        return 0
