"""`CachedDataset` in workers, ranks, and processes that are killed."""

import gc
import json
import os
import pickle
import random
import select
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.datasets import noted
from tests.helpers.gloo import run_ranks
from torchcache2.datasets.tally import DatasetStats, Tally

SOAK = bool(os.environ.get("SOAK"))
PREAMBLE = """
import copy, gc, glob, itertools, json, os, pickle, random, signal, sys, time
import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split
from tests.helpers.datasets import Batched, Counted, note, noted, same, sample_of
from torchcache2 import CachedDataset

sys.dont_write_bytecode = True  # that of a module which is written twice in a second is that of the first one


def read(loader, count, kind="coco"):
    '''All samples of an epoch, in the order in which they came; each is checked.'''
    ids = []
    for batch in loader:
        for sample in batch if isinstance(batch, list) else [batch]:
            same(sample, sample_of(sample["image_id"], kind))
            ids.append(sample["image_id"])
    assert sorted(ids) == list(range(count)), ids
    return ids


def left():
    '''What there is in the folder for temporary files.'''
    return [
        os.path.join(folder, name)
        for folder, _, names in os.walk(os.environ["TMPDIR"])
        for name in names
        if "torchcache2" in folder + name
    ]


"""


@pytest.fixture(autouse=True)
def temporary(tmp_path):
    """A folder for temporary files whose path is short, as that of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        (tmp_path / "tmp").symlink_to(folder)
        yield


def run(script, folder, *args, env=None, timeout=warm.DEADLINE, **options):
    """Run a script behind `PREAMBLE`; it finds no temporary files but its own."""
    env = {"TMPDIR": os.path.realpath(folder / "tmp"), **(env or {})}
    return warm.start(text_of(script), *args, env=env, **options).done(timeout=timeout)


def text_of(script):
    return warm.dedented(PREAMBLE) + warm.dedented(script)


EPOCHS = """
if __name__ == "__main__":
    folder, method, persistent, shuffle = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    levels = [
        {"memory_size": "10MB"},
        {"memory_size": "10MB", "cache_dir": folder + "/both"},
        {"memory_size": 0, "cache_dir": folder + "/disk"},
        {"memory_size": "33kB", "disk_size": "10MB"},
    ]
    if method != "fork":
        levels = levels[1:2]
    elif persistent and not os.environ.get("SOAK"):
        levels = levels[::3]
    for number, options in enumerate(levels):
        log = f"{folder}/log{number}"
        cached = CachedDataset(Batched(60, "coco", log), **options)
        loader = DataLoader(
            cached, 8, bool(shuffle), num_workers=2 if method == "fork" else 1,
            persistent_workers=bool(persistent), collate_fn=list, multiprocessing_context=method,
        )
        keeps = options["memory_size"] == "10MB" or not persistent  # else rows wait in other workers
        for epoch in range(1, 3):
            read(loader, 60)
            assert max(noted(log).values()) <= (1 if keeps else 2), (options, epoch, noted(log))
        stats = cached.stats()
        assert stats.misses == noted(log).total() and stats.hits == 120 - stats.misses
        assert (stats.corrupt, stats.faults, stats.bypasses) == (0, 0, {})
        del loader
        gc.collect()
        assert cached.missing().tolist() == []
        if "cache_dir" in options:
            cached.close()
            again = CachedDataset(Batched(60, "coco", log), **options)
            assert again.missing().tolist() == []
            read(again, 60)
            assert again.stats().misses == 0
            again.close()
        cached.close()
    print(left())
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("persistent", "shuffle"), [(0, 1), (1, 0)])
def test_each_sample_is_loaded_once(tmp_path, persistent, shuffle):
    assert run(EPOCHS, tmp_path, tmp_path, "fork", persistent, shuffle).out == "[]\n"


@pytest.mark.parametrize("method", ["forkserver", *["spawn"] * SOAK])
def test_workers_that_inherit_nothing_find_the_samples(tmp_path, method):
    assert run(EPOCHS, tmp_path, tmp_path, method, 1, 1, forks=True).out == "[]\n"


CLEARED = """
class Live(Dataset):
    '''Its samples change behind the same path.'''

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return int(open(self.path).read()), index


if __name__ == "__main__":
    folder = sys.argv[1]
    for number, memory in enumerate([0, "1MB"]):
        path = f"{folder}/{number}"
        for method in ("clear", "kill"):
            open(folder + "/value", "w").write("1")
            cached = CachedDataset(Live(folder + "/value"), path, memory_size=memory)
            loader = DataLoader(cached, 2, num_workers=2, persistent_workers=True, collate_fn=list)
            for epoch in range(2):
                assert {value for batch in loader for value, _ in batch} == {1}
            open(folder + "/value", "w").write("2")
            cached.clear()
            assert len(cached.missing()) == 20
            if method == "kill":
                for epoch in range(2):
                    assert {value for batch in loader for value, _ in batch} == {2}
            del loader
            gc.collect()
            cached.close()
            cached = CachedDataset(Live(folder + "/value"), path, memory_size=memory)
            assert {cached[index] for index in range(20)} == {(2, index) for index in range(20)}
            cached.clear()
            cached.close()
"""


@pytest.mark.slow
def test_clear_reaches_what_waits_in_workers(tmp_path):
    run(CLEARED, tmp_path, tmp_path)


RARE = """
class Rare(Dataset):
    '''It draws random numbers for a few samples only, and not for the first.'''

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return float(torch.rand(())) if index % 10 == 3 and index > 70 else float(index)


if __name__ == "__main__":
    folder = sys.argv[1]
    cached = CachedDataset(Rare(), folder + "/cache", memory_size="1MB")
    for epoch in range(2):
        for sample in DataLoader(cached, None, num_workers=2):
            pass
    assert cached.stats().bypasses["random"] > 700
    assert "random" in cached.explain()
    assert len(cached.missing()) == 400
    assert glob.glob(folder + "/cache/*/*.safetensors") == []
    cached.close()
    assert glob.glob(folder + "/cache/*/*.safetensors") == []
"""


def test_a_source_that_is_found_to_be_random_leaves_nothing_behind(tmp_path):
    process = run(RARE, tmp_path, tmp_path)
    assert 1 <= process.err.count("draws random numbers") <= 2


RANKS = """
from torch.utils.data import DataLoader, DistributedSampler
from tests.helpers.datasets import Batched, same, sample_of
from torchcache2 import CachedDataset

join()
folder, memory = ARGUMENTS
log = folder + "/log"
cached = CachedDataset(
    Batched(60, "coco", log), folder + "/cache", memory_size=memory
)
sampler = DistributedSampler(cached, WORLD, RANK, shuffle=True, drop_last=True)
loader = DataLoader(cached, 5, sampler=sampler, num_workers=2, collate_fn=list)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch in loader:
        for sample in batch:
            same(sample, sample_of(sample["image_id"], "coco"))
    torch.distributed.barrier()
    print(noted(log).total() if RANK == 0 else 0, end=" ")
    torch.distributed.barrier()
stats = cached.stats()
assert stats.hits + stats.misses == 120 and (stats.corrupt, stats.faults) == (0, 0), stats
print(stats.misses, len(cached.missing()))
torch.distributed.barrier()
cached.close()
"""


def test_ranks_and_their_workers_share_samples(tmp_path):
    script = "from tests.helpers.datasets import noted\n" + warm.dedented(RANKS)
    env = {"TORCHCACHE_JOB": str(tmp_path), "TMPDIR": os.path.realpath(tmp_path / "tmp")}
    first, second = run_ranks(script, tmp_path, tmp_path, "10MB", env=env)
    assert set(noted(tmp_path / "log").values()) == {1}
    assert first.words[:4] == ["60"] * 4 and [first.words[5], second.words[5]] == ["0", "0"]
    assert int(first.words[4]) + int(second.words[4]) == 60


KILLED_WORKER = """
class Deadly(Batched):
    '''Whoever loads sample 33 first is killed.'''

    def __getitem__(self, index):
        if index == 33 and not os.path.exists(self.log + "-killed"):
            note(self.log + "-killed", os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


if __name__ == "__main__":
    folder = sys.argv[1]
    for number, options in enumerate(
        [
            {"memory_size": "10MB"},
            {"memory_size": "10MB", "cache_dir": folder + "/both"},
            {"memory_size": 0, "cache_dir": folder + "/disk"},
            {"memory_size": "33kB", "disk_size": "10MB"},
        ]
    ):
        log = f"{folder}/log{number}"
        cached = CachedDataset(Deadly(60, "coco", log), **options)
        loader = DataLoader(cached, 5, num_workers=2, collate_fn=len)  # tensors of the dead cannot be opened
        try:
            for size in loader:
                assert size == 5
            raise AssertionError("nobody was killed")
        except RuntimeError as error:
            assert "worker" in str(error), error
        del loader
        gc.collect()
        before = noted(log).total()
        for epoch in range(2):
            read(DataLoader(cached, 5, num_workers=2, collate_fn=list), 60)
        loaded = noted(log).total() - before
        assert cached.missing().tolist() == [] or number == 1
        assert loaded <= (70 - before if number < 2 else 60), (number, before, loaded)  # two batches are lost
        assert (cached.stats().corrupt, cached.stats().faults) == (0, 0)
        cached.warmup()
        cached.close()
        if "cache_dir" in options:
            again = CachedDataset(Deadly(60, "coco", log), **options)
            assert again.missing().tolist() == []
            read(again, 60)
            again.close()
    print(left())
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_breaks_nothing(tmp_path):
    assert run(KILLED_WORKER, tmp_path, tmp_path).out == "[]\n"


KILLED_MAIN = """
class Slow(Batched):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


if __name__ == "__main__":
    folder, what, levels = sys.argv[1:]
    log = folder + "/log"
    cached = CachedDataset(Slow(600, "coco", log), **json.loads(levels))
    if what == "first":
        print("there", flush=True)
        loader = DataLoader(cached, 5, num_workers=2, collate_fn=list)
        for epoch in itertools.count():
            for batch in loader:
                print(len(batch), flush=True)
    known = 600 - len(cached.missing())
    for index in range(0, 600, 2):
        same(cached[index], sample_of(index, "coco"))
    assert (cached.stats().corrupt, cached.stats().faults) == (0, 0)
    cached.close()
    print(known, left())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "levels",
    [
        {"memory_size": "100kB", "disk_size": "10MB"},
        {"memory_size": "10MB", "cache_dir": "cache"},
    ],
    ids=["temporary", "lasting"],
)
def test_a_main_process_that_is_killed_leaves_nothing(tmp_path, levels):
    if "cache_dir" in levels:
        levels = levels | {"cache_dir": str(tmp_path / "cache")}
    options = {"env": {"TMPDIR": os.path.realpath(tmp_path / "tmp")}}
    arguments = [tmp_path, "first", json.dumps(levels)]
    process = warm.start(text_of(KILLED_MAIN), *arguments, **options).until("5\n5\n5\n5\n5\n5\n5\n5\n")
    workers = {os.pidfd_open(worker): worker for worker in children_of(process.pid)}
    assert len(workers) == 2
    process.send(signal.SIGKILL)
    process.wait()
    for end, worker in workers.items():  # as when the machine has no memory left
        os.kill(worker, signal.SIGKILL)
        assert select.select([end], [], [], 30)[0], "a worker that was killed has not ended"
        os.close(end)
    again = run(KILLED_MAIN, tmp_path, tmp_path, "again", json.dumps(levels))
    assert again.out.endswith(" []\n"), again.out


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


MODULE = """
import torch
from torch.utils.data import Dataset

SHIFT = 0


def helper(x):
    return x * 2 + SHIFT


class Scaled(Dataset):
    def __init__(self, transform=None, data=(1.0, 2.0, 3.0), length=3, files=("a.jpg", "b.jpg", "c.jpg")):
        self.transform, self.data = transform, torch.tensor(data)
        self.length, self.files = length, list(files)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = helper(self.data[index])
        return self.files[index], x if self.transform is None else self.transform(x)


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor
"""

ANOTHER = """
if __name__ == "__main__":
    folder, options, cached_options, how = sys.argv[1:]
    sys.path.insert(0, folder)
    import scaled

    options, more = json.loads(options), json.loads(cached_options)
    if "factor" in options:
        options["transform"] = scaled.Times(options.pop("factor"))
    if how == "load":
        cached = pickle.load(open(folder + "/pickle", "rb"))
        plain = cached._recipe.dataset
    else:
        plain = scaled.Scaled(**options)
        cached = CachedDataset(plain, folder + "/cache", memory_size="1MB", **more)
    for index in range(len(plain)):
        same(cached[index], plain[index])
        same(cached[index], plain[index])
    if how == "dump":
        pickle.dump(cached, open(folder + "/pickle", "wb"))
    stats = cached.stats()
    cached.close()
    print(stats.disk_hits, stats.misses)
"""


@pytest.mark.slow
def test_what_samples_depend_on_decides_whether_they_are_found(tmp_path):
    module = tmp_path / "scaled.py"
    module.write_text(warm.dedented(MODULE))

    def found(options, how="", seed="random", **more):
        process = run(ANOTHER, tmp_path, tmp_path, json.dumps(options), json.dumps(more), how, seed=seed)
        return tuple(map(int, process.words))

    usual = {"factor": 3}
    assert found(usual, "dump") == (0, 3)
    assert found(usual) == (3, 0)
    assert found(usual, "load") == (3, 0)
    for other in (
        {"factor": 4},
        {"factor": 3, "data": [1.0, 2.0, 4.0]},
        {"factor": 3, "length": 2},
        {"factor": 3, "files": ["a.jpg", "b.jpg", "d.jpg"]},
        {},
    ):
        assert found(other) == (0, other.get("length", 3)), other
    assert found(usual, version=2) == (0, 3)
    assert found(usual, name="scaled") == (0, 3)
    for old, new in (("x * 2", "x * 5"), ("SHIFT = 0", "SHIFT = 1"), ("x * self.factor", "x - self.factor")):
        module.write_text(module.read_text().replace(old, new))
        assert found(usual, "load") == (0, 3), (old, new)  # a pickle of a run with other code
        assert found(usual) == (3, 0)
    assert found(usual, name="scaled", version=3) == (0, 3)


def test_processes_count_together_whatever_files_are_closed():
    tally, pid, many = Tally(), os.getpid(), 20_000
    tally.add(misses=1)
    other = pickle.loads(pickle.dumps(tally))  # opens the file
    other.add(misses=1)
    del other
    gc.collect()  # and closes it
    children = []
    for number in (1, 2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                os.getpid = lambda number=number: pid + 1024 * number  # takes the parent's row if it may
                for _ in range(many):
                    tally.add(misses=1)
                os._exit(0)
            finally:
                os._exit(1)
    for _ in range(many):
        tally.add(misses=1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert tally.total()["misses"] == 2 + 3 * many


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["leaves", "is killed", "stays"])
def test_who_drops_waits_for_who_writes(monkeypatch, ends):
    monkeypatch.setattr("torchcache2.datasets.tally._PATIENCE", 3.0 if ends == "stays" else 60.0)
    tally = Tally()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            opening = pickle.loads(pickle.dumps(tally))
            with opening.publishing(), tally.publishing():  # several may at once
                os.write(there, b"1")
                while opening.drops == 0 or ends != "leaves":
                    time.sleep(0.01)
                time.sleep(0.5)
                opening.add(misses=1)  # the last that it writes
            os._exit(0)
        finally:
            os._exit(1)
    os.read(here, 1)
    if ends == "is killed":
        threading.Timer(0.5, os.kill, (child, signal.SIGKILL)).start()
    began = time.monotonic()
    tally.dropped()
    took = time.monotonic() - began
    assert (3 if ends == "stays" else 0.4) < took < 30
    assert tally.total()["misses"] == (ends == "leaves")
    if ends == "stays":
        os.kill(child, signal.SIGKILL)
    assert (os.waitpid(child, 0)[1] == 0) == (ends == "leaves")
    os.close(here)
    os.close(there)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({"memory_hits": 1234}, "hits      1,234 (99.9%)"),
        ({"memory_hits": 3, "disk_hits": 2}, "hits      5 (83.3%): 3 in memory, 2 on disk"),
        ({"remote_hits": 4}, "hits      4 (80.0%): 0 in memory, 4 remote"),
        (
            {"memory_hits": 1, "disk_hits": 2000, "remote_hits": 3},
            "hits      2,004 (100.0%): 1 in memory, 2,000 on disk, 3 remote",
        ),
    ],
)
def test_stats_print_where_samples_were_found(counts, line):
    tally = Tally()
    tally.add(**counts, misses=1)
    assert str(DatasetStats.of(tally, {})).splitlines()[0] == line


STORM = """
import traceback

def work(cached, seed, kind):
    chance = np.random.default_rng(seed)
    code = 1
    try:
        while True:
            indices = chance.integers(-60, 60, 7).tolist()
            if chance.random() < 0.5:
                samples = cached.__getitems__(indices)
            else:
                samples = [cached[index] for index in indices]
            for index, sample in zip(indices, samples, strict=True):
                same(sample, sample_of(index % 60, kind))
            what = chance.random()
            if what < 0.01:
                cached.clear()
            elif what < 0.02:
                cached.flush()
            elif what < 0.03:
                cached.missing()
            elif what < 0.032:
                code = 0
                break
    except BaseException:
        traceback.print_exc()
    cached.close()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    folder, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
    chance = random.Random(sys.argv[3])
    for turn in itertools.count():
        kind = chance.choice(["dict", "coco", "ragged"])
        options = {
            "cache_dir": chance.choice([None, f"{folder}/{turn}"]),
            "memory_size": chance.choice([0, "33kB", "100kB", "10MB"]),
            "disk_size": chance.choice([20_000, "1MB"]),
            "policy": chance.choice(["keep", "lru"]),
            "verify": chance.choice([0.0, 0.0, 0.1]),
        }
        cached = CachedDataset(chance.choice([Batched, Counted])(60, kind), **options)
        children = []
        stop = min(end, time.monotonic() + 1.0)
        while time.monotonic() < stop:
            pid = os.fork()
            if pid == 0:
                work(cached, len(children) + 1000 * turn + chance.randrange(10**6), kind)
            children.append(pid)
            if len(children) > 3:
                victim = children.pop(chance.randrange(4))
                if chance.random() < 0.5:
                    os.kill(victim, signal.SIGKILL)
                else:
                    os.kill(victim, signal.SIGTERM)
                code = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
                assert code in (0, -signal.SIGKILL, -signal.SIGTERM), (code, options)
            for index in chance.sample(range(60), 5):
                same(cached[index], sample_of(index, kind))
            time.sleep(chance.random() * 0.05)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for index, sample in enumerate(cached.__getitems__(list(range(60)))):
            same(sample, sample_of(index, kind))
        stats = cached.stats()
        assert (stats.corrupt, stats.faults, stats.mismatched) == (0, 0, 0), (options, stats)
        cached.close()
        again = CachedDataset(Batched(60, kind), **options)
        for index, sample in enumerate(again.__getitems__(list(range(60)))):
            same(sample, sample_of(index, kind))
        assert (again.stats().corrupt, again.stats().faults) == (0, 0)
        again.close()
        if time.monotonic() > end:
            break
    print(left())
"""


@pytest.mark.slow
def test_processes_that_come_and_go_and_are_killed_read_right_samples(tmp_path):
    seconds = 300 if SOAK else 1
    seed = str(random.random()) if SOAK else "1"
    assert run(STORM, tmp_path, tmp_path, seconds, seed, timeout=seconds + 60).out == "[]\n", seed


PERSISTENT = """
if __name__ == "__main__":
    source = Counted(200, "coco", log=sys.argv[1])
    dataset = CachedDataset(source, memory_size=0, disk_size="100MB")
    loader = DataLoader(dataset, 20, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=list)
    loads = []
    for _ in range(3):
        read(loader, 200)
        loads.append(len(noted(sys.argv[1])))
        while len(dataset.missing()):  # training takes longer than loading
            time.sleep(0.02)
    print(json.dumps(loads))
    dataset.close()
"""


def test_what_waits_in_persistent_workers_is_written_when_it_is_asked_for(tmp_path):
    process = run(PERSISTENT, tmp_path, tmp_path / "log")
    assert process.out == "[200, 200, 200]\n", (process.out, process.err)


LARGE = """
class Scans(Counted):
    def __getitem__(self, index):
        scan = torch.full((100, 200), index, dtype=torch.int16)
        return scan, torch.full((9000,), index, dtype=torch.bfloat16)


def edited(samples):
    '''Samples as a worker has them: each has a storage of its own, and is edited in place.'''
    tensors = [tensor for sample in samples for tensor in sample]
    values = [tensor.flatten()[0].item() for tensor in tensors]
    for number, tensor in enumerate(tensors):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
        assert (tensor == values[number]).all()
        tensor.fill_(-1 - number)
    for number, tensor in enumerate(tensors):
        assert (tensor == -1 - number).all()
    return values[::2]


if __name__ == "__main__":
    dataset = CachedDataset(Scans(40), memory_size="10MB")
    kept = []
    for _ in range(3):
        for values in DataLoader(dataset, 8, num_workers=1, collate_fn=edited):
            kept += values
    assert kept == [*range(40)] * 3 and dataset.stats().hits == 80, dataset.stats()
    for batch in DataLoader(dataset, 8, num_workers=1, collate_fn=list):  # sent as they are
        kept += [sample[0][3, 4].item() for sample in batch]
    assert kept[120:] == [*range(40)]
    dataset.close()
"""


def test_large_samples_of_workers_have_storages_of_their_own(tmp_path):
    process = run(LARGE, tmp_path)
    assert process.err == ""
