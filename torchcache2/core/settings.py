"""`CacheSettings`: every option, checked once, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal

import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.extras import require

__all__ = ["CacheSettings", "disabled_by_environment", "parse_size", "strict_by_environment"]

Size = int | float | str
Policy = Literal["mru", "lru"]
MissBatch = Literal["exact", "pad"]
Compression = Literal["brotli", "blosc2", "none"]

_MOST_QUALITY = {"brotli": 11, "blosc2": 9, "none": 11}

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """The options of a cache.

    Parameters
    ----------
    enabled : bool
        Off switch. ``TORCHCACHE_DISABLE=1`` turns every cache of a run off.
    subsample_count : int, optional
        None: every element of an item is hashed. N: of items with more than N elements, N elements
        in evenly spread blocks are hashed. Edits outside those blocks are **not seen**.
    persistent : bool
        Whether rows are kept on disk too, and found again by later runs.
    persistent_cache_dir : path, optional
        The folder for them, one of its own; it may be shared by any number of runs. None: a temporary
        one, which is deleted at exit.
    persistent_module_hash : str, optional
        A name to use instead of the computed namespace. Nothing about the module is then checked.
    max_memory_cache_size : int, str or float
        Budget of the memory tier: bytes, a text like ``"4GB"`` or ``"512MiB"``, or a float in
        (0, 1], a share of the memory that is free when the cache is made.
    max_persistent_cache_size : int, str or float
        Budget of the whole folder, likewise; as a float, a share of what is free on its disk.
    compression : {"brotli", "blosc2", "none"}
        How rows on disk are compressed. ``"blosc2"`` is faster and needs the extra ``blosc2``.
    compression_quality : int
        0 to 11 for brotli, 0 to 9 for blosc2. Reading does not depend on it.
    memory_cache_device : str or torch.device, optional
        Where the memory tier lives. None: where the output was.
    cache_dtype : torch.dtype, optional
        Stored dtype of floating-point leaves. Outputs keep their own dtype, and are rounded
        through this one whether they were found or computed.
    policy : {"mru", "lru"}
        What a full cache does, in memory and on disk: keep what came first, or drop the least recently used.
    shared_args : sequence of str
        Arguments of forward that belong to the whole batch, such as a mask or a table.
    item_args : sequence of str
        Arguments that are a list, tuple or array with one entry per item, such as texts or images. An entry
        is part of its item's key, and is taken with its item. With such arguments a function needs no tensor.
    probe : bool
        Whether the first call of a kind also computes a part of its batch alone, and compares: the output of
        an item must not depend on the rest of the batch.
    strict : bool
        Whether a call that cannot be cached raises `NotCachedError`, instead of running past the cache.
        ``TORCHCACHE_STRICT=1`` makes every cache of a run strict.
    miss_batch : {"exact", "pad"}
        How many items the forward gets when some of a batch are missing: those, or as many as the next
        power of two, at most the batch, the last of them repeated. A compiled forward is compiled
        again for each size that it has not seen; ``"pad"`` leaves few.
    verify : float
        Share of hits, in [0, 1], that are computed again and compared.

    Raises
    ------
    OptionError
        If an option has a value that it cannot take.
    """

    __module__ = "torchcache2"

    enabled: bool = True
    subsample_count: int | None = None
    persistent: bool = False
    persistent_cache_dir: str | os.PathLike[str] | None = None
    persistent_module_hash: str | None = None
    max_memory_cache_size: Size = 1_000_000_000
    max_persistent_cache_size: Size = 10_000_000_000
    compression: Compression = "brotli"
    compression_quality: int = 1
    memory_cache_device: torch.device | str | None = "cpu"
    cache_dtype: torch.dtype | None = None
    policy: Policy = "mru"
    shared_args: tuple[str, ...] = ()
    item_args: tuple[str, ...] = ()
    probe: bool = True
    strict: bool = False
    miss_batch: MissBatch = "exact"
    verify: float = 0.0

    def __post_init__(self) -> None:
        _require(isinstance(self.enabled, bool), "enabled", self.enabled, "True or False")
        count = self.subsample_count
        _require(
            count is None or (type(count) is int and count >= 2),
            "subsample_count",
            count,
            "None or an int of at least 2 (elements hashed per item)",
        )
        name = self.persistent_module_hash
        _require(
            name is None or (isinstance(name, str) and name != ""),
            "persistent_module_hash",
            name,
            "None or a non-empty str",
        )
        parse_size("max_memory_cache_size", self.max_memory_cache_size, free=0)
        self._check_persistence()
        if self.memory_cache_device is not None:
            try:
                device = torch.device(self.memory_cache_device)
            except (RuntimeError, TypeError) as error:
                raise OptionError(
                    f"memory_cache_device={self.memory_cache_device!r}: expected None, a "
                    f"torch.device or its name, such as 'cpu' or 'cuda:0' ({error})"
                ) from None
            _require(
                device.type != "meta",
                "memory_cache_device",
                self.memory_cache_device,
                "None, a torch.device or its name, of a device that holds data",
            )
            object.__setattr__(self, "memory_cache_device", device)
        dtype = self.cache_dtype
        _require(
            dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
            "cache_dtype",
            dtype,
            "None or a floating-point torch.dtype, such as torch.bfloat16",
        )
        _require(self.policy in ("mru", "lru"), "policy", self.policy, "'mru' or 'lru'")
        for option in ("shared_args", "item_args"):
            object.__setattr__(self, option, _names(option, getattr(self, option)))
        both = set(self.shared_args) & set(self.item_args)
        _require(not both, "item_args", self.item_args, f"none of shared_args, but {sorted(both)} is in both")
        _require(isinstance(self.probe, bool), "probe", self.probe, "True or False")
        _require(isinstance(self.strict, bool), "strict", self.strict, "True or False")
        _require(self.miss_batch in ("exact", "pad"), "miss_batch", self.miss_batch, "'exact' or 'pad'")
        share = self.verify
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        _require(is_number and 0 <= share <= 1, "verify", share, "a share of hits from 0.0 to 1.0")
        object.__setattr__(self, "verify", float(share))

    def _check_persistence(self) -> None:
        _require(isinstance(self.persistent, bool), "persistent", self.persistent, "True or False")
        parse_size("max_persistent_cache_size", self.max_persistent_cache_size, free=0)
        path = self.persistent_cache_dir
        if path is not None:
            _require(
                isinstance(path, (str, os.PathLike))
                and isinstance(os.fspath(path), str)
                and os.fspath(path) != "",
                "persistent_cache_dir",
                path,
                "None or the path of a folder",
            )
            text = os.fspath(path)
            _require("://" not in text, "persistent_cache_dir", text, "the path of a local folder, not a URL")
            _require(_is_name(text), "persistent_cache_dir", text, "a path that the system can have")
            object.__setattr__(self, "persistent_cache_dir", os.path.abspath(os.path.expanduser(text)))
        name, quality = self.compression, self.compression_quality
        known = isinstance(name, str) and name in _MOST_QUALITY
        _require(known, "compression", name, "'brotli', 'blosc2' or 'none'")
        most = _MOST_QUALITY[name]
        _require(
            type(quality) is int and 0 <= quality <= most,
            "compression_quality",
            quality,
            f"an int from 0 to {most} for {name!r}",
        )
        if self.persistent and name == "blosc2":
            require("blosc2", "blosc2", "compression='blosc2'")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> CacheSettings:
        """Settings from keyword options, with an error that lists the known ones."""
        return cls().replace(options)

    def replace(self, options: Mapping[str, Any]) -> CacheSettings:
        """The same settings with some options changed."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown option {name!r}; the options are {', '.join(known)}")
        return dataclasses.replace(self, **options)

    def shares_tiers_with(self, other: CacheSettings) -> bool:
        """Whether caches with these and the other settings can have one budget."""
        names = (
            "max_memory_cache_size",
            "memory_cache_device",
            "policy",
            "persistent",
            "persistent_cache_dir",
            "max_persistent_cache_size",
            "compression",
            "compression_quality",
        )
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def memory_budget(self) -> int:
        """`max_memory_cache_size` in bytes, as of now."""
        free = None
        if isinstance(self.max_memory_cache_size, float):
            free = free_memory(torch.device(self.memory_cache_device or "cpu"))
        return parse_size("max_memory_cache_size", self.max_memory_cache_size, free=free)

    def persistent_budget(self, folder: str) -> int:
        """`max_persistent_cache_size` in bytes, as of now."""
        free = None
        if isinstance(self.max_persistent_cache_size, float):
            free = free_disk(folder)
        return parse_size("max_persistent_cache_size", self.max_persistent_cache_size, free=free)


def disabled_by_environment() -> bool:
    """Whether ``TORCHCACHE_DISABLE`` turns caching off for this run."""
    return _is_on("TORCHCACHE_DISABLE")


def strict_by_environment() -> bool:
    """Whether ``TORCHCACHE_STRICT`` makes calls that cannot be cached errors in this run."""
    return _is_on("TORCHCACHE_STRICT")


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable)
    return value is not None and value.strip().lower() not in ("", "0", "false", "no")


def _names(option: str, names: Any) -> tuple[str, ...]:
    """Argument names, each once and in order, so that equal options are equal."""
    is_sequence = isinstance(names, Iterable) and not isinstance(names, (str, bytes))
    found = tuple(names) if is_sequence else (None,)
    is_valid = all(isinstance(name, str) for name in found)
    _require(is_valid, option, names, "a sequence of argument names, such as ('mask',)")
    return tuple(sorted(set(found)))


def parse_size(option: str, size: Size, *, free: int | None = None) -> int:
    """Bytes meant by a size option.

    Parameters
    ----------
    option : str
        The option's name, for the error.
    size : int, float or str
        Bytes, a share of `free` in (0, 1], or a text with a unit (``KB`` = 1000, ``KiB`` = 1024).
    free : int, optional
        Bytes that are free; needed for a share.

    Raises
    ------
    OptionError
        If the size does not parse, is negative, or is a share of an unknown amount.
    """
    if isinstance(size, float) and 0.0 < size <= 1.0:
        if free is None:
            raise OptionError(f"{option}={size!r}: how much is free cannot be read here; give bytes or '4GB'")
        return int(size * free)
    if type(size) is int and size >= 0:
        return size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        unit = match[2].upper()
        if unit in _UNITS:
            count = Decimal(match[1]) * _UNITS[unit]
            if count == int(count) or _UNITS[unit] > 1:
                return int(count)
    raise OptionError(
        f"{option}={size!r}: expected bytes as an int, a text like '4GB' or '512MiB', "
        "or a float in (0, 1] for a share of what is free"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a device for this process; None where it cannot be read."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        free.append(int(fields["MemAvailable"].split()[0]) * 1024)
        # A container may have less than the machine.
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        if limit != "max":
            with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
                free.append(max(0, int(limit) - int(file.read())))
    except (OSError, KeyError, ValueError):
        pass
    return min(free) if free else None


def free_disk(folder: str) -> int | None:
    """Bytes free where a folder is, or will be; None where that cannot be read."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _is_name(path: str) -> bool:
    """Whether the system can be asked for a path at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _require(holds: bool, option: str, value: object, expected: str) -> None:
    if not holds:
        raise OptionError(f"{option}={value!r}: expected {expected}")
