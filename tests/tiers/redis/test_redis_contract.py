"""The suite of all tiers, on each Redis server that was found, and on several at once."""

import pytest

from tests.helpers.redis import PROGRAMS, emptied, names
from tests.helpers.storage import NEVER, found
from tests.tiers.contract import LaterContract, TierContract, fewer

KINDS = {f"redis-{name}": (program,) for name, program in zip(names(), PROGRAMS, strict=True)}
KINDS["redis-3"] = PROGRAMS[:1] * 3


class TestServers(TierContract):
    is_of_others = True

    @pytest.fixture(params=KINDS)
    def make(self, request, started, tiers):
        servers = emptied(started(*KINDS[request.param]))
        options = {"codec": "brotli"} if request.param == "redis-3" else {}
        return lambda **more: tiers(servers, **options | more)

    # Each dtype is quick, but not on each server.
    test_every_dtype_comes_back_bit_by_bit = fewer(2, TierContract.test_every_dtype_comes_back_bit_by_bit)


class TestLater(LaterContract):
    @pytest.fixture
    def make(self, servers, tiers):
        return lambda **options: tiers(servers, **{"buffer": 100, "delay": NEVER} | options)

    @pytest.fixture
    def there(self, servers, tiers):
        return lambda: found(tiers(servers), range(20))
