"""Deleting from a cache directory. Other processes that meddle are in `tests/system/test_races.py`."""

import errno
import fcntl
import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.storage import (
    NAMESPACES,
    Mortal,
    Unsynced,
    abandon,
    fill,
    seal,
    segments,
    size_of,
    strange_files,
)
from torchcache2.files import removal
from torchcache2.files.directory import FINGERPRINT, CacheDirectory
from torchcache2.files.removal import (
    deleting,
    in_use,
    make_room,
    remove_leftovers,
    remove_namespace,
    room_after,
)

A, B, C = NAMESPACES


class Scans(Unsynced):
    """Counts how often the names in the directory are read; some files cannot be deleted."""

    def __init__(self, kept=()):
        self.scans = []
        self.kept = kept

    def listing(self, path):
        self.scans.append(os.path.basename(path))
        return super().listing(path)

    def remove(self, path):
        if os.path.basename(path) in self.kept:
            raise PermissionError(errno.EPERM, "not yours", path)
        super().remove(path)


@pytest.mark.parametrize("lru", [False, True])
def test_a_full_directory_is_scanned_once_to_make_room(path, lru):
    fill(path, 5)
    fs = Scans()
    assert make_room(CacheDirectory(str(path), fs), 10_000, size_of(path), lru=lru)
    assert fs.scans.count(path.name) == 1
    assert len(segments(path)) == 4


def test_a_directory_that_another_process_made_room_in_is_scanned_again(path, monkeypatch):
    fill(path, 5)
    fs = Scans()
    directory = CacheDirectory(str(path), fs)
    lock, acquire, waits = deleting(directory), type(deleting(directory)).acquire, []

    def wait(self, timeout=None, **options):
        if timeout == 0:
            waits.append(1)
            segments(path)[0].unlink()
            raise TimeoutError
        return acquire(self, timeout, **options)

    monkeypatch.setattr(type(lock), "acquire", wait)
    assert make_room(directory, 10_000, size_of(path), lru=False)
    assert waits and fs.scans.count(path.name) == 2 and len(segments(path)) == 4


@pytest.mark.parametrize("user", [True, False], ids=["a user", "somebody who asks"])
def test_only_who_asks_the_same_is_waited_for(path, monkeypatch, user):
    """A cache that is full of rows in use makes room for each segment: it would wait for each namespace."""
    fill(path, 1)
    fs, waits = Unsynced(), []
    others = [fs.open(str(path / A.hex() / FINGERPRINT))]
    assert fs.lock(others[0], exclusive=not user)

    class Clock:
        @staticmethod
        def sleep(seconds):
            waits.append(seconds)
            others.clear()

    monkeypatch.setattr(removal, "time", Clock)
    assert in_use(CacheDirectory(str(path), fs), A.hex()) is user
    assert len(waits) == (0 if user else 1)


def test_what_cannot_be_deleted_stays_and_the_rest_goes(path):
    fill(path, 3)
    kept = segments(path)[1]
    directory = CacheDirectory(str(path), Scans([kept.name]))
    with pytest.raises(PermissionError, match="not yours"):
        remove_namespace(directory, A.hex())
    assert segments(path) == [kept]


def test_heads_make_room_once_their_segments_are_gone_and_nobody_uses_them(path):
    for namespace in NAMESPACES:
        fill(path, 2, namespace=namespace)
        for file in segments(path, namespace):
            Path(f"{file}.head").write_bytes(bytes(1000))
    for file in (*segments(path, A), *segments(path, B)):
        file.unlink()
    Path(f"{segments(path, C)[0]}.head").unlink()  # so the bucket lacks this segment

    def heads(namespace):
        return len(list(path.glob(f"{namespace.hex()}/*.head")))

    def room(needed, left=0):
        directory = CacheDirectory(str(path), Unsynced())
        return room_after(directory, needed, size_of(path) + left, lru=True, mirrored=True)

    assert room(500, 600) == 100 and [heads(namespace) for namespace in NAMESPACES] == [2, 2, 1]
    freed = sum(file.stat().st_size for file in segments(path, C)[1:])
    assert room(freed) == 0 and [heads(namespace) for namespace in NAMESPACES] == [2, 2, 1]
    again = list(path.glob(f"{B.hex()}/*.head"))
    with next(path.glob(f"{A.hex()}/{FINGERPRINT}")).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as whoever uses it has it locked
        assert room(3000) == -1000 and [heads(namespace) for namespace in NAMESPACES] == [2, 0, 1]
    for head in again:
        head.write_bytes(bytes(1000))
    assert room(1500) == 500 and sorted(map(heads, (A, B))) == [0, 2]
    assert room(2001) == -1 and [heads(namespace) for namespace in NAMESPACES] == [0, 0, 1]
    assert len(segments(path, C)) == 1


def test_a_damaged_segment_counts_once(path):
    """Room is made for what is needed and no more: a file that is gone already is not counted again."""
    fill(path, 3)
    fill(path, 1, namespace=B)
    damaged, size = segments(path, A)[0], size_of(path)
    os.rename(damaged, f"{damaged}.corrupt")
    assert make_room(CacheDirectory(str(path), Unsynced()), 0, size - 60_000, lru=False)
    assert len(segments(path, A)) == 1 and len(segments(path, B)) == 1
    assert size_of(path) <= size - 60_000


def test_a_namespace_is_free_at_whichever_call_its_user_was_killed(make, tmp_path):
    """A killed process may leave a second name of the fingerprint, which is locked like the first."""
    calls, is_done = 0, False
    while not is_done:
        path = tmp_path / str(calls)
        fs = Mortal()
        tier = make(where=path, fs=fs)
        fs.die(after=calls)
        seal(tier, [1])
        is_done = not fs.is_dead
        abandon(tier, fs)
        directory = CacheDirectory(str(path), Unsynced())
        assert in_use(directory, A.hex()) is False
        assert remove_namespace(directory, A.hex()) and not (path / A.hex()).exists()
        remove_leftovers(directory)
        assert strange_files(path) == []
        calls += 1
    assert calls > 5


def test_another_system_is_told_that_it_is_not_supported(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delitem(sys.modules, "torchcache2.files.filesystem")
    with pytest.raises(ImportError, match="not on Windows"):
        importlib.import_module("torchcache2.files.filesystem")
