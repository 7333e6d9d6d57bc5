"""`PortableFetcher`: finds samples that no dataset could load, or says what is wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchcache2.core.errors import MissingSampleError
from torchcache2.core.keys import Keys, Positions
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.folders import PAUSE, ranges_text
from torchcache2.datasets.itemkeys import Index, as_index, keys_of
from torchcache2.datasets.source import Source
from torchcache2.datasets.store import SampleStore
from torchcache2.files.errors import DamagedError, NewerFormatError, UnknownClassError, UnreadableError

_MOST_REASONS = 3
_MANY = 1 << 20  # samples; a length that anybody may have written is not gone through to its end


class PortableFetcher(Fetcher):
    """What one process serves. A sample that is missing is an error."""

    patience = 60.0  # seconds that a fault of a bucket may last

    def __init__(self, store: SampleStore, source: Source, place: str, length: int | None) -> None:
        super().__init__(store, source, 0.0)
        self._where = f"{store.name} in {place}"
        self._length = length

    def fetch(self, indices: Sequence[Any]) -> list[Any]:
        """The samples at n indices."""
        start = time.perf_counter_ns()
        indices = [self._index(index) for index in indices]
        keys = keys_of(self.levels.namespace, indices)
        samples, found, counts, _ = self.store.find(keys)
        missing, end = np.flatnonzero(~found), start / 1e9 + self.patience
        while len(missing):
            missing, unread = self._again(keys, missing, samples, counts)
            if len(missing) == 0:
                break
            if unread or not self._faults() or time.perf_counter() > end:
                first = int(missing[0])
                raise self._missing(indices[first], unread.get(first))
            time.sleep(PAUSE)
        self.tally.add(**counts, spent=time.perf_counter_ns() - start)
        return samples

    def fill(self, indices: Sequence[int]) -> tuple[int, int, int]:
        """Some samples are missing, and there is nothing that could load them."""
        raise self._incomplete(self.levels.absent(self._length or 0))

    def check(self, *, partial: bool) -> None:
        """Raise `MissingSampleError` if samples are missing, or need what this process does not have."""
        length = self._length
        absent = self._absent(1 if length is None else length)
        unknown = [error for error in self._reasons() if not isinstance(error, (DamagedError, OSError))]
        if unknown and (len(absent) or length is None):
            raise MissingSampleError(f"{self._where} cannot be read{_because(unknown)}")
        if length is None and not partial:
            raise MissingSampleError(
                f"{self._where}: the dataset did not tell its length, so that nobody knows whether all "
                "samples are there: pass partial=True to have those that are"
            )
        if len(absent) and not partial:
            raise self._incomplete(absent)

    def _absent(self, count: int) -> Positions:
        """Which of the first samples are missing, once a bucket has answered."""
        end = time.monotonic() + self.patience
        while True:
            absent = self.levels.absent(count, _MANY)
            if len(absent) == 0 or not self._faults() or time.monotonic() > end:
                return absent
            time.sleep(PAUSE)

    def _index(self, index: Any) -> Index:
        """An index as it was when the sample was kept: an int is counted from the end if it is negative."""
        plain, length = as_index(index), self._length
        if not isinstance(plain, int) or length is None:
            return plain
        if not -length <= plain < length:
            raise IndexError(f"index {plain} of {length:,} samples")
        return plain % length

    def _again(
        self, keys: Keys, missing: Positions, samples: list[Any], counts: dict[str, int]
    ) -> tuple[Positions, dict[int, UnreadableError]]:
        """Look for samples that were missed, at once and then one by one: those of a file fail together.

        Returns
        -------
        missing : ndarray of int64
            Positions of those that are still missing.
        unread : dict of int to UnreadableError
            Why some of these cannot be read.
        """
        self.levels.look_again()
        unread: dict[int, UnreadableError] = {}
        for is_alone in (False, True):
            left = []
            for some in np.split(missing, np.arange(1, len(missing))) if is_alone else [missing]:
                sought = self.store.find(keys.take(some))
                for place, position in enumerate(some.tolist()):
                    if sought.found[place]:
                        samples[position] = sought.samples[place]
                    else:
                        left.append(position)
                unread |= {int(some[place]): error for place, error in sought.unread.items()}
                for name, count in sought.counts.items():
                    counts[name] = counts.get(name, 0) + count
            missing = np.array(left, np.int64)
            if not left or self._faults():
                break
        return missing, {position: error for position, error in unread.items() if position in set(left)}

    def _faults(self) -> list[Exception]:
        """Why a bucket cannot be asked now."""
        causes = [getattr(tier, "cause", None) for tier in self.levels.tiers]
        return [cause for cause in causes if cause is not None]

    def _reasons(self) -> list[Exception]:
        lists = [tier.reasons(self.levels.namespace) for tier in self.levels.tiers]
        return [error for reasons in lists for error in reasons]

    def _missing(self, index: Index, error: UnreadableError | None) -> MissingSampleError:
        if error is not None:
            return MissingSampleError(f"sample {index!r} of {self._where} cannot be read{_because([error])}")
        return MissingSampleError(
            f"sample {index!r} of {self._where} is missing, or damaged{_because(self._reasons())}. To have "
            "it there again, call CachedDataset(dataset, path).warmup() where the dataset is; missing() has "
            "all that are gone, and `torchcache2 verify` names damaged files"
        )

    def _incomplete(self, absent: Positions) -> MissingSampleError:
        count = f"{'at least ' * (len(absent) >= _MANY)}{len(absent):,} of {self._length:,}"
        return MissingSampleError(
            f"{self._where}: {count} samples are not there: "
            f"{ranges_text(absent)}{_because(self._reasons())}. Fill it with CachedDataset(dataset, "
            "path).warmup() where the dataset is, or pass partial=True to have the others"
        )


def _because(errors: Sequence[Exception]) -> str:
    """What is known of a reason, as the end of a sentence."""
    texts = list(dict.fromkeys(map(_text, errors)))
    return f" ({'; '.join(texts[:_MOST_REASONS])})" if texts else ""


def _text(error: Exception) -> str:
    """What is wrong, and what can be done about it here."""
    if isinstance(error, UnknownClassError):
        return f"{error}: import what defines it before CachedDataset is made"
    if isinstance(error, NewerFormatError):
        return f"the newer format {error}: upgrade torchcache2"
    return str(error)
