"""`Notes`: digests that take long to compute, remembered in a cache directory, one small file for each.

A note is ``<key, 32 hex>.note`` and has the 32 hexadecimal digits of its value, which never changes. It may
be deleted at any time, and one that has anything else in it is written anew.
"""

from __future__ import annotations

import contextlib
import os
import re

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import logger
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError, NewerFormatError
from torchcache2.files.filenames import NOTE
from torchcache2.files.filesystem import FileSystem, is_read_only
from torchcache2.files.whole import write_whole

_VALUE = re.compile(rb"[0-9a-f]{32}")


class Notes:
    """Values of 16 bytes by keys of 16 bytes; nothing is remembered without a `folder`, a cache directory."""

    def __init__(self, folder: str | None) -> None:
        self._directory = None if folder is None else CacheDirectory(folder, FileSystem())

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if none is remembered."""
        if self._directory is None:
            return None
        try:
            text = self._directory.fs.read_file(self._path(self._directory, key), 64)
        except (OSError, DamagedError):
            return None
        return bytes.fromhex(text.decode()) if _VALUE.fullmatch(text) else None

    def put(self, key: bytes, value: bytes) -> bytes:
        """Remember a value, unless there is one; the one that counts from then on.

        A fault of the disk is one warning, and the value of this process.
        """
        directory = self._directory
        if directory is None:
            return value
        try:
            directory.check()
            directory.create()
            path, data = self._path(directory, key), value.hex().encode()
            for replaces in (False, self.get(key) is None):  # what cannot be read is replaced
                with contextlib.suppress(FileExistsError):
                    write_whole(directory.fs, path, [memoryview(data)], stem=f"{path}.", replaces=replaces)
                if (found := self.get(key)) is not None:
                    return found
        except (OptionError, NewerFormatError):
            pass  # the tiers say so
        except OSError as error:
            log = logger.debug if is_read_only(error) else logger.warning
            log("a digest cannot be remembered in %s, and is computed again: %s", directory.path, error)
        return value

    @staticmethod
    def _path(directory: CacheDirectory, key: bytes) -> str:
        return os.path.join(directory.path, key.hex() + NOTE)
