"""`Differing`: a warning if ranks call with different namespaces, since they then share nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torchcache2.core.logs import listed, logger
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.header import Flag, Header
from torchcache2.engine.collective.part import Part
from torchcache2.identity.fingerprint import Fingerprint, differences, from_document

__all__ = ["Differing"]

_MOST_COMPARED = 8  # modules that change at every step are compared no more


class Differing:
    """Compares namespaces, and what they stand for, when ranks first call with different ones."""

    def __init__(self) -> None:
        self._compared: set[tuple[bytes, ...]] = set()  # the same on all ranks

    def look(self, channel: Channel, part: Part, headers: Sequence[Header]) -> None:
        """Warn in the first rank if another one has a namespace of its own. All ranks take part."""
        ranks = [rank for rank, one in enumerate(headers) if not one.flags & (Flag.BYPASS | Flag.DONE)]
        namespaces = tuple(headers[rank].namespace for rank in ranks)
        is_new = namespaces not in self._compared and len(self._compared) < _MOST_COMPARED
        if len(set(namespaces)) < 2 or not is_new:
            return
        self._compared.add(namespaces)
        said = channel.gather("parts", _described(part))
        first = ranks[0]
        other = next(rank for rank in ranks if headers[rank].namespace != headers[first].namespace)
        if channel.rank == first:
            lines = differences(_fingerprint(said[other]), _fingerprint(said[first]))
            shown = listed(lines) if lines else "it is not known in what"
            logger.warning(
                "%s: rank %d and rank %d share no rows, as they call modules that differ: %s. Keep what is "
                "another one on each rank, such as its device, out of the module",
                *(part.caller, first, other, shown),
            )


def _described(part: Part) -> bytes:
    """What the namespace of this rank stands for, as JSON; empty if that fails."""
    try:
        return json.dumps(part.description()).encode()
    except Exception:
        return b"{}"


def _fingerprint(said: bytes | memoryview) -> Fingerprint:
    """What the namespace of a rank stands for, as it has said; without parts if it has not."""
    found = from_document("", json.loads(bytes(said)))
    return Fingerprint(b"", {}) if found is None else found
