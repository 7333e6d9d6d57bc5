"""Claims: each key is computed by one, and nobody waits for ever."""

import collections
import inspect
import sys
import time

import numpy as np
import pytest
import torch

from tests.helpers.storage import CPU, NAMESPACES, found, keys_of, put, rows_of, warnings_of
from tests.tiers.claims_contract import ClaimContract, in_thread, interrupted
from tests.tiers.shared.scripts import JOB
from torchcache2.core.rows import Rows
from torchcache2.tiers.shared import board as board_module
from torchcache2.tiers.shared.board import Board, Tickets
from torchcache2.tiers.shared.tier import SharedClaim, SharedTier


@pytest.fixture
def two(join):
    return join(), join()


def claim(tier, names, namespace=NAMESPACES[0]):
    return tier.claim(keys_of(list(names), namespace))


class TestClaims(ClaimContract):
    claim, put = staticmethod(claim), staticmethod(put)

    def tally(self, tier):
        return tier.tally

    def left(self, tier):
        (table,) = tier._tables.open.values()
        return int(tier._job.board.tickets.held(table.locations).sum())


def test_a_claim_makes_room_for_its_keys(two):
    first, second = two
    put(first, range(280))
    mine, theirs = claim(first, range(2000, 3008)), claim(second, range(2000, 3008))
    assert mine.mine.tolist() == theirs.others.tolist() == list(range(1008))


def test_whoever_puts_serves_those_who_wait(two):
    first, second = two
    held = claim(first, range(4))
    theirs = claim(second, range(4))
    assert put(second, range(4)) == 4  # its whole batch, computed without a claim
    assert theirs.wait().tolist() == [] and len(theirs.appeared) == 4
    assert put(first, range(4)) == 0
    held.release()
    assert found(first, range(4)) == [0, 1, 2, 3] and first.stats().rows == 4


def test_drop_ends_claims(two):
    first, second = two
    held, theirs = claim(first, [1, 2]), claim(second, [1, 2])
    first.drop(NAMESPACES[0])
    assert theirs.wait().tolist() == [0, 1]
    held.release()
    assert claim(second, [1, 2]).mine.tolist() == [0, 1]


def test_close_ends_claims(two):
    first, second = two
    held, theirs = claim(first, [1, 2]), claim(second, [1, 2])
    first.close()
    assert theirs.wait().tolist() == [0, 1]
    held.release()
    assert first.claim(keys_of([7])).mine.tolist() == [0]


def test_a_full_tier_gives_no_claims(join):
    first, second = join(budget=400_000), join()
    held = claim(first, range(100))
    theirs = claim(second, range(100))
    assert 0 < put(first, range(100), 1000) < 100
    held.release()
    assert len(theirs.wait()) + len(theirs.appeared) == 100
    theirs.release()
    assert len(claim(second, range(100)).mine) == 100 and len(claim(second, range(100)).others) == 0


def test_room_that_was_made_ends_being_full(join):
    first, second = join(budget=400_000), join()
    put(first, range(100), 1000)
    assert first.stats().rows < 100
    second.drop(NAMESPACES[0])
    found(first, [1])
    held = claim(first, [1], NAMESPACES[1])
    assert len(claim(second, [1], NAMESPACES[1]).others) == 1
    held.release()


def test_rows_that_cannot_be_read_elsewhere_are_not_shared_and_not_claimed(two, log):
    first, second = two
    local = collections.namedtuple("Local", "x")
    assert first.put(keys_of([1, 2]), Rows.from_pytree(local(torch.ones(2, 3)), 2, device=CPU)) == 0
    held = claim(first, [1, 2])
    assert claim(second, [1, 2]).mine.tolist() == [0, 1]
    held.release()
    assert len(warnings_of(log)) == 1 and "not shared" in log[-1].getMessage()


class Shown:
    """A node type that one of two processes knows."""

    def __init__(self, x):
        self.x = x


torch.utils._pytree.register_pytree_node(Shown, lambda node: ([node.x], None), lambda x, context: Shown(*x))


def test_rows_that_one_cannot_read_are_its_own_to_compute(two, monkeypatch):
    first, second = two
    assert first.put(keys_of([1, 2]), Rows.from_pytree(Shown(torch.ones(2, 3)), 2, device=CPU)) == 2
    put(first, [3])
    monkeypatch.delattr(sys.modules[__name__], "Shown")
    held = claim(second, [1, 2, 3, 4])
    assert held.mine.tolist() == [0, 1, 3] and held.others.tolist() == [2]
    held.release()
    assert claim(first, [1, 2, 3, 4]).mine.tolist() == [3]


def test_a_stuck_one_is_passed_by(two, monkeypatch):
    first, second = two
    held, theirs = claim(first, [1, 2]), claim(second, [1, 2, 3])
    monkeypatch.setattr(board_module, "_LEAST_STUCK", 200_000_000)
    start = time.monotonic()
    assert theirs.wait().tolist() == [0, 1]
    assert 0.1 < time.monotonic() - start < 30  # it is 60 by itself
    put(second, [1, 2, 3])
    assert put(first, [1, 2]) == 0  # it comes too late
    held.release()
    assert found(first, [1, 2, 3]) == [1, 2, 3]
    assert first.stats().corrupt == 0


@pytest.mark.slow
def test_four_times_the_longest_computation_is_not_stuck(two, monkeypatch):
    first, second = two
    monkeypatch.setattr(board_module, "_LEAST_STUCK", 0)
    before = claim(first, [9])
    time.sleep(0.2)
    before.release()
    held, theirs = claim(first, [1]), claim(second, [1])
    start = time.monotonic()
    assert theirs.wait().tolist() == [0]
    assert time.monotonic() - start > 0.5
    held.release()


def test_more_claims_than_tickets_compute_without(join):
    tier, held = join(), []
    for number in range(1100):
        tier.thread = lambda number=number: number + 1  # as if each call came from another thread
        held.append(claim(tier, [number]))
    assert all(len(c.mine) == 1 for c in held)
    for c in held:
        c.release()
    assert put(tier, range(1100)) == 1100 and tier.stats().faults == 0


def test_a_thread_does_not_wait_for_itself_through_another_cache_of_its_process(tmp_path):
    first, second = [SharedTier(JOB, 10**8, folder=str(tmp_path)) for _ in range(2)]
    outer, inner = claim(first, [1, 2]), claim(second, [1, 2, 3])
    assert inner.mine.tolist() == [0, 1, 2] and inner.others.tolist() == []
    assert claim(second, [1], NAMESPACES[1]).mine.tolist() == [0]
    inner.release()
    outer.release()
    again = claim(second, [1, 2])
    assert in_thread(lambda: claim(first, [1, 2])).others.tolist() == [0, 1]
    again.release()
    first.close()
    second.close()


@pytest.mark.parametrize("number", range(3))
def test_a_ticket_that_another_thread_takes_meanwhile_is_not_taken_for_ones_own(number):
    table = np.zeros((Tickets.MOST, Tickets.COLUMNS), np.int64)
    reads = []

    class Read(np.ndarray):
        def __getitem__(self, which):
            reads.append(which)
            if len(reads) == number + 1:
                theirs.append(tickets.take(1, 20, 3, theirs.append))
            return super().__getitem__(which)

    theirs, tickets = [], Tickets(table, np.zeros(1, np.int64), lambda member: True)
    tickets.give_back(tickets.take(0, 10, 3, lambda ticket: None))
    reading = Tickets(table.view(Read), np.zeros(1, np.int64), lambda member: True)
    assert not reading.has_one(10, 3) and len(reads) == 3 and len(theirs) == 2
    assert reading.has_one(20, 3) and not reading.has_one(20, 4)


def test_an_interrupt_at_any_line_leaves_nothing_claimed(two):
    first, second = two
    # In a function with a lock, tracing would also interrupt where no signal can: before it is released.
    members = [member for cls in (SharedClaim, Board, Tickets) for member in vars(cls).values()]
    traced = {member.__code__ for member in members if inspect.isfunction(member)}
    claim(first, [0]).release()
    for number in range(1, 1000):
        gave, is_over = interrupted(number, traced.__contains__, lambda: claim(first, [number]))  # noqa: B023
        if is_over:
            break
        other = claim(second, [number])
        assert other.mine.tolist() == [0], number
        other.release()
    assert 20 < number < 999
    gave.release()


def test_rows_on_an_accelerator_are_there_when_put_returns(join):
    class Remote:
        """An accelerator whose tensors are those of one size."""

        def owns(self, tensor):
            return tensor.shape[-1] == 5

        def pinned(self, shape, dtype):
            return torch.empty(tuple(shape), dtype=dtype)

        def start_copy(self, target, source):
            self.copy = target, source

        def event(self, device):
            return self

        def synchronize(self):
            self.copy[0].copy_(self.copy[1])

    first, second = join(runtime=Remote()), join()
    theirs = None
    held = claim(first, range(3))
    theirs = claim(second, range(3))
    assert first.put(keys_of(range(3)), rows_of(range(3), 5)) == 3
    assert theirs.wait().tolist() == [] and found(second, range(3), 5) == [0, 1, 2]
    assert found(first, range(3), 5) == [0, 1, 2]
    held.release()
