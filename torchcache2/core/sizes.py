"""Parses budgets in bytes, and measures free memory and disk space."""

from __future__ import annotations

import os
import re
import shutil
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


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a device for this process; None if unknown."""
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
                used = int(file.read())
            with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:
                counts = {name: int(count) for name, count in map(str.split, file)}
            # The system counts file pages as used, but frees them when a process needs memory.
            used -= counts["active_file"] + counts["inactive_file"]
            free.append(max(0, int(limit) - used))
    except (OSError, KeyError, ValueError):
        pass
    return min(free) if free else None


def host_memory() -> int:
    """Bytes of memory of this machine; a very large number if unknown."""
    try:
        return max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return 1 << 44


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
