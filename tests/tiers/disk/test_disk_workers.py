"""What may wait in processes that are to end: no more than they can write in time, nor without the lock."""

import threading
import time

import pytest

from tests.helpers.storage import NEVER, Unsynced, keys_of, put, sealed_names
from torchcache2.tiers.disk.tier import DiskTier


class Slow(Unsynced):
    """A disk that writes so many bytes in a second."""

    def __init__(self, rate):
        self.rate = rate

    def write(self, file, buffers, offset):
        time.sleep(sum(map(len, buffers)) / self.rate)
        return super().write(file, buffers, offset)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [3e6, 3e7], ids=["slow", "faster"])
def test_no_more_waits_than_is_written_in_time(tmp_path, rate, monkeypatch):
    monkeypatch.setattr("torchcache2.tiers.writer.most_seconds", lambda: 0.3)
    tier = DiskTier(tmp_path, codec="none", delay=NEVER, fs=Slow(rate))
    waited = []
    for first in range(0, 90, 30):  # 2.4 MB, for which the slow one takes 0.8 s
        for name in range(first, first + 30):
            put(tier, [name], 20_000)
        waited.append(tier._index.writer.nbytes)
        tier.flush()
    assert max(waited[1:]) < 0.4 * rate, waited  # the first ones come before its speed is known
    assert max(waited) > 0.05 * rate or rate > 3e6
    tier.close()
    assert sealed_names(tmp_path, range(90), 20_000) == list(range(90))


def test_without_a_time_all_may_wait_that_the_queue_allows(tmp_path):
    tier = DiskTier(tmp_path, codec="none", delay=NEVER, fs=Slow(1e6), queue=10**9)
    for name in range(100):
        put(tier, [name], 20_000)
    writer = tier._index.writer
    assert writer.nbytes > 8_000_000 and writer.pace.limit == 10**9
    tier.drop(keys_of([]).namespace)
    tier.close()


class Collecting(Unsynced):
    """Calls a function in the thread that writes, as the garbage collector may."""

    def __init__(self):
        self.function = None

    def sync(self, file):
        function, self.function = self.function, None
        if function is not None and threading.current_thread().name == "torchcache2 writer":
            function()


def test_the_garbage_collector_may_close_it_in_the_thread_that_writes(tmp_path):
    fs, is_closed = Collecting(), threading.Event()
    tier = DiskTier(tmp_path, codec="none", queue=100, delay=NEVER, fs=fs, closed=is_closed.set)
    assert put(tier, range(3)) == 3  # which wait
    fs.function = tier.close
    threading.Thread(target=put, args=(tier, range(10, 30)), daemon=True).start()
    assert is_closed.wait(20.0)
    assert sealed_names(tmp_path, range(3)) == [0, 1, 2]
