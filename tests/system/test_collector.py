"""The garbage collector may close a cache at any point: in the middle of a put, or of a segment."""

import threading

import pytest
import torch

from tests.helpers.storage import keys_of
from torchcache2.core.rows import Rows
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.disk.tier import DiskTier


def rows_of(*numbers):
    output = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 8)
    return Rows.from_pytree(output, len(numbers), device=torch.device("cpu"))


def count_found(tier, keys):
    return sum(len(positions) for positions, _ in tier.get(keys).parts)


class Interfering(FileSystem):
    """Does something to the tier whenever a file is synced."""

    def __init__(self):
        self.interfere = lambda: None

    def sync(self, file):
        self.interfere()
        super().sync(file)


def in_time(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["flush", "close"])
@pytest.mark.parametrize("where", ["whoever flushes", "the writer"])
def test_a_tier_is_flushed_or_closed_while_it_writes_a_segment(tmp_path, name, where):
    fs = Interfering()
    tier = DiskTier(tmp_path / "cache", codec="none", fs=fs, delay=0.0 if where == "the writer" else 1e9)
    called = threading.Event()

    def interfere():
        if not called.is_set():
            getattr(tier, name)()
            called.set()

    fs.interfere = interfere
    tier.put(keys_of([1, 2]), rows_of(1, 2))
    if where == "whoever flushes":
        in_time(tier.flush)
    assert called.wait(60)
    in_time(tier.close)
    reopened = DiskTier(tmp_path / "cache")
    assert count_found(reopened, keys_of([1, 2])) == 2
    reopened.close()
