"""`FileDigests`: the content of users' files as digests, which a cache directory remembers.

A file is read again only if its absolute path, size, times or inode are new: otherwise it costs one call of
`stat`. The table ``.contents`` in the directory has a record of 40 bytes for each such state of a file: a
digest of the state, that of the content, and a checksum of both. Processes append to it without a lock. What
is lost or damaged there is read again.
"""

from __future__ import annotations

import os
import time

import numpy as np
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from torchcache2.core.errors import DamagedError, NewerFormatError, OptionError
from torchcache2.core.keys import Array
from torchcache2.core.logs import logger
from torchcache2.files.directory import CONTENTS, CacheDirectory
from torchcache2.files.filesystem import FileSystem

RECENT = 2.0  # seconds; a file may change again within one tick of its file system's clock
_PIECE = 4 << 20
_MOST = 1 << 20  # digests in memory
_MOST_BYTES = 1 << 30
_RECORD = 40


class FileDigests:
    """Digests of files' contents, 16 bytes each, remembered in memory and in the cache directory `folder`."""

    def __init__(self, folder: str | None = None) -> None:
        self._directory = None if folder is None else CacheDirectory(folder, FileSystem())
        self._is_made = False  # whether the directory was there, or was made
        self._known: dict[bytes, bytes] = {}  # by state
        self._table: tuple[Array, Array] | None = None  # the records, sorted, and the first word of each

    def of(self, path: str | bytes, found: os.stat_result) -> bytes:
        """The digest of the content of a file at an absolute path, which `stat` has just found.

        Raises `OSError` if the file cannot be read.
        """
        state = _state(path, found)
        digest = self._known.get(state) or self._remembered(state)
        if digest is not None:
            return digest
        began, hasher = time.time(), xxh3_128()
        buffer = memoryview(bytearray(min(_PIECE, found.st_size + 1)))
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                hasher.update(buffer[:size])
            is_same = _state(path, os.fstat(file.fileno())) == state
        digest = hasher.digest()
        if is_same and began - max(found.st_mtime, found.st_ctime) > RECENT:
            self._keep(state, digest)
            self._append(state + digest)
        return digest

    def _keep(self, state: bytes, digest: bytes) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[state] = digest

    def _remembered(self, state: bytes) -> bytes | None:
        """The digest in the table."""
        if self._table is None:
            records = self._read()
            records = records[np.argsort(records[:, 0])]
            self._table = records, records[:, 0].copy()
        records, words = self._table
        word = np.frombuffer(state, "<u8")[0]
        for at in range(int(words.searchsorted(word)), int(words.searchsorted(word, "right"))):
            record: bytes = records[at].tobytes()
            if record[:16] == state and xxh3_64_digest(record[:32]) == record[32:]:
                self._keep(state, record[16:32])
                return record[16:32]
        return None

    def _read(self) -> Array:
        data, directory = b"", self._directory
        if directory is not None:
            path = os.path.join(directory.path, CONTENTS)
            try:
                directory.check()
                data = directory.fs.read_file(path, _MOST_BYTES)
                if len(data) % _RECORD:  # a write was cut off: records after it would not be found
                    directory.fs.remove(path)
            except (OSError, DamagedError, OptionError, NewerFormatError):
                pass  # the tiers report it
        return np.frombuffer(data[: len(data) // _RECORD * _RECORD], "<u8").reshape(-1, _RECORD // 8)

    def _append(self, record: bytes) -> None:
        directory = self._directory
        if directory is None:
            return
        try:
            if not self._is_made:
                directory.check()
                directory.create()
                self._is_made = True
            data = record + xxh3_64_digest(record)
            directory.fs.append(os.path.join(directory.path, CONTENTS), data)
        except (OSError, OptionError, NewerFormatError) as error:
            logger.debug("a digest cannot be remembered in %s: %s", directory.path, error)
            self._directory = None


def _state(path: str | bytes, found: os.stat_result) -> bytes:
    """A digest of a file's path, and of what tells that the file has changed."""
    text = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino} "
    return xxh3_128_digest(text.encode() + os.fsencode(path))
