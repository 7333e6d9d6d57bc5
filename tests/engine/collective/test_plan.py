"""The plan of a step: each key has one source that can deliver it, and the loads are even."""

import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from torchcache2.engine.collective.plan import planned

SOAK = bool(os.environ.get("SOAK"))


def words_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def flags_of(masks, size):
    """For each key the ranks whose bits its mask has."""
    return np.array(masks, np.int64).reshape(-1, 1) >> np.arange(size) & 1 == 1


def plan_of(asked, held=None, whole=(), turn=0):
    is_whole = np.zeros(asked.shape[1], bool)
    is_whole[list(whole)] = True
    return planned(words_of(len(asked)), asked, asked & False if held is None else held, is_whole, turn)


def loads_of(source, size):
    return np.bincount(source[source >= 0], minlength=size)


@st.composite
def steps(draw, most_sets=6):
    size = draw(st.integers(1, 6))
    sets = draw(st.lists(st.integers(0, 2**size - 1), min_size=1, max_size=most_sets))
    pairs = st.tuples(st.sampled_from(sets), st.sampled_from([0, 0, *sets]))
    masks = draw(st.lists(pairs, max_size=40))
    asked, held = (flags_of([mask[i] for mask in masks], size) for i in (0, 1))
    whole = flags_of([draw(st.integers(0, 2**size - 1))], size)[0]
    return asked, held, whole, draw(st.integers(0, 10**6))


@hypothesis.settings(max_examples=2000 if SOAK else 150)
@hypothesis.given(steps())
def test_every_key_has_one_source_that_can_deliver_it(step):
    asked, held, whole, turn = step
    words = words_of(len(asked))
    source = planned(words, asked, held, whole, turn)
    # Every rank derives the same, however its arrays lie in memory.
    again = planned(*map(np.asfortranarray, (words, asked, held)), whole.copy(), turn)
    assert np.array_equal(source, again) and source.dtype == np.int64

    is_held, is_open = held.any(axis=1), asked.any(axis=1) & ~held.any(axis=1)
    assert np.array_equal(source >= 0, is_held | is_open)
    keys = np.arange(len(asked))
    assert held[keys[is_held], source[is_held]].all()
    assert asked[keys[is_open], source[is_open]].all()

    open_keys = asked & is_open[:, None]
    runs = whole & np.isin(np.arange(len(whole)), source[is_open])
    by_whole = np.isin(source, np.flatnonzero(runs))
    for rank in np.flatnonzero(whole):
        mine = open_keys[:, rank]
        if runs[rank]:  # it gets all of them, but those that another whole batch has, too
            assert by_whole[mine].all()
        elif mine.any():  # it waits only for one that runs its whole batch
            assert by_whole[mine].any()
        if (mine & (open_keys.sum(axis=1) == 1)).any():
            assert runs[rank]

    shared = is_open & ~by_whole
    assert not open_keys[shared][:, runs].any()
    parts = open_keys & ~whole
    for askers in {row.tobytes() for row in parts[shared]}:  # those of the same keys share them evenly
        same = shared & np.array([row.tobytes() == askers for row in parts])
        loads = loads_of(source[same], len(whole))[np.frombuffer(askers, bool)]
        assert loads.max() - loads.min() <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17, 64])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 257])
def test_identical_batches_are_split_evenly(count, size):
    asked = np.ones((count, size), bool)
    extra = set()
    for turn in range(size):
        plan = plan_of(asked, turn=turn)
        loads = loads_of(plan, size)
        assert loads.sum() == count and loads.max() - loads.min() <= 1
        extra.add(int(loads.argmax()))
    if count % size == 1:  # the odd one goes round
        assert extra == set(range(size))


def test_those_that_hold_a_key_take_turns():
    held = flags_of([0b1011] * 3000, 4)
    asked = flags_of([0b0100] * 3000, 4)
    sources = np.bincount(plan_of(asked, held), minlength=4)
    assert sources[2] == 0 and sources[[0, 1, 3]].min() > 900
    # The key decides, and neither the turn nor the other keys.
    assert np.array_equal(plan_of(asked, held, turn=3), plan_of(asked, held))
    words = words_of(3000)[7:]
    fewer = planned(words, asked[7:], held[7:], np.zeros(4, bool), 0)
    assert np.array_equal(fewer, plan_of(asked, held)[7:])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("pace", [0, 1, 2, 3, 5])
def test_identical_batches_warm_one_rank_in_each_step(size, pace):
    # Other modules take steps, too, so the turn may go on by any number.
    cold, asked = set(range(size)), np.ones((16, size), bool)
    for step in range(size):
        plan = plan_of(asked, whole=cold, turn=step * pace)
        (rank,) = set(plan.tolist())
        assert rank in cold
        cold.discard(rank)
    assert not cold


PLANS = {  # by the ranks that ask for each key, those that run their whole batch, and whose turn it is
    "no common item warms all ranks at once": ([1, 1, 2, 2, 4, 8], range(4), 0, [0, 0, 1, 1, 2, 3]),
    # Rank 1 alone asks for the last key, so it runs anyway: then rank 0 need not.
    "a rank that must run comes before one whose turn it is": ([3, 3, 2], [0, 1], 0, [1, 1, 1]),
    # Each pair has a key: the first takes two, and what the other two share needs one of them.
    "nothing that whole batches alone ask for is left": ([3, 6, 5], [0, 1, 2], 0, [0, 1, 0]),
    "nor at another turn": ([3, 6, 5], [0, 1, 2], 1, [1, 1, 2]),
    # Rank 0 takes its turn; rank 1 shares a key with it, and the other one is rank 2's.
    "the others may be ranks that compute parts": ([3, 6], [0, 1], 0, [0, 2]),
}


@pytest.mark.parametrize(("masks", "whole", "turn", "source"), PLANS.values(), ids=PLANS)
def test_who_runs_a_whole_batch(masks, whole, turn, source):
    assert plan_of(flags_of(masks, 4), whole=whole, turn=turn).tolist() == source


def test_keys_that_somebody_has_start_no_whole_batch():
    asked = np.ones((8, 2), bool)
    assert (plan_of(asked, held=flags_of([0b01] * 8, 2), whole=[0, 1]) == 0).all()
