"""`Gathering`: hands rows that come one by one to the disk tier in batches, as a call of it is dear."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchcache2.core.keys import Array, Keys
from torchcache2.core.process import AtExit, ProcessLock
from torchcache2.core.rows import Rows
from torchcache2.tiers.base import Found, Tier, TierStats
from torchcache2.tiers.disk.tier import DiskTier

_CPU = torch.device("cpu")
_FEW = 8  # rows of a call that is worth being put off
_MOST_ROWS, _MOST_BYTES = 64, 1 << 20
_LONGEST = 1.0  # seconds; looked at when rows come
_EXIT_PRIORITY = 20  # higher than that of the tier's own writer, which closes the tier


class Gathering(Tier):
    """A tier in front of the disk tier, as which it appears.

    What waits is handed on when there is enough of it, when it is asked for, at `flush` and `close`, and at
    exit. Safe under threads, and under fork: the parent hands on what waited. When `drops()` changes, as a
    process of the job has dropped rows, what waits is forgotten.
    """

    name = DiskTier.name
    is_lasting = True

    def __init__(self, tier: DiskTier, drops: Callable[[], int] = int) -> None:
        self._drops = drops
        self._tier = tier
        self.directory = tier.directory
        self._lock = ProcessLock(threading.RLock)  # the garbage collector may close this at any point
        self._closed = False
        self._start_anew()

    @property
    def budget(self) -> int:
        """That of the tier behind."""
        return self._tier.budget

    @property
    def cause(self) -> Exception | None:
        """That of the tier behind."""
        return self._tier.cause

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._dropped = self._drops()
        self._waiting: dict[tuple[bytes, bytes], tuple[Keys, Rows]] = {}
        self._bytes = 0
        self._since = 0.0
        self._exit: AtExit | None = None

    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here."""
        self._hand_on_if_asked_for(keys)
        return self._tier.get(keys)

    def has(self, keys: Keys) -> Array:
        """Which of these keys have a row here now."""
        self._hand_on_if_asked_for(keys)
        return self._tier.has(keys)

    def look_again(self, namespace: bytes) -> None:
        """Look for rows of other processes at the next call."""
        self._tier.look_again(namespace)

    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys; few of them wait until there are more."""
        if len(keys) >= _FEW:
            self.hand_on()
            return self._tier.put(keys, rows)
        kept, absent = 0, np.flatnonzero(~self._tier.has(keys))
        with self._lock():
            self._notice()
            if self._closed:
                return 0
            for i in absent.tolist():
                name = keys.namespace, keys.data[i].tobytes()
                if name in self._waiting:
                    continue
                key = Keys(keys.namespace, keys.data[i : i + 1].copy())
                own = [column[i : i + 1].clone() for column in rows.columns]
                self._waiting[name] = key, Rows(rows.schema, own, 1)
                self._bytes += rows.schema.row_bytes
                kept += 1
            if self._waiting and self._exit is None:
                # The tier is closed as well: a writer that starts while the process ends is not told to end.
                self._exit, self._since = AtExit(self.close, _EXIT_PRIORITY), time.monotonic()
            is_enough = len(self._waiting) >= _MOST_ROWS or self._bytes >= _MOST_BYTES
        if is_enough or time.monotonic() - self._since > _LONGEST:
            self.hand_on()
        return kept

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""
        self.hand_on()
        self._tier.drop(namespace)

    def let_go(self, namespace: bytes) -> None:
        """Nothing in this process uses a namespace any more."""
        self.hand_on()
        self._tier.let_go(namespace)

    def flush(self) -> None:
        """Return when everything that was put is as durable as the tier makes it."""
        self.hand_on()
        self._tier.flush()

    def close(self) -> None:
        """Hand on what waits, and close the tier."""
        if self._tier.is_busy_here():
            self._tier.later(self.close)  # the garbage collector calls this while the tier changes its tables
            return
        with self._lock():
            self.hand_on()
            self._closed = True
        self._tier.close()

    def stats(self) -> TierStats:
        """What is in the tier now."""
        self.hand_on()
        return self._tier.stats()

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of the tier."""
        self.hand_on()
        return self._tier.counts()

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Why rows that may be in the tier are not found."""
        return self._tier.reasons(namespace)

    def describe(self, namespace: bytes, description: Mapping[str, Any], *, create: bool) -> None:
        """Keep a newer description of a namespace."""
        self._tier.describe(namespace, description, create=create)

    def hand_on(self) -> None:
        """Put what waits into the tier."""
        with self._lock():
            self._notice()
            if self._exit is not None:
                self._exit.cancel()
            waiting = list(self._waiting.values())
            self._start_anew()
            groups: dict[Any, list[tuple[Keys, Rows]]] = {}
            for keys, rows in waiting:
                groups.setdefault((keys.namespace, rows.schema), []).append((keys, rows))
            for (namespace, _), pairs in groups.items():
                data = np.concatenate([keys.data for keys, _ in pairs])
                places = [(np.array([place]), rows) for place, (_, rows) in enumerate(pairs)]
                rows = Rows.scatter(places, len(pairs), device=_CPU)
                self._tier.put(Keys(namespace, data), rows)

    def _hand_on_if_asked_for(self, keys: Keys) -> None:
        with self._lock():  # who hands on has it until the tier has the rows
            waiting = self._waiting
            if waiting and any((keys.namespace, key.tobytes()) in waiting for key in keys.data):
                self.hand_on()

    def _notice(self) -> None:
        """Forget what waits if it is the parent's, or if a process of the job has dropped rows."""
        if self._pid != os.getpid() or self._dropped != self._drops():
            if self._exit is not None and self._pid == os.getpid():
                self._exit.cancel()
            self._start_anew()
