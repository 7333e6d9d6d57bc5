"""Cases in which a rank in step fails. test_collective.py runs them."""

import os
import time
from unittest import mock

import torch

from tests.helpers.steps import ITEMS, SOAK, Backbone, case, dist, raises, run_cases
from torchcache2 import InputError, RankError
from torchcache2.engine.cache import Cache
from torchcache2.engine.collective import plan
from torchcache2.engine.collective.exchange import Holdings
from torchcache2.engine.collective.plan import Asked

SOON = 3.0  # seconds; `make bench` holds a smaller bound on a machine that does nothing else


class PlannedError(Exception):
    """What a rank raises in these cases."""


def planned(*args, **kwargs):
    raise PlannedError("as planned")


def passed_on(ranks, stage, victim):
    """One rank raises in a stage, and the others, in the same step, an error that names it."""
    net = ranks.cached(Backbone())
    parts = ITEMS.split(16)
    ranks.check(net, parts[ranks.rank])
    if ranks.rank == victim:
        with raises(PlannedError, within=SOON), stage(ranks):
            net(parts[(ranks.rank + 1) % ranks.count + 3])
    else:
        with raises(RankError, f"rank {victim}", "PlannedError: as planned", within=SOON) as caught:
            net(parts[(ranks.rank + 1) % ranks.count + 3])
        assert caught[0].rank == victim
    for turn in range(2):
        for start in (0, 3):
            ranks.check(net, parts[start + (ranks.rank + turn) % ranks.count])
    net.cache_instance.close()


def in_forward(ranks):
    return mock.patch.object(ranks, "on_compute", planned)


def in_finding(ranks):
    return mock.patch.object(Holdings, "get", planned)


def in_looking(ranks):
    return mock.patch.object(Holdings, "owned", planned)


def in_keeping(ranks):
    return mock.patch.object(Cache, "keep", planned)


def in_preparing(ranks):
    return mock.patch.object(Asked, "offer", planned)


@case(ranks=3, more=15)
def an_error_of_each_stage_reaches_all_ranks(ranks):
    for stage in (in_forward, in_finding, in_looking, in_keeping, in_preparing):
        for victim in range(3) if SOAK else [2 * (stage is in_forward)]:
            ranks.again()
            ranks.nodes(3)
            passed_on(ranks, stage, victim)


@case(ranks=3, more=3)
def an_error_while_others_read_rows(ranks):
    for victim in range(3) if SOAK else (1,):
        ranks.again()
        ranks.nodes(3)
        net = ranks.cached(Backbone())
        ranks.check(net, ITEMS[ranks.rank :: 3])
        found, calls = Holdings.owned, []

        def owned(self, keys, found=found, calls=calls):
            calls.append(keys)
            return planned() if len(calls) == 2 else found(self, keys)

        if ranks.rank == victim:
            with raises(PlannedError, within=SOON), mock.patch.object(Holdings, "owned", owned):
                net(ITEMS)
        else:
            with raises(RankError, f"rank {victim}", "as planned", within=SOON):
                net(ITEMS)
        ranks.check(net, ITEMS)
        assert set(ranks.times_computed().values()) == {1}
        ranks.computed.clear()
        net.cache_instance.close()


@case(ranks=3, more=3)
def an_error_when_rows_are_sent_or_kept(ranks):
    """Nobody can be told of it in this step, so the connection ends, which others notice at once."""
    stages = [(plan, "packed"), (plan, "unpacked"), (Holdings, "put_replicas")]
    for number, (place, name) in enumerate(stages):
        ranks.again()
        ranks.nodes(3)
        net = ranks.cached(Backbone())
        ranks.check(net, ITEMS[ranks.rank :: 3])
        began = time.monotonic()
        if ranks.rank == number:
            with raises(PlannedError), mock.patch.object(place, name, planned):
                net(ITEMS)
            with raises(RankError, within=SOON):
                net(ITEMS)
        else:
            with raises(RankError, f"rank {number}"):
                for _ in range(2):
                    ranks.check(net, ITEMS)
            assert time.monotonic() - began < SOON
        net.cache_instance.close()


@case(ranks=3)
def an_interrupt_ends_the_wait_of_all(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 3][:8])

    def interrupted(x, output):
        raise KeyboardInterrupt

    if ranks.rank == 1:
        ranks.on_compute = interrupted
        with raises(KeyboardInterrupt, within=SOON):
            net(ITEMS[ranks.rank :: 3])
    else:
        with raises(RankError, "rank 1", within=SOON):
            net(ITEMS[ranks.rank :: 3])


@case(ranks=3)
def an_error_of_strict_reaches_all_ranks(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone(), strict=True)
    for victim in range(3):
        ranks.check(net, ITEMS[ranks.rank + victim :][:8])
        if ranks.rank == victim:
            with raises(InputError, within=SOON):
                net(torch.tensor(1.0))
        else:
            with raises(RankError, f"rank {victim}", "InputError", within=SOON):
                net(ITEMS[:8])
    ranks.check(net, ITEMS)


@case(ranks=2)
def a_call_that_does_not_fit_the_signature_keeps_ranks_in_step(ranks):
    ranks.nodes(2)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 2])
    if ranks.rank:
        with raises(TypeError):
            net(ITEMS, 1, 2)
    else:
        ranks.check(net, ITEMS[::2])
    ranks.check(net, ITEMS)
    assert set(ranks.times_computed().values()) == {1}


@case(ranks=3, seconds=1.0, more=2)
def a_rank_that_does_not_come_is_named(ranks):
    for absent in (2, 0) if SOAK else (2,):
        ranks.again()
        ranks.nodes(3)
        net = ranks.cached(Backbone())
        ranks.check(net, ITEMS[ranks.rank :: 3][:8])
        if ranks.rank != absent:
            began = time.monotonic()
            with raises(RankError, f"rank {absent}", within=1.0 + SOON) as caught:
                net(ITEMS)
            assert caught[0].rank == absent and time.monotonic() - began > 0.5
            with raises(RankError, f"rank {absent}", within=SOON):
                net(ITEMS)  # and no second wait
        dist.barrier(_rest)  # until then the absent one has closed nothing
        net.cache_instance.close()


@case(ranks=2)
def a_forked_process_does_not_speak_for_its_rank(ranks):
    ranks.nodes(2)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 2])
    child = os.fork() if ranks.rank else 0
    if ranks.rank and not child:
        try:
            net(ITEMS)
        except RankError as error:
            os._exit(7 if "fork" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (3, 7)
    ranks.check(net, ITEMS)
    assert set(ranks.times_computed().values()) == {1}


def prepare():
    global _rest
    _rest = dist.new_group([0, 1, 2])


run_cases(prepare)
