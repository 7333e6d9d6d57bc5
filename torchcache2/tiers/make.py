"""Makes the tiers for the options of a cache. No other file knows all kinds of tiers."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torchcache2.core.errors import NewerFormatError, OptionError
from torchcache2.core.logs import WarnOnce, logger
from torchcache2.core.process import has_peers, ranks_here, workers
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import size_text
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.removal import used_bytes
from torchcache2.tiers.base import Signals, Tier
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.source import BucketSource
from torchcache2.tiers.disk.tier import DiskTier
from torchcache2.tiers.drain import Drain
from torchcache2.tiers.meeting import Scratch, job_name
from torchcache2.tiers.memory.tier import MemoryTier
from torchcache2.tiers.redis.client import Clients
from torchcache2.tiers.redis.tier import RedisTier
from torchcache2.tiers.shared.region import SharingError
from torchcache2.tiers.shared.tier import SharedTier

_LEAST_QUEUED, _MOST_QUEUED = 16 << 20, 256 << 20

InUse = Callable[[], Collection[bytes]]
Description = Callable[[bytes], Mapping[str, Any]]
Opened = Objects  # connections opened by the check, which the tiers take over


def check_place(settings: CacheSettings) -> Opened | None:
    """Raise `OptionError` if rows cannot be kept where the settings say.

    Such as a cache directory that is a file or has another program's files, or a server or bucket that
    refuses the credentials. Returns the connections to a bucket that has answered; pass them to `make_tiers`
    or `make_levels`, whose tiers close them, or close them.
    """
    quiet = WarnOnce(lambda kind: False)  # the tier warns if a server or bucket does not answer
    folder = str(settings.persistent_cache_dir) if settings.persistent_cache_dir is not None else None
    if settings.servers is not None:
        with contextlib.closing(Clients(settings.servers, quiet)) as clients:
            clients.check()
        return None
    with contextlib.ExitStack() as stack:
        objects = None
        if settings.bucket is not None:
            folder, objects = settings.bucket.local_dir, Objects(settings.bucket, quiet)
            stack.callback(objects.close)
            objects.check()
        if settings.is_persistent and folder is not None:
            with contextlib.suppress(OSError, NewerFormatError):  # the tier will warn of these
                CacheDirectory(folder, FileSystem()).check()
        if objects is None or objects.cause is not None:
            return None
        stack.pop_all()
        objects.tell = WarnOnce()
        return objects


def disk_budget(settings: CacheSettings, folder: str) -> int:
    """How many bytes the rows in a folder may take; for a share of free space, their own count as free."""
    used = 0
    if isinstance(settings.max_persistent_cache_size, float):
        with contextlib.suppress(OSError, NewerFormatError):
            used = used_bytes(CacheDirectory(folder, FileSystem()).scan())
    return settings.persistent_budget(folder, used)


def job_of(settings: CacheSettings, name: str) -> bytes | None:
    """The job whose ranks share the tiers of one cache name and equal options; None: no sharing."""
    is_asked = settings.distributed == "node" or (settings.distributed != "off" and has_peers())
    if not (is_asked and settings.can_be_shared):
        return None
    return job_name(os.environ, name, repr(settings.of_tiers()))


def make_tiers(
    settings: CacheSettings,
    in_use: InUse,
    description: Description,
    job: bytes | None = None,
    opened: Opened | None = None,
) -> list[Tier]:
    """The tiers of one budget, fastest first.

    `in_use()` returns the namespaces that something alive in this process uses. `description(namespace)`
    describes a namespace, for people and later runs. The processes of a `job` share memory. `opened` are
    connections from `check_place`; the tiers close them.
    """
    budget, ranks = settings.memory_budget(), 1 if job is None else ranks_here()
    # Rows that wait to be written count as memory, too.
    queue = max(_LEAST_QUEUED, min(_MOST_QUEUED, budget // 4)) // ranks if settings.is_persistent else 0
    tiers = [_memory(settings, max(0, budget - queue * ranks), in_use, job)]
    if settings.is_persistent:
        try:
            tiers.append(_lasting(settings, queue, in_use, description, job, opened, claims=settings.claims))
        except OSError as error:
            logger.warning("there is no temporary folder: rows stay in memory (%s)", str(error))
        except OptionError as error:  # the folder has changed since the decorator accepted it
            logger.warning("%s; rows stay in memory", str(error))
    return tiers


def make_levels(
    settings: CacheSettings,
    in_use: InUse,
    description: Description,
    job: bytes,
    *,
    is_worker: bool = False,
    signals: Signals,
    writes: bool = True,
    opened: Opened | None = None,
) -> list[Tier]:
    """The tiers of a dataset, fastest first: memory of the processes of a `job`, then a folder or servers.

    A budget of 0 bytes leaves out its tier. If memory cannot be shared, workers divide it. A worker leaves
    its rows to other processes when it ends, even in a temporary folder; it does not repeat its parent's
    warnings. Without `writes`, folder and bucket stay unchanged. For `opened`, see `make_tiers`.
    """
    budget, tiers, shared = settings.memory_budget(), list[Tier](), None
    warn = logger.debug if is_worker else logger.warning
    if budget:
        try:
            # The caller warns itself if it is full.
            shared = SharedTier(job, budget, in_use, spills=True, is_copied=True)
            tiers.append(shared)
        except SharingError as error:
            warn(
                "processes cannot share memory (%s), so each keeps its own samples: n workers get an nth "
                "part of %s each, and find only what they loaded themselves",
                *(str(error), size_text(budget // ranks_here())),
            )
            memory = MemoryTier(budget // ranks_here(), in_use=in_use, spills=True, among=workers)
            tiers.append(memory)
    queue = max(_LEAST_QUEUED, min(_MOST_QUEUED, budget // 4))
    if settings.is_persistent:
        try:
            tiers.append(
                _lasting(
                    settings,
                    queue,
                    in_use,
                    description,
                    job,
                    opened,
                    is_worker=is_worker,
                    writes=writes,
                    signals=signals,
                )
            )
        except OSError as error:
            warn("there is no temporary folder: what does not fit in memory is not kept (%s)", str(error))
        else:
            if writes and settings.persistent_cache_dir is not None:
                Drain(shared, tiers[-1], signals, is_worker=is_worker)
    return tiers or [MemoryTier(0)]


def _memory(settings: CacheSettings, budget: int, in_use: InUse, job: bytes | None) -> Tier:
    if job is not None:
        try:
            return SharedTier(job, budget, in_use, spills=settings.is_persistent)
        except SharingError as error:
            logger.warning(
                "each rank has its own memory cache, because they cannot share one: %s", str(error)
            )
    device = settings.memory_cache_device
    device = None if device is None else torch.device(device)
    return MemoryTier(budget, settings.policy, device, in_use, spills=settings.is_persistent)


def _lasting(
    settings: CacheSettings,
    queue: int,
    in_use: InUse,
    description: Description,
    job: bytes | None,
    opened: Opened | None,
    *,
    claims: bool = False,
    is_worker: bool = False,
    writes: bool = True,
    **options: Any,
) -> Tier:
    """Servers, or a folder, perhaps with a bucket below it."""
    options |= {"codec": settings.compression, "quality": settings.compression_quality, "queue": queue}
    if settings.servers is not None:
        return RedisTier(settings.servers, claims=claims, **options)
    bucket, folder = settings.bucket, settings.persistent_cache_dir
    folder = folder if bucket is None else bucket.local_dir
    tiers = weakref.WeakSet[DiskTier]()  # weak: the bucket must not keep its owner alive

    def flush_first() -> None:
        for tier in tiers:
            tier.flush()

    with contextlib.ExitStack() as stack:
        if opened is not None:
            stack.callback(opened.close)
        scratch = Scratch(job) if folder is None else None
        path = scratch.path if scratch is not None else str(folder)
        budget, source = disk_budget(settings, path), None
        if bucket is not None:
            source = BucketSource(
                bucket,
                path,
                budget,
                objects=opened,
                signals=options.get("signals"),
                uploads=writes,
                flush_first=flush_first,
                temporary=scratch is not None,
            )
        disk = DiskTier(
            path,
            budget,
            settings.policy,
            in_use=in_use,
            description=description,
            temporary=scratch is not None and not (is_worker and bucket is None),
            closed=None if scratch is None else scratch.remove,
            bucket=source,
            writes=writes or bucket is not None,
            **options,
        )
        tiers.add(disk)
        stack.pop_all()
    return disk
