"""Who has which samples: a plan that all ranks compute alike."""

import hashlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from torchcache2.datasets.shards import Shard, permutation

EVEN = (None, "drop", "repeat")


@st.composite
def plans(draw):
    together, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    options = {
        "together": together,
        "seed": draw(st.sampled_from([0, 13, 2**64 - 1])),
        "shuffle": draw(st.booleans()),
    }
    return draw(st.integers(0, 60)), together * groups, options


def all_shards(count, ranks, **options):
    return [Shard(count, rank, ranks, **options) for rank in range(ranks)]


def orders(shards, epoch):
    found = [shard.order(epoch) for shard in shards]
    for shard, order in zip(shards, found, strict=True):
        assert order.dtype == np.int64 and len(order) == len(shard)
    return found


@hypothesis.given(plans(), st.integers(0, 5))
def test_shards_are_disjoint_and_have_every_sample_once(plan, epoch):
    count, ranks, options = plan
    found = orders(all_shards(count, ranks, **options), epoch)
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    lengths = list(map(len, found))
    assert max(lengths) - min(lengths) <= 1
    assert all(shard.is_even == (count % ranks == 0) for shard in all_shards(count, ranks, **options))


@hypothesis.given(plans(), st.integers(0, 5))
def test_drop_leaves_out_less_than_a_sample_of_each_rank(plan, epoch):
    count, ranks, options = plan
    shards = all_shards(count, ranks, even="drop", **options)
    found = np.concatenate(orders(shards, epoch))
    assert {len(shard) for shard in shards} == {count // ranks}
    assert len(set(found.tolist())) == len(found) == count - count % ranks
    assert all(shard.is_even and shard.left_out == 0 for shard in shards)


@hypothesis.given(plans(), st.integers(0, 5))
def test_repeat_has_every_sample_and_few_of_them_twice(plan, epoch):
    count, ranks, options = plan
    shards = all_shards(count, ranks, even="repeat", **options)
    found = np.concatenate(orders(shards, epoch))
    assert {len(shard) for shard in shards} == {-(-count // ranks)}
    assert set(found.tolist()) == set(range(count))
    assert all(shard.is_even and shard.left_out == 0 for shard in shards)
    if count >= ranks:  # a rank repeats what it, or its node, has
        plain = all_shards(count, ranks, **options)
        for shard, other in zip(shards, plain, strict=True):
            assert set(shard.samples.tolist()) == set(other.samples.tolist())


@hypothesis.given(plans(), st.sampled_from(EVEN), st.integers(0, 30))
def test_a_bound_leaves_out_the_same_samples_in_each_epoch_and_says_how_many(plan, even, most):
    count, ranks, options = plan
    bounded = all_shards(count, ranks, even=even, most=most, **options)
    free = all_shards(count, ranks, even=even, **options)
    for shard, other in zip(bounded, free, strict=True):
        assert len(shard) == min(len(other), most)
    first, second = (np.concatenate(orders(bounded, epoch)).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    if even != "repeat":
        assert len(set(first)) == len(first)
        lost = sum(shard.left_out for shard in bounded[:: options["together"]])
        assert lost == sum(map(len, free)) - len(first)
    lengths = set(map(len, bounded))
    assert all(len(lengths) == 1 for shard in bounded if shard.is_even)


@hypothesis.given(plans(), st.sampled_from(EVEN), st.integers(0, 30))
def test_what_ranks_have_together_stays_from_epoch_to_epoch(plan, even, most):
    count, ranks, options = plan
    shards, together = all_shards(count, ranks, even=even, most=most, **options), options["together"]
    for epoch in (0, 1, 7):
        found = orders(shards, epoch)
        for first in range(0, ranks, together):
            dealt = np.concatenate(found[first : first + together])
            assert sorted(dealt.tolist()) == sorted(shards[first].samples.tolist())


def test_a_rank_alone_keeps_its_samples_and_shuffle_changes_their_order():
    still, shuffled = Shard(100, 1, 4), Shard(100, 1, 4, shuffle=True)
    assert still.order(0).tolist() == still.order(5).tolist() == sorted(shuffled.order(0).tolist())
    assert shuffled.order(0).tolist() == shuffled.order(0).tolist() != shuffled.order(1).tolist()
    assert sorted(shuffled.order(0).tolist()) == sorted(shuffled.order(1).tolist())


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_that_are_dealt_together_get_others_in_each_epoch(shuffle):
    ranks = all_shards(400, 4, together=2, shuffle=shuffle)
    first, second = (set(ranks[0].order(epoch).tolist()) for epoch in (0, 1))
    assert 20 < len(first & second) < 80
    assert first | set(ranks[1].order(0)) == second | set(ranks[1].order(1))
    assert (ranks[0].order(3).tolist() == sorted(ranks[0].order(3).tolist())) != shuffle


def test_ranks_with_equally_many_samples_are_shuffled_independently():
    # Else the samples of a step, over all ranks, would be the same ones in each epoch.
    first, second = (np.argsort(shard.order(0)) for shard in all_shards(200, 2, shuffle=True))
    assert (first == second).mean() < 0.1


@pytest.mark.parametrize("options", [{}, {"together": 2}, {"together": 4}])
def test_shards_are_drawn_evenly_from_the_dataset(options):
    found = all_shards(10_000, 4, shuffle=True, **options)[1].order(0)
    share = np.histogram(found, bins=10, range=(0, 10_000))[0] / 1000
    assert abs(share - 0.25).max() < 0.07
    assert abs(np.corrcoef(found, np.arange(2500))[0, 1]) < 0.1


def test_shards_never_change():
    # Rows that were cached on a node's disk are those of its shard, in later versions too.
    assert permutation(10, 13, 0).tolist() == [9, 4, 1, 2, 3, 7, 8, 6, 0, 5]
    assert permutation(10, 13, 1).tolist() == [0, 2, 6, 5, 1, 9, 7, 4, 3, 8]
    assert permutation(10, 13, 1, 1).tolist() == [6, 4, 8, 7, 1, 0, 3, 5, 2, 9]
    assert permutation(10, 2**64 - 1, 0).tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]
    digest = hashlib.sha256(permutation(100_000, 13, 0).astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("ca2299752bc315aa")
    assert [Shard(10, rank, 4).order(3).tolist() for rank in range(4)] == [
        *([0, 3, 9], [4, 5, 7], [1, 8], [2, 6]),
    ]
    dealt = [Shard(10, rank, 4, together=2, shuffle=True).order(1).tolist() for rank in range(4)]
    assert dealt == [[9, 0, 3], [5, 4, 7], [2, 6], [1, 8]]
    repeated = [Shard(10, r, 4, together=2, shuffle=True, even="repeat").order(1).tolist() for r in range(4)]
    assert repeated == [[9, 0, 3], [5, 4, 7], [1, 1, 8], [2, 6, 2]]
