"""The probe: whether the output of an item depends on the rest of its batch, found out once for each kind.

Parts of a batch are computed by themselves, in another order, and their rows are compared with those of the
whole batch. Two parts that share no item, a quarter of the batch each, show what one half may hide: where
every item is divided by the largest of its batch, the part that has the largest one equals the whole batch.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchcache2.arguments import BoundCall
from torchcache2.errors import OutputError
from torchcache2.fingerprint import Fingerprint
from torchcache2.keys import Keys
from torchcache2.locks import ProcessLock
from torchcache2.rows import Rows, UnstorableError
from torchcache2.sources import code_objects
from torchcache2.structure import call_structure
from torchcache2.verify import leaf_differences

__all__ = ["DEPENDENT", "STRONGEST", "Kind", "Probes", "dependence", "has_collectives", "parts", "strength"]

DEPENDENT = 0  # the result of a probe: an item's output depends on its batch
STRONGEST = 3
_MOST_KINDS = 10_000
_MOST_VALUES = 8  # kinds that differ in numbers alone; if so many are independent, the others are
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}


class Kind(NamedTuple):
    """What a probe tells about: calls of one structure, of a module in one state."""

    namespace: bytes
    code: bytes
    exact: bytes
    loose: bytes

    @classmethod
    def of(cls, fingerprint: Fingerprint, call: BoundCall) -> Kind:
        """The kind of a call of the module that has this fingerprint."""
        structures = [call_structure(call, values=values) for values in (True, False)]
        return cls(fingerprint.namespace, fingerprint.code, *structures)


class Probes:
    """What probes have found, of one module or function; safe under threads.

    A result is the strength of the probe that found items to be independent, 1 to 3, or `DEPENDENT`.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._settled: set[bytes] = set()
        self._found: dict[bytes, dict[str, int]] = {}
        self._dependent: set[tuple[bytes, bytes]] = set()
        self._independent: dict[tuple[bytes, bytes], set[bytes]] = {}

    def is_settled(self, group: bytes) -> bool:
        """Whether calls whose keys have this group need no probe any more."""
        return group in self._settled

    def settle(self, group: bytes) -> None:
        """Calls whose keys have this group need no probe any more."""
        if len(self._settled) >= _MOST_KINDS:
            self._settled = set()
        self._settled.add(group)

    def result(self, kind: Kind, recall: Callable[[bytes], Mapping[str, int]]) -> int | None:
        """What is known of a kind; None if nothing is.

        ``recall(namespace)`` are the results that earlier runs have left, by the hexadecimal digits of
        `Kind.exact`.
        """
        with self._lock():
            # With other weights too: what mixes items once is not tried again.
            if (kind.code, kind.exact) in self._dependent:
                return DEPENDENT
            if len(self._independent.get((kind.namespace, kind.loose), ())) >= _MOST_VALUES:
                return STRONGEST
            if kind.namespace not in self._found:
                self._of(kind.namespace).update(recall(kind.namespace))
            return self._of(kind.namespace).get(kind.exact.hex())

    def add(self, kind: Kind, result: int) -> None:
        """A probe has found something."""
        with self._lock():
            self._of(kind.namespace)[kind.exact.hex()] = result
            if result == DEPENDENT:
                self._dependent.add((kind.code, kind.exact))
                self._settled = set()  # an earlier probe may have overlooked it
            elif result == STRONGEST:
                self._independent.setdefault((kind.namespace, kind.loose), set()).add(kind.exact)

    def found(self, namespace: bytes) -> dict[str, int]:
        """Everything that is known of a namespace, to be kept for later runs."""
        with self._lock():
            return dict(self._of(namespace))

    def _of(self, namespace: bytes) -> dict[str, int]:
        if namespace not in self._found:
            if len(self._found) >= _MOST_KINDS:
                self._found, self._independent, self._dependent = {}, {}, set()
            self._found[namespace] = {}
        return self._found[namespace]


def strength(keys: Keys) -> int:
    """How much a probe of a batch can show: 1 if all items are equal, 2 below four distinct ones, else 3."""
    distinct = keys.first_positions()
    count = len(keys) if distinct is None else len(distinct[0])
    return 1 if count == 1 else 2 if count < 4 else STRONGEST


def parts(keys: Keys) -> list[tuple[int, ...]]:
    """Positions of the parts to compute by themselves, of half of the batch at most."""
    found = keys.first_positions()
    distinct = np.arange(len(keys)) if found is None else found[0]
    if len(distinct) == 1:
        chosen = [np.arange(len(keys) // 2)]
    elif len(distinct) < 4:
        chosen = [distinct[-1:]]
    else:
        order, count = distinct[::-1], len(distinct) // 4
        chosen = [order[::4][:count], order[2::4][:count]]
    return [tuple(part.tolist()) for part in chosen]


def dependence(
    whole: Any,
    alone: Any,
    keys: Keys,
    positions: Tensor,
    device: torch.device,
    dtypes: Collection[torch.dtype],
) -> str | None:
    """How the output of items that were computed alone differs from that of their batch; None if it does not.

    Parameters
    ----------
    whole, alone : pytree
        The output for the whole batch, and for the items at `positions` (int64, shape ``(k,)``).
    keys : Keys
        Of the whole batch.
    device : torch.device
        Of the call.
    dtypes : collection of torch.dtype
        What the forward computes with.
    """
    try:
        expected = Rows.from_pytree(whole, len(keys), device=device)
    except (UnstorableError, OutputError):
        return None  # it is not kept anyway
    batches = f"in a batch of {len(positions)} and of {len(keys)}"
    try:
        rows = Rows.from_pytree(alone, len(positions), device=device)
    except (UnstorableError, OutputError) as error:
        return str(error)
    expected = expected.take(positions)
    if rows.schema != expected.schema:
        shapes = [
            f"output{leaf.path} is {leaf.dtype} {leaf.shape} and {other.dtype} {other.shape} an item"
            for leaf, other in zip(rows.schema.leaves, expected.schema.leaves, strict=False)
            if leaf != other
        ]
        return f"{next(iter(shapes), 'the output has another structure')} {batches}"
    worst: tuple[float, str, int] = (0.0, "", 0)
    for path, apart in leaf_differences(expected, rows, dtypes).items():
        worst = max(worst, (float(apart.max()), path, int(positions[apart.argmax()])))
    apart_by, path, item = worst
    if apart_by == 0.0:
        return None
    return f"output{path} of item {item} differs by {apart_by:.3g} {batches}"


def has_collectives(root: Any, fingerprint: Fingerprint) -> bool:
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
    # Torch's own modules that talk to other processes: DDP, FSDP, batch norm over all of them.
    if kind.__module__.startswith(("torch.distributed", "torch.nn.parallel.distributed")):
        return True
    names = {
        name
        for function in _functions(kind)
        for code in code_objects(function.__code__)
        for name in code.co_names
    }
    return kind is nn.SyncBatchNorm or not _COLLECTIVES.isdisjoint(names)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, types.FunctionType):
            yield function
