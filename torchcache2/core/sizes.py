"""Parses budgets in bytes, and measures free memory and disk space."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from decimal import Decimal

import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown

Size = int | float | str

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power
_MOST = 2**63 - 1  # bytes: the limit of system calls
_UNASKED = 256 << 20  # bytes allocated without checking what is free
# Control groups of Linux: their folder, the files of limits and use, and a prefix in ``memory.stat``.
_VERSION_1 = "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
_VERSION_2 = "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ""
_LINE = re.compile(r"^(.*?)[^\w\n]*(\d+)", re.MULTILINE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_size(option: str, size: Size, *, free: int | None = None) -> int:
    """Bytes meant by a size: bytes, a share of `free` in (0, 1], or a text with a unit.

    ``KB`` is 1000 bytes, and ``KiB`` 1024. All sizes from 2**63 on are equal. Raises `OptionError`, naming
    the `option`, if the size does not parse, is negative, is a share of an unknown amount, or is below 1000
    without a unit: a user who writes 4 means 4 GB.
    """
    if isinstance(size, float) and 0.0 < size <= 1.0:
        if free is None:
            raise OptionError(
                f"{option}={shown(size)}: the free amount cannot be read on this system; give bytes or '4GB'"
            )
        return int(size * free)
    text = str(min(size, _MOST)) if type(size) is int else size
    if isinstance(text, str) and (match := _SIZE.fullmatch(text)):
        unit = match[2].upper()
        if unit in _UNITS:
            count = Decimal(match[1]) * _UNITS[unit]
            if not unit and 0 < count < 1000 and count == int(count):
                raise OptionError(
                    f"{option}={shown(size)}: expected a unit with so small a number, such as "
                    f"'{match[1]}GB', or '{match[1]}B' for bytes"
                )
            if count == int(count) or _UNITS[unit] > 1:
                return min(int(count), _MOST)
    raise OptionError(
        f"{option}={shown(size)}: expected bytes as an int, a text like '4GB' or '512MiB', "
        "or a float in (0, 1] for a share of what is free"
    )


def free_memory(device: torch.device, root: str = "/") -> int | None:
    """Bytes free on a device for this process; None if unknown. ``proc`` and ``sys`` are in `root`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [max(0, limit - used) for limit, used in _limits(root)]
    return min(free, default=None)


def host_memory() -> int:
    """Bytes of memory that this process may have at most; a very large number if unknown."""
    limits = [limit for limit, _ in _limits("/")]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(1, min(limits, default=1 << 44))


def _limits(root: str) -> Iterator[tuple[int, int]]:
    """The limits of this process's memory, in bytes, and how much of each is used.

    Those of the machine, of its address space, and of its groups ("cgroups"): containers and schedulers of
    clusters limit a group, or any of those that contain it.
    """
    machine = _numbers(root, "proc/meminfo")
    if "MemAvailable" in machine:
        yield machine["MemTotal"] << 10, machine["MemTotal"] - machine["MemAvailable"] << 10
    space = _numbers(root, "proc/self/limits").get("Max address space")
    if space is not None:
        yield space, _numbers(root, "proc/self/status").get("VmSize", 0) << 10
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds or "memory" in kinds.split(","):
            folder, limits, used, prefix = _VERSION_1 if kinds else _VERSION_2
            top, names = os.path.join(root, folder), path.strip("/").split("/")
            while names and not os.path.isdir(os.path.join(top, *names)):
                del names[0]  # a container may see only its own part of the tree
            for group in {os.path.join(top, *names[:count]) for count in range(len(names) + 1)}:
                for limit in filter(None, (_numbers(group, name).get("") for name in limits)):
                    counts = _numbers(group, "memory.stat")
                    # The system counts file pages as used, but frees them when a process needs memory.
                    files = sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                    yield limit, _numbers(group, used).get("", 0) - files


def _numbers(*path: str) -> dict[str, int]:
    """The number in each line of a file of the system, by the words before it."""
    return {name: int(number) for name, number in _LINE.findall(_text(*path))}


def _text(*path: str) -> str:
    """The text of a file of the system; empty if there is none."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def check_room(size: int) -> None:
    """Raise `MemoryError` if `size` bytes are more than half of the host's free memory.

    The system overcommits memory, and kills processes that use too much. A few bytes of a file or server may
    expand to gigabytes of rows, and a faster tier copies found rows.
    """
    free = free_memory(torch.device("cpu")) if size > _UNASKED else None
    if free is not None and size > free // 2:
        raise MemoryError(f"{size_text(size)} of rows at once, with {size_text(free)} of memory free")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's, on the host


def free_disk(folder: str) -> int | None:
    """Bytes free where a folder is, or will be; None if unknown."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def size_text(count: float) -> str:
    """A number of bytes for people, such as ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
