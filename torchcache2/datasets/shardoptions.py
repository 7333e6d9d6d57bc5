"""The options of `LazyShardDataset`, checked, and what follows from them: ranks, and a bound of the shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchcache2.core.errors import OptionError
from torchcache2.core.process import Place, place, ranks_of_each
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import Size, parse_size, size_text
from torchcache2.datasets.fingerprint import length_of
from torchcache2.datasets.options import level_settings
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.values.samples import Samples

_MODES = ("rank", "node", "disk")
_PROBED = 8
_MEMORY_SHARE = 0.5


def _check(option: str, value: object, is_valid: bool, expected: str) -> None:
    """Raise `OptionError` for a value that is not valid."""
    if not is_valid:
        raise OptionError(f"{option}={value!r}: expected {expected}")


def _is_count(value: object) -> bool:
    """Whether a value is an int from 0 on."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 0


def check_names(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for options of `CachedDataset` that have other names here."""
    for name in ("memory_size", "disk_size"):
        theirs = name.replace("_", "_cache_")
        if theirs in options:
            raise OptionError(f"LazyShardDataset has no option {theirs!r}: it is {name}")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an option that cannot have its value."""
    for option, value in options.items():
        if option == "mode":
            _check(option, value, value in _MODES, f"one of {', '.join(map(repr, _MODES))}")
        elif option == "even":
            _check(option, value, value in (None, "drop", "repeat"), "None, 'drop' or 'repeat'")
        elif option == "seed":
            _check(option, value, _is_count(value) and value < 1 << 64, "an int from 0 to 2**64 - 1")
        elif option == "overflow":
            is_valid = value is None or (isinstance(value, (int, float)) and value >= 0)
            _check(option, value, is_valid, "None, or a number from 0 on")
        else:
            _check(option, value, _is_count(value), "an int from 0 on")


def sizes_of(
    mode: str, path: Any, memory_size: Size | None, disk_size: Size | None, *, is_served: bool
) -> tuple[Size, Size | None]:
    """Both sizes as `CachedDataset` takes them, where a share of 0.0 is no share."""
    if memory_size is None:
        memory_size = 0 if is_served else _MEMORY_SHARE
    memory_size = 0 if mode == "disk" else memory_size or 0
    disk_size = disk_size if disk_size is None else disk_size or 0
    parse_size("memory_size", memory_size, free=0)
    parse_size("disk_size", disk_size or 0, free=0)
    if mode == "disk" and not (path if disk_size is None else disk_size):
        raise OptionError("mode='disk' keeps samples on the disk only: give it a path, or a disk_size")
    return memory_size, disk_size


def samples_of(dataset: Any) -> int:
    """How many samples the dataset has; `OptionError` if it does not say."""
    length = length_of(dataset)
    if length is None:
        raise OptionError(f"dataset is of type {type(dataset).__name__}: only what has a len() has shards")
    return length


def place_of(rank: int | None, num_replicas: int | None) -> Place:
    """The number of this process among all, as these options say, or else as is known."""
    if rank is None and num_replicas is None:
        return place()
    given = f"rank={rank!r}, num_replicas={num_replicas!r}"
    if rank is None or num_replicas is None:
        raise OptionError(f"{given}: give both, or none of them")
    if not (_is_count(rank) and _is_count(num_replicas) and rank < num_replicas):
        raise OptionError(f"{given}: expected ints, and a rank from 0 to num_replicas - 1")
    return Place(int(rank), int(num_replicas))


def together_of(mode: str, mine: Place) -> int:
    """How many ranks are dealt their samples together: one, or those of a machine."""
    found = 1 if mode == "rank" else ranks_of_each(*mine)
    if found is None:
        raise OptionError(
            f"mode={mode!r}: it is not known which of {mine.world_size} ranks are on the machine of rank "
            f"{mine.rank}. Start them with torchrun, or set the variable LOCAL_WORLD_SIZE to the number of "
            "ranks on each machine, which has to be the same everywhere. Or use mode='rank'"
        )
    return found


class Bound:
    """How many samples the shard of a rank may have, judged by the size of some.

    Attributes
    ----------
    most : int, optional
        None: there is no bound.
    is_share : bool
        Whether it may be another number for another rank.
    """

    def __init__(
        self,
        dataset: Any,
        path: Any,
        memory_size: Size,
        disk_size: Size | None,
        *,
        overflow: float | None,
        even: str | None,
        mine: Place,
    ) -> None:
        self.most: int | None = None
        self.is_share, self._text = False, ""
        if overflow is None:
            return
        shares = isinstance(memory_size, float), isinstance(disk_size, float)
        self.is_share = mine.world_size > 1 and (any(shares) or (disk_size is None and path is not None))
        if even is not None and self.is_share:
            raise OptionError(
                f"overflow={overflow!r}, even={even!r}: memory_size={memory_size!r} and "
                f"disk_size={disk_size!r} have to be bytes, or texts such as '4GB', since a share of what is "
                "free may be more for one rank than for another"
            )
        count, room = samples_of(dataset), _room(level_settings(path, memory_size, disk_size, "mru", "none"))
        mean = max(1.0, _mean_size(dataset))
        here = ranks_of_each(*mine) or mine.world_size  # at most, and the same number for all ranks
        self.most = int(min(count, (1 + overflow) * room / mean / here))
        self._text = f": overflow={overflow!r}, and {size_text(room)} have room for about "
        self._text += f"{int(room / mean):,} samples of {size_text(mean)}"
        self._text += f", for {here} ranks" if here > 1 else ""
        if self.most == 0 and count > 0:
            raise OptionError(f"no rank would have any of {count:,} samples{self}")

    def __str__(self) -> str:
        """The reason for the bound, to be put behind a sentence; empty if there is none."""
        return self._text


def _room(settings: CacheSettings) -> int:
    memory, disk = settings.max_memory_cache_size, settings.max_persistent_cache_size
    assert isinstance(memory, int) and isinstance(disk, int)
    # A folder that lasts has every sample; a temporary one has those for which memory had no room.
    return memory + disk if settings.persistent_cache_dir is None else max(memory, disk)


def _mean_size(dataset: Any) -> float:
    """The mean size of up to 8 samples from all over a dataset, in bytes of rows."""
    count, state = samples_of(dataset), RandomState([])
    places = sorted({place * count // _PROBED for place in range(_PROBED if count else 0)})
    try:
        probes = [dataset[place] for place in places]
    finally:
        state.restore()  # the numbers that the caller draws next are those without a bound
    rows = Samples().to_rows(probes)
    for error in rows.refused.values():
        raise error
    return sum(c.nbytes for _, part in rows.parts for c in part.columns) / max(1, len(probes))
