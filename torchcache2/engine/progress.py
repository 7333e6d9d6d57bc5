"""`Progress` of a warmup: counts its items, and shows how far it is and what it will cost."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import math
import sys
import time
from typing import Any

from torchcache2.core.process import ranks_here
from torchcache2.core.sizes import size_text
from torchcache2.engine.stack import TierStack

_INDEX_BYTES = 43  # of memory for each row, besides the row
_SHOWN_EVERY, _LOGGED_EVERY = 0.2, 30.0  # seconds, on a terminal and in a file


@dataclasses.dataclass(frozen=True)
class WarmupStats:
    """What a warmup has done, on this rank.

    Attributes
    ----------
    computed : int
        Items that were not there.
    found : int
        Items that were there, or were there twice in this warmup.
    seconds : float
        That it took.
    bytes : int
        Of the rows of all these items, in memory.
    """

    __module__ = "torchcache2"

    computed: int
    found: int
    seconds: float
    bytes: int


class Progress:
    """Counts the items of a warmup by the counters of its cache, which count `hits` and `misses`.

    There are `total` items, of which `items` are this rank's; None: not known. If it `is_shown`, there is a
    bar, as far as tqdm is installed, and one line of cost when that is known, which ends in `advice` if the
    tiers are too small.
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
        advice: str = "Items that do not fit are computed at each call: raise the budgets, or set "
        "cache_dtype",
    ) -> None:
        self.batches = 0
        self.items = 0
        self._name, self._counters, self._tiers = name, counters, tiers
        self._mine, self._total = items, total
        self._is_shown, self._advice = is_shown, advice
        self._before = counters.hits, counters.misses
        self._start = time.perf_counter()
        self._last = self._start
        self._row_bytes = 0
        self._rate = 0.0
        self._bar: Any = None
        if is_shown:
            with contextlib.suppress(ImportError):
                tqdm = importlib.import_module("tqdm").tqdm
                quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # without a thread
                every = _SHOWN_EVERY if sys.stderr.isatty() else _LOGGED_EVERY
                self._bar = quiet(total=items, desc=name, unit=" items", mininterval=every)

    def update(self, nbytes: int) -> None:
        """A batch is done; the rows of the first one are of so many bytes."""
        before, (found, computed) = self.items, self._done()
        self.items = found + computed
        self.batches += 1
        if before == 0 < self.items:
            self._row_bytes = nbytes // self.items
        now = time.perf_counter()
        # The first batch also starts workers, reads the weights and probes, so the next one tells the rate.
        if before > 0 == self._rate:
            self._say_cost((self.items - before) / (now - self._last))
        self._last = now
        if self._bar is not None:
            self._bar.update(self.items - before)

    def close(self) -> None:
        """Show no more."""
        if self.items > 0 == self._rate:
            self._say_cost(self.items / (self._last - self._start))
        if self._bar is not None:
            self._bar.close()

    def stats(self) -> WarmupStats:
        """What was done until now."""
        found, computed = self._done()
        return WarmupStats(computed, found, time.perf_counter() - self._start, self.items * self._row_bytes)

    def _done(self) -> tuple[int, int]:
        return self._counters.hits - self._before[0], self._counters.misses - self._before[1]

    def _say_cost(self, rate: float) -> None:
        self._rate = rate
        line = f"{self._name}: {self._cost(rate)}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._is_shown:
            print(f"{line}\n", end="", file=sys.stderr)  # at once, or a thread may log between the two

    def _cost(self, rate: float) -> str:
        """What all items will take, as far as it is known by now."""
        each = f"{size_text(self._row_bytes)} an item, {rate:,.0f} items/s"
        mine, total = self._mine, self._total
        if mine is None or total is None:
            return f"{each}; the number of items is unknown"
        lines, shares = [], []
        for tier in self._tiers.tiers:
            # All ranks fill a folder together, those of a machine the memory that they share.
            count = total if tier.is_lasting else min(total, mine * ranks_here() if tier.is_shared else mine)
            need = count * (self._row_bytes + (0 if tier.is_lasting else _INDEX_BYTES))
            budget = getattr(tier, "budget", math.inf)
            shares.append(budget / max(1, need))
            room = "" if budget == math.inf else f" of {size_text(budget)}"  # a server knows its own
            most = "up to " if tier.is_lasting else ""  # rows are compressed, nobody knows yet how well
            lines.append(f"{tier.name} {most}{size_text(need)}{room}")
        left = str(datetime.timedelta(seconds=math.ceil(mine / rate)))
        counts = f"{total:,} items" + (f", {mine:,} on this rank" if mine < total else "")
        text = f"{counts}: {', '.join(lines)}; about {left} ({each})"
        if (sum(shares) if self._tiers.fills_up else max(shares)) < 1:
            text += f". {self._advice}"
        elif shares[0] < 1:
            place = self._tiers.settings
            where = (
                "servers" if place.servers is not None else "bucket" if place.bucket is not None else "disk"
            )
            text += f". What does not fit in memory is read from the {where}"
        return text
