"""`Sealing`: writes rows as segments of a cache directory, and makes room for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from torchcache2.core.locks import ProcessLock
from torchcache2.core.settings import Policy
from torchcache2.core.version import __version__
from torchcache2.files.codec import Codec
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.encode import SEGMENT, Encoded, encode, write
from torchcache2.files.eviction import Allowance, room_after
from torchcache2.files.filesystem import Descriptor
from torchcache2.files.segment import Segment
from torchcache2.files.whole import ulid
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.known import Known
from torchcache2.tiers.disk.unwritten import Pending

__all__ = ["Sealing"]


class Sealing:
    """Seals the rows of one tier.

    Parameters
    ----------
    directory : CacheDirectory
    known : Known
    health : Health
    codec : Codec
    budget : int
        Bytes of the whole directory.
    policy : {"mru", "lru"}
    description : callable, optional
        What a namespace stands for, for its ``fingerprint.json``.
    target : int
        Bytes of a segment.
    temporary : bool
        Whether nobody will open the directory again.

    Attributes
    ----------
    evictions : int
        Rows forgotten to make room.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        known: Known,
        health: Health,
        codec: Codec,
        budget: int,
        policy: Policy,
        description: Callable[[bytes], Mapping[str, Any]] | None,
        *,
        target: int,
        temporary: bool,
    ) -> None:
        self.evictions = 0
        self._directory = directory
        self._fs = directory.fs
        self._known = known
        self._health = health
        self._codec = codec
        self._budget = budget
        self._policy = policy
        self._description = description
        self._temporary = temporary
        self._allowance = Allowance(target)
        self._one_at_a_time = ProcessLock()

    def write(self, pending: Pending) -> None:
        """Seal rows; they are forgotten if that fails. Interrupts are left to the writer."""
        folder = self._directory.folder(pending.namespace)
        name = ulid() + SEGMENT
        try:
            encoded = encode(pending.rows(), self._codec, library=__version__)
            with self._known.lock():
                located = self._known.located.get(pending.namespace)
                if located is None or pending.dropped or not self._health.writes:
                    self.forget(pending)
                    return
                located.names.add(name)
                pending.name = name
            described = self._description(pending.namespace) if self._description is not None else {}
            if not self._sealed(pending, folder, name, encoded, described):
                self.forget(pending)
                return
            path = os.path.join(folder, name)
            segment = Segment.written(self._fs, self._known.descriptors, path, encoded)
            segment.keys = None
            with self._known.lock():
                self._health.worked(pending.namespace)
                is_forgotten = (
                    not self._known.closed and self._known.located.get(pending.namespace) is not located
                )
                if pending.dropped or is_forgotten:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.remove(path)
                else:
                    located.sealed(pending.number, segment)
        except Exception as error:
            self.forget(pending)
            self._health.write_fault(error, folder, pending.namespace)

    def _sealed(
        self, pending: Pending, folder: str, name: str, encoded: Encoded, described: Mapping[str, Any]
    ) -> bool:
        """Write a segment; False if there is no room for it."""
        extra = 0

        def enter() -> Descriptor | None:
            nonlocal extra
            made = self._directory.enter(pending.namespace, described)
            with contextlib.suppress(OSError):
                extra = self._fs.size(made) if made is not None else 0  # perhaps it is new
            return made

        for is_last in (False, True):
            if self._temporary and not self._fs.exists(self._directory.path):
                return False  # its run has ended: nobody would delete it again
            # Held until the segment is written: the cache that used the namespace may have been closed.
            held = self._known.held(pending.namespace, enter)
            try:
                with self._one_at_a_time():  # two threads would find the same room, and both use it
                    if not self._has_room(encoded.nbytes, extra):
                        return False
                    write(self._fs, folder, name, encoded)
                return True
            except FileNotFoundError:  # somebody has deleted the folder although we hold it
                if is_last:
                    raise
            finally:
                del held
        return False

    def forget(self, pending: Pending) -> None:
        """Have rows not found any more that nobody will write."""
        self._known.remove(pending.namespace, [pending.number])

    def _has_room(self, size: int, extra: int) -> bool:
        """Whether a segment fits into the budget; `extra` are bytes that have just been written."""
        if size > self._budget:
            return False
        if self._allowance.take(size + extra):
            return True
        self._known.hold_what_is_used()
        room = -1
        try:
            room = room_after(
                self._directory, size, self._budget, lru=self._policy == "lru", removed=self._removed
            )
        except PermissionError:
            self._health.faults += 1  # the segments that would have to go belong to another user
        except OSError as error:
            self._health.write_fault(error, self._directory.path)  # concerns the whole directory
            return False
        if room < 0:
            self._health.full(self._budget)
            return False
        self._allowance.looked(room, size)
        return True

    def _removed(self, namespace: str, names: list[str]) -> None:
        self.evictions += self._known.remove_files(bytes.fromhex(namespace), names)
