"""Warmups of models and of datasets: what all items cost, and progress until they are there.

An `Estimate` and `Progress` look at the first batches (`Looks`): how long their items take, and how many
bytes their rows have. Models and datasets make the batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import UnserialisableError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import logger
from torchcache2.core.memory import to_host
from torchcache2.core.process import ranks_here
from torchcache2.core.rows import Rows, Schema
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import free_disk, parse_size, size_text
from torchcache2.core.values import leaves_of
from torchcache2.engine.stack import TierStack
from torchcache2.engine.values.outputs import Lists, rows_of, stored
from torchcache2.engine.values.samples import Samples
from torchcache2.files.codec import codec
from torchcache2.files.segment import Batch, encode

_INDEX_BYTES = 43  # of memory per row, besides the row
_KEY_BYTES = 24  # of a segment per row, for key and checksum
_COMPRESSED = 16 << 20  # bytes of rows to compress as a sample
_LOOKS = 2  # batches of a warmup that tell its cost
_MARGIN = 1.1  # other items may be larger, or compress less
_HOST = torch.device("cpu")

_SHOWN_EVERY, _LOGGED_EVERY = 0.2, 30.0  # seconds, on a terminal and in a file
ADVICE = "Items that do not fit are computed at each call: raise the budgets, or set cache_dtype"
OPTION = "max_persistent_cache_size"

Sizes = tuple[int, int | None]  # bytes of rows in memory, and in files (None: unknown)


class Need(NamedTuple):
    """The bytes of all rows in a tier.

    Attributes
    ----------
    tier : str
        ``memory``, ``disk``, ``remote`` (servers) or ``bucket``.
    bytes : int
        As compressed there, if known; in memory, including the index.
    budget : int or None
        Most bytes of the tier; None: no limit, or only the server knows it.
    """

    tier: str
    bytes: int
    budget: int | None

    @property
    def share(self) -> float:
        """The share of the rows that fits."""
        return math.inf if self.budget is None else self.budget / max(1, self.bytes)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of caching all items of some data; printing it explains it.

    Attributes
    ----------
    items : int or None
        How many items there are, for all ranks; None: unknown, and then most other fields are, too.
    row_bytes : int
        Bytes of one row in memory.
    stored_bytes : int or None
        Bytes of one row in a file, with the chosen compression; None: unknown.
    seconds : float or None
        Time for the items of this rank, at the pace of these batches.
    memory_bytes, disk_bytes : int or None
        Bytes of all rows in memory; and in the folder, on servers or in the bucket. None also if not kept
        there.
    fits : bool or None
        Whether all rows fit: in one tier, or in all together if each row is in one tier only.
    fits_memory, fits_disk : bool or None
        Whether all rows fit into memory, and into the tier that outlives the process, if there is one.
    disk_free : int or None
        Bytes free on the disk of the folder.
    lacks_disk : bool
        Whether that is less than what will be written there.
    """

    __module__ = "torchcache2"

    items: int | None
    row_bytes: int
    stored_bytes: int | None
    seconds: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    fits: bool | None = None
    fits_memory: bool | None = None
    fits_disk: bool | None = None
    disk_free: int | None = None
    lacks_disk: bool = False
    text: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        return self.text


def estimated(
    tiers: TierStack,
    mine: int | None,
    total: int | None,
    sizes: Sizes,
    rate: float,
    *,
    advice: str,
    option: str,
) -> Estimate:
    """The estimate for `total` items, `mine` of them on this rank, at `rate` items a second.

    `sizes` are the bytes of a row in memory and in a file. `advice` is shown if items do not fit; `option`
    names the option that gives the disk more room.
    """
    row, packed = sizes
    if packed is None and tiers.settings.compression == "none":
        packed = row + _KEY_BYTES
    on_disk = ""
    if packed is not None and any(tier.is_lasting for tier in tiers.tiers):
        on_disk = f", {size_text(packed)} on disk"
    each = f"{size_text(row)} an item{on_disk}, {rate:,.0f} items/s"
    if mine is None or total is None:
        return Estimate(None, row, packed, text=f"{each}; the number of items is unknown")
    needs = []
    for tier in tiers.tiers:
        # All ranks together fill a folder; the ranks of one machine fill the memory that they share.
        count = total if tier.is_lasting else min(total, mine * ranks_here() if tier.is_shared else mine)
        size = row + _INDEX_BYTES if not tier.is_lasting else row if packed is None else packed
        name, budget = tier.name, getattr(tier, "budget", None)
        if tier.is_lasting and tiers.settings.bucket is not None:  # its local folder may hold only some rows
            most = tiers.settings.bucket.remote_size
            name, budget = "bucket", None if most is None else parse_size("remote_size", most)
        needs.append(Need(name, count * size, budget))
    shares = [need.share for need in needs]
    fits = (sum(shares) if tiers.fills_up else max(shares)) >= 1
    kept = next((need for need in needs if need.tier in ("disk", "bucket") and need.budget), None)
    disk = kept if kept is not None and kept.tier == "disk" else None
    notes = []
    if not fits:
        notes.append(advice)
    elif shares[0] < 1:
        place = tiers.settings
        where = "servers" if place.servers is not None else "bucket" if place.bucket is not None else "disk"
        notes.append(f"What does not fit in memory is read from the {where}")
    elif shares[-1] < 1:
        notes.append("Later runs find only what fits on disk")
    if kept is not None and kept.share < 1 and not (fits and tiers.fills_up):
        name = "remote_size" if disk is None else option
        notes[-1] += f"; {name}='{size_text(kept.bytes * _MARGIN)}' has room for all"
    directory, free, lacks_disk = tiers.directory, None, False
    if disk is not None and directory is not None:
        free = free_disk(directory.path)
        used = next(tier.stats().bytes for tier in tiers.tiers if tier.directory is directory)
        if free is not None and min(disk.bytes, disk.budget or 0) - used > free:
            lacks_disk = True
            notes.append(f"The disk of {directory.path} has only {size_text(free)} free")
    seconds, lines = mine / rate, []
    for need in needs:
        most = "up to " if need.tier != "memory" and packed is None else ""
        room = "" if need.budget is None else f" (room for {size_text(need.budget)})"
        lines.append(f"{need.tier} {most}{size_text(need.bytes)}{room}")
    counts = f"{total:,} items" + (f", {mine:,} on this rank" if mine < total else "")
    left = str(datetime.timedelta(seconds=math.ceil(seconds)))
    text = ". ".join([f"{counts}: {', '.join(lines)}; about {left} ({each})", *notes])
    memory = needs[0] if needs[0].tier == "memory" else None
    lasting = needs[-1] if needs[-1].tier != "memory" else None
    return Estimate(
        items=total,
        row_bytes=row,
        stored_bytes=packed,
        seconds=seconds,
        memory_bytes=None if memory is None else memory.bytes,
        disk_bytes=None if lasting is None else lasting.bytes,
        fits=fits,
        fits_memory=None if memory is None else memory.share >= 1,
        fits_disk=None if lasting is None else lasting.share >= 1,
        disk_free=free,
        lacks_disk=lacks_disk,
        text=text,
    )


class Looks:
    """The first batches: how many items, how many seconds, and the bytes of their rows."""

    def __init__(self) -> None:
        self._seen = list[tuple[int, float]]()
        self._row_bytes = 0
        self._packed: int | None = 0

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def items(self) -> int:
        """Items of all batches."""
        return sum(count for count, _ in self._seen)

    @property
    def sizes(self) -> Sizes:
        """Bytes of one row; 0 before the first."""
        count, packed = max(1, self.items), self._packed
        return self._row_bytes // count, None if packed is None else -(-packed // count)

    def add(self, count: int, seconds: float, sizes: Sizes) -> None:
        """Count a batch, whose rows have these bytes."""
        self._seen.append((count, seconds))
        self._row_bytes += sizes[0]
        self._packed = None if self._packed is None or sizes[1] is None else self._packed + sizes[1]

    def estimate(self, tiers: TierStack, mine: int | None, total: int | None, **hints: str) -> Estimate:
        """See `estimated`. The first batch also starts workers and compiles, so its time does not count."""
        counted = [look for look in self._seen[1:] if look[0]] or self._seen
        rate = sum(count for count, _ in counted) / sum(seconds for _, seconds in counted)
        return estimated(tiers, mine, total, self.sizes, rate, **hints)


def output_sizes(output: Any, count: int, settings: CacheSettings) -> Sizes:
    """Bytes of the rows of an output for `count` items in memory, and in files (None: unknown).

    Raises `OutputError` or `UnstorableError` if it cannot be stored.
    """
    known = dict[str, bool]()
    lists = Lists(Samples(), known)
    known.update(dict.fromkeys(lists.unsettled(output, count), True))  # most likely one entry per item
    tensors = [leaf for leaf in leaves_of(output, objects=True) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else _HOST
    rows = rows_of(output, count, lists, device=device, dtype=settings.cache_dtype)
    return row_sizes([part for _, part in stored(rows)], settings)


def row_sizes(parts: Sequence[Rows], settings: CacheSettings) -> Sizes:
    """Bytes of rows in memory, and in files (None: unknown), estimated from compressing the first of them."""
    total = sum(len(rows) * rows.schema.row_bytes for rows in parts)
    segments: dict[Schema, list[Batch]] = {}
    taken = 0
    for rows in parts:
        count = min(len(rows), max(1, (_COMPRESSED - taken) // max(1, rows.schema.row_bytes)))
        if taken >= _COMPRESSED or count == 0:
            continue
        some = rows.head(count)
        some = Rows(some.schema, to_host(some.columns), count)
        taken += count * some.schema.row_bytes
        keys = Keys(bytes(16), np.zeros((count, 16), np.uint8))
        segments.setdefault(some.schema.family, []).append((keys, some))
    try:
        made = codec(settings.compression, settings.compression_quality)
        size = 0
        for batches in segments.values():
            found = encode(batches, made)
            # The header does not count: a real segment has far more rows to share it.
            size += found.layout.row_data_bytes + sum(array.nbytes for array in found.index.values())
    except UnserialisableError:  # they stay in memory
        return total, None
    return total, math.ceil(size * total / taken) if taken else None


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
        self.batches = self.items = 0
        self._name, self._counters, self._tiers = name, counters, tiers
        self._mine, self._total = items, total
        self._is_shown, self._hints = is_shown, {"advice": advice, "option": option}
        self._before = counters.hits, counters.misses
        self._start = self._last = time.perf_counter()
        self._looks = Looks()
        self._bar: Any = None
        if is_shown:
            with contextlib.suppress(ImportError):
                tqdm = importlib.import_module("tqdm").tqdm
                quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # without a thread
                every = _SHOWN_EVERY if sys.stderr.isatty() else _LOGGED_EVERY
                self._bar = quiet(total=items, desc=name, unit=" items", mininterval=every)

    def update(self, sizes: Callable[[], Sizes]) -> None:
        """Count a finished batch; `sizes()` are its rows' bytes in memory and, if known, in a file."""
        count = sum(self._done()) - self.items
        self.batches += 1
        self.items += count
        seconds = time.perf_counter() - self._last
        if count and len(self._looks) < _LOOKS:
            self._looks.add(count, seconds, sizes())
            if len(self._looks) == _LOOKS:
                self._say_cost()
        self._last = time.perf_counter()
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Stop showing progress."""
        if 0 < len(self._looks) < _LOOKS:
            self._say_cost()
        if self._bar is not None:
            self._bar.close()

    def stats(self) -> WarmupStats:
        """The results so far."""
        found, computed = self._done()
        seconds = time.perf_counter() - self._start
        return WarmupStats(computed, found, seconds, self.items * self._looks.sizes[0])

    def _done(self) -> tuple[int, int]:
        return self._counters.hits - self._before[0], self._counters.misses - self._before[1]

    def _say_cost(self) -> None:
        cost = self._looks.estimate(self._tiers, self._mine, self._total, **self._hints)
        if self._is_shown and cost.lacks_disk:
            logger.warning("%s: %s", self._name, cost)
            return
        line = f"{self._name}: {cost}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._is_shown:
            print(f"{line}\n", end="", file=sys.stderr)  # one write, as a thread may log in between
