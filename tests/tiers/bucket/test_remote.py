"""The tier of a bucket: what it asks for, and what it does with objects that are damaged, foreign or gone."""

import contextlib
import errno
import functools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.buckets import bucket, opened, proxied
from tests.helpers.remote import reader, upload
from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    Unsynced,
    fill,
    flip,
    found,
    keys_of,
    put,
    seal,
    segments,
    snapshot,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.core.rows import Rows
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.layout import HEAD, read_head, write_head
from torchcache2.tiers.base import Signals
from torchcache2.tiers.bucket import objects as objects_module
from torchcache2.tiers.bucket import source as source_module
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.disk.tier import DiskTier

FS = Unsynced()
FOLDER = NAMESPACES[0].hex()
WIDTH = 1000


class Asked:
    """`Objects` that notes what is asked for."""

    def __init__(self, objects):
        self._objects = objects
        self.listings, self.reads, self.corrupt = [], [], 0

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def listing(self, folder=""):
        self.listings.append(folder)
        return self._objects.listing(folder)

    def read(self, ranges):
        self.reads.append(list(ranges))
        return self._objects.read(ranges)

    def fetch(self, ranges):
        self.reads.append(list(ranges))
        return self._objects.fetch(ranges)

    def texts(self, names, *most):
        self.reads.append([(name, 0, *most) for name in names])
        return self._objects.texts(names, *most)


class Place:
    """A bucket of files, which tests may damage, and tiers of it with one local folder."""

    def __init__(self, path, stack):
        self.path, self.local = path, path / "local"
        self.bucket = bucket("file", path)
        self.remote = Path(self.bucket.url.removeprefix("file://"))
        self._stack = stack

    def fill(self, count=3, **options):
        """Segments of 10 rows; returns their files in the bucket."""
        fill(self.remote, count, WIDTH, **options)
        return segments(self.remote)

    def tier(self, fs=FS, local=None, **options):
        objects = Asked(self._stack.enter_context(opened(self.bucket)))
        tier = reader(self.bucket, local or self.local, fs=fs, objects=objects, **options)
        self._stack.callback(tier.close)
        return tier

    def heads(self):
        return sorted(path.name for path in self.local.glob(f"*/*{HEAD}"))


@pytest.fixture
def place(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path, stack)


def names_of(*numbers, rows=range(10)):
    return [(number, row) for number in numbers for row in rows]


# What is asked for.


def test_heads_are_kept_and_the_next_process_asks_for_rows_only(place):
    files = place.fill(40)
    first = place.tier()
    assert found(first, names_of(*range(40), rows=[3]), WIDTH) == names_of(*range(40), rows=[3])
    asked = first.bucket.objects
    assert asked.listings == [FOLDER]
    heads = [read for read in asked.reads if all(start == 0 for _, start, _ in read)]
    assert [len(read) for read in heads if "fingerprint" not in read[0][0]] == [32, 8]
    assert place.heads() == [file.name + HEAD for file in files]
    for file in files:
        head, _ = read_head(FS, str(file))
        assert (place.local / FOLDER / (file.name + HEAD)).read_bytes() == head
    assert (place.local / FOLDER / "fingerprint.json").read_bytes() == (
        place.remote / FOLDER / "fingerprint.json"
    ).read_bytes()

    second = place.tier()
    assert found(second, names_of(1, 5, 7, rows=[0, 9]), WIDTH) == names_of(1, 5, 7, rows=[0, 9])
    assert second.has(keys_of(names_of(*range(40)))).all()
    assert second.bucket.objects.listings == []
    (read,) = second.bucket.objects.reads  # one call for a batch
    assert len(read) == 6 and {end - start for _, start, end in read} == {4 * WIDTH}


def test_neighbours_are_one_range(place):
    place.fill(1)
    tier = place.tier()
    assert tier.has(keys_of([(0, 0)])).all()
    tier.bucket.objects.reads.clear()
    names = names_of(0, rows=[7, 2, 3, 4, 2])
    assert found(tier, names, WIDTH) == sorted(names)
    (((_, start, end),),) = tier.bucket.objects.reads
    assert end - start == 6 * 4 * WIDTH  # of 2 to 7: less lies between than another request costs
    assert tier.counts()["bytes_down"] < 4 * 40_000


def test_long_ranges_are_several_requests(place, monkeypatch):
    monkeypatch.setattr(objects_module, "PIECE", 5000)
    (file,) = place.fill(1)
    tier = place.tier()
    assert found(tier, names_of(0), WIDTH) == names_of(0)
    (read,) = [read for read in tier.bucket.objects.reads if len(read) > 1]
    assert [end - start for _, start, end in read] == [5000] * 8
    file.write_bytes(file.read_bytes()[:-6000])  # one row is gone, and half of another
    assert found(tier, names_of(0), WIDTH) == names_of(0, rows=range(8))


@pytest.mark.parametrize("codec", ["none", "brotli"])
@pytest.mark.parametrize("kind", ["many leaves", "ragged"])
def test_rows_in_parts_and_blocks_are_read(place, codec, kind):
    disk = DiskTier(place.remote, codec=codec, delay=NEVER, fs=FS)
    cpu, expected = torch.device("cpu"), {}
    for part in range(3):
        names = [(part, i) for i in range(20)]
        size = 50 if kind == "many leaves" else 30 + part
        output = {"a": torch.rand(20, size).relu(), "b": torch.arange(20), "c": torch.rand(20, 3, size)}
        expected[part] = output
        disk.put(keys_of(names), Rows.from_pytree(output, 20, device=cpu))
    disk.close()
    tier = place.tier()
    seen = 0
    asked = [(part, i) for i in (19, 0, 7, 7) for part in range(3)]
    for positions, rows in tier.get(keys_of(asked)).parts:
        output = rows.to_pytree(device=cpu)
        for at, position in enumerate(positions.tolist()):
            part, i = asked[position]
            assert all(torch.equal(output[name][at], expected[part][name][i]) for name in "abc")
            seen += 1
    assert seen == len(asked)


def test_the_bucket_is_listed_again_when_rows_are_missing_and_it_is_time(place):
    place.fill(1)
    tier, often = place.tier(), place.tier(every=0.0)
    for _ in range(3):
        assert found(tier, [(0, 1), (5, 1)], WIDTH) == [(0, 1)]
        tier.look_again(NAMESPACES[0])
        assert found(tier, [(0, 1)], WIDTH) == [(0, 1)]
    assert tier.bucket.objects.listings == [FOLDER]
    writer = DiskTier(place.remote, codec="none", delay=NEVER, fs=FS)
    seal(writer, names_of(5), WIDTH)
    writer.close()
    assert found(often, [(0, 1), (5, 1)], WIDTH) == [(0, 1), (5, 1)]
    tier.look_again(NAMESPACES[0])  # another process has fetched the head
    assert found(tier, [(5, 1)], WIDTH) == [(5, 1)]
    assert tier.bucket.objects.listings == [FOLDER]


def test_a_tier_counts_the_rows_of_the_bucket_and_the_bytes_of_the_folder(place):
    files = place.fill(3)
    tier = place.tier()
    assert tier.stats().rows == tier.count(NAMESPACES[0]) == 0
    assert tier.has(keys_of(names_of(0, 1, 2))).all()
    assert (tier.stats().rows, tier.count(NAMESPACES[0]), tier.count(NAMESPACES[1])) == (30, 30, 0)
    assert 0 < tier.stats().bytes < sum(file.stat().st_size for file in files)
    shutil.copy(files[0], place.local / FOLDER)
    assert (tier.stats().rows, tier.count(NAMESPACES[0])) == (30, 30)
    assert found(tier, names_of(0, 1), WIDTH) == names_of(0, 1)
    assert put(tier, [(9, 9)], WIDTH) == 0


def test_what_was_dropped_is_not_looked_at_again(place):
    before = place.fill(2)
    tier, drops = place.tier(every=0.0), [0]
    other = place.tier(every=0.0, signals=Signals(drops=lambda: drops[0]))
    assert found(tier, [(0, 1)], WIDTH) == found(other, [(0, 1)], WIDTH) == [(0, 1)]
    tier.drop(NAMESPACES[0])
    drops[0] = time.time_ns()
    for one in (tier, other):
        for _ in range(2):
            assert found(one, names_of(0, 1), WIDTH) == []
            assert not one.has(keys_of(names_of(0, 1))).any()
            one.look_again(NAMESPACES[0])
    assert segments(place.remote) == before
    writer = DiskTier(place.path / "another", codec="none", delay=NEVER, fs=FS)
    seal(writer, [(0, 1)], WIDTH)
    writer.close()
    upload(tier.bucket.objects, place.path / "another")
    for one in (tier, other):
        assert found(one, names_of(0), WIDTH) == [(0, 1)]


def test_runs_of_the_local_folder_have_the_segments_of_the_bucket_too(place, monkeypatch):
    monkeypatch.setattr(merging, "_LEAST_ROWS", 30)
    place.fill(4)
    tier = place.tier(writes=True, budget=10**8)
    assert tier.has(keys_of(names_of(*range(4)))).all()
    seal(tier, names_of(4), WIDTH)
    (run,) = place.local.glob("*/*.run")
    (own,) = segments(place.local)
    for made in (tier, place.tier()):
        made.bucket.objects.reads.clear()
        assert found(made, names_of(*range(5)), WIDTH) == names_of(*range(5))
        assert made._index.namespaces[NAMESPACES[0]].beside_index_files == (
            2,
            20,
        )  # others are in a file
    flip(own, 100)  # its header: the bucket does not have it
    flip(segments(place.remote)[1], -1)
    last = place.tier()
    assert found(last, names_of(*range(5)), WIDTH) == [one for one in names_of(*range(4)) if one != (1, 9)]
    assert run.exists() and last.stats().corrupt >= 1


# Objects that are not what they should be.


def test_foreign_and_garbage_objects_are_left_alone(place, log):
    good, half, empty, garbage, html = place.fill(5)
    half.write_bytes(half.read_bytes()[:-1])
    empty.write_bytes(b"")
    garbage.write_bytes(os.urandom(5000))
    html.write_bytes(b"<html>no such page</html>" * 1000)
    for name in (
        "notes.txt",
        "model.safetensors",
        f"{good.name}.tmp",
        f"{good.name}{HEAD}",
        f"{good.name}.corrupt",
    ):
        (place.remote / FOLDER / name).write_bytes(b"foreign")
    (place.remote / FOLDER / "folder").mkdir()
    before = snapshot(place.remote)
    tier = place.tier(every=0.0)
    for _ in range(3):
        assert found(tier, names_of(*range(5)), WIDTH) == names_of(0)
    assert snapshot(place.remote) == before
    assert place.heads() == [good.name + HEAD]
    assert tier.stats().corrupt == 4 and tier.stats().faults == 0
    for bad in (half, empty, garbage, html):  # each is asked for once more, as the line may have failed
        assert sum(bad.name in name for read in tier.bucket.objects.reads for name, *_ in read) <= 2
    assert sum("is damaged" in record.getMessage() for record in warnings_of(log)) == 1


def test_half_an_object_is_read_when_it_is_whole(place):
    (file,) = place.fill(1)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    tier = place.tier(every=0.0)
    assert found(tier, names_of(0), WIDTH) == []
    file.write_bytes(whole)
    assert found(tier, names_of(0), WIDTH) == names_of(0)


@pytest.mark.parametrize("codec", ["none", "brotli"])
def test_a_damaged_row_is_missing_and_the_others_of_its_object_are_not(place, log, codec):
    writer = DiskTier(place.remote, codec=codec, delay=NEVER, fs=FS)
    seal(writer, names_of(0), 3000)
    writer.close()
    (file,) = segments(place.remote)
    size = file.stat().st_size - len(read_head(FS, str(file))[0])
    flip(file, -size // 2)
    before = file.read_bytes()
    tier = place.tier()
    good = found(tier, names_of(0), 3000)
    assert len(good) == 9
    (bad,) = set(names_of(0)) - set(good)
    assert tier.stats().corrupt == 1
    asked = len(tier.bucket.objects.reads)
    assert found(tier, [bad], 3000) == [] and not tier.has(keys_of([bad])).any()
    assert len(tier.bucket.objects.reads) == asked
    assert found(tier, good, 3000) == good and tier.has(keys_of(good)).all()
    assert tier.stats().corrupt == 1 and file.read_bytes() == before
    (warning,) = warnings_of(log)
    assert file.name in warning.getMessage()


@pytest.mark.parametrize("spoiled", ["a head", "a row"])
def test_what_was_damaged_on_its_way_is_fetched_once_more(place, log, spoiled):
    place.fill(1)
    tier = place.tier()
    if spoiled == "a row":
        assert tier.has(keys_of(names_of(0))).all()  # the head is here
    name = "fetch" if spoiled == "a row" else "read"
    read, spoils = getattr(tier.bucket.objects, name), [True]

    def flipped(ranges):
        data = read(ranges)
        if spoils and any(name.endswith(".safetensors") for name, *_ in ranges):
            spoils.clear()
            data = [piece[:-1] + bytes([piece[-1] ^ 1]) for piece in data]
        return data

    setattr(tier.bucket.objects, name, flipped)
    assert found(tier, names_of(0), WIDTH) == names_of(0) and not spoils
    assert tier.stats().corrupt == 0 and warnings_of(log) == []


def test_an_object_that_is_cut_after_its_head_was_fetched(place):
    (file,) = place.fill(1)
    tier = place.tier()
    assert tier.has(keys_of(names_of(0))).all()
    file.write_bytes(file.read_bytes()[:-6000])  # one row is gone, and half of another
    assert found(tier, names_of(0), WIDTH) == []  # one range had all of them
    assert found(place.tier(), names_of(0, rows=[0, 8, 9]), WIDTH) == [(0, 0)]
    assert tier.stats().corrupt == 10 and tier.stats().faults == 0


def test_an_object_that_is_deleted_in_mid_epoch(place, log):
    gone, stays = place.fill(2)
    tier = place.tier(every=0.3)
    assert tier.has(keys_of(names_of(0, 1))).all()
    content = gone.read_bytes()
    gone.unlink()
    assert found(tier, names_of(0, 1), WIDTH) == names_of(1)
    asked = len(tier.bucket.objects.reads)
    assert found(tier, names_of(0), WIDTH) == []
    assert len(tier.bucket.objects.reads) == asked
    threading.Event().wait(0.3)
    assert found(tier, names_of(0), WIDTH) == []  # the listing says that it is gone
    assert place.heads() == [stays.name + HEAD]
    gone.write_bytes(content)
    threading.Event().wait(0.3)
    assert found(tier, names_of(0), WIDTH) == names_of(0)
    assert (tier.stats().corrupt, tier.stats().faults) == (0, 0) and not warnings_of(log)


def test_a_newer_format_is_not_read(place, log, monkeypatch):
    (file,) = place.fill(1)
    monkeypatch.setattr("torchcache2.files.layout.FORMAT_VERSION", 3)
    writer = DiskTier(place.path / "newer", codec="none", delay=NEVER, fs=FS)
    seal(writer, names_of(1), WIDTH)
    writer.close()
    monkeypatch.undo()
    (newer,) = segments(place.path / "newer")
    shutil.copy(newer, file.parent)
    before = snapshot(place.remote)
    tier = place.tier()
    assert found(tier, names_of(0, 1), WIDTH) == []
    assert snapshot(place.remote) == before
    (warning,) = warnings_of(log)
    assert "Upgrade torchcache2" in warning.getMessage()


# The local folder.


class NoRoom(Unsynced):
    """Nothing can be written."""

    def create(self, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    make_folder = create


@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "none"])
def test_rows_are_missing_where_no_head_can_be_written(place, log, has_folder):
    place.fill(2)
    if has_folder:
        CacheDirectory(str(place.local), FS).create()
        (place.local / FOLDER).mkdir()
    tier = place.tier(NoRoom(), every=0.0)
    for _ in range(2):
        assert found(tier, names_of(0, 1, 2), WIDTH) == []
    (warning,) = warnings_of(log)
    assert "cannot keep what the bucket has" in warning.getMessage() and tier.stats().faults == 0


def test_a_local_folder_that_is_deleted(place):
    place.fill(2)
    tier = place.tier(every=0.0)
    assert found(tier, names_of(0), WIDTH) == names_of(0)
    shutil.rmtree(place.local)
    assert found(tier, names_of(0, 1, 2), WIDTH) == names_of(0, 1)


def test_a_damaged_head_is_fetched_again(place, log):
    file, other = place.fill(2)
    for one in (file, other):
        (place.local / FOLDER).mkdir(parents=True, exist_ok=True)
        write_head(FS, str(place.local / FOLDER / one.name), read_head(FS, str(one))[0])
    path = place.local / FOLDER / (file.name + HEAD)
    flip(path, 300)
    tier = place.tier()
    assert found(tier, names_of(0, 1), WIDTH) == names_of(0, 1)
    assert path.read_bytes() == read_head(FS, str(file))[0]
    assert tier.stats().corrupt == 1
    assert [name for read in tier.bucket.objects.reads[:1] for name, *_ in read] == [
        f"{FOLDER}/fingerprint.json"
    ]
    (warning,) = warnings_of(log)
    assert "fetched again" in warning.getMessage()


def test_processes_that_fetch_at_the_same_time_share_the_work(place, monkeypatch):
    monkeypatch.setattr(source_module, "_AT_ONCE", 4)
    place.fill(24)
    tiers = [place.tier() for _ in range(3)]
    names = names_of(*range(24), rows=[5])

    def work(tier):
        assert found(tier, names, WIDTH) == names

    run_at_once(*[functools.partial(work, tier) for tier in tiers])


# Faults of the bucket.


def test_a_bucket_that_fails_is_misses_and_comes_back(tmp_path, log):
    disk = DiskTier(tmp_path / "one", codec="none", delay=NEVER, fs=FS)
    seal(disk, names_of(0), WIDTH)
    disk.close()
    with proxied("s3", tmp_path) as (place, proxy):
        quick = Objects(place, patience=2.0, tries=2, backoff=0.01, pause=0.05)
        upload(quick, tmp_path / "one")
        tier = reader(place, tmp_path / "local", objects=quick, every=0.0)
        assert found(tier, names_of(0, rows=[1]), WIDTH) == names_of(0, rows=[1])
        proxy.status = 503
        assert found(tier, names_of(0), WIDTH) == []
        assert (
            tier.bucket.objects.cause is not None and tier.stats().faults >= 1 and tier.stats().corrupt == 0
        )
        assert tier.has(keys_of(names_of(0))).all()
        proxy.heal()
        threading.Event().wait(0.1)
        assert found(tier, names_of(0), WIDTH) == names_of(0)
        assert tier.bucket.objects.cause is None
        tier.close()
    assert len({record.getMessage() for record in warnings_of(log)}) == 1
