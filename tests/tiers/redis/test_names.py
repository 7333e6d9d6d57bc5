import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.tiers.redis.record import claim_names, pattern, row_names

NAMESPACE = bytes(range(0xA0, 0xB0))
HEX = b"a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"


def test_names_are_those_that_are_on_servers_already():
    keys = Keys(NAMESPACE, np.frombuffer(b"0123456789abcdef" + bytes(range(16)), np.uint8).reshape(2, 16))
    assert row_names(keys) == [
        b"torchcache2:" + HEX + b":0123456789abcdef",
        b"torchcache2:" + HEX + b":" + bytes(range(16)),
    ]
    assert claim_names(keys)[0] == b"torchcache2:claim:" + HEX + b":0123456789abcdef"
    assert pattern(NAMESPACE) == b"torchcache2:" + HEX + b":*"
    assert row_names(keys.take(np.empty(0, np.int64))) == []
