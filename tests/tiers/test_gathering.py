"""`Gathering`, where it is more than a tier."""

import threading

from tests.helpers.storage import NEVER, Unsynced, put, sealed_names
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.gathering import Gathering


class Collecting(Unsynced):
    """Calls a function in the thread that writes, as the garbage collector may."""

    def __init__(self):
        self.function = None

    def sync(self, file):
        function, self.function = self.function, None
        if function is not None and threading.current_thread().name == "torchcache2 writer":
            function()


def test_the_garbage_collector_may_close_it_in_the_thread_that_writes(path):
    fs = Collecting()
    disk = DiskTier(path, codec="none", queue=100, delay=NEVER, fs=fs)
    tier, is_closed = Gathering(disk), threading.Event()
    disk._on_closed = is_closed.set
    assert put(tier, range(3)) == 3  # which wait
    fs.function = tier.close
    threading.Thread(target=put, args=(disk, range(10, 30)), daemon=True).start()
    assert is_closed.wait(20.0)
    assert sealed_names(path, range(3)) == [0, 1, 2]
