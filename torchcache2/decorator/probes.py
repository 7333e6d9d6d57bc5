"""When the rows of a batch are checked, and what such checks have found for each kind of call.

What shows that items depend on their batch is a batch put together from several earlier ones. So batches are
counted, for each kind of call: those of which nothing was found, something, or everything. The 1st, 2nd, 4th,
8th … of each are computed as a whole, and found rows are compared with the computed ones; of batches that
are partly found, the first 64 are, as the forward runs anyway. If items were missing, parts of the batch are
computed too at these counts, by themselves (`torchcache2.decorator.probe`). A batch that was computed as a
whole before shows nothing new, and is not counted when it is found again.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import types
import zlib
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from torchcache2.core.keys import Keys
from torchcache2.core.process import ProcessLock
from torchcache2.decorator.bypass import BypassError
from torchcache2.engine.batch import Checks, is_computed_again
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest, qualified_name
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.sourcecode import names_in

__all__ = ["CallChecks", "Kind", "Probes", "talks"]

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}
_MOST_KINDS = 10_000
_MOST_NAMESPACES = 256
_ALL_MIXED = 64  # so many batches are all checked of which some items were found: the forward runs anyway
_MOST_VALUES = 8  # if so many kinds that differ in values only have one result, the others have it too
_MOST_ELEMENTS = 64  # so many elements of a sequence are looked at
_LONG = 64  # a text of more characters is content, rather than a choice of what to compute
_DEEPEST = 16
_NEUTRAL = (0.0, 1.0)  # such a factor may turn something off, and any other number turns it on
_BYTES = 1 << 14  # of the bits for batches that were computed as a whole
_WHOLE = "whole"  # what they are called among the kinds, which have hexadecimal names
_MISSED, _MIXED, _FOUND = range(3)  # batches of which no, some, and all items were found


@dataclasses.dataclass
class Kind:
    """The calls that one series of checks is for: those of one structure, of a module in one state.

    `code` is a digest of the module's code and of the structure, without weights and the values of arguments.
    `lists` is what this process knows of lists in the output; see `Lists.known`. `counts` are the batches of
    which no, some, and all items were found; it is empty if an item's output depends on its batch.
    """

    namespace: bytes
    name: str
    code: bytes = b""
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    lists: dict[str, bool] = dataclasses.field(default_factory=dict)


class _Namespace:
    """What is known of one namespace: its kinds by name, and the batches that were computed as a whole.

    Those batches are a Bloom filter with one bit a batch. After 1,300 batches, 1 of 100 new ones meets the
    bit of another one, and is not checked.
    """

    def __init__(self, namespace: bytes, before: Mapping[str, Any]) -> None:
        self.kinds: dict[str, Kind] = {}
        self.whole = bytearray(_BYTES)
        for name, found in before.items():  # anybody may have written this
            if name == _WHOLE:
                with contextlib.suppress(TypeError, ValueError, zlib.error):
                    data = base64.b64decode(found, validate=True)
                    whole = zlib.decompressobj().decompress(data, _BYTES)
                    self.whole = bytearray(whole) if len(whole) == _BYTES else self.whole
            elif isinstance(found, list) and len(found) in (0, 3) and all(type(n) is int for n in found):
                self.kinds[name] = Kind(namespace, name, counts=[max(n, 0) for n in found])

    def document(self) -> dict[str, Any]:
        """Everything, as JSON that a later run reads."""
        kinds = {name: list(kind.counts) for name, kind in self.kinds.items()}
        return {**kinds, _WHOLE: base64.b64encode(zlib.compress(self.whole)).decode()}


class Probes:
    """What the checks of one decorator's modules or functions have found; safe under threads."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._by_group: dict[bytes, Kind] = {}
        self._namespaces: dict[bytes, _Namespace] = {}
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

        ``recall(namespace)`` returns what earlier runs have left of `document`.
        """
        kind = self._by_group.get(group)
        if kind is None:
            with self._lock():
                kind = self._kind(fingerprint, call, recall, method)
                if len(self._by_group) >= _MOST_KINDS:
                    self._by_group = {}
                self._by_group[group] = kind
        return kind

    def _kind(
        self,
        fingerprint: Fingerprint,
        call: BoundCall,
        recall: Callable[[bytes], Mapping[str, Any]],
        method: str,
    ) -> Kind:
        namespace = fingerprint.namespace
        if namespace not in self._namespaces:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces, self._mixing, self._by_group = {}, {}, {}
            self._namespaces[namespace] = _Namespace(namespace, recall(namespace))
        kinds = self._namespaces[namespace].kinds
        exact, loose = (_call_structure(call, method, values=values) for values in (True, False))
        name, code = exact.hex(), digest([fingerprint.code, loose])
        mixing, counts = self._mixing.get(code, set()), [0, 0, 0]
        if name in mixing:  # a module that has mixed items once is not checked again when its weights change
            counts = []
        elif name not in kinds:
            alike = sum(kind.code == code and any(kind.counts) for kind in kinds.values())
            if alike + len(mixing) >= _MOST_VALUES:
                if mixing:  # some values make it mix items, so unknown values are not tried
                    return Kind(namespace, name, code, [])
                name, counts = loose.hex(), [alike, 0, 0]
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
        kind = kinds.setdefault(name, Kind(namespace, name, code, counts))
        kind.code, kind.counts = code, kind.counts if counts else []
        return kind

    def count(self, kind: Kind, what: int) -> int:
        """Count a batch, and return how many there are now."""
        with self._lock():
            if kind.counts:  # else another thread has just found out that items depend on their batch
                kind.counts[what] += 1
            return kind.counts[what] if kind.counts else 0

    def depends(self, kind: Kind) -> None:
        """Note that an item's output depends on its batch."""
        with self._lock():
            kind.counts = []
            self._mixing.setdefault(kind.code, set()).add(kind.name)
            self._by_group = {}  # it holds for other weights too

    def start_anew(self, namespace: bytes) -> None:
        """Note that the rows of a namespace were dropped: what is computed from now on is checked anew."""
        with self._lock():
            known = self._namespaces.get(namespace)
            if known is not None:
                known.whole = bytearray(_BYTES)
                for kind in known.kinds.values():
                    kind.counts = [0 for _ in kind.counts]

    def is_whole(self, keys: Keys) -> bool:
        """Whether a batch was computed as a whole."""
        known, at = self._namespaces.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        return known is not None and bool(known.whole[at % _BYTES] >> (at >> 61) & 1)

    def add_whole(self, keys: Keys) -> None:
        """Note that a batch was computed as a whole."""
        known, at = self._namespaces.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        if known is not None:
            known.whole[at % _BYTES] |= 1 << (at >> 61)

    def document(self, namespace: bytes) -> dict[str, Any]:
        """Everything that is known about a namespace, as JSON, to be kept for later runs."""
        with self._lock():
            known = self._namespaces.get(namespace)
            return {} if known is None else known.document()


class CallChecks(Checks):
    """The checks of one call; raises `BypassError` if its items are known to depend on their batch.

    ``may_run(is_first, is_found)`` says whether the forward can run by itself, for the first batch of a kind
    or for a later one, which is all found or not; it is asked when a check is due.
    """

    def __init__(self, probes: Probes, kind: Kind, keys: Keys, may_run: Callable[[bool, bool], bool]) -> None:
        if not kind.counts:
            raise BypassError.because("batch", "an item's output depends on the rest of its batch")
        self.kind = kind
        self.computes_parts = False  # whether parts of the batch are to be computed by themselves
        self.is_conclusive = True  # whether the forward has computed what it was asked for
        self._probes, self._keys, self._may_run = probes, keys, may_run
        self._counted: int | None = None

    def is_due(self, found: int) -> bool:
        """Whether to compute the whole batch, of which so many items were found."""
        count = len(self._keys)
        what = _MISSED if not found else _FOUND if found == count else _MIXED
        if what == _FOUND and (not count or self._probes.is_whole(self._keys)):
            return False
        if what != _FOUND and count < 2:
            return False
        self._counted = what
        counts = self.kind.counts  # another thread may find out now that items depend on their batch
        if not counts:
            return False
        is_turn = _is_power(counts[what] + 1)
        is_early = what == _MIXED and counts[what] < _ALL_MIXED
        if not (is_turn or is_early or (found and is_computed_again())):
            return False
        if not self._may_run(not any(counts), what == _FOUND):
            return False
        self.computes_parts = is_turn and what != _FOUND
        return True

    def computed_whole(self) -> None:
        """Note that the rows of this batch are those of one forward."""
        self._probes.add_whole(self._keys)

    def settle(self, *, has_run: bool) -> bool:
        """Count this batch; returns whether what is known should be written down.

        A rank in step may get all rows of a batch from others, and then its forward has not run.
        """
        if self._counted is None or not self.is_conclusive or (self.computes_parts and not has_run):
            return False
        return _is_power(self._probes.count(self.kind, self._counted))

    def note(self, *, has_run: bool) -> str:
        """What is known of calls like this one, for other ranks; `has_run`: it has been checked if needed."""
        return self._note if any(self.kind.counts) or (has_run and self.computes_parts) else ""

    def is_known(self, notes: Collection[str]) -> bool:
        """Whether other ranks, by their notes, have checked calls like this one."""
        return self._note in notes

    @property
    def _note(self) -> str:
        return f"{self.kind.namespace.hex()} {self.kind.name}"


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def talks(root: Any, fingerprint: Fingerprint) -> bool:
    """Whether a forward may talk to other processes, which would wait for what this one computes."""
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


def _call_structure(call: BoundCall, method: str, *, values: bool) -> bytes:
    """A digest of the structure of a call of a method, 16 bytes.

    With `values`, integers and short texts count, since ``dim=0`` and ``dim=1`` are different computations.
    The values of items' entries never count.
    """
    arguments = [*zip(call.names, call.args, strict=True), *sorted(call.kwargs.items())]
    contents = call.taken | call.aligned_ids
    parts = [f"{name} {_structure(value, values, contents, _DEEPEST)}" for name, value in arguments]
    leaves = [path for path, _ in call.leaves]
    leaves += [f"() {method}"] * (method != "forward")
    return digest([repr([parts, leaves]).encode("utf-8", "surrogatepass")])


def _structure(value: Any, values: bool, contents: Set[int], deeper: int) -> str:
    kind = qualified_name(type(value))
    values = values and id(value) not in contents
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.dim()}"
    if isinstance(value, np.ndarray):
        # The dtype of an array of texts has the length of the longest text, which is left out.
        dtype = value.dtype.kind if value.dtype.kind in "SU" else value.dtype.str
        return f"{kind} {dtype} {value.ndim}"
    if isinstance(value, bool) or (isinstance(value, float) and value in _NEUTRAL):
        return repr(value)
    if isinstance(value, (int, str)) and values and len(str(value)) <= _LONG:
        return f"{kind} {value!r}"
    if deeper and isinstance(value, (list, tuple)):
        elements = {_structure(element, values, contents, deeper - 1) for element in value[:_MOST_ELEMENTS]}
        return f"{kind} {sorted(elements)}"
    if deeper and isinstance(value, (dict, UserDict)):
        items: Mapping[Any, Any] = value
        pairs = {
            (
                str(key) if values else qualified_name(type(key)),
                _structure(element, values, contents, deeper - 1),
            )
            for key, element in items.items()
        }
        return f"{kind} {sorted(pairs)}"
    return kind
