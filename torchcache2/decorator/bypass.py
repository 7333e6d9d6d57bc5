"""Decides if a call may be cached: every reason against it, where it is checked, and advice for it.

Checks that need no forward are here, in this order: of the module, the arguments, the weights.
`torchcache2.decorator.forward` checks what the forward did, and `torchcache2.decorator.probe` whether items
depend on their batch.

Finding out that a call cannot be cached costs as much as caching it: hashing its arguments, checking the
module, comparing generators and containers. After a few such calls, a `Backoff` lets further calls of the
kind skip all that: a glance at a call's arguments shows its kind. Calls whose forward drew random numbers are
identified more precisely, by a digest of all arguments that are not batched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchcache2.core.errors import (
    InputError,
    NotCachedError,
    OptionError,
    OutputError,
    TorchcacheError,
    UnhashableArgumentError,
    attribute,
)
from torchcache2.core.logs import shown
from torchcache2.core.private import keeps_parametrized
from torchcache2.core.values import UnstorableError
from torchcache2.engine.batch import NotStoredError, RefusedError
from torchcache2.identity.arguments import BoundCall, Signature, UncachedArgumentError
from torchcache2.identity.namespace import Facts, NamespaceKeeper, Snapshot, reading

_MOST_CALLS = 1024  # most bypassing calls before the next try
_MOST_KINDS = 10_000
_LONG = 64  # longer texts are content, not a choice of what to compute


class Reason(NamedTuple):
    """A reason why calls are not cached.

    `asked` names the part that is checked. Module and weights are checked at every call, cheaply; checking
    the arguments or the forward costs as much as caching. `advice` says what to do; it is empty if the text
    of each case does.
    """

    asked: Literal["module", "weights", "arguments", "forward"]
    advice: str = ""


REASONS = {
    "grad": Reason(
        "module", "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs"
    ),
    "training": Reason("module", "call .eval() first; a trainer's model.train() may have undone it"),
    "argument": Reason("arguments"),
    "batch": Reason("forward"),  # see `advice_for`
    "random": Reason(
        "forward",
        "its output is random: nothing to do if that is intended, else remove the random operation (in map=, "
        "draw from the parameter generators); or another thread drew random numbers meanwhile",
    ),
    "state": Reason("forward", "if that happens at every call, keep it outside of the forward"),
    "inference": Reason("module", "make or load the module under torch.no_grad() instead"),
    "autocast": Reason("weights", "change weights outside of the autocast context"),
    "input": Reason("forward", "have it work on a copy"),
    "parametrize": Reason("module", "call it outside of that context"),
    "subclass": Reason("arguments", "pass dense tensors of torch's own type to have the call cached"),
    "lazy": Reason("module", "the next call can be cached"),
    "sharded": Reason(
        "module",
        "a rank that finds all items would skip a forward in which others wait. Cache a module that is whole "
        "on each rank, such as a frozen one outside of the model that is sharded",
    ),
    "output": Reason("forward"),
    "unreadable": Reason(
        "module",
        "reading a missing attribute must raise an AttributeError; of a torch.jit module, cache the original",
    ),
}
_BATCH = {  # advice about a dependence on the batch, by how it was found
    "": (
        "if the batch is not the first dimension, use batch_first=True; if an argument belongs to the whole "
        "batch, name it in shared_args; if the forward mixes items, decorate what runs before"
    ),
    "padding": (
        "if items are padded to the longest of their batch, pad them to a fixed length or to a multiple "
        "(docs/recipes/padding.md), and mask the padding; if the batch is not the first dimension, use "
        "batch_first=True; if the forward mixes items, decorate what runs before"
    ),
    "structure": (
        "return tensors or arrays whose first dimension is the batch, or a list with one entry per item, not "
        "a structure that differs between items"
    ),
    "raises": (
        "name arguments of the whole batch in shared_args, and those with one entry per item in item_args"
    ),
    "rounding": (
        "the difference is about as small as rounding: if it is nothing else, probe=False keeps the rows"
    ),
    "random": (
        "the forward draws random numbers without a seed, or is not deterministic: nothing to do if that is "
        "intended, else give its generator a seed"
    ),
    "repeat": (
        "the output depends on the place in the batch: pass what differs between places as an argument with "
        "one entry per item; if the batch is not the first dimension, use batch_first=True"
    ),
    "quantized": "quantize statically, or weights only",
}
EDITED = (
    "the module has changed in a way that PyTorch does not record, such as by .data or in shared memory: "
    "after such an edit, call .cache_instance.refresh()"
)
STALE = (
    "the forward reads something that its keys do not cover and that has changed, such as a file that no "
    "argument names, a date, a setting of a library, or what ignore= leaves out. Name it in version=, or "
    "pass it as an argument"
)
_LAYERS = {  # reason and text, by `UnsteadyLayer.does`
    "drops out": ("training", "{} drops out at random"),
    "normalises": ("training", "{} normalises by the statistics of the batch"),
    "scales": ("batch", "the dynamically quantized {} scales by the range of the batch"),
}


def advice_for(reason: str, cause: str = "") -> str:
    """What to do about a reason.

    `cause` is how a dependence on the batch was found. For a part of a batch, outputs have another shape
    (``"padding"``) or ``"structure"``, the forward ``"raises"``, or values differ, as little as by
    ``"rounding"``, or where entries have several lengths (``"padding"``). An item has two outputs alone
    (``"random"``), or in one batch (``"repeat"``). The module is dynamically ``"quantized"``. An empty text:
    values differ, or unknown by now.
    """
    return _BATCH[cause] if reason == "batch" else REASONS[reason].advice


class BypassError(RefusedError):
    """Raised where a check finds that a call cannot be cached.

    `reason` is a key of `REASONS`, and `text` says why and what to do. If it `is_final`, later calls of this
    kind will probably not be cached either.
    """

    def __init__(
        self, reason: str, text: str, error: Exception | None = None, *, is_final: bool = True
    ) -> None:
        super().__init__(reason, text, error)
        self.is_final = is_final and REASONS[reason].asked in ("arguments", "forward")

    @classmethod
    def because(cls, reason: str, why: str, *, cause: str = "", is_final: bool = True) -> BypassError:
        """The error for a reason, with `why` and the advice as its text; `cause` is as in `advice_for`."""
        return cls(reason, "; ".join(filter(None, (why, advice_for(reason, cause)))), is_final=is_final)

    @classmethod
    def all_of(cls, stops: Sequence[BypassError]) -> BypassError:
        """One error for all reasons of a call, so that the user can fix all at once.

        It counts as the first.
        """
        by_reason: dict[str, BypassError] = {}
        for stop in stops:
            by_reason.setdefault(stop.reason, stop)
        first, *others = by_reason.values()
        text = "".join([first.text, *[f". Also ({stop.reason}): {stop.text}" for stop in others]])
        return cls(first.reason, text, first.error, is_final=first.is_final)

    def as_error(self, name: str) -> NotCachedError:
        """What ``strict=True`` raises for a module of this name."""
        if isinstance(self.error, NotCachedError):
            return self.error
        kind = OutputError if isinstance(self.error, UnstorableError) else NotCachedError
        return kind(f"{name}: not cached ({self.reason}): {self.text}")


def not_stored(reason: str, output: Any, why: str = "", *, cause: str = "") -> NotStoredError:
    """The error for an output that must not be stored, with the advice; `cause` is as in `advice_for`."""
    return NotStoredError(reason, BypassError.because(reason, why, cause=cause).text, output)


def of_reading(keeper: NamespaceKeeper, root: Any) -> Facts | BypassError:
    """The facts about a module, or why it cannot be read."""
    try:
        return keeper.facts(root)
    except TorchcacheError:
        raise
    except Exception as error:  # such as from a property that should raise `AttributeError`
        return BypassError.because("unreadable", reading(error))


def of_module(keeper: NamespaceKeeper, root: Any, *, is_without_grad: bool) -> list[BypassError]:
    """Why no call of the module can be cached now, with any arguments; empty if calls can.

    `is_without_grad`: the forward turns grad mode off by itself, so that it makes no graph.
    """
    stops = list[BypassError]()
    facts = of_reading(keeper, root)
    if isinstance(facts, BypassError):
        return [facts]
    if facts.sharded is not None:
        return [BypassError.because("sharded", facts.sharded)]
    if facts.is_parametrized and keeps_parametrized():
        text = "parametrize.cached() keeps weights that may have changed"
        stops.append(BypassError.because("parametrize", text))
    has_graph = torch.is_grad_enabled() and (facts.names_grad or not is_without_grad)
    if has_graph and (path := keeper.path_with_grad(root)) is not None:
        keeper.distrust_tensors()
        stops.append(BypassError.because("grad", f"grad mode is on and {path} requires grad"))
    if facts.has_lazy:
        stops.append(BypassError.because("lazy", "a parameter is uninitialised"))
    if facts.is_uncounted:
        text = (
            "weights made under torch.inference_mode have no version counters, and more than 500 kB of them "
            "are too many to be read at every call"
        )
        stops.append(BypassError.because("inference", text))
    if facts.unsteady is not None:
        reason, text = _LAYERS[facts.unsteady.does]
        stops.append(BypassError.because(reason, text.format(facts.unsteady.name), cause="quantized"))
    return stops


def ask_arguments(
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keeper: NamespaceKeeper,
    stops: Sequence[BypassError] = (),
    *,
    is_without_grad: bool = False,
) -> BoundCall | None:
    """Bind a call to a signature; raises for `stops`, or if its arguments cannot be put in keys.

    Modules and other objects among the arguments are checked by `of_module`, like the module itself. None if
    the arguments do not fit the signature: the plain forward then raises the usual error.
    """
    try:
        call = signature.bind(args, kwargs)
        for value, other, seen in call.objects:
            stops = [*stops, *of_module(other, value, is_without_grad=is_without_grad)]
            ask_weights(seen)
            if other.mistaken:  # rows computed with it are in the function's namespace
                other.mistaken = []
                keeper.mistaken.append(keeper.fingerprint.namespace)
        if torch.is_grad_enabled() and call.requires_grad:
            keeper.distrust_tensors()
            raise BypassError.because("grad", "an input requires grad")
    except UncachedArgumentError as error:
        stops = [*stops, BypassError.because("subclass", str(error))]
    except (InputError, UnhashableArgumentError) as error:
        stops = [*stops, BypassError("argument", str(error), error)]
    except OptionError:
        raise
    except BypassError as stop:
        stops = [*stops, stop]
    except TypeError:
        return None
    except Exception as error:  # such as an image that cannot be read
        stops = [*stops, BypassError("argument", f"the arguments cannot be read: {shown(error)}", error)]
    if stops:
        raise BypassError.all_of(stops) from None
    return call


def ask_weights(seen: Snapshot) -> None:
    """Raise if the forward may compute with older weights than those in the key."""
    if seen.has_old_casts:
        text = "weights have changed while autocast is on, which keeps its copies of the old ones"
        raise BypassError.because("autocast", text)


def glance(root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind of a call, cheaply: types of arguments, dimensions of tensors, flags and texts."""
    marks = [torch.is_grad_enabled(), attribute(root, "training")]
    marks += map(_mark, args)
    for name, value in kwargs.items():
        marks += [name, _mark(value)]
    return tuple(marks)


def _mark(value: Any) -> Any:
    if any(type(value) is kind for kind in (Tensor, nn.Parameter)):  # those of subclasses may run any code
        return type(value), value.is_nested, value.layout, value.device.type, value.dim(), value.dtype
    if value is None or type(value) is bool or (type(value) is str and len(value) <= _LONG):
        return value
    return type(value)


class _Failed(NamedTuple):
    """How often caching has failed, why, and how many calls are left before the next try."""

    tries: int
    reason: str
    left: int


class Backoff:
    """The kinds of calls that were not cached, and why. Thread-safe.

    After `tries` failures, `calls` calls bypass the cache before the next try; each further failure doubles
    that number.
    """

    def __init__(self, tries: int, calls: int) -> None:
        self._tries, self._calls = tries, calls
        self._seen: dict[Hashable, _Failed] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def reason(self, kind: Hashable) -> str | None:
        """The reason for a call to bypass the cache; None if caching should be tried. Counts the call."""
        failed = self._seen.get(kind)
        if failed is None or failed.left == 0:
            return None
        self._seen[kind] = failed._replace(left=failed.left - 1)  # harmless if a thread has just cleared it
        return failed.reason

    def add(self, kind: Hashable, reason: str) -> None:
        """Record that a call of this kind was not cached."""
        if len(self._seen) >= _MOST_KINDS:
            self._seen = {}
        tries = 1 + (self._seen[kind].tries if kind in self._seen else 0)
        rounds = tries - self._tries
        left = min(self._calls << rounds, _MOST_CALLS) if rounds >= 0 else 0
        self._seen[kind] = _Failed(tries, reason, left)

    def clear(self, kind: Hashable) -> None:
        """Record that a call of this kind was cached."""
        self._seen.pop(kind, None)
