"""`Levels`: the tiers of one dataset. Memory that all its processes share, then a folder on the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchcache2.core.arrays import Flags
from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import ToldOnce
from torchcache2.core.ranks import has_ranks
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.tally import Tally
from torchcache2.engine.stack import Parts, TierStack
from torchcache2.tiers.base import Signals, Tier
from torchcache2.tiers.make import Description, InUse, make_levels
from torchcache2.tiers.shared.job import job_name
from torchcache2.tiers.shared.tier import SharedTier

__all__ = ["Levels", "check_length"]

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

    With a folder in the `settings`, the disk has every row. With a temporary one, it has the rows for which
    there was no room in memory, so that the capacities add up. The budgets are in bytes.

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
    ) -> None:
        super().__init__(settings, name)
        self.fills_up = settings.persistent_cache_dir is None or not settings.is_persistent
        self._tally = tally
        self._epochs, self._turned = 0, -math.inf  # epochs that are over, and when this was noticed
        self.namespace = namespace
        self._user = _User(namespace, description)
        self._is_worker = job is not None
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

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row in any tier now; with a folder that stays, in there."""
        self.tiers[-1].look_again(self.namespace)
        return super().has(keys) if self.fills_up else self.tiers[-1].has(keys)

    def found(self, keys: Keys) -> list[Parts]:
        """The parts of each tier that was asked."""
        if self._epochs != (epochs := self._tally.epochs):
            self._epochs, self._turned = epochs, time.monotonic()
        if time.monotonic() - self._turned < _SEALING:
            self.tiers[-1].look_again(self.namespace)
        drops = self._tally.drops
        found = super().found(keys)
        if self._tally.drops != drops:  # what was read from the disk before may be in memory now
            self.drop(self.namespace)
        return found

    def write_kept(self, keys: Keys) -> None:
        """Put rows that only memory has into the folder: the worker that was to write them was killed."""
        if not self.fills_up:
            for positions, rows in self.tiers[0].get(keys).parts:
                self.keep(keys.take(positions), rows)

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

    def _made(self, in_use: InUse, description: Description) -> Sequence[Tier]:
        tally = self._tally  # tiers that refer to these levels would keep them alive
        return make_levels(
            self.settings,
            in_use,
            description,
            self.job,
            is_worker=self._is_worker,
            signals=Signals(lambda: tally.drops, lambda: tally.epochs, ToldOnce(tally.is_first)),
        )


def check_length(levels: Levels, name: str, length: int | None) -> None:
    """Raise `OptionError` if the folder has a dataset of this name and version with another length."""
    directory = levels.directory
    if directory is None:
        return
    there = directory.fingerprint(levels.namespace.hex()).get("dataset")
    before = there.get("length") if isinstance(there, dict) else None
    if before is not None and before != length:
        raise OptionError(
            f"name={name!r} is a dataset of {before} samples in {directory.path}, and this one has {length}: "
            "give another name, or another version"
        )
