"""`Replicas`: rows that other ranks own, in room of the memory tier that nothing else needs.

They never go to a slower tier. They make room before any other row does, and go with their namespace when it
is dropped or let go of.
"""

from __future__ import annotations

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.engine.stack import TierStack
from torchcache2.tiers.base import Found, replicas_of

__all__ = ["Replicas"]


class Replicas:
    """Rows that other ranks own, and that were sent to this one.

    Parameters
    ----------
    tiers : TierStack
        The fastest of them has the replicas.
    """

    def __init__(self, tiers: TierStack) -> None:
        self._tiers = tiers

    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here."""
        return self._tiers.tiers[0].get(_of_replicas(keys))

    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, as far as there is room to spare; returns how many were kept."""
        return self._tiers.tiers[0].keep_replicas(_of_replicas(keys), rows)

    def drop(self, namespace: bytes) -> None:
        """Forget the replicas of a namespace, and leave its other rows."""
        self._tiers.tiers[0].drop(replicas_of(namespace))


def _of_replicas(keys: Keys) -> Keys:
    return Keys(replicas_of(keys.namespace), keys.data, keys.group)
