"""The disk tier, while another thread or process does something at the worst moment, or is killed."""

import contextlib
import errno
import functools
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.helpers import warm
from tests.helpers.storage import (
    CALLS,
    NAMESPACES,
    PowerCut,
    Unsynced,
    fill,
    found,
    keys_of,
    put,
    seal,
    sealed_names,
    segments,
    size_of,
    wait_until,
    warnings_of,
)
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.cache import Cache
from torchcache2.engine.stack import TierStack
from torchcache2.files.directory import FINGERPRINT, CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.removal import in_use, make_room, remove_namespace
from torchcache2.tiers.disk import tier as disk_module
from torchcache2.tiers.meeting import Scratch

A, B, C = NAMESPACES
WIDTH = 1000
ALL = [(0, row) for row in range(10)]  # of one segment that `fill` has made
NEW = [("new", row) for row in range(4)]


class Meddled(Unsynced):
    """Something else happens once, right before or after a call."""

    def __init__(self):
        self._plans = []

    def when(self, call, text, *, before=None, after=None, number=1, **options):
        """At the call of this number whose file has this text in its path, and that has these options."""
        self._plans.append([call, text, options, number, before, after])

    def happened(self):
        return self._plans == []

    def _due(self, call, file, options):
        file = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file.number}")
        for plan in self._plans:
            if plan[0] == call and plan[1] in file and plan[2].items() <= options.items():
                plan[3] -= 1
                if plan[3] == 0:
                    self._plans.remove(plan)
                    return plan[4:]
        return None, None


def _meddled(call):
    def method(self, file, *args, **options):
        before, after = self._due(call, file, options)
        if before is not None:
            before()
        try:
            return getattr(super(Meddled, self), call)(file, *args, **options)
        finally:
            if after is not None:
                after()

    return method


for _call in CALLS:
    setattr(Meddled, _call, _meddled(_call))


@pytest.fixture
def directory(path):
    """As another process sees it."""
    return CacheDirectory(str(path), FileSystem())


@pytest.fixture
def make(make):
    return functools.partial(make, codec="none")


def meanwhile(function, *args):
    """What another thread does, and what comes of it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return results


def used(directory):
    return [one for one in NAMESPACES if in_use(directory, one.hex())]


def deleted_but_open(path):
    open_files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            open_files.append(os.readlink(f"/proc/self/fd/{number}"))
    return [file for file in open_files if file.startswith(str(path)) and file.endswith(" (deleted)")]


# Who writes, and who makes room


def test_a_namespace_that_is_only_asked_about_is_not_taken_for_one_in_use(make, path, log):
    """As `torchcache2 ls` asks."""
    fill(path, 5, namespace=B)
    fs, asking = Meddled(), []

    def ask():
        asking.append(FileSystem().open(str(path / B.hex() / FINGERPRINT)))
        assert FileSystem().lock(asking[0], exclusive=True)

    fs.when("lock", B.hex(), exclusive=True, before=ask, after=asking.clear)
    tier = make(200_000, fs=fs)
    seal(tier, NEW, WIDTH)
    assert sealed_names(path, NEW, WIDTH) == NEW and fs.happened()
    assert warnings_of(log) == []


@pytest.mark.parametrize("number", [1, 2], ids=["after the scan", "while it is claimed"])
def test_segments_whose_fingerprint_is_lost_stay_when_somebody_begins_to_use_them(make, path, number):
    fill(path, 3)
    (path / A.hex() / FINGERPRINT).unlink()
    tier = make()
    fs = Meddled()
    fs.when("listing", A.hex(), number=number, after=lambda: seal(tier, NEW, WIDTH))
    assert not make_room(CacheDirectory(str(path), fs), 0, 1000, lru=False)
    assert fs.happened() and len(segments(path, A)) == 4
    assert sealed_names(path, ALL, WIDTH) == ALL and sealed_names(path, NEW, WIDTH) == NEW


def test_who_claims_a_fingerprint_that_was_replaced_deletes_nothing(path, directory):
    fill(path, 3)
    fs, holds = Meddled(), []

    def replace():
        (path / A.hex() / FINGERPRINT).unlink()
        directory.prepare(A, {})
        holds.append(directory.hold(A))

    fs.when("lock", A.hex(), exclusive=True, before=replace)
    assert not make_room(CacheDirectory(str(path), fs), 0, 1000, lru=False)
    assert fs.happened() and len(segments(path, A)) == 3
    assert directory.fs.same(holds[0], path / A.hex() / FINGERPRINT)


FORKS = """
import os, sys
from tests.helpers.storage import NAMESPACES, Unsynced, size_of
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.removal import make_room
from torchcache2.files.removal import in_use

path, namespace = sys.argv[1], NAMESPACES[0]
read, write = os.pipe()
child = None


class Forking(Unsynced):
    def remove(self, path):
        global child
        super().remove(path)
        if child is None:
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)  # until the parent ends
                os._exit(0)


directory = CacheDirectory(path, Forking())
assert make_room(directory, 0, size_of(path) - 1, lru=False)
assert in_use(directory, namespace.hex()) is False
assert directory.hold(namespace) is not None
assert make_room(directory, 0, 1000, lru=False)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
"""


def test_a_child_that_is_forked_while_room_is_made_claims_nothing(path):
    fill(path, 3)
    warm.run(FORKS, path)
    assert segments(path) == []


def test_a_tier_that_is_closed_in_a_thread_that_makes_room_does_not_wait_for_it(make, path):
    fill(path, 5, namespace=B)
    other = make(250_000)
    put(other, NEW, WIDTH, C)
    fs = Meddled()
    tier = make(200_000, fs=fs)
    fs.when("remove", B.hex(), after=other.close)  # as the garbage collector does
    seal(tier, NEW, WIDTH)
    assert fs.happened() and other.stats().faults == tier.stats().faults == 0
    assert sealed_names(path, NEW, WIDTH) == sealed_names(path, NEW, WIDTH, C) == NEW


# Who reads, and counts as a user


def test_who_reads_while_an_old_segment_is_deleted_counts_as_a_user(make, path, directory, at_once):
    fill(path, 4)
    reader, fs = make(), Meddled()
    want = [(number, row) for number in (1, 2, 3) for row in range(10)]
    fs.when("remove", A.hex(), before=lambda: found(reader, want, WIDTH))
    assert make_room(CacheDirectory(str(path), fs), 0, size_of(path) - 1, lru=False)
    wait_until(lambda: found(reader, want, WIDTH) == want and used(directory) == [A])
    assert fs.happened()
    assert not make_room(directory, 0, 1000, lru=False)
    assert found(reader, want, WIDTH) == sealed_names(path, want, WIDTH) == want


def test_who_only_reads_uses_what_is_in_use(make, path, directory):
    for namespace in NAMESPACES:
        fill(path, 1, namespace=namespace)
    now = set()
    reader = make(in_use=lambda: now)
    for namespace in NAMESPACES:
        now.clear()
        now.add(namespace)
        assert found(reader, ALL, WIDTH, namespace) == ALL
    assert used(directory) == [C]
    now.add(A)
    assert found(reader, ALL, WIDTH, A) == ALL
    assert used(directory) == [A, C]


# Who writes, and who deletes


@pytest.mark.parametrize("by", ["force", "hand"])
def test_rows_are_written_although_the_folder_is_deleted_meanwhile(make, path, directory, by):
    def delete():
        if by == "force":
            remove_namespace(directory, A.hex(), force=True)
        else:
            shutil.rmtree(path / A.hex())

    fill(path, 1)
    fs = Meddled()
    fs.when("create", ".tmp", before=delete)
    tier = make(fs=fs)
    seal(tier, range(5))
    assert tier.stats().faults == 0 and fs.happened()
    assert found(tier, range(5)) == sealed_names(path, range(5)) == list(range(5))
    assert len(segments(path)) == 1


def test_the_name_of_a_folder_is_synced_although_its_maker_was_killed(make, path, tmp_path):
    class Killed(PowerCut):
        """Whoever has made the folder gets no further."""

        is_dead = False

        def before(self, number, name, args):
            if self.is_dead or (name == "sync_folder" and (path / A.hex()).is_dir()):
                self.is_dead = True
                raise OSError(errno.EIO, "the end")
            super().before(number, name, args)

    fs = Killed(path)
    seal(make(fs=fs), ["first"])
    assert fs.is_dead and segments(path) == []
    fs.before = functools.partial(PowerCut.before, fs)  # another one comes
    seal(make(fs=fs), range(10))
    fs.restart(tmp_path / "after")
    assert sealed_names(tmp_path / "after", range(10)) == list(range(10))


@pytest.mark.parametrize(
    ("call", "text"),
    [("exists", f"{A.hex()}/{FINGERPRINT}"), ("open", f"{A.hex()}/{FINGERPRINT}")],
    ids=["before there is a fingerprint", "before it is held"],
)
def test_room_is_made_while_another_process_enters_a_namespace(make, path, directory, call, text):
    fill(path, 3, namespace=B)
    fs = Meddled()
    fs.when(call, text, before=lambda: make_room(directory, 40_000, 100_000, lru=False))
    seal(make(fs=fs), ["first"])
    assert sealed_names(path, ["first"]) == ["first"] and fs.happened()
    assert len(segments(path, B)) == 1


# Who drops, and who reads


def test_rows_that_are_read_while_they_are_dropped_do_not_stay(make, path):
    fs = Meddled()
    tier = make(fs=fs)
    for name in range(5):
        seal(tier, [name])
    fs.when("remove", ".safetensors", before=lambda: meanwhile(found, tier, range(5)))
    tier.drop(A)
    assert fs.happened() and found(tier, range(5)) == []
    assert deleted_but_open(path) == []
    seal(tier, range(5))
    assert found(tier, range(5)) == sealed_names(path, range(5)) == list(range(5))


def test_a_segment_that_is_dropped_while_it_is_opened_does_not_stay_open(make, path):
    fill(path, 1)
    fs = Meddled()
    tier = make(fs=fs)
    assert found(tier, ["nowhere"], WIDTH) == []  # its index is read, and the file closed
    fs.when("open", ".safetensors", after=lambda: meanwhile(tier.drop, A))
    found(tier, ALL, WIDTH)
    assert fs.happened() and found(tier, ALL, WIDTH) == []
    assert deleted_but_open(path) == []


@pytest.mark.parametrize("inner", ["clear", "read"])
def test_rows_that_are_read_while_they_are_cleared_do_not_stay_in_memory(path, monkeypatch, inner):
    """All of the one happens in the middle of the other."""

    def fetch(names, value):
        return cache.fetch(keys_of(names), lambda positions: torch.full((len(positions), 4), value))

    fs = Meddled()
    monkeypatch.setattr(disk_module, "FileSystem", lambda: fs)
    settings = CacheSettings(persistent=True, persistent_cache_dir=path)
    cache = Cache(A, settings)
    fetch(range(3), 1.0)
    cache.close()
    cache = Cache(A, settings)
    fetch([0], 1.0)  # the index of the segment has been read
    if inner == "clear":
        fs.when("read", ".safetensors", after=lambda: meanwhile(cache.clear))
        fetch([1, 2], 2.0)
    else:
        fs.when("remove", ".safetensors", before=lambda: meanwhile(fetch, [1, 2], 2.0))
        cache.clear()
    assert fs.happened() and not (fetch(range(3), 0.0) == 1.0).any()
    cache.close()


# Who closes


def test_the_last_cache_that_leaves_does_not_close_the_tier_of_the_next(path, monkeypatch, at_once):
    def ones(positions):
        return torch.ones(len(positions), 4)

    def join():
        caches.append(Cache(A, settings, tiers=tiers))
        caches[1].fetch(keys_of(range(10, 13)), ones)

    def close():
        meanwhile(join)
        memory_close()

    threads = threading.enumerate()
    settings = CacheSettings(persistent=True, persistent_cache_dir=path, max_memory_cache_size=0)
    tiers = TierStack(settings)
    caches = [Cache(A, settings, tiers=tiers)]
    caches[0].fetch(keys_of(range(3)), ones)
    memory_close = tiers.tiers[0].close
    monkeypatch.setattr(tiers.tiers[0], "close", close)
    caches[0].close()
    second = caches[1]
    second.flush()
    second.fetch(keys_of([*range(3), *range(10, 13)]), ones)
    assert second.stats().hits == 6
    second.close()
    assert threading.enumerate() == threads


def test_rows_that_another_thread_flushes_while_the_tier_is_closed_stay(make, path, directory, monkeypatch):
    """No thread can be started, so that whoever flushes writes."""
    start = threading.Thread.start

    def refuse(thread):
        if "torchcache2" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fs, closing, close_on, writing, write_on = Meddled(), *(threading.Event() for _ in range(4))
    written = []

    def describe(namespace):
        """What whoever writes asks first."""
        written.append(namespace)
        if len(written) == 2:
            writing.set()
            write_on.wait(30)
        return {}

    directory.create()
    directory.prepare(A, {})
    tier = make(fs=fs, description=describe)
    put(tier, range(5))
    fs.when("sync", A.hex(), before=lambda: (closing.set(), close_on.wait(30)))
    closer = threading.Thread(target=tier.close)
    closer.start()
    assert closing.wait(30)
    assert put(tier, range(10, 15)) == 5
    flusher = threading.Thread(target=tier.flush)
    flusher.start()
    assert writing.wait(30)
    close_on.set()
    closer.join(0.2)  # by now it has closed, or waits for the other one
    write_on.set()
    closer.join(30)
    flusher.join(30)
    assert not closer.is_alive() and not flusher.is_alive()
    assert sealed_names(path, range(15)) == [*range(5), *range(10, 15)]


# Temporary folders


def files_in(folder):
    return [file.name for file in folder.rglob("*") if file.is_file()]


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """Where temporary folders are; names in a folder come in the order of the alphabet."""
    system = os.scandir

    @contextlib.contextmanager
    def scandir(path="."):
        with system(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name))

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def test_the_next_run_deletes_what_is_left_of_a_folder_whenever_its_run_was_killed(make, tmp, monkeypatch):
    system, left = {name: getattr(os, name) for name in ("unlink", "rmdir", "remove")}, 0

    def patched(name):
        def delete(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            system[name](*args, **options)

        return delete

    for number in range(20):
        scratch = Scratch()
        tier = make(where=scratch.path)
        seal(tier, range(5))
        tier.close()
        left = number
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in system:
                patch.setattr(os, name, patched(name))
            scratch.remove()
        del scratch  # and its lock
        Scratch().remove()
        assert files_in(tmp) == []
        if left >= 0:
            break
    assert left >= 0 and number > 3


def test_a_folder_that_a_child_writes_into_while_it_is_deleted_goes_with_the_next_run(make, tmp, monkeypatch):
    system, done = os.rmdir, []

    def rmdir(folder, **options):
        if Path(folder).name == A.hex() and not done:
            done.append(1)
            seal(tier, range(10, 15))
        system(folder, **options)

    scratch = Scratch()
    tier = make(where=scratch.path, temporary=True)
    seal(tier, range(5))
    monkeypatch.setattr(os, "rmdir", rmdir)
    scratch.remove()
    assert done
    tier.close()
    Scratch().remove()
    assert files_in(tmp) == []
