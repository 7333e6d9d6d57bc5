"""Deleting namespaces of a cache directory: which are meant, their files, and what is gone in the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from torchcache2.cli.report import existing
from torchcache2.core.errors import OptionError
from torchcache2.files.directory import CacheDirectory, Contents
from torchcache2.files.eviction import deleting
from torchcache2.files.filesystem import Entry, FileSystem

__all__ = ["Gone", "gone", "remove_namespace", "wanted"]


class Gone(NamedTuple):
    """What is gone of a namespace."""

    namespace: str
    files: int
    bytes: int


def wanted(names: Sequence[str], directory: str, fs: FileSystem) -> list[tuple[CacheDirectory, Contents]]:
    """The namespaces that are meant, each once.

    Parameters
    ----------
    names : sequence of str
        First characters of a namespace, or the path of its folder.
    directory : str
        Of those that are no paths.
    fs : FileSystem

    Raises
    ------
    OptionError
        If a name does not mean exactly one.
    """
    found = {}
    for text in names:
        top, name = os.path.split(os.path.normpath(text))
        is_path = os.sep in text
        cache = existing((top or ".") if is_path else directory, fs)
        matching = [one for one in cache.scan() if text and one.namespace.startswith(name)]
        if is_path:
            matching = [one for one in matching if one.namespace == name]
        if not matching:
            raise OptionError(f"there is no namespace {name!r} in {cache.path}")
        if len(matching) > 1:
            several = ", ".join(one.namespace for one in matching)
            raise OptionError(f"{name!r} is the beginning of several namespaces: {several}")
        found[cache.path, matching[0].namespace] = cache, matching[0]
    return list(found.values())


def gone(before: Sequence[Contents], after: Sequence[Contents]) -> list[Gone]:
    """What was there before, and is no longer."""
    left = {(one.namespace, entry.name) for one in after for entry in _files(one)}
    found = []
    for one in before:
        sizes = [entry.size for entry in _files(one) if (one.namespace, entry.name) not in left]
        if sizes:
            found.append(Gone(one.namespace, len(sizes), sum(sizes)))
    return found


def remove_namespace(directory: CacheDirectory, namespace: str, *, force: bool = False) -> bool:
    """Delete the cache's files of a namespace; others that are there stay, and the folder with them.

    Parameters
    ----------
    directory : CacheDirectory
    namespace : str
        32 hexadecimal digits.
    force : bool
        Also if a process uses it, which then computes again. What it is writing at the moment stays.

    Returns
    -------
    bool
        False if a process uses it, and nothing was deleted.
    """
    fs, folder = directory.fs, os.path.join(directory.path, namespace)
    with contextlib.ExitStack() as lock:
        lock.enter_context(deleting(directory))
        contents = directory.contents(namespace)
        claimed = lock.enter_context(directory.claimed(namespace))
        if claimed is False and not force:
            return False
        for entry in (*contents.segments, *contents.corrupt):
            with contextlib.suppress(FileNotFoundError):
                fs.remove(os.path.join(folder, entry.name))
        directory.remove_leftovers()
        left = directory.contents(namespace)
        if not left.segments and not left.temporary:
            # Without a claim somebody may be about to use the folder: what has appeared since is theirs.
            for entry in left.others if claimed or force else []:
                with contextlib.suppress(FileNotFoundError):
                    fs.remove(os.path.join(folder, entry.name))
            with contextlib.suppress(OSError):  # somebody else's files are there
                fs.remove_folder(folder)
    return True


def _files(contents: Contents) -> list[Entry]:
    return [*contents.segments, *contents.corrupt, *contents.temporary, *contents.others]
