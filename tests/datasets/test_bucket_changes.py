"""A local folder whose heads say what a bucket had: it is another bucket now, or has lost something."""

import contextlib
import json
import os
import shutil

import numpy as np
import pytest
import torch

from tests.helpers import buckets
from tests.helpers.datasets import Batched, same, sample_of
from tests.helpers.remote import reader
from tests.helpers.storage import segments
from torchcache2 import CachedDataset, MissingSampleError, OptionError
from torchcache2.core.keys import int_keys
from torchcache2.core.places import Bucket

COUNT = 60


def fill(url, folder, capsys):
    """Fill a bucket through a local folder, in three segments."""
    with contextlib.closing(CachedDataset(Batched(COUNT), url, local_dir=folder, memory_size=0)) as cached:
        for start in range(0, COUNT, 20):
            cached.__getitems__(list(range(start, start + 20)))
            cached.flush()
        stats = cached.warmup()
    capsys.readouterr()
    return stats


def check_served(url):
    """All samples are in a bucket."""
    with contextlib.closing(CachedDataset(None, url, memory_size=0)) as cached:
        for index, sample in enumerate(cached.__getitems__(list(range(COUNT)))):
            same(sample, sample_of(index, "dict"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("has_segments", [True, False])
@pytest.mark.parametrize("change", ["another", "emptied", "one object is gone"])
def test_heads_of_what_the_bucket_lacks_are_not_believed(tmp_path, capsys, has_segments, change):
    url = buckets.bucket("file", tmp_path).url
    fill(url, tmp_path / "local", capsys)
    if not has_segments:
        for file in segments(tmp_path / "local"):
            file.unlink()
    if change == "another":
        url = buckets.bucket("file", tmp_path).url
    elif change == "emptied":
        shutil.rmtree(url.removeprefix("file://"))
    else:
        segments(url.removeprefix("file://"))[1].unlink()
    fill(url, tmp_path / "local", capsys)
    check_served(url)


@pytest.mark.slow
def test_a_fingerprint_that_was_not_uploaded_before_the_process_died_comes_later(tmp_path, capsys):
    url = buckets.bucket("file", tmp_path).url
    fill(url, tmp_path / "local", capsys)
    (fingerprint,) = (tmp_path / url.rpartition("/")[2]).glob("*/fingerprint.json")
    before = fingerprint.read_bytes()
    fingerprint.unlink()
    for file in segments(tmp_path / "local"):  # they have made room
        file.unlink()
    fill(url, tmp_path / "local", capsys)
    assert fingerprint.read_bytes() == before
    check_served(url)


def test_a_head_of_a_terabyte_is_not_read(tmp_path, capsys):
    url = buckets.bucket("file", tmp_path).url
    fill(url, tmp_path / "local", capsys)
    for file in segments(tmp_path / "local"):
        file.unlink()
        os.truncate(f"{file}.head", 1 << 40)
    options = {"local_dir": tmp_path / "local", "memory_size": 0}
    with contextlib.closing(CachedDataset(None, url, **options)) as cached:
        same(cached[COUNT - 1], sample_of(COUNT - 1, "dict"))
        assert cached.stats().corrupt >= 3


def test_the_local_folder_is_not_that_of_the_bucket(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    os.symlink(folder, link)
    for path in (folder, link):
        with pytest.raises(OptionError, match="is the folder of cache_dir itself"):
            CachedDataset(Batched(COUNT), f"file://{folder}", local_dir=path)
    CachedDataset(Batched(COUNT), f"file://{folder}", local_dir=tmp_path / "another").close()


@pytest.mark.slow
def test_a_length_that_nobody_could_go_through_is_no_hang(tmp_path):
    with contextlib.closing(CachedDataset(Batched(20), tmp_path, memory_size=0)) as cached:
        cached.__getitems__(list(range(20)))
    (file,) = tmp_path.glob("*/fingerprint.json")
    document = json.loads(file.read_bytes())
    file.write_text(json.dumps(document | {"dataset": document["dataset"] | {"length": 1 << 60}}))
    with pytest.raises(MissingSampleError, match="at least 2,097,132 of 1,152,921,504,606,846,976 samples"):
        CachedDataset(None, tmp_path)


class Ragged:
    """Samples of five shapes."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.full((100 + index % 5,), index), index


def test_rows_of_other_shapes_are_read_once_beside_a_damaged_one(tmp_path):
    """Those that were read at first must not be put together with themselves, which leaves places empty."""
    options = {"memory_size": 0, "compression": "none"}
    with contextlib.closing(CachedDataset(Ragged(), f"file://{tmp_path}/bucket", **options)) as cached:
        cached.warmup(batch_size=COUNT)
    (file,) = segments(tmp_path / "bucket")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    tier = reader(Bucket.of(f"file://{tmp_path}/bucket"), tmp_path / "local")
    with contextlib.closing(tier):
        namespace = bytes.fromhex(file.parent.name)
        found = tier.get(int_keys(namespace, np.arange(COUNT)))
        positions = np.concatenate([where for where, _ in found.parts])
        assert len(positions) == COUNT - 1 == len(set(positions.tolist()))
        for where, rows in found.parts:
            assert len(rows) == len(where)
            for column in rows.columns:
                assert (column.reshape(len(where), -1)[:, 0] == torch.from_numpy(where)).all()
