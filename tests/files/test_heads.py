"""Heads: a segment is opened from its first bytes alone; nothing that they state is believed unchecked."""

import time
from pathlib import Path

import numpy as np
import pytest

from torchcache2.core.errors import DamagedError, UnreadableError
from torchcache2.files.directory import CacheDirectory, contents_of
from torchcache2.files.filesystem import Descriptors, FileSystem, made_at, ulid
from torchcache2.files.layout import HEAD, head_size, parse_head, read_head, write_head
from torchcache2.files.removal import Removal, remove_leftovers
from torchcache2.files.segment import Segment

FS = FileSystem()
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))
NAME = "01ARZ3NDEKTSV4RRFFQ69G5FAV.safetensors"
LIMIT = 1 << 30


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_head_says_what_the_segment_says(path):
    head, size = read_head(FS, str(path))
    assert path.read_bytes().startswith(head) and size == path.stat().st_size
    files = Descriptors(FS)
    whole = Segment.open(FS, files, str(path), limit=LIMIT, structured=False)
    for stated in (size, None):
        layout, index = parse_head(head, stated, LIMIT, structured=False)
        segment = Segment(FS, files, str(path), layout, len(head), index)
        assert segment.layout.tensors() == whole.layout.tensors()
        assert (segment.nbytes, segment.path) == (size, str(path))
        assert np.array_equal(segment.keys, whole.keys)
        assert segment.check() == 0  # its rows are in that path


@pytest.mark.parametrize("path", GOLDEN[:3], ids=lambda path: path.stem)
def test_a_head_that_is_not_what_was_written_is_damaged(path):
    head, size = read_head(FS, str(path))
    generator = np.random.default_rng(0)
    for place in generator.choice(len(head), min(100, len(head)), replace=False).tolist():
        flipped = bytearray(head)
        flipped[place] ^= 1 << int(generator.integers(8))
        for stated in (size, None):
            with pytest.raises(UnreadableError):
                parse_head(bytes(flipped), stated, LIMIT, structured=False)
    for other in (head[:-1], head + b"\0", head[:8], head[:3], b"", b"<html>not found</html>"):
        with pytest.raises(DamagedError):
            parse_head(other, None, LIMIT, structured=False)
    for other in (size - 1, size + 1, len(head) - 1, 0):
        with pytest.raises(DamagedError):
            parse_head(head, other, LIMIT, structured=False)


@pytest.mark.parametrize("path", GOLDEN[:1], ids=lambda path: path.stem)
def test_the_first_bytes_tell_how_many_are_needed(path):
    head, size = read_head(FS, str(path))
    for count in range(8, len(head), 7):
        assert count < head_size(head[:count], size) <= len(head)
    assert head_size(head, size) == head_size(path.read_bytes(), size) == len(head)


def test_heads_are_files_of_a_namespace_and_go_with_it(tmp_path):
    directory = CacheDirectory(str(tmp_path / "cache"), FS)
    namespace = bytes(range(16))
    directory.create()
    directory.prepare(namespace, {})
    folder = Path(directory.folder(namespace))
    (folder / NAME).write_bytes(b"the segment")
    write_head(FS, str(folder / NAME), b"the head")
    for strange in (NAME + ".heads", "a" + NAME + HEAD, NAME + HEAD + ".tmp"):
        (folder / strange).write_bytes(b"")
    contents = directory.contents(namespace.hex())
    assert [info.name for info in contents.heads] == [NAME + HEAD]
    assert [info.name for info in contents.segments] == [NAME]
    assert contents.nbytes == 19 + contents.others[0].size
    remove_leftovers(directory)
    assert (folder / (NAME + HEAD)).read_bytes() == b"the head"
    removal = Removal(directory, 11)
    removal.namespace(contents)
    assert (folder / (NAME + HEAD)).exists() and not (folder / NAME).exists()
    assert removal.gone == {namespace.hex(): [NAME]}
    Removal(directory, 10**9).namespace(directory.contents(namespace.hex()))
    assert not (folder / (NAME + HEAD)).exists()
    assert contents_of("", directory.fs.listing(str(folder))).files == []


def test_a_name_tells_when_a_segment_was_made():
    before = time.time_ns() // 1_000_000
    assert before <= made_at(ulid() + ".safetensors") <= time.time_ns() // 1_000_000
    assert made_at(NAME) == 1469922850259  # as in the specification of ULIDs
