"""What the workers of a `DataLoader` do with tiers; they import it by its name."""

import os
import signal

from torch.utils.data import Dataset

from tests.helpers.storage import NEVER, found, put
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.meeting import Scratch
from torchcache2.tiers.shared.tier import SharedTier


class Sharing(Dataset):
    """Items 0, 1, …: an item is which of all names were there before it was put, and the worker's pid.

    A handle, as datasets have: a forked worker inherits the tier, and another one makes its own.
    """

    def __init__(self, job, folder, count, killed=()):
        self.state = job, folder, count, killed
        self.tier = SharedTier(job, 10**7, folder=folder)

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.__init__(*state)

    def __len__(self):
        return self.state[2]

    def __getitem__(self, name):
        here = found(self.tier, range(len(self)))
        put(self.tier, [name])
        if name in self.state[3]:
            os.kill(os.getpid(), signal.SIGKILL)
        return here, os.getpid()


class Spilling(Dataset):
    """Items 0, 1, …, which are put to a temporary folder that the job's processes share."""

    def __init__(self, job, count, is_worker=False):
        self.state, scratch = (job, count), Scratch(job)
        options = {"temporary": not is_worker, "closed": scratch.remove, "delay": NEVER}
        self.tier = DiskTier(scratch.path, codec="none", **options)

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.__init__(*state, is_worker=True)

    def __len__(self):
        return self.state[1]

    def __getitem__(self, name):
        assert put(self.tier, [name]) == 1
        return name
