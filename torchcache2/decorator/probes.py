"""What probes have found for each kind of call, and whether a call needs a probe."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchcache2.core.keys import Keys
from torchcache2.core.locks import ProcessLock
from torchcache2.decorator.bypass import BypassError
from torchcache2.decorator.probe import STRONGEST, strength
from torchcache2.decorator.structure import call_structure, item_lengths
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.compiled import names_in
from torchcache2.identity.encoding import digest
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["DEPENDENT", "Kind", "ProbePlan", "Probes"]

DEPENDENT = 0  # the result of a probe: an item's output depends on its batch
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}
_MOST_KINDS = 10_000
_MOST_VALUES = 8  # if so many kinds that differ in numbers only have one result, the others have it too


class Kind(NamedTuple):
    """The calls for which one probe is enough: those of one structure, of a module in one state.

    `code` and `loose` leave out the weights and the values of arguments; `namespace` and `exact` do not.
    """

    namespace: bytes
    code: bytes
    exact: bytes
    loose: bytes

    @classmethod
    def of(cls, fingerprint: Fingerprint, call: BoundCall, *, uneven: bool = False) -> Kind:
        """The kind of a call of the module that has this fingerprint.

        Calls whose items differ in length are a kind of their own: only these show whether a forward pads
        items to the longest.
        """
        marks = [b"uneven"] if uneven else []
        exact, loose = (digest([call_structure(call, values=values), *marks]) for values in (True, False))
        return cls(fingerprint.namespace, fingerprint.code, exact, loose)


class Probes:
    """What the probes of one module or function have found; safe under threads.

    A result is `DEPENDENT`, or the strength (1 to 4) of the probe that found items to be independent.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._settled: dict[bytes, int] = {}
        self._found: dict[bytes, dict[str, int]] = {}
        self._recalled: set[bytes] = set()
        self._dependent: dict[tuple[bytes, bytes], set[bytes]] = {}
        self._independent: dict[tuple[bytes, bytes], dict[bytes, int]] = {}

    def is_settled(self, group: bytes, items: int) -> bool:
        """Whether a call of so many items, whose keys have this group, needs no probe."""
        return self._settled.get(group, DEPENDENT) >= strength(items)

    def settle(self, group: bytes, result: int) -> None:
        """Note that a probe of strength `result` is known for calls whose keys have this group."""
        if len(self._settled) >= _MOST_KINDS:
            self._settled = {}
        self._settled[group] = result

    def result(self, kind: Kind, recall: Callable[[bytes], Mapping[str, int]]) -> int | None:
        """What is known about a kind; None if nothing is.

        ``recall(namespace)`` returns the results that earlier runs have left, by the hexadecimal digits of
        `Kind.exact`.
        """
        with self._lock():
            if kind.namespace not in self._recalled:
                self._of(kind.namespace).update(recall(kind.namespace))
                self._recalled.add(kind.namespace)
            known = self._of(kind.namespace).get(kind.exact.hex())
            # A module that has mixed items once is not probed again when its weights change.
            mixing = self._dependent.get((kind.code, kind.loose), set())
            if known == DEPENDENT or kind.exact in mixing:
                return DEPENDENT
            alike = sorted(self._independent.get((kind.namespace, kind.loose), {}).values())
            if len(alike) + len(mixing) < _MOST_VALUES:
                return known
            if mixing:  # some values make it mix items, so unknown values are not tried
                return DEPENDENT if known is None else known
            return max(alike[-_MOST_VALUES], known or DEPENDENT)

    def add(self, kind: Kind, result: int) -> None:
        """Remember the result of a probe."""
        with self._lock():
            self._of(kind.namespace)[kind.exact.hex()] = result
            if result == DEPENDENT:
                self._dependent.setdefault((kind.code, kind.loose), set()).add(kind.exact)
                self._settled = {}  # earlier probes may have overlooked this
            else:
                self._independent.setdefault((kind.namespace, kind.loose), {})[kind.exact] = result

    def found(self, namespace: bytes) -> dict[str, int]:
        """Everything that is known about a namespace, to be kept for later runs."""
        with self._lock():
            return dict(self._of(namespace))

    def _of(self, namespace: bytes) -> dict[str, int]:
        if namespace not in self._found:
            if len(self._found) >= _MOST_KINDS:
                self._found, self._independent = {}, {}
                self._recalled, self._dependent = set(), {}
            self._found[namespace] = {}
        return self._found[namespace]


@dataclasses.dataclass
class ProbePlan:
    """Whether one call needs a probe.

    `recall` is as for `Probes.result`. Unless it `is_on`, nothing is probed. `kinds` are the kinds of call
    for which this batch is to be probed, with the strength of the probe. If there are any, the whole batch is
    computed, and parts of it by themselves, to be compared.
    """

    probes: Probes
    recall: Callable[[bytes], Mapping[str, int]]
    root: Any
    fingerprint: Fingerprint
    call: BoundCall
    keys: Keys
    is_on: bool
    kinds: dict[Kind, int] = dataclasses.field(default_factory=dict)
    is_uneven_decided: bool = False

    def decide(self) -> None:
        """Decide by what is known at little cost; raises if items are known to depend on their batch."""
        self._decide(self.keys.group, uneven=False)

    def decide_uneven(self) -> None:
        """Decide anew if items differ in length; to look at that takes time, so only misses ask for it."""
        if not self.is_uneven_decided:
            self.is_uneven_decided = True
            self.decide()  # another call may have been probed meanwhile
            self._decide(self.keys.group + b"uneven", uneven=True)

    def _decide(self, group: bytes, *, uneven: bool) -> None:
        count = len(self.keys)
        if not self.is_on or count < 2 or self.probes.is_settled(group, count):
            return
        if uneven and item_lengths(self.call) is None:
            return
        kind = Kind.of(self.fingerprint, self.call, uneven=uneven)
        distinct = self.keys.first_positions()
        possible = strength(count if distinct is None else len(distinct[0]))
        result = self.probes.result(kind, self.recall)
        if result == DEPENDENT:
            raise BypassError.because("batch", "an item's output depends on the rest of its batch")
        if result is None and _has_collectives(self.root, self.fingerprint):
            result = STRONGEST
        if result is not None and result >= possible:
            self.probes.settle(group, result)
        else:
            self.kinds[kind] = possible

    def note(self, *, has_run: bool) -> str:
        """What is known of calls like this one, for other ranks; `has_run`: it has been probed if needed."""
        kind = Kind.of(self.fingerprint, self.call)
        found = self.kinds.get(kind) if has_run else None
        return _note(kind, found or self.probes.result(kind, self.recall) or DEPENDENT)

    def is_known(self, notes: Collection[str]) -> bool:
        """Whether the probes of other ranks, by their notes, are enough for this call."""
        return all(
            any(_note(kind, result) in notes for result in range(possible, STRONGEST + 1))
            for kind, possible in self.kinds.items()
        )

    def overlooked(self) -> list[Kind]:
        """The kinds of call to note as dependent, when computing this call has shown that they are."""
        return [*self.kinds] or [Kind.of(self.fingerprint, self.call)]


def _note(kind: Kind, result: int) -> str:
    return f"{kind.namespace.hex()} {kind.exact.hex()} {result}"


def _has_collectives(root: Any, fingerprint: Fingerprint) -> bool:
    """Whether a forward may talk to other processes, which would wait for parts that this one computes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    named = [name.split()[1].rpartition(".")[2] for name in fingerprint.parts if name.startswith("global ")]
    if not _COLLECTIVES.isdisjoint(named):
        return True
    modules = root.modules() if isinstance(root, nn.Module) else ()
    bases = {base for module in modules for base in type(module).__mro__ if base not in (nn.Module, object)}
    return any(map(_names_collectives, bases))


def _names_collectives(kind: type) -> bool:
    # DDP, FSDP and batch norm over all processes are torch's own modules that talk to other processes.
    if kind is nn.SyncBatchNorm or kind.__module__.startswith(
        ("torch.distributed", "torch.nn.parallel.distributed")
    ):
        return True
    functions = [inspect.unwrap(value) if callable(value) else value for value in vars(kind).values()]
    return any(
        isinstance(function, types.FunctionType) and not _COLLECTIVES.isdisjoint(names_in(function.__code__))
        for function in functions
    )
