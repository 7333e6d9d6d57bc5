"""The suite of all tiers, on a folder in front of each kind of bucket: what is flushed is only there."""

import itertools

import pytest

from tests.helpers.buckets import SCHEMES, bucket, opened
from tests.helpers.remote import Below, Emptied
from tests.helpers.storage import found, put
from tests.tiers.contract import TierContract, fewer, settled


@pytest.fixture(scope="module", params=SCHEMES)
def place(request, tmp_path_factory):
    """A bucket, what asks it, and numbers of folders in it."""
    made = bucket(request.param, tmp_path_factory.mktemp("bucket"))
    with opened(made) as objects:
        yield made, objects, itertools.count()


class TestBuckets(TierContract):
    is_of_others = True  # the folder takes rows again that have just made room there

    @pytest.fixture
    def settle(self):
        return settled

    @pytest.fixture
    def make(self, place, tmp_path):
        tiers = []

        def one(**options):
            where, objects, numbers = place
            number = next(numbers)
            below = Below(objects, f"tier-{number}")
            tiers.append(Emptied(where, tmp_path / f"cache-{number}", below, **options))
            return tiers[-1]

        yield one
        for tier in tiers:
            tier.close()
            assert tier.bucket.objects.corrupt == 0

    def test_stats_count_rows_and_bytes(self, tier):
        put(tier, range(100), 250)
        tier.flush()
        assert found(tier, range(100), 250) == list(range(100))
        assert tier.stats().rows == 100 and tier.stats().bytes < 10_000  # those of the folder

    # Each of their cases is quick, but not on each kind of bucket.
    test_every_dtype_comes_back_bit_by_bit = fewer(4, TierContract.test_every_dtype_comes_back_bit_by_bit)
    test_rows_that_are_views_are_copied_as_they_look = fewer(
        4, TierContract.test_rows_that_are_views_are_copied_as_they_look
    )
    test_channels_last_is_kept = fewer(2, TierContract.test_channels_last_is_kept)
    test_threads_that_put_get_flush_and_drop = fewer(8, TierContract.test_threads_that_put_get_flush_and_drop)
