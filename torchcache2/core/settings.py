"""`CacheSettings`: every option, checked once, in one frozen dataclass.

The table `_OPTIONS` has the valid values. `torchcache2.core.places` checks the options about places for rows,
as these depend on each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import torch

from torchcache2.core.errors import OptionError, require
from torchcache2.core.logs import shown
from torchcache2.core.places import Bucket, Place, Secrets, Servers, place_of
from torchcache2.core.private import variable
from torchcache2.core.sizes import Size, free_disk, free_memory, host_memory, parse_size

Policy = Literal["keep", "lru", "mru"]  # the last is an alias of the first
MissBatch = Literal["exact", "pad"]
Distributed = Literal["auto", "off", "node"]
Compression = Literal["brotli", "blosc2", "none"]


class _Option(NamedTuple):
    """The valid values of an option: in words, and as a check of the normalised value."""

    expected: str
    holds: Callable[[Any], bool]
    kept: Callable[[Any], Any] = lambda value: value


def _one_of(names: Any) -> _Option:
    *first, last = map(repr, get_args(names))
    expected = f"{', '.join(first)} or {last}"
    return _Option(expected, lambda value: isinstance(value, str) and value in get_args(names))


def plain_policy(policy: Policy) -> Policy:
    """A policy without aliases."""
    return "keep" if policy == "mru" else policy


def _sorted(names: Any) -> tuple[Any, ...]:
    """Sorted, distinct names of arguments or paths, so that options with the same names are equal."""
    found = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ("",)
    return tuple(sorted(set(found))) if all(isinstance(name, str) for name in found) else ("",)


def _device(value: Any) -> Any:
    with contextlib.suppress(RuntimeError, TypeError):
        return None if value is None else torch.device(value)
    return value


def _is_here(device: torch.device) -> bool:
    """Whether this machine has a device, as far as torch knows without initialising it."""
    if device.type in ("cpu", "meta"):
        return device.type == "cpu"
    count = getattr(getattr(torch, device.type, None), "device_count", None)
    return count is None or (device.index or 0) < count()


def _share(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else -1.0


_SWITCH = _Option("True or False", lambda value: isinstance(value, bool))
_NAMES = _Option(
    "the name of an argument, or several, such as ('mask', 'table')", lambda names: "" not in names, _sorted
)
_VERSION = _Option("None, a text or an int", lambda version: version is None or type(version) in (str, int))
_OPTIONS = {
    "enabled": _SWITCH,
    "subsample_count": _Option(
        "None or an int of at least 2 (elements hashed per item)",
        lambda count: count is None or (type(count) is int and count >= 2),
    ),
    "persistent": _Option(
        "True or False, or None: if there is a folder", lambda value: value is None or isinstance(value, bool)
    ),
    "persistent_module_hash": _Option(
        "None or a non-empty str", lambda name: name is None or (isinstance(name, str) and name != "")
    ),
    "version": _VERSION,
    "code_version": _VERSION,
    "label": _Option("None or a text", lambda label: label is None or isinstance(label, str)),
    "compression": _one_of(Compression),
    "memory_cache_device": _Option(
        "None, or a device of this machine that holds data, such as 'cpu' or 'cuda:0'",
        lambda device: device is None or (isinstance(device, torch.device) and _is_here(device)),
        _device,
    ),
    "cache_dtype": _Option(
        "None or a floating-point torch.dtype, such as torch.bfloat16",
        lambda dtype: dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
    ),
    "policy": _one_of(Policy)._replace(expected="'keep' or 'lru'"),
    "shared_args": _NAMES,
    "item_args": _NAMES,
    "ignore": _NAMES._replace(
        expected="the path of an attribute or weight or the name of an argument, or several, such as "
        "('tokenizer.memo', '*.lora_*')"
    ),
    "probe": _SWITCH,
    "strict": _SWITCH,
    "miss_batch": _one_of(MissBatch),
    "verify": _Option("a share of hits from 0.0 to 1.0", lambda share: 0 <= share <= 1, _share),
    "distributed": _one_of(Distributed)._replace(
        expected="'auto', 'off' or 'node'; ranks of several machines share rows and work on Redis servers, "
        "and rows in a bucket or a common folder"
    ),
    "claims": _SWITCH,
}
_MOST_QUALITY = {"brotli": 11, "blosc2": 9, "none": 11}


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """The options of a cache.

    Parameters
    ----------
    enabled : bool
        False turns the cache off. ``TORCHCACHE_DISABLE=1`` turns off every cache of a run.
    subsample_count : int, optional
        None: hash every element of an item. N: in items with more than N elements, hash only N elements in
        evenly spread blocks. Edits outside those blocks are **not noticed**.
    persistent : bool, optional
        Whether to keep rows on disk too, for later runs. None: if there is a `persistent_cache_dir`. False:
        no, and that folder is not touched.
    persistent_cache_dir : path or URL, optional
        The folder for these rows, with no other content; any number of runs may share it. Or the URL of a
        Redis server, such as ``redis://:password@host:6379/0``, or of a folder in a bucket, such as
        ``s3://bucket/folder``. None: with ``persistent=True``, a temporary folder that is deleted at exit.
    persistent_module_hash : str, optional
        A name that replaces the computed namespace. Changes of the module are then not noticed.
    version : str or int, optional
        A part of the key: give another one when something changes that the key does not cover, such as a
        file that the forward reads.
    label : str, optional
        A name for people, which ``torchcache2 ls`` shows; no part of the key.
    code_version : str or int, optional
        Stands for source code and the versions of packages, which then do not count; weights, attributes,
        arguments, and values of globals and closures do. You must change it with code that changes outputs.
    max_memory_cache_size : int, str or float
        Budget of the memory tier: bytes, a text like ``"4GB"`` or ``"512MiB"``, or a float in
        (0, 1], a share of the memory that is free when the cache is made.
    max_persistent_cache_size : int, str or float
        Budget of the whole folder, as above; a float is a share of the free bytes on its disk, including
        those that the folder takes itself.
    compression : {"brotli", "blosc2", "none"}
        How rows on disk are compressed. ``"blosc2"`` is faster and needs the extra ``blosc2``.
    compression_quality : int
        0 to 11 for brotli, 0 to 9 for blosc2. Reading does not depend on it.
    memory_cache_device : str or torch.device, optional
        The device of the memory tier. None: the device of the output.
    cache_dtype : torch.dtype, optional
        Stored dtype of floating-point leaves. Outputs keep their own dtype; found and computed ones alike are
        rounded through this one.
    policy : {"keep", "lru"}
        What a full cache does, in memory and on disk: ``"keep"`` keeps the rows that came first, ``"lru"``
        drops the least recently used ones. ``"mru"``, torchcache's name, is an alias of ``"keep"``.
    shared_args : str or sequence of str
        Arguments of forward that belong to the whole batch, such as a mask or a table.
    item_args : str or sequence of str
        Arguments that are a list, tuple, array or column of a table with one entry per item, such as texts or
        images. An entry is part of its item's key. A function with such arguments needs no tensor.
    ignore : str or sequence of str
        Paths of attributes, weights, closures and globals, and names of arguments, to leave out of the key.
        Outputs must not depend on them; this is not checked. In paths, ``*`` matches any text, ``?`` one
        character. For example a tokenizer's memo (``"tokenizer.memo"``), disabled adapters (``"*.lora_*"``),
        or ``"show_progress_bar"``. Code always counts.
    probe : bool
        Whether to recompute some batches, in parts or as a whole, to check that an item's output does not
        depend on the rest of its batch.
    strict : bool
        Whether a call that cannot be cached raises `NotCachedError`, instead of running the plain forward.
        ``TORCHCACHE_STRICT=1`` makes every cache of a run strict.
    miss_batch : {"exact", "pad"}
        Which items the forward gets if some of a batch are missing. ``"exact"``: the missing ones. ``"pad"``:
        these, with the last one repeated up to the next power of two, at most to the batch size, so that a
        compiled forward is compiled for few sizes.
    verify : float
        Share of hits, in [0, 1], to compute again and compare.
    distributed : {"auto", "off", "node"}
        What the ranks of a job share. ``"node"``: the ranks of a machine share one memory tier of
        `max_memory_cache_size` in all, and compute each item only once. Needs Linux, ``policy="keep"`` and
        ``memory_cache_device="cpu"``. ``"off"``: each process has its own memory tier. ``"auto"``: ``"node"``
        if a launcher or `torch.distributed` reports several ranks, and the other options allow it.
    claims : bool
        Whether to wait for an item that another rank is computing. False: two ranks that miss the same item
        at the same time both compute it.
    local_dir : path, optional
        With a bucket, the local folder for its rows, and for new rows until they are uploaded; its budget is
        `max_persistent_cache_size`. None: a temporary one.
    storage_options : mapping, optional
        Options of fsspec for the bucket, such as keys, if they are not in the environment. Never shown, and
        pickled only for processes being started.
    remote_size : int or str, optional
        Most bytes of the folder in the bucket. None: no limit.

    Raises
    ------
    OptionError
        If an option does not exist, or has an invalid value.
    """

    __module__ = "torchcache2"

    enabled: bool = True
    subsample_count: int | None = None
    persistent: bool | None = None
    persistent_cache_dir: Place | None = None
    persistent_module_hash: str | None = None
    version: str | int | None = None
    code_version: str | int | None = None
    label: str | None = None
    max_memory_cache_size: Size = 1_000_000_000
    max_persistent_cache_size: Size = 10_000_000_000
    compression: Compression = "brotli"
    compression_quality: int = 1
    memory_cache_device: torch.device | str | None = "cpu"
    cache_dtype: torch.dtype | None = None
    policy: Policy = "keep"
    shared_args: Sequence[str] = ()
    item_args: Sequence[str] = ()
    ignore: Sequence[str] = ()
    probe: bool = True
    strict: bool = False
    miss_batch: MissBatch = "exact"
    verify: float = 0.0
    distributed: Distributed = "auto"
    claims: bool = True
    local_dir: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    remote_size: Size | None = None

    def __post_init__(self) -> None:
        for name, option in _OPTIONS.items():
            value = option.kept(getattr(self, name))
            if not option.holds(value):
                raise OptionError(f"{name}={shown(getattr(self, name))}: expected {option.expected}")
            object.__setattr__(self, name, value)
        for name in ("max_memory_cache_size", "max_persistent_cache_size"):
            parse_size(name, getattr(self, name), free=0)
        both = sorted(set(self.shared_args) & set(self.item_args))
        if both:
            raise OptionError(
                f"item_args={shown(self.item_args)}: expected none of shared_args, but {both} is in both"
            )
        most = _MOST_QUALITY[self.compression]
        if not (type(self.compression_quality) is int and 0 <= self.compression_quality <= most):
            quality = shown(self.compression_quality)
            raise OptionError(
                f"compression_quality={quality}: expected an int from 0 to {most} for {self.compression!r}"
            )
        object.__setattr__(self, "policy", plain_policy(self.policy))
        for_buckets = {name: getattr(self, name) for name in ("local_dir", "storage_options", "remote_size")}
        object.__setattr__(self, "persistent_cache_dir", place_of(self.persistent_cache_dir, for_buckets))
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", Secrets(self.storage_options))
        if self.is_persistent and self.compression == "blosc2":
            require("blosc2", "blosc2", "compression='blosc2'")
        if self.distributed == "node" and not self.can_be_shared:
            raise OptionError(
                "distributed='node' needs policy='keep' and memory_cache_device='cpu', but these are "
                f"{self.policy!r} and {str(self.memory_cache_device)!r}: processes share rows in the "
                f"memory of the CPU, and never evict them"
            )

    @property
    def can_be_shared(self) -> bool:
        """Whether processes can share a memory tier with these options."""
        return self.policy == "keep" and str(self.memory_cache_device) == "cpu"

    @property
    def servers(self) -> Servers | None:
        """The servers that keep rows; None if there are none."""
        place = self.persistent_cache_dir
        return place if isinstance(place, Servers) and self.is_persistent else None

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that keeps rows; None if there is none."""
        place = self.persistent_cache_dir
        return place if isinstance(place, Bucket) and self.is_persistent else None

    @property
    def folder(self) -> str | None:
        """The lasting folder on this machine; None if there is none."""
        place = self.persistent_cache_dir if self.is_persistent else None
        place = place.local_dir if isinstance(place, Bucket) else place
        return place if isinstance(place, str) else None

    @property
    def is_persistent(self) -> bool:
        """Whether rows are kept outside of memory: as `persistent` says or, if None, if there is a place."""
        return self.persistent_cache_dir is not None if self.persistent is None else self.persistent

    def replace(self, options: Mapping[str, Any]) -> CacheSettings:
        """The same settings with some options changed."""
        return dataclasses.replace(self, **options)

    def shares_tiers_with(self, other: CacheSettings) -> bool:
        """Whether caches with these and the other settings can have one budget."""
        return self.of_tiers() == other.of_tiers()

    def of_tiers(self) -> tuple[Any, ...]:
        """The values of the options that determine the tiers."""
        return _OF_TIERS(self)

    def memory_budget(self) -> int:
        """`max_memory_cache_size` in bytes, as of now; on the host at most the machine's memory.

        Processes that share rows reserve address space for all of it, which is limited, too.
        """
        free = None
        if isinstance(self.max_memory_cache_size, float):
            free = free_memory(torch.device(self.memory_cache_device or "cpu"))
        size = parse_size("max_memory_cache_size", self.max_memory_cache_size, free=free)
        return min(size, host_memory()) if str(self.memory_cache_device) == "cpu" else size

    def persistent_budget(self, folder: str, used: int = 0) -> int:
        """`max_persistent_cache_size` in bytes, as of now.

        A share is of the free bytes on the disk of `folder` plus the `used` bytes of the cache there:
        otherwise rows of earlier runs would shrink the budget.
        """
        free = None
        if isinstance(self.max_persistent_cache_size, float):
            free = free_disk(folder)
            free = None if free is None else free + used
        return parse_size("max_persistent_cache_size", self.max_persistent_cache_size, free=free)


_OF_TIERS: Callable[[CacheSettings], tuple[Any, ...]] = attrgetter(
    *("distributed", "max_memory_cache_size", "memory_cache_device", "policy", "is_persistent"),
    *("persistent_cache_dir", "max_persistent_cache_size", "compression", "compression_quality", "claims"),
)


_init = CacheSettings.__init__


@functools.wraps(_init)
def _init_by_name(self: CacheSettings, *args: Any, **options: Any) -> None:
    """Set the options. Unlike a dataclass's own constructor, this suggests names for a wrong one."""
    check_names(options, [field.name for field in dataclasses.fields(CacheSettings)])
    _init(self, *args, **options)


CacheSettings.__init__ = _init_by_name  # type: ignore[method-assign]


_OF_TORCHCACHE = {  # options of torchcache 0.6 that do not exist here
    "zstd_compression": "it is compression='brotli'",
    "zstd_compression_level": "it is compression_quality",
    "zstd_compression_threads": "nothing takes its place, as one background thread compresses",
    "use_mmap_on_load": "nothing takes its place, as files are read and never mapped",
}


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `OptionError` for the first of the `given` names that is not `known`."""
    for name in given:
        if name in _OF_TORCHCACHE:
            raise OptionError(f"{name} is an option of torchcache 0.6; here {_OF_TORCHCACHE[name]}")
        if name not in known:
            close = similar(name, known)
            meant = f": did you mean {' or '.join(close)}? The" if close else "; the"
            raise OptionError(f"unknown option {name!r}{meant} options are {', '.join(known)}")


def similar(name: str, known: Sequence[str]) -> Sequence[str]:
    """One or two of the `known` names that were probably meant by another one; none if none is near."""
    close = [option for option in known if len(name) > 1 and name.lower() in option]
    if 1 <= len(close) <= 2:
        return close
    # If the most similar option has less in common with the name, the user probably meant none of them.
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.65)


# Environment variables that overrule the options of every cache of a run.


def disabled_by_environment() -> bool:
    """Whether ``TORCHCACHE_DISABLE`` turns caching off for this run."""
    return _is_on("TORCHCACHE_DISABLE")


def strict_by_environment() -> bool:
    """Whether ``TORCHCACHE_STRICT`` makes calls that cannot be cached errors in this run."""
    return _is_on("TORCHCACHE_STRICT")


def _is_on(name: str) -> bool:
    value = variable(name)
    return value is not None and value.strip().lower() not in ("", "0", "false", "no")
