"""Cases in which ranks leave a loop one after another. test_collective.py runs them."""

import contextlib

import torch
from torch import nn

from tests.helpers.steps import ITEMS, SOAK, Backbone, case, raises, run_cases
from torchcache2 import RankError, torchcache

SOON = 3.0


def loop(ranks, apart, net, *others):
    """Each rank makes so many calls more than the one before it, and all items are computed once."""
    order = torch.randperm(192, generator=torch.Generator().manual_seed(apart))
    with net.cache_instance.join():
        for indices in order.split(8)[: 3 + apart * ((ranks.rank + apart) % ranks.count)]:
            ranks.check(net, ITEMS[indices])
            for other in others:
                ranks.check(other, ITEMS[indices], 3.0)


@case(ranks=3, more=3)
def ends_that_are_0_1_and_7_calls_apart(ranks):
    for nodes, apart in ((3, 0), (3, 1), (3, 7), *[(1, 7)] * SOAK):
        if apart:
            ranks.again()
        ranks.nodes(nodes)
        net = ranks.cached(Backbone())
        loop(ranks, apart, net)
        times = ranks.times_computed()
        assert set(times.values()) == {1} and len(times) == 8 * (3 + 2 * apart), (apart, times)
        ranks.check(net, ITEMS)  # in step again
        ranks.check(net, ITEMS[ranks.rank :: 3])
        assert set(ranks.times_computed().values()) == {1}
        ranks.computed.clear()
        net.cache_instance.close()


@case(ranks=3)
def a_loop_that_calls_two_modules_and_passes_calls_by(ranks):
    ranks.nodes(3)
    first, second = (
        ranks.cached(Backbone()),
        ranks.cached(nn.Sequential(Backbone(3.0), nn.Dropout(0.5)).eval()),
    )
    loop(ranks, 4, first, second)
    assert set(ranks.times_computed().values()) == {2}  # by each of the modules once
    with second.cache_instance.join():
        for step in range(2 * ranks.rank):
            second.train(step == 1)
            second(ITEMS[8 * step :][:8])
    second.eval()
    ranks.check(second, ITEMS, 3.0)


@case(ranks=3)
def loops_without_calls_and_inside_of_each_other(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())
    with net.cache_instance.join():
        pass
    with net.cache_instance.join():
        if ranks.rank == 1:
            ranks.check(net, ITEMS[:8])
            ranks.check(net, ITEMS[4:12])
    with net.cache_instance.join(), net.cache_instance.join():
        for step in range(ranks.rank):
            ranks.check(net, ITEMS[step * 8 :][:16])
    with net.cache_instance.alone(), net.cache_instance.join():
        for step in range(ranks.rank):
            ranks.check(net, ITEMS[step * 8 :][:16])
    ranks.check(net, ITEMS)


@case(ranks=2)
def other_options_have_nothing_to_join(ranks):
    net = torchcache(distributed="off", probe=False)(Backbone())
    with net.cache_instance.join(), net.cache_instance.alone():
        for _ in range(3 * ranks.rank):
            ranks.check(net, ITEMS[:8])


@case(ranks=3)
def a_forward_that_raises_while_others_have_left(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())

    def failing(x, output):
        if (x[:, 0] >= 40).any():
            raise ValueError("40 is too many")

    ranks.on_compute = failing
    error = ValueError if ranks.rank == 2 else RankError
    with raises(error, "40 is too many", within=SOON), net.cache_instance.join():
        for step in range(1 + 9 * (ranks.rank == 2)):
            ranks.check(net, ITEMS[8 * step :][:8])
    ranks.on_compute = lambda x, output: None
    ranks.check(net, ITEMS)


@case(ranks=3)
def an_error_that_is_caught_inside_of_the_loop(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())

    def failing(x, output):
        if 16.0 in x[:, 0]:
            raise ValueError("16")

    ranks.on_compute = failing
    with net.cache_instance.join():
        for part in ITEMS[: 64 + 16 * ranks.rank].split(8):
            with contextlib.suppress(ValueError, RankError):
                ranks.check(net, part)
    ranks.on_compute = lambda x, output: None
    ranks.check(net, ITEMS)
    assert set(ranks.times_computed().values()) <= {1, 2}


run_cases()
