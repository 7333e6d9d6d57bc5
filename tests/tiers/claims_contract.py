"""What claims do wherever they are: each key is computed by one, and nobody waits for ever."""

import functools
import sys
import threading
import time

import numpy as np
import pytest

from tests.helpers.storage import NAMESPACES
from tests.helpers.threads import run_at_once


def in_thread(function):
    """Runs a function in another thread, for which nothing is claimed yet; what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    (result,) = results
    return result


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(number, is_traced, function):
    """What a function returns, and whether it has ended: it is interrupted at a line of code that is traced.

    What is left of the call is freed with the exception, as it is in a session that goes on.
    """
    seen = 0

    def tracer(frame, event, _):
        nonlocal seen
        if not is_traced(frame.f_code):
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise Interrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return function(), True
    except Interrupt:
        return None, False
    finally:
        sys.settrace(before)


class ClaimContract:
    """A subclass has a fixture `join`, which makes what one process has; each method gets that first.

    It has the methods ``claim(one, names, namespace)``, ``put(one, names)``, ``tally(one)``, and
    ``left(one)``, which says how many claims are held by anybody.
    """

    @pytest.fixture
    def two(self, join):
        return join(), join()

    def test_what_one_has_claimed_is_others_to_the_rest(self, two):
        first, second = two
        mine, theirs = self.claim(first, range(8)), self.claim(second, range(4, 12))
        assert mine.mine.tolist() == list(range(8)) and len(mine.others) == 0
        assert theirs.mine.tolist() == [4, 5, 6, 7] and theirs.others.tolist() == [0, 1, 2, 3]
        self.put(second, range(8, 12))
        self.put(first, range(8))
        mine.release()
        assert theirs.wait().tolist() == []
        assert theirs.appeared.tolist() == [0, 1, 2, 3] and theirs.others.tolist() == []
        assert (self.tally(second).waited, self.tally(second).taken_over) == (4, 0)
        theirs.release()
        mine.release()
        assert self.left(first) == 0

    def test_rows_that_have_appeared_since_are_decided_at_once(self, two):
        first, second = two
        self.put(first, range(4))
        theirs = self.claim(second, range(8))
        assert theirs.mine.tolist() == [4, 5, 6, 7] and theirs.others.tolist() == [0, 1, 2, 3]
        assert self.left(first) == 4
        assert theirs.wait().tolist() == [] and theirs.appeared.tolist() == [0, 1, 2, 3]
        assert self.left(first) == 0

    def test_a_claim_that_was_released_is_taken_over(self, two):
        first, second = two
        mine, theirs = self.claim(first, range(4)), self.claim(second, range(6))
        self.put(first, [0, 1])
        mine.release()
        assert theirs.wait().tolist() == [2, 3]
        assert theirs.appeared.tolist() == [0, 1] and theirs.others.tolist() == []
        assert (self.tally(second).waited, self.tally(second).taken_over) == (2, 2)
        again = self.claim(first, range(6))
        assert again.mine.tolist() == [4, 5] and again.others.tolist() == [0, 1, 2, 3]

    def test_one_of_those_that_wait_takes_over(self, join):
        first, *others = [join() for _ in range(4)]
        held, taken = self.claim(first, range(20)), []

        def work(one):
            claimed = self.claim(one, range(20))
            while len(claimed.others):
                left = claimed.wait().tolist()
                taken.extend(left)
                self.put(one, left)
            claimed.release()

        def release():
            time.sleep(0.02)
            self.put(first, range(5))
            held.release()

        run_at_once(release, *[functools.partial(work, one) for one in others])
        assert sorted(taken) == list(range(5, 20)) and self.left(first) == 0

    def test_nobody_waits_while_holding_a_claim(self, two):
        first, second = two
        one, other = self.claim(first, [0, 1]), self.claim(second, [2, 3])
        crossed = [
            in_thread(lambda: self.claim(first, [2, 3, 4])),
            in_thread(lambda: self.claim(second, [0, 1, 5])),
        ]
        assert [claim.mine.tolist() for claim in crossed] == [[2], [2]]
        one.release()
        other.release()
        # Each waits for the other's first claim, and gives up its own second one before.
        assert [sorted(claim.wait().tolist()) for claim in crossed] == [[0, 1], [0, 1]]

    def test_a_claim_that_nothing_refers_to_is_given_up_at_the_next_call(self, two):
        first, second = two
        self.claim(first, [1])
        again = self.claim(first, [2])
        assert self.claim(second, [1]).mine.tolist() == [0]
        again.release()

    def test_a_thread_that_holds_a_claim_computes_all_and_another_one_waits(self, join):
        one = join()
        outer = self.claim(one, [1, 2])
        inner = self.claim(one, [2, 3])
        assert inner.mine.tolist() == [0, 1] and len(inner.others) == 0
        other = in_thread(lambda: self.claim(one, [2, 3]))
        assert other.mine.tolist() == [1] and other.others.tolist() == [0]
        assert self.claim(one, [2], NAMESPACES[1]).mine.tolist() == [0]
        self.put(one, [1, 2])
        outer.release()
        assert in_thread(other.wait).tolist() == [] and other.appeared.tolist() == [0]
        assert self.claim(one, [2, 3]).mine.tolist() == [1]

    def test_claims_of_nothing(self, join):
        empty = self.claim(join(), [])
        assert empty.mine.tolist() == [] and empty.others.tolist() == []
        assert empty.wait().dtype == np.int64
        empty.release()
        empty.release()
