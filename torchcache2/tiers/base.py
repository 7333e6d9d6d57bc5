"""The contract of a tier: a store of rows by key, batches only.

A tier may forget any row at any time, and never returns a row under a key that it was not put under.
All methods may be called from several threads. A fault inside of a tier is a counted miss and one
warning, never an exception.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.core.logs import ToldOnce
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.encoding import digest
from torchcache2.tiers.claims import Claim, TierClaim

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
        The rows that the tier has, and how many bytes they take.
    evictions : int
        Rows forgotten to make room.
    corrupt : int
        Damaged rows and files.
    faults : int
        Calls of the system that failed.
    """

    rows: int
    bytes: int
    evictions: int
    corrupt: int = 0
    faults: int = 0


@dataclasses.dataclass(frozen=True)
class Signals:
    """What the processes of a job tell each other about rows that wait in them to be written.

    Attributes
    ----------
    drops : callable
        Returns when a process last dropped rows, in nanoseconds since 1970; 0: never. The others then forget
        theirs.
    seals : callable
        Returns a number that changes when others will need what waits, which is then written at once.
    tell : ToldOnce, optional
        Warns of faults; default: in each process.
    """

    drops: Callable[[], int] = int
    seals: Callable[[], int] = int
    tell: ToldOnce | None = None


def replicas_of(namespace: bytes) -> bytes:
    """The namespace of the replicas of a namespace; see `Tier.keep_replicas`."""
    return digest([namespace, b"replica"])


class Tier(abc.ABC):
    """A store of rows by key.

    Attributes
    ----------
    name : str
        The name of the tier in `CacheStats`, as in ``disk_rows``.
    is_lasting : bool
        Whether rows stay when the cache that put them is closed. Their namespaces are then described, for
        whoever finds the rows later.
    is_shared : bool
        Whether rows and budget are those of all ranks of the machine.
    directory : CacheDirectory or None
        The folder where its rows are; None if they are in no folder.
    """

    name: ClassVar[str]
    is_lasting: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False
    directory: CacheDirectory | None = None

    @property
    def cause(self) -> Exception | None:
        """Why a bucket is left out now, whose rows the tier has otherwise; None if it is not."""
        return None

    @abc.abstractmethod
    def get(self, keys: Keys) -> Found:
        """The rows of those keys that are here."""

    def get_one(self, namespace: bytes, low: int, high: int, make: Make) -> Any:
        """What is made of the row of one key, given as its two words; None if `get` has to look for it.

        ``make(schema, buffers)`` gets the bytes of each leaf's row in memory of the tier, which it copies. It
        neither raises nor keeps them, and must not call the tier.
        """
        return None

    @abc.abstractmethod
    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row here now, bool ``(n,)``. No row is read; any may be forgotten next."""

    def look_again(self, namespace: bytes) -> None:  # noqa: B027
        """Look for rows of other processes at the next call, which is otherwise done once in a while."""

    @abc.abstractmethod
    def put(self, keys: Keys, rows: Rows) -> int:
        """Keep rows under distinct keys, or only some of them, or none; returns how many were kept."""

    def offer(self, keys: Keys, rows: Rows) -> int:
        """Keep rows as `put` does, but forget no row that is in use for them: a slower tier has them too."""
        return self.put(keys, rows)

    def keep_replicas(self, keys: Keys, rows: Rows) -> int:
        """Keep rows that other ranks own, in room that nothing else needs; returns how many were kept.

        The keys are distinct, and of the namespace `replicas_of` that of their owners, with which they are
        dropped. No row is forgotten for them, and they are the first to make room for others; that is no
        eviction.
        """
        return 0

    def claims(self, keys: Keys) -> TierClaim | None:
        """What a call claims here, of distinct keys that `get` has missed; None: it claims nothing."""
        return None

    def claim(self, keys: Keys) -> Claim:
        """Say which of some distinct keys, missed by `get`, this call computes; `release` it in the end."""
        return claim_in([self], keys)

    @abc.abstractmethod
    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""

    def let_go(self, namespace: bytes) -> None:
        """Nothing in this process uses a namespace any more: forget what would not outlive it anyway."""
        if not self.is_lasting:
            self.drop(namespace)

    def give_back(self, device: torch.device | None) -> int:
        """Forget the rows that are in the memory of a device, or of all devices but the host.

        Returns how many bytes they took there.
        """
        return 0

    @abc.abstractmethod
    def flush(self) -> None:
        """Return when everything that was put is as durable as the tier makes it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and free every resource. From then on the tier has no rows, and keeps none."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """What is here now."""

    def count(self, namespace: bytes) -> int:
        """How many rows of a namespace, which was asked for, are here; all rows are if it is the only one."""
        return self.stats().rows

    def reasons(self, namespace: bytes) -> list[Exception]:
        """Why rows of a namespace that may be here are not found, as far as that is known."""
        return []

    def counts(self) -> dict[str, int]:
        """What `CacheStats` says of this tier; counts of the same name are added up over all tiers."""
        stats = self.stats()
        own = {"rows": stats.rows, "bytes": stats.bytes, "evictions": stats.evictions}
        shared = {"corrupt": stats.corrupt, "faults": stats.faults}
        return {f"{self.name}_{count}": value for count, value in own.items()} | shared

    def describe(self, namespace: bytes, description: Mapping[str, Any], *, create: bool) -> None:  # noqa: B027
        """Keep a newer description of a namespace; if there is none yet, only with `create`."""

    def later(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in another thread, where the garbage collector has called in the middle of work."""
        # No thread can be started while the process ends; but then the tier is closed at exit.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=function, args=args, daemon=True).start()


def claim_in(tiers: Sequence[Tier], keys: Keys) -> Claim:
    """Claim keys in those of some tiers that have claims, the fastest first; see `Tier.claim`."""
    claims = (tier.claims(keys) for tier in tiers)
    return Claim(len(keys), [claim for claim in claims if claim is not None])
