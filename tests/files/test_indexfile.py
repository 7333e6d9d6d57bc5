"""Runs: what is written is found, and nothing else, whatever becomes of the bytes.

The golden run was written once, by `write_golden`, and stays as it is.
"""

import hashlib
import os
import re
import tracemalloc
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.helpers.storage import Unsynced
from torchcache2.core.errors import DamagedError, NewerFormatError
from torchcache2.files import indexfile as module
from torchcache2.files.filesystem import Descriptors
from torchcache2.files.indexfile import ENTRY, TABLE, IndexFile, Part, by_key, entries_of, write_index_file
from torchcache2.files.layout import read_head
from torchcache2.files.segment import Segment

GOLDEN = Path(__file__).parents[1] / "golden"
NAMESPACE = bytes(range(16))


def name_of(number):
    return f"{number:026d}"


def part_of(segments):
    """Sorted entries of segments by number, whose keys are texts of 16 bytes."""
    table, entries = np.zeros(len(segments), TABLE), [np.empty(0, ENTRY)]
    for place, (number, keys) in enumerate(segments.items()):
        table[place] = name_of(number).encode(), b"", len(keys), 100, number
        data = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        checksums = np.array([xxh3_64_intdigest(key) for key in keys], np.uint64)
        entries.append(entries_of(data, checksums, place))
    return Part(by_key(np.concatenate(entries)), table)


def key(number, group=0):
    """Keys of one group begin alike."""
    return hashlib.md5(b"%d" % group).digest()[:8] + hashlib.md5(b"%d" % number).digest()[:8]


def written(folder, parts, alive, fs=None):
    fs = fs or Unsynced()
    return IndexFile(fs, Descriptors(fs), write_index_file(fs, os.fspath(folder), NAMESPACE, parts, alive))


def found(run, keys):
    """Name of the segment, and row, of each entry of each key."""
    words = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    places, entries = run.find(words)
    here = {one: [] for one in keys}
    for place, entry in zip(places.tolist(), entries, strict=True):
        assert entry["checksum"] == xxh3_64_intdigest(keys[place])
        here[keys[place]].append((run.names[entry["segment"]], int(entry["row"])))
    return here


@hypothesis.given(
    segments=st.lists(
        st.lists(st.integers(0, 600), min_size=1, max_size=300, unique=True), min_size=1, max_size=6
    ),
    dead=st.sets(st.integers(0, 5)),
    groups=st.sampled_from([1, 3, 10**6]),
    most_blocks=st.sampled_from([1, 2, 1 << 20]),
    at_once=st.sampled_from([1, 50, 1 << 20]),
    read_at_once=st.sampled_from([1, 50_000, 1 << 20]),
    cut=st.integers(0, 6),
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_runs_and_runs_of_runs_agree_with_a_dict(
    tmp_path_factory, segments, dead, groups, most_blocks, at_once, read_at_once, cut
):
    folder = tmp_path_factory.mktemp("run")
    by_number = {number: [key(one, one % groups) for one in some] for number, some in enumerate(segments)}
    expected = {}
    for number, keys in by_number.items():
        for row, one in enumerate(keys if number not in dead else []):
            expected.setdefault(one, set()).add((name_of(number), row))
    alive = {name_of(number) for number in by_number if number not in dead}
    hypothesis.assume(alive)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_BLOCKS", most_blocks)
        patch.setattr(module, "_AT_ONCE", at_once)
        first = {number: keys for number, keys in by_number.items() if number < cut}
        second = {number: keys for number, keys in by_number.items() if number >= cut}
        everything = {name_of(number) for number in by_number}
        parts = [part_of(second)] if second else []
        if first:  # a run of what was still alive then
            old = written(folder, [part_of(first)], everything)
            parts.append(Part(old, old.table))
        run = written(folder, parts, alive)
    run.check()
    assert set(run.names) == alive and run.table["rows"].sum() == sum(map(len, expected.values()))
    keys = {key(one, group) for one in range(0, 700, 7) for group in (one % groups, 99)}
    keys = sorted(keys | set(expected))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READ_AT_ONCE", read_at_once)
        here = found(run, keys)
    for one in keys:
        some = set(here[one])
        assert some <= expected.get(one, set()) and len(here[one]) == len(some)
        # Of keys that begin alike, so many that they fill blocks, only those in the last of these are found.
        assert some or one not in expected or groups < 10


@pytest.mark.slow
def test_a_search_for_all_keys_of_a_dataset_takes_little_memory(tmp_path):
    keys = [key(one, one) for one in range(20_000)]
    run = written(tmp_path, [part_of({0: keys})], {name_of(0)})
    tracemalloc.start()
    try:
        here = found(run, keys)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert all(len(here[one]) == 1 for one in keys)


@pytest.mark.slow
def test_damage_is_found_wherever_it_is(tmp_path):
    """A flipped bit, a cut, and what is not written at all: no entry is wrong."""
    keys = [key(number, number) for number in range(400)]
    fs = Unsynced()
    path = write_index_file(
        fs,
        os.fspath(tmp_path),
        NAMESPACE,
        [part_of({1: keys[:200], 2: keys[200:]})],
        {name_of(1), name_of(2)},
    )
    good, generator = Path(path).read_bytes(), np.random.default_rng(0)
    right = found(IndexFile(fs, Descriptors(fs), path), keys)
    unseen = 0
    for turn in range(400):
        data = bytearray(good)
        place = int(generator.integers(len(data)))
        if turn % 4:
            data[place] ^= 1 << int(generator.integers(8))
        else:
            del data[place:]
        Path(path).write_bytes(data)
        try:
            run = IndexFile(fs, Descriptors(fs), path)
        except (DamagedError, NewerFormatError):
            continue
        with pytest.raises(DamagedError):
            run.check()
        for one in keys[::9]:
            try:
                here = found(run, [one])[one]
            except DamagedError:
                continue
            unseen += not here
            assert here in ([], right[one])
    assert unseen < 100


def golden_part():
    path = os.fspath(GOLDEN / "segment-2-none.safetensors")
    fs = Unsynced()
    segment = Segment.open(fs, Descriptors(fs), path, limit=1 << 20)
    head = read_head(fs, path)[0]
    first = head[: 8 + int.from_bytes(head[:8], "little")]
    table = np.zeros(1, TABLE)
    table[0] = name_of(1).encode(), b"", len(segment), len(first), xxh3_64_intdigest(first)
    return Part(by_key(entries_of(segment.keys, segment.checksums, 0)), table)


def write_golden(folder=GOLDEN):
    """Makes the golden file; run it only for a new version of the format."""
    os.replace(written(folder, [golden_part()], {name_of(1)}).path, Path(folder, "run-1.run"))


def test_the_golden_run_is_read_and_written(tmp_path):
    fs, data = Unsynced(), (GOLDEN / "run-1.run").read_bytes()
    part = golden_part()
    run = IndexFile(fs, Descriptors(fs), os.fspath(GOLDEN / "run-1.run"))
    run.check()
    words = np.stack([part.source["low"], part.source["high"]], axis=1)
    places, entries = run.find(words)
    assert places.tolist() == list(range(len(words))) and (entries == part.source).all()
    assert run.namespace == NAMESPACE and run.names == [name_of(1)]
    write_golden(tmp_path)
    assert (tmp_path / "run-1.run").read_bytes() == data
    page = Path(__file__).parents[2].joinpath("docs/format.md").read_text(encoding="utf-8")
    section = page[page.index("## Index files") : page.index("## Heads")]
    lines = re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} )+)", section, re.MULTILINE)
    shown = {int(at, 16): bytes.fromhex(text) for at, text in lines}
    assert shown and all(data[at : at + len(some)] == some for at, some in shown.items())


def test_another_version_is_no_damage(tmp_path):
    run = written(tmp_path, [part_of({1: [key(1)]})], {name_of(1)})
    data = bytearray(Path(run.path).read_bytes())
    data[-48] = 2
    Path(run.path).write_bytes(data)
    with pytest.raises(NewerFormatError):
        IndexFile(Unsynced(), Descriptors(Unsynced()), run.path)
