"""What fails is left alone for a while, and tried again."""

import time

import pytest

from torchcache2.tiers.base import Breaker


@pytest.fixture
def now(monkeypatch):
    times = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[0])
    return times


def pause(breaker, now):
    """Seconds until the next try."""
    start = now[0]
    while not breaker.allows():
        now[0] += 1
    return now[0] - start


@pytest.mark.parametrize(("is_spared", "first"), [(True, 0), (False, 2)])
def test_pauses_become_longer_until_something_works(now, is_spared, first):
    breaker = Breaker()
    pauses = []
    for _ in range(8):
        breaker.failed(is_spared=is_spared)
        pauses.append(pause(breaker, now))
    assert pauses == [first, 4, 8, 16, 32, 60, 60, 60]
    breaker.worked()
    breaker.failed(is_spared=is_spared)
    assert pause(breaker, now) == first


def test_what_fails_for_days_is_still_left_alone(now):
    breaker = Breaker()
    for _ in range(3000):
        breaker.failed()
    assert pause(breaker, now) == 60


def test_a_pause_can_be_asked_for(now):
    breaker = Breaker()
    breaker.pause()
    assert pause(breaker, now) == 60 and breaker.failures == 0
