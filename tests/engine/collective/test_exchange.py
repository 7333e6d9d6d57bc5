"""Steps of ranks that are threads: whatever they ask for and have, each gets the right rows."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.threadranks import NAMESPACE, Rank, in_threads, keys_of, steps, told, value
from torchcache2 import torchcache
from torchcache2.core.errors import OptionError, RankError
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.batch import FunctionSource, NotStoredError
from torchcache2.engine.cache import Cache
from torchcache2.engine.collective.exchange import Exchange, is_apart

SHAPES = ((), (3,), (2, 0), (1,))


STEPS = st.lists(st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=3, max_size=3), max_size=5)


@settings(max_examples=12, deadline=None)
@given(STEPS, st.booleans())
def test_each_rank_gets_its_rows_and_each_item_is_computed_once(batches, forgets):
    def run(rank, channel):
        mine = Rank(channel, max_memory_cache_size=2000 if forgets else "1MB")
        for batch in batches:
            mine.fetch(batch[rank])
        stats = mine.cache.stats()
        mine.cache.close()
        return mine.computed, stats, channel.kinds

    results = told(in_threads(3, run))
    assert len({tuple(kinds) for _, _, kinds in results}) == 1
    computed = sorted(number for numbers, _, _ in results for number in numbers)
    if not forgets:
        assert computed == sorted({number for batch in batches for numbers in batch for number in numbers})
    assert sum(stats.received for _, stats, _ in results) == sum(stats.sent for _, stats, _ in results)


def test_what_all_find_is_one_round():
    def run(mine, rank):
        mine.fetch([rank, 5])
        mine.channel.kinds.clear()
        mine.fetch([rank])
        return mine.channel.kinds

    assert steps(2, run) == [["ask"], ["ask"]]


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
    def run(mine, rank):
        mine.fetch([1] if rank else [])
        mine.fetch([1]).zero_()  # what was received is the caller's
        mine.channel.kinds.clear()
        mine.fetch([1])
        return mine.channel.kinds, mine.computed, mine.cache.stats().memory_rows

    first, second = steps(2, run)
    assert first[0] == second[0] == ["ask"] and (first[1], second[1]) == ([], [1])


def test_no_tensor_of_an_output_that_was_received_shares_memory_with_another():
    def run(mine, rank):
        for numbers in ([1, 2] if rank else [], [1, 2]):
            output = mine.cache.fetch(
                keys_of(numbers), lambda at: (torch.ones(len(at), 3), torch.ones(len(at)))
            )
        return [tensor.untyped_storage().nbytes() for tensor in output], mine.cache.stats().received

    assert steps(2, run) == [([24, 8], 2), ([24, 8], 0)]


@pytest.mark.parametrize("sending", [1, 2])
def test_rows_are_sent_from_a_device_only_if_that_of_every_rank_can(sending):
    device = torch.device("meta")  # takes the place of an accelerator, as every machine has it

    def run(mine, rank):
        sent, swap = [], mine.channel.swap

        def spy(data, *sizes):
            sent.append(data.device)
            return swap(data, *sizes)

        mine.channel.swap, mine.channel.sends_from = spy, lambda device: rank < sending
        mine.fetch([1] if rank else [])
        mine.cache.fetch(keys_of([1]), lambda positions: torch.ones(1, 3), device=device)
        return sent

    expected = [device] if sending == 2 else [torch.device("cpu")]
    assert steps(2, run) == [expected, expected]


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
    def run(mine, rank):

        def broken(positions):
            raise ZeroDivisionError("here")

        try:
            mine.fetch([rank + 10, 3], broken if rank == raises else None)
        except (ZeroDivisionError, RankError) as error:
            found = type(error).__name__, str(error), getattr(error, "rank", None)
        mine.fetch([rank, 3])
        return found

    results = steps(2, run)
    assert results[raises] == ("ZeroDivisionError", "here", None)
    name, text, number = results[1 - raises]
    assert (name, number) == ("RankError", raises)
    assert f"rank {raises}" in text and "ZeroDivisionError: here" in text


def test_ranks_leave_at_different_times_and_go_on_answering():
    def run(mine, rank):
        with mine.cache.join():
            for step in range([0, 1, 7][rank]):
                mine.fetch([step, 100 + rank])
        with mine.cache.join():
            mine.fetch([rank])
        return mine.computed

    results = steps(3, run)
    assert sum(numbers.count(3) for numbers in results) == 1


def test_a_call_alone_needs_nobody():
    def run(mine, rank):
        mine.fetch([1])
        if rank == 0:
            with mine.cache.alone():
                mine.fetch([1, 2])
        mine.fetch([2])
        return mine.computed

    first, second = steps(2, run)
    assert sorted(first + second) == [1, 2]


def test_all_namespaces_that_one_rank_drops_all_drop():
    def run(mine, rank):
        names = [NAMESPACE, bytes(16)]
        for mine.namespace in names * 2:
            mine.fetch([1, 2])
        mine.computed.clear()
        for mine.cache.namespace in names if rank == 0 else []:
            mine.cache.clear()
        for mine.namespace in names:
            mine.fetch([1, 2])
        return mine.computed

    first, second = steps(2, run)
    assert sorted(first + second) == [1, 1, 2, 2]


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
    def run(mine, rank):
        for number, shape in enumerate(SHAPES):
            mine.fetch([10 * number + rank], shape=shape)
        for turn in range(len(SHAPES)):
            number = (rank + turn) % len(SHAPES)  # another shape in each rank
            mine.fetch([10 * number + 1, 10 * number + 2], shape=SHAPES[number])
        return mine.computed

    computed = [number for numbers in steps(3, run) for number in numbers]
    assert sorted(computed) == [10 * number + rank for number in range(len(SHAPES)) for rank in range(3)]


# In which something was wrong once


def test_a_loop_that_raises_is_told_if_an_earlier_step_has_failed_too():
    """Errors that were handled say nothing of the next one; what follows from one needs no telling."""

    def broken(positions):
        raise ZeroDivisionError("here")

    def fails(mine, rank):
        try:
            mine.fetch([rank], broken if rank == 0 else None)
        except (ZeroDivisionError, RankError) as error:
            return error
        raise AssertionError("no error")

    def run(rank, channel):
        mine, caught = Rank(channel), []
        fails(mine, rank)
        for loop in range(3):
            try:
                with mine.cache.join():
                    if loop:
                        error = fails(mine, rank)
                    if loop == 2:
                        raise LookupError("it follows") from error
                    if rank == 1:
                        raise KeyError("gone")
                    mine.fetch([3])
            except (LookupError, RankError) as error:
                caught.append(type(error))
        mine.fetch([rank])
        return caught

    first, second = told(in_threads(2, run))
    assert first == [RankError, RankError, LookupError] and second == [KeyError, KeyError, LookupError]


def test_a_rank_without_memory_for_the_caches_own_work_goes_on_only_with_the_others():
    """One that went on alone would wait for the others at its next reduction."""

    def no_memory(*args):
        raise torch.cuda.OutOfMemoryError("no memory")

    def run(rank, channel):
        mine, raised = Rank(channel), []
        for step in range(4):
            if rank == 0 and step in (1, 2):
                setattr(mine.cache, ("find", "keep")[step - 1], no_memory)
            try:
                mine.fetch([10 * step + rank, 10 * step + 5])
            except Exception as error:
                raised.append((step, type(error)))
            for name in ("find", "keep"):
                vars(mine.cache).pop(name, None)
        return raised

    first, second = told(in_threads(2, run))
    assert first == [(step, torch.cuda.OutOfMemoryError) for step in (1, 2)]
    assert second == [(step, RankError) for step in (1, 2)]


def test_rows_are_counted_if_what_else_a_rank_computes_is_not_stored():
    def run(mine, rank):
        mine.fetch([rank])

        def compute(positions):
            raise NotStoredError("random", "it is random", "output")

        try:
            mine.cache.output(keys_of([0, 1, 10 + rank]), FunctionSource(compute, torch.device("cpu")))
        except NotStoredError as stop:
            stats = mine.cache.stats()
            return stop.output, stats.received, stats.sent, stats.exchange_seconds >= 0
        raise AssertionError("it is stored")

    assert steps(2, run) == [("output", 1, 1, True)] * 2


def test_a_module_within_one_that_each_rank_caches_for_itself_takes_no_steps():
    """A rank that finds the rows of the outer one does not call the inner one, but others may."""
    outer = Cache(bytes(16), CacheSettings(max_memory_cache_size="1MB"))

    def run(mine, rank):

        def compute(positions):
            return mine.fetch([rank * 10 + i for i in positions.tolist()])

        cache = outer if rank else Cache(bytes(16), CacheSettings(max_memory_cache_size="1MB"))
        return cache.fetch(keys_of([1, 2]), compute)[:, 0].tolist()

    outer.fetch(keys_of([1, 2]), lambda positions: torch.zeros(len(positions), 3))
    assert steps(2, run) == [[0, 1], [0, 0]]


def in_step(module, channel):
    net, exchange = torchcache(distributed="collective")(module), Exchange(channel)
    net.cache_instance.engine.collective.exchange = lambda: None if is_apart() else exchange
    return net


class Centred(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


def test_rows_of_batches_of_one_item_are_not_taken_for_a_first_larger_batch():
    """No probe has seen whether items depend on their batch, and here they do."""
    items = torch.arange(12.0).reshape(4, 3)

    def run(rank, channel):
        net = in_step(Centred(), channel)
        for batch in (items[rank][None], items[1:3] if rank == 0 else items[rank][None]):
            assert torch.equal(net(batch), Centred()(batch))
        return dict(net.cache_instance.stats().bypasses)

    assert told(in_threads(3, run)) == [{"batch": 2}, {}, {}]


def test_one_probe_is_enough_for_ranks_with_the_same_batch():
    def run(rank, channel):
        net = in_step(torch.nn.Tanh(), channel)
        for step in range(3):
            batch = torch.arange(36.0).reshape(12, 3) + 100 * step
            assert torch.equal(net(batch), torch.tanh(batch))
        return net.cache_instance.stats()

    stats = told(in_threads(3, run))
    assert sum(of.misses for of in stats) == 36 and all(of.misses >= 12 for of in stats)


def test_a_rank_without_data_to_warm_up_with_is_an_error_in_all_ranks():
    def run(rank, channel):
        net = in_step(torch.nn.Identity(), channel)
        try:
            net.cache_instance.warmup([] if rank else [torch.zeros(3)] * 5)
        except (RankError, OptionError) as error:
            return type(error), getattr(error, "rank", None)
        raise AssertionError("no error")

    assert told(in_threads(2, run)) == [(RankError, 1), (OptionError, None)]


def test_who_has_left_the_loop_of_one_module_answers_for_all():
    """It has rows of another one, and what is dropped then is dropped wherever it is."""

    def run(mine, rank):
        first, second = mine.cache, Rank(mine.channel, bytes(16), cache_dtype=torch.float64).cache
        second.collective.exchange = first.collective.exchange
        first.collective.name, second.collective.name = "first", "second"
        mine.fetch([1])
        mine.cache, mine.namespace = second, second.namespace
        mine.fetch([2, 3] if rank == 0 else [])
        with first.join():
            if rank == 0:
                first.clear()
            else:
                mine.fetch([2])
        held = [
            first.collective.holdings.owned(keys_of([1])),
            second.collective.holdings.owned(keys_of([2], second.namespace)),
        ]
        with first.join():
            if rank == 1:
                second.clear()
                mine.fetch([])
        held.append(second.collective.holdings.owned(keys_of([2, 3], second.namespace)))
        return mine.computed, [len(parts) > 0 for parts in held]

    first, second = steps(2, run)
    assert first == ([1, 2, 3], [False, True, False]) or first == ([2, 3], [False, True, False])
    assert second[0] in ([], [1]) and not second[1][0] and not second[1][2]


def test_rows_that_a_rank_finds_are_its_output_if_their_check_raises(tmp_path):
    broken = tmp_path / "broken"

    def doubled(x):
        if broken.exists():
            raise OSError("no such thing")
        return x * 2

    def run(rank, channel):
        net, x = in_step(doubled, channel), torch.rand(2, 3)
        for item in x.split(1):
            net(item)
        channel.gather("before", b"")
        broken.touch()
        assert torch.equal(net(x), x * 2)

    told(in_threads(2, run))
