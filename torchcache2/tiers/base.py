"""The contract of a tier: a store of rows by key, batches only.

A tier may forget any row at any time, and never returns a row under another key than its own. All methods are
thread-safe. A fault inside a tier is a counted miss and one warning, never an exception.

`Claim` says "this call computes these keys now", so that others wait for the rows instead of computing them.
A claim may span several tiers, such as the memory of one machine and servers of all machines: the call
computes only keys that every tier has granted. A waiting call polls, and holds no claim meanwhile, so two
calls never wait for each other. If the holder gives keys up, is killed or gets stuck, one of the waiting
calls claims them.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.core.logs import WarnOnce
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.directory import CacheDirectory

LONGEST_PAUSE = 60.0  # seconds

Make = Callable[[Schema, Sequence[memoryview]], Any]  # see `Tier.get_one`


@dataclasses.dataclass(frozen=True)
class Found:
    """Which keys of a batch a tier has.

    Attributes
    ----------
    parts : sequence of (ndarray of int64, Rows)
        Positions in the batch and their rows, one part for each schema. No tier refers to the memory of
        these rows, so the caller may write to it.
    """

    parts: Sequence[tuple[Positions, Rows]]


@dataclasses.dataclass(frozen=True)
class TierStats:
    """The content of a tier now, and counts of what has happened.

    Attributes
    ----------
    rows, bytes : int
        How many rows the tier has, and the bytes they take.
    evictions : int
        Rows forgotten to make room.
    corrupt : int
        Damaged rows and files.
    faults : int
        System calls that failed.
    """

    rows: int
    bytes: int
    evictions: int
    corrupt: int = 0
    faults: int = 0


@dataclasses.dataclass(frozen=True)
class Signals:
    """What the processes of a job tell each other about rows that are still to be written.

    Attributes
    ----------
    drops : callable
        Returns when a process last dropped rows, in nanoseconds since 1970; 0: never. The other processes
        then forget their unwritten rows.
    publishing : callable
        Returns a context in which a process checks `drops` and then writes rows where others find them. The
        one that drops rows waits for it.
    asked : callable
        Returns a number that changes when another process asks for the unwritten rows: they are then written
        at once.
    waits : callable
        Called with the time since which rows have waited in this process, in seconds of `time.monotonic`; 0:
        none wait.
    ask : callable
        Asks the other processes for their unwritten rows, and waits until they are written.
    tell : WarnOnce, optional
        Warns of faults; default: each process warns.
    """

    drops: Callable[[], int] = int
    publishing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    asked: Callable[[], int] = int
    waits: Callable[[float], None] = lambda since: None
    ask: Callable[[], None] = lambda: None
    tell: WarnOnce | None = None


class Breaker:
    """Says when to try a failing folder or server again: after longer and longer pauses, up to a minute.

    Attributes
    ----------
    failures : int
        In a row, without a success.
    shortest : float
        The first pause in seconds; each further one is twice as long.
    """

    def __init__(self, shortest: float = 2.0) -> None:
        self.failures, self.shortest = 0, shortest
        self._until = 0.0

    @property
    def left(self) -> float:
        """Seconds until it may be tried; 0 or less: now."""
        return self._until - time.monotonic()

    def allows(self) -> bool:
        """Whether it may be tried now."""
        return self.left <= 0.0

    def failed(self, *, is_spared: bool = False) -> None:
        """Count a failed try, and pause; the first failure in a row can be spared the pause."""
        self.failures += 1
        if self.failures > 1 or not is_spared:
            # Larger exponents would overflow.
            self.pause(self.shortest * 2.0 ** min(self.failures - 1, 10))

    def pause(self, seconds: float = LONGEST_PAUSE) -> None:
        """Allow no tries for some seconds, at most a minute."""
        self._until = time.monotonic() + min(LONGEST_PAUSE, seconds)

    def worked(self) -> None:
        """Count a try that has succeeded."""
        self.failures = 0


class Tier(abc.ABC):
    """A store of rows by key.

    Attributes
    ----------
    name : str
        The name of the tier in `CacheStats`, as in ``disk_rows``.
    is_lasting : bool
        Whether rows outlive the cache that put them. Their namespaces then get descriptions, for people and
        later runs.
    is_shared : bool
        Whether all ranks of the machine share the rows and the budget.
    directory : CacheDirectory or None
        The folder of its rows; None if they are in no folder.
    above : Drain or None
        What puts rows of faster tiers and other processes into this one.
    """

    name: ClassVar[str]
    is_lasting: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False
    directory: CacheDirectory | None = None
    above: Any = None

    @property
    def cause(self) -> Exception | None:
        """The fault that keeps the tier from using its bucket now; None if there is none."""
        return None

    @abc.abstractmethod
    def get(self, keys: Keys) -> Found:
        """The rows that the tier has for these keys."""

    def get_one(self, namespace: bytes, low: int, high: int, make: Make) -> Any:
        """What `make` builds from the row of one key, given as its two words; None: ask `get` instead.

        ``make(schema, buffers)`` gets each leaf's bytes in the tier's own memory, and copies them. It must
        not raise, keep the buffers, or call the tier.
        """
        return None

    @abc.abstractmethod
    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now, bool ``(n,)``. Reads no rows; any may be forgotten next."""

    def look_again(self, namespace: bytes) -> None:  # noqa: B027
        """Have the next call look for rows of other processes; otherwise this happens once in a while."""

    def bring(self, namespace: bytes) -> None:  # noqa: B027
        """Bring rows of a namespace that are far away, in the background."""

    @abc.abstractmethod
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys; returns how many were kept, which may be none."""

    def keep_if_room(self, keys: Keys, rows: Rows) -> int:
        """Keep rows as `put` does, but evict no row in use for them, since a slower tier has them too."""
        return self.put(keys, rows)

    def claims(self, keys: Keys) -> TierClaim | None:
        """A claim on distinct keys that `get` has missed; None if this tier has no claims."""
        return None

    def claim(self, keys: Keys) -> Claim:
        """Claim distinct keys that `get` has missed; call `release` on the result in the end."""
        return claim_in([self], keys)

    @abc.abstractmethod
    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""

    def clear(self, namespace: bytes) -> None:
        """Like `drop`, but leaves a folder's rows that others use."""
        self.drop(namespace)

    def let_go(self, namespace: bytes) -> None:
        """Forget a namespace that this process no longer uses, unless its rows are lasting."""
        if not self.is_lasting:
            self.drop(namespace)

    def give_back(self, device: torch.device | None) -> int:
        """Forget the rows in the memory of one device, or of all devices but the host (None).

        Returns how many bytes they took there.
        """
        return 0

    def watch(self) -> None:  # noqa: B027
        """Take rows from `above` in this process from now on."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Return once all rows put so far are as durable as this tier makes them."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and free every resource. Afterwards the tier finds and keeps no rows."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """What is here now."""

    def count(self, namespace: bytes) -> int:
        """The tier's rows of a namespace in use; a tier with one namespace may count all its rows."""
        return self.stats().rows

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Known reasons why rows of a namespace that may be here are not found."""
        return []

    def counts(self) -> dict[str, int]:
        """The tier's counts in `CacheStats`, which adds up counts of the same name over all tiers."""
        stats = self.stats()
        return {
            f"{self.name}_rows": stats.rows,
            f"{self.name}_bytes": stats.bytes,
            "evictions" if self.name == "memory" else f"{self.name}_evictions": stats.evictions,
            "corrupt": stats.corrupt,
            "faults": stats.faults,
        }

    def later(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in a new thread, as the garbage collector may have called in the middle of work."""
        # While the process ends, no thread can start, but the exit handler closes the tier.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=function, args=args, daemon=True).start()


def claim_in(tiers: Sequence[Tier], keys: Keys) -> Claim:
    """Claim keys in all tiers that support claims, fastest first; see `Tier.claim`."""
    claims = (tier.claims(keys) for tier in tiers)
    return Claim(len(keys), [claim for claim in claims if claim is not None])


_NOWHERE: Positions = np.empty(0, np.int64)


@dataclasses.dataclass
class Tally:
    """Counts rows that other processes were computing: those they delivered, and those they gave up."""

    waited: int = 0
    taken_over: int = 0

    def counts(self) -> dict[str, int]:
        """The counts, as `CacheStats` names them."""
        return dataclasses.asdict(self)


class TierClaim(abc.ABC):
    """What one call claims in one tier, of a batch of distinct keys; positions are those of the batch.

    Attributes
    ----------
    pauses : (float, float)
        Seconds between polls: the first, and the longest.
    tally : Tally
        The counts of the tier.
    """

    pauses: tuple[float, float]
    tally: Tally

    @abc.abstractmethod
    def take(self, positions: Positions) -> Positions:
        """Claim keys that have no row and no claim; returns what this call may compute.

        If the tier cannot tell, because of a fault, the call may compute without a claim.
        """

    @abc.abstractmethod
    def look(self, positions: Positions) -> tuple[Flags, Flags]:
        """Whether each key has a row now, and whether it is open: no row, and no process computes it."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give up the claimed keys. Other processes find rows put earlier before they see this release."""


class Claim:
    """Which keys of a batch one call computes, and which it waits for. Used by one thread.

    Without tiers, the call computes all keys, as no other process shares its rows.

    Parameters
    ----------
    count : int
        How many keys there are.
    tiers : sequence of TierClaim
        The fastest first.

    Attributes
    ----------
    mine : ndarray of int64
        Positions in the batch that the call computes.
    others : ndarray of int64
        Positions that another process computes, or has computed since this call missed them; see `wait`.
    appeared : ndarray of int64
        Positions whose rows were there when `wait` last returned. A tier may forget rows: if one is gone
        again, compute it without a claim.
    """

    def __init__(self, count: int, tiers: Sequence[TierClaim] = ()) -> None:
        self._tiers = tiers
        self.mine = self._take(np.arange(count))
        left = np.ones(count, bool)
        left[self.mine] = False
        self.others: Positions = np.flatnonzero(left)
        self.appeared = _NOWHERE

    def wait(self) -> Positions:
        """Block until all of `others` have rows, or their holder gives some up.

        First gives up the keys that this call has claimed and not put.

        Returns
        -------
        ndarray of int64
            Positions that were given up: this call now computes them. `others` loses them, and the keys whose
            rows have `appeared`.
        """
        self.release()
        there, taken, rounds = np.zeros(len(self.others), bool), _NOWHERE, 0
        while not there.all():
            asked, pause = np.flatnonzero(~there), 0.0
            for tier in self._tiers:  # ask a slower tier only for keys open in this one
                rows, is_open = tier.look(self.others[asked])
                there[asked[rows]] = True
                tier.tally.waited += int(rows.sum())
                asked, pause = asked[is_open], min(tier.pauses[0] * 2**rounds, tier.pauses[1])
                if len(asked) == 0:
                    break
            if len(asked):
                taken = self._take(self.others[asked])
                if len(taken):
                    self._tiers[-1].tally.taken_over += len(taken)
                    break
                self.release()  # a slower tier refused what a faster one had granted
            if not there.all():
                time.sleep(pause)  # of the slowest tier that was asked
                rounds = min(rounds + 1, 20)
        self.appeared = self.others[there]
        self.others = np.setdiff1d(self.others[~there], taken, assume_unique=True)
        return taken

    def release(self) -> None:
        """Give up what was claimed and not put; may be called again."""
        for tier in reversed(self._tiers):  # a waiter claims in the faster tier first
            tier.release()

    def _take(self, positions: Positions) -> Positions:
        for tier in self._tiers:
            if len(positions):
                positions = tier.take(positions)
        return positions
