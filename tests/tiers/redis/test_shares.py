"""Which server keeps a row."""

import numpy as np

from torchcache2.tiers.redis.client import Shares

NAMES = [f"node{i}:6379" for i in range(5)]
WORDS = np.random.default_rng(0).integers(0, 2**64, (20_000, 2), np.uint64)


def owners(names, words=WORDS):
    return np.array(names)[Shares(names).of(words)]


def test_shares_are_even():
    counts = np.unique(owners(NAMES), return_counts=True)[1]
    assert len(counts) == 5 and abs(counts - 4000).max() < 300


def test_keys_that_hardly_differ_are_shared_out_too():
    for column in range(2):
        for step in (1, 1 << 32, 1 << 56):
            words = np.zeros((250, 2), np.uint64)
            words[:, column] = np.arange(250, dtype=np.uint64) * np.uint64(step)
            assert np.unique(owners(NAMES, words), return_counts=True)[1].min() > 20


def test_the_order_of_servers_does_not_matter():
    assert (owners(NAMES) == owners(NAMES[::-1])).all()


def test_a_lost_server_costs_its_own_share_only():
    before, after = owners(NAMES), owners(NAMES[1:])
    assert (before == after)[before != NAMES[0]].all()
    moved = np.unique(after[before == NAMES[0]], return_counts=True)[1]
    assert len(moved) == 4 and moved.min() > 800


def test_shares_are_those_of_rows_that_servers_have_already():
    words = np.arange(1, 25, dtype=np.uint64).reshape(12, 2)
    assert Shares(["a:1", "b:1", "c:1"]).of(words).tolist() == [1, 0, 0, 0, 0, 2, 2, 2, 2, 2, 0, 2]
    assert Shares(["a:1"]).of(words).tolist() == [0] * 12
    assert Shares(["a:1", "b:1"]).of(words[:0]).shape == (0,)
