"""`Cache`, the engine: looks keys up in the tiers, has the misses computed once, and keeps them.

All caches of one budget share a `TierStack`; each keeps the rows of its namespace there.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.arrays import Positions
from torchcache2.core.errors import OptionError, OutputError
from torchcache2.core.keys import Keys
from torchcache2.core.logs import ToldOnce, logger
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.core.version import __version__
from torchcache2.engine.batch import Batch, ComputeSteps, Hits, Misses, NotStoredError
from torchcache2.engine.stack import Parts, TierStack
from torchcache2.engine.stats import CacheStats, Counters
from torchcache2.engine.steps import Steps, run_steps, transparent
from torchcache2.engine.verify import differences
from torchcache2.identity.marks import ADDED_ATTRIBUTE
from torchcache2.tiers.base import Claim

__all__ = ["Cache", "now"]

_CPU = torch.device("cpu")
_NOWHERE: Positions = np.empty(0, np.int64)
Compute = Callable[[Tensor], Any]


def now() -> str:
    """The time, UTC, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


class Cache:
    """Finds rows of one namespace, and has the others computed.

    Safe under threads. Two threads that miss the same key at once both compute it.

    Parameters
    ----------
    namespace : bytes
        16 bytes that say who computes, such as a digest of model name and version.
    settings : CacheSettings, optional
        Options.
    tiers : TierStack, optional
        Tiers to share with other caches.

    Examples
    --------
    >>> cache = Cache(b"squares, 2026-11", CacheSettings(max_memory_cache_size="1MB"))
    >>> keys = Keys(cache.namespace, np.arange(48, dtype=np.uint8).reshape(3, 16))
    >>> cache.fetch(keys, lambda positions: positions.double() ** 2)
    tensor([0., 1., 4.], dtype=torch.float64)
    >>> cache.fetch(keys.take(np.array([2, 0])), lambda positions: 1 / 0)
    tensor([4., 0.], dtype=torch.float64)
    """

    __module__ = "torchcache2"

    def __init__(
        self, namespace: bytes, settings: CacheSettings | None = None, *, tiers: TierStack | None = None
    ) -> None:
        if not isinstance(namespace, bytes) or len(namespace) != 16:
            raise OptionError(f"namespace={namespace!r}: expected 16 bytes, such as a 128-bit digest")
        self.namespace = namespace
        self.settings = settings if settings is not None else CacheSettings()
        self._tiers = tiers if tiers is not None else TierStack(self.settings)
        self._counters = Counters()
        self._told = ToldOnce()
        self._closed = False
        self._random_shares = np.random.default_rng()
        self._tiers.join(self)

    @transparent
    def fetch(self, keys: Keys, compute: Compute, *, device: torch.device = _CPU) -> Any:
        """The output for a batch: rows that are found, and the others computed.

        Parameters
        ----------
        keys : Keys
            The keys of the batch, n items.
        compute : callable
            ``compute(positions)`` returns the pytree for the items at `positions` (int64 tensor of
            shape ``(k,)``, ascending), its tensors of shape ``(k, ...)``. With ``miss_batch="pad"``
            the last position may be there several times. An exception leaves the cache as it was.
        device : torch.device
            The device of the call, on which outputs are returned that were computed there.

        Returns
        -------
        pytree
            As `compute` would return it for all positions, tensors of shape ``(n, ...)``.

        Raises
        ------
        OutputError
            If a computed tensor's first dimension is not the number of positions.
        """
        return run_steps(self._fetch, keys, compute, device)

    def _fetch(self, keys: Keys, compute: Compute, device: torch.device) -> Steps[Any]:
        def steps(positions: Tensor) -> Steps[Any]:
            return (yield compute, (positions,), {})

        try:
            return (yield from self.steps(keys, steps, device))
        except NotStoredError as stop:
            if isinstance(stop.error, OutputError):
                raise stop.error from None
            self.count_bypass(stop.reason, len(keys), stop.text)
            return stop.output

    def steps(
        self,
        keys: Keys,
        compute: ComputeSteps,
        device: torch.device,
        dtypes: Collection[torch.dtype] = (),
        since: float | None = None,
        probes: bool = False,
    ) -> Steps[Any]:
        """The steps of `fetch`: yields the calls to make; see `torchcache2.engine.steps`.

        `dtypes` are those of the tensors that `compute` reads: `verify` tolerates what the coarsest of them
        rounds. The cost of caching is counted from the time `since` on (of `time.perf_counter`), by default
        from now on. If `compute` `probes` the batch, all items are computed, and the rows that are found are
        compared with them. `NotStoredError` if the output of `compute` must not, or cannot, be stored.
        """
        start = time.perf_counter() if since is None else since
        batch = Batch(keys, compute, device, self.settings, dtypes, probes=probes)
        output = yield from self._outcome(batch)
        self._counters.count(
            hits=len(keys) - batch.misses,
            misses=batch.misses,
            waited=batch.waited,
            computed=batch.computed,
            seconds=batch.seconds,
            spent=time.perf_counter() - start - batch.seconds,
        )
        return output

    def _outcome(self, batch: Batch) -> Steps[Any]:
        """The output of a batch: find, claim, compute, keep, put together."""
        if self._closed:
            return (yield from batch.compute_all())
        hits = self._find(batch)
        if hits is None:
            return self._not_stacked((yield from batch.compute_all()))
        if hits.rows is not None and len(hits.positions) == len(batch.keys) and len(hits.checked) == 0:
            return (yield from batch.output(hits.rows))
        misses = Misses.of(batch.keys, hits)
        claim = self._tiers.claim(batch.keys.take(misses.distinct))
        try:
            return (yield from self._claimed(batch, hits, misses, claim))
        finally:
            claim.release()

    def _claimed(self, batch: Batch, hits: Hits, misses: Misses, claim: Claim) -> Steps[Any]:
        """The output of a batch of which some items are missing, and some of those claimed."""
        mine = misses.distinct[claim.mine]
        asked = np.union1d(mine, hits.checked) if len(hits.checked) else mine
        parts: Parts = []
        if len(asked) or not len(claim.others):
            output, rows = yield from batch.compute(asked)
            batch.misses += len(mine)
            if len(hits.checked):
                if not self._verify(batch, hits, asked, rows):
                    return (yield from self._start_over(batch))
                rows = rows.take(torch.from_numpy(np.searchsorted(asked, mine)))
            self._keep(batch.keys.take(mine), rows)
            if len(mine) == len(batch.keys):
                return output if batch.dtype is None else (yield from batch.output(rows))
            parts.append((claim.mine, rows))
        parts += yield from self._of_others(batch, misses, claim)
        if any(rows.schema != parts[0][1].schema for _, rows in parts):
            return self._not_stacked((yield from batch.compute_all()))
        if len(parts) > 1:
            rows = Rows.scatter(parts, len(misses.distinct), device=batch.device)
        else:
            ((_, rows),) = parts
        return (yield from self._put_together(batch, hits, misses, rows))

    def _of_others(self, batch: Batch, misses: Misses, claim: Claim) -> Steps[Parts]:
        """Rows of the distinct misses that others have claimed; what they give up is computed here."""
        if batch.whole is not None and len(claim.others):  # the forward could only compute everything
            batch.misses += len(claim.others)
            return [(claim.others, batch.whole.take(torch.from_numpy(misses.distinct[claim.others])))]
        parts: Parts = []
        while len(claim.others):
            pending = claim.others
            given_up = claim.wait()
            decided = np.setdiff1d(pending, np.union1d(claim.others, given_up), assume_unique=True)
            keys = batch.keys.take(misses.distinct[decided])
            found = self._tiers.get(keys).parts
            parts += [(decided[positions], rows) for positions, rows in found]
            batch.waited += sum(len(rows) for _, rows in found)
            left = np.setdiff1d(decided, np.concatenate([_NOWHERE, *(where for where, _ in parts)]))
            left = np.union1d(left, given_up)  # a row may be damaged, or gone again
            if len(left):
                positions = misses.distinct[left]
                _, rows = yield from batch.compute(positions)
                batch.misses += len(left)
                self._keep(batch.keys.take(positions), rows)
                parts.append((left, rows))
        return parts

    def _find(self, batch: Batch) -> Hits | None:
        """The rows that the tiers have; None if some are of different schemas, which do not stack."""
        parts = self._tiers.get(batch.keys).parts
        if len(parts) > 1:
            return None
        positions, rows = parts[0] if parts else (_NOWHERE, None)
        checked, share = _NOWHERE, self.settings.verify
        if batch.probes:  # all items are computed, so all rows that are found can be compared
            checked = positions
        elif share > 0.0:  # this generator is the cache's own: the caller's generators must not move
            checked = positions[self._random_shares.random(len(positions)) < share]
        return Hits(positions, rows, checked)

    def _verify(self, batch: Batch, hits: Hits, asked: Positions, rows: Rows) -> bool:
        """Whether the hits to check equal the `rows` computed at the positions `asked`; warns if not."""
        assert hits.rows is not None
        before = hits.rows.take(torch.from_numpy(np.searchsorted(hits.positions, hits.checked)))
        again = rows.take(torch.from_numpy(np.searchsorted(asked, hits.checked)))
        apart = differences(before, again, batch.dtypes)
        mismatched, worst = int(np.count_nonzero(apart)), apart.argmax()
        self._counters.verify(verified=len(apart), mismatched=mismatched)
        if mismatched:
            logger.warning(
                "%s: %d of %d hits that were verified differ from what the forward computes now; most at "
                "position %d of the batch, by %.3g. The batch is computed again. Either something has "
                "changed that is not noticed, or the forward is not deterministic",
                *(self._name(), mismatched, len(apart), hits.checked[worst], apart[worst]),
            )
        return not mismatched

    def _start_over(self, batch: Batch) -> Steps[Any]:
        """Compute the whole batch, and drop the namespace: one row was wrong, so none can be trusted."""
        try:
            return (yield from batch.compute_all())
        finally:
            self._distrust()
            self._tiers.drop(batch.keys.namespace)

    def _keep(self, keys: Keys, rows: Rows) -> None:
        """Put computed rows into the tiers."""
        self._tiers.put(self, keys, rows)
        if self._closed:  # another thread has closed it while this one computed
            self._tiers.forget(keys.namespace)

    def _put_together(self, batch: Batch, hits: Hits, misses: Misses, rows: Rows) -> Steps[Any]:
        """The output of the batch in its order: of hits, and of the rows computed for distinct misses."""
        if len(misses.positions) == 0:
            assert hits.rows is not None
            return (yield from batch.output(hits.rows))
        if misses.inverse is not None:
            rows = rows.take(torch.from_numpy(misses.inverse))
        if hits.rows is None:
            return (yield from batch.output(rows))
        if hits.rows.schema != rows.schema:
            return self._not_stacked((yield from batch.compute_all()))
        parts = [(hits.positions, hits.rows), (misses.positions, rows)]
        return (yield from batch.output(Rows.scatter(parts, len(batch.keys), device=batch.device)))

    def _not_stacked(self, output: Any) -> Any:
        """The output of a batch whose rows are of different schemas; a subclass may refuse it."""
        return output

    def _distrust(self) -> None:
        """Called when a row was wrong and all are dropped; a subclass may then check its namespace."""

    def count_bypass(self, reason: str, items: int, text: str) -> None:
        """Count items that were computed and not stored; warns once for each reason."""
        self._counters.bypass(reason, items)
        self._told(reason, "%s: not cached (%s): %s", self._name(), reason, text)

    def stats(self) -> CacheStats:
        """What this cache has done so far."""
        return self._counters.stats(**self._tiers.stats())

    @property
    def cache_dir(self) -> Path | None:
        """The folder where rows are kept; None if they are kept in memory only."""
        directory = self._tiers.directory
        return None if directory is None else Path(directory.path)

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What a namespace of this cache stands for, as JSON, for people and `explain`."""
        return {"class": None, "library": __version__, "torch": str(torch.__version__), "created": now()}

    def flush(self) -> None:
        """Return when everything that was computed is as durable as the tiers make it."""
        self._tiers.flush()

    def clear(self) -> None:
        """Forget every row of this cache's namespace, on disk too."""
        self._tiers.drop(self.namespace)

    def close(self) -> None:
        """Stop caching and let go of the rows in memory; calls compute everything from then on.

        What waits to be written is on disk when this returns.
        """
        if not self._closed:
            self._closed = True
            self._tiers.forget(self.namespace)
            self._tiers.leave(self)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.namespace, self.settings)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace.hex()}>"

    def _name(self) -> str:
        return repr(self)


setattr(Cache, ADDED_ATTRIBUTE, True)
