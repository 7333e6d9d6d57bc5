"""What a bucket does that has no faults, on each kind of it."""

import gc
import os
import time

import pytest

from tests.helpers.buckets import SCHEMES, bucket, new_bucket, opened, options_of
from torchcache2.core.errors import NewerFormatError, OptionError
from torchcache2.core.places import Bucket
from torchcache2.files.directory import TAG_TEXT
from torchcache2.tiers.bucket.objects import Objects


@pytest.fixture(params=SCHEMES)
def objects(request, tmp_path):
    with opened(bucket(request.param, tmp_path)) as made:
        yield made


@pytest.fixture
def memory(tmp_path):
    with opened(bucket("memory", tmp_path)) as made:
        yield made


@pytest.fixture
def file(tmp_path):
    with opened(bucket("file", tmp_path)) as made:
        made.folder = made.bucket.url.partition("://")[2]
        yield made


def test_what_is_written_is_listed_read_and_removed(objects, tmp_path, log):
    objects.check()
    assert objects.listing() == [] and objects.listing("a") == []
    begun = time.time()
    assert objects.write("CACHEDIR.TAG", TAG_TEXT.encode()) and objects.write("a/one", b"0123456789")
    (tmp_path / "local").write_bytes(b"of a file")
    assert objects.write("a/two", str(tmp_path / "local")) and objects.write("a/none", b"")
    size = len(TAG_TEXT)
    assert [info[:3] for info in objects.listing()] == [("CACHEDIR.TAG", False, size), ("a", True, 0)]
    listed = objects.listing("a")
    assert [info[:3] for info in listed] == [("none", False, 0), ("one", False, 10), ("two", False, 9)]
    assert all(begun - 2 < info.mtime < time.time() + 2 for info in listed)
    asked = [("a/one", 2, 5), ("a/two", 0, 9), ("a/one", 0, 11), ("a/three", 0, 1), ("a/one", 4, 4)]
    asked += [("a/one", 10, 12), ("a/one", 20, 22), ("a/none", 0, 1), ("a", 0, 1)]
    assert objects.read(asked) == [b"234", b"of a file", None, None, b"", None, None, None, None]
    assert objects.texts(["a/one", "a/none", "a/three", "a"]) == {"a/one": b"0123456789"}
    assert objects.texts([]) == {}
    objects.check()
    assert objects.write("a/one", b"another")
    assert objects.read([("a/one", 0, 7)]) == [b"another"], "it is replaced"
    objects.remove(["a/one", "a/three"])
    assert [info.name for info in objects.listing("a")] == ["none", "two"]
    assert (objects.faults, objects.cause, log) == (0, None, [])
    assert (objects.bytes_up, objects.bytes_down) == (size + 26, 29)


def test_a_local_file_that_cannot_be_read_is_no_fault(memory, tmp_path):
    memory.write("one", b"1")
    assert not memory.write("two", str(tmp_path / "nothing"))
    assert memory.faults == 0 and memory.read([("one", 0, 1)]) == [b"1"]


@pytest.mark.parametrize(
    ("tag", "error", "says"),
    [
        (TAG_TEXT, None, ""),
        (TAG_TEXT.replace("format 2", "format 3"), NewerFormatError, "has format 3"),
        ("Signature: 8a477f597d28d172789f06886806bc55\n", OptionError, "of another program"),
        ("", OptionError, "of another program"),
    ],
    ids=["ours", "newer", "foreign", "empty"],
)
def test_the_tag_says_whose_folder_it_is(memory, tag, error, says):
    memory.write("CACHEDIR.TAG", tag.encode())
    memory.write("something-else", b"1")
    if error is None:
        memory.check()
    else:
        with pytest.raises(error, match=says):
            memory.check()


def test_objects_of_strangers_are_no_reason_to_refuse_a_bucket(objects):
    objects.write("picture.png", b"1")
    objects.check()


def test_a_folder_has_files_only_that_can_be_read_without_waiting(file):
    file.write("one", b"1")
    os.symlink("one", os.path.join(file.folder, "link"))
    os.mkfifo(os.path.join(file.folder, "pipe"))
    assert [info.name for info in file.listing()] == ["one"]


@pytest.mark.slow
def test_a_half_object_of_a_folder_is_seen_under_another_name_only(file, tmp_path, monkeypatch):
    seen = []
    name = "0" * 26 + ".safetensors"
    replace = os.replace

    def look(old, new):
        seen.append([info.name for info in file.listing("a")])
        replace(old, new)

    monkeypatch.setattr(os, "replace", look)
    (tmp_path / "local").write_bytes(b"1")
    assert file.write(f"a/{name}", str(tmp_path / "local"))
    assert seen == [[f"{name}.tmp"]] and [info.name for info in file.listing("a")] == [name]

    def fail(old, new):
        raise OSError

    monkeypatch.setattr(os, "replace", fail)
    assert not file.write("a/fingerprint.json", b"1")
    file._breaker.pause(0)
    assert file.faults == 1 and [info.name for info in file.listing("a")] == [name]


def test_a_range_of_half_an_object_is_none(file):
    file.write("one", b"0123456789")
    os.truncate(os.path.join(file.folder, "one"), 6)
    assert file.read([("one", 0, 6), ("one", 4, 8), ("one", 6, 8)]) == [b"012345", None, None]


@pytest.mark.slow
def test_a_marker_of_a_folder_is_no_object_in_it(tmp_path):
    with opened(bucket("s3", tmp_path)) as objects:
        objects.write("a/", b"")
        objects.write("a/one", b"1")
        assert [info.name for info in objects.listing()] == ["a"]
        assert [info.name for info in objects.listing("a")] == ["one"]


def test_nothing_is_asked_after_the_end(memory):
    memory.close()
    memory.close()
    assert memory.listing() is None and not memory.write("one", b"1") and memory.faults == 0


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_that_does_not_exist_is_an_error(scheme):
    place = Bucket.of(f"{scheme}://tc2-nobodys/folder", storage_options=options_of(scheme))
    with opened(place) as objects:
        with pytest.raises(OptionError, match="there is no such bucket"):
            objects.check()
        assert not objects.write("one", b"1")
        assert objects.faults == 1


def test_an_emulator_needs_no_other_setting(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", options_of("gs")["endpoint_url"])
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)
    place = Bucket.of(f"gs://{new_bucket('gs')}/folder", storage_options={"token": "anon", "project": "test"})
    with opened(place) as objects:
        begun = time.monotonic()
        objects.check()
        assert objects.write("one", b"1") and objects.read([("one", 0, 1)]) == [b"1"]
        assert time.monotonic() - begun < 10, "it is not asked by gRPC"


def test_options_that_the_library_does_not_take_are_an_error():
    place = Bucket.of("s3://tc2/folder", storage_options={"nonsense": "not-to-be-shown"})
    with opened(place) as objects, pytest.raises(OptionError, match="nonsense") as found:
        objects.check()
    assert "not-to-be-shown" not in str(found.value) + repr(objects)


def test_what_is_dropped_unclosed_is_closed(tmp_path):
    for scheme in ("s3", "gs"):
        objects = Objects(bucket(scheme, tmp_path))
        assert objects.listing() == []
        del objects
    gc.collect()  # a session that is not closed warns here, which is an error
