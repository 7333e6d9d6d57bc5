"""`delete_files`: deletes the segments of a namespace that is dropped."""

from __future__ import annotations

import math
import os

from torchcache2.files.directory import CacheDirectory
from torchcache2.files.removal import Removal
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.known import Known


def delete_files(directory: CacheDirectory, known: Known, health: Health, namespace: bytes) -> None:
    """Delete the segments of a namespace, and close them; without the lock.

    Files that cannot be deleted, such as those of another user, are not opened again.
    """
    folder = directory.folder(namespace)
    try:
        contents = directory.contents(namespace.hex())
        names = [info.name for info in (*contents.segments, *contents.corrupt)]
        removal = Removal(directory, math.inf)
        try:
            if health.writes:
                removal.files(contents)
        finally:
            for name in names:
                known.descriptors.forget(os.path.join(folder, name))
            known.remove_files(namespace, names)  # another thread may have opened them since
        if removal.error is not None:
            health.fault(removal.error, folder)
        if contents.segments:
            with known.lock():
                known.ignore(namespace, [info.name for info in contents.segments])
    except OSError as error:
        health.fault(error, folder)
