"""`Lease`: claims on servers that one thread has taken together, and until when."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Set

Abandoned = deque[tuple[Set[bytes], float, int]]  # what leases held: names, until when, in which process


class Lease:
    """Claims of rows that were taken together, by one thread.

    If nothing refers to it any more, it is not renewed, and its claims are deleted at the next beat.

    Attributes
    ----------
    names : set of bytes
        The claims that it holds.
    token : bytes
        Their value; it begins with what `Leases.own_tokens` returns.
    namespace : bytes
    thread : int
        Who computes the rows; 0 if they wait to be written.
    since, until, renewed : float
        When the claims were taken, run out, and are to be renewed, by the clock of this process.
    pid : int
        The process; a forked child has a copy that means nothing.
    """

    names: Set[bytes] = frozenset()  # `__del__` needs it even if an interrupt came before `__init__`

    def __init__(self, token: bytes, namespace: bytes, thread: int, abandoned: Abandoned) -> None:
        self.token, self.namespace, self.thread = token, namespace, thread
        self.since = self.until = self.renewed = 0.0
        self.pid = os.getpid()
        self._abandoned = abandoned

    def lasts(self, now: float, seconds: float, *, is_renewed: bool = True) -> None:
        """Note until when it was taken or renewed; or, if that has failed, only when to try it again."""
        self.renewed = now + seconds / 3
        if is_renewed:
            # It ends a bit earlier by this clock than on the server, as commands take their time there.
            self.until = now + 0.95 * seconds

    def part(self, names: Set[bytes]) -> Lease:
        """A lease that holds some of the claims from now on, for rows that wait to be written."""
        part = Lease(self.token, self.namespace, 0, self._abandoned)
        part.since, part.until, part.renewed = self.since, self.until, self.renewed
        part.names = names
        self.names -= names
        return part

    def __del__(self) -> None:
        # The garbage collector may call this within a call of a server, so it makes none.
        if self.names:
            self._abandoned.append((self.names, self.until, self.pid))
