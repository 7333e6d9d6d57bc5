"""Folders on NFS, as `tests.helpers.nfs` emulates it, and on file systems without hard links."""

import errno
import os

import pytest

from tests.helpers.nfs import Machine, Nfs
from tests.helpers.storage import NAMESPACES, NEVER, fill, found, seal, segments
from torchcache2.files import indexfile as merging
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem, ulid, write_whole
from torchcache2.files.removal import in_use, remove_namespace
from torchcache2.tiers.disk.tier import DiskTier


def nfs(age=0.0):
    """A machine of its own."""
    fs = Nfs()
    fs.machine = Machine(age)
    return fs


def test_what_locks_exclusively_works_on_nfs(path, monkeypatch):
    """Room is made, namespaces are removed, runs are written, and living writers are left alone."""
    monkeypatch.setattr(merging, "_LEAST_ROWS", 10)
    fill(path, 3)
    temporary = str(path / NAMESPACES[0].hex() / f"{ulid()}.safetensors.tmp")
    writer, other = nfs(), nfs()
    file = writer.create(temporary)
    assert writer.lock(file, exclusive=True)
    tier = DiskTier(path, 150_000, codec="none", delay=NEVER, fs=other)
    for first in range(0, 20, 10):
        seal(tier, range(first, first + 10), 1000, NAMESPACES[1])
    assert tier.stats().faults == 0 and os.path.exists(temporary)
    assert len(segments(path, NAMESPACES[0])) < 3 and list(path.glob("*/*.run"))
    directory = CacheDirectory(str(path), nfs())
    assert in_use(directory, NAMESPACES[1].hex()) is True
    assert not remove_namespace(directory, NAMESPACES[1].hex())
    tier.close()
    assert in_use(directory, NAMESPACES[1].hex()) is False
    assert remove_namespace(directory, NAMESPACES[1].hex()) and segments(path, NAMESPACES[1]) == []
    with pytest.raises(PermissionError, match="may not be written"):
        other.lock(other.open(str(path / "CACHEDIR.TAG")), exclusive=True)


def test_what_another_machine_deletes_is_a_miss_and_what_it_adds_is_found_later(path, at_once):
    one, two = (DiskTier(path, codec="none", delay=NEVER, fs=nfs(3600.0)) for _ in range(2))
    seal(one, range(5))
    for _ in range(2):  # at first it touches the segment, and looks again
        assert found(two, range(6)) == list(range(5))
    seal(one, range(5, 10))
    assert found(two, range(10)) == list(range(5))
    two.directory.fs.machine.seen.clear()
    assert found(two, range(10)) == list(range(10))
    one.drop(NAMESPACES[0])
    assert found(two, range(10)) == []
    for tier in (one, two):
        assert (tier.stats().faults, tier.stats().corrupt) == (0, 0)
        tier.close()


def test_who_links_without_hard_links_removes_nothing(tmp_path, monkeypatch):
    def refuse(old, new):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    old, new, fs = tmp_path / "old", tmp_path / "new", FileSystem()
    monkeypatch.setattr(os, "link", refuse)
    old.write_text("ours")
    new.write_text("theirs")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # it is made after any check
    with pytest.raises(FileExistsError):
        fs.link(str(old), str(new))
    assert (old.read_text(), new.read_text()) == ("ours", "theirs")
    new.unlink()
    fs.link(str(old), str(new))
    assert new.read_text() == "ours" and not old.exists()


def test_who_writes_a_file_begins_again_if_another_machine_deletes_it_before_it_is_locked(path):
    """As a tier does that opens the folder at this moment: what is not locked is a dead writer's."""
    fs, create, swept = nfs(), Nfs.create, []

    def create_and_sweep(self, name):
        file = create(self, name)
        if not swept:
            swept.append(name)
            nfs().remove(name)
        return file

    path.mkdir()
    fs.create = create_and_sweep.__get__(fs)
    write_whole(fs, str(path / "file"), [memoryview(b"whole")], stem=f"{path}/file.")
    assert swept and [file.name for file in path.iterdir()] == ["file"]
    assert (path / "file").read_bytes() == b"whole"
