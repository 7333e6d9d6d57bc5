"""`Breaker`: a tier leaves what fails alone for a while, tries it again, and tells of it once."""

from __future__ import annotations

import time
from collections import Counter

from torchcache2.core.logs import ToldOnce

__all__ = ["Breaker"]

_LONGEST_PAUSE = 60.0  # seconds


class Breaker:
    """Counts what fails in a tier, and pauses between tries.

    Parts of a tier may fail apart from each other, such as namespaces that other users have made. A part is
    named by bytes; None is the whole tier.

    Attributes
    ----------
    faults : int
        Calls of the system that failed.
    tell : ToldOnce
        Warns, the first time for each kind of fault.
    """

    def __init__(self) -> None:
        self.faults = 0
        self.tell = ToldOnce()
        self._failures: Counter[bytes | None] = Counter()  # without a success in between
        self._paused_until: dict[bytes | None, float] = {}

    def allows(self, part: bytes) -> bool:
        """Whether something may be tried now that concerns a part."""
        until = max(self._paused_until.get(None, 0.0), self._paused_until.get(part, 0.0))
        return time.monotonic() >= until

    def failed(self, part: bytes | None, *, is_lasting: bool) -> None:
        """A try has failed: the next ones come after longer and longer pauses.

        The second try comes at once, unless the reason `is_lasting`.
        """
        self._failures[part] += 1
        if self._failures[part] > 1 or is_lasting:
            self.pause(part, 2.0 ** min(self._failures[part], 10))  # thousands would overflow

    def pause(self, part: bytes | None = None, seconds: float = _LONGEST_PAUSE) -> None:
        """Try nothing for some seconds, at most a minute."""
        self._paused_until[part] = time.monotonic() + min(_LONGEST_PAUSE, seconds)

    def worked(self, part: bytes) -> None:
        """A try that concerns a part has succeeded."""
        self._failures.pop(part, None)
        self._failures.pop(None, None)
