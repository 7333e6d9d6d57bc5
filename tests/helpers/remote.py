"""A disk tier with a bucket behind it, as one tier; what is in the bucket, without a mirror."""

import contextlib
import os
import threading
from pathlib import Path

from tests.helpers.storage import NAMESPACES, NEVER, Unsynced, keys_of, segments
from torchcache2.core.places import Bucket
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.layout import read_head, write_head
from torchcache2.tiers.bucket.source import BucketSource
from torchcache2.tiers.disk.tier import DiskTier

ROOM = 10**8
FS = FileSystem()


def upload(objects, path):
    """Bring the sealed segments of a folder to a bucket; their files stay. Returns those that were there."""
    for file in (*Path(path).glob("*/fingerprint.json"), Path(path) / "CACHEDIR.TAG"):
        objects.write(os.path.relpath(file, path), str(file))
    return [file for file in segments(path) if objects.write(os.path.relpath(file, path), str(file))]


class Below:
    """`Objects` of a folder of a bucket, that share the connections of those of the whole."""

    def __init__(self, objects, folder):
        self._objects, self._folder = objects, folder
        self.corrupt = 0

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def listing(self, folder=""):
        return self._objects.listing(f"{self._folder}/{folder}".rstrip("/"))

    def read(self, ranges):
        return self._objects.read([(f"{self._folder}/{name}", *rest) for name, *rest in ranges])

    def fetch(self, ranges):
        return self._objects.fetch([(f"{self._folder}/{name}", *rest) for name, *rest in ranges])

    def write(self, name, content):
        return self._objects.write(f"{self._folder}/{name}", content)

    def close(self):
        pass


def reader(
    bucket,
    path,
    *,
    budget=0,
    fs=None,
    writes=False,
    every=60.0,
    signals=None,
    objects=None,
    uploads=None,
    **options,
):
    """A disk tier in a folder with a bucket below it, which uploads nothing."""
    given = {"fs": Unsynced() if fs is None else fs, "every": every, "objects": objects, "uploads": uploads}
    source = BucketSource(bucket, str(path), budget, signals=signals, **given)
    return DiskTier(
        path, budget, "keep", "none", delay=NEVER, signals=signals, bucket=source, writes=writes, **options
    )


def mirrored_disk(path, budget=ROOM, policy="keep", fs=None, **options):
    """A disk tier of which somebody else brings all segments to a bucket; it does not look there itself."""
    source = BucketSource(Bucket.of(f"file://{path}-bucket"), str(path), budget, fs=fs or Unsynced())
    source.look = lambda *_: False
    return DiskTier(path, budget, policy, "none", delay=NEVER, bucket=source, **options)


class Emptied:
    """A disk tier with a bucket below it. `flush` moves what is sealed into the bucket."""

    def __init__(self, bucket, path, objects=None, *, queue=ROOM, delay=NEVER):
        source = BucketSource(bucket, str(path), ROOM, fs=Unsynced(), objects=objects)
        self._tier = DiskTier(path, ROOM, "keep", "none", bucket=source, queue=queue, delay=delay)
        self._moving = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def stats(self):
        for namespace in NAMESPACES:
            self.has(keys_of(["nothing"], namespace))  # it counts what it was asked for
        return self._tier.stats()

    def flush(self):
        self._tier.flush()
        with self._moving:
            for file in [] if self._index.closed else segments(self.path):
                self._move(file)

    def _move(self, file):
        with contextlib.suppress(FileNotFoundError):  # it was dropped
            if self.bucket.objects.write(f"{file.parent.name}/{file.name}", str(file)):
                write_head(FS, str(file), read_head(FS, str(file))[0])
                self._index.remove_files(bytes.fromhex(file.parent.name), [file.name])
                file.unlink()
