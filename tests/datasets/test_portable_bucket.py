"""`CachedDataset(None, url)`: samples that are served from a bucket without their dataset."""

import contextlib
import os
import threading
import time

import pytest

from tests.helpers import buckets, warm
from tests.helpers.datasets import Batched, same, sample_of
from tests.helpers.remote import upload
from tests.helpers.storage import segments, wait_until, warnings_of
from torchcache2 import CachedDataset, CacheSettings, MissingSampleError, OptionError
from torchcache2.core.errors import NotCachedError
from torchcache2.datasets.served import ServedStore
from torchcache2.engine.stack import TierStack
from torchcache2.tiers.bucket import objects as module
from torchcache2.tiers.bucket.connection import Connection
from torchcache2.tiers.bucket.objects import Objects

SOAK = bool(os.environ.get("SOAK"))
COUNT = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Faults last for half a second at most, instead of a minute."""
    monkeypatch.setattr(ServedStore, "patience", 0.5)
    for option, seconds in {"backoff": 0.02, "pause": 0.2}.items():
        monkeypatch.setitem(Objects.__init__.__kwdefaults__, option, seconds)


def fill(bucket, path, kind="tensor", count=COUNT, **options):
    """A folder with samples, three segments of 20, and a copy of it in a bucket."""
    options = {"memory_size": 0, "compression": "none", **options}
    with contextlib.closing(CachedDataset(Batched(count, kind), path, **options)) as cached:
        for start in range(0, count, 20):
            cached.__getitems__(list(range(start, min(start + 20, count))))
            cached.flush()
    with buckets.opened(bucket) as objects:
        upload(objects, path)
    return path


def options_of(bucket, folder, **more):
    """The options of a `CachedDataset` that serves what is in a bucket."""
    more = {"memory_size": 0, "local_dir": folder, **more}
    return {"cache_dir": bucket.url, "storage_options": dict(bucket.storage_options), **more}


@pytest.mark.parametrize("scheme", ["file", *["memory", "s3", "gs"] * SOAK])
def test_a_bucket_is_served_without_the_dataset(scheme, tmp_path):
    bucket = buckets.bucket(scheme, tmp_path)
    fill(bucket, tmp_path / "filled", name="there")
    options = options_of(bucket, tmp_path / "local")
    for sizes in ((0, None), ("1MB", 0), (0, "5kB")):
        given = dict(zip(("memory_size", "disk_size"), sizes, strict=True))
        with contextlib.closing(CachedDataset(None, **options | given)) as cached:
            assert len(cached) == COUNT and cached.missing().tolist() == []
            for _ in range(2):
                for index, sample in enumerate(cached.__getitems__(list(range(COUNT)))):
                    same(sample, sample_of(index, "tensor"))
            stats = cached.stats()
            assert stats.misses == stats.faults == stats.corrupt == 0 and stats.hits == 2 * COUNT
            assert bucket.url in cached.explain() and str(bucket.storage_options) not in repr(vars(cached))
    with pytest.raises(OptionError, match="no dataset of name='elsewhere'"):
        CachedDataset(None, name="elsewhere", **options)
    fill(bucket, tmp_path / "filled", name="second", kind="coco", count=20)
    with pytest.raises(OptionError, match="2 datasets: ") as caught:
        CachedDataset(None, **options)
    assert "name='there': 60 samples, " in str(caught.value)
    assert "name='second': 20 samples, " in str(caught.value)
    with contextlib.closing(CachedDataset(None, name="second", **options)) as cached:
        same(cached[19], sample_of(19, "coco"))


@pytest.mark.parametrize("scheme", ["file", *["memory", "s3", "gs"] * SOAK])
def test_what_warmup_has_brought_to_a_bucket_is_served(scheme, tmp_path, capsys):
    bucket = buckets.bucket(scheme, tmp_path)
    options = options_of(bucket, tmp_path / "writer")
    with contextlib.closing(CachedDataset(Batched(COUNT), **options)) as cached:
        cached.warmup(batch_size=20)
        said = capsys.readouterr().err.strip().rpartition("\n")[2]
        assert said == f"Batched: {bucket.url} has all 60 samples"
    before = names_in(bucket)
    for folder in (tmp_path / "reader", None, tmp_path / "writer"):
        with contextlib.closing(CachedDataset(None, **options_of(bucket, folder))) as cached:
            for index, sample in enumerate(cached):
                same(sample, sample_of(index, "dict"))
            stats = cached.stats()
            assert stats.misses == stats.faults == 0 and stats.hits == COUNT
            with pytest.raises(NotCachedError, match=f"rm {bucket.url} [0-9a-f]+"):
                cached.clear()
    for file in segments(tmp_path / "writer"):  # what the bucket lacks is not brought there by a reader
        file.with_name("0" + file.name[1:]).write_bytes(file.read_bytes())
    with contextlib.closing(CachedDataset(None, **options)) as cached:
        cached.flush()
    assert names_in(bucket) == before and len(before) > 2


def test_warmup_brings_what_a_bucket_has_to_the_local_folder(tmp_path):
    bucket = buckets.bucket("file", tmp_path)
    fill(bucket, tmp_path / "filled")
    with contextlib.closing(CachedDataset(None, **options_of(bucket, tmp_path / "local"))) as cached:
        assert cached.missing().tolist() == [] and segments(tmp_path / "local") == []
        cached.warmup()
        wait_until(lambda: len(segments(tmp_path / "local")) == 3)
        before = cached.stats().bytes_down
        same(cached[1], sample_of(1, "tensor"))
        assert cached.stats().bytes_down == before


def test_a_reader_makes_way_for_a_writer_with_its_folder(tmp_path, log):
    bucket = buckets.bucket("file", tmp_path)
    options = options_of(bucket, tmp_path / "local")
    writer = CachedDataset(Batched(COUNT), **options)
    writer.__getitems__(list(range(20)))
    writer.flush()
    with contextlib.closing(CachedDataset(None, partial=True, **options)) as cached:
        writer.close()
        cached.flush()  # the reader mirrors now
        with contextlib.closing(CachedDataset(Batched(COUNT), **options)) as second:
            second.__getitems__(list(range(20, COUNT)))
            start = time.monotonic()
            second.flush()
            assert time.monotonic() - start < 15.0
            assert cached.missing().tolist() == []
    assert len([name for _, name, _ in names_in(bucket) if name.endswith(".safetensors")]) == 4
    assert warnings_of(log) == []


def names_in(bucket):
    """All objects, and their sizes."""
    with buckets.opened(bucket) as objects:
        folders = ["", *[info.name for info in objects.listing() if info.is_folder]]
        return {(one, info.name, info.size) for one in folders for info in objects.listing(one)}


def test_a_bucket_that_lacks_samples_says_which(tmp_path):
    bucket = buckets.bucket("file", tmp_path)
    fill(bucket, tmp_path / "filled")
    segments(bucket.url.removeprefix("file://"))[1].unlink()
    options = options_of(bucket, tmp_path / "local")
    with pytest.raises(MissingSampleError, match="20 of 60 samples are not there: 20–39"):
        CachedDataset(None, **options)
    with contextlib.closing(CachedDataset(None, partial=True, **options)) as cached:
        assert cached.missing().tolist() == list(range(20, 40))
        same(cached[59], sample_of(59, "tensor"))
        with pytest.raises(MissingSampleError, match=f"sample 20 of Batched in {bucket.url} is missing"):
            cached.__getitems__([1, 20])
    with pytest.raises(OptionError, match="does not exist"):
        CachedDataset(None, **options_of(buckets.bucket("file", tmp_path), tmp_path / "other"))


@pytest.mark.slow
def test_a_fault_is_waited_for_and_raised_with_its_cause_if_it_lasts(tmp_path, monkeypatch):
    with buckets.proxied("s3", tmp_path, session=buckets.session()) as (bucket, proxy):
        fill(bucket, tmp_path / "filled")
        options = options_of(bucket, tmp_path / "local")
        with contextlib.closing(CachedDataset(None, **options)) as cached:
            assert cached.missing().tolist() == []
            proxy.refuses = True
            with pytest.raises(
                MissingSampleError, match=f"sample 40 of Batched in {bucket.url} .*{bucket.url}: "
            ):
                cached[40]
            with pytest.raises(MissingSampleError, match=f"cannot tell which .*{bucket.url}: "):
                CachedDataset(None, **options)
            monkeypatch.setattr(ServedStore, "patience", 20.0)
            timer, indices = threading.Timer(0.5, proxy.heal), list(range(0, COUNT, 3))
            timer.start()
            for index, sample in zip(indices, cached.__getitems__(indices), strict=True):
                same(sample, sample_of(index, "tensor"))
            timer.join()


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader
from tests.helpers.datasets import same, sample_of
from torchcache2 import CachedDataset

if __name__ == "__main__":
    url, endpoint, folder, count, *methods = sys.argv[1:]
    options = {"endpoint_url": endpoint, "key": "any", "secret": "any"}
    for method in methods:
        served = CachedDataset(
            None, url, memory_size="1MB", storage_options=options, local_dir=folder or None
        )
        same(served[3], sample_of(3, "tensor"))  # so that a session is there before the fork
        loader = DataLoader(
            served, 8, shuffle=True, num_workers=2, collate_fn=list, multiprocessing_context=method,
            generator=torch.Generator().manual_seed(0),
        )
        samples = {sample.numpy().tobytes() for batch in loader for sample in batch}
        assert samples == {sample_of(index, "tensor").numpy().tobytes() for index in range(int(count))}
        stats = served.stats()
        assert stats.misses == stats.faults == 0 and stats.hits == int(count) + 1
        served.close()
    print(len(methods))
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", [False, *[True] * SOAK], ids=lambda has: "local" if has else "temporary")
def test_workers_serve_a_bucket(tmp_path, folder):
    bucket = buckets.bucket("s3", tmp_path)
    fill(bucket, tmp_path / "filled")
    methods = ["fork", *["spawn", "forkserver"] * SOAK]
    endpoint = bucket.storage_options["endpoint_url"]
    local = tmp_path / "local" if folder else ""
    assert warm.run(WORKERS, bucket.url, endpoint, local, COUNT, *methods).out == f"{len(methods)}\n"


@pytest.mark.slow
def test_one_session_opens_a_dataset_and_asks_for_each_thing_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(module, "Connection", lambda *args: made.append(args) or Connection(*args))
    with buckets.proxied("s3", tmp_path) as (bucket, proxy):
        options = options_of(bucket, tmp_path / "writer")
        with contextlib.closing(CachedDataset(Batched(COUNT), name="x", **options)) as cached:
            cached.warmup(batch_size=20)
        assert len(made) == 1
        options = options_of(bucket, tmp_path / "reader", disk_size="1B")
        for number, count in [(2, 5), (3, 3)]:  # with a listing of the segments, and their heads; without
            before = len(proxy.requests)
            with contextlib.closing(CachedDataset(None, **options)):
                assert len(made) == number
            asked = proxy.requests[before:]
            assert len(asked) == count + (number == 2) * (len(segments(tmp_path / "writer")) - 1), asked
            assert len(set(asked)) == len(asked)


def test_connections_that_no_tier_has_taken_over_are_closed(tmp_path):
    class User:
        namespace = b"n" * 16

    stack, user = TierStack(CacheSettings(persistent_cache_dir=buckets.bucket("file", tmp_path))), User()
    objects = stack._opened
    stack.join(user)
    assert objects.listing() == []
    stack.leave(user)
    assert objects.listing() is None, "it is closed"
