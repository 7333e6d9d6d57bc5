"""`Progress` of a warmup: counts its items, and shows progress and cost."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from torchcache2.core.logs import logger
from torchcache2.engine.estimate import Sizes, each, estimated
from torchcache2.engine.stack import TierStack

ADVICE = "Items that do not fit are computed at each call: raise the budgets, or set cache_dtype"
OPTION = "max_persistent_cache_size"
_SHOWN_EVERY, _LOGGED_EVERY = 0.2, 30.0  # seconds, on a terminal and in a file


@dataclasses.dataclass(frozen=True)
class WarmupStats:
    """The result of a warmup on this rank.

    Attributes
    ----------
    computed : int
        Items that were missing.
    found : int
        Items that were found, or appeared before in this warmup.
    seconds : float
        Duration.
    bytes : int
        Bytes of the rows of all these items, in memory.
    """

    __module__ = "torchcache2"

    computed: int
    found: int
    seconds: float
    bytes: int


class Progress:
    """Counts the items of a warmup by the counters of its cache, which count `hits` and `misses`.

    There are `total` items, `items` of them on this rank; None: unknown. If it `is_shown`, it shows a bar, if
    tqdm is installed, and prints a line of cost when that is known, which ends in `advice` if the tiers are
    too small.
    """

    def __init__(
        self,
        name: str,
        counters: Any,
        tiers: TierStack,
        items: int | None,
        total: int | None,
        *,
        is_shown: bool,
        advice: str = ADVICE,
        option: str = OPTION,
    ) -> None:
        self.batches = 0
        self.items = 0
        self._name, self._counters, self._tiers = name, counters, tiers
        self._mine, self._total = items, total
        self._is_shown, self._hints = is_shown, {"advice": advice, "option": option}
        self._before = counters.hits, counters.misses
        self._start = time.perf_counter()
        self._last = self._start
        self._sizes: Sizes = 0, None  # of a row
        self._rate = 0.0
        self._bar: Any = None
        if is_shown:
            with contextlib.suppress(ImportError):
                tqdm = importlib.import_module("tqdm").tqdm
                quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # without a thread
                every = _SHOWN_EVERY if sys.stderr.isatty() else _LOGGED_EVERY
                self._bar = quiet(total=items, desc=name, unit=" items", mininterval=every)

    def update(self, sizes: Callable[[], Sizes]) -> None:
        """Count a finished batch; `sizes()` are its rows' bytes in memory and, if known, in a file."""
        before, (found, computed) = self.items, self._done()
        self.items = found + computed
        self.batches += 1
        if before == 0 < self.items:
            self._sizes = each(sizes(), self.items)
        now = time.perf_counter()
        # The first batch also starts workers, reads weights and probes, so the second one gives the rate.
        if before > 0 == self._rate:
            self._say_cost((self.items - before) / (now - self._last))
        self._last = now
        if self._bar is not None:
            self._bar.update(self.items - before)

    def close(self) -> None:
        """Stop showing progress."""
        if self.items > 0 == self._rate:
            self._say_cost(self.items / (self._last - self._start))
        if self._bar is not None:
            self._bar.close()

    def stats(self) -> WarmupStats:
        """The results so far."""
        found, computed = self._done()
        return WarmupStats(computed, found, time.perf_counter() - self._start, self.items * self._sizes[0])

    def _done(self) -> tuple[int, int]:
        return self._counters.hits - self._before[0], self._counters.misses - self._before[1]

    def _say_cost(self, rate: float) -> None:
        self._rate = rate
        cost = estimated(self._tiers, self._mine, self._total, self._sizes, rate, **self._hints)
        if self._is_shown and cost.lacks_disk:
            logger.warning("%s: %s", self._name, cost)
            return
        line = f"{self._name}: {cost}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._is_shown:
            print(f"{line}\n", end="", file=sys.stderr)  # one write, as a thread may log in between
