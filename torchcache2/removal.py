"""Deleting one namespace of a cache directory."""

from __future__ import annotations

import contextlib
import os

from filelock import FileLock

from torchcache2.directory import LOCK, CacheDirectory

__all__ = ["remove_namespace"]

_PATIENCE = 10.0  # seconds


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
    with FileLock(os.path.join(directory.path, LOCK), timeout=_PATIENCE):
        contents = directory.contents(namespace)
        try:
            claim = directory.claim(namespace) if contents.others else None
        except FileNotFoundError:
            claim = None
        if claim is None and contents.others and not force:
            return False
        for entry in (*contents.segments, *contents.corrupt):
            with contextlib.suppress(FileNotFoundError):
                fs.remove(os.path.join(folder, entry.name))
        directory.remove_leftovers()
        left = directory.contents(namespace)
        if not left.segments and not left.temporary:
            for entry in left.others:
                with contextlib.suppress(FileNotFoundError):
                    fs.remove(os.path.join(folder, entry.name))
            with contextlib.suppress(OSError):  # somebody else's files are there
                fs.remove_folder(folder)
        del claim  # the lock, until here
    return True
