"""`keys=`: a row belongs to the key that the user gives a sample, not to the position."""

import contextlib
import os
import random
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from torchcache2 import CachedDataset, LazyShardDataset, NotCachedError
from torchcache2.core.errors import MissingSampleError, OptionError
from torchcache2.datasets.identity import identify

COUNT = 12


class Files(Dataset):
    def __init__(self, paths, scale=1):
        self.paths, self.scale, self.loaded = paths, scale, []

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        self.loaded.append(index)
        with open(self.paths[index]) as file:
            return torch.tensor(float(file.read()) * self.scale)


@pytest.fixture
def paths(tmp_path):
    """Files with a number each."""
    found = [tmp_path / f"images/{number:02}.txt" for number in range(COUNT)]
    found[0].parent.mkdir()
    for number, path in enumerate(found):
        path.write_text(str(number))
    return [*map(str, found)]


KEYS = {
    "paths": lambda paths: paths,
    "a function": lambda paths: lambda index: paths[index],
    "an array": lambda paths: np.array(paths),
    "tuples": lambda paths: [(path, 1) for path in paths],
}


def loaded(paths, folder, keys=None, **options):
    """How many samples are loaded; before and after, `missing` says so, and all samples are right."""
    dataset = Files(paths)
    cached = CachedDataset(dataset, folder, keys=paths if keys is None else keys, **options)
    missing = cached.missing().tolist()
    expected = [Files(paths)[index] for index in range(len(paths))]
    assert [cached[index] for index in range(len(paths))] == expected and cached[-1] == expected[-1]
    assert dataset.loaded == missing
    cached.close()
    return len(missing)


@pytest.mark.parametrize("kind", KEYS)
def test_what_changes_costs_its_own_rows(kind, paths, tmp_path):
    folder, keys_of = tmp_path / "cache", KEYS[kind]

    def cost(some):
        return loaded(some, folder, keys_of(some))

    assert cost(paths[:-1]) == COUNT - 1
    assert cost(paths) == 1  # added
    assert cost(paths[::-1]) == cost(paths[3:]) == cost(random.sample(paths, 9)) == 0
    os.utime(paths[4])
    shutil.copytree(tmp_path / "images", tmp_path / "copied")
    assert cost([path.replace("images", "copied") for path in paths]) == 0
    with open(paths[4], "w") as file:
        file.write("-4")
    assert cost(paths) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_faces_go_by_the_keys(workers, paths, tmp_path):
    folder, ids = tmp_path / "cache", [f"patient {number}" for number in range(COUNT)]
    first = CachedDataset(Files(paths), folder, keys=ids)
    assert first.estimate(batches=1).items == COUNT and first.warmup(num_workers=workers).computed == COUNT
    first.close()
    again = CachedDataset(Files(paths[::-1]), folder, keys=ids[::-1], verify=0.5)
    found = torch.cat(list(DataLoader(again, batch_size=5, num_workers=workers))).tolist()
    assert found == [*range(COUNT)][::-1] and len(again.missing()) == 0
    assert again.stats().misses == again.stats().mismatched == 0 < again.stats().verified
    assert "entry for each sample: paths" in again.explain()
    again.close()
    shard = LazyShardDataset(Files(paths[::-1]), folder, keys=ids[::-1], rank=1, num_replicas=2)
    assert [shard[i].item() for i in range(6)] == [COUNT - 1 - i for i in shard.indices.tolist()]
    assert shard.stats().misses == 0
    shard.close()
    with pytest.raises(OptionError, match="have keys: give them as keys="):
        CachedDataset(None, folder)
    served = CachedDataset(None, folder, keys=ids[:2] + ids[7:8])
    assert [sample.item() for sample in served] == [0, 1, 7]
    with pytest.raises(MissingSampleError):
        CachedDataset(None, folder, keys=["patient 99"])


def doubled(batch):
    return batch * 2


@pytest.mark.parametrize("options", [{}, {"map": doubled}, {"views": 2, "compression": "brotli"}], ids=len)
def test_rows_of_samples_that_are_gone_are_deleted(options, paths, tmp_path):
    folder, views = tmp_path / "cache", options.get("views", 1)
    ids = [f"patient {number}" for number in range(COUNT)]

    def cached(some):
        return CachedDataset(
            Files([paths[i] for i in some]), folder, name="files", keys=[ids[i] for i in some], **options
        )

    for some in (range(8), range(8, COUNT)):  # two files, of which one has nothing but what goes
        with contextlib.closing(cached(some)) as data:
            data.warmup()
    rest = [7, 1, 3]
    with contextlib.closing(cached(rest)) as data, contextlib.closing(cached(rest)) as other:
        other[0]
        with pytest.raises(NotCachedError, match="so none is deleted"):
            data.keep_only()
        other.close()
        found = [data[i] for i in range(3)]
        assert data.keep_only() == (COUNT - 3) * views and data.keep_only() == 0
        assert [data[i] for i in range(3)] == found and torch.equal(
            torch.cat([*data.loader()]), torch.stack(found)
        )
        assert data.stats().misses == 0 and data.missing().tolist() == []
    with contextlib.closing(cached(range(COUNT))) as data:
        assert data.missing().tolist() == [i for i in range(COUNT) if i not in rest]
    with contextlib.closing(CachedDataset(None, folder, keys=[ids[3]])) as served:
        assert torch.equal(served[0], found[2])
        with pytest.raises(NotCachedError, match="torchcache2 rm"):
            served.keep_only()


@pytest.mark.parametrize(
    "options", [{"keys": [*range(COUNT)]}, {"cache_dir": True}], ids=["no folder", "no keys"]
)
def test_only_rows_by_key_in_a_folder_are_deleted(options, paths, path):
    options |= {"cache_dir": path} if "cache_dir" in options else {}
    with contextlib.closing(CachedDataset(Files(paths), memory_size="1MB", **options)) as data:
        data[0]
        with pytest.raises(OptionError, match="by keys= from a folder on this machine"):
            data.keep_only()
        assert data[0] == 0 and data.stats().misses == 1


def test_equal_keys_are_loaded_once(paths):
    dataset = Files([paths[0], paths[1]] * 5)
    cached = CachedDataset(dataset, memory_size="1MB", keys=dataset.paths)
    assert cached.warmup(batch_size=10).computed == 2 and len(dataset.loaded) == 2
    assert torch.stack([cached[i] for i in range(10)]).tolist() == [0, 1] * 5
    assert cached.stats().misses == 2


def test_a_file_that_is_edited_while_it_is_loaded_is_not_kept(paths, tmp_path):
    class Late(Files):
        def __getitem__(self, index):
            with open(self.paths[index], "w") as file:
                file.write(f"{len(self.loaded) + 100}")
            return super().__getitem__(index)

    cached = CachedDataset(Late(paths), tmp_path / "cache", keys=paths)
    assert cached[3] == 100 and cached[3] == 101
    cached.close()
    assert loaded(paths, tmp_path / "cache", version=1) == COUNT


def table(count, name="a"):
    return TensorDataset(torch.arange(count), torch.zeros(count, 2))


class Table(Dataset):
    def __init__(self, count, size):
        self.rows = pd.DataFrame({"path": range(count)})
        self.names = {f"{number}": number for number in range(count)}
        self.size, self.classes = size, ["cat"] * 5

    def __len__(self):
        return len(self.rows)


# Two datasets, and whether their samples of one key are the same.
PAIRS = {
    "lists": (Files(["a"] * 8), Files(["b"] * 9), True),
    "another attribute": (Files(["a"] * 8), Files(["a"] * 8, scale=2), False),
    "tensors in a tuple": (table(9), table(10), True),
    "a table and a dict": (Table(20, 3), Table(30, 3), True),
    "beside a table": (Table(20, 3), Table(20, 4), False),
    "a dataset in another": (Subset(table(20), [*range(9)]), Subset(table(21), [*range(8)]), True),
    "several in one": (ConcatDataset([table(20), table(8)]), ConcatDataset([table(21), table(9)]), True),
    "a list of samples": ([1.0] * 9, [2.0] * 10, True),
    "lists so short that they may be sizes": (Files(["a"] * 3), Files(["b"] * 3), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_has_an_entry_for_each_sample_is_left_out(name):
    left, right, are_same = PAIRS[name]
    assert (identify(left, by_key=True).namespace == identify(right, by_key=True).namespace) is are_same
    assert identify(left).namespace != identify(right).namespace
    assert identify(left, by_key=True).namespace != identify(left).namespace


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["a"], "1 entries: expected one for each of 12"),
        ("abc", "a function of the index, or a sequence"),
        ({}, "a function of the index, or a sequence"),
        ([1.5] * COUNT, r"keys\[0\] is a float"),
        (lambda index: [index], r"keys\[0\] is a list"),
    ],
)
def test_keys_that_say_nothing_are_errors(keys, text, paths):
    with pytest.raises(OptionError, match=text):
        CachedDataset(Files(paths), memory_size="1MB", keys=keys)[0]


def test_datasets_that_differ_in_what_comes_after_the_cache_share_memory(paths):
    plain = CachedDataset(Files(paths), memory_size="1MB")
    turned = CachedDataset(Files(paths), memory_size="1MB", transform=torch.neg)
    other = CachedDataset(Files(paths), memory_size="2MB")
    found = [[cached[index].item() for index in range(COUNT)] for cached in (plain, turned, other)]
    assert found[0] == found[2] == [*range(COUNT)] and found[1] == [-i for i in range(COUNT)]
    assert [cached.stats().misses for cached in (plain, turned, other)] == [COUNT, 0, COUNT]
    plain.close()  # the other one still has them
    assert turned[5] == -5 and turned.stats().misses == 0
