"""`CacheLoader` in the workers of a `DataLoader`, on servers and on this machine."""

import json
import multiprocessing
import os
import pickle
import tempfile

import pytest

from tests.helpers import warm
from tests.helpers.gloo import run_ranks
from tests.helpers.ownserver import Place
from tests.helpers.redis import RedisServer
from torchcache2 import CacheLoader

SOAK = bool(os.environ.get("SOAK"))
PREAMBLE = """
import gc, json, os, pickle, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from tests.helpers.datasets import note, noted, same, sample_of
from torchcache2 import CacheLoader


class Read(Dataset):
    '''A dataset that asks a loader itself, as with Bagua.'''

    def __init__(self, loader, log, deadly=False):
        self.loader, self.log, self.deadly = loader, log, deadly

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.loader.get(index, self.load)

    def __getitems__(self, indices):
        return self.loader.get_many(indices, self.load)

    def load(self, index):
        if self.deadly and index == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        note(self.log, index)
        return sample_of(index, "coco")


def read(batches):
    '''Check the samples of an epoch.'''
    ids = []
    for batch in batches:
        for sample in batch:
            same(sample, sample_of(sample["image_id"], "coco"))
            ids.append(sample["image_id"])
    assert sorted(ids) == list(range(60)), ids


"""


@pytest.fixture
def options(request, tmp_path):
    """Options of a loader whose values all processes find, and later runs."""
    if request.param == "local":
        yield {"backend": "local", "memory_size": "10MB", "cache_dir": str(tmp_path / "cache")}
    else:
        with RedisServer() as server:
            yield {"hosts": server.url}


def run(script, *args):
    return warm.run(PREAMBLE + warm.dedented(script), *args)


EPOCHS = """
if __name__ == "__main__":
    log, method, persistent, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    loader = CacheLoader(key_prefix="p", **options)
    batches = DataLoader(
        Read(loader, log), 8, shuffle=True, num_workers=2 if method == "fork" else 1,
        persistent_workers=bool(persistent), collate_fn=list, multiprocessing_context=method,
    )
    for epoch in range(3):
        read(batches)
        time.sleep(0.05)  # a worker's last values are on their way to the server
        assert noted(log).total() == 60, (epoch, noted(log))
    stats = loader.stats()
    assert (stats.misses, stats.hits, stats.corrupt, stats.faults) == (60, 120, 0, 0), stats
    assert stats.remote_hits == (120 if "hosts" in options else 0)
    del batches
    gc.collect()
    assert loader.num_keys() == 60
    read([Read(loader, log).__getitems__(list(range(60)))])
    loader.close()
    with CacheLoader(key_prefix="p", **options) as again:
        read([Read(again, log).__getitems__(list(range(60)))])
    assert noted(log).total() == 60
"""


CASES = [("redis", "fork", 0), ("local", "fork", 1)]  # spawned workers are in test_redis_dataset.py
MORE = [
    (place, method, persistent)
    for place in ("redis", "local")
    for method, persistent in (("fork", 0), ("fork", 1), ("spawn", 1), ("forkserver", 0))
]


@pytest.mark.parametrize(("options", "method", "persistent"), MORE if SOAK else CASES, indirect=["options"])
def test_each_value_is_loaded_once(tmp_path, options, method, persistent):
    run(EPOCHS, tmp_path / "log", method, persistent, json.dumps(options))


def test_a_worker_whose_parent_was_killed_meanwhile_starts_no_server(monkeypatch):
    place = Place()
    monkeypatch.setattr(tempfile, "tempdir", str(place.path))
    try:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writing, pickle.dumps(CacheLoader("redis", "test")))
            finally:
                os._exit(0)
        os.wait()
        place.all_ended()
        data = os.read(reading, 1 << 16)
        # So `multiprocessing` marks a process that was spawned, until it has read what it is to do.
        monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pickle.loads(data) as loader:
            assert not place.folders and loader.get(3, str) == "3"
        os.close(reading)
        os.close(writing)
    finally:
        place.remove()


KILLED = """
if __name__ == "__main__":
    log, options = sys.argv[1], json.loads(sys.argv[2])
    loader = CacheLoader(key_prefix="p", **options)
    try:
        for batch in DataLoader(Read(loader, log, deadly=True), 5, num_workers=2, collate_fn=len):
            pass
        raise AssertionError("nobody was killed")
    except RuntimeError as error:
        assert "worker" in str(error), error
    gc.collect()
    loads = [noted(log).total()]
    for epoch in range(2):
        read(DataLoader(Read(loader, log), 5, num_workers=2, collate_fn=list))
        loads.append(noted(log).total())
    assert loads[0] < 60 and loads[1] < loads[0] + 60 and loads[2] == loads[1], loads
    assert loader.num_keys() == 60 or "cache_dir" in options  # the killed one had some in memory only
    assert (loader.stats().corrupt, loader.stats().faults) == (0, 0)
    loader.close()
"""


@pytest.mark.parametrize("options", ["redis", *["local"] * SOAK], indirect=True)
def test_a_worker_that_is_killed_breaks_nothing(tmp_path, options):
    run(KILLED, tmp_path / "log", json.dumps(options))


RANKS = """
import torch
from tests.helpers.datasets import Batched, noted, same, sample_of
from torchcache2 import CachedDataset, CacheLoader

join()
folder, = ARGUMENTS
cached = CachedDataset(Batched(40, "coco", folder + "/log"), backend="redis", capacity_per_node="50MB")
loader = CacheLoader("redis", "p", capacity_per_node="50MB")
for turn in range(2):
    for index in range(RANK + turn, 40, 2):
        same(cached[index], sample_of(index, "coco"))
        assert loader.get(index, {index: (turn, index)}.get) == (0, index)
    cached.flush()
    loader.flush()
    torch.distributed.barrier()
print(noted(folder + "/log").total(), loader.num_keys(), loader.stats().faults, len(cached.missing()))
torch.distributed.barrier()
loader.close()
cached.close()
"""


@pytest.mark.slow
def test_ranks_share_the_server_of_their_node(tmp_path):
    env = {"TORCHCACHE_JOB": str(tmp_path), "LOCAL_WORLD_SIZE": "2"}
    for rank in run_ranks(RANKS, tmp_path, tmp_path, env=env):
        assert rank.out == "40 40 0 0\n", rank.err
