"""`Levels`: the tiers of one dataset. Memory that all its processes share, then a folder or servers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys, Positions, int_keys
from torchcache2.core.logs import ToldOnce
from torchcache2.core.process import has_ranks
from torchcache2.core.rows import Parts, Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.tally import Tally
from torchcache2.engine.stack import TierStack, has_any
from torchcache2.tiers.base import Signals, Tier
from torchcache2.tiers.make import Description, InUse, Opened, make_levels
from torchcache2.tiers.meeting import job_name
from torchcache2.tiers.shared.tier import SharedTier

_ASKED_AT_ONCE = 1 << 20  # keys
_SEALING = 3.0  # seconds after an epoch in which others seal what waits in them


class _User:
    """Who uses the namespace of a dataset, as long as the process has its levels."""

    def __init__(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        self.namespace = namespace
        self._description = description

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """What the namespace stands for."""
        return self._description


class Levels(TierStack):
    """The tiers of the dataset with one namespace, in every process that uses it.

    A folder or servers, if there are any in the `settings`, have every row. A temporary folder has the rows
    for which there was no room in memory, so that the capacities add up. The budgets are in bytes.

    Unless it `writes`, the folder is only read. Then `opened` may be connections to the bucket, for the
    tiers.

    The ranks that give one `name` share memory and temporary folder; so do all processes that are given one
    `job` of 16 bytes, such as workers.
    """

    def __init__(
        self,
        settings: CacheSettings,
        namespace: bytes,
        description: Mapping[str, Any],
        name: str,
        job: bytes | None,
        tally: Tally,
        *,
        writes: bool = True,
        opened: Opened | None = None,
    ) -> None:
        self._is_worker, self._writes = job is not None, writes
        super().__init__(settings, name)
        self._opened = self._opened or opened
        self.fills_up = settings.persistent_cache_dir is None or not settings.is_persistent
        self._tally = tally
        self._epochs, self._turned = 0, -math.inf  # epochs that are over, and when this was noticed
        self.namespace = namespace
        self._user = _User(namespace, description)
        if job is None:
            # Processes that no launcher has started share with nobody but their workers.
            is_shared = has_ranks() or bool(os.environ.get("TORCHCACHE_JOB"))
            job = job_name(os.environ, "dataset", namespace.hex(), name) if is_shared else os.urandom(16)
        self.job = job
        self.join(self._user)
        self._hold()

    def _hold(self) -> None:
        """Take part now, so that what workers put outlives them."""
        memory = self.tiers[0]
        if isinstance(memory, SharedTier):
            memory.hold(self.namespace)

    def clear(self) -> None:
        """Forget every row, in every process."""
        self._tally.dropped()  # first: what waits elsewhere must not be written afterwards
        self.drop(self.namespace)

    def drop(self, namespace: bytes) -> None:
        """Delete the rows in files and in shared memory, and what waits in this process."""
        super().drop(namespace)
        self._hold()

    @property
    def _lasting(self) -> Sequence[Tier]:
        """The tiers whose rows stay, such as a folder and the bucket behind it."""
        return [tier for tier in self.tiers if tier.is_lasting] or self.tiers[-1:]

    def look_again(self) -> None:
        """Have the tiers look for rows of other processes at the next call."""
        for tier in self._lasting:
            tier.look_again(self.namespace)

    def _look(self, tiers: Sequence[Tier]) -> None:
        """Have some tiers look now for what other processes have written, or deleted."""
        self.look_again()
        for tier in tiers:
            tier.has(Keys(self.namespace, np.zeros((1, 16), np.uint8)))  # it looks when a key is not there

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in any tier now; with a folder that stays, or servers, in there."""
        self.look_again()
        return has_any(self.tiers if self.fills_up else self._lasting, keys)

    def absent(self, count: int, enough: float = math.inf) -> Positions:
        """Which of the samples 0 to `count` - 1 have no row, int64 ``(k,)``; `enough` need not be all."""
        self._look([tier for tier in self._lasting if tier.directory is not None])  # else it costs requests
        found = [np.empty(0, np.int64)]
        for start in range(0, count, _ASKED_AT_ONCE):
            some = np.arange(start, min(count, start + _ASKED_AT_ONCE))
            found.append(some[~self.has(int_keys(self.namespace, some))])
            if sum(map(len, found)) >= enough:
                break
        return np.concatenate(found)

    def found(self, keys: Keys) -> list[Parts]:
        """The parts of each tier that was asked."""
        if self._epochs != (epochs := self._tally.epochs):
            self._epochs, self._turned = epochs, time.monotonic()
        if time.monotonic() - self._turned < _SEALING:
            self.look_again()
        drops = self._tally.drops
        found = super().found(keys)
        if self._tally.drops != drops:  # what was read from the disk before may be in memory now
            self.drop(self.namespace)
        return found

    def count(self) -> int:
        """How many rows there are, in all processes; what waits in this one is written first."""
        self.flush()
        self._look(self._lasting)
        return sum(tier.count(self.namespace) for tier in (self.tiers if self.fills_up else self._lasting))

    def write_kept(self, keys: Keys) -> Flags:
        """Put rows that only memory has into the folder, or on servers; which of the keys memory had.

        The worker that was to write them was killed, or a server has forgotten them.
        """
        kept = np.zeros(len(keys), bool)
        if not self.fills_up and len(self.tiers) > 1:
            for positions, rows in self.tiers[0].get(keys).parts:
                self.keep(keys.take(positions), rows)
                kept[positions] = True
        return kept

    def keep(self, keys: Keys, rows: Rows) -> bool:
        """Put rows into every tier, or each into the first with room; whether there was room for all."""
        if not self.fills_up:
            self.put(self._user, keys, rows)
            return True  # the disk says itself if it is full
        absent = np.arange(len(keys))
        for depth, tier in enumerate(self.tiers):
            if depth:
                keys, rows = keys.take(absent), rows.take(torch.from_numpy(absent))
            if tier.put(keys, rows) == len(keys):
                return True
            absent = np.flatnonzero(~tier.has(keys))
            if len(absent) == 0:
                return True
        return False

    def close(self) -> None:
        """Let go of the rows in memory, and have the others on disk."""
        self.forget(self.namespace)
        self.leave(self._user)

    def _offer(self, tiers: Sequence[Tier], keys: Keys, rows: Rows) -> None:
        if not self.fills_up:  # else there was no room for them before, and room does not come back
            super()._offer(tiers, keys, rows)

    def _check_place(self) -> Opened | None:
        is_far = bool(self.settings.servers or self.settings.bucket)
        # In a worker, a server or a bucket that refuses is a fault and no error, as its parent has checked
        # it. A folder that is only read was checked when the dataset was chosen.
        is_checked = self._writes and not (self._is_worker and is_far)
        return super()._check_place() if is_checked else None

    def _made(self, in_use: InUse, description: Description, opened: Opened | None) -> Sequence[Tier]:
        tally = self._tally  # tiers that refer to these levels would keep them alive
        return make_levels(
            self.settings,
            in_use,
            description,
            self.job,
            is_worker=self._is_worker,
            signals=Signals(lambda: tally.drops, lambda: tally.epochs, ToldOnce(tally.is_first)),
            writes=self._writes,
            opened=opened,
        )
