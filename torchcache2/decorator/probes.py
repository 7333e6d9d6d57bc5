"""When the rows of a batch are checked, and what such checks have found for each kind of call.

What shows that items depend on their batch is a batch put together from several earlier ones. So batches are
counted, for each kind of call: those of which nothing was found, something, or everything. The 1st, 2nd, 4th,
8th … of each are computed as a whole, and found rows are compared with the computed ones. If items were
missing, parts of the batch are computed too, by themselves (`torchcache2.decorator.probe`). A batch that was
computed as a whole before shows nothing new, and is not counted when it is found again.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import types
import zlib
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from torchcache2.core.keys import Keys
from torchcache2.core.locks import ProcessLock
from torchcache2.decorator.bypass import BypassError
from torchcache2.engine.batch import Checks
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.compiled import names_in
from torchcache2.identity.encoding import digest, qualified_name
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["CallChecks", "Kind", "Probes", "talks"]

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather_for_metrics", "reduce_scatter"),
    "reduce_scatter_tensor",
}
_MOST_KINDS = 10_000
_MOST_NAMESPACES = 256
_MOST_VALUES = 8  # if so many kinds that differ in values only have one result, the others have it too
_MOST_COUNTED = 1 << 60
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

    `counts` are the batches of which no, some, and all items were found. `code` is a digest of the module's
    code and of the structure; it leaves out weights and the values of arguments.
    """

    namespace: bytes
    name: str
    code: bytes
    counts: list[int]
    is_dependent: bool = False  # whether an item's output depends on its batch


class _Namespace:
    """What is known of one namespace: its kinds by name, and the batches that were computed as a whole.

    Those batches are a Bloom filter with one bit a batch: a bit may belong to another batch, which is then
    not checked. The more batches there are, the more often that happens: for 1 of 100 batches after 1,300.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.kinds: dict[str, list[int] | None] = {}
        self.values: Counter[bytes] = Counter()  # how many kinds are independent, by `Kind.code`
        self.whole = bytearray(_BYTES)
        for name, found in before.items():
            if name == _WHOLE:
                self._read(found)
            elif found == 0:
                self.kinds[name] = None
            elif isinstance(found, list) and len(found) == 3:
                counts = [n for n in found if isinstance(n, int) and 0 <= n <= _MOST_COUNTED]
                self.kinds.update({name: counts} if len(counts) == 3 else {})

    def _read(self, text: Any) -> None:
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _BYTES)
        except (TypeError, ValueError, zlib.error):
            return
        self.whole = bytearray(data) if len(data) == _BYTES else self.whole

    def document(self) -> dict[str, Any]:
        """Everything, as JSON that a later run reads."""
        kinds = {name: 0 if counts is None else list(counts) for name, counts in self.kinds.items()}
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
    ) -> Kind:
        """The kind of a call whose keys have this group.

        ``recall(namespace)`` returns what earlier runs have left of `document`.
        """
        kind = self._by_group.get(group)
        if kind is None:
            with self._lock():
                kind = self._kind(fingerprint, call, recall)
                if len(self._by_group) >= _MOST_KINDS:
                    self._by_group = {}
                self._by_group[group] = kind
        return kind

    def _kind(
        self, fingerprint: Fingerprint, call: BoundCall, recall: Callable[[bytes], Mapping[str, Any]]
    ) -> Kind:
        exact, loose = (_call_structure(call, values=values) for values in (True, False))
        namespace, name, code = fingerprint.namespace, exact.hex(), digest([fingerprint.code, loose])
        known = self._of(namespace, recall)
        mixing = self._mixing.get(code, set())
        if name in known.kinds or name in mixing:
            # A module that has mixed items once is not checked again when its weights change.
            pass
        elif len(mixing) + known.values[code] >= _MOST_VALUES:
            if mixing:  # some values make it mix items, so unknown values are not tried
                return Kind(namespace, name, code, [0, 0, 0], is_dependent=True)
            name = loose.hex()
            known.kinds.setdefault(name, [known.values[code], 0, 0])
        elif len(known.kinds) >= _MOST_KINDS:
            known.kinds = {}
        counts = known.kinds.setdefault(name, [0, 0, 0])
        return Kind(namespace, name, code, counts or [0, 0, 0], counts is None or name in mixing)

    def count(self, kind: Kind, what: int) -> int:
        """Count a batch, and return how many there are now."""
        with self._lock():
            known = self._namespaces.get(kind.namespace)
            if known is not None and not any(kind.counts):
                known.values[kind.code] += 1
            kind.counts[what] += 1
            return kind.counts[what]

    def depends(self, kind: Kind) -> None:
        """Note that an item's output depends on its batch."""
        with self._lock():
            kind.is_dependent = True
            if kind.namespace in self._namespaces:
                self._namespaces[kind.namespace].kinds[kind.name] = None
            self._mixing.setdefault(kind.code, set()).add(kind.name)
            self._by_group = {}  # it holds for other weights too

    def start_anew(self, namespace: bytes) -> None:
        """Note that the rows of a namespace were dropped: what is computed from now on is checked anew."""
        with self._lock():
            known = self._namespaces.get(namespace)
            if known is not None:
                known.whole = bytearray(_BYTES)
                for counts in filter(None, known.kinds.values()):
                    counts[:] = 0, 0, 0

    def is_whole(self, keys: Keys) -> bool:
        """Whether a batch was computed as a whole."""
        known, at = self._namespaces.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        return known is not None and bool(known.whole[at % _BYTES] >> (at >> 61) & 1)

    def add_whole(self, keys: Keys) -> None:
        """Note that a batch was computed as a whole."""
        known, at = self._namespaces.get(keys.namespace), xxh3_64_intdigest(keys.data.data)
        if known is not None:
            known.whole[at % _BYTES] |= 1 << (at >> 61)

    def knows(self, namespace: bytes) -> bool:
        """Whether there is anything to keep for later runs."""
        return namespace in self._namespaces

    def document(self, namespace: bytes) -> dict[str, Any]:
        """Everything that is known about a namespace, as JSON, to be kept for later runs."""
        with self._lock():
            known = self._namespaces.get(namespace)
            return {} if known is None else known.document()

    def _of(self, namespace: bytes, recall: Callable[[bytes], Mapping[str, Any]]) -> _Namespace:
        if namespace not in self._namespaces:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces, self._mixing, self._by_group = {}, {}, {}
            self._namespaces[namespace] = _Namespace(recall(namespace))
        return self._namespaces[namespace]


class CallChecks(Checks):
    """The checks of one call; raises `BypassError` if its items are known to depend on their batch.

    ``may_run(found)`` says whether the forward can run by itself for a batch of which all items were found,
    or not; it is asked when a check is due.
    """

    def __init__(self, probes: Probes, kind: Kind, keys: Keys, may_run: Callable[[bool], bool]) -> None:
        if kind.is_dependent:
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
        if not _is_power(self.kind.counts[what] + 1) or not self._may_run(what == _FOUND):
            return False
        self.computes_parts = what != _FOUND
        return True

    def computed_whole(self) -> None:
        """Note that the rows of this batch are those of one forward."""
        self._probes.add_whole(self._keys)

    def settle(self) -> bool:
        """Count this batch; returns whether what is known should be written down."""
        if self._counted is None or not self.is_conclusive:
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


def _call_structure(call: BoundCall, *, values: bool) -> bytes:
    """A digest of the structure of a call, 16 bytes.

    With `values`, integers and short texts count, since ``dim=0`` and ``dim=1`` are different computations.
    The values of items' entries never count.
    """
    arguments = [*zip(call.names, call.args, strict=True), *sorted(call.kwargs.items())]
    contents = call.taken | call.aligned_ids
    parts = [f"{name} {_structure(value, values, contents, _DEEPEST)}" for name, value in arguments]
    leaves = [path for path, _ in call.leaves]
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
    if value is None or isinstance(value, bool) or (isinstance(value, float) and value in _NEUTRAL):
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
