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
import time
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NoReturn

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
from torchcache2.decorator.bypass import BypassError, not_stored, of_module
from torchcache2.decorator.lazymodule import devices_apart, lazies_of, with_device_hint
from torchcache2.decorator.probe import Difference, Probe, talks
from torchcache2.decorator.tracing import Runner
from torchcache2.engine.batch import Checks, NotStoredError, WholeBatch, computed_again
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.running import Forward
from torchcache2.engine.values.outputs import Lists, rows_of
from torchcache2.engine.values.samples import Samples
from torchcache2.identity.arguments import BoundCall, Signature, Single, argument_leaves
from torchcache2.identity.encoding import digest
from torchcache2.identity.items import item_keys
from torchcache2.identity.namespace import NamespaceKeeper, Snapshot

_MOST_CONTEXTS = 1000  # contexts whose outputs' lists are known
_MOST_KINDS = 10_000
_CPU = torch.device("cpu")
_FILLED = ("filled by the forward",)  # the only key of such an output: the added entries

Shapes = tuple[tuple[int, ...], ...]
Names = Callable[[bytes, BoundCall], Keys]


class Known:
    """Facts about the calls of one method, for all threads.

    Attributes
    ----------
    signature : Signature
        The signature of the plain method.
    random : set
        The contexts of calls whose forward was random, or seemed to be. They are not cached: a forward that
        seeds a generator would leave it in the same state again, which hides its draws.
    shapes : dict
        The shapes of items' outputs, by group of keys, for calls without side effects; see
        `_shapes_of_items`.
    """

    signature: Signature

    def __init__(
        self,
        settings: CacheSettings,
        keeper: NamespaceKeeper,
        runner: Runner,
        names: Names | None = None,
    ) -> None:
        self.settings, self.keeper, self.runner, self.names = settings, keeper, runner, names
        self.random = set[bytes]()
        self.shapes: dict[bytes, Shapes | None] = {}
        self.samples = Samples()
        self._lists: dict[bytes, dict[str, bool]] = {}
        self._groups: dict[Any, bytes] = {}  # see `item_keys`

    def keys(self, namespace: bytes, call: BoundCall) -> Keys:
        """The keys of the items of a call."""
        if self.names is not None:
            return self.names(namespace, call)
        entries = [*call.entries, *call.maybe_per_item]
        count = self.settings.subsample_count
        return item_keys(
            namespace, call.context, call.leaves, entries, subsample_count=count, groups=self._groups
        )

    def lengths(self) -> int:
        """How many shapes items have had."""
        return len({tuple([one[2] for one in group[2:] if type(one) is tuple]) for group in self._groups})

    def context(self, namespace: bytes, call: BoundCall) -> bytes:
        """A digest of the namespace and of the arguments that are not batched."""
        return digest([namespace, call.context])

    def lists(self, context: bytes) -> Lists:
        """Which lists in the outputs of a context's calls have an entry per item."""
        if len(self._lists) >= _MOST_CONTEXTS:
            self._lists.clear()
        return Lists(self.samples, self._lists.setdefault(context, {}))


def may_check(known: Known, root: Any, call: BoundCall, seen: Snapshot, is_found: bool = False) -> bool:
    """Whether the forward may run just to check a batch.

    No module is loaded just to check a batch that is all found.
    """
    loaded = [lazy.module for lazy in lazies_of(known.keeper, call)]
    if devices_apart(call, root, seen) or (is_found and None in loaded):
        return False
    return not any(talks(one, known.keeper.fingerprint) for one in (root, *loaded))


def for_each(plain: Forward, found: list[Any]) -> Forward:
    """A forward of batches, which calls the plain one for each entry of a `Single`.

    Returns a tensor or a list. What the plain one returns is added to `found`.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        count = next(len(value) for value in (*args, *kwargs.values()) if type(value) is Single)

        def call(i: int) -> Any:
            one = [value[i] if type(value) is Single else value for value in args]
            named = {name: value[i] if type(value) is Single else value for name, value in kwargs.items()}
            return plain.function(*one, **named)

        outputs = [call(i) for i in range(count)]
        found.extend(outputs)
        forms = {(one.shape, one.dtype, one.layout) if type(one) is Tensor else None for one in outputs}
        is_stacked = None not in forms and len(forms) == 1 and outputs[0].layout == torch.strided
        return torch.stack(outputs) if is_stacked else outputs

    return Forward(forward, plain.compiler)


class Computation:
    """Runs the forward for some items of a call, and decides whether the output may be stored.

    It is the `Source` of a batch, one for each call. Most calls find all items, so that it computes nothing.

    Attributes
    ----------
    root
        The module or function; `seen` is its state as seen by its keeper for this call.
    checks : Checks
        Decides whether to compute the whole batch.
    ran : list
        Holds the output of a forward that has run with the caller's arguments, until it is known that it has
        changed none of them.
    """

    def __init__(
        self,
        known: Known,
        call: BoundCall,
        keys: Keys,
        plain: Forward,
        root: Any,
        seen: Snapshot,
        checks: Checks,
        description: Callable[[bytes], Mapping[str, Any]],
        distrust: Callable[[], None],
    ) -> None:
        self.known, self.keeper, self.random = known, known.keeper, known.random
        self.call, self.keys, self.root, self.seen, self.checks = call, keys, root, seen, checks
        self.description, self.distrust = description, distrust
        self.ran: list[Any] = []
        self.singles: list[Any] = []  # outputs of a call that is one item
        self._plain = for_each(plain, self.singles) if call.is_one else plain
        self._walks = known.keeper.walks

    @computed_once
    def context(self) -> bytes:
        """See `Known.context`."""
        return self.known.context(self.seen.namespace, self.call)

    @computed_once
    def lists(self) -> Lists:
        """Which lists in the output have an entry per item."""
        lists = self.known.lists(self.context)
        if self.call.is_one:
            lists.known[""] = True
        return lists

    @property
    def device(self) -> torch.device:
        """The device of the batch or, without batched tensors, of the weights."""
        known = self.call.device or next((tensor.device for tensor in self.seen.tensors.tensors), None)
        return known or next((lazy.device() for lazy in lazies_of(self.keeper, self.call)), _CPU)

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensors that the forward reads."""
        return self.call.dtypes | self.seen.tensors.dtypes

    def is_outdated(self) -> bool:
        """Whether another process has changed weights in shared memory, which moves no version counter."""
        if not any(
            t.device.type == "cpu" and t.untyped_storage().is_shared() for t in self.seen.tensors.tensors
        ):
            return False
        self.keeper.distrust_tensors()
        return self.keeper.look(self.root).namespace != self.seen.namespace

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
        with with_device_hint(self.keeper.name, self.call, self.root, self.seen, positions):
            return self._output(positions)

    def _output(self, positions: Tensor) -> Any:
        if len(positions) == self.call.batch_size:
            return self._whole()
        if self._needs_whole_batch():
            return WholeBatch(self._whole())
        return self._part(positions)

    def _whole(self) -> Any:
        """The output of the whole batch, computed with the caller's own arguments.

        Once it has left no trace, parts of the batch are computed by themselves, if that is due.
        """
        call, count = self.call, self.call.batch_size
        positions = torch.arange(count, device="cpu")
        inputs, state = self._watched(call.args, call.kwargs, positions)
        undo = self._undo(state) if self.checks.is_just_check else None
        try:
            output = self.forward(call.args, call.kwargs)
        except BaseException:
            if undo is not None:
                undo(all_of_it=threading.active_count() == 1)
            raise
        self.ran = [output]
        stop = self._trace(inputs, state, output)
        if stop is not None:
            raise NotStoredError(stop.reason, stop.text, output)
        self.ran = []
        output = self._with_lists(output, positions)
        shapes = self._shapes_of_items(output, count)
        has_other_shape = self._has_other_shape(shapes)
        if has_other_shape or self.checks.computes_parts:
            # Copy: the forward may reuse this output's memory for the output of a part.
            copied = mapped(_copied, output, objects=True)
            try:
                whole = self._rows(copied, count)
            except (UnstorableError, OutputError):  # it cannot be stored
                return output
            if has_other_shape and not call.entries:
                raise not_stored("batch", output, self._shapes_text(shapes), cause="padding")
            output = copied
            found = self._difference(whole)
            if found is not None:
                raise not_stored("batch", output, found.text, cause=found.cause)
        self._remember(shapes)
        output = self._own(output, inputs.tensors)
        if undo is not None:
            undo(all_of_it=threading.active_count() == 1)
        return output

    def _part(self, positions: Tensor) -> Any:
        """The output of some items; or, if items had outputs of another shape before, of the whole batch."""
        call, count = self.call, len(positions)
        try:
            args, kwargs = call.take(positions)
        except UnstorableError as error:
            self._refuse_part(f"an argument for a part of the batch is {error.what}")
        inputs, state = self._watched(args, kwargs, positions)
        undo, failure = self._undo(state), ""
        try:
            output = self.forward(args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):  # the whole batch needs even more
                raise
            failure = f"the forward of {count} of its {call.batch_size} items raises {shown(error)}"
        if failure:
            undo()
            self._refuse_part(failure, cause="raises")
        stop = self._trace(inputs, state, output)
        if stop is not None:
            undo()
            raise NotStoredError(stop.reason, stop.text, self.forward(call.args, call.kwargs))
        output = self._with_lists(output, positions)
        shapes = self._shapes_of_items(output, count)
        if self._has_other_shape(shapes):
            undo()
            text, whole = self._shapes_text(shapes), self._whole()
            if self._shapes_of_items(whole, call.batch_size) != shapes:
                raise not_stored("batch", whole, text, cause="padding")
            return WholeBatch(whole)
        self._remember(shapes)
        return output

    def _refuse_part(self, why: str, *, cause: str = "") -> NoReturn:
        """Raise `NotStoredError` with the whole batch's output; or what the forward raises for that."""
        raise not_stored("batch", self.forward(self.call.args, self.call.kwargs), why, cause=cause) from None

    def _watched(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], positions: Tensor
    ) -> tuple[Inputs, RandomState]:
        """The state of arguments and random generators before a forward."""
        inputs = Inputs(self.call, args, kwargs, positions, self.known.signature.bind, self._key_bytes)
        return inputs, RandomState(self.keeper.generators)

    def _undo(self, state: RandomState) -> Callable[..., None]:
        """What restores the state of the module, of objects among the arguments, and of random generators."""
        undos = [self.keeper.undo(self.seen, self.root)]
        undos += [one.keeper.undo(one.seen, one.value) for one in self.call.objects]

        def undo(*, all_of_it: bool = True) -> None:
            for one in undos:
                one(all_of_it=all_of_it)
            if threading.active_count() == 1 and state.moved():  # else another thread may have drawn
                state.restore()

        return undo

    def _key_bytes(self, call: BoundCall) -> Bytes2D:
        return self.known.keys(self.seen.namespace, call).data

    def _needs_whole_batch(self) -> bool:
        """Whether the forward must run for the whole batch, whatever the requested items.

        It may run for a part of the batch if such calls left no trace before: a module that sets itself up,
        or counts its calls, must do so once, with the caller's own arguments. Also, we must know which
        arguments belong to items.
        """
        is_known = self.keys.group in self.known.shapes and self.context not in self.random
        return not is_known or self.checks.computes_parts or bool(self.call.maybe_per_item)

    def _trace(self, inputs: Inputs, state: RandomState, output: Any) -> BypassError | None:
        """The traces of the forward for which its output must not be stored; None if it has left none."""
        found = []
        if self._is_random(state):
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

    def _is_random(self, state: RandomState) -> bool:
        """Whether random numbers were drawn since `state`."""
        if not state.moved():
            return False
        # Only if such calls drew none before, and there are other threads, one of these may have drawn.
        if threading.active_count() == 1 or self.keys.group not in self.known.shapes:
            if len(self.random) >= _MOST_CONTEXTS:
                self.random.clear()
            self.random.add(self.context)
        return True

    def _look_at_loaded(self) -> list[BypassError]:
        """Take modules that the forward has loaded into account; returns reasons not to store the output."""
        self._walks, self.seen = self.keeper.walks, self.keeper.look(self.root)
        stops = of_module(self.keeper, self.root, is_without_grad=True)
        if self.keeper.generators:  # their state before is unknown
            why = "a module with generators of its own was loaded in this call"
            stops.append(BypassError.because("random", why, is_final=False))
        return stops

    def _has_other_shape(self, shapes: Shapes | None) -> bool:
        """Whether items had outputs of another shape in earlier batches.

        Within a batch, all outputs have one shape. If that differs between batches, items depend on them; but
        items of no group may themselves be of several shapes.
        """
        known = self.known.shapes.get(self.keys.group) if self.keys.group else None
        return self.known.settings.probe and None not in (known, shapes) and known != shapes

    def _shapes_text(self, shapes: Shapes | None) -> str:
        known = self.known.shapes.get(self.keys.group)
        return f"items of one shape have outputs of the shapes {known} and {shapes}"

    def _rows(self, output: Any, count: int) -> Rows:
        return rows_of(output, count, self.lists, device=self.device)

    def _difference(self, whole: Rows) -> Difference | None:
        """How parts of the batch, computed by themselves, differ from its rows; None if they do not."""
        start, checks = time.perf_counter(), self.checks
        probe = Probe(
            whole,
            self.keys,
            self.call,
            lambda part, maybe_per_item: self._rows(self._alone(part, maybe_per_item), len(part)),
            dtypes=self.dtypes(),
            pads=self.known.settings.miss_batch == "pad",
        )
        try:
            return probe.dependence()
        finally:
            checks.of_parts = time.perf_counter() - start
            checks.seconds += checks.of_parts

    def dependence(self) -> Difference | None:
        """How items depend on their batch, which is computed again with parts of it; None if they do not."""
        every = range(self.call.batch_size)
        try:
            return self._difference(self._rows(self._alone(every, maybe_per_item=False), len(every)))
        except Exception:  # it cannot be stored, or cannot run once more
            return None

    def _alone(self, part: Sequence[int], maybe_per_item: bool) -> Any:
        """The output of some items, computed by themselves; undoes side effects."""
        undo = self._undo(RandomState(self.keeper.generators))
        try:
            positions = torch.tensor(part, dtype=torch.int64, device="cpu")
            args = self.call.take(positions, maybe_per_item=maybe_per_item)
            return computed_again(self.forward, *args)
        finally:
            undo(all_of_it=threading.active_count() == 1)  # other threads may have changed the rest meanwhile

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
        if unsettled and may_check(self.known, self.root, self.call, self.seen):
            # The forward may reuse this output's memory.
            output = mapped(_copied, output, objects=True)
            part = positions[:1].tolist() * (1 if count > 1 else 2)
            with contextlib.suppress(Exception):  # then such lists are not stored
                lists.settle(unsettled, self._alone(part, bool(self.call.maybe_per_item)), len(part))
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
