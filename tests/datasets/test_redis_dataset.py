"""`CachedDataset` and `CacheLoader` on real Redis servers, some of which fail."""

import gc
import os
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.helpers import warm
from tests.helpers.datasets import Batched, Counted, noted, same, sample_of
from tests.helpers.redis import PASSWORD, PROGRAMS, RedisServer, names
from tests.helpers.storage import NEVER, wait_until, warnings_of
from torchcache2 import CachedDataset, CacheLoader
from torchcache2.core.errors import OptionError

SOAK = bool(os.environ.get("SOAK"))
COUNT = 40


SOME = PROGRAMS if SOAK else PROGRAMS[:1]  # the suite of tiers runs on all of them


@pytest.fixture(scope="module", params=SOME, ids=names(SOME))
def running(request):
    with RedisServer(request.param) as server:
        yield server


@pytest.fixture
def server(running):
    """A server that is empty."""
    client = running.client()
    client.flushall()
    client.close()
    return running


def cached_on(server, dataset=None, **options):
    dataset = Batched(COUNT, "coco") if dataset is None else dataset
    return CachedDataset(dataset, backend="redis", hosts=server.url, **options)


def read(dataset, kind="coco"):
    for index, sample in enumerate(dataset.__getitems__(list(range(COUNT)))):
        same(sample, sample_of(index, kind))


def keys_on(server):
    client = server.client()
    found = client.dbsize()
    client.close()
    return found


def test_samples_are_found_by_a_later_run(server, tmp_path):
    log = tmp_path / "log"
    for turn in range(2):
        dataset = cached_on(server, Batched(COUNT, "coco", log))
        assert len(dataset.missing()) == (COUNT if turn == 0 else 0)
        read(dataset)
        read(dataset)
        stats = dataset.stats()
        assert (stats.misses, stats.remote_hits, stats.hits) == ((40, 40, 40), (0, 80, 80))[turn]
        assert (stats.remote_rows, stats.memory_rows, stats.disk_rows, stats.faults) == (COUNT, 0, 0, 0)
        assert f"{stats.hits} (" in str(stats) and f"{stats.remote_hits} remote" in str(stats)
        assert dataset.missing().tolist() == [] and dataset.cache_dir is None
        dataset.close()
    assert noted(log).total() == COUNT
    changed = cached_on(server, Batched(COUNT, "ragged"))
    assert len(changed.missing()) == COUNT
    assert "nothing to compare with" in changed.explain()
    changed.close()
    assert changed.explain().startswith("not cached: closed")


def test_memory_may_be_in_front(server):
    dataset = cached_on(server, memory_size="10MB")
    read(dataset)
    read(dataset)
    assert (dataset.stats().memory_hits, dataset.stats().remote_hits) == (COUNT, 0)
    dataset.close()
    dataset = cached_on(server, memory_size="10MB")
    read(dataset)
    read(dataset)
    assert (dataset.stats().memory_hits, dataset.stats().remote_hits) == (COUNT, COUNT)
    assert len(dataset.missing()) == 0
    client = server.client()
    client.flushall()
    client.close()
    assert len(dataset.missing()) == COUNT  # of others: this one has them in memory
    assert dataset.warmup().computed == 0 and len(dataset.missing()) == 0
    dataset.close()


def test_warmup_clear_flush_and_names(server):
    first, second = (cached_on(server, Batched(COUNT, kind), name=kind) for kind in ("coco", "ragged"))
    assert [one.warmup(num_workers=count).computed for one, count in ((first, 2), (second, 0))] == [COUNT] * 2
    assert keys_on(server) == 2 * COUNT
    first.clear()
    assert (len(first.missing()), len(second.missing()), keys_on(server)) == (COUNT, 0, COUNT)
    same(first[3], sample_of(3, "coco"))
    first.flush()
    assert keys_on(server) == COUNT + 1
    first.close(), second.close()
    other = cached_on(server, Batched(COUNT, "coco"), dataset_name="ragged", version=2)
    read(other)
    other.close()


def test_samples_are_compressed(server):
    sizes = []
    for codec in ("none", "brotli"):
        with CacheLoader("redis", codec, hosts=server.url, compression=codec) as loader:
            values = [loader.get(1, lambda key: np.zeros(100_000)) for _ in range(2)]
            same(values[0], values[1])
            loader.flush()
        client = server.client()
        sizes.append(max(client.strlen(key) for key in client.scan_iter()))
        client.flushall()
        client.close()
    assert sizes[0] > 800_000 and sizes[1] < 10_000


def test_a_dataset_that_cannot_be_read_needs_a_name(server, tmp_path):
    class Open(Counted):
        file = None

    unread = Open(COUNT, "coco")
    unread.file = (tmp_path / "file").open("w")
    with pytest.raises(OptionError, match=r"on the server are theirs: pass name= and version="):
        cached_on(server, unread)
    dataset = cached_on(server, unread, name="open")
    read(dataset)
    dataset.close()
    unread.file.close()


def test_loaders_and_datasets_on_one_server_never_meet(server):
    given = [{"key_prefix": "a"}, {"key_prefix": "a", "version": 1}, {"key_prefix": "a1"}]
    for turn in range(2):
        for number, some in enumerate(given):
            with CacheLoader(hosts=server.url, **some) as loader:
                value = loader.get(1, {1: number if turn == 0 else None}.get)
                assert value == number and loader.num_keys() == 1
    dataset = cached_on(server, [7, 8], name="a")
    assert (dataset[1], len(dataset.missing())) == (8, 1)
    dataset.close()
    client = server.client()
    client.set("torchcache2:hello", "world")
    client.close()
    with CacheLoader(hosts=server.url, key_prefix="a") as loader:
        assert loader.num_keys() == 1
        loader.clear()
        assert loader.num_keys() == 0
    assert keys_on(server) == len(given) + 1  # the dataset's, the stranger's


def test_get_many_is_one_round_trip(server):
    with CacheLoader("redis", "test", hosts=server.url) as loader:
        loader.get_many(range(300), str)
        loader.flush()
        client = server.client()
        before = client.info("stats")["total_commands_processed"]
        assert loader.get_many(range(300), str) == [str(key) for key in range(300)]
        assert client.info("stats")["total_commands_processed"] - before <= 3  # MGET, and these INFO
        client.close()


def test_values_are_sent_when_there_are_enough(server, monkeypatch):
    monkeypatch.setattr("torchcache2.tiers.writer.Pace.left", lambda *pending: NEVER)
    with CacheLoader("redis", "test", hosts=server.url, writer_buffer_size=3) as loader:
        loader.get_many([1, 2], str)
        assert loader.get(1, str) == "1" and keys_on(server) == 0
        loader.get(3, str)
        wait_until(lambda: keys_on(server) == 3)


def test_a_password_that_is_refused_is_an_error_at_once(server):
    wrong = server.url.replace(PASSWORD, "other-secret")
    for make in (
        lambda: CacheLoader("redis", "test", hosts=wrong),
        lambda: CachedDataset([1], backend="redis", hosts=wrong),
    ):
        with pytest.raises(OptionError, match="the Redis server unix:") as caught:
            make()
        assert "secret" not in str(caught.value)


def test_a_password_that_is_refused_later_is_a_fault(log):
    with RedisServer(PROGRAMS[0]) as server, CacheLoader("redis", "test", hosts=server.url) as loader:
        assert loader.get(1, str) == "1"
        pickled, client = pickle.dumps(loader), server.client()
        client.config_set("requirepass", "other")
        with pickle.loads(pickled) as worker:  # as a worker that is spawned
            assert [worker.get(1, str), worker.get(1, repr)] == ["1", "1"] and worker.stats().faults > 0
        client.config_set("requirepass", PASSWORD)
        with pickle.loads(pickled) as worker:
            loader.flush()
            assert worker.get(1, {}.get) == "1"
        client.close()
    assert all(PASSWORD not in record.getMessage() for record in log) and len(warnings_of(log)) == 1


def test_no_password_is_in_any_text(server, log, capfd, tmp_path):
    dataset, loader = cached_on(server), CacheLoader("redis", "test", hosts=[server.url])
    copies = [pickle.loads(pickle.dumps(one)) for one in (dataset, loader)]
    texts = []
    for one in (dataset, loader, *copies):
        texts += [repr(one), repr(one._recipe), str(one._recipe.options), str(one.stats())]
    for one in (dataset, copies[0]):
        read(one)
        texts.append(one.explain())
    loader.get(1, str)
    for one in (*copies, dataset, loader):
        one.close()
    texts += [record.getMessage() for record in log]
    texts += capfd.readouterr()
    assert all(PASSWORD not in text for text in texts)
    assert repr(loader) == f"<CacheLoader 'test' on {server.name}>"


def test_a_server_that_is_not_there_costs_a_warning(log):
    with RedisServer() as server:
        pass
    dataset = cached_on(server)
    read(dataset)
    read(dataset)
    dataset.flush()
    assert dataset.stats().misses == 2 * COUNT and dataset.stats().faults > 0
    assert dataset.missing().tolist() == list(range(COUNT))
    dataset.clear()
    dataset.close()
    with CacheLoader("redis", "test", hosts=server.url) as loader:
        assert [loader.get(1, str), loader.num_keys()] == ["1", 0]
    assert len(warnings_of(log)) == 2  # one for each
    assert all(PASSWORD not in record.getMessage() for record in log)


def test_nothing_is_started_if_the_cache_is_turned_off(monkeypatch):
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    loader = CacheLoader("redis", "test")
    assert repr(loader) == "<CacheLoader 'test' on no server>" and loader.get(1, str) == "1"
    assert CachedDataset([7], backend="redis")[0] == 7


def test_what_waits_in_workers_is_forgotten_by_clear(server, tmp_path):
    log = tmp_path / "log"
    dataset = cached_on(server, Batched(COUNT, "coco", log), writer_buffer_size=1000)
    loader = DataLoader(dataset, 5, num_workers=2, persistent_workers=True, collate_fn=list)
    for turn in range(2):
        for batch in loader:
            for sample in batch:
                same(sample, sample_of(sample["image_id"], "coco"))
        dataset.clear()
        assert len(dataset.missing()) == COUNT and noted(log).total() == COUNT * (turn + 1)
    del batch, loader
    gc.collect()  # the workers end, and write what waits
    assert keys_on(server) == 0
    dataset.close()


def test_hosts_have_a_share_each_and_a_lost_one_costs_its_own(log):
    with RedisServer() as one, RedisServer(port=True) as other:
        given = [one.url, {"host": "127.0.0.1", "port": str(other.port), "password": PASSWORD}]
        dataset = CachedDataset(Batched(COUNT, "coco"), backend="redis", hosts=given)
        read(dataset)
        dataset.flush()
        shares = keys_on(one), keys_on(other)
        assert sum(shares) == COUNT and min(shares) > 5
        same_one = CachedDataset(Batched(COUNT, "coco"), backend="redis", hosts=given[::-1])
        read(same_one)
        assert same_one.stats().misses == 0
        same_one.close()
        one.kill()
        read(dataset)
        assert dataset.stats().misses == COUNT + shares[0] and dataset.stats().remote_hits == shares[1]
        assert len(dataset.missing()) == shares[0]
        dataset.close()
        log.clear()
        with CacheLoader("redis", "test", hosts=given, cluster_mode=False) as loader:
            assert len(loader._recipe.settings.servers.servers) == 1


EPOCHS = """
import gc, os, sys, time
from torch.utils.data import DataLoader
from tests.helpers.datasets import Batched, noted, same, sample_of
from tests.helpers.redis import RedisServer
from torchcache2 import CachedDataset


def read(loader):
    ids = []
    for number, batch in enumerate(loader):
        for sample in batch:
            same(sample, sample_of(sample["image_id"], "coco"))
            ids.append(sample["image_id"])
        if number == 3 and happening:
            happening.pop()()
    assert sorted(ids) == list(range(60)), ids


happening = []
if __name__ == "__main__":
    log, method, persistent = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with RedisServer() as server:
        cached = CachedDataset(Batched(60, "coco", log), backend="redis", hosts=server.url)
        loader = DataLoader(
            cached, 5, shuffle=True, num_workers=2 if method == "fork" else 1, collate_fn=list,
            persistent_workers=bool(persistent), multiprocessing_context=method,
        )
        read(loader)
        while persistent and cached.missing().tolist():  # a worker's last samples are sent after a second
            time.sleep(0.05)
        read(loader)
        stats = cached.stats()
        assert noted(log).total() == stats.misses == stats.remote_hits == 60, (noted(log), stats)
        assert (stats.faults, stats.corrupt) == (0, 0)
        happening.append(server.kill)
        read(loader)
        assert noted(log).total() > 60 and not happening
        server.start()
        end = time.monotonic() + 20
        while True:
            before = noted(log).total()
            read(loader)
            if noted(log).total() == before:
                break
            assert time.monotonic() < end
            time.sleep(0.3)
        happening.append(lambda: (server.kill(), server.start()))
        read(loader)
        del loader
        gc.collect()
        cached.close()
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", 1), *[("fork", 0), ("spawn", 1), ("forkserver", 1)] * SOAK]
)
def test_a_server_that_is_killed_and_restarted_in_an_epoch_costs_loads_only(tmp_path, method, persistent):
    process = warm.run(EPOCHS, tmp_path / "log", method, persistent)
    assert process.err.count("WARNING") <= 3, process.err
    assert PASSWORD not in process.err


OWN = """
import gc, pickle, sys
from torch.utils.data import DataLoader, Dataset
from tests.helpers.datasets import Batched, note, noted, same, sample_of
from torchcache2 import CachedDataset, CacheLoader


class Both(Dataset):
    def __init__(self, cached, loader, log):
        self.cached, self.loader, self.log = cached, loader, log

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return index, self.cached[index], self.loader.get(f"key {index}", self.load)

    def load(self, key):
        note(self.log, key.split()[1])
        return key


if __name__ == "__main__":
    log, method = sys.argv[1:]
    cached = CachedDataset(Batched(60, "coco", log), backend="redis", capacity_per_node="50MB")
    loader = CacheLoader(key_prefix="p", capacity_per_node="50MB")
    assert loader._recipe.settings.servers.servers == cached._recipe.settings.servers.servers
    batches = DataLoader(
        Both(cached, loader, log), 5, num_workers=2 if method == "fork" else 1, collate_fn=list,
        multiprocessing_context=method, persistent_workers=True,
    )
    for epoch in range(2):
        for batch in batches:
            for index, sample, key in batch:
                same((sample, key), (sample_of(index, "coco"), f"key {index}"))
    assert noted(log).total() == 120 and cached.stats().remote_hits == loader.stats().remote_hits == 60
    pickle.dump((cached, loader), open(log + ".pickle", "wb"))
    del batches
    gc.collect()
    print(loader.num_keys(), len(cached.missing()), cached.stats().faults + loader.stats().faults)
"""

LATER = """
import pickle, sys
from tests.helpers.datasets import same, sample_of

if __name__ == "__main__":
    cached, loader = pickle.load(open(sys.argv[1] + ".pickle", "rb"))
    for _ in range(2):
        same(cached[7], sample_of(7, "coco"))
        assert loader.get(7, str) == "7"
    print(cached.stats().remote_hits, loader.stats().remote_hits, cached.stats().faults)
"""


@pytest.mark.parametrize("method", ["forkserver", *["fork", "spawn"] * SOAK])
def test_a_server_of_our_own(tmp_path, method):
    env = {"TMPDIR": str(tmp_path)}
    assert warm.run(OWN, tmp_path / "log", method, env=env, forks=True).out == "60 0 0\n"
    assert warm.run(LATER, tmp_path / "log", env=env).out == "1 1 0\n"  # it has started another one
