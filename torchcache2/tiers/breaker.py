"""`Breaker`: a tier that meets a fault warns once, pauses, and then tries again."""

from __future__ import annotations

import time
from collections import Counter

from torchcache2.core.logs import ToldOnce

_LONGEST_PAUSE = 60.0  # seconds


class Breaker:
    """Counts the faults of a tier, and says when to try again.

    One part of a tier, such as a namespace whose folder another user owns, may fail while the others work.
    Bytes name a part; None stands for the whole tier.

    Attributes
    ----------
    faults : int
        System calls that failed.
    tell : ToldOnce
        Warns once for each kind of fault.
    shortest : float
        The first pause in seconds; each further one is twice as long, up to a minute.
    """

    def __init__(self, tell: ToldOnce | None = None, shortest: float = 2.0) -> None:
        self.faults = 0
        self.tell = ToldOnce() if tell is None else tell
        self.shortest = shortest
        self._failures: Counter[bytes | None] = Counter()  # in a row, without a success
        self._paused_until: dict[bytes | None, float] = {}

    def is_failing(self, part: bytes) -> bool:
        """Whether the last try of a part has failed."""
        return self._failures[part] > 0

    def allows(self, part: bytes) -> bool:
        """Whether a part may be tried now."""
        return self.pause_of(part) <= 0.0

    def pause_of(self, part: bytes) -> float:
        """Seconds until a part may be tried; 0 or less: now."""
        until = max(self._paused_until.get(None, 0.0), self._paused_until.get(part, 0.0))
        return until - time.monotonic()

    def failed(self, part: bytes | None, *, is_lasting: bool) -> None:
        """Count a failed try: further tries have to wait, longer and longer.

        After the first failure there is no wait, unless its reason `is_lasting`.
        """
        self._failures[part] += 1
        if self._failures[part] > 1 or is_lasting:
            # Larger exponents would overflow.
            self.pause(part, self.shortest * 2.0 ** min(self._failures[part] - 1, 10))

    def pause(self, part: bytes | None = None, seconds: float = _LONGEST_PAUSE) -> None:
        """Allow no tries for some seconds, at most a minute."""
        self._paused_until[part] = time.monotonic() + min(_LONGEST_PAUSE, seconds)

    def worked(self, part: bytes) -> None:
        """Count a try that has succeeded."""
        self._failures.pop(part, None)
        self._failures.pop(None, None)
