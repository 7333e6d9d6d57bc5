"""A folder in a bucket, read as a file system."""

import os

import pytest

from tests.helpers.buckets import bucket, opened
from tests.helpers.storage import NAMESPACES, NEVER, put, segments, snapshot
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import Descriptors, FileSystem
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.files import BucketFiles
from torchcache2.tiers.disk.tier import DiskTier

SEGMENTS, ROWS, WIDTH = 36, 5, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Many segments, some with an index that is longer than what is read of each at first."""
    path = tmp_path_factory.mktemp("folder") / "cache"
    tier = DiskTier(path, delay=NEVER, codec="none", description=lambda _: {"class": "models.Backbone"})
    for number in range(SEGMENTS):
        put(tier, range(number * ROWS, (number + 1) * ROWS), WIDTH)
        tier.flush()
    for number in range(2):
        put(tier, [(number, row) for row in range(5000)], WIDTH, NAMESPACES[1])
        tier.flush()
    tier.close()
    return path


class Counting:
    """Counts what is asked of a bucket."""

    def __init__(self, objects, monkeypatch):
        self.reads, self.listings = [], 0
        fetch, listing = objects.fetch, objects.listing

        def counted_fetch(ranges):
            self.reads.append(len(ranges))
            return fetch(ranges)

        def counted_listing(name=""):
            self.listings += 1
            return listing(name)

        monkeypatch.setattr(objects, "fetch", counted_fetch)
        monkeypatch.setattr(objects, "listing", counted_listing)


@pytest.fixture(scope="module")
def filled(folder):
    """`Objects` of a bucket that has the folder; tests of the command line read other kinds of buckets."""
    with opened(bucket("memory", None), tries=1) as made:
        for name in snapshot(folder):
            if not name.endswith(".lock"):
                assert made.write(name, str(folder / name))
        yield made


@pytest.fixture
def objects(filled, folder):
    """The same, complete again after each test."""
    yield filled
    for namespace in NAMESPACES[:2]:
        names = {info.name for info in filled.listing(namespace.hex())}
        for path in segments(folder, namespace):
            assert path.name in names or filled.write(f"{namespace.hex()}/{path.name}", str(path))


def opened_segments(fs, directory, namespace=NAMESPACES[0]):
    """Each segment of a namespace, opened."""
    descriptors = Descriptors(fs)
    for info in directory.contents(namespace.hex()).segments:
        path = os.path.join(directory.folder(namespace), info.name)
        yield Segment.open(fs, descriptors, path, limit=1 << 40)


def test_it_looks_like_the_folder(objects, folder, monkeypatch):
    counts = Counting(objects, monkeypatch)
    url, local = objects.bucket.url, CacheDirectory(str(folder), FileSystem())
    remote = CacheDirectory(url, BucketFiles(objects))
    remote.check()
    for mine, other in zip(remote.scan(), local.scan(), strict=True):
        assert mine.namespace == other.namespace
        assert [info[:3] for info in mine.files] == [info[:3] for info in other.files]
        assert remote.fingerprint(mine.namespace) == local.fingerprint(mine.namespace) != {}
    assert remote.format() == 2
    assert remote.fs.exists(url)
    assert not any(remote.fs.exists(f"{url}/{name}") for name in ("no", "no/more"))
    assert remote.fs.is_file(f"{url}/CACHEDIR.TAG") and not remote.fs.is_file(remote.folder(NAMESPACES[0]))
    with pytest.raises(FileNotFoundError):
        remote.fs.listing(f"{url}/nothing")
    with pytest.raises(FileNotFoundError):
        remote.fs.open(remote.folder(NAMESPACES[0]))
    with pytest.raises(OSError, match="ead-only"):
        remote.prepare(b"a new namespace.", {})
    assert len(counts.reads) == 3  # the tag, and two fingerprints
    assert counts.listings == 5  # the folder, two namespaces, and two folders that are not there


def test_segments_are_opened_many_at_a_time(objects, monkeypatch):
    counts = Counting(objects, monkeypatch)
    fs = BucketFiles(objects)
    directory = CacheDirectory(objects.bucket.url, fs)
    assert sum(map(len, opened_segments(fs, directory))) == SEGMENTS * ROWS
    assert counts.reads == [32, SEGMENTS - 32]
    counts.reads.clear()
    assert sum(map(len, opened_segments(fs, directory, NAMESPACES[1]))) == 10_000
    assert counts.reads == [2, 2]  # the beginnings of both, and what is left of their heads


def test_a_segment_that_is_read_as_a_whole_takes_one_more_read(objects, monkeypatch):
    fs = BucketFiles(objects)
    directory = CacheDirectory(objects.bucket.url, fs)
    some = list(opened_segments(fs, directory, NAMESPACES[1]))
    counts = Counting(objects, monkeypatch)
    assert [one.check() for one in some] == [0, 0]
    assert len(counts.reads) == 2


def test_an_object_that_goes_after_it_was_listed_is_a_missing_file(objects):
    fs = BucketFiles(objects)
    directory = CacheDirectory(objects.bucket.url, fs)
    first, second = directory.contents(NAMESPACES[1].hex()).segments
    objects.remove([f"{NAMESPACES[1].hex()}/{first.name}"])
    with pytest.raises(FileNotFoundError):
        next(opened_segments(fs, directory, NAMESPACES[1]))
    path = os.path.join(directory.folder(NAMESPACES[1]), second.name)
    assert len(Segment.open(fs, Descriptors(fs), path, limit=1 << 40)) == 5000
