"""`Computation`: runs the forward of one call for some of its items, and judges what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcache2.arguments import BoundCall, Signature
from torchcache2.batch import NotStoredError, WholeBatch
from torchcache2.entries import argument_leaves
from torchcache2.keys import Keys, item_keys
from torchcache2.namespace import NamespaceKeeper, Seen
from torchcache2.probe import Comparison, parts
from torchcache2.probes import Kind
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
    """Runs the forward for some items of a call, and says if the outcome must not be stored.

    Attributes
    ----------
    keys : Keys
    bound : BoundCall
        The call.
    context : bytes
        A digest of the namespace and the arguments that are not batched.
    probe : (Kind, int), optional
        If given, the whole batch is computed, and parts of it are computed by themselves and compared. The
        kind of call that this tells about, and the strength of the probe.
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
        self.probe: tuple[Kind, int] | None = None
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
        suspect = cache.random.is_suspect(self.context)
        all_positions = len(positions) == call.batch_size
        may_take = self.probe is None and not call.aligned and (suspect or self._kind in cache.pure)
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
        undo = None if whole else _Undo(cache.keeper, self._seen, self._root)
        state = RandomState(cache.keeper.generators)
        failure = ""
        try:
            output = yield from self._run(args, kwargs, state if suspect else None)
        except Exception as error:
            if all_positions:
                raise
            failure = f"the forward of {len(positions)} of its {call.batch_size} items raises {error!r}"
        if failure:
            # If the caller's own call raises, too, that is what the caller sees.
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
        if self.probe is not None:
            # The forward may use the memory of its output again, for a part.
            output = pytree.tree_map(_copied, output)
            yield from self._probe(output)
        if len(cache.pure) >= _MOST_KINDS:
            cache.pure.clear()
        cache.pure.add(self._kind)
        return self._own(output, inputs) if all_positions else output

    def _probe(self, output: Any) -> Steps[None]:
        """Compute parts of the batch by themselves; raises if the rows of the whole batch are others."""
        comparison = Comparison(output, len(self.keys), self.device, self.dtypes())
        for part in parts(self.keys):
            found = yield from self._probe_part(comparison, part, bool(self.bound.aligned))
            if found is not None and self.bound.aligned:
                # An argument as long as the batch has one entry per item, or else belongs to the whole batch.
                found = yield from self._probe_part(comparison, part, False)
            if isinstance(found, _RaisedText):
                # What wants its items in some order, such as longest first, gets them in the caller's.
                found = yield from self._probe_part(comparison, sorted(part), bool(self.bound.aligned))
            if self.probe is None:
                return
            if found is not None:
                raise NotStoredError("batch", f"{found}; {ADVICE['batch']}", output)

    def _probe_part(
        self, comparison: Comparison, part: Sequence[int], takes_aligned: bool
    ) -> Steps[str | None]:
        """How the output of some items differs if they are computed by themselves; None if it does not."""
        keeper, count = self._cache.keeper, len(part)
        if self._cache.settings.miss_batch == "pad":
            size = min(1 << (count - 1).bit_length(), len(self.keys))
            part = [*part, *[part[-1]] * (size - count)]
        undo, state = _Undo(keeper, self._seen, self._root), RandomState(keeper.generators)
        try:
            positions = torch.tensor(part, dtype=torch.int64, device="cpu")
            args, kwargs = self.bound.take(positions, aligned=takes_aligned)
            alone = yield from self._cache.run(self._plain, args, kwargs)
            return comparison.difference(alone, part)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            self.probe = None  # which says nothing about the forward: the next call is probed
            return None
        except Exception as error:
            return _RaisedText(f"the forward of {count} of its {len(self.keys)} items raises {error!r}")
        finally:
            # The same forward has left no trace just now, but for attributes that others read. What else it
            # does for a part is undone, too; but what changes beside other threads may be theirs.
            undo.attributes()
            if threading.active_count() == 1:
                undo()
                state.restore()

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


class _RaisedText(str):
    """What is said of an exception."""

    __slots__ = ()


class _Undo:
    """Puts small buffers, attributes, and what containers hold, back to what they were."""

    def __init__(self, keeper: NamespaceKeeper, seen: Seen, root: Any) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in seen.tensors.small_buffers()]
        self._attributes = keeper.attributes(root)

    def __call__(self) -> None:
        for buffer, content in self._buffers:
            if not torch.equal(buffer, content):
                with torch.inference_mode():  # which buffers may have been made in
                    buffer.copy_(content)
        self._attributes.restore()

    def attributes(self) -> None:
        """Put back attributes of modules alone."""
        self._attributes.restore_fields()


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _copied(leaf: Any) -> Any:
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided
    return leaf.clone() if is_plain and not (leaf.is_nested or leaf.is_quantized) else leaf


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass or layout without storage of its own
        return 0
