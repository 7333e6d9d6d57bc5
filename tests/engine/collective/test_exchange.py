"""Steps of ranks that are threads: whatever they ask for and have, each gets the right rows."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.threadranks import Rank, in_threads, told, value
from torchcache2.core.errors import RankError

SHAPES = ((), (3,), (2, 0), (1,))


STEPS = st.lists(st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=3, max_size=3), max_size=5)


@settings(max_examples=12, deadline=None)
@given(STEPS, st.booleans())
def test_each_rank_gets_its_rows_and_each_item_is_computed_once(steps, forgets):
    def run(rank, channel):
        mine = Rank(channel, max_memory_cache_size=2000 if forgets else "1MB")
        for step in steps:
            mine.fetch(step[rank])
        stats = mine.cache.stats()
        mine.cache.close()
        return mine.computed, stats, channel.kinds

    results = told(in_threads(3, run))
    assert len({tuple(kinds) for _, _, kinds in results}) == 1
    computed = sorted(number for numbers, _, _ in results for number in numbers)
    if not forgets:
        assert computed == sorted({number for step in steps for numbers in step for number in numbers})
    assert sum(stats.received for _, stats, _ in results) == sum(stats.sent for _, stats, _ in results)


def test_what_all_find_is_one_round():
    def run(rank, channel):
        mine = Rank(channel)
        mine.fetch([rank, 5])
        channel.kinds.clear()
        mine.fetch([rank])
        return channel.kinds

    assert told(in_threads(2, run)) == [["ask"], ["ask"]]


@pytest.mark.parametrize("gone", ["row", "memory"])
def test_a_row_may_go_while_the_others_are_told_that_it_is_there(gone):
    def run(rank, channel):
        mine, told = Rank(channel), channel.gather
        for _ in range(2):
            mine.fetch([rank, 5])

        def gather(kind, data, meanwhile):
            if rank == 0 and gone == "row":
                mine.cache.tiers.drop(mine.namespace)
            elif rank == 0:
                mine.cache.find = no_memory
            return told(kind, data, meanwhile)

        def no_memory(batch):
            raise torch.cuda.OutOfMemoryError("no memory")

        channel.gather = gather
        mine.fetch([rank, 5])
        channel.gather = told
        vars(mine.cache).pop("find", None)
        mine.fetch([7])
        return mine.computed

    first, second = told(in_threads(2, run))
    assert first.count(0) == 2 and second.count(1) == 1 and (first + second).count(7) == 1


def test_a_row_that_was_sent_is_found_next_time():
    def run(rank, channel):
        mine = Rank(channel)
        mine.fetch([1] if rank else [])
        mine.fetch([1])
        channel.kinds.clear()
        mine.fetch([1])
        return channel.kinds, mine.computed, mine.cache.stats().memory_rows

    first, second = told(in_threads(2, run))
    assert first[0] == second[0] == ["ask"] and (first[1], second[1]) == ([], [1])


def test_ranks_with_other_namespaces_share_nothing_and_one_warns(log):
    def run(rank, channel):
        mine = Rank(channel, bytes([rank]) * 16)
        for _ in range(3):
            mine.fetch([1, 2])
        return mine.computed, mine.cache.stats().received

    assert told(in_threads(2, run)) == [([1, 2], 0), ([1, 2], 0)]
    (warning,) = [record.getMessage() for record in log if "share no rows" in record.getMessage()]
    assert "rank 0 and rank 1" in warning


@pytest.mark.parametrize("raises", [0, 1])
def test_an_error_in_one_rank_is_an_error_in_all_and_the_next_step_works(raises):
    def run(rank, channel):
        mine = Rank(channel)

        def broken(positions):
            raise ZeroDivisionError("here")

        try:
            mine.fetch([rank + 10, 3], broken if rank == raises else None)
        except (ZeroDivisionError, RankError) as error:
            found = type(error).__name__, str(error), getattr(error, "rank", None)
        mine.fetch([rank, 3])
        return found

    results = told(in_threads(2, run))
    assert results[raises] == ("ZeroDivisionError", "here", None)
    name, text, number = results[1 - raises]
    assert (name, number) == ("RankError", raises)
    assert f"rank {raises}" in text and "ZeroDivisionError: here" in text


def test_ranks_leave_at_different_times_and_go_on_answering():
    def run(rank, channel):
        mine = Rank(channel)
        with mine.cache.join():
            for step in range([0, 1, 7][rank]):
                mine.fetch([step, 100 + rank])
        with mine.cache.join():
            mine.fetch([rank])
        return mine.computed

    results = told(in_threads(3, run))
    assert sum(numbers.count(3) for numbers in results) == 1


def test_a_loop_that_raises_is_told_to_those_that_have_left_it():
    def run(rank, channel):
        mine = Rank(channel)
        try:
            with mine.cache.join():
                if rank == 1:
                    raise KeyError("gone")
        except (KeyError, RankError) as error:
            return error
        return None

    first, second = in_threads(2, run)
    assert isinstance(first, RankError) and first.rank == 1 and isinstance(second, KeyError)


def test_a_call_alone_needs_nobody():
    def run(rank, channel):
        mine = Rank(channel)
        mine.fetch([1])
        if rank == 0:
            with mine.cache.alone():
                mine.fetch([1, 2])
        mine.fetch([2])
        return mine.computed

    first, second = told(in_threads(2, run))
    assert sorted(first + second) == [1, 2]


def test_what_one_rank_drops_all_drop():
    def run(rank, channel):
        mine = Rank(channel)
        mine.fetch([1, 2])
        mine.fetch([rank, 7])
        if rank == 0:
            mine.cache.clear()
        mine.fetch([1, 7])
        return mine.computed

    first, second = told(in_threads(2, run))
    assert sorted(first + second) == [0, 1, 1, 2, 7, 7]


def test_a_second_thread_of_a_rank_is_an_error_and_the_first_goes_on():
    def run(rank, channel):
        mine, failures = Rank(channel), []

        def slow(positions):
            def other():
                try:
                    mine.fetch([8])
                except RankError as error:
                    failures.append(str(error))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return torch.stack([value(rank)] * len(positions))

        assert torch.equal(mine.fetch([rank], slow)[0], value(rank))
        return failures

    for failures in told(in_threads(2, run)):
        assert len(failures) == 1 and "two threads" in failures[0]


def test_rows_of_several_shapes_go_in_one_step():
    def run(rank, channel):
        mine = Rank(channel)
        for number, shape in enumerate(SHAPES):
            mine.fetch([10 * number + rank], shape=shape)
        for turn in range(len(SHAPES)):
            number = (rank + turn) % len(SHAPES)  # another shape in each rank
            mine.fetch([10 * number + 1, 10 * number + 2], shape=SHAPES[number])
        return mine.computed

    computed = [number for numbers in told(in_threads(3, run)) for number in numbers]
    assert sorted(computed) == [10 * number + rank for number in range(len(SHAPES)) for rank in range(3)]
