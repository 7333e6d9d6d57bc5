"""`CacheStats`: statistics of a cache, and `Counters`, which collect them."""

from __future__ import annotations

import dataclasses
import html
from collections import deque
from collections.abc import Mapping
from statistics import median_low

from torchcache2.core.process import ProcessLock
from torchcache2.core.sizes import size_text

_UNKNOWN = "not known: no miss was timed"
# Counts of one cache; the others are of tiers, which several caches may share.
ADDED_UP = ("hits", "misses", "verified", "mismatched", "unchecked", "seconds_computed", "seconds_checking")


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache since it was made; all counts are items.

    Attributes
    ----------
    hits : int
        Items that were found. An item that equals another one of its batch counts as found.
    misses : int
        Items that were computed and offered to the cache.
    waited : int
        Hits that another rank computed while this one waited; of all caches that share the budget.
    taken_over : int
        Items that this rank computed because the rank that had claimed them ended or failed.
    bypasses : mapping of str to int
        Items that were computed and not stored, by reason.
    evictions : int
        Rows forgotten to make room, in all caches that share the budget.
    memory_rows : int
        Rows in the memory tier, of all caches that share the budget.
    memory_bytes : int
        Bytes that the memory tier has allocated.
    disk_rows : int
        Rows on disk, in the bucket below, or waiting to be written, in the namespaces used so far by caches
        that share the budget; without those that wait because the disk is full or fails.
    disk_bytes : int
        Bytes of the whole cache directory; 0 before the first rows are written there.
    disk_evictions : int
        Rows deleted from the directory to make room.
    remote_rows : int
        Rows on Redis servers, from all programs.
    remote_bytes : int
        Bytes of memory that the servers use.
    remote_evictions : int
        Rows that the servers have forgotten to make room.
    bytes_up, bytes_down : int
        Bytes that this process has uploaded to and downloaded from a bucket.
    corrupt : int
        Damaged rows and files. The files are set aside, and the items are computed again.
    faults : int
        Failed calls: of the operating system for the cache directory, of servers, and of a bucket.
    verified : int
        Hits that were computed again, by the options `probe` and `verify`.
    mismatched : int
        Verified hits that differed.
    unchecked : int
        Hits that were due to be computed again, where the forward could not run: its weights are not loaded,
        it communicates with other processes, or it raised an error.
    seconds_computed : float
        Time spent in the plain forward, without bypasses.
    seconds_checking : float
        Time spent by `probe` on computing found items again, and parts of batches by themselves.
    seconds_saved : float or None
        An estimate: hits times the time of a miss, minus the time that the cache itself took. The time of a
        miss is the median over the last computed batches of that size, or larger: an item of a small batch
        takes longer. The first computed batch does not count, as it may have compiled.
        Negative if caching costs more than it saves. None if there were hits but no misses to tell their
        cost, as in a second run that finds everything.
    """

    __module__ = "torchcache2"

    hits: int = 0
    misses: int = 0
    waited: int = 0
    taken_over: int = 0
    bypasses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    evictions: int = 0
    memory_rows: int = 0
    memory_bytes: int = 0
    disk_rows: int = 0
    disk_bytes: int = 0
    disk_evictions: int = 0
    remote_rows: int = 0
    remote_bytes: int = 0
    remote_evictions: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    corrupt: int = 0
    faults: int = 0
    verified: int = 0
    mismatched: int = 0
    unchecked: int = 0
    seconds_computed: float = 0.0
    seconds_checking: float = 0.0
    seconds_saved: float | None = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of all items that were found; 0.0 if there were no items."""
        asked = self.hits + self.misses + sum(self.bypasses.values())
        return self.hits / asked if asked else 0.0

    def _lines(self) -> list[tuple[str, str]]:
        """Names and texts of the lines; unused tiers have none."""
        bypasses = ", ".join(f"{reason} {count:,}" for reason, count in self.bypasses.items())
        on_disk = f"{size_text(self.disk_bytes)} in the directory" if self.disk_bytes else "not written yet"
        evicted = f", {self.remote_evictions:,} evicted" if self.remote_evictions else ""
        waited = f"{self.waited:,} rows that other ranks computed; {self.taken_over:,} were taken over"
        remote = f"{self.remote_rows:,} rows, {size_text(self.remote_bytes)}{evicted}"
        sent = f"{size_text(self.bytes_up)} to the bucket, {size_text(self.bytes_down)} from there"
        faults = f"{self.faults:,} of disk, server or bucket, and {self.corrupt:,} damaged rows or files"
        saved = _UNKNOWN if self.seconds_saved is None else f"{self.seconds_saved:.2f} s (estimated)"
        lines: list[tuple[str, str, object]] = [
            ("hits", f"{self.hits:,} ({self.hit_rate:.1%})", True),
            ("misses", f"{self.misses:,}", True),
            ("bypasses", bypasses or "0", True),
            ("evictions", f"{self.evictions:,}", True),
            ("memory", f"{self.memory_rows:,} rows, {size_text(self.memory_bytes)}", True),
            ("waited", waited, self.waited or self.taken_over),
            ("disk", f"{self.disk_rows:,} rows, {on_disk}", self.disk_rows or self.disk_bytes),
            ("deleted", f"{self.disk_evictions:,} rows on disk, to make room", self.disk_evictions),
            ("remote", remote, self.remote_rows or self.remote_bytes),
            ("sent", sent, self.bytes_up or self.bytes_down),
            ("faults", faults, self.corrupt or self.faults),
            ("computed", f"{self.seconds_computed:.2f} s", True),
            ("saved", saved, True),
            ("checking", f"{self.seconds_checking:.2f} s", self.seconds_checking),
            ("verified", f"{self.verified:,}, of which {self.mismatched:,} differed", self.verified),
            ("unchecked", f"{self.unchecked:,} hits, as the forward could not run", self.unchecked),
        ]
        return [(name, text) for name, text, happened in lines if happened]

    def __str__(self) -> str:
        return "\n".join(f"{name:<10}{value}" for name, value in self._lines())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._lines()
        )
        return f"<table>{rows}</table>"


class Counters:
    """Counts for `CacheStats`; safe under threads."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self.hits = self.misses = self.verified = self.mismatched = self.unchecked = 0
        self.seconds_computed = self.seconds_spent = self.seconds_checking = 0.0
        self.bypasses: dict[str, int] = {}
        # Seconds per row in the first computed batch, and in the last ones by the bit length of their size;
        # hits by that of their number.
        self._first: float | None = None
        self._paces: dict[int, deque[float]] = {}
        self._found: dict[int, int] = {}

    def count(self, *, hits: int, misses: int, computed: int, seconds: float, spent: float) -> None:
        """Add one batch: `computed` rows in `seconds`, and `spent` seconds on caching them."""
        with self._lock():
            self.hits += hits
            self.misses += misses
            if hits:
                size = hits.bit_length()
                self._found[size] = self._found.get(size, 0) + hits
            if computed and self._first is None:
                self._first = seconds / computed
            elif computed:
                known = self._paces.setdefault(computed.bit_length(), deque(maxlen=101))
                known.append(seconds / computed)
            self.seconds_computed += seconds
            self.seconds_spent += spent

    def add(self, **counts: float) -> None:
        """Add to counts by name, such as ``verified`` and ``mismatched``."""
        with self._lock():
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def bypass(self, reason: str, items: int) -> None:
        """Count items that were not stored."""
        with self._lock():
            self.bypasses[reason] = self.bypasses.get(reason, 0) + items

    def stats(self, **tiers: int) -> CacheStats:
        """The counts so far, and those of the tiers."""
        with self._lock():
            paces = {size: median_low(known) for size, known in self._paces.items()} or {
                0: self._first or 0.0
            }
            computed = 0.0
            for size, hits in self._found.items():
                larger = [other for other in paces if other >= size]
                computed += hits * (paces[min(larger)] if larger else min(paces.values()))
            share = 1.0 - self.verified / self.hits if self.hits else 0.0
            saved = computed * share - self.seconds_spent
            return CacheStats(
                **{name: getattr(self, name) for name in ADDED_UP},
                **tiers,
                bypasses=dict(self.bypasses),
                seconds_saved=None if self.hits and self._first is None else saved,
            )
