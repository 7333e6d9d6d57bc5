"""Which rank is it that has ended, or does not come? The ranks tell each other by way of the store.

The store is the one over which the ranks of the process group have found each other. For a channel it holds::

    count        how many ranks have come to its first round
    here/RANK    one that has come
    failed/RANK  one that cannot go on, and the ranks whose connections it has found closed (JSON)
    verdict      the first rank to know which ones are missing writes it, and all others take it (JSON)

A rank writes ``failed`` before it closes its own connections, so whoever is closed and has not failed has
ended.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Roll", "Verdict"]

_PATIENCE = 1.5  # seconds until those that have not failed count as missing; ranks that wait notice in 0.5 s
_STORE = 2.0  # seconds until a store that does not answer is given up
_PAUSE = 0.001, 0.05  # seconds between two looks at the store: the first one, and the longest


class Verdict(NamedTuple):
    """Why the ranks of a channel cannot go on."""

    text: str
    ranks: tuple[int, ...] = ()  # whose fault that is, if it is known


class Roll:
    """What a rank finds out about the others.

    Parameters
    ----------
    store : torch.distributed.Store
        For this channel only.
    ranks : sequence of int
        The numbers that the ranks of the group have among all ranks, for messages.
    rank : int
        Which rank of the group this is.
    timeout : timedelta
        How long the group waits for a rank.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._timeout = timeout.total_seconds()
        self._is_deaf = False

    def meet(self) -> Verdict | None:
        """Wait until all ranks have come; None if they have."""
        self._store.set(f"here/{self._rank}", b"1")
        came = self._store.add("count", 1)
        end, pause = time.monotonic() + self._timeout, _PAUSE[0]
        while not self._store.check(["verdict"]):
            if came >= len(self._ranks):
                return None
            if time.monotonic() > end and (missing := self._without("here")):
                return self._settled(self._not_come(missing))
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE[1])
            came = self._store.add("count", 0)
        return self._settled(Verdict(""))

    def fail(self, text: str) -> None:
        """Let all know why this rank cannot go on."""
        self._asked(lambda: self._settled(Verdict(text, (self._rank,))))

    def failed(self, closed: Sequence[int]) -> None:
        """Let the others know that this rank cannot go on, before it closes its connections."""
        self._asked(lambda: self._store.set(f"failed/{self._rank}", json.dumps(closed)))

    def verdict(self, closed: Sequence[int], error: str) -> Verdict:
        """Why this channel cannot go on; `closed` are the ranks to which the connections are closed."""
        verdict: Verdict | None = self._asked(lambda: self._settled(self._found(error)), _PATIENCE + _STORE)
        if verdict is not None:
            return verdict
        # The store does not answer. Most often the rank that held it has ended, which is rank 0 of all ranks.
        gone = [rank for rank in closed if self._ranks[rank] == 0] or closed
        if gone:
            return self._ended(gone)
        return Verdict(
            f"the exchange between the ranks has failed: {error}; nor does the store of torch.distributed "
            "answer, which most often is in rank 0 of all"
        )

    def _found(self, error: str) -> Verdict:
        end, pause = time.monotonic() + _PATIENCE, _PAUSE[0]
        while not self._store.check(["verdict"]):
            silent = self._without("failed")
            spoken = [rank for rank in range(len(self._ranks)) if rank not in silent]
            closed = {rank for of in spoken for rank in json.loads(self._store.get(f"failed/{of}"))}
            if ended := [rank for rank in silent if rank in closed]:
                return self._ended(ended)
            if not silent:
                return Verdict(f"the ranks are out of step, or have lost their connection: {error}")
            if time.monotonic() > end:
                return self._not_come(silent)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE[1])
        return Verdict("")

    def _settled(self, verdict: Verdict) -> Verdict:
        """The verdict of the first rank that has one."""
        written = self._store.compare_set("verdict", "", json.dumps(verdict))
        text, ranks = json.loads(written)
        return Verdict(text, tuple(ranks))

    def _without(self, mark: str) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if not self._store.check([f"{mark}/{rank}"])]

    def _ended(self, ranks: Sequence[int]) -> Verdict:
        which = self._named(ranks)
        return Verdict(f"{which} ended, so the others cannot go on: see what it printed last", tuple(ranks))

    def _not_come(self, ranks: Sequence[int]) -> Verdict:
        return Verdict(
            f"{self._named(ranks)} not come to this call within {self._timeout:g} s, which is the timeout of "
            "the process group: with distributed='collective', all ranks have to make the same calls; see "
            "cache.join() and cache.alone()",
            tuple(ranks),
        )

    def _named(self, ranks: Sequence[int]) -> str:
        names = [
            str(rank) if self._ranks[rank] == rank else f"{rank} of the group ({self._ranks[rank]} of all)"
            for rank in ranks
        ]
        return f"rank {names[0]} has" if len(names) == 1 else f"ranks {', '.join(names)} have"

    def _asked(self, question: Any, seconds: float = _STORE) -> Any:
        """The answer of the store; None if it has failed, or does not answer."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                answers.append(question())

        if not self._is_deaf:
            thread = threading.Thread(target=ask, daemon=True, name="torchcache2-absent")
            thread.start()
            thread.join(seconds)
            self._is_deaf = not answers
        return answers[0] if answers else None
