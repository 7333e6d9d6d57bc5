"""Keys and values for tests of `Clients`."""

import contextlib

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.places import Servers
from torchcache2.tiers.redis.client import Clients
from torchcache2.tiers.redis.record import row_names

NAMESPACE = bytes(range(16))


def keys(count, seed=0):
    return Keys(NAMESPACE, np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8))


def value_of(name, size=40):
    """A value that says whose it is."""
    return (name[-16:] * (size // 16 + 1))[:size]


def put(clients, some, size=40):
    names = row_names(some)
    return clients.run([(b"SET", name, value_of(name, size)) for name in names], some.words)


def get(clients, some):
    return clients.mget(row_names(some), some.words)


def values(some, size=40):
    return [value_of(name, size) for name in row_names(some)]


@contextlib.contextmanager
def connected(*servers, **options):
    """`Clients` of some `RedisServer`s, or URLs, or dicts."""
    clients = Clients(Servers.of([getattr(server, "url", server) for server in servers]), **options)
    try:
        yield clients
    finally:
        clients.close()
