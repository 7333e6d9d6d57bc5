"""Where the processes of a job meet: what the job is called, and folders that only its user can enter.

Pids mean something to the processes of one container or machine only. Another one may see the same folder: so
the names of files say which it is, and files of others are left alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from torchcache2.core.process import ray_job
from torchcache2.core.version import __version__
from torchcache2.files.filesystem import Descriptor
from torchcache2.identity.encoding import digest
from torchcache2.tiers.shared.region import start_time

JOB = "TORCHCACHE_JOB"
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def job_name(environ: Mapping[str, str], *parts: str) -> bytes:
    """The name of the job of this process, for a cache that `parts` name: 16 bytes.

    It is the value of ``TORCHCACHE_JOB``, or else the place where the ranks meet, or else Ray's job, or else
    the parent process.
    """
    if environ.get(JOB):
        job = [environ[JOB]]
    elif any(environ.get(name) for name in _RENDEZVOUS):
        job = ["ranks", *[environ.get(name, "") for name in _RENDEZVOUS]]
    elif of_ray := ray_job():
        job = ["ray", *of_ray]
    else:
        parent = os.getppid()
        job = ["parent", str(parent), str(start_time(parent))]
    return digest(
        [
            __version__.encode(),
            str(len(job)).encode(),
            *[text.encode("utf-8", "replace") for text in (*job, *parts)],
        ]
    )


def machine() -> str:
    """What tells those processes whose pids this one sees from others, which may see the same folder."""
    parts = [os.uname().nodename.encode()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts.append(file.read())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino).encode())
    return digest(parts).hex()[:12]


def own_folder(path: str) -> str:
    """Make a folder that nobody but this user can enter, or take it if it is there; `OSError` otherwise."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not is_own(path):
        raise PermissionError(f"{path} is not a folder that this user alone can enter: remove it")
    return path


def is_own(path: str) -> bool:
    """Whether a path is a folder of this user, which nobody else can enter; `OSError` if there is nothing."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def is_at(file: Descriptor, path: str) -> bool:
    """Whether an open file still has a name."""
    try:
        return os.path.samestat(os.fstat(file.number), os.stat(path))
    except FileNotFoundError:
        return False
