"""`CachedDataset(None, path)`: samples that are served without the dataset that they come from."""

import contextlib
import copy
import importlib
import json
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers import warm
from tests.helpers.datasets import Batched, Counted, same, sample_of
from tests.helpers.storage import segments, warnings_of
from torchcache2 import CachedDataset, CacheLoader, LazyShardDataset, MissingSampleError, OptionError
from torchcache2.cli.commands import run as commanded
from torchcache2.core.errors import NotCachedError
from torchcache2.datasets.served import ranges_text
from torchcache2.files.filesystem import FileSystem

SOAK = bool(os.environ.get("SOAK"))
COUNT = 60
CHANGES = ("create", "write", "rename", "link", "remove", "make_folder", "remove_folder", "touch", "sync")


def fill(path, count=COUNT, kind="dict", some=None, **options):
    """A folder with the samples of a dataset, or `some` of them; each batch of 20 is a segment."""
    with contextlib.closing(CachedDataset(Batched(count, kind), path, memory_size=0, **options)) as cached:
        indices = np.arange(count) if some is None else np.array(some)
        for start in range(0, len(indices), 20):
            cached.__getitems__(indices[start : start + 20].tolist())
            cached.flush()
    return path


@contextlib.contextmanager
def served(path, kind=None, count=COUNT, *, memory=0, **options):
    """What is served; all of it is checked if the `kind` of the samples is given."""
    with contextlib.closing(CachedDataset(None, path, memory_size=memory, **options)) as cached:
        if kind is not None:
            assert len(cached) == count and cached.missing().tolist() == []
            for index, sample in enumerate(cached.__getitems__(list(range(count)))):
                same(sample, sample_of(index, kind))
        yield cached


def state(path):
    """Names, sizes and times of everything in a folder."""
    return {
        os.path.join(folder, name): (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        for folder, folders, files in os.walk(path)
        for name in [*folders, *files, "."]
        if (stat := os.stat(os.path.join(folder, name)))
    }


def error_of(*args, kind=MissingSampleError, **options):
    """What the error says that `CachedDataset(None, …)` raises."""
    with pytest.raises(kind) as caught:
        CachedDataset(None, *args, memory_size=0, **options).close()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["dict", "large", *["coco", "tensor", "ragged"] * SOAK])
def test_it_serves_what_the_dataset_gave(path, kind):
    fill(path, kind=kind)
    for memory in (0, "1MB"):
        with served(path, kind, memory=memory) as cached:
            for _ in range(2):
                for index, sample in enumerate(cached):  # an IndexError ends this
                    same(sample, sample_of(index, kind))
            for index in (-1, np.int64(7), torch.tensor(-COUNT)):
                same(cached[index], sample_of(int(index) % COUNT, kind))
            stats = cached.stats()
            assert stats.misses == stats.faults == stats.corrupt == 0 and not stats.bypasses
            assert stats.hits == 3 * COUNT + 3
            assert bool(stats.memory_hits) == bool(memory) and stats.disk_hits >= COUNT
            with pytest.raises(IndexError, match=f"index {COUNT} of {COUNT} samples"):
                cached[COUNT]
            with pytest.raises(TypeError, match="one int, str or bytes"):
                cached[[1, 2]]


def test_nothing_in_the_folder_changes(path, monkeypatch, log):
    fill(path)
    leftover = path / segments(path)[0].parent.name / (segments(path)[0].name + ".tmp")
    leftover.write_bytes(b"of a writer that was killed")
    (path / "CACHEDIR.TAG").unlink()
    old = time.time() - 1000
    for file in segments(path):
        os.utime(file, (old, old))
    before = state(path)
    for name in CHANGES:
        monkeypatch.setattr(FileSystem, name, lambda *args, name=name, **options: pytest.fail(name))
    with served(path, "dict", memory="1MB") as cached:
        cached.warmup()
        cached.flush()
        cached.stats()
        copy.copy(cached)
    assert state(path) == before and warnings_of(log) == []


UNPRIVILEGED = """
import os, sys
from torchcache2 import CachedDataset

if os.getuid() == 0:  # whom no right of a file stops
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    open(sys.argv[1] + "/file", "w")
except PermissionError:
    served = CachedDataset(None, sys.argv[1], memory_size="1MB")
    print(len(served), len(list(served)), served.stats().faults, served.missing().tolist())
    served.close()
"""


def test_a_folder_that_nobody_may_write_to():
    with tempfile.TemporaryDirectory() as top:
        path = fill(os.path.join(top, "cache"))
        folders = [top, *[os.path.join(folder, name) for folder, names, _ in os.walk(top) for name in names]]
        try:
            for folder in folders:
                os.chmod(folder, 0o555)
            process = warm.run(UNPRIVILEGED, path)
            assert (process.out, process.err) == (f"{COUNT} {COUNT} 0 []\n", "")
        finally:
            for folder in folders:
                os.chmod(folder, 0o755)


@pytest.mark.parametrize("how", ["copy", "tar"])
def test_a_folder_may_be_carried_elsewhere(path, tmp_path, how):
    fill(path, name="carried", version=3)
    there = tmp_path / "there" / "samples"
    there.parent.mkdir()
    if how == "copy":
        shutil.copytree(path, there)
    else:
        with tarfile.open(tmp_path / "samples.tar", "w") as tar:
            tar.add(path, "samples")
        with tarfile.open(tmp_path / "samples.tar") as tar:
            tar.extractall(there.parent, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    shutil.rmtree(path)
    with served(there, "dict") as cached:
        assert repr(cached).startswith("<CachedDataset carried ")
        assert str(there) in cached.explain() and "Batched" in cached.explain()
        assert cached.cache_dir == there
        assert "closed" not in cached.explain()
    assert "closed" in cached.explain() and cached.cache_dir is None


ELSEWHERE = """
import sys
import numpy as np, torch
from torch.utils.data import DataLoader
from torchcache2 import CachedDataset

def same(index, sample):
    assert type(sample) is torch.Tensor and sample.dtype == torch.float64
    assert sample.numpy().tobytes() == np.random.default_rng(index).standard_normal(8).tobytes()
    return True

if __name__ == "__main__":
    path, methods = sys.argv[1], sys.argv[2:]
    served = CachedDataset(None, path, memory_size="1MB")
    assert all(same(index, served[index]) for index in range(len(served)))
    for method in methods:
        torch.manual_seed(0)
        order = torch.randperm(len(served)).tolist()
        loader = DataLoader(
            served, 8, sampler=order, num_workers=2 if method == "fork" else 1, collate_fn=list,
            multiprocessing_context=method,
        )
        samples = [sample for batch in loader for sample in batch]
        assert len(samples) == len(order) and all(map(same, order, samples))
    stats = served.stats()
    assert stats.misses == stats.faults == 0 and stats.hits == len(served) * (1 + len(methods))
    assert not [name for name in sys.modules if name.startswith("tests.helpers.datasets")]
    served.close()
    print(len(served))
"""


def test_workers_serve_it_without_the_module_of_the_dataset(path):
    fill(path, kind="tensor")
    before = state(path)
    methods = ["fork", "forkserver", *["spawn"] * SOAK]
    assert warm.run(ELSEWHERE, path, *methods, forks=True).out == f"{COUNT}\n"
    assert state(path) == before


def test_which_dataset_of_a_folder_is_meant(path):
    fill(path, name="first", version=1)
    with served(path, "dict"):
        pass
    fill(path, name="first", version="two", kind="coco")
    fill(path, 40, "tensor")
    text = error_of(path, kind=OptionError)
    (third,) = [line for line in text.splitlines() if "no name" in line]
    assert text.count("name='first'") == 2 and "version='1': 60 samples, " in text and "kB" in text
    assert "class tests.helpers.datasets.Batched: 40 samples, " in third
    assert "3 datasets: pass the name=" in text
    assert "2 datasets of name='first'" in error_of(path, name="first", kind=OptionError)
    assert "no dataset of name='fir'" in error_of(path, name="fir", kind=OptionError)
    assert "no dataset of name='first' of version=3" in error_of(
        path, name="first", version=3, kind=OptionError
    )
    for options, kind, count in [
        ({"name": "first", "version": 1}, "dict", 60),
        ({"version": "two"}, "coco", 60),
        ({"name": "Batched"}, "tensor", 40),
        ({"name": "tests.helpers.datasets.Batched"}, "tensor", 40),
        ({"name": third.split(":")[0].strip()}, "tensor", 40),
    ]:
        if options.get("name") != "Batched" and "." not in options.get("name", ""):
            with served(path, kind, count, **options):
                pass


def test_a_class_is_a_name_too(path):
    fill(path, name="first")
    with CacheLoader("local", "loader", cache_dir=path, memory_size=0) as loader:
        loader.get(1, str)
    with contextlib.closing(CachedDataset(Texts(), path, memory_size=0)) as cached:
        cached.warmup()
    for name in ("Texts", f"{__name__}.Texts"):
        with served(path, name=name) as cached:
            assert list(cached) == ["0", "1"]


class Texts(Counted):
    def __init__(self):
        super().__init__(2)

    def __getitem__(self, index):
        return str(index)


def test_folders_without_a_dataset_say_what_is_there(path, tmp_path):
    assert "does not exist" in error_of(path, kind=OptionError)
    path.mkdir()
    with CacheLoader("local", "loader", cache_dir=path, memory_size=0) as loader:
        loader.get(1, str)
    assert "has no samples of a dataset; `torchcache2 ls` says" in error_of(path, kind=OptionError)
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(tmp_path / "file", kind=OptionError)
    (path / "CACHEDIR.TAG").write_text("# This folder is a cache of torchcache2, format 9. ")
    assert "Upgrade torchcache2" in error_of(path, kind=OptionError)
    (path / "CACHEDIR.TAG").unlink()
    (path / "holiday.jpg").write_text("")
    assert "holiday.jpg" in error_of(path, kind=OptionError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give it as cache_dir="),
        ({"cache_dir": "x", "verify": 0.5}, "verify=0.5 loads samples again"),
        ({"backend": "redis", "cache_dir": "x"}, "a server cannot list"),
        ({"cache_dir": "x", "partial": 1}, "partial=1: expected True or False"),
        ({"cache_dir": "x", "name": 7}, "name=7: expected a text"),
        ({"cache_dir": "x", "nmae": 1}, "no option 'nmae'"),
        ({"dataset": [1], "partial": True}, "partial=True is only for samples without their dataset"),
    ],
    ids=["nowhere", "verify", "redis", "partial", "name", "unknown", "with a dataset"],
)
def test_options_that_need_a_dataset(options, text):
    with pytest.raises(OptionError, match=text):
        CachedDataset(**{"dataset": None, **options})


def test_a_folder_that_is_half_filled(path):
    some = [*range(3, 10), 12, *range(40, 60)]
    fill(path, some=some)
    text = error_of(path)
    assert "32 of 60 samples are not there: 0–2, 10–11, 13–39. Fill it" in text
    assert f"Batched in {path}: " in text and "partial=True" in text and "warmup()" in text
    with served(path, partial=True) as cached:
        assert cached.missing().tolist() == sorted(set(range(60)) - set(some))
        for index, sample in zip(some, cached.__getitems__(some), strict=True):
            same(sample, sample_of(index, "dict"))
        with pytest.raises(MissingSampleError, match=r"sample 11 of Batched in .* is missing.*warmup\(\)"):
            cached.__getitems__([3, 4, 11])
        with pytest.raises(MissingSampleError, match="32 of 60 samples are not there: 0–2, "):
            cached.warmup()
        with pytest.raises(MissingSampleError, match="sample 0 of"):
            list(cached)  # no IndexError, which would end this with fewer samples
        with pytest.raises(MissingSampleError, match="sample 0 of"):
            list(DataLoader(cached, 2))
        stats = cached.stats()
        assert (stats.hits, stats.misses) == (len(some), 0)
    assert issubclass(MissingSampleError, LookupError) and not issubclass(MissingSampleError, IndexError)


def test_ranges():
    for numbers, text in [
        ([5], "5"),
        ([0, 1, 2], "0–2"),
        ([0, 2, 3, 9], "0, 2–3, 9"),
        ([0, 2, 4, 6, 8], "0, 2, 4, 6, 8"),
        ([0, 2, 4, 6, 8, 10, 11], "0, 2, 4, 6, 8, …"),
    ]:
        assert ranges_text(np.array(numbers)) == text


def test_beside_a_writer(path):
    writer = CachedDataset(Batched(COUNT), path, memory_size=0)
    writer.__getitems__(list(range(20)))
    writer.flush()
    with served(path, partial=True, memory="1MB") as cached:
        same(cached[19], sample_of(19, "dict"))
        with pytest.raises(MissingSampleError):
            cached[20]
        writer.__getitems__(list(range(20, COUNT)))
        writer.flush()
        for index, sample in enumerate(cached):  # at once, although it looked for new files just now
            same(sample, sample_of(index, "dict"))
        assert cached.missing().tolist() == []
    writer.close()


def test_a_damaged_row_costs_no_other(path, log):
    fill(path, kind="tensor", compression="none")
    file = segments(path)[1]  # samples 20 to 39
    data = bytearray(file.read_bytes())
    place = bytes(data).index(sample_of(25, "tensor").numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    before = state(path)
    with served(path) as cached:
        assert len(cached) == COUNT and cached.missing().tolist() == []
        for _ in range(2):
            rest = [i for i in range(COUNT) if i != 25]
            for index, sample in zip(rest, cached.__getitems__(rest), strict=True):
                same(sample, sample_of(index, "tensor"))
            with pytest.raises(MissingSampleError, match=r"sample 25 of Batched in .* or damaged"):
                cached.__getitems__([24, 25, 26])
            for index, sample in zip((24, 26), (cached[24], cached[26]), strict=True):
                same(sample, sample_of(index, "tensor"))
        assert cached.stats().corrupt > 0
    assert state(path) == before
    (warning,) = warnings_of(log)
    assert "rows of it are missing" in warning.getMessage()


def test_a_damaged_segment_is_named(path, log):
    fill(path, kind="tensor")
    file = segments(path)[1]
    file.write_bytes(file.read_bytes()[:-3])
    before = state(path)
    assert "20 of 60 samples are not there: 20–39 (" in error_of(path)
    with served(path, partial=True) as cached:
        assert cached.missing().tolist() == list(range(20, 40))
        with pytest.raises(MissingSampleError, match="torchcache2 verify"):
            cached[20]
        same(cached[1], sample_of(1, "tensor"))
    assert state(path) == before


def test_samples_that_are_deleted_later(path):
    fill(path, kind="tensor")
    with served(path) as cached:
        same(cached[0], sample_of(0, "tensor"))
        segments(path)[1].unlink()
        same(cached[59], sample_of(59, "tensor"))
        with pytest.raises(MissingSampleError, match="sample 30 of Batched in"):
            cached[30]
        assert cached.missing().tolist() == list(range(20, 40))
        fill(path, kind="tensor")  # whoever has the dataset brings them back
        same(cached[30], sample_of(30, "tensor"))
        assert cached.missing().tolist() == []
        shutil.rmtree(path)
        assert len(cached.missing()) == COUNT
        with pytest.raises(MissingSampleError):
            cached[30]


@pytest.mark.parametrize("count", [3, 40], ids=["columns", "packed"])
def test_a_class_that_nobody_has_imported_is_named(path, tmp_path, monkeypatch, count):
    module = f"portable_classes_{count}"
    (tmp_path / f"{module}.py").write_text(
        "import collections\nfrom torch.utils.data import Dataset\n"
        "Pair = collections.namedtuple('Pair', 'left right')\n"
        "class Pairs(Dataset):\n"
        f"    def __len__(self):\n        return {count}\n"
        "    def __getitem__(self, index):\n"
        f"        if index + 1 < {count}:\n            return {{f'{{index}}': index}}\n"
        "        return Pair(index, 'é')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(CachedDataset(importlib.import_module(module).Pairs(), path)) as cached:
        cached.warmup()
    del sys.modules[module]
    text = f"'{module}:Pair' is not imported: import what defines it"
    if count == 3:
        assert text in error_of(path) and text in error_of(path, partial=True)
    else:
        with served(path, memory="1MB") as cached, pytest.raises(MissingSampleError) as caught:
            cached[count - 1]
        assert text in str(caught.value)
    imported = importlib.import_module(module)
    with served(path) as cached:
        assert cached[count - 1] == (count - 1, "é") and type(cached[count - 1]) is imported.Pair
    del sys.modules[module]


class Untold(Counted):
    def __len__(self):
        raise TypeError("it is not known yet")


def test_a_dataset_that_did_not_tell_its_length(path):
    with contextlib.closing(CachedDataset(Untold(5), path, memory_size=0)) as cached:
        cached.__getitems__([0, 1, 2])
    assert "partial=True" in error_of(path)
    with served(path, partial=True) as cached:
        same(cached[2], sample_of(2, "dict"))
        with pytest.raises(TypeError, match="has no length"):
            len(cached)
        with pytest.raises(MissingSampleError):
            cached[3]


def test_what_cannot_be_done_without_the_dataset(path):
    fill(path, name="x")
    with served(path, memory="1MB") as cached:
        before = state(path)
        with pytest.raises(
            NotCachedError, match=r"nothing was deleted. To delete them anyway, run `torchcache2 rm"
        ):
            cached.clear()
        assert state(path) == before and cached.missing().tolist() == []
        done = cached.warmup()
        assert (done.computed, done.found) == (0, COUNT)
        with pytest.raises(AttributeError, match="no attribute 'classes': the folder keeps the samples"):
            _ = cached.classes
        cached.classes = ["mine"]
        assert cached.classes == ["mine"]
    with pytest.raises(MissingSampleError, match="has been closed"):
        cached[0]
    with pytest.raises(NotCachedError, match="closed"):
        cached.warmup()


def test_a_pickle_looks_again_in_a_later_run(path):
    fill(path, kind="tensor")
    with served(path, transform=repr) as cached, contextlib.closing(copy.copy(cached)) as again:
        assert again[3] == cached[3] == repr(sample_of(3, "tensor"))
    script = """
        import os, pickle, sys
        from torchcache2 import CachedDataset
        cached = CachedDataset(None, sys.argv[1], memory_size=0)
        pickle.dump(cached, open(sys.argv[2], "wb"))
        cached.close()
    """
    file = path.parent / "pickle"
    warm.run(script, path, file)
    with contextlib.closing(pickle.loads(file.read_bytes())) as again:
        assert len(again) == COUNT and again.missing().tolist() == []
    segments(path)[0].unlink()
    with pytest.raises(MissingSampleError, match="20 of 60 samples are not there: 0–19"):
        pickle.loads(file.read_bytes())


def test_caching_may_be_turned_off_around_it(path, monkeypatch):
    fill(path)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    with served(path, "dict", disk_size=0):
        pass


def test_warmup_says_whether_all_samples_are_there(path, capsys):
    for part, said in (({"num_replicas": 2}, "30 of 60"), ({"num_replicas": 1}, "all 60")):
        shard = LazyShardDataset(Batched(COUNT), path, rank=0, memory_size=0, **part)
        shard.warmup()
        assert capsys.readouterr().err.endswith(f"Batched: {path} has {said} samples\n")
        shard.close()


def test_ls_shows_the_share_that_is_there(path, capsys):
    fill(path, some=range(45), name="x")
    with pytest.raises(SystemExit):
        commanded(["ls", str(path)])
    assert "tests.helpers.datasets.Batched x (60, 75 % filled)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        commanded(["ls", str(path), "--format", "json"])
    (one,) = json.loads(capsys.readouterr().out)
    assert one["dataset"] == {"length": 60, "name": "x", "version": None, "filled": 0.75}
