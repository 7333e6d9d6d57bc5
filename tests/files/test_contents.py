"""Digests of users' files: read once for all processes, and again when a file has changed."""

import os
import time

import pytest
from xxhash import xxh3_128_digest

from torchcache2.files.contents import FileDigests
from torchcache2.files.directory import CONTENTS


@pytest.fixture
def read(monkeypatch):
    """The files that were read. What was written just now is old."""
    found, now = [], time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    opened = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *args, **kw: found.append(path) or opened(path, *args, **kw)
    )
    return found


def digest_of(digests, path):
    digest = digests.of(os.fsencode(path), os.stat(path))
    assert digest == xxh3_128_digest(path.read_bytes())
    return digest


def times_read(read, folder, path, times=1):
    digests, before = FileDigests(folder), len(read)
    for _ in range(times):
        digest_of(digests, path)
    return len([one for one in read[before:] if type(one) is bytes])


def test_a_file_is_read_once_for_all_processes(tmp_path, read):
    folder, paths = str(tmp_path / "cache"), [tmp_path / f"{number}.bin" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    assert [times_read(read, folder, path, times=3) for path in paths] == [1] * 20
    assert [times_read(read, folder, path) for path in paths] == [0] * 20
    before = os.stat(paths[0])
    paths[0].write_bytes(bytes(range(100)))  # the same size, and then the same time
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    paths[1].rename(paths[1].with_suffix(".moved"))
    assert times_read(read, folder, paths[0]) == times_read(read, folder, paths[1].with_suffix(".moved")) == 1
    assert times_read(read, folder, paths[0]) == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no folder", "read-only"])
def test_what_is_lost_is_read_again(damage, tmp_path, read):
    folder, path = tmp_path / "cache", tmp_path / "one.bin"
    path.write_bytes(b"content")
    assert times_read(read, str(folder), path) == 1
    table = folder / CONTENTS
    data = table.read_bytes()
    if damage == "cut":
        table.write_bytes(data[:-1])
    elif damage == "flipped":
        table.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif damage == "gone":
        table.unlink()
    else:
        folder = tmp_path / "file" if damage == "read-only" else None
        (tmp_path / "file").write_bytes(b"")
    where = folder and str(folder)
    is_lost = damage in ("no folder", "read-only")
    assert [times_read(read, where, path, times=2) for _ in range(3)] == ([1, 1, 1] if is_lost else [1, 0, 0])


def test_what_was_written_just_now_is_not_remembered(tmp_path):
    digests, path = FileDigests(str(tmp_path / "cache")), tmp_path / "one.bin"
    for content in (b"one", b"two"):  # perhaps within one tick of the file system's clock
        path.write_bytes(content)
        digest_of(digests, path)
    assert not (tmp_path / "cache").exists()
