"""`Probes`: what probes have found out, by kind of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torchcache2.core.locks import ProcessLock
from torchcache2.decorator.probe import strength_of
from torchcache2.decorator.structure import call_structure
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["DEPENDENT", "Kind", "Probes"]

DEPENDENT = 0  # the result of a probe: an item's output depends on its batch
_MOST_KINDS = 10_000
_MOST_VALUES = 8  # if so many kinds that differ in numbers alone have one result, the others have it


class Kind(NamedTuple):
    """What a probe tells about: calls of one structure, of a module in one state."""

    namespace: bytes
    code: bytes
    exact: bytes
    loose: bytes

    @classmethod
    def of(cls, fingerprint: Fingerprint, call: BoundCall, *, uneven: bool = False) -> Kind:
        """The kind of a call of the module that has this fingerprint.

        Calls whose items are not equally long are a kind besides: only they show what pads to the longest.
        """
        marks = [b"uneven"] if uneven else []
        exact, loose = (digest([call_structure(call, values=values), *marks]) for values in (True, False))
        return cls(fingerprint.namespace, fingerprint.code, exact, loose)


class Probes:
    """What probes have found, of one module or function; safe under threads.

    A result is the strength of the probe that found items to be independent, 1 to 4, or `DEPENDENT`.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._settled: dict[bytes, int] = {}
        self._found: dict[bytes, dict[str, int]] = {}
        self._recalled: set[bytes] = set()
        self._dependent: dict[tuple[bytes, bytes], set[bytes]] = {}
        self._independent: dict[tuple[bytes, bytes], dict[bytes, int]] = {}

    def is_settled(self, group: bytes, items: int) -> bool:
        """Whether no call of so many items, whose keys have this group, needs a probe any more."""
        return self._settled.get(group, DEPENDENT) >= strength_of(items)

    def settle(self, group: bytes, result: int) -> None:
        """A probe of calls whose keys have this group would show no more than this one has."""
        if len(self._settled) >= _MOST_KINDS:
            self._settled = {}
        self._settled[group] = result

    def result(self, kind: Kind, recall: Callable[[bytes], Mapping[str, int]]) -> int | None:
        """What is known of a kind; None if nothing is.

        ``recall(namespace)`` are the results that earlier runs have left, by the hexadecimal digits of
        `Kind.exact`.
        """
        with self._lock():
            if kind.namespace not in self._recalled:
                self._of(kind.namespace).update(recall(kind.namespace))
                self._recalled.add(kind.namespace)
            known = self._of(kind.namespace).get(kind.exact.hex())
            # A module that mixed items once is not tried again with other weights.
            mixing = self._dependent.get((kind.code, kind.loose), set())
            if known == DEPENDENT or kind.exact in mixing:
                return DEPENDENT
            alike = sorted(self._independent.get((kind.namespace, kind.loose), {}).values())
            if len(alike) + len(mixing) < _MOST_VALUES:
                return known
            if mixing:  # some values mix items, and some may not: those that are not known are passed through
                return DEPENDENT if known is None else known
            return max(alike[-_MOST_VALUES], known or DEPENDENT)

    def add(self, kind: Kind, result: int) -> None:
        """A probe has found something."""
        with self._lock():
            self._of(kind.namespace)[kind.exact.hex()] = result
            if result == DEPENDENT:
                self._dependent.setdefault((kind.code, kind.loose), set()).add(kind.exact)
                self._settled = {}  # an earlier probe may have overlooked it
            else:
                self._independent.setdefault((kind.namespace, kind.loose), {})[kind.exact] = result

    def found(self, namespace: bytes) -> dict[str, int]:
        """Everything that is known of a namespace, to be kept for later runs."""
        with self._lock():
            return dict(self._of(namespace))

    def _of(self, namespace: bytes) -> dict[str, int]:
        if namespace not in self._found:
            if len(self._found) >= _MOST_KINDS:
                self._found, self._independent = {}, {}
                self._recalled, self._dependent = set(), {}
            self._found[namespace] = {}
        return self._found[namespace]
