"""`TierStack`: the tiers of one budget, fastest first, and who uses them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Keys
from torchcache2.core.locks import ProcessLock
from torchcache2.core.logs import logger
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import NewerFormatError
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.base import Found, Positions
from torchcache2.tiers.disk.scratch import Scratch
from torchcache2.tiers.disk.tier import DiskTier, queue_limit
from torchcache2.tiers.memory.tier import MemoryTier

__all__ = ["TierStack"]

_MOST_DESCRIBED = 256
Parts = list[tuple[Positions, Rows]]


class NamespaceUser(Protocol):
    """A cache."""

    namespace: bytes

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """What a namespace of this cache stands for."""
        ...


class Users:
    """The caches that use some tiers, as long as they live."""

    def __init__(self) -> None:
        self._lock = ProcessLock(threading.RLock)  # the garbage collector may close a cache at any point
        self._caches: weakref.WeakSet[NamespaceUser] = weakref.WeakSet()

    def add(self, cache: NamespaceUser) -> None:
        """Count one more."""
        with self._lock():
            self._caches.add(cache)

    def discard(self, cache: NamespaceUser) -> bool:
        """Count one less; whether that was the last one."""
        with self._lock():
            self._caches.discard(cache)
            return not self._caches

    def namespaces(self) -> set[bytes]:
        """The namespaces in use."""
        with self._lock():
            return {cache.namespace for cache in list(self._caches)}


class TierStack:
    """The tiers of one budget, and the caches that use them.

    The tiers are made when the first rows come, or the first are asked for.

    Raises
    ------
    OptionError
        If the cache directory is a file, or a folder with somebody else's files.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._lock = ProcessLock(threading.RLock)  # the garbage collector may close a cache at any point
        self._users = Users()  # what the tiers know of: else they would keep this alive
        self._memory: MemoryTier | None = None
        self._disk: DiskTier | None = None
        self._has_no_folder = False
        self._last_drop = object()  # another one after each drop
        self._finalizer: Any = None
        self._described: dict[bytes, Mapping[str, Any]] = {}
        if settings.persistent and settings.persistent_cache_dir is not None:
            with contextlib.suppress(OSError, NewerFormatError):  # the tier warns, and goes on in memory
                CacheDirectory(str(settings.persistent_cache_dir), FileSystem()).check()

    @property
    def memory(self) -> MemoryTier:
        """The memory tier."""
        with self._lock():
            if self._memory is None:
                device = self.settings.memory_cache_device
                budget = self.settings.memory_budget()
                if self.settings.persistent:
                    budget = max(0, budget - queue_limit(budget))
                self._memory = MemoryTier(
                    budget,
                    self.settings.policy,
                    None if device is None else torch.device(device),
                    self._users.namespaces,
                    spills=self.settings.persistent,
                )
            return self._memory

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier; None if rows are not kept there."""
        if not self.settings.persistent or self._has_no_folder:
            return None
        with self._lock():
            if self._disk is None:
                folder = self.settings.persistent_cache_dir
                try:
                    scratch = Scratch() if folder is None else None
                except OSError as error:
                    logger.warning("there is no temporary folder: rows stay in memory (%s)", str(error))
                    self._has_no_folder = True
                    return None
                path = scratch.path if scratch is not None else str(folder)
                try:
                    self._disk = DiskTier(
                        path,
                        self.settings.persistent_budget(path),
                        self.settings.policy,
                        self.settings.compression,
                        self.settings.compression_quality,
                        queue=queue_limit(self.settings.memory_budget()),
                        in_use=self._users.namespaces,
                        describe=lambda namespace, known=self._described: known.get(namespace, {}),  # type: ignore[misc]
                        temporary=scratch is not None,
                    )
                except OptionError as error:  # the folder was good when something was decorated
                    logger.warning("%s; rows stay in memory", str(error))
                    self._has_no_folder = True
                    return None
                # At exit both see to themselves.
                self._finalizer = weakref.finalize(self, _close, self._disk, scratch)
                self._finalizer.atexit = False
            return self._disk

    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are in any tier.

        What comes from disk enters memory if there is room.
        """
        found = self.memory.get(keys)
        if not self.settings.persistent or sum(len(rows) for _, rows in found.parts) == len(keys):
            return Found(_merged(list(found.parts)))
        disk = self.disk
        if disk is None:
            return Found(_merged(list(found.parts)))
        missing = np.ones(len(keys), bool)
        for positions, _ in found.parts:
            missing[positions] = False
        wanted = np.flatnonzero(missing)
        asked = keys.take(wanted) if len(wanted) < len(keys) else keys
        before = self._last_drop
        parts: Parts = list(found.parts)
        for positions, rows in disk.get(asked).parts:
            if self._last_drop is before:
                self._promote(asked.take(positions), rows)
            parts.append((wanted[positions], rows))
        if self._last_drop is not before:  # they may have been dropped between reading and promoting
            self.memory.drop(keys.namespace)
        return Found(_merged(parts))

    def put(self, cache: NamespaceUser, keys: Keys, rows: Rows) -> None:
        """Keep rows under distinct keys, in every tier."""
        self.memory.put(keys, rows)
        disk = self.disk
        if disk is not None:
            if keys.namespace not in self._described:
                if len(self._described) >= _MOST_DESCRIBED:
                    self._described.clear()
                self._described[keys.namespace] = cache.description(keys.namespace)
            disk.put(keys, rows)

    def describe(self, namespace: bytes, description: Mapping[str, Any], *, create: bool) -> None:
        """Have what the disk keeps about a namespace say what is known now.

        Where nothing is kept about it yet, it is written with the first rows, or at once with `create`.
        """
        if namespace in self._described:
            self._described[namespace] = description
        if self.disk is not None:
            self.disk.describe(namespace, description, create=create)

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What the disk keeps about a namespace; empty if there is nothing."""
        disk = self.disk
        return {} if disk is None else disk.directory.fingerprint(namespace.hex())

    def forget(self, namespace: bytes) -> None:
        """Let go of the rows of a namespace that are in memory."""
        self.memory.drop(namespace)

    def drop(self, namespace: bytes) -> None:
        """Delete the rows of a namespace everywhere."""
        if self.disk is not None:
            self.disk.drop(namespace)
        self._last_drop = object()
        self.memory.drop(namespace)

    def flush(self) -> None:
        """Return when what was put is as durable as the tiers make it."""
        self.memory.flush()
        if self.disk is not None:
            self.disk.flush()

    def stats(self) -> dict[str, int]:
        """What `CacheStats` says of the tiers."""
        memory = self.memory.stats()
        counts = {
            "evictions": memory.evictions,
            "memory_rows": memory.rows,
            "memory_bytes": memory.bytes,
        }
        if self.disk is not None:
            disk = self.disk.stats()
            counts |= {
                "disk_rows": disk.rows,
                "disk_bytes": disk.bytes,
                "disk_evictions": disk.evictions,
                "corrupt": disk.corrupt,
                "faults": disk.faults,
            }
        return counts

    def join(self, cache: NamespaceUser) -> None:
        """Count a cache among those whose namespaces are in use, as long as it lives."""
        self._users.add(cache)

    def leave(self, cache: NamespaceUser) -> None:
        """The cache is closed. The last one takes the tiers with it."""
        with self._lock():
            is_last = self._users.discard(cache)
            memory, disk, finalizer = self._memory, self._disk, self._finalizer
            if is_last:
                self._memory = self._disk = self._finalizer = None
        # Not under the lock: a full tier asks who is left while it holds its own.
        if is_last and memory is not None:
            memory.close()
        if disk is not None and is_last:
            finalizer()
        elif disk is not None:
            disk.flush()

    def _promote(self, keys: Keys, rows: Rows) -> None:
        """Rows from disk enter memory if there is room."""
        distinct = keys.first_positions()
        if distinct is not None:
            keys, rows = keys.take(distinct[0]), rows.take(torch.from_numpy(distinct[0]))
        self.memory.put(keys, rows, evicts=False)


def _close(disk: DiskTier, scratch: Scratch | None) -> None:
    disk.close()
    if scratch is not None:
        scratch.remove()


def _merged(parts: Parts) -> Parts:
    """Parts of one schema as one, in the order of their positions."""
    if len(parts) < 2 or any(rows.schema != parts[0][1].schema for _, rows in parts):
        return parts
    positions = np.sort(np.concatenate([where for where, _ in parts]))
    ranked = [(np.searchsorted(positions, where), rows) for where, rows in parts]
    columns = parts[0][1].columns
    device = columns[0].device if columns else torch.device("cpu")
    return [(positions, Rows.scatter(ranked, len(positions), device=device))]
