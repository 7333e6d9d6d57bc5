"""`Outcomes`: how the output of a batch comes about. Find, claim, compute, keep, put together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from torchcache2.core.keys import Keys, Positions
from torchcache2.core.logs import logger
from torchcache2.core.rows import Parts, Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.batch import Batch, Hits, Misses, NotStoredError, WrongRowsError
from torchcache2.engine.collective.exchange import Collective, apart
from torchcache2.engine.stack import TierStack
from torchcache2.engine.stats import Counters
from torchcache2.engine.values.outputs import found, joined, stored
from torchcache2.engine.verify import differences
from torchcache2.tiers.base import Claim

__all__ = ["Outcomes"]

_NOWHERE: Positions = np.empty(0, np.int64)


class Outcomes:
    """What a `Cache` does with a batch."""

    namespace: bytes

    def __init__(self, settings: CacheSettings, tiers: TierStack) -> None:
        self.settings = settings
        self._tiers = tiers
        self._counters = Counters()
        self._closed = False
        self.collective: Collective | None = None
        if settings.distributed == "collective":
            self.collective = Collective(settings, tiers, self._counters, type(self).__name__)
        self._random_shares = np.random.default_rng()

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What a namespace of this cache stands for, as JSON, for people and `explain`."""
        raise NotImplementedError

    def _outcome(self, batch: Batch) -> Any:
        """The output of a batch: find, claim, compute, keep, put together."""
        if self._closed:
            with self._stand_by():
                return batch.compute_all()
        exchange = None if self.collective is None else self.collective.exchange()
        if self.collective is not None and exchange is not None:
            return self.collective.output(exchange, self, batch)
        hits = self._find(batch)
        if hits is not None and hits.is_all(len(batch.keys)):
            assert hits.rows is not None
            return batch.output(hits.rows)
        with apart():  # a rank that finds these rows does not run the forward, nor the modules in it
            if hits is None or hits.rows is None or len(hits.positions) < len(batch.keys):
                return self._computed(batch, hits)
            self._checked(lambda: self._computed(batch, hits))
        return batch.output(hits.rows)

    def _checked(self, compute: Callable[[], Any]) -> None:
        """Compute items to check their rows, if the forward can run now: its weights may be elsewhere."""
        try:
            compute()
        except NotStoredError:
            raise
        except Exception as error:
            logger.debug("%s: rows that were found are not checked: %r", self._name(), error)

    def _computed(self, batch: Batch, hits: Hits | None) -> Any:
        """The output of a batch for which the forward runs."""
        if hits is None:
            return self._not_stacked(batch.compute_all())
        misses = Misses.of(batch.keys, hits)
        keys = batch.keys.take(misses.distinct)
        claim = self._tiers.claim(keys)
        try:
            return self._claimed(batch, hits, misses, keys, claim)
        finally:
            claim.release()

    def _claimed(self, batch: Batch, hits: Hits, misses: Misses, keys: Keys, claim: Claim) -> Any:
        """The output of a batch with misses.

        `keys` are those of its distinct misses, and `claim` says which of these are computed here.
        """
        # A check looks at the whole batch, so it waits for nobody: rows of others would not be compared.
        wanted = np.arange(len(keys)) if batch.is_checked else claim.mine
        mine = misses.distinct[wanted]
        asked = np.union1d(mine, hits.checked) if len(hits.checked) else mine
        parts: Parts = []
        # If others compute all misses, this call computes none. An empty batch is computed, for its output.
        if len(asked) or not len(claim.others):
            output, rows = batch.compute(asked)
            batch.misses += len(mine)
            is_whole = len(asked) == len(batch.keys) or batch.whole is not None
            if len(hits.checked):
                text = self._mismatch(batch, hits, asked, rows)
                if text is not None:
                    raise self._distrusted(batch, text, output if is_whole else None)
                rows = rows.take(torch.from_numpy(np.searchsorted(asked, mine)))
            if is_whole and len(hits.checked) == len(hits.positions):
                batch.checks.computed_whole()
            self._keep(keys if len(wanted) == len(keys) else keys.take(wanted), rows)
            if len(mine) == len(batch.keys):
                return output if batch.dtype is None else batch.output(rows)
            if len(wanted) or not len(claim.others):  # else only hits were computed, to be checked
                parts.append((wanted, rows))
        if len(wanted) < len(keys):
            parts += self._of_others(batch, misses.distinct, keys, claim)
        together = parts[0][1] if len(parts) == 1 else joined(parts, len(keys), device=batch.device)
        if together is None:
            return self._not_stacked(batch.compute_all())
        return self._put_together(batch, hits, misses, together)

    def _of_others(self, batch: Batch, distinct: Positions, keys: Keys, claim: Claim) -> Parts:
        """Rows of the misses that others have claimed; those that they give up are computed here.

        The misses have these `keys`, and are at the positions `distinct` of the batch.
        """
        parts: Parts = []
        while len(claim.others):
            if batch.whole is not None:  # the forward could only compute the whole batch
                batch.misses += len(claim.others)
                parts.append((claim.others, batch.whole.take(torch.from_numpy(distinct[claim.others]))))
                break
            left, there = claim.wait(), claim.appeared
            is_gone = np.ones(len(there), bool)  # a row may be damaged, or forgotten again
            for positions, rows in self._tiers.get(keys.take(there)).parts:
                parts.append((there[positions], found(rows)))
                is_gone[positions] = False
            left = np.union1d(left, there[is_gone])
            if len(left):
                _, rows = batch.compute(distinct[left])
                batch.misses += len(left)
                self._keep(keys.take(left), rows)
                parts.append((left, rows))
        return parts

    def _find(self, batch: Batch) -> Hits | None:
        """The rows that are there; None if some are of different schemas, which do not stack."""
        parts = [(positions, found(rows)) for positions, rows in self._rows(batch.keys)]
        positions, rows = parts[0] if parts else (_NOWHERE, None)
        if len(parts) > 1:
            positions = np.unique(np.concatenate([where for where, _ in parts]))
            ranked = [(np.searchsorted(positions, where), rows) for where, rows in parts]
            rows = joined(ranked, len(positions), device=batch.device)
            if rows is None:
                return None
        checked, share = _NOWHERE, self.settings.verify
        batch.is_checked = batch.checks.is_due(len(positions))
        if batch.is_checked:  # all items are computed, so all rows that are found can be compared
            checked = positions
        elif share > 0.0:  # this generator is the cache's own: the caller's generators must not move
            checked = positions[self._random_shares.random(len(positions)) < share]
        batch.is_compared = len(checked) > 0
        return Hits(positions, rows, checked)

    def _mismatch(self, batch: Batch, hits: Hits, asked: Positions, rows: Rows) -> str | None:
        """How the hits to check differ from the `rows` computed at the positions `asked`; None if equal."""
        assert hits.rows is not None
        before = hits.rows.take(torch.from_numpy(np.searchsorted(hits.positions, hits.checked)))
        again = rows.take(torch.from_numpy(np.searchsorted(asked, hits.checked)))
        apart = differences(before, again, batch.dtypes())
        mismatched, worst = int(np.count_nonzero(apart)), apart.argmax()
        self._counters.verify(verified=len(apart), mismatched=mismatched)
        if not mismatched:
            return None
        return (
            f"{mismatched} of {len(apart)} rows that were found differ from what the forward computes now, "
            f"most at position {hits.checked[worst]} of the batch, by {apart[worst]:.3g}"
        )

    def _distrusted(self, batch: Batch, text: str, output: Any = None) -> WrongRowsError:
        """Drop the namespace: one row was wrong, so none can be trusted. Returns the error to raise.

        `output` is that of the whole batch; if it is None, the forward runs for it.
        """
        try:
            if output is None:
                output = batch.compute_all()
        finally:
            self._distrust()
            self._drop(batch.keys.namespace)
        return WrongRowsError("batch", text, output)

    def _keep(self, keys: Keys, rows: Rows) -> None:
        """Put computed rows into the tiers."""
        for positions, part in stored(rows):
            self._tiers.put(self, keys if len(part) == len(keys) else keys.take(positions), part)
        if self._closed:  # another thread has closed it while this one computed
            self._tiers.forget(keys.namespace)

    def _rows(self, keys: Keys) -> Sequence[tuple[Positions, Rows]]:
        """The rows of those keys that are there: positions and rows, one part for each schema."""
        return self._tiers.get(keys).parts if self.collective is None else self.collective.holdings.get(keys)

    def _drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, on disk too."""
        (self._tiers if self.collective is None else self.collective).drop(namespace)

    def _stand_by(self, error: Exception | None = None) -> AbstractContextManager[None]:
        """The context of a call that is passed by, or raises, in step with other ranks if there are any."""
        return contextlib.nullcontext() if self.collective is None else self.collective.stand_by(error)

    def _put_together(self, batch: Batch, hits: Hits, misses: Misses, rows: Rows | None) -> Any:
        """The output of the batch in its order: of hits, and of the rows of distinct misses, if any."""
        if len(misses.positions) == 0 or rows is None:
            assert hits.rows is not None
            return batch.output(hits.rows)
        if misses.inverse is not None:
            rows = rows.take(torch.from_numpy(misses.inverse))
        if hits.rows is None:
            return batch.output(rows)
        parts = [(hits.positions, hits.rows), (misses.positions, rows)]
        together = joined(parts, len(batch.keys), device=batch.device)
        if together is None:
            return self._not_stacked(batch.compute_all())
        return batch.output(together)

    def _not_stacked(self, output: Any) -> Any:
        """The output of a batch whose rows are of different schemas; a subclass may refuse it."""
        return output

    def _distrust(self) -> None:
        """Called when a row was wrong and all are dropped; a subclass may then check its namespace."""

    def _name(self) -> str:
        return repr(self)
