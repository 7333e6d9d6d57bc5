"""Tiers of one job."""

import threading

import pytest

from tests.tiers.shared.scripts import JOB
from torchcache2.tiers.shared.tier import SharedTier


@pytest.fixture
def join(tmp_path):
    """Makes tiers that share, as if each were a process."""
    tiers = []

    def one(budget=10**8, in_use=None, **options):
        tier, number = SharedTier(JOB, budget, in_use, folder=str(tmp_path), **options), len(tiers)
        tier.thread = lambda: 1000 * threading.get_native_id() + number
        tiers.append(tier)
        return tier

    yield one
    for tier in tiers:
        tier.close()
