"""Folders of many segments and many namespaces: what each call of the tier asks of the system.

Calls are counted rather than seconds. Times are in `docs/tables/index.md`, by `make bench`.
"""

import contextlib
import itertools
import os
import threading
import types

import numpy as np
import pytest

from tests.helpers.nfs import HERE
from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    Unsynced,
    Watched,
    found,
    key_of,
    keys_of,
    put,
    refuse,
    rows_of,
    seal,
    sealed_names,
    segments,
    size_of,
)
from torchcache2.files.removal import make_room
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.index import KeyLocations
from torchcache2.tiers.unwritten import OwnRows, Slabs
from torchcache2.tiers.writer import Pace, Writer

NOWHERE = "nowhere"
ROWS = 8  # of a segment


class Counting(Watched):
    """Also counts the names in folders that were listed."""

    names = 0

    def listing(self, path):
        found = super().listing(path)
        self.names += len(found)
        return found


@pytest.fixture
def removals(monkeypatch):
    """How many keys each removal from an index was about."""
    counts, remove = [], KeyLocations.remove

    def counted(self, numbers):
        counts.append(remove(self, numbers))
        return counts[-1]

    monkeypatch.setattr(KeyLocations, "remove", counted)
    return counts


def computed_by(path, processes, count):
    """Each handle seals the same items, in segments of its own that begin elsewhere; all the items' names."""
    tiers = [DiskTier(path, codec="none", delay=NEVER, fs=Unsynced()) for _ in range(processes)]
    for tier in tiers:
        assert found(tier, [NOWHERE]) == []  # now it does not look for seconds
    for shift, tier in enumerate(tiers):
        for first in range(shift * 3, count * ROWS + shift * 3, ROWS):
            seal(tier, range(first, first + ROWS))
    for tier in tiers:
        tier.close()
    return list(range(count * ROWS + (processes - 1) * 3))


def delete(files):
    for file in files:
        file.unlink()


# Segments that others delete


@pytest.mark.parametrize("met", ["looking", "reading"])
@pytest.mark.parametrize("processes", [2, 3])
def test_files_are_opened_again_once_for_those_that_are_gone(make, path, removals, at_once, met, processes):
    names = computed_by(path, processes, 30)
    fs = Counting()
    tier = make(fs=fs)
    assert found(tier, names) == names
    tier._index.descriptors.clear()
    delete(segments(path)[::2])
    removals.clear()
    fs.calls.clear()
    here = found(tier, [NOWHERE, *names] if met == "looking" else names)
    assert len(removals) == 1  # all of them at once
    # A file is opened to read its rows, or to notice that it is gone; and once more for the index.
    assert fs.calls.count("open") <= 2 * processes * 30 + 1
    if met == "reading":
        found(tier, [NOWHERE])
    fresh = found(make(), names)
    assert found(tier, names) == fresh
    assert set(here) <= set(fresh) and len(fresh) > len(names) / 2


def test_looking_finds_rows_of_gone_segments_elsewhere(make, path, at_once):
    names = computed_by(path, 2, 40)
    tier = make()
    tier.get(keys_of([NOWHERE]))
    delete(segments(path)[:40])
    HERE.seen.clear()  # on NFS, some seconds later
    assert found(tier, [NOWHERE]) == []
    assert found(tier, names) == sealed_names(path, names) == names[3:]


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_rows_are_found_as_long_as_any_copy_is_left(make, path, at_once, turns):
    """Whatever goes first; in the end nothing is left, and everything can be kept again."""
    names = computed_by(path, 3, 20)
    tier = make()
    assert found(tier, names) == names
    files = segments(path)
    order = np.random.default_rng(turns).permutation(len(files)).tolist()
    for some in np.array_split(order, turns):
        delete([files[number] for number in some])
        found(tier, [NOWHERE, *names])  # perhaps it meets what is gone
        assert found(tier, [NOWHERE, *names]) == found(make(), names)
    assert found(tier, names) == []
    assert put(tier, names) == len(names)
    assert found(tier, names) == names


def test_a_forked_child_finds_copies_of_what_its_parent_writes(make, path, at_once):
    tier, other = make(), make()
    assert found(tier, range(10)) == []
    put(tier, range(10))
    seal(other, range(5, 15))
    found(tier, [NOWHERE])
    read, write = os.pipe()
    if os.fork() == 0:
        names = []
        with contextlib.suppress(BaseException):
            names = found(tier, [NOWHERE, *range(15)])
        os.write(write, ",".join(map(str, names)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == ",".join(map(str, range(5, 15)))
    os.wait()
    assert found(tier, range(15)) == list(range(15))


# Where keys are


def test_the_table_agrees_with_a_dict():
    """Segments come and go, with keys that others have: a key is where one of them has it, or nowhere."""
    generator = np.random.default_rng(0)
    table, segments = KeyLocations(), {}
    data = np.frombuffer(b"".join(map(key_of, range(200))), np.uint8).reshape(-1, 16)
    for number in range(300):
        chosen = generator.choice(200, generator.integers(1, 60), replace=bool(generator.integers(2)))
        table.add({number: data[chosen]}, 7)
        segments[number] = chosen
        new = table.find(data[chosen].view("<u8"))
        assert (new >= 0).all()
        if generator.random() < 0.4:
            gone = generator.choice(list(segments), min(len(segments), int(generator.integers(1, 12))), False)
            before = len(table)
            count = table.remove(gone.tolist())
            assert len(table) == before - count
            for one in gone.tolist():
                del segments[one]
        found = table.find(data.view("<u8"))
        here = np.flatnonzero(found >= 0)
        assert len(here) == len(table)
        for key, location in zip(here.tolist(), found[here].tolist(), strict=True):
            assert segments[location >> 32][(location & 0xFFFFFFFF) - 7] == key
    assert table.has_copies


# Making room


# What a flush asks


@pytest.mark.parametrize("in_use", ["one at a time", "all", "unknown"])
def test_namespaces_cost_the_same_each(make, path, in_use):
    fs, now = Counting(), set()
    tier = make(fs=fs, in_use=None if in_use == "unknown" else lambda: now)
    costs = []
    for turn in range(3):
        spaces = [key_of((turn, number)) for number in range(12 * 3**turn)]
        if in_use == "all":
            now.update(spaces)
        fs.calls.clear()
        for space in spaces:
            if in_use == "one at a time":
                now.clear()
                now.add(space)
            assert found(tier, range(4), namespace=space) == []
            put(tier, range(4), namespace=space)
        tier.flush()
        costs.append(len(fs.calls) / len(spaces))
    assert costs[2] <= 1.1 * costs[0] and costs[2] < 60
    assert len(segments(path)) == 156
    for space in spaces[::20]:
        assert sealed_names(path, range(4), namespace=space) == [0, 1, 2, 3]


def test_who_is_in_use_is_not_asked_under_the_lock(make, path):
    """A thread that knows it may wait for the tier's lock."""
    owned = []

    def in_use():
        owned.append(tier._lock()._is_owned())
        return {NAMESPACES[0]}

    tier = make(60_000, codec="none", in_use=in_use)
    for number in range(20):
        found(tier, [NOWHERE], namespace=NAMESPACES[number % 3])
        put(tier, [(number, row) for row in range(10)], 100, NAMESPACES[number % 3])
        tier.flush()
    assert owned and not any(owned)


def test_a_namespace_that_nothing_uses_any_more_may_go_although_nobody_looks(make, path):
    """As of a cache that was closed, in a process that goes on writing little."""
    living = {NAMESPACES[0], NAMESPACES[1]}
    tier = make(codec="none", in_use=lambda: living)
    for namespace in NAMESPACES[:2]:
        seal(tier, range(10), 1000, namespace)
    living.discard(NAMESPACES[0])
    seal(tier, ["little"], 4, NAMESPACES[1])
    assert make_room(tier.directory, 0, size_of(path) - 1, lru=False)
    assert not segments(path, NAMESPACES[0]) and len(segments(path, NAMESPACES[1])) == 2


def test_a_new_namespace_waits_for_the_disk_no_more_than_it_must(make, path):
    class Syncs(Unsynced):
        files = folders = 0

        def sync(self, file):
            self.files += 1

        def sync_folder(self, path):
            self.folders += 1

    fs = Syncs()
    tier = make(fs=fs)
    seal(tier, range(4))
    fs.files = fs.folders = 0
    seal(tier, range(4), namespace=NAMESPACES[1])
    assert (fs.files, fs.folders) == (2, 2)  # two files, the name of their folder, and their names
    seal(tier, range(4, 8), namespace=NAMESPACES[1])
    assert (fs.files, fs.folders) == (3, 3)


# The budget, although nobody looks


# A job that computes slowly


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Slow:
    """A job that puts rows of some kinds each second, and its writer, whose thread does not run."""

    def __init__(self, monkeypatch, delay=5.0):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        self.clock, self.lock = Clock(), threading.RLock()
        self.sealed = []  # time, age of the oldest row
        self.writer = Writer(
            self.lock,
            lambda pending: self.sealed.append((self.clock.now - 1000, self.clock.now - pending.since)),
            lambda pending: None,
            Pace(target=64 << 20, limit=256 << 20, delay=delay),
            at_exit=lambda: None,
            clock=self.clock,
        )
        self.held = OwnRows(rows_of(range(10), 750), Slabs())
        self.keys = keys_of(range(10))
        self.numbers = itertools.count()

    def work(self, seconds, widths=(750,), step=1):
        for _ in range(0, seconds, step):
            for width in widths:
                kind = (self.held.schema, width)
                with self.lock:
                    pending = self.writer.open(NAMESPACES[0], kind, self.numbers)
                    before = pending.nbytes
                    pending.add(self.keys, self.held)
                    self.writer.added(pending, kind, pending.nbytes - before)
            self.rest(step)

    def rest(self, seconds):
        self.clock.now += seconds
        with self.lock:
            self.writer.close_old()
        while self.writer._write_next():
            pass


def test_a_segment_is_large_enough_from_its_target_on():
    pace = Pace(target=100, limit=1000, delay=1.0)
    sizes = [types.SimpleNamespace(nbytes=size) for size in (99, 100, 101)]
    assert list(map(pace.is_enough, sizes)) == [False, True, True]


def test_a_job_of_ten_hours_leaves_at_most_500_segments(monkeypatch):
    job = Slow(monkeypatch)
    job.work(36_000)
    assert 200 < len(job.sealed) <= 500
    assert job.sealed[0] == (1.0, 1.0)  # the first rows are safe soon
    for now, age in job.sealed:
        assert age <= max(6, 0.02 * now + 1)  # what a kill would have lost: a small share of what there is
    assert max(age for _, age in job.sealed) <= 601
    job.work(36_000, step=10)
    ages = [age for _, age in job.sealed]
    assert len(ages) < 600 and 595 <= max(ages) <= 610


@pytest.mark.slow
def test_a_job_with_several_kinds_of_rows_leaves_no_more(monkeypatch):
    job = Slow(monkeypatch)
    job.work(36_000, widths=range(4), step=5)
    assert len(job.sealed) <= 650 and max(age for _, age in job.sealed) <= 605


def test_time_in_which_nothing_waits_does_not_make_rows_wait_longer(monkeypatch):
    job = Slow(monkeypatch)
    for _ in range(20):
        job.work(3)
        job.rest(3600)
        job.rest(3600)
    job.sealed.clear()
    job.work(6)
    job.rest(2)
    assert job.sealed[0][1] == 5  # not a share of the hours


def test_rows_are_sealed_at_flush_however_long_they_may_wait(monkeypatch):
    job = Slow(monkeypatch)
    job.work(5000)
    job.sealed.clear()
    job.work(3)
    job.writer.flush()
    assert [age for _, age in job.sealed][-1] <= 100 and not job.writer.all()


def test_a_namespace_that_is_new_does_not_wait_for_the_share_of_another(make, path):
    """The thread of the writer wakes for what is due first."""
    tier = make(delay=0.2)
    tier._index.begin()
    writer = tier._index.writer
    writer.pace.waited[NAMESPACES[0]] = writer.pace.idled[NAMESPACES[0]] = 100 * NEVER
    put(tier, range(4), namespace=NAMESPACES[0])
    put(tier, range(4), namespace=NAMESPACES[1])
    event = threading.Event()
    for _ in range(1000):
        if segments(path):
            break
        event.wait(0.01)
    assert [file.parent.name for file in segments(path)] == [NAMESPACES[1].hex()]


def test_what_waits_is_counted_when_it_may_be_too_much_and_not_at_each_call(make, monkeypatch):
    counted, count = [], Writer.nbytes.fget
    monkeypatch.setattr(Writer, "nbytes", property(lambda self: counted.append(1) or count(self)))
    tier = make(codec="none", queue=10**6)
    for number in range(50):
        put(tier, [number], 4, key_of(number))
    assert counted == []
    for number in range(300):
        put(tier, [("large", number)], 1000)
    assert counted
