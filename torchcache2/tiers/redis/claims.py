"""Claims on servers: "this call computes these keys now", for all processes that use the same servers.

A claim is a name on its row's server, which only the first process can set. It expires after far longer than
a computation takes, so that no process waits forever for a killed one. A holder that was stopped for longer
sees by its own clock that its claim has expired, and leaves its successor's alone. If a server fails, calls
compute its keys without a claim. In the worst case, a row is computed twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.tiers.base import Tally, TierClaim
from torchcache2.tiers.redis.client import Clients, failed
from torchcache2.tiers.redis.record import claim_names, row_names

_PROCESS = os.urandom(16)  # shared by forked children, but their thread ids differ


class _Held(NamedTuple):
    """Keys claimed together: by whom, when, and until when the claim is safe."""

    keys: Keys
    namespace: bytes
    pid: int
    thread: int
    since: float
    until: float


def _at_once(keys: Keys, function: Callable[[Keys], None]) -> None:
    function(keys)


class RedisClaims:
    """The claims of one tier in one process.

    Parameters
    ----------
    clients : Clients
    once_sent : callable, optional
        ``once_sent(keys, function)`` calls a function with keys whose rows are not queued to be sent, or no
        longer; there may be several calls, each with some of the keys. Claims of unsent rows end so.
    """

    least = 60.0  # seconds that a claim lasts, or 10 times the longest computation so far
    most = 600.0  # seconds to wait for a claim: another program may have set its name forever

    def __init__(
        self,
        clients: Clients,
        once_sent: Callable[[Keys, Callable[[Keys], None]], None] = _at_once,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clients, self.clock = clients, clock
        self.tally = Tally()
        self.thread: Callable[[], int] = threading.get_native_id
        self._once_sent = once_sent
        self._held: dict[int, _Held] = {}  # by identity
        self._left: deque[_Held] = deque()  # claims to give up at the next call
        self._longest = 0.0  # seconds from a claim to the rows

    @property
    def seconds(self) -> float:
        """How long a claim lasts from now on."""
        return max(self.least, 10 * self._longest)

    def of(self, keys: Keys) -> RedisClaim | None:
        """A claim on keys; None if this thread holds claims of the namespace: then it computes all.

        Else it might wait for processes that wait for its other claims.
        """
        self._give_up()
        who, now = (keys.namespace, os.getpid(), self.thread()), self.clock()
        is_holding = any(held[1:4] == who and now < held.until for held in list(self._held.values()))
        return None if is_holding or not len(keys) else RedisClaim(keys, self)

    def token(self) -> bytes:
        """The value of this thread's claims, in all tiers of its process."""
        return _PROCESS + self.thread().to_bytes(8, "little")

    def note(self, keys: Keys, since: float, seconds: float) -> _Held:
        """Record claimed keys."""
        # Expires earlier here than on the server, as commands take time.
        until = since + 0.95 * seconds
        held = _Held(keys, keys.namespace, os.getpid(), self.thread(), since, until)
        self._held[id(held)] = held
        return held

    def leave(self, held: _Held) -> None:
        """Give up claims at the next call, as the garbage collector may call this within another one."""
        self._left.append(held)

    def release(self, held: _Held) -> None:
        """Give up claims; those of unsent rows only once these are on the servers."""
        self._longest = max(self._longest, self.clock() - held.since)
        self.leave(held)
        self._give_up()

    def delete(self, held: _Held, keys: Keys) -> None:
        """Delete some claims if they certainly still belong to this process."""
        if len(keys) and held.pid == os.getpid() and self.clock() < held.until:
            self.clients.run([(b"DEL", name) for name in claim_names(keys)], keys.words)

    def close(self) -> None:
        """Give up everything."""
        self._left.extend(self._held.values())
        self._give_up()

    def _give_up(self) -> None:
        while self._left:
            held = self._left.popleft()
            if self._held.pop(id(held), None) is not None:
                self._once_sent(held.keys, partial(self.delete, held))


class RedisClaim(TierClaim):
    """A claim on servers."""

    pauses = 1e-3, 0.05
    _held: _Held | None = None  # `__del__` needs it even if an interrupt came before `__init__`

    def __init__(self, keys: Keys, claims: RedisClaims) -> None:
        self.tally = claims.tally
        self._keys, self._claims, self._clients = keys, claims, claims.clients
        self._passed = np.zeros(len(keys), bool)  # claimed by others, but not to be waited for
        self._end = float("inf")

    def take(self, positions: Positions) -> Positions:  # noqa: D102
        claims, mine = self._claims, np.ones(len(positions), bool)
        allowed = self._clients.allows_writes(self._keys.words[positions])
        asked = np.flatnonzero(allowed & ~self._passed[positions])
        keys = self._keys.take(positions[asked])
        names, since, seconds = claim_names(keys), claims.clock(), claims.seconds
        lasts = int(seconds * 1000)
        commands = [(b"SET", name, claims.token(), b"NX", b"PX", lasts) for name in names]
        replies = self._clients.run(commands, keys.words)
        mine[asked] = [reply is not None for reply in replies]
        granted = np.array([reply is not None and not failed(reply) for reply in replies], bool)
        if not granted.any():
            return positions[mine]
        granted_keys = keys.take(np.flatnonzero(granted))
        self._held = claims.note(granted_keys, since, seconds)
        # A process writes the row before it deletes its claim: if the row is missing now, no earlier holder
        # of this claim will still write it.
        is_row = self._published(granted_keys)
        claims.delete(self._held, granted_keys.take(np.flatnonzero(is_row)))
        mine[asked[granted][is_row]] = False
        return positions[mine]

    def look(self, positions: Positions) -> tuple[Flags, Flags]:  # noqa: D102
        claims, keys = self._claims, self._keys.take(positions)
        self._end = min(self._end, time.monotonic() + max(claims.most, claims.seconds))
        holders = self._clients.mget(claim_names(keys), keys.words)
        # A thread does not wait for itself: an outer call of this thread is computing these items.
        passed = np.array([holder == claims.token() for holder in holders], bool)
        passed |= time.monotonic() > self._end
        self._passed[positions] |= passed
        is_open = passed | np.array([holder is None for holder in holders], bool)
        is_row = np.zeros(len(keys), bool)
        if is_open.any():
            is_row[is_open] = self._published(keys.take(np.flatnonzero(is_open)))
        return is_row, is_open & ~is_row

    def release(self) -> None:  # noqa: D102
        if self._held is not None:
            self._claims.release(self._held)
            self._held = None

    def __del__(self) -> None:
        if self._held is not None:
            self._claims.leave(self._held)

    def _published(self, keys: Keys) -> Flags:
        """Whether each key has a row on its server."""
        return self._clients.exist(row_names(keys), keys.words)
