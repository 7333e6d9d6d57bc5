"""`ProbePlan`: whether the batch of one call is to be probed, by what earlier probes have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchcache2.core.keys import Keys
from torchcache2.decorator.bypass import BypassError
from torchcache2.decorator.collectives import has_collectives
from torchcache2.decorator.probe import STRONGEST, strength
from torchcache2.decorator.probes import DEPENDENT, Kind, Probes
from torchcache2.decorator.structure import item_lengths
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.modulewalk import Fingerprint

__all__ = ["ProbePlan"]


class ProbePlan:
    """What a probe of one call would tell, and whether that is known already.

    Parameters
    ----------
    probes : Probes
        What is known.
    recall : callable
        ``recall(namespace)`` are the results that earlier runs have left.
    root : nn.Module or function
    fingerprint : Fingerprint
        Of `root`, as of this call.
    call : BoundCall
    keys : Keys
        Of its items.
    is_on : bool
        Whether to probe at all; else `kinds` stays empty.

    Attributes
    ----------
    kinds : dict of Kind to int
        The kinds of call that a probe of this batch tells about, and its strength for each. If there are any,
        the whole batch is computed, and parts of it by themselves, to be compared.
    """

    def __init__(
        self,
        probes: Probes,
        recall: Callable[[bytes], Mapping[str, int]],
        root: Any,
        fingerprint: Fingerprint,
        call: BoundCall,
        keys: Keys,
        *,
        is_on: bool,
    ) -> None:
        self.kinds: dict[Kind, int] = {}
        self._probes = probes
        self._recall = recall
        self._root = root
        self._fingerprint = fingerprint
        self._call = call
        self._keys = keys
        self._is_on = is_on and len(keys) > 1
        self._is_uneven_decided = False

    def decide(self) -> None:
        """Find out whether to probe, by what is to be had at little cost; raises if items are dependent."""
        self._decide(self._keys.group, uneven=False)

    def decide_uneven(self) -> None:
        """Likewise by whether items are equally long, which is only looked at if something is computed."""
        if not self._is_uneven_decided:
            self._is_uneven_decided = True
            self.decide()  # another call may have been probed meanwhile
            self._decide(self._keys.group + b"uneven", uneven=True)

    def _decide(self, group: bytes, *, uneven: bool) -> None:
        if not self._is_on or self._probes.is_settled(group, len(self._keys)):
            return
        if uneven and item_lengths(self._call) is None:
            return
        kind = Kind.of(self._fingerprint, self._call, uneven=uneven)
        possible = strength(self._keys)
        result = self._probes.result(kind, self._recall)
        if result == DEPENDENT:
            raise BypassError.because("batch", "an item's output depends on the rest of its batch")
        if result is None and has_collectives(self._root, self._fingerprint):
            result = STRONGEST
        if result is not None and result >= possible:
            self._probes.settle(group, result)
        else:
            self.kinds[kind] = possible

    def overlooked(self) -> list[Kind]:
        """The kinds of call of which it has shown that items depend on their batch."""
        return [*self.kinds] or [Kind.of(self._fingerprint, self._call)]
