"""`Folders`: the files of a mirrored folder, which are listed again only where something has changed."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from torchcache2.files.directory import CORRUPT, NAMESPACE_NAME, CacheDirectory, Contents
from torchcache2.files.layout import HEAD

_SETTLED = 2e9  # nanoseconds; a folder that has not changed for so long gets another time if it changes again


class Transfer(NamedTuple):
    """A file of a namespace, 32 hexadecimal digits, to be brought to the bucket or from there."""

    namespace: str
    name: str


class Folders:
    """The namespaces of a folder. Not thread-safe."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._known: dict[str, tuple[int, Contents]] = {}

    def look(self, *, anew: bool = False) -> list[Contents]:
        """The files of each namespace, those that have changed since; with `anew`, all are listed."""
        known, self._known = self._known, {}
        try:
            names = [info.name for info in self._directory.fs.listing(self._directory.path) if info.is_folder]
        except FileNotFoundError:
            return []
        for name in filter(NAMESPACE_NAME.fullmatch, names):
            with contextlib.suppress(PermissionError):
                changed = self._directory.changed(bytes.fromhex(name))
                before = known.get(name)
                if before is None or anew or changed != before[0]:
                    # The clock of a file system is coarse: it may not show a second change soon after.
                    is_settled = time.time_ns() - changed > _SETTLED
                    before = changed if is_settled else -1, self._directory.contents(name)
                self._known[name] = before
        return [contents for _, contents in self._known.values()]


def lacking(contents: Contents) -> list[Transfer]:
    """The segments that have no head, the oldest first."""
    heads = {info.name for info in contents.heads}
    names = [info.name for info in contents.segments]
    return [Transfer(contents.namespace, name) for name in names if name + HEAD not in heads]


def absent(contents: Contents) -> list[Transfer]:
    """The segments that have a head and are not here, nor set aside; what was asked for last comes first."""
    here = {info.name for info in contents.segments}
    here |= {info.name.removesuffix(CORRUPT) for info in contents.corrupt}
    heads = sorted(contents.heads, key=lambda info: (-info.mtime, info.name))
    names = [info.name.removesuffix(HEAD) for info in heads]
    return [Transfer(contents.namespace, name) for name in names if name not in here]
