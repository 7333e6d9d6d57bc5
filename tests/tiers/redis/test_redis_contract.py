"""The suite of all tiers, on each Redis server that was found, and on several at once."""

import pytest

from tests.helpers.redis import PROGRAMS, emptied, names
from tests.tiers.contract import TierContract, fewer

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
