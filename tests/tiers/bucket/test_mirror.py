"""What is sealed in a local folder reaches the bucket, whatever ends or fails; what is there comes here."""

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.buckets import bucket, opened, proxied
from tests.helpers.remote import mirrored_disk, reader
from tests.helpers.storage import (
    NAMESPACES,
    ReadOnly,
    Unsynced,
    fill,
    found,
    put,
    refuse,
    seal,
    segments,
    size_of,
    wait_until,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.files.directory import ASKED, FINGERPRINT, MIRROR, TAG, TAG_TEXT, CacheDirectory
from torchcache2.files.filesystem import open_to_lock
from torchcache2.tiers.bucket.folder import TRANSFER, BucketFolder
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.disk import segmentwriter

FOLDER = NAMESPACES[0].hex()
WIDTH, ROWS = 1000, 10  # 40 kB a segment
SEGMENT = ROWS * WIDTH * 4
IMPORTS = ("s3fs", "gcsfs.core", "tests.helpers.buckets")  # as other tests have them
QUICK = {"patience": 1.0, "backoff": 0.02, "pause": 0.1}


class Slow(Objects):
    """Notes what is written, in which order, and may be stopped before it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.written, self.gate, self.stopped = [], threading.Event(), threading.Event()
        self.gate.set()

    def write_all(self, contents):
        if contents and isinstance(contents[0][1], str):  # segments; none if another has uploaded them
            self.stopped.set()
            assert self.gate.wait(30)
        self.written += [name for name, _ in contents]
        return super().write_all(contents)


@contextlib.contextmanager
def mirrored(objects, path, budget=10**7, fs=None, mirror_fs=None, **options):
    """A disk tier and the mirror of its folder."""
    fs = Unsynced() if fs is None else fs
    disk = mirrored_disk(path, budget, fs=fs)
    directory = disk.directory if mirror_fs is None else CacheDirectory(str(path), mirror_fs)
    options = {"pause": 0.01, "patience": 5.0} | options
    folder = BucketFolder(objects, directory, budget)
    folder.used.update(namespace.hex() for namespace in NAMESPACES)
    mirror = Mirror(objects, directory, folder, budget, disk.flush, **options)
    mirror.begin()
    try:
        yield disk, mirror
    finally:
        getattr(objects, "gate", threading.Event()).set()
        disk.close()
        mirror.close()


@pytest.fixture
def slow(tmp_path):
    objects = Slow(bucket("file", tmp_path))
    yield objects
    objects.close()


def there(objects, folder=FOLDER):
    """Names and sizes of what the bucket has."""
    return {info.name: info.size for info in objects.listing(folder) if not info.is_folder}


def here(path):
    return {file.name: file.stat().st_size for file in segments(path)}


def heads(path):
    return sorted(file.name.removesuffix(".head") for file in Path(path).glob("*/*.head"))


def locked(path):
    """The lock of the mirror's file; None if another process has it."""
    file = open_to_lock(Unsynced(), str(path / MIRROR))
    return file if Unsynced().lock(file, exclusive=True) else None


def put_and_flush(disk, number):
    put(disk, [(number, row) for row in range(ROWS)], WIDTH)
    disk.flush()


def seal_some(disk, numbers, **options):
    for number in numbers:
        seal(disk, [(number, row) for row in range(ROWS)], WIDTH, **options)


def names_of(numbers):
    return [(number, row) for number in numbers for row in range(ROWS)]


def check_whole(bucket, tmp_path, numbers):
    """Assert that the bucket alone has all rows, and that its listing is that of a cache directory."""
    with opened(bucket) as objects:
        assert TAG in there(objects, "")
        tier = reader(bucket, tmp_path / f"empty-{len(os.listdir(tmp_path))}")
        wanted = names_of(numbers)
        assert found(tier, wanted, WIDTH) == sorted(wanted)
        tier.close()
        assert json.loads(objects.read([(f"{FOLDER}/{FINGERPRINT}", 0, there(objects)[FINGERPRINT])])[0])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("scheme", ["memory", "file", "s3", "gs"])
def test_a_bucket_becomes_what_the_folder_is_and_another_folder_what_the_bucket_is(scheme, tmp_path):
    place = bucket(scheme, tmp_path)
    with opened(place) as objects:
        with mirrored(objects, tmp_path / "one") as (disk, mirror):
            seal_some(disk, range(3))
            mirror.flush()
            files = here(tmp_path / "one")
            text = (tmp_path / "one" / FOLDER / FINGERPRINT).read_bytes()
            assert there(objects) == {**files, FINGERPRINT: len(text)}
            assert there(objects, "") == {TAG: len(TAG_TEXT)}
            assert heads(tmp_path / "one") == sorted(files)
        tier = reader(place, tmp_path / "two")
        assert len(found(tier, names_of(range(3)), WIDTH)) == 3 * ROWS
        with mirrored(objects, tmp_path / "two") as (disk, mirror):
            assert found(disk, names_of([5])) == []  # from now on the namespace is in use
            wait_until(lambda: here(tmp_path / "two") == files)
            disk.look_again(NAMESPACES[0])
            assert len(found(disk, names_of(range(3)), WIDTH)) == 3 * ROWS
        tier.close()
        assert objects.faults == objects.corrupt == 0


def test_the_tag_comes_first_and_a_fingerprint_last(slow, path):
    before = mirrored_disk(path)
    seal_some(before, range(3))
    before.close()
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert slow.written[0] == TAG and slow.written[-1] == f"{FOLDER}/{FINGERPRINT}"
        assert len(slow.written) == 5
    slow.written.clear()
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert slow.written == []  # all is there


def test_a_tag_that_is_there_is_never_written_again(slow, path):
    tag = TAG_TEXT.encode() + b"# and more\n"
    slow.write(TAG, tag)
    with mirrored(slow, path) as (disk, mirror):
        seal_some(disk, range(1))
        mirror.flush()
    assert slow.written.count(TAG) == 1 and slow.read([(TAG, 0, len(tag))]) == [tag]


def test_a_bucket_of_a_newer_format_gets_nothing(slow, path, log):
    slow.write(TAG, TAG_TEXT.replace("format 2", "format 3").encode())
    with mirrored(slow, path) as (disk, mirror):
        seal_some(disk, range(1))
        mirror.flush()
        assert here(path) and not heads(path)
    assert slow.written == [TAG] and len(warnings_of(log)) == 2
    assert "newer format" in warnings_of(log)[0].getMessage()


def test_a_fingerprint_that_is_there_stays(slow, path):
    slow.write(f"{FOLDER}/{FINGERPRINT}", b'{"created": "then"}')
    with mirrored(slow, path) as (disk, mirror):
        seal_some(disk, range(1))
        mirror.flush()
    assert slow.written.count(f"{FOLDER}/{FINGERPRINT}") == 1


# Room


def test_uploaded_segments_make_room_and_others_never_do(slow, path, tmp_path, monkeypatch):
    monkeypatch.setattr(segmentwriter, "PAUSE", 0.005)
    budget = 10 * SEGMENT  # or segments would be smaller
    with mirrored(slow, path, budget) as (disk, mirror):
        slow.gate.clear()
        writer = threading.Thread(target=seal_some, args=(disk, range(20)))
        writer.start()
        wait_until(lambda: len(segments(path)) == 9)
        time.sleep(0.1)
        assert len(segments(path)) == 9 and writer.is_alive()  # it waits for room
        slow.gate.set()
        writer.join(30)
        assert not writer.is_alive() and size_of(path) <= budget
        mirror.flush()
        assert len(there(slow)) == 21 and len(heads(path)) == 20
        assert disk.stats().evictions >= 10 * ROWS and disk.stats().faults == 0
        # What made room is not brought again, although there would be some for it.
        for file in segments(path):
            file.unlink()
        time.sleep(0.1)
        assert not segments(path)
    check_whole(slow.bucket, tmp_path, range(20))


def test_who_waits_for_room_gives_up_if_nobody_uploads(path, monkeypatch, log):
    monkeypatch.setattr(segmentwriter, "PAUSE", 0.005)
    monkeypatch.setattr(segmentwriter, "SILENCE", 0.1)
    disk = mirrored_disk(path, 10 * SEGMENT)
    for number in range(12):
        put_and_flush(disk, number)
    assert len(segments(path)) == 9 and len(warnings_of(log)) == 1
    assert "the bucket does not have" in warnings_of(log)[0].getMessage()
    disk.close()


def test_who_waits_for_room_goes_on_while_another_process_uploads(path, monkeypatch):
    monkeypatch.setattr(segmentwriter, "PAUSE", 0.005)
    monkeypatch.setattr(segmentwriter, "SILENCE", 0.05)
    disk = mirrored_disk(path, 10 * SEGMENT)
    (path / MIRROR).touch()
    lock = locked(path)
    seal_some(disk, range(9))
    last = threading.Thread(target=put_and_flush, args=(disk, 9))
    last.start()
    last.join(0.4)
    assert last.is_alive() and len(segments(path)) == 9
    lock.close()
    last.join(30)
    assert not last.is_alive() and len(segments(path)) == 9
    disk.close()


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_the_least_recently_used_goes_first_whoever_uses_it(slow, path, policy):
    fill(path, 3, namespace=NAMESPACES[0])  # the last one is the oldest
    fill(path, 3, namespace=NAMESPACES[1])
    oldest = segments(path, NAMESPACES[0])[0], segments(path, NAMESPACES[1])[0]
    fill(path, 3, namespace=NAMESPACES[2])
    disk = mirrored_disk(path, 10 * SEGMENT, policy)
    assert len(found(disk, names_of(range(3)), WIDTH)) == 3 * ROWS  # which is in use, and just was
    Path(f"{segments(path, NAMESPACES[1])[1]}.head").write_bytes(b"")
    Path(f"{segments(path, NAMESPACES[0])[1]}.head").write_bytes(b"")
    used, unused = segments(path, NAMESPACES[0]), segments(path, NAMESPACES[1])
    seal_some(disk, range(10, 11))
    assert not unused[1].exists() and all(file.exists() for file in (*oldest, *used, unused[2]))
    seal_some(disk, range(11, 12))
    assert not used[1].exists() and all(file.exists() for file in (*oldest, used[2], unused[2]))
    disk.close()


# Faults


@pytest.mark.slow
def test_a_cut_upload_leaves_no_head_and_is_done_again(tmp_path, log):
    with proxied("s3", tmp_path) as (place, proxy), opened(place, **QUICK) as objects:
        proxy.only, proxy.cut_up = ".safetensors", SEGMENT // 2
        with mirrored(objects, tmp_path / "local") as (disk, mirror):
            seal_some(disk, range(2))
            mirror.flush()
            assert heads(tmp_path / "local") == [] and objects.cause is not None
            assert len(warnings_of(log)) == 2
            proxy.heal()
            wait_until(lambda: len(heads(tmp_path / "local")) == 2)
            mirror.flush()
        assert len(warnings_of(log)) == 2
        check_whole(place, tmp_path, range(2))


SCRIPT = """
import json, sys, time
from tests.helpers.buckets import Bucket
from tests.helpers.storage import *
from tests.helpers.remote import mirrored_disk
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
path, url, options, what = sys.argv[1:]
objects = Objects(Bucket.of(url, storage_options=json.loads(options)))
disk = mirrored_disk(path)
mirror = Mirror(objects, disk.directory, disk.bucket.folder, 10**7, disk.flush, pause=0.01)
mirror.begin()
if what == "fork":
    import os, threading
    begun = threading.Event()
    objects.write_all = lambda contents: begun.set() or time.sleep(60)
    put(disk, [(0, 0)], 1000)
    disk.flush()
    assert begun.wait(30)
    if os.fork() == 0:
        print("child", flush=True)
        time.sleep(60)
        os._exit(0)
for number in range(3):
    put(disk, [(number, row) for row in range(10)], 1000)
    if what != "exit":
        disk.flush()
if what != "exit":
    print("sealed", flush=True)
    time.sleep(60)
"""


def start(path, place, what):
    return warm.start(SCRIPT, path, place.url, json.dumps(place.storage_options), what, imports=IMPORTS)


@pytest.mark.slow
def test_a_process_uploads_before_it_ends_although_nobody_closes_anything(tmp_path):
    place = bucket("s3", tmp_path)
    place.storage_options["endpoint_url"] = place.storage_options["endpoint_url"].replace(
        "127.0.0.1", "localhost"
    )  # so that a name has to be looked up
    process = start(tmp_path / "local", place, "exit").done()
    assert process.err == "" and len(heads(tmp_path / "local")) >= 1
    check_whole(place, tmp_path, range(3))


def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_is_killed(tmp_path):
    place = bucket("file", tmp_path)
    process = start(tmp_path / "local", place, "fork").until("child")
    assert locked(tmp_path / "local") is None
    process.send(signal.SIGKILL)
    process.wait()
    wait_until(lambda: locked(tmp_path / "local"), seconds=5)


def test_what_half_an_upload_has_left_is_replaced(slow, path, tmp_path):
    fill(path, 2)
    first, _ = segments(path)
    half = Path(slow.bucket.url.removeprefix("file://"), FOLDER)
    half.mkdir(parents=True)
    (half / first.name).write_bytes(first.read_bytes()[:SEGMENT])
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert heads(path) == [file.name for file in segments(path)]
    check_whole(slow.bucket, tmp_path, range(2))


def test_a_damaged_segment_is_not_uploaded(slow, path, log):
    fill(path, 2)
    first, second = segments(path)
    first.write_bytes(first.read_bytes()[:100])
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert list(there(slow)) == [second.name, FINGERPRINT] and Path(f"{first}.corrupt").exists()
    assert len(warnings_of(log)) == 1 and slow.corrupt == 1


def test_nobody_waits_for_a_damaged_segment_that_cannot_be_set_aside(slow, path, log):
    fill(path, 2)
    first, second = segments(path)
    first.write_bytes(first.read_bytes()[:100])
    Path(f"{first}.corrupt").mkdir()
    with mirrored(slow, path) as (_, mirror):
        flush = threading.Thread(target=mirror.flush, daemon=True)
        flush.start()
        flush.join(30)
        assert not flush.is_alive()
        assert list(there(slow)) == [second.name, FINGERPRINT] and slow.corrupt == 1


def test_rows_that_are_dropped_while_they_are_uploaded_get_no_head(slow, path):
    with mirrored(slow, path) as (disk, mirror):
        slow.gate.clear()
        seal_some(disk, range(1))
        assert slow.stopped.wait(30)
        disk.drop(NAMESPACES[0])
        slow.gate.set()
        mirror.flush()
        assert heads(path) == [] and found(disk, names_of([0]), WIDTH) == []


@pytest.mark.slow
def test_a_bucket_that_is_left_out_is_not_waited_for_and_told_once(tmp_path, log):
    with proxied("s3", tmp_path) as (place, proxy), opened(place, **QUICK | {"pause": 60.0}) as objects:
        proxy.status = 503
        with mirrored(objects, tmp_path / "local") as (disk, mirror):
            seal_some(disk, range(2))
            mirror.flush()
            begun = time.monotonic()
            mirror.flush()
            disk.close()
            mirror.close()
            assert time.monotonic() - begun < 20.0
        told = [record.getMessage() for record in warnings_of(log)]
        assert (len(told) == 2 and "2 files" in told[1]) or "3 files" in told[1]
        assert "uploaded when it is used again" in told[1]


def test_over_remote_size_uploads_end_with_one_warning(tmp_path, log):
    place = bucket("file", tmp_path, remote_size=3 * SEGMENT)
    with opened(place) as objects, mirrored(objects, tmp_path / "local") as (disk, mirror):
        assert objects.write("folder of others/file", bytes(9 * SEGMENT))  # which does not count
        for number in range(4):
            seal_some(disk, [number])
            mirror.flush()
        assert len(there(objects)) == 3 and len(heads(tmp_path / "local")) == 2
        assert len(segments(tmp_path / "local")) == 4
        told = [record.getMessage() for record in warnings_of(log)]
        assert len(told) == 2 and "remote_size" in told[0]
    with opened(place) as objects, mirrored(objects, tmp_path / "local") as (disk, mirror):
        mirror.flush()  # another process counts what is there
        assert len(there(objects)) == 3


def test_remote_size_counts_what_others_upload_meanwhile(tmp_path, log):
    place = bucket("file", tmp_path, remote_size=3 * SEGMENT)
    with contextlib.ExitStack() as stack:
        objects = [stack.enter_context(opened(place)) for _ in range(2)]
        both = [stack.enter_context(mirrored(one, tmp_path / str(i))) for i, one in enumerate(objects)]
        for number in range(4):
            disk, mirror = both[number % 2]
            seal_some(disk, [number])
            mirror.flush()
        assert len([name for name in there(objects[0]) if name != FINGERPRINT]) == 2
    assert "remote_size" in warnings_of(log)[0].getMessage()


def test_a_local_folder_that_is_read_only_is_left_alone(slow, path):
    fill(path, 2)
    with mirrored(slow, path, mirror_fs=ReadOnly()) as (_, mirror):
        mirror.flush()  # nothing of ours can be there
        assert slow.written == [] and heads(path) == []


def test_a_local_folder_that_is_deleted_begins_anew(slow, path):
    with mirrored(slow, path) as (disk, mirror):
        seal_some(disk, range(2))
        mirror.flush()
        shutil.rmtree(path)
        mirror.flush()
        seal_some(disk, [7])
        mirror.flush()
        assert heads(path) == [file.name for file in segments(path)] and len(there(slow)) == 4


def test_a_process_that_can_write_no_heads_uploads_once(slow, path, log):
    fill(path, 2)

    class Full(Unsynced):
        def write(self, file, buffers, offset):
            raise OSError(28, "No space left on device")

    with mirrored(slow, path, mirror_fs=Full()) as (_, mirror):
        mirror.flush()
        assert len(there(slow)) == 3 and heads(path) == []
        mirror.flush()
        assert len(slow.written) == 4
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert len(heads(path)) == 2
    assert warnings_of(log) == []


def test_what_this_process_has_sealed_goes_up_at_once(tmp_path):
    with opened(bucket("file", tmp_path)) as objects:
        directory = CacheDirectory(str(tmp_path / "cache"), Unsynced())
        mirror = Mirror(objects, directory, BucketFolder(objects, directory, 0), 10**7, pause=60.0)
        disk = mirrored_disk(directory.path)
        disk.bucket.mirror = mirror
        mirror.begin()
        try:
            for number in range(2):
                time.sleep(0.05)  # the mirror has looked, and waits
                seal_some(disk, [number])
                wait_until(lambda: len(there(objects)) == number + 2)  # noqa: B023
        finally:
            disk.close()
            mirror.close()


# Down


@pytest.fixture
def filled(tmp_path):
    """A bucket of four segments, and a local folder with their heads."""
    place = bucket("file", tmp_path)
    with opened(place) as objects:
        with mirrored(objects, tmp_path / "first") as (disk, mirror):
            seal_some(disk, range(4))
            mirror.flush()
        tier = reader(place, tmp_path / "cache")
        assert len(found(tier, names_of(range(4)), WIDTH)) == 4 * ROWS
        tier.close()
        assert (tmp_path / "cache" / FOLDER / ASKED).exists()  # it has read more than a tenth
        yield objects, tmp_path / "cache", segments(tmp_path / "first")


def downloaded(path, count):
    wait_until(lambda: len(segments(path)) == count)
    time.sleep(0.1)
    assert len(segments(path)) == count


@pytest.mark.slow
def test_segments_come_down_as_long_as_they_fit_and_nothing_goes_for_them(filled):
    objects, path, _ = filled
    budget = size_of(path) + 2 * SEGMENT + SEGMENT // 2
    with mirrored(objects, path, budget) as (disk, mirror):
        assert found(disk, names_of([9])) == []
        downloaded(path, 2)
        kept = set(segments(path))
        assert size_of(path) <= budget and len(heads(path)) == 4
        seal_some(disk, [9])  # which needs room
        mirror.flush()
        time.sleep(0.1)
        assert size_of(path) <= budget and len(kept - set(segments(path))) == 1


@pytest.mark.slow
def test_a_damaged_object_stays_and_is_told_once(filled, log):
    objects, path, files = filled
    place = Path(objects.bucket.url.removeprefix("file://"), FOLDER)
    names = [file.name for file in files]
    damaged = place / names[0]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    other = bytearray((place / names[1]).read_bytes())
    other[300] ^= 1
    (place / names[1]).write_bytes(other)
    (path / FOLDER / f"{names[2]}.corrupt").write_bytes(b"set aside")
    with mirrored(objects, path) as (disk, _):
        assert found(disk, names_of([9])) == []
        downloaded(path, 2)  # the second has the rows, and its head is here
        assert [file.name for file in segments(path)] == [names[1], names[3]]
        wait_until(lambda: objects.corrupt == 1)
        assert not list(path.glob("*/*.tmp"))
    assert len(warnings_of(log)) == 1 and (place / names[1]).read_bytes() == other


@pytest.mark.slow
def test_an_object_that_is_gone_is_no_fault(filled, log):
    objects, path, files = filled
    objects.remove([f"{FOLDER}/{files[0].name}"])
    with mirrored(objects, path) as (disk, _):
        assert found(disk, names_of([9])) == []
        downloaded(path, 3)
    assert objects.faults == 0 and warnings_of(log) == []


@pytest.mark.slow
def test_a_namespace_that_this_process_does_not_use_is_not_brought(filled):
    objects, path, _ = filled
    with mirrored(objects, path, pause=60.0) as (_, mirror):
        mirror._folder.used.clear()
        for _ in range(3):
            mirror.wake()
            time.sleep(0.1)
        assert segments(path) == []


@pytest.mark.slow
def test_a_full_disk_gets_segments_when_there_is_room_again(filled, monkeypatch, log):
    objects, path, _ = filled
    monkeypatch.setattr("torchcache2.tiers.bucket.folder._FULL_FOR", 1.5)

    class Full(Unsynced):
        is_full = True

        def write(self, file, buffers, offset):
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, buffers, offset)

    with mirrored(objects, path, mirror_fs=Full()) as (disk, _):
        assert found(disk, names_of([9])) == []
        wait_until(lambda: warnings_of(log))
        monkeypatch.setattr(Full, "is_full", False)
        downloaded(path, 4)
    (warning,) = warnings_of(log)
    assert "gets no segments from the bucket" in warning.getMessage() and objects.faults == 0
    assert not list(path.glob("*/*.tmp"))


# Processes


def test_of_several_mirrors_one_uploads_each_segment_and_all_wait_for_it(slow, path):
    second = Slow(slow.bucket)
    with mirrored(slow, path) as (disk, mirror), mirrored(second, path) as (_, other):
        for number in range(4):
            seal_some(disk, [number])
            run_at_once(mirror.flush, other.flush)
            assert len(heads(path)) == number + 1
        mirror.close()
        seal_some(disk, [4])
        other.flush()
        assert heads(path) == [file.name for file in segments(path)] and len(there(slow)) == 6
    written = [name for name in slow.written + second.written if name.endswith(".safetensors")]
    assert len(written) == len(set(written)) == 5
    second.close()


def test_who_waits_for_a_process_that_does_nothing_gives_up(slow, path, log):
    fill(path, 2)
    (path / MIRROR).touch()
    lock = locked(path)
    with mirrored(slow, path, patience=0.2, pause=0.1) as (_, mirror):
        mirror.flush()
        mirror.flush()
        assert slow.written == [] and len(warnings_of(log)) == 1 and mirror.is_uploading()
        lock.close()
        wait_until(lambda: len(heads(path)) == 2)


def test_who_waits_without_threads_uploads(slow, path, monkeypatch):
    fill(path, 2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with mirrored(slow, path) as (_, mirror):
        mirror.flush()
        assert len(heads(path)) == 2


def test_a_folder_that_cannot_be_listed_is_told_to_who_waits_without_threads(slow, path, monkeypatch, log):
    class Unlisted(Unsynced):
        def listing(self, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    fill(path, 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with mirrored(slow, path, mirror_fs=Unlisted()) as (_, mirror):
        mirror.flush()
    (warning,) = warnings_of(log)
    assert "the mirror of" in warning.getMessage() and slow.written == []


def test_threads_that_transfer_never_wait_for_transfers(slow, path):
    busy = []
    with mirrored(slow, path) as (_, mirror):  # the garbage collector may close a tier in any thread
        for name in (f"{TRANSFER}_0", "another"):
            thread = threading.Thread(target=lambda: busy.append(mirror.is_busy_here()), name=name)
            thread.start()
            thread.join()
    assert busy == [True, False]


def test_no_thread_stays_after_close(slow, path):
    before = set(threading.enumerate())
    with mirrored(slow, path) as (disk, mirror):
        seal_some(disk, range(2))
        mirror.flush()
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
