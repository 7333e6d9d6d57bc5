"""What fails is left alone for a while, tried again, and told once."""

import pytest

from torchcache2.tiers import breaker as breaker_module
from torchcache2.tiers.breaker import Breaker

PART, OTHER = b"part", b"other"


@pytest.fixture
def now(monkeypatch):
    times = [1000.0]
    monkeypatch.setattr(breaker_module.time, "monotonic", lambda: times[0])
    return times


def pause(breaker, now, part=PART):
    """Seconds until the next try."""
    start = now[0]
    while not breaker.allows(part):
        now[0] += 1
    return now[0] - start


def test_pauses_become_longer_until_something_works(now):
    breaker = Breaker()
    pauses = []
    for _ in range(8):
        breaker.failed(PART, is_lasting=False)
        assert breaker.allows(OTHER)
        pauses.append(pause(breaker, now))
    assert pauses == [0, 4, 8, 16, 32, 60, 60, 60]
    breaker.worked(PART)
    breaker.failed(PART, is_lasting=False)
    assert breaker.allows(PART)


def test_what_fails_for_days_is_still_left_alone(now):
    breaker = Breaker()
    for _ in range(3000):
        breaker.failed(PART, is_lasting=False)
    assert pause(breaker, now) == 60


def test_what_lasts_is_not_tried_again_at_once(now):
    breaker = Breaker()
    breaker.failed(PART, is_lasting=True)
    assert pause(breaker, now) == 2


def test_the_whole_is_all_its_parts(now):
    breaker = Breaker()
    breaker.pause()
    assert not breaker.allows(PART) and not breaker.allows(OTHER)
    assert pause(breaker, now) == 60
    assert breaker.allows(OTHER)


def test_each_kind_is_told_once(log):
    breaker = Breaker()
    for number in range(3):
        breaker.tell("one", "number %d", number)
        breaker.tell("another", "also %d", number)
    assert [record.getMessage() for record in log] == ["number 0", "also 0"]
