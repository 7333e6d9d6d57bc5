"""Runs in a folder: whatever runs say, or whoever replaces them, rows are right, and are found in the end."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.nfs import HERE
from tests.helpers.storage import (
    NAMESPACES,
    ReadOnly,
    Watched,
    found,
    keys_of,
    put,
    seal,
    segments,
    size_of,
    warnings_of,
)
from torchcache2.core.process import holds
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import INDEX_FILES_LOCK
from torchcache2.files.filesystem import Descriptors, FileSystem
from torchcache2.files.indexfile import IndexFile, kept_index_files
from torchcache2.tiers.disk.index import NamespaceIndex

ROWS = 8  # of a segment


@pytest.fixture(autouse=True)
def _small(monkeypatch, at_once):
    monkeypatch.setattr(merging, "_LEAST_ROWS", 24)
    monkeypatch.setattr(merging, "_MERGED", 3)


def runs(path, namespace=NAMESPACES[0]):
    return sorted(Path(path).glob(f"{namespace.hex()}/*.run"))


def fill(tier, count, first=0, namespace=NAMESPACES[0], width=4):
    for number in range(first, first + count):
        seal(tier, range(number * ROWS, number * ROWS + ROWS), width, namespace)
    return list(range(first * ROWS, (first + count) * ROWS))


def index_of(tier):
    return tier._index.namespaces[NAMESPACES[0]]


@pytest.mark.parametrize("codec", ["none", "brotli"])
def test_a_new_process_reads_no_head_of_what_runs_have(make, path, codec):
    writer = make(codec=codec)
    names = fill(writer, 30)
    assert 1 <= len(runs(path)) <= 4
    assert index_of(writer).beside_index_files[1] < 24  # who only writes keeps no more in memory either
    fs = Watched()
    tier = make(codec=codec, fs=fs)
    tier.get(keys_of(["nowhere"]))
    beside, rows = index_of(tier).beside_index_files
    assert beside < 3 and rows == beside * ROWS and len(index_of(tier)) == len(names)
    assert fs.calls.count("open") <= len(runs(path)) + beside + 4  # the tag, and the fingerprint
    assert found(tier, names) == names and put(tier, names) == 0
    assert tier.has(keys_of([*names[:5], "nowhere"])).tolist() == [True] * 5 + [False]


def test_what_is_in_memory_is_found_without_a_look_at_runs(make, path):
    fs = Watched()
    tier = make(fs=fs)
    fill(tier, 8)
    put(tier, ["new"])
    assert runs(path) and Descriptors.spare()
    fs.calls.clear()
    assert found(tier, ["new"]) == ["new"] and fs.calls == []


def test_ragged_rows_are_found_by_runs_too(make, path):
    tier = make()
    for number in range(12):
        for width in (3, 50):
            put(tier, [(width, number, row) for row in range(4)], width)
        tier.flush()
    assert runs(path)
    for width in (3, 50):
        names = [(width, number, row) for number in range(12) for row in range(4)]
        assert found(make(), names, width) == sorted(names)


def test_a_reader_of_an_old_run_goes_on_when_it_is_merged(make, path):
    """With the old file still open, and when it has been closed meanwhile."""
    writer = make()
    names = fill(writer, 8)
    readers = [make(), make()]
    assert all(found(tier, names) == names for tier in readers)
    before = runs(path)
    more = fill(writer, 30, 8)
    assert not set(before) & set(runs(path))
    readers[1]._index.descriptors.clear()
    assert found(readers[0], names) == names  # no look is due, as all is found
    found(readers[1], names)  # perhaps it meets what is gone
    for tier in readers:
        assert found(tier, names + more) == names + more
        assert tier.stats().corrupt == tier.stats().faults == 0


@pytest.mark.parametrize(
    "what", ["older", "foreign", "another folder's", "newer version", "empty", "garbage", "a link"]
)
def test_runs_that_are_not_what_was_written_last(make, path, tmp_path, log, what):
    writer = make()
    names = fill(writer, 8)
    old = tmp_path / "old.run"
    shutil.copy(runs(path)[0], old)
    names += fill(writer, 8, 8)
    other = fill(make(), 8, 0, NAMESPACES[1], 7)
    target = runs(path)[0].with_name("7ZZZZZZZZZZZZZZZZZZZZZZZZZ.run")
    source = {"older": old, "foreign": runs(path, NAMESPACES[1])[0]}.get(what, runs(path)[0])
    data = bytearray(source.read_bytes())
    if what == "another folder's":  # the same names of segments, and others' rows
        shutil.rmtree(path)
        names = fill(make(), 16)
    elif what == "newer version":
        data[-48] = 9
    elif what in ("empty", "garbage"):
        data = bytearray(np.random.default_rng(0).bytes(5000 * (what == "garbage")))
    if what == "a link":
        target.symlink_to(source)
    else:
        target.write_bytes(data)
    HERE.seen.clear()  # on NFS, some seconds later
    tier = make()
    found(tier, names)
    assert found(tier, names) == names
    if what != "another folder's":
        assert found(tier, other, 7, NAMESPACES[1]) == other
    is_damaged = what in ("empty", "garbage")
    assert tier.stats().corrupt == is_damaged == len(warnings_of(log))
    assert tier.stats().faults == 0


@pytest.mark.parametrize("options", [{"writes": False}, {"fs": ReadOnly()}, {}])
def test_rows_of_a_damaged_run_are_found_also_where_it_stays(make, path, log, options):
    names = fill(make(), 12)
    for file in runs(path):
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    damaged = len(runs(path))
    tier = make(**options)
    for _ in range(3):
        assert found(tier, names) == names
        assert tier.stats().corrupt == damaged and len(warnings_of(log)) == 1


def test_a_segment_that_another_file_replaces_is_not_read_by_the_old_run(make, path, tmp_path):
    """Somebody renames files: the keys of the file itself decide."""
    names = fill(make(), 8)
    others = fill(make(where=tmp_path / "other"), 8, 100)
    for file, other in zip(segments(path), segments(tmp_path / "other"), strict=True):
        shutil.copy(other, file)
    tier = make()
    assert found(tier, names) == []
    assert found(tier, others) == others and found(tier, names) == []


def test_what_eviction_deletes_is_a_miss_and_leaves_runs_in_the_end(make, path):
    tier = make()
    names = fill(tier, 12)
    reader = make()
    assert found(reader, names) == names
    for file in segments(path)[:6]:
        file.unlink()
    found(reader, [*names, "nowhere"])
    assert found(reader, names) == names[6 * ROWS :] == found(make(), names)
    assert len(index_of(reader)) == 6 * ROWS
    assert put(reader, names) == 6 * ROWS
    for file in segments(path):
        file.unlink()
    fill(tier, 6, 50)
    fs = FileSystem()
    here = {name for run in runs(path) for name in IndexFile(fs, Descriptors(fs), os.fspath(run)).names}
    assert here and here <= {file.stem for file in segments(path)}


def test_runs_count_and_go_with_their_namespace(make, path):
    tier = make(120_000, "lru", "none")
    for number in range(60):
        put(tier, [(number, row) for row in range(ROWS)], 200)
        tier.flush()
        assert size_of(path) <= 120_000
        tier.has(keys_of(["nowhere"]))
        assert index_of(tier).beside_index_files[0] <= 4  # room was made for runs, too
    tier = make()
    names = fill(tier, 8, 20)
    assert runs(path)
    tier.drop(NAMESPACES[0])
    assert runs(path) == [] and found(tier, names) == []


def test_files_are_counted_while_no_thread_can_add_some(make, path, monkeypatch):
    tier, held, counted = make(), [], NamespaceIndex.beside_index_files
    lock = tier._index.lock()
    monkeypatch.setattr(
        NamespaceIndex, "beside_index_files", property(lambda s: held.append(holds(lock)) or counted.fget(s))
    )
    fill(tier, 2)
    assert held == [True, True]


def test_who_cannot_write_runs_goes_on_without(make, path):
    holder = FileSystem()
    path.mkdir()
    lock = holder.create(os.fspath(path / INDEX_FILES_LOCK))
    assert holder.lock(lock, exclusive=True)
    tier = make()
    names = fill(tier, 6)
    assert runs(path) == [] and found(make(), names) == names
    lock.close()
    names += fill(tier, 1, 6)
    assert runs(path) and found(make(), names) == names and tier.stats().faults == 0


def test_keys_are_written_few_times_and_few_runs_are_left():
    sizes, written, most = [], 0, 0
    for _ in range(200):
        kept = kept_index_files(sizes, 1)
        sizes = sorted([*sizes[:kept], 1 + sum(sizes[kept:])], reverse=True)
        written += sizes[kept]
        most = max(most, len(sizes))
    assert sum(sizes) == 200 and written <= 5 * 200 and most <= 9  # of three


@pytest.mark.parametrize("value", [0, 1, 255])
def test_offsets_that_do_not_grow_are_misses_of_their_segment(make, path, value, log):
    writer = make(codec="brotli")
    names = fill(writer, 6, width=2000)
    writer.close()
    assert runs(path)
    damaged = segments(path)[0]
    data = bytearray(damaged.read_bytes())
    index = 8 + int.from_bytes(data[:8], "little")  # keys, checksums, offsets; a run has the first two
    place = index + 24 * ROWS
    data[place + 8 : place + 24] = bytes([value]) * 16
    damaged.write_bytes(data)
    tier = make(codec="brotli")
    here = found(tier, names, 2000)
    assert set(names) - set(here) <= set(names[:ROWS]) and len(here) < len(names)
    assert tier.stats().corrupt == 1 and len(warnings_of(log)) == 1
