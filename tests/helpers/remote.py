"""A disk tier with a bucket behind it, as one tier; what is in the bucket, without a mirror."""

import contextlib
import os
import threading
from pathlib import Path

from tests.helpers.storage import NAMESPACES, NEVER, Unsynced, keys_of, segments
from torchcache2 import CacheSettings
from torchcache2.engine.stack import TierStack
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.layout import read_head, write_head
from torchcache2.tiers.base import TierStats
from torchcache2.tiers.bucket.tier import RemoteTier
from torchcache2.tiers.disk.tier import DiskTier

ROOM = 10**8
FS = FileSystem()


def upload(objects, path):
    """Bring the sealed segments of a folder to a bucket; their files stay. Returns those that were there."""
    for file in (*Path(path).glob("*/fingerprint.json"), Path(path) / "CACHEDIR.TAG"):
        objects.upload(str(file), os.path.relpath(file, path))
    return [file for file in segments(path) if objects.upload(str(file), os.path.relpath(file, path))]


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

    def upload(self, path, name):
        return self._objects.upload(path, f"{self._folder}/{name}")

    def close(self):
        pass


class Behind(TierStack):
    """`flush` moves what is sealed into the bucket, so that only rows that wait are found on the disk."""

    def __init__(self, bucket, path, objects=None, *, queue=ROOM, delay=NEVER):
        super().__init__(CacheSettings())
        options = {"mirrored": True, "queue": queue, "delay": delay, "fs": Unsynced()}
        self.disk = DiskTier(path, ROOM, "mru", "none", **options)
        self.remote = RemoteTier(bucket, self.disk.directory, objects=objects)
        self._tiers = [self.disk, self.remote]
        self._moving = threading.Lock()

    def description(self, namespace):
        return {}

    def let_go(self, namespace):
        self.forget(namespace)

    def put(self, keys, rows):
        return super().put(self, keys, rows)

    def flush(self):
        self.disk.flush()
        with self._moving:
            for file in [] if self.disk._known.closed else segments(self.disk.path):
                self._move(file)

    def _move(self, file):
        namespace, remote = bytes.fromhex(file.parent.name), self.remote
        with contextlib.suppress(FileNotFoundError):  # it was dropped
            if remote.objects.upload(str(file), f"{file.parent.name}/{file.name}"):
                write_head(FS, str(file), read_head(FS, str(file))[0])
                remote.look_again(namespace)
                self.disk._known.remove_files(namespace, [file.name])
                file.unlink()

    def close(self):
        for tier in self.tiers:
            tier.close()

    def stats(self):
        for namespace in NAMESPACES:
            self.remote.has(keys_of(["nothing"], namespace))  # it counts what it was asked for
        disk, remote = self.disk.stats(), self.remote.stats()
        names = ("bytes", "evictions", "corrupt", "faults")
        rows = max(disk.rows, remote.rows)
        return TierStats(rows, *[getattr(disk, name) + getattr(remote, name) for name in names])
