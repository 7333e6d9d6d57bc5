"""Rows with values that their names tell, and file systems that fail, stop, or lose power."""

import contextlib
import errno
import functools
import hashlib
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import torch

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.files.directory import FINGERPRINT, INDEX_FILES_LOCK, LOCK, MIRROR, TAG
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.disk.tier import DiskTier

CPU = torch.device("cpu")
NAMESPACES = [b"first namespace.", b"second namespace", b"third namespace."]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
NEVER = 3600.0  # seconds: rows are sealed when somebody flushes, or when there are enough of them


@functools.lru_cache(maxsize=100_000)
def key_of(name):
    return hashlib.md5(repr(name).encode()).digest()


def keys_of(names, namespace=NAMESPACES[0]):
    data = b"".join(map(key_of, names))
    return Keys(namespace, np.frombuffer(data, np.uint8).reshape(-1, 16))


@functools.lru_cache(maxsize=20_000)
def value_of(name, width):
    """A row that every codec makes smaller: half of it is zeros."""
    generator = torch.Generator().manual_seed(int.from_bytes(key_of((name, width))[:4], "little"))
    return torch.randn(width, generator=generator).relu_()


def rows_of(names, width):
    values = [value_of(name, width) for name in names]
    output = torch.stack(values) if values else torch.empty(0, width)
    return Rows.from_pytree(output, len(names), device=CPU)


def put(tier, names, width=4, namespace=NAMESPACES[0]):
    names = list(names)
    return tier.put(keys_of(names, namespace), rows_of(names, width))


def check_values(output, names, width):
    """Assert that an output is what `rows_of` has put under these names."""
    for row, name in zip(output, names, strict=True):
        assert torch.equal(row, value_of(name, width))


def found(tier, names, width=4, namespace=NAMESPACES[0], *, check=check_values):
    """The names that are there, each checked against its value."""
    names, here = list(names), []
    for positions, rows in tier.get(keys_of(names, namespace)).parts:
        assert list(positions) == sorted(set(positions.tolist()))
        these = [names[position] for position in positions.tolist()]
        check(rows.to_pytree(device=CPU), these, width)
        here += these
    return sorted(here)


def sealed_names(path, names, width=4, namespace=NAMESPACES[0]):
    """What another handle finds on the disk."""
    tier = DiskTier(path, delay=NEVER, fs=Unsynced())
    try:
        return found(tier, names, width, namespace)
    finally:
        tier.close()


def refuse(thread):
    raise RuntimeError("can't start new thread")


def wait_until(holds, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def files_in_memory(pids=None):
    """Our files in memory that some processes, or all, have open: the bytes of each, by its inode.

    The system frees such a file when nobody has it any more.
    """
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")) if pids is None else pids:
        with contextlib.suppress(OSError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith("/memfd:torchcache2"):
                        found[file.stat().st_ino] = file.stat().st_blocks * 512
    return found


def seal(tier, names, width=4, namespace=NAMESPACES[0]):
    names = list(names)
    assert put(tier, names, width, namespace) == len(names)
    tier.flush()


def fill(path, count, width=1000, rows=10, namespace=NAMESPACES[0], **options):
    """Segments of nobody's, each with `rows` rows, and older from the last one to the first."""
    tier = DiskTier(path, codec="none", delay=NEVER, fs=Unsynced(), **options)
    for number in range(count):
        seal(tier, [(number, row) for row in range(rows)], width, namespace)
    tier.close()
    for age, file in enumerate(reversed(segments(path, namespace))):
        set_age(file, 1000 + age)


def set_age(file, seconds):
    then = time.time() - seconds
    os.utime(file, (then, then))


def segments(path, namespace=None):
    """The sealed files, in the order of their making."""
    folder = "*" if namespace is None else namespace.hex()
    return sorted(Path(path).glob(f"{folder}/*.safetensors"), key=lambda file: file.name)


def snapshot(path):
    """Every file below a folder, with its bytes."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()
    }


def size_of(path):
    """Bytes of a cache directory that its budget is about."""
    total = 0
    for folder in os.scandir(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for file in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    total += file.stat().st_size
    return total


def strange_files(path):
    """Files that a directory without living writers should not have."""
    return sorted(
        name
        for name in snapshot(path)
        if name not in (TAG, LOCK, MIRROR, INDEX_FILES_LOCK)
        and not name.endswith((f"/{FINGERPRINT}", ".safetensors", ".run"))
    )


def warnings_of(log):
    return [record for record in log if record.levelno >= 30]


def flip(file, position, mask=0x10):
    with Path(file).open("r+b", buffering=0) as opened:
        opened.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ mask]))


CALLS = [
    name
    for name, value in vars(FileSystem).items()
    if callable(value) and not name.startswith("_") and not name.startswith(("read_", "write_"))
    if name not in ("is_away", "has_elsewhere", "fetch_again")  # of these the system knows nothing
]
WRITING = {"create", "write", "rename", "link", "remove", "make_folder", "remove_folder", "touch"}


class Unsynced(FileSystem):
    """Does not wait for the disk."""

    def sync(self, file):
        pass

    def sync_folder(self, path):
        pass


class Watched(Unsynced):
    """Tells `before` of every call that reaches the system.

    It has rows read ahead always, rather than where a read was slow: so each run makes the same calls.
    """

    is_remote = True

    def is_away(self, file):
        return True

    def __init__(self):
        self.calls = []
        self.lock_of_calls = threading.RLock()

    def before(self, number, name, args):
        """Raises what the call is to raise."""


def _watched(name):
    def method(self, *args, **kwargs):
        with self.lock_of_calls:
            number = len(self.calls)
            self.calls.append(name)
            self.before(number, name, args)
            return getattr(super(Watched, self), name)(*args, **kwargs)

    return method


for _name in CALLS:
    setattr(Watched, _name, _watched(_name))


class Faulty(Watched):
    """The calls from number `first` up to, and without, `end` raise."""

    def __init__(self, code, first=0, end=None):
        super().__init__()
        self.code = code
        self.first = first
        self.end = end
        self.failed = []

    def before(self, number, name, args):
        if number >= self.first and (self.end is None or number < self.end):
            self.failed.append(name)
            raise OSError(self.code, os.strerror(self.code))

    def mend(self):
        self.first, self.end = 0, 0


class ReadOnly(Watched):
    """A file system that is mounted read-only."""

    def before(self, number, name, args):
        if name == "make_folder" and os.path.isdir(args[0]):
            return
        if name in WRITING:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class Short(Watched):
    """Reads and writes are done in pieces."""

    def __init__(self, most):
        super().__init__()
        self._most = most

    def _head(self, buffers):
        left, head = self._most, []
        for buffer in buffers:
            head.append(memoryview(buffer)[:left])
            left -= len(head[-1])
            if left == 0:
                break
        return head

    def read(self, file, buffers, offset):
        return super().read(file, self._head(buffers), offset)

    def write(self, file, buffers, offset):
        return super().write(file, self._head(buffers), offset)


class Mortal(Watched):
    """From call number `dies` on nothing works any more, and nothing is written."""

    def __init__(self, dies=None):
        super().__init__()
        self.dies = dies

    @property
    def is_dead(self):
        return self.dies is not None and len(self.calls) > self.dies

    def die(self, after=0):
        """Stop after so many more calls."""
        self.dies = len(self.calls) + after

    def before(self, number, name, args):
        if self.dies is not None and number >= self.dies:
            raise OSError(errno.EIO, "the power is off")


def abandon(tier, fs):
    """What SIGKILL leaves of a handle: nothing in memory, and no locks. Nothing more is written."""
    fs.dies = 0
    tier.close()


class _Node:
    """A file: what its readers see, and what is on the disk."""

    def __init__(self, content=b""):
        self.content = bytearray(content)
        self.synced = bytes(content)


class PowerCut(Mortal):
    """Remembers what would be on the disk if the power went off.

    Bytes are there when they were synced, names when their folder was. What was there before is.

    Parameters
    ----------
    path : Path
        The cache directory; the folder above it exists.
    dies : int, optional
        See `Mortal`.
    """

    def __init__(self, path, dies=None):
        super().__init__(dies)
        self.root = os.path.abspath(path)
        self._nodes = {}  # as the readers see it: path -> node
        self._files = {}  # file descriptor -> node
        self._durable = {}  # path -> node, None for a folder
        self._unsynced = {}  # folder -> changes of names: (old path or None, new path or None, node)
        for folder, _, names in os.walk(path):
            self._durable[folder] = None
            for name in names:
                file = os.path.join(folder, name)
                self._nodes[file] = self._durable[file] = _Node(Path(file).read_bytes())

    def open(self, path):
        with self.lock_of_calls:
            file = super().open(path)
            self._files[file.number] = self._nodes.get(os.path.abspath(path))
            return file

    def create(self, path):
        with self.lock_of_calls:
            file = super().create(path)
            node = self._files[file.number] = self._nodes[path] = _Node()
            self._change(None, path, node)
            return file

    def write(self, file, buffers, offset):
        with self.lock_of_calls:
            count = super().write(file, buffers, offset)
            content = self._files[file.number].content
            content[offset : offset + count] = b"".join(map(bytes, buffers))[:count]
            return count

    def sync(self, file):
        with self.lock_of_calls:
            super().sync(file)
            node = self._files[file.number]
            node.synced = bytes(node.content)

    def sync_folder(self, path):
        with self.lock_of_calls:
            super().sync_folder(path)
            for change in self._unsynced.pop(os.path.abspath(path), []):
                _apply(self._durable, change)

    def rename(self, old, new):
        with self.lock_of_calls:
            super().rename(old, new)
            self._nodes[new] = self._nodes.pop(old)
            self._change(old, new, self._nodes[new])

    def link(self, old, new):
        with self.lock_of_calls:
            super().link(old, new)
            self._nodes[new] = self._nodes[old]
            self._change(None, new, self._nodes[new])

    def remove(self, path):
        with self.lock_of_calls:
            super().remove(path)
            self._nodes.pop(path, None)
            self._change(path, None, None)

    def remove_folder(self, path):
        with self.lock_of_calls:
            super().remove_folder(path)
            self._change(path, None, None)

    def make_folder(self, path):
        with self.lock_of_calls:
            folder, new = os.path.abspath(path), []
            while not os.path.isdir(folder):
                new.append(folder)
                folder = os.path.dirname(folder)
            super().make_folder(path)
            for folder in reversed(new):
                self._change(None, folder, None)

    def _change(self, old, new, node):
        self._unsynced.setdefault(os.path.dirname(new or old), []).append((old, new, node))

    def restart(self, target, names="lost", content="lost", seed=0):
        """Make what is left as a folder `target`.

        Parameters
        ----------
        target : Path
        names : {"lost", "kept", "some"}
            What becomes of changes of names that were not synced.
        content : {"lost", "garbage"}
            Bytes that were not synced: the file ends before them, or others are there.
        seed : int
            Of what is left to chance.
        """
        chance = random.Random(seed)
        left = dict(self._durable)
        for changes in self._unsynced.values():
            for change in changes:
                if names == "kept" or (names == "some" and chance.random() < 0.5):
                    _apply(left, change)
        for path in sorted(left):  # folders before what is in them
            above = os.path.dirname(path)
            place = Path(str(target) + path.removeprefix(self.root))
            if path != self.root and (above not in left or not place.parent.is_dir()):
                continue  # the folder is lost
            node = left[path]
            if node is None:
                place.mkdir()
                continue
            data = node.synced
            if content == "garbage":
                data += chance.randbytes(len(node.content) - len(data))
            place.write_bytes(data)


def _apply(names, change):
    old, new, node = change
    if old is not None:
        with contextlib.suppress(KeyError):  # its making was lost
            del names[old]
    if new is not None:
        names[new] = node
