"""Segments that are here in part: each block comes once, for all readers, and what is spoiled comes again."""

import functools
import os
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.buckets import bucket, opened
from tests.helpers.remote import mirrored_disk, reader, upload
from tests.helpers.storage import NAMESPACES, NEVER, Unsynced, found, seal, segments, size_of, warnings_of
from tests.helpers.threads import run_at_once
from torchcache2.files.directory import CacheDirectory
from torchcache2.tiers.bucket import sparse
from torchcache2.tiers.bucket.sparse import BucketFolder
from torchcache2.tiers.disk.tier import DiskTier

FS = Unsynced()
FOLDER = NAMESPACES[0].hex()
WIDTH, ROWS, SEGMENTS = 1000, 40, 3  # rows of 4 kB
ROOM = 10**8


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sparse, "_BLOCK", 10_000)


@pytest.fixture
def place(tmp_path):
    """A bucket of files, and the segments in it."""
    disk = DiskTier(tmp_path / "first", codec="none", delay=NEVER, fs=FS)
    for number in range(SEGMENTS):
        seal(disk, names_of(number), WIDTH)
    disk.close()
    made = bucket("file", tmp_path)
    with opened(made) as objects:
        files = upload(objects, tmp_path / "first")
    return made, files


@pytest.fixture
def make(place, tmp_path):
    """Makes readers of the bucket, each as in a process of its own, with one local folder."""
    tiers = []

    def one(budget=ROOM):
        tiers.append(reader(place[0], tmp_path / "local", budget=budget))
        return tiers[-1]

    yield one
    for tier in tiers:
        tier.close()


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


def names_of(*numbers, rows=range(ROWS)):
    return [(number, row) for number in numbers for row in rows]


def down(*tiers):
    return sum(tier.counts()["bytes_down"] for tier in tiers)


def parts(path):
    return sorted(file.name for file in Path(path).glob("*/*.part*"))


def test_each_block_comes_once_for_all_readers_and_a_whole_segment_gets_its_name(place, make, local):
    tiers = [make() for _ in range(3)]
    assert all(found(tier, names_of(9), WIDTH) == [] for tier in tiers)
    heads = down(*tiers)

    def read(tier, step):
        for start in range(ROWS):
            names = [(number, (start * step) % ROWS) for number in range(SEGMENTS)]
            assert found(tier, names, WIDTH) == names

    run_at_once(*[functools.partial(read, *pair) for pair in zip(tiers, (1, 7, 11), strict=True)])
    size = sum(file.stat().st_size for file in place[1])
    # Two readers that look at the same time may both fetch a block.
    assert down(*tiers) - heads < 1.5 * size
    folder = BucketFolder(tiers[0].bucket.objects, CacheDirectory(str(local), FS), ROOM)
    assert all(folder.fill(str(local / FOLDER / file.name)) for file in place[1])
    assert [file.read_bytes() for file in segments(local)] == [file.read_bytes() for file in place[1]]
    assert parts(local) == []


def test_the_first_batch_gets_what_it_needs_and_those_after_it_more_and_more(make):
    tier, sizes = make(), []
    assert found(tier, names_of(9), WIDTH) == []
    for row in range(0, ROWS, 6):
        before = down(tier)
        assert found(tier, [(0, row)], WIDTH) == [(0, row)]
        sizes.append(down(tier) - before)
    assert sizes[0] <= 20_000 and max(sizes) > 20_000 and sizes[-1] == 0


def test_whoever_has_fetched_much_gets_all_of_a_segment_at_the_first_visit(make):
    tier = make()
    assert found(tier, names_of(0), WIDTH) == names_of(0)
    before = down(tier)
    assert found(tier, names_of(1, rows=[3]), WIDTH) == names_of(1, rows=[3])
    assert down(tier) - before > ROWS * WIDTH * 4
    before = down(tier)
    assert found(tier, names_of(1), WIDTH) == names_of(1)
    assert down(tier) == before


def test_neighbours_are_fetched_with_one_request(make):
    tier = make()
    assert found(tier, names_of(9), WIDTH) == []
    asked, read = [], tier.bucket.objects.fetch
    tier.bucket.objects.fetch = lambda ranges: asked.append(list(ranges)) or read(ranges)
    assert found(tier, names_of(0, 1, rows=(5, 6, 7, 8)), WIDTH) == names_of(0, 1, rows=(5, 6, 7, 8))
    (ranges,) = asked
    assert len(ranges) == 2 and all(end - start <= 30_000 for _, start, end in ranges)


def test_what_is_kept_comes_with_fewer_requests_than_what_is_not(make):
    counts, names = [], names_of(0, rows=range(0, ROWS, 10))
    for budget in (0, ROOM):
        tier = make(budget)
        assert found(tier, names_of(9), WIDTH) == []
        asked, read = [], tier.bucket.objects.fetch
        tier.bucket.objects.fetch = lambda ranges: asked.append(list(ranges)) or read(ranges)  # noqa: B023
        assert found(tier, names, WIDTH) == names
        counts.append([len(ranges) for ranges in asked])
    assert counts == [[4], [1]]


@pytest.mark.parametrize("spoiled", ["zeros", "cut", "no map", "another map", "a map alone", "a whole file"])
def test_what_a_power_cut_has_spoiled_comes_again(make, local, spoiled, log):
    tier = make()
    assert found(tier, names_of(0, rows=(0, 20)), WIDTH) == names_of(0, rows=(0, 20))
    (part,) = local.glob("*/*.part")
    states = Path(f"{part}.map")
    if spoiled == "zeros":
        part.write_bytes(bytes(part.stat().st_size))
    elif spoiled == "cut":
        os.truncate(part, 100)
    elif spoiled == "no map":
        states.unlink()
        os.utime(part, (0, 0))
    elif spoiled == "a map alone":
        part.unlink()
    elif spoiled == "a whole file":
        part.rename(str(part).removesuffix(".part"))
    else:
        states.write_bytes(b"\1" * states.stat().st_size)
    for tier in (make(), make()):
        assert found(tier, names_of(0), WIDTH) == names_of(0)
        assert tier.stats().corrupt == 0
    assert warnings_of(log) == []


def test_what_a_killed_process_was_fetching_is_fetched_by_another(make, local, monkeypatch):
    monkeypatch.setattr(sparse, "_STALE", 0.2)
    tier = make()
    assert found(tier, [(0, 0)], WIDTH) == [(0, 0)]
    (states,) = local.glob("*/*.map")
    states.write_bytes(states.read_bytes().replace(b"\0", b"\2"))
    begun = time.monotonic()
    assert found(make(), names_of(0), WIDTH) == names_of(0)
    assert 0.2 <= time.monotonic() - begun < 10


def test_where_there_is_no_room_ranges_come_and_nothing_is_kept(place, make, local):
    tier = make(budget=place[1][0].stat().st_size * 3 // 2)
    for _ in range(2):
        assert found(tier, names_of(0, 1, 2), WIDTH) == names_of(0, 1, 2)
    assert len(segments(local)) == 1 and parts(local) == []
    assert size_of(local) < place[1][0].stat().st_size * 2
    none = make(budget=0)
    assert found(none, names_of(0, 1, 2), WIDTH) == names_of(0, 1, 2)


def test_what_is_not_whole_makes_room_for_new_rows(make, local):
    tier = make()
    assert len(found(tier, names_of(0, 1, 2, rows=[3]), WIDTH)) == 3
    assert len(parts(local)) == 6
    disk = mirrored_disk(local, size_of(local) + 10_000)
    seal(disk, names_of(7), WIDTH)
    assert len(segments(local)) >= 1 and len(parts(local)) < 6
    assert found(tier, names_of(0, 1, 2), WIDTH) == names_of(0, 1, 2)
    disk.close()


def test_a_segment_that_is_dropped_while_it_comes_does_not_stay(make, local):
    tier = make()
    assert found(tier, names_of(0, rows=[3]), WIDTH) == names_of(0, rows=[3])
    (part,) = local.glob("*/*.part")
    folder = BucketFolder(tier.bucket.objects, CacheDirectory(str(local), FS), ROOM)
    path = str(part).removesuffix(".part")
    assert folder.sizes_of(path)
    os.unlink(path + ".head")
    assert not folder.fill(path)
    assert segments(local) == [] and parts(local) == []


def test_segments_are_filled_only_when_nobody_reads(place, make, local):
    tier = make()
    assert found(tier, [(0, 3)], WIDTH) == [(0, 3)]
    folder = BucketFolder(tier.bucket.objects, CacheDirectory(str(local), FS), ROOM)
    path, filled = str(local / FOLDER / place[1][1].name), []
    thread = threading.Thread(target=lambda: filled.append(folder.fill(path)))
    with tier.bucket.folder.reading():
        thread.start()
        time.sleep(0.2)
        assert filled == [] and not os.path.exists(path)
    time.sleep(0.2)
    assert filled == [] and folder.has_readers()  # whoever has read just now is likely to go on
    thread.join()
    assert filled == [True] and os.path.exists(path) and not folder.has_readers()
