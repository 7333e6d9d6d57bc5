"""The disk tier: what is in the directory, who sees it, what goes when it is full, whose files are left."""

import errno
import functools
import gc
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest

from tests.helpers.nfs import HERE
from tests.helpers.storage import (
    CPU,
    NAMESPACES,
    NEVER,
    ReadOnly,
    Unsynced,
    Watched,
    fill,
    flip,
    found,
    keys_of,
    put,
    refuse,
    rows_of,
    seal,
    sealed_names,
    segments,
    set_age,
    size_of,
    snapshot,
    strange_files,
    wait_until,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2 import OptionError
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.files import filesystem
from torchcache2.files.directory import FINGERPRINT, LOCK, TAG, CacheDirectory
from torchcache2.files.filesystem import FileSystem, ulid
from torchcache2.files.removal import in_use, make_room
from torchcache2.tiers.disk import index as located_module
from torchcache2.tiers.disk import reading as reading_module
from torchcache2.tiers.disk.tier import DiskTier

CODECS = ["none", "brotli", "blosc2"]


class Gated(Unsynced):
    """Waits for the disk as long as a gate is closed."""

    def __init__(self):
        self.gates = {"sync": threading.Event(), "sync_folder": threading.Event()}
        self.entered = set()
        for gate in self.gates.values():
            gate.set()

    def close(self, *names):
        for name in names:
            self.gates[name].clear()
        self.entered.clear()

    def open_all(self):
        for gate in self.gates.values():
            gate.set()

    def sync(self, file):
        self.entered.add("sync")
        assert self.gates["sync"].wait(60)

    def sync_folder(self, path):
        self.entered.add("sync_folder")
        assert self.gates["sync_folder"].wait(60)


def refuse_to_delete(file):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), file)


def header_of(file):
    data = Path(file).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[8:end], data[end:]


# What is in the directory


def test_the_directory_is_as_documented(make, path):
    tier = make(description=lambda namespace: {"class": "Backbone", "namespace in words": namespace.decode()})
    seal(tier, range(5), namespace=NAMESPACES[0])
    seal(tier, range(3), namespace=NAMESPACES[1])
    assert (path / TAG).read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    assert sorted(os.listdir(path)) == sorted([TAG, *(space.hex() for space in NAMESPACES[:2])])
    for space in NAMESPACES[:2]:
        folder = path / space.hex()
        (file,) = segments(path, space)
        assert re.fullmatch(r"[0-7][0-9A-HJKMNP-TV-Z]{25}\.safetensors", file.name)
        assert sorted(os.listdir(folder)) == sorted([FINGERPRINT, file.name])
        document = json.loads((folder / FINGERPRINT).read_text())
        assert document["namespace"] == space.hex() and document["class"] == "Backbone"
        assert document["namespace in words"] == space.decode()
    assert tier.stats().bytes == size_of(path)


@pytest.mark.parametrize("codec", CODECS)
def test_segments_have_the_codec_that_was_asked_for(make, path, codec):
    tier = make(codec=codec)
    seal(tier, range(20), 1024)
    with safe_open(segments(path)[0], "np") as file:
        assert file.metadata()["codec"] == codec
        assert file.metadata()["namespace"] == NAMESPACES[0].hex()
    assert found(tier, range(25), 1024) == list(range(20))
    raw = 20 * 4096
    assert (size_of(path) < 0.9 * raw) == (codec != "none")


# When rows are sealed


def test_rows_are_sealed_when_there_are_enough(make, path):
    tier = make(10**6, codec="none")
    for start in range(0, 400, 10):
        put(tier, range(start, start + 10), 250)
    wait_until(lambda: len(segments(path)) >= 3)
    for file in segments(path):
        assert 100_000 < file.stat().st_size < 150_000
    assert found(tier, range(400), 250) == list(range(400))


def test_rows_of_a_temporary_directory_are_not_written_at_close(make, path):
    tier = make(temporary=True)
    put(tier, range(10))
    tier.close()
    assert segments(path) == []


def test_rows_of_one_kind_share_a_segment_whatever_their_extents(make, path):
    tier = make()
    for length in (3, 5, 3, 8):
        put(tier, [("ragged", length, segments) for segments in range(2)], length)
    put(tier, ["other"], 4, NAMESPACES[1])
    tier.flush()
    assert len(segments(path, NAMESPACES[0])) == 1 and len(segments(path, NAMESPACES[1])) == 1
    for length in (3, 5, 8):
        assert len(found(make(), [("ragged", length, 0), ("ragged", length, 1)], length)) == 2


def test_a_caller_waits_for_a_slow_disk_and_then_goes_on(make):
    fs = Gated()
    tier = make(codec="none", queue=100 * 4000, fs=fs)
    fs.close("sync")
    done = []

    def work():
        for start in range(0, 500, 10):
            done.append(put(tier, range(start, start + 10), 1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: tier.stats().rows >= 90)
        thread.join(0.3)
        assert thread.is_alive()
        waiting = tier.stats().rows
        assert 90 <= waiting <= 110
        assert found(tier, range(waiting), 1000) == list(range(waiting))  # reading does not wait
    finally:
        fs.open_all()
        thread.join(60)
    assert done == [10] * 50
    tier.flush()
    assert found(tier, range(500), 1000) == list(range(500))


@pytest.mark.parametrize("what", ["flush", "put"])
def test_who_waits_for_the_disk_may_be_interrupted_right_after_the_lock_was_released(make, what):
    def interrupt(frame, event, argument):
        if event == "c_return" and argument.__name__ == "_release_save":
            sys.setprofile(None)
            raise KeyboardInterrupt

    fs = Gated()
    tier = make(codec="none", queue=1000, fs=fs)
    fs.close("sync")
    others = threading.Thread(target=put, args=(tier, [0], 1000))
    others.start()
    try:
        wait_until(lambda: "sync" in fs.entered)
        sys.setprofile(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.flush() if what == "flush" else put(tier, [1], 1000)
    finally:
        sys.setprofile(None)
        fs.open_all()
        others.join(60)
    tier.flush()
    assert found(tier, range(2), 1000) == list(range(1 if what == "flush" else 2))


def test_flush_does_not_wait_for_rows_that_come_later(make):
    class Feeding(Unsynced):
        """Whenever a segment is written, others put enough rows for the next one."""

        tier, fed = None, 0

        def sync(self, file):
            if self.tier is not None and self.fed < 200:
                self.fed += 1
                self.tier.put(keys_of([("fed", self.fed, i) for i in range(30)]), rows_of(range(30), 1000))

    fs = Feeding()
    tier = make(800_000, "lru", "none", queue=10**9, fs=fs)  # nobody ever waits for room
    put(tier, range(5), 8)
    fs.tier = tier
    tier.flush()
    fs.tier = None
    assert fs.fed < 100


# Other handles


def test_another_handle_finds_what_was_sealed_by_any_codec(make):
    for number, codec in enumerate(CODECS):
        tier = make(codec=codec)
        seal(tier, range(number * 40, number * 40 + 30), 512, NAMESPACES[0])
        seal(tier, range(number * 50, number * 50 + 50), 3, NAMESPACES[1])
        seal(tier, range(number * 40 + 30, number * 40 + 40), 512, NAMESPACES[0])
    for codec in CODECS:
        other = make(codec=codec)
        assert found(other, range(130), 512, NAMESPACES[0]) == list(range(120))
        assert found(other, range(160), 3, NAMESPACES[1]) == list(range(150))
        assert other.stats().rows == 270 and other.stats().bytes == tier.stats().bytes


def test_new_segments_are_looked_for_at_most_every_few_seconds(make, monkeypatch):
    assert 0.5 <= located_module._LOOK_EVERY <= 5
    one, fs = make(), Watched()
    two = make(fs=fs)
    assert found(two, range(10)) == []
    seal(one, range(10))
    fs.calls.clear()
    monkeypatch.setattr(located_module, "_LOOK_EVERY", NEVER)
    for _ in range(5):
        assert found(two, range(10)) == []
    assert "listing" not in fs.calls  # a call may take hold of the folder, which is there now
    monkeypatch.setattr(located_module, "_LOOK_EVERY", 0.0)
    assert found(two, range(10)) == list(range(10))


def test_hits_do_not_look_for_more(make, at_once):
    fs = Watched()
    tier = make(fs=fs)
    seal(tier, range(10))
    found(tier, range(10))
    fs.calls.clear()
    assert found(tier, range(10)) == list(range(10))
    assert set(fs.calls) <= {"read", "will_need"}


@pytest.mark.usefixtures("at_once")
def test_what_a_handle_has_sealed_it_does_not_open_again(make):
    fs = Watched()
    tier = make(fs=fs)
    seal(tier, range(10))
    seal(tier, range(10, 20))
    fs.calls.clear()
    assert found(tier, [99]) == []  # looks for segments of others
    assert "listing" in fs.calls and "open" not in fs.calls
    assert tier.stats().rows == 20


def test_few_files_are_open_however_many_segments_there_are(make, path, monkeypatch):
    fill(path, 200, width=4, rows=1)
    tier = make()
    monkeypatch.setattr(filesystem, "most_open", lambda: 128)  # a quarter of the usual limit, with the holds
    before = len(os.listdir("/proc/self/fd"))
    names = [(number, 0) for number in range(200)]
    for _ in range(2):
        assert found(tier, names, 4) == names
    assert len(os.listdir("/proc/self/fd")) - before <= 140
    tier.close()
    del tier
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - before <= 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("why", ["reads are slow", "reads are remote"])
def test_rows_are_asked_for_beside_the_reading(path, threads, why, monkeypatch):
    class Asked(Unsynced):
        """Who asks for rows; the system refuses."""

        is_remote = why == "reads are remote"

        def is_away(self, file):
            return self.is_remote

        def __init__(self):
            self.by = []

        def read(self, *args):
            if not self.is_remote:
                time.sleep(0.02)
            return super().read(*args)

        def will_need(self, file, offset, size):
            self.by.append(threading.current_thread() is threading.main_thread())
            raise OSError(errno.EIO, "not now")

    fill(path, 2)
    tier = DiskTier(path, codec="none", delay=NEVER, fs=(fs := Asked()))
    names = [(number, i) for number in range(2) for i in range(0, 10, 2)]
    before = threading.active_count()
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    assert found(tier, names, 1000) == names
    assert fs.by == [fs.is_remote] * (2 if fs.is_remote or threads else 0)  # one for each segment
    assert threading.active_count() == before
    assert tier.stats().faults == 0
    tier.close()


def test_rows_that_are_in_memory_are_not_asked_for(path, monkeypatch):
    class Silent(Unsynced):
        def will_need(self, file, offset, size):
            raise AssertionError("nobody waited")

    monkeypatch.setattr("torchcache2.files.segment._SLOW", 60.0)
    fill(path, 2)
    tier = DiskTier(path, codec="none", delay=NEVER, fs=Silent())
    names = [(number, i) for number in range(2) for i in range(10)]
    assert found(tier, names, 1000) == names
    tier.close()


@pytest.mark.parametrize("codec", ["none", "brotli"])
@pytest.mark.parametrize(("count", "width"), [(98_310, 1), (150_000, 1), (3_080, 1030), (4_000, 1030)])
@pytest.mark.one_in(2)
def test_the_index_takes_at_most_64_bytes_a_row(make, codec, count, width):
    # The counts are where a table has just grown, and where it has not for long.
    tier = make(codec=codec, fs=Unsynced())
    generator = np.random.default_rng(0)
    output = torch.randn(1000, width).relu()
    for start in range(0, count, 1000):
        size = min(1000, count - start)
        data = generator.integers(0, 256, (size, 16), dtype=np.uint8)
        tier.put(Keys(NAMESPACES[0], data), Rows.from_pytree(output[:size], size, device=CPU))
        if start % 20_000 == 0:
            tier.flush()
    tier.flush()
    other = make(codec=codec)
    other.get(keys_of([0]))
    for handle in (tier, other):
        assert handle.stats().rows == count
        assert handle.index_bytes <= 64 * count


# Directories that are not the cache's, or of a later version


def test_a_path_that_is_a_file_is_an_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path, message in (file, "is a file"), (file / "below", "leads through a file"):
        with pytest.raises(OptionError, match=message):
            DiskTier(path)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", ["notes.txt", ".hidden", "folder/", TAG, "0" * 31 + "/", "0" * 32])
def test_a_folder_with_somebody_elses_files_is_an_error(path, content):
    path.mkdir()
    if content.endswith("/"):
        (path / content).mkdir()
    else:
        (path / content).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# Another program's.\n")
    before = snapshot(path)
    with pytest.raises(OptionError) as caught:
        DiskTier(path)
    assert repr(content.rstrip("/")) in str(caught.value) and repr(str(path)) in str(caught.value)
    assert snapshot(path) == before and len(os.listdir(path)) == 1


def test_an_empty_folder_is_fine(make, path):
    path.mkdir()
    seal(make(), range(3))
    assert sealed_names(path, range(3)) == [0, 1, 2]


def test_a_directory_whose_tag_is_gone_is_a_cache_again(make, path):
    seal(make(), range(3))
    (path / TAG).unlink()
    assert found(make(), range(3)) == [0, 1, 2]
    assert (path / TAG).exists()


def foreign_files(path):
    """What people and programs may have put into a cache directory; every path that must stay."""
    folder = path / NAMESPACES[0].hex()
    name = ulid()
    (path / "outside.bin").write_bytes(b"o" * 5000)
    files = {
        path / "notes.txt": b"n" * 5000,
        path / f"{name}.safetensors": b"not in a namespace" * 500,
        path / ("A" * 32) / f"{name}.safetensors": b"no namespace" * 500,
        path / ("a" * 31) / f"{name}.safetensors": b"no namespace" * 500,
        path / ("0" * 33) / f"{name}.safetensors": b"no namespace" * 500,
        path / "other" / "deep" / f"{name}.safetensors": b"x" * 5000,
        path / ("b" * 32): b"a file, and no folder" * 200,
        folder / "README": b"r" * 5000,
        folder / "features.safetensors": b"f" * 5000,
        folder / f"{name.lower()}.safetensors": b"l" * 5000,
        folder / f"{name[:-1]}.safetensors": b"s" * 5000,
        folder / f"{name}0.safetensors": b"s" * 5000,
        folder / f"8{name[1:]}.safetensors": b"s" * 5000,
        folder / f"{name}.safetensors.bak": b"b" * 5000,
        folder / f"{name}.safetensors~": b"b" * 5000,
        folder / f"{name}.pt": b"p" * 5000,
        folder / f"{name}.tmp": b"t" * 5000,
        folder / f"{name}.corrupt": b"c" * 5000,
        folder / f"{FINGERPRINT}.bak": b"{}" * 2500,
        folder / "folder" / f"{name}.safetensors": b"d" * 5000,
        folder / f"{ulid()}.safetensors" / "file": b"a folder with a segment's name" * 100,
        path / ("c" * 32) / "file": b"only this" * 500,
    }
    for file, data in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    link = folder / f"{ulid()}.safetensors"
    link.symlink_to(path / "outside.bin")
    return {**files, path / "outside.bin": b"o" * 5000, link: b"o" * 5000}


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_foreign_files_are_neither_counted_nor_deleted(make, path, policy, log):
    fill(path, 3)
    mine, old = size_of(path), segments(path)
    files = foreign_files(path)
    tier = make(10**6, policy, "none", in_use=lambda: {NAMESPACES[1]})
    assert tier.stats().bytes == mine
    assert len(found(tier, [(number, row) for number in range(3) for row in range(10)], 1000)) == 30
    for number in range(60):
        put(tier, [("new", number, row) for row in range(10)], 1000, NAMESPACES[1])
    tier.flush()
    assert not any(file.exists() for file in old) and tier.stats().evictions >= 30
    for namespace in NAMESPACES:
        tier.drop(namespace)
    tier.close()
    for file, data in files.items():
        assert file.read_bytes() == data
    assert tier.stats().corrupt == 0
    assert len(warnings_of(log)) == (policy == "keep")  # it was full


def newer_segment(path):
    """A whole segment of a later version, with tensors that this one does not know."""
    (file,) = segments(path)
    header, _, rest = header_of(file)
    header["__metadata__"].update(format_version="3", checksum="0" * 16, codec="quantum")
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little")
    rows = min(header[name]["data_offsets"][0] for name in header if name.startswith(("output", "payload")))
    digits = xxh3_64_hexdigest(start + text + rest[:rows]).encode()
    file.write_bytes(start + text.replace(b"0" * 16, digits, 1) + rest)


@pytest.mark.parametrize("first", ["get", "put"])
def test_a_newer_segment_is_neither_read_nor_deleted_and_gets_none_beside_it(make, path, log, first):
    seal(make(codec="none"), range(10))
    newer_segment(path)
    before = snapshot(path)
    tier = make(10_000, "lru")
    if first == "put":
        put(tier, range(100, 110))
    assert found(tier, range(10)) == []
    assert put(tier, range(10, 20)) == 0
    tier.flush()
    assert found(tier, range(20)) == []
    tier.drop(NAMESPACES[0])
    stats = tier.stats()
    tier.close()
    assert stats.corrupt == stats.faults == stats.evictions == 0
    assert {name: data for name, data in snapshot(path).items() if name != LOCK} == before
    (warning,) = warnings_of(log)
    assert "newer" in warning.getMessage() or "format 2" in warning.getMessage()
    assert "Upgrade torchcache2" in warning.getMessage()


def test_a_directory_is_made_by_whoever_comes_first(path):
    tiers = []

    def work(number):
        tier = DiskTier(path, delay=NEVER)
        put(tier, [number])
        tier.close()
        tiers.append(tier)

    run_at_once(*[functools.partial(work, number) for number in range(8)])
    assert len(tiers) == 8 and sum(tier.stats().faults for tier in tiers) == 0
    assert sealed_names(path, range(8)) == list(range(8))
    assert strange_files(path) == []


# Budget


class Measuring(Unsynced):
    """How many bytes there were at most, and in the largest segment."""

    lock_of_all = threading.RLock()

    def __init__(self, path):
        self.path = path
        self.most = self.largest = 0

    def write(self, file, buffers, offset):
        with self.lock_of_all:
            return super().write(file, buffers, offset)

    def remove(self, path):
        with self.lock_of_all:
            super().remove(path)

    def rename(self, old, new):
        with self.lock_of_all:
            super().rename(old, new)
            self.most = max(self.most, size_of(self.path))
            self.largest = max(self.largest, os.path.getsize(new))


@pytest.mark.parametrize("threads", [True, False], ids=["thread", "no thread"])
@pytest.mark.parametrize("policy", ["keep", "lru"])
@pytest.mark.parametrize("budget", [3_000, 40_000, 400_000])
@pytest.mark.one_in(6)
def test_the_budget_is_exceeded_by_a_segment_at_most(path, policy, budget, threads, monkeypatch):
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    fs = Measuring(path)
    tier = DiskTier(path, budget, policy, "none", delay=NEVER, fs=fs)
    generator = np.random.default_rng(0)
    for _ in range(100):
        width = int(generator.choice([1, 10, 300, 1500]))
        namespace = NAMESPACES[generator.integers(3)]
        names = [(width, i) for i in generator.integers(0, 500, generator.integers(1, 8)).tolist()]
        names = list(dict.fromkeys(names))
        put(tier, names, width, namespace)
        if generator.random() < 0.2:
            tier.flush()
        found(tier, names, width, namespace)
    tier.close()
    # Beside the thread writes whoever flushes.
    assert 0.3 * budget < fs.most <= budget + (fs.largest if threads else 0)
    assert tier.stats().faults == 0


def test_a_small_budget_makes_small_segments(make, path):
    tier = make(100_000, codec="none")
    for start in range(0, 200, 10):
        put(tier, range(start, start + 10), 100)
    tier.flush()
    assert found(tier, range(200), 100) == list(range(200))
    assert len(segments(path)) >= 5
    assert max(file.stat().st_size for file in segments(path)) < 20_000


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_rows_that_the_budget_has_no_room_for_do_not_keep_others_out(make, path, policy):
    tier = make(20_000, policy, "none")
    assert put(tier, ["huge"], 6_000) == 0
    put(tier, ["almost"], 4_990)  # with its header it is larger than the budget
    tier.flush()
    seal(tier, range(10), 100)
    assert found(tier, range(10), 100) == list(range(10))
    assert size_of(path) <= 20_000


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_a_budget_of_nothing_keeps_nothing(make, path, policy):
    tier = make(0, policy)
    assert put(tier, range(3)) == 0
    tier.flush()
    assert found(tier, range(3)) == [] and segments(path) == []


def test_mru_keeps_what_came_first_and_says_what_to_do(make, path, log):
    tier = make(100_000, codec="none")
    for start in range(0, 400, 10):
        put(tier, range(start, start + 10), 100)
        tier.flush()
    here = found(tier, range(400), 100)
    assert here == list(range(len(here))) and 100 < len(here) < 250
    assert size_of(path) <= 100_000 and tier.stats().evictions == 0
    (warning,) = warnings_of(log)
    words = ("full", str(path), "100.0 kB", "max_persistent_cache_size", "policy='lru'", "torchcache2 prune")
    assert all(word in warning.getMessage() for word in words), warning.getMessage()
    larger = make(10**6, codec="none")
    seal(larger, range(len(here), 400), 100)
    assert found(larger, range(400), 100) == list(range(400))


def test_lru_drops_the_segments_that_were_not_used_for_longest(make, path):
    fill(path, 10)
    files = segments(path)
    budget = size_of(path) + 1000
    tier = make(budget, "lru", "none")
    used = [(number, row) for number in (0, 3) for row in range(10)]
    assert found(tier, used, 1000) == used
    seal(tier, [("new", row) for row in range(20)], 1000)
    gone = [number for number, file in enumerate(files) if not file.exists()]
    assert gone == [1, 2, 4][: len(gone)] and len(gone) >= 2
    everything = [(number, row) for number in range(10) for row in range(10)]
    here = found(tier, everything, 1000)
    assert here == [name for name in everything if name[0] not in gone]
    assert tier.stats().evictions == 10 * len(gone)
    assert sealed_names(path, [("new", row) for row in range(20)], 1000) == [
        ("new", row) for row in range(20)
    ]
    assert size_of(path) <= budget


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_unused_namespaces_go_first_the_least_recently_used_one_first(make, path, policy):
    names = [(number, row) for number in range(4) for row in range(10)]
    fill(path, 4, namespace=NAMESPACES[0])
    fill(path, 4, namespace=NAMESPACES[1])
    for number, file in enumerate(segments(path, NAMESPACES[1])):
        set_age(file, 9000 - number)  # used less recently than the other
    budget = size_of(path) + 50_000
    tier = make(budget, policy, "none")
    seal(tier, names[:10], 1000, NAMESPACES[2])
    before = segments(path, NAMESPACES[1])
    seal(tier, names[10:20], 1000, NAMESPACES[2])
    left = segments(path, NAMESPACES[1])
    assert left == before[len(before) - len(left) :] and 0 < len(left) < 4
    for number in range(20):
        put(tier, [("new", number, row) for row in range(10)], 1000, NAMESPACES[2])
        tier.flush()
        if segments(path, NAMESPACES[1]):
            assert len(segments(path, NAMESPACES[0])) == 4
        if segments(path, NAMESPACES[0]):
            assert len(segments(path, NAMESPACES[2])) == number + 3
        assert size_of(path) <= budget
    assert not (path / NAMESPACES[0].hex()).exists() and not (path / NAMESPACES[1].hex()).exists()
    assert len(segments(path, NAMESPACES[2])) >= 7
    first = found(tier, names[:20], 1000, NAMESPACES[2])
    assert (first == names[:20]) == (policy == "keep")


@pytest.mark.parametrize("by", ["writing", "reading"])
def test_a_namespace_that_another_handle_uses_is_in_use(make, path, log, by):
    other = make()
    if by == "writing":
        seal(other, [(0, row) for row in range(10)], 1000)
    else:
        fill(path, 1)
        found(other, [(0, 0)], 1000)
    budget = size_of(path) + 60_000
    tier = make(budget, codec="none")
    for number in range(10):
        put(tier, [("new", number, row) for row in range(5)], 1000, NAMESPACES[1])
        tier.flush()
    assert len(warnings_of(log)) == 1
    assert sealed_names(path, [(0, row) for row in range(10)], 1000) == [(0, row) for row in range(10)]
    other.close()
    again = make(budget, codec="none")
    seal(again, [("again", row) for row in range(10)], 1000, NAMESPACES[1])
    assert segments(path, NAMESPACES[0]) == []


def test_a_namespace_without_rows_that_nothing_alive_uses_is_not_in_use(make, path):
    fill(path, 1)
    living = {NAMESPACES[0], NAMESPACES[1]}
    tier = make(in_use=lambda: living)
    found(tier, [(0, 0)], 1000)
    segments(path)[0].unlink()  # another process has made room
    tier.look_again(NAMESPACES[0])
    assert found(tier, [(0, 0), "missing"], 1000) == []
    assert in_use(tier.directory, NAMESPACES[0].hex())
    living.remove(NAMESPACES[0])
    found(tier, range(1), namespace=NAMESPACES[1])
    assert not in_use(tier.directory, NAMESPACES[0].hex())


def test_what_nothing_alive_uses_makes_room_and_what_is_used_again_does_not(make, path):
    living = {NAMESPACES[0], NAMESPACES[1]}
    tier = make(200_000, codec="none", in_use=lambda: living)
    rows = [("row", row) for row in range(10)]
    seal(tier, rows, 1000, NAMESPACES[0])
    living.remove(NAMESPACES[0])
    seal(tier, rows, 1000, NAMESPACES[1])
    living.add(NAMESPACES[0])
    assert found(tier, rows, 1000, NAMESPACES[0]) == rows  # used again, and all of it is here
    other = make(200_000, codec="none")
    for number in range(10):
        put(other, [(number, row) for row in range(5)], 1000, NAMESPACES[2])
        other.flush()
    assert sealed_names(path, rows, 1000, NAMESPACES[0]) == rows
    living.remove(NAMESPACES[0])
    for number in range(5):
        put(tier, [(number, row) for row in range(10)], 1000, NAMESPACES[1])
        tier.flush()
    assert found(tier, rows, 1000, NAMESPACES[0]) == []
    assert found(tier, rows, 1000, NAMESPACES[1]) == rows
    assert tier.stats().evictions == 10


def test_several_writers_exceed_the_budget_by_a_segment_each(path):
    budget, writers, handles, faults = 300_000, 4, [], []

    def work(number):
        fs = Measuring(path)
        handles.append(fs)
        tier = DiskTier(path, budget, "lru", "none", delay=NEVER, fs=fs)
        for batch in range(60):
            put(tier, [(number, batch, i) for i in range(5)], 1000, NAMESPACES[number % 2])
        tier.close()
        faults.append(tier.stats().faults)

    run_at_once(*[functools.partial(work, number) for number in range(writers)])
    assert faults == [0] * writers
    assert max(fs.most for fs in handles) <= budget + writers * max(fs.largest for fs in handles)
    assert size_of(path) > 0.5 * budget


def test_corrupt_files_are_counted_and_go_first(make, path):
    fill(path, 4)
    damaged = segments(path)[3]
    flip(damaged, damaged.stat().st_size - 1)
    tier = make(size_of(path) + 1000, codec="none")
    everything = [(number, row) for number in range(4) for row in range(10)]
    assert found(tier, everything, 1000) == everything[:39]
    assert found(tier, everything, 1000) == everything[:30]
    aside = damaged.with_name(damaged.name + ".corrupt")
    assert aside.exists() and not damaged.exists()
    assert tier.stats().bytes == size_of(path) and tier.stats().corrupt == 1
    seal(tier, everything[30:35], 1000)
    assert not aside.exists()
    assert found(tier, everything, 1000) == everything[:35]
    assert tier.stats().evictions == 0


def test_making_room_leaves_a_namespace_that_somebody_begins_to_use(path):
    class Late(FileSystem):
        """Whoever makes room sees the folder of a namespace before there is anything in it."""

        looks, holds = 0, None

        def listing(self, folder):
            found = super().listing(folder)
            self.looks += folder == str(path / NAMESPACES[0].hex())
            if self.looks == 2 and self.holds is None:  # the first look asks whether there is room already
                other = CacheDirectory(path, FileSystem())
                other.prepare(NAMESPACES[0], {})
                self.holds = other.hold(NAMESPACES[0])
            return found

    fill(path, 3, namespace=NAMESPACES[1])
    (path / NAMESPACES[0].hex()).mkdir()
    fs = Late()
    make_room(CacheDirectory(path, fs), 40_000, 40_000, lru=True)
    assert fs.same(fs.holds, path / NAMESPACES[0].hex() / FINGERPRINT)


# What is used


def test_a_segment_that_is_read_is_touched_at_most_once_a_minute(make, path, monkeypatch):
    assert 30 <= reading_module._TOUCHED_EVERY <= 60
    fill(path, 2)
    one, two = segments(path)
    tier = make()
    ages = [file.stat().st_mtime for file in (one, two)]
    assert found(tier, [(0, 0)], 1000)
    assert one.stat().st_mtime > time.time() - 100 and two.stat().st_mtime == ages[1]
    set_age(one, 5000)
    then = one.stat().st_mtime
    for _ in range(3):
        assert found(tier, [(0, 1)], 1000)
    assert one.stat().st_mtime == then
    monkeypatch.setattr(reading_module, "_TOUCHED_EVERY", 0.0)
    assert found(tier, [(0, 1)], 1000)
    assert one.stat().st_mtime > time.time() - 100


def test_a_read_only_directory_serves_its_rows(make, path, log):
    fill(path, 2)
    before = snapshot(path)
    ages = [file.stat().st_mtime_ns for file in segments(path)]
    tier = make(fs=ReadOnly())
    everything = [(number, row) for number in range(2) for row in range(10)]
    for _ in range(2):
        assert found(tier, [*everything, "other"], 1000) == everything
        put(tier, range(3), 1000)
        tier.flush()
        assert found(tier, range(3), 1000) == []
    assert put(tier, range(3), 1000) == 0
    tier.close()
    assert snapshot(path) == before
    assert [file.stat().st_mtime_ns for file in segments(path)] == ages
    (warning,) = warnings_of(log)
    assert "cannot be written" in warning.getMessage()


# What is not there


def test_segments_of_a_codec_that_is_not_installed_wait_for_it(make, path, log, monkeypatch, at_once):
    seal(make(codec="blosc2"), range(20), 1024)
    seal(make(codec="none"), range(20, 30), 1024)
    before = snapshot(path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "blosc2", None)
        tier = make(codec="none")
        assert found(tier, range(30), 1024) == list(range(20, 30))
        assert tier.stats().corrupt == tier.stats().faults == 0
        with pytest.raises(OptionError, match=r"torchcache2\[blosc2\]"):
            make(codec="blosc2")
    assert snapshot(path) == before and warnings_of(log) == []
    assert found(tier, range(30), 1024) == list(range(30))


CLASSES = """
import collections
Output = collections.namedtuple("Output", ["x", "y"])
"""


def test_segments_of_a_class_that_is_not_imported_wait_for_it(
    make, path, log, tmp_path, monkeypatch, at_once
):
    (tmp_path / "user_classes.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_classes

    output = user_classes.Output(torch.rand(5, 3), torch.arange(5))
    tier = make()
    tier.put(keys_of(range(5)), Rows.from_pytree(output, 5, device=CPU))
    seal(tier, range(10, 20))
    before = snapshot(path)
    monkeypatch.delitem(sys.modules, "user_classes")
    tier = make()
    assert found(tier, range(10, 20)) == list(range(10, 20))
    assert tier.get(keys_of(range(5))).parts == []
    assert "user_classes" not in sys.modules
    assert snapshot(path) == before and warnings_of(log) == []
    assert tier.stats().corrupt == tier.stats().faults == 0
    monkeypatch.setitem(sys.modules, "user_classes", user_classes)
    ((positions, rows),) = tier.get(keys_of(range(5))).parts
    back = rows.to_pytree(device=CPU)
    assert type(back) is user_classes.Output and positions.tolist() == list(range(5))
    assert torch.equal(back.x, output.x) and torch.equal(back.y, output.y)


def test_a_segment_in_another_namespaces_folder_is_nobodys(make, path, log):
    seal(make(), range(10), namespace=NAMESPACES[0])
    seal(make(), range(3), namespace=NAMESPACES[1])
    (file,) = segments(path, NAMESPACES[0])
    data = file.read_bytes()
    (path / NAMESPACES[1].hex() / file.name).write_bytes(data)
    tier = make()
    assert found(tier, range(10), namespace=NAMESPACES[1]) == [0, 1, 2]
    assert tier.stats().corrupt == 0 and warnings_of(log) == []
    assert (path / NAMESPACES[1].hex() / file.name).read_bytes() == data


@pytest.mark.parametrize("what", ["segments", "folder", "directory"])
def test_files_that_somebody_deletes_are_misses(make, path, log, what, at_once):
    fill(path, 3)
    everything = [(number, row) for number in range(3) for row in range(10)]
    tier, reader = make(), make()
    assert found(reader, [(0, 0)], 1000) == [(0, 0)]  # one file is open, the others are known
    seal(tier, ["mine"], 1000)
    victim = {"segments": path / NAMESPACES[0].hex(), "folder": path / NAMESPACES[0].hex(), "directory": path}
    for file in [file for file in victim[what].rglob("*") if file.is_file()]:
        if what != "segments" or file.suffix == ".safetensors":
            file.unlink()
    if what != "segments":
        for folder in sorted([*victim[what].rglob("*"), victim[what]], reverse=True):
            folder.rmdir()
    for handle in (tier, reader):
        for _ in range(2):
            here = found(handle, [*everything, "mine"], 1000)
            assert {name for name in here if name != "mine"} <= set(everything[:10])
        assert put(handle, [("new", id(handle))], 1000) == 1
        handle.flush()
    names = [("new", id(tier)), ("new", id(reader))]
    assert sealed_names(path, names, 1000) == sorted(names)
    for handle in (tier, reader):
        assert found(handle, names, 1000) == sorted(names)
        assert handle.stats().faults == handle.stats().corrupt == 0
    assert warnings_of(log) == []


# Deleting


def test_drop_deletes_the_files_of_a_namespace(make, path):
    fill(path, 3)
    flip(segments(path)[0], -1)
    tier = make()
    found(tier, [(0, 0)], 1000)
    seal(tier, range(3), namespace=NAMESPACES[1])
    put(tier, ["waiting"], 1000)
    tier.drop(NAMESPACES[0])
    tier.flush()
    assert sorted(os.listdir(path / NAMESPACES[0].hex())) == [FINGERPRINT]
    assert found(make(), range(3), namespace=NAMESPACES[1]) == [0, 1, 2]


def test_who_drops_a_namespace_without_rows_does_not_become_its_user(make, path):
    other = make()
    seal(other, range(3), namespace=NAMESPACES[1])
    other.close()
    segments(path)[0].unlink()
    tier = make()
    tier.drop(NAMESPACES[1])
    seal(tier, range(3), namespace=NAMESPACES[0])  # before it writes, it holds what it uses
    assert in_use(tier.directory, NAMESPACES[0].hex())
    assert not in_use(tier.directory, NAMESPACES[1].hex())


@pytest.mark.parametrize("point", ["sync", "sync_folder", "beside a file that stays"])
def test_rows_that_are_dropped_while_they_are_written_do_not_come_back(make, path, log, point):
    """Before and after the file has its name; a file that cannot be deleted is no excuse."""
    fs = Gated()
    tier = make(fs=fs)
    seal(tier, ["before"])
    kept = [str(file) for file in segments(path)] if point == "beside a file that stays" else []
    fs.remove = lambda file: refuse_to_delete(file) if file in kept else Gated.remove(fs, file)
    fs.close("sync", "sync_folder")
    put(tier, range(10))
    thread = threading.Thread(target=tier.flush)
    thread.start()
    try:
        wait_until(lambda: "sync" in fs.entered)
        if point != "sync_folder":
            tier.drop(NAMESPACES[0])
        fs.gates["sync"].set()
        wait_until(lambda: "sync_folder" in fs.entered or not (kept or thread.is_alive()))
        assert len(segments(path)) == 2 or not kept
        if point == "sync_folder":
            tier.drop(NAMESPACES[0])
        assert found(tier, [*range(10), "before"]) == []
    finally:
        fs.open_all()
        thread.join(60)
    assert [str(file) for file in segments(path)] == kept
    if not kept:
        tier.flush()
        assert found(tier, range(10)) == [] and segments(path) == []
        seal(tier, range(5))
        assert found(tier, range(10)) == list(range(5))
        assert tier.stats().faults == 0 and warnings_of(log) == []


def test_what_dead_writers_left_is_deleted_and_what_living_ones_write_is_not(make, path):
    fill(path, 1)
    folder = path / NAMESPACES[0].hex()
    for name in (f"{ulid()}.safetensors.tmp", f"{FINGERPRINT}.{ulid()}"):
        (folder / name).write_bytes(b"half of it")
    (path / f"{TAG}.{ulid()}").write_bytes(b"half of it")
    living = FileSystem()
    temporary = folder / f"{ulid()}.safetensors.tmp"
    file = living.create(str(temporary))
    assert living.lock(file, exclusive=True) is not False
    HERE.seen.clear()  # on NFS, some seconds later
    make()
    assert strange_files(path) == [f"{NAMESPACES[0].hex()}/{temporary.name}"]
    del file
    make()
    assert strange_files(path) == []


def test_a_writer_is_not_disturbed_by_whoever_deletes_leftovers(make, path):
    class Contended(Unsynced):
        """Somebody has every new file locked, to delete it, at the worst moment."""

        holders = ()

        def create(self, path):
            file = super().create(path)
            if path.endswith(".tmp") and len(self.holders) < 2:
                holder = FileSystem().open(path)
                assert FileSystem().lock(holder, exclusive=True)
                self.holders = (*self.holders, (holder, path))
            return file

        def lock(self, file, *, exclusive):
            locked = super().lock(file, exclusive=exclusive)
            for _, path in self.holders:
                if os.path.exists(path) and locked is False:
                    os.unlink(path)
            return locked

    tier = make(fs=Contended())
    seal(tier, range(10))
    assert tier.stats().faults == 0
    assert found(tier, range(10)) == sealed_names(path, range(10)) == list(range(10))


def test_no_file_or_thread_stays_after_close(path):
    fill(path, 3)
    threads = threading.enumerate()
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(5):
        tier = DiskTier(path, delay=NEVER)
        found(tier, [(number, 0) for number in range(3)], 1000)
        put(tier, [turn], 1000)
        assert len(threading.enumerate()) == len(threads) + 1
        tier.close()
        del tier
    gc.collect()
    assert threading.enumerate() == threads
    assert len(os.listdir("/proc/self/fd")) <= before
