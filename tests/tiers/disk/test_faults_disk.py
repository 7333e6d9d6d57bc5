"""What the disk tier does when the file system fails, the power goes, or bytes change: it goes on."""

import collections
import errno
import functools
import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch

from tests.helpers.storage import (
    CALLS,
    NAMESPACES,
    NEVER,
    Faulty,
    Mortal,
    PowerCut,
    ReadOnly,
    Short,
    Unsynced,
    Watched,
    abandon,
    flip,
    found,
    keys_of,
    put,
    sealed_names,
    segments,
    size_of,
    snapshot,
    strange_files,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.core import sizes
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import LOCK
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.disk import index as located_module
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.unwritten import Pending

SOAK = bool(os.environ.get("SOAK"))
CODES = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS]
WIDTH = 200
OLD, NEW, LATE = ([(kind, i) for i in range(12)] for kind in ("old", "new", "late"))


@pytest.fixture
def no_threads(monkeypatch):
    """Whoever flushes writes, so that the order of calls is always the same."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def runs(request, monkeypatch):
    """Whether there are runs of few rows."""
    if request.param:
        monkeypatch.setattr(merging, "_LEAST_ROWS", 6)
        monkeypatch.setattr(merging, "_MERGED", 2)
    return request.param


with_runs = pytest.mark.parametrize("runs", [False, True], ids=["heads", "runs"], indirect=True)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(located_module, "_LOOK_EVERY", 0.0)
    for module in ("indexfile", "segment"):  # what is called must not depend on how busy the machine is
        monkeypatch.setattr(f"torchcache2.files.{module}._SLOW", 60.0)


def handle(path, *args, **options):
    return DiskTier(path, *args, **{"delay": NEVER, "fs": Unsynced()} | options)


def fill(path, names=OLD, width=WIDTH, **options):
    tier = handle(path, **options)
    assert put(tier, names, width) == len(names)
    tier.close()


# Every call fails


def use(path, fs, *, policy="keep", budget=10**9):
    """Everything that a handle does; what it found at last, its counts, and what it accepted."""
    tier = handle(path, budget, policy, "none", fs=fs)
    found(tier, OLD, WIDTH)
    kept = [NEW[:6] * (put(tier, NEW[:6], WIDTH) > 0)]
    tier.flush()
    kept[0] += NEW[6:] * (put(tier, NEW[6:], WIDTH) > 0)
    kept.append(NEW * (put(tier, NEW, 50, NAMESPACES[1]) > 0))
    tier.flush()
    found(tier, OLD + NEW, WIDTH)
    tier.stats()
    tier.drop(NAMESPACES[2])
    here = found(tier, OLD + NEW + LATE, WIDTH), found(tier, NEW, 50, NAMESPACES[1])
    tier.close()
    return here, tier.stats(), kept


def everything(path):
    return (sealed_names(path, OLD + NEW + LATE, WIDTH), sealed_names(path, NEW, 50, NAMESPACES[1]))


def calls_of(path, **options):
    fs = Watched()
    use(path, fs, **options)
    return len(fs.calls)


def some_of(calls, count=40):
    """All calls in `make soak`; otherwise about so many, and chance says which."""
    step = 1 if SOAK else max(1, calls // count)
    return range(random.randrange(step), calls, step)


def cases(calls):
    """Which call fails, until when, and how: once, and from then on."""
    for turn, number in enumerate(some_of(calls)):
        for code in CODES if SOAK else [CODES[turn % len(CODES)]]:
            yield number, number + 1, code
        for code in CODES if SOAK else [CODES[turn // 3 % len(CODES)]] * (turn % 3 == 0):
            yield number, None, code


def test_the_faulty_file_system_knows_every_call():
    assert {"open", "create", "read", "write", "sync", "rename", "lock", "listing", "remove"} <= set(CALLS)
    fs = Faulty(errno.EIO)
    for name in CALLS:
        with pytest.raises(OSError, match="Input/output"):
            getattr(fs, name)(*[None] * 3)
    assert fs.failed == CALLS


def assert_told(log, stats, lost):
    """At most one warning of a kind, and one and a count if anything is lost."""
    warnings = warnings_of(log)
    kinds = collections.Counter(record.msg.split("%")[0] for record in warnings)
    assert all(count == 1 for count in kinds.values()), warnings
    assert sum("fail" in record.msg or "cannot be written" in record.msg for record in warnings) <= 1
    assert stats.corrupt == 0
    assert (stats.faults > 0) >= lost
    assert bool(warnings) >= lost
    log.clear()


@pytest.mark.slow
@with_runs
@pytest.mark.usefixtures("no_threads", "runs")
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "new"])
def test_any_call_may_fail(tmp_path, log, filled):
    def directory(name):
        path = tmp_path / str(name)
        if filled:
            shutil.copytree(tmp_path / "filled", path)
        return path

    if filled:
        fill(tmp_path / "filled", codec="none")
    calls = calls_of(directory("whole"))
    assert calls > 40
    before = (OLD if filled else []), []
    for number, end, code in cases(calls):
        path = directory((number, end, code))
        fs = Faulty(code, number, end)
        here, stats, kept = use(path, fs)
        assert fs.failed
        after = everything(path)
        whole = [sorted(OLD * filled + NEW), NEW]
        for mine, left, old in zip(here, after, before, strict=True):
            assert set(left) >= set(old)  # what was sealed is never lost
            if end is not None:  # else some of it waits until it can be written
                assert set(mine) <= set(left)  # everything was flushed
        if end is not None and code in (errno.ENOSPC, errno.EIO):  # what passes loses nothing
            assert all(set(some) <= set(left) for some, left in zip(kept, after, strict=True))
        assert_told(log, stats, list(here) != whole)
        assert [name for name in strange_files(path) if name.endswith(".corrupt")] == []
        # When the disk is well again, nothing is left to be done by hand.
        fill_up = handle(path)
        put(fill_up, LATE, WIDTH)
        put(fill_up, NEW, WIDTH)
        fill_up.close()
        assert fill_up.stats().faults == fill_up.stats().corrupt == 0
        assert sealed_names(path, OLD * filled + NEW + LATE, WIDTH) == sorted(OLD * filled + NEW + LATE)
        assert strange_files(path) == []
        assert warnings_of(log) == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_any_call_may_fail_while_room_is_made(tmp_path, log, policy):
    for number in range(2):
        fill(tmp_path / "filled", [("unused", number, i) for i in range(10)], WIDTH, codec="none")
    budget = size_of(tmp_path / "filled") + 1000
    names = [("new", i) for i in range(8)]

    def work(path, fs):
        shutil.copytree(tmp_path / "filled", path)
        tier = handle(path, budget, policy, "none", fs=fs)
        for number in range(4):
            put(tier, names[2 * number :][:2], WIDTH, NAMESPACES[1])
            tier.flush()
            # A folder that may not be read counts as empty.
            assert size_of(path) <= budget or "listing" in getattr(fs, "failed", ())
        here = found(tier, names, WIDTH, NAMESPACES[1])
        tier.close()
        return here, tier.stats()

    fs = Watched()
    expected, stats = work(tmp_path / "whole", fs)
    assert len(expected) >= 6 and {"remove", "lock"} <= set(fs.calls)
    for number, end, code in cases(len(fs.calls)):
        path = tmp_path / f"{number} {end} {code}"
        fs = Faulty(code, number, end)
        log.clear()
        here, stats = work(path, fs)
        assert fs.failed
        assert_told(log, stats, len(here) < len(expected))
        if end is not None:  # else some of it waits until it can be written
            assert set(here) <= set(sealed_names(path, names, WIDTH, NAMESPACES[1]))
        tier = handle(path, budget, "lru", "none")
        put(tier, LATE[:4], WIDTH, NAMESPACES[2])
        tier.flush()
        assert found(tier, LATE, WIDTH, NAMESPACES[2]) == LATE[:4]
        assert size_of(path) <= budget
        tier.close()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", CALLS)
def test_a_kind_of_call_that_always_fails(path, log, name, code):
    class Lacking(Watched):
        def before(self, number, called, args):
            if called == name and not (name == "make_folder" and os.path.isdir(args[0])):
                raise OSError(code, os.strerror(code))

    fill(path)
    here, stats, _ = use(path, Lacking())
    assert_told(log, stats, here != (sorted(OLD + NEW), NEW))
    assert set(everything(path)[0]) >= set(OLD)


@pytest.mark.parametrize("passes", [True, False])
def test_what_a_disk_that_is_full_for_a_while_refuses_is_written_at_close(path, log, passes):
    fs = Faulty(errno.ENOSPC, 10**9)
    tier = handle(path, codec="none", fs=fs)
    put(tier, OLD, WIDTH)
    tier.flush()
    fs.first = 0
    for number in range(10):
        put(tier, [("lost", number)], WIDTH)
        tier.flush()
    waiting = found(tier, [("lost", number) for number in range(10)], WIDTH)
    assert 1 <= tier.stats().faults < 60
    assert tier.stats().rows == len(OLD)  # what is not on disk is not counted
    if passes:
        fs.mend()
    tier.close()
    told = [record.getMessage() for record in warnings_of(log)]
    assert len(told) == 2 - passes and "the cache directory fails" in told[0]
    fs.mend()
    assert waiting and sealed_names(path, [*OLD, *waiting], WIDTH) == sorted([*OLD, *waiting * passes])
    if not passes:
        assert told[1] == f"rows that could not be written to {path}: {len(waiting)}"


class Misread(Unsynced):
    """One bit of some reads of segments and runs is flipped on its way."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.count = reads, 0

    def read(self, file, buffers, offset):
        done = super().read(file, buffers, offset)
        if self.count in self.reads:
            buffers[-1][len(buffers[-1]) // 2] ^= 4
        self.count += offset > 0 or done > 200  # not of the folder's tag
        return done


@with_runs
@pytest.mark.parametrize("codec", ["none", "brotli"])
def test_a_bit_that_flips_on_its_way_costs_nothing(path, log, codec, runs):
    for names in (OLD, NEW, LATE):
        fill(path, names, codec=codec)
    names, before = [*OLD, *NEW, *LATE], snapshot(path)
    count, first = 1, 0
    while first < count:
        fs = Misread({first})
        tier = handle(path, fs=fs)
        assert found(tier, names, WIDTH) == sorted(names) and tier.stats().corrupt == 0
        tier.close()
        count, first = fs.count, first + 1
    assert count >= 4 and not warnings_of(log)
    assert snapshot(path) == before
    tier = handle(path, fs=Misread(range(count - 1, 99)))  # damaged whenever it is read
    found(tier, names, WIDTH)
    assert tier.stats().corrupt and len(warnings_of(log)) == 1


def test_rows_are_found_again_when_a_read_has_failed(path, log):
    fill(path)
    fs = Faulty(errno.EIO, 10**9)
    tier = handle(path, fs=fs)
    assert found(tier, OLD, WIDTH) == sorted(OLD)
    fs.first = 0
    for _ in range(3):
        assert found(tier, OLD, WIDTH) == []
    assert tier.stats().faults >= 1
    fs.mend()
    assert set(found(tier, OLD, WIDTH)) <= set(OLD)
    put(tier, OLD, WIDTH)  # computed again
    assert found(tier, OLD, WIDTH) == sorted(OLD)
    tier.close()
    assert len(warnings_of(log)) == 1
    assert sealed_names(path, OLD, WIDTH) == sorted(OLD)


def test_segments_that_could_not_be_opened_once_are_found_later(path):
    """Such as when a process has too many files open."""

    class Busy(FileSystem):
        fails = True

        def open(self, path):
            if self.fails and path.endswith(".safetensors"):
                raise OSError(errno.EMFILE, "Too many open files")
            return super().open(path)

    fill(path)
    folder = path / NAMESPACES[0].hex()
    os.utime(folder, (0, 0))  # nothing has come or gone for long
    fs = Busy()
    tier = handle(path, fs=fs)
    assert found(tier, OLD, WIDTH) == []
    assert tier.stats().faults >= 1
    fs.fails = False
    assert found(tier, OLD, WIDTH) == sorted(OLD)
    tier.close()


def test_faults_under_threads_are_told_once(path, log):
    fill(path)
    log.clear()
    fs = Faulty(errno.EIO, 60)
    tier = DiskTier(path, codec="none", delay=0.0, fs=fs)

    def work(number):
        for turn in range(30):
            put(tier, [("mine", number, turn)], WIDTH)
            found(tier, [("mine", number, turn)], WIDTH)
            found(tier, OLD, WIDTH)
            if turn % 5 == 0:
                tier.flush()

    run_at_once(*[functools.partial(work, number) for number in range(4)])
    tier.close()
    assert tier.stats().faults > 0
    assert len(warnings_of(log)) <= 2  # the fault, and how many rows are lost
    assert sealed_names(path, OLD, WIDTH) == sorted(OLD)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("bug"), UnicodeError("name")], ids=repr)
def test_other_exceptions_of_the_system_are_faults_too(path, log, error):
    class Odd(Watched):
        fails = False

        def before(self, number, name, args):
            if self.fails and name in ("read", "write"):
                raise error

    fill(path)
    fs = Odd()
    tier = handle(path, fs=fs)
    fs.fails = True
    assert found(tier, OLD, WIDTH) == []
    put(tier, NEW, WIDTH)
    tier.flush()
    assert found(tier, NEW, WIDTH) == []
    tier.close()
    assert tier.stats().faults > 0 and len(warnings_of(log)) == 1
    assert everything(path)[0] == sorted(OLD)


# Short reads and writes


@pytest.mark.parametrize("most", [1, 7, 4096])
@pytest.mark.parametrize("codec", ["none", "brotli"])
def test_reads_and_writes_in_pieces(path, codec, most):
    count = 4 if most == 1 else 40
    tier = handle(path, codec=codec, fs=Short(most))
    ragged = [(length, i) for length in (3, 5) for i in range(3)]
    for length, i in ragged:
        assert put(tier, [(length, i)], length, NAMESPACES[1]) == 1
    assert put(tier, range(count), WIDTH) == count
    tier.flush()
    assert sealed_names(path, range(count), WIDTH) == list(range(count))
    tier.close()
    tier = handle(path, codec=codec, fs=Short(most))
    assert found(tier, range(count), WIDTH) == list(range(count))
    for length in (3, 5):
        names = [name for name in ragged if name[0] == length]
        assert found(tier, names, length, NAMESPACES[1]) == names
    stats = tier.stats()
    assert stats.corrupt == stats.faults == 0
    tier.close()


def test_a_disk_that_writes_nothing_is_a_fault(path, log):
    class Stuck(FileSystem):
        def write(self, file, buffers, offset):
            return 0

    tier = handle(path, fs=Stuck())
    put(tier, OLD, WIDTH)
    tier.close()
    assert tier.stats().faults > 0 and len(warnings_of(log)) == 2  # the fault, and how many rows are lost
    assert segments(path) == []


# Read-only


def test_a_read_only_directory_without_a_cache(path, log):
    path.mkdir()
    here, stats, _ = use(path, ReadOnly())
    assert here == ([], []) and stats.faults >= 1
    assert snapshot(path) == {} and len(warnings_of(log)) == 1


def test_damage_in_a_read_only_directory_is_ignored(path, log):
    fill(path, OLD[:6], codec="none")
    fill(path, OLD[6:], codec="none")
    flip(segments(path)[0], -1)
    before = snapshot(path)
    tier = handle(path, fs=ReadOnly())
    assert found(tier, OLD, WIDTH) == sorted(OLD)[:5] + sorted(OLD)[6:]
    for _ in range(2):
        assert found(tier, OLD, WIDTH) == sorted(OLD[6:])
    assert tier.stats().corrupt == 1
    tier.close()
    assert snapshot(path) == before and len(warnings_of(log)) == 1


# SIGKILL and power cuts


def write_in_turns(path, fs, sealed):
    """Seal rows batch by batch; `sealed` gets what is safe if the process or the power dies later."""
    tier = handle(path, codec="none", fs=fs)
    for number in range(2):
        for width, namespace in ((WIDTH, NAMESPACES[number % 2]), (7, NAMESPACES[0])):
            names = [(width, number, i) for i in range(4)]
            put(tier, names, width, namespace)
            tier.flush()
            if not fs.is_dead:
                sealed.append((names, width, namespace))
    return tier


def assert_serves(path, sealed, log):
    """A later process finds what was sealed, and can keep what was not; nothing is left over."""
    tier = handle(path, codec="none")
    for names, width, namespace in sealed:
        assert found(tier, names, width, namespace) == names
    again = [(width, namespace) for width in (WIDTH, 7) for namespace in NAMESPACES[:2]]
    for turn in range(2):
        for width, namespace in again:
            names = [(width, number, i) for number in range(2) for i in range(4)]
            here = found(tier, names, width, namespace)
            assert put(tier, names, width, namespace) == len(names) - len(here)
            assert turn == 0 or here == names
        tier.flush()
    stats = tier.stats()
    tier.close()
    assert stats.corrupt == stats.faults == 0 and warnings_of(log) == []
    assert strange_files(path) == []


@pytest.mark.slow
@with_runs
@pytest.mark.usefixtures("no_threads")
def test_a_process_that_is_killed_at_any_call(tmp_path, log, runs):
    fs = Mortal()
    write_in_turns(tmp_path / "whole", fs, []).close()
    assert runs == bool(list(tmp_path.glob("whole/*/*.run")))
    for number in some_of(len(fs.calls)):
        fs, sealed = Mortal(number), []
        path = tmp_path / str(number)
        abandon(write_in_turns(path, fs, sealed), fs)
        log.clear()
        assert_serves(path, sealed, log)
    assert len(sealed) >= 3


LEFT = [("lost", "lost"), ("kept", "garbage"), ("some", "garbage"), ("kept", "lost"), ("some", "lost")]


@pytest.mark.slow
@with_runs
@pytest.mark.usefixtures("no_threads", "runs")
def test_the_power_may_go_at_any_call(tmp_path, log):
    fs = PowerCut(tmp_path / "whole")
    write_in_turns(tmp_path / "whole", fs, []).close()
    total = len(fs.calls)
    for number in [*some_of(total), total]:
        path, sealed = tmp_path / str(number), []
        fs = PowerCut(path, number)
        abandon(write_in_turns(path, fs, sealed), fs)
        for seed, (names, content) in enumerate(LEFT * 20 if SOAK else [LEFT[number % 5]]):
            after = tmp_path / f"after {number} {seed}"
            fs.restart(after, names, content, number + seed)
            log.clear()
            assert_serves(after, sealed, log)
    assert len(sealed) == 4


def test_the_power_cut_loses_what_was_not_synced(tmp_path):
    # Or the test before could not fail.
    path = tmp_path / "cache"
    path.mkdir()
    fs = PowerCut(path)
    file = fs.create(str(path / "synced"))
    fs.write_all(file, [memoryview(b"first ")], 0)
    fs.sync(file)
    fs.write_all(file, [memoryview(b"second")], 6)
    fs.sync_folder(str(path))
    fs.create(str(path / "new"))
    fs.rename(str(path / "synced"), str(path / "renamed"))
    fs.make_folder(str(path / "folder"))
    fs.restart(tmp_path / "a")
    assert snapshot(tmp_path / "a") == {"synced": b"first "}
    assert not (tmp_path / "a" / "folder").exists()
    fs.restart(tmp_path / "b", "kept", "garbage")
    left = snapshot(tmp_path / "b")
    assert set(left) == {"renamed", "new"} and (tmp_path / "b" / "folder").is_dir()
    assert left["renamed"].startswith(b"first ") and len(left["renamed"]) == 12
    assert left["renamed"] != b"first second"


# Damage


def damaged_files(path, codec):
    tier = handle(path, codec=codec)
    put(tier, OLD, WIDTH)
    tier.flush()
    put(tier, NEW, WIDTH)
    tier.close()
    return segments(path)


def assert_damage_is_noticed(tier, path, file, lost, kept, log):
    """Rows of a damaged file are computed again and the file is moved aside; other rows stay."""
    here = found(tier, lost + kept, WIDTH)
    assert set(kept) <= set(here)
    again = [name for name in lost if name not in here]
    if again:
        again = lost  # the file had the good ones, too
        assert tier.stats().corrupt == 1 and len(warnings_of(log)) == 1
        assert "damaged" in warnings_of(log)[0].getMessage()
        assert not file.exists() and file.with_name(file.name + ".corrupt").exists()
        assert put(tier, again, WIDTH) == len(again)
    tier.flush()
    assert found(tier, lost + kept, WIDTH) == sorted(lost + kept)
    assert tier.stats().faults == 0
    tier.close()
    # What this handle did not need to read again, the next one does.
    left = sealed_names(path, lost + kept, WIDTH)
    assert set(left) >= set(lost + kept if again else kept)
    assert left == sorted(lost + kept) or not file.exists()
    return bool(again)


def damages_of(data):
    """Where a bit is flipped, or a segment cut: in its size, header, index and rows; the latter come last.

    `tests/files/test_segment.py` has each byte.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    rows = start + len(OLD) * 40
    flips = [(flip, position) for position in (0, 7, 8, 100, start - 1, start, start + 1)]
    cuts = [(os.truncate, size) for size in (0, 7, 100, rows, len(data) // 2, len(data) - 1)]
    return flips, [(flip, position) for position in (rows + 1, len(data) // 2, len(data) - 1)] + cuts


@pytest.mark.one_in(6)
@pytest.mark.parametrize("opened", [True, False], ids=["while open", "before"])
@pytest.mark.parametrize("codec", ["none", "brotli", "blosc2"])
def test_damage_anywhere_is_noticed(path, log, codec, opened):
    file, other = damaged_files(path, codec)
    data = file.read_bytes()
    of_head, of_rows = damages_of(data)
    for damage, place in of_head + of_rows:
        tier = handle(path, codec=codec)
        if opened:
            assert found(tier, NEW[:1], WIDTH) == NEW[:1]  # opens both, and reads from the other one
        damage(file, place)
        is_noticed = assert_damage_is_noticed(tier, path, file, OLD, NEW, log)
        # An open segment's index is not read again: there only the rows count.
        assert is_noticed or (opened and (damage, place) in of_head)
        log.clear()
        for left in segments(path):
            if left != other:
                left.unlink()
        file.with_name(file.name + ".corrupt").unlink(missing_ok=True)
        file.write_bytes(data)


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 100, b"\xff" * 500, bytes(500), b"\x10" + bytes(7) + b"{}" * 99]
)
def test_a_file_that_is_no_segment_is_moved_aside(path, log, content):
    file, _ = damaged_files(path, "none")
    stranger = file.with_name("0" * 26 + ".safetensors")
    stranger.write_bytes(content)
    tier = handle(path)
    assert found(tier, OLD + NEW, WIDTH) == sorted(OLD + NEW)
    assert tier.stats().corrupt == 1 and len(warnings_of(log)) == 1
    assert stranger.with_name(stranger.name + ".corrupt").read_bytes() == content
    tier.close()


def test_a_damaged_row_takes_no_other_row_with_it(path):
    fill(path, OLD, codec="none")
    flip(segments(path)[0], -1)
    tier = handle(path, codec="none")
    # The file's last row is damaged; rows that are asked for without it are still right.
    assert found(tier, OLD[:3], WIDTH) == OLD[:3]
    here = found(tier, OLD, WIDTH)
    assert OLD[-1] not in here
    put(tier, OLD, WIDTH)
    assert found(tier, OLD, WIDTH) == sorted(OLD)
    tier.close()


@pytest.mark.parametrize("codec", ["none", "brotli", "blosc2"])
def test_damage_of_every_row_of_a_batch_from_many_segments(path, log, codec):
    for number in range(8):
        fill(path, [(number, i) for i in range(5)], WIDTH, codec=codec)
    for file in segments(path)[::2]:
        flip(file, -1)
    names = [(number, i) for i in range(5) for number in range(8)]
    tier = handle(path, codec=codec)
    here = found(tier, names, WIDTH)
    assert set(here) >= {name for name in names if name[0] % 2 == 1} and len(here) < len(names)
    assert found(tier, names, WIDTH) == sorted(name for name in names if name[0] % 2 == 1)
    assert tier.stats().corrupt == 4 and len(warnings_of(log)) == 1
    tier.close()


def test_no_memory_for_a_batch_is_a_miss(path, log, monkeypatch):
    fill(path)
    tier = handle(path)

    def refuse(*args, **options):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", refuse)
        patch.setattr(torch, "empty", refuse)
        assert tier.get(keys_of(OLD)).parts == []
    assert tier.stats().faults == 1 and len(warnings_of(log)) == 1
    assert found(tier, OLD, WIDTH) == sorted(OLD)
    tier.close()


def test_rows_that_are_larger_than_half_of_what_is_free_are_misses(path, log, monkeypatch):
    """A few bytes of a file may stand for gigabytes."""
    tier = handle(path, codec="brotli")
    put(tier, OLD, WIDTH)
    put(tier, ["large"], 10**6)  # 4 MB that compress well
    tier.close()
    tier = handle(path)
    every = keys_of([*OLD, "large"])
    assert sum(len(rows) for _, rows in tier.get(every).parts) == len(OLD) + 1
    with monkeypatch.context() as patch:
        patch.setattr(sizes, "_UNASKED", 10**5)
        patch.setattr(sizes, "free_memory", lambda device: 6 * 10**6)
        ((positions, _),) = tier.get(every).parts
        assert len(positions) == len(OLD)  # the other rows of the batch are found
    assert tier.stats().faults == 1 and "of rows at once" in warnings_of(log)[0].getMessage()
    assert sum(len(rows) for _, rows in tier.get(every).parts) == len(OLD) + 1
    tier.close()


def test_rows_that_wait_and_cannot_be_read_leave_the_folder_where_it_is(path, log, monkeypatch):
    fill(path)
    tier = handle(path)
    put(tier, NEW, WIDTH)

    def refuse(*args):
        raise OSError(errno.EIO, "unreadable")

    with monkeypatch.context() as patch:
        patch.setattr(Pending, "fill", refuse)
        assert found(tier, OLD + NEW, WIDTH) == sorted(OLD)
    assert tier.stats().faults == 1 and tier.stats().corrupt == 0 and len(warnings_of(log)) == 1
    tier.close()
    assert sealed_names(path, OLD, WIDTH) == sorted(OLD)


def test_an_interrupt_while_a_segment_is_written_leaves_nothing_behind(path, monkeypatch):
    class Interrupted(FileSystem):
        fails = False

        def sync(self, file):
            if self.fails:
                raise KeyboardInterrupt
            super().sync(file)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)  # the interrupt comes to whoever flushes
    fill(path)
    fs = Interrupted()
    tier = handle(path, codec="none", fs=fs)
    put(tier, NEW, WIDTH)
    fs.fails = True
    with pytest.raises(KeyboardInterrupt):
        tier.flush()
    fs.fails = False
    assert strange_files(path) == []
    assert found(tier, NEW, WIDTH) == []
    put(tier, NEW, WIDTH)
    tier.close()
    assert sealed_names(path, OLD + NEW, WIDTH) == sorted(OLD + NEW)


def test_a_lock_file_that_cannot_be_made_is_a_fault(path, log):
    fill(path)
    (path / LOCK).mkdir()
    tier = DiskTier(path, size_of(path) + 1000, "lru", "none", delay=NEVER)
    put(tier, NEW[:2], WIDTH, NAMESPACES[1])
    tier.close()
    assert tier.stats().faults >= 1 and len(warnings_of(log)) == 1
    assert sealed_names(path, OLD, WIDTH) == sorted(OLD)
