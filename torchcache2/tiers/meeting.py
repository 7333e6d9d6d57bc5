"""How the processes of a job find each other: the job's name, and folders private to its user.

A pid is unique within one container or machine only, and several may see the same folder. So file names
include the machine, and a process leaves files of other machines alone.
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
    """The name of this process's job, for the cache named by `parts`: 16 bytes.

    It derives from ``TORCHCACHE_JOB``, else from the rendezvous address of the ranks, else from Ray's job,
    else from the parent process.
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
    """Identifies the machine and pid namespace, since other machines may see the same folder."""
    parts = [os.uname().nodename.encode()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts.append(file.read())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino).encode())
    return digest(parts).hex()[:12]


def own_folder(path: str) -> str:
    """Make a folder that only this user can enter, or accept an existing one; `OSError` otherwise."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not is_own(path):
        raise PermissionError(f"{path} is not a folder that this user alone can enter: remove it")
    return path


def is_own(path: str) -> bool:
    """Whether a path is a folder that only this user can enter; `OSError` if nothing is there."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def is_at(file: Descriptor, path: str) -> bool:
    """Whether `path` still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.number), os.stat(path))
    except FileNotFoundError:
        return False
