"""The replicas in a tier, for tests: rows of another namespace, which go before all others."""

from torchcache2.core.keys import Keys
from torchcache2.engine.collective.exchange import Holdings
from torchcache2.tiers.base import replicas_of


class Stack:
    """A stack of one tier."""

    def __init__(self, tier):
        self.tiers = [tier]


class Replicas:
    """What `Holdings` keeps of rows that other ranks own, as a tier."""

    def __init__(self, tiers):
        self.tier, self.put = tiers.tiers[0], Holdings(tiers).put_replicas

    def get(self, keys):
        return self.tier.get(Keys(replicas_of(keys.namespace), keys.data, keys.group))

    def drop(self, namespace):
        self.tier.drop(replicas_of(namespace))
