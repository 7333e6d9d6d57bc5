"""Batches that wait for whole segments to come down: when, how long, and never for nothing."""

import threading
import time

import pytest

from torchcache2.files.directory import MIRROR, CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.bucket.arrivals import Arrivals

UNIT = 1 << 18  # four of them are small


@pytest.fixture
def arrivals(tmp_path):
    made = Arrivals(CacheDirectory(str(tmp_path), FileSystem()), silence=0.5)
    made.took(8 * UNIT, 0.05)
    return made


def waited(arrivals, needed):
    begun = time.monotonic()
    arrivals.wait(needed)
    return time.monotonic() - begun


def test_nobody_waits_for_nothing(arrivals, tmp_path):
    needed = {str(tmp_path / "one"): 8 * UNIT}
    assert waited(arrivals, needed) < 0.15, "there is no mirror"
    (tmp_path / MIRROR).touch()
    small = {str(tmp_path / str(i)): UNIT for i in range(4)}
    assert waited(arrivals, small) < 0.15, "ranges are as good"
    (tmp_path / "one").touch()
    assert waited(arrivals, needed | small) < 0.15, "what is large is here"
    fresh = Arrivals(CacheDirectory(str(tmp_path), FileSystem()))
    fresh.took(UNIT, 10.0)
    assert waited(fresh, {"two": 8 * UNIT}) < 0.15, "the first large batch comes at once"


def test_a_batch_waits_in_proportion_and_until_nothing_comes(arrivals, tmp_path):
    (tmp_path / MIRROR).touch()
    assert 0.2 <= waited(arrivals, {"one": 8 * UNIT}) < 0.45, "four times as long as the last ranges took"
    arrivals.took(8 * UNIT, 10.0)
    (tmp_path / MIRROR).touch()
    assert 0.5 <= waited(arrivals, {"one": 8 * UNIT}) < 2.0, "the mirror is silent"
    assert waited(arrivals, {"one": 8 * UNIT}) < 0.15, "and was before"


def test_a_batch_goes_on_when_its_segments_are_here(arrivals, tmp_path):
    arrivals.took(8 * UNIT, 10.0)
    (tmp_path / MIRROR).touch()
    needed = {str(tmp_path / str(i)): 3 * UNIT for i in range(3)}

    def mirror():
        for i in range(2):  # the third one is small enough to come by ranges
            time.sleep(0.1)
            (tmp_path / str(i)).touch()
            (tmp_path / MIRROR).touch()

    thread = threading.Thread(target=mirror)
    thread.start()
    assert 0.2 <= waited(arrivals, needed) < 0.45
    thread.join()
