"""The probe: checks that the output of an item does not depend on the rest of its batch.

A batch composed of items from several earlier batches reveals such a dependence. So batches are counted for
each kind of call, by whether none, some or all items were found. The 1st, 2nd, 4th, 8th … of each are
computed as a whole, and found rows are compared with the computed ones; so are the first 64 partly found
batches, as the forward runs anyway. A batch that was computed as a whole before reveals nothing new, and is
not counted when found again.

If items were missing, parts of the batch are also computed at these counts, by themselves and in another
order. Some parts share no item, since one part may hide a dependence: if every item is divided by the largest
of its batch, a part with the largest one equals the whole batch. Two parts of one size begin with the same
items: as a forward rounds alike for batches of one size, these two reveal even an influence that is hardly
larger than rounding.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import types
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import shown
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Rows
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.core.values import UnstorableError
from torchcache2.decorator.bypass import BypassError
from torchcache2.engine.batch import Checks, is_computed_again
from torchcache2.engine.verify import leaf_differences
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.obstacles import modules_of
from torchcache2.identity.sourcecode import names_in

_ALIKE = 0.75  # batches of one size differ by less than the precision to this power
_MOST_KINDS = 1_000
_MOST_NAMESPACES = 256
_MOST_VALUES = 8  # if so many kinds, different only in values, have one result, assume it for the others
_ALL_MIXED = 64  # partly found batches that are all checked, as the forward runs anyway
_BYTES = 1 << 14  # of the Bloom filter of batches computed as a whole
_WHOLE = "whole"  # its name among the kinds, whose names are hexadecimal
_MISSED, _MIXED, _FOUND = range(3)  # batches of which no, some, and all items were found
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}
_TALKING = ("torch.distributed", "torch.nn.parallel.distributed")  # modules of these talk to other processes


@dataclasses.dataclass
class Kind:
    """Calls that are equal except for their items share one series of checks.

    `code` is a digest of the module's code and of the form of the arguments, without weights and values.
    `counts` are the numbers of batches of which no, some, and all items were found; empty if an item's output
    depends on its batch.
    """

    namespace: bytes
    name: str
    code: bytes = b""
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])


class Probes:
    """Results of the checks of one decorator's modules or functions; safe under threads.

    Per namespace: its kinds by name, and the batches computed as a whole, in a Bloom filter with one bit per
    batch. After 1,300 batches, 1 in 100 new ones hits the bit of another one, and is not checked.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._by_group: dict[bytes, Kind] = {}
        self._kinds: dict[bytes, dict[str, Kind]] = {}
        self._whole: dict[bytes, bytearray] = {}
        self._mixing: dict[bytes, set[str]] = {}  # names of dependent kinds, by `Kind.code`

    def kind(
        self,
        group: bytes,
        fingerprint: Fingerprint,
        call: BoundCall,
        recall: Callable[[bytes], Mapping[str, Any]],
        method: str = "forward",
    ) -> Kind:
        """The kind of a call of a method whose keys have this group.

        ``recall(namespace)`` returns the `document` that earlier runs saved.
        """
        kind = self._by_group.get(group)
        if kind is None:
            with self._lock():
                if fingerprint.namespace not in self._kinds:
                    self._read(fingerprint.namespace, recall(fingerprint.namespace))
                if len(self._by_group) >= _MOST_KINDS:
                    self._by_group = {}
                kind = self._by_group[group] = self._kind(fingerprint, call, method)
        return kind

    def _read(self, namespace: bytes, document: Mapping[str, Any]) -> None:
        if len(self._kinds) >= _MOST_NAMESPACES:
            self._kinds, self._whole, self._mixing, self._by_group = {}, {}, {}, {}
        kinds, whole = {}, bytearray(_BYTES)
        for name, found in document.items():  # do not trust it: any program may have written this
            if name == _WHOLE:
                with contextlib.suppress(TypeError, ValueError, zlib.error):
                    data = zlib.decompressobj().decompress(base64.b64decode(found, validate=True), _BYTES)
                    whole = bytearray(data) if len(data) == _BYTES else whole
            elif isinstance(found, list) and len(found) in (0, 3) and all(type(n) is int for n in found):
                kinds[name] = Kind(namespace, name, counts=[max(n, 0) for n in found])
        self._kinds[namespace], self._whole[namespace] = kinds, whole

    def _kind(self, fingerprint: Fingerprint, call: BoundCall, method: str) -> Kind:
        namespace, kinds = fingerprint.namespace, self._kinds[fingerprint.namespace]
        leaves = [(path, str(tensor.dtype), tensor.dim()) for path, tensor in call.leaves]
        form = repr([method, sorted({*call.names, *call.kwargs}), leaves]).encode("utf-8", "surrogatepass")
        name, code = digest([form, call.context]).hex(), digest([fingerprint.code, form])
        mixing, counts = self._mixing.get(code, set()), [0, 0, 0]
        if name in mixing:  # a module that has mixed items is not checked again after a change of weights
            counts = []
        elif name not in kinds:
            alike = sum(kind.code == code and any(kind.counts) for kind in kinds.values())
            if alike + len(mixing) >= _MOST_VALUES:
                if mixing:  # some values make it mix items, so do not try unknown ones
                    return Kind(namespace, name, code, [])
                name, counts = digest([form]).hex(), [alike, 0, 0]
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
        kind = kinds.setdefault(name, Kind(namespace, name, code, counts))
        kind.code, kind.counts = code, kind.counts if counts else []
        return kind

    def count(self, kind: Kind, what: int) -> int:
        """Count a batch; returns the new count."""
        with self._lock():
            if kind.counts:  # else another thread has just found a dependence
                kind.counts[what] += 1
            return kind.counts[what] if kind.counts else 0

    def depends(self, kind: Kind) -> None:
        """Record that an item's output depends on its batch."""
        with self._lock():
            kind.counts = []
            self._mixing.setdefault(kind.code, set()).add(kind.name)
            self._by_group = {}  # holds for other weights too

    def start_anew(self, namespace: bytes) -> None:
        """Restart the checks of a namespace, whose rows were dropped."""
        with self._lock():
            for kind in self._kinds.get(namespace, {}).values():
                kind.counts = [0 for _ in kind.counts]
            if namespace in self._whole:
                self._whole[namespace] = bytearray(_BYTES)

    def is_whole(self, keys: Keys) -> bool:
        """Whether a batch was computed as a whole."""
        whole, at = self._whole.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        return whole is not None and bool(whole[at % _BYTES] >> (at >> 61) & 1)

    def add_whole(self, keys: Keys) -> None:
        """Record that a batch was computed as a whole."""
        whole, at = self._whole.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        if whole is not None:
            whole[at % _BYTES] |= 1 << (at >> 61)

    def document(self, namespace: bytes) -> dict[str, Any]:
        """All results for a namespace, as JSON, to save for later runs."""
        with self._lock():
            if namespace not in self._kinds:
                return {}
            counts = {name: list(kind.counts) for name, kind in self._kinds[namespace].items()}
            return {**counts, _WHOLE: base64.b64encode(zlib.compress(self._whole[namespace])).decode()}


class CallChecks(Checks):
    """The checks of one call; raises `BypassError` if its items are known to depend on their batch.

    When a check is due, ``may_run(is_found)`` returns whether the forward can run just for it; `is_found`:
    for a batch that is all found.
    """

    def __init__(self, probes: Probes, kind: Kind, keys: Keys, may_run: Callable[[bool], bool]) -> None:
        if not kind.counts:
            raise BypassError.because("batch", "an item's output depends on the rest of its batch")
        self.kind = kind
        self.computes_parts = False  # whether to compute parts of the batch by themselves
        self.is_conclusive = True  # whether the forward has computed the requested items
        self._probes, self._keys, self._may_run = probes, keys, may_run
        self._counted: int | None = None

    def is_due(self, found: int) -> bool:
        """Whether to compute the whole batch; `found` of its items were found."""
        count = len(self._keys)
        what = _MISSED if not found else _FOUND if found == count else _MIXED
        if count == 0 or (self._probes.is_whole(self._keys) if what == _FOUND else count == 1):
            return False
        self._counted, counts = what, self.kind.counts
        if not counts:  # another thread has just found a dependence
            return False
        is_turn = _is_power(counts[what] + 1)
        is_early = what == _MIXED and counts[what] < _ALL_MIXED
        if not (is_turn or is_early or (found and is_computed_again())):
            return False
        if not self._may_run(what == _FOUND):
            return False
        self.computes_parts = is_turn and what != _FOUND
        return True

    def computed_whole(self) -> None:
        """Record that one forward has computed this batch."""
        self._probes.add_whole(self._keys)

    def settle(self) -> bool:
        """Count this batch; returns whether the results should be saved."""
        if self._counted is None or not self.is_conclusive:
            return False
        return _is_power(self._probes.count(self.kind, self._counted))


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def talks(root: Any, fingerprint: Fingerprint) -> bool:
    """Whether a forward may communicate with other processes, which would wait for it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    named = {name.split()[1].rpartition(".")[2] for name in fingerprint.parts if name.startswith("global ")}
    kinds = {base for module in modules_of(root) for base in type(module).__mro__}
    for kind in kinds - {nn.Module}:
        if kind is nn.SyncBatchNorm or kind.__module__.startswith(_TALKING):
            return True
        for function in map(inspect.unwrap, filter(callable, vars(kind).values())):
            if isinstance(function, types.FunctionType):
                named |= names_in(function.__code__)
    return not _COLLECTIVES.isdisjoint(named)


def _parts(keys: Keys) -> list[tuple[int, ...]]:
    """The positions of each part's items. Of 12 or more items, all parts together have at most half."""
    found = keys.first_positions()
    distinct = np.arange(len(keys)) if found is None else found[0]
    size = max(1, len(distinct) // 6)
    shared, last, rest = (size + 1) // 2, distinct[::-1][:size], distinct[::-1][size:]
    first, second = rest[::3][:size], rest[1::3]
    chosen = [last, first, np.concatenate([first[:shared], second[: size - shared]])]
    return list(dict.fromkeys(tuple(part.tolist()) for part in chosen if len(part)))


class _Difference(NamedTuple):
    """How an item's output depends on its batch, and how that was found; see `batch_advice`."""

    text: str
    cause: str


class Probe:
    """Compares parts of a batch, computed by themselves, with the rows of the whole batch.

    ``alone(part, aligned)`` computes the rows of the items at some positions, in this order; see
    `BoundCall.take`. The forward computes in `dtypes`. With `pads`, batches are padded to few sizes.
    """

    def __init__(
        self,
        whole: Rows,
        keys: Keys,
        call: BoundCall,
        alone: Callable[[Sequence[int], bool], Rows],
        *,
        dtypes: Collection[torch.dtype],
        pads: bool,
    ) -> None:
        self.is_conclusive = True  # False if a part could not be computed for lack of memory
        self._whole, self._keys, self._call, self._alone = whole, keys, call, alone
        self._dtypes, self._pads = dtypes, pads
        self._parts: list[tuple[Sequence[int], Rows]] = []

    def dependence(self) -> _Difference | None:
        """How items depend on their batch; None if no dependence was found."""
        aligned = bool(self._call.aligned)
        found = self._repetition()
        for part in _parts(self._keys) if found is None else ():
            found = self._difference(part, aligned)
            if found is not None and aligned:
                # An argument as long as the batch may have one entry per item, or belong to the whole batch.
                found = self._difference(part, False)
            if found is not None and found.cause == "raises":
                # The forward may need its items in the caller's order, such as longest first.
                found = self._difference(sorted(part), aligned)
            if found is not None or not self.is_conclusive:
                break
        return found

    def _repetition(self) -> _Difference | None:
        """How the outputs of equal items in the batch differ; None if they do not."""
        found = self._keys.first_positions()
        if found is None:
            return None
        first, inverse = found
        expected = self._whole.take(torch.from_numpy(first[inverse]))
        text = self._worst(expected, self._whole, range(len(self._keys)), 0.5)
        return (
            None if text is None else _Difference(f"{text} from that of an equal item of its batch", "repeat")
        )

    def _difference(self, part: Sequence[int], aligned: bool) -> _Difference | None:
        """How the output of some items differs when computed by themselves; None if it does not."""
        count = len(part)
        if self._pads:
            size = min(1 << (count - 1).bit_length(), len(self._keys))
            part = [*part, *[part[-1]] * (size - count)]
        try:
            return self._compared(self._alone(part, aligned), part)
        except (UnstorableError, OutputError) as error:
            return _Difference(str(error), "shape")
        except Exception as error:
            if is_out_of_memory(error):
                self.is_conclusive = False
                return None
            text = f"the forward of {count} of its {len(self._keys)} items raises {shown(error)}"
            return _Difference(text, "raises")

    def _compared(self, rows: Rows, part: Sequence[int]) -> _Difference | None:
        """How the rows of some items differ from those of the whole batch; None if they do not."""
        batches = f"in a batch of {len(part)} and of {len(self._keys)}"
        expected = self._whole.take(torch.tensor(part, dtype=torch.int64, device="cpu"))
        if rows.schema != expected.schema:
            for leaf, other in zip(rows.schema.leaves, expected.schema.leaves, strict=False):
                if leaf != other and rows.schema.structure == expected.schema.structure:
                    forms = f"{leaf.dtype} {leaf.shape} and {other.dtype} {other.shape}"
                    return _Difference(f"output{leaf.path} is {forms} an item {batches}", "shape")
            return _Difference(f"the output has another structure {batches}", "structure")
        found = self._worst(expected, rows, part, 0.5)
        if found is not None:
            return _Difference(f"{found} {batches}", "values")
        for other_part, others in self._parts:
            same = [a == b for a, b in zip(part, other_part, strict=False)]
            shared = [*same, False].index(False)
            if 0 < shared < len(part) == len(other_part):
                found = self._worst(others.head(shared), rows.head(shared), part, _ALIKE)
                if found is not None:
                    return _Difference(f"{found} in two batches of {len(part)}", "rounding")
        self._parts.append((part, rows))
        return None

    def _worst(self, left: Rows, right: Rows, part: Sequence[int], power: float) -> str | None:
        apart_by, path, item = 0.0, "", 0
        for name, apart in leaf_differences(left, right, self._dtypes, power=power).items():
            if apart.max() > apart_by:
                apart_by, path, item = float(apart.max()), name, part[int(apart.argmax())]
        return f"output{path} of item {item} differs by {apart_by:.3g}" if apart_by else None
