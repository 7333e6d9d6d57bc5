"""`LeasedClaim`: "this call computes these keys now", for all processes that use the same servers.

A claim is a name on the server of its row, which only the first one can set. It is a lease: it goes by itself
some time after its holder has last renewed it, so that nobody waits for a process that was killed. Rows that
wait to be written keep theirs until they are. Whoever waits asks for the names again and again, and holds no
claim meanwhile, so that no two wait for each other.

A holder that was stopped for longer than its lease finds by its own clock that it has none any more: it then
neither renews nor deletes it, since it may be somebody else's. If a server fails, what is claimed there is
computed without a claim. In the worst case, a row is computed twice.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np

from torchcache2.core.keys import Flags, Keys, Positions, Words
from torchcache2.core.process import ProcessLock
from torchcache2.tiers.base import Claim
from torchcache2.tiers.redis.clients import Clients
from torchcache2.tiers.redis.lease import Abandoned, Lease
from torchcache2.tiers.redis.names import claim_names, row_names
from torchcache2.tiers.redis.pipelines import LOST

_PROCESS = os.urandom(16)  # forked children have the same, but no thread of the same number
_NOWHERE: Positions = np.empty(0, np.int64)


class Leases:
    """The leases of one tier in one process.

    Parameters
    ----------
    clients : Clients
    wake : callable
        Called when leases begin to be held: somebody then has to call `beat` soon, and again when it says.

    Attributes
    ----------
    waited, taken_over : int
        Rows that others have computed, and those that they have given up.
    """

    least = 30.0  # seconds of a lease, or 4 times those of the longest computation so far
    most = 600.0  # seconds until a holder counts as stuck, or 4 times as above
    first_pause, longest_pause = 1e-3, 0.05  # seconds between looks at what is waited for

    def __init__(
        self,
        clients: Clients,
        wake: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited = self.taken_over = 0
        self._clients, self._wake, self._clock = clients, wake, clock
        self._lock = ProcessLock(threading.RLock)
        self._held: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._abandoned: Abandoned = deque()
        self._numbers = itertools.count()
        self._longest = 0.0  # seconds from a claim to the rows
        self._beats_in = 0  # the process that calls `beat`
        self._closed = False

    def claim(self, keys: Keys) -> Claim:
        """Say which of some distinct keys this call computes.

        A thread that holds a claim of the namespace gets no other, and computes all: it would wait for
        others, which may be waiting for what it has claimed already.
        """
        is_holding = any(lease.namespace == keys.namespace for lease in self._of_this_thread())
        return Claim(len(keys)) if is_holding or self._closed or not len(keys) else LeasedClaim(keys, self)

    def take(self, keys: Keys, note: Callable[[Lease], None]) -> tuple[Flags, Flags]:
        """Claim what nobody else has claimed.

        `note` is called with the lease before it counts: whoever has noted it gives it up. It comes first, as
        there may be an interrupt.

        Returns
        -------
        mine : ndarray of bool, shape (n,)
            Whether the caller computes each key, perhaps without a claim, as a server has failed.
        there : ndarray of bool, shape (n,)
            Whether there is a row, and so no claim: it was published since the caller has missed it.
        """
        lease = Lease(self._token(), keys.namespace, threading.get_native_id(), self._abandoned)
        lease.since, seconds = self._clock(), self.seconds
        lease.lasts(lease.since, seconds)
        mine, there = np.ones(len(keys), bool), np.zeros(len(keys), bool)
        asked = np.flatnonzero(self._clients.allows_writes(keys.words))
        keys = keys.take(asked)
        names, milliseconds = claim_names(keys), int(seconds * 1000)
        commands = [(b"SET", name, lease.token, b"NX", b"PX", milliseconds) for name in names]
        replies = self._clients.run(commands, keys.words)
        granted = [number for number, reply in enumerate(replies) if reply is not None and not _failed(reply)]
        lease.names = {names[number] for number in granted}
        note(lease)
        with self._lock():
            self._held.add(lease)
        if self._beats_in != os.getpid():
            self._beats_in = os.getpid()
            self._wake()
        mine[asked] = [reply is not None for reply in replies]
        # Whoever publishes writes the row before the claim is deleted: if the row is not there now, nobody
        # who had this claim before will still write it.
        keys = keys.take(np.array(granted, np.int64))
        is_row = self.published(keys)
        if is_row.any():
            published = asked[granted][is_row]
            there[published], mine[published] = True, False
            self.end([lease.part(set(claim_names(keys.take(np.flatnonzero(is_row)))))])
        return mine, there

    def published(self, keys: Keys) -> Flags:
        """Whether each key has a row on its server."""
        return self._clients.exist(row_names(keys), keys.words)

    def holders(self, keys: Keys) -> list[bytes | None]:
        """The token of whoever has claimed each key; None: nobody, or the server has failed."""
        return self._clients.mget(claim_names(keys), keys.words)

    def hand_over(self, keys: Keys) -> list[Lease]:
        """The leases of those keys that this process has claimed: their rows are about to be written.

        To be called before the claim is released. Whoever writes calls `end` with them when the rows are on
        the server, or will not come there. Others may be waiting, so the rows are to be written at once.
        """
        found: list[Lease] = []
        if held := self._leases():
            names, now = set(claim_names(keys)), self._clock()
            with self._lock():
                for lease in held:
                    if ours := lease.names & names:
                        self._longest = max(self._longest, now - lease.since if lease.thread else 0.0)
                        found.append(lease.part(ours))
                        self._held.add(found[-1])
        return found

    def end(self, leases: Iterable[Lease]) -> None:
        """Give up what leases hold."""
        held = []
        for lease in leases:
            with self._lock():
                held.append((lease.names, lease.until, lease.pid))
                lease.names = frozenset()
        self._delete(held)

    def beat(self) -> float:
        """Renew the leases that are due; seconds until the next call, inf if there are none.

        What a server has lost meanwhile, or somebody else has claimed, is not held any more.
        """
        abandoned = []
        while self._abandoned:
            abandoned.append(self._abandoned.popleft())
        self._delete(abandoned)
        with self._lock():
            held = [lease for lease in self._leases() if lease.until > self._clock()]
            if not held:
                self._beats_in = 0
                return float("inf")
        now = self._clock()
        for lease in held:
            if lease.renewed <= now < lease.since + self.stuck:
                self._renew(lease)
        return max(0.0, min(max(lease.renewed, now + self.seconds / 60) for lease in held) - self._clock())

    def close(self) -> None:
        """Give up everything, and claim nothing from now on."""
        self._closed = True
        self.end(self._leases())

    @property
    def seconds(self) -> float:
        """How long a lease lasts from now on."""
        return max(self.least, 4 * self._longest)

    @property
    def stuck(self) -> float:
        """After how many seconds a holder counts as stuck."""
        return max(self.most, 4 * self._longest)

    def patience(self) -> float:
        """For how many seconds this thread waits; a short time if an outer call of it holds claims."""
        return self.seconds if self._of_this_thread() else self.stuck

    def own_tokens(self) -> bytes:
        """What the tokens of this thread begin with, whichever tier of the process they are of."""
        return _PROCESS + threading.get_native_id().to_bytes(8, "little")

    def _token(self) -> bytes:
        return self.own_tokens() + next(self._numbers).to_bytes(8, "little")

    def _of_this_thread(self) -> list[Lease]:
        """Those under which this thread computes now."""
        thread = threading.get_native_id()
        return [lease for lease in self._leases() if lease.thread == thread]

    def _leases(self) -> list[Lease]:
        """Those of this process that hold something."""
        pid = os.getpid()
        with self._lock():
            return [lease for lease in self._held if lease.names and lease.pid == pid]

    def _renew(self, lease: Lease) -> None:
        names, start, seconds = list(lease.names), self._clock(), self.seconds
        commands = [(b"GETEX", name, b"PX", int(seconds * 1000)) for name in names]
        tokens = self._clients.run(commands, _words(names))
        with self._lock():
            lease.names -= {
                name
                for name, token in zip(names, tokens, strict=True)
                if not _failed(token) and token != lease.token
            }
        lease.lasts(start, seconds, is_renewed=not any(map(_failed, tokens)))

    def _delete(self, held: Iterable[tuple[Set[bytes], float, int]]) -> None:
        """Delete what leases held, if it is certainly still this process's."""
        now, pid = self._clock(), os.getpid()
        names = [name for some, until, owner in held if owner == pid and now < until for name in some]
        if names:
            self._clients.counts(b"DEL", names, _words(names))


class LeasedClaim(Claim):
    """A claim on servers."""

    def __init__(self, keys: Keys, leases: Leases) -> None:
        super().__init__(len(keys))
        self._keys, self._leases = keys, leases
        self._lease: Lease | None = None
        mine, _ = leases.take(keys, self._note)
        self.mine, self.others = np.flatnonzero(mine), np.flatnonzero(~mine)

    def wait(self) -> Positions:  # noqa: D102
        self.release()
        leases, pause, own = self._leases, self._leases.first_pause, self._leases.own_tokens()
        self.appeared, end = _NOWHERE, time.monotonic() + leases.patience()
        while len(self.others):
            holders = leases.holders(self._keys.take(self.others))
            # A thread does not wait for itself: an outer call of this thread is computing these items.
            taken = np.array([holder is not None and holder.startswith(own) for holder in holders], bool)
            taken |= time.monotonic() > end  # such as for a name that somebody else has set, for ever
            there = np.zeros(len(holders), bool)
            open_ = np.flatnonzero([holder is None for holder in holders] & ~taken)
            if len(open_):
                there[open_] = leases.published(self._keys.take(self.others[open_]))
                open_ = open_[~there[open_]]
            if len(open_):
                keys = self._keys.take(self.others[open_])
                taken[open_], there[open_] = leases.take(keys, self._note)
            mine: Positions = self.others[taken]
            self.appeared = np.union1d(self.appeared, self.others[there])
            leases.waited += int(there.sum())
            leases.taken_over += len(mine)
            self.others = self.others[~taken & ~there]
            if len(mine):
                return mine
            if len(self.others):
                time.sleep(pause)
                pause = min(2 * pause, leases.longest_pause)
        return _NOWHERE

    def release(self) -> None:  # noqa: D102
        if self._lease is not None:
            self._leases.end([self._lease])
            self._lease = None

    def _note(self, lease: Lease) -> None:
        self._lease = lease


def _failed(reply: Any) -> bool:
    return reply is LOST or isinstance(reply, Exception)


def _words(names: Iterable[bytes]) -> Words:
    """The words of the keys that names end with."""
    words: Words = np.frombuffer(b"".join(name[-16:] for name in names), "<u8").reshape(-1, 2)
    return words
