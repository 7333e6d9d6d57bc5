"""`Computation`: runs the forward of one call for some of its items, and checks its side effects.

`Inputs` notices whether a forward has changed its arguments. A forward may fill the dict that it gets and
return it: `filling` gives it a copy, the added entries are its output, and `given_back` puts them into the
caller's dict.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Bytes2D, Keys
from torchcache2.core.logs import shown
from torchcache2.core.private import has_version, version
from torchcache2.core.process import computed_once
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.core.values import UnstorableError, has_attributes, leaves_of, mapped
from torchcache2.decorator.bypass import Backoff, BypassError, not_stored, of_module
from torchcache2.decorator.lazymodule import devices_apart, lazies_of, with_device_hint
from torchcache2.decorator.probe import Probe, talks
from torchcache2.decorator.tracing import Runner
from torchcache2.engine.batch import Checks, NotStoredError, WholeBatch, computed_again
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.running import Forward
from torchcache2.engine.values.outputs import Lists, rows_of
from torchcache2.engine.values.samples import Samples
from torchcache2.identity.arguments import BoundCall, Signature, argument_leaves
from torchcache2.identity.encoding import digest
from torchcache2.identity.guard import Undo
from torchcache2.identity.items import item_keys
from torchcache2.identity.namespace import NamespaceKeeper, Seen

_MOST_CONTEXTS = 1000  # contexts whose outputs' lists are known
_MOST_KINDS = 10_000
_CPU = torch.device("cpu")
_FILLED = ("filled by the forward",)  # the only key of such an output: the added entries

Shapes = tuple[tuple[int, ...], ...]


class Known:
    """Facts about the calls of one method, for all threads.

    Attributes
    ----------
    signature : Signature
        The signature of the plain method.
    random : Backoff
        Calls whose forward was random, or seemed to be, by `context`. A forward that seeds a generator always
        leaves it in the same state, which may hide the draws: so such calls are never cached again. But with
        other threads, one of them may have drawn the numbers: then caching is tried again after some calls,
        with the generators in another state.
    shapes : dict
        The shapes of items' outputs, by group of keys, for calls without side effects; see
        `_shapes_of_items`.
    """

    signature: Signature

    def __init__(self, settings: CacheSettings, keeper: NamespaceKeeper, runner: Runner) -> None:
        self.settings, self.keeper, self.runner = settings, keeper, runner
        self.random = Backoff(1, 4)
        self.shapes: dict[bytes, Shapes | None] = {}
        self.samples = Samples()
        self._lists: dict[bytes, dict[str, bool]] = {}
        self._groups: dict[Any, bytes] = {}  # see `item_keys`

    def keys(self, namespace: bytes, call: BoundCall) -> Keys:
        """The keys of the items of a call."""
        entries = [*call.entries, *call.aligned]
        count = self.settings.subsample_count
        return item_keys(
            namespace, call.context, call.leaves, entries, subsample_count=count, groups=self._groups
        )

    def context(self, namespace: bytes, call: BoundCall) -> bytes:
        """A digest of the namespace and of the arguments that are not batched."""
        return digest([namespace, call.context])

    def lists(self, context: bytes) -> Lists:
        """Which lists in the outputs of a context's calls have an entry per item."""
        if len(self._lists) >= _MOST_CONTEXTS:
            self._lists.clear()
        return Lists(self.samples, self._lists.setdefault(context, {}))


def may_check(
    known: Known, root: Any, call: BoundCall, seen: Seen, is_first: bool, is_found: bool = False
) -> bool:
    """Whether the forward may run just to check a batch, the first of its kind or a later one.

    No module is loaded just to check a batch that is all found. Ranks in step divide the work, so that one
    that computes its whole batch delays all: only without other ranks are later batches checked.
    """
    is_alone = known.settings.distributed != "collective"
    if seen.shards is not None or devices_apart(call, root, seen) or not (is_first or is_alone):
        return False
    loaded = [lazy.module for lazy in lazies_of(known.keeper, call)]
    if is_found and None in loaded:
        return False
    return not any(talks(one, known.keeper.fingerprint) for one in (root, *loaded))


class Computation:
    """Runs the forward for some items of a call, and decides whether the output may be stored.

    It is the `Source` of a batch, one for each call. Most calls find all items, so that it computes nothing.

    Attributes
    ----------
    root
        The module or function; `seen` is its state as seen by its keeper for this call.
    checks : Checks
        Decides whether to compute the whole batch.
    has_run : bool
        Whether any items were requested.
    ran : list
        Holds the output of a forward that must not run again.
    """

    def __init__(
        self,
        known: Known,
        call: BoundCall,
        keys: Keys,
        plain: Forward,
        root: Any,
        seen: Seen,
        checks: Checks,
        description: Callable[[bytes], Mapping[str, Any]],
        distrust: Callable[[], None],
    ) -> None:
        self.known, self.keeper, self.random = known, known.keeper, known.random
        self.call, self.keys, self.root, self.seen, self.checks = call, keys, root, seen, checks
        self.description, self.distrust = description, distrust
        self.has_run = False
        self.ran: list[Any] = []
        self._plain = plain
        self._walks = known.keeper.walks

    @property
    def is_sharded(self) -> bool:
        """Whether the forward waits for other processes: it runs for whole batches, at most once."""
        return self.seen.shards is not None

    @computed_once
    def context(self) -> bytes:
        """See `Known.context`."""
        return self.known.context(self.seen.namespace, self.call)

    @computed_once
    def lists(self) -> Lists:
        """Which lists in the output have an entry per item."""
        return self.known.lists(self.context)

    @property
    def device(self) -> torch.device:
        """The device of the batch or, without batched tensors, of the weights."""
        tensors = chain(self.seen.tensors.tensors, self.seen.shards.tensors() if self.seen.shards else ())
        known = self.call.device or next((tensor.device for tensor in tensors), None)
        return known or next((lazy.device() for lazy in lazies_of(self.keeper, self.call)), _CPU)

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensors that the forward reads."""
        of_shards = self.seen.shards.dtypes() if self.seen.shards else set()
        return self.call.dtypes | self.seen.tensors.dtypes | of_shards

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of the plain forward; see `filling`."""
        return filling(functools.partial(self.known.runner.run, self._plain))(args, kwargs)

    def compute(self, positions: Tensor) -> Any:
        """The output for the items at some positions (int64, CPU, shape ``(k,)``), or a `WholeBatch`.

        Raises
        ------
        NotStoredError
            If the output must not be stored.
        """
        self.has_run = True
        with with_device_hint(self.keeper.name, self.call, self.root, self.seen, positions):
            return self._output(positions)

    def _output(self, positions: Tensor) -> Any:
        is_whole = len(positions) == self.call.batch_size
        if not (is_whole or self._may_compute_parts()):
            return self._whole_batch()
        if self.is_sharded and self.ran:
            return self.ran[0]
        output, inputs, undo = self._traceless(positions, is_whole)
        output = self._with_lists(output, positions)
        shapes = self._shapes_of_items(output, len(positions))
        is_odd = self._is_odd(shapes)
        if is_odd and not is_whole:
            if undo is not None:
                undo()
            return self._whole_of_odd(shapes)
        if is_odd or self.checks.computes_parts:
            # Copy: the forward may reuse this output's memory for the output of a part.
            copied = mapped(_copied, output, objects=True)
            try:
                whole = self._rows(copied, len(self.keys))
            except (UnstorableError, OutputError):  # it cannot be stored
                self.checks.is_conclusive = False
                return output
            if is_odd and not self.call.entries:
                raise not_stored("batch", output, self._odd_text(shapes), cause="shape")
            if self.call.batch_size > 1 and not self.is_sharded:
                output = self._probed(copied, whole)
        self._remember(shapes)
        if is_whole:
            output = self._own(output, inputs.tensors)
        self.ran = [output] if self.is_sharded else []
        return output

    def _traceless(self, positions: Tensor, is_whole: bool) -> tuple[Any, Inputs, Undo | None]:
        """Run the forward for some items; returns its output if it had no side effects, and its arguments.

        The last value undoes its changes, if these were copies. Raises `NotStoredError` after side effects.
        """
        # A forward that may be random runs twice, and then needs the caller's unchanged arguments: so at
        # first it gets copies. A forward that waits for other processes can run only once.
        was_random = self.context in self.random
        is_suspect = was_random and not self.is_sharded
        is_callers = is_whole and not is_suspect
        try:
            args, kwargs = (self.call.args, self.call.kwargs) if is_callers else self.call.take(positions)
        except UnstorableError as error:
            output = self.forward(self.call.args, self.call.kwargs)
            why = f"an argument for a part of the batch is {error.what}"
            raise not_stored("batch", output, why) from None
        inputs = Inputs(self.call, args, kwargs, positions, self.known.signature.bind, self._key_bytes)
        undo = None if is_callers else self.keeper.undo(self.seen, self.root, self.call.objects)
        state = RandomState(self.keeper.generators)
        output = self._run(inputs, state, undo, is_suspect, len(positions))
        self.ran = [output] if is_callers else []  # until we know that nothing was changed
        try:
            stop = self._trace(inputs, state, is_suspect, output)
        except torch.cuda.OutOfMemoryError:
            if undo is not None:
                undo()
            raise
        self.ran = self.ran if self.is_sharded else []
        if stop is None and was_random and self.is_sharded:
            stop = BypassError.because("random", "")
        if stop is not None:
            is_own = stop.reason == "random" and (is_suspect or threading.active_count() == 1)
            output = self._run_again(output, undo, state if is_own else None)
            raise NotStoredError(stop.reason, stop.text, output)
        return output, inputs, undo

    def _key_bytes(self, call: BoundCall) -> Bytes2D:
        return self.known.keys(self.seen.namespace, call).data

    def runs_whole_batch(self) -> bool:
        """Whether the forward would run for the whole batch, whatever the requested items."""
        return not self._may_compute_parts()

    def _may_compute_parts(self) -> bool:
        """Whether the forward may run for a part of the batch.

        It may if such calls had no side effects before: a module that sets itself up, or counts its calls,
        must do so once, with the caller's own arguments. Also, we must know which arguments belong to items.
        """
        is_known = self.keys.group in self.known.shapes or self.context in self.random
        return is_known and not (self.is_sharded or self.checks.computes_parts or self.call.aligned)

    def _whole_batch(self) -> WholeBatch:
        output = self._output(torch.arange(self.call.batch_size, device="cpu"))
        return WholeBatch(output)

    def _run(self, inputs: Inputs, state: RandomState, undo: Undo | None, suspect: bool, count: int) -> Any:
        """Run the forward for `count` items; raises `NotStoredError` if it refuses a part of the batch."""
        try:
            if suspect:
                return self._run_disturbed(inputs, state)
            output = self.forward(inputs.args, inputs.kwargs)
            with contextlib.suppress(RecursionError):  # it is not kept, and returned as it is
                return mapped(_waited, output, objects=True) if self.is_sharded else output
            return output
        except Exception as error:
            if count == self.call.batch_size or is_out_of_memory(error):  # the whole batch needs even more
                raise
            failure = f"the forward of {count} of its {self.call.batch_size} items raises {shown(error)}"
        # If this raises for the whole batch too, the caller sees that exception, as without a cache.
        output = self._run_again(None, undo)
        raise not_stored("batch", output, failure, cause="raises")

    def _run_disturbed(self, inputs: Inputs, state: RandomState) -> Any:
        """Run the forward with the generators in another state, to see whether it draws numbers."""
        state.disturb()
        try:
            output = self.forward(inputs.args, inputs.kwargs)
        except BaseException:
            state.restore()
            raise
        if not state.moved():
            state.restore()
            self.random.clear(self.context)
        return output

    def _run_again(self, output: Any, undo: Undo | None, state: RandomState | None = None) -> Any:
        """An output computed with the caller's own arguments.

        Without `undo`, that is `output`. Otherwise the forward ran with copies: undo its changes, restore the
        generators to `state`, if given, and run it again.
        """
        if undo is None:
            return output
        if state is not None:
            state.restore()
        undo()
        return self.forward(self.call.args, self.call.kwargs)

    def _trace(self, inputs: Inputs, state: RandomState, suspect: bool, output: Any) -> BypassError | None:
        """The traces of the forward for which its output must not be stored; None if it has left none."""
        found = []
        if (not suspect or self.context in self.random) and state.moved():
            self.random.add(self.context, "random", is_final=threading.active_count() == 1)
            found.append(BypassError.because("random", ""))
        if changes := self.keeper.changed_since(self.seen, self.root):
            found.append(BypassError.because("state", f"while the forward ran, {changes}"))
        elif self.keeper.lazies and self.keeper.walks != self._walks:
            found += self._look_at_loaded()
        for one in self.call.objects:
            found += of_module(one.keeper, one.value, is_without_grad=True) if one.keeper.lazies else []
        if inputs.changed() or self.call.was_written():
            found.append(BypassError.because("input", "the forward changed its input in place"))
        try:
            leaves = leaves_of(output, objects=True)
        except RecursionError:
            found.append(BypassError.because("output", "the output contains itself, or is nested too deep"))
            leaves = []
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            found.append(BypassError.because("grad", "the output requires grad"))
        return BypassError.all_of(found) if found else None

    def _look_at_loaded(self) -> list[BypassError]:
        """Take modules that the forward has loaded into account; returns reasons not to store the output."""
        self._walks, self.seen = self.keeper.walks, self.keeper.look(self.root)
        stops = of_module(self.keeper, self.root, is_without_grad=True)
        if self.keeper.generators:  # their state before is unknown
            why = "a module with generators of its own was loaded in this call"
            stops.append(BypassError.because("random", why, is_final=False))
        return stops

    def _is_odd(self, shapes: Shapes | None) -> bool:
        """Whether items had outputs of another shape in earlier batches.

        Within a batch, all outputs have one shape. If that differs between batches, items depend on them.
        """
        known = self.known.shapes.get(self.keys.group)
        return self.known.settings.probe and None not in (known, shapes) and known != shapes

    def _whole_of_odd(self, shapes: Shapes | None) -> WholeBatch:
        """Compute the whole batch, after a part of it had outputs of other shapes than before."""
        text = self._odd_text(shapes)
        whole = self._whole_batch()
        if self._shapes_of_items(whole.output, self.call.batch_size) != shapes:
            raise not_stored("batch", whole.output, text, cause="shape")
        return whole

    def _odd_text(self, shapes: Shapes | None) -> str:
        known = self.known.shapes.get(self.keys.group)
        return f"items of one shape have outputs of the shapes {known} and {shapes}"

    def _rows(self, output: Any, count: int) -> Rows:
        return rows_of(output, count, self.lists, device=self.device)

    def _probed(self, output: Any, whole: Rows) -> Any:
        """The output of the whole batch, once parts were computed alone and compared with its rows."""
        probe = Probe(
            whole,
            self.keys,
            self.call,
            lambda part, aligned: self._rows(self._alone(part, aligned), len(part)),
            dtypes=self.dtypes(),
            pads=self.known.settings.miss_batch == "pad",
        )
        found = probe.dependence()
        if found is not None:
            raise not_stored("batch", output, found.text, cause=found.cause)
        self.checks.is_conclusive = probe.is_conclusive
        return output

    def _alone(self, part: Sequence[int], aligned: bool) -> Any:
        """The output of some items, computed by themselves; undoes side effects."""
        undo = self.keeper.undo(self.seen, self.root, self.call.objects)
        state = RandomState(self.keeper.generators)
        try:
            positions = torch.tensor(part, dtype=torch.int64, device="cpu")
            args = self.call.take(positions, aligned=aligned)
            return computed_again(self.forward, *args)
        finally:
            # The forward has just run for the whole batch, and changed at most attributes that it never
            # reads: restore these. Restore the rest only without other threads, which may have changed it.
            undo.attributes()
            if threading.active_count() == 1:
                undo()
                state.restore()

    def _remember(self, shapes: Shapes | None) -> None:
        """Record that such calls have no side effects."""
        if len(self.known.shapes) >= _MOST_KINDS:
            self.known.shapes.clear()
        self.known.shapes[self.keys.group] = shapes

    def _own(self, output: Any, inputs: list[Tensor]) -> Any:
        """The output, with copies of tensors that share memory with other tensors."""
        borrowed = set(map(_storage, (*inputs, *self.seen.tensors.tensors)))

        def own(leaf: Any) -> Any:
            if type(leaf) is np.ndarray:
                return leaf if leaf.base is None else leaf.copy(order="K")
            if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.is_nested:
                return leaf
            if has_attributes(leaf):  # it is not kept, and returned as it is
                return leaf
            storage = leaf.untyped_storage()
            is_part = storage.nbytes() != leaf.numel() * leaf.element_size()
            return leaf.clone() if is_part or _storage(leaf) in borrowed else leaf

        return mapped(own, output, objects=True)

    def _with_lists(self, output: Any, positions: Tensor) -> Any:
        """Find out which of the output's lists have an entry for each item; returns the output.

        If a list is as long as the batch for the first time, computes one item again, in a batch of another
        size.
        """
        if isinstance(output, Tensor):
            return output
        lists, count = self.lists, len(positions)
        unsettled = lists.unsettled(output, count)
        if unsettled and may_check(self.known, self.root, self.call, self.seen, True):
            # The forward may reuse this output's memory.
            output = mapped(_copied, output, objects=True)
            part = positions[:1].tolist() * (1 if count > 1 else 2)
            with contextlib.suppress(Exception):  # then such lists are not stored
                lists.settle(unsettled, self._alone(part, bool(self.call.aligned)), len(part))
        return output

    def _shapes_of_items(self, output: Any, count: int) -> Shapes | None:
        """The shapes of the tensors of an item's output; None if one has no batch, or there are no items.

        Excludes lists with an entry for each item: there, shapes may differ.
        """
        leaves = [output] if isinstance(output, Tensor) else self.lists.leaves(output)[1]
        arrays = (Tensor, np.ndarray)
        shapes = [
            leaf.shape for leaf in leaves if type(leaf) in arrays and not getattr(leaf, "is_nested", False)
        ]
        if count == 0 or not all(shape and shape[0] == count for shape in shapes):
            return None
        return tuple([tuple(shape[1:]) for shape in shapes])


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass or layout without storage
        return 0


def _waited(leaf: Any) -> Any:
    """Wait for a tensor that tensor parallelism returns before it has arrived."""
    return leaf.trigger_wait() if type(leaf).__name__ == "AsyncCollectiveTensor" else leaf


def _copied(leaf: Any) -> Any:
    """A copy of an array or a plain dense tensor; anything else unchanged."""
    if type(leaf) is np.ndarray:
        return leaf.copy(order="K")
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not has_attributes(leaf)
    return leaf.clone() if is_plain and not (leaf.is_nested or leaf.is_quantized) else leaf


def filling(
    forward: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Wrap a forward: if it fills its only dict and returns that, the output is just the added entries."""

    def filled(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = _only_dict(args, kwargs)
        if given is None:
            return forward(args, kwargs)
        copied = copy.copy(given)
        own: dict[int, Any] = {id(given): copied}
        output: Any = None
        args = tuple([own.get(id(value), value) for value in args])
        try:
            output = forward(args, {name: own.get(id(v), v) for name, v in kwargs.items()})
        finally:
            added = {
                name: value for name, value in copied.items() if name not in given or given[name] is not value
            }
            is_plain = not any(value is copied for value in added.values())
            is_filled = is_plain and output is copied and added and list(copied)[: len(given)] == list(given)
            if not is_filled and (added or list(copied) != list(given)):
                given.clear()  # so that the change of this argument is noticed
                given.update({name: given if one is copied else one for name, one in copied.items()})
        return {_FILLED: added} if is_filled else given if output is copied else output

    return filled


def given_back(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The output for the caller: the caller's dict, with the entries added to its copy."""
    if type(output) is not dict or output.keys() != {_FILLED}:
        return output
    given = _only_dict(args, kwargs)
    given.update(output[_FILLED])
    return given


def _only_dict(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    found = {id(v): v for v in (*args, *kwargs.values()) if type(v) is dict or isinstance(v, UserDict)}
    return next(iter(found.values())) if len(found) == 1 else None


class Inputs:
    """The arguments for some items of a call, and their state before the forward runs.

    ``bind(args, kwargs)`` names arguments, like `Signature.bind`, and ``keys_of(call)`` returns the keys of
    its items, uint8 of shape ``(k, 16)``.
    """

    def __init__(
        self,
        call: BoundCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        positions: Tensor,
        bind: Callable[[tuple[Any, ...], Mapping[str, Any]], BoundCall],
        keys_of: Callable[[BoundCall], Bytes2D],
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._call, self._positions = call, positions
        self._bind, self._keys_of = bind, keys_of
        self._leaves = argument_leaves(args, kwargs)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._before = self._versions()
        self._content = self._uncounted()

    def changed(self) -> bool:
        """Whether the forward has changed an argument in place."""
        try:
            leaves = argument_leaves(self.args, self.kwargs)
        except RecursionError:  # an argument now contains itself
            return True
        return (
            self._versions() != self._before
            or not (len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)))
            or not np.array_equal(self._uncounted(), self._content)  # type: ignore[arg-type]
            or not self._has_same_context()
        )

    def _versions(self) -> list[int]:
        """The version counters of tensors; inference tensors have none."""
        return [version(tensor) for tensor in self.tensors if has_version(tensor)]

    def _uncounted(self) -> Bytes2D | None:
        """The keys of the items, to detect changes of inference tensors; None if there are none."""
        if all(map(has_version, self.tensors)):
            return None
        return self._keys_of(self._bind(self.args, self.kwargs))

    def _has_same_context(self) -> bool:
        """Whether arguments other than tensors are unchanged."""
        if not self._call.can_change:
            return True
        try:
            return not self._call.is_changed(self._bind(self.args, self.kwargs), self._positions)
        except Exception:  # a changed argument cannot be put in a key
            return False
