"""The probe: the net for what no key covers. It computes found rows again, and parts of batches alone.

Found rows are wrong if an item's output depends on the rest of its batch, or on something that is not in its
key and has changed. Both show when a found batch is computed again. So of each kind of call, the 1st found
batch of a run is computed again before it is returned, then the 2nd, 4th, 8th …, and never fewer than one in
256. No check of another run spares one of these. Batches of which only some items were found are counted
likewise, and so are batches of items that this run has computed together: these show changes alone.

Of batches of which nothing was found, the 1st, 2nd, 4th … are followed by parts of them, computed by
themselves and in another order. Some parts share no item, since one part may hide a dependence: if every item
is divided by the largest of its batch, a part with the largest one equals the whole batch. Two parts of one
size begin with the same items: as a forward rounds alike for batches of one size, these two reveal even an
influence that is hardly larger than rounding. A batch of one item is computed twice: only its draws can
differ.

Beside the first of each kind, checks take at most 2 % of the time that the found items would have taken to
compute, or of the time of the calls where that is more. A check that is too expensive now is due until it is
not. Forked children, such as the workers of a `DataLoader`, count and check together with their parent.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import shown
from torchcache2.core.process import ForkedRows, ProcessLock
from torchcache2.core.rows import Rows
from torchcache2.core.sizes import is_out_of_memory
from torchcache2.core.values import UnstorableError
from torchcache2.decorator.bypass import BypassError
from torchcache2.engine.batch import Batch, Checks, is_computed_again
from torchcache2.engine.verify import leaf_differences
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.libraries import modules_of
from torchcache2.identity.sourcecode import names_in

_PRICE = 0.02  # share of the time of found items, or of calls, that checks may take
_LONGEST = 256  # batches between two checks, if their price allows it
_ALIKE = 0.75  # batches of one size differ by less than the precision to this power
_MOST_KINDS = 1_000
_MOST_NAMESPACES = 256
_MOST_VALUES = 8  # if so many kinds, different only in values, have one result, assume it for the others
_MOST_WHOLE = 1 << 16  # batches known to be computed as a whole
_MOST_STALE = 3  # verdicts of one kind that its rows are stale; what is stale again and again is not cached
_USUAL = 2e-3  # seconds that a check takes beside its forward, until one has shown it
_MISSED, _MIXED, _FOUND, _AGAIN = range(4)  # no, some, and all items were found; all, of a batch as computed
# Places in `Kind.row`. Counts, and the next batch to check, take four: one for each of the above.
_COUNT, _DUE, _ITEMS, _SECONDS, _SEEN, _PACE, _SPENT, _EXTRA, _PARTS, _MIXING = 0, 4, *range(8, 16)
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}
_TALKING = ("torch.distributed", "torch.nn.parallel.distributed")  # modules of these talk to other processes


class Kind:
    """Calls that are equal except for their items share one series of checks.

    Attributes
    ----------
    name : str
        A digest of the arguments other than items, and of the form of the items.
    code : bytes
        A digest of the module's code and of the form of the arguments, without weights and values.
    row : memoryview of float
        What forked processes know together: for each of four series, how many batches there were, and which
        one is to be checked next (0: the first); how many items were found; the seconds of all calls without
        checks; how many batches were computed, and the seconds an item; the seconds of checks beside the
        firsts, what a check takes beside its forward, and what parts take; whether items depend on
        their batch.
    """

    WIDTH = 16

    def __init__(self, name: str, code: bytes, row: memoryview[float]) -> None:
        self.name, self.code, self.row = name, code, row

    @property
    def is_known(self) -> bool:
        """Whether there were any batches."""
        return any(self.row[_COUNT : _COUNT + 4])

    def affords(self, what: int, found: int) -> bool:
        """Whether a check that computes `found` items again keeps to the price."""
        row = self.row
        cost = row[_EXTRA] + found * row[_PACE] + (row[_PARTS] if what == _MISSED else 0.0)
        return row[_SPENT] + cost <= _PRICE * max(row[_ITEMS] * row[_PACE], row[_SECONDS])

    def checked(self, what: int) -> None:
        """Have the next batch checked that comes after twice as many, or after 256."""
        count = int(self.row[_COUNT + what])
        self.row[_DUE + what] = min(1 << count.bit_length(), count + _LONGEST)

    def start_anew(self) -> None:
        """Forget all but the verdict."""
        for at in range(_MIXING):
            self.row[at] = 0.0


class Probes:
    """Results of this run's checks of one decorator's modules or functions; safe under threads."""

    def __init__(self) -> None:
        self._rows = ForkedRows(Kind.WIDTH)
        self._lock = ProcessLock()
        self._by_group: dict[tuple[bytes, int], Kind] = {}
        self._kinds: dict[bytes, dict[str, Kind]] = {}  # by namespace and name
        self._mixing: dict[bytes, set[str]] = {}  # names of dependent kinds, by `Kind.code`
        self._stale: dict[bytes, int] = {}  # verdicts, by `Kind.code`
        self._whole = set[int]()  # batches that this run has computed as a whole

    def kind(self, group: bytes, fingerprint: Fingerprint, call: BoundCall, method: str = "forward") -> Kind:
        """The kind of a call of a method whose keys have this group."""
        spread = _spread(call)
        kind = self._by_group.get((group, spread))
        if kind is None:
            with self._lock():
                if len(self._by_group) >= _MOST_KINDS:
                    self._by_group = {}
                kind = self._by_group[group, spread] = self._kind(fingerprint, call, method, spread)
        return kind

    def _kind(self, fingerprint: Fingerprint, call: BoundCall, method: str, spread: int) -> Kind:
        if len(self._kinds) >= _MOST_NAMESPACES:
            self._kinds, self._mixing, self._stale, self._by_group = {}, {}, {}, {}
        kinds = self._kinds.setdefault(fingerprint.namespace, {})
        leaves = [(path, str(tensor.dtype), tensor.dim()) for path, tensor in call.leaves]
        text = repr([method, spread, sorted({*call.names, *call.kwargs}), leaves])
        form = text.encode("utf-8", "surrogatepass")
        name, code = digest([form, call.context]).hex(), digest([fingerprint.code, form])
        mixing = self._mixing.get(code, set())
        is_mixing = name in mixing  # it is not checked again after a change of weights
        if name not in kinds and not is_mixing:
            alike = {kind.name for kind in kinds.values() if kind.code == code and kind.is_known}
            if len(alike | mixing) >= _MOST_VALUES:
                is_mixing = bool(mixing)  # some values make it mix items, so do not try unknown ones
                name = name if is_mixing else digest([form]).hex()
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
        if name not in kinds:
            number = xxh3_64_intdigest(fingerprint.namespace + name.encode())
            kinds[name] = Kind(name, code, self._rows.row(number))
        kinds[name].row[_MIXING] = float(is_mixing or kinds[name].row[_MIXING])
        return kinds[name]

    def depends(self, kind: Kind) -> None:
        """Record that an item's output depends on its batch, in this run."""
        with self._lock():
            kind.row[_MIXING] = 1.0
            self._mixing.setdefault(kind.code, set()).add(kind.name)
            self._by_group = {}  # holds for other weights too

    def is_steady(self, kind: Kind) -> bool:
        """Record that found rows were stale; returns whether to keep rows of such calls all the same."""
        with self._lock():
            self._stale[kind.code] = self._stale.get(kind.code, 0) + 1
            return self._stale[kind.code] < _MOST_STALE

    def start_anew(self, namespace: bytes) -> None:
        """Restart the checks of a namespace, whose rows were dropped; verdicts stay."""
        with self._lock():
            for kind in self._kinds.get(namespace, {}).values():
                kind.start_anew()
            self._whole.clear()

    def forget(self) -> None:
        """Forget all verdicts, and start all checks anew."""
        with self._lock():
            for kind in [kind for kinds in self._kinds.values() for kind in kinds.values()]:
                kind.start_anew()
                kind.row[_MIXING] = 0.0
            self._kinds, self._mixing, self._stale, self._by_group = {}, {}, {}, {}
            self._whole.clear()

    def is_whole(self, keys: Keys) -> bool:
        """Whether this run has computed a batch, in any order."""
        return any(number in self._whole for number in _numbers(keys))

    def add_whole(self, keys: Keys) -> None:
        """Record that this run has computed a batch."""
        if len(self._whole) >= _MOST_WHOLE:
            self._whole.clear()
        self._whole.update(_numbers(keys))


def _numbers(keys: Keys) -> Iterator[int]:
    """Two numbers of a batch: for its order, which is quick, and for any order."""
    yield xxh3_64_intdigest(keys.data.data)
    yield int(np.add.reduce(keys.words, axis=None))


def _spread(call: BoundCall) -> int:
    """0 for a batch of one item; 2 if entries of an argument differ in length; else 1.

    A forward that pads entries to the longest shows that it does so only where they differ.
    """
    if call.batch_size < 2:
        return 0
    taken = call.taken | call.maybe_per_item_ids
    with contextlib.suppress(Exception):  # such as of an entry whose length is an error
        for value in (*call.args, *call.kwargs.values()) if taken else ():
            is_uniform = isinstance(value, np.ndarray) and value.dtype.kind not in "OU"
            if id(value) in taken and not is_uniform and len(set(map(length_hint, value))) > 1:
                return 2
    return 1


class CallChecks(Checks):
    """The checks of one call; raises `BypassError` if its items are known to depend on their batch.

    When a check is due, ``may_run(is_found)`` returns whether the forward can run just for it; `is_found`:
    for a batch that is all found.
    """

    def __init__(self, probes: Probes, kind: Kind, keys: Keys, may_run: Callable[[bool], bool]) -> None:
        if kind.row[_MIXING]:
            raise BypassError.because("batch", "an item's output depends on the rest of its batch")
        self.kind = kind
        self._probes, self._keys, self._may_run = probes, keys, may_run
        self._what = _MISSED
        self._is_checked = self._is_first = False

    def of(self, keys: Keys) -> CallChecks:
        """The checks of another call of this kind."""
        return CallChecks(self._probes, self.kind, keys, self._may_run)

    @property
    def is_first_batch(self) -> bool:
        """Whether this run has kept no rows of such calls yet."""
        return sum(self.kind.row[_COUNT : _COUNT + 4]) <= 1

    def is_due(self, found: int) -> bool:
        """Whether to compute the whole batch; `found` of its items were found."""
        kind, row, count = self.kind, self.kind.row, len(self._keys)
        if count == 0:
            return False
        what = _MISSED if not found else _MIXED if found < count else _FOUND
        if what == _FOUND and self._probes.is_whole(self._keys):
            what = _AGAIN
        self._what = what
        row[_COUNT + what] += 1.0
        due = row[_DUE + what]
        self._is_first = due == 0.0
        is_turn = self._is_first or (row[_COUNT + what] >= due and kind.affords(what, found))
        if not (is_turn or (found and is_computed_again())):
            return False
        if not self._may_run(what >= _FOUND):
            self.give_up(found)
            return False
        self._is_checked = is_turn
        self.computes_parts, self.is_just_check = is_turn and what == _MISSED, what >= _FOUND
        return True

    def give_up(self, found: int) -> None:
        """Record that the forward cannot run here to check `found` rows; later ones may be checked."""
        self.unchecked += found
        self._is_checked = False
        self.kind.checked(self._what)

    def computed_whole(self) -> None:
        """Record that one forward has computed this batch."""
        self._probes.add_whole(self._keys)

    def settle(self, batch: Batch, seconds: float) -> None:
        """Count the time of this batch, and its check."""
        row = self.kind.row
        row[_ITEMS] += len(self._keys) - batch.misses
        row[_SECONDS] += max(0.0, seconds - self.seconds)
        if batch.computed:
            pace, known = max(0.0, batch.seconds - self.of_parts) / batch.computed, row[_PACE]
            if row[_SEEN] > 1.0:  # of the first two batches, the faster one: the other may have compiled
                pace = known + (min(pace, 4.0 * known) - known) / 8.0
            elif row[_SEEN]:
                pace = min(pace, known)
            row[_PACE] = pace
            row[_SEEN] += 1.0
        if not self._is_checked:
            return
        if not self._is_first:
            row[_SPENT] += self.seconds
        if self.computes_parts:
            row[_PARTS] = self.of_parts
        if self._what >= _FOUND:
            extra = max(0.0, self.seconds - batch.seconds)
            row[_EXTRA] = min(extra, _USUAL) if self._is_first else extra  # the first imports what it needs
        self.kind.checked(self._what)


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


class Difference(NamedTuple):
    """How an item's output depends on its batch, and how that was found; see `advice_for`."""

    text: str
    cause: str


class Probe:
    """Compares parts of a batch, computed by themselves, with the rows of the whole batch.

    ``alone(part, maybe_per_item)`` computes the rows of the items at some positions, in this order; see
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

    def dependence(self) -> Difference | None:
        """How items depend on their batch; None if no dependence was found."""
        maybe_per_item = bool(self._call.maybe_per_item)
        found = self._repetition()
        for part in _parts(self._keys) if found is None else ():
            found = self._difference(part, maybe_per_item)
            if found is not None and maybe_per_item:
                # An argument as long as the batch may have one entry per item, or belong to the whole batch.
                found = self._difference(part, False)
            if found is not None and found.cause == "raises":
                # The forward may need its items in the caller's order, such as longest first.
                found = self._difference(sorted(part), maybe_per_item)
            if found is not None or not self.is_conclusive:
                break
        if found is not None and found.cause in ("", "repeat") and self._is_random():
            return Difference("an item that is computed twice by itself has two outputs", "random")
        if found is not None and found.cause in ("", "rounding") and _spread(self._call) == 2:
            return found._replace(cause="padding")
        return found

    def _is_random(self) -> bool:
        """Whether one item, computed twice by itself, has two outputs."""
        try:
            first, second = (self._alone((0,), bool(self._call.maybe_per_item)) for _ in range(2))
        except Exception:
            return False
        return first.schema != second.schema or self._worst(first, second, (0,), 0.5) is not None

    def _repetition(self) -> Difference | None:
        """How the outputs of equal items in the batch differ; None if they do not."""
        found = self._keys.first_positions()
        if found is None:
            return None
        first, inverse = found
        expected = self._whole.take(torch.from_numpy(first[inverse]))
        text = self._worst(expected, self._whole, range(len(self._keys)), 0.5)
        return (
            None if text is None else Difference(f"{text} from that of an equal item of its batch", "repeat")
        )

    def _difference(self, part: Sequence[int], maybe_per_item: bool) -> Difference | None:
        """How the output of some items differs when computed by themselves; None if it does not."""
        count = len(part)
        if self._pads:
            size = min(1 << (count - 1).bit_length(), len(self._keys))
            part = [*part, *[part[-1]] * (size - count)]
        try:
            return self._compared(self._alone(part, maybe_per_item), part)
        except (UnstorableError, OutputError) as error:
            return Difference(str(error), "padding")
        except Exception as error:
            if is_out_of_memory(error):
                self.is_conclusive = False
                return None
            text = f"the forward of {count} of its {len(self._keys)} items raises {shown(error)}"
            return Difference(text, "raises")

    def _compared(self, rows: Rows, part: Sequence[int]) -> Difference | None:
        """How the rows of some items differ from those of the whole batch; None if they do not."""
        batches = f"in a batch of {len(part)} and of {len(self._keys)}"
        expected = self._whole.take(torch.tensor(part, dtype=torch.int64, device="cpu"))
        if rows.schema != expected.schema:
            for leaf, other in zip(rows.schema.leaves, expected.schema.leaves, strict=False):
                if leaf != other and rows.schema.structure == expected.schema.structure:
                    forms = f"{leaf.dtype} {leaf.shape} and {other.dtype} {other.shape}"
                    return Difference(f"output{leaf.path} is {forms} an item {batches}", "padding")
            return Difference(f"the output has another structure {batches}", "structure")
        found = self._worst(expected, rows, part, 0.5)
        if found is not None:
            return Difference(f"{found} {batches}", "")
        for other_part, others in self._parts:
            same = [a == b for a, b in zip(part, other_part, strict=False)]
            shared = [*same, False].index(False)
            if 0 < shared < len(part) == len(other_part):
                found = self._worst(others.head(shared), rows.head(shared), part, _ALIKE)
                if found is not None:
                    return Difference(f"{found} in two batches of {len(part)}", "rounding")
        self._parts.append((part, rows))
        return None

    def _worst(self, left: Rows, right: Rows, part: Sequence[int], power: float) -> str | None:
        apart_by, path, item = 0.0, "", 0
        for name, apart in leaf_differences(left, right, self._dtypes, power=power).items():
            if apart.max() > apart_by:
                apart_by, path, item = float(apart.max()), name, part[int(apart.argmax())]
        return f"output{path} of item {item} differs by {apart_by:.3g}" if apart_by else None
