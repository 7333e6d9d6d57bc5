"""What is read from a bucket, and kept: few bytes of a large one, whole segments, within the budget."""

import functools
import os
import shutil
import threading

import pytest

from tests.helpers import warm
from tests.helpers.buckets import bucket, opened
from tests.helpers.remote import reader, upload
from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    Unsynced,
    found,
    keys_of,
    seal,
    segments,
    size_of,
    wait_until,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.files.directory import ASKED, CacheDirectory
from torchcache2.tiers.bucket import folder as module
from torchcache2.tiers.bucket.folder import BucketFolder
from torchcache2.tiers.disk.tier import DiskTier

FS = Unsynced()
FOLDER = NAMESPACES[0].hex()
WIDTH, ROWS, SEGMENTS = 1000, 40, 3  # rows of 4 kB
ROOM = 10**8
ALL = range(SEGMENTS)


@pytest.fixture
def place(tmp_path):
    """A bucket of files, and the segments in it."""
    disk = DiskTier(tmp_path / "first", codec="none", delay=NEVER, fs=FS)
    for number in ALL:
        seal(disk, names_of(number), WIDTH)
    disk.close()
    made = bucket("file", tmp_path)
    with opened(made) as objects:
        files = upload(objects, tmp_path / "first")
    return made, files


@pytest.fixture
def make(place, local):
    """Makes readers of the bucket, each as in a process of its own, with one local folder."""
    tiers = []

    def one(budget=ROOM, *, brings=False):
        tiers.append(tier := reader(place[0], local, budget=budget, uploads=False if brings else None))
        if brings:
            assert found(tier, names_of(9), WIDTH) == []  # the heads are here
            tier.bring(NAMESPACES[0])
        return tier

    yield one
    for tier in tiers:
        tier.close()


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


@pytest.fixture
def large(monkeypatch):
    """Requests count as cheap."""
    monkeypatch.setattr(module, "_REQUEST", 0)


def names_of(*numbers, rows=range(ROWS)):
    return [(number, row) for number in numbers for row in rows]


def ticks_on(probe):
    """Wait until the clock of the file system, by which the last reads are known, goes on."""
    probe.touch()
    before = probe.stat().st_mtime_ns
    wait_until(lambda: probe.touch() or probe.stat().st_mtime_ns > before)


def down(*tiers):
    return sum(tier.counts()["bytes_down"] for tier in tiers)


def test_few_rows_of_large_segments_bring_nothing_and_more_than_a_tenth_bring_all(place, make, local, large):
    tier = make()
    some = names_of(*ALL, rows=[3])  # 3 of 120 rows
    assert tier.has(keys_of(some)).all()
    before = down(tier)  # heads
    for _ in range(3):
        assert found(tier, some, WIDTH) == some
    assert down(tier) - before == 3 * len(some) * 4 * WIDTH
    assert segments(local) == [] and not (local / FOLDER / ASKED).exists()
    for _ in range(2):
        assert found(tier, some, WIDTH) == some
    assert (local / FOLDER / ASKED).exists()


@pytest.mark.parametrize("budget", [ROOM, 180_000])
def test_a_wanted_namespace_is_brought_as_far_as_it_fits_those_read_last_first(place, local, large, budget):
    tier = reader(place[0], local, budget=budget, uploads=False)
    assert found(tier, names_of(9), WIDTH) == [] and not segments(local)
    for number in reversed(ALL):
        assert found(tier, names_of(number, rows=[3]), WIDTH) == names_of(number, rows=[3])
        ticks_on(local.parent / "clock")
    tier.bring(NAMESPACES[0])
    wait_until(lambda: len(segments(local)) == (SEGMENTS if budget == ROOM else 1))
    assert (local / FOLDER / place[1][0].name).exists() and size_of(local) <= budget
    assert found(tier, names_of(*ALL), WIDTH) == names_of(*ALL)
    tier.close()


def test_a_batch_waits_for_segments_that_come(place, make, local, large):
    tier = make()
    assert found(tier, names_of(0, rows=[3]), WIDTH) == names_of(0, rows=[3])
    before = down(tier)
    coming = local / FOLDER / f"{place[1][1].name}.tmp"
    shutil.copy(place[1][1], coming)
    timer = threading.Timer(0.1, coming.rename, [coming.with_suffix("")])
    timer.start()
    assert found(tier, names_of(1), WIDTH) == names_of(1) and down(tier) == before
    timer.join()
    assert found(tier, names_of(2, rows=[3]), WIDTH) == names_of(2, rows=[3])  # nothing comes
    assert down(tier) > before


def test_what_a_killed_process_had_begun_is_brought_by_another(place, local):
    """Even if it had taken all the room."""
    budget = sum(file.stat().st_size for file in place[1]) + 10_000
    tier = reader(place[0], local, budget=budget, uploads=False)
    assert found(tier, names_of(9), WIDTH) == []  # the heads are here
    for file in place[1]:
        shutil.copy(file, local / FOLDER / f"{file.name}.tmp")
    tier.bring(NAMESPACES[0])
    wait_until(lambda: len(segments(local)) == SEGMENTS)
    tier.close()


def test_the_budget_holds_over_all_readers(place, make, local):
    budget = 2 * place[1][0].stat().st_size
    tiers = [make(budget, brings=True) for _ in range(6)]

    def read(tier, first):
        for row in range(first, first + 8):
            assert found(tier, names_of(*ALL, rows=[row]), WIDTH) == names_of(*ALL, rows=[row])
            assert size_of(local) <= budget

    run_at_once(*[functools.partial(read, tier, 5 * i) for i, tier in enumerate(tiers)])
    wait_until(lambda: len(segments(local)) == 1)
    none = make(budget=0)
    assert found(none, names_of(*ALL), WIDTH) == names_of(*ALL)


READ = """
import sys, threading
from tests.helpers.remote import reader
from tests.helpers.storage import NAMESPACES, found, segments, wait_until
from tests.tiers.bucket.test_folder import ALL, WIDTH, names_of
from torchcache2.core.places import Bucket
from torchcache2.tiers.bucket import folder
url, local, budget, kills = sys.argv[1:]
if kills == "True":
    begun = folder.BucketFolder._begun
    def begin(self, names):
        if kept := begun(self, names):  # which holds the lock of what it has begun
            print("begun", flush=True)
            threading.Event().wait()  # until it is killed
    folder.BucketFolder._begun = begin
tier = reader(Bucket.of(url), local, budget=int(budget), writes=True, uploads=False)
assert found(tier, names_of(9), WIDTH) == []
tier.bring(NAMESPACES[0])
for row in range(20):
    assert found(tier, names_of(*ALL, rows=[row]), WIDTH) == names_of(*ALL, rows=[row])
wait_until(lambda: kills == "True" or len(segments(local)) == 1)
tier.close()
print("read", flush=True)
"""


@pytest.mark.slow
def test_the_budget_holds_over_processes_and_who_is_killed_leaves_nothing(place, local):
    budget = 2 * place[1][0].stat().st_size
    killed = warm.start(READ, place[0].url, local, budget, True).until("begun")
    killed.send(9)
    killed.wait()
    assert len(list(local.glob("*/*.tmp"))) == 1 and size_of(local) <= budget
    readers = [warm.start(READ, place[0].url, local, budget, False) for _ in range(6)]
    for process in readers:
        process.until("read")
        assert size_of(local) <= budget
    assert len(segments(local)) == 1 and not list(local.glob("*/*.tmp"))


@pytest.mark.parametrize("spoiled", ["zeros", "cut"])
def test_what_a_power_cut_has_spoiled_is_read_from_the_bucket(make, local, spoiled, log):
    make(brings=True)
    wait_until(lambda: len(segments(local)) == SEGMENTS)
    for file in segments(local):
        if spoiled == "zeros":
            file.write_bytes(bytes(file.stat().st_size))
        else:
            os.truncate(file, 100)
    for tier in (make(), make()):
        assert found(tier, names_of(0), WIDTH) == names_of(0)
        assert tier.stats().corrupt == 0
    assert warnings_of(log) == []


def test_a_segment_that_is_dropped_while_it_comes_does_not_stay(place, make, local, large):
    assert found(make(), names_of(9), WIDTH) == []
    with opened(place[0]) as objects:
        folder, download = BucketFolder(objects, CacheDirectory(str(local), FS), ROOM), objects.download
        name = f"{FOLDER}/{place[1][0].name}"

        def dropped(*args):
            os.unlink(local / f"{name}.head")
            return download(*args)

        objects.download = dropped
        folder.bring([name])
    assert segments(local) == [] and not list(local.glob("*/*.tmp"))
