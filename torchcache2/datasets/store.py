"""`Store`: one process's side of a cache of samples: finds them in the tiers, loads and keeps them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache2.core.errors import NotCachedError, OutputError, UnreadableError
from torchcache2.core.keys import Flags, Keys, Positions
from torchcache2.core.logs import WarnOnce
from torchcache2.core.memory import as_bytes
from torchcache2.core.process import has_peers
from torchcache2.core.rows import Parts, Rows, Schema, merged
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.identity import as_index
from torchcache2.datasets.samplekeys import SampleKeys
from torchcache2.datasets.source import One, Source
from torchcache2.datasets.tally import Tally
from torchcache2.engine.stack import Describer, TierStack, has_any
from torchcache2.engine.values.outputs import is_like_samples, items_of
from torchcache2.engine.values.samples import Samples, from_rows, rebuilder
from torchcache2.tiers.base import Found, Signals, Tier
from torchcache2.tiers.drain import Drain
from torchcache2.tiers.make import Description, InUse, Opened, make_levels
from torchcache2.tiers.meeting import job_name
from torchcache2.tiers.shared.region import start_time
from torchcache2.tiers.shared.tier import SharedTier

_ASKED_AT_ONCE = 1 << 20  # keys


class Levels(TierStack):
    """The tiers of one dataset, in each process that uses it.

    A folder or servers, if the `settings` have them, get every row. A temporary folder gets only rows that do
    not fit in memory, so that the capacities add up. Budgets are in bytes.

    Unless it `writes`, the folder is only read; then `opened` may be connections to the bucket, for the
    tiers.

    Ranks with the same `name` share memory and temporary folder; so do processes with the same `job` (16
    bytes), such as workers. `by` says which sample an index is. Under another `mode` of torch, the rows that
    a map has made have other keys.
    """

    mode: bytes | None = None

    def __init__(
        self,
        settings: CacheSettings,
        namespace: bytes,
        description: Mapping[str, Any],
        name: str,
        job: bytes | None,
        tally: Tally,
        by: SampleKeys,
        *,
        writes: bool = True,
        opened: Opened | None = None,
    ) -> None:
        self.by = by
        self._is_worker, self._writes = job is not None, writes
        super().__init__(settings, name)
        self._opened = self._opened or opened
        self.fills_up = settings.persistent_cache_dir is None or not settings.is_persistent
        self._tally = tally
        self.namespace, self.document = namespace, description
        self._users.describe(namespace, description)
        if job is None:
            # Without a launcher, a process shares with its workers only, and with other datasets of its own.
            is_shared = has_peers() or bool(os.environ.get("TORCHCACHE_JOB"))
            own = [] if is_shared else [str(os.getpid()), str(start_time(os.getpid()))]
            job = job_name(os.environ, "dataset", namespace.hex(), name, *own)
        self.job = job
        self.join(self)
        self._hold()

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """What the namespace stands for."""
        return self.document

    def _hold(self) -> None:
        """Open the namespace now, so that workers' rows outlive them."""
        memory = self.tiers[0]
        if isinstance(memory, SharedTier):
            memory.hold(self.namespace)

    def clear(self) -> None:
        """Forget every row, in every process."""
        self.tiers[0].drop(self.namespace)  # first, so that no process drains it from now on
        self._tally.dropped()  # rows queued in other processes must not be written afterwards
        self.drop(self.namespace)

    def drop(self, namespace: bytes) -> None:
        """Delete the rows in files, in shared memory, and in this process's queue."""
        self.tiers[0].drop(namespace)  # first, as in `clear`
        super().drop(namespace)
        self._hold()

    def keys(self, indices: Sequence[Any] | Positions) -> Keys:
        """The keys of the samples at n indices."""
        return in_mode(self.by.of(self.namespace, indices), self.mode)

    @property
    def _lasting(self) -> Sequence[Tier]:
        """The lasting tiers, such as a folder with its bucket."""
        return [tier for tier in self.tiers if tier.is_lasting] or self.tiers[-1:]

    def look_again(self) -> None:
        """Make the next call look for rows of other processes."""
        for tier in self._lasting:
            tier.look_again(self.namespace)

    def bring(self) -> None:
        """Bring rows of a bucket to its local folder, in the background."""
        for tier in self._lasting:
            tier.bring(self.namespace)

    def _look(self, tiers: Sequence[Tier]) -> None:
        """Make some tiers look now for what other processes have written or deleted."""
        self.look_again()
        for tier in tiers:
            tier.has(Keys(self.namespace, np.zeros((1, 16), np.uint8)))  # a miss makes it look

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row now: in any tier or, with a lasting folder or servers, there."""
        if self._drain is not None:
            self._drain.gather(at_end=True)
        self.look_again()
        return has_any(self.tiers if self.fills_up else self._lasting, keys)

    def absent(self, count: int, enough: float = math.inf) -> Positions:
        """Which of the samples 0 to `count` - 1 have no row, int64 ``(k,)``; may stop after `enough`."""
        costs_requests = self.settings.bucket is not None
        self._look([tier for tier in self._lasting if tier.directory is not None and not costs_requests])
        found = [np.empty(0, np.int64)]
        for start in range(0, count, _ASKED_AT_ONCE):
            some = np.arange(start, min(count, start + _ASKED_AT_ONCE))
            found.append(some[~self.has(self.keys(some))])
            if sum(map(len, found)) >= enough:
                break
        return np.concatenate(found)

    def found(self, keys: Keys) -> list[Parts]:
        """The parts that `get` merges, by tier."""
        drops = self._tally.drops
        found = super().found(keys)
        if self._tally.drops != drops:  # rows read from disk before may be in memory now
            self.drop(keys.namespace)
        return found

    def drops(self, namespace: bytes) -> Any:
        """A value that changes with each drop of a namespace, also by other processes."""
        return self._last_drop(namespace), self._tally.drops

    def get(self, keys: Keys) -> Found:
        """As in `TierStack`; counts what it finds."""
        found = self.found(keys)
        for tier, parts in zip(self.tiers, found, strict=False):
            self._tally.add(**{f"{tier.name}_hits": sum(len(rows) for _, rows in parts)})
        return Found(merged(list(chain.from_iterable(found))))

    def count(self) -> int:
        """How many rows there are, in all processes; first has those written that are queued."""
        self.flush()
        self._look(self._lasting)
        return sum(tier.count(self.namespace) for tier in (self.tiers if self.fills_up else self._lasting))

    @property
    def _drain(self) -> Drain | None:
        """What brings rows of memory to a lasting folder or servers; None without these."""
        drain: Drain | None = self.tiers[-1].above
        return drain

    def write_kept(self, keys: Keys) -> Flags:
        """Copy rows from memory to the folder or servers that have lost them; returns which memory had."""
        return np.zeros(len(keys), bool) if self._drain is None else self._drain.copy(keys)

    def keep(self, keys: Keys, rows: Rows) -> bool:
        """Put each row into the first tier with room, or into every one if none drains memory.

        Returns whether all fit.
        """
        kept = self.put(self, keys, rows)
        return kept == len(keys) or (self._drain is None and not self.fills_up)  # the disk tier warns

    def put(self, source: Describer, keys: Keys, rows: Rows) -> int:
        """As `keep`; returns how many are kept."""
        if keys.namespace not in self._users.described:  # such as of a map that has changed
            self._users.describe(keys.namespace, source.description(keys.namespace))
        if self._drain is not None:
            self._drain.watch()
        elif not self.fills_up:
            return super().put(source, keys, rows)
        count, absent = len(keys), np.arange(len(keys))
        for depth, tier in enumerate(self.tiers):
            if depth:
                keys, rows = keys.take(absent), rows.take(torch.from_numpy(absent))
            if tier.put(keys, rows) == len(keys):
                return count
            absent = np.flatnonzero(~tier.has(keys))
            if len(absent) == 0:
                return count
        return count - len(absent)

    def close(self) -> None:
        """Write the rows to disk, and release those in memory."""
        self.leave(self)

    def _offer(self, tiers: Sequence[Tier], keys: Keys, rows: Rows) -> None:
        if not self.fills_up:  # else they did not fit before, and memory gets no new room
            super()._offer(tiers, keys, rows)

    def _check_place(self) -> Opened | None:
        is_far = bool(self.settings.servers or self.settings.bucket)
        # In a worker, a refusing server or bucket is a fault, not an error, as the parent has checked it. A
        # read-only folder was checked when the dataset was chosen.
        is_checked = self._writes and not (self._is_worker and is_far)
        return super()._check_place() if is_checked else None

    def _made(self, in_use: InUse, description: Description, opened: Opened | None) -> Sequence[Tier]:
        tally = self._tally  # not `self`: tiers must not keep these levels alive
        return make_levels(
            self.settings,
            in_use,
            description,
            self.job,
            is_worker=self._is_worker,
            signals=Signals(
                drops=lambda: tally.drops,
                publishing=tally.publishing,
                asked=lambda: tally.asked,
                waits=tally.waits,
                ask=tally.ask,
                tell=WarnOnce(tally.is_first),
            ),
            writes=self._writes,
            opened=opened,
        )


def in_mode(keys: Keys, mode: bytes | None) -> Keys:
    """The keys of the same samples under a mode of torch, of 16 bytes; None: that of the namespace."""
    return keys if mode is None else Keys(keys.namespace, keys.data ^ np.frombuffer(mode, np.uint8))


_MOST_REBUILDERS = 1024
_NOTHING: list[Any] = []


class Sought(NamedTuple):
    """The rows that were found for n keys.

    Attributes
    ----------
    samples : list
        n samples; None where not found.
    found : ndarray of bool
        Which were found, ``(n,)``.
    counts : dict of str to int
        How many were found in each tier, by name in `COUNTS`.
    unread : dict of int to UnreadableError
        Errors of found rows that could not be read, by position.
    """

    samples: list[Any]
    found: Flags
    counts: dict[str, int]
    unread: dict[int, UnreadableError]


class Store:
    """Finds, loads and keeps samples in one process, for a dataset or loader, `name` in messages.

    Loads a share `verify` of the hits again and compares them. Thread-safe; two threads that miss one sample
    at once both load it.

    Attributes
    ----------
    end : int
        Ints from 0 up to this may be found by the fast path; others may mean another index.
    """

    end = 1 << 63

    def __init__(
        self, name: str, levels: Levels, tally: Tally, source: Source | None = None, verify: float = 0.0
    ) -> None:
        self.name, self.levels, self.tally = name, levels, tally
        self.told = WarnOnce(tally.is_first)
        self._source, self._verify = source, verify
        self._is_mapped = bool((levels.document.get("dataset") or {}).get("map"))
        self._samples = Samples()
        self._rebuilders: dict[int, tuple[Schema, Any]] = {}  # by id of the schema, which is kept alive
        self._random_shares = np.random.default_rng()  # its own: others' generators must not advance

    @property
    def is_verifying(self) -> bool:
        """Whether found samples are loaded again, now and then, or none are kept."""
        return self._verify > 0.0 or self.tally.is_random

    def follow(self) -> None:
        """Name the rows of what would be made now; that of samples does not change."""

    def close(self) -> None:
        """Write queued rows, and release memory and servers."""
        self.levels.close()

    # What is found

    def find(self, keys: Keys) -> Sought:
        """The samples that the tiers have, each in its own memory."""
        sought = Sought([None] * len(keys), np.zeros(len(keys), bool), {}, {})
        self.seek(keys, np.arange(len(keys)), sought)
        return sought

    def seek(self, keys: Keys, places: Positions, sought: Sought) -> None:
        """Look for the samples of the keys at some positions."""
        asked = keys if len(places) == len(keys) else keys.take(places)
        for tier, parts in zip(self.levels.tiers, self.levels.found(asked), strict=False):
            before, name = int(sought.found.sum()), f"{tier.name}_hits"
            for positions, rows in parts:
                self._read(places[positions], rows, sought)
            sought.counts[name] = sought.counts.get(name, 0) + int(sought.found.sum()) - before

    def find_one(self, index: int) -> list[Any]:
        """The fast path: a list with the sample at an int, if memory has it; empty in all other cases."""
        is_plain = 0 <= index < self.end and not self._verify and not self.tally.is_random
        if not is_plain or torch.is_inference_mode_enabled() or self.levels.mode is not None:
            return _NOTHING
        start, levels = time.perf_counter_ns(), self.levels
        found = levels.tiers[0].get_one(levels.namespace, *levels.by.one(index), self._made)
        if found is None:
            return _NOTHING
        self.tally.add_hit(time.perf_counter_ns() - start)
        return found  # type: ignore[no-any-return]

    def _made(self, schema: Schema, buffers: Sequence[memoryview]) -> list[Any] | None:
        """The sample of a row in a list; None if the row cannot be read, which `find` warns of."""
        known = self._rebuilders.get(id(schema))
        try:
            if known is None:
                if self._is_mapped and not is_like_samples(schema):
                    return None
                if len(self._rebuilders) >= _MOST_REBUILDERS:
                    self._rebuilders.clear()
                known = self._rebuilders[id(schema)] = schema, rebuilder(schema)
            return [known[1](buffers)]
        except UnreadableError:
            return None

    def _read(self, positions: Positions, rows: Rows, sought: Sought) -> None:
        try:
            read = items_of(rows) if self._is_mapped else from_rows(rows)
        except UnreadableError as error:
            if len(rows) > 1:  # perhaps only some are damaged
                for i in range(len(rows)):
                    one = rows.take(torch.from_numpy(np.array([i])))
                    self._read(positions[i : i + 1], one, sought)
                return
            sought.unread.update(dict.fromkeys(positions.tolist(), error))
            self.told("unreadable", "%s: a cached sample cannot be read (%s)", self.name, str(error))
            return
        for position, sample in zip(positions.tolist(), read, strict=True):
            sought.samples[position] = sample
        sought.found[positions] = True

    # What is loaded

    def fetch(self, indices: Sequence[Any], one: One | None = None) -> list[Any]:
        """The samples at n indices: found, or loaded from the source, or by ``one(index)``, and kept."""
        drops, source = self.tally.drops, self.source  # read first: `found_random` precedes dropping all rows
        if self.tally.is_random:
            self.tally.add(random=len(indices))
            return source.plain(indices, one)
        start, before = time.perf_counter_ns(), source.nanoseconds
        indices = [as_index(index) for index in indices]  # normalised before use
        keys = self.levels.keys(indices)
        samples, found, counts, _ = self.find(keys)
        if self._verify > 0.0 and not self._is_verified(indices, samples, found, one):
            self.tally.add(**counts)
            return source.plain(indices, one)
        missing = np.flatnonzero(~found)
        if len(missing):
            loaded, _ = self._load([indices[i] for i in missing.tolist()], keys.take(missing), drops, one)
            for position, sample in zip(missing.tolist(), loaded, strict=True):
                samples[position] = sample
        in_source = source.nanoseconds - before
        spent = time.perf_counter_ns() - start - in_source
        self.tally.add(**counts, nanoseconds=in_source, spent=spent)
        return samples

    def fill(self, indices: Sequence[int]) -> tuple[int, int, int]:
        """Load and keep the samples at ints, unless they are there or others load them.

        Returns
        -------
        found, loaded, nbytes : int
            Samples that were there or loaded by others; samples loaded here; bytes of their rows.
        """
        drops = self.tally.drops  # first, as in `fetch`
        self._check_steady()
        keys = self.levels.keys(indices)
        absent = np.flatnonzero(~self.levels.has(keys))
        absent = absent[~self.levels.write_kept(keys.take(absent))]
        if (distinct := keys.take(absent).first_positions()) is not None:
            absent = absent[distinct[0]]
        loaded = nbytes = 0
        if len(absent):
            claim = self.levels.claim(keys.take(absent))
            try:
                wanted = absent[claim.mine]
                while True:
                    some = [indices[i] for i in wanted.tolist()]
                    samples, size = self._load(some, keys.take(wanted), drops)
                    loaded, nbytes = loaded + len(samples), nbytes + size
                    if not len(claim.others):
                        break
                    wanted = absent[claim.wait()]
            finally:
                claim.release()
        self._check_steady()
        return len(indices) - loaded, loaded, nbytes

    @property
    def source(self) -> Source:
        """The source of samples."""
        assert self._source is not None
        return self._source

    def _check_steady(self) -> None:
        if self.tally.is_random:
            raise NotCachedError(f"{self.name} draws random numbers, so no sample would be kept")

    def _load(
        self, indices: Sequence[Any], keys: Keys, drops: int, one: One | None = None
    ) -> tuple[list[Any], int]:
        """Load the samples at indices with these keys; returns them, and the bytes of their rows.

        Keeps none if `Tally.drops` is no longer `drops`.
        """
        if len(indices) == 0:
            return [], 0
        samples, is_steady = self.source.load(indices, one)
        if not is_steady:
            self.moved(indices[0], one)
            self.tally.add(random=len(samples))
            return samples, 0
        if not self.levels.by.hold(keys, indices):
            self.tally.add(misses=len(samples))
            return samples, 0
        return samples, self.keep(keys, samples, drops)

    def _is_verified(self, indices: Sequence[Any], samples: list[Any], found: Flags, one: One | None) -> bool:
        """Whether randomly chosen hits equal freshly loaded samples; if not, drops all rows."""
        drawn = np.flatnonzero(found & (self._random_shares.random(len(found)) < self._verify)).tolist()
        fresh = self.source.load([indices[i] for i in drawn], one)[0]
        apart = [i for i, sample in zip(drawn, fresh, strict=True) if not _same(samples[i], sample)]
        self.tally.add(verified=len(drawn), mismatched=len(apart))
        if not apart:
            return True
        self.told(
            "verify",
            "%s: the cached sample at %r differs from what the dataset returns now: all samples are "
            "dropped. Either its data have changed, and so must version=, or it is not deterministic",
            *(self.name, indices[apart[0]]),
        )
        self.levels.clear()
        return False

    def moved(self, index: Any, one: One | None) -> None:
        """React to random numbers drawn while samples were loaded."""
        if self.source.is_random(index, one) and not self.tally.is_random:
            self.tally.found_random()
            self.levels.clear()
            where = f" ({self.source.unseeded[0]})" if self.source.unseeded else ""
            self.told(
                "random",
                "%s draws random numbers%s, so it is not cached: every epoch would get the same ones. Move "
                "random augmentation into transform=, which runs after the cache. If the "
                "numbers do not matter, or are seeded by the index, pass allow_random=True",
                *(self.name, where),
            )

    # What is kept

    def keep(self, keys: Keys, samples: Sequence[Any], drops: int) -> int:
        """Offer loaded samples to the tiers, and count them as misses.

        Parameters
        ----------
        keys : Keys
            n keys; some may be equal.
        samples : sequence
            Their samples.
        drops : int
            `Tally.drops` from before the samples were loaded: if it has changed, none is kept.

        Returns
        -------
        int
            Bytes of the rows.

        Raises
        ------
        OutputError
            If samples cannot be stored, and none was stored before.
        """
        count, distinct = len(samples), keys.first_positions()
        if distinct is not None:
            keys, samples = keys.take(distinct[0]), [samples[i] for i in distinct[0].tolist()]
        batch = self._samples.to_rows(samples)
        if batch.refused:
            self._refuse(next(iter(batch.refused.values())), is_any_kept=bool(batch.parts))
        kept = [self.levels.keep(keys.take(positions), rows) for positions, rows in batch.parts]
        if self.tally.drops != drops:  # samples loaded before the drop must not be found later
            self.levels.drop(self.levels.namespace)
        if not (all(kept) or self.levels.settings.is_persistent):  # a full disk tier warns itself
            self.told(
                "full",
                "%s: memory_size is used up: samples that are not kept are loaded in each epoch. Raise "
                "it, or give disk_size, which keeps them in a temporary folder",
                self.name,
            )
        self.tally.add(misses=count - len(batch.refused), refused=len(batch.refused))
        return sum(len(rows) * rows.schema.row_bytes for _, rows in batch.parts)

    def _refuse(self, error: OutputError, *, is_any_kept: bool) -> None:
        """Report samples that cannot be stored: an error if none was stored before, else a warning."""
        is_first = not is_any_kept and self.tally.total()["misses"] == 0
        if is_first and not any(tier.count(self.levels.namespace) for tier in self.levels.tiers):
            raise error
        self.told("refused", "%s: some samples cannot be cached: %s", self.name, str(error))


def _same(left: Any, right: Any) -> bool:
    """Whether two samples are bit for bit the same."""
    both = Samples().to_rows([left, right])
    if both.refused or len(both.parts) != 1:
        return False
    ((_, rows),) = both.parts
    return all(torch.equal(*as_bytes(column)) for column in rows.columns)
